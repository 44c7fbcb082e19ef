"""Reads one checkpoint and decides with all processes whether it is intact.

The files are compared with the manifest and the arrays, once they are in memory, with the
digests that they had in memory when they were saved. A damaged one is read a second time:
a bit may have flipped on its way from the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxpipe.checkpoint import contents, copies, digests, manifest
from maxpipe.checkpoint.copies import Recorded
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.digests import Sum
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.storage import first_line
from maxpipe.checkpoint.trees import by_name, named, other_shapes
from maxpipe.errors import StorageError

Tree = Any
Agree = Callable[[str], str]

_LOG = logging.getLogger(__name__)
_TEXT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Restored:
    """One checkpoint's content, and where it was."""

    facts: Facts
    state: Tree
    folder: epath.Path

    @property
    def step(self) -> int:
        return self.facts.step


def first_of_all(text: str) -> str:
    """The first text, by process, that is not empty; every process has to ask."""
    if jax.process_count() == 1:
        return text
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    for row in _gathered(mine):
        if row.any():
            return row.tobytes().rstrip(b"\0").decode(errors="ignore")
    return ""


@contextlib.contextmanager
def answering(path: epath.PathLike) -> Iterator[None]:
    """A failure of storage inside ends the run: no decision is based on it.

    Raises:
        StorageError: for any OSError. Other processes may see what this one does not.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be reached\n"
            f"  {first_line(error)}. It is left as it is.\n"
            "  Start again when the storage answers."
        ) from error


def restore(
    folder: Folder,
    step: int,
    abstract: Tree | None,
    *,
    accept: Callable[[Facts], None] = lambda facts: None,
    agree: Agree = first_of_all,
) -> Restored:
    """A checkpoint as arrays placed like `abstract`, by default as numpy arrays.

    `accept` may raise before the arrays are read: `Damaged` for metadata that no run saves.

    Raises:
        Damaged: it was read twice, and is not what was saved.
        StorageError: it cannot be reached, does not fit, or is of a later release.
    """
    try:
        return _restore(folder, step, abstract, accept, agree)
    except Damaged as damage:
        first = str(damage)
    found = _restore(folder, step, abstract, accept, agree)
    if jax.process_index() == 0:
        _LOG.warning(
            "%s: %s at first, but not when it was read again: check the storage and the "
            "memory of this machine",
            folder / step,
            first,
        )
    return found


def _restore(
    folder: Folder,
    step: int,
    abstract: Tree | None,
    accept: Callable[[Facts], None],
    agree: Agree,
) -> Restored:
    path = folder / step
    with answering(path):
        fault, facts, expected = _before_arrays(folder, step)
    _all_agree(agree, fault)
    assert facts is not None
    try:
        accept(facts)
    except Damaged as damage:
        fault = str(damage)
    _all_agree(agree, fault)
    state: Tree = None
    found: dict[str, Sum] = {}
    try:
        with answering(path):
            stored = abstract if abstract is None else _as_stored(path, abstract)
            state = folder.arrays(step, stored)
        found = copies.local_sums(state)
        if "step" in state and int(state["step"]) != step:
            fault = f"its state is that of step {int(state['step'])}"
    except Damaged as damage:
        fault = str(damage)
    _all_agree(agree, fault)
    total = _over_processes(found)
    wrong = digests.differences(_of(expected.arrays, total), total) if expected else []
    if wrong := wrong or digests.non_finite(total):
        raise Damaged("; ".join(wrong[:3]))
    return Restored(facts, state if abstract is None else _cast(state, abstract), path)


def _before_arrays(folder: Folder, step: int) -> tuple[str, Facts | None, Recorded | None]:
    """The faults of the files, the facts, and the expected digests of the arrays."""
    path = folder / step
    try:
        if manifest.is_in(path):
            share = (jax.process_index(), jax.process_count())
            if wrong := manifest.faults(path, step, share):
                return "; ".join(wrong[:3]), None, None
        facts = folder.facts(step)
        expected = contents.recorded(path, step)
        wrong = contents.facts_faults(path, expected) if expected else []
        return "; ".join(wrong), facts, expected
    except Damaged as damage:
        return str(damage), None, None


def _all_agree(agree: Agree, fault: str) -> None:
    if fault := agree(fault):
        raise Damaged(fault)


def _as_stored(path: epath.Path, abstract: Tree) -> Tree:
    """The same in the types of the checkpoint, whose digests are of these.

    Raises:
        StorageError: the checkpoint has other arrays.
    """
    saved = contents.shapes(path)
    saved = {name: saved[name] for name in saved if name in abstract}
    if "step" not in abstract and "optimizer" in saved:  # some of its trees alone
        trees = saved["optimizer"]
        saved["optimizer"] = {each: trees[each] for each in abstract["optimizer"] if each in trees}
    lines = other_shapes(saved, abstract)
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise StorageError(
            f"{path}: cannot be restored\n"
            f"  {'; '.join(lines[:3])}{more}.\n"
            "  Train with the model and optimizer that it was saved with, or set run.name to "
            "a new name."
        )
    types = {name: leaf.dtype for name, leaf in named(saved).items()}

    def as_stored(name: str, leaf: Any) -> Any:
        if leaf.dtype == types[name]:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, types[name], sharding=leaf.sharding)

    return by_name(as_stored, abstract)


def _cast(state: Tree, abstract: Tree) -> Tree:
    """In the types that were asked for, one array after the other."""

    def cast(leaf: Any, wanted: Any) -> Any:
        if leaf.dtype == wanted.dtype:
            return leaf
        dtype = wanted.dtype
        found = jax.jit(lambda array: array.astype(dtype), out_shardings=leaf.sharding)(leaf)
        found.block_until_ready()
        leaf.delete()
        return found

    return jax.tree.map(cast, state, abstract)


def _of(expected: Mapping[str, Sum], restored: Mapping[str, Sum]) -> dict[str, Sum]:
    """Those of the sections of the state that were asked for: evaluation leaves out moments."""

    def section(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first

    sections = set(map(section, restored))
    return {name: one for name, one in expected.items() if section(name) in sections}


def _over_processes(sums: dict[str, Sum]) -> dict[str, Sum]:
    """Of whole arrays, from those of each process' parts."""
    if jax.process_count() > 1:
        mine = np.array(
            [(one.value, one.elements, one.non_finite) for one in sums.values()], np.uint64
        )
        rows = _gathered(mine.view(np.uint32))
        total = rows.view(np.uint64).sum(axis=0, dtype=np.uint64)  # modulo 2**64
        for one, (value, elements, non_finite) in zip(sums.values(), total, strict=True):
            one.value, one.elements, one.non_finite = int(value), int(elements), int(non_finite)
    return sums


def _gathered(mine: np.ndarray) -> np.ndarray:
    """`[processes, ...]`: every process' array."""
    # XLA for CPUs runs programs of a device in their order, and those of several devices in theirs,
    # but both at once, so that their messages get mixed. All that were begun end before this does.
    jax.block_until_ready(jax.jit(jnp.add)(0, 0))
    return np.asarray(multihost_utils.process_allgather(mine))


def content_digest(tree: Tree) -> str:
    """One digest of all arrays on devices, by their names, which depends on no layout."""
    return digest_of(_over_processes(copies.local_sums(tree)))


def digest_of(sums: Mapping[str, Sum]) -> str:
    """The same from the sums of all arrays."""
    entries = {name: one.entry() for name, one in sums.items()}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
