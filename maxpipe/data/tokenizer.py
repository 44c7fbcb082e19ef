"""Tokenizers, which convert text to token ids and token ids to text.

A tokenizer defines the control token ids (BOS, EOS, padding), the ids that stop generation, and the
length of each token in bytes. Tokenizers never download files. `TextStream` decodes tokens one by
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizers.control import ControlTokens, Framing, Tokenizer, token_offsets
from maxpipe.data.tokenizers.files import locate
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxpipe.data.tokenizers.sentencepiece import SentencePieceTokenizer
from maxpipe.data.tokenizers.tiktoken import TiktokenTokenizer
from maxpipe.data.tokenizers.tokenizer_class import FILE_AS_IT_IS
from maxpipe.errors import Code, ConfigError

_CONTEXT = 4
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_INCOMPLETE = 3
"""A UTF-8 character has up to four bytes, so at most three bytes can be pending."""
_MAX_PENDING_IDS = 64


class TextStream:
    """Incremental decoder that returns only complete characters.

    If the ids encode complete characters, the concatenated outputs equal `decode(ids)`. The text of
    a token can depend on the preceding tokens: for example, some tokenizers drop a leading space.
    Each id is therefore decoded together with the last few ids.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._ids: list[int] = []
        self._given = 0
        """Number of characters in the decoded text of `_ids` that were already returned."""

    def push(self, token: int) -> str:
        """Add a token id and return the newly decoded text; "" while a character is incomplete."""
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        text = complete = self._decode(self._ids)
        for _ in range(_MAX_INCOMPLETE):
            complete = complete.removesuffix(_REPLACEMENT_CHARACTER)
        # Invalid UTF-8 may never complete a character, so pending bytes are limited.
        if len(self._ids) > _MAX_PENDING_IDS:
            complete = text
        added = complete[self._given :]
        self._given = max(self._given, len(complete))
        if complete == text and len(self._ids) > 2 * _CONTEXT:
            self._forget(text)
        return added

    def finish(self) -> str:
        """Return the text of the pending bytes, which do not form a complete character."""
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
    """Return a copy of the tokenizer for a model whose embedding table has `rows` rows.

    `model` names the pretrained model whose weights fix the number of embedding rows, if any.

    Raises:
        ConfigError: encoded text could contain an id without an embedding row.
    """
    need = tokenizer.min_embedding_rows
    if need <= rows:
        return tokenizer.with_embedding_rows(rows)
    rule = f"must be at least {need}: the tokenizer produces token ids up to {need - 1}."
    if model:
        rule = f"{rule[:-1]}, but the embedding of {model} has {rows} rows."
        action = "Use the tokenizer of this model: tokenizer.kind=auto tokenizer.path=FOLDER."
        raise ConfigError.one(Code.TOK_VOCABULARY, "model.vocab_size", rows, rule, action)
    action = f"Set model.vocab_size={-(-need // 128) * 128} (or any value of at least {need})."
    raise ConfigError.one(Code.TOK_VOCABULARY, "model.vocab_size", rows, rule, action)


def check_token_ids(where: str, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a stored token id has no embedding row; devices do not check ids."""
    largest = int(ids.max(initial=0))
    if largest < tokenizer.embedding_rows:
        return
    rule = f"must be below model.vocab_size ({tokenizer.embedding_rows}), the "
    rule += f"number of embedding rows: the tokenizer has {tokenizer.vocab_size} ids."
    action = f"Set model.vocab_size={tokenizer.vocab_size}, or re-prepare the dataset without the "
    action += "text that produces this token."
    raise ConfigError.one(Code.TOK_VOCABULARY, where, f"id {largest}", rule, action)


def suggest_tokenizer_action(tokenizer: Tokenizer, fingerprint: str, action: str) -> str:
    """Return the suggested action for stored token ids that another tokenizer encoded.

    The action is `action`, unless the ids were encoded with this `tokenizer.json` in unmodified
    form.
    """
    is_file = isinstance(tokenizer, HuggingFaceTokenizer)
    if not is_file or not fingerprint or fingerprint != tokenizer.file_fingerprint:
        return action
    return (
        f'Set "tokenizer_class": "{FILE_AS_IT_IS}" in the tokenizer_config.json of '
        f"{tokenizer.folder}, so that its tokenizer.json is used unchanged."
    )


_BYTES_CONTROL = re.compile("(<begin>|<end>|<pad>)")


class ByteTokenizer(Tokenizer):
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
    byte_lengths = np.repeat(np.array([1, 0], np.int32), [256, 3])
    _fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        return [self.encode(text) for text in texts]

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
