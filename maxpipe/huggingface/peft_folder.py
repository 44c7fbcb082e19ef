"""Read the adapters of a PEFT folder, which PEFT or `maxpipe export --adapter` wrote."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from maxpipe.config.check import error_location
from maxpipe.config.peft_settings import CONFIG, KEY, WEIGHTS, read_peft_settings
from maxpipe.config.rules import format_value
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.config_json import table_for
from maxpipe.huggingface.peft_layout import PREFIX, SUFFIXES, AdaptedTensor, adapted_tensors
from maxpipe.huggingface.safetensors import (
    DTYPES,
    SafetensorsReader,
    format_names,
    format_shape,
)
from maxpipe.huggingface.tensor_layouts import canonical
from maxpipe.io.formatting import pluralize
from maxpipe.models.adapters import DOWN, UP
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.models.registry import describe


class PeftFolder:
    """Adapters of a PEFT folder, for the matrices that a config adapts."""

    def __init__(self, config: ModelConfig, adapter: AdapterConfig, origins: Mapping[str, str]):
        """Open the folder `adapter.restore_from`, and check its config and tensor shapes.

        Raises:
            ConfigError: the folder is damaged, or has other adapters than the config defines.
        """
        where = error_location(KEY, origins)
        self._settings = read_peft_settings(adapter.restore_from, where)
        self._config = adapter
        own_config = os.path.join(adapter.restore_from, CONFIG)
        self._has_own_targets = origins.get("adapter.targets") == own_config
        self._check_settings(origins)
        self._model = describe(replace(config, adapter=adapter))
        self._reader = SafetensorsReader(self._settings.path / WEIGHTS)
        self._names = self._canonical_names()
        stacked = any(re.search(r"\.experts(\.base_layer)*\.lora_", name) for name in self._names)
        table, _ = table_for(config)
        try:
            self._tensors, _ = adapted_tensors(self._model, table, stacked=stacked)
        except ConfigError as error:
            file = str(self._settings.path / CONFIG)
            rule = f"is not supported: {error.problems[0].rule}"
            action = "Merge the adapter into its base model with PEFT."
            raise ConfigError.one(Code.HF_UNSUPPORTED, file, None, rule, action) from error
        self._check_tensors()

    def note(self) -> str:
        """Return the message that names the folder and its base model."""
        base = f", which was trained on {self._settings.base}" if self._settings.base else ""
        return f"starting from the adapter {self._settings.path}{base}"

    def factor(self, name: str, end: str) -> np.ndarray:
        """Return one adapter factor of a matrix, stacked over the layers of its type.

        Raises:
            ConfigError: the file cannot be read, or the values are not finite or do not fit.
        """
        factor = np.zeros(())
        for tensor in self._tensors:
            numbers = [n for n, part in enumerate(tensor.parts) if part.name == name]
            for number in numbers:
                part, values = tensor.parts[number], self._read(tensor)[number][end]
                if not factor.ndim:
                    place = part.place
                    param = place.layer_type.params[place.key[0], place.key[1] + end]
                    factor = np.zeros((self._num_layers[name], *param.shape), np.float32)
                target = factor[part.layer]
                if part.expert is not None:
                    at = part.place.layer_type.adapters[part.place.key].expert_dim
                    target = np.moveaxis(target, at, 0)[part.expert : part.expert + 1]
                    values = np.moveaxis(values, at, 0)
                target[...] = values
        return factor

    @cached_property
    def _num_layers(self) -> Mapping[str, int]:
        pairs = {(part.name, part.layer) for tensor in self._tensors for part in tensor.parts}
        return Counter(name for name, _ in pairs)

    def _check_settings(self, origins: Mapping[str, str]) -> None:
        for name in ("rank", "alpha", "rslora", "kind"):
            theirs, ours = getattr(self._settings, name), getattr(self._config, name)
            if theirs != ours:
                raise ConfigError.one(
                    Code.HF_TENSORS,
                    error_location(f"adapter.{name}", origins),
                    format_value(ours),
                    f"must be {format_value(theirs)}, the value of the adapter in "
                    f"{self._settings.path}.",
                    f"Omit adapter.{name}.",
                )

    def _canonical_names(self) -> dict[str, str]:
        """Return the tensor names in the file, keyed by name without the prefixes of PEFT."""
        names: dict[str, str] = {}
        for name in self._reader.entries:
            short = canonical(name.removeprefix(PREFIX)).removesuffix(".default")
            short = re.sub(r"(lora_magnitude_vector)\.weight$", r"\1", short)
            if short in names:
                rule = f"contains {names[short]!r} and {name!r}, which are the same tensor."
                raise self._error(rule, "Save the adapter again with PEFT.")
            names[short] = name
        return names

    def _check_tensors(self) -> None:
        ends = SUFFIXES if self._config.kind == "dora" else {DOWN: "", UP: ""}
        wanted = {tensor.key(end).removeprefix(PREFIX) for tensor in self._tensors for end in ends}
        missing = sorted(wanted - self._names.keys())
        surplus = sorted(self._names.keys() - wanted)
        other = self._settings.base or "the base model of the adapter"
        if missing:
            rule = f"lacks {pluralize(len(missing), 'tensor')}: {format_names(missing)}."
            action = f"Copy the file again, or set checkpoint.restore_from to {other}."
            if self._has_in_other_layers(missing):
                rule = f"{rule[:-1]}, although a matrix must have adapters in all its layers."
                action = "Merge the adapter into its base model with PEFT, or set "
                action += f"checkpoint.restore_from to {other}."
            raise self._error(rule, action)
        if surplus:
            rule = f"has {pluralize(len(surplus), 'tensor')} that "
            if self._has_own_targets:
                rule += "belong to no matrix that supports adapters in this base model: "
                action = "Merge the adapter into its base model with PEFT, or "
            else:
                rule += "no matrix in adapter.targets uses: "
                action = "Omit adapter.targets, or "
            action += f"set checkpoint.restore_from to {other}."
            raise self._error(f"{rule}{format_names(surplus)}.", action)
        for tensor in self._tensors:
            self._check_shapes(tensor, ends)

    def _has_in_other_layers(self, missing: Sequence[str]) -> bool:
        """Return whether each missing tensor's module has no adapter, and the module of another
        layer has one.
        """
        modules = {name.rpartition(".lora_")[0] for name in self._names}
        anywhere = {re.sub(r"\.\d+\.", ".#.", module) for module in modules}
        lacking = {name.rpartition(".lora_")[0] for name in missing}
        return not lacking & modules and all(
            re.sub(r"\.\d+\.", ".#.", module) in anywhere for module in lacking
        )

    def _check_shapes(self, tensor: AdaptedTensor, ends: Mapping[str, str]) -> None:
        rank, other = self._config.rank, self._settings.base or "the base model of the adapter"
        wider = rank * len(tensor.parts)
        wanted = {each: tensor.shapes(each) for each in (rank, wider)}
        found = {end: self._reader.entries[self._name(tensor, end)] for end in ends}
        shapes = {end: entry.shape for end, entry in found.items()}
        for end, entry in found.items():
            if entry.dtype not in DTYPES:
                rule = f"must have the dtype {' or '.join(DTYPES)}."
                raise self._error(
                    rule, "Save the adapter again in float32.", tensor, end, entry.dtype
                )
            valid = {format_shape(each[end]): None for each in wanted.values()}
            if format_shape(entry.shape) not in valid and _is_other_rank(entry.shape, end, wanted):
                raise ConfigError.one(
                    Code.HF_UNSUPPORTED,
                    f"{self._settings.path}: rank_pattern",
                    None,
                    f"gives {tensor.target} another rank than r = {rank}: all adapters must have "
                    "the same rank.",
                    "Train with one rank, or merge the adapter with PEFT.",
                )
            if format_shape(entry.shape) not in valid:
                rule = f"must have the shape {' or '.join(valid)} for this base model and rank."
                action = f"Set checkpoint.restore_from to {other}."
                raise self._error(rule, action, tensor, end, format_shape(entry.shape))
        whole = next((each for each, sizes in wanted.items() if {**sizes, **shapes} == sizes), None)
        if whole is None:
            shape = format_shape(shapes[UP])
            raise self._error(
                "must have the rank of lora_A.", "Copy the file again.", tensor, UP, shape
            )
        alpha, root = self._settings.alpha_of(tensor.target), self._config.rslora
        scales = (
            each / (size**0.5 if root else size)
            for each, size in ((alpha, whole), (self._config.alpha, rank))
        )
        if not math.isclose(*scales, rel_tol=1e-6):
            raise ConfigError.one(
                Code.HF_UNSUPPORTED,
                f"{self._settings.path}: alpha_pattern",
                format_value(alpha),
                f"gives {tensor.target} another ratio of alpha to rank than the other modules.",
                "Train with one ratio of alpha to rank, or merge the adapter with PEFT.",
            )

    def _read(self, tensor: AdaptedTensor) -> list[dict[str, np.ndarray]]:
        from maxpipe.checkpoint.digests import num_non_finite

        ends = [end for end in SUFFIXES if self._config.kind == "dora" or end in (DOWN, UP)]
        values: dict[str, np.ndarray] = {}
        for end in ends:
            read = self._reader.read(self._name(tensor, end))
            if bad := num_non_finite(read):
                rule = (
                    f"must be finite, but has {pluralize(bad, 'value')} that are NaN or infinite."
                )
                action = "Copy the file again, or use an earlier version of the adapter."
                raise self._error(rule, action, tensor, end)
            values[end] = read.astype(np.float32)
        factors = tensor.from_peft(values, self._config.rank)
        if factors is None:
            rule = (
                "changes parts of the tensor that adapter.targets does not select, or has a rank "
            )
            rule += "that its matrices share (rank_pattern)."
            raise self._error(rule, "Omit adapter.targets.", tensor, UP)
        return factors

    def _name(self, tensor: AdaptedTensor, end: str) -> str:
        return self._names[tensor.key(end).removeprefix(PREFIX)]

    def _error(
        self,
        rule: str,
        action: str,
        tensor: AdaptedTensor | None = None,
        end: str = "",
        value: str | None = None,
    ) -> ConfigError:
        where = str(self._reader.path)
        where += f": {self._name(tensor, end)}" if tensor else ""
        return ConfigError.one(Code.HF_TENSORS, where, value, rule, action)


def _is_other_rank(
    shape: tuple[int, ...], end: str, wanted: Mapping[int, Mapping[str, tuple[int, ...]]]
) -> bool:
    """Return whether a factor's shape differs from the expected shapes only in its rank."""
    if end not in (DOWN, UP) or len(shape) != 2:
        return False
    own = 1 if end == DOWN else 0
    return any(shape[own] == each[end][own] for each in wanted.values())
