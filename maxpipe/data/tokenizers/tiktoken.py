"""Tokenizer for tiktoken rank files, which have one `BASE64 RANK` per line.

Text is encoded with the `tiktoken` package, but its loader is not used because it downloads files.
A rank file contains neither the split pattern nor the control tokens, which are defined by a preset
or by config keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizers.byte_bpe import PRESETS
from maxpipe.data.tokenizers.control import Tokenizer, resolve, token_offsets
from maxpipe.data.tokenizers.files import (
    MAX_IDS,
    PATH,
    USABLE_RULE,
    missing_package_error,
    read,
    wrap_library_errors,
)
from maxpipe.errors import Code, ConfigError

_THREADS = 2
_PROBE_TEXT = (
    "".join(map(chr, range(0x250))) + "word  12345's\n\r\n\t naïve 語 かな 😀\u0301\u200d\u3000"
)


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE tokenizer. The rank of a token is both its id and its merge priority."""

    def __init__(self, config: TokenizerConfig):
        path = self._path = config.path
        raw = read(path, "tiktoken")
        with wrap_library_errors(path, "tiktoken"):
            ranks = parse_ranks(raw)
        pattern, special = _resolve_preset(config, ranks)
        with wrap_library_errors(path, "tiktoken"):
            self._encoding = _encoding(pattern, ranks, special)
            lost = self._encoding.decode(self._encoding.encode_ordinary(_PROBE_TEXT)) != _PROBE_TEXT
        if lost:  # the library drops text that the pattern does not match
            rule = "must cover the entire input: characters between matches would be lost."
            action = "Append |\\s+|\\S, or use the pattern that the model was trained with."
            raise ConfigError.one(Code.TOK_FILE, "tokenizer.split_pattern", pattern, rule, action)
        self.vocab_size = max([*ranks.values(), *special.values()]) + 1
        if self.vocab_size > MAX_IDS:
            rule = f"must have ids below {MAX_IDS}: the largest is {self.vocab_size - 1}."
            raise ConfigError.one(Code.TOK_FILE, PATH, path, rule, "Choose another file.")
        ids = {_text(token): i for token, i in ranks.items()} | special
        self.control = resolve(path, special, ids.get, self.vocab_size)
        self.min_embedding_rows = max(*ranks.values(), self.begin_id, self.end_id) + 1
        self._stands_for_text = np.zeros(self.vocab_size, bool)
        self.byte_lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in ranks.items():
            self.byte_lengths[i] = len(token)
        self._stands_for_text[list(ranks.values())] = True
        self._written = self.byte_lengths.copy()
        """Length in bytes of each token's text, including control tokens."""
        for name, i in special.items():
            self._written[i] = len(name.encode())
        hidden = list(self.special_ids)
        self._stands_for_text[hidden] = False
        self.byte_lengths[hidden] = 0
        parts = json.dumps([pattern, special, self.begin_id, self.end_id, self.pad_id])
        self._fingerprint = hashlib.sha256(raw + parts.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        with wrap_library_errors(self._path, "tiktoken", USABLE_RULE):
            return np.asarray(self._encoding.encode_ordinary(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self._ids_of(texts)]

    def encode_chat(self, text: str) -> np.ndarray:
        with wrap_library_errors(self._path, "tiktoken", USABLE_RULE):
            known = {name for name, i in self.special_tokens.items() if i < self.embedding_rows}
            known &= self._encoding.special_tokens_set
            ids = self._encoding.encode(text, allowed_special=known, disallowed_special=())
            return np.asarray(ids, np.int32)

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode_chat(text)
        return ids, token_offsets(text, self._written[ids])

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(ids) for ids in self._ids_of(texts)]

    def _ids_of(self, texts: Sequence[str]) -> Sequence[list[int]]:
        with wrap_library_errors(self._path, "tiktoken", USABLE_RULE):
            return self._encoding.encode_ordinary_batch(list(texts), num_threads=_THREADS)

    def decode(self, ids: Iterable[int]) -> str:
        # Ids between the ranks and the control tokens can be unused.
        kept = [i for i in map(int, ids) if i < self.vocab_size and self._stands_for_text[i]]
        with wrap_library_errors(self._path, "tiktoken", USABLE_RULE):
            return self._encoding.decode(kept)


def parse_ranks(raw: bytes) -> dict[bytes, int]:
    """Parse a rank file and return the rank of each token.

    Raises:
        ValueError: a line does not have the form `BASE64 RANK`, a token or a rank is repeated, or
            one of the 256 bytes has no rank. Text that contains such a byte could not be encoded.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        if not rank.isdigit() or len(rank) > 9:
            raise ValueError(f"line {number} must be a token in base64, a space and its rank")
        try:
            decoded = base64.b64decode(token, validate=True)
        except binascii.Error as error:
            raise ValueError(f"line {number} is not valid base64: {error}") from error
        if not decoded or decoded in ranks:
            what = "is repeated" if decoded else "is empty"
            raise ValueError(f"the token on line {number} {what}")
        ranks[decoded] = int(rank)
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{len(absent)} of the 256 bytes have no rank; the file may be truncated")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("two tokens have the same rank")
    if (largest := max(ranks.values())) >= MAX_IDS:
        raise ValueError(f"rank {largest} is too large: ranks must be below {MAX_IDS}")
    return ranks


def _resolve_preset(config: TokenizerConfig, ranks: dict[bytes, int]) -> tuple[str, dict[str, int]]:
    if config.preset != "none":
        preset = PRESETS[config.preset]
        if len(ranks) != preset.ranks:
            rule = f"must have {preset.ranks} ranks with tokenizer.preset={config.preset}: found "
            rule += f"{len(ranks)}."
            action = "Set tokenizer.path to that vocabulary, or tokenizer.preset=none with "
            action += "the tokenizer.split_pattern and tokenizer.special_tokens of this file."
            raise ConfigError.one(Code.TOK_FILE, PATH, config.path, rule, action)
        return preset.pattern, dict(preset.special)
    if not config.split_pattern:
        fits = [name for name, preset in PRESETS.items() if preset.ranks == len(ranks)]
        raise ConfigError.one(
            Code.TOK_FILE,
            "tokenizer.preset",
            "none",
            f"must define the split pattern: {config.path} has {len(ranks)} ranks and no pattern.",
            f"Set tokenizer.preset={' or '.join(fits or PRESETS)}"
            + ("." if fits else ", or tokenizer.split_pattern and tokenizer.special_tokens."),
        )
    first = max(ranks.values()) + 1
    return config.split_pattern, {t: first + n for n, t in enumerate(config.special_tokens)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "surrogateescape")


def _encoding(pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise missing_package_error("tiktoken", error) from error
    return tiktoken.Encoding(
        "maxpipe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
