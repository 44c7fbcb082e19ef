"""Phases of the learning rate, as they are written."""

from __future__ import annotations

import pytest

from maxpipe.config.load import load
from maxpipe.config.sections.optim import EXAMPLE, LRPhase, parse_phases
from maxpipe.errors import ConfigError


def test_steps_are_numbers_shares_and_the_rest() -> None:
    found = parse_phases(["5% linear 0->1", "2 x 10 cosine 0.1", " rest  linear 0 "], 100)
    first, *bends, last = found
    assert first == LRPhase(5, "linear", 0.0, 1.0)
    # Without a beginning of its own, a phase that is done again goes on where it has ended.
    assert bends == [LRPhase(10, "cosine", 1.0, 0.1), LRPhase(10, "cosine", 0.1, 0.1)]
    assert last == LRPhase(75, "linear", 0.1, 0.0)


def test_a_repeated_phase_starts_from_its_first_rate() -> None:
    wanted = [LRPhase(20, "cosine", 1.0, 0.1)] * 3
    assert parse_phases(["3 x 20% cosine 1 -> 0.1"], 100) == wanted


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ten linear 1", "STEPS SHAPE TO"),
        ("10 polynomial 1", "STEPS SHAPE TO"),
        ("10 linear", "STEPS SHAPE TO"),
        ("10 linear 1 -> ", "fractions of the peak|STEPS SHAPE TO"),
        ("10 linear 2", "has 2."),
        ("10 linear -1", "has -1."),
        ("10 linear nan", "has nan."),
        ("0 x 10 linear 1", "0 times"),
        ("-5 linear 1", "STEPS SHAPE TO"),
        ("", "STEPS SHAPE TO"),
        ("100 x 1 linear 1", "STEPS SHAPE TO"),
        ("2 x rest linear 1", "rest"),
    ],
)
def test_phases_that_cannot_be_parsed_are_explained(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        parse_phases([text], 100)
    with pytest.raises(ConfigError, match=rule) as caught:
        load(["tiny", "train.steps=50", f"optim.lr_phases=['{text}']"])
    assert f'Set "optim.lr_phases={EXAMPLE}".' in str(caught.value)


def test_the_example_is_taken_and_what_it_replaces_is_not() -> None:
    load(["tiny", "train.steps=50", f"optim.lr_phases={EXAMPLE}"])
    with pytest.raises(ConfigError, match="must be 0 with optim.lr_phases"):
        load(["tiny", "train.steps=50", f"optim.lr_phases={EXAMPLE}", "optim.warmup_steps=5"])
    with pytest.raises(ConfigError, match="optim.lr_phases"):
        load(["tiny", "train.steps=50", "optim.lr_phases=['rest linear 0 -> 0']"])
