"""Load models for generation: tokenizers immediately, and parameters on request.

`open_model` opens a checkpoint or a Hugging Face folder. Generation accepts any implementation of
`LazyModel`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from maxpipe.checkpoint.address import Address
from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.config.sections.source import parse_template_kwargs
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.errors import Code, ConfigError
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    AnyDecodeEngine,
    build_decode_engine,
    decode_param_layout,
    decode_param_shardings,
    to_decode_params,
)
from maxpipe.io.formatting import pluralize
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import STAGE, build_mesh, describe_mesh
from maxpipe.restore.open_model import is_overridden, open_address_or_folder
from maxpipe.step.build import resolve_mesh, steps_from_config
from maxpipe.step.state import ParamLayout
from maxpipe.step.step import Steps

MessageCallback = Callable[[str], None]

_USED_SECTIONS = ("run", "model", "adapter", "tokenizer", "runtime")
_DIVISIBLE_BATCH_SIZE = 16 * math.lcm(*range(1, 17))
"""Batch size that satisfies the divisibility rules of training on every mesh. Generation ignores
`train.batch_size`."""


class LoadedModel(NamedTuple):
    """A model whose parameters are on the mesh."""

    decoder: Decoder
    params: Any
    """Parameters on the mesh, stacked by layer type with layers in model order."""
    mesh: Mesh


class LazyModel(Protocol):
    """A model whose parameters are not loaded yet, so that invalid prompts fail early."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int:
        """Return the training sequence length in tokens."""
        ...

    @property
    def template_settings(self) -> Mapping[str, Any]:
        """Return the values of `data.chat_template_kwargs` in the model's config."""
        ...

    @property
    def model_config(self) -> ModelConfig: ...

    def load(self, say: MessageCallback) -> LoadedModel:
        """Initialize the devices and load the parameters. `say` receives progress messages."""
        ...

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[AnyDecodeEngine, Any]:
        """Return a decode engine, and the parameters in the layout that it requires."""
        ...


def open_model(named: Address | Path, inputs: Sequence[str | Mapping[str, Any]]) -> LazyModel:
    """Open a checkpoint or a Hugging Face folder for inference.

    `inputs` are config files and overrides that change the model's config. The `mesh` section
    selects the devices, and `train.sequence_length` overrides the `max_position_embeddings` of a
    Hugging Face folder.

    Raises:
        ConfigError: the model does not exist, or does not match the inputs or the tokenizer.
        StorageError: the checkpoint is damaged.
    """
    chosen = open_address_or_folder(named, inputs, _generation_config)
    _check_processes(chosen.loaded.config)
    tokenizer = chosen.prompt_tokenizer(open_tokenizer(chosen.loaded.config.tokenizer))
    return _Model(chosen.name, chosen.loaded, tokenizer, chosen.params)


@dataclass(frozen=True)
class _Model:
    """A lazily loaded model whose architecture and mesh are defined by a config."""

    name: str
    loaded: LoadedConfig
    tokenizer: Tokenizer
    params: Callable[[Steps], Any]
    """Function that loads the parameters in checkpoint layout."""

    @property
    def template_settings(self) -> Mapping[str, Any]:
        return parse_template_kwargs(self.loaded.config.data.chat_template_kwargs)

    @property
    def model_config(self) -> ModelConfig:
        return self.loaded.config.model

    @property
    def max_length(self) -> int:
        return self.loaded.config.train.sequence_length

    def load(self, say: MessageCallback) -> LoadedModel:
        """Initialize the devices and load the parameters.

        Raises:
            ConfigError: the config does not match the devices, or has pipeline stages.
            StorageError: the checkpoint is damaged.
        """
        _check_no_stages(self.loaded.config)
        parts, params = self._load_params(say)
        return LoadedModel(parts.decoder, params, parts.mesh)

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[AnyDecodeEngine, Any]:
        """Load the parameters and build a decode engine, with or without pipeline stages."""
        parts, params = self._load_params(say)
        if parts.mesh.shape[STAGE] == 1:
            params = _unstack_layers(parts.decoder, params)
        else:
            stack = jax.jit(
                partial(to_decode_params, parts), out_shardings=decode_param_shardings(parts)
            )
            params = stack(params)
        return build_decode_engine(parts, sampling, seed), params

    def _load_params(self, say: MessageCallback) -> tuple[ParamLayout, Any]:
        """Load the parameters, stacked by layer type with layers in model order."""
        config = self.loaded.config
        for warning in self.loaded.warnings:
            say(f"warning: {warning.line}")
        keep = not is_overridden(self.loaded, self.name, "mesh.cpu_devices")
        runtime.start(config.runtime, config.mesh.cpu_devices, keep_devices=keep)
        config = _fit_mesh(self.loaded, self.name, say)
        # Generation and scoring are compiled with auto mesh axes.
        mesh = build_mesh(dataclasses.replace(config.mesh, shard_mode="auto"))
        steps = steps_from_config(config, mesh, self.tokenizer.byte_lengths)
        say(f"restoring the parameters of {self.name}")
        params = steps.param_layout.split_layer_types(self.params(steps))
        return decode_param_layout(steps.param_layout), params


