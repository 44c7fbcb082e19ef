"""Where a run and its checkpoints are stored: in its folder, in another one, or in a bucket.

The only buckets are those of Google Cloud Storage, `gs://BUCKET/PATH`. epath, and so orbax, speak
of their objects as of files, through gcsfs; what they lack is here.

Damage told apart from failures of storage: content that was read and is wrong, or no content.

Storage that does not answer loses nothing. Only content that was read and differs from what was
saved makes a checkpoint damaged; any other failure is retried, and then ends the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeVar, cast

from etils import epath

from maxpipe.config.bundled_configs import CONFIG_FILE
from maxpipe.config.load import load
from maxpipe.config.schema import CheckpointConfig, RunConfig
from maxpipe.errors import ConfigError, MaxpipeError, StorageError, exception_chain
from maxpipe.io.files import UnsafeFileError, expand_path, gcs_filesystem, open_regular, url_scheme

T = TypeVar("T")

ATTEMPTS, PAUSE_SECONDS = 3, 1.0
"""Attempts before storage counts as failing, and the seconds in between."""

# Not a regular file.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_CONTENT = (ValueError, LookupError, TypeError, AttributeError, EOFError, NotImplementedError)
_CONTENT += (RecursionError,)  # of orbax, whose parser follows whatever nests
# tensorstore raises ValueError for all that goes wrong, and tells what in words.
_SYSTEM_CALL = re.compile(r"os_error_code='([0-9]+)'")
_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|"
    r"ABORTED|CANCELLED):"
)


class DamagedError(Exception):
    """The content on disk is not what was saved; the text is file or array, and reason."""


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading says that the content is wrong, or gone."""
    if outage(error) is not None or isinstance(error, MaxpipeError):
        return False
    return isinstance(error, (*_CONTENT, OSError))


def outage(error: BaseException) -> OSError | None:
    """The failure of the storage that an error of reading stands for, a new one that may be raised
    from it; None of any other.
    """
    for cause in exception_chain(error):
        if isinstance(cause, OSError):
            return (
                None
                if isinstance(cause, UnsafeFileError) or cause.errno in _DAMAGE
                else copy(cause)
            )
        words = str(cause)
        if found := _SYSTEM_CALL.search(words):
            number = int(found[1])
            return None if number in _DAMAGE else OSError(number, words.splitlines()[0])
        if _OUTAGE.search(words):
            return OSError(words.splitlines()[0])
    return None


def call_with_retries(call: Callable[[], T]) -> T:
    """The result of the call, which is retried a few times while the storage fails.

    Raises:
        OSError: the storage still fails.
        Exception: any other exception of the call, at once.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if outage(error) is None:
                raise
        time.sleep(PAUSE_SECONDS)
    return call()


CHECKPOINTS_FOLDER = "checkpoints"
"""Name of the folder inside a run's folder, or inside its home in `checkpoint.dir`."""

_BUCKET = "gs://"
_OPEN_FILES = "/proc/self/fd"


def run_folder(config: RunConfig) -> Path:
    """The folder of what a run writes, except checkpoints with a folder of their own."""
    return expand_path(config.dir, "run.dir") / config.name


def checkpoint_home(run_dir: epath.PathLike, config: CheckpointConfig) -> str:
    """The parent of the folder of a run's checkpoints, with this config."""
    if not config.dir:
        return os.fspath(run_dir)
    above = config.dir if in_bucket(config.dir) else expand_path(config.dir, "checkpoint.dir")
    return os.path.join(above, os.path.basename(run_dir))


def find_checkpoint_home(run_dir: epath.PathLike, where: str = "path") -> str:
    """The same for an existing run, by its config.yml. `where` names what gave the folder.

    Raises:
        ConfigError: that cannot be read, and the run's folder holds no checkpoints itself.
    """
    path = os.fspath(run_dir)
    if in_bucket(path) or not os.path.exists(file := expand_path(path, where) / CONFIG_FILE):
        return path
    try:
        config = load([str(file)]).config
    except ConfigError:
        if (file.parent / CHECKPOINTS_FOLDER).is_dir():
            return path
        raise
    if not config.checkpoint.dir:
        return path
    return checkpoint_home(
        config.run.name, config.checkpoint
    )  # the folder may be a copy, or renamed


def in_bucket(path: epath.PathLike) -> bool:
    """Whether a path is in a bucket, not in a file system."""
    return url_scheme(path) != ""


def to_epath(path: epath.PathLike) -> epath.Path:
    """The path for epath, absolute.

    Raises:
        ConfigError: it is in a store that nothing here can reach.
        StorageError: what reaches buckets is not installed.
    """
    if not in_bucket(path):
        return epath.Path("/") / expand_path(os.fspath(path)).absolute()
    if not os.fspath(path).startswith(_BUCKET):
        rule = "must be a folder, or a path in a bucket of Google Cloud Storage."
        raise ConfigError.one(os.fspath(path), None, rule, "Give gs://BUCKET/PATH or a folder.")
    try:
        gcs_filesystem()
    except ImportError as error:
        raise StorageError(
            f"{path}: cannot be reached\n"
            "  buckets need the package gcsfs, which is not installed.\n"
            "  Run: pip install 'maxpipe[gcs]'"
        ) from error
    return epath.Path(path)


@contextlib.contextmanager
def translate_bucket_errors(path: epath.PathLike) -> Iterator[None]:
    """Turns any error of a bucket inside into an OSError, as for a disk."""
    try:
        yield
    except (OSError, MaxpipeError):
        raise
    except Exception as error:
        if not in_bucket(path):
            raise
        raise OSError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def translate_read_errors(path: epath.PathLike) -> Iterator[None]:
    """An object is whole or missing: other failures to read one say nothing about it.

    Raises:
        StorageError: of a bucket. A disk's OSError stays what it is.
    """
    try:
        with translate_bucket_errors(path):
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if not in_bucket(path):
            raise
        raise StorageError(
            f"{path}: cannot be read\n"
            f"  {root_cause_text(error)}.\n"
            "  Look after this machine's network and its account's rights, then start again."
        ) from error


