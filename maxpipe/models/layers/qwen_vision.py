"""Vision tower of Qwen3-VL and Qwen3.5 for images of different sizes, as a spec without jax.

`QwenVisionTower` declares the parameters under the name `vision`. `maxpipe.nn.qwen_vision` computes
the image embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.layers.patch_tower import PatchTower, stacked
from maxpipe.models.layers.vision import CHANNELS, VISION, bias
from maxpipe.models.spec import Constant, Dims, Normal, Param

FRAMES = 2
"""Number of video frames per patch. An image consists of equal frames."""


@dataclass(frozen=True, kw_only=True)
class QwenVisionTower(PatchTower):
    """A vision transformer with 2-D rotary positions and a merger of patches (arXiv:2511.21631).

    The transformer has pre-norms with biases, learned positions that are interpolated to the grid
    of an image, and attention between all patches of an image. The learned positions form a square
    grid. The merger concatenates squares of patches and applies an MLP. Further mergers read the
    outputs of some layers (DeepStack, arXiv:2406.04334).
    """

    deepstack_layers: tuple[int, ...] = ()
    """Indices of the layers whose outputs are merged into additional embeddings. The n-th of these
    embeddings is added to the output of the n-th layer of the language model."""

    @property
    def has_rotary_positions(self) -> bool:
        """Return whether the tokens of the language model have 3-D positions."""
        return True

    @property
    def placeholder(self) -> tuple[int, ...]:
        """Return the token IDs that chat templates render for an image."""
        return (self.image_begin_token_id, self.image_token_id, self.image_end_token_id)

    @property
    def merged_width(self) -> int:
        """Return the width of a square of patches."""
        return self.width * self.merge_size**2

    @property
    def feature_width(self) -> int:
        """Return the width of an image embedding, followed by the additional embeddings."""
        return self.d_model * (1 + len(self.deepstack_layers))

    @property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters, keyed by storage path. Layers are stacked along the first dim."""
        width, size = (self.width, "embed"), (self.patch_size, "vision")
        frames = (FRAMES, "vision")
        kernel = Normal(CHANNELS * FRAMES * self.patch_size**2)
        params = {
            ("patches", "kernel"): Param(((CHANNELS, "vision"), frames, size, size, width), kernel),
            ("patches", "bias"): bias((width,)),
            ("positions",): Param(((self.num_positions, "vision"), width), Normal(self.width)),
        }
        params |= stacked("layers", self.num_layers, self._layer_params)
        params |= {("merger", *name): param for name, param in self._merger(width).items()}
        if self.deepstack_layers:
            merger = self._merger((self.merged_width, "vision"))
            params |= stacked("deepstack", len(self.deepstack_layers), merger)
        return {(VISION, *name): param for name, param in params.items()}

    def _merger(self, normed: tuple[int, str]) -> dict[tuple[str, ...], Param]:
        """Return the parameters of a merger, whose norm has the dim `normed`."""
        merged, contracted = (self.merged_width, "vision"), (self.merged_width, "embed")
        return {
            **_norm("norm", normed),
            ("up",): Param((contracted, merged), Normal(self.merged_width)),
            ("up_bias",): bias((merged,)),
            ("down",): Param((contracted, (self.d_model, "norm")), Normal(self.merged_width)),
            ("down_bias",): bias(((self.d_model, "norm"),)),
        }

    @property
    def _layer_params(self) -> dict[tuple[str, ...], Param]:
        """Return the parameters of one layer."""
        width, mlp = (self.width, "embed"), (self.d_mlp, "vision")
        heads: Dims = ((self.num_heads, "vision"), (self.head_dim, "vision"))
        gain = (2 * self.num_layers) ** -0.5
        params = _norm("attention_norm", width)
        for name in ("query", "key", "value"):
            params["attention", name] = Param((width, *heads), Normal(self.width))
            params["attention", f"{name}_bias"] = bias(heads)
        params["attention", "out"] = Param((*heads, width), Normal(self.width, gain))
        params["attention", "out_bias"] = bias((width,))
        params |= _norm("mlp_norm", width)
        params["mlp", "up"] = Param((width, mlp), Normal(self.width))
        params["mlp", "up_bias"] = bias((mlp,))
        params["mlp", "down"] = Param((mlp, width), Normal(self.d_mlp, gain))
        params["mlp", "down_bias"] = bias((width,))
        return params


def _norm(name: str, dim: tuple[int, str]) -> dict[tuple[str, ...], Param]:
    scale = Param((dim,), Constant(1.0), decays=False)
    return {(name, "scale"): scale, (name, "bias"): bias((dim,))}
