"""Splash attention: kernels in interpret mode, and the code around them with plain stand-ins."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxpipe.models.layers.attention import LOG_SUM
from maxpipe.nn.attention import splash, splash_kernels, xla
from maxpipe.nn.attention.interface import Mask
from maxpipe.parallel import scopes, tpu_kernels
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import MANUAL_AXES, build_mesh
from tests.cases import TOLERANCE, Case, buffer_bytes, keeping, steps_of
from tests.pipeline.test_engine import check_gradients

KERNEL_TOLERANCE = 5e-6  # float32; of the largest entry
B, N = 2, 4


def row(tokens: int) -> np.ndarray:
    """Return segment IDs of two sequences whose documents begin at random positions."""
    cuts = np.sort(np.random.default_rng(0).integers(0, 3, (B, tokens)), axis=1)
    return cuts.astype(np.int32)


# Chunks 1 and 6 of 8 of a sequence, held by one of four devices.
ZIG_ZAG = np.concatenate([np.arange(128, 256), np.arange(768, 896)])
WINDOWS = (0, 100, 200)
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "cap": {"groups": 4, "soft_cap": 2.0, "scale": 0.3, "window": 150},
    "sinks": {"groups": 1, "sinks": True, "window": 5},
    "sizes": {"size": 48, "value_size": 32, "sinks": True},
    "shared dims": {"size": 48, "value_size": 32, "shared_dims": 16, "groups": 4},
    "shared dims, fewer heads": {"size": 48, "shared_dims": 16, "window": 150},
    "both ways": {"causal": False, "window": 30},
    "documents alone": {"causal": False},
    "zig-zag": {"tokens": 256, "keys": 1024, "places": ZIG_ZAG, "run": 128},
    "zig-zag window": {"tokens": 256, "keys": 1024, "places": ZIG_ZAG, "run": 128, "window": 150},
    "by layer": {"tokens": 384, "windows": WINDOWS, "window": 100, "sinks": True},
    "by layer, all": {"windows": WINDOWS, "window": 0},
    "divided diagonal": {"tokens": 2048, "block": 1024, "window": 700, "soft_cap": 2.0},
    "divided diagonal, zig-zag": {
        **{"tokens": 1536, "keys": 3072, "block": 768, "run": 768, "sinks": True},
        "places": np.r_[:768, 2304:3072],
    },
}


@pytest.mark.parametrize("name", keeping(CASES, 0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13))
def test_kernels_equal_xla_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare outputs and gradients of queries, keys, values and sinks over several blocks."""
    given = dict(CASES[name])
    tokens, groups = given.pop("tokens", 256), given.pop("groups", 2)
    keys, size = given.pop("keys", tokens), given.pop("size", 32)
    value_size, places = given.pop("value_size", size), given.pop("places", None)
    has_sinks, window = given.pop("sinks", False), given.pop("window", 0)
    block = given.pop("block", 128)
    monkeypatch.setattr(splash, "attention_block_size", lambda tokens, size, window: block)
    draw = [jax.random.key(number) for number in range(5)]
    query = jax.random.normal(draw[0], (B, tokens, N, size))
    key = jax.random.normal(draw[1], (B, keys, groups, size))
    value = jax.random.normal(draw[2], (B, keys, groups, value_size))
    weight = jax.random.normal(draw[3], (B, tokens, N, value_size))
    sinks = jax.random.normal(draw[4], (N,))
    where = np.arange(tokens) if places is None else places

    def run(attend: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, sinks: Any, window: Any) -> Any:
            if shared := given.get("shared_dims", 0):
                key = key.at[..., -shared:].set(key[:, :, :1, -shared:])
            mask = Mask(
                jnp.asarray(row(keys)[:, where]),
                key_segments=None if places is None else jnp.asarray(row(keys)),
                places=None if places is None else jnp.asarray(places),
                sinks=sinks if has_sinks else None,
                window=window,
                **given,
            )
            mixed = attend(query, key, value, mask)
            return (mixed * weight).sum(), mixed

        differentiated = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        static = () if "windows" in given else (4,)
        # Arrays are arguments: XLA would fold products of constants.
        return jax.jit(differentiated, static_argnums=static)(query, key, value, sinks, window)

    wanted = run(xla.attend)
    got = run(lambda *arguments: splash.attend(*arguments, interpret=True))
    assert not has_sinks or np.abs(wanted[1][3]).max() > 0.01
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=KERNEL_TOLERANCE * np.abs(right).max())