def create(path: epath.PathLike, text: str) -> None:
    """Write an object that must be new; of several that try, one can.

    Raises:
        FileExistsError: it is there.
    """
    gcs_filesystem().pipe_file(os.fspath(path), text.encode(), mode="create")


class PinnedFolder:
    """A folder that is kept open: `path` refers to that folder wherever it is moved, and
    to nothing once it is deleted. By its name, the writer of arrays would create it again.

    A bucket, and a system without /proc, has only the name.
    """

    def __init__(self, folder: epath.Path):
        self._name, self._open = os.fspath(folder), -1
        self.path = folder
        if in_bucket(folder):
            return
        folder.mkdir(exist_ok=True)  # never its parents: those are made when a run starts
        if os.path.isdir(_OPEN_FILES):
            self._open = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = epath.Path(_OPEN_FILES) / str(self._open)

    def restore_names(self, error: BaseException) -> BaseException:
        """The error, which speaks of the folder's name."""
        for cause in exception_chain(error):
            cause.args = tuple(self._by_name(each) for each in cause.args)
            if isinstance(cause, OSError) and cause.filename is not None:
                cause.filename = self._by_name(cause.filename)
        return error

    def _by_name(self, text: Any) -> Any:
        if self._open < 0 or not isinstance(text, str):
            return text
        return text.replace(os.fspath(self.path), self._name)

    def close(self) -> None:
        if self._open >= 0:
            os.close(self._open)


def probe_writable(folder: epath.Path) -> None:
    """Write a file there and delete it. A missing folder is made.

    Raises:
        OSError: that is not possible.
    """
    with translate_bucket_errors(folder):
        if in_bucket(folder):
            probe = folder / f"{secrets.token_hex(8)}.probe"
            probe.write_text("checks whether this can be written")
            probe.unlink()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()


def exists(path: epath.Path) -> bool:
    """Whether there is such a file or folder. For epath unreachable storage is empty.

    Raises:
        OSError: that is unknown.
    """
    if not in_bucket(path):
        return call_with_retries(lambda: _stat(path)) is not None
    with translate_read_errors(path):
        try:
            gcs_filesystem().info(os.fspath(path))
        except FileNotFoundError:
            return False
    return True


def entries(folder: epath.Path) -> list[epath.Path]:
    """The entries of a folder, in the order of names; none for one that does not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    if not in_bucket(folder):
        try:
            names = call_with_retries(lambda: os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [folder / name for name in sorted(names)]
    with translate_read_errors(folder):
        try:
            names = gcs_filesystem().ls(os.fspath(folder), detail=False)
        except FileNotFoundError:
            return []
    return [folder / os.path.basename(name) for name in names]


def open_file(path: epath.Path) -> BufferedIOBase:
    """A file or object to read.

    Raises:
        OSError: it cannot be read. On a disk it has to be a regular file.
    """
    if in_bucket(path):
        return cast(BufferedIOBase, path.open("rb"))
    return os.fdopen(open_regular(path), "rb")


def read(path: epath.Path, most: int) -> bytes:
    """The content of a file or object of at most `most` bytes.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with translate_read_errors(path), open_file(path) as file:
        large = not in_bucket(path) and os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise UnsafeFileError(errno.EFBIG, f"it is larger than {most} bytes", os.fspath(path))
    return content


def files(folder: epath.Path) -> dict[str, int]:
    """Names below `folder` of all files, and their bytes."""
    if not in_bucket(folder):
        return call_with_retries(lambda: dict(_walk(folder)))
    with translate_read_errors(folder):
        found = gcs_filesystem().find(os.fspath(folder), detail=True)
    begin = len(os.fspath(folder)) - len(_BUCKET) + 1
    return {name[begin:]: info["size"] for name, info in found.items() if name[-1] != "/"}


def _walk(folder: epath.Path) -> Iterator[tuple[str, int]]:
    """Links are files here: their targets may hold them again."""
    left = [""]
    while left:
        below = left.pop()
        with os.scandir(folder / below) as found:
            for entry in found:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{name}/")
                else:
                    yield name, _size(entry)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        if not entry.is_symlink():
            raise
    except OSError:
        pass
    return entry.stat(follow_symlinks=False).st_size  # of a broken link


def _stat(path: epath.Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def remedy(path: epath.PathLike, key: str) -> str:
    """The action for a path from a config key that cannot be written."""
    if link := _lost_link(path):
        return f"Create the target of {link}, or remove the link."
    if in_bucket(path):
        return (
            "Check that this machine reaches the bucket, and give its account the role Storage "
            f"Object User there; or set {key} to another path."
        )
    return f"Free space, or set {key} to a folder that can be written."


def _lost_link(path: epath.PathLike) -> str:
    """The path, or a folder above it, that is a broken link; empty if none is."""
    found = "" if in_bucket(path) else os.path.abspath(path)
    while found and found != os.path.dirname(found):
        if os.path.islink(found) and not os.path.exists(found):
            return found
        found = os.path.dirname(found)
    return ""


def root_cause_text(error: BaseException) -> str:
    """The first cause: orbax wraps it in its own messages."""
    *_, error = exception_chain(error)
    if isinstance(error, FileExistsError) and (link := _lost_link(error.filename or "")):
        return f"{link} is a link to {os.readlink(link)}, which does not exist"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
