"""A small model and the ways to run it that several test files share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import jax
import numpy as np
import pytest

from maxpipe.config.image_format import model_image_format
from maxpipe.config.rules import axis_size
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.data.image_grids import rotary_positions
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.models.gemma4_vision import Gemma4VisionConfig
from maxpipe.models.layers.mlp import LayerNorm
from maxpipe.models.qwen_vision import QwenVisionConfig
from maxpipe.models.registry import FAMILIES
from maxpipe.models.spec import Branch, Model, Part
from maxpipe.parallel.axes import MESH_AXES, MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.objective import CrossEntropy, Objective
from maxpipe.step.build import build_steps
from maxpipe.step.step import Steps

TOLERANCE = 1e-5  # float32; relative to the largest entry of a gradient leaf, or to the loss
MODEL = ModelConfig(
    num_layers=5,
    d_model=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    d_mlp=32,
    vocab_size=30,
    compute_dtype="float32",
)
TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One configuration of the model. If `group` is 0, the schedule's default is used."""

    stages: int = 1
    repeats: int = 1
    microbatches: int = 1
    schedule: str = "interleaved"
    group: int = 0
    fsdp: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    attends: str = "auto"
    """Attention over the context axis: `mesh.context_attention`."""
    ulysses: int = 0
    """Number of devices that exchange heads: `mesh.ulysses_size`."""
    heads: tuple[int, int] = (MODEL.num_heads, MODEL.num_kv_heads)
    """Number of heads, and number of key/value heads."""
    shard_mode: str = "auto"
    gather: str = "iteration"
    remat: str = "full"
    idle: str = "skip"
    delayed: bool = False
    offloaded: tuple[str, ...] = ()
    offload_weights: bool = False
    cut: tuple[int, ...] = ()
    outside: int = 0
    layers: int = 5
    dropout: float = 0.0
    tied: bool = False
    ahead: int = 0
    """Number of multi-token prediction heads: `model.mtp_heads`."""
    form: str = "projection"
    """Type of these heads: `model.mtp_kind`."""
    own: Any = None
    """Config section of a model family other than Llama."""
    epsilon: float = MODEL.norm_epsilon
    """Epsilon of the norms. For inputs near 0, it bounds the slope and thus the rounding errors."""
    dtype: str = "float32"
    stored: str = "float32"
    """Data type of the parameters."""
    attention: str = "xla"
    frozen: tuple[str, ...] = ()
    """Patterns of `model.frozen`."""
    adapter: AdapterConfig | None = None
    length: int = 0
    """Sequence length T. If 0, a length that is divisible by the context axis is used."""
    width: int = 0
    """Model width D. If 0, a width that is divisible by the axes that shard it is used."""
    across: tuple[str, ...] = ()
    """Mesh axes that span several slices."""
    alike: int = 0
    """Size of all model and batch dimensions, so that no array can be identified by its shape."""
    split: Literal["", "sequence", "ring"] = ""
    """How tokens between matmuls are sharded over the tensor axis: `mesh.sequence_parallel`; for
    "ring", also `mesh.collective_matmul`."""
    low: tuple[str, str, str] = ("default", "channel", "default")
    """`model.matmul`, `model.matmul_scales` and `model.matmul_weight_gradients`."""
    low_parts: str = "all"
    """`model.matmul_parts`."""
    loss_block: int = -1
    """Number of tokens per block of the loss: `pipeline.loss_block_tokens`."""
    sources: int = 0
    """Number of mixture sources. One source has no sequence, and one sequence has no source."""
    images: int = 0
    """Maximum number of images per sequence: `data.max_images_per_sequence`."""
    by_three: bool = False
    """If true, all sizes except the number of heads are divisible by 3 and not by 2."""

    @property
    def tokens(self) -> int:
        """Sequence length T."""
        pieces, tokens = 2 * self.context, TOKENS
        if self.split:
            pieces = math.lcm(pieces, self.context * self.tensor)
        if self.by_three:
            pieces, tokens = 15, 15
        return self.alike or self.length or -(-tokens // pieces) * pieces

    @property
    def mesh(self) -> MeshConfig:
        """Mesh config of this case."""
        sizes: dict[str, Any] = {a: getattr(self, a) for a in MESH_AXES if a != "stage"}
        sizes["stage"] = self.stages
        links = {axis: "dcn" if axis in self.across else "ici" for axis in sizes}
        return MeshConfig(
            **{f"{links[axis]}_{axis}": size for axis, size in sizes.items()},
            context_attention=self.attends,  # type: ignore[arg-type]
            ulysses_size=self.ulysses,
            shard_mode=self.shard_mode,  # type: ignore[arg-type]
            sequence_parallel=bool(self.split),
            collective_matmul=self.split == "ring",
        )

    @property
    def rows(self) -> int:
        """Number of sequences per step."""
        return (self.alike or 2) * self.microbatches * self.fsdp * self.data * self.expert

    @property
    def model(self) -> ModelConfig:
        """Model config of this case."""
        config = replace(
            MODEL,
            num_layers=self.layers,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            d_model=self.width or math.lcm(MODEL.d_model, self.fsdp * self.expert * self.context),
            dropout=self.dropout,
            tied_embeddings=self.tied,
            mtp_heads=self.ahead,
            mtp_kind=self.form,  # type: ignore[arg-type]
            norm_epsilon=self.epsilon,
            compute_dtype=self.dtype,  # type: ignore[arg-type]
            param_dtype=self.stored,  # type: ignore[arg-type]
            attention=self.attention,  # type: ignore[arg-type]
            matmul=self.low[0],  # type: ignore[arg-type]
            matmul_scales=self.low[1],  # type: ignore[arg-type]
            matmul_weight_gradients=self.low[2],  # type: ignore[arg-type]
            matmul_parts=self.low_parts,  # type: ignore[arg-type]
            frozen=list(self.frozen),
            adapter=self.adapter,
        )
        if self.own is not None:
            name = next(name for name, each in FAMILIES.items() if each.section is type(self.own))
            config = replace(config, family=name, own=self.own)
        if self.by_three:
            config = replace(config, num_heads=6, num_kv_heads=3, d_mlp=33)
        names = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_mlp", "vocab_size")
        return replace(config, **dict.fromkeys(names if self.alike else (), self.alike))

    def __str__(self) -> str:
        shown = [f"{self.schedule}-P{self.stages}R{self.repeats}M{self.microbatches}"]
        named = ("stages", "repeats", "microbatches", "schedule")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, AdapterConfig):
                drops = "-dropped" if value.dropout else ""
                shown.append(f"{value.kind}-{value.base_quantization}{drops}")
            elif field.name not in named and value != field.default:
                shown.append(
                    f"{field.name}{value}" if field.name != "own" else type(value).__name__
                )
        return "-".join(shown)


