"""Tokenizer for `tokenizer.json` files, based on the `tokenizers` package.

The normalizer and the decoder may lengthen text only up to a limit, because six chained
replacements of `a` with `aaaaaaaaaa` would turn one character into a million. Before any text is
encoded, an upper bound is computed from the definition: the maximum number of characters to which
one character can expand. Unicode normalization (NFKC, lowercasing) lengthens text only slightly and
is ignored.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from maxpipe.data.tokenizers.byte_bpe import ByteBpe, byte_bpe
from maxpipe.data.tokenizers.control import Tokenizer, resolve
from maxpipe.data.tokenizers.files import (
    MAX_IDS,
    USABLE_RULE,
    missing_package_error,
    needs_limit,
    read,
    run_texts_with_time_limit,
    run_with_time_limit,
    wrap_library_errors,
)
from maxpipe.data.tokenizers.tokenizer_class import may_keep_file, rebuild_definition
from maxpipe.io.typed_json import parse_json

MAX_GROWTH = 64
"""Maximum number of characters to which one character may expand; published tokenizers need 4."""
_MAX_STEPS = 200
_LONGEST_UNICODE = 64
"""Size in bytes of the longest entry in any published `precompiled_charsmap`, rounded up."""
_OTHER = ""
"""Placeholder for all characters that do not occur in the definition."""


def check_growth(definition: Mapping[str, Any]) -> None:
    """Raise ValueError if the tokenizer can expand text by more than a factor of MAX_GROWTH."""
    for part in ("normalizer", "decoder"):
        factor = growth([*_steps(definition.get(part))])
        if factor > MAX_GROWTH:
            raise ValueError(
                f"the {part} can expand text by a factor of {factor:.3g}; at most {MAX_GROWTH} "
                "is allowed"
            )


def growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the maximum number of characters to which one character can expand."""
    if len(steps) > _MAX_STEPS:
        raise ValueError(
            f"normalizer or decoder has {len(steps):,} steps; at most {_MAX_STEPS} are allowed"
        )
    alphabet = {_OTHER, *"".join(_texts(steps))}

    @functools.cache
    def of_text(number: int, text: str) -> float:
        return sum(of(number, character) for character in text)

    @functools.cache
    def of(number: int, character: str) -> float:
        """Return the length to which one character expands in step `number` and all later steps."""
        if number == len(steps):
            return 1.0
        step, same = steps[number], of(number + 1, character)
        pattern, content = _replacement(step)
        if content:
            grown = of_text(number + 1, content)
            if not pattern:  # a regex may match any character and the adjacent empty string
                return same + grown
            # Each match consumes all characters of the pattern.
            return max(same, grown / len(pattern)) if character in pattern else same
        if step.get("type") == "Precompiled":
            longest = _longest(step) / _LONGEST_UNICODE
            return max(1.0, longest) * max(of(number + 1, character) for character in alphabet)
        if step.get("type") in _FOLDS:  # `A` may become `a`
            return max(of(number + 1, character) for character in alphabet)
        return same

    # Starting with the last step limits the depth of the recursion to one step.
    worst = [
        max(of(number, character) for character in alphabet) for number in range(len(steps), -1, -1)
    ]
    return worst[-1]


