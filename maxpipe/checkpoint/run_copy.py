"""Local copy of a run folder in a bucket, for runs with `run.dir=s3://BUCKET/PATH`.

Checkpoints are saved in the bucket directly. All other files of the run are written to a folder in
the user's cache, which is uploaded at the start, every `UPLOAD_SECONDS` and at the end. The start
of a run downloads the files, unless this copy was the last one that was uploaded. Commands that
read records download them to another folder, because a run may be writing to the copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxpipe.checkpoint.lock import FILE as LOCK_FILE
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    copy_folder,
    in_bucket,
    root_cause_text,
    to_epath,
    translate_bucket_errors,
    url_of_copy,
)
from maxpipe.errors import Code, StorageError
from maxpipe.io.stores import create_parent, store_filesystem, strip_scheme

UPLOAD_SECONDS = 30.0
"""Time between uploads of changed files."""
_TOKEN = ".copy"
"""Name of the file that identifies the copy that was uploaded last."""

_LOG = logging.getLogger(__name__)


class RunCopy:
    """Context manager that downloads the files of a run, and uploads changed files.

    The caller holds the lock of the run. `is_held` returns whether the lock is still held; files
    are uploaded only then. A failed upload is logged and never stops the run.
    """

    def __init__(self, folder: Path, is_held: Callable[[], bool] = lambda: True):
        self._folder, self._url, self._is_held = folder, url_of_copy(folder), is_held
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._ended, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="run-copy", daemon=True)

    def __enter__(self) -> RunCopy:
        download(self._folder)
        if not (self._folder / _TOKEN).exists():
            (self._folder / _TOKEN).write_text(secrets.token_hex(16))
        self.upload()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self.upload()

    def _run(self) -> None:
        while not self._ended.wait(UPLOAD_SECONDS):
            self.upload()

    def upload(self) -> None:
        """Upload the files that changed since their last upload."""
        if not self._is_held():
            return
        try:
            with translate_bucket_errors(self._url):
                store = store_filesystem(self._url)
                for name, stamp in _stamps(self._folder).items():
                    if self._uploaded.get(name) != stamp:
                        create_parent(f"{self._url}/{name}")
                        store.put_file(str(self._folder / name), f"{self._url}/{name}")
                        self._uploaded[name] = stamp
            self._failed = False
        except OSError as error:
            if not self._failed:
                _LOG.warning(
                    "%s: records of the run cannot be uploaded (%s); the upload is repeated, and "
                    "%s contains all records",
                    self._url,
                    root_cause_text(error),
                    self._folder,
                )
            self._failed = True


def download(folder: Path) -> None:
    """Download the files of a run to its local copy, unless this copy was uploaded last.

    Raises:
        StorageError: the bucket cannot be read, or the copy cannot be written.
    """
    url = url_of_copy(folder)
    with _translate_errors(url, folder):
        token = _read(store_filesystem(url), f"{url}/{_TOKEN}")
        own = (folder / _TOKEN).read_bytes() if (folder / _TOKEN).exists() else None
        if token is not None and token != own:
            _replace_records(url, folder)


def folder_of_records(path: str) -> str:
    """Return the folder with the records of a run, or of all runs in a folder. Records in a bucket
    are downloaded.

    Raises:
        ConfigError: the scheme of the URL is not supported.
        StorageError: the bucket cannot be read, or the folder cannot be written.
    """
    if not in_bucket(path):
        return path
    url = os.fspath(to_epath(path.rstrip("/")))
    folder = copy_folder(url, "records")
    with _translate_errors(url, folder):
        folder.mkdir(parents=True, exist_ok=True)
        _replace_records(url, folder)
    return str(folder)


@contextlib.contextmanager
def _translate_errors(url: str, folder: Path) -> Iterator[None]:
    try:
        with translate_bucket_errors(url):
            yield
    except OSError as error:
        raise StorageError(
            Code.CKPT_STORAGE,
            f"{url}: cannot be copied to {folder}\n"
            f"  {root_cause_text(error)}.\n"
            "  Check the network, the permissions of the account and the free disk space, then "
            "start again.",
        ) from error


def _replace_records(url: str, folder: Path) -> None:
    """Replace the records in a folder by those in the bucket. Each file is replaced atomically."""
    store = store_filesystem(url)
    begin, names = len(strip_scheme(url)) + 1, []
    with contextlib.suppress(FileNotFoundError):
        for above, folders, files in store.walk(url, on_error="raise"):
            if CHECKPOINTS_FOLDER in folders:
                folders.remove(CHECKPOINTS_FOLDER)  # may contain many objects
            names += [f"{above}/{name}"[begin:] for name in files]
    names = [name for name in names if _is_record(name) and os.path.basename(name) != _TOKEN]
    for name in _stamps(folder).keys() - {*names, _TOKEN}:
        (folder / name).unlink()
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        store.get_file(f"{url}/{name}", str(partial))
        os.replace(partial, target)


def _read(store: Any, path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return store.cat_file(path)
    return None


def _is_record(name: str) -> bool:
    """Return whether a file is copied: not a checkpoint, lock, secret or unfinished file."""
    parts = name.split("/")
    return (
        all(part not in ("", ".", "..") and "\\" not in part for part in parts)
        and CHECKPOINTS_FOLDER not in parts[:-1]
        and not parts[-1].startswith((LOCK_FILE, ".secret-"))
        and not parts[-1].endswith(".partial")
    )


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of every record, by path relative to the folder.

    The token is last, so that it is uploaded only after all other files.
    """
    stamps = {}
    for above, _, names in os.walk(folder):
        for name in names:
            path = Path(above, name)
            relative = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if _is_record(relative) and path.is_file() and not path.is_symlink():
                    found = path.stat()
                    stamps[relative] = found.st_size, found.st_mtime_ns
    return dict(sorted(stamps.items(), key=lambda item: item[0] == _TOKEN))
