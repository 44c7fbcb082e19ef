"""Parse run and checkpoint addresses, as used in commands and config keys.

    RUN          the name of a run in `run.dir`, the path of its folder, or a URL
    RUN@STEP     one checkpoint of a run; STEP is a step number, `newest` or `best`
    PATH         the folder of one checkpoint: runs/quickstart/checkpoints/120

Parsing an address opens no files and sends no requests to buckets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, find_checkpoint_home, in_bucket
from maxpipe.config.config_files import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from maxpipe.config.rules import did_you_mean
from maxpipe.config.sections.run import RunConfig
from maxpipe.errors import Code, ConfigError
from maxpipe.io.files import expand_path
from maxpipe.io.stores import corrected_url

Step = int | Literal["newest", "best"] | None

_SUFFIX = re.compile(r"(?P<run>.+)@(?P<step>[^@/]*)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,18}")
_MARKS = (CONFIG_FILE, EVENTS_FILE, METRICS_FILE, CHECKPOINTS_FOLDER)
"""Entries that identify a run folder, which contains at least one of them."""
_SHOWN_RUNS = 8


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a run and, optionally, of one checkpoint. `given` is the unparsed string."""

    given: str
    run_dir: str
    step: Step = None
    parent: str = ""
    """Parent of the checkpoint folder if `given` is a checkpoint folder or a checkpoint in one,
    else ""."""
    where: str = ""
    """Config key whose value is the address; empty for a command-line argument."""
    average: bool = False
    """Whether to load the EMA parameters (`optim.ema_decay`) instead of the trained parameters."""

    def check_average(self, optim: object) -> None:
        """Check that the run has EMA parameters if the address selects them.

        Raises:
            ConfigError: the run was trained without EMA.
        """
        has_any = isinstance(optim, Mapping) and bool(optim.get("ema_decay"))
        if self.average and not has_any:
            rule = "was trained with optim.ema_decay = 0, so it has no EMA parameters."
            raise self.error(rule, "Remove --average.")

    @property
    def home(self) -> str:
        """Parent of the checkpoint folder.

        Raises:
            ConfigError: the run's config.yml is needed to find the folder but cannot be read.
        """
        return self.parent or find_checkpoint_home(self.run_dir, self.where or "path")

    def address_at(self, step: int) -> str:
        """Return the address of another step of this run."""
        return f"{self.parent or self.run_dir}@{step}"

    def error(self, rule: str, action: str) -> ConfigError:
        """Return a ConfigError that names this address."""
        return _wrong(self.given, self.where, rule, action)


def parse_address(text: str, where: str = "", runs: str = "", begin: Path = Path()) -> Address:
    """Parse the address of a run or checkpoint.

    `where` is the config key whose value is `text`. `runs` is the parent folder of all runs
    (default: the default value of `run.dir`). Relative paths are resolved against `begin`.

    Raises:
        ConfigError: the run does not exist, or the checkpoint address is ambiguous.
    """
    if in_bucket(runs) and re.fullmatch(r"[\w.-]+(@\w+)?", text):
        text = f"{runs.rstrip('/')}/{text}"
    if in_bucket(text):
        return _in_bucket(text, where)
    if url := corrected_url(text):
        rule = "must have a scheme in lowercase and two slashes, because this is a store."
        raise _wrong(text, where, rule, f"Give {url}.")
    finder = _Finder(text, where, runs or RunConfig().dir, begin)
    if not text.strip() or "\0" in text:
        finder.refuse("must name a run.", "Give the folder of a run (default: runs/<run.name>).")
    found, suffix = finder.find(text), _SUFFIX.fullmatch(text)
    if suffix is None:
        return found or finder.unknown(text)
    before, step = suffix["run"], suffix["step"]
    run = finder.find(before)
    if found and run and _step(step) is not None:
        finder.refuse(
            f"is ambiguous: both the folder {found.run_dir} and step {step} of {run.run_dir} "
            "exist.",
            f"Write {text}@newest to select the folder, or {before}/{CHECKPOINTS_FOLDER}/{step} "
            "to select the step.",
        )
    if found:
        return found
    if run is None:
        finder.unknown(before)
    return finder.with_step(run, step, before)


