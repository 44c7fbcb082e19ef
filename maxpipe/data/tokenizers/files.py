"""Tokenizer files: detection of file formats, size limits and time limits.

The time limit applies when a `tokenizer.json` encodes or decodes text. A pattern such as `(a|aa)+$`
can require exponential time, and the limit of the regex engine applies only to a single match. The
library cannot be interrupted, so it runs in a separate thread. If the limit is exceeded, the thread
is abandoned and an error is raised.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from maxpipe.config.config_files import is_hub_id
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizers.byte_bpe import PUBLISHED, QWEN3_5
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io import files
from maxpipe.io.formatting import pluralize

T = TypeVar("T")
R = TypeVar("R")

SECONDS = 10.0
"""CPU time limit in seconds for short inputs. Longer inputs have a higher limit."""
CHARACTERS_PER_SECOND = 100_000
"""Speed assumed for the time limit: a tenth of the speed of the slowest published tokenizer."""
_SINGLE_TEXT_SECONDS = 2.0
"""CPU time limit in seconds per string, when strings are encoded one by one to find the failing
one.
"""
_LONGEST_WORD = 200
"""Maximum word length for which WordPiece is fast: its run time is quadratic in this length."""
_SLICE_SECONDS = 0.05
_LINEAR = frozenset({*PUBLISHED, QWEN3_5})
"""Patterns whose matching time is linear in the length of the text."""


class SlowCall(Exception):
    """Raised if a call exceeds its CPU time limit."""

    def __init__(self, seconds: float):
        super().__init__(f"encoding exceeds the limit of {seconds:.3g} s of CPU time")


class FailedText(Exception):
    """Input on which the tokenizer fails or exceeds the time limit. `__cause__` is the original
    error.
    """

    def __init__(self, number: int, text: str):
        super().__init__(text[:40])
        self.number, self.text = number, text


def needs_limit(*parts: Any) -> bool:
    """Return whether these tokenizer components can be slow even on short input."""
    return any(map(_is_slow, parts))


def _is_slow(part: Any) -> bool:
    if isinstance(part, Mapping):
        pattern = part.get("Regex")
        if isinstance(pattern, str) and pattern not in _LINEAR:
            return True
        longest = part.get("max_input_chars_per_word", 0)
        if not isinstance(longest, int) or longest > _LONGEST_WORD:
            return True
        # The vocabulary and the merges are large and contain no patterns.
        return any(_is_slow(item) for name, item in part.items() if name not in _LISTS)
    return isinstance(part, list) and any(map(_is_slow, part))


_LISTS = frozenset({"vocab", "merges"})


def run_with_time_limit(call: Callable[[], T], seconds: float | None = None) -> T:
    """Return the result of `call`, or raise an error if it uses more than `seconds` of CPU time.

    A call that exceeds the limit continues to run in its thread until the process ends. `call` must
    release the GIL.

    Raises:
        SlowCall: the call exceeds the limit.
    """
    seconds = SECONDS if seconds is None else seconds
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # a panic in Rust code raises a BaseException
            errors.append(error)
        done.set()

    threading.Thread(target=work, daemon=True, name="tokenizer").start()
    # Each interval counts as the smaller of its CPU time and wall time. A suspended process uses no
    # CPU time, and a process with several busy threads uses more CPU time than wall time.
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


def run_texts_with_time_limit(
    call: Callable[[Sequence[str]], Sequence[R]], texts: Sequence[str]
) -> Sequence[R]:
    """Return the result of `call`, or raise FailedText for the string that failed."""
    try:
        return run_with_time_limit(lambda: call(texts), _limit(SECONDS, texts))
    except BaseException as error:
        if not is_library_error(error):
            raise
        number, cause = _find_failing_text(call, texts) if len(texts) > 1 else (0, None)
        raise FailedText(number, texts[number]) from (cause or error)


def is_library_error(error: BaseException) -> bool:
    """Return whether the error was raised by a library, not by a signal handler."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _find_failing_text(
    call: Callable[[Sequence[str]], Sequence[R]], texts: Sequence[str]
) -> tuple[int, BaseException | None]:
    """Return the index of the first string that fails when encoded alone, and the error; if no
    string fails, return the index of the slowest string and None.
    """
    # The library reads this variable at each call, and then encodes without its thread pool, whose
    # threads may all be busy with abandoned calls.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    slowest, longest, begin = 0, 0.0, time.monotonic()
    for number, text in enumerate(texts):
        start = time.monotonic()
        try:
            run_with_time_limit(
                lambda text=text: call([text]), _limit(_SINGLE_TEXT_SECONDS, [text])
            )
        except BaseException as error:
            if not is_library_error(error):
                raise
            return number, error
        if time.monotonic() - start > longest:
            slowest, longest = number, time.monotonic() - start
        if time.monotonic() - begin > SECONDS:
            break
    return slowest, None


