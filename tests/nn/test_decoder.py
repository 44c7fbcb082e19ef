"""The whole decoder: parameters, logits, dropout and multi-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.registry import describe
from maxpipe.models.spec import LayerType, Model
from maxpipe.nn import block, mlp
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.module import LayerContext, Output
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
RULES = AxisRules.from_config(MeshConfig())
KEY = jax.random.key(7)
SMALL = ModelConfig(
    num_layers=3,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    d_mlp=24,
    vocab_size=37,
    compute_dtype="float32",
)


def decoder_with(**changes: Any) -> Decoder:
    return Decoder(dataclasses.replace(SMALL, **changes), RULES)


def assert_close(got: Any, wanted: Any) -> None:
    """Compare within a float32 tolerance of 1e-5 of the largest value."""
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def leaves(tree: Any) -> dict[str, Any]:
    """Return leaves by dotted name; a tuple of logical axes is a leaf."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def numpy_leaves(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in leaves(tree).items()}


def make_batch(rows: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """Return a batch with documents of 3 and 5 tokens in every sequence."""
    cut = np.arange(length) >= 3
    generator = np.random.default_rng(seed)
    batch = {
        "tokens": generator.integers(0, SMALL.vocab_size, (rows, length)),
        "targets": generator.integers(0, SMALL.vocab_size, (rows, length)),
        "loss_mask": np.ones((rows, length), np.int32),
        "segment_ids": np.tile(1 + cut, (rows, 1)),
        "positions": np.tile(np.arange(length) - 3 * cut, (rows, 1)),
        "example_ids": 100 + np.arange(rows),
    }
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()}


@pytest.fixture(scope="module")
def deep() -> dict[str, Any]:
    """Parameters of five layers."""
    return jax.device_get(jax.jit(decoder_with(num_layers=5).init)(KEY))


@pytest.fixture(scope="module")
def params(deep: dict[str, Any]) -> dict[str, Any]:
    """Parameters of three layers."""
    return jax.tree.map(
        jnp.asarray, deep | {"layers": jax.tree.map(lambda leaf: leaf[:3], deep["layers"])}
    )


# Parameters.


def test_tiny_model_parameter_tree_equals_golden(golden: Callable[[str, str], None]) -> None:
    config = load([str(CONFIGS / "tiny.yml"), "train.steps=1"]).config.model
    decoder = Decoder(config, RULES)
    shapes = leaves(jax.eval_shape(decoder.init, jax.random.key(0)))
    axes = leaves(decoder.axes())
    assert set(shapes) == set(axes)
    lines = []
    for name, leaf in sorted(shapes.items()):
        logical = ("layer", *axes[name]) if name.startswith("layers.") else axes[name]
        dims = " ".join(f"{a}={n}" for a, n in zip(logical, leaf.shape, strict=True))
        lines.append(f"{name:32} {leaf.dtype!s:8} {dims}")
    golden("params-tiny.txt", "\n".join(lines) + "\n")


def test_tied_embeddings_have_no_head() -> None:
    tied = decoder_with(tied_embeddings=True)
    shapes = jax.eval_shape(tied.init, jax.random.key(0))
    assert "head" not in shapes and "head" not in tied.axes()
    assert {"head"} == set(decoder_with().axes()) - set(tied.axes())


