"""Fast encoder for byte-level BPE, based on tiktoken.

The encoder is used only if it returns the same ids as the library `tokenizers`.

The library `tokenizers` applies a list of merges. In contrast, tiktoken merges adjacent tokens
whose concatenation is a token, lowest rank first. Both methods agree if the text of every token is
encoded as this single token, because the last merge of a token then joins the same two tokens in
both libraries. This condition is tested for every token. Both libraries must also split text into
the same words. This requires a pattern in `PUBLISHED`, and characters that both libraries classify
in the same way as letters, numbers or spaces. Every character is tested. Texts with other
characters are encoded with `tokenizers`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxpipe.data.tokenizers.tiktoken_presets import LLAMA3, O200K, QWEN

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Default pattern of `ByteLevel`."""
PUBLISHED = (LLAMA3, QWEN, O200K, _GPT2)
"""Published patterns whose matching time is linear in the length of the text."""
_LONGEST = 1 << 18
"""Maximum text length in characters, because tiktoken's patterns fail on runs of a million
spaces.
"""
_LAST = 0x32000
"""First code point that is not tested. No language uses letters from this code point on. Texts with
such characters use `tokenizers`.
"""
_FOLDED = "\u017f\u212a"
"""Non-ASCII characters that match s or k when case is ignored."""
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_OTHER_KINDS = ("byte_fallback", "fuse_unk")


class ByteBpe:
    """Fast encoder that supports most texts."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], ids: Sequence[int], added: str):
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "bytes", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._pattern = pattern
        self._ids = np.array(ids, np.int32)
        self._added = re.compile(added) if added else None

    def encode(self, text: str) -> np.ndarray | None:
        """Return int32 [tokens]; None if the ids could differ from the ids of `tokenizers`."""
        if len(text) > _LONGEST or (not text.isascii() and self._ambiguous_character.search(text)):
            return None
        if self._added is not None and self._added.search(text):
            return None
        return self._ids[self._encoding.encode_ordinary(text)]

    @functools.cached_property
    def _ambiguous_character(self) -> re.Pattern[str]:
        """Pattern for characters that only one library treats as a letter, number or space."""
        found = set(_FOLDED)
        for kind in set(re.findall(r"\\p\{\w+\}|\\[swd]", self._pattern)):
            found |= _tiktoken_characters(kind) ^ _tokenizers_characters(kind)
        characters = "".join(map(re.escape, sorted(found)))
        return re.compile(f"[{characters}{chr(_LAST)}-\U0010ffff\ud800-\udfff]")


def _characters() -> str:
    return "".join(chr(i) for i in range(1, _LAST) if not 0xD800 <= i < 0xE000)


def _tiktoken_characters(kind: str) -> set[str]:
    """Return the characters that the pattern matches in tiktoken, which drops all other
    characters.
    """
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("kind", pat_str=kind, mergeable_ranks=ranks, special_tokens={})
    return set(bytes(encoding.encode_ordinary(_characters())).decode())


def _tokenizers_characters(kind: str) -> set[str]:
    """Return the characters that the pattern matches in `tokenizers`, where each match is a
    word.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    text = "\0".join(_characters())
    words = Split(Regex(kind), "isolated").pre_tokenize_str(text)
    return {word for word, _ in words if len(word) == 1 and word != "\0"}


def byte_bpe(definition: Mapping[str, Any], model: Any) -> ByteBpe | None:
    """Return the fast encoder for a `tokenizer.json`; None if ids could differ or tiktoken is
    missing.

    Args:
        definition: Content of the `tokenizer.json` file.
        model: The `tokenizers` model of the file. Its settings are modified.
    """
    pattern = _pattern_of(definition)
    settings = definition["model"]
    is_plain = settings.get("type") == "BPE" and not any(
        settings.get(name) for name in (*_PLAIN, *_OTHER_KINDS)
    )
    if pattern is None or not is_plain or definition.get("normalizer") is not None:
        return None
    try:
        import tiktoken  # noqa: F401
    except ImportError:
        return None
    found = _ranks_of(settings, model)
    if found is None:
        return None
    added = [
        each["content"] for each in definition.get("added_tokens") or () if not each["special"]
    ]
    return ByteBpe(pattern, *found, "|".join(map(re.escape, added)))


def _pattern_of(definition: Mapping[str, Any]) -> str | None:
    """Return the pattern that splits text into words, or None if the pattern is not in
    `PUBLISHED`.
    """
    first = definition.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2 if byte_level.get("use_regex", True) else None
    split = steps[0]
    pattern = (split.get("pattern") or {}).get("Regex")
    fits = (
        len(steps) == 2
        and split.get("type") == "Split"
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and not byte_level.get("use_regex", True)
    )
    return pattern if fits and pattern in PUBLISHED else None


def _ranks_of(settings: Mapping[str, Any], model: Any) -> tuple[dict[bytes, int], list[int]] | None:
    """Return a map from token bytes to ranks, and the id of each rank. Return None if a token fails
    the merge test.
    """
    vocabulary, byte_of = settings["vocab"], _byte_alphabet()
    if not byte_of.keys() <= vocabulary.keys():
        return None
    tokens = sorted(byte_of)
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else each for each in settings["merges"]
    ]
    for first, second in merges:
        joined = first + second
        if joined != tokens[-1]:  # a token may have several merges, which are adjacent in the list
            tokens.append(joined)
    if len(set(tokens)) != len(tokens) or not set(tokens) <= vocabulary.keys():
        return None
    model.ignore_merges = False  # otherwise the model would return known tokens without merging
    if any(set(token) - byte_of.keys() for token in tokens):
        return None
    for token in tokens:
        if [each.value for each in model.tokenize(token)] != [token]:
            return None
    if settings.get("ignore_merges") and len(vocabulary) > len(tokens):
        return None  # tokens without a merge may be full words
    ranks = {bytes(byte_of[each] for each in token): i for i, token in enumerate(tokens)}
    return ranks, [vocabulary[token] for token in tokens]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return a map from the characters that `ByteLevel` writes to bytes. Printable bytes represent
    themselves.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
