"""An fsspec store of the scheme `folder`, whose buckets are folders of the local disk.

`python -m tests.folder_store ARGUMENTS` is the command line of maxpipe with this store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

ROOT, STALL = "FOLDER_STORE", "FOLDER_STORE_STALL"
"""Environment variables: the folder of the buckets, and the part of a path whose writes stall."""
STALLED = "stalled"
"""File in the folder of the buckets that a stalled write creates."""


class FolderStore(LocalFileSystem):
    """`fault` may raise the error of a request. Folders must exist before files are written."""

    protocol = "folder"
    fault: Callable[[str, str], None] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        root, name = os.environ[ROOT], os.fspath(path).removeprefix("folder://")
        return (name if name.startswith("/") else f"{root}/{name}").rstrip("/")

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        FolderStore.fault("info", os.fspath(path))
        return super().info(path, **options)

    def ls(self, path: Any, *arguments: Any, **options: Any) -> Any:
        FolderStore.fault("ls", os.fspath(path))
        return super().ls(path, *arguments, **options)

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        FolderStore.fault(mode, path)
        if mode == "wb" and os.environ.get(STALL, "\0") in path:
            Path(os.environ[ROOT], STALLED).touch()
            time.sleep(1000)
        return super()._open(path, mode, *arguments, **options)


def register() -> None:
    """Register the scheme for this process."""
    fsspec.register_implementation("folder", "tests.folder_store.FolderStore", clobber=True)


if __name__ == "__main__":
    from maxpipe.cli import main
    from tests.folder_store import register as register_store

    register_store()
    sys.exit(main(sys.argv[1:]))
