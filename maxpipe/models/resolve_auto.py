"""What is chosen by sizes: the backend of `model.attention=auto`, and the blocks of the loss.

No jax: forecasts and programs ask the same function, each where it knows the platform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.attention import AUTO, CANNOT, Attention
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import MeshConfig, exchanges_heads

_LONG = {"cpu": 256, "tpu": 4096, "gpu": 4096}
"""Tokens of a row from which on `blockwise` is taken. On CPUs it is faster from 64 on
(`benchmarks/attention.md`), and compiles longer where there are several blocks; elsewhere it is
taken where plain attention's scores would need the memory."""

_ORDER = {"tpu": ("splash", "blockwise"), "gpu": ("cudnn", "blockwise"), "cpu": ("blockwise",)}
"""The best first; behind the last comes `xla`, which does everything everywhere."""

_SPLASH_TOKENS = 128
_CUDNN_HEAD, _CUDNN_LARGEST = 8, 128


BLOCK_TOKENS = 2048
"""Each block reads the output projection, and the sums of its gradient: fewer tokens would keep
matmuls waiting for memory on chips with little of its bandwidth."""
_LARGE_LOGITS = 2**29
"""Bytes of a microbatch's logits in float32 on a device from which on they are made by blocks."""


class Choice(NamedTuple):
    """A backend, and why it is none that would be better."""

    backend: str
    rejected: tuple[str, ...] = ()


class Divided(NamedTuple):
    """Over how many devices rows and heads are divided, and how tokens get to others."""

    context: int = 1
    tensor: int = 1
    method: str = "auto"
    """`mesh.context_attention`"""

    @property
    def uses_ring(self) -> bool:
        """Whether scores are computed part by part, as keys come around: always by blocks."""
        return self.context > 1 and self.method == "ring"

    @classmethod
    def from_mesh(cls, mesh: MeshConfig, axes: Mapping[str, int]) -> Divided:
        """Of a mesh whose axes have these sizes."""
        return cls(axes["context"], axes["tensor"], mesh.context_attention)


ALONE = Divided()
"""Rows that each device has as wholes."""


def choose(model: ModelConfig, platform: str, tokens: int, divided: Divided = ALONE) -> Choice:
    """The backend of a model on a platform, as jax names it, for rows of `tokens`."""
    if model.attention != AUTO:
        return Choice(model.attention)
    if divided.uses_ring:
        return Choice("blockwise")
    device = platform if platform in _ORDER else "gpu"
    refused: list[str] = []
    for backend in _ORDER[device]:
        why = next(_refuses(backend, device, model, tokens, divided), "")
        if not why:
            return Choice(backend, tuple(refused))
        refused.append(f"{backend} {why}")
    return Choice("xla", tuple(refused))


def resolved(
    model: ModelConfig, platform: str, tokens: int, divided: Divided = ALONE
) -> ModelConfig:
    """The model with a backend that is named: what descriptions and programs are made of."""
    return replace(model, attention=choose(model, platform, tokens, divided).backend)


def words(model: ModelConfig, platform: str, tokens: int, divided: Divided = ALONE) -> str:
    """What was chosen and why, for the start of a run and for plans; of a named backend nothing."""
    if model.attention != AUTO:
        return ""
    backend, refused = choose(model, platform, tokens, divided)
    if divided.uses_ring:
        return f"{backend}, as mesh.context_attention=ring computes by blocks"
    chosen = f"{backend}, as model.attention=auto chooses on {platform} for {tokens:,} tokens"
    return f"{chosen}: {', '.join(refused)}" if refused else chosen


def loss_block(setting: int, tokens: int, vocabulary: int) -> int:
    """Tokens whose logits are in memory at once, 0 for all of a microbatch.

    `setting` is `pipeline.loss_block_tokens`; a device has `tokens` of a microbatch, and of each
    `vocabulary` logits.
    """
    if setting < 0:
        setting = BLOCK_TOKENS if 4 * tokens * vocabulary > _LARGE_LOGITS else 0
    return setting if setting < tokens else 0


def _refuses(
    backend: str, device: str, model: ModelConfig, tokens: int, divided: Divided
) -> Iterator[str]:
    """Why a backend is not taken."""
    if backend not in CANNOT:
        yield "is not there"
        return
    parts = [part for kind in describe(model).layer_types.values() for part in kind.parts.values()]
    mixing = [part for part in parts if isinstance(part, Attention | LatentAttention)]
    lacks = {option for part in mixing for option in part.options & CANNOT[backend]}
    for option in sorted(lacks):
        yield f"has no {option.replace('_', ' ')}"
    if backend == "blockwise" and tokens < _LONG[device]:
        yield f"is for {_LONG[device]:,} tokens or more"
    context, tensor, method = divided
    whole = context == 1 or all(
        exchanges_heads(method, part.num_heads, _key_heads(part), context, tensor)
        for part in mixing
    )
    run = tokens if whole else tokens // (2 * context)  # a device has two pieces of a row
    if backend == "splash" and run % _SPLASH_TOKENS:
        yield f"needs a multiple of {_SPLASH_TOKENS} tokens"
    if backend == "cudnn":
        if model.compute_dtype == "float32":
            yield "has no float32"
        for size in {part.head_dim for part in mixing}:
            if size % _CUDNN_HEAD or size > _CUDNN_LARGEST:
                yield f"needs heads of a multiple of {_CUDNN_HEAD}, {_CUDNN_LARGEST} at most"
        if tokens % 2:
            yield "needs an even number of tokens"


def _key_heads(part: Attention | LatentAttention) -> int:
    return part.num_kv_heads if isinstance(part, Attention) else part.num_heads
