"""Prompts in, text out: rows side by side, each until it ends.

Text of tokens as they come: whole characters only, and up to the first stop string. No jax.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.errors import ConfigError, DivergenceError
from maxpipe.generate.decoding import DecodeShape, Refill, RefillPrompt, padded_length

_REPLACEMENT_CHARACTER = "\ufffd"
"""What a tokenizer makes of bytes that are no character, or not yet."""
_MAX_PENDING_BYTES = 3
"""Bytes that an incomplete character of UTF-8 has at most."""


class IncrementalDetokenizer:
    """Text of a row of tokens, without characters that later tokens may complete.

    Text is the difference of two decodings, with and without the newest tokens, as in
    text-generation-inference. What both begin with is needed, as some tokenizers drop the space in
    front of a text's first token; it begins where a character does.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._num_decoded = len(self._ids)
        """Number of tokens whose text has been given in full."""
        self._num_emitted = 0
        """Characters that have been given of the tokens behind those."""

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(token)
        text, is_whole = self._pending_text()
        if not is_whole:
            return ""
        certain = text.rstrip(_REPLACEMENT_CHARACTER)
        certain = text[: max(len(certain), len(text) - _MAX_PENDING_BYTES)]
        new = certain[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(certain))
        if text and len(certain) == len(text):
            self._ids, self._num_emitted = self._ids[self._num_decoded :], 0
            self._num_decoded = len(self._ids)
        return new

    def flush(self) -> str:
        """What still waits when no token follows; incomplete characters are U+FFFD."""
        return self._pending_text()[0][self._num_emitted :]

    def _pending_text(self) -> tuple[str, bool]:
        """Text of the tokens that are not known in full, and whether the known text stays.

        Some decoders give up all characters of a row of bytes while its last one is incomplete.
        """
        before = self._tokenizer.decode(self._ids[: self._num_decoded])
        whole = self._tokenizer.decode(self._ids)
        return whole[len(before) :], whole.startswith(before)


class StopStringMatcher:
    """Text up to the first stop string, without what may become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._pending = ""
        self.matched = False
        """Whether a stop string came: the text ends in front of it."""

    def add(self, text: str) -> str:
        """The text that is certain now."""
        self._pending += text
        starts = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if starts:
            self.matched = True
            before, self._pending = self._pending[: min(starts)], ""
            return before
        begun = max((_stop_prefix_length(self._pending, stop) for stop in self._stops), default=0)
        end = len(self._pending) - begun
        certain, self._pending = self._pending[:end], self._pending[end:]
        return certain

    def flush(self) -> str:
        """What waited, when no text follows."""
        waited, self._pending = self._pending, ""
        return waited


def _stop_prefix_length(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop string may begin."""
    most = min(len(stop) - 1, len(text))
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


class CompletionText:
    """The text of one row: `add` for each token, `end` when it is over."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._characters, self._stops = (
            IncrementalDetokenizer(tokenizer, prompt),
            StopStringMatcher(stops),
        )
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stops.matched

    def add(self, token: int) -> str:
        """The text that is certain by this token."""
        return self._append(self._stops.add(self._characters.add(token)))

    def end(self) -> str:
        """What waited for tokens that do not come."""
        if self.stopped:
            return ""
        last = self._stops.add(self._characters.flush())
        return self._append(last if self.stopped else last + self._stops.flush())

    def _append(self, text: str) -> str:
        self._parts.append(text)
        return text


FinishReason = Literal["end", "stop", "length", "room", "interrupted"]
"""Why a row is over: the end token, a stop string, `--max-tokens`, the tokens that the model was
trained to see, Ctrl-C."""


class Prompt(NamedTuple):
    """A text to go on with."""

    number: int
    """Among all prompts, from 0."""
    text: str
    ids: list[int]
    """With the begin token."""


@dataclass(frozen=True)
class GenerationLimits:
    """How far rows go."""

    max_tokens: int
    max_length: int
    """Tokens of a row, its prompt included."""
    stops: tuple[str, ...] = ()
    batch_size: int = 16
    longest_prompt: int = 0
    """Tokens of the longest prompt there may be: other prompts take the same compiled program."""
    stop_ids: frozenset[int] = frozenset()
    """Control tokens that stop a text as `stops` do."""


@dataclass
class Completion:
    """What a prompt became. Tokens have the end token; the text has no stop string."""

    prompt: Prompt
    streamed_text: CompletionText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """In nats, of each token."""
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """What is certain so far."""
        return self.streamed_text.text


class DecodeEngineProtocol(Protocol):
    """What extends rows: `Decoding`, or with stages `StagedDecoding`."""

    @property
    def batch_multiple(self) -> int:
        """What the number of rows is a multiple of."""
        ...

    @property
    def supports_refill(self) -> bool:
        """Whether rows that are over can be replaced."""
        ...

    def run(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Tokens and log-probabilities `[B]` that follow, one of each row at a time."""
        ...


