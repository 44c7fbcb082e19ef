"""Compare the kernels of experts with plain operations before a run uses them on new hardware.

Grouped matmuls are compared with a loop, and the ragged all-to-all with one of complete buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.errors import Code, ConfigError
from maxpipe.models.layers.experts import AllToAll, Experts
from maxpipe.models.spec import Model
from maxpipe.nn.expert_backends import dispatch, triton
from maxpipe.nn.experts import exchange_rows
from maxpipe.parallel.collectives import all_to_all, manual_axes_of, mark_varying
from maxpipe.parallel.mesh import EXPERT
from maxpipe.train.kernel_check import (
    KernelCheck,
    KernelDeviation,
    deviation,
    reporting_compile_errors,
)

_ROOM, _WIDTH = 24, 256
"""Rows that a device can send to another device, and their width, in the check of the all-to-all.
"""
_SIZES, _ROW_TILE = (200, 0, 77, 107), 128
"""Number of rows of each expert, for tiles of `_ROW_TILE` rows. One expert has no rows, and the
others begin inside a tile."""
_WIDTHS, _REMAINDER = 1024, 256
"""Larger widths are replaced by about 1024, with the same remainder of the division by 256. The
kernels then mask the same part of their last tile, and the check needs little memory and time."""


def expert_check(
    model: Model, dtype: str, tensor: int = 1, family: str = "moe", num_tokens: int = 0
) -> KernelCheck:
    """Return the check of all experts whose tokens are sorted by expert.

    The loop is not checked. CPUs use the loop, unless `expert_backend` selects another
    implementation. `tensor` is the number of devices that share the hidden width of an expert.
    `num_tokens` is the number of tokens on one device in a microbatch of `model`, or 0 to check
    the largest tiles.
    """
    cases = [*_cases(model, dtype, tensor, num_tokens)]
    key = f"model.{family}.expert_backend"
    return KernelCheck(
        "experts",
        [
            f"{part.backend} {width} x {hidden}, tiles of {tile} rows"
            for part, width, hidden, tile in cases
        ],
        lambda: [each for case in cases for each in _compare(*case, dtype)],
        lambda rule: ConfigError.one(Code.MODEL_EXPERTS, key, None, rule, f"Set {key}=loop."),
    )


def exchange_check(model: Model, mesh: Mesh, dtype: str, family: str = "moe") -> KernelCheck:
    """Return the check of the ragged all-to-all over the expert axis of `mesh`."""
    is_ragged = mesh.devices.flat[0].platform != "cpu" and any(
        isinstance(part, Experts) and part.permutes_tokens and part.all_to_all == "auto"
        for kind in model.layer_types.values()
        for part in kind.parts.values()
    )
    key = f"model.{family}.all_to_all"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return KernelCheck(
        "all-to-all",
        [f"ragged over {axes}"] if is_ragged and mesh.shape[EXPERT] > 1 else [],
        lambda: [compare_exchanges(mesh, dtype)],
        lambda rule: ConfigError.one(Code.MODEL_EXPERTS, key, None, rule, f"Set {key}=padded."),
        mesh,
    )


def compare_exchanges(mesh: Mesh, dtype: str) -> KernelDeviation:
    """Exchange random rows in both directions. All received rows must be equal.

    All processes of the mesh must call this function together.
    """
    size, random = mesh.shape[EXPERT], np.random.default_rng(0)
    counts = random.integers(0, _ROOM + 1, (size, size)).astype(np.int32)
    counts[0, -1], counts[-1, 0] = 0, _ROOM
    values = random.standard_normal((size * size * _ROOM, _WIDTH)).astype(dtype)
    spec = PartitionSpec(EXPERT)

    def place(array: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def differences(values: Array, sent: Array) -> Array:
        values, sent = mark_varying(values), mark_varying(sent)
        received = all_to_all(sent, EXPERT, 0, 0)

        def exchange(method: AllToAll, values: Array) -> list[Array]:
            there = exchange_rows(values, sent, received, method)
            used = jnp.arange(_ROOM) < received[:, None]
            there = jnp.where(used.reshape(-1, 1), there, 0)
            back = exchange_rows(there, received, sent, method)
            used = jnp.arange(_ROOM) < sent[:, None]
            return [there, jnp.where(used.reshape(-1, 1), back, 0)]

        pairs = zip(exchange("auto", values), exchange("padded", values), strict=True)
        # A comparison with NaN is false, so it must hold for equal values.
        different = jnp.stack([~(own == plain).all() for own, plain in pairs])
        return lax.pmax(different.astype(jnp.float32), axes)

    axes = manual_axes_of(mesh)
    compare = jax.jit(
        jax.shard_map(
            differences,
            axis_names=set(axes),
            in_specs=(spec, spec),
            out_specs=PartitionSpec(),
            mesh=mesh,
        )
    )
    given = place(values), place(counts.reshape(-1))
    with reporting_compile_errors():
        run = compare.lower(*given).compile()
    there, back = jax.device_get(run(*given))
    return KernelDeviation("ragged all-to-all", float(there), float(back), 0.0)


def _cases(
    model: Model, dtype: str, tensor: int, num_tokens: int
) -> Iterator[tuple[Experts, int, int, int]]:
    """Yield (sublayer, input width, hidden width on one device, rows per tile) for all distinct
    sizes.
    """
    platform = jax.local_devices()[0].platform
    uses_loop = platform == "cpu"
    seen: set[tuple[int, int, int]] = set()
    for kind in model.layer_types.values():
        for part in kind.parts.values():
            if not isinstance(part, Experts) or not part.permutes_tokens:
                continue
            if part.backend == "loop" or (part.backend == "auto" and uses_loop):
                continue
            # Tiles on TPUs have at least 128 rows.
            rows = _rows_per_expert(part, num_tokens) if platform != "tpu" else _ROW_TILE
            sizes = (
                _checked_width(part.d_model),
                _checked_width(-(-part.d_mlp // tensor)),
                triton.row_tile(rows, dtype),
            )
            if sizes not in seen:
                seen.add(sizes)
                yield part, *sizes


def _rows_per_expert(part: Experts, num_tokens: int) -> float:
    """Return the mean number of rows per expert in one grouped matmul."""
    if part.rows_received is None or not num_tokens:
        return _ROW_TILE
    chunks = part.all_to_all_chunks if part.shards > 1 else 1
    return part.rows_received * num_tokens / chunks / (part.num_experts // part.shards)


def _checked_width(width: int) -> int:
    return min(width, _WIDTHS + width % _REMAINDER)


def _compare(
    part: Experts, width: int, hidden: int, row_tile: int, dtype: str
) -> Iterator[KernelDeviation]:
    """Yield the deviations of the input projections and of the output projection."""
    random, num_experts = np.random.default_rng(0), len(_SIZES)
    counts = [size * row_tile // _ROW_TILE for size in _SIZES]
    num_rows, sizes = sum(counts), jnp.asarray(counts, jnp.int32)
    # The gate and the up projection have the same input.
    for dim, number, (first, second) in ((1, 2, (width, hidden)), (0, 1, (hidden, width))):
        shape = [first, second]
        shape.insert(dim, num_experts)
        shapes = ((num_rows, first), *[shape] * number, *[(num_rows, second)] * number)
        given = [jnp.asarray(random.standard_normal(each), dtype) for each in shapes]

        def run(
            backend: Any, rows: Array, *others: Array, dim: int = dim, number: int = number
        ) -> list[Array]:
            multiply = partial(dispatch.grouped_matmul, dim=dim, backend=backend)
            outer = partial(dispatch.grouped_outer, dim=dim, backend=backend)
            weights, cotangents = others[:number], others[number:]
            return [
                *(multiply([rows], [weight], sizes) for weight in weights),
                multiply(cotangents, weights, sizes, transposed=True),
                *outer(rows, cotangents, sizes),
            ]

        def all_of(given: list[Array], run: Any = run) -> Mapping[str, list[Array]]:
            wide = [each.astype(jnp.float32) for each in given]
            with jax.default_matmul_precision("highest"):
                exact = run("loop", *wide)
            plain, found = (run(backend, *given) for backend in ("loop", part.backend))
            return {"exact": exact, "plain": plain, "found": found}

        arrays = jax.device_get(jax.jit(all_of)(given))
        yield deviation(part.backend, dtype, **arrays)
