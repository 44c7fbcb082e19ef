"""Settings of a PEFT adapter folder, as values of the config section `adapter`.

The targets are derived from the tensor names in the folder, because `target_modules` may be a
regular expression. Folders come from untrusted sources: each setting of PEFT that changes the
adapter's computation is either supported or an error.

Source: `LoraConfig` of peft 0.21.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from maxpipe.config.check import DEFAULT, check, error_location
from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError
from maxpipe.io.files import expand_path, open_regular, read
from maxpipe.io.typed_json import parse_json
from maxpipe.models.adapters import adaptable
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.param_names import names_in_layers
from maxpipe.models.registry import FAMILIES, describe
from maxpipe.models.spec import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "adapter.restore_from"
SETTINGS = ("rank", "alpha", "rslora", "kind", "dropout", "targets")
"""Keys of the section `adapter` that a PEFT folder defines."""

_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES = 1 << 24, 100_000_000
_MAX_PATTERNS = 1000
_IGNORED = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "peft_version", "r", "lora_alpha", "lora_dropout", "use_rslora"),
        *("use_dora", "target_modules", "target_parameters", "exclude_modules", "bias"),
        *("init_lora_weights", "rank_pattern", "alpha_pattern", "megatron_core", "layers_pattern"),
        *("qalora_group_size", "runtime_config", "eva_config", "loftq_config"),
        *("ensure_weight_tying", "lora_ga_config"),
    }
)
"""Keys of PEFT's config that are read below, or that do not change a saved adapter. Every other key
must have a false or empty value."""
_SAME_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the weights of the base model."""
_PATTERN = re.compile(r"\^?(?:\.\*\\?\.|[\w.]|\\\.){1,200}\$?")
"""Keys of `alpha_pattern` that are matched: names, escaped dots, and `.*` before a dot. Any other
regular expression could need exponential time."""


