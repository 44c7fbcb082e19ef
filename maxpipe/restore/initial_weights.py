"""Load a run's initial weights from the checkpoint of another run or from a Hugging Face folder.

The model config is checked before weights are read. The run's vocabulary may be larger than the
saved vocabulary. Arrays have the checkpoint layout: layers in model order, without padding.

The checkpoint of an adapter run holds only the adapters and a reference to the base model. The base
model is not copied. The base model is read from its address, and each read verifies a digest of the
content.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import map_named_leaves
from maxpipe.checkpoint.folder import BASE, AdapterBase, CheckpointMetadata
from maxpipe.checkpoint.manager import RestoredCheckpoint, open_address, resolve_step_on_all
from maxpipe.checkpoint.reader import content_digest
from maxpipe.checkpoint.storage import DamagedError, in_bucket
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.rules import format_value
from maxpipe.config.schema import (
    KEYS,
    default_of,
    flatten,
    is_of_another_family,
    legacy_value_of,
    names_in,
    section_of,
    upgrade_setting,
)
from maxpipe.config.sections.model import FAMILY
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.huggingface.folder import (
    PREFIX,
    HuggingFaceFolder,
    folder_of,
)
from maxpipe.huggingface.folder import open_folder as open_folder
from maxpipe.huggingface.import_ import WEIGHTS_ONLY, describe_source
from maxpipe.huggingface.peft_folder import PeftFolder
from maxpipe.huggingface.upcycle import has_experts
from maxpipe.io.typed_json import check_type
from maxpipe.models.adapters import DOWN, LENGTH, UP
from maxpipe.models.config import AdapterConfig, ModelConfig, num_unquantized_layers
from maxpipe.models.huggingface import WITHOUT_MTP
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model
from maxpipe.step.step import Steps

Tree = Any


def read_folder_params(source: HuggingFaceFolder, abstract: Tree) -> Tree:
    """Load the parameters from a Hugging Face folder, sharded like `abstract`.

    Each process reads the shards of its devices, one device's shard of one parameter at a time.

    Raises:
        ConfigError: a file cannot be read, or contains NaN or infinity.
    """
    size = _vocabulary(abstract)

    def read(name: str, leaf: Any) -> jax.Array:
        places: dict[str, list[Any]] = {}  # shards that several devices hold are read once
        regions = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        for device, region in regions.items():
            places.setdefault(str(region), []).append(device)
        shards = {}
        for devices in places.values():
            values = source.read_region(name, np.dtype(leaf.dtype), regions[devices[0]], size)
            for device in devices:
                shards[device] = jax.device_put(values, device)
            jax.block_until_ready(shards[devices[-1]])  # frees `values`
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [shards[device] for device in regions]
        )

    return map_named_leaves(read, abstract)


def _vocabulary(params: Tree) -> int:
    return params["embedding"].shape[0]


def with_vocabulary(abstract: Tree, model: Model) -> Tree:
    """Return `abstract` with the vocabulary of `model` and with unsharded vocabulary dims."""
    rows = _vocabulary_rows(model)

    def resize(name: str, leaf: Any) -> Any:
        if name not in rows:
            return leaf
        dim, size = rows[name]
        shape, spec = list(leaf.shape), [*leaf.sharding.spec, *[None] * leaf.ndim][: leaf.ndim]
        shape[dim], spec[dim] = size, None
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    return map_named_leaves(resize, abstract)


def _vocabulary_rows(model: Model) -> dict[str, tuple[int, int]]:
    """Return the index and size of the vocabulary dim of each embedding table and output
    projection, keyed by checkpoint name.
    """
    found = {
        ".".join(name): (param.axes.index("vocab"), param.shape[param.axes.index("vocab")])
        for name, param in model.ends.params.items()
        if "vocab" in param.axes
    }
    several = len(model.layer_types) > 1
    for layer_type, each in model.layer_types.items():
        prefix = f"layers.{layer_type}." if several else "layers."
        for name, param in each.params.items():
            if "layer_vocab" in param.axes:
                dim = param.axes.index("layer_vocab")
                found[prefix + ".".join(name)] = dim + 1, param.shape[dim]
    return found


def grow_vocabulary(params: Tree, abstract: Tree) -> Tree:
    """Grow the vocabulary to its size in `abstract`; each new row is the mean of the old rows."""

    def grow(table: jax.Array, wanted: Any) -> jax.Array:
        if table.shape == wanted.shape:
            return table
        sizes = zip(table.shape, wanted.shape, strict=True)
        (dim,) = (dim for dim, (old, new) in enumerate(sizes) if old != new)

        def extend(table: jax.Array) -> jax.Array:
            mean = table.astype(jnp.float32).mean(dim, keepdims=True).astype(table.dtype)
            shape = list(table.shape)
            shape[dim] = wanted.shape[dim] - table.shape[dim]
            return jnp.concatenate([table, jnp.broadcast_to(mean, shape)], dim)

        return jax.jit(extend, out_shardings=wanted.sharding)(table)

    return jax.tree.map(grow, params, abstract)


def vocabulary_growth_note(before: int, now: int) -> str:
    """Return the message for a vocabulary that grows from `before` to `now` tokens."""
    assert now > before
    return (
        f"the vocabulary grows from {before:,} to {now:,} tokens: each new row of the embedding"
        " tables and of the output projection is the mean of the old rows"
    )


KEY = "checkpoint.restore_from"

_MTP_HEADS_KEY, _MTP_KIND_KEY = "model.mtp_heads", "model.mtp_kind"
"""Keys for the number and the architecture of the multi-token prediction heads. The architecture is
ignored if the number is 0."""

# Model keys that may change between a checkpoint and a run that resumes from it.
_FREE_MODEL_KEYS = frozenset(
    {"model.dropout", "model.attention", "model.compute_dtype", "model.mtp_loss_weight"}
    | {"model.matmul", "model.matmul_parts", "model.matmul_scales", "model.frozen"}
    | {"model.matmul_weight_gradients"}
)
_FREE_FAMILY_KEYS = frozenset(
    {"dispatch", "expert_backend", "all_to_all", "all_to_all_chunks", "min_pixels", "max_pixels"}
)
"""Keys that may change in the config section of any model family, because they select only the
implementation of the experts or the sizes of images."""

_UNQUANTIZED_KEY = "model.matmul_unquantized_layers"

# This key also determines the dtype of the optimizer state. A run that starts from weights alone
# restores no optimizer state, so the run can cast the weights.
_TYPE = "model.param_dtype"

NEW_START = "checkpoint.restore_from to a run with this model, or to '' for a fresh start"


class Notifier(Protocol):
    """Interface for printing messages at the start of a run; implemented by the run's console."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class InitialWeights(NamedTuple):
    """Weights from a checkpoint or a Hugging Face folder."""

    params: Any
    """Parameters in checkpoint layout, without adapters, on the mesh."""
    description: str
    """Description of the checkpoint or folder, printed for the user."""
    address: str
    """Address of the exact checkpoint or folder that was read."""


