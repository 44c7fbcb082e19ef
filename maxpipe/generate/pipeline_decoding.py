"""Rows that go on while the layers are divided over stages: a ring that keeps turning.

Rows are cut into as many microbatches as there are stages. In each tick every stage runs its layers
for another microbatch and passes the result on; what leaves the last stage becomes a token, which
enters the first stage in the next tick. No stage waits for another but while the ring fills, once
for each piece of the prompts and once for all tokens. Each stage keeps what its own layers have
seen; the vocabulary is divided over the stages, as in training.

Parameters of training as those of decoding, on the same mesh, with its stages.

The order of layers on the ring of training serves its schedule; to decode, each stage has one run
of layers. On a mesh without stages layers are by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.generate.decoding import (
    TEXT,
    DecodeEngine,
    DecodeShape,
    Refill,
    SampledTokens,
    Sampling,
    TokenBatch,
    is_axes,
    left_pad,
    place_replicated,
    row_keys,
    sample,
    with_shardings,
)
from maxpipe.models.count import layer_costs
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.collectives import (
    all_gather,
    axis_index,
    broadcast_from,
    manual_axes_of,
    mark_varying,
    ring_shift,
)
from maxpipe.parallel.mesh import STAGE, TOKEN_AXES
from maxpipe.parallel.sharding import auto_mesh, restrict_spec
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.prologue import Embedding
from maxpipe.pipeline.weights import WeightSharding, gather_weight
from maxpipe.schedule.table import Ring, balance_layers
from maxpipe.step.state import ParamLayout

Tree = Any

_SEQUENCE_SPEC = PartitionSpec(None, TOKEN_AXES)
"""Of what is given for each row, `[M, B, ...]`. A token is too little to be divided over context:
there, too, each device has rows of its own."""


class RingState(NamedTuple):
    """What the ring has between two ticks. Stages have parts of their own, or copies, along P."""

    caches: Tree
    """By kind, `[P, L, M, ...]`."""
    stage_inputs: Float[Array, "P B 1 D"]
    """What each stage computes with next."""
    newest_tokens: SampledTokens
    """`[P, M, B]`: tokens on their way around the ring."""
    seen_tokens: Bool[Array, "P M B V"] | None
    """Tokens of each row, where a repetition penalty asks for them."""


@dataclass(frozen=True)
class PipelineDecodeEngine:
    """A model's rows on a mesh with stages; rows over all axes but tensor, which has heads."""

    decoder: Decoder
    layout: LayerLayout
    """One chunk for each stage, none outside the ring."""
    specs: Tree
    """PartitionSpec of each parameter, stacked `[1, P, L, ...]`."""
    mesh: Mesh
    sampling: Sampling
    seed: int

    supports_refill = False
    """Whether rows that are over can be replaced: the ring is filled once for a batch."""

    @property
    def batch_multiple(self) -> int:
        """What the number of rows is a multiple of."""
        return self._stages * math.prod(self.mesh.shape[axis] for axis in TOKEN_AXES)

    @property
    def _stages(self) -> int:
        return self.mesh.shape[STAGE]

    def run(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """As `Decoding.run`; `params` are stacked by the layout."""
        assert refill is None
        given = np.zeros(size.batch_size, np.int32)
        given[: len(numbers)] = numbers
        rows, found = left_pad(prompts, size.batch_size, size.prompt_length), []
        with jax.set_mesh(self.mesh):
            named, turning = self._place(given), self._init_program(size)
            for start in range(0, size.prompt_length, size.prefill_chunk):
                piece = TokenBatch(
                    *(self._place(each[:, start : start + size.prefill_chunk]) for each in rows)
                )
                turning, newest = self._prefill_program(params, turning, named, piece)
                found = [newest]
        try:
            # Behind turn n the first microbatch has token n, and the others have the one before.
            for number in range(size.max_new_tokens):
                while len(found) < min(
                    number + 3, size.max_new_tokens + 1
                ):  # one is under way meanwhile
                    with jax.set_mesh(self.mesh):
                        is_full = np.array(len(found) > 1)
                        turning, newest = self._decode_program(params, turning, named, is_full)
                    found.append(newest)
                yield _join_microbatches(found[number], found[number + 1] if number else found[0])
        finally:
            jax.block_until_ready(turning)  # Python may end next

    def _place(self, rows: np.ndarray) -> Array:
        """`[rows, ...]` on the mesh as `[M, B, ...]`."""
        cut = rows.reshape(self._stages, -1, *rows.shape[1:])
        return place_replicated(cut, NamedSharding(self.mesh, _SEQUENCE_SPEC))

    # The programs.

    @cached_property
    def _prefill_program(self) -> Any:
        """(parameters, turning, row numbers, piece) -> (turning, newest behind the piece)."""
        return self._compiled(self._prefill, _SEQUENCE_SPEC)

    @cached_property
    def _decode_program(self) -> Any:
        """(parameters, turning, row numbers, whether all stages have work) -> (turning, newest).

        As many ticks as there are stages: the next token of each row.
        """
        return self._compiled(self._decode_turn, PartitionSpec())

    def _compiled(self, program: Callable[..., RingState], last: PartitionSpec) -> Any:
        def mine(params: Tree, turning: RingState, *given: Any) -> RingState:
            layers = jax.tree.map(lambda leaf: leaf[0, 0], params["layers"])
            turning = jax.tree.map(lambda leaf: leaf[0], turning)
            found = program(*mark_varying((params | {"layers": layers}, turning, *given)))
            return jax.tree.map(
                lambda leaf, spec: _from_first_device(leaf, spec)[None], found, self._specs
            )

        axes, turning = manual_axes_of(self.mesh), self._specs
        given = (self.specs, turning, _SEQUENCE_SPEC, last)
        run = jax.shard_map(
            mine,
            axis_names=set(axes),
            in_specs=_map_specs(lambda spec: restrict_spec(spec, axes), given),
            out_specs=_map_specs(lambda spec: restrict_spec(spec, axes), turning),
        )

        def both(*given: Any) -> tuple[RingState, SampledTokens]:
            found = run(*given)
            return found, SampledTokens(*(leaf[0] for leaf in found.newest_tokens))

        shardings = self._on_mesh((turning, PartitionSpec()))
        return jax.jit(both, donate_argnums=1, out_shardings=shardings)

    @cached_property
    def _init_program(self) -> Any:
        """(size) -> a ring that holds nothing yet."""

        def build(size: DecodeShape) -> RingState:
            stages, rows = self._stages, size.batch_size // self._stages
            config = self.decoder.config

            def stacked(kind: str) -> Tree:
                stack = (stages, self.layout.stacks[kind].max_layers_per_chunk, stages)
                cache = self.decoder.empty_cache(
                    kind, rows, size.prompt_length + size.max_new_tokens
                )
                return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, stack + leaf.shape), cache)

            none = jnp.zeros((stages, stages, rows), jnp.int32)
            return RingState(
                {kind: stacked(kind) for kind in self.layout.ring_layer_types},
                jnp.zeros((stages, rows, 1, config.d_model), jnp.dtype(config.compute_dtype)),
                SampledTokens(none, none.astype(jnp.float32), none),
                jnp.zeros((*none.shape, config.vocab_size), bool)
                if self._has_repetition_penalty
                else None,
            )

        return jax.jit(build, static_argnums=0, out_shardings=self._on_mesh(self._specs))

    @cached_property
    def _specs(self) -> RingState:
        """PartitionSpec of each array of the ring."""
        rules = self.decoder.rules
        table = dict(rules.table) | {"batch": TOKEN_AXES}
        rules = replace(rules, table=tuple(table.items()))

        def cached(axes: tuple[str | None, ...]) -> PartitionSpec:
            return rules.spec(("stage", None, None, *axes), "the cache")

        caches = {
            kind: jax.tree.map(cached, self.decoder.cache_axes(kind), is_leaf=is_axes)
            for kind in self.layout.ring_layer_types
        }
        rows: Any = PartitionSpec(STAGE, *_SEQUENCE_SPEC)
        arriving: Any = PartitionSpec(STAGE, TOKEN_AXES)
        seen = rows if self._has_repetition_penalty else None
        return RingState(caches, arriving, SampledTokens(rows, rows, rows), seen)

    def _on_mesh(self, specs: Tree) -> Tree:
        return _map_specs(lambda spec: NamedSharding(self.mesh, spec), specs)

    @cached_property
    def _weight_shardings(self) -> Tree:
        """How each parameter is divided among the devices of a stage."""
        return _map_specs(WeightSharding.from_spec, self.specs)

    @property
    def _has_repetition_penalty(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    def lower_step(self, params: Tree, size: DecodeShape) -> jax.stages.Lowered:
        """The program of a turn for devices that need not be there; parameters are abstract."""
        rows = (self._stages, size.batch_size // self._stages)
        (at,) = jax.tree.leaves(self._on_mesh((_SEQUENCE_SPEC,)))
        named = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=at)
        with jax.set_mesh(self.mesh):
            turning = with_shardings(
                self._init_program.eval_shape(size), self._on_mesh(self._specs)
            )
            return self._decode_program.lower(params, turning, named, np.array(True))

    # On each stage, where dims P are gone.

    def _prefill(self, params: Tree, turning: RingState, numbers: Array, piece: Any) -> RingState:
        """All microbatches move through: the ring fills, and empties again."""
        stages, stage = self._stages, axis_index(STAGE)

        def tick(now: Array, carried: tuple[RingState, Array]) -> tuple[RingState, Array]:
            turning, x = carried
            mine, leaving = now - stage, now - (stages - 1)
            works = (mine >= 0) & (mine < stages)
            mine = jnp.clip(mine, 0, stages - 1)
            inputs = {name: each[mine] for name, each in piece._asdict().items()}
            y, caches = self._layers(params, turning.caches, x, mine, works, inputs)
            done = jnp.maximum(leaving, 0)
            behind = TokenBatch(*(each[done] for each in piece))
            turning = turning._replace(caches=caches)
            turning = self._sample_tokens(params, turning, y, numbers, done, leaving >= 0, behind)
            entering = piece.tokens[jnp.minimum(now + 1, stages - 1)]
            return turning, self._next_stage_inputs(params, y, entering)

        x = self._embed(params, piece.tokens[0])
        turning, _ = lax.fori_loop(0, 2 * stages - 1, tick, (turning, mark_varying(x)))
        first = self._embed(params, turning.newest_tokens.tokens[0][:, None])
        return turning._replace(stage_inputs=first)

    def _decode_turn(
        self, params: Tree, turning: RingState, numbers: Array, is_full: Array
    ) -> RingState:
        """Each microbatch passes each stage once; where it is depends on the stage."""
        stages, stage = self._stages, axis_index(STAGE)

        def tick(now: Array, turning: RingState) -> RingState:
            mine, leaving = (now - stage) % stages, (now + 1) % stages
            on_way = self._in_flight_tokens(turning.newest_tokens)
            inputs = {name: each[mine] for name, each in on_way._asdict().items()}
            works = is_full | (now >= stage)
            y, caches = self._layers(
                params, turning.caches, turning.stage_inputs, mine, works, inputs
            )
            behind, done = (
                TokenBatch(*(each[leaving] for each in on_way)),
                is_full | (now == stages - 1),
            )
            turning = turning._replace(caches=caches)
            turning = self._sample_tokens(params, turning, y, numbers, leaving, done, behind)
            entering = turning.newest_tokens.tokens[leaving][:, None]
            return turning._replace(stage_inputs=self._next_stage_inputs(params, y, entering))

        return lax.fori_loop(0, stages, tick, turning)

    def _in_flight_tokens(self, newest: SampledTokens) -> Any:
        """The tokens that are on their way, as a piece of one token."""
        tokens, positions = newest.tokens[..., None], newest.positions[..., None]
        return TokenBatch(tokens, jnp.full_like(tokens, TEXT), positions)

    def _layers(
        self, params: Tree, caches: Tree, x: Array, at: Array, works: Array, inputs: Tree
    ) -> tuple[Array, Tree]:
        """This stage's layers for microbatch `at`; caches stay as they are unless it works."""
        layout, stage = self.layout, axis_index(STAGE)
        # Where no stage has another kind, or fewer layers, there is nothing to branch on.
        alike = len(layout.ring_layer_types) == 1 and bool((layout.layer_at >= 0).all())
        layer_at, kind_at, place_at = (
            jnp.asarray(table[0])[stage]
            for table in (layout.layer_at, layout.layer_type_at, layout.index_in_type_at)
        )

        def of_kind(number: int, kind: str, position: Array, x: Array, stack: Tree) -> Any:
            is_mine = kind_at[position] == number
            place = jnp.where(is_mine, place_at[position], 0)
            stacked, divided = params["layers"][kind], self._weight_shardings["layers"][kind]
            one = jax.tree.map(
                lambda leaf, by: gather_weight(leaf[place], by.unstacked(3), leaf.dtype),
                stacked,
                divided,
            )
            old = jax.tree.map(lambda leaf: leaf[place, at], stack)

            def run(x: Array, old: Tree) -> tuple[Array, Tree]:
                x, new = self.decoder.decode_layer(kind, one, x, inputs, layer_at[position], old)
                kept = jax.tree.map(lambda new, old: jnp.where(works, new, old), new, old)
                return mark_varying((x, kept))

            x, new = run(x, old) if alike else lax.cond(is_mine, run, lambda *same: same, x, old)
            return x, jax.tree.map(lambda leaf, new: leaf.at[place, at].set(new), stack, new)

        def layer(position: Array, carried: tuple[Array, Tree]) -> tuple[Array, Tree]:
            x, caches = carried
            for number, kind in enumerate(layout.ring_layer_types):
                x, new = of_kind(number, kind, position, x, caches[kind])
                caches = caches | {kind: new}
            return x, caches

        return lax.fori_loop(0, layout.max_layers_per_chunk, layer, (x, caches))

    def _sample_tokens(
        self,
        params: Tree,
        turning: RingState,
        y: Array,
        numbers: Array,
        at: Array,
        is_done: Array,
        behind: Any,
    ) -> RingState:
        """The newest tokens with those of microbatch `at`, if it `is_done` with the last stage."""
        last = mark_varying(broadcast_from(y[:, -1:], STAGE, self._stages - 1))
        ends = {
            name: jax.tree.map(
                lambda leaf, by: gather_weight(leaf, by, leaf.dtype),
                params[name],
                self._weight_shardings[name],
            )
            for name in ("final_norm", "head" if "head" in params else "embedding")
        }
        logits = all_gather(self.decoder.logits(ends, last), STAGE, 2)
        logits = logits[:, 0, : self.decoder.config.vocab_size]
        seen, positions = turning.seen_tokens, behind.positions[:, -1] + 1
        if seen is not None:
            each = jnp.arange(seen.shape[1])[:, None]
            more = seen[at].at[each, behind.tokens].max((behind.segment_ids == TEXT) & is_done)
            seen = seen.at[at].set(more)
        keys = row_keys(self.seed, numbers[at], positions)
        choice = sample(logits, None if seen is None else seen[at], keys, self.sampling)
        newest = SampledTokens(
            *(
                old.at[at].set(jnp.where(is_done, new, old[at]))
                for old, new in zip(turning.newest_tokens, (*choice, positions), strict=True)
            )
        )
        return turning._replace(newest_tokens=newest, seen_tokens=seen)

    def _next_stage_inputs(self, params: Tree, y: Array, entering: Int[Array, "B T"]) -> Array:
        """What each stage computes with next: its neighbour's output, or tokens that enter."""
        new = self._embed(params, entering)
        return jnp.where(axis_index(STAGE) == 0, new, ring_shift(y, STAGE, 1, self._stages))

    def _embed(self, params: Tree, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the table, of which each stage has a part."""
        scale, dtype = self.decoder.model.ends.embed_scale, self.decoder.config.compute_dtype
        table = Embedding(self._weight_shardings["embedding"], scale)
        held = table.prepare(params["embedding"], jnp.dtype(dtype))
        return mark_varying(table.lookup(held, tokens))


def _join_microbatches(
    first: SampledTokens, others: SampledTokens
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities `[rows]`: of the first microbatch, and of the others."""

    def joined(first: Array, others: Array) -> np.ndarray:
        return np.concatenate([np.asarray(first)[:1], np.asarray(others)[1:]]).reshape(-1)

    return joined(first.tokens, others.tokens), joined(first.logprobs, others.logprobs)


def _from_first_device(leaf: Array, spec: PartitionSpec) -> Array:
    """The array, which counts the same for all rows unless it is split over them."""
    if TOKEN_AXES in spec:
        return leaf
    for axis in TOKEN_AXES:
        leaf = broadcast_from(leaf, axis, 0)
    return leaf


def _map_specs(change: Callable[[PartitionSpec], Any], specs: Tree) -> Tree:
    return jax.tree.map(change, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))


AnyDecodeEngine = DecodeEngine | PipelineDecodeEngine


def decode_param_layout(partition: ParamLayout) -> ParamLayout:
    """The same model on the same devices, with one chunk for each stage.

    Caches grow and tokens are picked by index: the compiler chooses shardings.
    """
    decoder, stages = partition.decoder, partition.mesh.shape[STAGE]
    cut = balance_layers(layer_costs(decoder.model, 1), stages)
    layout = LayerLayout(Ring(stages, 1), tuple(cut), layer_types=decoder.model.layers)
    return ParamLayout(decoder, layout, auto_mesh(partition.mesh))


def build_decode_engine(parts: ParamLayout, sampling: Sampling, seed: int) -> AnyDecodeEngine:
    """What generates with parameters as `prepared` makes them for the same partition."""
    if parts.mesh.shape[STAGE] == 1:
        return DecodeEngine(parts.decoder, parts.mesh, sampling, seed)
    return PipelineDecodeEngine(
        parts.decoder, parts.layout, parts.specs, parts.mesh, sampling, seed
    )


def to_decode_params(parts: ParamLayout, params: Tree) -> Tree:
    """Parameters in network order, layers stacked by kind -> as `decoding_of` takes them."""
    staged = parts.mesh.shape[STAGE] > 1
    return parts.stack(params) if staged else parts.decoder.by_layer(params)


def decode_param_shardings(parts: ParamLayout) -> Tree:
    """Of what `prepared` makes."""
    if parts.mesh.shape[STAGE] > 1:
        return parts.shardings(parts.specs)
    specs, layers = parts.split_layer_types(parts.saved_specs), {}
    for kind, stack in specs["layers"].items():
        one = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack, is_leaf=_is_spec)
        layers[kind] = one
    each = [layers[kind] for kind in parts.decoder.model.layers]
    return parts.shardings(specs | {"layers": each})


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
