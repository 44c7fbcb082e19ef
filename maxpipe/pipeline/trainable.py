"""Trees of parameters without those that are not trained, and back.

Gradients and all that is kept for them are nested dicts in the form of the parameters, in which
frozen ones are missing, and so are dicts that would be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maxpipe.parallel.low_precision import is_rounded

Tree = Any


def trained(tree: Tree, is_trained: Tree) -> Tree:
    """The parts of a tree where a tree of bools is true; None of a single leaf that is not.

    The tree may lack frozen parts already.
    """
    if not isinstance(is_trained, Mapping):
        return tree if is_trained else None
    found = {name: trained(part, is_trained[name]) for name, part in tree.items()}
    return {
        name: part
        for name, part in found.items()
        if part is not None and not (isinstance(part, Mapping) and not part)
    }


def joined(tree: Tree, part: Tree) -> Tree:
    """The whole tree, with this part of it in place of its own.

    A weight in 8 bits stays, and has the gradient of what would be in its place.
    """
    if not isinstance(part, Mapping):
        return replace(tree, gradient=part) if is_rounded(tree) else part
    return {name: joined(own, part[name]) if name in part else own for name, own in tree.items()}