def read_weights(
    text: str, loaded: LoadedConfig, steps: Steps, console: Notifier, tokenizer: str = ""
) -> InitialWeights:
    """Read weights from the address `text`, in the same format as `checkpoint.restore_from`.

    `tokenizer` is the fingerprint of the run's tokenizer. A warning is printed if the weights were
    trained with another tokenizer.

    Raises:
        ConfigError: the weights do not exist or belong to another model.
        StorageError: the weights cannot be read.
    """
    if (folder := folder_of(text)) is not None:
        return _read_folder_weights(folder, loaded, steps, console)
    config, wanted = loaded.config, steps.abstract_base
    other = read_other_metadata(text, loaded)
    said = other.config.get("model", {}).get("vocab_size") if other else None
    size = said if isinstance(said, int) else config.model.vocab_size
    grows = size < config.model.vocab_size

    def accept(facts: CheckpointMetadata) -> None:
        _check_not_adapters(facts, text, loaded)
        _check_weights(facts.config["model"], loaded)
        before = facts.data["fingerprint"].get("tokenizer")
        if before and tokenizer and before != tokenizer:
            console.warn(
                f"tokenizer: the fingerprint was {before} at step {facts.step} and is now "
                f"{tokenizer}: the weights were trained with different token ids"
            )

    abstract = wanted
    if grows:
        abstract = with_vocabulary(wanted, describe(replace(config.model, vocab_size=size)))
    found = restore_other(text, loaded, {"params": abstract}, accept)
    params = found.state["params"]
    if grows:
        console.note(vocabulary_growth_note(size, config.model.vocab_size))
        params = grow_vocabulary(params, wanted)
    source = f"{text}, step {found.step}"
    if found.metadata.data.get(WEIGHTS_ONLY):
        source += " (weights only)"
    address = parse_address(text, error_location(KEY, loaded.origins), config.run.dir).address_at(
        found.step
    )
    return InitialWeights(
        params, source, address if in_bucket(address) else os.path.abspath(address)
    )


