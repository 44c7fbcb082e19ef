"""Translate keys and values of other trainers to maxpipe settings."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import re
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from maxpipe.config import config_files
from maxpipe.config.foreign_keys import (
    NameMatch,
    is_foreign_key,
    list_action,
    match_exact_key,
    match_exact_value,
    match_key,
)
from maxpipe.config.rules import BATCH_AXES, BOUNDS, axis_keys, format_value, normalize_name
from maxpipe.config.schema import KEYS, default_of, is_of_another_family, section_of
from maxpipe.config.sections.log import TENSORBOARD, TRACKER_PACKAGES
from maxpipe.config.sections.model import FAMILY, family_section
from maxpipe.config.yaml_values import READERS, Raw, to_yaml_line
from maxpipe.io.files import accelerators
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.schedule.catalog import SCHEDULES

_TRACKERS = "log.trackers"
MODEL = "model"
"""Name of the section that accepts the name of a bundled model in place of keys."""


class Translation(NamedTuple):
    """Translation of another trainer's setting into maxpipe settings."""

    settings: tuple[tuple[str, str], ...] = ()
    """Pairs of a key and a value string; empty if no key needs to be set."""
    why: str = ""
    action: str = ""
    """Suggested action if `settings` is empty."""
    is_exact: bool = True
    """Whether the name was matched exactly rather than by similarity."""
    key: str = ""
    """Equivalent maxpipe key, or an empty string."""

    def action_text(self, *, in_file: bool) -> str:
        """Return the suggested action, in config-file syntax if `in_file`, else in command-line
        syntax.
        """
        if not self.settings:
            return self.action
        if in_file:
            return f"Write {', and '.join(_as_lines(*each) for each in self.settings)}."
        return f"Write {' '.join(shlex.quote(f'{key}={text}') for key, text in self.settings)}."


def _as_lines(key: str, text: str) -> str:
    *sections, name = key.split(".")
    line = f"`{name}: {yaml_line_of_text(text)}`"
    below = " below ".join(f"`{each}:`" for each in reversed(sections))
    return f"{line} below {below}" if below else line


def yaml_line_of_text(text: str) -> str:
    """Format a value as YAML that can follow its key on one line."""
    return (
        text
        if text.startswith("[")
        else to_yaml_line(text).strip("'")
        if _needs_no_quotes(text)
        else to_yaml_line(text)
    )


def _needs_no_quotes(text: str) -> bool:
    """Return True if YAML quotes the string only because it would otherwise change its type."""
    return (
        to_yaml_line(text) == f"'{text}'"
        and not set(text) & set(":#{}[],&*!|>%@`\"' ")
        and bool(text)
    )


@dataclasses.dataclass(frozen=True)
class TranslationContext:
    """Current settings that affect how other keys are translated."""

    values: Mapping[str, Any]
    """Current values from files and overrides, keyed by full key."""
    gradient_accumulation: int = 1
    """Number of gradient accumulation steps, as other trainers define it."""

    @property
    def family(self) -> str:
        """Name of the config's model family."""
        return str(self.values[FAMILY])

    def num_devices(self, axes: Sequence[str] = MESH_AXES) -> int | None:
        """Return the total number of devices along these mesh axes, or None if unknown."""
        sizes = self.axis_sizes()
        left = [key for key, size in sizes.items() if size < 1]
        if left:
            total = self._num_cpu_devices()
            fixed = math.prod(size for size in sizes.values() if size >= 1)
            if total is None or len(left) != 1 or total % fixed:
                return None
            sizes[left[0]] = total // fixed
        return math.prod(sizes[key] for key in axis_keys(*axes))

    def axis_sizes(self) -> dict[str, int]:
        """Return the mesh axis sizes, keyed by config key. An axis of size -1 uses all remaining
        devices.
        """
        return {key: int(self.values[key]) for key in axis_keys(*MESH_AXES)}

    def _num_cpu_devices(self) -> int | None:
        """Return the number of CPU devices, or None if the run may use accelerators."""
        processes = int(self.values["runtime.num_processes"])
        each = int(self.values["mesh.cpu_devices"])
        platform = self.values["runtime.platform"]
        on_cpu = platform == "cpu" or (platform == "auto" and not accelerators())
        return each * processes if on_cpu and processes > 0 else None


