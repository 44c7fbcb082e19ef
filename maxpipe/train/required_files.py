"""Check that the files and folders in a config exist, before devices are initialized."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping, Sequence

from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    checkpoint_home,
    entries,
    run_folder,
    to_epath,
)
from maxpipe.config import bundled_configs
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import named_sources
from maxpipe.config.sections.source import FILES, paths_of
from maxpipe.errors import ConfigError, Problem
from maxpipe.io.files import url_scheme

_MODEL = "hf:"
_RESTORE, _TEACHER, _TOKENIZER = "checkpoint.restore_from", "distill.teacher", "tokenizer.path"
_PREPARED = ("tokens", "megatron")


def missing_files(loaded: LoadedConfig) -> list[Problem]:
    """Return a problem for each local file or folder in the config that does not exist."""
    config, origins = loaded.config, loaded.origins
    folders = _model_folders(config)
    problems = [_model_problem(key, folder, config, origins) for key, folder in folders.items()]
    in_folder = any(_is_inside(config.tokenizer.path, folder) for folder in folders.values())
    if config.tokenizer.kind != "bytes" and not in_folder:
        problems += _problem(_TOKENIZER, config.tokenizer.path, origins)
    for section, source in named_sources(config):
        if source.source in (*FILES, *_PREPARED):
            key = f"{section}.path" if source.path else f"{section}.paths"
            for path in paths_of(source):
                problems += _problem(key, path, origins)
        if source.chat != "off":
            problems += _problem(f"{section}.chat_template", source.chat_template, origins)
    for key, path in _other_files(config):
        problems += _problem(key, path, origins)
    return problems


@contextlib.contextmanager
def merge_problems(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise these problems, followed by the problems of a ConfigError raised inside the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)


def _model_folders(config: Config) -> dict[str, str]:
    """Return the missing Hugging Face folders, keyed by the config key that names the folder."""
    named = {}
    if config.train.objective == "distill":
        named[_TEACHER] = config.distill.teacher
    if config.checkpoint.restore_from.startswith(_MODEL) and not _has_checkpoint(config):
        named[_RESTORE] = config.checkpoint.restore_from
    folders = {k: v.removeprefix(_MODEL) for k, v in named.items() if v.startswith(_MODEL)}
    return {key: folder for key, folder in folders.items() if folder and not _exists(folder)}


def _has_checkpoint(config: Config) -> bool:
    """Return whether the run resumes, so that `checkpoint.restore_from` is not read."""
    home = checkpoint_home(run_folder(config.run), config.checkpoint)
    try:
        steps = entries(to_epath(os.path.join(home, CHECKPOINTS_FOLDER)))
        return any(entry.name.isdecimal() for entry in steps)
    except OSError:
        return True  # the storage backend reports the error later


def _model_problem(key: str, folder: str, config: Config, origins: Mapping[str, str]) -> Problem:
    rule = "must name a folder with config.json, *.safetensors and a tokenizer: "
    rule += f"{os.path.abspath(os.path.expanduser(folder))} does not exist."
    settings = f"{key}={_MODEL}DIR"
    if config.tokenizer.kind != "bytes" and _is_inside(config.tokenizer.path, folder):
        rule += f" {_TOKENIZER}={config.tokenizer.path} is also read from that folder."
        settings += f" and {_TOKENIZER}=DIR"
    action = f"Download the model to this folder (`hf download NAME --local-dir {folder}`), or set "
    action += f"{settings} to the folder of a local model."
    return Problem(error_location(key, origins), f"{_MODEL}{folder}", rule, action)


def _is_inside(path: str, folder: str) -> bool:
    if not path:
        return False
    inner, outer = (os.path.abspath(os.path.expanduser(name)) for name in (path, folder))
    return os.path.commonpath([inner, outer]) == outer


def _other_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for every other file that a run reads."""
    for name, task in config.eval.tasks.items():
        yield f"eval.tasks.{name}.path", task.path
    if config.eval.sample_every:
        yield "eval.sample_prompts_file", config.eval.sample_prompts_file
    if config.train.objective == "grpo":
        yield "grpo.prompts", config.grpo.prompts
        yield "grpo.reward_file", config.grpo.reward_file.rpartition(":")[0]
    if config.train.objective == "distill":
        yield "distill.teacher_logits", config.distill.teacher_logits


def _problem(key: str, path: str, origins: Mapping[str, str]) -> Iterator[Problem]:
    if path and not _exists(path):
        rule = f"must name an existing file or folder; none was found relative to {os.getcwd()}."
        action = f"Set {key} to an existing path."
        if key == "tokenizer.path" and bundled_configs.is_hub_id(path):
            rule += " Nothing is downloaded."
            action = f"{bundled_configs.hub_download_action(path).removesuffix('.')} as {key}."
        yield Problem(error_location(key, origins), path, rule, action)


def _exists(path: str) -> bool:
    """Return whether a local path or glob pattern exists; always true for buckets."""
    expanded = os.path.expanduser(path)
    if url_scheme(path) or os.path.lexists(expanded):
        return True  # the code that reads the file reports broken links
    return next(glob.iglob(expanded, recursive=True), None) is not None
