"""Rules between config values that can be checked without devices.

Each rule is a range in `rules.py` or a small function. `check` runs all rules and reports every
violation. A rule lists the keys that it reads, and is skipped if one of these keys is already known
to be invalid. Rules that depend on the machine, such as on the number of devices, are checked when
the mesh is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping

# Imported to register their rules.
import maxpipe.config.data_rules
import maxpipe.config.eval_rules
import maxpipe.config.item_rules
import maxpipe.config.model_rules
import maxpipe.config.pipeline_rules
import maxpipe.config.posttrain_rules  # noqa: F401
from maxpipe.config import training_schedule
from maxpipe.config.item_reader import EXAMPLES
from maxpipe.config.keys import FAMILY, ITEM, KEYS, family_section
from maxpipe.config.mesh_rules import replication_warnings
from maxpipe.config.rules import BOUNDS, RULES, Bound, folder_name, format_value, rule, value_of
from maxpipe.config.schema import Config, TrainConfig
from maxpipe.config.training_schedule import BatchRamp, resolve_phases
from maxpipe.errors import Problem, RuleViolation
from maxpipe.io import redact
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import format_divisors, pluralize, round_up
from maxpipe.models.layers.attention import Attention
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import FAMILIES, describe

DEFAULT = "default"
"""Origin of a value that no file or override sets."""


def is_override(argument: str) -> bool:
    """Whether a command-line argument is `section.key=value` rather than a path."""
    return "=" in argument.partition("/")[0]


def error_location(key: str, origins: Mapping[str, str]) -> str:
    """Return the beginning of an error message: the key, and the file or option that sets it."""
    origin = origins.get(key) or origins.get(key.partition("[")[0])
    origin = origin or origins.get(key.rpartition(".")[0], DEFAULT)
    return f"{'command line' if is_override(origin) else origin}: {key}"


def total_steps(train: TrainConfig) -> int:
    """Return the number of optimizer steps in the run."""
    return train.steps or BatchRamp.from_config(train).num_batches(
        -(-train.tokens // train.sequence_length)
    )


def check(config: Config, origins: Mapping[str, str], skip: Collection[str] = ()) -> list[Problem]:
    """Return all rule violations. Rules that read a key in `skip` are not run."""
    wrong = set(skip)
    problems: list[Problem] = []
    # Rules for a single key run first. If one of them fails, rules that relate the key to other
    # keys are skipped.
    for each in sorted(RULES, key=lambda each: (len(each.keys) > 1, not each.is_first)):
        if not wrong.isdisjoint(each.keys):
            continue
        findings = list(each.find(config))
        if findings and len(each.keys) == 1:
            wrong.update(each.keys)
        elif each.is_first:
            wrong.update(key for key, *_ in findings)
        for key, text, action in findings:
            value = value_of(config, key)
            given = format_value(
                redact.redact_variable_names(value) if key == "launch.environment" else value
            )
            problems.append(Problem(error_location(key, origins), given, text, action))
    return problems


def find_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about settings that are allowed but likely to be mistakes."""
    warmup, steps = config.optim.warmup_steps, total_steps(config.train)
    if warmup >= steps > 0:
        yield Problem(
            "optim.warmup_steps",
            str(warmup),
            f"must be less than the {pluralize(steps, 'step')} of the run: otherwise the learning "
            "rate never reaches its peak.",
            f"Set optim.warmup_steps={steps // 10}, or increase train.steps.",
        )
    yield from _phases_beyond_the_run(config)
    yield from _decays_past_zero(config)
    yield from _updates_too_small(config)
    yield from _rate_is_large(config)
    yield from replication_warnings(config)


def _phases_beyond_the_run(config: Config) -> Iterator[Problem]:
    phases, steps, end, late = config.optim.lr_phases, total_steps(config.train), 0, 0
    for phase in resolve_phases(phases, steps):
        late += end >= steps
        end += phase.steps
    if late and steps:
        yield Problem(
            "optim.lr_phases",
            format_value(phases),
            f"has {pluralize(end, 'step')}, but the run has {steps}: it ends before the last "
            f"{pluralize(late, 'phase')}.",
            "Shorten the earlier phases, for example with `percent` in place of `steps`.",
        )


