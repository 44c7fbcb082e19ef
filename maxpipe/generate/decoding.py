"""Rows of tokens that go on: prompts in pieces of one size, then one token of each row at a time.

Prompts are padded on the left, so that all rows end in one place of the cache and each is extended
there. Padding is a segment of its own, which no token sees. One function computes pieces and single
tokens alike; it is compiled once for each of the two sizes.

The choice of a token from its logits: pure functions, each row by its own key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Key

from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The steps follow each other in the order of these fields."""

    repetition_penalty: float = 1.0
    """Logits of tokens that the row already has are divided by it if they are positive, and
    multiplied if not (arXiv:1909.05858). 1: as they are."""
    temperature: float = 1.0
    """Logits are divided by it. 0: the most likely token, the first of equals."""
    top_k: int = 0
    """Only this many of the most likely tokens, and those as likely as the last. 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that are together as likely as this (arXiv:1904.09751), and those
    as likely as the last. 1: all."""
    min_p: float = 0.0
    """Only tokens at least this times as likely as the most likely one (arXiv:2407.01082)."""


class SampleOutput(NamedTuple):
    """A token of each row."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    """Log-probability in nats that the model gives the token: before penalty, temperature and the
    rest. Not a number where the row's logits are not."""


def sample(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    keys: Key[Array, " B"],
    sampling: Sampling,
) -> SampleOutput:
    """A token of each row, which depends on the row's logits, seen tokens and key alone."""
    logits = logits.astype(jnp.float32)
    scores = logits
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a penalty needs the tokens that it is for"
        scores = apply_repetition_penalty(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        tokens = most_likely(scores)
    else:
        scores = filter_logits(apply_temperature(scores, sampling.temperature), sampling)
        tokens = jax.vmap(jax.random.categorical)(keys, scores)
    taken = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return SampleOutput(tokens.astype(jnp.int32), taken - jax.nn.logsumexp(logits, axis=-1))


def most_likely(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The first of the highest scores; the last token where scores are not numbers.

    Two reductions of one number each: on CPU `argmax`, which reduces pairs, takes five times as
    long.
    """
    last = scores.shape[-1] - 1
    is_best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(last + 1), last).min(axis=-1)


def apply_temperature(scores: Float[Array, "B V"], temperature: float) -> Float[Array, "B V"]:
    """Scores divided by the temperature, counted from the highest, which is 0.

    So a tiny temperature, which may be 0 in float32, leaves the highest, and none overflows.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    return jnp.where(below == 0, 0.0, below / temperature)


def apply_repetition_penalty(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """Logits with those of seen tokens made less likely by a penalty above 1."""
    less = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, less, logits)


def filter_logits(scores: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Scores with `-inf` for tokens that top-k, top-p or min-p exclude; each looks at what the
    one before has left. The most likely token always stays.
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
            # The first is kept even if `top_p` is smaller than what rounding leaves of it.
            least = jnp.maximum(least, jnp.minimum(kept.min(axis=-1), ordered[:, 0]))
    if sampling.min_p > 0.0:
        best = scores.max(axis=-1)
        least = jnp.maximum(least, best + jnp.log(sampling.min_p))
    return jnp.where(scores < least[:, None], -jnp.inf, scores)


def row_keys(seed: int, rows: Int[Array, " B"], positions: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of each row for the token at its position: no batch or mesh changes it."""
    base = jax.random.key(seed)

    def key(row: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, row), position)

    return jax.vmap(key)(rows, positions)


Tree = Any

_MAX_PREFILL_CHUNK = 512
"""Tokens of a prompt that are computed at once: scores are this times the cache's room."""
_MIN_PREFILL_CHUNK = 16
_PADDING, TEXT = 0, 1
"""Segments."""


class DecodeState(NamedTuple):
    """What the next token needs of all before it."""

    caches: Tree
    seen_tokens: Bool[Array, "B V"] | None
    """Tokens of each row, where a repetition penalty asks for them."""


class SampledTokens(NamedTuple):
    """The newest token of each row; with stages, of the rows of each microbatch."""

    tokens: Int[Array, "*rows"]
    logprobs: Float[Array, "*rows"]
    positions: Int[Array, "*rows"]


class TokenBatch(NamedTuple):
    """Prompts side by side, int32 `[B, T]`."""

    tokens: Any
    segment_ids: Any
    positions: Any


class DecodeShape(NamedTuple):
    """Sizes that a batch is compiled for."""

    batch_size: int
    prompt_length: int
    """Tokens of the longest prompt, with padding."""
    max_new_tokens: int
    """Tokens that may follow."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of prompts that are computed at once."""
        return min(self.prompt_length, _MAX_PREFILL_CHUNK)


class RefillPrompt(NamedTuple):
    """A prompt that takes the place of a row that is over."""

    row: int
    prompt: Sequence[int]
    number: int


Refill = Callable[[], Sequence[RefillPrompt]]


def padded_length(longest: int) -> int:
    """The size of prompts for a longest one: a power of two, or a multiple of the largest piece."""
    if longest > _MAX_PREFILL_CHUNK:
        return -(-longest // _MAX_PREFILL_CHUNK) * _MAX_PREFILL_CHUNK
    return max(_MIN_PREFILL_CHUNK, 1 << (longest - 1).bit_length())


def left_pad(prompts: Sequence[Sequence[int]], rows: int, width: int) -> TokenBatch:
    """The prompts at the right end of their rows; rows without a prompt are padding."""
    found = TokenBatch(*(np.zeros((rows, width), np.int32) for _ in TokenBatch._fields))
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        found.tokens[row, start:] = prompt
        found.segment_ids[row, start:] = TEXT
        found.positions[row, start:] = np.arange(len(prompt))
    return found


def place_replicated(array: np.ndarray, sharding: NamedSharding) -> Array:
    """The array, which every process has, on the devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    """Shapes with the shardings that arrays of them have."""
    return jax.tree.map(lambda leaf, at: leaf.update(sharding=at), shapes, shardings)


@dataclass(frozen=True)
class DecodeEngine:
    """A model's rows on a mesh without stages: rows over the batch axes, heads over tensor."""

    decoder: Decoder
    mesh: Mesh
    sampling: Sampling
    seed: int

    supports_refill = True
    """Whether rows that are over can be replaced."""

    @property
    def batch_multiple(self) -> int:
        """What the number of rows is a multiple of."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    def run(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Tokens and log-probabilities `[B]` that follow, one of each row at a time.

        Args:
            params: in network order, as `Decoder.by_layer` has them.
            prompts: ids of each row, at least one.
            numbers: of the rows: with the seed and a token's position they are its randomness.
            size: of the batch, which has at least as many rows and tokens.
            refill: asked after each token for rows whose place another prompt takes; the next
                token of such a row is the first one behind its prompt. With it there is no end.
        """
        with jax.set_mesh(self.mesh):
            given = np.zeros(size.batch_size, np.int32)
            given[: len(numbers)] = numbers
            named = self._place(given)
            kept, drawn = self._prefill(params, self._init_program(size), named, prompts, size)
        try:
            left = size.max_new_tokens
            while left:
                before, left = drawn, left - (refill is None)
                if left:  # the next token is under way while this one is read
                    with jax.set_mesh(self.mesh):
                        kept, drawn = self._decode_program(params, kept, named, drawn)
                yield np.asarray(before.tokens), np.asarray(before.logprobs)
                for new in refill() if refill is not None else ():
                    with jax.set_mesh(self.mesh):
                        kept, drawn, named = self._refill_row(params, kept, drawn, named, new, size)
        finally:
            jax.block_until_ready(drawn)  # Python may end next

    def _prefill(
        self,
        params: Tree,
        kept: DecodeState,
        named: Int[Array, " B"],
        prompts: Sequence[Sequence[int]],
        size: DecodeShape,
    ) -> tuple[DecodeState, SampledTokens]:
        """What is kept with the prompts, and the tokens behind them."""
        rows, drawn = left_pad(prompts, size.batch_size, size.prompt_length), None
        for start in range(0, size.prompt_length, size.prefill_chunk):
            piece = TokenBatch(
                *(self._place(each[:, start : start + size.prefill_chunk]) for each in rows)
            )
            kept, drawn = self._prefill_program(params, kept, named, piece)
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
        """With another prompt in a row.

        It is computed in caches of its own, which end at the same place.
        """
        width, rows = padded_length(len(new.prompt)), self.batch_multiple
        beside = self._refill_init_program(size._replace(batch_size=rows), kept, np.int32(width))
        number = self._place(np.full(rows, new.number, np.int32))
        prompts = [new.prompt] * rows
        found = self._prefill(params, beside, number, prompts, DecodeShape(rows, width, 0))
        return self._insert_program(
            kept, drawn, named, *found, np.int32(new.row), np.int32(new.number)
        )

    def _place(self, rows: np.ndarray) -> Array:
        return place_replicated(rows, NamedSharding(self.mesh, BATCH_SPEC))

    # The programs.

    @cached_property
    def _decode_program(self) -> Any:
        """(parameters, kept, row numbers, drawn) -> (kept, drawn), by one token."""
        return jax.jit(self._decode_token, donate_argnums=1, out_shardings=self._shardings)

    @cached_property
    def _prefill_program(self) -> Any:
        """(parameters, kept, row numbers, piece) -> (kept, drawn behind the piece)."""
        return jax.jit(self._extend_and_sample, donate_argnums=1, out_shardings=self._shardings)

    @cached_property
    def _init_program(self) -> Any:
        """(size) -> room for the batch, on the mesh."""
        return jax.jit(self._init_state, static_argnums=0, out_shardings=self._shardings[0])

    def _init_state(self, size: DecodeShape) -> DecodeState:
        caches = self.decoder.empty_caches(
            size.batch_size, size.prompt_length + size.max_new_tokens, size.prefill_chunk
        )
        shape = (size.batch_size, self.decoder.config.vocab_size)
        return DecodeState(caches, jnp.zeros(shape, bool) if self._has_repetition_penalty else None)

    @cached_property
    def _refill_init_program(self) -> Any:
        """(size, kept, tokens) -> room for rows that end where `kept` does, after these."""

        def build(size: DecodeShape, kept: DecodeState, tokens: Int[Array, ""]) -> DecodeState:
            mine = self._init_state(size)

            def begun(leaf: Array, other: Array) -> Array:
                return leaf if other.ndim else other - tokens

            return mine._replace(caches=jax.tree.map(begun, mine.caches, kept.caches))

        return jax.jit(build, static_argnums=0, out_shardings=self._shardings[0])

    @cached_property
    def _insert_program(self) -> Any:
        """(kept, drawn, row numbers, another's kept and drawn, row, its number) -> the first
        three, with the other's first row there.
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
        """Of what is kept, and of what is drawn."""

        def sharding(axes: tuple[str | None, ...]) -> NamedSharding:
            return NamedSharding(self.mesh, self.decoder.rules.spec(axes, "the cache"))

        axes = [self.decoder.cache_axes(kind) for kind in self.decoder.model.layers]
        caches = jax.tree.map(sharding, axes, is_leaf=is_axes)
        rows: Any = NamedSharding(self.mesh, BATCH_SPEC)
        whole: Any = NamedSharding(self.mesh, PartitionSpec())  # each process reads all of it
        return DecodeState(caches, rows if self._has_repetition_penalty else None), SampledTokens(
            whole, whole, rows
        )

    @property
    def _has_repetition_penalty(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    def lower_step(self, params: Tree, size: DecodeShape) -> jax.stages.Lowered:
        """The program of a token for devices that need not be there; parameters are abstract."""
        kept, drawn = self._shardings
        rows = NamedSharding(self.mesh, BATCH_SPEC)
        given = jax.ShapeDtypeStruct((size.batch_size,), jnp.int32, sharding=rows)
        types = SampledTokens._make((given, given.update(dtype=jnp.float32), given))
        drawn = with_shardings(types, drawn)
        with jax.set_mesh(self.mesh):
            abstract = with_shardings(self._init_program.eval_shape(size), kept)
            return self._decode_program.lower(params, abstract, given, drawn)

    def _decode_token(
        self, params: Tree, kept: DecodeState, numbers: Int[Array, " B"], drawn: SampledTokens
    ) -> tuple[DecodeState, SampledTokens]:
        tokens, positions = drawn.tokens[:, None], drawn.positions[:, None]
        piece: Any = TokenBatch._make((tokens, jnp.full_like(tokens, TEXT), positions))
        return self._extend_and_sample(params, kept, numbers, piece)

    def _extend_and_sample(
        self, params: Tree, kept: DecodeState, numbers: Int[Array, " B"], piece: Any
    ) -> tuple[DecodeState, SampledTokens]:
        logits, caches = self.decoder.extend(params, piece._asdict(), kept.caches, last=1)
        # Whole rows of the vocabulary: what is drawn does not depend on how it is split.
        logits = jax.lax.with_sharding_constraint(logits[:, -1], PartitionSpec(BATCH_AXES, None))
        seen = kept.seen_tokens
        if seen is not None:
            each = jnp.arange(seen.shape[0])[:, None]
            seen = seen.at[each, piece.tokens].max(piece.segment_ids == TEXT)
        positions = piece.positions[:, -1] + 1
        keys = row_keys(self.seed, numbers, positions)
        choice = sample(logits, seen, keys, self.sampling)
        return DecodeState(caches, seen), SampledTokens(choice.tokens, choice.logprobs, positions)


def is_axes(node: object) -> bool:
    """Whether it is the logical axes of one array."""
    return type(node) is tuple
