"""The best layouts of a search, ranked again by what the compiler or the devices say."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from maxpipe.config.load import Loaded
from maxpipe.errors import ConfigError
from maxpipe.plan.calibrate import medians, step_of
from maxpipe.plan.compile import Report, build_steps, compile_step
from maxpipe.plan.learn import next_to_run
from maxpipe.plan.search import Candidate
from maxpipe.plan.topology import Topology

COMPUTE = ("layers", "bubble", "head", "update", "ticks")
"""Parts of a forecast that the compiler's estimate of cycles stands in for."""
MEASURED_SECONDS = 10.0
"""For which a layout's steps run, at least three of them."""


@dataclass(frozen=True)
class Checked:
    """A layout that was compiled or run."""

    candidate: Candidate
    report: Report | None = None
    """The compiler's; None if it was not asked, or the step needs more memory than there is."""
    measured: float | None = None
    """Seconds of a step on the devices."""

    @property
    def fits(self) -> bool:
        """Whether a device has room for it, by the compiler or because it ran."""
        return self.measured is not None or (self.report is not None and self.report.fits)

    @property
    def seconds(self) -> float:
        """Of a step: measured, or the compiler's compute, if any, and the forecast's traffic."""
        predicted = self.candidate.cost
        if self.measured is not None:
            return self.measured
        if self.report is None or not self.report.seconds:
            return predicted.seconds
        traffic = sum(time for name, time in predicted.parts.items() if name not in COMPUTE)
        return self.report.seconds + traffic


def recheck(
    best: Sequence[Candidate], topology: Topology, tell: Callable[[str], None]
) -> list[Checked]:
    """Compiles each layout; those that fit come first, the fastest in front.

    Args:
        best: of a search on this topology.
        topology: what is compiled for.
        tell: is given a line before each compilation.
    """
    checked = []
    for number, candidate in enumerate(best, 1):
        tell(_line("compiling", number, len(best), candidate))
        try:
            report = compile_step(Loaded(candidate.config, {}), topology)
        except ConfigError as error:
            tell(str(error))
            report = None
        checked.append(Checked(candidate, report))
    return _ranked(checked)


def run_best(
    candidates: Sequence[Candidate], count: int, devices: Sequence[Any], tell: Callable[[str], None]
) -> list[Checked]:
    """Runs steps of `count` layouts on made-up data; the fastest come first, what fails last.

    The first is the best predicted. What ran corrects the forecasts of layouts like it, and so says
    which one is next.

    Args:
        candidates: of a search for so many devices, the best predicted in front.
        count: how many to run, if there are as many.
        devices: of this machine.
        tell: is given a line before each layout.
    """
    ran: dict[int, float | None] = {}
    count = min(count, len(candidates))
    while len(ran) < count:
        index = next_to_run(candidates, ran)
        tell(_line("measuring", len(ran) + 1, count, candidates[index]))
        ran[index] = _measured(candidates[index], devices, tell)
    return _ranked([Checked(candidates[index], measured=taken) for index, taken in ran.items()])


def _measured(
    candidate: Candidate, devices: Sequence[Any], tell: Callable[[str], None]
) -> float | None:
    """Seconds of its step; None if a device has too little memory."""
    seconds = None
    try:
        step = step_of(build_steps(candidate.config, devices))
        (seconds,) = medians([step], MEASURED_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tell("a device has too little memory for it")
    step = None  # and with it parameters and optimizer state
    gc.collect()
    return seconds


def _line(doing: str, number: int, count: int, candidate: Candidate) -> str:
    return f"{doing} {number} of {count}: {candidate.words}"


def _ranked(checked: Sequence[Checked]) -> list[Checked]:
    return sorted(checked, key=lambda each: (not each.fits, each.seconds))
