"""Split patterns and control tokens of published vocabularies. Rank files do not contain these.

Sources: `tiktoken_ext/openai_public.py` in tiktoken 0.14 (OpenAI vocabularies),
`llama3/tokenizer.py` in meta-llama/llama3 (with the token names of Llama 3.1), and
`tokenization_qwen.py` in Qwen/Qwen-7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Split pattern and control tokens of a published vocabulary. `ranks` is the number of
    ranks.
    """

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
"""Maps values of `tokenizer.preset` to presets."""