def _decays_past_zero(config: Config) -> Iterator[Problem]:
    optim = config.optim
    decays = [("weight_decay", optim.weight_decay)]
    decays += [("weight_decays", item.weight_decay) for item in optim.weight_decays]
    key, decay = max(decays, key=operator.itemgetter(1))
    rates = [1.0, *(item.multiplier for item in optim.lr_multipliers)]
    if (taken := optim.learning_rate * max(rates) * decay) > 1:
        yield Problem(
            f"optim.{key}",
            f"{decay:g}",
            f"subtracts {taken:.3g} times a parameter from itself in each step, with "
            f"optim.learning_rate = {optim.learning_rate:g}: the factor must be at most 1.",
            f"Set a weight decay of 0.1, or leave optim.{key} out.",
        )


_LARGEST_RATE = 1.0
"""Learning rate from which a warning is printed. Usual learning rates of these optimizers are at
most about 0.02."""


def _rate_is_large(config: Config) -> Iterator[Problem]:
    if (rate := config.optim.learning_rate) >= _LARGEST_RATE:
        yield Problem(
            "optim.learning_rate",
            f"{rate:g}",
            "changes each parameter by about this amount in one step: the loss will diverge.",
            "Set optim.learning_rate=3e-4.",
        )


def _updates_too_small(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.learning_rate < 1e-10:  # updates are about this large, and parameters about 0.01
        yield Problem(
            "optim.learning_rate",
            f"{optim.learning_rate:g}",
            "is too small: float32 rounding removes all updates, and parameters do not change.",
            "Set optim.learning_rate=3e-4.",
        )
    # The gradient norm covers more entries than the embedding table has.
    entry = (optim.clip_norm or 1.0) / math.sqrt(config.model.vocab_size * config.model.d_model)
    if entry < optim.epsilon and optim.name in ("adamw", "muon"):
        yield Problem(
            "optim.epsilon",
            f"{optim.epsilon:g}",
            f"is larger than a typical entry of the gradient ({entry:.1g} with optim.clip_norm = "
            f"{optim.clip_norm:g}): parameters hardly change.",
            "Set optim.epsilon=1e-8 and optim.clip_norm=1.0.",
        )


# Rules for single values.

_LENGTH = (
    "train.steps",
    "train.tokens",
    "train.batch_size",
    "train.batch_ramp",
    "train.sequence_length",
)
"""Keys that determine `total_steps`."""


_ROUNDS_TO_ONE = 1 - 2.0**-25
"""Smallest value that is rounded to 1 in float32."""


@rule(*_LENGTH)
def _ramp_grows_and_ends(config: Config) -> Iterator[RuleViolation]:
    found, steps = BatchRamp.from_config(config.train), total_steps(config.train)
    if wrong := training_schedule.check_order(found):
        yield RuleViolation(
            "train.batch_ramp", wrong, "Set train.batch_ramp=[] for batches of one size."
        )
    elif found.stages and found.steps >= steps > 0:
        yield RuleViolation(
            "train.batch_ramp",
            f"has {pluralize(found.steps, 'step')}, but the run has {steps}: no batch reaches "
            f"train.batch_size ({found.batch_size}).",
            f"Set train.steps={2 * found.steps}, or shorten the stages of train.batch_ramp.",
        )


@rule("train.batch_ramp", "runtime.compiled_step")
def _ramp_needs_no_executable(config: Config) -> Iterator[RuleViolation]:
    if config.train.batch_ramp and config.runtime.compiled_step:
        yield RuleViolation(
            "runtime.compiled_step",
            "contains one train step, but train.batch_ramp needs one for each batch size.",
            "Set runtime.compiled_step='' to compile the steps in this run, or "
            "train.batch_ramp=[].",
        )


@rule("optim.name", "optim.beta1", "optim.beta2", "optim.epsilon")
def _moments_can_be_computed(config: Config) -> Iterator[RuleViolation]:
    optim = config.optim
    if optim.name not in ("adamw", "muon"):
        return
    # Moments start at 0 and are divided by 1 - beta^updates. No single device can check whether
    # Muon's update is finite, so the bound on beta must guarantee that it is.
    limit, shown = (
        (1 - 1e-6, "0.999999")
        if optim.name == "muon"
        else (_ROUNDS_TO_ONE, f"{_ROUNDS_TO_ONE:.8f}")
    )
    if optim.name == "muon" and optim.epsilon <= 1e-30:
        rule = (
            "must be more than 1e-30 with optim.name=muon: float32 arithmetic may lose smaller "
            "values."
        )
        yield RuleViolation("optim.epsilon", rule, "Set optim.epsilon=1e-8.")
    for field, usual in (("beta1", 0.9), ("beta2", 0.95)):
        if getattr(optim, field) >= limit:
            rule = f"must be less than {shown} with optim.name={optim.name}: float32 may round it"
            yield RuleViolation(f"optim.{field}", f"{rule} to 1.", f"Set optim.{field}={usual}.")


@rule("optim.lr_phases", "optim.warmup_steps", *_LENGTH)
def _phases_replace_the_warmup(config: Config) -> Iterator[RuleViolation]:
    steps, warmup = total_steps(config.train), config.optim.warmup_steps
    phases = resolve_phases(config.optim.lr_phases, steps)
    if phases and warmup:
        yield RuleViolation(
            "optim.warmup_steps",
            "must be 0 with optim.lr_phases, which include the warm-up.",
            "Set optim.warmup_steps=0, and write the first phase as "
            f"`{{steps: {warmup}, shape: linear, from: 0, to: 1}}`.",
        )
    if phases and steps and all(phase.start == phase.end == 0 for phase in phases if phase.steps):
        yield RuleViolation(
            "optim.lr_phases",
            "must have a learning rate above 0 in some phase: otherwise nothing is learned.",
            f'Set "optim.lr_phases={EXAMPLES["optim.lr_phases"]}".',
        )


def _add_range_rule(bound: Bound) -> None:
    @rule(bound.key)
    def find(config: Config) -> Iterator[RuleViolation]:
        if not bound.holds(value_of(config, bound.key)):
            yield RuleViolation(
                bound.key, f"must be {bound}.", f"Set {bound.key}={format_value(bound.example)}."
            )


for _bound in BOUNDS.values():
    if ITEM not in _bound.key:
        _add_range_rule(_bound)


MAX_NAME = 200
"""Maximum length of a run name. File systems allow 255 characters, and names of other files contain
the run name."""


@rule("run.name")
def _name_is_a_folder(config: Config) -> Iterator[RuleViolation]:
    name = config.run.name
    if name in (".", "..") or not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}", name):
        yield RuleViolation(
            "run.name",
            f"must be a folder name of at most {MAX_NAME} letters, digits, `.`, `_` and `-`.",
            f"Set run.name={folder_name(name)}.",
        )


