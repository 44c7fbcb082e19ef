"""Compare kernels with plain operations before a run uses them on new hardware.

A kernel can return wrong results on one device type or with one jax release without visibly
affecting the loss curve. Each check runs kernels of the model on small arrays, and compares outputs
and gradients with float32 references. The check allows errors a few times larger than those of
plain operations in the run's dtype. The outcome is recorded in the run's events, so that the check
is not repeated on the same hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.errors import ConfigError
from maxpipe.io.files import read_json_lines
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.train.session import Session

_EVENT = "kernels_checked"
_TOLERANCE_FACTOR = 4.0
"""Maximum ratio of a kernel's error to the error of the plain operations."""
_MIN_TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-6}
"""Error that every kernel is allowed, relative to the array's largest element."""


_MAX_REASON = 300


class _CheckEvent(TypedDict):
    event: Literal["kernels_checked"]
    what: str


@dataclass(frozen=True)
class KernelDeviation:
    """Errors of outputs and gradients, relative to the largest element of the reference array."""

    backend: str
    result: float
    gradients: float
    limit: float

    @property
    def ok(self) -> bool:
        """Return whether the errors are within the limit. NaN errors are not."""
        return self.result <= self.limit and self.gradients <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.backend} has errors of {self.result:.1e} in results and {self.gradients:.1e} "
            f"in gradients; at most {self.limit:.1e} is allowed"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:_MAX_REASON]


class KernelCheck(NamedTuple):
    """A check of all kernels of one kind that a model uses."""

    kind: str
    """Kind of kernels, such as `attention`."""
    cases: Sequence[str]
    """Backend, sizes and options of each compared kernel, equal on all processes. Empty if the
    model uses no kernels."""
    compare: Callable[[], Sequence[KernelDeviation]]
    """Run all cases."""
    error: Callable[[str], ConfigError]
    """Return the error of a run with a wrong kernel, given the violated rule."""
    mesh: Mesh | None = None
    """Mesh of a check in which all processes take part. None: each process uses its first device.
    """

    def description(self, dtype: str) -> str:
        """Return a string that identifies the check: device, jax version, backends and sizes."""
        where = f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}, {dtype}"
        return f"{where}: {'; '.join(self.cases)}"

    def run(self) -> KernelDeviation | None:
        """Return the largest deviation, or None if there are no cases."""
        if not self.cases:
            return None
        with jax.set_mesh(self.mesh or build_mesh(MeshConfig(), jax.local_devices()[:1])):
            return max(self.compare(), key=lambda each: (not each.ok, each.gradients))


def deviation(
    backend: str,
    dtype: str,
    exact: Sequence[Any],
    plain: Sequence[Any],
    found: Sequence[Any],
) -> KernelDeviation:
    """Compare arrays with references in float32. The first array is the output, and the others are
    gradients.

    Args:
        backend: name of the backend.
        dtype: dtype of the run.
        exact: arrays that plain operations computed in float32.
        plain: arrays that plain operations computed in `dtype`.
        found: arrays that the backend computed in `dtype`.
    """
    of_plain, own = (
        [_distance(*pair) for pair in zip(arrays, exact, strict=True)] for arrays in (plain, found)
    )
    limit = max(_MIN_TOLERANCE[dtype], _TOLERANCE_FACTOR * max(of_plain))
    return KernelDeviation(backend, own[0], max(own[1:]), limit)


def _distance(found: Any, exact: Any) -> float:
    """Return the relative error; NaN becomes infinity, because `max` would ignore NaN."""
    found, exact = (np.asarray(each, np.float64) for each in (found, exact))
    distance = float(np.abs(found - exact).max() / np.abs(exact).max())
    return distance if np.isfinite(distance) else np.inf


def check_kernels(session: Session, checks: Sequence[KernelCheck]) -> None:
    """Run the checks that this run has not already passed on this hardware.

    Raises:
        ConfigError: on at least one process, the errors exceed the limit or a kernel fails.
    """
    for check in checks:
        _check(session, check)


def _check(session: Session, check: KernelCheck) -> None:
    if not check.cases:
        return
    found, fault = None, ""
    where = f"on {jax.local_devices()[0].device_kind} with jax {jax.__version__}"
    description = check.description(session.config.model.compute_dtype)
    is_due = not _was_checked(session.run_dir, description)
    if check.mesh is not None:
        verdicts = session.channel.compare_across_processes(f"{check.kind} due", str(is_due))
        is_due = str(True) in verdicts
    if is_due:
        with session.console.stage(f"checking {check.kind}"):
            try:
                found = check.run()
            except Exception as error:
                fault = f"fails {where}: {_first_line(error)}"
                if check.mesh is not None:
                    # Other processes may wait for this one in the exchange, so this process cannot
                    # compare its result with theirs. The exchange also fails if a process is lost,
                    # which the control channel then reports instead of this error.
                    raise check.error(fault) from error
    if found is not None and not found.ok:
        fault = (
            f"differs from plain {check.kind} {where}: {found}, relative to the largest element."
        )
    # Processes that ran no check also join this collective: if one must stop, all must stop.
    if worst := max(session.channel.compare_across_processes(check.kind, fault)):
        raise check.error(worst)
    if found is not None:
        session.console.note(f"{check.kind}: {found}")
        session.events.write(
            _EVENT,
            kind=check.kind,
            what=description,
            result=found.result,
            gradients=found.gradients,
        )


def _was_checked(run_dir: Path, description: str) -> bool:
    try:
        events = read_json_lines(run_dir / EVENTS_FILE, _CheckEvent)
        return any(event["what"] == description for event in events)
    except OSError:
        return False
