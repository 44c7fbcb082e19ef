"""Preference losses of packed pairs equal those of separate pairs, on every layout and schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.data.documents import EncodedDocument
from maxpipe.data.packing import Packer
from maxpipe.objectives import Dpo, Ipo, Orpo, Preference
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.objective import CrossEntropy
from tests.cases import TOLERANCE, Case, keeping, steps_of
from tests.pipeline.test_families import GROUPED

TOKENS, MOST = 24, 3


class RandomPairs:
    """Random preference pairs: a prompt with two responses of different lengths."""

    pad_id = 0

    def __init__(self, count: int, vocab_size: int):
        random = np.random.default_rng(count)
        self.encoded = []
        for _ in range(count):
            prompt = random.integers(0, vocab_size, random.integers(1, 5))
            sizes = random.integers(1, 7, 2)
            halves = [np.append(prompt, random.integers(0, vocab_size, size)) for size in sizes]
            trained = [np.arange(len(each)) >= len(prompt) for each in halves]
            pair = EncodedDocument(
                np.concatenate(halves), np.concatenate(trained), second_half_start=len(halves[0])
            )
            self.encoded.append(pair)
        self.lengths = np.array([len(each.ids) for each in self.encoded])
        self.reference = random.normal(-10, 3, (count, 2)).astype(np.float32)

    def __getitem__(self, document: int) -> EncodedDocument:
        return self.encoded[document]

    def where(self, document: int) -> str:
        return str(document)


def packed_batch(case: Case) -> tuple[dict[str, np.ndarray], RandomPairs, list[int]]:
    """Return a batch with one empty sequence, all pairs, and indices of the batch's pairs."""
    made = RandomPairs(4 * case.rows + 6, case.model.vocab_size)
    order = np.arange(len(made.encoded))
    sequences = Packer("best_fit", TOKENS, max_pairs=MOST)(made, order)
    numbers = range(min(case.rows - 1, len(sequences)))
    rows = [sequences[number] for number in numbers]
    rows += [sequences.padding()] * (case.rows - len(rows))
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    inside = [document for number in numbers for document in sequences.documents(number)]
    batch["example_ids"] = np.arange(case.rows, dtype=np.int32)
    if case.sources:
        sources = np.arange(case.rows, dtype=np.int32) % (case.sources - 1)
        batch["source_ids"] = np.where(batch["pairs"].any(1), sources, -1).astype(np.int32)
    assert len(inside) >= case.rows and (batch["pairs"].sum(1) > 1).any()
    return batch, made, inside


def unpacked_batch(made: RandomPairs, inside: list[int]) -> dict[str, Any]:
    """Return a batch in which each half of every pair is a separate sequence."""
    tokens = 12
    rows = {name: [] for name in ("tokens", "targets", "mask", "segment_ids")}
    for document in inside:
        pair = made[document]
        assert pair.trained is not None
        for part in (slice(0, pair.second_half_start), slice(pair.second_half_start, None)):
            ids, trained = pair.ids[part], pair.trained[part]
            filled = lambda values: np.pad(values, (0, tokens - len(values)))  # noqa: E731
            rows["tokens"].append(filled(ids[:-1]))
            rows["targets"].append(filled(ids[1:]))
            rows["mask"].append(filled(trained[1:].astype(np.float32)))
            rows["segment_ids"].append(filled(np.ones(len(ids) - 1, np.int32)))
    batch = {name: jnp.asarray(np.stack(each)) for name, each in rows.items()}
    return batch | {"positions": jnp.broadcast_to(jnp.arange(tokens), batch["tokens"].shape)}


def response_log_probs(decoder: Any, params: Any, batch: dict[str, Any]) -> jax.Array:
    """Return the unpipelined model's log-probabilities of the responses, shape `[pairs, 2]`."""
    scores = jax.nn.log_softmax(decoder.run(params, batch).logits)
    picked = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    return (picked * batch["mask"]).sum(-1).reshape(-1, 2)


def plain(
    steps: Any, objective: Preference, made: RandomPairs, inside: list[int]
) -> tuple[Any, ...]:
    """Return parameters, mean loss and reports, and gradients of the unpacked pairs."""
    batch = unpacked_batch(made, inside)
    decoder = steps.param_layout.decoder
    one_each = type(objective)(**{**vars(objective), "most_pairs": 1})

    def mean(params: Any) -> tuple[Any, Any]:
        inputs = {
            "pairs": jnp.ones((len(inside), 1)),
            "reference": made.reference[inside],
            "response_tokens": batch["mask"].sum(-1).reshape(-1, 2),
        }
        lost, reports = one_each((response_log_probs(decoder, params, batch),), inputs)
        return lost.mean(), [each.mean() for each in reports]

    params = jax.jit(decoder.init)(jax.random.key(0))
    (loss, reports), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    return params, [loss, *reports], gradients


