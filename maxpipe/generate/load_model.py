"""Models to generate with: their tokenizer at once, and their parameters on a mesh when asked for.

`open_model` opens that of a checkpoint or of a Hugging Face folder. Whatever else is an `Opened`
can be generated with.
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
from maxpipe.config.data_sources import parse_template_kwargs
from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.errors import ConfigError
from maxpipe.generate.decoding import Sampling
from maxpipe.generate.pipeline_decoding import (
    AnyDecodeEngine,
    build_decode_engine,
    decode_param_layout,
    decode_param_shardings,
    to_decode_params,
)
from maxpipe.io.formatting import pluralize
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
"""A batch that the rules of training allow on every mesh: generation has rows of its own."""


class LoadedModel(NamedTuple):
    """A model that is ready."""

    decoder: Decoder
    params: Any
    """In network order, layers stacked by kind, on the mesh."""
    mesh: Mesh


class LazyModel(Protocol):
    """A model before its parameters are read: mistakes in prompts are found first."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int:
        """Tokens of a row that the model was trained on."""
        ...

    @property
    def template_settings(self) -> Mapping[str, Any]:
        """Values of `data.chat_template_kwargs` of the model's config."""
        ...

    def load(self, say: MessageCallback) -> LoadedModel:
        """Starts the devices and reads the parameters; `say` is called with progress messages."""
        ...

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[AnyDecodeEngine, Any]:
        """The same, to generate with: the parameters are as the decoding takes them."""
        ...


def open_model(named: Address | Path, inputs: Sequence[str]) -> LazyModel:
    """A checkpoint or a Hugging Face folder, for its parameters alone.

    `inputs` are files and overrides that change its own config: `mesh` for the devices,
    `train.sequence_length` for the room, which is the folder's `max_position_embeddings`.

    Raises:
        ConfigError: there is no such model, or the inputs do not fit it or its tokenizer.
        StorageError: the checkpoint is damaged.
    """
    chosen = open_address_or_folder(named, inputs, _generation_config)
    _check_processes(chosen.loaded.config)
    tokenizer = chosen.prompt_tokenizer(open_tokenizer(chosen.loaded.config.tokenizer))
    return _Model(chosen.name, chosen.loaded, tokenizer, chosen.params)


@dataclass(frozen=True)
class _Model:
    """One with a config."""

    name: str
    loaded: LoadedConfig
    tokenizer: Tokenizer
    params: Callable[[Steps], Any]
    """In the form of checkpoints."""

    @property
    def template_settings(self) -> Mapping[str, Any]:
        return parse_template_kwargs(self.loaded.config.data.chat_template_kwargs)

    @property
    def max_length(self) -> int:
        return self.loaded.config.train.sequence_length

    def load(self, say: MessageCallback) -> LoadedModel:
        """Starts the devices and reads the parameters.

        Raises:
            ConfigError: the config does not fit the devices, or has stages.
            StorageError: the checkpoint is damaged.
        """
        _check_no_stages(self.loaded.config)
        parts, params = self._load_params(say)
        return LoadedModel(parts.decoder, params, parts.mesh)

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[AnyDecodeEngine, Any]:
        """The same for generation, on any mesh."""
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
        """The parameters in network order, layers stacked by kind."""
        config = self.loaded.config
        for each in self.loaded.warnings:
            say(f"warning: {each.line}")
        runtime.start(config.runtime, config.mesh.cpu_devices)
        config = _fit_mesh(self.loaded, self.name, say)
        # Programs that generate and score leave shardings to the compiler.
        mesh = build_mesh(dataclasses.replace(config.mesh, shard_mode="auto"))
        steps = steps_from_config(config, mesh, self.tokenizer.byte_lengths)
        say(f"restoring the parameters of {self.name}")
        params = steps.param_layout.split_layer_types(self.params(steps))
        return decode_param_layout(steps.param_layout), params


def _unstack_layers(decoder: Decoder, params: Any) -> Any:
    """`Decoder.by_layer`, a stack at a time: each is freed when its layers are by themselves."""
    copied = jax.jit(list)

    def split(leaf: jax.Array) -> list[jax.Array]:
        each = jax.block_until_ready(copied(leaf))
        leaf.delete()
        return each

    return decoder.by_layer(params, split)


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's config counts here: mesh and pipeline were for training."""
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
                f"mesh.{key}",
                size,
                "must be 1: texts are scored without stages.",
                f"Set mesh.{key}=1, and mesh.ici_tensor or mesh.ici_data for the devices.",
            )


def _check_processes(config: Config) -> None:
    if config.runtime.num_processes != 1:
        raise ConfigError.one(
            "runtime.num_processes",
            config.runtime.num_processes,
            "must be 1: one process generates, on all devices of its machine.",
            "Leave it out.",
        )


def _fit_mesh(loaded: LoadedConfig, name: str, say: MessageCallback) -> Config:
    """The config with the user's mesh, or with all devices here on one axis."""
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
        "mesh",
        f"{pluralize(count, 'device')}",
        "does not follow from the model: neither tensor nor fsdp divides its sizes.",
        f"Set mesh.ici_data={count}, or sizes of axes that multiply to {count}.",
    )
