"""Config section `log`: console output, metrics and experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from maxpipe.config.rules import add_ranges, rule, unknown_names
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

TENSORBOARD = "tensorboard"
TRACKER_PACKAGES: dict[str, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio",),
    "prometheus": (),
    "otlp": ("opentelemetry-exporter-otlp-proto-http",),
}
"""Maps trackers to the distributions that contain their client. One of them must be installed; the
extra of maxpipe with the name of the tracker installs it."""

TRACKERS: dict[str, Callable[[], Any]] = {}
"""Functions that create trackers of plug-ins, keyed by name."""


def known_trackers() -> tuple[str, ...]:
    """Return the valid items of `log.trackers`."""
    return (TENSORBOARD, *TRACKER_PACKAGES, *TRACKERS)


_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


def upgrade_trackers(value: Any) -> Any:
    """Convert the boolean value of the former key `log.tensorboard` to a list."""
    word = str(value).lower() if isinstance(value, str | bool) else None
    if word in _TRUE:
        return [TENSORBOARD]
    if word in _FALSE:
        return []
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Console output, metrics and experiment trackers during training."""

    every: int = 10
    """Number of steps between records in `metrics.jsonl`, trackers and the console."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """Console output: a `live` view or `plain` lines. `auto` uses `live` if the output is a
    terminal."""
    trackers: list[str] = field(
        default_factory=lambda: [TENSORBOARD],
        hash=False,  # a list has no hash
        metadata=renamed_from("tensorboard", values=upgrade_trackers),
    )
    """Experiment trackers that receive the records of `metrics.jsonl`: `tensorboard`, `wandb`,
    `mlflow`, `trackio`, `prometheus`, `otlp`, or a tracker of a plug-in. `[]` disables all of them.
    Most trackers require an extra, such as `pip install 'maxpipe[wandb]'`. The section `tracker`
    configures them."""


add_ranges(
    Bound("log.every", 10, 1),
)


@rule("log.trackers")
def _trackers_exist(config: Config) -> Iterator[RuleViolation]:
    names = config.log.trackers
    yield from unknown_names("log.trackers", names, known_trackers(), TENSORBOARD)
    if len(set(names)) < len(names):
        distinct = ", ".join(dict.fromkeys(names))
        yield RuleViolation(
            Code.CFG_VALUE,
            "log.trackers",
            "must not contain a name twice.",
            f"Set log.trackers=[{distinct}].",
        )
