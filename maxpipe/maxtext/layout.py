"""Layout of MaxText's parameters: names, layer axes and scales, by model family.

The rules are those of MaxText's `checkpoint_conversion/utils/param_mapping.py` and of its layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.maxtext.orbax_arrays import ParamArrays
from maxpipe.models.config import ModelConfig
from maxpipe.models.registry import FAMILIES, describe
from maxpipe.models.spec import Param

FAMILY_NAMES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "moe", "gemma2", "gemma3")
"""Model families whose checkpoints can be imported."""

RopeLayout = Literal["auto", "interleaved", "split"]

_GEMMA3_PATTERN = 6
_SCANNED = ("layers", "scanned_blocks")
_PROJECTIONS = {
    "attention.query": "{attention}.query.kernel",
    "attention.key": "{attention}.key.kernel",
    "attention.value": "{attention}.value.kernel",
    "attention.out": "{attention}.out.kernel",
    "attention.query_bias": "{attention}.query.bias",
    "attention.key_bias": "{attention}.key.bias",
    "attention.value_bias": "{attention}.value.bias",
    "attention.query_norm": "{attention}.query_norm.scale",
    "attention.key_norm": "{attention}.key_norm.scale",
    "mlp.gate": "{mlp}.wi_0.kernel",
    "mlp.up": "{mlp}.wi_1.kernel",
    "mlp.down": "{mlp}.wo.kernel",
    "experts.router": "{experts}.gate.kernel",
    "experts.gate": "{experts}.wi_0",
    "experts.up": "{experts}.wi_1",
    "experts.down": "{experts}.wo",
}
_PRE_NORMS = {
    "attention_norm.scale": "pre_self_attention_layer_norm.scale",
    "mlp_norm.scale": "post_self_attention_layer_norm.scale",
    "experts_norm.scale": "post_self_attention_layer_norm.scale",
}
_SANDWICH = {
    "attention_norm.scale": "pre_self_attention_norm{side}.scale",
    "attention_after_norm.scale": "post_self_attention_norm{side}.scale",
    "mlp_norm.scale": "pre_ffw_norm{side}.scale",
    "mlp_after_norm.scale": "post_ffw_norm{side}.scale",
}
_EXPERT_BLOCKS = {"moe": "MoeBlock_0", "qwen3_moe": "moe_block"}
_SWAPPED = ("experts.gate", "experts.up")
"""Parameters whose first two dims, experts and width, are swapped in MaxText."""


@dataclass(frozen=True)
class LayerSlice:
    """Location of one layer of a parameter, or of a parameter outside layers, in an array."""

    array: str
    layer_axis: int = -1
    """Axis of the array that stacks layers, or -1."""
    layer: int = 0
    """Index of the layer along `layer_axis`."""


@dataclass(frozen=True)
class ParamLayout:
    """Location of one parameter in the arrays of MaxText, and its conversion."""

    slices: Sequence[LayerSlice]
    """Slices in model order, one per stacked layer."""
    shape: tuple[int, ...]
    """Shape of the parameter in maxpipe, with the layer dim if it is stacked."""
    is_stacked: bool
    swapped: bool = False
    scale: float = 1.0
    offset: float = 0.0
    deinterleaved: bool = False
    """Whether the pairs of rotated dims, which are adjacent in MaxText, are split into halves."""

    def read(self, arrays: ParamArrays, region: Sequence[slice]) -> np.ndarray:
        """Read a region of the parameter in maxpipe's layout and the stored dtype."""
        wanted = [slice(*part.indices(n)) for part, n in zip(region, self.shape, strict=True)]
        if not self.is_stacked:
            return self._read_one(arrays, self.slices[0], wanted)
        layers = range(*wanted[0].indices(self.shape[0]))
        return np.stack([self._read_one(arrays, self.slices[each], wanted[1:]) for each in layers])

    def _read_one(
        self, arrays: ParamArrays, piece: LayerSlice, inner: Sequence[slice]
    ) -> np.ndarray:
        parts = list(inner)
        if self.deinterleaved:
            parts[-1] = slice(None)  # every half needs all pairs
        index: list[int | slice] = [parts[1], parts[0], *parts[2:]] if self.swapped else [*parts]
        if piece.layer_axis >= 0:
            index.insert(piece.layer_axis, piece.layer)
        values = arrays.read(piece.array, tuple(index))
        if self.swapped:
            values = values.swapaxes(0, 1)
        if self.deinterleaved:
            values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
            values = values[..., inner[-1]]
        if self.scale != 1.0 or self.offset:
            exact = values.astype(np.float32) * np.float32(self.scale) + np.float32(self.offset)
            values = exact.astype(values.dtype)
        return values


