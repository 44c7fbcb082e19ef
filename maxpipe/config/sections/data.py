"""Config section `data`: document sources, mixtures, validation sets and packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from maxpipe.config.foreign_keys import list_action
from maxpipe.config.rules import (
    add_item_rules,
    add_nonempty_rule,
    add_ranges,
    axis_keys,
    axis_size,
    did_you_mean,
    rule,
    upgrade_mixture_stages,
)
from maxpipe.config.sections.model import MODEL_KEYS
from maxpipe.config.sections.source import (
    COLUMNS,
    FILES,
    ONE_PATH,
    SourceConfig,
    has_columns,
    is_template,
    paths_of,
    split_template,
)
from maxpipe.config.sections.train import BatchRamp
from maxpipe.errors import Code, ConfigError, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound
from maxpipe.models.registry import describe

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSourceConfig(SourceConfig):
    """Document source in `data.mixture`, with a share of the training sequences."""

    weight: float = 0.0
    """Sampling weight of this source. The source's share of the training sequences is its weight
    divided by the sum of all weights. If no source has a weight or epochs, shares are proportional
    to source size."""
    epochs: float = 0.0
    """Number of passes over this source, relative to the passes over the other sources. `epochs`
    replaces `weight`, and must be set for all sources or for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureStageConfig:
    """Stage of a run that uses different mixture weights. Set either `steps` or `tokens`."""

    weights: dict[str, float]
    """Mixture weights, keyed by source name. Sources that are not listed have weight 0."""
    steps: int | None = None
    """Length of the stage in steps."""
    tokens: int | None = None
    """Length of the stage in tokens, rounded up to complete batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(SourceConfig):
    """Training and validation documents, mixtures, and settings of the data loader."""

    mixture: dict[str, MixedSourceConfig] = dataclasses.field(default_factory=dict)
    """Named sources that replace `data.source`, such as `data.mixture.web.path=web/*.txt`. Each
    sequence contains documents of only one source. On resume, the weights may differ from those in
    the checkpoint, but the sources must be the same."""
    mixture_temperature: float = 1.0
    """Sampling temperature of the mixture. Weights are raised to the power 1 / temperature, so
    temperatures above 1 make the shares more uniform."""
    mixture_stages: list[MixtureStageConfig] = dataclasses.field(
        default_factory=list, metadata=renamed_from(values=upgrade_mixture_stages)
    )
    """Stages at the start of the run that use different mixture weights, such as `[{weights: {web:
    0.9, code: 0.1}, steps: 1000}]`. A source that a stage does not list has weight 0 in that stage.
    After the last stage, the weights in `data.mixture` apply."""
    end: Literal["repeat", "stop", "fail"] = "repeat"
    """Behavior when the run needs more documents than the sources contain. `repeat` reads the
    documents again in a new order, as often as necessary. `stop` ends the run after a final
    evaluation and checkpoint. `fail` rejects such a run before training starts. A mixture source is
    exhausted after its `epochs`, or after one pass if `epochs` is not set. With `stop`, the share
    of an exhausted source is divided among the remaining sources, until all sources are
    exhausted."""
    max_pairs_per_sequence: int = dataclasses.field(
        default=16, metadata=renamed_from("pairs_per_row")
    )
    """Maximum number of preference pairs per sequence. This limit also determines the maximum
    number of pairs in a batch. If pairs are shorter than `train.sequence_length` divided by this
    number, sequences are padded. Ignored unless `data.chat=pairs`."""
    max_images_per_sequence: int = 0
    """Maximum number of images per sequence. Every batch reserves memory for this many images per
    sequence, and the vision tower processes all of them. 0 means that records have no images.
    Requires a model with a vision tower, such as `model.gemma3.num_vision_layers` above 0."""
    validation_fraction: float = 0.05
    """Fraction of the documents that is held out for evaluation. Held-out documents are selected at
    random, seeded by `run.seed`."""
    validation: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    """Additional validation sets, keyed by name, such as `data.validation.code.path=code/*.py`.
    Each set has a separate loss metric, such as `eval/code/loss`. `eval/loss` is the loss on the
    documents of `data.validation_fraction`, or on all sets together if that fraction is 0."""
    validation_overlap: Literal["warn", "stop", "ignore"] = "warn"
    """Handling of validation documents whose text also occurs in the training documents. Such
    overlap makes the validation loss misleadingly low. `warn` prints a warning, `stop` ends the
    run, and `ignore` disables the check. Documents are compared by a digest of their full text.
    With more than a million prepared documents, the check runs only with `stop`, because it must
    read every digest."""
    allow_change: bool = False
    """Allow a run to resume if the documents, seed, packing or tokenizer have changed since the
    checkpoint was saved. Samples may then be repeated or skipped."""
    prefetch_batches: int = 4
    """Number of batches that the data loader prepares in advance."""
    threads: int = 2
    """Number of threads that read and pack documents."""


add_ranges(
    Bound(
        "data.mixture_temperature",
        1.0,
        0,
        LARGEST,
        "1 uses the weights unchanged",
        low_is_inside=False,
    ),
    Bound("data.validation_fraction", 0.05, 0, 0.5),
    Bound(
        "data.max_pairs_per_sequence", 16, 1, 4096, "every batch reserves space for this many pairs"
    ),
    Bound("data.max_images_per_sequence", 4, 0, 1024, "every batch reserves space for the images"),
    Bound("data.prefetch_batches", 4, 1),
    Bound("data.threads", 2, 1, 1024, "all threads run in this process"),
    Bound("data.mixture_stages[].weights", 1, 0, LARGEST),
    Bound("data.mixture_stages[].steps", 1000, 1, 10**18),
    Bound("data.mixture_stages[].tokens", 1000000, 1, 10**18),
    Bound("data.mixture.NAME.weight", 1.0, 0, LARGEST),
    Bound("data.mixture.NAME.epochs", 1.0, 0, 10**9, "sample indices must fit in 63 bits"),
)
for _section in ("data", "data.mixture.NAME", "data.validation.NAME"):
    add_ranges(
        Bound(f"{_section}.max_bad_records", 100, 1),
        Bound(f"{_section}.max_decompressed_bytes", 2**36, 1),
    )
add_item_rules(
    "data.mixture_stages",
    "[{weights: {web: 0.9, code: 0.1}, steps: 1000}]",
    one_of=("steps", "tokens"),
)


@rule("data.prompt_field", "data.chat")
def _prompt_field_is_named(config: Config) -> Iterator[RuleViolation]:
    # With data.chat=pairs, each response may be a full conversation, including the prompt.
    if not config.data.prompt_field and config.data.chat != "pairs":
        yield RuleViolation(
            Code.CFG_MISSING,
            "data.prompt_field",
            "must not be empty.",
            "Set data.prompt_field=prompt.",
        )


_SOURCES = ("data.source", "data.path", "data.paths", "data.mixture")


_NAMED = ("data.mixture", "data.validation")


_JOINED = ("system", "prompt", "response", "chosen", "rejected")
"""Prefixes of the `data.*_field` keys that accept a template."""


_WITHOUT_FIELDS = ("corpus", "text", "tokens", "megatron", "synthetic")


_Find = Callable[[str, SourceConfig], Iterator[RuleViolation]]


def named_sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (section, source) for each source, where section is e.g. `data.mixture.web`."""
    for name, source in all_sources(config.data).items():
        yield section_of(name), source


