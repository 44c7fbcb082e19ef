"""The best layouts of a search, compiled and ranked again by what the compiler says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maxpipe.config.load import Loaded
from maxpipe.errors import ConfigError
from maxpipe.plan.compile import Report, compile_step
from maxpipe.plan.search import Found
from maxpipe.plan.topology import Topology

COMPUTE = ("layers", "bubble", "head", "update", "ticks")
"""Parts of a forecast that the compiler's estimate of cycles stands in for."""


@dataclass(frozen=True)
class Checked:
    """A layout, and the compiler's report; None if it needs more memory than there is."""

    found: Found
    report: Report | None

    @property
    def fits(self) -> bool:
        """Whether a device has room for it, by the compiler."""
        return self.report is not None and self.report.fits

    @property
    def seconds(self) -> float:
        """Of a step: the compiler's compute where it gives any, and the forecast's traffic."""
        foretold = self.found.cost
        if self.report is None or not self.report.seconds:
            return foretold.seconds
        traffic = sum(time for name, time in foretold.parts.items() if name not in COMPUTE)
        return self.report.seconds + traffic


def recheck(
    best: Sequence[Found], topology: Topology, tell: Callable[[str], None]
) -> list[Checked]:
    """Compiles each layout; those that fit come first, the fastest in front.

    Args:
        best: of a search on this topology.
        topology: what is compiled for.
        tell: is given a line before each compilation.
    """
    checked = []
    for place, found in enumerate(best, 1):
        keys = " ".join(f"{key}={value}" for key, value in found.changes.items())
        tell(f"compiling {place} of {len(best)}: {keys}")
        try:
            report = compile_step(Loaded(found.config, {}), topology)
        except ConfigError as error:
            tell(str(error))
            report = None
        checked.append(Checked(found, report))
    return sorted(checked, key=lambda each: (not each.fits, each.seconds))
