"""The best layouts of a search, ranked again by the compiler's report or by measurement."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from maxpipe.config.load import Loaded
from maxpipe.errors import ConfigError
from maxpipe.plan.compile import Report, build_steps, compile_step, unreported
from maxpipe.plan.learn import next_to_run
from maxpipe.plan.search import Candidate
from maxpipe.plan.timed_steps import medians, step_of
from maxpipe.plan.topology import Topology

COMPUTE = ("layers", "bubble", "outside", "head", "update", "ticks")
"""Parts of a forecast that the compiler's estimate of cycles replaces."""
MEASURED_SECONDS = 10.0
"""Seconds for which a layout's steps run, at least three of them."""


@dataclass(frozen=True)
class Checked:
    """A layout that was compiled or run."""

    candidate: Candidate
    report: Report | None = None
    """The compiler's report; None if it was not compiled, or needs too much memory."""
    measured: float | None = None
    """Seconds of a step on the devices."""

    @property
    def fits(self) -> bool:
        """Whether a device has room for it, by the compiler or because it ran."""
        return self.measured is not None or (self.report is not None and self.report.fits)

    @property
    def seconds(self) -> float:
        """Seconds of a step: measured, or the compiler's compute, if any, and predicted traffic."""
        predicted = self.candidate.cost
        if self.measured is not None:
            return self.measured
        if self.report is None or not self.report.seconds:
            return predicted.seconds
        traffic = sum(time for name, time in predicted.parts.items() if name not in COMPUTE)
        return self.report.seconds + traffic


def recheck(
    best: Sequence[Candidate],
    topology: Topology,
    tell: Callable[[str], None],
    begin: Callable[[str], None] = unreported,
) -> list[Checked]:
    """Compiles each layout; those that fit come first, the fastest in front.

    Args:
        best: of a search on this topology.
        topology: the target of the compilation.
        tell: called with a line before each compilation.
        begin: called with the name of each phase of a compilation.
    """
    checked = []
    for number, candidate in enumerate(best, 1):
        tell(_line("compiling", number, len(best), candidate))
        try:
            report = compile_step(Loaded(candidate.config, {}), topology, None, None, begin)
        except ConfigError as error:
            tell(str(error))
            report = None
        checked.append(Checked(candidate, report))
    return _ranked(checked)


def run_best(
    candidates: Sequence[Candidate], count: int, devices: Sequence[Any], tell: Callable[[str], None]
) -> list[Checked]:
    """Runs steps of `count` layouts on synthetic data; the fastest come first, failures last.

    The first is the best by forecast. Each result corrects the forecasts of similar layouts, which
    chooses the next one.

    Args:
        candidates: of a search for the same number of devices, the best predicted first.
        count: how many to run, if there are as many.
        devices: of this machine.
        tell: called with a line before each layout.
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
