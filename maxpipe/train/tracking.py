"""Connect a run to experiment trackers and alerts."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import maxpipe
from maxpipe.config.config_files import FORECAST_FILE
from maxpipe.config.load import to_dict, to_yaml
from maxpipe.config.plugins import loaded_plugins
from maxpipe.config.schema import Config, flatten, without_permissions
from maxpipe.config.sections.log import TENSORBOARD
from maxpipe.io import files, redact
from maxpipe.profiles.run_comparison import MAX_FORECAST_BYTES
from maxpipe.schedule.pictures import draw_overview
from maxpipe.schedule.table import Schedule
from maxpipe.telemetry.alerts import Alerts
from maxpipe.telemetry.trackers.delivery import Trackers, TrackingContext
from maxpipe.telemetry.trackers.interface import TrackedRun
from maxpipe.telemetry.writers import RecordObserver
from maxpipe.train.session import Session, ownership_check

_GIT_SECONDS = 5.0


def open_tracking(session: Session, schedule: Schedule) -> Sequence[RecordObserver]:
    """Start the trackers and alerts of process 0, which are closed at the end of the session."""
    if not session.is_first_process:
        return ()
    config = session.config
    observers: list[RecordObserver] = []
    names = [name for name in config.log.trackers if name != TENSORBOARD]
    if names:
        observers.append(_open_trackers(session, names, schedule))
    alerts = Alerts(config.alerts, session.run_dir, session.events, session.console.warn)
    if alerts.has_rules:
        session.events.observers.append(alerts.observe_event)
        session.stack.callback(alerts.close)
        observers.append(alerts)
    return observers


def _open_trackers(session: Session, names: Sequence[str], schedule: Schedule) -> Trackers:
    config, artifacts = session.config, session.config.tracker.artifacts
    trackers = Trackers(
        names,
        TrackingContext(
            run_dir=session.run_dir,
            config=config.tracker,
            plugins=[
                each.item
                for each in loaded_plugins(config.plugins.modules)
                if any(f"log.trackers={name}" in each.undo for name in names)
            ],
            describe=_describe(config, os.path.abspath(session.run_dir)),
            events=session.events,
            warn=session.console.warn,
            note=session.console.note,
            ours=ownership_check(session.locks),
        ),
    )
    if "config" in artifacts:
        text = to_yaml(redact.redact_value(without_permissions(config)))
        trackers.log_artifact("config.yml", text)
    if "plan" in artifacts:
        try:
            text = files.read(session.run_dir / FORECAST_FILE, MAX_FORECAST_BYTES).decode()
        except (OSError, ValueError) as error:
            session.console.warn(f"{FORECAST_FILE} cannot be sent to trackers: {error}")
        else:
            trackers.log_artifact(FORECAST_FILE, text)
    if "schedule" in artifacts:
        trackers.log_artifact("schedule.svg", draw_overview(schedule).svg())
    if "checkpoints" in artifacts:

        def observe(event: str, fields: Mapping[str, Any]) -> None:
            if event == "checkpoint":
                trackers.log_checkpoint(fields["step"], fields["folder"], fields["bytes"])

        session.events.observers.append(observe)

    def close(kind: object, error: BaseException | None, trace: object) -> None:
        trackers.close(is_complete=error is None)

    session.stack.push(close)
    return trackers


def _describe(config: Config, folder: str) -> Callable[[], TrackedRun]:
    """Return a function that returns the description of the run. Its first call may take
    seconds.
    """

    @functools.cache
    def describe() -> TrackedRun:
        versions = {"version": maxpipe.__version__, "jax_version": jax.__version__}
        shareable = redact.redact_value(without_permissions(config))
        return TrackedRun(
            name=config.run.name,
            project=config.tracker.project,
            key="",
            folder=folder,
            config=flatten(to_dict(shareable)),
            tags=versions | git_state(os.getcwd()),
            tracker_config=config.tracker,
        )

    return describe


def git_state(folder: str) -> dict[str, str]:
    """Return the commit of a git repository and whether tracked files have changed. Return an empty
    dict outside a repository.
    """
    # A hook of the repository must not run.
    command = ["git", "-C", folder, "-c", "core.fsmonitor=false", "--no-optional-locks"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit, status = (
            subprocess.run(
                [*command, *arguments], capture_output=True, timeout=_GIT_SECONDS, check=True
            ).stdout.decode(errors="replace")
            for arguments in (
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
        return {"git_commit": commit.strip(), "git_dirty": str(bool(status.strip())).lower()}
    return {}
