"""Failures of saving: which may pass, and the error for one that does not."""

from __future__ import annotations

import contextlib
import errno

import jax
from etils import epath

from maxpipe.checkpoint.folder import Folder
from maxpipe.checkpoint.storage import exists, first_line, in_bucket, remedy
from maxpipe.errors import StorageError, causes

# Failures that a retry would meet again. Orbax passes on a system call's message, not its number.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_LASTING |= {errno.ENOTDIR, errno.EISDIR}
_LASTING_WORDS = ("No space left", "quota", "File too large", "Read-only", "ermission denied")
_LASTING_WORDS += ("Forbidden", "PERMISSION_DENIED")  # of a bucket
# Errors of orbax and tensorstore for a folder or file with unexpected content, which a flipped bit
# in their own metadata turns into values of any type. A save runs no code of the user.
_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_FAULTS += (ArithmeticError, EOFError, RuntimeError, StorageError)  # RuntimeError: RecursionError


def unusable(folder: Folder, error: BaseException, what: epath.Path | None = None) -> StorageError:
    """The error that ends the run: `what`, by default the folder, cannot be written."""
    newest: list[int] = []
    with contextlib.suppress(OSError, StorageError):
        if what is not None and not in_bucket(folder.path) and not exists(folder.path):
            return StorageError(
                f"{folder.path}: was moved or deleted while the run was using it\n"
                f"  {what.name} was not saved, and the checkpoints before it are not there.\n"
                "  Put the folder back, then start the same command again."
            )
        newest = folder.steps()[-1:]
    resumes = f"from step {newest[0]}" if newest else "from its newest complete checkpoint"
    return StorageError(
        f"{what or folder.path}: cannot be written\n"
        f"  {first_line(error)}.\n"
        f"  {remedy(folder.path, folder.key)} Started again, the run resumes {resumes}."
    )


def is_fault(error: BaseException) -> bool:
    """Whether the storage may be the cause.

    An error of jax itself is not: a lost process fails the saves of the others.
    """
    by_jax = any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes(error))
    return isinstance(error, _FAULTS) and not by_jax


def lasts(error: BaseException) -> bool:
    """Whether another attempt would fail, too."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _LASTING)
        or any(word in str(cause) for word in _LASTING_WORDS)
        for cause in causes(error)
    )
