"""Mixture of experts compared with an independent forward pass, and its config keys."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models import count
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers import experts
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.moe import MoeConfig
from maxpipe.models.registry import describe, summaries
from maxpipe.models.spec import Matmul
from maxpipe.nn.attention.interface import KVCache
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.experts import Experts
from maxpipe.step.step import compute_layer_metrics
from tests.cases import keeping
from tests.nn.parts import RULES, assert_close, context, packed, with_values

OWN = MoeConfig(
    num_experts=5, top_k=2, num_dense_layers=1, d_expert=14, load_balance_loss_weight=0.3
)
CONFIG = ModelConfig(
    family="moe",
    num_layers=4,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=28,
    vocab_size=37,
    rope_theta=300.0,
    norm_epsilon=1e-4,
    compute_dtype="float32",
    own=OWN,
)
LENGTHS = [[9], [2, 4, 3]]


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """`x [tokens, heads, size]` of one document that starts at position 0."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * 300.0 ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    query = rotated(np.einsum("td,dnh->tnh", x, w["query"]))
    key = rotated(np.einsum("td,dgh->tgh", x, w["key"]))
    value = np.einsum("td,dgh->tgh", x, w["value"])
    key, value = (np.repeat(each, 3, axis=1) for each in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / math.sqrt(10.0)
    shares = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("nts,snh,nhd->td", shares, value, w["out"])


def mlp(weights: Iterable[np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up, down = weights
    hidden = x @ gate
    return (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down


def of_expert(w: dict[str, np.ndarray], number: int) -> tuple[np.ndarray, ...]:
    """One expert's gate, up and down projections."""
    return w["gate"][:, number], w["up"][:, number], w["down"][number]


def routed(w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Return output, probabilities and selected experts, computed token by token."""
    shares = np.exp(x @ w["router"])
    shares /= shares.sum(-1, keepdims=True)
    out, picked = np.zeros_like(x), []
    for token, mine in enumerate(shares):
        best = sorted(range(len(mine)), key=lambda expert, mine=mine: -mine[expert])[:2]
        for expert in best:
            weight = mine[expert] / mine[best].sum()
            out[token] += weight * mlp(of_expert(w, expert), x[token])
        picked.append(best)
    return out, shares, picked


def forward(
    params: dict[str, Any], tokens: np.ndarray
) -> tuple[np.ndarray, list[tuple[np.ndarray, list[Any]]]]:
    """Return a document's logits, and its probabilities and experts in each layer."""
    x, found = params["embedding"][tokens], []
    for layer in range(CONFIG.num_layers):
        kind, place = ("dense", 0) if layer < 1 else ("experts", layer - 1)
        w = jax.tree.map(lambda leaf, i=place: leaf[i], params["layers"][kind])
        x = x + attention(w["attention"], normed(x, w["attention_norm"]["scale"]))
        if kind == "dense":
            weights = (w["mlp"][name] for name in ("gate", "up", "down"))
            x = x + mlp(weights, normed(x, w["mlp_norm"]["scale"]))
        else:
            change, *rest = routed(w["experts"], normed(x, w["experts_norm"]["scale"]))
            x = x + change
            found.append(tuple(rest))
    return normed(x, params["final_norm"]["scale"]) @ params["head"], found


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    """Random parameters, including norm scales, with enlarged router weights."""
    drawn = jax.device_get(jax.jit(Decoder(CONFIG, RULES).init)(jax.random.key(3)))
    generator = np.random.default_rng(0)

    def changed(path: Any, leaf: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        added = 0.3 * generator.normal(size=leaf.shape) if "norm" in name else 0.0
        return ((2.0 if "router" in name else 1.0) * leaf + added).astype(np.float32)

    return jax.tree_util.tree_map_with_path(changed, drawn)


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    segments, positions = packed(LENGTHS)
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, CONFIG.vocab_size, segments.shape)
    mask = generator.integers(0, 2, segments.shape).astype(np.float32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1),
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": mask,
    }


def test_outputs_losses_and_statistics_equal_formulas(
    params: dict[str, Any], batch: dict[str, Any]
) -> None:
    decoder = Decoder(CONFIG, RULES)
    every = lambda *given: [f(*given) for f in (decoder.run, decoder.objective, decoder.loss)]  # noqa: E731
    found, objective, loss = jax.jit(every)(params, batch)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    num_layers, num_experts = 3, OWN.num_experts
    balance, load = 0.0, np.zeros((num_layers, num_experts))
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        documents = [
            forward(wide, batch["tokens"][row, start:end])
            for start, end in zip(ends - lengths, ends, strict=True)
        ]
        assert_close(found.logits[row], np.concatenate([logits for logits, _ in documents]))
        valid = np.flatnonzero(batch["loss_mask"][row])
        for layer in range(num_layers):
            shares = np.concatenate([layers[layer][0] for _, layers in documents])
            picked = np.concatenate([layers[layer][1] for _, layers in documents])
            used = np.bincount(picked[valid].ravel(), minlength=num_experts)
            fraction, likely = used / len(valid), shares[valid].mean(0)
            balance += len(valid) * num_experts / 2 * (fraction * likely).sum()
            load[layer] += used
    assert_close(found.losses["balance"], balance)
    np.testing.assert_array_equal(found.statistics["experts"]["load"], load)
    targets = batch["loss_mask"].sum()
    per_token = balance / targets
    gap = objective - loss
    np.testing.assert_allclose(gap, 0.3 * per_token, rtol=1e-5)
    mean = {name: loss / targets for name, loss in found.losses.items()}
    numbers = compute_layer_metrics(decoder.model, mean, found.statistics)
    relative = load / load.mean(-1, keepdims=True)
    assert {tag: float(number) for tag, number in numbers.items()} == pytest.approx(
        {
            "moe/balance_loss": per_token / num_layers,
            "moe/load_max": relative.max(),
            "moe/load_min": relative.min(),
            "moe/router_z_loss": float(mean["router_z"]) / num_layers,
            "moe/router_entropy": float(mean["entropy"]) / num_layers,
        }
    )


def test_cached_decoding_equals_full_forward(params: dict[str, Any], batch: dict[str, Any]) -> None:
    decoder = Decoder(CONFIG, RULES)
    names = ("tokens", "segment_ids", "positions")
    whole = jax.jit(decoder.run)(params, {name: batch[name] for name in names})
    assert not whole.losses and whole.statistics == {"dense": {}, "experts": {}}
    caches, parts = decoder.empty_caches(2, 10), []
    extend = jax.jit(decoder.extend)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        piece = {name: batch[name][:, start:stop] for name in names}
        logits, caches = extend(params, piece, caches)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole.logits)


def of_experts(**changes: Any) -> tuple[Experts, dict[str, np.ndarray], jax.Array]:
    """Return an experts module, its weights and an input."""
    part = experts.Experts(6, 7, 4, 2, 1.0, 0.1, **changes)
    module = Experts(part, RULES)
    return module, with_values(module), jax.random.normal(jax.random.key(1), (2, 5, 6))


def test_unnormalized_expert_weights_are_probabilities() -> None:
    module, w, x = of_experts(normalised=False)
    got = jax.jit(lambda x: module(x, context([[0]], [[0]])).x)(x)
    for row in range(2):
        wide = np.asarray(x[row], np.float64)
        _, shares, picked = routed(w, wide)
        for token, best in enumerate(picked):
            each = [
                shares[token, expert] * mlp(of_expert(w, expert), wide[token]) for expert in best
            ]
            assert_close(got[row, token], sum(each))


def test_ties_are_routed_to_first_experts() -> None:
    module, w, x = of_experts()
    with_values(module, router=np.zeros((6, 4)))
    with_mask = context([[1] * 5] * 2, [range(5)] * 2)
    with_mask.inputs["loss_mask"] = jnp.ones((2, 5))  # type: ignore[index]
    found = jax.jit(lambda x: module(x, with_mask))(x)
    np.testing.assert_array_equal(found.statistics["load"], [10, 10, 0, 0])
    np.testing.assert_allclose(found.losses["balance"], 10.0, rtol=1e-6)
    wide = np.asarray(x[1, 2], np.float64)
    first, second = (mlp(of_expert(w, expert), wide) for expert in (0, 1))
    assert_close(found.x[1, 2], (first + second) / 2)


def within_capacity(slots: int, places: list[Any], counts: np.ndarray) -> np.ndarray:
    """Return whether each choice of each token `[tokens, k]` is within the expert capacity."""
    found, used = np.zeros((len(places), len(places[0])), bool), {}
    for choice in range(found.shape[1]):
        for token in np.flatnonzero(counts):
            expert = places[token][choice]
            found[token, choice] = used.get(expert, 0) < slots
            used[expert] = used.get(expert, 0) + 1
    return found


@pytest.mark.parametrize("capacity", keeping([0.4, 0.8, 9.0], 1))
def test_tokens_beyond_expert_capacity_are_dropped(capacity: float) -> None:
    module, w, _ = of_experts(capacity=capacity)
    x = jax.random.normal(jax.random.key(2), (2, 9, 6))
    segments = np.array([[1] * 5 + [2] * 4, [1] * 6 + [0] * 3])
    here = context(segments, [range(9)] * 2)
    mask = (segments > 0) & (np.arange(9) != 2)
    here.inputs["loss_mask"] = jnp.asarray(mask, jnp.float32)  # type: ignore[index]
    slots = min(max(math.ceil(capacity * 9 * 2 / 4), 1), 9)
    kept = np.zeros((2, 9, 4))
    lost = 0.0
    for row in range(2):
        _, _, picked = routed(w, np.asarray(x[row], np.float64))
        finds = within_capacity(slots, picked, segments[row] > 0)
        for token, best in enumerate(picked):
            kept[row, token, best] = finds[token]
        lost += ((~finds).mean(1) * mask[row]).sum()
    assert (lost == 0) == (capacity == 9.0)

    def plainly(x: jax.Array) -> jax.Array:
        """Compute all experts, with zero weights for dropped tokens."""
        shares = jax.nn.softmax(x @ w["router"])
        chosen = jax.nn.one_hot(jax.lax.top_k(shares, 2)[1], 4).sum(-2)
        weights = shares * chosen / (shares * chosen).sum(-1, keepdims=True) * kept
        gate, up = (jnp.einsum("btd,def->btef", x, w[name]) for name in ("gate", "up"))
        return jnp.einsum("btef,efd,bte->btd", jax.nn.silu(gate) * up, w["down"], weights)

    found = jax.jit(lambda x: module(x, here))(x)
    counted = (segments > 0)[..., None]
    assert_close(found.x * counted, jax.jit(plainly)(x) * counted)
    np.testing.assert_allclose(found.losses["dropped"], lost, rtol=1e-6)
    towards = jax.random.normal(jax.random.key(3), x.shape) * counted
    got, wanted = (
        jax.jit(jax.grad(lambda x, f=f: (f(x) * towards).sum()))(x)
        for f in (lambda x: module(x, here).x, plainly)
    )
    assert_close(got, wanted)
    # No token is dropped in generation.
    cache = KVCache.empty((2, 9, 1, 2), jnp.dtype("float32"))
    module_all, *_ = of_experts()
    with_values(module_all, **w)
    got = jax.jit(lambda x: module(x, replace(here, cache=cache)).x)(x)
    assert_close(got, jax.jit(lambda x: module_all(x, here).x)(x))


@pytest.mark.parametrize("gated", [False, True])
def test_sigmoid_scores_shared_experts_and_router_losses(gated: bool) -> None:
    shared = MLP(6, 9, 1.0)
    module, w, x = of_experts(
        scores="sigmoid",
        weight_scale=2.5,
        normalised=False,
        shared=shared,
        shared_gated=gated,
        z_loss_weight=0.2,
    )
    here = context([[1] * 5] * 2, [range(5)] * 2)
    here.inputs["loss_mask"] = jnp.ones((2, 5))  # type: ignore[index]
    found = jax.jit(lambda x: module(x, here))(x)
    z = entropy = 0.0
    for row in range(2):
        for token in range(5):
            wide = np.asarray(x[row, token], np.float64)
            logits = wide @ w["router"]
            scores = 1 / (1 + np.exp(-logits))
            best = np.argsort(-scores)[:2]
            each = [2.5 * scores[expert] * mlp(of_expert(w, expert), wide) for expert in best]
            always = mlp((w[f"shared_{name}"] for name in ("gate", "up", "down")), wide)
            if gated:
                always /= 1 + np.exp(-wide @ w["shared_weight"])
            assert_close(found.x[row, token], sum(each) + always)
            z += np.log(np.exp(logits).sum()) ** 2
            likely = scores / scores.sum()
            entropy -= (likely * np.log(likely)).sum()
    assert module.part.losses == {"balance": 0.1, "router_z": 0.2, "entropy": 0.0}
    assert_close(found.losses["router_z"], z)
    assert_close(found.losses["entropy"], entropy)


def test_flops_of_experts_with_capacity() -> None:
    own = MoeConfig(num_experts=6, top_k=2, capacity_factor=1.5, num_shared_experts=2)
    model = describe(replace(CONFIG, own=own))
    part = model.layer_types["experts"].parts["experts"]
    assert isinstance(part, experts.Experts)
    assert part.rows == 3.0 and (
        part.expert_capacity(10),
        part.expert_capacity(1),
        part.expert_capacity(2),
    ) == (5, 1, 1)
    found = {each.param: each for each in part.operations if isinstance(each, Matmul)}
    assert found["up"].needed == pytest.approx(1 / 3) and found["up"].computed == 0.5
    assert part.params["shared_up"].shape == (18, 2 * 28)
    assert part.activations["expert_up"] == ((3, "experts"), (28, "mlp"))


def test_balance_loss_is_additive_over_sequences_and_ignores_masked_tokens() -> None:
    module, _, x = of_experts()
    # All tokens use the same two experts: 4 / 2 for each token. Masked tokens do not count.
    router = np.zeros((6, 4))
    router[0] = [30.0, 20.0, -30.0, -30.0]
    with_values(module, router=router)
    one = jnp.abs(x) + 1.0
    mask = jnp.asarray([[1.0, 1, 0, 1, 1], [0.0, 0, 0, 0, 0]])
    inputs = {"loss_mask": mask}

    def balance(x: jax.Array, mask: jax.Array) -> jax.Array:
        here = context([[1] * 5] * len(x), [range(5)] * len(x))
        here.inputs.update(inputs | {"loss_mask": mask})  # type: ignore[attr-defined]
        return module(x, here).losses["balance"]

    # A compiled function holds the module's values at compile time.
    before = jax.jit(lambda *given: balance(*given))
    np.testing.assert_allclose(before(one, mask), 2.0 * 4, rtol=1e-5)
    with_values(module)
    after = jax.jit(lambda *given: balance(*given))
    mask = jnp.asarray([[1.0, 1, 0, 1, 1], [1.0, 0, 1, 1, 1]])
    both = after(x, mask)
    np.testing.assert_allclose(both, after(x[:1], mask[:1]) + after(x[1:], mask[1:]), rtol=1e-6)
    slope = jax.jit(jax.grad(lambda x: balance(x, mask)))(x)
    assert not np.asarray(slope[0, 2]).any() and np.asarray(slope[0, 1]).any()


def test_model_description_matches_counts_and_metrics() -> None:
    model = describe(replace(CONFIG, own=replace(OWN, dispatch="dense")))
    assert model.layers == ("dense", "experts", "experts", "experts")
    assert model.losses == {"balance": 0.3, "router_z": 0.0, "entropy": 0.0}
    listed = {tag for tag, _, families in summaries() if "moe" in families}
    assert set(model.metrics) == listed
    expert = 3 * 18 * 14
    assert count.active_params(model) == count.num_params(model) - 3 * 3 * expert
    needed = count.forward_flops_per_token(model, 32)
    pairs = 2 * 2 * 4 * 6 * 10 * (32 - 16)
    costs = count.layer_costs(model, 32)
    head = 2 * count.size(model.ends.params["head",])
    assert sum(costs) + head == needed + 2 * 3 * 3 * expert + pairs
    own_only = describe(CONFIG)
    assert sum(count.layer_costs(own_only, 32)) + head == needed + pairs
    assert model.notes == ("all 5 experts for each token",)
    note = "2 of 5 experts for each token, by kernels on GPUs, a loop elsewhere"
    assert own_only.notes == (note,)
    assert len({*costs[1:]}) == 1 and costs[0] < costs[1]


@pytest.mark.parametrize("over", ["sequence", "microbatch", "devices"])
def test_balance_loss_uses_expert_load_of_configured_scope(over: str) -> None:
    """On one device, a call contains all sequences of the microbatch and of the devices."""
    module, _, x = of_experts(load_balance_scope=over)
    mask = jnp.asarray([[1.0, 1, 0, 1, 1], [1.0, 0, 1, 1, 1]])
    here = context([[1] * 5] * 2, [range(5)] * 2)
    here.inputs["loss_mask"] = mask  # type: ignore[index]
    found = jax.jit(lambda x: module(x, here))(x)
    shares = np.asarray(jax.nn.softmax(x @ module.router[...]))
    used = np.zeros((2, 4))
    for row, token in zip(*np.nonzero(mask), strict=True):
        used[row, np.argsort(-shares[row, token])[:2]] += 1
    used = used if over == "sequence" else np.tile(used.sum(0), (2, 1))
    relative = used / used.mean(-1, keepdims=True)
    wanted = (relative[:, None] * shares * np.asarray(mask)[..., None]).sum()
    np.testing.assert_allclose(found.losses["balance"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("model.moe.top_k=9", "must be at most model.moe.num_experts (8)"),
        ("model.moe.num_dense_layers=6", "must be less than model.num_layers (6)"),
        ("model.moe.num_experts=0", "must be at least 1."),
        ("model.moe.dispatch=dense model.moe.capacity_factor=2", "must be auto with model.moe.cap"),
        ("model.moe.num_expert_groups=3", "must divide model.moe.num_experts (8)"),
        (
            "model.moe.num_expert_groups=4 model.moe.expert_groups_per_token=5",
            "must be at most model.moe.num_expert_groups",
        ),
        ("model.moe.num_expert_groups=8", "covers only 1 of 8 experts"),
        (
            "model.moe.num_expert_groups=8 model.moe.expert_groups_per_token=2 "
            "model.moe.group_scores=top2",
            "must be max",
        ),
        ("model.q_lora_rank=4", "Write model.family=deepseek model.deepseek.q_lora_rank=4."),
        ("model.moe.load_balance_loss_weight=-1", "0 only logs this loss"),
        ("model.num_experts=4", "Write model.moe.num_experts=4."),
        ("model.n_routed_experts=4", "Write model.moe.num_experts=4."),
        ("model.moe.sliding_window=3", "is not a key of model.moe"),
        ("mesh.ici_tensor=4 mesh.cpu_devices=4 model.moe.d_expert=90", "multiple of the tensor"),
    ],
)
def test_invalid_moe_keys_are_rejected(given: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["tiny-moe", "train.steps=1", *given.split()])
    assert text in str(caught.value)
    action = str(caught.value).rsplit("Set ", 1)[-1]
    assert action


def test_keys_of_other_families_are_not_checked() -> None:
    assert load(["tiny", "train.steps=1", "mesh.ici_tensor=4"]).config.model.family == "llama"
