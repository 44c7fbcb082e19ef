"""Config sections `model` and `adapter`, and the allowed ranges of numeric config values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from maxpipe.io.typed_json import renamed_from

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Config of the decoder, a stack of layers of one model family."""

    family: str = "llama"
    """Name of the model family. The section with the family's name, such as `model.llama`, contains
    the keys that only this family uses."""
    num_layers: int
    """Number of decoder layers. The number need not be a multiple of stages x repeats."""
    d_model: int
    """Width of the residual stream."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key/value heads. Must divide `model.num_heads`."""
    head_dim: int = field(metadata=renamed_from("head_size"))
    """Dimension of one attention head. Must be even, because rotary embeddings rotate pairs of
    dims."""
    d_mlp: int
    """Hidden width of the gated MLP."""
    vocab_size: int
    """Vocabulary size: the number of token IDs. Must be at least the tokenizer's vocabulary
    size."""
    tied_embeddings: bool = False
    """Use the embedding table as the output projection."""
    mtp_heads: int = field(default=0, metadata=renamed_from("heads_ahead"))
    """Number of multi-token prediction heads. Head k predicts the token k positions after the
    ordinary target. The heads share the output projection and are used only in training."""
    mtp_kind: Literal["projection", "layer"] = field(
        default="projection", metadata=renamed_from("ahead")
    )
    """Architecture of each multi-token prediction head. `projection` adds one square matrix.
    `layer` adds one transformer layer of the same type as the last layer, as in DeepSeek-V3. The
    input of that layer is a projection of the previous head's output and the next token's
    embedding. Ignored unless `model.mtp_heads` is set."""
    mtp_loss_weight: float = field(default=0.3, metadata=renamed_from("ahead_loss_weight"))
    """Weight of the multi-token prediction loss, averaged over the heads, in the training
    objective. Ignored unless `model.mtp_heads` is set."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding frequencies (RoPE theta)."""
    norm_epsilon: float = 1e-5
    """Epsilon added to the mean square in RMS normalization."""
    dropout: float = 0.0
    """Dropout rate applied to the output of each residual branch during training."""
    attention: Literal["auto", "xla", "blockwise", "cudnn", "splash"] = "auto"
    """Attention implementation. `xla` and `blockwise` run on every platform; `blockwise` never
    stores all attention scores at once. In sparse attention, `blockwise` reads only the keys that
    some token of a block selects, and `xla` computes all scores. `cudnn` runs on NVIDIA GPUs.
    `splash` runs on TPUs and requires sequence lengths that are multiples of 128. `auto` selects
    the best supported implementation for the device, the model and the sequence length. The
    selected implementation is printed at the start of a run."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of activations and of the weights used in matmuls."""
    matmul: Literal["default", "int8", "fp8", "mxfp8", "nvfp4"] = "default"
    """Number format of the projection matmuls in attention, MLPs and experts. `default` uses
    `model.compute_dtype`. `int8` and `fp8` quantize the inputs to 8 bits with one scale per token;
    `fp8` uses e5m2 for cotangents and e4m3 for all other inputs. `mxfp8` uses e4m3 with one
    power-of-two scale per 32 numbers along the contracted dim (OCP Microscaling v1.0), for which
    Blackwell GPUs have matmul instructions. Other devices multiply dequantized inputs, which is not
    faster than `default`. `nvfp4` uses 4-bit e2m1 with one e4m3 scale per 16 numbers and the recipe
    of arXiv:2509.25149: blocks of 16 x 16 weights, and stochastic rounding of cotangents. It does
    not support experts. Every shard of a contracted dim must be a multiple of 32 with `mxfp8`, and
    of 16 with `nvfp4`. The following always use `model.compute_dtype`: the embedding, the router,
    the output heads, the score and value matmuls of attention, recurrent layers, and the
    projections to latents; in sparse attention with `model.attention=blockwise`, also the
    projections from latents to keys and values."""
    matmul_parts: Literal["all", "mlp"] = "all"
    """Projections quantized by `model.matmul`: all of them, or only the projections of MLPs and
    experts (`mlp`). For attention projections, quantizing the inputs costs about as much time as
    the faster matmuls save. Ignored if `model.matmul` is `default`."""
    matmul_scales: Literal["channel", "tensor", "block"] = "channel"
    """Granularity of the weight quantization scales. `channel` uses one scale per output channel.
    `tensor` uses one scale per matrix, so the forward and backward passes share one 8-bit matrix.
    `block` uses power-of-two scales for blocks of 128 x 128 weights and of 128 activations along
    the contracted dim. `block` only simulates the format: it dequantizes and multiplies in
    `model.compute_dtype`, so it is not faster. `mxfp8` and `nvfp4` define their own scales
    and require `channel`. Ignored if `model.matmul` is `default`."""
    matmul_weight_gradients: Literal["default", "same"] = "default"
    """Number format of the weight-gradient matmuls: `default` uses `model.compute_dtype`, and
    `same` uses the format of `model.matmul`. With `mxfp8`, blocks then consist of 32 tokens of the
    same sequence. With `nvfp4`, blocks consist of 16 tokens, and a random Hadamard transform is
    applied first. Ignored if `model.matmul` is `default`."""
    matmul_unquantized_layers: int = -1
    """Number of last layers whose matmuls use `model.compute_dtype` instead of the format of
    `model.matmul`. These layers have separate parameter stacks. -1 selects 15% of the layers,
    rounded up, if `model.matmul` is `nvfp4`, and otherwise 0. At least one layer must be quantized
    unless `model.matmul` is `default`. A resumed run must use the same number."""
    param_dtype: Dtype = "float32"
    """Dtype in which parameters and optimizer state are stored."""
    frozen: list[str] = field(default_factory=list, hash=False)  # lists are not hashable
    """Name patterns of the frozen parameters, such as `embedding` or `layers.attention.*`. Frozen
    parameters are not updated, and have no gradients or optimizer state. In models with several
    layer types, names include the layer type. In a `moe` model with dense layers,
    `layers.experts.*` matches complete layers of the type `experts`, including attention and norms;
    `layers.experts.experts.*` matches only their routers and experts. A resumed run must freeze the
    same parameters. To freeze different parameters, start a new run with
    `checkpoint.restore=weights`."""
    own: Any = None
    """Config section of the model family. None selects the section's default values."""
    adapter: Any = None
    """Config section `adapter`. None if the config has no adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Config of low-rank adapters, which are trained while the base model is frozen."""

    rank: int = 0
    """Rank of each adapter (LoRA, arXiv:2106.09685). The update of a `K x N` matrix is the product
    of a `K x rank` and a `rank x N` matrix. If 0, no adapters are added and the model itself is
    trained."""
    kind: Literal["lora", "dora"] = "lora"
    """Adapter type. `lora` adds the product to the matrix. `dora` also normalizes each column of
    the sum and multiplies it by a trained magnitude (arXiv:2402.09353)."""
    alpha: float = 16.0
    """Numerator of the adapter scale, which is `alpha / rank` unless `rslora` is set."""
    rslora: bool = field(
        default=False, metadata=renamed_from("scale_by", values={"rank": False, "root": True})
    )
    """Use `alpha / sqrt(rank)` as the adapter scale instead of `alpha / rank` (rsLoRA,
    arXiv:2312.03732)."""
    dropout: float = 0.0
    """Dropout rate applied to the adapter inputs during training."""
    targets: list[str] = field(default_factory=list, hash=False)  # lists are not hashable
    """Name patterns of the matrices that receive adapters, such as `layers.attention.*`. The syntax
    is the same as in `model.frozen`. An empty list selects the projections of attention, MLPs and
    shared experts. Routed experts have adapters only if a pattern selects them, such as
    `*.experts.gate`; each expert then has a separate adapter. Embeddings, norms and routers do not
    support adapters."""
    restore_from: str = ""
    """Folder of a PEFT adapter from which a new run starts: `adapter_config.json` and
    `adapter_model.safetensors`. The keys `rank`, `alpha`, `rslora`, `kind`, `dropout` and `targets`
    default to the values of this adapter. Also read by `maxpipe generate hf:DIR` and `eval hf:DIR`,
    where DIR is the base model. If this run already has a checkpoint, only these keys are read from
    the folder. To resume without the folder, use the config.yml in the run's folder."""
    base_quantization: Literal["default", "int8", "nf4"] = field(
        default="default", metadata=renamed_from("base")
    )
    """Storage format of the layers' frozen weight matrices. `default` uses `model.param_dtype`,
    `int8` uses one scale per row, and `nf4` uses 4 bits with one scale per 64 values (QLoRA,
    arXiv:2305.14314). Matrices are all-gathered in this format and dequantized. Matmuls use the
    format of `model.matmul`."""
    double_quantization: bool = False
    """Also quantize the scales of an `nf4` base, to 8 bits with one scale per 256 scales
    (arXiv:2305.14314, section 3). The base then needs 4.13 instead of 4.5 bits per weight."""