def lay_out(config: ModelConfig, arrays: ParamArrays, rope: RopeLayout) -> dict[str, ParamLayout]:
    """Return the layout of each parameter, keyed by checkpoint name.

    Raises:
        ConfigError: the family is not supported, or arrays are missing, unexpected or have another
            shape.
    """
    if config.family not in FAMILY_NAMES:
        rule = f"cannot be imported from MaxText. Families: {', '.join(FAMILY_NAMES)}."
        others = ", ".join(name for name in FAMILIES if name not in FAMILY_NAMES)
        action = f"For {others}, convert to a Hugging Face folder with MaxText, and import that."
        raise ConfigError.one(Code.MT_UNSUPPORTED, "model.family", config.family, rule, action)
    _check_layers(config)
    builder = _Builder(config, arrays, rope)
    layouts = builder.build()
    builder.check()
    return layouts


def _check_layers(config: ModelConfig) -> None:
    if len(describe(config).layer_types) > 1:
        rule = "must have experts in every layer, as in MaxText."
        action = f"Set model.{config.family}.num_dense_layers=0, or dense_layers=[]."
        raise ConfigError.one(Code.MT_UNSUPPORTED, "model", config.family, rule, action)
    own = config.own
    period = getattr(own, "sliding_window_pattern", _GEMMA3_PATTERN)
    if config.family == "gemma3" and period != _GEMMA3_PATTERN:
        rule = f"must be {_GEMMA3_PATTERN}, as in MaxText."
        action = f"Set model.gemma3.sliding_window_pattern={_GEMMA3_PATTERN}."
        raise ConfigError.one(
            Code.MT_UNSUPPORTED, "model.gemma3.sliding_window_pattern", period, rule, action
        )
    if config.mtp_heads:
        rule = "must be 0: multi-token prediction layers of MaxText cannot be imported."
        raise ConfigError.one(
            Code.MT_UNSUPPORTED, "model.mtp_heads", config.mtp_heads, rule, "Set model.mtp_heads=0."
        )


def is_interleaved(config: ModelConfig, rope: RopeLayout = "auto") -> bool:
    """Return whether MaxText stores the two dims of a rotated pair next to each other.

    By default, this is decided as in MaxText: for the RoPE of Llama 3.1 and for YaRN.
    """
    if rope != "auto":
        return rope == "interleaved"
    own = config.own if config.own is not None else FAMILIES[config.family].section()
    kind, factor = getattr(own, "rope_type", ""), getattr(own, "rope_factor", 1.0)
    return factor != 1 and kind in ("llama3", "yarn")