@pytest.mark.parametrize(("mib", "span", "parts"), [(1.9, 384, 2), (1.7, 384, 4), (1.0, 128, 4)])
def test_gradients_with_little_memory(
    mib: float, span: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query heads are divided into parts, and queries into spans."""
    cores = tpu_kernels.tpu_cores()._replace(vmem_mib=mib)  # type: ignore[arg-type]
    monkeypatch.setattr(tpu_kernels, "tpu_cores", lambda: cores)
    draw = [jax.random.key(number) for number in range(4)]
    query, d_mixed = (jax.random.normal(each, (1, 384, 4, 128)) for each in draw[:2])
    key, value = (jax.random.normal(each, (1, 384, 1, 128)) for each in draw[2:])
    mask = Mask(jnp.asarray(row(384)[:1]), window=200)
    swapped = [jnp.swapaxes(each, 1, 2) for each in (query, value)]
    sizes = splash_kernels.BlockSizes(128, 128, 128)
    assert splash_kernels._query_span(swapped[:1], swapped[1], sizes) == (span, parts)

    def gradients(attend: Any) -> Any:
        return jax.vjp(lambda *arrays: attend(*arrays, mask), query, key, value)[1](d_mixed)

    monkeypatch.setattr(splash, "attention_block_size", lambda tokens, size, window: 128)
    wanted = gradients(xla.attend)
    got = gradients(lambda *arguments: splash.attend(*arguments, interpret=True))
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=KERNEL_TOLERANCE * np.abs(right).max())


def test_queries_without_keys_have_zeros() -> None:
    """For a query block that is listed but skipped, and in a block with other documents."""
    draw = [jax.random.key(number) for number in range(3)]
    query, key, value = (jax.random.normal(each, (1, 2, 256, 32)) for each in draw)
    segments = jnp.repeat(jnp.asarray([[5, 1]]), 128, axis=1)
    first = np.asarray([0, 128], np.int32)
    mixed, sums = splash_kernels.forward(
        [query],
        [key],
        value,
        segments,
        jnp.ones_like(segments),
        first,
        function=splash_kernels.ScoreFunction(True, 0, 1.0),
        sizes=splash_kernels.BlockSizes(128, 128, 128),
        interpret=True,
    )
    assert (mixed[:, :, :128] == 0).all() and (sums[:, :, :128] < -1e37).all()
    assert (mixed[:, :, 128:] != 0).all() and (sums[:, :, 128:] > -100).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 130, 300])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_visible_blocks_are_listed_exactly_once(
    causal: bool, window: int, shuffled: bool, by_key: bool
) -> None:
    """For static and traced positions; no query sees a block that is omitted, and masks are omitted
    only where all pairs are visible."""
    size, keys = 128, 1024
    first = np.arange(0, keys, size)
    first = first[[1, 6, 0, 7]] if shuffled else first
    function = splash_kernels.ScoreFunction(causal, window, 1.0)
    places = (first[:, None] + np.arange(size)).reshape(-1)
    mask = Mask(jnp.zeros((1, len(places)), int), places=jnp.asarray(places), window=window)
    key_segments = jnp.zeros((1, keys), int)
    pairs = dataclasses.replace(mask, key_segments=key_segments, causal=causal).seen(
        0, len(places), keys, causal=causal
    )[0, 0]
    blocks = np.asarray(pairs).reshape(len(first), size, keys // size, size)
    visible, complete = np.asarray(blocks.any((1, 3))), np.asarray(blocks.all((1, 3)))
    for kind in (np, jnp):
        listed, count = splash_kernels.list_pairs(
            function,
            splash_kernels.BlockSizes(size, size, size),
            kind.asarray(first),
            mask.segments,
            key_segments,
            by_key=by_key,
        )
        query, key, distance, completed, flags = (np.asarray(each)[: int(count)] for each in listed)
        assert (distance == first[query] - size * key).all()
        assert len(set(zip(query, key, strict=True))) == len(query)
        assert set(query) == set(range(len(first))) and set(key) == set(range(keys // size))
        major = key if by_key else query
        assert (np.diff(major) >= 0).all()
        skipped, masked = flags & splash_kernels._SKIPPED != 0, flags & splash_kernels._MASKED != 0
        assert (skipped == ~visible[query, key]).all()
        assert visible.sum() == (~skipped).sum()
        assert (masked == ~complete[query, key]).all()
        for number in set(major):
            here = flags[np.flatnonzero(major == number)]
            assert np.flatnonzero(here & splash_kernels._FIRST).tolist() == [0]
            assert np.flatnonzero(here & splash_kernels._LAST).tolist() == [len(here) - 1]
        if not by_key:
            continue
        last = {block: np.flatnonzero(query == block)[-1] for block in set(query)}
        for step, block in enumerate(completed):
            assert last[block] == min(each for each in last.values() if each >= step)


def test_blocks_of_different_documents_are_skipped() -> None:
    segments = jnp.repeat(jnp.asarray([[0, 0, 1, 2]]), 128, axis=1)
    function = splash_kernels.ScoreFunction(True, 0, 1.0)
    sizes = splash_kernels.BlockSizes(128, 128, 128)
    first = np.arange(0, 512, 128)
    pairs, count = splash_kernels.list_pairs(
        function, sizes, first, segments, segments, by_key=False
    )
    skipped = np.asarray(pairs.flags) & splash_kernels._SKIPPED != 0
    assert count == 10
    used = {
        (int(i), int(j)) for i, j in zip(pairs.query[~skipped], pairs.key[~skipped], strict=True)
    }
    assert used == {(0, 0), (1, 0), (1, 1), (2, 2), (3, 3)}


@pytest.mark.parametrize(
    ("tokens", "size", "window", "block"),
    [
        *((128, 64, 0, 128), (2048, 128, 0, 1024), (8192, 128, 0, 1024), (8192, 256, 0, 512)),
        *((1920, 128, 0, 640), (8192, 128, 512, 512), (8192, 128, 513, 1024)),
    ],
)
def test_block_size_divides_sequence_length(
    tokens: int, size: int, window: int, block: int
) -> None:
    assert splash.attention_block_size(tokens, size, window) == block
    assert tokens % block == 0 and block % splash.LANES == 0


def test_kernels_report_flops_of_computed_blocks() -> None:
    """A causal square of 2048 has 3 of 4 blocks of 1024, but only 10 of 16 parts of each block on
    the diagonal are computed. With a window of 512, the square has 7 of 16 blocks of 512.
    """
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)

    def run(query: Any, window: Any) -> Any:
        mask = Mask(jnp.zeros((1, 2048), int), window=window, windows=(0, 512))
        return splash.attend(query, query, query, mask)

    def names(function: Any, *arguments: Any) -> set[str]:
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        text = lowered.as_text(debug_info=True)
        return set(re.findall(r"(?:window_\d+/)?flops_\d+", text))

    pairs = 2 * 2048**2
    forward = {f"window_{w}/flops_{4 * 64 * pairs * n // 16}" for w, n in ((0, 9), (512, 7))}
    number = jax.ShapeDtypeStruct((), jnp.int32)
    assert names(run, shape, number) >= forward
    gradient = jax.grad(lambda q, w: run(q, w).astype(jnp.float32).sum())
    found = names(gradient, shape, number)
    # One kernel with five matmuls.
    assert found >= {f"window_0/flops_{10 * 64 * pairs * 9 // 16}"}


# The code around the kernels.


def stand_in(query: Any, key: Any, value: Any, sinks: Any, seen: Any, *, call: Any) -> Any:
    """Compute the kernel's results in plain JAX."""
    scores, value = scored(query, key, value, seen, call)
    sums = jax.nn.logsumexp(scores, -1)
    sums = sums if sinks is None else jnp.logaddexp(sums, sinks[:, None])
    return jnp.einsum("bnts,bsnv->btnv", jnp.exp(scores - sums[..., None]), value), sums


def stand_in_gradients(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    seen: Any,
    mixed: Any,
    sums: Any,
    d: Any,
    *,
    call: Any,
) -> Any:
    """Compute gradients from saved residuals, as the kernels do."""
    del sinks
    scores, wide = scored(query, key, value, seen, call)
    shares = jnp.exp(scores - sums[..., None])
    d_scores = jnp.einsum("btnv,bsnv->bnts", d, wide)
    d_scores -= jnp.einsum("btnv,btnv->bnt", mixed, d)[..., None]
    d_scores *= shares * call.scale
    times = query.shape[2] // key.shape[2]
    d_query = jnp.einsum("bnts,bsnh->btnh", d_scores, jnp.repeat(key, times, 2))
    d_key = jnp.einsum("bnts,btnh->bsnh", d_scores, query)
    d_value = jnp.einsum("bnts,btnv->bsnv", shares, d)
    return d_query, summed(d_key, key), summed(d_value, value)


def summed(x: Any, like: Any) -> Any:
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3)


