"""Names of the mesh's axes, and the one table from logical axes to them. No jax.

Model code names what a dim means ("heads", "mlp"); the table says over which mesh axes such a dim
is split, and `mesh.axis_rules` changes it. `sharding` makes jax's partitions of it, `plan` counts
bytes with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from maxpipe.io.typed_json import renamed_from

LOGICAL_AXES = (
    *("batch", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab", "norm"),
    *("ahead", "latent", "expert_embed", "routes", "sequence", "lora"),
)
"""Names that model code gives to the dims of its arrays."""

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Axes of the device mesh, the slowest link first."""

DEFAULT_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp", "expert", "context"),
    "expert_embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "vocab": ("stage", "tensor"),
    "routes": (),
    "norm": (),
    "lora": (),
    "ahead": (),
    "latent": ("fsdp", "expert", "context"),
    "sequence": (),  # of what is between a layer's matmuls: see `with_tokens`
}
"""Mesh axes over which each logical axis is split, before `mesh.axis_rules`."""

ALLOWED_AXIS_RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embed": ((), ("fsdp",), ("fsdp", "expert", "context")),
    "expert_embed": ((), ("fsdp",), ("fsdp", "context")),
    "latent": ((), ("fsdp",), ("fsdp", "expert", "context")),
    "heads": ((), ("tensor",)),
    "kv_heads": ((), ("tensor",)),
    "head_dim": ((), ("tensor",)),
    "mlp": ((), ("tensor",)),
    "vocab": (("stage",), ("stage", "tensor")),
}
"""What `mesh.axis_rules` may say. The pipeline owns the stage axis and the batch."""


def exchanges_heads(method: str, heads: int, kv_heads: int, context: int, tensor: int) -> bool:
    """Whether attention over the context axis exchanges heads, by `mesh.context_attention`.

    `auto` does where every device gets as many heads, and key/value heads, of each tensor shard.
    """
    divide = not (heads % (context * tensor) or kv_heads % (context * tensor))
    return method == "heads" or (method == "auto" and divide)


def find_zero1_dim(
    dims: Sequence[tuple[int, str]], over: Sequence[Sequence[str]], axes: Mapping[str, int]
) -> int | None:
    """The dim of a parameter that the devices of the data axis divide for the optimizer.

    Args:
        dims: the parameter's.
        over: mesh axes that divide each of them already.
        axes: devices of each mesh axis.

    Returns:
        The first that divides evenly; not one that the compiler divides, nor the vocabulary, which
        is padded in one form and not in another. None if there is none: each device has it all.
    """
    if axes["data"] == 1:
        return None
    for number, ((size, logical), split) in enumerate(zip(dims, over, strict=True)):
        shards = math.prod(axes[axis] for axis in split)
        is_manual = all(axis != "tensor" or axes[axis] == 1 for axis in split)
        if logical != "vocab" and is_manual and size % (shards * axes["data"]) == 0:
            return number
    return None


def axis_table(mesh: MeshConfig) -> dict[str, tuple[str, ...]]:
    """Logical axis to mesh axes: the default table with the changes applied."""
    return DEFAULT_AXIS_RULES | {name: tuple(axes) for name, axes in mesh.axis_rules.items()}


def axis_table_with_sequence(mesh: MeshConfig) -> dict[str, tuple[str, ...]]:
    """The same, and over which axes tokens are split between the matmuls of a layer."""
    return axis_table(mesh) | {"sequence": ("tensor",) if mesh.sequence_parallel else ()}


def infer_axis_sizes(mesh: MeshConfig, num_devices: int, num_slices: int) -> MeshConfig:
    """The mesh with -1 replaced by the slices, and inside a slice by the devices, that are left.

    The sizes need not multiply to the number of devices: the caller checks that.
    """
    sizes = _infer_link_sizes("dcn", mesh, num_slices)
    inside = num_devices // math.prod(sizes.values())
    return dataclasses.replace(mesh, **sizes, **_infer_link_sizes("ici", mesh, inside))


