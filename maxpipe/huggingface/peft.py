"""Export adapters, either merged into their base model or alone in PEFT format.

The PEFT format consists of `adapter_config.json` and `adapter_model.safetensors`. The base model is
loaded from the same path that was used for training. Weight matrices that are quantized or have
adapters are merged one layer at a time.

Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath

from maxpipe.checkpoint import digests, manifest
from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.folder import BASE, AdapterBase, CheckpointFolder
from maxpipe.checkpoint.manager import resolve_step
from maxpipe.checkpoint.reader import combine_digests
from maxpipe.checkpoint.slab_writer import Region
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER as CHECKPOINTS
from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface import mapping
from maxpipe.huggingface.folder import (
    HuggingFaceFolder,
    folder_of,
    open_folder,
)
from maxpipe.huggingface.peft_layout import (
    CONFIG,
    SUFFIXES,
    WEIGHTS,
    AdaptedTensor,
    MatrixLocation,
    adapted_tensors,
    matrix_locations,
    target_names,
)
from maxpipe.huggingface.safetensors import DTYPES, SafetensorsWriter
from maxpipe.io.typed_json import check_type
from maxpipe.models.adapters import DOWN, LENGTH, UP, is_held
from maxpipe.models.config import AdapterConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model
from maxpipe.nn.adapters import quantize_dequantize
from maxpipe.parallel.lora_weight import LoraWeight


class LazyArray(NamedTuple):
    """An array that is read from disk, or computed from arrays on disk, on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    """Shape of the smallest region that can be read efficiently."""
    read: Callable[[Region], np.ndarray]


def open_lazy_array(path: epath.Path, name: str) -> LazyArray:
    """Open a checkpoint array without reading it."""
    array = manifest.open_array(path, name)
    shape = tuple(array.shape)
    part = tuple(array.chunk_layout.read_chunk.shape or shape)
    return LazyArray(
        shape, array.dtype.numpy_dtype, part, lambda region: array[region].read().result()
    )


def read_all(array: LazyArray) -> np.ndarray:
    """Read the complete array into memory."""
    return array.read(tuple(slice(0, size) for size in array.shape))


@dataclass(frozen=True)
class CheckpointAdapters:
    """Adapters stored in a checkpoint, and their base model."""

    path: epath.Path
    """Path of the checkpoint that stores the adapters."""
    prefix: str
    """Name prefix of the trained parameters in the checkpoint, such as `params.`."""
    config: Config
    base_record: AdapterBase
    _sums: dict[str, digests.ArrayDigest] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls, path: epath.Path, prefix: str, config: Config, data: Mapping[str, Any]
    ) -> CheckpointAdapters:
        """Return the adapters of a checkpoint.

        Raises:
            ValueError: the checkpoint's record of its base model is invalid.
            KeyError: the checkpoint does not record its base model.
        """
        return cls(path, prefix, config, check_type(data[BASE], AdapterBase))

    @cached_property
    def _model(self) -> Model:
        return describe(self.config.model)

    @cached_property
    def base(self) -> HuggingFaceFolder | epath.Path:
        """Open the base model: a Hugging Face folder, or the folder of a checkpoint step."""
        address = self.base_record["address"]
        if (folder := folder_of(address)) is not None:
            images = self._model.ends.vision is not None
            return open_folder(folder, "base", images=images).with_layer_types(self.config.model)
        run = parse_address(address)
        steps = CheckpointFolder(os.path.join(run.home, CHECKPOINTS))
        return steps / resolve_step(steps, run)

    def factor(self, name: str, end: str) -> np.ndarray:
        """Return one adapter factor (LoRA A or B, or DoRA magnitudes), stacked over all layers.

        Raises:
            DamagedError: the array cannot be decoded.
        """
        full_name = f"{self.prefix}{name}{end}"
        return manifest.call_detecting_damage(
            lambda: read_all(open_lazy_array(self.path, full_name))
        )

    def _base(self, name: str, shape: tuple[int, ...]) -> LazyArray:
        """Open a base-model array in the training dtype. Each read updates the array's digest."""
        source, place = self.base, matrix_locations(self._model).get(name)
        exact = place.layer_type.declared[place.key].own_dtype if place else ""
        dtype = jnp.dtype(exact or self.config.model.param_dtype)
        if isinstance(source, HuggingFaceFolder):
            size = self.config.model.vocab_size
            read, chunk = lambda region: source.read_region(name, dtype, region, size), shape
        else:
            array = open_lazy_array(source, f"params.{name}")
            read, chunk, shape = array.read, array.chunk_shape, array.shape
        total = digests.ArrayDigest(str(dtype), shape)
        self._sums[name] = total

        def counted(region: Region) -> np.ndarray:
            values = np.asarray(read(region)).astype(dtype)
            part = digests.ArrayDigest(total.dtype, total.shape)
            part.add(values, [indices.start for indices in region])
            with self._lock:
                total.merge(part)
            return values

        return LazyArray(shape, dtype, chunk, counted)

    def array(self, name: str, shape: tuple[int, ...]) -> LazyArray:
        """Open a parameter of the merged model."""
        base, place = self._base(name, shape), matrix_locations(self._model).get(name)
        if place is None or not (is_held(*place) or place.key in place.layer_type.adapters):
            return base
        layer_type, key = place
        ends = [end for end in (DOWN, UP, LENGTH) if (key[0], key[1] + end) in layer_type.stored]
        factors = {end: self.factor(name, end) for end in ends}

        def read(region: Region) -> np.ndarray:
            (layers, *inner) = region
            weights = base.read((layers, *(slice(0, size) for size in base.shape[1:])))
            merged = np.empty(weights.shape, np.float32)
            for number, weight in enumerate(map(jnp.asarray, weights)):
                weight = (
                    quantize_dequantize(layer_type, key, weight)
                    if is_held(layer_type, key)
                    else weight
                )
                merged[number] = weight.astype(jnp.float32)
                if ends:
                    layer = layers.start + number
                    merged[number] = self._merge(place, factors, layer, merged[number])
            return merged[(slice(None), *inner)]

        return LazyArray(base.shape, np.dtype(np.float32), (1, *base.shape[1:]), read)

    def _merge(
        self,
        place: MatrixLocation,
        factors: Mapping[str, np.ndarray],
        layer: int,
        weight: np.ndarray,
    ) -> Any:
        adapter = place.layer_type.adapters[place.key]
        down, up = (jnp.asarray(factors[end][layer]) for end in (DOWN, UP))
        lengths = jnp.asarray(factors[LENGTH][layer]) if LENGTH in factors else None
        scale, *dims = adapter.scale, adapter.num_contracted_dims, adapter.expert_dim
        return LoraWeight(jnp.asarray(weight), down, up, lengths, None, scale, 0.0, *dims).merge()

    def check(self) -> None:
        """Check that the adapters were trained with the weights of this base model.

        Raises:
            ConfigError: the weight digests differ.
        """
        if (digest := combine_digests(self._sums)) != self.base_record["digest"]:
            raise ConfigError.one(
                Code.CKPT_BASE,
                "base",
                self.base_record["address"],
                "must contain the weights with which the adapters were trained: expected digest "
                f"{self.base_record['digest'][:16]}, got {digest[:16]}.",
                "Restore the original base model.",
            )


