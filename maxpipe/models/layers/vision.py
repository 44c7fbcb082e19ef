"""Vision tower of SigLIP and the projector of Gemma 3, as a spec without jax.

`VisionTower` declares the parameters under the name `vision`. `maxpipe.nn.vision` computes the
image embeddings. An image is square, with values from 0 to 255 in three channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from maxpipe.models.spec import Constant, Dims, Normal, Param

VISION = "vision"
"""First part of the names of the parameters of the vision tower and its projector."""
CHANNELS = 3
QUERY_BLOCK = 512
"""Number of query patches whose attention scores are in memory at the same time."""


@dataclass(frozen=True)
class VisionTower:
    """A vision transformer (SigLIP, arXiv:2303.15343) and the projector of arXiv:2503.19786.

    The transformer has pre-norms with biases, learned positions, and attention between all patches
    of an image. The projector averages squares of patches, applies an RMS norm and multiplies by
    one matrix.
    """

    d_model: int
    """Width of the language model."""
    width: int
    """Width of the tower."""
    num_layers: int
    num_heads: int
    d_mlp: int
    image_size: int
    """Height and width of an image in pixels."""
    patch_size: int
    """Height and width of a patch in pixels."""
    tokens_per_image: int
    """Number of image embeddings. A square number, because patches are averaged in squares."""
    norm_epsilon: float
    image_token_id: int
    """Token ID of the positions whose embeddings are replaced."""
    image_begin_token_id: int
    """Token ID that precedes the tokens of an image."""
    image_end_token_id: int
    """Token ID that follows the tokens of an image."""

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.patches_per_side**2

    @property
    def tokens_per_side(self) -> int:
        return round(self.tokens_per_image**0.5)

    @property
    def feature_width(self) -> int:
        """Return the width of an image embedding."""
        return self.d_model

    @property
    def has_grids(self) -> bool:
        """Return whether images have different sizes."""
        return False

    @property
    def has_rotary_positions(self) -> bool:
        """Return whether the tokens of the language model have 3-D positions."""
        return False

    @property
    def placeholder(self) -> tuple[int, ...]:
        """Return the token IDs that chat templates render for an image."""
        return (self.image_begin_token_id,)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return the shape of an image: height, width and channels."""
        return (self.image_size, self.image_size, CHANNELS)

    @property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters, keyed by storage path. Layers are stacked along the first dim."""
        width, size = (self.width, "embed"), self.patch_size
        patch = ((CHANNELS, "vision"), (size, "vision"), (size, "vision"), width)
        positions = ((self.num_patches, "vision"), width)
        params = {
            ("patches", "kernel"): Param(patch, Normal(CHANNELS * size**2)),
            ("patches", "bias"): bias((width,)),
            ("positions",): Param(positions, Normal(self.width)),
        }
        stack = (self.num_layers, "vision")
        for name, param in self._layer_params.items():
            params["layers", *name] = replace(param, dims=(stack, *param.dims))
        params |= {("norm", name): param for name, param in self._norm.items()}
        matrix = (width, (self.d_model, "norm"))
        params["projector", "norm"] = Param((width,), Constant(0.0), decays=False)
        params["projector", "kernel"] = Param(matrix, Normal(self.width))
        return {(VISION, *name): param for name, param in params.items()}

    @property
    def _norm(self) -> Mapping[str, Param]:
        width: Dims = ((self.width, "embed"),)
        return {"scale": Param(width, Constant(1.0), decays=False), "bias": bias(width)}

    @property
    def _layer_params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters of one layer."""
        width, mlp = (self.width, "embed"), (self.d_mlp, "vision")
        heads: Dims = ((self.num_heads, "vision"), (self.head_dim, "vision"))
        gain = (2 * self.num_layers) ** -0.5
        params: dict[tuple[str, ...], Param] = {}
        params |= {("attention_norm", name): param for name, param in self._norm.items()}
        for name in ("query", "key", "value"):
            params["attention", name] = Param((width, *heads), Normal(self.width))
            params["attention", f"{name}_bias"] = bias(heads)
        params["attention", "out"] = Param((*heads, width), Normal(self.width, gain))
        params["attention", "out_bias"] = bias((width,))
        params |= {("mlp_norm", name): param for name, param in self._norm.items()}
        params["mlp", "up"] = Param((width, mlp), Normal(self.width))
        params["mlp", "up_bias"] = bias((mlp,))
        params["mlp", "down"] = Param((mlp, width), Normal(self.d_mlp, gain))
        params["mlp", "down_bias"] = bias((width,))
        return params


def bias(dims: Dims) -> Param:
    """Return a bias."""
    return Param(dims, Constant(0.0), decays=False)
