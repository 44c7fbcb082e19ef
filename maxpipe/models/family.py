"""Interface of a model family, and helpers shared by several families, without jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.mlp import MLP, RMSNorm
from maxpipe.models.spec import Branch, Dims, Ends, LayerType, Model, Normal, Param, Part


def residual_gain(config: ModelConfig) -> float:
    """Return the initialization gain for projections to the residual stream.

    The gain keeps the variance of the residual stream close to 1.
    """
    return (2 * config.num_layers) ** -0.5


def attention(config: ModelConfig, rope: Rope, **options: Any) -> Attention:
    """Return an attention sublayer with sizes from `config`; `options` sets additional fields."""
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


def mlp(config: ModelConfig, **options: Any) -> MLP:
    """Return an MLP with the width from `config`; `options` sets additional fields."""
    return MLP(config.d_model, config.d_mlp, residual_gain(config), **options)


def ends(config: ModelConfig, norm: Part, **options: Any) -> Ends:
    """Return the embedding, final norm and output projection.

    Tied embeddings have no separate output projection. `options` are additional fields of `Ends`.
    """
    width, vocab = (config.d_model, "embed"), (config.vocab_size, "vocab")

    def table(*dims: tuple[int, str]) -> Param:
        found: Dims = dims
        return Param(found, Normal(config.d_model))

    head = None if config.tied_embeddings else table(width, vocab)
    return Ends(table(vocab, width), norm, head, **options)


def chunk_rule(section: str, key: str, size: int) -> Iterator[RuleViolation]:
    """Yield a violation if the chunk size of a recurrent layer is not a power of two."""
    if size & (size - 1):
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.{key}",
            "must be a power of two, because chunks are computed by recursive halving.",
            f"Set {section}.{key}={1 << size.bit_length() - 1}.",
        )


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
    added_arrays: tuple[str, ...] = (),
    **of_ends: Any,
) -> Model:
    """Return a model with a single layer type that consists of attention and a gated MLP.

    `before` and `after` select pre-norms and post-norms for both branches. `scale` multiplies the
    output of both branches. `added_arrays` are the carried arrays that layers add to their output,
    with the width of the model. `of_ends` are additional fields of `Ends`.
    """
    parts = {"attention": mixing, "mlp": mlp(config, function=function)}
    branches = tuple(
        Branch(name, part, norm if before else None, norm if after else None, config.dropout, scale)
        for name, part in parts.items()
    )
    layers = ("layer",) * config.num_layers
    layer_type = LayerType(branches, added_arrays=added_arrays)
    carried = dict.fromkeys(added_arrays, config.d_model)
    return Model(
        {"layer": layer_type}, layers, ends(config, norm, **of_ends), values or {}, carried
    )


def yarn(theta: float, factor: float, original_tokens: int, **options: Any) -> Rope:
    """Return rotary positions scaled with YaRN to a context `factor` times the original length
    (arXiv:2309.00071).

    `options` are additional fields of `Rope`.
    """
    length = 0.1 * math.log(factor) + 1.0
    return Rope(theta, factor, "yarn", original_tokens, attention_factor=length, **options)


def same_everywhere(config: ModelConfig, value: float) -> tuple[float, ...]:
    """Return a tuple that repeats one value for every layer."""
    return (value,) * config.num_layers


def layer_indices(config: ModelConfig, key: str, indices: Sequence[int]) -> Iterator[RuleViolation]:
    """Yield a violation if a list in the family's section contains an index that is not a layer,
    or an index twice.
    """
    count, name = config.num_layers, f"model.{config.family}.{key}"
    wrong = [layer for layer in indices if not 0 <= layer < count or indices.count(layer) > 1]
    if wrong:
        valid = sorted({layer for layer in indices if 0 <= layer < count}) or [count - 1]
        yield RuleViolation(
            Code.MODEL_SIZES,
            name,
            f"must contain layer indices from 0 to {count - 1}, each once, but contains "
            f"{','.join(map(str, wrong[:3]))}.",
            f"Set {name}=[{','.join(map(str, valid))}].",
        )


def embeddings_are_tied(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield a violation unless embeddings are tied, as in all released models of this family."""
    if not config.tied_embeddings:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "model.tied_embeddings",
            f"must be true with model.family={config.family}, because the output projection is "
            "the embedding table.",
            "Set model.tied_embeddings=true.",
        )


@dataclass(frozen=True)
class Family:
    """A model family, defined by a module in `maxpipe.models`."""

    name: str
    """Value of `model.family`, and name of the family's config section below `model`."""
    section: type
    """Frozen dataclass with the keys that only this family uses. Every key has a default."""
    describe: Callable[[ModelConfig], Model]
    """Function that returns the model spec for a valid config."""
    bounds: tuple[Bound, ...] = ()
    """Allowed ranges of the numeric values in the family's section."""
    rules: Callable[[ModelConfig], Iterable[RuleViolation]] = lambda _: ()
    """Function that yields the rule violations of a config whose numbers are within bounds."""
    trained: Callable[[ModelConfig], Sequence[str]] = lambda _: ()
    """Function that returns the name patterns of the parameters that a config trains. An empty
    result means that all parameters are trained."""
    metric_parts: tuple[type[Part], ...] = ()
    """Sublayer classes that declare `metrics`, from which the list of all metrics is built."""
    huggingface: tuple[HuggingFace, ...] = ()
    """transformers classes that are equivalent to this family. An export uses the first class that
    supports the config."""


_Section = TypeVar("_Section")


def own_keys(config: ModelConfig, section: type[_Section]) -> _Section:
    """Return the section of the config's family."""
    own = section() if config.own is None else config.own
    assert isinstance(own, section), f"{config.family} does not use the config section {own}"
    return own
