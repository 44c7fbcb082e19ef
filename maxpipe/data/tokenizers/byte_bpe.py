"""Byte-level BPE: published vocabularies, and a fast encoder based on tiktoken.

Rank files contain neither split patterns nor control tokens. The patterns and tokens in this module
are from `tiktoken_ext/openai_public.py` in tiktoken 0.14 (OpenAI vocabularies),
`llama3/tokenizer.py` in meta-llama/llama3 (with the token names of Llama 3.1), and
`tokenization_qwen.py` in Qwen/Qwen-7B.

The encoder is used only if it returns the same ids as the library `tokenizers`.

The library `tokenizers` applies a list of merges. In contrast, tiktoken merges adjacent tokens
whose concatenation is a token, lowest rank first. Both methods return the same ids if encoding the
text of each token returns only this token, because the last merge of a token then joins the same
two tokens in both libraries. This condition is tested for each token in the vocabulary. Both
libraries must also split text into the same words. This requires a pattern in `PUBLISHED`, and
characters that both libraries classify in the same way as letters, numbers or spaces. Every
character is tested. Text that contains other characters is encoded with `tokenizers`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = _ENDINGS + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
"""Pattern that splits numbers into groups of up to three digits."""
QWEN = _WORDS + r"\p{N}" + _REST
QWEN3_5 = (
    _ENDINGS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that treats combining marks as parts of words."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Split pattern, control tokens and number of ranks of a published vocabulary."""

    ranks: int
    pattern: str
    special: Mapping[str, int]


def _numbered(first: int, *names: str) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(names)}


_HARMONY_NAMED = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>"),
    *("<|return|>", "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>"),
    "<|call|>",
)
_HARMONY = _numbered(
    199998, *_HARMONY_NAMED, *(f"<|reserved_{number}|>" for number in range(200013, 201088))
)
_HARMONY["<|endofprompt|>"] = 200018  # alternative name

_LLAMA3_NAMED = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)

PRESETS = {
    "gpt2": Preset(50256, _GPT2, {"<|endoftext|>": 50256}),
    "p50k": Preset(50280, _GPT2, {"<|endoftext|>": 50256}),
    "cl100k": Preset(
        100256,
        _CL100K,
        _numbered(100257, "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
        | {"<|endofprompt|>": 100276},
    ),
    "o200k": Preset(199998, O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "o200k_harmony": Preset(199998, O200K, _HARMONY),
    "llama3": Preset(
        128000,
        LLAMA3,
        _numbered(
            128000,
            *_LLAMA3_NAMED,
            *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
        ),
    ),
    "qwen": Preset(
        151643,
        QWEN,
        _numbered(151643, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
        | _numbered(151646, *(f"<|extra_{number}|>" for number in range(205))),
    ),
}
"""Presets, keyed by the value of `tokenizer.preset`."""


_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Default pattern of `ByteLevel`."""
PUBLISHED = (LLAMA3, QWEN, O200K, _BYTE_LEVEL)
"""Published patterns whose matching time is linear in the length of the text."""
_LONGEST = 1 << 18
"""Maximum input length in characters, because tiktoken fails on runs of a million spaces."""
_LAST = 0x32000
"""First code point that is not tested. No language has letters at or above this code point. Text
with such characters is encoded with `tokenizers`.
"""
_FOLDED = "\u017f\u212a"
"""Non-ASCII characters that match s or k when case is ignored."""
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_OTHER_KINDS = ("byte_fallback", "fuse_unk")


class ByteBpe:
    """Fast encoder that supports most input; see `encode`."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], ids: Sequence[int], added: str):
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "bytes", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._pattern = pattern
        self._ids = np.array(ids, np.int32)
        self._added = re.compile(added) if added else None

    def encode(self, text: str) -> np.ndarray | None:
        """Return int32 [tokens], or None if the ids could differ from those of `tokenizers`."""
        if len(text) > _LONGEST or (not text.isascii() and self._ambiguous_character.search(text)):
            return None
        if self._added is not None and self._added.search(text):
            return None
        return self._ids[self._encoding.encode_ordinary(text)]

    @functools.cached_property
    def _ambiguous_character(self) -> re.Pattern[str]:
        differing = set(_FOLDED)
        for kind in set(re.findall(r"\\p\{\w+\}|\\[swd]", self._pattern)):
            differing |= _tiktoken_characters(kind) ^ _tokenizers_characters(kind)
        characters = "".join(map(re.escape, sorted(differing)))
        return re.compile(f"[{characters}{chr(_LAST)}-\U0010ffff\ud800-\udfff]")


def _characters() -> str:
    return "".join(chr(i) for i in range(1, _LAST) if not 0xD800 <= i < 0xE000)


def _tiktoken_characters(kind: str) -> set[str]:
    """Return the characters that the pattern matches; tiktoken drops all other characters."""
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("kind", pat_str=kind, mergeable_ranks=ranks, special_tokens={})
    return set(bytes(encoding.encode_ordinary(_characters())).decode())


def _tokenizers_characters(kind: str) -> set[str]:
    """Return the characters that the pattern matches as separate words in `tokenizers`."""
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
        model: The model that `tokenizers` built from the file. Its settings are modified.
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
    ranks = _ranks_of(settings, model)
    if ranks is None:
        return None
    added = [
        token["content"] for token in definition.get("added_tokens") or () if not token["special"]
    ]
    return ByteBpe(pattern, *ranks, "|".join(map(re.escape, added)))


def _pattern_of(definition: Mapping[str, Any]) -> str | None:
    """Return the pattern that splits text into words; None if it is not in `PUBLISHED`."""
    first = definition.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _BYTE_LEVEL if byte_level.get("use_regex", True) else None
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
    """Return the rank of each token's bytes, and the id of each rank; None if a token fails the
    merge test.
    """
    vocabulary, byte_of = settings["vocab"], _byte_alphabet()
    if not byte_of.keys() <= vocabulary.keys():
        return None
    tokens = sorted(byte_of)
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in settings["merges"]
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
        if [part.value for part in model.tokenize(token)] != [token]:
            return None
    if settings.get("ignore_merges") and len(vocabulary) > len(tokens):
        return None  # tokens without a merge may be full words
    ranks = {bytes(byte_of[character] for character in token): i for i, token in enumerate(tokens)}
    return ranks, [vocabulary[token] for token in tokens]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return a map from `ByteLevel` characters to bytes. Printable bytes represent themselves."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