def parse_stops(
    texts: Sequence[str], tokenizer: Tokenizer, where: str
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop strings, and ids of those that are control tokens.

    Raises:
        ConfigError: one has a control token among other text, which no text has.
    """
    ids, special = set(), tokenizer.special_tokens
    for text in texts:
        if text in special:
            ids.add(special[text])
        elif inside := next((name for name in special if name and name in text), None):
            raise ConfigError.one(
                where,
                repr(text),
                f"never matches: {inside} is a control token, and text has none.",
                f"Give {where.rpartition(' ')[2]} {inside!r} alone.",
            )
    return tuple(text for text in texts if text not in special), frozenset(ids)


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, room: int, first: int = 0
) -> list[Prompt]:
    """The prompts' tokens, with those of the tokenizer's framing around them.

    Raises:
        ConfigError: a prompt leaves no room for a token, or is not text.
    """
    found = []
    for number, text in enumerate(texts, first):
        _check_text(number, text)
        found.append(_check_length(Prompt(number, text, tokenizer.encode_prompt(text)), room))
    return found


def _check_text(number: int, text: str) -> None:
    """Raises ConfigError for half of a surrogate pair, of which each tokenizer says another thing.

    Bytes of the command line that are not UTF-8 are such, and escapes in JSON may be.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError.one(
            f"prompt {number + 1}",
            ascii(text[:40]),
            "must be UTF-8.",
            "Convert it, with `iconv -t UTF-8` perhaps.",
        ) from error


def encode_chats(
    conversations: Sequence[ChatInput],
    tokenizer: Tokenizer,
    room: int,
    first: int = 0,
    where: str = "command line: --chat",
    chat: ChatTemplate | None = None,
) -> list[Prompt]:
    """The conversations as a template, by default that of the model's folder, writes them, and
    their tokens.

    The text of such a prompt is that of the last message. `where` names what asks for a template.

    Raises:
        ConfigError: there is no template, or it refuses the messages; as `encoded` does.
    """
    if (chat := chat or tokenizer.chat) is None:
        raise ConfigError.one(
            where,
            None,
            "needs the chat template of a model's folder, and the tokenizer has none.",
            f"Leave {where.rpartition(' ')[2]} out, or name the folder: tokenizer.kind=auto "
            "tokenizer.path=FOLDER.",
        )
    for number, conversation in enumerate(conversations, first):
        for each in conversation.messages:
            _check_text(number, str(each.get("content", "")))
    found = []
    for number, text in enumerate(chat.render(conversations), first):
        said = str(conversations[number - first].messages[-1].get("content", ""))
        ids = tokenizer.encode_chat(text).tolist()
        if not ids:
            raise ConfigError.one(
                chat.path,
                None,
                f"must make a text of messages, and makes none of prompt {number + 1}.",
                f"Correct the template, or leave {where.rpartition(' ')[2]} out.",
            )
        found.append(_check_length(Prompt(number, said, ids), room))
    return found


def _check_length(prompt: Prompt, room: int) -> Prompt:
    text, size = prompt.text, len(prompt.ids)
    if size >= room:
        raise ConfigError.one(
            f"prompt {prompt.number + 1}",
            repr(text[:40]) + ("..." if len(text) > 40 else ""),
            f"has {size} tokens, control tokens included, and must leave room for one more: "
            f"the model was trained on {room} (train.sequence_length).",
            f"Shorten it, or set train.sequence_length={2 * size} to go beyond that.",
        )
    return prompt


def complete(
    decoding: DecodeEngineProtocol,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    limits: GenerationLimits,
    *,
    write: Callable[[Completion], object],
    stream: Callable[[str], object] = lambda text: None,
    stops: Callable[[], bool] = lambda: False,
) -> None:
    """Completes the prompts, as many side by side as a batch has rows.

    Where a row is over the next prompt takes its place, or with stages the next batch begins when
    all are. `write` is called with each completion, in the order of the prompts, as soon as it and
    those before it are over; `stream` with new text of any row. At an interrupt, or when `stops`
    says so, rows under way are written as they are.

    Raises:
        NumbersError: the model gives numbers that are not finite.
        KeyboardInterrupt: after the rows under way were written.
    """
    size = batch_shape(prompts, limits, decoding.batch_multiple)
    every = [
        Completion(each, CompletionText(tokenizer, each.ids, limits.stops)) for each in prompts
    ]
    waiting, unwritten = deque(every), deque(every)
    try:
        while waiting:
            rows = _steps(decoding, params, tokenizer, waiting, limits, size, stream)
            with contextlib.closing(rows):
                for _ in rows:
                    while unwritten and unwritten[0].finish_reason is not None:
                        write(unwritten.popleft())
                    if stops():
                        raise KeyboardInterrupt
    except KeyboardInterrupt:
        while len(unwritten) > len(waiting):
            if (done := unwritten.popleft()).finish_reason is None:
                _finish(done, "interrupted", stream)
            write(done)
        raise


def batch_shape(prompts: Sequence[Prompt], limits: GenerationLimits, shards: int) -> DecodeShape:
    """The size of all batches."""
    rows = min(limits.batch_size, len(prompts))
    longest = max(limits.longest_prompt, *(len(prompt.ids) for prompt in prompts))
    more = min(limits.max_tokens, limits.max_length)
    return DecodeShape(math.ceil(rows / shards) * shards, padded_length(longest), more)


def _steps(
    decoding: DecodeEngineProtocol,
    params: Any,
    tokenizer: Tokenizer,
    waiting: deque[Completion],
    limits: GenerationLimits,
    size: DecodeShape,
    stream: Callable[[str], object],
) -> Generator[None]:
    """Extends the rows of a batch by a token at a time, until all are over.

    Rows are taken from those that wait.
    """
    batch = [waiting.popleft() for _ in range(min(size.batch_size, len(waiting)))]
    new: list[RefillPrompt] = []

    def refill() -> list[RefillPrompt]:
        given = new.copy()
        new.clear()
        return given

    given = (params, [each.prompt.ids for each in batch], [each.prompt.number for each in batch])
    more = refill if decoding.supports_refill and waiting else None
    with contextlib.closing(decoding.run(*given, size, more)) as drawn:
        for tokens, logprobs in drawn:
            for row, each in enumerate(batch):
                if each.finish_reason is not None:
                    continue
                _append_token(each, int(tokens[row]), float(logprobs[row]), tokenizer, stream)
                if (why := _finish_reason(each, tokenizer, limits)) is None:
                    continue
                _finish(each, why, stream)
                if more is not None and waiting:
                    batch[row] = waiting.popleft()
                    new.append(RefillPrompt(row, batch[row].prompt.ids, batch[row].prompt.number))
            yield
            if all(each.finish_reason is not None for each in batch):
                return


def _append_token(
    row: Completion,
    token: int,
    logprob: float,
    tokenizer: Tokenizer,
    stream: Callable[[str], object],
) -> None:
    if not math.isfinite(logprob):
        raise DivergenceError(
            f"prompt {row.prompt.number + 1}: token {len(row.tokens) + 1} has the "
            f"log-probability {logprob}\n"
            "  the model's parameters give numbers that are not finite.\n"
            "  Take an earlier step, or set model.compute_dtype=float32."
        )
    row.tokens.append(token)
    row.logprobs.append(logprob)
    if token not in tokenizer.end_ids:  # which need not be a control token
        stream(row.streamed_text.add(token))


def _finish_reason(
    row: Completion, tokenizer: Tokenizer, limits: GenerationLimits
) -> FinishReason | None:
    if row.tokens[-1] in tokenizer.end_ids:
        return "end"
    if row.streamed_text.stopped or row.tokens[-1] in limits.stop_ids:
        return "stop"
    if len(row.tokens) >= limits.max_tokens:
        return "length"
    if len(row.prompt.ids) + len(row.tokens) >= limits.max_length:
        return "room"
    return None


def _finish(row: Completion, why: FinishReason, stream: Callable[[str], object]) -> None:
    stream(row.streamed_text.end())
    row.finish_reason = "stop" if row.streamed_text.stopped else why
