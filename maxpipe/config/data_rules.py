"""Rules for document sources, mixtures, validation sets and the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.data_sources import (
    COLUMNS,
    FILES,
    ONE_PATH,
    SPLITS,
    all_sources,
    is_synthetic,
    is_template,
    paths_of,
    section_of,
    split_template,
)
from maxpipe.config.foreign_keys import list_action
from maxpipe.config.rules import BOUNDS, BYTES_VOCABULARY, did_you_mean, rule, value_of
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation
from maxpipe.models.config import LARGEST

_SOURCES = ("data.source", "data.path", "data.paths", "data.mixture")
_NAMED = ("data.mixture", "data.validation")
_MOST_EPOCHS = 1e9
"""Maximum number of epochs. The limit exists because sample numbers of a source have 63 bits."""
_JOINED = ("system", "prompt", "response", "chosen", "rejected")
"""Prefixes of the `data.*_field` keys that may be templates."""
_WITHOUT_FIELDS = ("corpus", "text", "tokens", "megatron", "synthetic")

_Find = Callable[[str, SourceConfig], Iterator[RuleViolation]]


def named_sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (section, source) for all sources. A section is, for example, `data.mixture.NAME`."""
    for name, each in all_sources(config.data).items():
        yield section_of(name), each


def _source_rule(*keys: str) -> Callable[[_Find], None]:
    """Register a rule that reads these keys of each source."""

    def register(find: _Find) -> None:
        @rule("data.source", *_NAMED, *(f"data.{key}" for key in keys))
        def _(config: Config) -> Iterator[RuleViolation]:
            for section, each in named_sources(config):
                yield from find(section, each)

    return register


