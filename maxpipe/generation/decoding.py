"""Prefill prompts in chunks of a fixed size, then decode all sequences one token at a time.

Prompts are padded on the left, so that all sequences end at the same cache slot. Padding is a
separate segment that no token attends to. The same function processes prefill chunks and single
tokens, and is compiled once for each of these two sizes. Sampling is a pure function with one
random key per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Key

from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.batch_arrays import (
    IMAGE_GRIDS,
    IMAGE_TOKENS_LEFT,
    IMAGES,
    ROTARY_POSITIONS,
)
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, which are applied in the order of the fields."""

    repetition_penalty: float = 1.0
    """Penalty for tokens that the sequence already contains (arXiv:1909.05858). Positive logits are
    divided by the penalty, and negative logits are multiplied by it. 1 disables the penalty."""
    temperature: float = 1.0
    """Divisor of the logits. If 0, the most likely token is selected, or the lowest ID in a tie."""
    top_k: int = 0
    """Number of most likely tokens to sample from. Tokens that tie with the least likely of these
    are included. 0 disables the limit."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens to sample from (arXiv:1904.09751). Tokens
    that tie with the least likely of these are included. 1 disables the limit."""
    min_p: float = 0.0
    """Minimum token probability, as a fraction of the highest probability (arXiv:2407.01082)."""


class SampleOutput(NamedTuple):
    """Sampled token of each sequence."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    """Log-probability in nats that the model assigns to the token, before penalty, temperature and
    filters are applied. NaN if the logits are NaN."""


def sample(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    keys: Key[Array, " B"],
    sampling: Sampling,
) -> SampleOutput:
    """Sample one token per sequence, which depends only on its logits, seen tokens and key."""
    logits = logits.astype(jnp.float32)
    scores = logits
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty requires the seen tokens"
        scores = apply_repetition_penalty(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        tokens = most_likely(scores)
    else:
        scores = filter_logits(apply_temperature(scores, sampling.temperature), sampling)
        tokens = jax.vmap(jax.random.categorical)(keys, scores)
    taken = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return SampleOutput(tokens.astype(jnp.int32), taken - jax.nn.logsumexp(logits, axis=-1))


def most_likely(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the first index of the maximum, or the last index if scores are NaN.

    On CPU, these two scalar reductions are five times faster than `argmax`, which reduces (value,
    index) pairs.
    """
    last = scores.shape[-1] - 1
    is_best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(last + 1), last).min(axis=-1)


def apply_temperature(scores: Float[Array, "B V"], temperature: float) -> Float[Array, "B V"]:
    """Subtract the highest score from all scores, and divide the differences by the temperature.

    The highest score therefore becomes 0, even if the temperature underflows to 0 in float32.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    return jnp.where(below == 0, 0.0, below / temperature)


def apply_repetition_penalty(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """Penalize the logits of seen tokens, which become less likely if the penalty is above 1."""
    less = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, less, logits)


def filter_logits(scores: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Set the scores of tokens that top-k, top-p or min-p exclude to `-inf`.

    Each filter applies to the tokens that the previous filter kept. The most likely token is always
    kept.
    """
    least = jnp.full(scores.shape[:-1], -jnp.inf)
    count = scores.shape[-1]
    if 0 < sampling.top_k < count or sampling.top_p < 1.0:
        ordered = -jnp.sort(-scores, axis=-1)
        if 0 < sampling.top_k < count:
            least = ordered[:, sampling.top_k - 1]
            ordered = jnp.where(ordered < least[:, None], -jnp.inf, ordered)
        if sampling.top_p < 1.0:
            shares = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(shares, axis=-1) - shares
            kept = jnp.where(before < sampling.top_p, ordered, jnp.inf)
            # Keep the most likely token even if `top_p` is below the rounding error.
            least = jnp.maximum(least, jnp.minimum(kept.min(axis=-1), ordered[:, 0]))
    if sampling.min_p > 0.0:
        best = scores.max(axis=-1)
        least = jnp.maximum(least, best + jnp.log(sampling.min_p))
    return jnp.where(scores < least[:, None], -jnp.inf, scores)


