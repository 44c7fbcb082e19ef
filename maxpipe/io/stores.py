"""Object stores: Google Cloud Storage, S3, Azure and other stores that fsspec can open.

A path in a store has the form `SCHEME://BUCKET/PATH`. Credentials are read by the library of the
store from the environment or its login.
"""

from __future__ import annotations

import functools
import logging
import os
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

CHECKPOINT_STORES = ("gs", "s3")
"""Schemes of the stores in which orbax and tensorstore can write arrays."""


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether fsspec has an object store for the scheme of a URL."""
    from fsspec.registry import available_protocols

    scheme = url_scheme(path)
    return scheme in _EXTRAS or (scheme in available_protocols() and scheme not in _NOT_STORES)


def store_filesystem(path: str | os.PathLike[str]) -> Any:
    """Return the fsspec file system of a store. Its methods accept complete URLs.

    Raises:
        ImportError: the package of the store is not installed.
        ValueError: the scheme is not that of a store.
    """
    if not is_store(path):
        raise ValueError(f"{url_scheme(path)}:// is not supported")
    return _filesystem(url_scheme(path))


@functools.cache
def _filesystem(scheme: str) -> Any:
    import fsspec
    from fsspec.config import conf

    package, _ = _EXTRAS.get(scheme, ("fsspec", ""))
    # gcsfs logs tracebacks even for errors that it raises or handles.
    logging.getLogger(package).setLevel(logging.CRITICAL)
    # Cached listings would miss files that tensorstore and other hosts write.
    conf.setdefault("gcs" if scheme == "gs" else scheme, {})["use_listings_cache"] = False
    return fsspec.filesystem(scheme)


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


def array_store(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensorstore spec for arrays below a folder of a store.

    tensorstore does not read AWS_ENDPOINT_URL, so the endpoint and the region are those of s3fs.
    """
    scheme = url_scheme(path)
    bucket, _, name = os.fspath(path).partition("://")[2].partition("/")
    spec: dict[str, Any] = {"driver": "gcs", "bucket": bucket, "path": name}
    if scheme == "s3":
        store = store_filesystem(path)
        store.connect()
        meta = store.s3.meta
        spec["driver"] = "s3"
        if not (meta.endpoint_url or "").partition("?")[0].endswith(".amazonaws.com"):
            spec |= {"endpoint": meta.endpoint_url, "aws_region": meta.region_name or "us-east-1"}
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            # Other sources are not searched, which would print messages.
            spec["aws_credentials"] = {"type": "environment"}
    return spec
