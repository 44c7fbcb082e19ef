"""What is made of files once and read many times, each under the digest of its file."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable

from maxpipe.data.formats.files import File
from maxpipe.data.formats.locks import locked
from maxpipe.data.formats.source import Moved

_LOG = logging.getLogger(__name__)

Make = Callable[[str, Moved], None]
"""Fills a folder, and calls what it is given for each part of that."""


class Cache:
    """Folders made once, by one process of several that ask.

    They stay in `folder` if `keep` says so; without it what is there is used, and what is not is
    made in a folder that ends with the process.
    """

    def __init__(self, folder: str | None, *, keep: bool):
        self._folder = None if folder is None else os.path.expanduser(folder)
        self._keep = keep
        self._own: str | None = None

    @property
    def place(self) -> str:
        """Where folders are made."""
        if self._own is not None or self._folder is None or not self._keep:
            return self._own or tempfile.gettempdir()
        return self._folder

    def made(self, name: str, file: File, make: Make, moved: Moved | None = None) -> str:
        """The folder with this name, which `make` fills from a file if it is not there yet.

        `name` has to tell contents apart.

        Raises:
            OSError: neither folder can be written.
        """
        for root in (self._folder, self._own):
            if root is not None and os.path.isdir(found := os.path.join(root, name)):
                return found
        if self._folder is not None and self._keep:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self._folder)
            if os.access(self._folder, os.W_OK | os.X_OK):
                return _made(self._folder, name, file, make, moved)
            _LOG.warning("%s cannot be written: the next start reads all files", self._folder)
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="maxpipe-")
            weakref.finalize(self, shutil.rmtree, self._own, True)
        return _made(self._own, name, file, make, moved)


def _made(root: str, name: str, file: File, make: Make, moved: Moved | None) -> str:
    final = os.path.join(root, name)
    with locked(f"{final}.lock", f"reading {file.path}", moved) as moved:
        if os.path.isdir(final):
            return final
        for left in glob.glob(f"{glob.escape(final)}.partial-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial = tempfile.mkdtemp(prefix=f"{name}.partial-", dir=root)
        try:
            make(partial, moved)
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final
