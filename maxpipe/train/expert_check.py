"""Compare the kernels of experts with plain operations before a run uses them on new hardware.

Grouped matmuls are compared with a loop, and the ragged all-to-all with one of complete buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.errors import Code, ConfigError
from maxpipe.models.layers.experts import AllToAll, ExpertBackend, Experts
from maxpipe.models.spec import Model
from maxpipe.nn.expert_backends import dispatch, mosaic, triton
from maxpipe.nn.experts import exchange_rows
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.collectives import all_to_all, manual_axes_of, mark_varying
from maxpipe.parallel.mesh import EXPERT, build_mesh
from maxpipe.train.kernel_check import (
    KernelCheck,
    KernelDeviation,
    deviation,
)

_ROOM, _WIDTH = 24, 256
"""Rows that a device can send to another device, and their width, in the check of the all-to-all.
"""
_SIZES, _ROW_TILE = (200, 0, 77, 107), 128
"""Number of rows of each expert, for tiles of `_ROW_TILE` rows. One expert has no rows, and the
others begin inside a tile. Other tiles have proportional numbers of rows."""
_WIDTHS, _REMAINDER = 1024, 256
"""Larger widths are replaced by about 1024, with the same remainder of the division by 256. The
kernels then mask the same part of their last tile, and the check needs little memory and time.
TPUs use no masks. Their widths are those of one tile, or of two tiles if the run has several tiles.
"""


class _Kernel(NamedTuple):
    """A kernel of the projections between the width of the model and that of the experts."""

    kind: Literal["matmul", "transposed", "outer"]
    dim: int
    """Expert dim of the weights: 1 for input projections, and 0 for output projections."""
    number: int
    """Number of projections that the kernel computes together."""
    row_tile: int
    contracted: int
    """Contracted width, or width of the rows in weight gradients."""
    width: int
    """Output width."""
    tiles: mosaic.Tiles | None = None
    """Tiles on TPUs, or None if the backend selects them for these sizes."""
    uses_loop: bool = False
    """Whether the run uses the loop, because no tiles fit the sizes."""

    @property
    def description(self) -> str:
        """Return the sizes that select the compiled kernel."""
        return f"{self.kind} {' x '.join(map(str, self.tiles or ['loop']))}"


class _Case(NamedTuple):
    """A sublayer, and its kernels."""

    backend: ExpertBackend
    width: int
    """Checked input width."""
    hidden: int
    """Checked hidden width on one device."""
    kernels: tuple[_Kernel, ...]

    @property
    def description(self) -> str:
        """Return the backend and all sizes."""
        text = f"{self.backend} {self.width} x {self.hidden}, "
        if any(kernel.tiles for kernel in self.kernels):
            return text + ", ".join(kernel.description for kernel in self.kernels)
        return f"{text}tiles of {self.kernels[0].row_tile} rows"


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
        [case.description for case in cases],
        lambda: [each for case in cases for each in _compare(case, dtype)],
        lambda rule: ConfigError.one(Code.MODEL_EXPERTS, key, None, rule, f"Set {key}=loop."),
    )


def exchange_check(model: Model, mesh: Mesh, dtype: str, family: str = "moe") -> KernelCheck:
    """Return the check of the ragged all-to-all over the expert axis of `mesh`."""
    is_ragged = _platform() != "cpu" and any(
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
    there, back = jax.device_get(compare(*given))
    return KernelDeviation("ragged all-to-all", float(there), float(back), 0.0)


def _cases(model: Model, dtype: str, tensor: int, num_tokens: int) -> Iterator[_Case]:
    """Yield all distinct cases."""
    platform = _platform()
    seen: set[_Case] = set()
    for kind in model.layer_types.values():
        for part in kind.parts.values():
            if not isinstance(part, Experts) or not part.permutes_tokens:
                continue
            if part.backend == "loop" or (part.backend == "auto" and platform == "cpu"):
                continue
            hidden = -(-part.d_mlp // tensor)
            if platform == "tpu" and part.backend == "auto":
                with jax.set_mesh(build_mesh(MeshConfig(), jax.local_devices()[:1])):
                    case = _tpu_case(part, hidden, dtype, num_tokens)
            else:
                rows = triton.row_tile(_num_rows(part, num_tokens) / _num_experts(part), dtype)
                sizes = _checked_width(part.d_model), _checked_width(hidden)
                case = _Case(part.backend, *sizes, (*_kernels(*sizes, rows),))
            if case not in seen and not all(kernel.uses_loop for kernel in case.kernels):
                seen.add(case)
                yield case


def _platform() -> str:
    return jax.local_devices()[0].platform


def _kernels(width: int, hidden: int, row_tile: int) -> Iterator[_Kernel]:
    """Yield the kernels of both projections. The gate and the up projection have the same input."""
    for dim, number, sizes in ((1, 2, (width, hidden)), (0, 1, (hidden, width))):
        yield _Kernel("matmul", dim, 1, row_tile, *sizes)
        yield _Kernel("transposed", dim, number, row_tile, sizes[1], sizes[0])
        yield _Kernel("outer", dim, number, row_tile, *sizes)


def _tpu_case(part: Experts, hidden: int, dtype: str, num_tokens: int) -> _Case:
    """Return a case with the tiles of the run, which depend on all sizes of its matmuls."""
    num_rows, num_experts = _num_rows(part, num_tokens), _num_experts(part)
    kernels = []
    for kernel in _kernels(part.d_model, hidden, _ROW_TILE):
        sizes = round(num_rows), num_experts, kernel.contracted, kernel.width, dtype
        tiles = (
            mosaic.outer_tiles(*sizes, number=kernel.number)
            if kernel.kind == "outer"
            else mosaic.matmul_tiles(*sizes, num_pairs=kernel.number)
        )
        if tiles is None:
            kernels.append(kernel._replace(contracted=_ROW_TILE, width=_ROW_TILE, uses_loop=True))
            continue
        kernels.append(
            kernel._replace(
                row_tile=tiles.rows,
                contracted=min(kernel.contracted, 2 * tiles.contracted),
                width=min(kernel.width, 2 * tiles.width),
                tiles=tiles,
            )
        )
    return _Case(part.backend, part.d_model, hidden, tuple(kernels))


def _num_experts(part: Experts) -> int:
    """Return the number of experts on one device."""
    return part.num_experts // part.shards


def _num_rows(part: Experts, num_tokens: int) -> float:
    """Return the number of rows in one grouped matmul."""
    if part.rows_received is None or not num_tokens:
        return float(_ROW_TILE * _num_experts(part))
    return part.rows_received * num_tokens / (part.all_to_all_chunks if part.shards > 1 else 1)


def _checked_width(width: int) -> int:
    return min(width, _WIDTHS + width % _REMAINDER)


def _compare(case: _Case, dtype: str) -> Iterator[KernelDeviation]:
    """Yield the deviations of the input projections and of the output projection."""
    for dim in (1, 0):
        kernels = [kernel for kernel in case.kernels if kernel.dim == dim]
        random = np.random.default_rng(0)
        given = [_operands(kernel, random, dtype) for kernel in kernels]

        def all_of(
            given: Sequence[_Operands], kernels: Sequence[_Kernel] = kernels
        ) -> Mapping[str, list[Array]]:
            def run(backend: ExpertBackend, given: Sequence[_Operands]) -> list[Array]:
                pairs = zip(kernels, given, strict=True)
                return [each for kernel, arrays in pairs for each in _run(kernel, backend, arrays)]

            wide = jax.tree.map(
                lambda array: array if array.dtype == jnp.int32 else array.astype(jnp.float32),
                given,
            )
            with jax.default_matmul_precision("highest"):
                exact = run("loop", wide)
            plain, found = (run(backend, given) for backend in ("loop", case.backend))
            return {"exact": exact, "plain": plain, "found": found}

        arrays = jax.device_get(jax.jit(all_of)(given))
        yield deviation(case.backend, dtype, **arrays)


class _Operands(NamedTuple):
    """Random operands of one kernel."""

    sizes: Array
    """Number of rows of each expert."""
    rows: list[Array]
    others: list[Array]
    """Weights, or cotangents in weight gradients."""


def _operands(kernel: _Kernel, random: np.random.Generator, dtype: str) -> _Operands:
    def draw(*shape: int) -> Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), dtype)

    counts = [size * kernel.row_tile // _ROW_TILE for size in _SIZES]
    rows = [draw(sum(counts), kernel.contracted)]
    if kernel.kind == "outer":
        others = [draw(sum(counts), kernel.width) for _ in range(kernel.number)]
    else:
        shape = [kernel.contracted, kernel.width]
        shape = shape[::-1] if kernel.kind == "transposed" else shape
        shape.insert(kernel.dim, len(counts))
        others = [draw(*shape) for _ in range(kernel.number)]
        rows += [draw(*rows[0].shape) for _ in others[1:]]
    return _Operands(jnp.asarray(counts, jnp.int32), rows, others)


def _run(kernel: _Kernel, backend: ExpertBackend, given: _Operands) -> Sequence[Array]:
    """Return the results of a kernel."""
    sizes, rows, others = given
    backend = "loop" if kernel.uses_loop else backend
    options: dict[str, Any] = {"dim": kernel.dim, "backend": backend, "tiles": kernel.tiles}
    if kernel.kind == "outer":
        return dispatch.grouped_outer(rows[0], others, sizes, **options)
    options["transposed"] = kernel.kind == "transposed"
    return [dispatch.grouped_matmul(rows, others, sizes, **options)]