def row_keys(seed: int, rows: Int[Array, " B"], positions: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return a sampling key for each sequence and position, independent of the batch and mesh."""
    base = jax.random.key(seed)

    def key(row: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, row), position)

    return jax.vmap(key)(rows, positions)


Tree = Any

_MAX_PREFILL_CHUNK = 512
"""Maximum number of prompt tokens per prefill chunk. The attention scores of one head for a chunk
have the shape (chunk tokens, cache slots)."""
_MIN_PREFILL_CHUNK = 16
_PADDING, TEXT = 0, 1
"""Segment IDs of padding and of text."""


class DecodeState(NamedTuple):
    """State of a batch between two decode steps."""

    caches: Tree
    seen_tokens: Bool[Array, "B V"] | None
    """Mask of the tokens that each sequence contains, or None without a repetition penalty."""
    rotary_offsets: Int[Array, " B"] | None = None
    """Difference between the 3-D positions and the position of the newest token, or None if tokens
    have no 3-D positions. Negative after images, whose tokens share positions."""


class SampledTokens(NamedTuple):
    """Newest token of each sequence, `[B]`; with stages, `[microbatches, sequences]`."""

    tokens: Int[Array, "*rows"]
    logprobs: Float[Array, "*rows"]
    positions: Int[Array, "*rows"]


class TokenBatch(NamedTuple):
    """A batch of prompts, int32 `[B, T]`."""

    tokens: Any
    segment_ids: Any
    positions: Any


class PromptImages(NamedTuple):
    """Images of a prompt."""

    pixels: np.ndarray
    """Images or patches, uint8 `[n, ...]`."""
    tokens_left: np.ndarray
    """Number of tokens of an image from each of its tokens to its last token, int32 `[T]`."""
    grids: np.ndarray | None = None
    """Number of patches per column and per row, int32 `[n, 2]`; None if all images have the same
    size."""
    rotary_positions: np.ndarray | None = None
    """3-D position of each token, int32 `[T, 3]`; None if the model has no 3-D positions."""


class DecodeShape(NamedTuple):
    """Sizes of a batch. Each combination of sizes needs a separate compilation."""

    batch_size: int
    prompt_length: int
    """Number of tokens per prompt, including padding."""
    max_new_tokens: int
    """Maximum number of generated tokens."""
    num_images: int = 0
    """Maximum number of images per prompt."""

    @property
    def prefill_chunk(self) -> int:
        """Return the number of prompt tokens per prefill chunk.

        Prompts with images form one chunk, because the tokens of an image attend to later tokens.
        """
        if self.num_images:
            return self.prompt_length
        return min(self.prompt_length, _MAX_PREFILL_CHUNK)


class RefillPrompt(NamedTuple):
    """A prompt that replaces the finished sequence `row` of a batch."""

    row: int
    prompt: Sequence[int]
    number: int


Refill = Callable[[], Sequence[RefillPrompt]]


def padded_length(longest: int) -> int:
    """Return the padded prompt length: a power of two, or a multiple of the maximum chunk size."""
    if longest > _MAX_PREFILL_CHUNK:
        return -(-longest // _MAX_PREFILL_CHUNK) * _MAX_PREFILL_CHUNK
    return max(_MIN_PREFILL_CHUNK, 1 << (longest - 1).bit_length())


def left_pad(prompts: Sequence[Sequence[int]], rows: int, width: int) -> TokenBatch:
    """Pad prompts on the left. Batch rows without a prompt contain only padding."""
    batch = TokenBatch(*(np.zeros((rows, width), np.int32) for _ in TokenBatch._fields))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        batch.tokens[row, start:] = prompt
        batch.segment_ids[row, start:] = TEXT
        batch.positions[row, start:] = np.arange(len(prompt))
    return batch


def pad_images(
    images: Sequence[PromptImages | None], size: DecodeShape, tokens: TokenBatch
) -> dict[str, np.ndarray]:
    """Return the batch arrays of the prompts' images, padded as `left_pad` pads tokens. `tokens`
    are the padded prompts.
    """
    first = next((each for each in images if each is not None), None)
    if first is None:
        return {}
    shape = (size.batch_size, size.num_images)
    arrays = {
        IMAGES: np.zeros((*shape, *first.pixels.shape[1:]), np.uint8),
        IMAGE_TOKENS_LEFT: np.zeros((size.batch_size, size.prompt_length), np.int32),
    }
    if first.grids is not None:
        arrays[IMAGE_GRIDS] = np.zeros((*shape, 2), np.int32)
    if first.rotary_positions is not None:
        arrays[ROTARY_POSITIONS] = np.repeat(tokens.positions[..., None], 3, axis=-1)
    for row, each in enumerate(images):
        if each is None:
            continue
        start = size.prompt_length - len(each.tokens_left)
        arrays[IMAGES][row, : len(each.pixels)] = each.pixels
        arrays[IMAGE_TOKENS_LEFT][row, start:] = each.tokens_left
        if each.grids is not None:
            arrays[IMAGE_GRIDS][row, : len(each.grids)] = each.grids
        if each.rotary_positions is not None:
            arrays[ROTARY_POSITIONS][row, start:] = each.rotary_positions
    return arrays


def place_replicated(array: np.ndarray, sharding: NamedSharding) -> Array:
    """Transfer an array to the devices. Every process must have a full copy of the array."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    """Return abstract arrays that combine the given shapes and shardings."""
    return jax.tree.map(lambda leaf, at: leaf.update(sharding=at), shapes, shardings)


@dataclass(frozen=True)
class DecodeEngine:
    """Decode engine for meshes without stages.

    Sequences are sharded over the batch axes, and attention heads over the tensor axis.
    """

    decoder: Decoder
    mesh: Mesh
    sampling: Sampling
    seed: int

    supports_refill = True
    """Whether new prompts can replace finished sequences."""
    supports_images = True
    """Whether prompts can have images."""

    @property
    def batch_multiple(self) -> int:
        """Return the number of batch shards, which must divide the batch size."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    def run(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
        images: Sequence[PromptImages | None] = (),
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Yield, in each step, the next tokens of all sequences and their log-probabilities, both
        `[B]`.

        Args:
            params: parameters with layers in model order, as returned by `Decoder.by_layer`.
            prompts: token ids of each prompt, at least one token per prompt.
            numbers: index of each sequence. Sampling keys depend on the seed,
                this index and the token position.
            size: sizes of the batch, at least as large as the prompts require.
            refill: called after each step; returns prompts that replace finished sequences. The
                next step yields the first token after each of these prompts. If `refill` is set,
                the generator never ends.
            images: images of each prompt if `size.num_images` is above 0.
        """
        with jax.set_mesh(self.mesh):
            padded_numbers = np.zeros(size.batch_size, np.int32)
            padded_numbers[: len(numbers)] = numbers
            named = self._place(padded_numbers)
            empty = self._init_program(size)
            kept, drawn = self._prefill(params, empty, named, prompts, size, images)
        try:
            left = size.max_new_tokens
            while left:
                before, left = drawn, left - (refill is None)
                if left:  # compute the next token while the host reads this one
                    with jax.set_mesh(self.mesh):
                        kept, drawn = self._decode_program(params, kept, named, drawn)
                yield np.asarray(before.tokens), np.asarray(before.logprobs)
                for new in refill() if refill is not None else ():
                    with jax.set_mesh(self.mesh):
                        kept, drawn, named = self._refill_row(params, kept, drawn, named, new, size)
        finally:
            jax.block_until_ready(drawn)  # Python may exit after this, so devices must be idle

    def _prefill(
        self,
        params: Tree,
        kept: DecodeState,
        named: Int[Array, " B"],
        prompts: Sequence[Sequence[int]],
        size: DecodeShape,
        images: Sequence[PromptImages | None] = (),
    ) -> tuple[DecodeState, SampledTokens]:
        """Return the state after the prompts, and the first sampled token of each sequence."""
        rows, drawn = left_pad(prompts, size.batch_size, size.prompt_length), None
        arrays = pad_images(images, size, rows) if size.num_images else {}
        pixels = {name: self._place(array) for name, array in arrays.items()}
        for start in range(0, size.prompt_length, size.prefill_chunk):
            piece = TokenBatch(
                *(self._place(array[:, start : start + size.prefill_chunk]) for array in rows)
            )
            kept, drawn = self._prefill_program(params, kept, named, piece, pixels)
        assert drawn is not None
        return kept, drawn

    def _refill_row(
        self,
        params: Tree,
        kept: DecodeState,
        drawn: SampledTokens,
        named: Int[Array, " B"],
        new: RefillPrompt,
        size: DecodeShape,
    ) -> tuple[DecodeState, SampledTokens, Int[Array, " B"]]:
        """Replace a finished sequence with another prompt.

        The prompt is prefilled into separate caches, aligned to end at the same slot.
        """
        width, rows = padded_length(len(new.prompt)), self.batch_multiple
        beside = self._refill_init_program(size._replace(batch_size=rows), kept, np.int32(width))
        number = self._place(np.full(rows, new.number, np.int32))
        prompts = [new.prompt] * rows
        prefilled = self._prefill(params, beside, number, prompts, DecodeShape(rows, width, 0))
        return self._insert_program(
            kept, drawn, named, *prefilled, np.int32(new.row), np.int32(new.number)
        )

    def _place(self, rows: np.ndarray) -> Array:
        return place_replicated(rows, NamedSharding(self.mesh, BATCH_SPEC))

    # Compiled programs.

    @cached_property
    def _decode_program(self) -> Any:
        """Compiled program: (params, state, sequence indices, tokens) -> (state, next tokens)."""
        return jax.jit(self._decode_token, donate_argnums=1, out_shardings=self._shardings)

    @cached_property
    def _prefill_program(self) -> Any:
        """Compiled program: (params, state, sequence indices, chunk) -> (state, next tokens)."""
        return jax.jit(self._extend_and_sample, donate_argnums=1, out_shardings=self._shardings)

    @cached_property
    def _init_program(self) -> Any:
        """Compiled program that returns the empty state of a batch, given its `DecodeShape`."""
        return jax.jit(self._init_state, static_argnums=0, out_shardings=self._shardings[0])

    def _init_state(self, size: DecodeShape) -> DecodeState:
        caches = self.decoder.empty_caches(
            size.batch_size, size.prompt_length + size.max_new_tokens, size.prefill_chunk
        )
        shape = (size.batch_size, self.decoder.config.vocab_size)
        return DecodeState(
            caches,
            jnp.zeros(shape, bool) if self._has_repetition_penalty else None,
            jnp.zeros(shape[:1], jnp.int32) if self._has_rotary_offsets else None,
        )

    @cached_property
    def _refill_init_program(self) -> Any:
        """Compiled program: (size, state, tokens) -> an empty state, whose caches will end at the
        same slot as the caches of `state` after `tokens` tokens are added.
        """

        def build(size: DecodeShape, kept: DecodeState, tokens: Int[Array, ""]) -> DecodeState:
            empty = self._init_state(size)

            def begun(leaf: Array, other: Array) -> Array:
                return leaf if other.ndim else other - tokens

            return empty._replace(caches=jax.tree.map(begun, empty.caches, kept.caches))

        return jax.jit(build, static_argnums=0, out_shardings=self._shardings[0])

    @cached_property
    def _insert_program(self) -> Any:
        """Return a function that replaces sequence `row` with the first sequence of another state.

        It maps (state, tokens, indices, other state, other tokens, row, index) to (state, tokens,
        indices).
        """

        def join(
            kept: DecodeState,
            drawn: SampledTokens,
            named: Array,
            new: DecodeState,
            first: SampledTokens,
            row: Array,
            at: Array,
        ) -> tuple[DecodeState, SampledTokens, Array]:
            def taken(old: Array, new: Array) -> Array:
                return old.at[row].set(new[0]) if old.ndim else old

            kept, drawn = jax.tree.map(taken, (kept, drawn), (new, first))
            return kept, drawn, named.at[row].set(at)

        rows = NamedSharding(self.mesh, BATCH_SPEC)
        return jax.jit(join, donate_argnums=0, out_shardings=(*self._shardings, rows))

    @cached_property
    def _shardings(self) -> Any:

        def sharding(axes: tuple[str | None, ...]) -> NamedSharding:
            return NamedSharding(self.mesh, self.decoder.rules.spec(axes, "the cache"))

        axes = [self.decoder.cache_axes(kind) for kind in self.decoder.model.layers]
        caches = jax.tree.map(sharding, axes, is_leaf=is_axes)
        rows: Any = NamedSharding(self.mesh, BATCH_SPEC)
        whole: Any = NamedSharding(
            self.mesh, PartitionSpec()
        )  # every process reads the sampled tokens of all sequences
        seen = rows if self._has_repetition_penalty else None
        state = DecodeState(caches, seen, rows if self._has_rotary_offsets else None)
        return state, SampledTokens(whole, whole, rows)

    @property
    def _has_repetition_penalty(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    @property
    def _has_rotary_offsets(self) -> bool:
        tower = self.decoder.model.ends.vision
        return tower is not None and tower.has_rotary_positions

    def lower_step(self, params: Tree, size: DecodeShape) -> jax.stages.Lowered:
        """Lower the one-token program from abstract parameters, for devices that may be absent."""
        kept, drawn = self._shardings
        rows = NamedSharding(self.mesh, BATCH_SPEC)
        indices = jax.ShapeDtypeStruct((size.batch_size,), jnp.int32, sharding=rows)
        types = SampledTokens._make((indices, indices.update(dtype=jnp.float32), indices))
        drawn = with_shardings(types, drawn)
        with jax.set_mesh(self.mesh):
            abstract = with_shardings(self._init_program.eval_shape(size), kept)
            return self._decode_program.lower(params, abstract, indices, drawn)

    def _decode_token(
        self, params: Tree, kept: DecodeState, numbers: Int[Array, " B"], drawn: SampledTokens
    ) -> tuple[DecodeState, SampledTokens]:
        tokens, positions = drawn.tokens[:, None], drawn.positions[:, None]
        piece: Any = TokenBatch._make((tokens, jnp.full_like(tokens, TEXT), positions))
        if (offsets := kept.rotary_offsets) is None:
            return self._extend_and_sample(params, kept, numbers, piece)
        rotary = jnp.repeat((positions + offsets[:, None])[..., None], 3, axis=-1)
        return self._extend_and_sample(params, kept, numbers, piece, {ROTARY_POSITIONS: rotary})

    def _extend_and_sample(
        self,
        params: Tree,
        kept: DecodeState,
        numbers: Int[Array, " B"],
        piece: Any,
        images: Mapping[str, Array] = MappingProxyType({}),
    ) -> tuple[DecodeState, SampledTokens]:
        batch = {**piece._asdict(), **images}
        logits, caches = self.decoder.extend(params, batch, kept.caches, last=1)
        # Replicate the vocabulary dim, so that sampling does not depend on its sharding.
        logits = jax.lax.with_sharding_constraint(logits[:, -1], PartitionSpec(BATCH_AXES, None))
        seen = kept.seen_tokens
        if seen is not None:
            each = jnp.arange(seen.shape[0])[:, None]
            seen = seen.at[each, piece.tokens].max(piece.segment_ids == TEXT)
        positions = piece.positions[:, -1] + 1
        keys = row_keys(self.seed, numbers, positions)
        choice = sample(logits, seen, keys, self.sampling)
        offsets = kept.rotary_offsets
        if offsets is not None and ROTARY_POSITIONS in images:
            offsets = images[ROTARY_POSITIONS][:, -1, 0] - piece.positions[:, -1]
        return DecodeState(caches, seen, offsets), SampledTokens(
            choice.tokens, choice.logprobs, positions
        )


def is_axes(node: object) -> bool:
    """Return whether a tree node contains the logical axes of one array."""
    return type(node) is tuple and all(axis is None or type(axis) is str for axis in node)
