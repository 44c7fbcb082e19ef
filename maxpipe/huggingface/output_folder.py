"""Folders that appear complete or not at all, and the files that travel with weights.

What imports and exports tell their caller while they work.

What a user names as a model: a run, one of its checkpoints, or a Hugging Face folder. No jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from maxpipe.checkpoint.address import Address, check_outside_checkpoints, parse_address
from maxpipe.errors import ConfigError, StorageError
from maxpipe.huggingface.config_json import FILE
from maxpipe.huggingface.source import folder_of
from maxpipe.io.files import expand_path, read, url_scheme, write

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files of tokenizers and of generation. No other name is copied, but for these:"""

_VOCABULARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(model|tiktoken)")
"""Of SentencePiece and tiktoken, which have no fixed names."""

_MAX_VOCABULARIES = 8
_MAX_BYTES = 1 << 28
_SUFFIX = ".partial"
_REMOVE_TIMEOUT_SECONDS = 3.0


@contextlib.contextmanager
def atomic_folder(path: str, option: str) -> Iterator[Path]:
    """A new folder beside `path`, which gets that name when all that is done has succeeded.

    After an error or Ctrl-C it is removed; after a kill the next command for this path does that.

    Raises:
        ConfigError: there is something with that name.
        StorageError: nothing can be written there.
    """
    given = expand_path(path, option)
    if not path.strip() or "\0" in path or url_scheme(path):
        rule = "must be a folder on this machine that does not exist yet."
        raise ConfigError.one(option, path or "''", rule, "Name one, such as ./model.")
    where = given.absolute()
    check_outside_checkpoints(where, option)
    if os.path.lexists(where):
        rule = "is there already, and nothing is overwritten."
        raise ConfigError.one(option, path, rule, "Give another name, or delete it first.")
    prefix = f".{where.name}."
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(where.parent, prefix)
        partial, held = _new_partial(where.parent, prefix)
    except OSError as error:
        raise unwritable_error(where, error) from error
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        os.fsync(held)
        if os.path.lexists(where):
            rule = "was made by somebody else meanwhile, and nothing is overwritten."
            raise ConfigError.one(option, path, rule, "Give another name, or delete it first.")
        partial.rename(where)
    except OSError as error:
        raise unwritable_error(where, error) from error
    finally:
        os.close(held)
        _remove(partial)


def _new_partial(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and its descriptor, which has the lock of a living process."""
    while True:
        partial = Path(tempfile.mkdtemp(_SUFFIX, prefix, parent))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(partial, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
            # Without a lock it was a leftover to another process that began at the same time.
            if os.path.lexists(partial):
                return partial, held
            os.close(held)


def _remove(folder: Path) -> None:
    """Removes it, even if threads of a library still write into it for a moment after Ctrl-C.

    A second Ctrl-C does not end it.
    """
    end = time.monotonic() + _REMOVE_TIMEOUT_SECONDS
    with _ignore_interrupts():
        shutil.rmtree(folder, ignore_errors=True)
        while os.path.lexists(folder) and time.monotonic() < end:
            time.sleep(0.02)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ctrl-C has no effect inside; only the main thread is interrupted at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unwritable_error(where: Path, error: OSError) -> StorageError:
    """The error for a folder that cannot be written. Nothing of it is left."""
    return StorageError.unwritable(
        where, error, "Free space, or name a folder that can be written. Nothing was left behind."
    )


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """What killed processes have left."""
    with os.scandir(folder) as entries:
        left = [
            each.path
            for each in entries
            if each.name.startswith(prefix)
            and each.name.endswith(_SUFFIX)
            and each.is_dir(follow_symlinks=False)
        ]
    for path in left:
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def copy_tokenizer_files(
    source: Path, target: Path, names: tuple[str, ...] = TOKENIZER_FILES
) -> list[str]:
    """Copies those of these files that are there, and vocabularies; returns their names.

    What is in `target` already is left as it is.

    Raises:
        ConfigError: one cannot be read, or is a link out of the folder.
        OSError: one cannot be written.
    """
    copied = []
    for name in dict.fromkeys((*names, *vocabularies(source))):
        if (target / name).exists():
            continue
        _check_inside(source, source / name)
        try:
            content = read(source / name, _MAX_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            rule = f"cannot be copied: {error.strerror or error}."
            action = "Copy it again from where it came from, or move it away."
            raise ConfigError.one(str(source / name), None, rule, action) from error
        write(target / name, content)
        copied.append(name)
    return copied


def _check_inside(folder: Path, path: Path) -> None:
    """Raises ConfigError for a link to elsewhere: with an export anything could be published.

    Links of a download cache lead to its `blobs`, beside the `snapshots` that the folder is in.
    """
    if not path.is_symlink():
        return
    real, whole = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = whole.parent.parent / "blobs"
    if not real.is_relative_to(whole) and not real.is_relative_to(blobs):
        rule = f"is a link to {real}, out of the folder: what is there would be copied."
        raise ConfigError.one(str(path), None, rule, "Copy the file itself there, if it is meant.")


def vocabularies(folder: Path) -> list[str]:
    """The first few names of files of SentencePiece and tiktoken in a folder."""
    found = sorted(name for name in os.listdir(folder) if _VOCABULARY.fullmatch(name))
    return found[:_MAX_VOCABULARIES]


MessageCallback = Callable[[str], None]
"""Takes a line for the user."""

ProgressCallback = Callable[[str, int, int], None]
"""Takes a task, and how many megabytes of how many are done."""

_MEGABYTE = 10**6


def ignore_progress(task: str, done: int, total: int) -> None:
    """Shows nothing."""


class ByteProgress:
    """A count of bytes to which several threads add."""

    def __init__(self, task: str, total: int, report: ProgressCallback):
        self._task, self._total, self._report = task, total, report
        self._done, self._lock = 0, threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Adds what was done."""
        with self._lock:
            self._done += count
            self._report(self._task, self._done // _MEGABYTE, -(-self._total // _MEGABYTE))


def resolve_model(
    text: str, *, average: bool = False, where: str = "", runs: str = ""
) -> Address | Path:
    """The address of a run or checkpoint, or the path of a Hugging Face folder.

    `hf:DIR` is one, and so is a folder with a config.json: that of a run is YAML. `average`: the
    averaged parameters are meant. `where` and `runs` are those of `parse`.

    Raises:
        ConfigError: it is none of them, or a folder, which has no averages.
    """
    folder = folder_of(text)
    if folder is None and os.path.isfile(os.path.join(os.path.expanduser(text), FILE)):
        folder = text
    if folder is None:
        return dataclasses.replace(parse_address(text, where, runs), average=average)
    if average:
        rule = "is a Hugging Face folder, which holds no averages."
        raise ConfigError.one("command line: --average", text, rule, "Leave --average out.")
    return expand_path(folder, where) if where else expand_path(folder)
