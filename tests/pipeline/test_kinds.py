"""Heterogeneous layers and their losses and statistics, against automatic differentiation.

The toy network has up to three layer types with different parameters and shapes, layer losses and
per-layer statistics.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import FSDP, STAGE, TENSOR, build_mesh
from maxpipe.parallel.sharding import BATCH_SPEC
from maxpipe.pipeline import program, prologue, slots
from maxpipe.pipeline.engine import Engine
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.network import Network
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import balance_layers
from tests.cases import TOLERANCE, keeping
from tests.times import shared

D, V, T = 6, 12, 5
WEIGHTS = {"size": 0.7, "spread": 0.3}
SHAPES = {
    "wide": {"into": (D, 10), "out": (10, D)},
    "narrow": {"into": (D, 4), "gain": (4,), "out": (4, D)},
    "plain": {"shift": (D,)},
}
LETTERS = {"w": "wide", "n": "narrow", "p": "plain"}


def wide(params: Any, x: Any, inputs: Any, index: Any, key: Any) -> Any:
    """Return a loss over the target tokens, and a count of large hidden activations."""
    hidden = checkpoint_name(jnp.tanh(x @ params["into"]), "gate")
    if key is not None:
        keys = jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, index), n))(
            inputs["example_ids"]
        )
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.7, hidden.shape[1:]))(keys)
        hidden = jnp.where(keep, hidden, 0)
    mask = inputs["loss_mask"]
    size = (jnp.square(hidden).mean(-1) * mask).sum()
    # NaN if uninitialized data of an idle slot or a missing sequence reaches this layer.
    size = jnp.where(jnp.isfinite(x).all(), size, jnp.nan)
    large = (hidden > 0.2).astype(jnp.float32).sum((0, 1))
    return x + hidden @ params["out"], {"size": size}, {"large": large}


def narrow(params: Any, x: Any, inputs: Any, index: Any, key: Any) -> Any:
    """Return two losses; a per-layer constant is read by the layer index."""
    pace = jnp.linspace(0.5, 1.5, 16)[index]
    hidden = checkpoint_name(jnp.sin(pace * (x @ params["into"])) * params["gain"], "gate")
    mask = inputs["loss_mask"]
    losses = {
        "size": (jnp.abs(hidden).mean(-1) * mask).sum(),
        "spread": (jnp.square(x).mean(-1) * mask).sum(),
    }
    statistics = {"tokens": mask.sum(), "square": jnp.square(hidden).sum((0, 1))}
    return x + hidden @ params["out"], losses, statistics


def plain(params: Any, x: Any, inputs: Any, index: Any, key: Any) -> Any:
    """Return no losses or statistics; read the token positions."""
    return x + params["shift"] * jnp.cos(0.3 * inputs["positions"])[..., None], {}, {}


LAYERS = {"wide": wide, "narrow": narrow, "plain": plain}


@dataclass(frozen=True)
class Case:
    """One configuration of a layer pattern, with one letter per layer."""

    pattern: str
    stages: int = 1
    repeats: int = 1
    microbatches: int = 1
    schedule: str = "interleaved"
    gather: str = "iteration"
    remat: str = "full"
    idle: str = "skip"
    outside: int = 0
    fsdp: int = 1
    data: int = 1
    tensor: int = 1
    dropout: bool = False
    cut: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    """Frozen parameters: a layer type, `type.name`, or a parameter outside the layers."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(LETTERS[letter] for letter in self.pattern)

    @property
    def rows(self) -> int:
        return 3 * self.microbatches * self.fsdp * self.data

    def trains(self, path: Any) -> bool:
        """Return True if the parameter at this tree path is trained."""
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = name.removeprefix("layers.").removeprefix("outside.")
        return not any(name == each or name.startswith(f"{each}.") for each in self.frozen)

    def __str__(self) -> str:
        shown = [self.pattern, f"{self.schedule}-P{self.stages}R{self.repeats}M{self.microbatches}"]
        named = ("pattern", "stages", "repeats", "microbatches", "schedule")
        for field in fields(self):
            if field.name not in named and getattr(self, field.name) != field.default:
                shown.append(f"{field.name}{getattr(self, field.name)}")
        return "-".join(shown)


def norm(params: Any, x: Any) -> Any:
    return x * params["scale"]


@shared
def parameters(kinds: tuple[str, ...]) -> Any:
    random = np.random.default_rng(3)
    draw = lambda *shape: (0.5 * random.standard_normal(shape)).astype(np.float32)  # noqa: E731
    return {
        "embedding": draw(V, D),
        "head": draw(D, V),
        "final_norm": {"scale": 1 + draw(D)},
        "layers": {
            kind: {name: draw(kinds.count(kind), *shape) for name, shape in SHAPES[kind].items()}
            for kind in dict.fromkeys(kinds)
        },
    }


