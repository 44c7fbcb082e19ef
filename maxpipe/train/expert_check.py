"""Compare grouped matmuls of experts with a loop before a run uses them on new hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxpipe.errors import Code, ConfigError
from maxpipe.models.layers.experts import Experts
from maxpipe.models.spec import Model
from maxpipe.nn import expert_backends
from maxpipe.train.kernel_check import KernelCheck, KernelDeviation, deviation

_SIZES = (200, 0, 77, 107)
"""Number of rows of each expert. One expert has no rows, and the others begin inside a tile."""


def expert_check(model: Model, dtype: str, tensor: int = 1, family: str = "moe") -> KernelCheck:
    """Return the check of all experts whose tokens are sorted by expert.

    The loop is not checked; CPUs use the loop unless `backend` selects another implementation.
    `tensor` is the number of devices that share the hidden width of an expert.
    """
    cases = [*_cases(model, tensor)]
    return KernelCheck(
        "experts",
        [f"{part.backend} {part.d_model} x {width}" for part, width in cases],
        lambda: [each for case in cases for each in _compare(*case, dtype)],
        lambda rule: ConfigError.one(
            Code.MODEL_EXPERTS, key := f"model.{family}.backend", None, rule, f"Set {key}=loop."
        ),
    )


def _cases(model: Model, tensor: int) -> Iterator[tuple[Experts, int]]:
    """Yield (sublayer, hidden width on one device) for all distinct sizes."""
    uses_loop = jax.local_devices()[0].platform == "cpu"
    seen: set[tuple[int, int]] = set()
    for kind in model.layer_types.values():
        for part in kind.parts.values():
            if not isinstance(part, Experts) or not part.permutes_tokens:
                continue
            if part.backend == "loop" or (part.backend == "auto" and uses_loop):
                continue
            width = -(-part.d_mlp // tensor)
            if (part.d_model, width) not in seen:
                seen.add((part.d_model, width))
                yield part, width


def _compare(part: Experts, width: int, dtype: str) -> Iterator[KernelDeviation]:
    """Yield the deviations of the input projections and of the output projection."""
    random, num_experts = np.random.default_rng(0), len(_SIZES)
    sizes = jnp.asarray(_SIZES, jnp.int32)
    for dim, (first, second) in ((1, (part.d_model, width)), (0, (width, part.d_model))):
        shape = [first, second]
        shape.insert(dim, num_experts)
        shapes = ((sum(_SIZES), first), shape, (sum(_SIZES), second))
        given = [jnp.asarray(random.standard_normal(each), dtype) for each in shapes]

        def run(
            backend: Any, rows: Array, weights: Array, cotangents: Array, dim: int = dim
        ) -> list[Array]:
            multiply = partial(expert_backends.grouped_matmul, dim=dim, backend=backend)
            outer = partial(expert_backends.grouped_outer, dim=dim, backend=backend)
            return [
                multiply(rows, weights, sizes),
                multiply(cotangents, weights, sizes, transposed=True),
                outer(rows, cotangents, sizes),
            ]

        def all_of(given: list[Array], run: Any = run) -> Mapping[str, list[Array]]:
            wide = [each.astype(jnp.float32) for each in given]
            with jax.default_matmul_precision("highest"):
                exact = run("loop", *wide)
            plain, found = (run(backend, *given) for backend in ("loop", part.backend))
            return {"exact": exact, "plain": plain, "found": found}

        arrays = jax.device_get(jax.jit(all_of)(given))
        yield deviation(part.backend, dtype, **arrays)
