"""Find bundled configs and resolve command-line arguments to config files.

Bundled configs are stored in `configs/` of a source checkout, and in a copy of that folder in the
installed package. An argument is a path or the name of a bundled config.

This module also defines the names of files and folders in a run folder.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from maxpipe.config.rules import did_you_mean, folder_name
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.files import read

SUFFIX = ".yml"
_FOLDERS = (
    Path(__file__).parents[1] / "configs",  # installed package
    Path(__file__).parents[2] / "configs",  # source checkout
)


@dataclass(frozen=True, slots=True)
class BundledConfig:
    """Bundled config, which commands accept by name instead of by path."""

    name: str
    kind: Literal["run", "model", "sft"]
    """Type of the config. A `model` config defines only a model, and is merged with a file or
    overrides that configure training. An `sft` config fine-tunes the model in the folder `base` on
    conversations."""
    path: Path

    @property
    def text(self) -> str:
        """Text of the file."""
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
def bundled_folder() -> Path:
    """Return the folder of the bundled configs."""
    found = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    assert found is not None, f"no configs found in any of {_FOLDERS}"
    return found


@cache
def bundled_configs() -> Mapping[str, BundledConfig]:
    """Return the bundled configs, keyed by name. Configs for first runs come first, then models,
    then fine-tuning runs. Models are ordered by size.
    """
    runs = [
        BundledConfig(path.stem, "run", path)
        for path in sorted(bundled_folder().glob(f"*{SUFFIX}"))
    ]
    found = {
        kind: [
            BundledConfig(path.stem, kind, path)
            for path in sorted((bundled_folder() / kind).glob(f"*{SUFFIX}"), key=_by_number)
        ]
        for kind in ("model", "sft")
    }
    return {each.name: each for each in (*runs, *found["model"], *found["sft"])}


def _by_number(path: Path) -> list[str]:
    """Return a sort key that orders `8b` before `70b`."""
    return [part.zfill(9) if part.isdecimal() else part for part in re.split(r"(\d+)", path.stem)]


def find_config(argument: str) -> BundledConfig | None:
    """Return the bundled config with this name, or None if it does not exist or a local file has
    the same name.
    """
    if os.path.isfile(argument):
        return None
    return bundled_configs().get(argument) or (
        None if os.path.lexists(argument) else find_model(argument)
    )


def find_model(text: str) -> BundledConfig | None:
    """Return the bundled model for a model name in any common spelling, such as
    `meta-llama/Llama-3.1-8B`.
    """
    if found := bundled_configs().get(text):
        return found if found.kind == "model" else None
    return _models().get(_normalize_model_name(text))


def is_hub_id(text: str) -> bool:
    """Return True if the string has the form `OWNER/NAME` of a model ID on the Hugging Face Hub."""
    form = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
    return re.fullmatch(form, text) is not None and not os.path.lexists(text.partition("/")[0])


def hub_download_action(text: str) -> str:
    """Return a message that explains how to download this model from the Hugging Face Hub."""
    folder = text.rpartition("/")[2]
    return f"Run `maxpipe fetch hf:{text} --out {folder}`, and use the folder {folder}."


def _normalize_model_name(text: str) -> str:
    """Return the lower-case letters and digits of a model name, without owner and tuning
    variant.
    """
    words = re.split(r"[^a-z0-9]+", text.rpartition("/")[2].lower().removesuffix(SUFFIX))
    return "".join(word for word in words if word not in _TUNED)


_TUNED = ("instruct", "it", "chat", "base", "hf", "pt", "meta")
"""Words in model names that do not affect the shape of the model."""

_SAME_SHAPE = {"Llama-3.3-70B": "llama3.1-70b"}
"""Maps model names to bundled models with the same shape."""


@cache
def _models() -> Mapping[str, BundledConfig]:
    """Return the bundled models, keyed by normalized name, including the names of the published
    models listed in their files.
    """
    models = [each for each in bundled_configs().values() if each.kind == "model"]
    sources = {
        _normalize_model_name(source): each
        for each in models
        for source in re.findall(r"config\.json of\s+(?:#\s*)?(\S+/\S*[A-Za-z0-9])", each.text)
    }
    same = {
        _normalize_model_name(name): bundled_configs()[model] for name, model in _SAME_SHAPE.items()
    }
    return same | sources | {_normalize_model_name(each.name): each for each in models}


CONFIG_FILE = "config.yml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LAYERS_FILE = "layers.jsonl"
EVENTS_FILE = "events.jsonl"
FORECAST_FILE = "forecast.json"
REFERENCE_FILE = "references.npz"
TENSORBOARD_FOLDER = "tensorboard"
EVALUATIONS_FOLDER = "evaluations"
PROFILES_FOLDER = "profiles"
TRACKERS_FILE = "trackers.json"
CHECKPOINTS_FOLDER = "checkpoints"
"""Name of the checkpoint folder inside the run folder, or inside the run's folder in
`checkpoint.dir`."""

SUFFIXES = (".yml", ".yaml")
_PROGRAMS = (".py", ".sh", ".ipynb")
_DATA = (".jsonl", ".parquet", ".txt", ".array_record", ".arrayrecord", ".arrow", ".gz", ".zst")
FOREIGN_SUFFIXES = (".toml", ".json")
"""Suffixes of other trainers' config files, which can be translated but cannot be used directly for
training."""
_MAX_BYTES = 1 << 20
_LIST = "`maxpipe configs list` lists the bundled configs"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Path to a config file; the file may not exist."""

    path: Path
    origin: str
    """Name of the file as shown in messages and by `config print --origin`."""
    argument: str = ""
    """Hugging Face model ID by which the user selected the file, if any."""

    @property
    def run_name(self) -> str:
        """Default run name for this file."""
        return folder_name(self.path.stem)


