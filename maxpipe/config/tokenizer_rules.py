"""Rules on which tokenizer a run has, and how its file is read."""

from __future__ import annotations

from collections.abc import Iterator

from maxpipe.config.rules import BYTES_VOCABULARY, rule, value_of
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation

_EXAMPLES = {"sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.model"}


@rule("model.vocab_size", "tokenizer.kind")
def _vocabulary_holds_bytes(config: Config) -> Iterator[RuleViolation]:
    if config.tokenizer.kind == "bytes" and config.model.vocab_size < BYTES_VOCABULARY:
        yield RuleViolation(
            "model.vocab_size",
            f"must be at least {BYTES_VOCABULARY} with tokenizer.kind=bytes: 256 bytes and "
            "three control ids.",
            f"Set model.vocab_size={BYTES_VOCABULARY}.",
        )


@rule("tokenizer.kind", "tokenizer.path")
def _path_goes_with_kind(config: Config) -> Iterator[RuleViolation]:
    kind, path = config.tokenizer.kind, config.tokenizer.path
    if kind == "bytes" and path:
        yield RuleViolation(
            "tokenizer.path",
            "is not read with tokenizer.kind=bytes: the run would be trained on bytes.",
            "Set tokenizer.kind=auto, which finds out what the file is, or tokenizer.path=''.",
        )
    elif kind != "bytes" and not path:
        yield RuleViolation(
            "tokenizer.path",
            f"must name a tokenizer's file or folder with tokenizer.kind={kind}.",
            f"Set tokenizer.path={_EXAMPLES.get(kind, 'tokenizer.json')} (your own), or "
            "tokenizer.kind=bytes.",
        )


_TIKTOKEN = {
    "tokenizer.preset": "none",
    "tokenizer.split_pattern": "''",
    "tokenizer.special_tokens": "[]",
}
"""Keys of rank files, and their values that say nothing."""


@rule("tokenizer.kind", *_TIKTOKEN)
def _tiktoken_keys_are_consistent(config: Config) -> Iterator[RuleViolation]:
    kind = config.tokenizer.kind
    given = [key for key in _TIKTOKEN if value_of(config, key) not in ("none", "", [])]
    if given and kind not in ("tiktoken", "auto"):
        yield RuleViolation(
            given[0],
            f"is read with tokenizer.kind=tiktoken, and that is {kind}.",
            f"Set {given[0]}={_TIKTOKEN[given[0]]}, or tokenizer.kind=tiktoken.",
        )
    elif len(given) > 1 and given[0] == "tokenizer.preset":
        yield RuleViolation(
            given[1],
            f"is part of tokenizer.preset={config.tokenizer.preset}, and has no place beside it.",
            f"Set {given[1]}={_TIKTOKEN[given[1]]}, or tokenizer.preset=none.",
        )
    elif kind == "tiktoken" and not given:
        yield RuleViolation(
            "tokenizer.preset",
            "must say with tokenizer.kind=tiktoken how text is split: its file does not.",
            "Set tokenizer.preset=llama3, or another one, or tokenizer.split_pattern and "
            "tokenizer.special_tokens.",
        )
    elif given == ["tokenizer.special_tokens"]:
        yield RuleViolation(
            "tokenizer.split_pattern",
            "must not be empty with tokenizer.special_tokens: it says how text is split.",
            "Set tokenizer.split_pattern='\\s+|\\S+' (your vocabulary's), or a tokenizer.preset "
            "in place of both.",
        )


@rule("tokenizer.special_tokens")
def _special_tokens_are_texts(config: Config) -> Iterator[RuleViolation]:
    special = config.tokenizer.special_tokens
    if len(set(special)) != len(special) or "" in special:
        yield RuleViolation(
            "tokenizer.special_tokens",
            "must be texts that are not empty, each once: their ids follow their order.",
            f"Set tokenizer.special_tokens=[{','.join(filter(None, dict.fromkeys(special)))}], or "
            "names such as <|reserved_1|> for ids that are not used.",
        )
