"""Objectives beside cross entropy: pure functions of log-probabilities.

What an objective is stands in `maxpipe.pipeline.objective`.
"""
