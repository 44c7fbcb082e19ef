"""Tokenizer for SentencePiece `.model` files, based on the `sentencepiece` package."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from maxpipe.data.tokenizers.control import Tokenizer, resolve
from maxpipe.data.tokenizers.files import (
    USABLE_RULE,
    missing_package_error,
    read,
    wrap_library_errors,
)
from maxpipe.data.tokenizers.tokenizer_class import folder_class, prepend_scheme

_MAX_BYTES = 1 << 26  # four times the size of the largest published model
_MAX_FIELDS = 1 << 21
"""Maximum number of pieces in a vocabulary. An empty piece uses 2 bytes in the file and 100 in
memory."""
_SPACE = "\u2581"
_THREADS = 2


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer for a unigram or BPE model, using the settings files in the model's folder.

    Unless `spaces` is set, the model file defines how spaces are handled. Most models insert a
    space before the input and merge consecutive spaces. The byte length of the first token includes
    an inserted space.
    """

    spaces: str = ""
    """Rule for inserting a space before text that does not begin with a space; see
    `prepend_scheme`."""

    def __init__(self, path: str):
        raw = read(path, "sentencepiece", _MAX_BYTES)
        self._path = path
        with wrap_library_errors(path, "sentencepiece"):
            _check_size(raw)
            self._model = self._encoder = _load_model(raw)
            self.spaces, normalizer = _class_rules(path)
            if self.spaces:
                self._encoder = _load_model(raw + normalizer)
            # The model itself removes leading spaces.
            if self.spaces and not self._encoder.encode(" "):
                self.spaces, self._encoder = "", self._model
            self._set_up(raw, path)

    def _set_up(self, raw: bytes, path: str) -> None:
        model = self._model
        self.vocab_size: int = model.get_piece_size()
        if not self.vocab_size:
            raise ValueError("the model has no pieces")
        pieces: list[str] = model.id_to_piece(list(range(self.vocab_size)))
        special = {piece: i for i, piece in enumerate(pieces) if model.is_control(i)}
        ids = {piece: i for i, piece in enumerate(pieces)}
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        own["pad_token"] = model.pad_id()
        known = {role: i for role, i in own.items() if i >= 0}
        self.control = resolve(path, special, ids.get, self.vocab_size, known)
        reachable = (i for i in ids.values() if not (model.is_control(i) or model.is_unused(i)))
        self.min_embedding_rows = max(*reachable, self.begin_id, self.end_id) + 1
        self.byte_lengths = np.zeros(self.vocab_size, np.int32)
        for i, piece in enumerate(pieces):
            if model.is_byte(i):
                self.byte_lengths[i] = 1
            elif not model.is_unknown(i):
                self.byte_lengths[i] = len(piece.replace(_SPACE, " ").encode())
        self.byte_lengths[list(self.special_ids)] = 0
        self._pieces, self._ids = pieces, ids
        self._unknown = [] if model.unk_id() < 0 else [model.unk_id()]
        control = f"{self.begin_id} {self.end_id} {self.pad_id} {self.spaces}".rstrip()
        self._fingerprint = hashlib.sha256(raw + control.encode()).hexdigest()

    def with_control(self, **changes: Any) -> Self:
        changed = super().with_control(**changes)
        # The cached pattern depends on the number of embedding rows.
        vars(changed).pop("_control_text", None)
        return changed

    @functools.cached_property
    def _control_text(self) -> re.Pattern[str]:
        special = [*self.special_ids, *self._unknown]
        names = (self._pieces[i] for i in special if i < self.embedding_rows)
        texts = sorted(names, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, texts)) + ")")

    def encode(self, text: str) -> np.ndarray:
        with wrap_library_errors(self._path, "sentencepiece", USABLE_RULE):
            return np.asarray(self._encoder.encode(self._space(text) + text), np.int32)

    def _space(self, text: str, begin: int = 0) -> str:
        """Return the space to insert before a text that begins at character `begin`, or ""."""
        puts = self.spaces == "always" or (self.spaces == "first" and begin == 0)
        return " " if puts and text and not text.startswith((" ", _SPACE)) else ""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self._ids_of(texts)]

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        # The library does not recognize control tokens in text, so the text between control tokens
        # is encoded separately.
        ids, offsets, begin = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int64)], 0
        for number, part in enumerate(self._control_text.split(text)):
            if number % 2:
                ids.append(np.asarray([self._ids[part]], np.int32))
                offsets.append(np.asarray([[begin, begin + len(part)]]))
            elif part:
                space = self._space(part, begin)
                with wrap_library_errors(self._path, "sentencepiece", USABLE_RULE):
                    encoding = self._encoder.encode(space + part, return_type="offset_mapping")
                ids.append(np.asarray(encoding["ids"], np.int32))
                places = np.asarray(encoding["offsets"], np.int64).reshape(-1, 2) - len(space)
                offsets.append(begin + np.maximum(places, 0))
            begin += len(part)
        return np.concatenate(ids), np.concatenate(offsets)

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(ids) for ids in self._ids_of(texts)]

    def _ids_of(self, texts: Sequence[str]) -> Sequence[list[int]]:
        with wrap_library_errors(self._path, "sentencepiece", USABLE_RULE):
            spaced = [self._space(text) + text for text in texts]
            return self._encoder.encode(spaced, num_threads=_THREADS)

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in map(int, ids) if i < self.vocab_size and i not in self.special_ids]
        with wrap_library_errors(self._path, "sentencepiece", USABLE_RULE):
            return self._model.decode(kept)


def _class_rules(path: str) -> tuple[str, bytes]:
    """Return the tokenizer class's rule for spaces, and protobuf fields that disable the file's
    rules.

    If a protobuf file repeats a message, fields in the later message override the earlier fields.
    """
    name, settings = folder_class(os.path.dirname(os.path.expanduser(path)))
    if name == "LlamaTokenizer":  # this class applies no other normalization
        return prepend_scheme(settings), _NORMALIZER + b"\x06" + _NO_MAP + _NO_PREFIX + _ALL_SPACES
    if not name and settings.get("legacy", True) in (False, None):
        return "first", _NORMALIZER + b"\x02" + _NO_PREFIX
    return "", b""


_NORMALIZER, _NO_MAP, _NO_PREFIX, _ALL_SPACES = b"\x1a", b"\x12\0", b"\x18\0", b"\x20\0"


def _load_model(raw: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise missing_package_error("sentencepiece", error) from error
    return sentencepiece.SentencePieceProcessor(model_proto=raw)


def _check_size(raw: bytes) -> None:
    """Check the number of fields in the protobuf message without parsing the fields.

    The library creates an object per field, so a file with many tiny pieces could exhaust the
    memory.

    Raises:
        ValueError: the file is not a valid protobuf message, or has too many fields.
    """
    position = fields = 0
    while position < len(raw):
        key, position = _varint(raw, position)
        size, position = _varint(raw, position)
        fields += 1
        if fields > _MAX_FIELDS:
            raise ValueError(f"the file has more than {_MAX_FIELDS} pieces")
        position += size
        if key & 7 != 2:
            raise ValueError("the file has a field that is not a message")
    if position != len(raw):
        raise ValueError("the file is truncated")


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 64, 7):
        if position >= len(raw):
            raise ValueError("the file is truncated")
        byte = raw[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("the file has an integer of more than 64 bits")
