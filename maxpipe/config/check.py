"""Check a config against all section rules and training requirements, and collect warnings.

`check` runs all rules and reports every violation. Rules that depend on the machine, such as the
number of devices, are checked when the mesh is built. `check_training` applies only to training,
not to memory forecasts or ahead-of-time compilation.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from maxpipe.config.rules import axis_size, format_value, value_of, violations
from maxpipe.config.schema import KEYS, Config
from maxpipe.config.sections.alerts import check_alert_permission
from maxpipe.config.sections.data import is_synthetic, named_sources, section_of, train_sources
from maxpipe.config.sections.eval import check_eval_during_training
from maxpipe.config.sections.mesh import replication_warnings
from maxpipe.config.sections.optim import optimizer_warnings
from maxpipe.config.sections.profile import profile_warnings
from maxpipe.config.sections.source import COLUMNS, paths_of
from maxpipe.config.sections.tokenizer import BYTES_VOCABULARY
from maxpipe.config.translation import infer_source
from maxpipe.errors import Code, ConfigError, Problem, RuleViolation
from maxpipe.io import redact
from maxpipe.io.files import accelerators
from maxpipe.models.param_names import trained
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import MESH_AXES, device_count_rule

DEFAULT = "default"
"""Origin of a value that neither a file nor an override sets."""


def is_override(argument: str) -> bool:
    """Return True if a command-line argument is an override (`section.key=value`), not a path."""
    return "=" in argument.partition("/")[0]


def error_location(key: str, origins: Mapping[str, str]) -> str:
    """Return the prefix of an error message: the file or option that sets the key, and the key."""
    origin = origins.get(key) or origins.get(key.partition("[")[0])
    origin = origin or origins.get(key.rpartition(".")[0], DEFAULT)
    return f"{'command line' if is_override(origin) else origin}: {key}"


def find_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about settings that are allowed but likely to be mistakes."""
    yield from optimizer_warnings(config)
    yield from replication_warnings(config)
    yield from profile_warnings(config)


LARGEST_FOR_BYTES = 4096
"""Largest vocabulary size of a model that is assumed to be trained on bytes. The limit exceeds 259,
so that the vocabulary size can be rounded up to a multiple of the number of shards. Published
models have vocabularies of at least 30,000 tokens."""


def check_training(
    config: Config, origins: Mapping[str, str], skip: Collection[str] = ()
) -> list[Problem]:
    """Return errors for settings that are valid but would probably cause training on unintended
    data.

    Not called for memory forecasts or ahead-of-time compilation, which need neither documents nor a
    tokenizer.
    """
    wrong = not {"data.source", "data.mixture", "data.validation"}.isdisjoint(skip)
    problems = [] if wrong else find_unused_path(config, origins)
    problems += [] if wrong else _check_sft_data(config, origins)
    problems += _check_evaluation(config, origins, skip)
    if {"alerts.command", "alerts.allow_code"}.isdisjoint(skip):
        problems += _problems(check_alert_permission(config), config, origins)
    problems += _check_adapter_base(config, origins, skip)
    if not any(key.startswith("model.") for key in skip):
        problems += _check_vision_tower(config, origins)
    if {"train.steps", "train.tokens"}.isdisjoint(skip):
        problems += find_missing_length(config, origins)
    return problems + _check_vocabulary(config, origins, skip)


