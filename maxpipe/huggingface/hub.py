"""Download models and datasets from the Hugging Face Hub, with pinned commits and digests.

`fetch` resolves the revision to a commit and downloads files of a few types: safetensors, configs,
tokenizers and data files. Code and pickle files are never downloaded. Each file is compared with
the digest that the hub states: the SHA-256 of an LFS file, or the git blob ID of any other file.

The functions of `huggingface_hub` that download files neither verify digests nor resume a killed
download, so this module writes the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.huggingface.folder import INDEX, SINGLE
from maxpipe.huggingface.hub_client import (
    COMMIT,
    WHERE,
    Hub,
    HubAddress,
    RemoteFile,
    RetryableError,
    parse_hub_address,
    read_blocks,
    shown_name,
)
from maxpipe.huggingface.output_folder import check_local
from maxpipe.io.files import expand_path, lock, open_regular, read, write
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json

T = TypeVar("T")

MANIFEST = ".fetch.json"
"""Name of the manifest in the folder. Data sources ignore names that begin with a dot."""
PARTIAL_FOLDER = ".fetch"

_CHUNK_BYTES = 1 << 20
_MEGABYTE = 10**6
_RESERVE_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 1 << 28
_WRITE_SECONDS = 5.0
"""Interval at which the manifest is written. The time of one write grows with the number of files,
and a complete file that the manifest does not record yet is recognized by its stated digest."""
_FORMAT = 1

_OUT = "command line: --out"
_STATED = re.compile(r"git:[0-9a-f]{40}|sha256:[0-9a-f]{64}")

_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.jinja")
_MODEL_FILES += ("vocab.txt", "merges.txt")
_DATA_FILES = tuple(
    f"*{kind}{packed}"
    for kind in (".parquet", ".jsonl", ".json", ".csv", ".txt")
    for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)
_DATA_CONFIGS = ("dataset_infos.json", "dataset_dict.json")
_HIDDEN = re.compile(r"(^|/)\.[^./\\]")
_WINDOWS_NAMES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class _Entry(TypedDict):
    """A file in the manifest. `sha256` is empty until the file is complete."""

    size: int
    stated: str
    sha256: str


class _Manifest(TypedDict):
    format: int
    repository: str
    revision: str
    commit: str
    endpoint: str
    include: list[str]
    files: dict[str, _Entry]


def fetch(
    text: str,
    out: str,
    include: Sequence[str] = (),
    *,
    say: Callable[[str], None] = lambda line: None,
    report: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> str:
    """Download the files of a repository to the folder `out`, and return the commit.

    `include` selects files by glob patterns; patterns never select other types of files. If `out`
    contains an incomplete download of the same revision, the download continues. `report` receives
    the current file, and the megabytes done and in total.

    Raises:
        ConfigError: the repository, the revision, a file name or the folder cannot be used.
        StorageError: the hub or the disk failed, or a file differs from its stated digest.
    """
    address = parse_hub_address(text)
    check_local(out, _OUT)
    folder = expand_path(out, _OUT)
    hub = Hub(address, say)
    with _locked(folder):
        before = _read_manifest(folder, address)
        commit = before["commit"] if before else ""
        if before and sorted(include) == before["include"]:
            files = [RemoteFile(p, e["size"], e["stated"]) for p, e in before["files"].items()]
        else:
            commit, listed = hub.list_files(commit)
            files = _select(address, listed, include)
        _check_names(address, [file.path for file in files])
        known = before["files"] if before else {}
        manifest: _Manifest = {
            "format": _FORMAT,
            "repository": str(address),
            "revision": address.revision,
            "commit": commit,
            "endpoint": hub.shown_endpoint,
            "include": sorted(include),
            "files": known | {f.path: _entry(f, known.get(f.path)) for f in files},
        }
        say(
            f"{address}@{commit}: {pluralize(len(files), 'file')}, "
            f"{math.ceil(sum(file.size for file in files) / _MEGABYTE):,} MB"
        )
        progress = _Progress(report, files)
        with _translate_disk_errors(folder):
            missing = [f for f in files if not _is_complete(folder, f, manifest, progress)]
            _check_space(folder, missing)
            _write_manifest(folder, manifest)
            written = time.monotonic()
            for file in missing:
                progress.begin(file)
                entry = manifest["files"][file.path]
                entry["sha256"] = _fetch_file(hub, folder, file, commit, progress)
                if time.monotonic() - written > _WRITE_SECONDS:
                    _write_manifest(folder, manifest)
                    written = time.monotonic()
                say(f"{file.path}: sha256 {entry['sha256']}")
            _write_manifest(folder, manifest)
            shutil.rmtree(folder / PARTIAL_FOLDER, ignore_errors=True)
    return commit


def _entry(file: RemoteFile, before: _Entry | None) -> _Entry:
    same = before is not None and before["stated"] == file.stated
    return {
        "size": file.size,
        "stated": file.stated,
        "sha256": before["sha256"] if before and same else "",
    }


# --- files of the repository --------------------------------------------------------------


def _select(
    address: HubAddress, files: Sequence[RemoteFile], include: Sequence[str]
) -> list[RemoteFile]:
    """Return the files to download, sorted by path."""
    kinds = _DATA_FILES if address.kind == "dataset" else _MODEL_FILES
    allowed = [
        f
        for f in files
        if _matches(f.path.rpartition("/")[2], kinds) and not _HIDDEN.search(f.path)
    ]
    if include:
        chosen = [f for f in allowed if _matches(f.path, include)]
    elif address.kind == "dataset":
        chosen = [f for f in allowed if f.path not in _DATA_CONFIGS]
    else:
        names = {f.path for f in allowed}
        # Some repositories contain the weights a second time, in the format of another program.
        twice = "consolidated*" if names & {SINGLE, INDEX} else ""
        chosen = [f for f in allowed if "/" not in f.path and not fnmatchcase(f.path, twice)]
        if not _any(chosen, "*.safetensors"):
            chosen = []
    if not chosen:
        others = sorted({os.path.splitext(f.path)[1] or f.path for f in files})[:8]
        kind = "data" if address.kind == "dataset" else "safetensors"
        rule = f"has no {kind} files"
        if include:
            rule += f" that match {' or '.join(map(shown_name, include))}"
        if files:
            rule += f": its {pluralize(len(files), 'file')} end with "
            rule += f"{', '.join(shown_name(text)[1:-1] for text in others)}."
        else:
            rule += ": the repository is empty."
        action = "Choose a repository with these files; code and pickle files are never downloaded."
        raise ConfigError.one(Code.HF_ACCESS, WHERE, address, rule, action)
    for file in chosen:
        if not _STATED.fullmatch(file.stated):
            rule = f"the hub states no digest of {shown_name(file.path)}."
            action = "Check HF_ENDPOINT, or download another repository."
            raise ConfigError.one(Code.HF_ACCESS, WHERE, address, rule, action)
    return sorted(chosen)


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def _any(files: Sequence[RemoteFile], pattern: str) -> bool:
    return any(fnmatchcase(file.path, pattern) for file in files)


def _check_names(address: HubAddress, paths: Sequence[str]) -> None:
    """Check that every name stays inside the folder and is distinct on every file system.

    Raises:
        ConfigError: a name is unsafe.
    """
    seen: dict[str, str] = {}
    done: set[str] = set()
    for path in paths:
        reason = _unsafe_reason(path)
        folders = itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
        for place in (*(f"{folder}/" for folder in folders), path):
            key = unicodedata.normalize("NFC", place.removesuffix("/")).casefold()
            known = seen.setdefault(key, place)
            if known != place or (place == path and path in done):
                reason = reason or f"collides with {shown_name(known)} on some file systems"
        done.add(path)
        if reason:
            rule = f"has the file {shown_name(path)}, whose name {reason}. Nothing was downloaded."
            action = "Do not use this repository, or select other files with --include."
            raise ConfigError.one(Code.HF_NAMES, WHERE, address, rule, action)


def _unsafe_reason(path: str) -> str:
    names = path.split("/")
    if "\\" in path or ":" in path or not path.isprintable():
        return "contains a character that some file systems do not allow"
    if any(name in ("", ".", "..") for name in names):
        return "leaves the folder, or has an empty part"
    if any(name.startswith(".") for name in names):
        return "begins with a dot"
    if any(name.endswith((".", " ")) or name.startswith(" ") for name in names):
        return "has a space or a dot at an end"
    if any(_WINDOWS_NAMES.fullmatch(name) for name in names):
        return "is reserved on Windows"
    if len(path.encode()) > 1024 or any(len(name.encode()) > 200 for name in names):
        return "is too long"
    return ""


# --- the folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold its lock."""
    is_new = not os.path.lexists(folder)
    with _translate_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            rule, action = "must be a folder.", "Specify a folder that does not exist."
            raise ConfigError.one(Code.HF_OUT, _OUT, folder, rule, action) from None
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free = True
        with contextlib.suppress(OSError):  # some file systems have no locks
            free = lock(descriptor)
        if not free:
            rule = "is in use by another `maxpipe fetch`."
            raise ConfigError.one(Code.HF_OUT, _OUT, folder, rule, "Wait until it has finished.")
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):  # it is empty only if nothing was downloaded
                folder.rmdir()