def with_layer_norms(model: Model, **changes: Any) -> Model:
    """Return the model with layer norms in all branches and before the head, and changed ends.

    Norms before each part and before the head have a bias; norms after a part have none.
    """
    width = model.ends.norm.params["scale"].shape[0]
    before = LayerNorm(width, 0.1)
    after = LayerNorm(width, 0.2, bias=False)
    kinds = {
        name: replace(
            kind,
            branches=tuple(
                replace(each, pre_norm=before, post_norm=after) for each in kind.branches
            ),
        )
        for name, kind in model.layer_types.items()
    }
    return replace(model, layer_types=kinds, ends=replace(model.ends, norm=before, **changes))


def with_attention(model: Model, part: Part) -> Model:
    """Return the model with `part` as attention in all layers."""

    def changed(branch: Branch) -> Branch:
        return replace(branch, part=part) if branch.name == "attention" else branch

    kinds = {
        name: replace(kind, branches=tuple(map(changed, kind.branches)))
        for name, kind in model.layer_types.items()
    }
    return replace(model, layer_types=kinds)


OPTIM = OptimConfig(learning_rate=3e-3, warmup_steps=2)


def steps_of(
    case: Case,
    rows: int,
    total_steps: int = 10,
    optim: OptimConfig = OPTIM,
    objective: Objective = CrossEntropy(),  # noqa: B008
) -> Steps:
    config = case.model
    mesh = case.mesh
    size = math.prod(axis_size(mesh, axis) or 1 for axis in MESH_AXES)
    return build_steps(
        build_mesh(mesh, jax.devices()[:size]),
        model=config,
        pipeline=PipelineConfig(
            schedule=case.schedule,  # type: ignore[arg-type]
            repeats=case.repeats,
            microbatches=case.microbatches,
            group=case.group,
            delayed_forwarding=case.delayed,
            layers_per_chunk=list(case.cut),
            prologue_layers=case.outside,
            weight_gather=case.gather,  # type: ignore[arg-type]
            remat=case.remat,  # type: ignore[arg-type]
            offloaded_names=list(case.offloaded),
            offload_weights=case.offload_weights,
            idle=case.idle,  # type: ignore[arg-type]
            loss_block_tokens=case.loss_block,
        ),
        optim=optim,
        train=TrainConfig(batch_size=rows, sequence_length=case.tokens),
        total_steps=total_steps,
        rules=AxisRules.from_config(mesh),
        seed=0,
        byte_lengths=np.ones(config.vocab_size, np.int32),
        num_sources=case.sources,
        objective=objective,
        max_images=case.images,
    )


