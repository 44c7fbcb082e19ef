"""Requests of evaluation harnesses compared with the unpipelined loop on single sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maxpipe.errors import ConfigError, DivergenceError
from maxpipe.evals.language_model import LanguageModel, Scorer, ScoringSequence, ScoringTokenizer
from maxpipe.generation.load_model import LoadedModel
from tests.evals.model import BYTES, greedy_continuation, logprobs, weights
from tests.train.runs import SAME

MAX_LENGTH = 64
PAIRS = [
    ("The cat sat on", " the mat"),
    ("", "a"),
    ("Q: 2 + 2?\nA:", " 4, I think, and nothing but four."),
    ("naïve", " 語"),
    ("nothing follows", ""),
]


@pytest.fixture(scope="module")
def requests() -> LanguageModel:
    return LanguageModel(weights(), ScoringTokenizer(BYTES, MAX_LENGTH), batch_size=3)


def test_loglikelihoods_equal_unpipelined_loop(requests: LanguageModel) -> None:
    """Score sequences of different lengths in batches of three."""
    best = {first: greedy_continuation(first.encode(), 1)[1:] for first in "abcdefghij"}
    greedy = next((first, more.decode()) for first, more in best.items() if more.isascii())
    pairs = [*PAIRS, greedy]
    told: list[int] = []
    found = requests.loglikelihood(pairs, told.append)
    assert told == [3, 6]
    for (context, continuation), score in zip(pairs, found, strict=True):
        text, before = (context + continuation).encode(), len(context.encode())
        nats, best = logprobs(text)
        assert score.logprob == pytest.approx(float(nats[before:].sum()), rel=SAME, abs=SAME)
        assert score.is_greedy == (best[before:] == np.frombuffer(text, np.uint8)[before:]).all()
    assert [score.is_greedy for score in found] == [False, False, False, False, True, True]


def test_batched_scores_equal_single_scores(requests: LanguageModel) -> None:
    alone = LanguageModel(weights(), ScoringTokenizer(BYTES, MAX_LENGTH), batch_size=1)
    found, one = requests.loglikelihood(PAIRS), [alone.loglikelihood([pair])[0] for pair in PAIRS]
    assert [each.logprob for each in found] == pytest.approx(
        [each.logprob for each in one], rel=SAME
    )


def test_rolling_loglikelihood_scores_each_token_once(requests: LanguageModel) -> None:
    """Windows of 20 tokens begin after one context token; the last has as much context as fits."""
    short = LanguageModel(weights(), ScoringTokenizer(BYTES, 20), batch_size=4)
    text = b"It was the best of times, it was the worst of times."
    assert len(text) == 52
    wanted = 0.0
    for context, begin, end in ((0, 0, 20), (20, 20, 40), (32, 40, 52)):
        # Each window but the first begins with a token of the text instead of the begin token.
        row = ScoringSequence(([BYTES.begin_id, *text])[context : begin + 1], [*text[begin:end]])
        assert len(row.context) + len(row.target) <= 21
        (score,) = Scorer(weights(), 1).score([row])
        wanted += score.logprob
    found = short.loglikelihood_rolling([text.decode(), "", "It was"])
    assert found[0] == pytest.approx(wanted, rel=SAME)
    assert found[1] == 0.0
    assert found[2] == pytest.approx(float(logprobs(text[:6])[0].sum()), rel=SAME)


def test_long_context_is_truncated_after_begin_token(requests: LanguageModel) -> None:
    texts = ScoringTokenizer(BYTES, 9)
    row = texts.truncate(texts.sequence("0123456789", "abcd"))
    assert row.context == [BYTES.begin_id, *b"56789"] and row.target == [*b"abcd"]
    with pytest.raises(ConfigError, match="must fit into 9 tokens"):
        texts.truncate(texts.sequence("x", "0123456789"))


def test_generate_until_ends_at_limit_or_stop_string(requests: LanguageModel) -> None:
    text = greedy_continuation(b"The dog", 8)[7:].decode("utf-8", "replace")
    until = text[3:5]
    greedy: dict[str, Any] = {"max_gen_toks": 8, "until": ["\x00never"]}
    found = requests.generate_until(
        [
            ("The dog", greedy),
            ("The cat", {**greedy, "max_gen_toks": 2}),
            ("The dog", {**greedy, "until": until, "do_sample": False, "temperature": 0.7}),
        ]
    )
    assert found[0] == text
    assert found[1] == greedy_continuation(b"The cat", 2)[7:].decode("utf-8", "replace")
    assert found[2] == text[: text.index(until)]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"num_beams": 3}, "must be among the supported settings"),
        ({"max_gen_toks": 64}, "from 1 to 63"),
    ],
)
def test_unsupported_generation_settings_are_rejected(
    settings: dict[str, Any], rule: str, requests: LanguageModel
) -> None:
    with pytest.raises(ConfigError, match=rule):
        requests.generate_until([("a", settings)])


def test_scorer_stops_on_interrupt_and_non_finite_logits(requests: LanguageModel) -> None:
    asked = iter([False, True])
    scorer = Scorer(weights(), 2)
    rows = [requests.texts.sequence(*pair) for pair in PAIRS]
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        scorer.score(rows, stops=lambda: next(asked), moved=done.append)
    assert done == [2, 4]
    decoder, params, mesh = weights()
    broken = LoadedModel(decoder, params | {"embedding": params["embedding"] * np.nan}, mesh)
    with pytest.raises(DivergenceError, match="not finite"):
        Scorer(broken, 2).score(rows[:1])
