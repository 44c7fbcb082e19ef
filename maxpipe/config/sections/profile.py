"""Config section `profile`: profiles of training steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maxpipe.config.rules import add_ranges, rule
from maxpipe.config.sections.train import total_steps
from maxpipe.errors import Code, Problem, RuleViolation
from maxpipe.models.config import LARGEST, Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Profiles of training steps, which `maxpipe profile` prints and XProf shows.

    The signal SIGUSR1 to any process of a run also starts a profile.
    """

    at: list[int] = field(default_factory=list)
    """Steps at which a profile starts, such as `[100, 200]`. A profile is written to
    `profiles/step_000100` in the run folder."""
    steps: int = 3
    """Number of consecutive steps in a profile."""
    slow_step: float = 0.0
    """Factor by which a step must exceed the median step time to start a profile. A common value is
    1.5. 0 disables these profiles."""
    alarm: float = 1.5
    """Factor by which profiled steps must exceed the median step time for a warning that names the
    slow stage. The median is computed from earlier steps that were not profiled. 0 disables the
    warning."""
    max_profiles: int = 5
    """Maximum number of profiles that slow steps and signals start until the run is restarted.
    Profiles at the steps in `profile.at` are not limited."""
    python: bool = False
    """Record the calls of Python functions. The trace is then larger, and the steps are slower."""


add_ranges(
    Bound("profile.steps", 3, 1),
    Bound("profile.slow_step", 1.5, 0, LARGEST, "0 disables these profiles"),
    Bound("profile.alarm", 1.5, 0, LARGEST, "0 disables the warning"),
    Bound("profile.max_profiles", 5, 0, why="0 allows only the profiles in profile.at"),
)


@rule("profile.at", "profile.steps")
def _profiles_do_not_overlap(config: Config) -> Iterator[RuleViolation]:
    at, steps = config.profile.at, config.profile.steps
    if any(step < 1 for step in at):
        yield RuleViolation(
            Code.CFG_VALUE,
            "profile.at",
            "must contain steps of at least 1, which is the first step.",
            f"Set profile.at={_listed(sorted({max(1, step) for step in at}))}.",
        )
    kept: list[int] = []
    for step in sorted(at):
        if not kept or step >= kept[-1] + steps:
            kept.append(step)
    if len(kept) < len(at):
        yield RuleViolation(
            Code.CFG_VALUE,
            "profile.at",
            f"must contain steps that are at least profile.steps={steps} apart.",
            f"Set profile.at={_listed(kept)}.",
        )


def profile_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about profiles that a run never records."""
    at, last = config.profile.at, total_steps(config.train)
    if last and max(at, default=0) > last:
        yield Problem(
            Code.CFG_VALUE,
            "profile.at",
            _listed(at),
            f"contains steps after the last one, which is step {last}: these profiles are not "
            "recorded.",
            f"Set profile.at={_listed([step for step in at if step <= last])}, or increase "
            "train.steps.",
        )


def _listed(steps: list[int]) -> str:
    """Format a list without spaces, so that it is one word on a command line."""
    return f"[{','.join(map(str, steps))}]"


@rule("profile.slow_step", "profile.alarm")
def _factors_exceed_one(config: Config) -> Iterator[RuleViolation]:
    for name in ("slow_step", "alarm"):
        if 0 < getattr(config.profile, name) <= 1:
            yield RuleViolation(
                Code.CFG_VALUE,
                f"profile.{name}",
                "must be more than 1, or 0: about half of all steps exceed the median.",
                f"Set profile.{name}=1.5.",
            )
