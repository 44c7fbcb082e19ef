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
from maxpipe.config.data import template_settings
from maxpipe.config.load import Loaded
from maxpipe.config.schema import Config
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.errors import ConfigError
from maxpipe.generate.decoding import Sampling
from maxpipe.generate.staged import (
    AnyDecoding,
    decoding_of,
    for_decoding,
    prepared,
    prepared_shardings,
)
from maxpipe.io.text import counted
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import STAGE, build_mesh, describe
from maxpipe.restore.open_model import choose, is_given
from maxpipe.step.build import fit_to_devices, steps_of
from maxpipe.step.state import Partition
from maxpipe.step.step import Steps

Say = Callable[[str], None]

_TAKEN = ("run", "model", "adapter", "tokenizer", "runtime")
_ANY_COUNT = 16 * math.lcm(*range(1, 17))
"""A batch that the rules of training allow on every mesh: generation has rows of its own."""


class Weights(NamedTuple):
    """A model that is ready."""

    decoder: Decoder
    params: Any
    """In network order, layers stacked by kind, on the mesh."""
    mesh: Mesh


class Opened(Protocol):
    """A model before its parameters are read: mistakes in prompts are found first."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def room(self) -> int:
        """Tokens of a row that the model was trained on."""
        ...

    @property
    def template_settings(self) -> Mapping[str, Any]:
        """Values of `data.chat_template_kwargs` of the model's config."""
        ...

    def load(self, say: Say) -> Weights:
        """Starts the devices and reads the parameters; `say` is called with progress messages."""
        ...

    def decoding(self, say: Say, sampling: Sampling, seed: int) -> tuple[AnyDecoding, Any]:
        """The same, to generate with: the parameters are as the decoding takes them."""
        ...


def open_model(named: Address | Path, inputs: Sequence[str]) -> Opened:
    """A checkpoint or a Hugging Face folder, for its parameters alone.

    `inputs` are files and overrides that change its own config: `mesh` for the devices,
    `train.sequence_length` for the room, which is the folder's `max_position_embeddings`.

    Raises:
        ConfigError: there is no such model, or the inputs do not fit it or its tokenizer.
        StorageError: the checkpoint is damaged.
    """
    chosen = choose(named, inputs, _saved)
    _check_processes(chosen.loaded.config)
    tokenizer = chosen.prompting(open_tokenizer(chosen.loaded.config.tokenizer))
    return _Model(chosen.name, chosen.loaded, tokenizer, chosen.params)


@dataclass(frozen=True)
class _Model:
    """One with a config."""

    name: str
    loaded: Loaded
    tokenizer: Tokenizer
    params: Callable[[Steps], Any]
    """In the form of checkpoints."""

    @property
    def template_settings(self) -> Mapping[str, Any]:
        return template_settings(self.loaded.config.data.chat_template_kwargs)

    @property
    def room(self) -> int:
        return self.loaded.config.train.sequence_length

    def load(self, say: Say) -> Weights:
        """Starts the devices and reads the parameters.

        Raises:
            ConfigError: the config does not fit the devices, or has stages.
            StorageError: the checkpoint is damaged.
        """
        _check_no_stages(self.loaded.config)
        parts, params = self._read(say)
        return Weights(parts.decoder, params, parts.mesh)

    def decoding(self, say: Say, sampling: Sampling, seed: int) -> tuple[AnyDecoding, Any]:
        """The same for generation, on any mesh."""
        parts, params = self._read(say)
        if parts.mesh.shape[STAGE] == 1:
            params = _by_layer(parts.decoder, params)
        else:
            stack = jax.jit(partial(prepared, parts), out_shardings=prepared_shardings(parts))
            params = stack(params)
        return decoding_of(parts, sampling, seed), params

    def _read(self, say: Say) -> tuple[Partition, Any]:
        """The parameters in network order, layers stacked by kind."""
        config = self.loaded.config
        for each in self.loaded.cautions:
            say(f"warning: {each.line}")
        runtime.start(config.runtime, config.mesh.cpu_devices)
        config = _fitted(self.loaded, self.name, say)
        # Programs that generate and score leave shardings to the compiler.
        mesh = build_mesh(dataclasses.replace(config.mesh, shard_mode="auto"))
        steps = steps_of(config, mesh, self.tokenizer.byte_lengths)
        say(f"restoring the parameters of {self.name}")
        params = steps.partition.by_kind(self.params(steps))
        return for_decoding(steps.partition), params


def _by_layer(decoder: Decoder, params: Any) -> Any:
    """`Decoder.by_layer`, a stack at a time: each is freed when its layers are by themselves."""
    copied = jax.jit(list)

    def split(leaf: jax.Array) -> list[jax.Array]:
        each = jax.block_until_ready(copied(leaf))
        leaf.delete()
        return each

    return decoder.by_layer(params, split)


def _saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's config counts here: mesh and pipeline were for training."""
    train = {
        "steps": 1,
        "batch_size": _ANY_COUNT,
        "sequence_length": config["train"]["sequence_length"],
    }
    rules = config.get("mesh", {}).get("axis_rules", {})
    taken = {name: config[name] for name in _TAKEN if name in config}
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


def _fitted(loaded: Loaded, name: str, say: Say) -> Config:
    """The config with the user's mesh, or with all devices here on one axis."""
    if is_given(loaded, name, "mesh.ici_", "mesh.dcn_") or jax.device_count() == 1:
        return fit_to_devices(loaded).config
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
            say(f"generating on {counted(count, 'device')}: {describe(build_mesh(mesh))}")
            return fitted
    raise ConfigError.one(
        "mesh",
        f"{counted(count, 'device')}",
        "does not follow from the model: neither tensor nor fsdp divides its sizes.",
        f"Set mesh.ici_data={count}, or sizes of axes that multiply to {count}.",
    )
