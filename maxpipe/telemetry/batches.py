"""Map a step of a run to its batch and its data sources, based only on `events.jsonl`.

Steps are numbered from 1 and batches from 0: without rollbacks, step s uses batch s - 1. Every
rollback skips batches, and a start restores the mapping at the step of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from maxpipe.config.bundled_configs import EVENTS_FILE
from maxpipe.errors import StorageError
from maxpipe.io.files import expand_path, read_json_lines


class _BatchEvent(TypedDict):
    event: str
    step: NotRequired[int]
    to: NotRequired[int]
    sources: NotRequired[list[str]]
    mixture: NotRequired[list[list[Any]]]


def batch_of(run_dir: str | Path, step: int) -> int:
    """Return the batch index of a past or future step, according to the recorded events.

    Raises:
        StorageError: the records cannot be read.
    """
    return step - 1 + offset(_events(run_dir), step)


def mixture_of(run_dir: str | Path) -> tuple[list[str], list[list[Any]]] | None:
    """Return the sources of a run's mixture and their sampling schedule since the latest start.

    Raises:
        StorageError: the records cannot be read.
    """
    found = [each for each in _events(run_dir) if each["event"] == "start" and "mixture" in each]
    return (found[-1].get("sources", []), found[-1].get("mixture", [])) if found else None


def _events(run_dir: str | Path) -> list[_BatchEvent]:
    """Return all records, or nothing if the run has not started."""
    path = expand_path(run_dir) / EVENTS_FILE
    try:
        return list(read_json_lines(path, _BatchEvent))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>), unchanged since training."
        ) from error


def offset(events: Iterable[_BatchEvent], step: int) -> int:
    """Return the number of batches that were skipped before a step."""
    # Pairs (step, batch offset of the following steps), sorted by step.
    found = [(0, 0)]
    for each in events:
        at = each.get("step", 0)
        if each["event"] == "start":
            found = [(begin, left) for begin, left in found if begin < at] or [(0, 0)]
        elif each["event"] == "roll_back":
            to, left = each.get("to", 0), found[-1][1]
            found = [(begin, left) for begin, left in found if begin < to]
            found.append((to, left + at - to))
    return next(left for begin, left in reversed(found) if begin < max(1, step))