def _read_folder_weights(
    folder: str, loaded: LoadedConfig, steps: Steps, console: Notifier
) -> InitialWeights:
    """Read the weights of a Hugging Face folder."""
    config = loaded.config
    has_images = describe(config.model).ends.vision is not None
    source = open_folder(folder, error_location(KEY, loaded.origins), images=has_images)
    if has_experts(describe(config.model)) and not has_experts(describe(source.config)):
        raise ConfigError.one(
            Code.HF_UPCYCLE,
            error_location(KEY, loaded.origins),
            PREFIX + folder,
            f"must hold a model with experts, as model.family={config.model.family}, but the "
            f"folder holds a dense {source.description.table.architecture}.",
            f"Run `maxpipe import {folder} --out NEW --upcycle` with the model keys of this run, "
            f"and set {KEY}=NEW.",
        )
    wanted = to_dict(config)["model"]
    decided = {**WITHOUT_MTP, **source.description.section}
    if decided["mtp_heads"] and not config.model.mtp_heads:
        console.note("model.mtp_heads=0: the folder's multi-token prediction layers are not loaded")
        decided |= {**WITHOUT_MTP, "mtp_kind": config.model.mtp_kind}
    # config.json has no values for other keys, such as dropout.
    own = {
        name: {**wanted.get(name, {}), **keys}
        for name, keys in decided.items()
        if isinstance(keys, dict)
    }
    _check_weights(wanted | decided | own, loaded)
    for line in describe_source(source):
        console.note(line)
    if (before := source.config.vocab_size) < config.model.vocab_size:
        console.note(vocabulary_growth_note(before, config.model.vocab_size))
    params = read_folder_params(source.with_layer_types(config.model), steps.abstract_base)
    return InitialWeights(params, str(source.folder), PREFIX + os.path.abspath(source.folder))


def _check_weights(saved: Mapping[str, Any], loaded: LoadedConfig) -> None:
    """Compare a saved `model` section with the run's section, whose vocabulary may be larger.

    Raises:
        ConfigError: keys that must not change differ; the error lists all of them.
    """
    wanted = to_dict(loaded.config)["model"]
    key, before = "vocab_size", saved.get("vocab_size")
    if isinstance(before, int) and before < wanted[key]:
        wanted[key] = before
    check_model(saved, wanted, loaded.origins, NEW_START, weights_alone=True)


def _check_not_adapters(facts: CheckpointMetadata, text: str, loaded: LoadedConfig) -> None:
    """Check that a checkpoint holds a complete model.

    Raises:
        ConfigError: the checkpoint holds only adapters.
    """
    if has_adapters(facts):
        raise ConfigError.one(
            Code.CKPT_BASE,
            error_location(KEY, loaded.origins),
            text,
            f"must hold a complete model, but step {facts.step} holds only adapters "
            f"(adapter.rank={facts.config['adapter']['rank']}).",
            f"Merge the adapters with `maxpipe export {text} OUT`, and set {KEY}=hf:OUT.",
        )


def has_adapters(facts: CheckpointMetadata) -> bool:
    """Return whether a checkpoint holds adapters instead of a complete model."""
    return bool(facts.config.get("adapter", {}).get("rank"))


