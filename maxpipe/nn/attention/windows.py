"""A kernel for each size of window, where layers differ in it and data say which one it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from maxpipe.parallel import stated


def by_window(
    run: Callable[..., Any], window: Int[Array, ""] | None, sizes: Sequence[int], arrays: Any
) -> Any:
    """`run(size, *arrays)` with the size that is asked for, None for the only one."""
    if window is None or len(sizes) == 1:
        return run(sizes[0], *arrays)
    number = sum((window > size).astype(jnp.int32) for size in sizes[:-1])
    with jax.named_scope(stated.WINDOWS):
        return lax.switch(number, [_named(run, size) for size in sizes], *arrays)


def _named(run: Callable[..., Any], window: int) -> Callable[..., Any]:
    def branch(*arrays: Any) -> Any:
        with jax.named_scope(stated.window(window)):
            return run(window, *arrays)

    return branch
