"""Atomic output folders, tokenizer files, progress callbacks and model addresses, without jax."""

from __future__ import annotations

import contextlib
import dataclasses
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
from maxpipe.io.files import expand_path, lock, read, url_scheme, write

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Names of tokenizer and generation files. Only these files and vocabularies are copied."""

_VOCABULARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(model|tiktoken)")
"""Pattern of the file names of SentencePiece and tiktoken vocabularies."""

_MAX_VOCABULARIES = 8
_MAX_BYTES = 1 << 28
_SUFFIX = ".partial"
_REMOVE_TIMEOUT_SECONDS = 3.0


@contextlib.contextmanager
def atomic_folder(path: str, option: str) -> Iterator[Path]:
    """Create a folder next to `path` and rename it to `path` after the body succeeds.

    An error or Ctrl-C removes the folder. If the process is killed, the next command for the same
    path removes the folder.

    Raises:
        ConfigError: the path exists.
        StorageError: the folder cannot be written.
    """
    given = expand_path(path, option)
    if not path.strip() or "\0" in path or url_scheme(path):
        rule = "must be a new folder on this machine."
        raise ConfigError.one(option, path or "''", rule, "Set a path such as ./model.")
    where = given.absolute()
    check_outside_checkpoints(where, option)
    if os.path.lexists(where):
        rule = "must not exist, because nothing is overwritten."
        raise ConfigError.one(option, path, rule, "Use another name, or delete the folder.")
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
            rule = "was created by another process; nothing is overwritten."
            raise ConfigError.one(option, path, rule, "Use another name, or delete the folder.")
        partial.rename(where)
    except OSError as error:
        raise unwritable_error(where, error) from error
    finally:
        os.close(held)
        _remove(partial)


def _new_partial(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and its descriptor, which holds the lock of this process."""
    while True:
        partial = Path(tempfile.mkdtemp(_SUFFIX, prefix, parent))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(partial, os.O_RDONLY)
            lock(held, wait=True)
            # Another process could have removed the folder as a leftover before it was locked.
            if os.path.lexists(partial):
                return partial, held
            os.close(held)


def _remove(folder: Path) -> None:
    """Remove a folder, even if threads of a library still write to it shortly after Ctrl-C.

    A second Ctrl-C does not interrupt the removal.
    """
    end = time.monotonic() + _REMOVE_TIMEOUT_SECONDS
    with _ignore_interrupts():
        shutil.rmtree(folder, ignore_errors=True)
        while os.path.lexists(folder) and time.monotonic() < end:
            time.sleep(0.02)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the body. Only the main thread receives interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unwritable_error(where: Path, error: OSError) -> StorageError:
    """Return the error for a folder that cannot be written. The message adds that no files
    remain.
    """
    return StorageError.unwritable(
        where, error, "Free space, or use a writable folder. All partial files were removed."
    )


def _remove_leftovers(folder: Path, prefix: str) -> None:
    with os.scandir(folder) as entries:
        leftovers = [
            entry.path
            for entry in entries
            if entry.name.startswith(prefix)
            and entry.name.endswith(_SUFFIX)
            and entry.is_dir(follow_symlinks=False)
        ]
    for path in leftovers:
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if lock(held):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def copy_tokenizer_files(
    source: Path, target: Path, names: tuple[str, ...] = TOKENIZER_FILES
) -> list[str]:
    """Copy vocabularies, and those files in `names` that exist. Return the names of the copies.

    Existing files in `target` are kept.

    Raises:
        ConfigError: a file cannot be read, or is a link that leaves the folder.
        OSError: a file cannot be written.
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
            action = "Copy the file again from its source, or move it away."
            raise ConfigError.one(str(source / name), None, rule, action) from error
        write(target / name, content)
        copied.append(name)
    return copied


def _check_inside(folder: Path, path: Path) -> None:
    """Check that a file is not a link that leaves the folder, so that no other files are published.

    Links to `blobs` of the hub's cache, next to the folder's `snapshots`, are allowed.

    Raises:
        ConfigError: the link leaves the folder.
    """
    if not path.is_symlink():
        return
    real, whole = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = whole.parent.parent / "blobs"
    if not real.is_relative_to(whole) and not real.is_relative_to(blobs):
        rule = f"must not link to {real} outside the folder: that file would be copied."
        raise ConfigError.one(str(path), None, rule, "Replace the link by a copy, if intended.")


def vocabularies(folder: Path) -> list[str]:
    """Return the names of up to `_MAX_VOCABULARIES` vocabulary files in a folder."""
    names = sorted(name for name in os.listdir(folder) if _VOCABULARY.fullmatch(name))
    return names[:_MAX_VOCABULARIES]


MessageCallback = Callable[[str], None]
"""Function that receives a message for the user."""

ProgressCallback = Callable[[str, int, int], None]
"""Function that receives a task, the megabytes done and the total megabytes."""

_MEGABYTE = 10**6


def ignore_progress(task: str, done: int, total: int) -> None:
    """Ignore progress."""


class ByteProgress:
    """Byte counter for several threads."""

    def __init__(self, task: str, total: int, report: ProgressCallback):
        self._task, self._total, self._report = task, total, report
        self._done, self._lock = 0, threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Add completed bytes and report progress."""
        with self._lock:
            self._done += count
            self._report(self._task, self._done // _MEGABYTE, -(-self._total // _MEGABYTE))


def resolve_model(
    text: str, *, average: bool = False, where: str = "", runs: str = ""
) -> Address | Path:
    """Return the address of a run or checkpoint, or the path of a Hugging Face folder.

    `hf:DIR` and folders with a config.json are Hugging Face folders; the config of a run is YAML.
    `average` selects the averaged parameters (EMA). `where` and `runs` are passed to
    `parse_address`.

    Raises:
        ConfigError: the text is invalid, or averages of a folder are requested.
    """
    folder = folder_of(text)
    if folder is None and os.path.isfile(os.path.join(os.path.expanduser(text), FILE)):
        folder = text
    if folder is None:
        return dataclasses.replace(parse_address(text, where, runs), average=average)
    if average:
        rule = "must be a run or checkpoint: a Hugging Face folder has no averages."
        raise ConfigError.one("command line: --average", text, rule, "Omit --average.")
    return expand_path(folder, where) if where else expand_path(folder)
