"""Names of the mesh axes, and the table that maps logical axes to mesh axes.

Model code gives dims logical names ("heads", "mlp"). The table defines the mesh axes over which a
dim with such a name is sharded, and `mesh.axis_rules` changes the table. `sharding` derives JAX
partition specs from the table, and `plan` computes memory use from it. This module does not import
jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import renamed_from

LOGICAL_AXES = (
    *("batch", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab", "norm"),
    *("ahead", "latent", "expert_embed", "routes", "sequence", "lora", "layer_vocab", "vision"),
)
"""Logical names that model code assigns to the dims of its arrays."""

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Axes of the device mesh, ordered from the slowest to the fastest interconnect."""

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
    "layer_vocab": (),  # rows of the embedding tables inside layers
    "routes": (),
    "norm": (),
    "lora": (),
    "ahead": (),
    "vision": (),
    "latent": ("fsdp", "expert", "context"),
    "sequence": (),  # activations between a layer's matmuls: see `SequenceParallel`
}
"""Mesh axes over which each logical axis is sharded, before `mesh.axis_rules` is applied."""

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
"""Allowed values of each `mesh.axis_rules` entry. The pipeline controls the stage axis and the
batch axes."""


_SINGLE = {"context": 1, "tensor": 1}


class ContextAttention(NamedTuple):
    """Communication method of attention over the context axis, and the sizes that it depends on."""

    method: str = "auto"
    """Value of `mesh.context_attention`."""
    ulysses_size: int = 0
    """Value of `mesh.ulysses_size`."""
    context: int = 1
    """Size of the context axis."""
    tensor: int = 1
    """Size of the tensor axis."""
    num_slices: int = 1
    """Number of slices that the context axis spans."""

    @classmethod
    def from_config(cls, mesh: MeshConfig, axes: Mapping[str, int] = _SINGLE) -> ContextAttention:
        """Return the method of a mesh config, on a mesh with the given axis sizes."""
        return cls(
            mesh.context_attention,
            mesh.ulysses_size,
            axes["context"],
            axes["tensor"],
            num_slices=max(1, mesh.dcn_context),
        )

    def exchange_size(self, heads: int, kv_heads: int) -> int:
        """Return the number of adjacent devices along the context axis that exchange tokens for
        heads with each other; 1 means that heads are not exchanged.

        With `auto`, heads are exchanged if context x tensor divides both the number of heads and
        the number of key/value heads.
        """
        if self.context == 1:
            return 1
        if self.method == "ulysses_ring":
            # More devices than key/value heads would send copies of the heads around the ring.
            inside = self.context // self.num_slices
            own = math.gcd(heads // self.tensor, max(1, kv_heads // self.tensor), inside)
            return self.ulysses_size or own
        shards = self.context * self.tensor
        divides = heads % shards == 0 and kv_heads % shards == 0
        exchanges = self.method == "ulysses" or (self.method == "auto" and divides)
        return self.context if exchanges else 1

    def ring_size(self, heads: int, kv_heads: int) -> int:
        """Return the number of devices along the context axis that pass keys and values around a
        ring; 1 means no ring.
        """
        if self.method not in ("ring", "ulysses_ring"):
            return 1
        return self.context // self.exchange_size(heads, kv_heads)

    def exchanged_kv_heads(self, heads: int, kv_heads: int) -> int:
        """Return the number of key/value heads, including copies, that are sharded over the devices
        that exchange heads.

        Each device receives the key/value heads of its query heads. If the devices outnumber the
        key/value heads, several devices receive the same head.
        """
        size = self.exchange_size(heads, kv_heads)
        return kv_heads if size == 1 else math.lcm(kv_heads, size * self.tensor)


def find_zero1_dim(
    dims: Sequence[tuple[int, str]], over: Sequence[Sequence[str]], axes: Mapping[str, int]
) -> int | None:
    """Return the dim of a parameter along which ZeRO-1 shards the optimizer state, or None.

    Args:
        dims: (size, logical axis) of each dim of the parameter.
        over: mesh axes over which each dim is already sharded.
        axes: number of devices along each mesh axis.

    Returns: The first dim whose size is a multiple of the data axis size. Dims sharded by the
        compiler are skipped. The vocabulary dim is also skipped, because its padding differs
        between representations of the train state. If None, every device holds the full state.
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
    """Map each logical axis to its mesh axes, with `mesh.axis_rules` applied."""
    return DEFAULT_AXIS_RULES | {name: tuple(axes) for name, axes in mesh.axis_rules.items()}


def axis_table_with_sequence(mesh: MeshConfig) -> dict[str, tuple[str, ...]]:
    """Return `axis_table` with an additional rule for the axes that shard tokens between a layer's
    matmuls.
    """
    return axis_table(mesh) | {"sequence": ("tensor",) if mesh.sequence_parallel else ()}


def infer_axis_sizes(mesh: MeshConfig, num_devices: int, num_slices: int) -> MeshConfig:
    """Replace each -1 in the mesh config with the number of remaining slices (dcn) or devices
    (ici).

    The caller must check that the product of the sizes equals the number of devices.
    """
    sizes = _infer_link_sizes("dcn", mesh, num_slices)
    inside = num_devices // math.prod(sizes.values())
    return dataclasses.replace(mesh, **sizes, **_infer_link_sizes("ici", mesh, inside))


def _infer_link_sizes(link: str, mesh: MeshConfig, available: int) -> dict[str, int]:
    sizes = {f"{link}_{axis}": getattr(mesh, f"{link}_{axis}") for axis in MESH_AXES}
    known_size = math.prod(size for size in sizes.values() if size != -1)
    return {
        key: max(1, available // known_size) if size == -1 else size for key, size in sizes.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes: `ici_*` inside one slice, `dcn_*` across slices.

    The total size of an axis is ici x dcn. At most one `ici_*` and one `dcn_*` may be -1, which
    means all remaining devices.
    """

    ici_data: int = 1
    """Number of parameter replicas within a slice. Each replica processes a different shard of the
    batch."""
    ici_fsdp: int = 1
    """Number of parameter shards within a slice. Devices with different parameter shards process
    different shards of the batch."""
    ici_stage: int = 1
    """Number of pipeline stages within a slice."""
    ici_tensor: int = 1
    """Number of shards of attention heads and MLP weights within a slice."""
    ici_context: int = 1
    """Number of shards of each sequence within a slice."""
    ici_expert: int = 1
    """Number of expert shards within a slice. Devices with different expert shards process
    different shards of the batch."""
    dcn_data: int = 1
    """Number of parameter replicas across slices."""
    dcn_fsdp: int = 1
    """Number of parameter shards across slices."""
    dcn_stage: int = 1
    """Number of pipeline stages across slices."""
    dcn_tensor: int = 1
    """Number of shards of attention heads and MLP weights across slices."""
    dcn_context: int = 1
    """Number of shards of each sequence across slices."""
    dcn_expert: int = 1
    """Number of expert shards across slices. Devices with different expert shards process different
    shards of the batch."""
    context_attention: Literal["auto", "all_gather", "ulysses", "ring", "ulysses_ring"] = (
        dataclasses.field(
            default="auto",
            metadata=renamed_from(values={"gather": "all_gather", "heads": "ulysses"}),
        )
    )
    """Communication method for attention over the context axis. `all_gather`: each device gathers
    the keys and values of full sequences. `ulysses`: devices exchange tokens for heads, so that
    each device computes some of the heads over full sequences; context x tensor must divide the
    number of heads, and key/value heads are replicated if there are too few. `ring`: keys and
    values are sent around a ring, so no device holds the keys and values of full sequences;
    requires `pipeline.idle=compute` or a single stage. `ulysses_ring`: groups of
    `mesh.ulysses_size` adjacent devices exchange tokens for heads, and keys and values are sent
    around a ring of groups (USP, arXiv:2405.07719); has the requirements of a ring. `auto`:
    `ulysses` if context x tensor divides both the number of heads and the number of key/value
    heads, `all_gather` otherwise."""
    ulysses_size: int = 0
    """Number of adjacent devices along the context axis that exchange tokens for heads; the other
    factor of the axis is the size of the ring. Must divide the context axis, and ulysses_size x
    tensor must divide the number of heads. 0 selects the largest size that fits in a slice and
    requires no copies of key/value heads. Ignored unless `mesh.context_attention=ulysses_ring`."""
    shard_mode: Literal["auto", "explicit"] = "auto"
    """Sharding mode of arrays outside the pipeline. `auto`: the compiler chooses the shardings
    between a program's inputs and outputs. `explicit`: array types include the shardings over all
    axes except tensor, and ambiguous operations raise an error. Both modes give the same results.
    Generation and scoring always use `auto`."""
    cpu_devices: int = 1
    """Number of virtual devices when running on CPU. Ignored on TPU and GPU."""
    sequence_parallel: bool = False
    """Shard the activations between the matmuls of a layer (residual stream, norms, stage-to-stage
    messages, saved inputs) by token over the tensor axis. All-reduces become all-gathers and
    reduce-scatters, and saved activations use less memory."""
    collective_matmul: bool = False
    """Overlap the all-gathers and reduce-scatters of sequence parallelism with the matmuls that use
    their results or compute their operands. Each collective is replaced by a ring of messages and
    smaller matmuls. Ignored unless `mesh.sequence_parallel` is set."""
    axis_rules: dict[str, list[str]] = field(default_factory=dict)
    """Changes to the table that maps logical axes to mesh axes, e.g. `{mlp: [tensor]}`.
    `maxpipe config explain mesh.axis_rules` prints the default table."""
    max_replicated_bytes: int = dataclasses.field(
        default=2**27, metadata=renamed_from("largest_copy_bytes")
    )
    """Maximum size in bytes, summed over all layers of a stage, of a parameter that is replicated
    over the fsdp, expert and context axes. A larger replicated parameter is rejected unless an axis
    rule set to `[]` explicitly replicates it; parameters replicated in this way are reported. 0
    disables the limit."""


QUANTIZATION_BLOCK = 128
"""Number of elements along a dim that share one scale if `model.matmul_scales=block`. If this
number does not divide the size of the dim, the largest power of two that divides both is used."""

BLOCK_SIZES = {"mxfp8": 32, "nvfp4": 16}
"""Number of elements along a contracted dim that share one scale, for the values of `model.matmul`
with such blocks."""


def device_count_rule(needed: int, devices: int, kind: str) -> str:
    """Return the rule of the error for a mesh that does not match the number of devices."""
    verb = "is" if devices == 1 else "are"
    return (
        f"must multiply to the number of devices: the run needs {needed}, but there {verb} "
        f"{pluralize(devices, f'{kind} device')}."
    )
