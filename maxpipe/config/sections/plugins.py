"""Config section `plugins`: Python code from outside the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maxpipe.io.typed_json import renamed_from


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginsConfig:
    """Python code that adds families, objectives, data sources, schedules or trackers."""

    modules: list[str] = field(
        default_factory=list,
        hash=False,  # a list has no hash
        metadata={**renamed_from("model.module", values=_as_list), "alias": True},
    )
    """Plug-ins to load: Python files, such as `[plugin.py]`, names of entry points in the group
    `maxpipe.plugins`, or importable modules. `model.module=plugin.py` is a short form."""
    allow_code: bool = False
    """Allow the code in `plugins.modules` to run. The code runs with your permissions. The value is
    read only from config files and from the command line, never from a checkpoint or the config.yml
    of a run folder, and is not saved."""
    allow_change: bool = False
    """Resume or evaluate a run even if the code of a plug-in has changed since the checkpoint was
    saved."""
