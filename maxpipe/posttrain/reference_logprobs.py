"""Reference log-probabilities of preference pairs, computed with the initial weights of a run.

Forward passes before training compute the log-probabilities once and store them in the run folder.
Training therefore needs no second model in memory. An interrupted computation resumes from its last
save.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from maxpipe.config.config_files import REFERENCE_FILE
from maxpipe.data.loader import Loader
from maxpipe.data.pairs import PairDocuments
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import COMPILE, EVAL, Phases
from maxpipe.errors import Code, ConfigError, DivergenceError, StorageError
from maxpipe.io import files
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.objectives import Preference
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.step.build import load_batches
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console

_VERSION = 1
_SAVE_SECONDS = 60.0

Values = dict[str, np.ndarray]
"""Log-probabilities of the chosen and rejected responses, float32 `[documents, 2]`, keyed by source
name. A log-probability that is not computed yet is NaN."""


class _ReferenceMetadata(TypedDict):
    version: int
    weights: str
    """Checksum of the initial weights."""
    sources: list[tuple[str, str]]
    """Name and checksum of the pairs for each source."""


class _PairSequence(NamedTuple):
    """Log-probabilities of the pairs in one sequence."""

    source: str
    documents: list[int]
    halves: np.ndarray
    """Log-probabilities, float32 `[2 * documents]`."""


@dataclass(frozen=True)
class StoredReferences:
    """Contents of a run's reference file."""

    weights: str
    digests: Mapping[str, str]
    """Checksum of the pairs of each source, keyed by source name."""
    values: Values

    def for_source(self, name: str, documents: PairDocuments) -> np.ndarray | None:
        """Return the log-probabilities of a source if its pairs are unchanged, else None."""
        return self.values[name] if self.digests.get(name) == documents.digest else None


def needs_references(steps: Steps) -> bool:
    """Return whether the objective of a run uses reference log-probabilities."""
    objective = steps.objective
    return isinstance(objective, Preference) and objective.needs_reference


class PairReferences:
    """Compute the reference log-probabilities of a run, or load stored values."""

    def __init__(
        self,
        run_dir: Path,
        steps: Steps,
        loaders: list[Loader],
        console: Console,
        channel: ControlChannel,
        phases: Phases,
    ):
        """Prepare to compute the log-probabilities. The `loaders` together must yield every pair
        exactly once.
        """
        self._path = run_dir / REFERENCE_FILE
        self._steps, self._loaders = steps, loaders
        self._console, self._channel, self._phases = console, channel, phases
        self._documents = {name: each for loader in loaders for name, each in loader.pairs.items()}
        self._values: Values = {}
        self._weights = ""

    def attach(self, params: Any, *, is_new: bool) -> None:
        """Attach reference log-probabilities to the documents.

        If the run is new, missing log-probabilities are computed with `params`.

        Raises:
            StorageError: a resumed run lacks log-probabilities, or the file cannot be written.
            DivergenceError: a log-probability is not finite.
            Preemption: the run received a stop request.
        """
        stored = self._load_stored(is_new)
        self._weights = self._steps.digest(params) if is_new else ""
        if is_new and stored is not None and stored.weights != self._weights:
            self._console.note(
                f"{self._path} was computed with different weights and will be overwritten"
            )
            stored = None
        for name, documents in self._documents.items():
            known = None if stored is None else stored.for_source(name, documents)
            # Excluded pairs have no response and do not appear in any sequence.
            empty = np.where(documents.lengths > 0, np.nan, 0.0).astype(np.float32)
            self._values[name] = np.stack([empty, empty], 1) if known is None else known.copy()
        self._check_same_file()
        if missing := self._num_missing():
            if not is_new:
                raise self._missing_error(missing)
            self._compute(params, missing)
        for name, documents in self._documents.items():
            documents.reference = self._values[name]

    def _load_stored(self, is_new: bool) -> StoredReferences | None:
        try:
            return load_references(self._path)
        except (OSError, ValueError) as error:
            if not is_new:
                raise self._missing_error(self._num_missing(), f"{error}; ") from error
            self._console.warn(f"{self._path} cannot be used ({error}) and will be overwritten")
            return None

    def _num_missing(self) -> int:
        return sum(int(np.isnan(each).any(1).sum()) for each in self._values.values())

    def _missing_error(self, missing: int, reason: str = "") -> StorageError:
        what = pluralize(missing, "pair") if missing else "the pairs"
        return StorageError(
            Code.POST_REFERENCE,
            f"{self._path}: lacks the reference log-probabilities of {what}\n"
            f"  {reason}the run resumes from a checkpoint, but the log-probabilities can only be "
            "computed with its initial weights.\n"
            "  Restore the file and the original pairs, or set run.name to a new name.",
        )

    def _check_same_file(self) -> None:
        digest = hashlib.sha256()
        for name in sorted(self._values):
            digest.update(self._values[name].tobytes())
        if len(self._channel.compare_across_processes("reference", digest.hexdigest())) > 1:
            raise ConfigError.one(
                Code.NET_FOLDERS,
                "run.dir",
                str(self._path.parent),
                f"must be a folder shared by all processes: their {REFERENCE_FILE} files differ.",
                "Set run.dir to a shared folder, or delete these files.",
            )

    # The computation.

    def _compute(self, params: Any, missing: int) -> None:
        total = sum(int((each.lengths > 0).sum()) for each in self._documents.values())
        with self._phases.enter(COMPILE), self._console.stage("compiling the reference pass"):
            step = self._steps.compile_reader(
                LossHead.scores, self._loaders[0].ramp.batch_size, everywhere=True
            )
        words = f"computing reference log-probabilities of {pluralize(missing, 'pair')}"
        words += f" (out of {total})" if missing < total else ""
        # After the first check, a stop request no longer ends the process immediately.
        if self._channel.should_stop():
            raise self._stop_error(total)
        saved = time.monotonic()
        with self._phases.enter(EVAL), self._console.stage(words):
            for number, found in enumerate(self._score_batches(step, params)):
                self._phases.progress(number)
                self._record(found)
                stops = self._channel.should_stop()
                if stops or time.monotonic() - saved > _SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
                if stops:
                    raise self._stop_error(total)
            self._save()

    def _score_batches(
        self, step: Callable[[Any, Any], Any], params: Any
    ) -> Iterator[list[_PairSequence]]:
        """Yield the results of each batch, starting at the first batch with missing values."""
        for loader in self._loaders:
            first = next(filter(self._has_missing(loader), range(loader.num_batches)), None)
            if first is None:
                continue
            ready = load_batches(self._steps.batch_sharding, loader, first, loader.num_batches)
            with ready as source:
                for number, batch in enumerate(source, first):
                    halves = np.asarray(step(params, batch)[0])
                    yield [
                        _PairSequence(
                            row.source, row.documents, halves[at, : 2 * len(row.documents)]
                        )
                        for at, row in enumerate(loader.sequence_origins(number))
                    ]

    def _has_missing(self, loader: Loader) -> Callable[[int], bool]:
        """Return a function that tests whether a batch has a pair with missing values."""
        return lambda number: any(
            np.isnan(self._values[row.source][row.documents]).any()
            for row in loader.sequence_origins(number)
        )

    def _record(self, rows: list[_PairSequence]) -> None:
        for source, documents, halves in rows:
            if not np.isfinite(halves).all():
                where = self._documents[source].where(documents[0])
                raise DivergenceError(
                    Code.RUN_NOT_FINITE,
                    f"{where}: the reference log-probability of this pair is not finite\n"
                    "  the model returns NaN or infinity with the initial weights of the run.\n"
                    "  Start from other weights, or set model.compute_dtype=float32.",
                )
            self._values[source][documents] = halves.reshape(-1, 2)

    def _stop_error(self, total: int) -> BaseException:
        done = total - self._num_missing()
        return self._channel.stop_error(
            f"{self._path}: stopped after computing the reference log-probabilities of {done} of "
            f"{pluralize(total, 'pair')}\n"
            "  The computed log-probabilities are saved.\n"
            "  Run the same command again to resume."
        )

    def _save(self) -> None:
        if self._channel.index == 0:
            digests = {name: each.digest for name, each in self._documents.items()}
            save_references(self._path, StoredReferences(self._weights, digests, self._values))