def write_adapters(
    adapters: CheckpointAdapters,
    model: Model,
    table: HuggingFace,
    here: Path,
    dtype: str,
    base: str | None,
) -> list[str]:
    """Write the adapter config and weights, and return the names of the tensors with adapters.

    `model` includes the adapters; `table` is the conversion table of its family. `base` is the
    folder or hub id of the base model. If `base` is None, the checkpoint address of the base model
    is written.

    Raises:
        ConfigError: PEFT does not support one of the adapters, or `dtype` cannot represent a value.
    """
    adapted, names = adapted_tensors(model, table)
    tensors = {name: (DTYPES[dtype], values.shape) for name, values in _tensors(adapters, adapted)}
    with SafetensorsWriter(here / WEIGHTS, tensors) as writer:
        for name, values in _tensors(adapters, adapted):
            writer.write(name, mapping.cast(values, writer.dtype(name), name))
    config = adapters.config.adapter
    text = json.dumps(
        _config(config, base or adapters.base_record["address"], adapted, names), indent=2
    )
    (here / CONFIG).write_text(text + "\n", encoding="utf-8")
    return [each.tensor for each in adapted]


def _tensors(
    adapters: CheckpointAdapters, adapted: list[AdaptedTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    known: dict[str, dict[str, np.ndarray]] = {}
    for tensor in adapted:
        for part in tensor.parts:
            (sublayer, own), stored = part.place.key, part.place.layer_type.stored
            if part.name not in known:
                ends = [end for end in SUFFIXES if (sublayer, own + end) in stored]
                known[part.name] = {end: adapters.factor(part.name, end) for end in ends}
        factors = [
            {end: values[part.layer] for end, values in known[part.name].items()}
            for part in tensor.parts
        ]
        for end, values in tensor.to_peft(factors).items():
            yield tensor.key(end), values


def _config(
    config: AdapterConfig, base: str, adapted: list[AdaptedTensor], every: list[str]
) -> Mapping[str, Any]:
    modules = [each.target for each in adapted if not each.is_parameter]
    parameters = [each.target for each in adapted if each.is_parameter]
    names = target_names([each.target for each in adapted], every)
    wider = {names[each.target]: len(each.parts) for each in adapted if len(each.parts) > 1}
    scales = {name: count**0.5 if config.rslora else count for name, count in wider.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # PEFT requires 0 for parameters. The value affects only training.
        "lora_dropout": 0.0 if parameters else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.kind == "dora",
        "target_modules": list(dict.fromkeys(names[each] for each in modules)),
        **(
            {"target_parameters": list(dict.fromkeys(names[each] for each in parameters))}
            if parameters
            else {}
        ),
        "rank_pattern": {re.escape(name): config.rank * count for name, count in wider.items()},
        "alpha_pattern": {re.escape(name): config.alpha * scale for name, scale in scales.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
