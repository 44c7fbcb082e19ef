"""The code around the cuDNN kernel, replaced here by plain attention: no GPU is needed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from maxpipe.nn.attention import cudnn, xla
from maxpipe.nn.attention.cudnn import DocumentOffsets, Kernel
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel import scopes
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import MANUAL_AXES, build_mesh
from tests.cases import TOLERANCE, Case, keeping
from tests.cudnn import backward, forward, put_in_place
from tests.pipeline.test_engine import check_gradients

CALLS = cudnn.forward, cudnn.backward
"""The original functions, which the tests replace."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    put_in_place(monkeypatch)


def close(got: Any, wanted: Any) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE * np.abs(right).max())


ENGINE = [
    Case(2, 2, 3, fsdp=2, tensor=2),
    Case(2, 1, 3, schedule="zb_h1", data=2, tensor=2, remat="names", layers=3),
    Case(2, 2, 3, schedule="zb_v", fsdp=2, remat="none", idle="compute"),
]


@pytest.mark.parametrize("case", keeping(ENGINE, 0), ids=str)
def test_engine_gradients_equal_xla_attention(case: Case) -> None:
    check_gradients(dataclasses.replace(case, attention="cudnn"), attention="xla")


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (6, 3), (3, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_batch_and_heads_are_sharded_under_automatic_partitioning(
    heads: int, groups: int, causal: bool
) -> None:
    mesh = build_mesh(MeshConfig(ici_fsdp=2, ici_tensor=2), jax.devices()[:4])
    draw = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (
        jax.random.normal(each, (2, 8, count, 4))
        for each, count in zip(draw, (heads, groups, groups, heads), strict=True)
    )
    segments = jnp.asarray([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 5 + [3] * 3])

    def run(attend: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            mask = Mask(segments, window=3, causal=causal, scale=0.3)
            return (attend(*arrays, mask) * weight).sum()

        with jax.set_mesh(mesh):
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    close(run(cudnn.attend), run(xla.attend))


ROWS = {
    "each row is one document": [[1] * 8, [4] * 8],
    "as many as a kernel takes": [[1, 1, 1, 2, 2, 3, 3, 3], [1] * 8],
    "fewer, with padding": [[1, 1, 1, 1, 1, 2, 0, 0], [1] * 8],
    "more": [[1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 2, 2, 3, 3, 4, 4]],
    "one that begins again": [[1, 1, 2, 2, 1, 1, 1, 1], [1] * 8],
    "padding in between": [[1, 1, 0, 0, 2, 2, 2, 2], [1] * 8],
}
KERNELS = dict(zip(ROWS, (1, 2, 2, None, None, None), strict=True))
"""Documents per kernel of each case; None for the kernel with a bias of all pairs."""


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_kernel_is_selected_by_document_layout(
    window: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program handles every document layout."""
    ran: list[Kernel | None] = []

    def spied(kernel: Kernel, *arrays: Any) -> Any:
        numbers = isinstance(arrays[3], jax.Array)
        jax.debug.callback(lambda: ran.append(None if numbers else kernel))
        return forward(kernel, *arrays)

    monkeypatch.setattr(cudnn, "forward", spied)
    draw = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (
        jax.random.normal(each, (2, 8, count, 4))
        for each, count in zip(draw, (4, 2, 2, 4), strict=True)
    )

    def program(attend: Any) -> Any:
        # Compare the outputs: their weighted sum cancels, and its rounding depends on the CPU.
        def loss(query: Any, key: Any, value: Any, segments: Any) -> Any:
            outputs = attend(query, key, value, Mask(segments, window=window, causal=causal))
            return (outputs * weight).sum(), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    ours, plain = program(cudnn.attend), program(xla.attend)
    for rows, segments in ROWS.items():
        ran.clear()
        # Leave out the sum.
        found, wanted = (
            (each[0][1], each[1])
            for each in (run(query, key, value, jnp.asarray(segments)) for run in (ours, plain))
        )
        close(found, wanted)
        jax.effects_barrier()
        by_numbers = KERNELS[rows] is None or (window and not causal)
        scale = query.shape[-1] ** -0.5
        kernel = None if by_numbers else Kernel(causal, scale, window, KERNELS[rows] or 1)
        assert ran == [kernel], rows


def test_window_is_selected_at_run_time() -> None:
    query = jax.random.normal(jax.random.key(0), (2, 8, 4, 4))
    segments = jnp.asarray(ROWS["as many as a kernel takes"])

    def run(attend: Any, window: jax.Array) -> jax.Array:
        mask = Mask(segments, window=window, windows=(0, 2, 5))
        return attend(query, query[:, :, :2], query[:, :, 2:], mask)

    for window in (0, 2, 5):
        size = jnp.asarray(window)
        close(jax.jit(run, static_argnums=0)(cudnn.attend, size), run(xla.attend, size))


def test_kernel_runs_per_device_and_reports_flops() -> None:
    """JAX's partitioning rule for the cuDNN kernel fails unless all mesh axes are manual."""
    mesh = build_mesh(MeshConfig(ici_stage=2, ici_tensor=2), jax.devices()[:4])
    seen: list[tuple[set[str], tuple[int, ...]]] = []

    def spied(call: Any) -> Any:
        def run(kernel: Kernel, query: Any, *arrays: Any) -> Any:
            seen.append((set(jax.sharding.get_abstract_mesh().manual_axes), query.shape))
            return call(kernel, query, *arrays)

        return run

    def program(x: Any) -> Any:
        mask = Mask(jnp.zeros((1, 8), int))
        return jax.grad(lambda x: cudnn.attend(x, x[:, :, :2], x[:, :, 2:], mask).sum())(x)

    spec = PartitionSpec(MANUAL_AXES)
    run = jax.shard_map(
        program, mesh=mesh, axis_names=set(MANUAL_AXES), in_specs=spec, out_specs=spec
    )
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patched:
        patched.setattr(cudnn, "forward", spied(forward))
        patched.setattr(cudnn, "backward", spied(backward))
        lowered = jax.jit(run).lower(jnp.ones((2, 8, 4, 6)))
    # Three kernels for each direction, selected by the data at run time.
    assert seen == [(set(mesh.axis_names), (1, 8, 2, 6))] * 6
    products, text = 4 * 6 * 2 * 8 * 8 / 2, lowered.as_text(debug_info=True)
    assert scopes.flops(products) in text and scopes.flops(2.5 * products) in text


@pytest.mark.parametrize("tokens", [7, 8])
def test_odd_lengths_and_caches_fall_back_to_xla(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels with a bias require even lengths, and cached queries have no contiguous keys."""
    query = jax.random.normal(jax.random.key(0), (2, tokens, 4, 4))
    segments = jnp.ones((2, tokens), int)
    mask = Mask(segments)
    if tokens % 2 == 0:
        places = jnp.broadcast_to(jnp.arange(tokens), segments.shape)
        mask = dataclasses.replace(
            mask, positions=places, key_positions=places, key_segments=segments
        )
    monkeypatch.setattr(cudnn, "forward", None)  # must not be called
    arrays = query, query[:, :, :2], query[:, :, 2:]
    close(cudnn.attend(*arrays, mask), xla.attend(*arrays, mask))


def part_of(mine: Any, theirs: Any) -> bool:
    """Return True if one JSON value is contained in another, recursively."""
    if isinstance(mine, dict):
        return all(name in theirs and part_of(each, theirs[name]) for name, each in mine.items())
    return bool(mine == theirs)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        (Kernel(True, 0.3), "CAUSAL"),
        (Kernel(False, 0.3), "NO_MASK"),
        (Kernel(True, 0.3, window=5), "CAUSAL"),
        (Kernel(True, 0.3, window=5, packed=4), "PADDING_CAUSAL"),
        (Kernel(False, 0.3, packed=4), "PADDING"),
    ],
)
def test_kernel_config_matches_jax(kernel: Kernel, mask: str, is_backward: bool) -> None:
    query, key = (jnp.zeros(shape, jnp.bfloat16) for shape in ((2, 16, 8, 64), (2, 32, 2, 64)))
    with mlir.make_ir_context():
        theirs = fused_attention_stablehlo.create_dot_product_attention_backend_config(
            *(2, 8, 16, 32, ir.BF16Type.get(), 0.3, 42, 0.0),
            fused_attention_stablehlo.MaskType[mask],
            fused_attention_stablehlo.AttentionLayout.BTNH.value,
            *(kernel.window, kernel.packed, False, is_backward),
        )
    mine = cudnn._config(kernel, query, key, is_backward)
    assert part_of(mine, json.loads(theirs))


@pytest.mark.parametrize("packed", [1, 4])
def test_calls_lower_for_cuda(packed: int) -> None:
    """Check targets, operands and results by lowering, which needs no GPU."""
    arrays = [jax.ShapeDtypeStruct((2, 16, heads, 64), jnp.bfloat16) for heads in (8, 2, 2, 8, 8)]
    query, key, value, mixed, d_mixed = arrays
    lengths, starts = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (packed, packed + 1))
    beside = DocumentOffsets(lengths, starts) if packed > 1 else None  # type: ignore[arg-type]
    sums = jax.ShapeDtypeStruct((2 * packed, 8, 16), jnp.float32)
    kernel = Kernel(True, 0.3, packed=packed)
    given = (query, key, value, beside), (query, key, value, mixed, sums, d_mixed, beside)
    forward_text, backward_text = (
        jax.jit(call, static_argnums=0)
        .trace(kernel, *arrays)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        for call, arrays in zip(CALLS, given, strict=True)
    )
    rest = ", ".join(
        [f"tensor<2x{packed}xi32>"] * 2 + [f"tensor<2x{packed + 1}xi32>"] * 2 if packed > 1 else []
    )
    q, k = "tensor<2x16x8x64xbf16>", "tensor<2x16x2x64xbf16>"
    stats = f"tensor<{2 * packed}x8x16xf32>"
    assert "@__cudnn$fmhaSoftmax(" in forward_text and "api_version = 2" in forward_text
    assert f": ({', '.join([q, k, k, *([rest] if rest else [])])}) -> (" in forward_text
    assert f"tensor<2x8x16x64xbf16>, {stats}, tensor<0xui8>" in forward_text
    assert "@__cudnn$fmhaSoftmaxBackward(" in backward_text
    operands = [q, k, k, stats, q, q, *([rest] if rest else [])]
    assert f": ({', '.join(operands)}) -> (" in backward_text
