"""Damage told apart from failures of storage: content that was read and is wrong, or no content.

Storage that does not answer loses nothing. Only content that was read and differs from what was
saved makes a checkpoint damaged; any other failure is retried, and then ends the run.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from copy import copy
from typing import TypeVar

from maxpipe.errors import MaxpipeError, causes
from maxpipe.io.files import Unfit

T = TypeVar("T")

ATTEMPTS, PAUSE_SECONDS = 3, 1.0
"""Attempts before storage counts as failing, and the seconds in between."""

# Not a regular file.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_CONTENT = (ValueError, LookupError, TypeError, AttributeError, EOFError, NotImplementedError)
_CONTENT += (RecursionError,)  # of orbax, whose parser follows whatever nests
# tensorstore raises ValueError for all that goes wrong, and tells what in words.
_SYSTEM_CALL = re.compile(r"os_error_code='([0-9]+)'")
_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|DEADLINE_EXCEEDED|"
    r"ABORTED|CANCELLED):"
)


class Damaged(Exception):
    """The content on disk is not what was saved; the text is file or array, and reason."""


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading says that the content is wrong, or gone."""
    if outage(error) is not None or isinstance(error, MaxpipeError):
        return False
    return isinstance(error, (*_CONTENT, OSError))


def outage(error: BaseException) -> OSError | None:
    """The failure of the storage that an error of reading stands for, a new one that may be raised
    from it; None of any other.
    """
    for cause in causes(error):
        if isinstance(cause, OSError):
            return None if isinstance(cause, Unfit) or cause.errno in _DAMAGE else copy(cause)
        words = str(cause)
        if found := _SYSTEM_CALL.search(words):
            number = int(found[1])
            return None if number in _DAMAGE else OSError(number, words.splitlines()[0])
        if _OUTAGE.search(words):
            return OSError(words.splitlines()[0])
    return None


def retried(call: Callable[[], T]) -> T:
    """The result of the call, which is retried a few times while the storage fails.

    Raises:
        OSError: the storage still fails.
        Exception: any other exception of the call, at once.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if outage(error) is None:
                raise
        time.sleep(PAUSE_SECONDS)
    return call()
