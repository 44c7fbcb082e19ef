"""Formats of quantized weights in Hugging Face folders, as `quantization_config` declares them.

Each format stores a weight matrix as codes and scales. All entries of a block of the matrix share a
scale. A folder can have matrices of several formats. `maxpipe.huggingface.dequantize` reads the
tensors.

| `quant_method` | codes | scales |
|---|---|---|
| `fp8` | `NAME`, float8 (e4m3) | `NAME_scale_inv`, usually one per 128 x 128 block |
| `fp8`, `deepseek_v4` | `NAME.weight`, float8 (e4m3) | `NAME.scale`, one per 128 x 128 block |
| `fp8`, `expert_dtype: fp4` | `NAME.weight`, float4 (e2m1) | `NAME.scale`, one per 32 inputs |
| `mxfp4` | `NAME_blocks`, float4 (e2m1) | `NAME_scales`, a power of two per 32 inputs |
| `compressed-tensors`, `pack-quantized` | `NAME_packed`, int4 | `NAME_scale`, one per group |
| `compressed-tensors`, `float-quantized` | `NAME`, float8 (e4m3) | `NAME_scale` |

Sources of the formats: arXiv:2412.19437, section 3.3; OCP Microscaling Formats 1.0;
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from maxpipe.models.huggingface import Theirs, UnsupportedError

KEY = "quantization_config"
"""Key of config.json that describes the format."""

_COPY = "Copy config.json again from the model's source."
_UNQUANTIZED = "Use a folder with unquantized weights."

FP8_BLOCK = (128, 128)
FP4_BLOCK = 32
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def _pairs(low_first: Iterable[float]) -> np.ndarray:
    """Return the two values of each byte, whose low 4 bits are the first code."""
    values = np.asarray(low_first, np.float32)
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], -1)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Encoding:
    """Codes and scales of a quantized tensor."""

    name: str
    """Name of the format for messages."""
    codes: str
    """Suffix of the tensor of codes."""
    code_dtype: str
    scales: str
    """Suffix of the tensor of scales."""
    scale_dtypes: tuple[str, ...]
    values: np.ndarray = field(compare=False)
    """Values that each byte encodes, with shape `[256]` or `[256, 2]`."""
    weight: str = ""
    """Suffix of the dequantized tensor."""
    shape: str = ""
    """Suffix of the tensor that stores the shape of the weight matrix, if any."""
    rounds_to_scale_dtype: bool = False
    """Whether products are rounded to the dtype of the scales first."""
    activation_scales: tuple[str, ...] = ()
    """Suffixes of tensors with the scales of quantized activations, which imports ignore."""


_FLOATS = ("F32", "BF16", "F16")
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
_BLOCK_FP8 = Encoding(
    *("FP8", "", "F8_E4M3", "_scale_inv", (*_FLOATS, "F8_E8M0"), _FP8_VALUES),
    activation_scales=(".activation_scale", "_activation_scale"),
)
_COMPRESSED_ACTIVATIONS = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
_DEEPSEEK_FP8 = Encoding(
    *("FP8", ".weight", "F8_E4M3", ".scale", (*_FLOATS, "F8_E8M0"), _FP8_VALUES), weight=".weight"
)
_FLOAT_FP8 = Encoding(
    *("FP8", "", "F8_E4M3", "_scale", _FLOATS, _FP8_VALUES),
    rounds_to_scale_dtype=True,
    activation_scales=_COMPRESSED_ACTIVATIONS,
)
_E2M1_PAIRS = _pairs((*_E2M1, *(-value for value in _E2M1)))
MXFP4 = Encoding("MXFP4", "_blocks", "U8", "_scales", ("U8", "F8_E8M0"), _E2M1_PAIRS)
_DEEPSEEK_FP4 = Encoding(
    *("FP4", ".weight", "I8", ".scale", ("F8_E8M0",), _E2M1_PAIRS), weight=".weight"
)
_INT4 = Encoding(
    "int4",
    *("_packed", "I32", "_scale", _FLOATS),
    _pairs(range(-8, 8)),
    shape="_shape",
    rounds_to_scale_dtype=True,
    activation_scales=_COMPRESSED_ACTIVATIONS,
)


@dataclass(frozen=True)
class Quantization:
    """Format of a folder's quantized tensors, as config.json declares it."""

    method: str
    encoding: Encoding
    block: tuple[int, int]
    """Numbers of rows and columns that share a scale; 0 means all of them."""
    dtype: str
    """Dtype of the dequantized weights, as named in safetensors files."""
    excluded_modules: frozenset[str] = frozenset()
    """Names of modules that are declared to be unquantized."""
    others: tuple[Quantization, ...] = ()
    """Formats of other tensors in the folder."""

    @property
    def is_float4(self) -> bool:
        """Return whether codes are float4 numbers and scales are powers of two."""
        return self.encoding.values is _E2M1_PAIRS

    @property
    def is_transposed(self) -> bool:
        """Return whether expert matrices have the output dim first, unlike the plain folder."""
        return self.encoding is MXFP4

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor."""
        *lead, rows, columns = shape
        blocks = (-(-rows // (self.block[0] or rows)), -(-columns // (self.block[1] or columns)))
        return (*lead, *blocks)


# --- config.json ----------------------------------------------------------------------------------


def parse_quantization(content: Theirs, dtype: Any) -> Quantization | None:
    """Return the format that `quantization_config` declares, or None for unquantized weights.

    `dtype` is the dtype in config.json, to which weights are dequantized.

    Raises:
        UnsupportedError: the format is invalid or not supported.
    """
    said = content.get(KEY)
    if said is None:
        return None
    if not isinstance(said, dict):
        raise UnsupportedError(KEY, said, "must be an object or null.", _COPY)
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in _PARSERS:
        known = ", ".join(_PARSERS)
        rule = f"must be one of {known}: maxpipe does not read other quantized weights."
        action = _DEQUANTIZED.get(method, _UNQUANTIZED) if isinstance(method, str) else _COPY
        raise UnsupportedError(f"{KEY}.quant_method", method, rule, action)
    names = {"float32": "F32", "float16": "F16"}
    target = names.get(dtype, "BF16") if isinstance(dtype, str) else "BF16"
    encoding, block, excluded = _PARSERS[method](said)
    whole = Quantization(method, encoding, block, target, excluded)
    if encoding is _BLOCK_FP8:
        return _with_deepseek_formats(whole, content, said)
    return whole


def _with_deepseek_formats(
    quantization: Quantization, content: Theirs, said: Theirs
) -> Quantization:
    """Add the formats of DeepSeek-V4, which transformers renames while it reads a folder."""
    is_v4 = content.get("model_type") == "deepseek_v4"
    inside = said if not is_v4 or said.get("expert_dtype") is not None else content
    supported = (None, "fp8", "fp4") if is_v4 else (None, "fp8")
    where = KEY if inside is said else ""
    _check_values(inside, where, {"expert_dtype": supported}, _TRANSFORMERS_FP8)
    if not is_v4:
        return quantization
    others = [replace(quantization, encoding=_DEEPSEEK_FP8)]
    if inside.get("expert_dtype") == "fp4":
        others.append(replace(quantization, encoding=_DEEPSEEK_FP4, block=(1, FP4_BLOCK)))
    return replace(quantization, others=tuple(others))


_Parsed = tuple[Encoding, tuple[int, int], frozenset[str]]


def _parse_fp8(said: Theirs) -> _Parsed:
    _check_values(said, KEY, _FP8_VALUES_OF_KEYS, _TRANSFORMERS_FP8)
    block = said.get("weight_block_size", list(FP8_BLOCK))
    excluded = said.get("modules_to_not_convert")
    if excluded is None:
        excluded = said.get("ignored_layers")
    return (
        _BLOCK_FP8,
        (0, 0) if block is None else _block(block, f"{KEY}.weight_block_size"),
        _names(excluded, f"{KEY}.modules_to_not_convert"),
    )


_FP8_VALUES_OF_KEYS: Mapping[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
}


def _parse_mxfp4(said: Theirs) -> _Parsed:
    _names(said.get("modules_to_not_convert"), f"{KEY}.modules_to_not_convert")
    return MXFP4, (1, 32), frozenset()  # the names are patterns; only expert tensors have blocks


def _parse_compressed(said: Theirs) -> _Parsed:
    groups = said.get("config_groups")
    where = f"{KEY}.config_groups"
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise UnsupportedError(where, groups, "must be an object of objects.", _COPY)
    if len(groups) != 1:
        rule = "must have exactly one group: maxpipe reads folders with one format."
        raise UnsupportedError(where, groups, rule, _TRANSFORMERS_COMPRESSED)
    ((name, group),) = groups.items()
    where = f"{where}.{name}.weights"
    kind, weights = group.get("format") or said.get("format"), group.get("weights")
    if not isinstance(weights, dict):
        raise UnsupportedError(where, weights, "must be an object.", _COPY)
    if not isinstance(kind, str) or kind not in _COMPRESSED_VALUES:
        rule = f"must be {' or '.join(_COMPRESSED_VALUES)}: maxpipe does not read other formats."
        raise UnsupportedError(f"{KEY}.format", kind, rule, _TRANSFORMERS_COMPRESSED)
    _check_values(weights, where, _COMPRESSED_VALUES[kind], _TRANSFORMERS_COMPRESSED)
    for key in ("sparsity_config", "transform_config"):
        if said.get(key):
            rule = "must be empty: maxpipe reads only quantized weights."
            raise UnsupportedError(f"{KEY}.{key}", said[key], rule, _TRANSFORMERS_COMPRESSED)
    excluded = _names(said.get("ignore"), f"{KEY}.ignore")
    strategy = weights["strategy"]
    if strategy == "group":
        block = _block([1, weights.get("group_size")], f"{where}.group_size")
    elif strategy == "block":
        block = _block(weights.get("block_structure"), f"{where}.block_structure")
    else:
        block = (1, 0) if strategy == "channel" else (0, 0)
    return _INT4 if kind == "pack-quantized" else _FLOAT_FP8, block, excluded


_COMPRESSED_VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "pack-quantized": {
        "num_bits": (4,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("group", "channel"),
        "actorder": (None, False, "static", "weight"),
    },
    "float-quantized": {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (True,),
        "strategy": ("channel", "tensor", "block"),
    },
}
"""Supported values of the keys of `weights`, by format."""

_PARSERS = {"fp8": _parse_fp8, "mxfp4": _parse_mxfp4, "compressed-tensors": _parse_compressed}


def _check_values(
    said: Theirs, where: str, supported: Mapping[str, tuple[Any, ...]], action: str
) -> None:
    for key, values in supported.items():
        value = said.get(key)
        if not any(value == each and type(value) is type(each) for each in values):
            allowed = " or ".join("null" if each is None else repr(each) for each in values)
            rule = f"must be {allowed}: other values are not supported."
            raise UnsupportedError(f"{where}.{key}" if where else key, value, rule, action)


def _block(size: Any, where: str) -> tuple[int, int]:
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(each) is int and 0 < each < 2**31 for each in size)
    ):
        given = size[1] if isinstance(size, list) and where.endswith("group_size") else size
        rule = "must be the size of a block: "
        rule += "a positive integer." if where.endswith("group_size") else "two positive integers."
        raise UnsupportedError(where, given, rule, _COPY)
    return size[0], size[1]


def _names(said: Any, where: str) -> frozenset[str]:
    if said is None:
        return frozenset()
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise UnsupportedError(where, said, "must be a list of module names or null.", _COPY)
    return frozenset(said)


def _command(packages: str, code: str) -> str:
    """Return the action that dequantizes a folder with transformers."""
    return (
        f"Dequantize the weights with transformers, torch{packages}: python -c 'from "
        f"transformers import AutoModelForCausalLM as M{code}, "
        "save_original_format=False)', then import NEW."
    )


_LOADED = '; M.from_pretrained("DIR", dtype="bfloat16"'


def _loaded_by(config: str) -> str:
    return (
        f', {config} as C{_LOADED}, quantization_config=C(dequantize=True)).save_pretrained("NEW"'
    )


_TRANSFORMERS_FP8 = _command(" and accelerate", _loaded_by("FineGrainedFP8Config"))
_TRANSFORMERS_COMPRESSED = _command(
    ", accelerate and compressed-tensors", _loaded_by("CompressedTensorsConfig")
)
_DEQUANTIZED = {
    "bitsandbytes": _command(
        ", accelerate and bitsandbytes", f'{_LOADED}).dequantize().save_pretrained("NEW"'
    )
}
"""Actions for methods that maxpipe does not read, if another tool can dequantize the weights."""