def scored(query: Any, key: Any, value: Any, seen: Any, call: Any) -> Any:
    times = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, times, 2), jnp.repeat(value, times, 2)
    scores = call.scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    window = call.windows[0] if seen.window is None else seen.window
    mask = Mask(seen.segments, key_segments=seen.key_segments, window=window)
    pairs = mask.seen(0, query.shape[1], key.shape[1], causal=call.causal)
    return jnp.where(pairs, scores, -1e30), value


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels, which cannot run in interpret mode inside the pipeline."""
    monkeypatch.setattr(splash, "local_forward", stand_in)
    monkeypatch.setattr(splash, "local_backward", stand_in_gradients)
    monkeypatch.setattr(splash, "LANES", 1)


ENGINE = [
    Case(2, 1, 3, schedule="zb_h1", fsdp=2, tensor=2, remat="names", layers=3),
    Case(2, 2, 3, schedule="zb_v", fsdp=2, remat="none", idle="compute"),
    Case(2, 2, 2, tensor=2, data=2),
]


@pytest.mark.parametrize("case", keeping(ENGINE, 1), ids=str)
@pytest.mark.usefixtures("stand_ins", "devices")
def test_engine_gradients_equal_xla_attention(case: Case) -> None:
    with_splash = dataclasses.replace(case, attention="splash")
    check_gradients(with_splash, attention="xla")
    held, held_too = (buffer_bytes(steps_of(each, each.rows)) for each in (case, with_splash))
    assert held_too.get("deferred") == held.get("deferred")
    if case.remat == "names":
        # The attention output is saved once, and a log-sum for each head and query.
        sums = case.tokens * (8 // case.tensor) * 4
        slots = held_too["stash"] - held["stash"]
        assert slots and slots % sums == 0
        assert slots < held["stash"] / 8


@pytest.mark.usefixtures("stand_ins", "devices")
@pytest.mark.parametrize(("names", "kernels_in_backward"), [((), 2), (("context", LOG_SUM), 1)])
def test_saved_context_avoids_kernel_recomputation(
    names: tuple[str, ...], kernels_in_backward: int
) -> None:
    mesh = build_mesh(MeshConfig(ici_stage=2, ici_tensor=2), jax.devices()[:4])
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    found: list[int] = []

    def program(x: Any) -> Any:
        def layer(x: Any) -> Any:
            mask = Mask(jnp.zeros((1, 8), int) + 0 * x[..., 0, 0].astype(int))
            return splash.attend(x, x[:, :, :2], x[:, :, 2:], mask)

        out, pull = jax.vjp(jax.checkpoint(layer, policy=policy, prevent_cse=False), x)
        found.append(str(jax.make_jaxpr(pull)(out)).count("shard_map["))
        return x

    spec = PartitionSpec(("stage", "data", "fsdp"))
    run = jax.shard_map(
        program, mesh=mesh, axis_names=set(MANUAL_AXES), in_specs=spec, out_specs=spec
    )
    with jax.set_mesh(mesh):
        jax.eval_shape(run, jnp.ones((2, 8, 4, 6)))
    assert found == [kernels_in_backward]


@pytest.mark.usefixtures("stand_ins", "devices")
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (6, 3), (3, 3), (4, 2)])
def test_heads_not_divisible_by_shards(heads: int, groups: int) -> None:
    """The program is partitioned automatically: the batch is sharded over the batch axes."""
    mesh = build_mesh(MeshConfig(ici_fsdp=2, ici_tensor=2), jax.devices()[:4])
    draw = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (
        jax.random.normal(each, (2, 8, count, 5))
        for each, count in zip(draw, (heads, groups, groups, heads), strict=True)
    )
    segments, sinks = jnp.asarray(row(8)), jnp.linspace(-1.0, 1.0, heads)

    def run(attend: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            mask = Mask(segments, window=3, sinks=arrays[3])
            return (attend(*arrays[:3], mask) * weight).sum()

        with jax.set_mesh(mesh):
            given = (query, key, value, sinks)
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*given)

    wanted, got = run(xla.attend), run(splash.attend)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE * np.abs(right).max())


def test_caches_and_partial_blocks_fall_back_to_xla() -> None:
    """The kernels would raise an error on this platform."""
    x = jax.random.normal(jax.random.key(0), (2, 100, 2, 4))
    mask = Mask(jnp.zeros((2, 100), int))
    assert (splash.attend(x, x, x, mask) == xla.attend(x, x, x, mask)).all()
    x, places = x[:, :1], jnp.zeros((2, 1), int)
    mask = Mask(places, positions=places, key_segments=places, key_positions=places)
    assert (splash.attend(x, x, x, mask) == xla.attend(x, x, x, mask)).all()


def test_scope_names_are_parsed() -> None:
    assert scopes.parse_flops(f"jit(f)/jvp({scopes.flops(12.4)})/pallas_call") == 12
    both = scopes.flops(4, 10)
    again = f"transpose(jvp())/rematted_computation/jvp({both})/kernel"
    assert (scopes.parse_flops(again), scopes.parse_flops(f"a/transpose(jvp({both}))/b")) == (4, 10)
    assert scopes.parse_trips(f"transpose(jvp({scopes.trips(2.5)}))/while") == 2.5
    assert scopes.parse_flops("jit(f)/flops/mul") is None
    assert scopes.parse_trips(f"{scopes.trips(2.5)}/body/while") is None
