"""Text to token ids and back.

Owns the control ids (begin, end, padding), the ends of a generated text and the size in bytes of
each token; does not know documents, sequences or the model. Nothing is downloaded.

Text of tokens that come one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np

from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.control import ControlTokenMixin, ControlTokens, Framing
from maxpipe.data.tokenizers.files import locate
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxpipe.data.tokenizers.offsets import of_widths
from maxpipe.data.tokenizers.sentencepiece import SentencePieceTokenizer
from maxpipe.data.tokenizers.tiktoken import TiktokenTokenizer
from maxpipe.data.tokenizers.tokenizer_class import FILE_AS_IT_IS
from maxpipe.errors import ConfigError

_CONTEXT = 4
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_INCOMPLETE = 3
"""A character has up to four bytes: three may have come."""
_MAX_PENDING_IDS = 64


class TextStream:
    """Turns ids into text as they come, and never gives half a character.

    The pieces together are what `decode` makes of all ids, as long as these are whole characters.
    What a token stands for depends on those before it (a space at the start of a text is left
    out), so each id is decoded behind the last few.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._ids: list[int] = []
        self._given = 0
        """Characters of the text of `_ids` that were given."""

    def push(self, token: int) -> str:
        """What the next id adds to the text; empty while a character is incomplete."""
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        text = complete = self._decode(self._ids)
        for _ in range(_MAX_INCOMPLETE):
            complete = complete.removesuffix(_REPLACEMENT_CHARACTER)
        if len(self._ids) > _MAX_PENDING_IDS:  # of bytes that are no text any number may come
            complete = text
        added = complete[self._given :]
        self._given = max(self._given, len(complete))
        if complete == text and len(self._ids) > 2 * _CONTEXT:
            self._forget(text)
        return added

    def finish(self) -> str:
        """What is left: bytes that never became a character."""
        added = self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return added

    def _forget(self, text: str) -> None:
        """Drops ids that are not needed any more; never between the bytes of a character."""
        for first in range(len(self._ids) - _CONTEXT, 0, -1):
            tail = self._decode(self._ids[first:])
            if tail and _REPLACEMENT_CHARACTER not in tail and text.endswith(tail):
                self._ids, self._given = self._ids[first:], len(tail)
                return
        if len(self._ids) > _MAX_PENDING_IDS:
            self._ids, self._given = [], 0


class Tokenizer(Protocol):
    """Ids are below `vocab_size`. `encode` adds no control ids and never returns one."""

    control: ControlTokens

    @property
    def vocab_size(self) -> int: ...

    @property
    def embedding_rows(self) -> int:
        """Rows of the model's embedding, or a number above all ids where no model is known."""
        ...

    @property
    def min_embedding_rows(self) -> int:
        """Rows that an embedding needs: the largest id that a text gives with its begin and end
        tokens, plus one.

        Control tokens that no text gives, and ids that BPE never makes, need none.
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
        """Ids that end a generated text, sorted: `end_id`, and the ends of a turn of a chat."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of control tokens by how they are written."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """All control ids: begin, end, padding, and what else stands for no text."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, int32 [vocab_size]; 0 for control ids."""
        ...

    @property
    def role_texts(self) -> Mapping[str, str]:
        """Texts of control tokens by roles such as `bos_token`, as chat templates name them."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """The template of the model's folder, whose text `encode_chat` takes."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens]. Text that spells a control token stays text."""
        ...

    @property
    def framing(self) -> Framing:
        """The tokens around a prompt."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt with the tokens of `framing` around them; at least one."""
        ...

    def with_control(self, **changes: Any) -> Self:
        """A copy with other values of `Control`."""
        ...

    def with_embedding_rows(self, rows: int) -> Self:
        """A copy for an embedding of `rows` rows, at least `min_rows`: no id is beyond them.

        Text that spells a control token without a row stays text.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """The same of several texts, faster than one by one."""
        ...

    def encode_chat(self, text: str) -> np.ndarray:
        """The same for text of a chat template: what spells a control token is that token."""
        ...

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The same, and begin and end of each token in the text, int64 [tokens, 2] characters."""
        ...

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Number of tokens of each text, faster than encoding them one by one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, without control ids. Broken characters become U+FFFD.

        Ids from `vocab_size` on, as a model with a padded vocabulary has, stand for no text.
        """
        ...

    def fingerprint(self) -> str: ...


def open_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `tokenizer.kind` names.

    Raises:
        ConfigError: no file, no package for it, or a file without an end token.
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
    """Text of ids that come one at a time, without halves of characters."""
    return TextStream(tokenizer.decode, tokenizer.special_ids)


def fit_tokenizer(tokenizer: Tokenizer, rows: int, *, model: str = "") -> Tokenizer:
    """The tokenizer for a model whose embedding has `rows` rows.

    `model` names one that has its weights: its rows are what they are.

    Raises:
        ConfigError: text would give an id without a row.
    """
    need = tokenizer.min_embedding_rows
    if need <= rows:
        return tokenizer.with_embedding_rows(rows)
    rule = f"must be at least {need}: the tokenizer encodes text as ids up to {need - 1}."
    if model:
        raise ConfigError.one(
            "model.vocab_size",
            rows,
            f"{rule[:-1]}, and the embedding of {model} has {rows} rows.",
            "Name the tokenizer of this model: tokenizer.kind=auto tokenizer.path=FOLDER.",
        )
    raise ConfigError.one(
        "model.vocab_size",
        rows,
        rule,
        f"Set model.vocab_size={-(-need // 128) * 128} (or any value from {need}).",
    )


def check_token_ids(where: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check that the model's embedding has a row for each stored id of a document.

    Raises:
        ConfigError: it has not; a device would take the last row.
    """
    largest = int(ids.max(initial=0))
    if largest < tokenizer.embedding_rows:
        return
    raise ConfigError.one(
        where,
        f"id {largest}",
        f"must be below model.vocab_size ({tokenizer.embedding_rows}), the rows of the "
        "embedding: the "
        f"tokenizer has {tokenizer.vocab_size} ids.",
        f"Set model.vocab_size={tokenizer.vocab_size}, or prepare documents without the text of "
        "this control token.",
    )


def suggest_tokenizer_action(tokenizer: Tokenizer, fingerprint: str, action: str) -> str:
    """The action about ids that were made with another fingerprint than the tokenizer's.

    It is `action`, unless they were made with the same `tokenizer.json`, used as it is.
    """
    is_file = isinstance(tokenizer, HuggingFaceTokenizer)
    if not is_file or not fingerprint or fingerprint != tokenizer.file_fingerprint:
        return action
    return (
        f'Set "tokenizer_class": "{FILE_AS_IT_IS}" in the tokenizer_config.json of '
        f"{tokenizer.folder}: ids are then those of its tokenizer.json, as they were."
    )


_BYTES_CONTROL = re.compile("(<begin>|<end>|<pad>)")


class ByteTokenizer(ControlTokenMixin):
    """The 256 bytes of UTF-8 text, then begin, end and padding."""

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
        found = [
            np.asarray([special[part]], np.int32) if number % 2 else self.encode(part)
            for number, part in enumerate(parts)
        ]
        ids = np.concatenate(found)
        widths = np.ones(len(ids), np.int64)
        for name, i in special.items():
            widths[ids == i] = len(name)
        return ids, of_widths(text, widths)

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        return "bytes-1"