def _read_manifest(folder: Path, address: HubAddress) -> _Manifest | None:
    """Return the manifest of an earlier download to the folder, or None if the folder is empty.

    Raises:
        ConfigError: the folder contains something else.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_json(read(path, _MAX_MANIFEST_BYTES), _Manifest)
        if manifest["format"] != _FORMAT or not COMMIT.fullmatch(manifest["commit"]):
            raise ValueError("its format is unknown")
    except FileNotFoundError:
        if not os.listdir(folder):
            return None
        rule = "must be a new or empty folder, or the folder of an earlier `maxpipe fetch`."
        action = "Specify another folder."
        raise ConfigError.one(Code.HF_OUT, _OUT, folder, rule, action) from None
    except (OSError, ValueError) as error:
        rule = f"must be a manifest of `maxpipe fetch`: {getattr(error, 'strerror', 0) or error}."
        action = f"Delete {path} and the files next to it, or specify another folder."
        raise ConfigError.one(Code.HF_OUT, str(path), None, rule, action) from error
    same = manifest["repository"] == str(address)
    if same and address.revision in (manifest["revision"], manifest["commit"]):
        return manifest
    rule = f"contains {manifest['repository']}@{manifest['revision']}, which was resolved to "
    rule += f"commit {manifest['commit']}."
    action = "Specify another folder for another repository or revision."
    raise ConfigError.one(Code.HF_OUT, _OUT, folder, rule, action)


def _write_manifest(folder: Path, manifest: _Manifest) -> None:
    write(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


@contextlib.contextmanager
def _translate_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = OSError(error.errno, error.strerror or str(error))
        action = "Free up disk space or change --out, then run the same command again."
        raise StorageError.unwritable(error.filename or folder, cause, action) from error


def _check_space(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Check that the missing bytes fit on the disk.

    Raises:
        StorageError: they do not fit.
    """
    needed = sum(file.size for file in files)
    for file in files:
        with contextlib.suppress(OSError):
            needed -= os.stat(_partial_path(folder, file)).st_size
    free = shutil.disk_usage(folder).free
    if needed and needed + _RESERVE_BYTES > free:
        raise StorageError(
            Code.IO_UNWRITABLE,
            f"{folder}: has too little space\n"
            f"  the missing files need {needed:,} bytes, but only {free:,} are free.\n"
            "  Free up disk space, change --out, or select fewer files with --include.",
        )