def parse_run_address(text: str) -> Address:
    """Parse the argument of a command that accepts a run but no step.

    Raises:
        ConfigError: `text` is not a valid address, or includes a step.
    """
    address = parse_address(text)
    if address.step is not None:
        rule = "names a step, but this command accepts only a run."
        raise address.error(rule, f"Give {address.run_dir}.")
    return address


def is_run(path: Path) -> bool:
    """Return whether a folder is a run folder or contains the checkpoints of a run."""
    return any(os.path.exists(path / name) for name in _MARKS)


def check_outside_checkpoints(path: str | Path, option: str) -> None:
    """Check that an output path is outside the checkpoint folder of every run.

    `maxpipe checkpoints verify` could report such a file as damage, and the file could be deleted
    together with a checkpoint.

    Raises:
        ConfigError: the path is inside a checkpoint folder.
    """
    whole = os.path.abspath(os.path.expanduser(path))
    for target in map(Path, dict.fromkeys((whole, os.path.realpath(whole)))):
        for folder in (target, *target.parents):
            if _holds_checkpoints(folder):
                raise ConfigError.one(
                    Code.IO_PATH,
                    option,
                    path,
                    f"must be outside {folder}, which may contain only checkpoints.",
                    f"Choose another path, such as ./{os.path.basename(whole)}."
                    if folder != target
                    else "Choose a path in the current folder.",
                )


def _holds_checkpoints(folder: Path) -> bool:
    if folder.name != CHECKPOINTS_FOLDER:
        return False
    if any(os.path.exists(folder.parent / name) for name in (EVENTS_FILE, METRICS_FILE)):
        return True
    try:
        with os.scandir(folder) as entries:
            return any(
                os.path.isdir(os.path.join(entry.path, "state"))
                and os.path.isdir(os.path.join(entry.path, "facts"))
                for entry in entries
                if _NUMBER.fullmatch(entry.name)
            )
    except (OSError, ValueError):
        return False


