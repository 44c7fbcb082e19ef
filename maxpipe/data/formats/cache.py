"""What is made of files once and read many times, each under the digest of its file."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
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
            if root is not None and _is_readable(found := os.path.join(root, name)):
                return found
        if self._folder is not None and self._keep:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self._folder)
            if unusable := _why_unusable(self._folder, name):
                _LOG.warning("%s: the next start reads all files", unusable)
            else:
                return _made(self._folder, name, file, make, moved)
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="maxpipe-")
            weakref.finalize(self, shutil.rmtree, self._own, True)
        return _made(self._own, name, file, make, moved)


def _is_readable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)


def _why_unusable(root: str, name: str) -> str:
    """Return the reason why `name` cannot be made in `root`, or an empty string."""
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} cannot be written"
    final = os.path.join(root, name)
    return f"{final} cannot be read" if os.path.lexists(final) else ""


def _made(root: str, name: str, file: File, make: Make, moved: Moved | None) -> str:
    final = os.path.join(root, name)
    with contextlib.ExitStack() as stack:
        try:
            task = f"reading {file.path}"
            moved = stack.enter_context(locked(f"{final}.lock", task, moved))
        except OSError as error:  # a file system without locks: each process makes it for itself
            _LOG.info("%s cannot be locked (%s)", final, error)
        else:
            if os.path.isdir(final):
                return final
            for left in glob.glob(f"{glob.escape(final)}.partial-*"):  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
        partial = f"{final}.partial-{secrets.token_hex(8)}"
        os.mkdir(partial)  # mkdtemp would make a folder that other users of `root` cannot read
        try:
            make(partial, moved or (lambda: None))
            _appear(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


def _appear(partial: str, final: str) -> None:
    try:
        os.rename(partial, final)
    except OSError:
        if not os.path.isdir(final):
            raise
        shutil.rmtree(partial, ignore_errors=True)  # made by another process without a lock
