"""Limit on the processor time that a `tokenizer.json` takes for a text.

A pattern such as `(a|aa)+$` takes a time that is exponential in the length of a run, and the limit
of the regex engine bounds one match, not a text. Such work cannot be interrupted inside the
library. It is done in a thread, which is given up with an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from maxpipe.data.tokenizers.byte_bpe import PUBLISHED
from maxpipe.data.tokenizers.tiktoken_presets import QWEN3_5

T = TypeVar("T")
R = TypeVar("R")

SECONDS = 10.0
"""Processor time for any text, to which more is added with its length."""
CHARACTERS_PER_SECOND = 100_000
"""A tenth of the speed of the slowest published tokenizers."""
_ALONE_SECONDS = 2.0
"""The same for a text that is encoded again to find which of several is at fault."""
_LONGEST_WORD = 200
"""Characters; WordPiece takes a time that grows with the square of a word's length or faster."""
_SLICE_SECONDS = 0.05
_LINEAR = frozenset({*PUBLISHED, QWEN3_5})
"""Patterns that take a time that is linear in the length of a text."""


class SlowCall(Exception):
    """A call that took more than its limit of processor time."""

    def __init__(self, seconds: float):
        super().__init__(f"it takes more than {seconds:.3g} s of processor time")


class UnfitText(Exception):
    """A text that the library fails with or is too slow for; the cause is its error."""

    def __init__(self, number: int, text: str):
        super().__init__(text[:40])
        self.number, self.text = number, text


def needs_limit(*parts: Any) -> bool:
    """Return whether these parts of a definition may take long for a short text."""
    return any(map(_is_slow, parts))


def _is_slow(part: Any) -> bool:
    if isinstance(part, Mapping):
        pattern = part.get("Regex")
        if isinstance(pattern, str) and pattern not in _LINEAR:
            return True
        longest = part.get("max_input_chars_per_word", 0)
        if not isinstance(longest, int) or longest > _LONGEST_WORD:
            return True
        # The vocabulary is large and holds no steps.
        return any(_is_slow(each) for name, each in part.items() if name not in _LISTS)
    return isinstance(part, list) and any(map(_is_slow, part))


_LISTS = frozenset({"vocab", "merges"})


def within(call: Callable[[], T], seconds: float | None = None) -> T:
    """Return what `call` returns, unless it takes more than `seconds` of processor time.

    A call that takes longer is not ended; its thread ends with the process. `call` has to release
    Python's lock.

    Raises:
        SlowCall: it takes longer.
    """
    seconds = SECONDS if seconds is None else seconds
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # a panic in Rust code is not an `Exception`
            errors.append(error)
        done.set()

    threading.Thread(target=work, daemon=True, name="tokenizer").start()
    # The lesser of both: a suspended process uses no processor time, and other threads use more
    # than passes on the clock.
    used, clock, processor = 0.0, time.monotonic(), time.process_time()
    while not done.wait(_SLICE_SECONDS):
        now, spent = time.monotonic(), time.process_time()
        used += min(now - clock, spent - processor)
        clock, processor = now, spent
        if used > seconds:
            raise SlowCall(seconds)
    if errors:
        raise errors[0]
    return results[0]


def each_within(call: Callable[[Sequence[str]], Sequence[R]], texts: Sequence[str]) -> Sequence[R]:
    """Return what `call` returns for these texts; an error names the text that is at fault.

    Raises:
        UnfitText: the library fails with a text, or takes more than the limit of time.
    """
    try:
        return within(lambda: call(texts), _limit(SECONDS, texts))
    except BaseException as error:
        if not is_of_library(error):
            raise
        number, found = _at_fault(call, texts) if len(texts) > 1 else (0, None)
        raise UnfitText(number, texts[number]) from (found or error)


def is_of_library(error: BaseException) -> bool:
    """Return whether a library raised the error, and not a signal."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _at_fault(
    call: Callable[[Sequence[str]], Sequence[R]], texts: Sequence[str]
) -> tuple[int, BaseException | None]:
    """The first text that fails alone, with its error; else the one that took longest."""
    # Read at each call: the threads of `tokenizers` may all be at work on the texts given up.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    slowest, longest, begin = 0, 0.0, time.monotonic()
    for number, text in enumerate(texts):
        start = time.monotonic()
        try:
            within(lambda text=text: call([text]), _limit(_ALONE_SECONDS, [text]))
        except BaseException as error:
            if not is_of_library(error):
                raise
            return number, error
        if time.monotonic() - start > longest:
            slowest, longest = number, time.monotonic() - start
        if time.monotonic() - begin > SECONDS:
            break
    return slowest, None


def _limit(seconds: float, texts: Sequence[str]) -> float:
    return seconds + sum(map(len, texts)) / CHARACTERS_PER_SECOND