_FOLDS = {"Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "BertNormalizer", "Nmt"}
_FOLDS |= {"ByteLevel", "ByteFallback"}


def _steps(node: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(node, dict):
        return
    inner = node.get("normalizers", node.get("decoders"))
    if isinstance(inner, list):
        for step in inner:
            yield from _steps(step)
    else:
        yield node


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    """Return the pattern that a step replaces ("" if it may match anywhere), and the text that the
    step inserts.
    """
    if step.get("type") == "Prepend":
        return "", str(step.get("prepend", ""))
    if step.get("type") != "Replace":
        return "", ""
    pattern = step.get("pattern")
    text = pattern.get("String", "") if isinstance(pattern, dict) else ""
    return str(text), str(step.get("content", ""))


def _texts(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        yield from _replacement(step)


def _longest(step: Mapping[str, Any]) -> int:
    """Return the size in bytes of the longest text that a `precompiled_charsmap` inserts."""
    try:
        raw = base64.b64decode(step.get("precompiled_charsmap") or "")
    except (ValueError, TypeError):
        return 0  # `tokenizers` reports the error
    trie = int.from_bytes(raw[:4], "little")
    return max(map(len, raw[4 + trie :].split(b"\0")), default=0)


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer for a `tokenizer.json` file, using the settings files in the same folder."""

    file_fingerprint: str = ""
    """Fingerprint of the unmodified `tokenizer.json`. It is empty unless the folder's tokenizer
    class changes the definition and `tokenizer_config.json` could name a class that uses the
    file unchanged.
    """

    def __init__(self, path: str):
        raw = read(path, "huggingface")
        self._path, self.folder = path, os.path.dirname(os.path.expanduser(path))
        with wrap_library_errors(path, "huggingface"):
            definition = parse_json(raw, dict[str, Any], most_depth=256)
            check_growth(definition)
            self._tokenizer = _parse_definition(raw)
            changed = rebuild_definition(path, raw, definition)
            if changed is not raw:
                self._tokenizer = _parse_definition(changed)
            self._set_up(changed, path)
            if changed is not raw and may_keep_file(self.folder):
                self.file_fingerprint = self._fingerprint_of(raw)

    def _set_up(self, raw: bytes, path: str) -> None:
        # The file may contain settings that would truncate or pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that spells a control token is encoded as plain text.
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("the vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_IDS:
            raise ValueError(f"id {self.vocab_size - 1} is too large: ids must be below {MAX_IDS}")
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        definition = parse_json(self._tokenizer.to_str(), dict[str, Any], most_depth=256)
        self._is_slow = needs_limit(
            *(definition.get(name) for name in ("normalizer", "pre_tokenizer", "model"))
        )
        self._decodes_slowly = needs_limit(definition.get("decoder"))
        around = _framing_ids(definition.get("post_processor"))
        self.control = resolve(path, special, vocabulary.get, self.vocab_size, published=around)
        hidden = {i for i, token in added.items() if token.special}
        ids = [i for token, i in vocabulary.items() if i not in hidden]
        reachable = _reachable_ids(definition, vocabulary)
        roles = (self.begin_id, self.end_id, *around[0], *around[1])
        self.min_embedding_rows = (
            max(max(ids if reachable is None else reachable & {*ids}, default=0), *roles) + 1
        )
        spelled = {token.content: i for i, token in added.items()}
        self.byte_lengths = self._byte_lengths(vocabulary, spelled, definition)
        self._fingerprint = self._fingerprint_of(raw)

    def _fingerprint_of(self, raw: bytes) -> str:
        control = f"{self.begin_id} {self.end_id} {self.pad_id}"
        return hashlib.sha256(raw + control.encode()).hexdigest()

    def _byte_lengths(
        self,
        vocabulary: Mapping[str, int],
        spelled: Mapping[str, int],
        definition: Mapping[str, Any],
    ) -> np.ndarray:
        """Return token lengths in bytes, int32 [vocab_size]. `spelled` tokens decode to their
        names.
        """
        decoder = json.dumps(definition.get("decoder"))
        # A byte-level vocabulary represents each byte as one character.
        byte_level, joined = '"ByteLevel"' in decoder, '"WordPiece"' in decoder
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in vocabulary.items():
            if byte_level:
                lengths[i] = len(token)
            elif _BYTE_TOKEN.fullmatch(token):
                lengths[i] = 1
            else:
                text = token.removeprefix("##") if joined else token.replace("\u2581", " ")
                lengths[i] = len(text.encode())
        for token, i in spelled.items():
            lengths[i] = len(token.encode())
        lengths[list(self.special_ids)] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        (encoding,) = self._encodings([text])
        return np.asarray(encoding.ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        fast = self._byte_bpe
        encoded = [None if fast is None else fast.encode(text) for text in texts]
        slow = [number for number, ids in enumerate(encoded) if ids is None]
        encodings = self._encodings([texts[number] for number in slow])
        for number, encoding in zip(slow, encodings, strict=True):
            encoded[number] = np.asarray(encoding.ids, np.int32)
        return [ids for ids in encoded if ids is not None]

    @functools.cached_property
    def _byte_bpe(self) -> ByteBpe | None:
        raw = self._tokenizer.to_str()
        definition = parse_json(raw, dict[str, Any], most_depth=256)
        return byte_bpe(definition, _parse_definition(raw.encode()).model)

    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        (encoding,) = self._each([text], self._with_control.encode_batch)
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(
            -1, 2
        )

    def with_control(self, **changes: Any) -> Self:
        changed = super().with_control(**changes)
        # The cached tokenizer depends on the number of embedding rows.
        vars(changed).pop("_with_control", None)
        return changed

    @functools.cached_property
    def _with_control(self) -> Any:
        """Second tokenizer, which recognizes control tokens in text."""
        settings = parse_json(self._tokenizer.to_str(), dict[str, Any], most_depth=256)
        settings["added_tokens"] = [
            token
            for token in settings.get("added_tokens") or ()
            if token["id"] < self.embedding_rows
        ]
        # The post-processor would add no tokens here, but could exclude spaces from token offsets.
        settings["post_processor"] = None
        other = _parse_definition(json.dumps(settings).encode())
        other.encode_special_tokens = False
        return other

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(encoding) for encoding in self._encodings(texts)]

    def _encodings(self, texts: Sequence[str]) -> Sequence[Any]:
        return self._each(texts, self._tokenizer.encode_batch_fast)

    def _each(self, texts: Sequence[str], encode: Callable[..., Sequence[Any]]) -> Sequence[Any]:

        def call(texts: Sequence[str]) -> Sequence[Any]:
            return encode(list(texts), add_special_tokens=False)

        with wrap_library_errors(self._path, "huggingface", USABLE_RULE):
            return run_texts_with_time_limit(call, texts) if self._is_slow else call(texts)

    def decode(self, ids: Iterable[int]) -> str:
        # Drop control tokens that are defined in the settings, in addition to special tokens of the
        # file.
        kept = [i for i in map(int, ids) if i < self.vocab_size and i not in self.special_ids]

        def call() -> str:
            return self._tokenizer.decode_batch([kept], skip_special_tokens=True)[0]

        with wrap_library_errors(self._path, "huggingface", USABLE_RULE):
            return run_with_time_limit(call) if self._decodes_slowly else call()


def _framing_ids(post_processor: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor adds before and after the encoded text."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    others = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder", "truncation", "padding"))
    whole = {"version": "1.0", "added_tokens": [], "model": model, **others}
    one_word = _parse_definition(json.dumps({**whole, "post_processor": post_processor}).encode())
    encoding = one_word.encode("a", add_special_tokens=True)
    place = encoding.special_tokens_mask.index(0)
    return encoding.ids[:place], encoding.ids[place + 1 :]


def _reachable_ids(definition: Mapping[str, Any], vocabulary: Mapping[str, int]) -> set[int] | None:
    """Return the ids that BPE can produce; None for other models, or if `ignore_merges` is set.

    Reserved ids are excluded: tokens that no merge produces and that are neither characters nor
    bytes.
    """
    model = definition["model"]
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        return None
    merged = (
        "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)
        for merge in model.get("merges") or ()
    )
    prefix, suffix = (
        model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    if prefix:
        return None
    known = {
        content for token in definition.get("added_tokens") or () for content in [token["content"]]
    }
    known |= {*merged, str(model.get("unk_token"))}
    return {
        i
        for token, i in vocabulary.items()
        if token in known or len(token.removesuffix(suffix)) <= 1 or _BYTE_TOKEN.fullmatch(token)
    }


def _parse_definition(raw: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise missing_package_error("huggingface", error) from error
    return tokenizers.Tokenizer.from_buffer(raw)
