"""Which checkpoints stay, rule by rule and together."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from maxpipe.checkpoint.retention import Rules, Saved, kept
from maxpipe.config.schema import CheckpointConfig

HOUR = 3600.0
RUN = [Saved(step, step / 10 * HOUR, 3 - step / 100) for step in range(10, 101, 10)]


def test_each_rule_keeps_its_own():
    assert list(kept(RUN, Rules(2))) == [90, 100]
    assert list(kept(RUN, Rules(1, every_steps=40))) == [40, 80, 100]
    # Step 10 was saved after an hour: the periods begin at 0, 4 and 8 hours.
    assert list(kept(RUN, Rules(1, every_hours=4))) == [10, 40, 80, 100]
    assert list(kept(RUN, Rules(0, best=3))) == [80, 90, 100]
    assert kept(RUN, Rules(0)) == {} == kept([], Rules(3, 1, 1, 1))


def test_reasons_are_told_together():
    assert kept(RUN, Rules(1, 50, 0, 1))[100] == "newest; every 50 steps; best, loss 2.0000"


def test_what_was_not_evaluated_is_not_best():
    odd = [Saved(1, 0.0, math.nan), Saved(2, 0.0), Saved(3, 0.0, 5.0), Saved(4, 0.0, -math.inf)]
    assert list(kept(odd, Rules(0, best=4))) == [3]


def test_order_does_not_matter_and_half_hours_do():
    assert kept(RUN[::-1], Rules(2, 30, 2, 2)) == kept(RUN, Rules(2, 30, 2, 2))
    close = [Saved(step, step * 600.0) for step in range(6)]
    assert list(kept(close, Rules(0, every_hours=0.5))) == [0, 3]


def test_config_states_rules():
    config = CheckpointConfig(keep=2, keep_every_steps=3, keep_every_hours=0.5, keep_best=4)
    assert Rules.of(config) == Rules(2, 3, 0.5, 4)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.none() | st.floats()), max_size=12),
    st.builds(Rules, st.integers(1, 4), st.integers(0, 4), st.floats(0, 9), st.integers(0, 3)),
)
def test_rules_only_add_to_the_newest(values: list[tuple[float, float | None]], rules: Rules):
    saved = [Saved(step, time, loss) for step, (time, loss) in enumerate(values)]
    stay = kept(saved, rules)
    assert {one.step for one in saved[-rules.newest :]} <= stay.keys() <= {s.step for s in saved}
    # What is kept now is kept after the rest is deleted: pruning twice changes nothing.
    left = [one for one in saved if one.step in stay]
    assert kept(left, rules).keys() == stay.keys()
