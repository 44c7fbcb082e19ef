"""What several families make of the generic keys of `model`.

What the file of a model family declares, and the keys that it alone reads. No jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from maxpipe.errors import RuleViolation
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.mlp import GatedMLP, RMSNorm
from maxpipe.models.spec import Branch, Dims, Ends, Kind, Model, Normal, Param, Part


def residual_gain(config: ModelConfig) -> float:
    """Of projections that write to the residual stream: keeps its variance near 1."""
    return (2 * config.num_layers) ** -0.5


def attention(config: ModelConfig, rope: Rope, **options: Any) -> Attention:
    """Attention of the generic sizes; `options` are further fields of `Attention`."""
    return Attention(
        config.d_model,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        residual_gain(config),
        config.attention,
        rope,
        **options,
    )


def gated_mlp(config: ModelConfig, **options: Any) -> GatedMLP:
    """The gated MLP of the generic width; `options` are further fields of `GatedMLP`."""
    return GatedMLP(config.d_model, config.d_mlp, residual_gain(config), **options)


def ends(config: ModelConfig, norm: Part, **options: Any) -> Ends:
    """An embedding, and an output projection of its own unless embeddings are tied.

    `options` are further fields of `Ends`.
    """
    width, vocab = (config.d_model, "embed"), (config.vocab_size, "vocab")

    def table(*dims: tuple[int, str]) -> Param:
        found: Dims = dims
        return Param(found, Normal(config.d_model))

    head = None if config.tied_embeddings else table(width, vocab)
    return Ends(table(vocab, width), norm, head, **options)


def alike(
    config: ModelConfig,
    mixing: Attention,
    norm: RMSNorm,
    *,
    before: bool = True,
    after: bool = False,
    scale: float = 1.0,
    function: Literal["silu", "gelu"] = "silu",
    values: Mapping[str, tuple[float, ...]] | None = None,
    **of_ends: Any,
) -> Model:
    """A model of one kind of layer: attention and a gated MLP, normed `before`, `after` or both.

    `scale` is that of both branches, `of_ends` are further fields of `Ends`.
    """
    parts = {"attention": mixing, "mlp": gated_mlp(config, function=function)}
    branches = tuple(
        Branch(name, part, norm if before else None, norm if after else None, config.dropout, scale)
        for name, part in parts.items()
    )
    layers = ("layer",) * config.num_layers
    return Model({"layer": Kind(branches)}, layers, ends(config, norm, **of_ends), values or {})


def yarn(theta: float, factor: float, original_tokens: int, **options: Any) -> Rope:
    """Rotary positions of a context that is `factor` times as long (arXiv:2309.00071).

    `options` are further fields of `Rope`.
    """
    length = 0.1 * math.log(factor) + 1.0
    return Rope(theta, factor, "yarn", original_tokens, attention_factor=length, **options)


def same_everywhere(config: ModelConfig, value: float) -> tuple[float, ...]:
    """A per-layer value that does not differ by layer."""
    return (value,) * config.num_layers


def embeddings_are_tied(config: ModelConfig) -> Iterator[RuleViolation]:
    """The rule of families whose released models all share one table."""
    if not config.tied_embeddings:
        yield RuleViolation(
            "model.tied_embeddings",
            f"must be true with model.family={config.family}: its output projection is the "
            "embedding's table.",
            "Set model.tied_embeddings=true.",
        )


@dataclass(frozen=True)
class Family:
    """A model family: a file in `maxpipe.models`."""

    name: str
    """Value of `model.family`, and name of its section of keys below `model`."""
    section: type
    """Frozen dataclass with the keys that only this family reads; each has a default."""
    describe: Callable[[ModelConfig], Model]
    """The model of a config that satisfies every rule."""
    bounds: tuple[Bound, ...] = ()
    """Ranges of the numbers in its section."""
    rules: Callable[[ModelConfig], Iterable[RuleViolation]] = lambda _: ()
    """What is wrong with a config of which each number is within its range."""
    metric_parts: tuple[type[Part], ...] = ()
    """Classes of its parts with `summaries`, for the list of all that runs write."""
    huggingface: tuple[HuggingFace, ...] = ()
    """Classes of transformers that compute the same. An export takes the first that can say what a
    config says."""


_Section = TypeVar("_Section")


def own_keys(config: ModelConfig, section: type[_Section]) -> _Section:
    """The keys of the config's family, whose section this is."""
    own = section() if config.own is None else config.own
    assert isinstance(own, section), f"{config.family} has other keys than {own}"
    return own