LOSSES = [Dpo(MOST, False, label_smoothing=0.1), Ipo(MOST, True), Orpo(MOST, True)]
CASES = [
    (Case(1, 1, 2, length=TOKENS), LOSSES[0]),
    (Case(4, 1, 4, length=TOKENS), LOSSES[0]),
    (Case(2, 2, 2, tensor=2, fsdp=2, length=TOKENS), LOSSES[0]),
    (Case(2, 1, 2, tensor=2, context=2, length=TOKENS, loss_block=7), LOSSES[1]),
    (Case(2, 1, 3, fsdp=2, context=2, schedule="zb_h1", remat="names", length=TOKENS), LOSSES[2]),
    (Case(1, 1, 2, fsdp=2, tensor=2, context=2, length=TOKENS, sources=3), LOSSES[1]),
    (Case(2, 2, 4, schedule="zb_v", loss_block=5, length=TOKENS), LOSSES[0]),
    (Case(1, 1, 1, data=2, loss_block=11, tied=True, length=TOKENS), LOSSES[2]),
    (Case(2, 1, 2, split="sequence", tensor=2, data=2, length=TOKENS), LOSSES[1]),
]


@pytest.mark.parametrize(("case", "objective"), keeping(CASES, 4), ids=str)
def test_packed_pairs_match_unpacked_pairs(case: Case, objective: Preference) -> None:
    steps = steps_of(case, case.rows, objective=objective)
    parts = steps.param_layout
    batch, made, inside = packed_batch(case)
    params, means, wanted = plain(steps, objective, made, inside)
    # The batch has the same arrays as in training, with reference scores from the documents.
    assert {name: (each.shape, each.dtype) for name, each in batch.items()} == {
        name: (each.shape, each.dtype) for name, each in steps.abstract_batch().items()
    }
    run = steps.engine.value_and_grad(steps.train_schedule)

    def whole(params: Any, batch: Any) -> Any:
        found = run(parts.stack(params), batch, None)
        return found.loss, found.reports, parts.unstack(found.gradients)

    placed = jax.device_put(batch, steps.batch_sharding)
    with jax.set_mesh(parts.mesh):
        loss, reports, found = jax.jit(whole)(params, placed)
    # Rewards are small differences of large sums.
    named = [loss, *(reports[name] for name in objective.report_names)]
    np.testing.assert_allclose(named, means, rtol=TOLERANCE, atol=1e-6)
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, a), b in zip(leaves, jax.tree.leaves(found), strict=True):
        error = np.abs(a - np.asarray(b)).max() / np.abs(a).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_packed_reference_scores_match_unpacked_pairs() -> None:
    """Reference scores at each pair's position match, and digests do not depend on layout."""
    case = Case(2, 1, 2, fsdp=2, context=2, length=TOKENS)
    steps = steps_of(case, case.rows, objective=LOSSES[0])
    batch, made, inside = packed_batch(case)
    params = steps.init().params
    step = steps.compile_reader(LossHead.scores, case.rows, everywhere=True)
    (found,) = step(params, jax.device_put(batch, steps.batch_sharding))
    found = np.asarray(found)
    assert found.shape == (case.rows, 2 * MOST)
    unpacked = jax.device_get(jax.jit(steps.param_layout.unstack)(params))
    is_half = np.repeat(batch["pairs"], 2, axis=1) > 0
    assert not found[~is_half].any()
    decoder, rows = steps.param_layout.decoder, unpacked_batch(made, inside)
    wanted = jax.jit(partial(response_log_probs, decoder))(unpacked, rows)
    np.testing.assert_allclose(found[is_half], wanted.ravel(), rtol=TOLERANCE)
    other = steps_of(Case(1, 1, 1, tensor=2, length=TOKENS), 1, objective=LOSSES[0])
    stack = jax.jit(other.param_layout.stack, out_shardings=other.state_sharding.params)
    with jax.set_mesh(other.param_layout.mesh):
        restacked = stack(unpacked)
    assert other.digest(restacked) == steps.digest(params)


@pytest.mark.layouts
def test_auxiliary_losses_are_weighted_by_token() -> None:
    """The balance loss has the same weight as with cross entropy, for any number of pairs."""
    found = {}
    for objective in (LOSSES[0], CrossEntropy()):
        for weight in (0.0, 0.5):
            own = replace(GROUPED, num_experts=6, load_balance_loss_weight=weight)
            case = Case(2, 1, 2, own=own, length=TOKENS, layers=4)
            steps = steps_of(case, case.rows, objective=objective)
            batch = {name: packed_batch(case)[0][name] for name in steps.abstract_batch()}
            run = steps.engine.value_and_grad(steps.train_schedule)
            with jax.set_mesh(steps.param_layout.mesh):
                placed = jax.device_put(batch, steps.batch_sharding)
                each = jax.jit(run)(steps.init().params, placed, None)
            is_plain = isinstance(objective, CrossEntropy)
            found[is_plain, weight] = each.gradients, each.losses["balance"]
    np.testing.assert_allclose(found[True, 0.5][1], found[False, 0.5][1], rtol=TOLERANCE)
    of_balance = [
        jax.tree.map(jnp.subtract, found[plain, 0.5][0], found[plain, 0.0][0])
        for plain in (True, False)
    ]
    router = [each["layers"]["experts"]["experts"]["router"] for each in of_balance]
    largest = np.abs(router[0]).max()
    assert largest > 0
    np.testing.assert_allclose(router[1], router[0], atol=1e-4 * largest)
