"""Trees of arrays by the dotted names of their leaves: digests, sizes and differences."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

Tree = Any


def named(tree: Tree) -> dict[str, Any]:
    """Dotted name to leaf, in the order of the names."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return dict(
        sorted(
            (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found
        )
    )


def by_name(change: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """The tree with what `change(dotted name, leaf)` makes of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )


def leaves(tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """Dotted name and array of every leaf, in the order of their names."""
    for name, leaf in named(tree).items():
        yield name, np.asarray(leaf)


def digest(tree: Tree) -> str:
    """SHA-256 over names, types, shapes and bytes of all leaves.

    On trees in their saved form it does not depend on mesh, stages or schedule.
    """
    total = hashlib.sha256()
    for name, array in leaves(tree):
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def num_bytes(tree: Tree) -> int:
    """Bytes of all leaves together, over all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def other_shapes(saved: Tree, wanted: Tree) -> list[str]:
    """One line for each leaf that only one of the trees has, or that has another shape."""
    before, now = named(saved), named(wanted)
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is in the checkpoint only")
        elif name not in before:
            lines.append(f"{name} is not in the checkpoint")
        elif tuple(before[name].shape) != tuple(now[name].shape):
            lines.append(
                f"{name} is {_shape(before[name])} in the checkpoint, not {_shape(now[name])}"
            )
    return lines


def differences(first: Tree, second: Tree) -> list[str]:
    """One line for each leaf that is not the same, bit for bit, in both trees."""
    lines = []
    left, right = dict(leaves(first)), dict(leaves(second))
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            lines.append(f"{name}  only in the {'first' if name in left else 'second'}")
            continue
        a, b = left[name], right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{name}  {a.dtype} {_shape(a)}, and {b.dtype} {_shape(b)}")
        elif a.tobytes() != b.tobytes():
            # Of bfloat16 numpy knows too little to subtract it.
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            share = np.count_nonzero(apart) / max(apart.size, 1)
            lines.append(
                f"{name}  {_shape(a)}, {100 * share:.4g}% of its values differ, "
                f"by at most {apart.max():.6g}"
            )
    return lines


def _shape(leaf: Any) -> str:
    return " x ".join(map(str, leaf.shape)) or "a scalar"
