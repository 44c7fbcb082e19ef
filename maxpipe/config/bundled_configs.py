"""Bundled configs, in `configs/` of a checkout or in its copy in the installed package.

This module also defines the names of files and folders in a run folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

SUFFIX = ".yml"
_FOLDERS = (
    Path(__file__).parents[1] / "configs",  # installed package
    Path(__file__).parents[2] / "configs",  # source checkout
)


@dataclass(frozen=True, slots=True)
class BundledConfig:
    """A config that commands accept by name instead of a file."""

    name: str
    kind: Literal["run", "model", "sft"]
    """Type of the config. A `model` config is merged with a file or overrides that configure the
    training. An `sft` config fine-tunes the model in the folder `base` on conversations."""
    path: Path

    @property
    def text(self) -> str:
        """Content of the file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def summary(self) -> str:
        """First sentence of the comment at the start of the file."""
        lines = []
        for line in self.text.splitlines():
            if not line.startswith("# "):
                break
            lines.append(line[2:].strip())
        return re.split(r"(?<=\.)\s", " ".join(lines), maxsplit=1)[0]


@cache
def folder() -> Path:
    """Return the folder of the bundled configs."""
    found = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    assert found is not None, f"configs are in none of {_FOLDERS}"
    return found


@cache
def configs() -> Mapping[str, BundledConfig]:
    """Return the bundled configs, keyed by name: runs for beginners, then models in order of size,
    then fine-tuning runs.
    """
    runs = [BundledConfig(path.stem, "run", path) for path in sorted(folder().glob(f"*{SUFFIX}"))]
    found = {
        kind: [
            BundledConfig(path.stem, kind, path)
            for path in sorted((folder() / kind).glob(f"*{SUFFIX}"), key=_by_number)
        ]
        for kind in ("model", "sft")
    }
    return {each.name: each for each in (*runs, *found["model"], *found["sft"])}


def _by_number(path: Path) -> list[str]:
    """Return a sort key that orders `8b` before `70b`."""
    return [part.zfill(9) if part.isdecimal() else part for part in re.split(r"(\d+)", path.stem)]


def find_config(argument: str) -> BundledConfig | None:
    """Return the bundled config with this name. Return None if it does not exist, or if a local
    file has the same name.
    """
    if os.path.isfile(argument):
        return None
    return configs().get(argument) or (None if os.path.lexists(argument) else find_model(argument))


def find_model(text: str) -> BundledConfig | None:
    """Return the bundled model with this name in any spelling, such as
    `meta-llama/Llama-3.1-8B`.
    """
    if found := configs().get(text):
        return found if found.kind == "model" else None
    return _models().get(_normalize_model_name(text))


def is_hub_id(text: str) -> bool:
    """Whether the text has the form `OWNER/NAME`, like the name of a model on the Hugging Face
    Hub.
    """
    form = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
    return re.fullmatch(form, text) is not None and not os.path.lexists(text.partition("/")[0])


def hub_download_action(text: str) -> str:
    """Return the suggested action that downloads this model from the Hub."""
    folder = text.rpartition("/")[2]
    return f"Run `hf download {text} --local-dir {folder}`, and give the folder {folder}."


def _normalize_model_name(text: str) -> str:
    """Return the letters and digits of a model name, without the owner and the tuning variant."""
    words = re.split(r"[^a-z0-9]+", text.rpartition("/")[2].lower().removesuffix(SUFFIX))
    return "".join(word for word in words if word not in _TUNED)


_TUNED = ("instruct", "it", "chat", "base", "hf", "pt", "meta")
"""Words in model names that do not affect the shape of the model."""

_SAME_SHAPE = {"Llama-3.3-70B": "llama3.1-70b"}
"""Maps names of models to bundled models with the same shape."""


@cache
def _models() -> Mapping[str, BundledConfig]:
    """Return the bundled models, keyed by the normalized forms of their names and of the source
    names in their files.
    """
    models = [each for each in configs().values() if each.kind == "model"]
    sources = {
        _normalize_model_name(source): each
        for each in models
        for source in re.findall(r"config\.json of\s+(?:#\s*)?(\S+/\S*[A-Za-z0-9])", each.text)
    }
    same = {_normalize_model_name(name): configs()[model] for name, model in _SAME_SHAPE.items()}
    return same | sources | {_normalize_model_name(each.name): each for each in models}


CONFIG_FILE = "config.yml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
REFERENCE_FILE = "references.npz"
TENSORBOARD_FOLDER = "tensorboard"
