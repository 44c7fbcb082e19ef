"""Object stores: Google Cloud Storage, S3, Azure and other stores that fsspec can open.

A path in a store has the form `SCHEME://BUCKET/PATH`. Credentials are read by the library of the
store from the environment or its login.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from typing import Any

from maxpipe.io.files import url_scheme

_EXTRAS = {
    "gs": ("gcsfs", "gcs"),
    "s3": ("s3fs", "s3"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
}
"""Package and extra of each scheme."""
_NOT_STORES = frozenset(
    (
        *("abstract", "arrow_hdfs", "asynclocal", "blockcache", "cached", "data", "dask", "dir"),
        *("file", "filecache", "generic", "git", "github", "gist", "hf", "http", "https"),
        *("jlab", "jupyter", "libarchive", "local", "reference", "root", "simplecache", "tar"),
        "zip",
    )
)
"""Schemes of fsspec that are not object stores; `maxpipe fetch` downloads files of a hub."""

CREATE_SECONDS = 1.0
"""Pause after creating an object in a store whose library cannot create objects exclusively. It
must be longer than a request."""


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether fsspec has an object store for the scheme of a URL."""
    from fsspec.registry import available_protocols

    scheme = url_scheme(path)
    return scheme in _EXTRAS or (scheme in available_protocols() and scheme not in _NOT_STORES)


def corrected_url(path: str | os.PathLike[str]) -> str:
    """Return the URL that a path with one slash, or with a scheme in capitals, is meant to be."""
    match = re.match(r"([A-Za-z0-9]+):/(/?)(?=[^/])", text := os.fspath(path))
    if match is None or (match[2] and match[1].islower()):
        return ""
    url = f"{match[1].lower()}://{text[match.end() :]}"
    return url if is_store(url) else ""


def invalid_part(url: str | os.PathLike[str]) -> str:
    """Return the reason why a URL cannot be the path of a run or checkpoint, or an empty string.

    fsspec expands glob patterns even when it deletes objects, and stores have no parent folders.
    """
    name = os.fspath(url).partition("://")[2]
    if re.search(r"[*?[]", name):
        return "must not contain *, ? or [, which are glob patterns."
    if {".", ".."} & set(name.split("/")):
        return "must not contain . or .. as a folder, because a store has no parent folders."
    return ""


def is_checkpoint_store(path: str | os.PathLike[str]) -> bool:
    """Return whether runs and checkpoints can be in the store of a URL."""
    return is_store(path) and url_scheme(path) != "memory"


def store_filesystem(path: str | os.PathLike[str]) -> Any:
    """Return the fsspec file system of a store. Its methods accept complete URLs.

    Raises:
        ImportError: the package of the store is not installed.
        ValueError: the scheme is not that of a store.
    """
    if not is_store(path):
        raise ValueError(f"{url_scheme(path)}:// is not supported")
    if (scheme := url_scheme(path)) in ("gs", "s3"):
        return _filesystem(scheme)
    return _filesystem(scheme, **_options_in_url(os.fspath(path)))


@functools.lru_cache(4096)
def _options_in_url(url: str) -> dict[str, Any]:
    """Return options such as the host of `sftp://HOST/PATH`, or the account of `abfs://`."""
    import fsspec

    return fsspec.get_filesystem_class(url_scheme(url))._get_kwargs_from_urls(url)


@functools.cache
def _filesystem(scheme: str, **options: Any) -> Any:
    import fsspec
    from fsspec.config import conf

    package, _ = _EXTRAS.get(scheme, ("fsspec", ""))
    # gcsfs logs tracebacks even for errors that it raises or handles.
    logging.getLogger(package).setLevel(logging.CRITICAL)
    # Cached listings would miss files that tensorstore and other hosts write.
    conf.setdefault("gcs" if scheme == "gs" else scheme, {})["use_listings_cache"] = False
    return fsspec.filesystem(scheme, **options)


def find_objects(folder: str) -> dict[str, dict[str, Any]]:
    """Return the metadata of all objects in a folder, by name.

    Raises:
        OSError: the folder cannot be listed.
    """
    store = store_filesystem(folder)
    if url_scheme(folder) in _EXTRAS:
        return store.find(folder, detail=True)
    # fsspec's `find` omits folders whose listing fails.
    objects, folders = {}, [folder]
    while folders:
        with contextlib.suppress(FileNotFoundError):
            for info in store.ls(above := folders.pop(), detail=True):
                if info["type"] != "directory":
                    objects[info["name"]] = info
                elif len(info["name"]) > len(store._strip_protocol(above)):
                    folders.append(info["name"])
    return objects


def create_parent(path: str) -> None:
    """Create the folder of a new object in stores that have folders. Buckets are not created."""
    if url_scheme(path) not in _EXTRAS:
        store = store_filesystem(path)
        store.makedirs(store._parent(path), exist_ok=True)


def create_object(path: str, content: bytes) -> None:
    """Create an object. If several processes try to create the object, exactly one succeeds. The
    content of each process must be unique.

    Google Cloud Storage, S3 and Azure guarantee it. In other stores, a process succeeds if its
    content is still there after a pause, because the last of several writes remains.

    Raises:
        FileExistsError: the object exists.
    """
    store = store_filesystem(path)
    if url_scheme(path) in _EXTRAS:
        try:
            store.pipe_file(path, content, mode="create")
        except FileExistsError:
            # If the response to a request is lost, the library of the store repeats the request.
            with contextlib.suppress(FileNotFoundError):
                if store.cat_file(path) == content:
                    return
            raise
        return
    create_parent(path)
    if store.exists(path):
        raise FileExistsError(path)
    store.pipe_file(path, content)
    time.sleep(CREATE_SECONDS)
    if store.cat_file(path) != content:
        raise FileExistsError(path)


def strip_scheme(path: str | os.PathLike[str]) -> str:
    """Return `BUCKET/PATH` as the file system of the store writes it in lists."""
    return store_filesystem(path)._strip_protocol(os.fspath(path))


def missing_package(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the rule and the action of an error for a store whose package is not installed."""
    from fsspec.registry import known_implementations

    scheme = url_scheme(path)
    if scheme in _EXTRAS:
        package, extra = _EXTRAS[scheme]
        rule = f"{scheme}:// requires the package {package}, which is not installed."
        return rule, f"Run: pip install 'maxpipe[{extra}]'"
    reason = known_implementations.get(scheme, {}).get("err", "fsspec reports no package")
    rule = f"{scheme}:// requires a package that is not installed: {reason}."
    return rule, "Install the package with pip."
