"""Tokenizers, which convert text to token ids and token ids to text.

A tokenizer defines the control ids (BOS, EOS, padding), the ids that end generated text, and the
size of each token in bytes. Tokenizers never download files. `TextStream` decodes tokens one by
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np

from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.control import ControlTokenMixin, ControlTokens, Framing, token_offsets
from maxpipe.data.tokenizers.files import locate
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxpipe.data.tokenizers.sentencepiece import SentencePieceTokenizer
from maxpipe.data.tokenizers.tiktoken import TiktokenTokenizer
from maxpipe.data.tokenizers.tokenizer_class import FILE_AS_IT_IS
from maxpipe.errors import ConfigError

_CONTEXT = 4
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_INCOMPLETE = 3
"""A UTF-8 character has up to four bytes, so at most three bytes can be pending."""
_MAX_PENDING_IDS = 64


class TextStream:
    """Incremental decoder that returns only complete characters.

    If the ids encode complete characters, the concatenated outputs equal `decode(ids)`. The text of
    a token can depend on the previous tokens: for example, a space at the start of a text is
    dropped. Each id is therefore decoded together with the last few ids.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._ids: list[int] = []
        self._given = 0
        """Number of characters in the decoded text of `_ids` that were already returned."""

    def push(self, token: int) -> str:
        """Return the text that the next id adds; empty while a character is incomplete."""
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        text = complete = self._decode(self._ids)
        for _ in range(_MAX_INCOMPLETE):
            complete = complete.removesuffix(_REPLACEMENT_CHARACTER)
        # A sequence of invalid UTF-8 bytes may continue indefinitely.
        if len(self._ids) > _MAX_PENDING_IDS:
            complete = text
        added = complete[self._given :]
        self._given = max(self._given, len(complete))
        if complete == text and len(self._ids) > 2 * _CONTEXT:
            self._forget(text)
        return added

    def finish(self) -> str:
        """Return the remaining text, which comes from bytes that did not complete a character."""
        added = self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return added

    def _forget(self, text: str) -> None:
        """Drop ids that are no longer needed, without splitting a character."""
        for first in range(len(self._ids) - _CONTEXT, 0, -1):
            tail = self._decode(self._ids[first:])
            if tail and _REPLACEMENT_CHARACTER not in tail and text.endswith(tail):
                self._ids, self._given = self._ids[first:], len(tail)
                return
        if len(self._ids) > _MAX_PENDING_IDS:
            self._ids, self._given = [], 0


class Tokenizer(Protocol):
    """Tokenizer with ids below `vocab_size`. The output of `encode` contains no control ids."""

    control: ControlTokens

    @property
    def vocab_size(self) -> int: ...

    @property
    def embedding_rows(self) -> int:
        """Number of embedding rows of the model; without a model, an upper bound on all ids."""
        ...

    @property
    def min_embedding_rows(self) -> int:
        """Minimum number of embedding rows: the largest id that encoded text can contain, plus one.

        BOS and EOS are included. Unused BPE ids, and control tokens that never occur in encoded
        text, are excluded.
        """
        ...

    @property
    def begin_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Sorted ids that end generated text: `end_id` and end-of-turn tokens of chat formats."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Maps the text of each control token to its id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """All control ids: BOS, EOS, padding, and other ids without decoded text."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: size in bytes of the text of each id; 0 for control ids."""
        ...

    @property
    def role_texts(self) -> Mapping[str, str]:
        """Maps roles of chat templates (such as `bos_token`) to texts of control tokens."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """Chat template of the model folder, or None; `encode_chat` encodes the rendered text."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return int32 [tokens]. Text that spells a control token is encoded as plain text."""
        ...

    @property
    def framing(self) -> Framing:
        """Tokens added before and after a prompt."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, including the tokens of `framing`; never an empty list."""
        ...

    def with_control(self, **changes: Any) -> Self:
        """Return a copy of the tokenizer with some fields of `ControlTokens` changed."""
        ...

    def with_embedding_rows(self, rows: int) -> Self:
        """Return a copy for an embedding with `rows` rows, whose ids are all below `rows`.

        `rows` must be at least `min_embedding_rows`. Control tokens without an embedding row are
        encoded as plain text.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """Return int32 [tokens] for each text. Batches are faster than single texts."""
        ...

    def encode_chat(self, text: str) -> np.ndarray:
        """Return int32 [tokens] for rendered text, with control tokens encoded as their ids."""
        ...

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of `encode_chat`, and begin and end in characters int64 [tokens, 2]."""
        ...

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the number of tokens of each text. Batches are faster than single texts."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids. Control ids are skipped, and incomplete characters become
        U+FFFD.

        Ids at or above `vocab_size`, as in a padded vocabulary, have no text.
        """
        ...

    def fingerprint(self) -> str: ...


def open_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer selected by `tokenizer.kind`.

    Raises:
        ConfigError: the tokenizer file or the required package is missing, or the vocabulary has no
            EOS token.
    """
    if config.kind == "bytes":
        return ByteTokenizer()
    kind, path = locate(config)
    match kind:
        case "huggingface":
            return HuggingFaceTokenizer(path)
        case "sentencepiece":
            return SentencePieceTokenizer(path)
        case "tiktoken":
            return TiktokenTokenizer(replace(config, path=path))