@_source_rule()
def _numbers(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if section == "data":
        return  # range rules in `check` cover this section
    for field in dataclasses.fields(SourceConfig):
        bound = BOUNDS.get(f"data.{field.name}")
        if bound is not None and not bound.holds(getattr(source, field.name)):
            key = f"{section}.{field.name}"
            yield RuleViolation(key, f"must be {bound}.", f"Set {key}={bound.example}.")


@_source_rule("path", "paths")
def _paths(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    kind, path = source.source, source.path
    if kind in (*FILES, *ONE_PATH) and not paths_of(source):
        examples = {"tfds": "c4/en:3.1.0", "text": "data/*.txt", "huggingface": "saved"}
        examples |= {"tokens": "data/tokens", "megatron": "data/*.idx"}
        yield RuleViolation(
            f"{section}.path",
            f"must not be empty with {section}.source={kind}.",
            f"Set {section}.path={examples.get(kind, f'data/*.{kind}')} (your own), or "
            f"{section}.source=corpus.",
        )
    if path.startswith("[") and path.endswith("]") and "," in path:
        yield RuleViolation(
            f"{section}.path",
            "must be one path, not a list.",
            list_action("data.path").replace("data.path", f"{section}.path"),
        )
    if source.paths and path:
        yield RuleViolation(
            f"{section}.paths",
            f"must be empty if {section}.path ({path}) is set.",
            f"Add that path to {section}.paths, and leave {section}.path out.",
        )
    if source.paths and kind in ONE_PATH:
        yield RuleViolation(
            f"{section}.paths",
            f"is ignored with {section}.source={kind}, which has one path.",
            f"Set {section}.path to that path.",
        )


@_source_rule("template")
def _template(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    key = f"{section}.template"
    if not source.template:
        return
    if source.source not in COLUMNS:
        yield RuleViolation(
            key,
            f"is ignored with {section}.source={source.source}, whose documents have no columns.",
            f"Leave {key} out, or set {section}.source to one of {', '.join(COLUMNS)}.",
        )
    example = f"Write column names in braces, such as {key}='{{title}}: {{text}}'"
    try:
        pieces = split_template(source.template)
    except ValueError as error:
        action = f"{example}; write {{{{ for a literal brace."
        yield RuleViolation(key, f"cannot be parsed: {error}.", action)
        return
    if len(pieces) == 1:
        rule = "must contain a column: otherwise all documents are the same."
        yield RuleViolation(key, rule, f"{example}.")


@_source_rule(*(f"{each}_field" for each in _JOINED))
def _field_templates(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    for each in _JOINED:
        field = getattr(source, f"{each}_field")
        if not is_template(field):
            continue
        try:
            split_template(field)
        except ValueError as error:
            example = f"{section}.{each}_field='{{instruction}}\\n{{input}}'"
            action = f"Write column names in braces, such as {example}; write {{{{ for a literal "
            action += "brace."
            yield RuleViolation(f"{section}.{each}_field", f"cannot be parsed: {error}.", action)


@_source_rule("chat", "chat_template", "bad_records")
def _chat(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "off":
        if source.chat_template:
            yield RuleViolation(
                f"{section}.chat_template",
                f"is ignored with {section}.chat=off.",
                f"Set {section}.chat=messages or {section}.chat=prompt, or leave "
                f"{section}.chat_template out.",
            )
        return
    if source.source in _WITHOUT_FIELDS:
        yield RuleViolation(
            f"{section}.chat",
            f"must be off with {section}.source={source.source}, whose documents have no fields.",
            f"Set {section}.source=jsonl and {section}.path to a file of conversations, or "
            f"{section}.chat=off.",
        )
    if source.bad_records == "skip":
        yield RuleViolation(
            f"{section}.bad_records",
            f"must be stop with {section}.chat: records without messages cannot be skipped.",
            f"Set {section}.bad_records=stop, and correct or remove the reported records.",
        )


@_source_rule("chat", "packing")
def _pairs_are_not_split(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "pairs" and source.packing == "cut":
        yield RuleViolation(
            f"{section}.packing",
            f"must not be cut with {section}.chat=pairs: a pair cannot be split across sequences.",
            f"Set {section}.packing=best_fit.",
        )


@_source_rule("chat", "chosen_field", "rejected_field")
def _pair_fields_differ(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "pairs" and source.chosen_field == source.rejected_field:
        key = f"{section}.rejected_field"
        rule = f"must differ from {section}.chosen_field: a pair consists of two responses."
        yield RuleViolation(key, rule, f"Set {key}=rejected.")


@_source_rule("chat_roles", "trained_roles")
def _roles(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    roles, trained = source.chat_roles, source.trained_roles
    key, known = f"{section}.trained_roles", f"{section}.chat_roles"
    if not trained:
        yield RuleViolation(
            key,
            "must not be empty: otherwise no token is trained.",
            f"Set {key}=[assistant].",
        )
    elif others := [role for role in trained if role not in roles]:
        yield RuleViolation(
            key,
            f"must be a subset of {known} ({', '.join(roles) or 'none'}): {others[0]} is missing.",
            f"Set {known}=[{', '.join([*roles, *others])}], or leave {others[0]} out.",
        )


@rule(*_SOURCES)
def _one_source_or_a_mixture(config: Config) -> Iterator[RuleViolation]:
    if config.data.mixture and paths_of(config.data):
        yield RuleViolation(
            "data.path" if config.data.path else "data.paths",
            "is ignored with data.mixture, which has the sources "
            f"{', '.join(sorted(config.data.mixture))}.",
            "Leave it out, or add it to the mixture under a new name: data.mixture.mine.path=...",
        )


@rule("data.packing", "data.mixture")
def _packing_is_set_per_source(config: Config) -> Iterator[RuleViolation]:
    data = config.data
    if data.mixture and data.packing != "auto":
        name = sorted(data.mixture)[0]
        yield RuleViolation(
            "data.packing",
            "is ignored with data.mixture, whose sources have separate packing keys.",
            f"Set data.mixture.{name}.packing={data.packing}, and the same key of each source.",
        )


@rule("data.mixture", is_first=True)
def _weights_or_epochs(config: Config) -> Iterator[RuleViolation]:
    found = config.data.mixture
    for name, each in found.items():
        for key, value, most in (
            ("weight", each.weight, LARGEST),
            ("epochs", each.epochs, _MOST_EPOCHS),
        ):
            if not 0 <= value <= most:
                full = f"data.mixture.{name}.{key}"
                yield RuleViolation(full, f"must be from 0 to {most:.2g}.", f"Set {full}=1.")
    with_weight = [name for name, each in found.items() if each.weight]
    with_epochs = [name for name, each in found.items() if each.epochs]
    if with_weight and with_epochs:
        yield RuleViolation(
            f"data.mixture.{with_epochs[0]}.epochs",
            f"cannot be combined with data.mixture.{with_weight[0]}.weight: weights or epochs "
            "define the shares, not both.",
            "Set the weight of all sources, or the epochs of all sources.",
        )
    elif with_epochs and (without := [name for name in found if name not in with_epochs]):
        yield RuleViolation(
            f"data.mixture.{without[0]}.epochs",
            "must be more than 0 if other sources have epochs.",
            f"Set data.mixture.{without[0]}.epochs=1, or leave the source out.",
        )


@rule("data.mixture", "data.mixture_stages", "data.mixture_temperature")
def _stages_are_of_the_mixture(config: Config) -> Iterator[RuleViolation]:
    data, key = config.data, "data.mixture_stages"
    if not data.mixture:
        if data.mixture_stages:
            yield RuleViolation(key, "requires data.mixture.", f"Set {key}=[].")
        if data.mixture_temperature != 1:
            key = "data.mixture_temperature"
            yield RuleViolation(key, "requires data.mixture.", f"Set {key}=1.")
        return
    name = sorted(data.mixture)[0]
    known = ", ".join(sorted(data.mixture))
    for number, stage in enumerate(data.mixture_stages):
        for other in (name for name in stage.weights if name not in data.mixture):
            guess = did_you_mean(other, data.mixture)
            action = f"Did you mean {guess}?" if guess else f"Write `{name}: 1`."
            rule = f"is not the weight of a source in data.mixture ({known})."
            yield RuleViolation(f"{key}[{number}].weights.{other}", rule, action)


@rule(*_SOURCES, "data.validation", "data.validation_fraction", "eval.batches")
def _validation_has_documents(config: Config) -> Iterator[RuleViolation]:
    data, batches = config.data, config.eval.batches
    if data.validation and not batches:
        yield RuleViolation(
            "eval.batches",
            f"must be more than 0 with data.validation ({', '.join(data.validation)}): otherwise "
            "nothing is evaluated.",
            "Set eval.batches=8, or leave data.validation out.",
        )
        return
    has_documents = data.validation_fraction or data.validation or is_synthetic(data)
    if batches and not has_documents:
        yield RuleViolation(
            "data.validation_fraction",
            f"must be more than 0 if eval.batches is {batches}: evaluation uses documents that are "
            "not trained.",
            "Set data.validation_fraction=0.05, or eval.batches=0, or add a validation set to "
            "data.validation.",
        )


@rule("data.validation")
def _validation_names_are_unreserved(config: Config) -> Iterator[RuleViolation]:
    for name in SPLITS:
        if name in config.data.validation:
            yield RuleViolation(
                f"data.validation.{name}",
                f"must have another name: {', '.join(SPLITS)} are reserved for splits of the "
                "training documents.",
                f"Rename it, for example to data.validation.{name}_set.",
            )


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
            "is ignored with tokenizer.kind=bytes: the run would train on bytes.",
            "Set tokenizer.kind=auto, which detects the format of the file, or tokenizer.path=''.",
        )
    elif kind != "bytes" and not path:
        yield RuleViolation(
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
"""Maps keys that apply only to `tiktoken` files to the values that disable them."""


@rule("tokenizer.kind", *_TIKTOKEN)
def _tiktoken_keys_are_consistent(config: Config) -> Iterator[RuleViolation]:
    kind = config.tokenizer.kind
    given = [key for key in _TIKTOKEN if value_of(config, key) not in ("none", "", [])]
    if given and kind not in ("tiktoken", "auto"):
        yield RuleViolation(
            given[0],
            f"requires tokenizer.kind=tiktoken, but tokenizer.kind is {kind}.",
            f"Set {given[0]}={_TIKTOKEN[given[0]]}, or tokenizer.kind=tiktoken.",
        )
    elif len(given) > 1 and given[0] == "tokenizer.preset":
        yield RuleViolation(
            given[1],
            f"cannot be combined with tokenizer.preset={config.tokenizer.preset}, which sets it.",
            f"Set {given[1]}={_TIKTOKEN[given[1]]}, or tokenizer.preset=none.",
        )
    elif kind == "tiktoken" and not given:
        yield RuleViolation(
            "tokenizer.preset",
            "must be set with tokenizer.kind=tiktoken: the file does not define how text is split.",
            "Set tokenizer.preset=llama3, another preset, or tokenizer.split_pattern and "
            "tokenizer.special_tokens.",
        )
    elif given == ["tokenizer.special_tokens"]:
        yield RuleViolation(
            "tokenizer.split_pattern",
            "must not be empty with tokenizer.special_tokens: it defines how text is split.",
            "Set tokenizer.split_pattern='\\s+|\\S+' (use the pattern of your vocabulary), or "
            "replace both keys by a tokenizer.preset.",
        )


@rule("tokenizer.special_tokens")
def _special_tokens_are_texts(config: Config) -> Iterator[RuleViolation]:
    special = config.tokenizer.special_tokens
    if len(set(special)) != len(special) or "" in special:
        yield RuleViolation(
            "tokenizer.special_tokens",
            "must be unique texts that are not empty: their order defines their ids.",
            f"Set tokenizer.special_tokens=[{','.join(filter(None, dict.fromkeys(special)))}], or "
            "use names such as <|reserved_1|> for unused ids.",
        )