def _add_nonempty_rule(key: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        if not value_of(config, key):
            section, name = key.split(".")
            schema = {f.name: f.default for f in dataclasses.fields(getattr(config, section))}
            yield RuleViolation(key, "must not be empty.", f"Set {key}={schema[name]}.")


_add_nonempty_rule("run.dir")
for _key in ("text_field", "messages_field", "response_field"):
    _add_nonempty_rule(f"data.{_key}")


@rule("data.prompt_field", "data.chat")
def _prompt_field_is_named(config: Config) -> Iterator[RuleViolation]:
    # Both responses of a pair may be full conversations.
    if not config.data.prompt_field and config.data.chat != "pairs":
        yield RuleViolation(
            "data.prompt_field", "must not be empty.", "Set data.prompt_field=prompt."
        )


# Model.


@rule("model.num_heads", "model.num_kv_heads")
def _heads_share_kv_heads(config: Config) -> Iterator[RuleViolation]:
    heads, kv_heads = config.model.num_heads, config.model.num_kv_heads
    if heads % kv_heads:
        yield RuleViolation(
            "model.num_heads",
            f"must be a multiple of model.num_kv_heads ({kv_heads}): query heads share "
            "key/value heads evenly.",
            f"Set model.num_heads={round_up(heads, kv_heads)}, or model.num_kv_heads to "
            f"{format_divisors(heads)}.",
        )


@rule("model.head_dim")
def _head_size_is_even(config: Config) -> Iterator[RuleViolation]:
    size = config.model.head_dim
    if size % 2:
        yield RuleViolation(
            "model.head_dim",
            "must be even: rotary embedding rotates pairs of dimensions.",
            f"Set model.head_dim={size + 1}.",
        )


@rule(
    *("model.attention", "model.compute_dtype", "model.head_dim"),
    *("runtime.platform", "train.sequence_length"),
)
def _cudnn_runs_there(config: Config) -> Iterator[RuleViolation]:
    if config.model.attention != "cudnn":
        return
    if config.runtime.platform in ("cpu", "tpu"):
        yield RuleViolation(
            "model.attention",
            f"requires an NVIDIA GPU, but runtime.platform is {config.runtime.platform}.",
            "Set model.attention=xla.",
        )
    if config.model.compute_dtype == "float32":
        yield RuleViolation(
            "model.compute_dtype",
            "must be bfloat16 with model.attention=cudnn, which has no float32 kernel.",
            "Set model.compute_dtype=bfloat16, or model.attention=xla.",
        )
    if (tokens := config.train.sequence_length) % 2:
        yield RuleViolation(
            "train.sequence_length",
            "must be even with model.attention=cudnn, whose backward requires even lengths.",
            f"Set train.sequence_length={tokens + 1}, or model.attention=xla.",
        )
    if (size := config.model.head_dim) % 8 or size > 256:
        yield RuleViolation(
            "model.head_dim",
            "must be a multiple of 8 and at most 256 with model.attention=cudnn.",
            "Set model.attention=xla.",
        )


_MODEL_KEYS = tuple(key for key in KEYS if key.startswith("model."))


@rule(*_MODEL_KEYS, is_first=True)  # `describe` fails for configs that this rule rejects
def _family_rules(config: Config) -> Iterator[RuleViolation]:
    yield from FAMILIES[config.model.family].rules(config.model)


@rule(*_MODEL_KEYS)
def _attention_backend_supports_model(config: Config) -> Iterator[RuleViolation]:
    section = family_section(config.model.family)
    parts = [
        part for kind in describe(config.model).layer_types.values() for part in kind.parts.values()
    ]
    mixing = [part for part in parts if isinstance(part, Attention | LatentAttention)]
    options = {option for part in mixing for option in part.unsupported}
    for option in sorted(options):
        key = f"{section}.{option}" if f"{section}.{option}" in KEYS else FAMILY
        yield RuleViolation(
            "model.attention",
            f"does not support {option.replace('_', ' ')}, which {key} = "
            f"{format_value(value_of(config, key))} "
            "requires.",
            "Set model.attention=xla.",
        )


@rule("model.mtp_heads", "train.sequence_length")
def _mtp_fits_sequence_length(config: Config) -> Iterator[RuleViolation]:
    heads, tokens = config.model.mtp_heads, config.train.sequence_length
    if heads >= tokens:
        yield RuleViolation(
            "model.mtp_heads",
            f"must be less than train.sequence_length ({tokens}): a sequence has no tokens "
            "further ahead.",
            f"Set model.mtp_heads={tokens - 1}, or increase train.sequence_length.",
        )


# Checkpoints.


def _add_local_folder_rule(key: str, action: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        if url_scheme(value_of(config, key)):
            yield RuleViolation(key, "must be a folder in a file system, not a URL.", action)


_add_local_folder_rule(
    "run.dir", "Set run.dir=runs, and checkpoint.dir=gs://my-bucket/runs for checkpoints."
)
_add_local_folder_rule(
    "checkpoint.local_dir", "Set checkpoint.local_dir=/tmp/runs, or another folder on a fast disk."
)


def _add_folder_or_bucket_rule(key: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        found = url_scheme(value_of(config, key))
        if found not in ("", "gs"):
            yield RuleViolation(
                key,
                f"must be a folder or gs://BUCKET/PATH: {found}:// is not supported.",
                f"Set {key}=gs://my-bucket/runs, or mount the storage and set {key} to its folder.",
            )
        elif found and not re.match(r"gs://[a-z0-9]", value_of(config, key)):
            yield RuleViolation(
                key, "must contain a bucket name.", f"Set {key}=gs://my-bucket/runs."
            )


_add_folder_or_bucket_rule("checkpoint.dir")
_add_folder_or_bucket_rule("checkpoint.restore_from")


@rule("checkpoint.keep_best", "eval.every", "eval.batches")
def _best_is_evaluated(config: Config) -> Iterator[RuleViolation]:
    if config.checkpoint.keep_best and not (config.eval.every and config.eval.batches):
        yield RuleViolation(
            "checkpoint.keep_best",
            "requires evaluations: eval.every and eval.batches must be more than 0.",
            f"Set eval.every={config.checkpoint.every or 1000}, or checkpoint.keep_best=0.",
        )


@rule("checkpoint.local_dir", "checkpoint.local_every")
def _local_has_folder_and_period(config: Config) -> Iterator[RuleViolation]:
    local_dir, every = config.checkpoint.local_dir, config.checkpoint.local_every
    if local_dir and not every:
        yield RuleViolation(
            "checkpoint.local_every",
            "must be more than 0 with checkpoint.local_dir.",
            "Set checkpoint.local_every=100, or checkpoint.local_dir='' to save only in the run "
            "folder.",
        )
    elif every and not local_dir:
        yield RuleViolation(
            "checkpoint.local_dir",
            f"must be a folder with checkpoint.local_every={every}.",
            "Set checkpoint.local_dir to a folder on a fast disk, or checkpoint.local_every=0.",
        )


# Processes.


@rule("runtime.process_id", "runtime.num_processes")
def _process_id_is_in_range(config: Config) -> Iterator[RuleViolation]:
    process, processes = config.runtime.process_id, config.runtime.num_processes
    if processes and process >= processes:
        yield RuleViolation(
            "runtime.process_id",
            f"must be less than runtime.num_processes ({processes}): ranks start at 0.",
            f"Set runtime.process_id={processes - 1} or less, or "
            f"runtime.num_processes={process + 1}.",
        )


def _is_host(text: str) -> bool:
    """Whether the text is an IPv4 address, an IPv6 address in brackets, or a valid host name."""
    with contextlib.suppress(ValueError):
        if in_brackets := re.fullmatch(r"\[([0-9A-Fa-f:.]+)\]", text):
            return ipaddress.ip_address(in_brackets[1]).version == 6
        return ipaddress.ip_address(text).version == 4
    # For labels of other lengths, Python's name lookup raises an error that is not an OSError.
    label = r"[A-Za-z0-9_-]{1,63}"
    is_name = re.fullmatch(rf"(?![0-9.]+$){label}(\.{label})*\.?", text)
    return len(text) <= 253 and is_name is not None


@rule("runtime.coordinator", "runtime.num_processes")
def _coordinator_is_an_address(config: Config) -> Iterator[RuleViolation]:
    processes, address = config.runtime.num_processes, config.runtime.coordinator
    if processes <= 1:
        return
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        yield RuleViolation(
            "runtime.coordinator",
            f"must be host:port of process 0 when runtime.num_processes is {processes}.",
            "Set runtime.coordinator=localhost:12345 on one machine, or the address of process 0.",
        )


# Launching.


def _add_word_rule(key: str, pattern: str, words: str, example: str) -> None:
    """Restrict a value that is inserted into scripts and manifests to characters without a special
    meaning in them.
    """

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        text = value_of(config, key)
        if len(text) > _LONGEST_WORD:
            rule = f"must have at most {_LONGEST_WORD} characters; this value has {len(text)}."
            yield RuleViolation(key, rule, f"Set {key}={example}.")
        elif not re.fullmatch(pattern, text):
            yield RuleViolation(key, f"must be {words}.", f"Set {key}={example}.")
        elif any(len(name) > _LONGEST_NAME for name in text.split("/")):
            rule = f"must have at most {_LONGEST_NAME} characters between slashes."
            yield RuleViolation(key, rule, f"Set {key}={example}.")


_LONGEST_WORD, _LONGEST_NAME = 1024, 255
"""Maximum length of a launch value, and of one path component (the limit of file systems)."""
_MOST_VARIABLES = 1000
_NAME, _NAME_WORDS = r"([A-Za-z0-9][A-Za-z0-9._:-]*)?", "a name of letters, digits and `._:-`"
_PATH, _PATH_WORDS = (
    r"[A-Za-z0-9_/.][A-Za-z0-9_/.,+@:-]*",
    "a path of letters, digits and `/._,+@:-`",
)
_add_word_rule("launch.project", _NAME, _NAME_WORDS, "my-project")
_add_word_rule("launch.zone", _NAME, _NAME_WORDS, "us-east5-a")
_add_word_rule("launch.cluster", _NAME, _NAME_WORDS, "my-cluster")
_add_word_rule("launch.queue", _NAME, _NAME_WORDS, "multislice-queue")
_add_word_rule("launch.image", f"({_PATH})?", _PATH_WORDS, "us-docker.pkg.dev/mine/maxpipe:0.1")
_add_word_rule("launch.volume", f"({_PATH})?", _PATH_WORDS, "gs://my-bucket")
_add_word_rule("launch.workdir", f"({_PATH})?", _PATH_WORDS, "/shared/runs")
_add_word_rule("launch.program", _PATH, _PATH_WORDS, "/shared/venv/bin/maxpipe")


@rule("launch.environment")
def _environment_has_names(config: Config) -> Iterator[RuleViolation]:
    names = config.launch.environment
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names):
        yield RuleViolation(
            "launch.environment",
            "must be names of environment variables, without values.",
            "Write only the names, such as launch.environment=[MY_TOKEN].",
        )
    elif len(names) > _MOST_VARIABLES or any(len(name) > _LONGEST_NAME for name in names):
        yield RuleViolation(
            "launch.environment",
            f"must be at most {_MOST_VARIABLES} names of at most {_LONGEST_NAME} characters.",
            "List fewer or shorter names, such as launch.environment=[MY_TOKEN].",
        )