def _source_rule(*keys: str) -> Callable[[_Find], None]:
    """Register a config rule that is checked for each source and reads these keys."""

    def register(find: _Find) -> None:
        @rule("data.source", *_NAMED, *(f"data.{key}" for key in keys))
        def _(config: Config) -> Iterator[RuleViolation]:
            for section, source in named_sources(config):
                yield from find(section, source)

    return register


@_source_rule("path", "paths")
def _paths(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    kind, path = source.source, source.path
    if kind in (*FILES, *ONE_PATH) and not paths_of(source):
        examples = {"tfds": "c4/en:3.1.0", "text": "data/*.txt", "huggingface": "saved"}
        examples |= {"tokens": "data/tokens", "megatron": "data/*.idx"}
        yield RuleViolation(
            Code.DATA_MISSING,
            f"{section}.path",
            f"must not be empty with {section}.source={kind}.",
            f"Set {section}.path={examples.get(kind, f'data/*.{kind}')} (your own path), or "
            f"{section}.source=corpus.",
        )
    if path.startswith("[") and path.endswith("]") and "," in path:
        yield RuleViolation(
            Code.CFG_TYPE,
            f"{section}.path",
            "must be a single path, not a list.",
            list_action("data.path").replace("data.path", f"{section}.path"),
        )
    if source.paths and path:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            f"{section}.paths",
            f"must be empty if {section}.path ({path}) is set.",
            f"Add that path to {section}.paths, and leave {section}.path out.",
        )
    if source.paths and kind in ONE_PATH:
        yield RuleViolation(
            Code.CFG_IGNORED,
            f"{section}.paths",
            f"is ignored with {section}.source={kind}, which accepts only one path.",
            f"Set {section}.path to that path.",
        )