def _infer_link_sizes(link: str, mesh: MeshConfig, available: int) -> dict[str, int]:
    sizes = {f"{link}_{axis}": getattr(mesh, f"{link}_{axis}") for axis in MESH_AXES}
    rest = math.prod(size for size in sizes.values() if size != -1)
    return {key: max(1, available // rest) if size == -1 else size for key, size in sizes.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes: `ici_*` inside one slice, `dcn_*` across slices.

    An axis' total size is ici x dcn. At most one `ici_*` and one `dcn_*` may be
    -1, which means "the devices that are left".
    """

    ici_data: int = 1
    """Replicas of the parameters inside a slice; each sees its own part of the batch."""
    ici_fsdp: int = 1
    """Shards of the parameters inside a slice; each sees its own part of the batch."""
    ici_stage: int = 1
    """Pipeline stages inside a slice."""
    ici_tensor: int = 1
    """Shards of heads and MLP inside a slice."""
    ici_context: int = 1
    """Shards of each sequence inside a slice."""
    ici_expert: int = 1
    """Shards of the experts inside a slice; each sees its own part of the batch."""
    dcn_data: int = 1
    """Replicas of the parameters across slices."""
    dcn_fsdp: int = 1
    """Shards of the parameters across slices."""
    dcn_stage: int = 1
    """Pipeline stages across slices."""
    dcn_tensor: int = 1
    """Shards of heads and MLP across slices."""
    dcn_context: int = 1
    """Shards of each sequence across slices."""
    dcn_expert: int = 1
    """Shards of the experts across slices; each sees its own part of the batch."""
    context_attention: Literal["auto", "gather", "heads", "ring"] = "auto"
    """How tokens attend to those on other devices of the context axis. `gather` brings keys and
    values of whole sequences to each device. `heads` exchanges tokens, so that each has whole
    sequences of some heads (Ulysses); heads and key/value heads are multiples of context x tensor.
    `ring` passes keys and values around, so that no device has all; needs `pipeline.idle` compute,
    or one stage. `auto` takes `heads` where they divide, else `gather`."""
    shard_mode: Literal["auto", "explicit"] = "auto"
    """How jax knows the way in which arrays are divided outside the pipeline: `auto` leaves it to
    the compiler, between a program's inputs and outputs; in `explicit` types carry it over all
    axes but tensor, and an operation that would need a guess is an error. Results are the same.
    Generation and scoring are always `auto`."""
    cpu_devices: int = 1
    """Number of virtual devices when running on CPU. Ignored on TPU and GPU."""
    sequence_parallel: bool = False
    """Split what is between the matmuls of a layer (residual stream, norms, messages, kept
    inputs) over tokens on the tensor axis. All-reduces become all-gathers and reduce-scatters, and
    what waits between slots takes less memory."""
    collective_matmul: bool = False
    """Send parts of these all-gathers and reduce-scatters behind the matmuls that read or write
    them: each becomes a ring of messages and smaller matmuls. Read with
    `mesh.sequence_parallel=true`."""
    axis_rules: dict[str, list[str]] = field(default_factory=dict)
    """Changes to the table from logical axis to mesh axes, e.g. `{mlp: [tensor]}`.
    The default table is printed by `maxpipe config explain mesh.axis_rules`."""
    max_replicated_bytes: int = dataclasses.field(
        default=2**27, metadata=renamed_from("largest_copy_bytes")
    )
    """The most that a device holds of one parameter, a stage's layers together, when all devices
    of the fsdp, expert and context axes hold the same: a larger one that no rule `[]` keeps whole
    is an error, and one that a rule keeps whole is reported. 0: no limit."""


QUANTIZATION_BLOCK = 128
"""Numbers of a dim that share a scale with `model.matmul_scales=block`, if their count can be
divided so; else the largest power of two that divides it."""