def _limit(seconds: float, texts: Sequence[str]) -> float:
    return seconds + sum(map(len, texts)) / CHARACTERS_PER_SECOND


TokenizerKind = Literal["huggingface", "sentencepiece", "tiktoken"]

PATH = "tokenizer.path"
MAX_IDS = 1 << 26
"""Exclusive upper limit of token ids, which bounds the size of arrays with one entry per id."""

_OR_BYTES = "Set tokenizer.path to the file, or both tokenizer.kind=bytes and tokenizer.path=''."
_MAX_BYTES = 1 << 28  # eight times the size of the largest published tokenizer file
_HEAD_BYTES = 1 << 12
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")
_JSON = "tokenizer.json"
_NAMES = {
    "huggingface": "a tokenizer.json file",
    "sentencepiece": "a SentencePiece .model file",
    "tiktoken": "a tiktoken rank file",
}
_ACTIONS = {
    "huggingface": "Set tokenizer.path to the tokenizer.json that `save_pretrained` "
    "writes, or to its folder.",
    "sentencepiece": "Set tokenizer.path to the model's tokenizer.model, or download it again.",
    "tiktoken": "Set tokenizer.path to a file with lines `BASE64 RANK`, or download it again.",
}
USABLE_RULE = "must be a tokenizer that can process any text"
_UNFIT = (
    "Use the tokenizer published with the model, fix the regex in its Split or "
    "Replace step, or remove the offending text."
)
_SHOWN = 40
"""Maximum length in characters of a text excerpt in a message."""


def locate(config: TokenizerConfig) -> tuple[TokenizerKind, str]:
    """Return the kind and the path of the tokenizer file at `tokenizer.path`, which may be a file
    or a folder.

    Raises:
        ConfigError: the file does not exist, the folder has several tokenizer files, or
            `tokenizer.kind=auto` cannot infer the kind.
    """
    path = os.path.expanduser(config.path)
    if os.path.isdir(path):
        return _in_folder(path, config.kind)
    if config.kind != "bytes" and config.kind != "auto":
        return config.kind, config.path
    inferred = _kind_of(path)
    if inferred is None:
        rule = f"must be {', '.join(_NAMES.values())}, or a folder with one of these."
        action = "Choose another file, or set tokenizer.kind."
        raise ConfigError.one(Code.TOK_FILE, PATH, config.path, rule, action)
    return inferred, config.path


