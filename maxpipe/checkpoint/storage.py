"""Store runs and checkpoints in local folders and in buckets of object stores.

A bucket path has the form `SCHEME://BUCKET/PATH`. epath and orbax access objects through fsspec;
this module adds operations that they lack. orbax itself supports only `gs://`, so `to_epath`
extends the functions with which orbax recognizes a bucket.

The module also distinguishes damage from storage failures. A checkpoint counts as damaged only if
its content was read and differs from the saved content, or is missing. All other failures are
retried. If the retries fail, the run ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from etils import epath
from etils.epath import backend, gpath

from maxpipe.config.config_files import CHECKPOINTS_FOLDER, CONFIG_FILE
from maxpipe.config.load import load_storage_settings
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.run import RunConfig
from maxpipe.errors import Code, ConfigError, MaxpipeError, StorageError, exception_chain
from maxpipe.io.array_store import array_context, array_store
from maxpipe.io.files import UnsafeFileError, expand_path, open_regular, url_scheme
from maxpipe.io.stores import (
    create_object,
    create_parent,
    find_objects,
    invalid_part,
    is_checkpoint_store,
    missing_package,
    store_filesystem,
    strip_scheme,
)

T = TypeVar("T")

ATTEMPTS, PAUSE_SECONDS = 3, 1.0
"""Number of attempts before a storage failure ends the run, and seconds between attempts."""

# Error codes for a path that is missing or not a regular file.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_CONTENT = (ValueError, LookupError, TypeError, AttributeError, EOFError, NotImplementedError)
_CONTENT += (RecursionError,)  # orbax's parser does not limit the nesting depth
# tensorstore raises ValueError for every failure and describes the cause in the message.
_SYSTEM_CALL = re.compile(r"os_error_code='([0-9]+)'")
_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|"
    r"ABORTED|CANCELLED):"
)


class DamagedError(Exception):
    """Raised if content on disk differs from the saved content; names the file or array."""


def is_damage(error: BaseException) -> bool:
    """Return whether a read error means that the content is wrong or missing."""
    if outage(error) is not None or isinstance(error, MaxpipeError):
        return False
    return isinstance(error, (*_CONTENT, OSError))


def outage(error: BaseException) -> OSError | None:
    """Return the storage failure that caused a read error as a new OSError, or None if there was
    none.
    """
    for cause in exception_chain(error):
        if isinstance(cause, OSError):
            is_content = isinstance(cause, UnsafeFileError) or cause.errno in _DAMAGE
            return None if is_content else copy(cause)
        text = str(cause)
        if match := _SYSTEM_CALL.search(text):
            number = int(match[1])
            return None if number in _DAMAGE else OSError(number, text.splitlines()[0])
        if _OUTAGE.search(text):
            return OSError(text.splitlines()[0])
    return None


def call_with_retries(call: Callable[[], T]) -> T:
    """Return the result of `call`, retrying a few times after storage failures.

    Raises:
        OSError: the storage failed at every attempt.
        Exception: `call` raised another exception, which is not retried.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if outage(error) is None:
                raise
        time.sleep(PAUSE_SECONDS)
    return call()


_OPEN_FILES = "/proc/self/fd"


def copy_folder(url: epath.PathLike, kind: Literal["runs", "records"] = "runs") -> Path:
    """Return the folder on this machine that contains the copy of a folder in a bucket: `runs` of
    the runs that write to it, `records` of commands that read it.
    """
    scheme, _, name = os.fspath(url).partition("://")
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return Path(_copies(kind), scheme, *parts)


def url_of_copy(folder: epath.PathLike) -> str:
    """Return the URL of the folder in a bucket if `folder` is its copy, or an empty string."""
    path = Path(folder)
    if in_bucket(folder) or not path.is_relative_to(_copies()):
        return ""
    scheme, *parts = path.relative_to(_copies()).parts or ("",)
    url = f"{scheme}://{'/'.join(parts)}"
    return url if is_checkpoint_store(url) else ""


def _copies(kind: str = "runs") -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "maxpipe", kind)


def runs_folder(config: RunConfig) -> Path:
    """Return the folder of all runs on this machine. For a bucket, this is its local copy."""
    if in_bucket(config.dir):
        return copy_folder(config.dir)
    return expand_path(config.dir, "run.dir")


def run_folder(config: RunConfig) -> Path:
    """Return a run's folder, which contains all run files except those in `checkpoint.dir`."""
    return runs_folder(config) / config.name


