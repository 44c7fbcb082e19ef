"""tensorstore specs for arrays in object stores."""

from __future__ import annotations

import os
from typing import Any

from maxpipe.io.files import url_scheme
from maxpipe.io.store_server import CONTEXT, served_array_store
from maxpipe.io.stores import store_filesystem

RETRIES: dict[str, Any] = {"max_retries": 6, "initial_delay": "1s", "max_delay": "32s"}
"""Repetitions of a failed request, in about one minute. By default, tensorstore repeats requests
for a quarter of an hour, in which a run would hang without a message."""


def array_context(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensorstore context for arrays at a path."""
    scheme = url_scheme(path)
    if scheme in ("gs", "s3"):
        return {"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES}
    return CONTEXT if scheme else {}


def array_store(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensorstore spec for arrays below a folder of a store.

    tensorstore does not read AWS_ENDPOINT_URL, so the endpoint and the region are those of s3fs.
    """
    scheme = url_scheme(path)
    if scheme not in ("gs", "s3"):
        return served_array_store(os.fspath(path))
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