def _is_complete(folder: Path, file: RemoteFile, manifest: _Manifest, progress: _Progress) -> bool:
    """Return whether the folder contains the file with its stated digest. Record its SHA-256."""
    entry, path = manifest["files"][file.path], folder / file.path
    entry["sha256"] = ""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            return False
        progress.begin(file)
        digest = _Digest(file.size)
        with open(open_regular(path), "rb") as stream:
            digest.read(stream, progress.add)
        if digest.matches(file.stated):
            entry["sha256"] = digest.sha256
            return True
        progress.add(-digest.size)
    return False


class _Digest:
    """SHA-256 and git blob ID of a file of known size."""

    def __init__(self, size: int):
        self._expected_size = size
        self.reset()

    def reset(self) -> None:
        self._sha256 = hashlib.sha256()
        head = b"blob %d\0" % self._expected_size
        self._git = hashlib.sha1(head, usedforsecurity=False)
        self.size = 0

    def add(self, data: bytes) -> None:
        self._sha256.update(data)
        self._git.update(data)
        self.size += len(data)

    def read(self, stream: Any, count: Callable[[int], None]) -> None:
        """Add the remaining content of a file."""
        while data := stream.read(_CHUNK_BYTES):
            self.add(data)
            count(len(data))

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def matches(self, stated: str) -> bool:
        """Return whether a digest that the hub states is the digest of the content."""
        return stated in (f"sha256:{self.sha256}", f"git:{self._git.hexdigest()}")