def checkpoint_home(run_dir: epath.PathLike, config: CheckpointConfig) -> str:
    """Return the parent of a run's checkpoint folder, according to a config."""
    if not config.dir:
        return url_of_copy(run_dir) or os.fspath(run_dir)
    above = config.dir if in_bucket(config.dir) else expand_path(config.dir, "checkpoint.dir")
    return os.path.join(above, os.path.basename(run_dir))


def find_checkpoint_home(run_dir: epath.PathLike, where: str = "path") -> str:
    """Return the parent of an existing run's checkpoint folder, according to its config.yml.

    `where` names the config key that sets the run folder.

    Raises:
        ConfigError: config.yml cannot be read, and the run folder contains no checkpoints.
    """
    path = os.fspath(run_dir)
    if in_bucket(path) or not os.path.exists(file := expand_path(path, where) / CONFIG_FILE):
        return path
    try:
        config = load_storage_settings(str(file))
    except ConfigError:
        if (file.parent / CHECKPOINTS_FOLDER).is_dir():
            return path
        raise
    if not config.checkpoint.dir:
        return url_of_copy(path) or path
    # Use the run name in the config, because the run folder may have been copied or renamed.
    return checkpoint_home(config.run.name, config.checkpoint)


def in_bucket(path: epath.PathLike) -> bool:
    """Return whether a path is in a bucket."""
    return url_scheme(path) != ""


def to_epath(path: epath.PathLike) -> epath.Path:
    """Convert a path to an absolute epath.

    Raises:
        ConfigError: the URL scheme is not supported.
        StorageError: the package of the store is not installed, or has no credentials.
    """
    if not in_bucket(path):
        return epath.Path("/") / expand_path(os.fspath(path)).absolute()
    scheme = url_scheme(path)
    if not is_checkpoint_store(path):
        rule = f"must be a folder or a path in an object store: {scheme}:// is not supported."
        action = "Give a folder, gs://BUCKET/PATH, s3://BUCKET/PATH or az://CONTAINER/PATH."
        raise ConfigError.one(Code.IO_PATH, os.fspath(path), None, rule, action)
    if reason := invalid_part(path):
        action = f"Give a path such as {scheme}://my-bucket/runs/my-run."
        raise ConfigError.one(Code.IO_PATH, os.fspath(path), None, reason, action)
    try:
        store_filesystem(path)
    except ImportError as error:
        rule, action = missing_package(path)
        raise StorageError(
            Code.ENV_PACKAGE, f"{path}: cannot be reached\n  {rule}\n  {action}"
        ) from error
    except Exception as error:
        raise StorageError(
            Code.CKPT_STORAGE,
            f"{path}: cannot be reached\n"
            f"  the library of the store reports: {root_cause_text(error)}.\n"
            "  Check the URL, and the environment variables with the credentials of the store.",
        ) from error
    if scheme != "gs":
        _extend_orbax()
    if scheme not in ("gs", "s3"):
        epath.register_path_cls(f"{scheme}://")(StorePath)
    _extend_array_contexts(path)
    return epath.Path(path)


def _extend_array_contexts(path: str | os.PathLike[str]) -> None:
    from orbax.checkpoint._src.serialization import tensorstore_utils

    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        getattr(tensorstore_utils, name, {}).update(array_context(path))


class StorePath(gpath.PosixGPath):
    """An epath in a store that epath cannot open, or opens without the options in its URL."""

    @property
    def _path_str(self) -> str:
        if self.parts and self.parts[0].endswith(":"):  # the scheme, if epath does not know it
            return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"
        return super()._path_str

    @property
    def _backend(self) -> Any:
        return _STORE_BACKEND


class _StoreBackend(type(backend.fsspec_backend)):
    def fs(self, path: epath.PathLike) -> Any:
        return store_filesystem(path)

    def exists(self, path: epath.PathLike) -> bool:
        try:
            store_filesystem(path).info(os.fspath(path))  # fsspec's `exists` hides errors
        except FileNotFoundError:
            return False
        return True

    def open(self, path: epath.PathLike, mode: str) -> Any:
        if "w" in mode:
            create_parent(os.fspath(path))
        return super().open(path, mode)

    def glob(self, path: epath.PathLike) -> list[str]:
        above = re.split(r"[*?[]", os.fspath(path))[0].rpartition("/")[0]
        begin = len(strip_scheme(above))  # names in lists may lack the host of the URL
        return [f"{above}{name[begin:]}" for name in store_filesystem(path).glob(path)]


_STORE_BACKEND = _StoreBackend()


def _array_store(path: str) -> dict[str, Any]:
    """Return the tensorstore spec for a folder of arrays, or for orbax's file of shardings."""
    path = path.rstrip("/")
    return array_store(path if path.endswith("/_sharding") else f"{path}/")


