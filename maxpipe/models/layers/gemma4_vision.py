"""Vision tower of Gemma 4 for images of different sizes, as a spec without jax.

`Gemma4VisionTower` declares the parameters under the name `vision`. `maxpipe.nn.gemma4_vision`
computes the image embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.layers.patch_tower import PatchTower, stacked
from maxpipe.models.layers.vision import CHANNELS, VISION
from maxpipe.models.spec import Constant, Dims, Normal, Param

LIMITS = (("input_min", -1), ("input_max", 1), ("output_min", -1), ("output_max", 1))
"""Names of the limits of a clipped matmul, and the signs of their initial values."""
LARGEST_LIMIT = 3e38
"""Magnitude of limits that clip nothing. Finite, as all numbers in checkpoints are."""


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionTower(PatchTower):
    """A vision transformer with 2-D rotary positions, and the average of each square of patches.

    The transformer has norms before and after each sublayer, normalized queries, keys and values,
    gated MLPs, and learned embeddings of the column and the row of a patch. One matrix projects the
    averages to the width of the language model.
    """

    is_clipped: bool = False
    """Whether the inputs and outputs of the matmuls in the layers are clipped to stored limits."""
    is_standardized: bool = False
    """Whether a stored bias is subtracted from the averages, which are then multiplied by a stored
    scale."""

    @property
    def has_rotary_positions(self) -> bool:
        """Return whether the tokens of the language model have 3-D positions."""
        return False

    @property
    def placeholder(self) -> tuple[int, ...]:
        """Return the token IDs that chat templates render for an image."""
        return (self.image_token_id,)

    @property
    def feature_width(self) -> int:
        """Return the width of an image embedding."""
        return self.d_model

    @property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters, keyed by storage path. Layers are stacked along the first dim."""
        width, size = (self.width, "embed"), (self.patch_size, "vision")
        kernel = (size, size, (CHANNELS, "vision"), width)
        positions = ((2, "vision"), (self.num_positions, "vision"), width)
        params = {
            ("patches", "kernel"): Param(kernel, Normal(CHANNELS * self.patch_size**2)),
            ("positions",): Param(positions, Normal(self.width)),
        }
        params |= stacked("layers", self.num_layers, self._layer_params)
        if self.is_standardized:
            for name, value in (("bias", 0.0), ("scale", 1.0)):
                stored = Param((width,), Constant(value), decays=False, trainable=False)
                params["standardize", name] = stored
        matrix = (width, (self.d_model, "norm"))
        params["projector", "kernel"] = Param(matrix, Normal(self.width))
        return {(VISION, *name): param for name, param in params.items()}

    @property
    def _layer_params(self) -> dict[tuple[str, ...], Param]:
        """Return the parameters of one layer."""
        width, mlp = (self.width, "embed"), (self.d_mlp, "vision")
        heads: Dims = ((self.num_heads, "vision"), (self.head_dim, "vision"))
        gain = (2 * self.num_layers) ** -0.5
        params = {
            **_norm("attention_norm", width),
            **_norm("attention_after_norm", width),
            **_norm("query_norm", heads[1]),
            **_norm("key_norm", heads[1]),
            **_norm("mlp_norm", width),
            **_norm("mlp_after_norm", width),
        }
        for name in ("query", "key", "value"):
            params["attention", name] = Param((width, *heads), Normal(self.width))
        params["attention", "out"] = Param((*heads, width), Normal(self.width, gain))
        for name in ("gate", "up"):
            params["mlp", name] = Param((width, mlp), Normal(self.width))
        params["mlp", "down"] = Param((mlp, width), Normal(self.d_mlp, gain))
        if self.is_clipped:
            matmuls = [name for name in params if name[0] in ("attention", "mlp")]
            params |= {
                (part, f"{matmul}_{limit}"): _limit(sign)
                for part, matmul in matmuls
                for limit, sign in LIMITS
            }
        return params


def _norm(name: str, dim: tuple[int, str]) -> dict[tuple[str, ...], Param]:
    return {(name, "scale"): Param((dim,), Constant(1.0), decays=False)}


def _limit(sign: int) -> Param:
    return Param(((1, "vision"),), Constant(sign * LARGEST_LIMIT), decays=False, trainable=False)