def num_unquantized_layers(setting: int, matmul: str, num_layers: int) -> int:
    """Return the number of last layers whose matmuls are not quantized.

    The arguments are the values of `model.matmul_unquantized_layers` and two other keys.
    """
    if setting >= 0:
        return setting
    return math.ceil(0.15 * num_layers) if matmul == "nvfp4" else 0


LARGEST = 3.4e38
"""Largest allowed config value. Devices compute in float32, where larger values overflow to
infinity."""
SMALLEST = 1.2e-38
"""Smallest allowed positive config value. Smaller values underflow to zero in float32."""


class Bound(NamedTuple):
    """Allowed range of a numeric config value. `example` is a valid value."""

    key: str
    example: float
    low: float
    high: float = math.inf
    why: str = ""
    low_is_inside: bool = True
    high_is_inside: bool = True
    axis: str = ""
    """Logical axes of the dims whose size is this value, separated by spaces. The size must be a
    multiple of the number of devices that shard each axis."""

    def holds(self, value: float) -> bool:
        above = self.low <= value if self.low_is_inside else self.low < value
        below = value <= self.high if self.high_is_inside else value < self.high
        return above and below

    def __str__(self) -> str:
        if math.isinf(self.high):
            text = f"at least {self.low}" if self.low_is_inside else f"greater than {self.low}"
        elif not self.low_is_inside:
            text = f"greater than {self.low} and at most {self.high}"
        elif self.high_is_inside:
            text = f"from {self.low} to {self.high}"
        else:
            text = f"at least {self.low} and less than {self.high}"
        return f"{text}{': ' + self.why if self.why else ''}"
