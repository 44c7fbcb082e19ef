"""Buckets of Google Cloud Storage, `gs://BUCKET/PATH`, as fsspec gives them."""

from __future__ import annotations

import functools
import logging
from typing import Any


@functools.cache
def store() -> Any:
    """All buckets as one file system, whose paths may begin with `gs://`.

    Raises:
        ImportError: gcsfs is not installed.
    """
    import fsspec
    from fsspec.config import conf

    # It logs, with tracebacks, errors that it also raises or handles.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Its cache of listings would miss what tensorstore and other hosts write.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
