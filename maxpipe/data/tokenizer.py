"""Text to token ids and back.

Owns the control ids (begin, end, padding) and the size in bytes of each token;
does not know documents, sequences or the model. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from maxpipe.boundary import files
from maxpipe.boundary.typed import parse
from maxpipe.config.schema import TokenizerConfig
from maxpipe.errors import ConfigError

_BEGIN_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>", "[CLS]")
_END_NAMES = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
_MAX_BYTES = 1 << 28  # eight times the largest published ones
_MAX_SETTINGS_BYTES = 1 << 24
_MAX_IDS = 1 << 26
"""Arrays have an entry per id: one large number must not fill the memory."""
_USED = "must be a tokenizer that works on every text"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """Ids are below `vocab_size`. `encode` adds no control ids and never returns one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, int32 [vocab_size]; 0 for control ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens]."""
        ...

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Number of tokens of each text, faster than encoding them one by one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, without control ids. Broken characters become U+FFFD."""
        ...

    def fingerprint(self) -> str: ...


def open_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `tokenizer.kind` names.

    Raises:
        ConfigError: no file, no `tokenizers` package, or a file without an end token.
    """
    match config.kind:
        case "bytes":
            return ByteTokenizer()
        case "huggingface":
            return HuggingFaceTokenizer(config.path)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError unless the model has an embedding for every token id."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError.one(
            "model.vocab_size",
            vocab_size,
            f"must be at least the tokenizer's vocabulary ({tokenizer.vocab_size}).",
            f"Set model.vocab_size={-(-tokenizer.vocab_size // 128) * 128} "
            f"(or any value from {tokenizer.vocab_size}).",
        )


class ByteTokenizer:
    """The 256 bytes of UTF-8 text, then begin, end and padding."""

    begin_id = 256
    end_id = 257
    pad_id = 258
    vocab_size = 259

    @property
    def byte_lengths(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, np.int32)
        lengths[256:] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        return "bytes-1"


@contextlib.contextmanager
def _explained(path: str, rule: str) -> Iterator[None]:
    """Turns any error of the library inside into a mistake in the file.

    A panic in Rust code raises an exception that is no `Exception`.
    """
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError.one(
            "tokenizer.path",
            path,
            f"{rule}: {_first_line(error)}.",
            "Set tokenizer.path to the file that `save_pretrained` writes as tokenizer.json.",
        ) from error


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0].rstrip(".")
    return line[:200] or type(error).__name__


class HuggingFaceTokenizer:
    """A `tokenizer.json` file.

    Control ids are taken from `tokenizer_config.json` in the same folder, else from
    the file's special tokens by their usual names. Without a begin token documents
    begin with the end token; without a padding token the end token pads.
    """

    def __init__(self, path: str):
        raw = _read(path)
        self._path = path
        with _explained(path, "must be a tokenizer.json file"):
            self._tokenizer = _parse(raw)
            self._set_up(raw, path)

    def _set_up(self, raw: bytes, path: str) -> None:
        # A file may carry settings of another use that would change or cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that spells a control token stays text.
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("it has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_IDS:
            raise ValueError(f"it has an id of {self.vocab_size - 1}, at most {_MAX_IDS} are used")
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        named = _named_tokens(path)
        end = _pick(named.get("eos_token"), _END_NAMES, special, vocabulary)
        if end is None:
            raise ConfigError.one(
                "tokenizer.path",
                path,
                f"must have an end token: its special tokens are {', '.join(special) or 'none'}.",
                'Put tokenizer_config.json with {"eos_token": "..."} beside it.',
            )
        begin = _pick(named.get("bos_token"), _BEGIN_NAMES, special, vocabulary)
        pad = _pick(named.get("pad_token"), _PAD_NAMES, special, vocabulary)
        self.end_id = end
        self.begin_id = end if begin is None else begin
        self.pad_id = end if pad is None else pad
        self.byte_lengths = self._byte_lengths(vocabulary, set(special.values()))
        control = f"{self.begin_id} {self.end_id} {self.pad_id}"
        self._fingerprint = hashlib.sha256(raw + control.encode()).hexdigest()

    def _byte_lengths(self, vocabulary: dict[str, int], special: set[int]) -> np.ndarray:
        decoder = json.dumps(
            parse(self._tokenizer.to_str(), dict[str, Any], most_depth=256).get("decoder")
        )
        # A byte-level vocabulary writes each byte of text as one character.
        byte_level = '"ByteLevel"' in decoder
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in vocabulary.items():
            if byte_level:
                lengths[i] = len(token)
            elif _BYTE_TOKEN.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len(token.removeprefix("##").replace("\u2581", " ").encode())
        lengths[[*special, self.begin_id, self.end_id, self.pad_id]] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        with _explained(self._path, _USED):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        with _explained(self._path, _USED):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        with _explained(self._path, _USED):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def fingerprint(self) -> str:
        return self._fingerprint


def _read(path: str) -> bytes:
    try:
        return files.read(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError.one(
            "tokenizer.path",
            path or '""',
            f"must be a tokenizer.json file: {error.strerror}.",
            "Set tokenizer.path to the file, or tokenizer.kind=bytes, which needs none.",
        ) from error


def _parse(raw: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError.one(
            "tokenizer.kind",
            "huggingface",
            f"needs the package tokenizers: {error}.",
            "Run: pip install 'maxpipe[tokenizers]'",
        ) from error
    return tokenizers.Tokenizer.from_buffer(raw)


def _named_tokens(path: str) -> Mapping[str, str]:
    """Token texts by role, from the optional `tokenizer_config.json` beside the file."""
    beside = os.path.join(os.path.dirname(os.path.expanduser(path)), "tokenizer_config.json")
    try:
        entries = parse(files.read(beside, _MAX_SETTINGS_BYTES), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError.one(
            "tokenizer.path",
            beside,
            f"must be a JSON object: {getattr(error, 'strerror', None) or error}.",
            "Correct or remove the file.",
        ) from error
    # A token is written as its text, or as an object with the text in `content`.
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in entries.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _pick(
    named: str | None,
    usual: Sequence[str],
    special: Mapping[str, int],
    vocabulary: Mapping[str, int],
) -> int | None:
    if named is not None and named in vocabulary:
        return vocabulary[named]
    return next((special[name] for name in usual if name in special), None)