def _in_folder(folder: str, wanted: str) -> tuple[TokenizerKind, str]:
    """Return the kind and the path of a folder's tokenizer file. `tokenizer.json` takes precedence
    over the file from which it was converted.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable_error(folder, error) from error
    candidates = [_JSON] if _JSON in names else []
    if wanted in ("sentencepiece", "tiktoken") or not candidates:
        candidates += [name for name in names if name.endswith((".model", ".tiktoken"))]
    tokenizers: list[tuple[TokenizerKind, str]] = [
        (kind, path)
        for path in (os.path.join(folder, name) for name in candidates)
        if (kind := _kind_of(path)) is not None and wanted in (kind, "auto")
    ]
    if len(tokenizers) == 1:
        return tokenizers[0]
    what = " or ".join(_NAMES.values()) if wanted == "auto" else _NAMES[wanted]
    if tokenizers:
        several = ", ".join(os.path.basename(path) for _, path in tokenizers)
        action = f"Set tokenizer.path={tokenizers[0][1]}, or to another of these files."
        raise ConfigError.one(
            Code.TOK_FILE,
            PATH,
            folder,
            f"must contain only one tokenizer: found {several}.",
            action,
        )
    rule = f"must be {what}, or a folder that contains one: this folder does not."
    raise ConfigError.one(Code.TOK_FILE, PATH, folder, rule, _OR_BYTES)


def _kind_of(path: str) -> TokenizerKind | None:
    """Infer the kind from the first bytes; names such as `tokenizer.model` are ambiguous."""
    try:
        with open(files.open_regular(path), "rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise _unreadable_error(path, error) from error
    if head.lstrip()[:1] == b"{":
        return "huggingface"
    if _RANK_LINE.match(head):
        return "tiktoken"
    # The first field of the protobuf message contains the pieces.
    return "sentencepiece" if head[:1] == b"\n" else None


def read(path: str, kind: TokenizerKind, most: int | None = None) -> bytes:
    """Return the content of a tokenizer file; raise ConfigError if it is too large."""
    try:
        return files.read(path, _MAX_BYTES if most is None else most)
    except OSError as error:
        raise _unreadable_error(path, error, _NAMES[kind]) from error


def _unreadable_error(path: str, error: OSError, what: str = "a tokenizer file") -> ConfigError:
    action = _OR_BYTES
    if is_hub_id(path):
        action = f"Download the files first: run `maxpipe fetch hf:{path} --include 'tokenizer*' "
        action += f"--out tokenizer`, and set {PATH}=tokenizer."
    return ConfigError.one(
        Code.TOK_FILE, PATH, path or '""', f"must be {what}: {error.strerror}.", action
    )


def missing_package_error(kind: TokenizerKind, error: ImportError) -> ConfigError:
    """Return the error for a missing tokenizer package."""
    package = "tokenizers" if kind == "huggingface" else kind
    rule = f"requires the package {package}: {error}."
    return ConfigError.one(
        Code.ENV_PACKAGE, "tokenizer.kind", kind, rule, "Run: pip install 'maxpipe[tokenizers]'"
    )


class TextError(ConfigError):
    """Input on which a tokenizer fails or exceeds the time limit."""

    def __init__(self, path: str, error: FailedText, place: str = ""):
        self.path, self.error = path, error
        start = repr(error.text[:_SHOWN]) + ("..." if len(error.text) > _SHOWN else "")
        what = f"{pluralize(len(error.text), 'character')} starting with {start}"
        cause = _first_line(error.__cause__ or error)
        rule = f"{USABLE_RULE}: {cause}, for {place + ', ' if place else ''}{what}."
        super().__init__([Problem(Code.TOK_FILE, PATH, path, rule, _UNFIT)])


@contextlib.contextmanager
def wrap_text_errors(where: Callable[[int], str]) -> Iterator[None]:
    """Add the location of the failing string to errors. `where` maps the index of a string to its
    location.
    """
    try:
        yield
    except TextError as error:
        raise TextError(error.path, error.error, where(error.error.number)) from error


@contextlib.contextmanager
def wrap_library_errors(path: str, kind: TokenizerKind, rule: str = "") -> Iterator[None]:
    """Convert any error raised by the library to a ConfigError about the tokenizer file.

    Panics in Rust code are also converted; they raise a BaseException that is not an `Exception`.
    """
    try:
        yield
    except ConfigError:
        raise
    except FailedText as error:
        raise TextError(path, error) from error
    except BaseException as error:
        if not is_library_error(error):
            raise
        rule = rule or f"must be {_NAMES[kind]}"
        text = f"{rule}: {_first_line(error)}."
        raise ConfigError.one(Code.TOK_FILE, PATH, path, text, _ACTIONS[kind]) from error


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0].rstrip(".")
    return line[:200] or type(error).__name__