def with_rare(cases: Sequence[Any], rare: Sequence[Any]) -> list[Any]:
    """Return test parameters of which the rare ones run only in the full matrix."""
    return [*cases, *(pytest.param(case, marks=pytest.mark.matrix) for case in rare)]


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Return test parameters: every `every`-th runs by default, and the others are `layouts`."""
    listed = list(cases)
    return keeping(listed, *range(0, len(listed), every))


def keeping(cases: Iterable[Any], *places: int) -> list[Any]:
    """Return test parameters: cases at these indices run by default, the others are `layouts`."""

    def rare(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.layouts)

    listed = list(cases)
    assert max(places) < len(listed)
    return [case if number in places else rare(case) for number, case in enumerate(listed)]


_ORDINARY = Case()


def batch_of(rows: int, step: int = 0, case: Case = _ORDINARY) -> dict[str, np.ndarray]:
    """Return random tokens: each sequence holds two documents, split at a random position."""
    random, tokens = np.random.default_rng(step), case.tokens
    ids = random.integers(0, case.model.vocab_size, (rows, tokens + 1), np.int32)
    cut = random.integers(1, tokens, (rows, 1))
    place = np.arange(tokens, dtype=np.int32)
    of_sources: dict[str, np.ndarray] = {}
    images = _images_of(rows, random, case, ids, cut) if case.images else {}
    mask = (place != cut - 1).astype(np.float32)
    if images:
        mask[ids[:, 1:] == case.own.image_token_id] = 0
    if case.sources:
        sources = random.integers(0, case.sources - 1, rows, np.int32)
        sources[0], mask[0] = -1, 0  # padding
        of_sources = {"source_ids": sources}
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": (1 + (place >= cut)).astype(np.int32),
        "positions": np.where(place >= cut, place - cut, place).astype(np.int32),
        "loss_mask": mask,
        "example_ids": np.arange(rows, dtype=np.int32),
        **of_sources,
        **images,
    }


def _images_of(rows: int, random: Any, case: Case, ids: Any, cut: Any) -> dict[str, np.ndarray]:
    """Return random images, and write their tokens into the second document of each sequence.

    Sequences have from 0 to `case.images` images.
    """
    if isinstance(case.own, QwenVisionConfig | Gemma4VisionConfig):
        return _patches_of(rows, random, case, ids, cut)
    own, tokens = case.own, case.tokens
    size, shape = own.tokens_per_image, (rows, case.images, *(own.image_size,) * 2, 3)
    left = np.zeros((rows, tokens + 1), np.int32)
    images = random.integers(0, 256, shape, np.uint8)
    for row in range(rows):
        count = row % (case.images + 1)
        images[row, count:] = 0
        for number in range(count):
            begin = tokens - (number + 1) * (size + 1)
            left[row, begin : begin + size] = np.arange(size, 0, -1)
        cut[row] = min(cut[row, 0], tokens - count * (size + 1) - 1)
    ids[left > 0] = own.image_token_id
    return {"images": images, "image_tokens_left": left[:, :-1]}


def _patches_of(rows: int, random: Any, case: Case, ids: Any, cut: Any) -> dict[str, np.ndarray]:
    """Return images of different sizes, as `_images_of` returns images of one size."""
    own, tokens = case.own, case.tokens
    image = model_image_format(case.model, case.images)
    assert image is not None and image.patches is not None
    side = image.patches.merge_size
    left = np.zeros((rows, tokens + 1), np.int32)
    images = random.integers(0, 256, (rows, case.images, *image.shape), np.uint8)
    grids = np.zeros((rows, case.images, 2), np.int32)
    rotary = np.zeros((rows, tokens + 1, 3), np.int32)
    for row in range(rows):
        end = tokens
        for number in reversed(range(row % (case.images + 1))):
            columns = random.integers(1, image.num_tokens + 1)
            height = random.integers(1, image.num_tokens // columns + 1)
            grids[row, number] = side * height, side * columns
            size = height * columns
            left[row, end - size - 1 : end - 1] = np.arange(size, 0, -1)
            images[row, number, size * side**2 :] = 0
            end -= size + 1
        images[row, row % (case.images + 1) :] = 0
        start = cut[row] = min(cut[row, 0], end - 1)
        used = grids[row, : row % (case.images + 1)]
        rotary[row, :start] = np.arange(start)[:, None]
        rotary[row, start:] = rotary_positions(left[row, start:], used, image.patches)
    ids[left > 0] = own.image_token_id
    arrays = {"images": images, "image_grids": grids, "image_tokens_left": left[:, :-1]}
    if not image.patches.has_rotary_positions:
        return arrays
    return arrays | {"rotary_positions": rotary[:, :-1]}


def buffer_bytes(steps: Steps) -> dict[str, int]:
    """Return the size in bytes of each buffer that the loop over ticks carries."""
    return {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        for name, leaves in steps.buffer_shapes().items()
    }