@dataclass(frozen=True)
class PeftSettings:
    """Content of `adapter_config.json`."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    kind: str
    dropout: float
    base: str
    """Path or hub id of the base model; empty if unknown."""
    alpha_pattern: Mapping[str, float]
    """Values of alpha that differ from `alpha`, keyed by name pattern."""
    target_parameters: Sequence[str]

    def alpha_of(self, target: str) -> float:
        """Return the value of alpha for a module or parameter."""
        for pattern, alpha in self._alphas:
            if pattern.match(target):
                return alpha
        return self.alpha

    @cached_property
    def _alphas(self) -> list[tuple[re.Pattern[str], float]]:
        pairs = self.alpha_pattern.items()
        return [(re.compile(rf"(.*\.)?({pattern})$"), alpha) for pattern, alpha in pairs]


def read_peft_settings(folder: str, where: str = KEY) -> PeftSettings:
    """Read the config of a PEFT adapter folder. `where` is the setting that error messages name.

    Raises:
        ConfigError: the folder has no adapter, or maxpipe does not support a setting.
    """
    path = expand_path(folder, where)
    if "\0" in folder or not path.is_dir():
        rule = f"must be a folder on this machine with {CONFIG} and {WEIGHTS}."
        action = "Download the adapter with `maxpipe fetch`, and use the path of its folder. To "
        action += "resume a run without the folder, use the config.yml in the run's folder."
        raise ConfigError.one(Code.HF_FOLDER, where, folder, rule, action)
    if not (path / WEIGHTS).exists():
        raise _missing_weights(path, where)
    file = path / CONFIG
    try:
        content = parse_json(read(file, _MAX_CONFIG_BYTES), dict[str, Any])
    except FileNotFoundError:
        rule, action = (
            f"must contain {CONFIG}.",
            "Use the folder that PEFT's save_pretrained wrote.",
        )
        raise ConfigError.one(Code.HF_FOLDER, where, str(path), rule, action) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        rule = f"must be a JSON object: {reason}."
        action = "Copy the file again from its source."
        raise ConfigError.one(Code.HF_DAMAGED, str(file), None, rule, action) from error
    return _settings(file, content)


def _missing_weights(path: Path, where: str) -> ConfigError:
    rule, action = f"must contain {WEIGHTS}.", "Copy the complete folder again."
    if (path / "adapter_model.bin").exists():
        rule += " adapter_model.bin is a pickle file, which can run any code and is never read."
        action = "If you trust the file, load and save the adapter with PEFT, which writes "
        action += f"{WEIGHTS}."
    return ConfigError.one(Code.HF_FOLDER, where, str(path), rule, action)


def _settings(file: Path, content: Mapping[str, Any]) -> PeftSettings:
    def refuse(key: str, rule: str, action: str) -> ConfigError:
        value = json.dumps(content.get(key))
        value = value if len(value) <= 200 else f"{value[:197]}..."
        return ConfigError.one(Code.HF_UNSUPPORTED, f"{file}: {key}", value, rule, action)

    def number(key: str, default: float, valid: str, *, low: float, high: float) -> float:
        value = content.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise refuse(key, f"must be {valid}.", "Use the file that PEFT wrote.")
        return value

    def flag(key: str) -> bool:
        if type(value := content.get(key) or False) is not bool:
            raise refuse(key, "must be true or false.", "Use the file that PEFT wrote.")
        return value

    if content.get("peft_type") != "LORA":
        rule = "must be LORA: other adapter types are not supported."
        raise refuse("peft_type", rule, "Merge the adapter into its base model with PEFT.")
    if content.get("bias", "none") not in ("none", None):
        rule = "must be none, because adapters have no biases."
        raise refuse("bias", rule, "Merge the adapter into its base model with PEFT.")
    initial = content.get("init_lora_weights", True)
    if not any(initial is value or initial == value for value in _SAME_BASE):
        rule = "is not supported, because it changes the weights of the base model."
        action = "Convert the adapter with PEFT: save_pretrained(NEW, path_initial_model_for_weight"
        raise refuse("init_lora_weights", rule, f"{action}_conversion=INITIAL).")
    for key in content:
        if key not in _IGNORED and content[key]:
            rule = "is not supported: only LoRA and DoRA of complete weight matrices are."
            raise refuse(key, rule, "Merge the adapter into its base model with PEFT.")
    patterns = {}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns[key] = content.get(key) or {}
        if not isinstance(patterns[key], dict) or not all(
            type(value) in (int, float) and 0 < value < 1e38 for value in patterns[key].values()
        ):
            raise refuse(
                key, "must map names to positive numbers.", "Use the file that PEFT wrote."
            )
    if len(patterns["alpha_pattern"]) > _MAX_PATTERNS:
        rule = f"must have at most {_MAX_PATTERNS:,} keys: each key is compared with each module."
        raise refuse("alpha_pattern", rule, "Merge the adapter into its base model with PEFT.")
    for pattern in patterns["alpha_pattern"]:
        if not _PATTERN.fullmatch(pattern) or pattern.count(".*") > 2:
            rule = "must have names of modules as its keys, not general regular expressions."
            raise refuse("alpha_pattern", rule, "Write the full name of each module instead.")
    parameters = content.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise refuse("target_parameters", "must be a list of names.", "Use the file of PEFT.")
    base = content.get("base_model_name_or_path")
    rank = number("r", 8, "an integer of at least 1", low=1, high=1 << 20)
    if type(rank) is not int:
        raise refuse("r", "must be an integer of at least 1.", "Use the file that PEFT wrote.")
    return PeftSettings(
        file.parent,
        rank,
        float(number("lora_alpha", 8, "a positive number", low=1e-37, high=1e37)),
        flag("use_rslora"),
        "dora" if flag("use_dora") else "lora",
        float(number("lora_dropout", 0.0, "from 0 to less than 1", low=0, high=1 - 2**-53)),
        base if isinstance(base, str) else "",
        {key: float(value) for key, value in patterns["alpha_pattern"].items()},
        parameters,
    )


def with_peft_values(config: Config, origins: dict[str, str]) -> Config:
    """Return the config in which the keys of section `adapter` that no file or override sets have
    the values of the PEFT folder. `origins` is updated.

    Raises:
        ConfigError: the folder has no supported adapter of the model.
    """
    folder, section = config.adapter.restore_from, KEY.partition(".")[0]
    unset = [each for each in SETTINGS if origins[f"{section}.{each}"] == DEFAULT]
    plain = replace(config.model, adapter=None, frozen=[])
    if not unset or check(replace(config, model=plain, adapter=AdapterConfig()), origins):
        return config
    values = _adapter_values(folder, plain, error_location(KEY, origins))
    for each in unset:
        origins[f"{section}.{each}"] = os.path.join(folder, CONFIG)
    filled = replace(config.adapter, **{each: values[each] for each in unset})
    return replace(config, adapter=filled)


def _adapter_values(folder: str, config: ModelConfig, where: str) -> dict[str, Any]:
    """Return the values of `SETTINGS` for a PEFT folder and the base model's config.

    Raises:
        ConfigError: as in `read_peft_settings`, or no adapter belongs to a matrix of the model.
    """
    settings = read_peft_settings(folder, where)
    values: dict[str, Any] = {name: getattr(settings, name) for name in SETTINGS[:-1]}
    names, model = _tensor_names(settings.path / WEIGHTS), describe(config)
    targets = dict[str, None]()
    for table in FAMILIES[config.family].huggingface:
        targets |= dict.fromkeys(_targets(names, settings, model, table))
    if not targets:
        rule = f"must have adapters of a {config.family} model, but {WEIGHTS} has none"
        rule += f" (for example, {names[0]!r:.100})." if names else "."
        raise ConfigError.one(
            Code.HF_TENSORS,
            where,
            folder,
            rule,
            f"Use an adapter for this base model, or the base model {settings.base!r}.",
        )
    return values | {"targets": list(targets)}


def _targets(
    names: Sequence[str], settings: PeftSettings, model: Model, table: HuggingFace
) -> Iterator[str]:
    """Yield the checkpoint names of the matrices with adapters."""
    modules = {re.sub(r"\.experts\.\d+\.", ".experts.#.", module) for module in _modules(names)}
    rows = {row.ours: row for row in table.tensors}
    both = any(name.endswith(".experts.base_layer") for name in modules)
    for number, layer_type in enumerate(model.layers):
        checkpoint_names = names_in_layers(model, layer_type)
        for key in adaptable(model.layer_types[layer_type]):
            if (row := rows.get(".".join(key))) is None:
                continue
            module = (
                table.module_name(row.theirs)
                .format(layer=number, expert="#")
                .removesuffix(".weight")
            )
            module, tensor = re.sub(r"^\w+\.(?=layers\.)", "", module), ""
            if model.layer_types[layer_type].declared[key].expert_dim >= 0:
                into = "gate_up_proj" if "experts.gate" in rows else "up_proj"
                tensor = "down_proj" if key[1] == "down" else into
            is_target = any(name.endswith(tensor) for name in settings.target_parameters)
            stacked = re.sub(r"\.\w+\.experts\..*", ".", module)
            is_stacked = tensor and any(
                name.startswith(stacked) and _STACKED.search(name) for name in modules
            )
            if module in modules or (is_stacked and (both or is_target)):
                yield checkpoint_names[key]


def _modules(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the modules with adapters, from the word `layers` on."""
    for name in names:
        # Matching the name with a single regular expression would need cubic time.
        module, separator, _ = name.rpartition(".lora_")
        if separator and (match := re.search(r"\blayers\.\d+\.", module)):
            yield module[match.start() :]


_STACKED = re.compile(r"\.experts(\.base_layer)*$")


def _tensor_names(path: Path) -> list[str]:
    """Return the tensor names in a safetensors file.

    Raises:
        ConfigError: the file has no valid header.
    """
    try:
        with open(open_regular(path), "rb") as stream:
            size, first = os.fstat(stream.fileno()).st_size, stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"the file has {size:,} bytes, which is less than its header")
            content = parse_json(stream.read(length), dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        rule = f"cannot be used as a safetensors file: {reason}."
        action = "Copy the file again from its source, and compare sizes or digests."
        raise ConfigError.one(Code.HF_DAMAGED, str(path), None, rule, action) from error
    return [name for name in content if name != "__metadata__"]
