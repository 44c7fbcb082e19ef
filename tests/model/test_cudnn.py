"""What stands around cuDNN's kernel, with jax's plain attention in its place: no GPU is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxpipe.config.schema import MeshConfig
from maxpipe.model.attention import cudnn, cudnn_calls, xla
from maxpipe.model.attention.cudnn_calls import Documents, Kernel
from maxpipe.model.attention.interface import Mask
from maxpipe.parallel import stated
from maxpipe.parallel.mesh import MANUAL_AXES, build_mesh
from tests.cases import TOLERANCE, Case, batch_of, keeping, steps_of


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    monkeypatch.setattr(cudnn_calls, "forward", forward)
    monkeypatch.setattr(cudnn_calls, "backward", backward)
    monkeypatch.setattr(cudnn, "_packs", lambda: True)
    monkeypatch.setattr(cudnn, "packed_documents", lambda tokens: 2)
    monkeypatch.setitem(cudnn._HIDDEN, "float32", -1e30)


# What the kernels compute, from what they are told.


def scores(
    kernel: Kernel, query: jax.Array, key: jax.Array, beside: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(of all pairs `[B, N, T, S]`, the document of each token)."""
    rows, tokens, heads, _ = query.shape
    key = jnp.repeat(key, heads // key.shape[2], axis=2)
    found = jnp.einsum("btnh,bsnh->bnts", query, key) * kernel.scale
    distance = jnp.arange(tokens)[:, None] - jnp.arange(key.shape[1])
    seen = distance >= 0 if kernel.causal else distance == distance
    seen &= (distance < kernel.window) | (kernel.window == 0)
    if not isinstance(beside, Documents):
        assert kernel.packed == 1
        return jnp.where(seen, found if beside is None else found + beside, -1e30), None
    assert beside.lengths.shape == (rows, kernel.packed)
    assert beside.starts.shape == (rows, kernel.packed + 1)
    starts, lengths = beside.starts.reshape(-1), beside.lengths.reshape(-1)
    places = jnp.arange(rows * tokens)
    inside = (places >= starts[: len(lengths), None]) & (
        places < starts[: len(lengths), None] + lengths[:, None]
    )
    number = jnp.where(inside.sum(0) == 1, inside.argmax(0), -1).reshape(rows, tokens)
    same = number[:, None, :, None] == number[:, None, None]
    return jnp.where(seen & same, found, -1e30), number


def forward(
    kernel: Kernel, query: jax.Array, key: jax.Array, value: jax.Array, beside: Any
) -> tuple[jax.Array, jax.Array]:
    found, number = scores(kernel, query, key, beside)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(found), value)
    sums = jax.nn.logsumexp(found, axis=-1)
    if number is None:
        return mixed, sums
    rows, heads, tokens = sums.shape
    starts = beside.starts.reshape(-1)[: rows * kernel.packed]
    places = jnp.arange(rows * tokens) - starts[number.reshape(-1)]
    by_document = jnp.full((rows * kernel.packed, heads, tokens), jnp.nan)
    flat = jnp.swapaxes(sums, 1, 2).reshape(-1, heads)
    return mixed, by_document.at[number.reshape(-1), :, places].set(flat)


def backward(
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mixed: jax.Array,
    sums: jax.Array,
    d_mixed: jax.Array,
    beside: Any,
) -> tuple[jax.Array, ...]:
    found, number = scores(kernel, query, key, beside)
    if number is not None:
        starts = beside.starts.reshape(-1)
        places = jnp.arange(number.size) - starts[number.reshape(-1)]
        flat = sums[number.reshape(-1), :, places].reshape(*number.shape, -1)
        sums = jnp.swapaxes(flat, 1, 2)
    count = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(each, count, axis=2) for each in (key, value))
    shares = jnp.exp(found - sums[..., None])
    delta = jnp.einsum("btnh,btnh->bnt", d_mixed, mixed)
    d_scores = shares * (jnp.einsum("btnh,bsnh->bnts", d_mixed, values) - delta[..., None])
    d_query = jnp.einsum("bnts,bsnh->btnh", d_scores, keys) * kernel.scale
    d_keys = jnp.einsum("bnts,btnh->bsnh", d_scores, query) * kernel.scale
    d_values = jnp.einsum("bnts,btnh->bsnh", shares, d_mixed)
    grouped = (each.reshape(*key.shape[:3], count, -1).sum(3) for each in (d_keys, d_values))
    return d_query, *grouped