def _check_vision_tower(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Return an error if the vision tower would be trained without images."""
    if config.data.max_images_per_sequence or config.adapter.rank:
        return []
    if not any(name.startswith("vision.") for name in trained(describe(config.model))):
        return []
    rule = "must be above 0, because the vision tower is trained but would receive no images."
    action = "Set data.max_images_per_sequence=1, or freeze the tower: model.frozen=[vision.*]."
    violation = RuleViolation(Code.MODEL_IMAGES, "data.max_images_per_sequence", rule, action)
    return _problems([violation], config, origins)


def find_mesh_mismatch(config: Config, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield an error if the mesh does not match the CPU devices that the config sets. Other devices
    are counted only when the mesh is built.
    """
    runtime, mesh = config.runtime, config.mesh
    is_cpu = runtime.platform == "cpu" or (runtime.platform == "auto" and not accelerators())
    is_cpu = is_cpu and origins["mesh.cpu_devices"] != DEFAULT
    sizes = {axis: axis_size(mesh, axis) for axis in MESH_AXES}
    total = math.prod(size or 0 for size in sizes.values())
    devices = mesh.cpu_devices * runtime.num_processes - config.distill.teacher_devices
    if not is_cpu or config.launch.topology or min(total, devices) < 1 or total == devices:
        return
    wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
    rule = device_count_rule(total, devices, "cpu")
    action = f"Set axis sizes whose product is {devices}."
    yield Problem(Code.MESH_DEVICES, "mesh", wanted or "one device", rule, action)


def find_missing_length(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Return an error if the run length is not set. Memory forecasts and data commands do not need
    a run length.
    """
    if config.train.steps or config.train.tokens:
        return []
    rule = "must be more than 0 if train.tokens is 0: one of the two keys must set the run length."
    return [
        Problem(
            Code.CFG_MISSING,
            error_location("train.steps", origins),
            "0",
            rule,
            "Set train.steps=100, or set train.tokens.",
        )
    ]


def check_length(config: Config, origins: Mapping[str, str]) -> None:
    """Raise ConfigError if the run length is not set."""
    if problems := find_missing_length(config, origins):
        raise ConfigError(problems)


def _check_evaluation(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    if not {"eval.tasks", "eval.batches", "data.mixture", "data.validation"}.isdisjoint(skip):
        return []
    return _problems(check_eval_during_training(config), config, origins)


def _problems(
    violations: Iterable[RuleViolation], config: Config, origins: Mapping[str, str]
) -> list[Problem]:
    """Return a problem with location and value for each violation."""
    return [
        Problem(
            code, error_location(key, origins), format_value(value_of(config, key)), text, action
        )
        for code, key, text, action in violations
    ]


def _check_sft_data(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Return an error for each source without a loss mask if `train.objective=sft`."""
    if config.train.objective != "sft":
        return []
    problems = []
    for name, source in train_sources(config.data).items():
        if source.chat == "off":
            section = section_of(name)
            rule = "must be messages or prompt with train.objective=sft, which trains only on "
            rule += (
                f"responses: documents from {section}.source={source.source} do not mark responses."
            )
            records = f"{section}.source=jsonl, {section}.path=chats.jsonl (your own) and "
            records = "" if source.source in COLUMNS else records
            action = f"Set {records}{section}.chat=messages, or train.objective=pretrain to train "
            action += "on all tokens."
            problems.append(
                Problem(
                    Code.CFG_CONFLICT,
                    error_location(f"{section}.chat", origins),
                    "off",
                    rule,
                    action,
                )
            )
    return problems


def _check_adapter_base(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    """Return an error if adapters have no pretrained base weights, because adapters on randomly
    initialized weights are useless.
    """
    key = "checkpoint.restore_from"
    if not config.adapter.rank or config.checkpoint.restore_from or key in skip:
        return []
    rule = f"must be set to the adapters' base model (adapter.rank={config.adapter.rank})."
    action = f"Set {key}=hf:DIR, the folder of a public model, or {key}=RUN@STEP."
    return [Problem(Code.MODEL_ADAPTER, error_location(key, origins), "''", rule, action)]


def find_unused_path(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Return an error for each path that the source format ignores, because the run would then
    train on other documents.
    """
    problems = []
    for section, source_config in named_sources(config):
        if source_config.source in ("corpus", "synthetic") and (paths := paths_of(source_config)):
            key = f"{section}.path" if source_config.path else f"{section}.paths"
            rule = f"is ignored with {section}.source={source_config.source}."
            missing = [path for path in paths if "://" not in path and not glob.glob(path)]
            if missing:
                rule = f"does not exist: {missing[0]}. It {rule}"
            kinds = {infer_source(path) for path in paths}
            source = kinds.pop() if len(kinds) == 1 else ""
            source = source or ("text" if missing else "")
            action = f"Set {section}.source={source}, or leave {key} out."
            if missing:
                action = f"Set {key} to existing files and {section}.source={source}, or leave "
                action += f"{key} out."
            elif not source:
                action = f"Set {key} to files of one format, such as '*.jsonl' with "
                action += f"{section}.source=jsonl, or leave {key} out."
            problems.append(
                Problem(
                    Code.CFG_IGNORED, error_location(key, origins), ", ".join(paths), rule, action
                )
            )
    return problems


def _check_vocabulary(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    """Return errors if a model with a large vocabulary uses the default documents or the bytes
    tokenizer.
    """
    vocabulary = config.model.vocab_size
    if not {"model.vocab_size", "tokenizer.kind", "data.source"}.isdisjoint(skip):
        return []
    prompts = config.train.objective == "grpo"
    if vocabulary <= LARGEST_FOR_BYTES or is_synthetic(config.data):
        return []
    problems = []
    if config.tokenizer.kind == "bytes":
        problems.append(
            Problem(
                Code.TOK_VOCABULARY,
                error_location("tokenizer.kind", origins),
                "bytes",
                f"has {BYTES_VOCABULARY} ids, but model.vocab_size is {vocabulary}: the model "
                "requires its own tokenizer.",
                "Set tokenizer.kind=auto and tokenizer.path=tokenizer.json (the file or folder of "
                f"the model), or set model.vocab_size={BYTES_VOCABULARY} to train on bytes.",
            )
        )
    if not prompts and origins.get("data.source", DEFAULT) == DEFAULT and not config.data.mixture:
        problems.append(
            Problem(
                Code.TOK_VOCABULARY,
                error_location("data.source", origins),
                config.data.source,
                "is the default dataset for first runs (the source code of Python's standard "
                f"library), but the model has a vocabulary of {vocabulary} ids.",
                "Set data.source=text and data.path=data/*.txt (your own), or set "
                "data.source=corpus if this is intended.",
            )
        )
    return problems


def check(config: Config, origins: Mapping[str, str], skip: Collection[str] = ()) -> list[Problem]:
    """Return all rule violations. Rules that read a key in `skip` are skipped."""
    problems: list[Problem] = []
    for code, key, text, action in violations(config, skip, [*KEYS]):
        value = value_of(config, key)
        shown = format_value(
            redact.redact_variable_names(value) if key == "launch.environment" else value
        )
        problems.append(Problem(code, error_location(key, origins), shown, text, action))
    return problems
