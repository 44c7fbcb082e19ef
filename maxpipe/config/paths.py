"""Names of the files and folders that a run writes into its folder."""

from __future__ import annotations

CONFIG_FILE = "config.yml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
REFERENCE_FILE = "references.npz"
TENSORBOARD_FOLDER = "tensorboard"