def save_references(path: Path, stored: StoredReferences) -> None:
    """Write a reference file atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    names = sorted(stored.values)
    sources = [(name, stored.digests[name]) for name in names]
    facts: _ReferenceMetadata = {"version": _VERSION, "weights": stored.weights, "sources": sources}
    arrays = {f"values_{number}": stored.values[name] for number, name in enumerate(names)}
    stream = io.BytesIO()
    np.savez(stream, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    try:
        files.write(path, stream.getvalue())
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def load_references(path: Path) -> StoredReferences | None:
    """Return the contents of a reference file, or None if the file does not exist.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or is not a reference file.
    """
    try:
        # The file is opened here, because numpy does not close a damaged file.
        with (
            open(files.open_regular(path), "rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            facts = parse_json(arrays["facts"].tobytes(), _ReferenceMetadata)
            if facts["version"] != _VERSION:
                raise ValueError("the file was written by another release")
            values = {name: arrays[f"values_{n}"] for n, (name, _) in enumerate(facts["sources"])}
    except FileNotFoundError:
        return None
    except (KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"the file is damaged: {error}") from error
    if any(each.dtype != np.float32 or each.shape[1:] != (2,) for each in values.values()):
        raise ValueError("the arrays in the file have the wrong dtype or shape")
    return StoredReferences(facts["weights"], dict(facts["sources"]), values)


def attach_stored_references(run_dir: Path, loader: Loader) -> None:
    """Attach the stored reference log-probabilities of a run to the documents of a loader.

    Raises:
        ConfigError: the run has no reference log-probabilities for these documents.
        StorageError: the file cannot be read.
    """
    path = run_dir / REFERENCE_FILE
    try:
        stored = load_references(path)
    except (OSError, ValueError) as error:
        action = "Restore the file."
        raise StorageError(
            Code.POST_REFERENCE, f"{path}: cannot be read\n  {error}.\n  {action}"
        ) from error
    for name, documents in loader.pairs.items():
        known = None if stored is None else stored.for_source(name, documents)
        if known is None or np.isnan(known).any():
            raise ConfigError.one(
                Code.POST_REFERENCE,
                "data",
                None,
                "must be preference pairs for which the run has stored reference "
                f"log-probabilities: {path} has none for these pairs.",
                "Evaluate the run's own pairs; or evaluate text with train.objective=pretrain "
                "data.chat=off data.packing=concatenate and data.path.",
            )
        documents.reference = known