def read_other_metadata(text: str, loaded: LoadedConfig) -> CheckpointMetadata | None:
    """Return the metadata of the checkpoint at an address, or None if it cannot be read."""
    address = parse_address(text, error_location(KEY, loaded.origins), loaded.config.run.dir)
    with open_address(address) as other:
        step = resolve_step_on_all(other, address)
        try:
            return other.durable.read_metadata(step)
        except (DamagedError, OSError):  # the restore reports the error or skips the step
            return None


def restore_other(
    text: str, loaded: LoadedConfig, abstract: Any, accept: Callable[[CheckpointMetadata], None]
) -> RestoredCheckpoint:
    """Restore the checkpoint at an address, by default the newest valid checkpoint of its run.

    Raises:
        ConfigError: no checkpoint exists, or `accept` rejects it.
        StorageError: the checkpoint cannot be read.
    """
    address = parse_address(text, error_location(KEY, loaded.origins), loaded.config.run.dir)
    with open_address(address) as other:
        if address.step is None:
            found = other.restore_newest(abstract, accept)
            assert found is not None
            return found
        return other.restore(resolve_step_on_all(other, address), abstract, accept)


def _is_free(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return key in _FREE_MODEL_KEYS or (name in _FREE_FAMILY_KEYS and section != "model")


def check_model(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    origins: Mapping[str, str],
    otherwise: str = "run.name to a new name",
    *,
    weights_alone: bool = False,
) -> None:
    """Compare the `model` sections of a checkpoint and of a config.

    `otherwise` is an alternative action for the error message. If `weights_alone` is True,
    `model.param_dtype` may differ.

    Raises:
        ConfigError: keys that must not change differ; the error lists all of them.
    """
    then, now = (
        _with_layer_count(keys)
        for keys in (upgrade_model_section(saved), flatten({"model": wanted}))
    )
    problems = [
        Problem(
            Code.CKPT_MODEL,
            error_location(key, origins),
            format_value(now.get(key, "missing")),
            f"must be {format_value(then[key])}, the value in the checkpoint.",
            f"Set {key}={format_value(then[key])}, or {otherwise}.",
        )
        for key in sorted(then)
        if not (_is_free(key) or (weights_alone and key == _TYPE))
        and then[key] != now.get(key)
        and not (key == _MTP_KIND_KEY and not then[_MTP_HEADS_KEY])
    ]
    if problems:
        raise ConfigError(problems)


def _with_layer_count(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with the number of unquantized layers, even if it is selected by default."""
    count = num_unquantized_layers(
        keys[_UNQUANTIZED_KEY], keys["model.matmul"], keys["model.num_layers"]
    )
    return {**keys, _UNQUANTIZED_KEY: count}


def upgrade_model_section(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a saved `model` section to the full key names of this release.

    A key that did not exist when the section was saved gets the value that matches the behavior of
    that earlier release.
    """
    found = dict(upgrade_setting(*item) for item in flatten({"model": saved}).items())
    family = found.get(FAMILY, legacy_value_of(FAMILY))
    known = (key for key in KEYS if key.startswith("model."))
    own = (key for key in known if not is_of_another_family(section_of(key), family))
    return {key: legacy_value_of(key) for key in own} | found


_SECTION = "adapter"
_FREE = frozenset({"dropout", "targets", "restore_from"})
"""Keys of the `adapter` section that may change on resume. For `adapter.targets`, the selected
matrices are compared instead of the patterns.
"""


def read_peft_adapters(loaded: LoadedConfig, steps: Steps, console: Notifier) -> Tree | None:
    """Read the adapters in `adapter.restore_from`, in checkpoint layout on the mesh; None if the
    key is not set.

    Raises:
        ConfigError: the folder is damaged, or has adapters of another model.
    """
    config = loaded.config
    if not config.adapter.rank or not config.adapter.restore_from:
        return None
    folder = PeftFolder(config.model, config.adapter, loaded.origins)
    console.note(folder.note())

    def read(name: str, leaf: Any) -> jax.Array:
        end = next(end for end in (DOWN, UP, LENGTH) if name.endswith(end))
        values = folder.factor(name.removesuffix(end), end).astype(leaf.dtype)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda region: values[region]
        )

    return map_named_leaves(read, steps.abstract_saved["params"])


def base_record(found: InitialWeights, given: str) -> AdapterBase:
    """Return the metadata record of a base model, as stored in adapter checkpoints."""
    return {"address": found.address, "given": given, "digest": content_digest(found.params)}


def read_base(
    facts: CheckpointMetadata,
    loaded: LoadedConfig,
    steps: Steps,
    console: Notifier,
    *,
    own: bool = True,
) -> tuple[Any, AdapterBase]:
    """Return the base model that a checkpoint's adapters were trained on, in checkpoint layout, and
    its metadata record.

    `own` means that the checkpoint belongs to this run. A changed `checkpoint.restore_from` then
    replaces the recorded address. Otherwise, `checkpoint.restore_from` names the checkpoint itself.

    Raises:
        ConfigError: the base model does not exist, or its weights have changed.
        StorageError: the base model cannot be read, or the checkpoint does not record it.
    """
    try:
        said = check_type(facts.data[BASE], AdapterBase)
    except (ValueError, KeyError) as error:
        raise StorageError(
            Code.CKPT_BASE,
            f"step {facts.step}: does not record the base model of its adapters\n"
            f"  {error}.\n  Use another step.",
        ) from error
    given = loaded.config.checkpoint.restore_from
    moved = own and given not in ("", said["given"])
    found = read_weights(given if moved else said["address"], loaded, steps, console)
    now = base_record(found, said["given"] if own and not moved else given)
    if now["digest"] != said["digest"]:
        raise ConfigError.one(
            Code.CKPT_BASE,
            error_location(KEY, loaded.origins),
            found.address,
            f"must hold the base weights that step {facts.step} was trained with: "
            f"their digest was {said['digest'][:16]}, but the digest is now {now['digest'][:16]}.",
            f"Restore the original base model, or set {KEY} to its new address.",
        )
    return found.params, now


def check_adapter(
    facts: CheckpointMetadata, loaded: LoadedConfig, *, own: bool, address: str = ""
) -> None:
    """Check that the config of a resumed run defines the same adapters as its checkpoint.

    `address` is the address of the checkpoint, if the config does not name it.

    Raises:
        ConfigError: the adapters in the checkpoint and in the config differ.
    """
    saved, now = facts.config.get(_SECTION, {}), loaded.config.adapter
    names = [name for name in names_in(_SECTION) if name not in _FREE]
    then = {name: saved.get(name, default_of(f"{_SECTION}.{name}")) for name in names}
    if not then["rank"] and not now.rank:
        return
    action = f"checkpoint.restore=weights, or {KEY}=''"
    if own:
        action = "run.name to a new name"
    elif address:
        action = f"read only the weights of {address} with {KEY}={address}"
    for name, before in then.items():
        if before != getattr(now, name):
            key = f"{_SECTION}.{name}"
            raise ConfigError.one(
                Code.CKPT_RESUME,
                error_location(key, loaded.origins),
                format_value(getattr(now, name)),
                f"must be {format_value(before)}, the value in step {facts.step}, because "
                "this key determines the adapter parameters.",
                f"Set {key}={format_value(before)}, or {action}.",
            )
    targets = check_type(saved.get("targets", []), list[str])
    before, after = (
        _adapted_matrices(loaded.config.model, each) for each in (targets, now.targets)
    )
    if before != after:
        key = f"{_SECTION}.targets"
        changes = [f"{', '.join(sorted(before - after))} had an adapter"] if before - after else []
        changes += [f"{', '.join(sorted(after - before))} had none"] if after - before else []
        raise ConfigError.one(
            Code.CKPT_RESUME,
            error_location(key, loaded.origins),
            format_value(now.targets),
            f"must select the matrices that had an adapter when step {facts.step} was saved: "
            f"{'; '.join(changes)}.",
            f"Set {key}=[{','.join(targets)}], or {action}.",
        )


def _adapted_matrices(model: ModelConfig, targets: list[str]) -> frozenset[str]:
    adapter = model.adapter
    assert isinstance(adapter, AdapterConfig)
    kinds = describe(replace(model, adapter=replace(adapter, targets=targets))).layer_types
    several = len(kinds) > 1
    return frozenset(
        ".".join((*([kind] if several else []), *key))
        for kind, each in kinds.items()
        for key in each.adapters
    )
