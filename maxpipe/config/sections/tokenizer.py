"""Config section `tokenizer`: the tokenizer that encodes documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import rule, value_of
from maxpipe.errors import Code, RuleViolation

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

BYTES_VOCABULARY = 259
"""Vocabulary size of the bytes tokenizer: 256 bytes, BOS, EOS and padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Tokenizer that converts text to token ids."""

    kind: Literal["bytes", "auto", "huggingface", "sentencepiece", "tiktoken"] = "bytes"
    """Tokenizer format. `bytes`: the built-in tokenizer, with 256 byte tokens and three control
    tokens. `huggingface`: a `tokenizer.json` file. `sentencepiece`: a `.model` file. `tiktoken`: a
    file of ranks, one `BASE64 RANK` per line. `auto`: one of `huggingface`, `sentencepiece` and
    `tiktoken`, detected from the file at `tokenizer.path`. All formats except `bytes` require `pip
    install 'maxpipe[tokenizers]'`."""
    path: str = ""
    """Tokenizer file, or a Hugging Face folder that contains a tokenizer file.
    `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
    `chat_template.jinja` in the same folder define control tokens, stop tokens and the chat
    template."""
    preset: Literal[
        "none", "gpt2", "p50k", "cl100k", "o200k", "o200k_harmony", "llama3", "qwen"
    ] = "none"
    """Name of the published vocabulary in a `tiktoken` file. The preset defines the split pattern,
    the control tokens and their ids. The number of ranks in the file must match that of the
    preset."""
    split_pattern: str = ""
    """Regular expression that splits text into words before tokenization. Tokens never span two
    words. Used only for `tiktoken` files without a preset."""
    special_tokens: list[str] = field(default_factory=list)
    """Control tokens, in the order of their ids. The ids are consecutive and start after the
    largest rank. Ignored unless `tokenizer.split_pattern` is set."""


_EXAMPLES = {"sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.model"}


@rule("tokenizer.kind", "tokenizer.path")
def _path_goes_with_kind(config: Config) -> Iterator[RuleViolation]:
    kind, path = config.tokenizer.kind, config.tokenizer.path
    if kind == "bytes" and path:
        yield RuleViolation(
            Code.CFG_IGNORED,
            "tokenizer.path",
            "is ignored with tokenizer.kind=bytes: the run would train on raw bytes.",
            "Set tokenizer.kind=auto, which detects the format of the file, or tokenizer.path=''.",
        )
    elif kind != "bytes" and not path:
        yield RuleViolation(
            Code.TOK_FILE,
            "tokenizer.path",
            f"must be a tokenizer file or folder with tokenizer.kind={kind}.",
            f"Set tokenizer.path={_EXAMPLES.get(kind, 'tokenizer.json')} (your file), or "
            "tokenizer.kind=bytes.",
        )


_TIKTOKEN = {
    "tokenizer.preset": "none",
    "tokenizer.split_pattern": "''",
    "tokenizer.special_tokens": "[]",
}
"""Maps keys that apply only to `tiktoken` files to their default values."""


@rule("tokenizer.kind", *_TIKTOKEN)
def _tiktoken_keys_are_consistent(config: Config) -> Iterator[RuleViolation]:
    kind = config.tokenizer.kind
    keys = [key for key in _TIKTOKEN if value_of(config, key) not in ("none", "", [])]
    if keys and kind not in ("tiktoken", "auto"):
        yield RuleViolation(
            Code.TOK_SETTINGS,
            keys[0],
            f"requires tokenizer.kind=tiktoken, but tokenizer.kind is {kind}.",
            f"Set {keys[0]}={_TIKTOKEN[keys[0]]}, or tokenizer.kind=tiktoken.",
        )
    elif len(keys) > 1 and keys[0] == "tokenizer.preset":
        yield RuleViolation(
            Code.TOK_SETTINGS,
            keys[1],
            f"cannot be combined with tokenizer.preset={config.tokenizer.preset}, which sets it.",
            f"Set {keys[1]}={_TIKTOKEN[keys[1]]}, or tokenizer.preset=none.",
        )
    elif kind == "tiktoken" and not keys:
        yield RuleViolation(
            Code.TOK_SETTINGS,
            "tokenizer.preset",
            "must be set with tokenizer.kind=tiktoken: the file does not define how text is split.",
            "Set tokenizer.preset=llama3, another preset, or tokenizer.split_pattern and "
            "tokenizer.special_tokens.",
        )
    elif keys == ["tokenizer.special_tokens"]:
        yield RuleViolation(
            Code.TOK_SETTINGS,
            "tokenizer.split_pattern",
            "must not be empty if tokenizer.special_tokens is set: it defines how text is split.",
            "Set tokenizer.split_pattern='\\s+|\\S+' (use the pattern of your vocabulary), or "
            "replace both keys with a tokenizer.preset.",
        )


@rule("tokenizer.special_tokens")
def _special_tokens_are_texts(config: Config) -> Iterator[RuleViolation]:
    special = config.tokenizer.special_tokens
    if len(set(special)) != len(special) or "" in special:
        yield RuleViolation(
            Code.CFG_VALUE,
            "tokenizer.special_tokens",
            "must be unique, non-empty strings: their order defines their ids.",
            f"Set tokenizer.special_tokens=[{','.join(filter(None, dict.fromkeys(special)))}], or "
            "use names such as <|reserved_1|> for unused ids.",
        )
