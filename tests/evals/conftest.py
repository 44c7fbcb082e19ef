"""Fixtures of runs that the tests of this folder share with tests/train."""

from tests.train.conftest import run, start, tiny

__all__ = ["run", "start", "tiny"]