def close(got: Any, wanted: Any) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE * np.abs(right).max())


ENGINE = [
    Case(2, 2, 3, fsdp=2, tensor=2),
    Case(2, 1, 3, schedule="zb_h1", data=2, tensor=2, remat="names", layers=3),
    Case(2, 2, 3, schedule="zb_v", fsdp=2, remat="none", idle="compute"),
]


@pytest.mark.parametrize("case", keeping(ENGINE, 0), ids=str)
def test_the_engine_trains_as_with_plain_attention(case: Case) -> None:
    def run(case: Case) -> Any:
        steps = steps_of(case, case.rows)
        parts = steps.partition
        params = jax.jit(parts.decoder.init)(jax.random.key(0))
        run = steps.engine.value_and_grad(steps.train_schedule)

        def whole(params: Any, batch: Any) -> Any:
            loss, gradients, *_ = run(parts.stack(params), batch, None)
            return loss, parts.unstack(gradients)

        with jax.set_mesh(parts.mesh):
            batch = jax.device_put(batch_of(case.rows), steps.batch_sharding)
            return jax.tree.map(np.asarray, jax.jit(whole)(params, batch))

    close(run(dataclasses.replace(case, attention="cudnn")), run(case))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (6, 3), (3, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_heads_are_divided_where_the_program_is_automatic(
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
"""By what is in the rows: documents of the kernel, None for numbers of all pairs."""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_data_choose_the_kernel(
    rows: str, window: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Kernel | None] = []

    def spied(kernel: Kernel, *arrays: Any) -> Any:
        numbers = isinstance(arrays[3], jax.Array)
        jax.debug.callback(lambda: ran.append(None if numbers else kernel))
        return forward(kernel, *arrays)

    monkeypatch.setattr(cudnn_calls, "forward", spied)
    draw = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (
        jax.random.normal(each, (2, 8, count, 4))
        for each, count in zip(draw, (4, 2, 2, 4), strict=True)
    )
    mask = Mask(jnp.asarray(ROWS[rows]), window=window, causal=causal)

    def run(attend: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return (attend(*arrays, mask) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    close(run(cudnn.attend), run(xla.attend))
    jax.effects_barrier()
    by_numbers = KERNELS[rows] is None or (window and not causal)
    scale = query.shape[-1] ** -0.5
    assert ran == [None if by_numbers else Kernel(causal, scale, window, KERNELS[rows] or 1)]


def test_data_choose_the_window() -> None:
    query = jax.random.normal(jax.random.key(0), (2, 8, 4, 4))
    segments = jnp.asarray(ROWS["as many as a kernel takes"])

    def run(attend: Any, window: jax.Array) -> jax.Array:
        mask = Mask(segments, window=window, windows=(0, 2, 5))
        return attend(query, query[:, :, :2], query[:, :, 2:], mask)

    for window in (0, 2, 5):
        size = jnp.asarray(window)
        close(jax.jit(run, static_argnums=0)(cudnn.attend, size), run(xla.attend, size))


def test_each_device_calls_the_kernel_by_itself_and_states_its_work() -> None:
    """jax's rule for cuDNN's kernel fails unless all axes of the mesh are written per device."""
    mesh = build_mesh(MeshConfig(ici_stage=2, ici_tensor=2), jax.devices()[:4])
    seen: list[tuple[set[str], tuple[int, ...]]] = []

    def spied(kernel: Kernel, query: Any, *arrays: Any) -> Any:
        seen.append((set(jax.sharding.get_abstract_mesh().manual_axes), query.shape))
        return forward(kernel, query, *arrays)

    def program(x: Any) -> Any:
        return cudnn.attend(x, x[:, :, :2], x[:, :, 2:], Mask(jnp.zeros((1, 8), int)))

    spec = PartitionSpec(MANUAL_AXES)
    run = jax.shard_map(
        program, mesh=mesh, axis_names=set(MANUAL_AXES), in_specs=spec, out_specs=spec
    )
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patched:
        patched.setattr(cudnn_calls, "forward", spied)
        lowered = jax.jit(run).lower(jnp.ones((2, 8, 4, 6)))
    assert set(map(str, seen)) == {str((set(mesh.axis_names), (1, 8, 2, 6)))}
    products = stated.flops(4 * 6 * 2 * 8 * 8 / 2)
    assert products in lowered.as_text(debug_info=True)