def test_parameters_have_configured_dtype() -> None:
    shapes = jax.eval_shape(decoder_with(param_dtype="bfloat16").init, jax.random.key(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"bfloat16"}


def test_initial_layer_weights_depend_only_on_layer_index(deep: dict[str, Any]) -> None:
    # Not on the depth of the model, nor on the layers initialized with it.
    picked = [2, 0, 2]
    decoder = decoder_with(num_layers=3)
    drawn = jax.jit(lambda layers: decoder.init_layers("layer", KEY, layers))(jnp.array(picked))
    whole = numpy_leaves(deep["layers"]["layer"])
    assert set(numpy_leaves(drawn)) == set(whole)
    for name, leaf in numpy_leaves(drawn).items():
        if name in ("attention.out", "mlp.down"):
            # Residual projections are scaled by depth; the random numbers are equal.
            np.testing.assert_allclose(leaf * (3 / 5) ** 0.5, whole[name][picked], rtol=1e-6)
        else:
            np.testing.assert_array_equal(leaf, whole[name][picked])


def test_initial_parameters_are_uncorrelated(deep: dict[str, Any]) -> None:
    rows = []
    for name, leaf in numpy_leaves(deep).items():
        if not name.endswith("scale"):
            parts = leaf if name.startswith("layers.") else leaf[None]
            # Standard deviations differ between matrices: compare signs.
            rows += [np.sign(part.ravel()[:200]) for part in parts]
    assert len(rows) == 2 + 5 * 7
    for i, one in enumerate(rows):
        for two in rows[:i]:
            same = (one[: len(two)] == two[: len(one)]).mean()
            assert 0.2 < same < 0.8


# Logits.


def test_tied_embeddings_equal_untied_with_shared_table(params: dict[str, Any]) -> None:
    tied, untied = decoder_with(tied_embeddings=True), decoder_with()
    batch = make_batch()
    shared = {name: leaf for name, leaf in params.items() if name != "head"}
    apart = shared | {"head": params["embedding"].T}

    def run(decoder: Decoder, params: Any) -> Any:
        return decoder.apply(params, batch), jax.grad(decoder.loss)(params, batch)

    (logits, gradient), (wanted, both) = (
        jax.jit(run, static_argnums=0)(*each) for each in ((tied, shared), (untied, apart))
    )
    assert_close(logits, wanted)
    # Both uses contribute to the gradient of the shared table.
    assert_close(gradient["embedding"], both["embedding"] + both["head"].T)


def test_logits_are_float32_for_any_compute_dtype(params: dict[str, Any]) -> None:
    batch = make_batch()
    exact = jax.jit(decoder_with().apply)(params, batch)
    rough = jax.jit(decoder_with(compute_dtype="bfloat16").apply)(params, batch)
    assert exact.dtype == rough.dtype == jnp.float32
    assert exact.shape == (2, 8, SMALL.vocab_size)
    # bfloat16 keeps 8 bits; three layers may add up a few roundings.
    scale = float(jnp.abs(exact).max())
    assert 0 < float(jnp.abs(exact - rough).max()) < 8 * 2**-8 * scale


def other_tokens(batch: dict[str, Any], where: slice) -> np.ndarray:
    tokens = np.array(batch["tokens"])
    tokens[:, where] = (tokens[:, where] + 1) % SMALL.vocab_size
    return tokens


def test_packed_documents_do_not_attend_to_each_other(params: dict[str, Any]) -> None:
    apply = jax.jit(decoder_with().apply)
    batch = make_batch()
    before = np.asarray(apply(params, batch))
    after = np.asarray(apply(params, batch | {"tokens": other_tokens(batch, slice(0, 3))}))
    np.testing.assert_array_equal(after[:, 3:], before[:, 3:])
    assert (after[:, :3] != before[:, :3]).any(axis=-1).all()
    after = np.asarray(apply(params, batch | {"tokens": other_tokens(batch, slice(6, 7))}))
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert (after[:, 6:] != before[:, 6:]).any(axis=-1).all()


def test_packed_document_equals_unpacked_document(params: dict[str, Any]) -> None:
    apply = jax.jit(decoder_with().apply)
    batch = make_batch()
    packed = apply(params, batch)
    names = ("tokens", "segment_ids", "positions", "example_ids")
    for part in (slice(0, 3), slice(3, 8)):
        alone = {n: batch[n][:, part] if batch[n].ndim == 2 else batch[n] for n in names}
        assert_close(packed[:, part], apply(params, alone))


def test_loss_is_mean_over_unmasked_targets(params: dict[str, Any]) -> None:
    decoder, batch = decoder_with(), make_batch()
    batch["loss_mask"] = np.random.default_rng(3).integers(0, 2, (2, 8))
    both = jax.jit(lambda batch: (decoder.apply(params, batch), decoder.loss(params, batch)))
    logits, loss = both(batch)
    logits = np.asarray(logits, np.float64)
    total, count = 0.0, 0
    for b, t in np.argwhere(batch["loss_mask"]):
        row = logits[b, t]
        total += np.log(np.exp(row).sum()) - row[int(batch["targets"][b, t])]
        count += 1
    assert 0 < count < 16
    assert_close(loss, total / count)
    assert both(batch | {"loss_mask": np.zeros_like(batch["loss_mask"])})[1] == 0


# Dropout in the model.


@cache
def jitted_layer(rate: float) -> Callable[..., jax.Array]:
    layer = decoder_with(dropout=rate).layer("layer")
    return jax.jit(lambda *given: layer(*given)[0])


def layer_output(
    params: dict[str, Any], index: int, key: jax.Array | None, rows: slice, rate: float = 0.5
) -> np.ndarray:
    batch = {name: leaf[rows] for name, leaf in make_batch(rows=4).items()}
    x = np.random.default_rng(9).normal(size=(4, 8, SMALL.d_model)).astype(np.float32)[rows]
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"]["layer"])
    return np.asarray(jitted_layer(rate)(first, x, batch, jnp.asarray(index), key))


EVERY = slice(0, 4)


def test_dropout_does_not_depend_on_batch_split(params: dict[str, Any]) -> None:
    key = jax.random.key(1)
    whole = layer_output(params, 0, key, EVERY)
    np.testing.assert_array_equal(layer_output(params, 0, key, EVERY), whole)
    for cut in (slice(0, 1), slice(1, 4)):
        assert_close(layer_output(params, 0, key, cut), whole[cut])


def test_dropout_depends_on_key_layer_and_example(params: dict[str, Any]) -> None:
    key = jax.random.key(1)
    whole = layer_output(params, 0, key, EVERY)
    for other in (
        layer_output(params, 1, key, EVERY),
        layer_output(params, 0, jax.random.key(2), EVERY),
        layer_output(params, 0, None, EVERY),
    ):
        assert (np.abs(other - whole).max(axis=(1, 2)) > 1e-2).all()
    # Equal inputs get different masks if their example IDs differ.
    batch = {name: np.repeat(leaf[:1], 2, 0) for name, leaf in make_batch().items()}
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"]["layer"])
    x = np.ones((2, 8, SMALL.d_model), np.float32)
    for ids, equal in (([3, 3], True), ([3, 4], False)):
        batch["example_ids"] = np.array(ids)
        out = np.asarray(jitted_layer(0.5)(first, x, batch, jnp.asarray(0), key))
        assert bool((out[0] == out[1]).all()) is equal


def test_dropout_is_disabled_without_key_or_rate(params: dict[str, Any]) -> None:
    plain = layer_output(params, 0, None, EVERY)
    np.testing.assert_array_equal(layer_output(params, 0, jax.random.key(1), EVERY, 0.0), plain)
    decoder, batch = decoder_with(dropout=0.5), make_batch()
    apply = jax.jit(decoder.apply)
    assert_close(apply(params, batch), jax.jit(decoder_with().apply)(params, batch))
    dropped = apply(params, batch, jax.random.key(0))
    assert float(jnp.abs(dropped - apply(params, batch)).max()) > 1e-2


# Layers of different types.


@dataclasses.dataclass(frozen=True)
class _Counting(MLP):
    """An MLP that also returns a loss and a statistic."""

    @property
    def losses(self) -> dict[str, float]:
        return {"size": 0.25}


class _CountingModule(mlp.MLP):
    def __call__(self, x: jax.Array, context: LayerContext) -> Output:
        found = super().__call__(x, context)
        counted = context.inputs["loss_mask"].astype(jnp.float32)[..., None]
        loss = (jnp.square(found.x) * counted).sum()
        return found._replace(losses={"size": loss}, statistics={"sum": found.x.sum((0, 1))})


def test_layer_types_run_in_network_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with layers run one by one; losses are summed, statistics are kept per layer."""
    table = {**block._MODULES, _Counting: _CountingModule}
    monkeypatch.setattr(block, "_MODULES", table)
    decoder, plain = decoder_with(num_layers=5), describe(SMALL)
    first, second = plain.layer_types["layer"].branches
    counting = LayerType((first, dataclasses.replace(second, part=_Counting(16, 20, 0.5))))
    kinds = {"wide": plain.layer_types["layer"], "counting": counting}
    layers = ("wide", "counting", "counting", "wide", "counting")
    ends = dataclasses.replace(plain.ends, embed_scale=3.0, final_logit_softcapping=0.7)
    decoder.__dict__["model"] = Model(kinds, layers, ends)
    params, batch = jax.jit(decoder.init)(KEY), make_batch()
    batch["loss_mask"] = jnp.asarray(np.random.default_rng(3).integers(0, 2, (2, 8)))
    sizes = {kind: leaf["mlp"]["gate"].shape for kind, leaf in params["layers"].items()}
    assert sizes == {"wide": (2, 16, 24), "counting": (3, 16, 20)}

    x = 3.0 * params["embedding"][batch["tokens"]]
    places, losses, sums = dict.fromkeys(kinds, 0), 0.0, []
    runs = {kind: jax.jit(decoder.layer(kind)) for kind in kinds}
    for number, kind in enumerate(layers):
        place, places[kind] = places[kind], places[kind] + 1
        one = jax.tree.map(lambda leaf, at=place: leaf[at], params["layers"][kind])
        x, lost, counted = runs[kind](one, x, batch, jnp.asarray(number), None)
        assert set(lost) == ({"size"} if kind == "counting" else set())
        losses += lost.get("size", 0.0)
        sums += [counted["sum"]] if counted else []
    normed = decoder.norm(params["final_norm"], x)
    logits = 0.7 * np.tanh(np.asarray(normed @ params["head"]) / 0.7)
    total = lambda x: jnp.sum(jnp.asarray(decoder.run(x, batch).statistics["counting"]["sum"]))  # noqa: E731
    every = lambda *given: [f(*given) for f in (decoder.run, decoder.loss, decoder.objective)]  # noqa: E731
    (found, loss, objective), gradient = jax.jit(
        lambda params: (every(params, batch), jax.grad(total)(params))
    )(params)
    assert_close(found.logits, logits)
    assert_close(found.losses["size"], losses)
    assert_close(found.statistics["counting"]["sum"], np.stack(sums))
    mask, targets = batch["loss_mask"], batch["targets"]
    log_shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_shares, targets[..., None], -1)[..., 0]
    cross_entropy = (nats * mask).sum() / mask.sum()
    assert_close(loss, cross_entropy)
    assert_close(objective, cross_entropy + 0.25 * losses / mask.sum())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_mtp_head_losses_equal_formula() -> None:
    """Compare with loops over tokens, with several documents and masked targets."""
    plain, decoder = decoder_with(), decoder_with(mtp_heads=2, mtp_loss_weight=0.6)
    params, batch = jax.jit(decoder.init)(KEY), make_batch()
    assert not np.asarray(params["ahead"]["transform"]).any()
    without = jax.jit(plain.init)(KEY)
    rest = {name: leaf for name, leaf in params.items() if name != "ahead"}
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), rest, without)))

    generator = np.random.default_rng(3)
    params["ahead"]["transform"] = jnp.asarray(generator.normal(0, 0.25, (2, 16, 16)), jnp.float32)
    batch["loss_mask"] = jnp.asarray(generator.integers(0, 2, (2, 8)))
    every = lambda *given: [f(*given) for f in (decoder.run, decoder.loss, decoder.objective)]  # noqa: E731
    found, loss, objective = jax.jit(every)(params, batch)
    assert_close(found.logits, jax.jit(plain.apply)(without, batch))
    # Recover the hidden states from the logits: the vocabulary is larger than the width.
    head = np.asarray(params["head"], np.float64)
    hidden = np.asarray(found.logits, np.float64) @ np.linalg.pinv(head)
    ids, mask, targets = (np.asarray(batch[n]) for n in ("segment_ids", "loss_mask", "targets"))
    losses = {}
    for number, transform in enumerate(np.asarray(params["ahead"]["transform"], np.float64)):
        bent = hidden @ transform
        logits = (hidden + bent / (1 + np.exp(-bent))) @ head
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses[f"ahead_{number + 1}"] = -sum(
            logs[row, place, targets[row, later]]
            for row in range(2)
            for place in range(8)
            if (later := place + number + 1) < 8
            and mask[row, later]
            and ids[row, later] == ids[row, place]
        )
    assert found.losses.keys() == losses.keys()
    for name, wanted in losses.items():
        assert_close(found.losses[name], wanted)
    mean = sum(losses.values()) / 2
    assert_close(objective, loss + 0.6 * mean / mask.sum())


def test_mtp_layers_are_initialized_independently() -> None:
    decoders = [decoder_with(mtp_heads=heads, mtp_kind="layer") for heads in (0, 1, 3)]
    drawn = jax.jit(lambda key: [decoder.init(key) for decoder in decoders])(KEY)
    plain, one, three = map(numpy_leaves, drawn)
    assert all(np.array_equal(three[name], leaf) for name, leaf in plain.items())
    assert all(np.array_equal(three[name][:1], one[name]) for name in one.keys() - plain.keys())
    drawn = [
        leaf for name, leaf in three.items() if name.startswith("ahead") and "norm" not in name
    ]
    assert all(leaf.std() > 0 and not np.array_equal(leaf[0], leaf[2]) for leaf in drawn)
    assert not np.array_equal(three["ahead.layer.mlp.gate"], three["ahead.layer.mlp.up"])


def test_mtp_layer_losses_equal_per_document_formula() -> None:
    """Compute two chained heads in a loop over documents, each as a separate sequence."""
    decoder = decoder_with(mtp_heads=2, mtp_kind="layer", mtp_loss_weight=0.6)
    params, batch = jax.jit(decoder.init)(KEY), make_batch(1)
    batch["loss_mask"] = jnp.asarray([[1, 0, 1, 1, 1, 0, 1, 1]])
    losses = {"ahead_1": 0.0, "ahead_2": 0.0}

    def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + SMALL.norm_epsilon) * scale

    ahead = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["ahead"])
    ahead["norm"]["scale"] *= np.linspace(0.5, 1.5, 16)
    params["ahead"]["norm"] = jax.tree.map(jnp.asarray, ahead["norm"])
    table = np.asarray(params["embedding"], np.float64)
    layer, before_heads = jax.jit(decoder.layer("layer")), jax.jit(decoder.hidden)
    for document in (slice(0, 3), slice(3, 8)):
        own = {n: leaf[:, document] if leaf.ndim > 1 else leaf for n, leaf in batch.items()}
        hidden = decoder.norm(params["final_norm"], before_heads(params, own))
        for head in range(2):
            mine = jax.tree.map(lambda leaf, at=head: leaf[at], ahead)
            count = own["tokens"].shape[1] - 1 - head
            places = {n: leaf[:, :count] if leaf.ndim > 1 else leaf for n, leaf in own.items()}
            later = table[np.asarray(own["tokens"])[:, head + 1 :]]
            before = np.asarray(hidden, np.float64)[:, :count]
            norms = mine["embedding_norm"]["scale"], mine["hidden_norm"]["scale"]
            both = np.concatenate([rms(later, norms[0]), rms(before, norms[1])], -1)
            x = jnp.asarray(both @ mine["projection"], jnp.float32)
            x, *_ = layer(mine["layer"], x, places, jnp.int32(3 + head))
            hidden = rms(np.asarray(x, np.float64), mine["norm"]["scale"])
            logits = hidden @ np.asarray(params["head"], np.float64)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            targets, mask = (np.asarray(own[n])[0, head + 1 :] for n in ("targets", "loss_mask"))
            losses[f"ahead_{head + 1}"] -= (logs[0, np.arange(count), targets] * mask).sum()
    every = lambda *given: [f(*given) for f in (decoder.run, decoder.loss, decoder.objective)]  # noqa: E731
    found, loss, objective = jax.jit(every)(params, batch)
    assert found.losses.keys() == losses.keys()
    for name, wanted in losses.items():
        assert_close(found.losses[name], wanted)
    assert_close(objective, loss + 0.3 * sum(losses.values()) / batch["loss_mask"].sum())