def open_text_stream(tokenizer: Tokenizer) -> TextStream:
    """Return an incremental decoder that uses this tokenizer."""
    return TextStream(tokenizer.decode, tokenizer.special_ids)


def fit_tokenizer(tokenizer: Tokenizer, rows: int, *, model: str = "") -> Tokenizer:
    """Return a copy of the tokenizer, fitted to a model whose embedding has `rows` rows.

    `model` is the name of a model with existing weights, which fix the number of embedding rows.

    Raises:
        ConfigError: encoded text could contain an id without an embedding row.
    """
    need = tokenizer.min_embedding_rows
    if need <= rows:
        return tokenizer.with_embedding_rows(rows)
    rule = f"must be at least {need}: the tokenizer encodes text as ids up to {need - 1}."
    if model:
        rule = f"{rule[:-1]}, and the embedding of {model} has {rows} rows."
        action = "Set the tokenizer of this model: tokenizer.kind=auto tokenizer.path=FOLDER."
        raise ConfigError.one("model.vocab_size", rows, rule, action)
    action = f"Set model.vocab_size={-(-need // 128) * 128} (or any value from {need})."
    raise ConfigError.one("model.vocab_size", rows, rule, action)


def check_token_ids(where: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a stored id without an embedding row, which devices would ignore."""
    largest = int(ids.max(initial=0))
    if largest < tokenizer.embedding_rows:
        return
    rule = f"must be below model.vocab_size ({tokenizer.embedding_rows}), the size of the "
    rule += f"embedding: the tokenizer has {tokenizer.vocab_size} ids."
    action = f"Set model.vocab_size={tokenizer.vocab_size}, or prepare documents without the text "
    action += "of this control token."
    raise ConfigError.one(where, f"id {largest}", rule, action)


def suggest_tokenizer_action(tokenizer: Tokenizer, fingerprint: str, action: str) -> str:
    """Return the suggested action for stored ids whose tokenizer fingerprint differs.

    The result is `action`, unless the ids were encoded with the unmodified version of the same
    `tokenizer.json`.
    """
    is_file = isinstance(tokenizer, HuggingFaceTokenizer)
    if not is_file or not fingerprint or fingerprint != tokenizer.file_fingerprint:
        return action
    return (
        f'Set "tokenizer_class": "{FILE_AS_IT_IS}" in the tokenizer_config.json of '
        f"{tokenizer.folder}: text is then encoded with its tokenizer.json unchanged."
    )


_BYTES_CONTROL = re.compile("(<begin>|<end>|<pad>)")


class ByteTokenizer(ControlTokenMixin):
    """Tokenizer whose ids are the 256 byte values followed by BOS, EOS and padding."""

    control = ControlTokens(
        begin_id=256,
        end_id=257,
        pad_id=258,
        end_ids=(257,),
        special_tokens={"<begin>": 256, "<end>": 257, "<pad>": 258},
        role_texts={"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>"},
        published=Framing((256,)),
    )
    vocab_size = min_embedding_rows = 259

    @property
    def byte_lengths(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, np.int32)
        lengths[256:] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_chat(self, text: str) -> np.ndarray:
        return self.encode_chat_offsets(text)[0]

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        parts = _BYTES_CONTROL.split(text)
        special = self.control.special_tokens
        encoded = [
            np.asarray([special[part]], np.int32) if number % 2 else self.encode(part)
            for number, part in enumerate(parts)
        ]
        ids = np.concatenate(encoded)
        widths = np.ones(len(ids), np.int64)
        for name, i in special.items():
            widths[ids == i] = len(name)
        return ids, token_offsets(text, widths)

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        return "bytes-1"