def objective(case: Case, params: Any, batch: Any, key: Any) -> Any:
    """Return (total, (cross entropy, losses, statistics)) over the batch, without a pipeline."""
    x = params["embedding"][batch["tokens"]]
    losses, found, seen = dict.fromkeys(WEIGHTS, 0.0), {}, dict.fromkeys(case.kinds, 0)
    for index, kind in enumerate(case.kinds):
        mine = jax.tree.map(lambda leaf, n=seen[kind]: leaf[n], params["layers"][kind])
        seen[kind] += 1
        x, more, statistics = LAYERS[kind](mine, x, batch, jnp.int32(index), key)
        losses = losses | {name: losses[name] + loss for name, loss in more.items()}
        found.setdefault(kind, []).append(statistics)
    scores = jax.nn.log_softmax(norm(params["final_norm"], x) @ params["head"])
    picked = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    loss = -(picked * batch["loss_mask"]).sum()
    total = loss + sum(WEIGHTS[name] * value for name, value in losses.items())
    return total, (loss, losses, found)


def batch_of(rows: int) -> Any:
    random = np.random.default_rng(5)
    ids = random.integers(0, V, (rows, T + 1), np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "positions": np.tile(np.arange(T, dtype=np.int32), (rows, 1)),
        "loss_mask": (random.random((rows, T)) < 0.8).astype(np.float32),
        "example_ids": np.arange(rows, dtype=np.int32),
    }


def engine_of(case: Case) -> tuple[Engine, Any]:
    schedule = make_schedule(
        case.schedule,
        stages=case.stages,
        repeats=case.repeats,
        microbatches=case.microbatches,
    )
    cut = case.cut or balance_layers(
        [1.0] * (len(case.pattern) - case.outside), schedule.ring.num_chunks
    )
    layout = LayerLayout(schedule.ring, cut, case.outside, case.kinds)
    size = case.stages * case.fsdp * case.data * case.tensor
    mesh = MeshConfig(
        ici_stage=case.stages, ici_fsdp=case.fsdp, ici_data=case.data, ici_tensor=case.tensor
    )
    of_layer = {
        "into": (FSDP, TENSOR),
        "out": (TENSOR, FSDP),
        "gain": (TENSOR,),
        "shift": (None,),
    }

    def specs(kinds: tuple[str, ...], *stacked: Any) -> Any:
        return {
            kind: {name: PartitionSpec(*stacked, *of_layer[name]) for name in SHAPES[kind]}
            for kind in kinds
        }

    all_specs = {
        "embedding": PartitionSpec((STAGE, TENSOR), FSDP),
        "head": PartitionSpec(FSDP, (STAGE, TENSOR)),
        "final_norm": {"scale": PartitionSpec()},
        "layers": specs(layout.ring_layer_types, None, STAGE, None),
    }
    if case.outside:
        all_specs["outside"] = specs(layout.prologue_layer_types, None)
    network = Network(LAYERS, norm, V, jnp.dtype("float32"), WEIGHTS)
    keep = RematPolicy(case.remat, ("gate",))  # type: ignore[arg-type]
    trainable = jax.tree_util.tree_map_with_path(
        lambda path, _: case.trains(path),
        all_specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    engine = Engine(
        network,
        layout,
        build_mesh(mesh, jax.devices()[:size]),
        all_specs,
        weight_gather=case.gather,  # type: ignore[arg-type]
        remat_policy=keep,
        idle=case.idle,  # type: ignore[arg-type]
        trainable=trainable,
    )
    return engine, schedule


def check(case: Case) -> None:
    """Compare loss, layer losses, statistics and every gradient leaf with the unpipelined model."""
    engine, schedule = engine_of(case)
    layout, mesh = engine.layout, engine.mesh
    key = jax.random.key(7) if case.dropout else None
    batch, params = batch_of(case.rows), parameters(case.kinds)
    run = jax.jit(jax.grad(functools.partial(objective, case), has_aux=True))
    wanted, (loss, losses, statistics) = run(params, batch, key)
    count = batch["loss_mask"].sum()

    def whole(params: Any, batch: Any) -> Any:
        layers, outside = layout.stack(params["layers"])
        stacked = params | {"layers": layers} | ({"outside": outside} if outside else {})
        found = engine.value_and_grad(schedule)(stacked, batch, key)
        gradients = dict(found.gradients)
        back = layout.unstack(gradients.pop("layers", {}), gradients.pop("outside", {}))
        statistics = found.statistics
        reported = layout.unstack(statistics["layers"], statistics.get("outside", {}))
        gradients |= {"layers": back} if back else {}
        return found.loss, found.losses, gradients, reported

    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))
        got = jax.jit(whole)(params, placed)
    np.testing.assert_allclose(got[0], loss / count, rtol=TOLERANCE)
    assert got[1].keys() == {name for name in WEIGHTS if float(losses[name])}
    for name, loss in got[1].items():
        np.testing.assert_allclose(loss, losses[name] / count, rtol=TOLERANCE)
    wanted = [pair for pair in jax.tree_util.tree_leaves_with_path(wanted) if case.trains(pair[0])]
    found = jax.tree_util.tree_leaves_with_path(got[2])
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(wanted, found, strict=True):
        error = np.abs(a / count - b).max() / np.abs(a / count).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"
    for kind, layers in statistics.items():
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
        assert got[3].get(kind, {}).keys() == stacked.keys()
        for name, values in stacked.items():
            np.testing.assert_allclose(got[3][kind][name], values, rtol=TOLERANCE)


