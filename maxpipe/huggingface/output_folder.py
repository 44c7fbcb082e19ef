"""Write folders atomically, copy tokenizer files and count bytes for progress callbacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from maxpipe.checkpoint.address import check_outside_checkpoints
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import expand_path, lock, read, url_scheme, write
from maxpipe.io.stores import corrected_url

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Names of the tokenizer, processor and generation files that are copied, in addition to vocabulary
files."""

_VOCABULARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(model|tiktoken)")
"""Pattern for the names of SentencePiece and tiktoken vocabulary files."""

_MAX_VOCABULARIES = 8
_MAX_BYTES = 1 << 28
_SUFFIX = ".partial"
_REMOVE_TIMEOUT_SECONDS = 3.0


@contextlib.contextmanager
def atomic_folder(path: str, option: str) -> Iterator[Path]:
    """Create a temporary folder next to `path`, and rename it to `path` when the body succeeds.

    On an error or Ctrl-C, the temporary folder is removed. If the process is killed, the next
    command for the same path removes the temporary folder.

    Raises:
        ConfigError: the path already exists.
        StorageError: the folder cannot be written.
    """
    check_local(path, option)
    where = expand_path(path, option).absolute()
    check_outside_checkpoints(where, option)
    if os.path.lexists(where):
        rule = "must not exist, because existing folders are never overwritten."
        raise ConfigError.one(
            Code.CLI_OUTPUT, option, path, rule, "Use another name, or delete the folder."
        )
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
            rule = "was created by another process, and existing folders are never overwritten."
            raise ConfigError.one(
                Code.CLI_OUTPUT, option, path, rule, "Use another name, or delete the folder."
            )
        partial.rename(where)
    except OSError as error:
        raise unwritable_error(where, error) from error
    finally:
        os.close(held)
        _remove(partial)


def check_local(path: str, option: str) -> None:
    """Check that an output path is not empty and not in an object store.

    Raises:
        ConfigError: the path cannot be a folder on this machine.
    """
    if not path.strip() or "\0" in path or url_scheme(path) or corrected_url(path):
        rule = "must be a folder on this machine."
        raise ConfigError.one(
            Code.CLI_OUTPUT, option, path or "''", rule, "Use a path such as ./model."
        )


def _new_partial(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new temporary folder and its file descriptor, which holds this process's lock."""
    while True:
        partial = Path(tempfile.mkdtemp(_SUFFIX, prefix, parent))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(partial, os.O_RDONLY)
            lock(held, wait=True)
            # Another process could have removed the folder as a leftover before this process locked
            # it.
            if os.path.lexists(partial):
                return partial, held
            os.close(held)


def _remove(folder: Path) -> None:
    """Remove a folder, even if library threads keep writing to it shortly after Ctrl-C.

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
    """Ignore Ctrl-C in the `with` body. Only the main thread receives interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unwritable_error(where: Path, error: OSError) -> StorageError:
    """Return the error to raise if a folder cannot be written; its message states that all partial
    files were removed.
    """
    return StorageError.unwritable(
        where,
        error,
        "Free up disk space, or use a writable folder. All partial files were removed.",
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
    """Copy vocabulary files and any existing files in `names`, and return the copied names.

    Files that already exist in `target` are not overwritten.

    Raises:
        ConfigError: a file cannot be read, or is a symlink to a file outside the folder.
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
            action = "Copy the file again from its source, or move it out of the folder."
            raise ConfigError.one(
                Code.HF_DAMAGED, str(source / name), None, rule, action
            ) from error
        write(target / name, content)
        copied.append(name)
    return copied


def _check_inside(folder: Path, path: Path) -> None:
    """Check that a file is not a symlink to a file outside the folder, which would be published.

    Symlinks to `blobs` in the Hugging Face cache, next to the folder's `snapshots`, are allowed.

    Raises:
        ConfigError: the symlink target is outside the folder.
    """
    if not path.is_symlink():
        return
    real, whole = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = whole.parent.parent / "blobs"
    if not real.is_relative_to(whole) and not real.is_relative_to(blobs):
        rule = f"must not link to {real} outside the folder: that file would be copied."
        raise ConfigError.one(
            Code.IO_UNSAFE,
            str(path),
            None,
            rule,
            "To copy that file anyway, replace the link with the file.",
        )


def vocabularies(folder: Path) -> list[str]:
    """Return the names of up to `_MAX_VOCABULARIES` vocabulary files in a folder."""
    names = sorted(name for name in os.listdir(folder) if _VOCABULARY.fullmatch(name))
    return names[:_MAX_VOCABULARIES]


MessageCallback = Callable[[str], None]
"""Function that receives a message for the user."""

ProgressCallback = Callable[[str, int, int], None]
"""Function that receives the name of a task, the megabytes completed and the total megabytes."""

_MEGABYTE = 10**6


def ignore_progress(task: str, done: int, total: int) -> None:
    """Ignore a progress report."""


class ByteProgress:
    """Thread-safe byte counter that reports progress."""

    def __init__(self, task: str, total: int, report: ProgressCallback):
        self._task, self._total, self._report = task, total, report
        self._done, self._lock = 0, threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Add completed bytes and report progress."""
        with self._lock:
            self._done += count
            self._report(self._task, self._done // _MEGABYTE, -(-self._total // _MEGABYTE))
