"""Complete prompts in batches, generating each sequence until it ends.

Completions are detokenized incrementally, up to the first stop string. jax is not imported.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxpipe.data.formats.record_text import BadRecord
from maxpipe.data.images import decode_images, expand_image_tokens, image_tokens_left
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.errors import Code, ConfigError, DivergenceError
from maxpipe.generation.decoding import (
    DecodeShape,
    PromptImages,
    Refill,
    RefillPrompt,
    padded_length,
)

_REPLACEMENT_CHARACTER = "\ufffd"
"""Character that a tokenizer returns for invalid or incomplete UTF-8."""
_MAX_PENDING_BYTES = 3
"""Maximum number of bytes of an incomplete UTF-8 character."""


class IncrementalDetokenizer:
    """Incremental decoder of a token sequence, which holds back incomplete characters.

    New text is the difference between two decoded strings, with and without the newest tokens, as
    in text-generation-inference. Both strings start at the same character boundary, because some
    tokenizers drop a leading space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._num_decoded = len(self._ids)
        """Number of tokens whose text has been returned completely."""
        self._num_emitted = 0
        """Number of characters that have been returned for the tokens after the first
        `_num_decoded`."""

    def add(self, token: int) -> str:
        """Append a token and return the newly completed text."""
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
        """Return the text still held back, with U+FFFD in place of incomplete characters."""
        return self._pending_text()[0][self._num_emitted :]

    def _pending_text(self) -> tuple[str, bool]:
        """Return the text of the pending tokens, and whether the text before these tokens is
        unchanged.

        The preceding text can change: some decoders replace all characters of a byte sequence while
        its last character is incomplete.
        """
        before = self._tokenizer.decode(self._ids[: self._num_decoded])
        whole = self._tokenizer.decode(self._ids)
        return whole[len(before) :], whole.startswith(before)


class StopStringMatcher:
    """Filter that returns text up to the first stop string, and holds back text that may be the
    beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._pending = ""
        self.matched = False
        """Whether a stop string was found. The text from `add` ends before the stop string."""

    def add(self, text: str) -> str:
        """Append text, and return all pending text that cannot belong to a stop string."""
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
        """Return the text held back as a possible stop string; called after the last token."""
        text, self._pending = self._pending, ""
        return text


def _stop_prefix_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    most = min(len(stop) - 1, len(text))
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


class CompletionText:
    """Text of one completion. Call `add` for each token, and `end` after the last token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._characters, self._stops = (
            IncrementalDetokenizer(tokenizer, prompt),
            StopStringMatcher(stops),
        )
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text generated so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found."""
        return self._stops.matched

    def add(self, token: int) -> str:
        """Append a token and return the text that it completes."""
        return self._append(self._stops.add(self._characters.add(token)))

    def end(self) -> str:
        """Return the text that is still held back after the last token."""
        if self.stopped:
            return ""
        last = self._stops.add(self._characters.flush())
        return self._append(last if self.stopped else last + self._stops.flush())

    def _append(self, text: str) -> str:
        self._parts.append(text)
        return text


FinishReason = Literal["end", "stop", "length", "room", "interrupted"]
"""Reason a completion ended: an end token, a stop string, `--max-tokens`, the model's sequence
length, or an interrupt."""


class Prompt(NamedTuple):
    """A prompt to complete."""

    number: int
    """Zero-based index of this prompt among all prompts."""
    text: str
    ids: list[int]
    """Token ids, including BOS."""
    images: PromptImages | None = None


@dataclass(frozen=True)
class GenerationLimits:
    """Length limits and stop conditions of generation."""

    max_tokens: int
    max_length: int
    """Maximum number of tokens in a sequence, including the prompt."""
    stops: tuple[str, ...] = ()
    batch_size: int = 16
    longest_prompt: int = 0
    """Length in tokens of the longest expected prompt. If set, one program is compiled for all
    prompts."""
    stop_ids: frozenset[int] = frozenset()
    """Ids of control tokens that end a completion, in addition to the stop strings."""


@dataclass
class Completion:
    """A completion. `tokens` includes the end token, and `text` excludes the stop string."""

    prompt: Prompt
    streamed_text: CompletionText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, in nats."""
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """Return the text generated so far."""
        return self.streamed_text.text