class _Builder:
    """Collects layouts, and the errors about the arrays of the checkpoint."""

    def __init__(self, config: ModelConfig, arrays: ParamArrays, rope: RopeLayout):
        self.config, self.arrays = config, arrays
        self.deinterleaved = is_interleaved(config, rope)
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.is_gemma = config.family in ("gemma2", "gemma3")
        scanned = [name for name in _SCANNED if self._has(f"decoder.{name}.")]
        self.scanned = scanned[0] if scanned else ""

    def _has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.arrays.arrays)

    def build(self) -> dict[str, ParamLayout]:
        model = describe(self.config)
        found: dict[str, ParamLayout] = {}
        for name, param in model.ends.params.items():
            key = ".".join(name)
            found[key] = self._end(key, param)
        [layer_type] = model.layer_types.values()  # all supported families have one layer type
        for name, param in layer_type.params.items():
            key = ".".join(name)
            places = [self._place(layer, key) for layer in range(len(model.layers))]
            slices = [self._slice(place, key, param.shape) for place in places]
            shape = (len(places), *param.shape)
            found[f"layers.{key}"] = ParamLayout(
                slices,
                shape,
                is_stacked=True,
                swapped=key in _SWAPPED,
                scale=self._query_scale() if key == "attention.query" else 1.0,
                offset=-1.0 if self.is_gemma and key.endswith(("norm", "norm.scale")) else 0.0,
                deinterleaved=self.deinterleaved and key in ("attention.query", "attention.key"),
            )
        return found

    def _end(self, key: str, param: Param) -> ParamLayout:
        """Return the layout of the embedding, the final norm or the output projection."""
        array = {
            "embedding": "token_embedder.embedding",
            "final_norm.scale": "decoder.decoder_norm.scale",
            "head": "decoder.logits_dense.kernel",
        }[key]
        # MaxText may pad the vocabulary: only the first rows are used.
        padded = {"embedding": 0, "head": 1}.get(key, -1)
        piece = self._slice((array, 0, 0), key, param.shape, padded)
        scale, offset = 1.0, 0.0
        if self.is_gemma and key == "embedding":
            width = math.sqrt(self.config.d_model)
            # MaxText's conversions scale Gemma 3 by the square root in bfloat16.
            import ml_dtypes

            rounded = float(ml_dtypes.bfloat16(width))
            scale = 1 / (rounded if self.config.family == "gemma3" else width)
        if self.is_gemma and key == "final_norm.scale":
            offset = -1.0
        return ParamLayout([piece], param.shape, is_stacked=False, scale=scale, offset=offset)

    def _query_scale(self) -> float:
        """Return the factor of the query projection, into which MaxText folds the score scale."""
        family, own = self.config.family, self.config.own
        if family in ("llama", "mistral", "moe"):
            return math.sqrt(self.config.head_dim)
        if family == "gemma2":
            return math.sqrt(getattr(own, "query_pre_attn_scalar", 0) or self.config.head_dim)
        return 1.0

    def _place(self, layer: int, key: str) -> tuple[str, int, int]:
        """Return the name of the array of one layer, the layer's index in it, and the number of
        layers that the array stacks (0 for one layer without a layer axis).
        """
        family, count = self.config.family, self.config.num_layers
        if family == "gemma2":
            side = "_global" if layer % 2 else "_local"
            suffix = self._suffix(key, side)
            pair, pairs = layer // 2, count // 2
            if self.scanned:
                return f"decoder.{self.scanned}.{suffix}", pair, pairs
            return f"decoder.layers_{pair}.{suffix}", 0, 0
        suffix = self._suffix(key, "")
        if not self.scanned:
            return f"decoder.layers_{layer}.{suffix}", 0, 0
        if family == "gemma3":
            blocks = count // _GEMMA3_PATTERN
            block, inside = divmod(layer, _GEMMA3_PATTERN)
            if block < blocks:
                return f"decoder.{self.scanned}.layers_{inside}.{suffix}", block, blocks
            return f"decoder.layers_remainder.layers_{inside}.{suffix}", 0, 0
        return f"decoder.{self.scanned}.{suffix}", layer, count

    def _suffix(self, key: str, side: str) -> str:
        names = {**_PROJECTIONS, **(_SANDWICH if self.is_gemma else _PRE_NORMS)}
        return names[key].format(
            attention=f"self_attention{side}",
            mlp=f"mlp{side}",
            experts=_EXPERT_BLOCKS.get(self.config.family, ""),
            side=side,
        )

    def _slice(
        self,
        place: tuple[str, int, int],
        key: str,
        shape: tuple[int, ...],
        padded: int = -1,
    ) -> LayerSlice:
        """Check the shape of an array, and return the slice of one layer."""
        array, layer, count = place
        if array not in self.arrays.arrays:
            if array not in self.missing:
                self.missing.append(array)
            return LayerSlice(array)
        stored = self.arrays.shape(array)
        one = (shape[1], shape[0], *shape[2:]) if key in _SWAPPED else shape
        is_new = array not in self.used
        self.used.add(array)
        if not count:
            enough = [
                have >= want if axis == padded else have == want
                for axis, (have, want) in enumerate(zip(stored, one, strict=False))
            ]
            if len(stored) != len(one) or not all(enough):
                self._report(array, stored, one, is_new)
            return LayerSlice(array)
        axes = [1, *(axis for axis in range(len(one) + 1) if axis != 1)]
        fits = [axis for axis in axes if (*one[:axis], count, *one[axis:]) == stored]
        if not fits:
            self._report(array, stored, (*one[:1], count, *one[1:]), is_new)
            return LayerSlice(array)
        return LayerSlice(array, fits[0], layer)

    def _report(
        self, array: str, stored: tuple[int, ...], wanted: tuple[int, ...], is_new: bool
    ) -> None:
        if is_new:
            self.wrong.append(f"{array} has shape {stored}, but the config needs {wanted}")

    def check(self) -> None:
        """Raise an error that lists missing and unexpected arrays and wrong shapes.

        Raises:
            ConfigError: the arrays do not match the config.
        """
        unexpected = sorted(self.arrays.arrays.keys() - self.used)
        if not (self.missing or unexpected or self.wrong):
            return
        parts = [
            _listed("lacks", self.missing),
            _listed("has unexpected", unexpected),
            _listed("differs:", self.wrong, "; "),
        ]
        raise ConfigError.one(
            Code.MT_PARAMS,
            f"checkpoint {self.arrays.folder}",
            None,
            f"does not match the model config: {'; '.join(filter(None, parts))}.",
            "Set --config to the config of this checkpoint, such as the file that `maxpipe config "
            "from-maxtext` writes.",
        )


def _listed(verb: str, names: Sequence[str], separator: str = ", ", most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{verb} {separator.join(names[:most])}{more}" if names else ""