def locate(argument: str, keys: Collection[str]) -> ConfigFile:
    """Return the config file named by a command-line argument that is not an override. `keys`
    contains all config keys.

    Raises:
        ConfigError: the argument is neither a path nor the name of a bundled config.
    """
    path = Path(argument)
    if path.suffix in SUFFIXES:
        return ConfigFile(path, argument)
    if found := find_config(argument):
        _check_ambiguous_name(found)
        by_hub = argument if "/" in argument else ""
        return ConfigFile(found.path, f"shipped config {found.name}", by_hub)
    if path.suffix in FOREIGN_SUFFIXES and not os.path.isdir(argument):
        return ConfigFile(path, argument)
    raise ConfigError([_missing_config_problem(argument, keys)])


def _check_ambiguous_name(found: BundledConfig) -> None:
    """Reject the name of a bundled config if a local file has the same name but different
    content.
    """
    here = Path(f"{found.name}{SUFFIX}")
    try:
        if not here.is_file() or read(here, _MAX_BYTES) == found.path.read_bytes():
            return
    except OSError:
        pass
    raise ConfigError.one(
        Code.CFG_FILE,
        f"command line: {found.name}",
        None,
        f"is ambiguous: it is a bundled config, but {here} in this folder has different content.",
        f"Write {here} to use the local file, or rename the file.",
    )


def _missing_config_problem(argument: str, keys: Collection[str]) -> Problem:
    where = f"command line: {argument}" if argument else "command line: empty argument"
    if argument in keys:
        return Problem(
            Code.CFG_FILE, where, "", "has no value.", f"Write {argument}=VALUE without spaces."
        )
    rule = "must be a .yml or .yaml file, the name of a bundled config, or `section.key=value`."
    if os.path.isfile(argument) and os.path.splitext(argument)[1] in _DATA:
        action = f"Specify a config, and set data.path={argument} and its data.source."
        return Problem(Code.CFG_FILE, where, "", f"{rule} It is a data file.", action)
    if os.path.splitext(argument)[1] in _PROGRAMS:
        action = "Write each setting as section.key=value, such as train.batch_size=64, or edit a "
        action += "file written by `maxpipe init DIR`."
        return Problem(Code.CFG_FILE, where, "", f"{rule} Programs cannot be configs.", action)
    if os.path.isfile(argument):  # pathlib raises an error for a name that is too long
        return Problem(Code.CFG_FILE, where, "", rule, f"Rename the file to {argument}.yml.")
    if os.path.isfile(inside := os.path.join(argument, CONFIG_FILE)):
        return Problem(Code.CFG_FILE, where, "", f"{rule} It is a run folder.", f"Use {inside}.")
    if os.path.isfile(os.path.join(argument, "config.json")):
        action = f"Run `maxpipe import {argument} --out runs/NAME` first, and use "
        action += f"runs/NAME/{CONFIG_FILE}."
        return Problem(Code.CFG_FILE, where, "", f"{rule} It is a Hugging Face folder.", action)
    if is_hub_id(argument) and not os.path.lexists(argument):
        rule += (
            " It looks like the ID of a Hugging Face Hub model, and only `maxpipe fetch` downloads "
            "models."
        )
        return Problem(Code.CFG_FILE, where, "", rule, _hub_model_action(argument))
    if guess := did_you_mean(os.path.basename(argument).lower(), bundled_configs()):
        return Problem(Code.CFG_FILE, where, "", rule, f"Did you mean {guess}? {_LIST}.")
    action = f"{_LIST}, and `maxpipe config explain` lists sections and keys."
    return Problem(Code.CFG_FILE, where, "", rule, action)


def _hub_model_action(argument: str) -> str:
    guess = did_you_mean(os.path.basename(argument).lower(), bundled_configs())
    similar = f"Write {guess} for a model of similar shape, or run" if guess else "Run"
    return (
        f"{similar} `maxpipe fetch hf:{argument} --out base` and `maxpipe import base --out "
        f"runs/base`, and use runs/base/{CONFIG_FILE}."
    )


def broken_link(path: str | os.PathLike[str]) -> str:
    """Describe a broken symbolic link. Return an empty string for any other path."""
    if not os.path.islink(path):
        return ""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"a symbolic link to {os.readlink(path)}, which forms a cycle"
        return f"a symbolic link to {os.path.realpath(path)}, which does not exist"
    return ""


def _similar_folder(path: Path) -> Path | None:
    """Return the path of a file with the same name in a sibling folder with a similar name, or
    None.
    """
    above = path.parent.parent
    try:
        folders = sorted(each.name for each in above.iterdir() if each.is_dir())
    except OSError:
        return None
    guess = did_you_mean(
        path.parent.name, [f for f in folders if (above / f / path.name).is_file()]
    )
    return above / guess / path.name if guess else None


def missing_file_action(path: Path) -> str:
    """Return the suggested action for a missing file. The action names a bundled config, a similar
    file or the missing folder.
    """
    if found := bundled_configs().get(path.stem):
        return (
            f"Write {found.name} instead of {path} to use the bundled config, or copy it with "
            f"`maxpipe configs copy {found.name}`."
        )
    if not os.path.isdir(path.parent):
        if guess := _similar_folder(path):
            return f"Did you mean {guess}?"
        return f"Check the path: the folder {path.parent} does not exist."
    siblings = sorted(p.name for p in path.parent.glob("[!.]*") if p.suffix in SUFFIXES)
    guess = did_you_mean(path.name, siblings)
    if guess:
        return f"Did you mean {path.parent / guess}?"
    contents = ", ".join(siblings[:8]) or "no .yml files"
    return f"Check the path: {path.parent}/ contains {contents}."