@_source_rule("template")
def _template(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    key = f"{section}.template"
    if not source.template:
        return
    if not has_columns(source.source):
        yield RuleViolation(
            Code.CFG_IGNORED,
            key,
            f"is ignored with {section}.source={source.source}, whose documents have no columns.",
            f"Leave {key} out, or set {section}.source to one of {', '.join(COLUMNS)}.",
        )
    example = f"Write column names in braces, such as {key}='{{title}}: {{text}}'"
    try:
        pieces = split_template(source.template)
    except ValueError as error:
        action = f"{example}; write {{{{ for a literal brace."
        yield RuleViolation(Code.DATA_FIELDS, key, f"cannot be parsed: {error}.", action)
        return
    if len(pieces) == 1:
        rule = "must contain a column name: otherwise all documents are identical."
        yield RuleViolation(Code.DATA_FIELDS, key, rule, f"{example}.")


@_source_rule(*(f"{prefix}_field" for prefix in _JOINED))
def _field_templates(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    for prefix in _JOINED:
        field = getattr(source, f"{prefix}_field")
        if not is_template(field):
            continue
        try:
            split_template(field)
        except ValueError as error:
            example = f"{section}.{prefix}_field='{{instruction}}\\n{{input}}'"
            action = f"Write column names in braces, such as {example}; write {{{{ for a literal "
            action += "brace."
            yield RuleViolation(
                Code.DATA_FIELDS, f"{section}.{prefix}_field", f"cannot be parsed: {error}.", action
            )


@_source_rule("chat", "chat_template", "bad_records")
def _chat(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "off":
        if source.chat_template:
            yield RuleViolation(
                Code.CFG_IGNORED,
                f"{section}.chat_template",
                f"is ignored with {section}.chat=off.",
                f"Set {section}.chat=messages or {section}.chat=prompt, or leave "
                f"{section}.chat_template out.",
            )
        return
    if source.source in _WITHOUT_FIELDS:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            f"{section}.chat",
            f"must be off with {section}.source={source.source}, whose documents have no fields.",
            f"Set {section}.source=jsonl and {section}.path to a file of conversations, or "
            f"{section}.chat=off.",
        )
    if source.bad_records == "skip":
        yield RuleViolation(
            Code.CFG_CONFLICT,
            f"{section}.bad_records",
            f"must be stop if {section}.chat is set: records without messages cannot be skipped.",
            f"Set {section}.bad_records=stop, and correct or remove the reported records.",
        )


@_source_rule("chat", "packing")
def _pairs_are_not_split(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "pairs" and source.packing == "concatenate":
        yield RuleViolation(
            Code.CFG_CONFLICT,
            f"{section}.packing",
            f"must not be concatenate with {section}.chat=pairs: pairs cannot be split across "
            "sequences.",
            f"Set {section}.packing=best_fit.",
        )


@_source_rule("chat", "chosen_field", "rejected_field")
def _pair_fields_differ(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    if source.chat == "pairs" and source.chosen_field == source.rejected_field:
        key = f"{section}.rejected_field"
        rule = f"must differ from {section}.chosen_field: a pair consists of two responses."
        yield RuleViolation(Code.DATA_FIELDS, key, rule, f"Set {key}=rejected.")


@_source_rule("chat_roles", "trained_roles")
def _roles(section: str, source: SourceConfig) -> Iterator[RuleViolation]:
    roles, trained = source.chat_roles, source.trained_roles
    key, known = f"{section}.trained_roles", f"{section}.chat_roles"
    if not trained:
        yield RuleViolation(
            Code.DATA_FIELDS,
            key,
            "must not be empty: otherwise no token contributes to the loss.",
            f"Set {key}=[assistant].",
        )
    elif others := [role for role in trained if role not in roles]:
        yield RuleViolation(
            Code.DATA_FIELDS,
            key,
            f"must be a subset of {known} ({', '.join(roles) or 'none'}): {others[0]} is missing.",
            f"Set {known}=[{', '.join([*roles, *others])}], or leave {others[0]} out.",
        )


@rule(*_SOURCES)
def _one_source_or_a_mixture(config: Config) -> Iterator[RuleViolation]:
    if config.data.mixture and paths_of(config.data):
        yield RuleViolation(
            Code.CFG_IGNORED,
            "data.path" if config.data.path else "data.paths",
            "is ignored if data.mixture is set, which defines the sources "
            f"{', '.join(sorted(config.data.mixture))}.",
            "Leave it out, or add it to the mixture under a new name: data.mixture.mine.path=...",
        )


@rule("data.packing", "data.mixture")
def _packing_is_set_per_source(config: Config) -> Iterator[RuleViolation]:
    data = config.data
    if data.mixture and data.packing != "auto":
        name = sorted(data.mixture)[0]
        yield RuleViolation(
            Code.CFG_IGNORED,
            "data.packing",
            "is ignored if data.mixture is set: each source has its own packing key.",
            f"Set data.mixture.{name}.packing={data.packing}, and the same key of every other "
            "source.",
        )


@rule("data.mixture", is_first=True)
def _weights_or_epochs(config: Config) -> Iterator[RuleViolation]:
    mixture = config.data.mixture
    with_weight = [name for name, source in mixture.items() if source.weight]
    with_epochs = [name for name, source in mixture.items() if source.epochs]
    if with_weight and with_epochs:
        yield RuleViolation(
            Code.DATA_MIXTURE,
            f"data.mixture.{with_epochs[0]}.epochs",
            f"cannot be combined with data.mixture.{with_weight[0]}.weight: shares are "
            "defined by either weights or epochs.",
            "Set the weight of all sources, or the epochs of all sources.",
        )
    elif with_epochs and (without := [name for name in mixture if name not in with_epochs]):
        yield RuleViolation(
            Code.DATA_MIXTURE,
            f"data.mixture.{without[0]}.epochs",
            "must be more than 0 if another source has epochs.",
            f"Set data.mixture.{without[0]}.epochs=1, or leave the source out.",
        )


@rule("data.mixture", "data.mixture_stages", "data.mixture_temperature")
def _stages_are_of_the_mixture(config: Config) -> Iterator[RuleViolation]:
    data, key = config.data, "data.mixture_stages"
    if not data.mixture:
        if data.mixture_stages:
            yield RuleViolation(Code.DATA_MIXTURE, key, "requires data.mixture.", f"Set {key}=[].")
        if data.mixture_temperature != 1:
            key = "data.mixture_temperature"
            yield RuleViolation(Code.DATA_MIXTURE, key, "requires data.mixture.", f"Set {key}=1.")
        return
    name = sorted(data.mixture)[0]
    known = ", ".join(sorted(data.mixture))
    for number, stage in enumerate(data.mixture_stages):
        for other in (name for name in stage.weights if name not in data.mixture):
            guess = did_you_mean(other, data.mixture)
            action = f"Did you mean {guess}?" if guess else f"Write `{name}: 1`."
            rule = f"does not match a source in data.mixture ({known})."
            yield RuleViolation(Code.DATA_MIXTURE, f"{key}[{number}].weights.{other}", rule, action)


@rule(*_SOURCES, "data.validation", "data.validation_fraction", "eval.batches")
def _validation_has_documents(config: Config) -> Iterator[RuleViolation]:
    data, batches = config.data, config.eval.batches
    if data.validation and not batches:
        yield RuleViolation(
            Code.DATA_VALIDATION,
            "eval.batches",
            f"must be more than 0 if data.validation is set ({', '.join(data.validation)}): "
            "otherwise nothing is evaluated.",
            "Set eval.batches=8, or leave data.validation out.",
        )
        return
    has_documents = data.validation_fraction or data.validation or is_synthetic(data)
    if batches and not has_documents:
        yield RuleViolation(
            Code.DATA_VALIDATION,
            "data.validation_fraction",
            f"must be more than 0 if eval.batches is {batches}: evaluation uses documents that are "
            "not trained on.",
            "Set data.validation_fraction=0.05, or eval.batches=0, or add a validation set to "
            "data.validation.",
        )


@rule("data.validation")
def _validation_names_are_unreserved(config: Config) -> Iterator[RuleViolation]:
    for name in SPLITS:
        if name in config.data.validation:
            yield RuleViolation(
                Code.DATA_VALIDATION,
                f"data.validation.{name}",
                f"must have a different name: {', '.join(SPLITS)} are reserved for splits of the "
                "training documents.",
                f"Rename it, for example to data.validation.{name}_set.",
            )


def stage_ends(
    stages: Sequence[MixtureStageConfig], ramp: BatchRamp, sequence_length: int
) -> list[int]:
    """Return the cumulative number of sequences at the end of each stage. Each stage ends with a
    complete batch.
    """
    batch, edges = 0, []
    for stage in stages:
        if stage.steps is not None:
            batch += stage.steps
        else:
            sequences = -(-(stage.tokens or 0) // sequence_length)
            batch = ramp.num_batches(ramp.sequences_before(batch) + sequences)
        edges.append(ramp.sequences_before(batch))
    return edges


def train_sources(data: DataConfig) -> Mapping[str, SourceConfig]:
    """Return the training sources, keyed by name and sorted by name.

    Without a mixture, section `data` is the only source, and its name is the empty string.
    """
    return {name: data.mixture[name] for name in sorted(data.mixture)} or {"": data}


def mixture_shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return each source's fraction of the training sequences. Weights are raised to the power 1 /
    temperature and normalized.
    """
    largest = max(weights.values())
    flat = {
        name: (weight / largest) ** (1 / temperature) if weight else 0.0
        for name, weight in weights.items()
    }
    total = sum(flat.values())
    return {name: weight / total for name, weight in flat.items()}


SPLITS = ("validation", "train", "all")
"""Document splits that can be selected with `--split`."""


_VALIDATION = "validation."


def validation_sets(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the sources in `data.validation`, keyed by `validation.NAME`. These keys cannot
    collide with mixture sources, whose names contain no dots.
    """
    return {validation_key(name): data.validation[name] for name in sorted(data.validation)}


def validation_key(name: str) -> str:
    """Return the key of a validation set in `all_sources`."""
    return f"{_VALIDATION}{name}"


def all_sources(data: DataConfig) -> dict[str, SourceConfig]:
    """Return all sources for training and evaluation, keyed by name."""
    return {**train_sources(data), **validation_sets(data)}


def check_split(name: str, known: Sequence[str]) -> None:
    """Raise ConfigError if `--split` names a split that does not exist."""
    if name not in known:
        action = f"Write --split {did_you_mean(name, known) or known[0]}."
        rule = f"must be one of {', '.join(known)}."
        raise ConfigError.one(Code.CLI_VALUE, "command line: --split", name, rule, action)


def is_synthetic(data: DataConfig) -> bool:
    """Return True if all training sources are synthetic."""
    return all(source.source == "synthetic" for source in train_sources(data).values())


def section_of(name: str) -> str:
    """Return the config section of the source with this name."""
    if not name:
        return "data"
    return f"data.{name}" if name.startswith(_VALIDATION) else f"data.mixture.{name}"


for _key in ("text_field", "messages_field", "response_field"):
    add_nonempty_rule(f"data.{_key}")


_IMAGES = "data.max_images_per_sequence"


@rule(_IMAGES, *MODEL_KEYS)
def _images_have_a_tower(config: Config) -> Iterator[RuleViolation]:
    if config.data.max_images_per_sequence and describe(config.model).ends.vision is None:
        yield RuleViolation(
            Code.MODEL_IMAGES,
            _IMAGES,
            "requires a model with a vision tower.",
            f"Set {_IMAGES}=0, or use a model with images, such as gemma3-4b-images.",
        )


@rule(_IMAGES, "train.objective", *axis_keys("context"))
def _settings_support_images(config: Config) -> Iterator[RuleViolation]:
    if not config.data.max_images_per_sequence:
        return
    objectives = ("pretrain", "sft")
    if config.train.objective not in objectives:
        yield RuleViolation(
            Code.MODEL_IMAGES,
            "train.objective",
            f"must be {' or '.join(objectives)} if {_IMAGES} is above 0.",
            f"Set {_IMAGES}=0, or train.objective=sft.",
        )
    if (axis_size(config.mesh, "context") or 1) > 1:
        yield RuleViolation(
            Code.MODEL_IMAGES,
            "mesh.ici_context",
            f"must be 1 if {_IMAGES} is above 0: images are not divided over the context axis.",
            f"Set mesh.ici_context=1 and mesh.dcn_context=1, or {_IMAGES}=0.",
        )


@rule(_IMAGES, "data.source", "data.chat", "data.packing", "data.long_conversations", *_NAMED)
def _images_are_not_split(config: Config) -> Iterator[RuleViolation]:
    for section, source in named_sources(config) if config.data.max_images_per_sequence else ():
        if source.chat not in ("messages", "prompt"):
            continue
        if source.packing == "concatenate":
            yield RuleViolation(
                Code.MODEL_IMAGES,
                f"{section}.packing",
                f"must not be concatenate if {_IMAGES} is above 0: images cannot be split across "
                "sequences.",
                f"Set {section}.packing=best_fit.",
            )
        if source.long_conversations not in ("drop", "error"):
            yield RuleViolation(
                Code.MODEL_IMAGES,
                f"{section}.long_conversations",
                f"must be drop or error if {_IMAGES} is above 0: images cannot be cut.",
                f"Set {section}.long_conversations=drop.",
            )
