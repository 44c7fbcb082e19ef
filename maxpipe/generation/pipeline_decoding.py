"""Pipelined decoding: microbatches circulate through a ring of stages.

The batch is split into one microbatch per stage. In each tick, every stage runs its layers on a
different microbatch and passes the result to the next stage. A token is sampled from the last
stage's output and enters the first stage in the next tick. Stages are idle only while the ring
fills: once per prefill chunk, and once when token generation starts. Each stage stores the caches
of its layers. The vocabulary is sharded over the stages, as in training.

The module also converts training parameters to decode parameters on the same mesh. In training, the
schedule assigns layers to stages; in decoding, each stage has consecutive layers. On a mesh without
stages, stacked layers are unstacked.
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

from maxpipe.generation.decoding import (
    TEXT,
    DecodeEngine,
    DecodeShape,
    PromptImages,
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
from maxpipe.parallel.sharding import auto_mesh, rebind_mesh, restrict_spec, to_device
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.prologue import Embedding
from maxpipe.pipeline.weights import WeightSharding, gather_weight
from maxpipe.schedule.table import Ring, balance_layers
from maxpipe.step.state import ParamLayout

Tree = Any

_SEQUENCE_SPEC = PartitionSpec(None, TOKEN_AXES)
"""PartitionSpec of arrays `[M, B, ...]` that hold sequences. A single token cannot be sharded over
the context axis, so this axis also shards sequences.
"""


class RingState(NamedTuple):
    """State of the ring between two ticks.

    Dim P is sharded over stages. Each entry of a replicated array along dim P is a copy.
    """

    caches: Tree
    """Caches keyed by layer type, `[P, L, M, ...]`."""
    stage_inputs: Float[Array, "P B 1 D"]
    """Input of each stage in the next tick."""
    newest_tokens: SampledTokens
    """Newest token of each sequence in the ring, `[P, M, B]`."""
    seen_tokens: Bool[Array, "P M B V"] | None
    """Mask of the tokens that each sequence contains, or None without a repetition penalty."""


@dataclass(frozen=True)
class PipelineDecodeEngine:
    """Decode engine for meshes with stages.

    Attention heads are sharded over the tensor axis, and sequences over the axes in `TOKEN_AXES`.
    """

    decoder: Decoder
    layout: LayerLayout
    """Layer layout with one chunk per stage and no prologue layers."""
    specs: Tree
    """PartitionSpec of each parameter. Layer parameters are stacked as `[1, P, L, ...]`."""
    mesh: Mesh
    sampling: Sampling
    seed: int

    supports_refill = False
    """Whether new prompts can replace finished sequences: never, because the ring is filled only
    once per batch.
    """
    supports_images = False
    """Whether prompts can have images: never, because a prompt is processed in several chunks."""

    @property
    def batch_multiple(self) -> int:
        """Return the number of stages times sequence shards, which must divide the batch size."""
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
        images: Sequence[PromptImages | None] = (),
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Implement `DecodeEngine.run` for `params` that are stacked as in `layout`."""
        assert refill is None and not size.num_images
        padded_numbers = np.zeros(size.batch_size, np.int32)
        padded_numbers[: len(numbers)] = numbers
        rows, newest_tokens = left_pad(prompts, size.batch_size, size.prompt_length), []
        with jax.set_mesh(self.mesh):
            named, turning = self._place(padded_numbers), self._init_program(size)
            for start in range(0, size.prompt_length, size.prefill_chunk):
                piece = TokenBatch(
                    *(self._place(array[:, start : start + size.prefill_chunk]) for array in rows)
                )
                turning, newest = self._prefill_program(params, turning, named, piece)
                newest_tokens = [newest]
        try:
            # After turn n, the first microbatch has sampled token n, and the others token n - 1.
            for number in range(size.max_new_tokens):
                while len(newest_tokens) < min(
                    number + 3, size.max_new_tokens + 1
                ):  # compute one turn ahead
                    with jax.set_mesh(self.mesh):
                        is_full = np.array(len(newest_tokens) > 1)
                        turning, newest = self._decode_program(params, turning, named, is_full)
                    newest_tokens.append(newest)
                yield _join_microbatches(
                    newest_tokens[number], newest_tokens[number + 1] if number else newest_tokens[0]
                )
        finally:
            jax.block_until_ready(turning)  # Python may exit after this, so devices must be idle

    def _place(self, rows: np.ndarray) -> Array:
        """Reshape an array `[sequences, ...]` to `[M, B, ...]` and transfer it to the mesh."""
        cut = rows.reshape(self._stages, -1, *rows.shape[1:])
        return place_replicated(cut, NamedSharding(self.mesh, _SEQUENCE_SPEC))

    # Compiled programs.

    @cached_property
    def _prefill_program(self) -> Any:
        """Compiled program: (params, state, sequence indices, chunk) -> (state, next tokens)."""
        return self._compiled(self._prefill, _SEQUENCE_SPEC)

    @cached_property
    def _decode_program(self) -> Any:
        """Compiled program: (params, state, sequence indices, `is_full`) -> (state, next tokens).

        The program runs one turn, which has one tick per stage and samples one token of each
        sequence. `is_full` is False in the first turn, in which the ring fills.
        """
        return self._compiled(self._decode_turn, PartitionSpec())

    def _compiled(self, program: Callable[..., RingState], last: PartitionSpec) -> Any:
        def run_local(params: Tree, turning: RingState, *arguments: Any) -> RingState:
            layers = jax.tree.map(lambda leaf: leaf[0, 0], params["layers"])
            turning = jax.tree.map(lambda leaf: leaf[0], turning)
            state = program(*mark_varying((params | {"layers": layers}, turning, *arguments)))
            return jax.tree.map(
                lambda leaf, spec: _from_first_device(leaf, spec)[None], state, self._specs
            )

        axes, turning = manual_axes_of(self.mesh), self._specs
        arguments = (self.specs, turning, _SEQUENCE_SPEC, last)
        run = jax.shard_map(
            run_local,
            axis_names=set(axes),
            in_specs=_map_specs(lambda spec: restrict_spec(spec, axes), arguments),
            out_specs=_map_specs(lambda spec: restrict_spec(spec, axes), turning),
        )

        def both(*arguments: Any) -> tuple[RingState, SampledTokens]:
            state = run(*arguments)
            return state, SampledTokens(*(leaf[0] for leaf in state.newest_tokens))

        shardings = self._on_mesh((turning, PartitionSpec()))
        return jax.jit(both, donate_argnums=1, out_shardings=shardings)

    @cached_property
    def _init_program(self) -> Any:
        """Compiled program that returns the state of an empty ring, given a `DecodeShape`."""

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
                jnp.zeros(
                    (stages, rows, 1, self.decoder.model.stream_width),
                    jnp.dtype(config.compute_dtype),
                ),
                SampledTokens(none, none.astype(jnp.float32), none),
                jnp.zeros((*none.shape, config.vocab_size), bool)
                if self._has_repetition_penalty
                else None,
            )

        return jax.jit(build, static_argnums=0, out_shardings=self._on_mesh(self._specs))

    @cached_property
    def _specs(self) -> RingState:
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
        """Return the sharding of each parameter over the devices of one stage."""
        return _map_specs(WeightSharding.from_spec, self.specs)

    @property
    def _has_repetition_penalty(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    def lower_step(self, params: Tree, size: DecodeShape) -> jax.stages.Lowered:
        """Lower the one-turn program from abstract parameters, for devices that may be absent."""
        rows = (self._stages, size.batch_size // self._stages)
        (at,) = jax.tree.leaves(self._on_mesh((_SEQUENCE_SPEC,)))
        named = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=at)
        with jax.set_mesh(self.mesh):
            turning = with_shardings(
                self._init_program.eval_shape(size), self._on_mesh(self._specs)
            )
            return self._decode_program.lower(params, turning, named, np.array(True))

    # The following methods compute one stage's results; their arrays have no dim P.

    def _prefill(self, params: Tree, turning: RingState, numbers: Array, piece: Any) -> RingState:
        """Prefill a chunk for all microbatches, while the ring fills and then drains."""
        stages, stage = self._stages, axis_index(STAGE)

        def tick(now: Array, carried: tuple[RingState, Array]) -> tuple[RingState, Array]:
            turning, x = carried
            microbatch, leaving = now - stage, now - (stages - 1)
            works = (microbatch >= 0) & (microbatch < stages)
            microbatch = jnp.clip(microbatch, 0, stages - 1)
            inputs = {name: array[microbatch] for name, array in piece._asdict().items()}
            y, caches = self._layers(params, turning.caches, x, microbatch, works, inputs)
            done = jnp.maximum(leaving, 0)
            behind = TokenBatch(*(array[done] for array in piece))
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
        """Run each microbatch through every stage once, each starting at a different stage."""
        stages, stage = self._stages, axis_index(STAGE)

        def tick(now: Array, turning: RingState) -> RingState:
            microbatch, leaving = (now - stage) % stages, (now + 1) % stages
            on_way = self._in_flight_tokens(turning.newest_tokens)
            inputs = {name: array[microbatch] for name, array in on_way._asdict().items()}
            works = is_full | (now >= stage)
            y, caches = self._layers(
                params, turning.caches, turning.stage_inputs, microbatch, works, inputs
            )
            behind, done = (
                TokenBatch(*(array[leaving] for array in on_way)),
                is_full | (now == stages - 1),
            )
            turning = turning._replace(caches=caches)
            turning = self._sample_tokens(params, turning, y, numbers, leaving, done, behind)
            entering = turning.newest_tokens.tokens[leaving][:, None]
            return turning._replace(stage_inputs=self._next_stage_inputs(params, y, entering))

        return lax.fori_loop(0, stages, tick, turning)

    def _in_flight_tokens(self, newest: SampledTokens) -> Any:
        """Return the newest tokens as a `TokenBatch` with one token per sequence."""
        tokens, positions = newest.tokens[..., None], newest.positions[..., None]
        return TokenBatch(tokens, jnp.full_like(tokens, TEXT), positions)

    def _layers(
        self, params: Tree, caches: Tree, x: Array, at: Array, works: Array, inputs: Tree
    ) -> tuple[Array, Tree]:
        """Apply this stage's layers to microbatch `at`; update caches only if `works` is true."""
        layout, stage = self.layout, axis_index(STAGE)
        # If there is one layer type and all stages have the same number of layers, no branch is
        # needed.
        alike = len(layout.ring_layer_types) == 1 and bool((layout.layer_at >= 0).all())
        layer_at, kind_at, place_at = (
            jnp.asarray(table[0])[stage]
            for table in (layout.layer_at, layout.layer_type_at, layout.index_in_type_at)
        )

        def of_kind(number: int, kind: str, position: Array, x: Array, stack: Tree) -> Any:
            is_mine = kind_at[position] == number
            place = jnp.where(is_mine, place_at[position], 0)
            stacked, divided = params["layers"][kind], self._weight_shardings["layers"][kind]
            layer = jax.tree.map(
                lambda leaf, by: gather_weight(leaf[place], by.unstacked(3), leaf.dtype),
                stacked,
                divided,
            )
            old = jax.tree.map(lambda leaf: leaf[place, at], stack)

            def run(x: Array, old: Tree) -> tuple[Array, Tree]:
                x, new = self.decoder.decode_layer(kind, layer, x, inputs, layer_at[position], old)
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
        """Sample the next tokens of microbatch `at` if it has left the last stage (`is_done`)."""
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
        """Return this stage's next input: the previous stage's output, or new embeddings."""
        new = self._embed(params, entering)
        return jnp.where(axis_index(STAGE) == 0, new, ring_shift(y, STAGE, 1, self._stages))

    def _embed(self, params: Tree, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        model, dtype = self.decoder.model, self.decoder.config.compute_dtype
        table = Embedding(
            self._weight_shardings["embedding"],
            model.ends.embed_scale,
            sum(model.carried.values()),
            model.ends.num_streams,
        )
        held = table.prepare(params["embedding"], jnp.dtype(dtype))
        return mark_varying(table.lookup(held, tokens))


def _join_microbatches(
    first: SampledTokens, others: SampledTokens
) -> tuple[np.ndarray, np.ndarray]:
    """Combine the first microbatch's tokens from one turn with the other microbatches' tokens from
    the next turn. Return the tokens and their log-probabilities, both of shape `[sequences]`.
    """

    def joined(first: Array, others: Array) -> np.ndarray:
        return np.concatenate([np.asarray(first)[:1], np.asarray(others)[1:]]).reshape(-1)

    return joined(first.tokens, others.tokens), joined(first.logprobs, others.logprobs)


def _from_first_device(leaf: Array, spec: PartitionSpec) -> Array:
    """Broadcast an array from the first device, unless the array is sharded over sequences."""
    if TOKEN_AXES in spec:
        return leaf
    for axis in TOKEN_AXES:
        leaf = broadcast_from(leaf, axis, 0)
    return leaf


def _map_specs(change: Callable[[PartitionSpec], Any], specs: Tree) -> Tree:
    return jax.tree.map(change, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))


AnyDecodeEngine = DecodeEngine | PipelineDecodeEngine


def decode_param_layout(partition: ParamLayout) -> ParamLayout:
    """Return a parameter layout for the same model and devices, with one chunk per stage.

    All mesh axes are auto axes, because caches are updated and tokens are selected by index.
    """
    decoder, stages = partition.decoder, partition.mesh.shape[STAGE]
    cut = balance_layers(layer_costs(decoder.model, 1), stages)
    layout = LayerLayout(Ring(stages, 1), tuple(cut), layer_types=decoder.model.layers)
    return ParamLayout(decoder, layout, auto_mesh(partition.mesh))


def build_decode_engine(parts: ParamLayout, sampling: Sampling, seed: int) -> AnyDecodeEngine:
    """Build a decode engine for parameters that `to_decode_params` converts to the same layout."""
    if parts.mesh.shape[STAGE] == 1:
        return DecodeEngine(parts.decoder, parts.mesh, sampling, seed)
    return PipelineDecodeEngine(
        parts.decoder, parts.layout, parts.specs, parts.mesh, sampling, seed
    )


def to_decode_params(parts: ParamLayout, params: Tree) -> Tree:
    """Convert stacked parameters in model order to the layout of `build_decode_engine`."""
    staged = parts.mesh.shape[STAGE] > 1
    return parts.stack(params) if staged else parts.decoder.by_layer(params)


def decode_param_converter(training: ParamLayout, parts: ParamLayout) -> Callable[[Tree], Tree]:
    """Return a function that converts training parameters to the layout of `build_decode_engine`.

    The conversion is compiled at the first call.
    """
    convert = jax.jit(
        lambda params: to_decode_params(parts, training.unstack(to_device(params))),
        out_shardings=decode_param_shardings(parts),
    )
    return lambda params: convert(rebind_mesh(parts.mesh, params))


def decode_param_shardings(parts: ParamLayout) -> Tree:
    """Return the shardings of the parameters that `to_decode_params` returns."""
    if parts.mesh.shape[STAGE] > 1:
        return parts.shardings(parts.specs)
    specs, layers = parts.split_layer_types(parts.saved_specs), {}
    for kind, stack in specs["layers"].items():
        layer_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack, is_leaf=_is_spec)
        layers[kind] = layer_specs
    each = [layers[kind] for kind in parts.decoder.model.layers]
    return parts.shardings(specs | {"layers": each})


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