@functools.cache
def _extend_orbax() -> None:
    """Extend the functions with which orbax recognizes `gs://` to all stores.

    orbax then commits a checkpoint by an object in place of a rename, and writes arrays with the
    S3 driver of tensorstore.
    """
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    is_hierarchical = gcs_utils.is_hierarchical_namespace_enabled
    replaced = {
        gcs_utils: {
            "is_gcs_path": lambda path: in_bucket(path),
            "is_hierarchical_namespace_enabled": lambda path: (
                url_scheme(path) == "gs" and is_hierarchical(path)
            ),
            "get_kvstore_for_gcs": _array_store,
        },
        tensorstore_utils: {
            "_use_gcs_driver": in_bucket,
            "_normalize_path": lambda path: (
                path.rstrip("/") if in_bucket(path) else os.path.normpath(path)
            ),
        },
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            if not callable(getattr(module, name, None)):
                raise StorageError(
                    Code.ENV_PACKAGE,
                    "checkpoints: cannot be stored in this object store\n"
                    f"  the installed orbax-checkpoint has no function {name}.\n"
                    "  Run: pip install 'orbax-checkpoint==0.12.8'",
                )
            setattr(module, name, function)


@contextlib.contextmanager
def translate_bucket_errors(path: epath.PathLike) -> Iterator[None]:
    """Convert any bucket error inside the context to an OSError."""
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
    """Convert errors from bucket reads inside the context. Objects are either complete or missing.

    Raises:
        StorageError: the object cannot be read, so its state is unknown.
        OSError: a file on disk cannot be read, or the object is missing.
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
            Code.CKPT_STORAGE,
            f"{path}: cannot be read\n"
            f"  {root_cause_text(error)}.\n"
            "  Check the network of this machine, and the credentials and permissions of its "
            "account, then start again.",
        ) from error


def create(path: epath.PathLike, text: str) -> None:
    """Create an object. If several processes try to create the object, exactly one succeeds.

    Raises:
        FileExistsError: the object exists.
    """
    create_object(os.fspath(path), text.encode())


class PinnedFolder:
    """A folder that is kept open, so that `path` remains valid even if the folder is moved.

    If the folder is deleted, `path` no longer exists, whereas orbax would recreate a folder with
    the old name. In buckets and on systems without /proc, `path` is the folder's original path.
    """

    def __init__(self, folder: epath.Path):
        self._name, self._open = os.fspath(folder), -1
        self.path = folder
        if in_bucket(folder):
            return
        folder.mkdir(exist_ok=True)  # parent folders are created only when a run starts
        if os.path.isdir(_OPEN_FILES):
            self._open = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = epath.Path(_OPEN_FILES) / str(self._open)

    def restore_names(self, error: BaseException) -> BaseException:
        """Replace the path in an error message with the folder's original path."""
        for cause in exception_chain(error):
            cause.args = tuple(map(self._by_name, cause.args))
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


def create_folder(folder: epath.PathLike) -> None:
    """Create a folder and its parents.

    Raises:
        NotADirectoryError: the path of the folder or of a parent is a file.
        OSError: the folder cannot be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        if not (file := _file_in_place_of_folder(folder)):
            raise
        text = "must be a folder, but is a file"
        raise NotADirectoryError(errno.ENOTDIR, text, file) from None


def _file_in_place_of_folder(folder: epath.PathLike) -> str:
    """Return the file that has the path of the folder or of a parent, or an empty string."""
    if in_bucket(folder):
        return ""
    path = Path(os.path.abspath(folder))
    return next((str(each) for each in (path, *path.parents) if os.path.isfile(each)), "")


def probe_writable(folder: epath.Path) -> None:
    """Check that a folder is writable. A missing folder is created.

    Raises:
        OSError: the folder is not writable.
    """
    with translate_bucket_errors(folder):
        if in_bucket(folder):
            probe = folder / f"{secrets.token_hex(8)}.probe"
            probe.write_text("checks whether the bucket is writable")
            probe.unlink()
        else:
            create_folder(folder)
            tempfile.TemporaryFile(dir=folder).close()


def exists(path: epath.Path) -> bool:
    """Return whether a path exists. Unlike epath, raise an error if the storage is unreachable.

    Raises:
        OSError: the storage is unreachable.
    """
    if not in_bucket(path):
        return call_with_retries(lambda: _exists(path))
    with translate_read_errors(path):
        try:
            store_filesystem(path).info(os.fspath(path))
        except FileNotFoundError:
            return False
    return True


def entries(folder: epath.Path) -> list[epath.Path]:
    """Return the entries of a folder sorted by name; an empty list if it does not exist.

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
            names = store_filesystem(folder).ls(os.fspath(folder), detail=False)
        except FileNotFoundError:
            return []
    return [folder / os.path.basename(name) for name in names]


def rename(path: epath.Path, target: epath.Path) -> None:
    """Rename a folder. In a bucket, all objects are copied, then deleted.

    Raises:
        OSError: the folder cannot be renamed.
    """
    if url_scheme(path) in ("", "gs"):
        path.rename(target)
        return
    store = store_filesystem(path)
    for name in files(path):
        _copy(store, os.fspath(path / name), os.fspath(target / name))
    store.rm(os.fspath(path), recursive=True)


def _copy(store: Any, path: str, target: str) -> None:
    create_parent(target)
    if url_scheme(path) == "s3":
        store.cp_file(path, target)
        return
    # Other stores may lack copies, or return before a copy is complete.
    with store.open(path, "rb") as source, store.open(target, "wb") as copied:
        shutil.copyfileobj(source, copied, 1 << 23)


def modified_seconds(path: epath.PathLike) -> float:
    """Return the Unix time of the last write to a file, folder or object."""
    if not in_bucket(path):
        return os.stat(path).st_mtime
    store = store_filesystem(path)
    # epath returns 0 for objects in S3. Folders of a bucket have no time.
    with contextlib.suppress(KeyError, TypeError):
        return store.modified(os.fspath(path)).timestamp()
    return 0.0


def open_file(path: epath.Path) -> BufferedIOBase:
    """Open a file or object for reading.

    Raises:
        OSError: the path cannot be read, or is not a regular file.
    """
    if in_bucket(path):
        return cast(BufferedIOBase, path.open("rb"))
    return os.fdopen(open_regular(path), "rb")


def read(path: epath.Path, most: int) -> bytes:
    """Read a file or object of at most `most` bytes.

    Raises:
        OSError: the file cannot be read, or is larger than `most` bytes.
    """
    with translate_read_errors(path), open_file(path) as file:
        large = not in_bucket(path) and os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise UnsafeFileError(errno.EFBIG, f"larger than {most} bytes", os.fspath(path))
    return content


def files(folder: epath.Path) -> dict[str, int]:
    """Return the size in bytes of every file in a folder, keyed by relative path."""
    if not in_bucket(folder):
        return call_with_retries(lambda: dict(_walk(folder)))
    with translate_read_errors(folder):
        objects = find_objects(os.fspath(folder))
    begin = len(strip_scheme(folder)) + 1
    return {name[begin:]: info["size"] for name, info in objects.items() if name[-1] != "/"}


def _walk(folder: epath.Path) -> Iterator[tuple[str, int]]:
    """Yield relative paths and sizes. Links to folders are not followed, to avoid cycles."""
    folders = [""]
    while folders:
        below = folders.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
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
    return entry.stat(follow_symlinks=False).st_size  # a broken link


def _exists(path: epath.Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def remedy(path: epath.PathLike, key: str) -> str:
    """Return the suggested action if `path`, the value of config key `key`, is not writable."""
    if link := _lost_link(path):
        return f"Create the target of {link}, or remove the link."
    if in_bucket(path):
        role = "the Storage Object User role"
        if url_scheme(path) != "gs":
            role = "permission to list, read, write and delete its objects"
        return (
            f"Check that this machine can reach the bucket, and grant its account {role}; or set "
            f"{key} to another path."
        )
    if file := _file_in_place_of_folder(path):
        return f"Move {file} to another path, or set {key} to another folder."
    return f"Free disk space, or set {key} to a writable folder."


def _lost_link(path: epath.PathLike) -> str:
    """Return the first broken link among the path and its parents, or an empty string if there is
    none.
    """
    if in_bucket(path):
        return ""
    whole = Path(os.path.abspath(path))
    links = (str(link) for link in (whole, *whole.parents) if os.path.islink(link))
    return next((link for link in links if not os.path.exists(link)), "")


def root_cause_text(error: BaseException) -> str:
    """Return the message of an error's root cause without a period at its end.

    orbax wraps errors in other exceptions.
    """
    *_, error = exception_chain(error)
    if isinstance(error, FileExistsError) and (link := _lost_link(error.filename or "")):
        return f"{link} is a link to {os.readlink(link)}, which does not exist"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first, *others = str(error).splitlines() or [type(error).__name__]
    # Messages of botocore put the reason on the second line.
    text = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
    return _ANNOTATION.sub("", text).rstrip(".!")


_ANNOTATION = re.compile(r"\s*\[(tensorstore_spec|source locations)='([^'\\]|\\.)*'\]")
"""Part of a tensorstore error that does not help users: the complete spec, or lines of C++ code."""