CONTEXT_KEYS = (
    *axis_keys(*MESH_AXES),
    FAMILY,
    "mesh.cpu_devices",
    "tokenizer.kind",
    "runtime.platform",
    "runtime.num_processes",
    "train.steps",
    "optim.learning_rate",
)
"""Keys whose current values are part of a `TranslationContext`."""


def translate(path: Sequence[str], raw: Raw, context: TranslationContext) -> Translation:
    """Translate an unknown key. `path` contains the key's section (if any) and name."""
    for name in (normalize_name("".join(path)), normalize_name(path[-1])):
        if name in _COMPUTED:
            return _COMPUTED[name](raw, context)
    if len(path) == 1 and isinstance(raw, str) and is_main_key(path[0], raw):
        return _translate_value(_MAIN_KEY[path[0]], raw, context)
    answer = _match_family_key(path, context.family)
    if not answer.name:
        text = raw if isinstance(raw, str) else "VALUE"
        action = answer.action.replace("{value}", text or "VALUE")
        return Translation((), answer.why, action, answer.is_exact and bool(action))
    return _translate_value(answer.name, raw, context)._replace(is_exact=answer.is_exact)


def match_foreign_key(path: Sequence[str]) -> NameMatch | None:
    """Return the maxpipe equivalent of another trainer's key, or None if no table lists the key."""
    for name in (normalize_name("".join(path)), normalize_name(path[-1])):
        if name in _COMPUTED:
            defaults = {key: None if key == FAMILY else default_of(key) for key in CONTEXT_KEYS}
            translation = _COMPUTED[name]("VALUE", TranslationContext(defaults))
            action = "" if translation.key else translation.action
            return NameMatch(translation.key, translation.why, action)
    return match_exact_key(path, KEYS) if is_foreign_key(path) else None


def _match_family_key(path: Sequence[str], family: str) -> NameMatch:
    """Return the maxpipe key that an unknown key refers to. Keys of `family` take precedence."""
    family_keys = [key for key in KEYS if not is_of_another_family(section_of(key), family)]
    answer = match_exact_key(path, family_keys) or match_key(path, KEYS)
    own = f"{family_section(family)}.{answer.name.rpartition('.')[2]}"
    other = own in KEYS and is_of_another_family(section_of(answer.name), family)
    return answer._replace(name=own) if other else answer


def _translate_value(key: str, raw: Raw, context: TranslationContext) -> Translation:
    """Translate another trainer's value for a maxpipe key, or suggest an action."""
    if key == "run.dir" and isinstance(raw, str) and "://" in raw:
        return Translation((("run.dir", "runs"), ("checkpoint.dir", raw)), key=key)
    if key == "data.path" and isinstance(raw, list) and len(raw) > 1:
        return Translation((("data.paths", _joined(raw)),), key=key)
    is_word = isinstance(raw, str) and re.fullmatch(r"\w+", raw) is not None
    if key == "data.path" and is_word and not os.path.lexists(str(raw)):
        return Translation((), *_unsaved_dataset_problem(str(raw)), key=key)
    text, action = convert_value(key, raw)
    if key.endswith(".num_experts") and text == "1":
        return Translation(
            (), "a layer with one expert is a dense layer.", "Leave it out.", key=key
        )
    if text is None:
        return Translation((), "", action, key=key)
    section = section_of(key)
    settings = ((key, text),)
    if key == "tokenizer.path" and context.values["tokenizer.kind"] == "bytes":
        settings = (("tokenizer.kind", "auto"), *settings)
    if is_of_another_family(section, context.family):
        settings = ((FAMILY, section.rpartition(".")[2]), *settings)
    return Translation(settings, key=key)


