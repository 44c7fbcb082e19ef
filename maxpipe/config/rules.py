"""Registry of config rules, ranges of all numbers, and phrases that several messages share.

A rule lists the keys that it reads, and is skipped if one of these keys is already known to be
invalid. The rules are defined in `check.py` and in the modules `*_rules`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from maxpipe.config.keys import (
    ITEM,
    ITEM_SECTIONS,
    NAMED_SECTIONS,
    declared_key,
    default_of,
    plain_value,
    sections_of,
    split_key,
)
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import format_nested
from maxpipe.models.config import LARGEST, SMALLEST, Bound
from maxpipe.models.registry import FAMILIES
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES, MeshConfig


def value_of(config: Config, key: str) -> Any:
    """Return the value of a full key, or of one entry of a mapping.

    For keys of other model families, return the default. Items of lists are dicts.
    """
    outer, _, index = key.partition("[")
    if index and f"{outer}{ITEM}" in ITEM_SECTIONS:
        number, _, names = index.partition("]")
        value = plain_value(value_of(config, outer))[int(number)]
        for name in names.split(".")[1:]:
            value = value[name]
        return value
    if (outer := declared_key(key).rpartition(".")[0]) in NAMED_SECTIONS:
        section, name, each, inner = key.split(".")
        assert outer.startswith(f"{section}.{name}.")
        return getattr(getattr(getattr(config, section), name)[each], inner)
    section, (name, *entry) = split_key(key.split(".", 2))
    is_own = "." in section
    values = sections_of(config).get(section) if is_own else getattr(config, section)
    value = default_of(key) if values is None else getattr(values, name)
    return value[entry[0]] if entry else value


def applies_to_family(config: Config, key: str) -> bool:
    """Whether the key is common to all families or belongs to the family of this config."""
    section, _ = split_key(key.split(".", 2))
    return "." not in section or section in sections_of(config)


@dataclass(frozen=True, slots=True)
class Rule:
    """A config rule. `find` yields the violations, and reads only the keys in `keys`."""

    keys: tuple[str, ...]
    find: Callable[[Config], Iterator[RuleViolation]]
    is_first: bool = False
    """Whether a violation of this rule causes other rules that read the same keys to be skipped."""


RULES: list[Rule] = []

_NAME_CHARACTERS = 100
"""Maximum length of a name that is derived from another name. File systems allow 255 characters."""


def rule(
    *keys: str, is_first: bool = False
) -> Callable[[Callable[[Config], Iterator[RuleViolation]]], None]:
    """Register a function as a rule that reads these keys."""

    def register(find: Callable[[Config], Iterator[RuleViolation]]) -> None:
        RULES.append(Rule(keys, find, is_first))

    return register


def axis_keys(*axes: str) -> tuple[str, ...]:
    """Return the config keys that set the sizes of these mesh axes."""
    return tuple(f"mesh.{link}_{axis}" for axis in axes for link in ("ici", "dcn"))


_MAX_WORD = 200


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the choice that is most similar to the word, or an empty string.

    A choice with the same letters and digits, regardless of case and separators, is preferred.
    """
    known = list(choices)
    if len(word) > _MAX_WORD:
        return ""  # difflib needs quadratic time
    wanted = normalize_name(word)
    same = [choice for choice in known if normalize_name(choice) == wanted]
    lower = {choice.lower(): choice for choice in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1)
    return next(iter(same or [lower[each] for each in close]), "")