class DecodeEngineProtocol(Protocol):
    """Interface of the decode engines, `DecodeEngine` and `PipelineDecodeEngine`."""

    @property
    def batch_multiple(self) -> int:
        """Return the number by which the batch size must be divisible."""
        ...

    @property
    def supports_refill(self) -> bool:
        """Return whether new prompts can replace finished sequences."""
        ...

    @property
    def supports_images(self) -> bool:
        """Return whether prompts can have images."""
        ...

    def run(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
        images: Sequence[PromptImages | None] = (),
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Yield, in each step, the next tokens of all sequences and their log-probabilities, both
        `[B]`.
        """
        ...


def parse_stops(
    texts: Sequence[str], tokenizer: Tokenizer, where: str
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Split stop strings into plain strings and control-token ids.

    Raises:
        ConfigError: a stop string is empty, or combines a control token with other text and can
            never match.
    """
    ids, special = set(), tokenizer.special_tokens
    for text in texts:
        if not text:
            rule = "must not be empty: every completion would end before its first token."
            action = f"Remove the empty string from {where.rpartition(' ')[2]}."
            raise ConfigError.one(Code.CLI_VALUE, where, "''", rule, action)
        if text in special:
            ids.add(special[text])
        elif inside := next((name for name in special if name and name in text), None):
            raise ConfigError.one(
                Code.CLI_VALUE,
                where,
                repr(text),
                f"must not contain the control token {inside} next to other text, because "
                "generated text never contains control tokens.",
                f"Set {where.rpartition(' ')[2]} {inside!r} as a separate stop string.",
            )
    return tuple(text for text in texts if text not in special), frozenset(ids)


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, room: int, first: int = 0
) -> list[Prompt]:
    """Tokenize the prompts, including the control tokens that the tokenizer adds.

    Raises:
        ConfigError: a prompt is not valid Unicode, or leaves no space for a generated token.
    """
    prompts = []
    for number, text in enumerate(texts, first):
        _check_text(number, text)
        prompts.append(_check_length(Prompt(number, text, tokenizer.encode_prompt(text)), room))
    return prompts


def _check_text(number: int, text: str) -> None:
    """Check that a prompt has no unpaired surrogates, which tokenizers handle inconsistently.

    Unpaired surrogates result from command-line arguments that are not UTF-8 and from JSON escapes.

    Raises:
        ConfigError: the prompt has an unpaired surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError.one(
            Code.GEN_PROMPT,
            f"prompt {number + 1}",
            ascii(text[:40]),
            "must be UTF-8.",
            "Convert the prompt to UTF-8, for example with `iconv -t UTF-8`.",
        ) from error


def encode_chats(
    conversations: Sequence[ChatInput],
    tokenizer: Tokenizer,
    room: int,
    first: int = 0,
    where: str = "command line: --chat",
    chat: ChatTemplate | None = None,
) -> list[Prompt]:
    """Format conversations with a chat template and tokenize them.

    `chat` defaults to the tokenizer's own template. `Prompt.text` is the last message. `where` is
    the command-line option that error messages name.

    Raises:
        ConfigError: no template exists, the template rejects the messages, or a prompt is invalid.
    """
    if (chat := chat or tokenizer.chat) is None:
        raise ConfigError.one(
            Code.TOK_TEMPLATE,
            where,
            None,
            "requires a chat template, but the tokenizer has none.",
            f"Omit {where.rpartition(' ')[2]}, or set tokenizer.kind=auto and "
            "tokenizer.path=FOLDER to a model folder with a chat template.",
        )
    for number, conversation in enumerate(conversations, first):
        for message in conversation.messages:
            _check_text(number, str(message.get("content", "")))
    prompts = []
    for number, text in enumerate(chat.render(conversations), first):
        conversation = conversations[number - first]
        message = _message_text(conversation.messages[-1].get("content", ""))
        images = None
        if conversation.images:
            ids, images = _encode_images(text, conversation, tokenizer, number)
        else:
            ids = tokenizer.encode_chat(text).tolist()
        if not ids:
            raise ConfigError.one(
                Code.TOK_TEMPLATE,
                chat.path,
                None,
                f"must render at least one token, but rendered none for prompt {number + 1}.",
                f"Fix the template, or omit {where.rpartition(' ')[2]}.",
            )
        prompts.append(_check_length(Prompt(number, message, ids, images), room))
    return prompts


def _message_text(content: object) -> str:
    """Return the text of a message, with `[image]` in place of each image."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def _encode_images(
    text: str, conversation: ChatInput, tokenizer: Tokenizer, number: int
) -> tuple[list[int], PromptImages]:
    """Return the token IDs of a rendered conversation with images, and the images.

    Raises:
        ConfigError: an image cannot be used.
    """
    image = tokenizer.images
    assert image is not None, "the generator sets the format of images"
    try:
        decoded = decode_images(conversation.images, lambda: "", image)
        counts, special = decoded.num_tokens, tokenizer.special_tokens
        ids = tokenizer.encode_chat(expand_image_tokens(text, [], counts, image, special).text)
        left = image_tokens_left(ids, image, counts)
    except BadRecord as error:
        where = f"prompt {number + 1}"
        raise ConfigError.one(
            Code.DATA_IMAGE, where, error.value, error.rule, error.action
        ) from error
    return ids.tolist(), PromptImages(
        decoded.pixels, left, decoded.grids, decoded.rotary_positions(left, image)
    )