def _unstack_layers(decoder: Decoder, params: Any) -> Any:
    """Unstack layers as in `Decoder.by_layer`, freeing each stack before the next is copied."""
    copied = jax.jit(list)

    def split(leaf: jax.Array) -> list[jax.Array]:
        each = jax.block_until_ready(copied(leaf))
        leaf.delete()
        return each

    return decoder.by_layer(params, split)


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a checkpoint's config that apply to generation.

    Mesh sizes and the pipeline section are omitted, because they apply only to training.
    """
    train = {
        "steps": 1,
        "batch_size": _DIVISIBLE_BATCH_SIZE,
        "sequence_length": config["train"]["sequence_length"],
    }
    rules = config.get("mesh", {}).get("axis_rules", {})
    taken = {name: config[name] for name in _USED_SECTIONS if name in config}
    return taken | {"train": train, "mesh": {"axis_rules": rules}}


def _check_no_stages(config: Config) -> None:
    for key in ("ici_stage", "dcn_stage"):
        if (size := getattr(config.mesh, key)) != 1:
            raise ConfigError.one(
                Code.MESH_UNSUPPORTED,
                f"mesh.{key}",
                size,
                "must be 1, because scoring does not support pipeline stages.",
                f"Set mesh.{key}=1, and use mesh.ici_tensor or mesh.ici_data for the devices.",
            )


def _check_processes(config: Config) -> None:
    if config.runtime.num_processes != 1:
        raise ConfigError.one(
            Code.MESH_UNSUPPORTED,
            "runtime.num_processes",
            config.runtime.num_processes,
            "must be 1, because generation runs in one process on all devices of its machine.",
            "Omit the key.",
        )


def _fit_mesh(loaded: LoadedConfig, name: str, say: MessageCallback) -> Config:
    """Return the config with the mesh that the user set, or with all local devices on one axis."""
    if is_overridden(loaded, name, "mesh.ici_", "mesh.dcn_") or jax.device_count() == 1:
        return resolve_mesh(loaded).config
    config, count = loaded.config, jax.device_count()
    rules = config.mesh.axis_rules
    whole = rules | {"kv_heads": []}
    for mesh in (
        MeshConfig(ici_tensor=count, axis_rules=rules),
        MeshConfig(ici_tensor=count, axis_rules=whole),
        MeshConfig(ici_fsdp=count, axis_rules=rules),
    ):
        fitted = dataclasses.replace(config, mesh=mesh)
        if not check(fitted, loaded.origins):
            say(f"generating on {pluralize(count, 'device')}: {describe_mesh(build_mesh(mesh))}")
            return fitted
    raise ConfigError.one(
        Code.MESH_DEVICES,
        "mesh",
        f"{pluralize(count, 'device')}",
        "cannot be selected automatically: the model cannot be sharded over either tensor or fsdp.",
        f"Set mesh.ici_data={count}, or axis sizes whose product is {count}.",
    )