def convert_value(key: str, raw: Raw) -> tuple[str | None, str]:
    """Convert another trainer's value to a string that the key accepts.

    Return the string and an empty action, or None and a suggested action if conversion is
    impossible.
    """
    hint = KEYS[key]
    if isinstance(raw, dict):
        return None, _leave_out(key)
    if isinstance(raw, list):
        if typing.get_origin(hint) is list:
            return _joined([_element(key, each) for each in raw]), ""
        if len(raw) != 1 or not isinstance(raw[0], str):
            return None, list_action(key) or _leave_out(key)
        raw = raw[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    choices = tuple(SCHEDULES) if key == "pipeline.schedule" else choices
    text = "" if raw is None else raw.strip()
    match = text if text in choices else match_exact_value(key, text, choices) if text else ""
    if match and " " in match:
        return None, match.replace("KEY", key)
    if match:
        return match, ""
    if normalize_name(text) in ("", "none", "null"):
        return None, _leave_out(key)
    if normalize_name(text) in ("auto", "alllinear") and "auto" not in choices:
        return None, _leave_out(key)
    if choices and not text.startswith("file:"):
        example = format_value(default_of(key))
        return None, f"Set {key}={example}, or another of {', '.join(map(str, choices))}."
    if typing.get_origin(hint) is list:
        return text if text.startswith("[") else f"[{text}]", ""
    return _read(key, text)


def _read(key: str, text: str) -> tuple[str | None, str]:
    """Implement `convert_value` for a string value of a key that is not a list."""
    if (reader := READERS.get(KEYS[key])) is None:
        return text, ""
    bound = BOUNDS.get(key)
    default = default_of(key)
    example = bound.example if bound and default in (0, dataclasses.MISSING) else default
    try:
        value = reader(text)
    except (ValueError, OverflowError):
        kind = {int: "an integer", float: "a number", bool: "true or false"}.get(
            KEYS[key], "a list"
        )
        return None, f"Set {key}={format_value(example)}: the value must be {kind}."
    if bound and not bound.holds(value):
        return None, _leave_out(key) if value < 0 else f"Set {key}={format_value(example)}."
    return str(value) if KEYS[key] is int else text, ""


def _leave_out(key: str) -> str:
    default = default_of(key)
    if default is dataclasses.MISSING:
        return f"Leave it out: the model sets {key}."
    if default in ("", [], {}):
        return f"Leave it out: {key} is not set by default."
    return f"Leave it out: {key} is {format_value(default)} by default."


def _element(key: str, raw: Raw) -> Raw:
    """Translate one item of a list of names."""
    return (match_exact_value(key, raw, ()) or raw) if isinstance(raw, str) else raw


def _joined(raw: list[Raw]) -> str:
    return f"[{', '.join(str(each) for each in raw)}]"


# Translations that depend on other settings.


def _number(raw: Raw) -> float | None:
    try:
        return float(READERS[float](raw))
    except (ValueError, OverflowError):
        return None


def _per_device_batch(
    key: str, axes: Sequence[str] = MESH_AXES
) -> Callable[[Raw, TranslationContext], Translation]:
    """Return a function that converts sequences per device to the total over all devices and
    gradient accumulation steps.
    """
    accumulates = key == "train.batch_size"

    def translated(raw: Raw, context: TranslationContext) -> Translation:
        why = f"{key} is the total over all devices."
        number, devices = _number(raw), context.num_devices(axes)
        if number is None or number <= 0:
            return Translation((), why, _leave_out(key), key=key)
        factor = context.gradient_accumulation if accumulates else 1
        if devices and (total := number * devices * factor) == int(total):
            return Translation(((key, str(int(total))),), why, key=key)
        over = "devices" if axes is MESH_AXES else "devices along data, fsdp and expert"
        action = f"Set {key} to {number * factor:g} x the number of {over}"
        example = _example(key, number * factor, axes, context)
        return Translation((), why, f"{action}{example}.", key=key)

    return translated


def _example(key: str, number: float, axes: Sequence[str], context: TranslationContext) -> str:
    """Return an example value of `key`, assuming one possible size for the mesh axis set to -1.
    Return an empty string if no example exists.
    """
    sizes = context.axis_sizes()
    left = [axis for axis, size in sizes.items() if size < 1]
    for size in (2, 4, 8, 16, 32, 64, 128, 256):
        filled = {
            axis: configured if configured >= 1 else size for axis, configured in sizes.items()
        }
        total = number * math.prod(filled[axis] for axis in axis_keys(*axes))
        if len(left) == 1 and total == int(total):
            devices = math.prod(filled.values())
            return f": {key}={int(total)} on {devices} devices, where {left[0]} is {size}"
    return ""


def _share_of_steps(raw: Raw, context: TranslationContext) -> Translation:
    key, why, number = "optim.warmup_steps", "the warm-up length is set in steps.", _number(raw)
    if number is None:
        return Translation((), why, _leave_out(key), key=key)
    if not number:
        return Translation(((key, "0"),), why, key=key)
    if steps := int(context.values["train.steps"]):
        # Round up, as transformers does, so that short runs also have a warm-up.
        return Translation(((key, str(math.ceil(number * steps - 1e-9))),), why, key=key)
    return Translation(
        (),
        why,
        f"Set {key} to {number:g} x train.steps: {key}={number * 1000:.0f} for 1000 steps.",
        key=key,
    )


def _share_of_rate(raw: Raw, context: TranslationContext) -> Translation:
    key, why = "optim.min_lr_ratio", "the final learning rate is set as a fraction of the peak."
    number = _number(raw)
    share = math.inf if number is None else number / float(context.values["optim.learning_rate"])
    if not 0 <= share <= 1:
        return Translation((), why, _leave_out(key), key=key)
    return Translation(((key, f"{share:.4g}"),), why, key=key)


def _switch(
    key: str, when_true: str, when_false: str
) -> Callable[[Raw, TranslationContext], Translation]:
    """Return a function that translates another trainer's boolean to one of two values of `key`. If
    the selected value is empty, the key is left out.
    """

    def translated(raw: Raw, context: TranslationContext) -> Translation:
        try:
            value = when_true if READERS[bool](raw) else when_false
        except ValueError:
            value = ""
        settings = ((key, value),) if value else ()
        return Translation(settings, "", _leave_out(key), key=key)

    return translated


def _eval_steps(raw: Raw, context: TranslationContext) -> Translation:
    number = _number(raw)
    why = "in other trainers, it sets the steps between evaluations, or eval.batches."
    if number is None or number < 1:
        return Translation((), why, _leave_out("eval.every"), key="eval.every")
    every, batches = f"eval.every={number:g}", f"eval.batches={number:g}"
    action = f"Set {every} for steps between evaluations, or {batches} for batches per evaluation."
    return Translation((), why, action)


def _base_model(raw: Raw, context: TranslationContext) -> Translation:
    """Translate the name of a base model to settings of the model shape, initial weights and
    tokenizer.
    """
    translation = _model_name(raw, context)
    if not translation.settings or not config_files.is_hub_id(str(raw)):
        return translation
    folder = str(raw).rpartition("/")[2]
    settings = (("checkpoint.restore_from", f"hf:{folder}"),)
    settings += (("tokenizer.kind", "auto"), ("tokenizer.path", folder))
    return translation._replace(
        settings=(*translation.settings, *settings),
        action=config_files.hub_download_action(str(raw)),
    )


def _adapter(raw: Raw, context: TranslationContext) -> Translation:
    """Translate the name of an adapter type."""
    kind = normalize_name(raw) if isinstance(raw, str) else ""
    if kind in ("qlora", "dora"):
        key, value = (
            ("adapter.base_quantization", "nf4") if kind == "qlora" else ("adapter.kind", "dora")
        )
        return Translation(((key, value),), key=key)
    why = "adapters are enabled by adapter.rank."
    return Translation((), why, "Leave it out, or set adapter.rank=16.")


def _bits(base: str) -> Callable[[Raw, TranslationContext], Translation]:
    return _switch("adapter.base_quantization", base, "")


def _tracker(name: str) -> Callable[[Raw, TranslationContext], Translation]:
    """Return a function that translates another trainer's switch of one tracker."""

    def translated(raw: Raw, context: TranslationContext) -> Translation:
        is_off = isinstance(raw, str) and normalize_name(raw) in ("false", "off", "no", "0", "none")
        if is_off and name != TENSORBOARD:
            return Translation((), "", _leave_out(_TRACKERS), key=_TRACKERS)
        names: list[Raw] = [] if is_off else [*dict.fromkeys((TENSORBOARD, name))]
        return Translation(((_TRACKERS, _joined(names)),), key=_TRACKERS)

    return translated


def _report_to(raw: Raw, context: TranslationContext) -> Translation:
    """Translate a list of trackers."""
    names = raw if isinstance(raw, list) else str(raw).strip("[]").split(",")
    normalized = [normalize_name(each) for each in names if isinstance(each, str)]
    known = [each for each in (TENSORBOARD, *TRACKER_PACKAGES) if each in normalized]
    if normalized in (["none"], []):
        return Translation(((_TRACKERS, "[]"),), key=_TRACKERS)
    if len(known) == len(normalized):
        return Translation(((_TRACKERS, _joined([*known])),), key=_TRACKERS)
    why = f"the trackers are {', '.join((TENSORBOARD, *TRACKER_PACKAGES))}."
    return Translation((), why, f"Set {_TRACKERS}={_joined([*known] or [TENSORBOARD])}.")


def _rl(raw: Raw, context: TranslationContext) -> Translation:
    """Translate an objective from Axolotl's `rl` key."""
    name = normalize_name(raw) if isinstance(raw, str) else ""
    if name in ("dpo", "ipo", "orpo", "simpo"):
        settings = (("train.objective", "preference"), ("data.chat", "pairs"))
        return Translation(settings, key="train.objective")
    if name == "grpo":
        return Translation((("train.objective", "grpo"),), key="train.objective")
    why = "the supported objectives are pretrain, sft, preference, distill and grpo."
    return Translation((), why, "Leave it out, or set train.objective.")


def _offloaded(key: str, raw: Raw, context: TranslationContext) -> Translation:
    """Translate DeepSpeed's device for optimizer state or parameters to the key that offloads
    them.
    """
    if isinstance(raw, str) and normalize_name(raw) in ("cpu", "nvme"):
        return Translation(((key, "true"),), key=key)
    return Translation((), "", _leave_out(key), key=key)


_MESSAGES = ("chattemplate", "sharegpt", "messages", "sharegptvcs")
_PAIRS = ("chatml", "llama3", "dpo", "orpo", "ipo", "chosenrejected")


def _unsaved_dataset_problem(name: str) -> tuple[str, str]:
    """Return the violated rule and the suggested action for a dataset name that is not a file
    path.
    """
    return (
        "data must be in files; only `maxpipe fetch` downloads datasets.",
        f"Run `maxpipe fetch hf:datasets/{name} --out data`, and set data.source=parquet (or "
        "jsonl) data.path=data.",
    )


def _datasets(raw: Raw, context: TranslationContext) -> Translation:
    """Translate a list of datasets, each with a path and a type."""
    entries = [each for each in raw if isinstance(each, dict)] if isinstance(raw, list) else []
    paths = [str(each.get("data_files") or each.get("path") or "") for each in entries]
    if not entries or not all(paths):
        return Translation((), "a source requires several keys.", "Set data.source and data.path.")
    if len(entries) > 1:
        why = "several sources are combined in a mixture."
        settings = " ".join(f"data.mixture.part{n}.path={path}" for n, path in enumerate(paths, 1))
        action = f"Set {settings}, and also the keys source, weight and chat of each source."
        return Translation((), why, action)
    [entry] = entries
    source = infer_source(paths[0])
    if not source:
        return Translation((), *_unsaved_dataset_problem(paths[0]))
    settings = [("data.source", source), ("data.path", paths[0])]
    kind = str(entry.get("type") or "").partition(".")[0]
    field = entry.get("field_messages") or entry.get("field")
    if normalize_name(kind) in _MESSAGES:
        settings += [("train.objective", "sft"), ("data.chat", "messages")]
        settings += [("data.messages_field", field)] if isinstance(field, str) else []
    elif normalize_name(kind) in _PAIRS:
        settings += [("train.objective", "preference"), ("data.chat", "pairs")]
    elif normalize_name(kind).startswith("alpaca"):
        settings += [("train.objective", "sft"), ("data.chat", "prompt")]
        settings += [("data.prompt_field", r"{instruction}\n{input}")]
        settings += [("data.response_field", "output")]
    elif isinstance(field, str):
        settings += [("data.text_field", field)]
    return Translation(tuple(settings), key="data.path")


SOURCE_OF = {".jsonl": "jsonl", ".parquet": "parquet", ".txt": "text", ".md": "text"} | {
    ".array_record": "arrayrecord",
    ".arrayrecord": "arrayrecord",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
}
"""Maps file suffixes to values of `data.source`."""


def infer_source(path: str) -> str:
    """Infer `data.source` for a path from its file suffixes. Return an empty string if the format
    is ambiguous or unknown.
    """
    folder = os.path.expanduser(path)
    if os.path.isfile(os.path.join(folder, "dataset_info.json")):
        return "huggingface"
    names = [path.lower()]
    if os.path.isdir(folder):
        names = [each.name.lower() for each in os.scandir(folder) if each.is_file()]
    if any(sign in path for sign in "*?["):
        names = [os.path.basename(each).lower() for each in glob.glob(folder)] or names
    names = [name for name in names if not name.startswith(".")]
    if os.path.isfile(folder) and not os.path.splitext(folder)[1]:
        return "text"
    kinds = {
        next((kind for end, kind in SOURCE_OF.items() if name.endswith(end)), "") for name in names
    }
    return kinds.pop() if len(kinds) == 1 else ""


def _model_name(raw: Raw, context: TranslationContext) -> Translation:
    if isinstance(raw, str) and (model := config_files.find_model(raw)):
        return Translation(((MODEL, model.name),), key=MODEL)
    if isinstance(raw, str) and config_files.is_hub_id(raw):
        action = config_files.hub_download_action(raw)
        return Translation((), "only `maxpipe fetch` downloads models.", action)
    answer = match_exact_key(["model_name"], ())
    assert answer is not None
    return Translation((), answer.why, answer.action)


def _table() -> dict[str, Callable[[Raw, TranslationContext], Translation]]:
    named = {
        "per_device_batch_size per_device_train_batch_size device_batch_size": _per_device_batch(
            "train.batch_size"
        ),
        "micro_batch_size local_batch_size train_micro_batch_size_per_gpu": _per_device_batch(
            "train.batch_size", BATCH_AXES
        ),
        "per_device_eval_batch_size eval_per_device_batch_size": _per_device_batch(
            "eval.batch_size"
        ),
        "validation_local_batch_size": _per_device_batch("eval.batch_size", BATCH_AXES),
        "warmup_ratio warmup_fraction warmup_steps_fraction lr_warmup_fraction": _share_of_steps,
        "min_lr final_lr end_lr": _share_of_rate,
        "disable_tqdm": _switch("log.progress", "plain", "live"),
        "use_cpu no_cuda": _switch("runtime.platform", "cpu", ""),
        "eval_steps": _eval_steps,
        "adapter": _adapter,
        "load_in_4bit": _bits("nf4"),
        "load_in_8bit": _bits("int8"),
        "peft_use_dora use_dora": _switch("adapter.kind", "dora", ""),
        "peft_use_rslora use_rslora": _switch("adapter.rslora", "true", ""),
        "use_tensorboard tb enable_tensorboard": _tracker(TENSORBOARD),
        "wandb use_wandb enable_wandb weights_and_biases": _tracker("wandb"),
        "mlflow use_mlflow": _tracker("mlflow"),
        "trackio use_trackio": _tracker("trackio"),
        "report_to loggers logger": _report_to,
        "train_on_inputs": _switch("train.objective", "", "sft"),
        "datasets pretraining_dataset": _datasets,
        "rl": _rl,
        "zero_optimization_offload_optimizer_device offload_optimizer_device": partial(
            _offloaded, "optim.offload_state"
        ),
        "zero_optimization_offload_param_device offload_param_device": partial(
            _offloaded, "pipeline.offload_weights"
        ),
        "model_name model_name_or_path pretrained_model_name_or_path hf_model": _model_name,
        "base_model": _base_model,
    }
    return {normalize_name(name): each for names, each in named.items() for name in names.split()}


_COMPUTED = _table()
_MAIN_KEY = {
    "optim": "optim.name",
    "tokenizer": "tokenizer.path",
    "data": "data.path",
    "run": "run.name",
    "pipeline": "pipeline.schedule",
}
"""Maps each section to its primary key, which `SECTION=TEXT` sets."""

_ACCUMULATION = {normalize_name(n) for n in ("gradient_accumulation_steps", "grad_accum_steps")}


def is_main_key(section: str, text: str) -> bool:
    """Return True if `SECTION=TEXT` is shorthand for the section's primary key, as in
    `optim=adamw`.
    """
    return (
        section in _MAIN_KEY
        and re.fullmatch(r"(?i)[a-z][\w./-]*", text) is not None
        and (
            normalize_name(text) not in ("true", "false", "none", "null", "yes", "no", "on", "off")
        )
    )


def is_accumulation(path: Sequence[str]) -> bool:
    """Return True if the key sets gradient accumulation steps, which multiply the batch size."""
    return normalize_name(path[-1]) in _ACCUMULATION
