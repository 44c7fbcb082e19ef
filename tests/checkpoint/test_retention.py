"""Retention rules for checkpoints, one by one and combined."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from maxpipe.checkpoint.retention import BestMetric, CheckpointInfo, RetentionRules, select_retained
from maxpipe.config.sections.checkpoint import CheckpointConfig

HOUR = 3600.0


def of_loss(step: int, time: float, loss: float) -> CheckpointInfo:
    return CheckpointInfo(step, time, {"eval/loss": loss, "eval/sums/accuracy": (step % 30) / 30})


RUN = [of_loss(step, step / 10 * HOUR, 3 - step / 100) for step in range(10, 101, 10)]


def test_each_retention_rule_selects_its_steps():
    assert list(select_retained(RUN, RetentionRules(2))) == [90, 100]
    assert list(select_retained(RUN, RetentionRules(1, every_steps=40))) == [40, 80, 100]
    # Step 10 was saved after an hour: the periods begin at 0, 4 and 8 hours.
    assert list(select_retained(RUN, RetentionRules(1, every_hours=4))) == [10, 40, 80, 100]
    assert list(select_retained(RUN, RetentionRules(0, best=3))) == [80, 90, 100]
    assert (
        select_retained(RUN, RetentionRules(0))
        == {}
        == select_retained([], RetentionRules(3, 1, 1, 1))
    )


def test_retention_reasons_are_joined():
    assert (
        select_retained(RUN, RetentionRules(1, 50, 0, 1))[100]
        == "newest; every 50 steps; best, loss 2.0000"
    )


def test_steps_without_finite_loss_are_not_best():
    losses = {1: math.nan, 3: 5.0, 4: -math.inf}
    odd = [CheckpointInfo(2, 0.0), *(of_loss(step, 0.0, loss) for step, loss in losses.items())]
    assert list(select_retained(odd, RetentionRules(0, best=4))) == [3]


def test_best_respects_metric_and_mode():
    by_accuracy = BestMetric("eval/sums/accuracy", is_largest=True)
    found = select_retained(RUN, RetentionRules(0, best=3, better=by_accuracy))
    assert list(found) == [20, 50, 80] and found[50] == "best, sums/accuracy 0.6667"
    assert list(
        select_retained(RUN, RetentionRules(0, best=3, better=BestMetric("eval/sums/accuracy")))
    ) == [30, 60, 90]
    assert select_retained(RUN, RetentionRules(0, best=3, better=BestMetric("eval/other"))) == {}


def test_newest_of_equal_values_is_best():
    equal = [of_loss(step, 0.0, 2.0) for step in (10, 20, 30)]
    assert list(select_retained([*equal, of_loss(40, 0.0, 3.0)], RetentionRules(1, best=1))) == [
        30,
        40,
    ]


def test_retention_ignores_order_and_supports_fractional_hours():
    assert select_retained(RUN[::-1], RetentionRules(2, 30, 2, 2)) == select_retained(
        RUN, RetentionRules(2, 30, 2, 2)
    )
    close = [CheckpointInfo(step, step * 600.0) for step in range(6)]
    assert list(select_retained(close, RetentionRules(0, every_hours=0.5))) == [0, 3]


def test_retention_rules_from_config():
    config = CheckpointConfig(keep=2, keep_every_steps=3, keep_every_hours=0.5, keep_best=4)
    assert RetentionRules.of(config) == RetentionRules(2, 3, 0.5, 4)
    config = CheckpointConfig(best_metric="eval/a/accuracy", best_mode="max")
    assert RetentionRules.of(config).better == BestMetric("eval/a/accuracy", is_largest=True)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.none() | st.floats()), max_size=12),
    st.builds(
        RetentionRules, st.integers(1, 4), st.integers(0, 4), st.floats(0, 9), st.integers(0, 3)
    ),
)
def test_retention_always_keeps_newest_and_is_idempotent(
    values: list[tuple[float, float | None]], rules: RetentionRules
):
    saved = [
        CheckpointInfo(step, time, {} if loss is None else {"eval/loss": loss})
        for step, (time, loss) in enumerate(values)
    ]
    stay = select_retained(saved, rules)
    assert {one.step for one in saved[-rules.newest :]} <= stay.keys() <= {s.step for s in saved}
    # Pruning is idempotent: the remaining checkpoints are all retained the next time.
    left = [one for one in saved if one.step in stay]
    assert select_retained(left, rules).keys() == stay.keys()