def run_names(folder: str | Path) -> list[str]:
    """Return the sorted names of the runs in a folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if is_run(Path(entry.path)))
    except (OSError, ValueError):
        return []


def _has_begun(path: Path) -> bool:
    """Return whether a run folder contains more files than a failed start would create."""
    checkpoints = path / CHECKPOINTS_FOLDER
    if any(os.path.exists(path / name) for name in (CONFIG_FILE, METRICS_FILE)):
        return True
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def _step(text: str) -> Step:
    if text in ("newest", "best"):
        return text  # pyright: ignore[reportReturnType]
    return int(text) if _NUMBER.fullmatch(text) else None


def _wrong(given: str, where: str, rule: str, action: str) -> ConfigError:
    if where:
        return ConfigError.one(Code.CKPT_ADDRESS, where, given or "''", rule, action)
    return ConfigError.one(
        Code.CKPT_ADDRESS, f"command line: {given or 'an empty argument'}", None, rule, action
    )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the folder named by an address, and reports invalid addresses."""

    given: str
    where: str
    runs: str
    begin: Path

    def refuse(self, rule: str, action: str) -> NoReturn:
        raise _wrong(self.given, self.where, rule, action)

    # These methods use os.path, because pathlib raises an error if a name is too long.

    def find(self, text: str) -> Address | None:
        """Return the address of the run or checkpoint that `text` names, or None if nothing
        matches. A checkpoint's step need not exist.
        """
        folders = [path for path in self._candidates(text) if os.path.isdir(path)]
        runs = [path for path in folders if is_run(path)]
        if len(runs) > 1 and not runs[0].samefile(runs[1]):
            self.refuse(
                f"is ambiguous: {runs[0]} and {runs[1]} are both run folders.",
                f"Write ./{runs[0]} or {runs[1]}.",
            )
        for path in runs or folders:
            return self._address(path)
        for path in self._candidates(text):
            if _is_in_checkpoints(path):  # the step does not exist
                return self._address(path)
        return None

    def _candidates(self, text: str) -> Iterator[Path]:
        yield self.begin / expand_path(text, self.where or "path")
        if "/" not in text and not text.startswith("~") and text not in (".", ".."):
            yield self.begin / expand_path(self.runs, "run.dir") / text

    def _address(self, path: Path) -> Address:
        def inside(parent: Path, step: Step) -> Address:
            return Address(self.given, str(parent), step, str(parent), self.where)

        if not is_run(path):
            whole = path.absolute()
            if whole.name == CHECKPOINTS_FOLDER:
                return inside(_above(path, 1), None)
            if _is_in_checkpoints(path):
                return inside(_above(path, 2), int(whole.name))
        return Address(self.given, str(path), where=self.where)

    def with_step(self, run: Address, step: str, before: str) -> Address:
        """Return the run's address, with the step given after `@`."""
        if run.step is not None:
            self.refuse("names a step twice.", f"Give {before}.")
        number = _step(step)
        if number is None:
            self.refuse(
                "must be RUN@STEP, where STEP is a number, `newest` or `best`.",
                f"Write {before}@newest, or remove @{step}.",
            )
        return Address(self.given, run.run_dir, number, run.parent, self.where)

    def unknown(self, text: str) -> NoReturn:
        """Raise the error for a name that matches no run."""
        path, *below = self._candidates(text)
        if os.path.isfile(path) and is_run(path.parent):
            self.refuse("is a file, but a run must be a folder.", f"Give {path.parent}.")
        folder = below[0].parent if below else path.parent
        names = [name for name in run_names(folder) if _has_begun(Path(folder, name))]
        rule = f"is not a run: there is no folder {path}"
        rule += f" and no folder {below[0]}." if below else "."
        guess = did_you_mean(path.name, names)
        if guess:
            action = f"Did you mean {guess if below else path.parent / guess}?"
        elif names:
            more = f" and {len(names) - _SHOWN_RUNS} more" if len(names) > _SHOWN_RUNS else ""
            action = f"The runs in {folder} are {', '.join(names[:_SHOWN_RUNS])}{more}."
        else:
            action = "Give the folder of a run (default: runs/<run.name>)."
        self.refuse(rule, action)


def _is_in_checkpoints(path: Path) -> bool:
    whole = path.absolute()
    is_step = _NUMBER.fullmatch(whole.name) and whole.parent.name == CHECKPOINTS_FOLDER
    return bool(is_step) and os.path.isdir(whole.parent)


def _above(path: Path, count: int) -> Path:
    """Return the ancestor of `path` that is `count` levels up, as a relative path if `path` has
    enough components.
    """
    return (
        path.parents[count - 1] if len(path.parts) > count else path.absolute().parents[count - 1]
    )


def _in_bucket(text: str, where: str) -> Address:
    """Return the address of a run in a bucket, where `@STEP` always denotes a step."""
    if not re.match(r"[^/]+//[^/]", text):
        action = f"Give a path such as {text.partition('://')[0]}://my-bucket/runs/my-run."
        raise _wrong(text, where, "must contain a bucket name.", action)
    plain, step = text.rstrip("/"), None
    if (suffix := _SUFFIX.fullmatch(plain)) and (found := _step(suffix["step"])) is not None:
        plain, step = suffix["run"].rstrip("/"), found
    inside = re.fullmatch(rf"(.+)/{CHECKPOINTS_FOLDER}(?:/({_NUMBER.pattern}))?", plain)
    if inside is None:
        return Address(text, plain, step, "", where)
    if inside[2] and step is not None:
        raise _wrong(text, where, "names a step twice.", f"Give {plain}.")
    return Address(text, inside[1], int(inside[2]) if inside[2] else step, inside[1], where)
