"""GRPO steps: loss and gradients compared with a plain loop over the paper's formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.data.prompts import PromptRecord
from maxpipe.objectives import ON_POLICY
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.posttrain.rollouts import RewardedCompletion, assemble_batch
from maxpipe.step.build import policy_of
from tests.cases import TOLERANCE, Case, keeping, steps_of

Tree = Any
CLIP, HIGH, KL = 0.1, 0.3, 0.4


def drawn_for(case: Case) -> list[RewardedCompletion]:
    """Return completions of various lengths for prompts of various lengths."""
    random, found = np.random.default_rng(3), []
    for row in range(case.rows):
        prompt = random.integers(0, case.model.vocab_size, 1 + row % 3, np.int32)
        count = 1 + row % (case.tokens - len(prompt))
        tokens = random.integers(0, case.model.vocab_size, count).tolist()
        record = PromptRecord({}, "", prompt, "")
        found.append(RewardedCompletion(record, tokens, "", "end", 0.0, float(random.normal())))
    return found


def plain(
    steps: Any, params: Tree, drawn: Sequence[RewardedCompletion], batch: Any, config: GrpoConfig
) -> jax.Array:
    """Return the loss of the papers, computed one completion and one token at a time."""
    rows = [[*each.prompt.ids, *each.tokens] for each in drawn]
    # One forward pass for all: attention is causal, so no token attends to the padding after it.
    longest = max(map(len, rows))
    ids = jnp.asarray([row + [0] * (longest - len(row)) for row in rows], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(longest), ids.shape)
    inputs = {"tokens": ids, "segment_ids": jnp.ones_like(ids), "positions": positions}
    logits = steps.param_layout.decoder.run(params, inputs).logits / config.temperature
    scores = jax.nn.log_softmax(logits)
    total = jnp.zeros(())
    for row, each in enumerate(drawn):
        loss = jnp.zeros(())
        for place in range(len(each.prompt.ids), len(rows[row])):
            logp = scores[row, place - 1, ids[row, place]]
            old, reference = (batch[n][row, place - 1] for n in ("old_logp", "reference_logp"))
            ratio = jnp.exp(logp - (jax.lax.stop_gradient(logp) if old == ON_POLICY else old))
            bounded = jnp.clip(ratio, 1 - CLIP, 1 + HIGH)
            gain = jnp.minimum(ratio * each.advantage, bounded * each.advantage)
            apart = jnp.exp(reference - logp) - (reference - logp) - 1
            loss += -gain + KL * apart
        total += loss / len(each.tokens) if config.loss_aggregation == "sequence" else loss
    num_tokens = sum(len(each.tokens) for each in drawn)
    return total / (len(drawn) if config.loss_aggregation == "sequence" else num_tokens)


CASES = [
    (Case(2, 1, 2, fsdp=2, layers=2), "sequence"),
    (Case(2, 2, 4, tensor=2, layers=4), "token"),
    (Case(1, 1, 1, context=2, loss_block=3, layers=2), "sequence"),
]


@pytest.mark.parametrize(("case", "average"), keeping(CASES, 0), ids=str)
def test_loss_and_gradients_match_reference_loop(case: Case, average: Any) -> None:
    """Half of the tokens were sampled with other weights."""
    config = GrpoConfig(
        clip_ratio=CLIP, clip_ratio_high=HIGH, kl_coef=KL, temperature=0.7, loss_aggregation=average
    )
    steps = steps_of(case, case.rows, objective=policy_of(config))
    parts, drawn, random = steps.param_layout, drawn_for(case), np.random.default_rng(5)
    batch = assemble_batch(drawn, case.tokens, 0, average)
    params = jax.jit(parts.decoder.init)(jax.random.key(0))
    batch["reference_logp"] = random.uniform(-6, -1, batch["old_logp"].shape).astype(np.float32)
    other = random.uniform(-4.5, -2.5, batch["old_logp"].shape)
    batch["old_logp"] = np.where(other < -3.5, other, ON_POLICY).astype(np.float32)
    assert {name: each.shape for name, each in batch.items()} == {
        name: leaf.shape for name, leaf in steps.abstract_batch().items()
    }
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda params: plain(steps, params, drawn, batch, config))
    )(params)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(params: Tree, batch: Tree) -> Any:
        found = run(parts.stack(params), batch, None)
        return found.loss, found.reports, parts.unstack(found.gradients)

    placed = jax.device_put(batch, steps.batch_sharding)
    with jax.set_mesh(parts.mesh):
        found_loss, reports, found = jax.jit(whole)(params, placed)
    np.testing.assert_allclose(found_loss, loss, rtol=TOLERANCE)
    assert 0 < reports["clipped"] < 1 and reports["kl"] > 0
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found), strict=True
    ):
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_precomputed_logprobs_of_same_weights_give_same_loss() -> None:
    """A step and a forward pass have equal log-probabilities: the ratio is 1, up to rounding."""
    case = Case(2, 1, 2, fsdp=2, layers=2)
    steps = steps_of(case, case.rows, objective=policy_of(GrpoConfig(kl_coef=KL)))
    batch = assemble_batch(drawn_for(case), case.tokens, 0, "token")
    batch["reference_logp"] = np.zeros_like(batch["old_logp"])
    placed = jax.device_put(batch, steps.batch_sharding)
    state = steps.init()
    again = jax.tree.map(jnp.copy, state)  # a step donates its state
    (logp,) = steps.compile_reader(LossHead.scores)(state.params, placed)
    step = steps.compile_train()
    _, metrics = step(state, placed | {"old_logp": logp, "reference_logp": logp})
    assert metrics["train/clipped"] == 0 and abs(metrics["train/kl"]) < 1e-10
    _, same = step(again, placed | {"reference_logp": logp})
    np.testing.assert_allclose(metrics["train/loss"], same["train/loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(metrics["train/grad_norm"], same["train/grad_norm"], rtol=TOLERANCE)
