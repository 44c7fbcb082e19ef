"""Image embeddings of a step, computed by the vision tower before the tick loop.

All devices share the images. Batch axes already divide them; the other axes, such as stage and
tensor, divide the images of each batch shard. Every device gathers the weights of the tower. The
backward pass runs the tower again, so that none of its activations exist during the tick loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from maxpipe.models.layers.gemma4_vision import Gemma4VisionTower
from maxpipe.models.layers.qwen_vision import QwenVisionTower
from maxpipe.models.layers.vision import VISION, VisionTower
from maxpipe.nn.vision import image_embeddings
from maxpipe.parallel.batch_arrays import IMAGE_FEATURES, image_arrays, without_images
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC, reshard
from maxpipe.pipeline.weights import replace_subtree, select_trainable

Tree = Any
_EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class ImageFeatures:
    """Computation of image embeddings and of the gradients of the vision tower on a mesh."""

    tower: VisionTower | QwenVisionTower | Gemma4VisionTower
    max_images: int
    """Number of images per sequence in a batch."""
    mesh: Mesh
    dtype: jnp.dtype
    """Compute dtype."""
    trainable: Tree
    """Whether each parameter of the tower has a gradient."""
    gradient_specs: Tree
    """PartitionSpec of the gradient of each trainable parameter."""

    def add_to(self, params: Tree, batch: Tree) -> Tree:
        """Return the batch with image embeddings in place of images."""
        run = self._shard_map(self._embed, (_EVERYWHERE, BATCH_SPEC), BATCH_SPEC)
        features = run(_gathered(params[VISION]), image_arrays(batch))
        return without_images(batch) | {IMAGE_FEATURES: features}

    def gradients(self, params: Tree, batch: Tree, cotangent: Float[jax.Array, "B N K F"]) -> Tree:
        """Return the float32 gradients of the trainable parameters of the tower, given the gradient
        of the image embeddings.
        """
        specs = (_EVERYWHERE, BATCH_SPEC, BATCH_SPEC)
        run = self._shard_map(self._differentiate, specs, _EVERYWHERE)
        found = run(_gathered(params[VISION]), image_arrays(batch), cotangent)
        return reshard(found, self.gradient_specs)

    def abstract_features(self, batch: Tree) -> Tree:
        """Return the shapes of a batch with image embeddings in place of images."""
        tower, tokens = self.tower, batch["tokens"]
        shape = (len(tokens), self.max_images, tower.tokens_per_image, tower.feature_width)
        features = jax.ShapeDtypeStruct(shape, self.dtype, sharding=tokens.sharding)
        return without_images(batch) | {IMAGE_FEATURES: features}

    def _shard_map(self, run: Callable[..., Tree], in_specs: Tree, out_specs: Tree) -> Callable:
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @property
    def _sharing_axes(self) -> tuple[str, ...]:
        """Return the mesh axes whose devices have the same images."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in BATCH_AXES)

    def _share(self, array: jax.Array) -> jax.Array:
        """Return this device's share of a batch shard's images, padded with zeros."""
        count = math.prod(self.mesh.shape[axis] for axis in self._sharing_axes)
        size = -(-len(array) // count)
        padding = ((0, count * size - len(array)), *((0, 0),) * (array.ndim - 1))
        start = lax.axis_index(self._sharing_axes) * size
        return lax.dynamic_slice_in_dim(jnp.pad(array, padding), start, size, 0)

    def _embed(self, params: Tree, images: Tree) -> Float[jax.Array, "B N K F"]:
        flat = jax.tree.map(_merge_sequences, images)
        own = image_embeddings(self.tower, params, jax.tree.map(self._share, flat), self.dtype)
        features = lax.all_gather(own, self._sharing_axes, axis=0, tiled=True)
        rows = len(jax.tree.leaves(images)[0])
        return features[: rows * self.max_images].reshape(rows, -1, *features.shape[1:])

    def _differentiate(
        self, params: Tree, images: Tree, cotangent: Float[jax.Array, "B N K F"]
    ) -> Tree:
        own, seed = jax.tree.map(
            lambda array: self._share(_merge_sequences(array)), (images, cotangent)
        )
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

        def run(trained: Tree) -> jax.Array:
            complete = replace_subtree(wide, trained)
            return image_embeddings(self.tower, complete, own, self.dtype)

        _, pull = jax.vjp(run, select_trainable(wide, self.trainable))
        (found,) = pull(seed.astype(self.dtype))
        return jax.tree.map(lambda leaf: lax.psum(leaf, self.mesh.axis_names), found)


def _merge_sequences(array: jax.Array) -> jax.Array:
    """Merge the dims of sequences and of images."""
    return array.reshape(-1, *array.shape[2:])


def _gathered(params: Tree) -> Tree:
    return reshard(params, jax.tree.map(lambda _: _EVERYWHERE, params))