CASES = [
    Case("wn"),
    Case("wnwwp", 1, 2, 3, data=2),
    Case("wwnnw", 2, 1, 3, schedule="1f1b", fsdp=2),
    Case("wnwnwn", 2, 1, 4, idle="compute", tensor=2, dropout=True),
    Case("nwwwwnw", 2, 2, 5, fsdp=2, remat="chunk"),
    Case("pwnwpnwnw", 3, 2, 6, fsdp=2, gather="window", remat="names"),
    Case("wwnwwnwwn", 3, 3, 4, idle="compute", gather="step", data=2),
    Case("wnnwnwwn", 2, 3, 5, gather="window", idle="compute", fsdp=2, tensor=2),
    Case("wnnwnwpn", 4, 2, 8, schedule="zb_v", fsdp=2, remat="none"),
    Case("npwnnwp", 2, 1, 5, schedule="zb_h1", remat="names", tensor=2, idle="compute"),
    Case("wwwnnnpp", 4, 1, 9, schedule="gpipe", fsdp=2, cut=(1, 3, 2, 2)),
    Case("wnwnwnwn", 4, 2, 8, schedule="circular", remat="chunk", idle="compute"),
    # Prologue layers of types that the ring has too, and of one type that it does not have.
    Case("pwnwn", 2, 1, 5, outside=1, fsdp=2),
    Case("wpnwnnwn", 2, 2, 5, outside=2, schedule="v_half", remat="none", dropout=True),
    Case("wwnnnnn", 4, 1, 7, outside=2, schedule="1f1b", gather="step", data=2),
    Case("nwpnwnnwn", 3, 2, 7, outside=3, gather="window", remat="chunk", fsdp=2),
]


@pytest.mark.layouts
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heterogeneous_layers_match_unpipelined_model(case: Case) -> None:
    check(case)


def buffers(case: Case) -> dict[str, int]:
    """Return the bytes of each buffer that the loop over ticks carries, by name."""
    engine, schedule = engine_of(case)
    params = parameters(case.kinds)
    layers, _ = engine.layout.stack(params["layers"])
    shapes = engine.buffer_shapes(schedule, params | {"layers": layers}, batch_of(case.rows))
    sizes = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)  # noqa: E731
    return {name: sizes(leaves) for name, leaves in shapes.items()}


def test_buffer_bytes_are_sum_over_layer_types() -> None:
    one = Case("", 2, 1, 4, remat="none", schedule="zb_h1")
    both, wides, plains = (
        buffers(replace(one, pattern=pattern)) for pattern in ("wwpwwp", "wwww", "pp")
    )
    for name in ("stash", "deferred"):
        assert both[name] == wides[name] + plains[name] > wides[name] > 0
    ends = buffers(replace(one, pattern="pppp"))["gradients"] - plains["gradients"]
    assert both["gradients"] == wides["gradients"] + ends


def test_auxiliary_losses_do_not_depend_on_microbatch_count() -> None:
    values = []
    for count in (1, 2, 6):
        case = Case("wnwn", 2, 1, count)
        engine, schedule = engine_of(case)
        layers, _ = engine.layout.stack(parameters(case.kinds)["layers"])
        stacked = parameters(case.kinds) | {"layers": layers}
        with jax.set_mesh(engine.mesh):
            run = jax.jit(engine.value_and_grad(schedule))
            batch = jax.device_put(batch_of(18), NamedSharding(engine.mesh, BATCH_SPEC))
            found = run(stacked, batch, None)
        values.append([float(found.losses[name]) for name in WEIGHTS])
    np.testing.assert_allclose(values[1:], values[:1] * 2, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    keeping(
        [
            Case("wnnwnw", 3, 1, 4, idle="compute", data=2),
            Case(
                "nwpwnnwn",
                2,
                2,
                5,
                outside=2,
                schedule="zb_v",
                remat="names",
                idle="compute",
                tensor=2,
            ),
        ],
        1,
    ),
    ids=str,
)
def test_idle_slots_do_not_affect_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are filled with NaN before their first write."""

    def nan_slots(count: int, like: Any) -> Any:
        empty = slots.empty_slots(count, like)
        return jnp.full_like(empty, jnp.nan) if jnp.issubdtype(empty.dtype, jnp.floating) else empty

    for module in (program, prologue):
        monkeypatch.setattr(module, "empty_slots", nan_slots)
    check(case)