@functools.lru_cache(maxsize=8192)
def normalize_name(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(each for each in name.lower() if each.isalnum())


def folder_name(text: str) -> str:
    """Convert the text to a valid run name, which contains only letters, digits, `.`, `_` and
    `-`.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_NAME_CHARACTERS].strip("-.") or "run"


def axis_size(mesh: MeshConfig, axis: str) -> int | None:
    """Return the total size of a mesh axis, or None if it depends on the number of devices."""
    ici, dcn = getattr(mesh, f"ici_{axis}"), getattr(mesh, f"dcn_{axis}")
    return ici * dcn if ici >= 1 and dcn >= 1 else None


BATCH_AXES = DEFAULT_AXIS_RULES["batch"]
"""Mesh axes over which the batch is sharded."""


def batch_shards(mesh: MeshConfig) -> tuple[int, list[str]]:
    """Return the number of batch shards over axes of known size, and descriptions of these axes.

    The expert axis is listed only if its size is more than 1.
    """
    sizes = {axis: axis_size(mesh, axis) for axis in BATCH_AXES}
    words = [f"{axis} ({n})" for axis, n in sizes.items() if n and (n > 1 or axis != "expert")]
    return math.prod(size or 1 for size in sizes.values()), words


# Phrases for messages.


def format_value(value: object) -> str:
    """Format a value as in a config file. Long values are shortened."""
    if is_dataclass(value):
        return ""  # the key already names the section
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list | dict):
        text = format_nested(plain_value(value))
    elif value == "":
        text = "''"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


BYTES_VOCABULARY = 259
"""Vocabulary size of the bytes tokenizer: 256 bytes, BOS, EOS and padding."""

_SHARE_LEFT = "1 would drop everything"
_INT32 = 2**31 - 1
MAX_STEPS = 10**11
"""Maximum number of steps of a run. The limit exists because sequence numbers have 63 bits."""
_RANGES = (
    Bound("run.seed", 0, 0, 2**32 - 1, "the random generator has a 32-bit seed"),
    Bound("model.num_layers", 1, 1, 2048, "plans and layer partitions enumerate all layers"),
    *(Bound(f"model.{name}", 1, 1) for name in ("d_model", "num_heads", "num_kv_heads", "d_mlp")),
    Bound("model.head_dim", 2, 2),
    Bound("model.vocab_size", BYTES_VOCABULARY, 2, _INT32, "token ids are int32"),
    Bound("model.mtp_heads", 2, 0),
    Bound("model.mtp_loss_weight", 0.3, 0, LARGEST, "devices compute in float32"),
    Bound(
        "model.rope_theta", 10000.0, 1, LARGEST, "devices compute in float32", low_is_inside=False
    ),
    Bound("model.norm_epsilon", 1e-5, SMALLEST, LARGEST, "0 would allow a division by 0"),
    Bound("model.dropout", 0.1, 0, 1, _SHARE_LEFT, high_is_inside=False),
    *(
        bound._replace(key=f"model.{family.name}.{bound.key}")
        for family in FAMILIES.values()
        for bound in family.bounds
    ),
    Bound("mesh.max_replicated_bytes", 2**27, 0, why="0 means no limit"),
    Bound("mesh.cpu_devices", 1, 1, 4096, "each device needs threads and memory"),
    Bound("pipeline.microbatches", 1, 1),
    Bound("pipeline.repeats", 1, 1),
    Bound("pipeline.group", 0, 0, why="0 means the number of stages"),
    Bound("pipeline.prologue_layers", 0, 0),
    Bound("pipeline.loss_block_tokens", -1, -1, why="-1 uses blocks if logits are large"),
    Bound("train.steps", 100, 0, MAX_STEPS, "0 uses train.tokens"),
    Bound("train.tokens", 1000000, 0, 10**18, "0 uses train.steps"),
    Bound("train.batch_size", 8, 1, 2**24, "a step lists its sequences"),
    Bound(
        "train.sequence_length",
        1024,
        2,
        _INT32,
        "the last token has no target, and positions are int32",
    ),
    Bound("optim.learning_rate", 3e-4, 1e-30, LARGEST, "devices compute in float32"),
    Bound("train.batch_ramp[].batch_size", 4, 1, 2**24, "a step lists its sequences"),
    Bound("train.batch_ramp[].steps", 100, 1, MAX_STEPS),
    Bound("train.batch_ramp[].tokens", 1000000, 1, 10**18),
    Bound("optim.lr_phases[].steps", 100, 0, 10**9),
    Bound("optim.lr_phases[].percent", 10, 0, 1000),
    Bound("optim.lr_phases[].from", 1, 0, 1),
    Bound("optim.lr_phases[].to", 0.1, 0, 1),
    Bound("optim.lr_phases[].times", 3, 1, 99),
    Bound("optim.lr_multipliers[].multiplier", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("optim.weight_decays[].weight_decay", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("data.mixture_stages[].weights", 1, 0, LARGEST),
    Bound("data.mixture_stages[].steps", 1000, 1, 10**18),
    Bound("data.mixture_stages[].tokens", 1000000, 1, 10**18),
    Bound("adapter.rank", 16, 0, why="0 trains all parameters"),
    Bound("adapter.alpha", 16.0, SMALLEST, LARGEST, "devices compute in float32"),
    Bound("adapter.dropout", 0.1, 0, 1, _SHARE_LEFT, high_is_inside=False),
    Bound("optim.warmup_steps", 0, 0),
    Bound("optim.decay_fraction", 0.2, 0, 1),
    Bound("optim.min_lr_ratio", 0.1, 0, 1),
    Bound("optim.beta1", 0.9, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.beta2", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.momentum", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.ema_decay", 0.999, 0, 1, "1 would never change the average", high_is_inside=False),
    Bound("optim.epsilon", 1e-8, SMALLEST, LARGEST, "0 would allow a division by 0"),
    Bound("optim.weight_decay", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("optim.clip_norm", 1.0, 0, LARGEST, "0 disables clipping; devices compute in float32"),
    Bound("grpo.group_size", 8, 2, why="completions of a group are compared"),
    Bound("grpo.max_tokens", 64, 1),
    Bound("grpo.temperature", 1.0, 0.01, 100, "token probabilities are compared"),
    Bound("grpo.reward_timeout_seconds", 10.0, 0, 86400, low_is_inside=False),
    Bound("grpo.clip_ratio", 0.2, 0, 1, "no probability is negative", low_is_inside=False),
    Bound(
        "grpo.clip_ratio_high",
        0.0,
        0,
        LARGEST,
        "0 uses grpo.clip_ratio; devices compute in float32",
    ),
    Bound("grpo.kl_coef", 0.04, 0, LARGEST, "0 disables the reference; devices compute in float32"),
    Bound("grpo.updates_per_rollout", 1, 1, 1024, "all completions are sampled at once"),
    Bound(
        "data.mixture_temperature",
        1.0,
        0,
        LARGEST,
        "1 leaves weights unchanged",
        low_is_inside=False,
    ),
    Bound("data.validation_fraction", 0.05, 0, 0.5),
    Bound("data.max_pairs_per_sequence", 16, 1, 4096, "every batch has this capacity"),
    Bound("data.max_bad_records", 100, 1),
    Bound("data.max_decompressed_bytes", 2**36, 1),
    Bound("data.prefetch_batches", 4, 1),
    Bound("data.threads", 2, 1, 1024, "all threads belong to this process"),
    Bound("checkpoint.every", 1000, 0, why="0 saves only the last step"),
    Bound("checkpoint.keep", 3, 1, why="the newest checkpoint is never deleted"),
    Bound("distill.temperature", 1.0, 1e-3, 1e3, "logits are divided by it in float32"),
    Bound("distill.top_k", 32, 1),
    Bound("distill.weight", 0.5, 0, 1, "0 would ignore the teacher", low_is_inside=False),
    Bound("distill.teacher_devices", 0, 0, why="0 alternates on all devices"),
    Bound("guard.max_bad_steps", 5, 1),
    Bound("guard.spike_sigmas", 6.0, 0, LARGEST, "0 disables it; devices compute in float32"),
    Bound("guard.spike_window", 128, 2, why="a deviation needs two steps"),
    Bound("guard.max_rollbacks", 3, 0),
    Bound("guard.replica_check_every", 100, 0, why="0 disables the comparison"),
    Bound("checkpoint.keep_every_steps", 0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.keep_every_hours", 0.0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.keep_best", 0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.retries", 3, 0, why="0 disables retries"),
    Bound("checkpoint.local_every", 0, 0),
    Bound("eval.every", 100, 0, why="0 evaluates only after the last step"),
    Bound("eval.batch_size", 8, 0, why="0 uses train.batch_size"),
    Bound("eval.batches", 8, 0, why="0 evaluates no documents"),
    Bound("eval.patience", 3, 0, why="0 disables early stopping"),
    Bound("eval.min_delta", 0.0, 0, LARGEST, "a negative gain is a loss"),
    Bound("eval.sample_conversations", 4, 0, why="0 samples no conversations"),
    Bound("eval.sample_every", 100, 0, why="0 disables samples"),
    Bound("eval.sample_max_tokens", 64, 1),
    Bound("eval.sample_temperature", 1.0, 0, LARGEST, "devices compute in float32"),
    Bound("preference.beta", 0.1, 0, LARGEST, "devices compute in float32", low_is_inside=False),
    Bound(
        "preference.label_smoothing",
        0.1,
        0,
        0.5,
        "with 0.5 labels carry no information",
        high_is_inside=False,
    ),
    Bound("preference.odds_weight", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("log.every", 10, 1),
    Bound("runtime.num_processes", 1, 0, why="0 uses the cluster's number"),
    Bound("runtime.process_id", 0, 0),
    Bound("runtime.init_timeout_seconds", 300, 1),
    Bound("runtime.heartbeat_timeout_seconds", 100, 1),
    Bound("runtime.stall_timeout_seconds", 1800, 0, why="0 waits forever"),
    Bound("runtime.stop_grace_seconds", 120, 0, why="0 means no limit"),
    Bound("launch.slices", 1, 1),
    Bound("launch.restarts", 3, 0),
    Bound("launch.grace_seconds", 120, 1),
    Bound("launch.time_limit_minutes", 0, 0, why="0 uses the partition's limit"),
)


BOUNDS = {bound.key: bound for bound in _RANGES}
"""Maps full keys to the ranges of their values."""