def _check_length(prompt: Prompt, room: int) -> Prompt:
    text, size = prompt.text, len(prompt.ids)
    if size >= room:
        raise ConfigError.one(
            Code.GEN_PROMPT,
            f"prompt {prompt.number + 1}",
            repr(text[:40]) + ("..." if len(text) > 40 else ""),
            f"has {size} tokens including control tokens, but must have fewer than the model's "
            f"sequence length, {room} (train.sequence_length).",
            f"Shorten the prompt, or set train.sequence_length={2 * size} for longer sequences.",
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
    """Complete the prompts in batches.

    When a sequence finishes, the next prompt replaces that sequence in the batch. If there are
    pipeline stages, the next batch starts only after all sequences have finished.

    `write` receives the completions in prompt order, each as soon as that completion and all
    earlier ones have finished. `stream` receives the new text of all sequences. If `stops` returns
    true or the process is interrupted, unfinished completions are also passed to `write`.

    Raises:
        DivergenceError: the model returns a log-probability that is not finite.
        KeyboardInterrupt: generation was interrupted, and all completions have been written.
    """
    size = batch_shape(prompts, limits, decoding.batch_multiple)
    if size.num_images and not decoding.supports_images:
        rule = "must be 1 to generate with images."
        action = "Set mesh.ici_stage=1 and mesh.dcn_stage=1."
        raise ConfigError.one(Code.MODEL_IMAGES, "mesh.ici_stage", None, rule, action)
    every = [
        Completion(prompt, CompletionText(tokenizer, prompt.ids, limits.stops))
        for prompt in prompts
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
    """Return the shape of a batch, which is the same for all batches."""
    rows = min(limits.batch_size, len(prompts))
    longest = max(limits.longest_prompt, *(len(prompt.ids) for prompt in prompts))
    more = min(limits.max_tokens, limits.max_length)
    images = max(0 if prompt.images is None else len(prompt.images.pixels) for prompt in prompts)
    return DecodeShape(math.ceil(rows / shards) * shards, padded_length(longest), more, images)


def _steps(
    decoding: DecodeEngineProtocol,
    params: Any,
    tokenizer: Tokenizer,
    waiting: deque[Completion],
    limits: GenerationLimits,
    size: DecodeShape,
    stream: Callable[[str], object],
) -> Generator[None]:
    """Generate one token per step for every sequence of a batch, until all have finished.

    Prompts from the front of `waiting` fill the batch.
    """
    batch = [waiting.popleft() for _ in range(min(size.batch_size, len(waiting)))]
    new: list[RefillPrompt] = []

    def refill() -> list[RefillPrompt]:
        inputs = new.copy()
        new.clear()
        return inputs

    inputs = (
        params,
        [completion.prompt.ids for completion in batch],
        [completion.prompt.number for completion in batch],
    )
    more = refill if decoding.supports_refill and waiting and not size.num_images else None
    images = [completion.prompt.images for completion in batch]
    with contextlib.closing(decoding.run(*inputs, size, more, images)) as drawn:
        for tokens, logprobs in drawn:
            for row, completion in enumerate(batch):
                if completion.finish_reason is not None:
                    continue
                _append_token(completion, int(tokens[row]), float(logprobs[row]), tokenizer, stream)
                if (why := _finish_reason(completion, tokenizer, limits)) is None:
                    continue
                _finish(completion, why, stream)
                if more is not None and waiting:
                    batch[row] = waiting.popleft()
                    new.append(RefillPrompt(row, batch[row].prompt.ids, batch[row].prompt.number))
            yield
            if all(completion.finish_reason is not None for completion in batch):
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
            Code.RUN_NOT_FINITE,
            f"prompt {row.prompt.number + 1}: token {len(row.tokens) + 1} has the "
            f"log-probability {logprob}\n"
            "  The log-probabilities that the model returns must be finite.\n"
            "  Use an earlier step, or set model.compute_dtype=float32.",
        )
    row.tokens.append(token)
    row.logprobs.append(logprob)
    if token not in tokenizer.end_ids:  # some end tokens are not control tokens
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