class _Progress:
    """Reports the megabytes of all files together."""

    def __init__(self, report: Callable[[str, int, int], None], files: Sequence[RemoteFile]):
        self._report, self._task, self._done = report, "", 0
        self._total = sum(file.size for file in files)

    def begin(self, file: RemoteFile) -> None:
        self._task = file.path
        self.add(0)

    def add(self, count: int) -> None:
        self._done += count
        total = math.ceil(self._total / _MEGABYTE)
        self._report(self._task, min(self._done // _MEGABYTE, total), total)


def _partial_path(folder: Path, file: RemoteFile) -> Path:
    """Return the path of an incomplete file. Another content has another path."""
    name = hashlib.sha256(f"{file.path}\0{file.stated}".encode()).hexdigest()[:32]
    return folder / PARTIAL_FOLDER / f".{name}"


def _fetch_file(hub: Hub, folder: Path, file: RemoteFile, commit: str, progress: _Progress) -> str:
    """Download one file, move it to its place, and return its SHA-256."""
    target = _make_parents(folder, file.path)
    path = _partial_path(folder, file)
    _make_folder(path.parent)
    with open(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b") as stream:
        partial = _PartialFile(stream, file, progress)
        _download_rest(hub, partial, commit)
        if not partial.is_complete and partial.is_resumed:
            partial.restart()  # some response may have had the wrong part of the content
            _download_rest(hub, partial, commit)
        if not partial.is_complete:
            partial.restart()
            raise _digest_error(file)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(path, target)
    return partial.digest.sha256


class _PartialFile:
    """A partly downloaded file and the digest of its content.

    `is_resumed` is True if the content was received in several responses.
    """

    def __init__(self, stream: Any, file: RemoteFile, progress: _Progress):
        self.file, self._stream, self._progress = file, stream, progress
        self.digest = _Digest(file.size)
        if os.fstat(stream.fileno()).st_size > file.size:
            stream.truncate(0)
        self.digest.read(stream, progress.add)
        self.is_resumed = self.digest.size > 0

    @property
    def is_complete(self) -> bool:
        return self.digest.size == self.file.size and self.digest.matches(self.file.stated)

    def restart(self) -> None:
        self._progress.add(-self.digest.size)
        self._stream.seek(0)
        self._stream.truncate(0)
        self.digest.reset()
        self.is_resumed = False

    def append(self, data: bytes) -> None:
        if self.digest.size + len(data) > self.file.size:
            self.restart()
            raise _size_error(self.file)
        self._stream.write(data)
        self.digest.add(data)
        self._progress.add(len(data))


def _download_rest(hub: Hub, partial: _PartialFile, commit: str) -> None:
    """Download the rest of a file, with several attempts."""
    file, attempt, most = partial.file, 0, partial.digest.size
    while (before := partial.digest.size) < file.size:
        try:
            with hub.open(file.path, commit, before) as response:
                rest = f"bytes {before}-{file.size - 1}/{file.size}"
                is_rest = response.headers.get("Content-Range") == rest
                if response.status_code != 206 or not is_rest:
                    partial.restart()  # the server ignores ranges
                    if response.status_code != 200:
                        raise RetryableError(f"HTTP status {response.status_code} for a range")
                partial.is_resumed |= partial.digest.size > 0
                for data in read_blocks(response):
                    partial.append(data)
            if partial.digest.size < file.size:
                end = f"{partial.digest.size:,} of {file.size:,} bytes"
                raise RetryableError(f"the connection ended after {end}")
        except RetryableError as error:
            if partial.digest.size > most and not error.is_slow:
                attempt = 0
            most = max(most, partial.digest.size)
            hub.pause(file.path, attempt, error)
            attempt += 1


def _make_parents(folder: Path, path: str) -> Path:
    """Create the subfolders of a file without following links, and return the file's path."""
    place = folder
    *parents, name = path.split("/")
    for parent in parents:
        place = place / parent
        _make_folder(place)
    return place / name


def _make_folder(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        rule = "must be a folder, not a link or a file."
        raise ConfigError.one(Code.IO_UNSAFE, str(path), None, rule, f"Remove {path}.")


def _digest_error(file: RemoteFile) -> StorageError:
    return StorageError(
        Code.HF_DIGEST,
        f"{file.path}: differs from the digest that the hub states\n"
        f"  the downloaded content does not have the digest {file.stated}. The content was "
        "deleted.\n"
        "  Run the same command again. If the error persists, check the proxy and HF_ENDPOINT.",
    )


def _size_error(file: RemoteFile) -> StorageError:
    return StorageError(
        Code.HF_DIGEST,
        f"{file.path}: differs from the size that the hub states\n"
        f"  the server sends more than {file.size:,} bytes.\n"
        "  Run the same command again. If the error persists, check the proxy and HF_ENDPOINT.",
    )
