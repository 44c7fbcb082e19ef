"""Settings of the model: the sections `model` and `adapter` of a config.

What the range of a number in a config is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from maxpipe.io.typed_json import renamed_from

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The decoder: a stack of layers of a model family."""

    family: str = "llama"
    """Family of the model. Keys that only one family reads are in the section of its name, such as
    `model.llama`."""
    num_layers: int
    """Number of decoder layers. Needs not be a multiple of stages x repeats."""
    d_model: int
    """Width of the residual stream."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key/value heads. Query heads share them evenly."""
    head_dim: int = field(metadata=renamed_from("head_size"))
    """Size of one attention head. Even, because rotary embedding turns pairs."""
    d_mlp: int
    """Hidden width of the gated MLP."""
    vocab_size: int
    """Number of token ids. At least the tokenizer's vocabulary."""
    tied_embeddings: bool = False
    """Use the embedding table as the output projection as well."""
    mtp_heads: int = field(default=0, metadata=renamed_from("heads_ahead"))
    """Heads beside the ordinary one that predict the tokens 1, 2, ... places further ahead, in
    training only (multi-token prediction). They share the output projection."""
    mtp_kind: Literal["projection", "layer"] = field(
        default="projection", metadata=renamed_from("ahead")
    )
    """What each of them has of its own: `projection`, a square matrix; or `layer`, a whole layer of
    the kind of the last one behind a projection of the head before it and of the embedding of the
    next token, as in DeepSeek-V3. Read when `model.mtp_heads` is not 0."""
    mtp_loss_weight: float = field(default=0.3, metadata=renamed_from("ahead_loss_weight"))
    """What the mean of their losses counts in the objective. Read when `model.mtp_heads` is not
    0."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's wavelengths."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMS normalisation."""
    dropout: float = 0.0
    """Fraction of each residual branch's outputs set to zero in training."""
    attention: Literal["auto", "xla", "blockwise", "cudnn", "splash"] = "auto"
    """Implementation of attention: `xla` and `blockwise` run everywhere, the second without an
    array of all scores; `cudnn` on NVIDIA GPUs; `splash` on TPUs, in sequences of whole blocks of
    128 tokens. `auto` takes the best for device, model and sequence length; a run says at its start
    what that is."""
    compute_dtype: Dtype = "bfloat16"
    """Type of activations and of weights inside a matmul."""
    matmul: Literal["default", "int8", "fp8"] = "default"
    """What projections of attention, MLPs and experts multiply: numbers of `model.compute_dtype`;
    or 8-bit numbers with scales, of each token its own: `int8`, or `fp8`, e4m3 with
    cotangents in e5m2. Embedding, router, loss head and the products inside of attention stay in
    `model.compute_dtype`; so do projections of linear attention and into latents."""
    matmul_parts: Literal["all", "mlp"] = "all"
    """Which products `model.matmul` is for: all that it names, or those of MLPs and experts alone.
    Projections of attention are as wide as the model: to round what they multiply takes about as
    long as faster products save. Read when `model.matmul` is not `default`."""
    matmul_scales: Literal["channel", "tensor", "block"] = "channel"
    """What has a scale in weights: each output of a product, or the whole matrix, which is then the
    same 8-bit matrix forward and backward. `block`: blocks of 128 x 128, and of 128 along the sum
    in activations, with powers of two as scales; what they stand for is multiplied in
    `model.compute_dtype`, so that it says what such a format does to a loss and is not faster.
    Read when `model.matmul` is not `default`."""
    matmul_weight_gradients: Literal["default", "same"] = "default"
    """What products that make gradients of weights multiply: numbers of `model.compute_dtype`, or
    the same 8-bit numbers as others do. Read when `model.matmul` is not `default`."""
    param_dtype: Dtype = "float32"
    """Type of stored parameters and of the optimizer's state."""
    frozen: list[str] = field(default_factory=list, hash=False)  # a list has no hash
    """Parameters that are not trained: patterns over the names in checkpoints, such as `embedding`
    or `layers.attention.*`. With several kinds of layers those names hold the kind: in a `moe`
    model with dense layers `layers.experts.*` are whole layers of the kind `experts`, attention
    and norms included, and `layers.experts.experts.*` the router and the experts in them alone.
    They keep their values, and have neither gradients nor optimizer state. A run goes on with the
    same ones frozen; `checkpoint.restore=weights` starts with others."""
    own: Any = None
    """The section of the family. None: its defaults."""
    adapter: Any = None
    """The section `adapter` of a config that has adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Low-rank changes of a frozen model's matrices, which are trained in place of it."""

    rank: int = 0
    """Rank of each change (LoRA, arXiv:2106.09685): of a matrix W of `K x N` the product of a
    `K x rank` and a `rank x N` matrix. 0 trains the model itself."""
    kind: Literal["lora", "dora"] = "lora"
    """`lora` adds the change to the matrix. `dora` norms each column of the sum besides, and
    multiplies it with a length that is trained, too (arXiv:2402.09353)."""
    alpha: float = 16.0
    """Changes are multiplied with `alpha / rank`."""
    scale_by: Literal["rank", "root"] = "rank"
    """`root` multiplies them with `alpha / sqrt(rank)` (rsLoRA, arXiv:2312.03732)."""
    dropout: float = 0.0
    """Fraction of the inputs of changes set to zero in training."""
    targets: list[str] = field(default_factory=list, hash=False)  # a list has no hash
    """Matrices that get a change: patterns over their names in checkpoints, as in `model.frozen`,
    such as `layers.attention.*`. Empty: all that can have one, the projections of attention and of
    MLPs. Embeddings, norms, routers and experts that are chosen by one have none."""
    base_quantization: Literal["default", "int8", "nf4"] = field(
        default="default", metadata=renamed_from("base")
    )
    """How the frozen matrices of layers are held: in `model.param_dtype`; in `int8`, with a scale
    for each row; or in `nf4`, 4 bits with a scale for each 64 numbers (QLoRA, arXiv:2305.14314).
    They are gathered as they are held and multiplied in `model.compute_dtype`."""


LARGEST = 3.4e38
"""What devices compute with are float32 numbers: more is infinite."""
SMALLEST = 1.2e-38
"""Less is zero there."""


class Bound(NamedTuple):
    """A range of one number; `example` is a value inside it."""

    key: str
    example: float
    low: float
    high: float = math.inf
    why: str = ""
    low_is_inside: bool = True
    high_is_inside: bool = True
    axis: str = ""
    """Logical axis of the dims of this size: it is a multiple of the devices that split them."""

    def holds(self, value: float) -> bool:
        above = self.low <= value if self.low_is_inside else self.low < value
        below = value <= self.high if self.high_is_inside else value < self.high
        return above and below

    def __str__(self) -> str:
        if math.isinf(self.high):
            text = f"at least {self.low}" if self.low_is_inside else f"more than {self.low}"
        elif not self.low_is_inside:
            text = f"more than {self.low} and at most {self.high}"
        elif self.high_is_inside:
            text = f"from {self.low} to {self.high}"
        else:
            text = f"at least {self.low} and less than {self.high}"
        return f"{text}{': ' + self.why if self.why else ''}"
