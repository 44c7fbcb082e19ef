"""Decoder: pure functions of the parameters declared by a model spec.

Parameters are a nested dict `{embedding, layers, final_norm, head, ahead}`. `layers` stacks the
layers of each layer type in model order. `Decoder.apply` is a plain loop over layers that serves as
the reference for pipelined runs. The pipeline calls `layer` and `norm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Key

from maxpipe.models import spec
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.vision import VISION
from maxpipe.models.param_names import unflatten
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model, Param, Part
from maxpipe.nn.activation_statistics import ActivationRecorder
from maxpipe.nn.adapters import apply_adapters, complete_params
from maxpipe.nn.block import Block, norm_module, sublayer_module
from maxpipe.nn.hyper_connections import spread
from maxpipe.nn.module import LayerContext, Output, make_quantizer
from maxpipe.nn.vision import image_embeddings
from maxpipe.parallel import stochastic_rounding
from maxpipe.parallel.batch_arrays import IMAGE_TOKENS_LEFT, IMAGES, image_arrays
from maxpipe.parallel.collectives import Statistic, local_positions
from maxpipe.parallel.image_splice import splice_images
from maxpipe.parallel.sharding import AxisRules, shard_embeddings_by_batch

_Name = TypeVar("_Name", bound=Hashable)


def init_params(
    params: Mapping[_Name, Param], key: Key[Array, ""], dtype: jnp.dtype
) -> dict[_Name, Array]:
    """Initialize parameters, keyed by name.

    The random key of each randomly initialized parameter is derived from the parameter's index
    among these parameters. Parameters that are derived from other parameters are omitted.
    """
    drawn = [name for name, param in params.items() if isinstance(param.init, spec.Normal)]
    keys = {name: jax.random.fold_in(key, number) for number, name in enumerate(drawn)}
    return {
        name: _init_param(param, keys.get(name), dtype)
        for name, param in params.items()
        if not isinstance(param.init, spec.Made)
    }


def _init_param(param: Param, key: Key[Array, ""] | None, dtype: jnp.dtype) -> Array:
    if isinstance(param.init, spec.Constant):
        return jnp.full(param.shape, param.init.value, param.own_dtype or dtype)
    if isinstance(param.init, spec.Entries):
        values = jnp.asarray(param.init.values, param.own_dtype or dtype)
        return values.reshape(param.shape)
    if isinstance(param.init, spec.TokenHash):
        tokens, choices = (jnp.arange(size, dtype=param.own_dtype) for size in param.shape)
        return param.init.experts(tokens[:, None], choices)
    assert isinstance(param.init, spec.Normal) and key is not None
    stddev = param.init.gain * param.init.fan_in**-0.5
    return normal_approximation(key, param.shape, stddev).astype(param.own_dtype or dtype)


def normal_approximation(
    key: Key[Array, ""], shape: Sequence[int], stddev: float
) -> Float[Array, "*dims"]:
    """Return approximately normal float32 samples with mean 0, limited to 3.5 standard deviations.

    Each sample is a scaled sum of four uniform 16-bit integers. Unlike the inverse error function,
    integer sums and one multiplication are bitwise identical on every device and for any sharding.
    """
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    halves = (bits & 0xFFFF) + (bits >> 16)
    centred = (halves[0] + halves[1]).astype(jnp.int32) - 2 * 0xFFFF
    return centred.astype(jnp.float32) * (stddev * (4 * (2**32 - 1) / 12) ** -0.5)


MTP = "ahead"
"""Key under which the parameters and statistics of multi-token prediction heads are stored."""
_STREAMS = {"embedding": 1, "head": 2, MTP: 3, "final_norm": 4, VISION: 5}
"""Index of the random stream for each parameter outside the layers. The layers use stream 0."""

Params = dict[str, Any]
LayerKey = Key[Array, ""] | None
Losses = Mapping[str, Float[Array, ""]]
Statistics = Mapping[str, Statistic]


class DecoderOutput(NamedTuple):
    """Output of the non-pipelined loop over layers for one batch."""

    logits: Float[Array, "B T V"]
    """Float32 logits."""
    losses: Losses
    """Float32 losses keyed by name, summed over all layers and target tokens. If the batch has
    targets, the losses of multi-token prediction heads are included."""
    statistics: Mapping[str, Statistics]
    """Statistics keyed by layer type and name, summed over tokens, with shape `[layers of the type,
    ...]`. If the batch has targets, the statistics of multi-token prediction layers are stored
    under `ahead`, with shape `[heads, ...]`."""


@dataclass(frozen=True)
class Decoder:
    """A model, as pure functions of its parameters."""

    config: ModelConfig
    rules: AxisRules
    records_activations: bool = False
    """Whether layers report statistics of their activations."""
    records_histograms: bool = False
    """Whether these statistics include histograms."""

    @cached_property
    def model(self) -> Model:
        """Return the model spec."""
        return describe(self.config)

    # Parameters.

    def init(self, key: Key[Array, ""]) -> Params:
        """Initialize all parameters; each layer depends only on the key and the layer's index."""
        indices = {layer_type: [] for layer_type in self.model.layer_types}
        for number, layer_type in enumerate(self.model.layers):
            indices[layer_type].append(number)
        layers = {
            layer_type: self.init_layers(layer_type, key, jnp.asarray(layer_indices, jnp.int32))
            for layer_type, layer_indices in indices.items()
        }
        return self.init_outer(key) | {"layers": layers}

    def init_layers(self, layer_type: str, key: Key[Array, ""], layers: Int[Array, " L"]) -> Params:
        """Initialize layers of one type with the given indices, stacked along the first dim."""
        base = jax.random.fold_in(key, 0)
        keys = jax.vmap(partial(jax.random.fold_in, base))(layers)
        return jax.vmap(partial(self.init_layer, layer_type))(keys)

    def init_layer(self, layer_type: str, key: Key[Array, ""]) -> Params:
        """Initialize one layer."""
        described = self.model.layer_types[layer_type]
        params = init_params(described.params_in_init_order, key, self._param_dtype)
        return unflatten(complete_params(described, params))

    def init_outer(self, key: Key[Array, ""]) -> Params:
        """Initialize all parameters that do not belong to layers."""
        params: dict[tuple[str, ...], Array] = {}
        ends = self.model.ends
        for name, param in ends.params.items():
            if name[0] not in (MTP, VISION):
                stream = jax.random.fold_in(key, _STREAMS.get(name[0], 1))
                params |= init_params({name: param}, stream, self._param_dtype)
        if ends.vision is not None:
            stream = jax.random.fold_in(key, _STREAMS[VISION])
            params |= init_params(ends.vision.params, stream, self._param_dtype)
        outer = unflatten(params)
        if (mtp := ends.mtp) is not None:
            base = jax.random.fold_in(key, _STREAMS[MTP])
            keys = jax.vmap(partial(jax.random.fold_in, base))(jnp.arange(mtp.num_heads))
            draw = partial(init_params, mtp.params_of_one, dtype=self._param_dtype)
            outer[MTP] = unflatten(jax.vmap(lambda key: draw(key=key))(keys))
        return outer

    def axes(self) -> Params:
        """Return the logical axes of every parameter, excluding the layer stacking axis."""
        return self._declared(lambda param: param.axes)

    def trainable(self) -> Params:
        """Return a tree of bools: true for trained parameters."""
        return self._declared(lambda param: param.trainable)

    def has_own_dtype(self) -> Params:
        """Return a tree of bools: true for parameters whose fixed dtype overrides the config."""
        return self._declared(lambda param: bool(param.own_dtype))

    def contracted_dims(self) -> Params:
        """Return each parameter's number of contracted dims if layers receive it in 8 bits, else 0.

        If sequence parallelism is enabled, layers quantize their weights themselves.
        """
        quantizer = make_quantizer(self.config)
        is_token_sharded = any(dict(self.rules.table).get("sequence", ()))
        if quantizer is None or not quantizer.can_prequantize or is_token_sharded:
            return self._declared(lambda param: 0)
        is_quantized = lambda param: quantizer.attention or not param.is_of_heads  # noqa: E731
        dims = self._declared(lambda param: param.num_contracted_dims if is_quantized(param) else 0)
        return jax.tree.map(lambda _: 0, dims) | {"layers": dims["layers"]}

    def _declared(self, of: Callable[[Param], Any]) -> Params:
        """Return a tree with the structure of the parameters and `of(declaration)` as leaves."""
        ends = {name: of(param) for name, param in self.model.ends.params.items()}
        layers = {
            layer_type: unflatten({name: of(param) for name, param in described.params.items()})
            for layer_type, described in self.model.layer_types.items()
        }
        return unflatten(ends) | {"layers": layers}

    @property
    def _param_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.param_dtype)

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.compute_dtype)

    # Layers.

    def layer(
        self, layer_type: str
    ) -> Callable[
        [Params, Float[Array, "B T D"], Params, Int[Array, ""], LayerKey],
        tuple[Float[Array, "B T D"], Losses, Statistics],
    ]:
        """Return the function that applies a layer of this type.

        The function maps parameters, x, inputs, the layer's index and a key to the output, losses
        and statistics. The inputs contain `segment_ids` and `positions` `[B, T]`, and `example_ids`
        `[B]`, the indices of sequences in the global batch. The key depends on the step, and None
        disables dropout. The layer index and the example ID are folded into the key.
        """

        def run(
            params: Params,
            x: Float[Array, "B T D"],
            inputs: Params,
            index: Int[Array, ""],
            key: LayerKey = None,
        ) -> tuple[Float[Array, "B T D"], Losses, Statistics]:
            return self._layer(layer_type, params, x, self._context(inputs, index), key)[:3]

        return run

    def _layer(
        self, layer_type: str, params: Params, x: Array, context: LayerContext, key: LayerKey
    ) -> Output:
        described = self.model.layer_types[layer_type]
        if described.in_compute_dtype:
            context = replace(context, quantizer=None)
        if key is not None:
            key = jax.random.fold_in(key, context.index)
            if context.quantizer is not None and context.quantizer.rounds_stochastically:
                keys = stochastic_rounding.token_keys(
                    key, context.inputs["example_ids"], local_positions(x.shape[1])
                )
                context = replace(context, rounding_keys=keys)
        params = apply_adapters(described, params, x.dtype, context.inputs, key)
        output = _merge_module(self._blocks[layer_type], params)(x, context, key)
        statistics = jax.tree.map(jax.lax.stop_gradient, output.statistics)
        return output._replace(statistics=statistics)

    def _context(self, inputs: Params, index: Array, cache: Any = None) -> LayerContext:
        low, recorder = make_quantizer(self.config), None
        if self.records_activations:
            recorder = ActivationRecorder(inputs, histograms=self.records_histograms)
        return LayerContext(inputs, index, self.model.values, cache, low, recorder=recorder)

    @cached_property
    def _blocks(self) -> Mapping[str, tuple[Any, Any]]:
        """Return the block of each layer type, as a graph definition and an abstract state."""
        return {
            name: _split(
                lambda layer_type=layer_type: Block(layer_type, self.rules, self.model.carried)
            )
            for name, layer_type in self.model.layer_types.items()
        }

    # Embedding and output heads.

    def embed_batch(self, params: Params, batch: Params) -> Float[Array, "B T W"]:
        """Return the input of the first layer: token embeddings and, if the batch has images, image
        embeddings.
        """
        x = self.embed(params["embedding"], batch["tokens"])
        if IMAGES in batch:
            features = self.image_features(params, image_arrays(batch))
            x = splice_images(x, features, batch[IMAGE_TOKENS_LEFT])
        return x

    def image_features(self, params: Params, images: Params) -> Float[Array, "B N K F"]:
        """Return the embeddings of all images of each sequence, in the compute dtype."""
        rows, count = images[IMAGES].shape[:2]
        flat = jax.tree.map(lambda array: array.reshape(rows * count, *array.shape[2:]), images)
        tower = self.model.ends.vision
        features = image_embeddings(tower, params[VISION], flat, self._dtype)
        return features.reshape(rows, count, *features.shape[1:])

    def embed(self, table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """Return the input of the first layer: token embeddings in the compute dtype, copied to all
        residual streams, and zeros for the carried arrays.
        """
        return self._layer_input(self._embed(table, tokens))

    def _embed(
        self, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        x = shard_embeddings_by_batch(table.astype(self._dtype)[tokens], self.rules)
        scale = self.model.ends.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, self._dtype)

    def _layer_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        return pad_stream(spread(x, self.model.ends.num_streams), self.model.stream_width)

    def norm(self, params: Params, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Apply the final norm, between the last layer and the output projection."""
        params = {name: params[name] for name in self.model.ends.norm.params}
        return _merge_module(_split(lambda: norm_module(self.model.ends.norm)), params)(x)

    def logits(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return float32 logits computed from the last layer's output."""
        return self._projected(params, self.final_norm(params["final_norm"], x))

    def final_norm(self, params: Params, x: Float[Array, "B T W"]) -> Float[Array, "B T D"]:
        """Apply the final norm to the last layer's output."""
        return self.norm(params, self.reduce_streams(params, x))

    def reduce_streams(self, params: Params, x: Float[Array, "B T W"]) -> Float[Array, "B T D"]:
        """Return the input of the final norm, given the norm's parameters and the last layer's
        output: the residual stream, or the sum of all streams, without the carried arrays.
        """
        x = x[..., : self.model.residual_width] if self.model.carried else x
        if (head := self.model.ends.stream_head) is None:
            return x
        build = sublayer_module(head)
        return _merge_module(_split(lambda: build(head, self.rules)), params[spec.STREAM_HEAD])(x)

    def mtp_head(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply a projection-only MTP head to the final norm's output."""
        transform = params["transform"].astype(hidden.dtype)
        return hidden + jax.nn.silu(jnp.einsum("btd,de->bte", hidden, transform))

    def mtp_layer(
        self,
        params: Params,
        x: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        inputs: Params,
        number: Int[Array, ""],
        key: LayerKey = None,
    ) -> tuple[Float[Array, "B T D"], Losses, Statistics]:
        """Apply an MTP head with a transformer layer, and return its output, losses and statistics.

        The output is the input of both the output projection and the next head. `x` is the previous
        head's output, or the final norm's output for the first head. `embedded` holds the
        embeddings of the later tokens, and `number` is the head's zero-based index. The layer
        indices of the heads follow the indices of the network's layers.
        """
        heads = self.model.ends.mtp_layers
        assert heads is not None
        both = self.norm(params["embedding_norm"], embedded), self.norm(params["hidden_norm"], x)
        projection = params["projection"].astype(x.dtype)
        x = jnp.einsum("btd,de->bte", jnp.concatenate(both, axis=-1), projection)
        index = number + len(self.model.layers)
        run = self.layer(heads.layer_type_name)
        x, losses, statistics = run(params["layer"], self._layer_input(x), inputs, index, key)
        head = {name: params[name] for name in (spec.STREAM_HEAD,) if name in params}
        return self.final_norm(params["norm"] | head, x), losses, statistics

    def _mtp_losses(
        self, params: Params, x: Array, batch: Params, key: LayerKey
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the summed losses, including the cross entropy of each MTP head, in nats.

        If the heads are layers, also return their statistics `[heads, ...]`.
        """
        losses: dict[str, Array] = {}
        statistics: list[Statistics] = []
        hidden, ids = self.final_norm(params["final_norm"], x), batch["segment_ids"]
        for number, name in enumerate(self.model.ends.losses):
            head = jax.tree.map(lambda leaf, at=number: leaf[at], params[MTP])
            distance = number + 1
            same = ids[:, distance:] == ids[:, :-distance]
            mask = jnp.asarray(batch["loss_mask"][:, distance:], jnp.float32) * same
            if self.model.ends.mtp_layers is None:
                output = self.mtp_head(head, hidden)
            else:
                tokens = batch["tokens"][:, distance:]
                later = self._embed(params["embedding"], tokens) * same[..., None]
                after = ((0, 0), (0, distance))
                inputs = batch | {"loss_mask": jnp.pad(mask, after)}
                later = jnp.pad(later, (*after, (0, 0))).astype(hidden.dtype)
                hidden, layer_losses, layer_statistics = self.mtp_layer(
                    head, hidden, later, inputs, jnp.int32(number), key
                )
                for loss_name, loss in layer_losses.items():
                    losses[loss_name] = losses.get(loss_name, 0.0) + loss
                statistics.append(layer_statistics)
                output = hidden
            logits = self._projected(params, output[:, :-distance])
            losses[name] = _summed_cross_entropy(logits, batch["targets"][:, distance:], mask)
        return losses, jax.tree.map(lambda *leaves: jnp.stack(leaves), *statistics or [{}])

    def _projected(self, params: Params, x: Array) -> Array:
        head = params["embedding"].T if self.model.ends.head is None else params["head"]
        head = head.astype(self._dtype)
        logits = jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)
        scale, cap = self.model.ends.logit_scale, self.model.ends.final_logit_softcapping
        logits = logits if scale == 1.0 else logits * scale
        return cap * jnp.tanh(logits / cap) if cap else logits

    # Complete network.

    def run(self, params: Params, batch: Params, key: LayerKey = None) -> DecoderOutput:
        """Run all layers in a plain loop, without pipelining."""
        x, losses, statistics = self._run_layers(params, batch, key)
        if "targets" in batch:
            mtp_losses, mtp_statistics = self._mtp_losses(params, x, batch, key)
            losses |= {name: losses.get(name, 0.0) + loss for name, loss in mtp_losses.items()}
            if self.model.ends.mtp_layers is not None:
                statistics[MTP] = mtp_statistics
        return DecoderOutput(self.logits(params, x), losses, statistics)

    def hidden(self, params: Params, batch: Params) -> Float[Array, "B T D"]:
        """Return the last layer's output, which is the input of `logits`."""
        return self._run_layers(params, batch, None)[0]

    def _run_layers(
        self, params: Params, batch: Params, key: LayerKey
    ) -> tuple[Array, dict[str, Array], dict[str, Statistics]]:
        """Return the last layer's output, and the losses and statistics of all layers."""
        x = self.embed_batch(params, batch)
        losses: dict[str, Array] = {}
        statistics: dict[str, list[Statistics]] = {name: [] for name in self.model.layer_types}
        for layer_type, stack, numbers in self._layer_runs(params["layers"]):
            layer = self.layer(layer_type)

            def body(
                x: Array, layer_input: tuple[Params, Array], layer: Callable[..., Any] = layer
            ) -> tuple[Array, tuple[Losses, Statistics]]:
                x, *reports = layer(layer_input[0], x, batch, layer_input[1], key)
                return x, tuple(reports)

            x, (layer_losses, layer_statistics) = jax.lax.scan(body, x, (stack, numbers))
            for name, loss in layer_losses.items():
                losses[name] = losses.get(name, 0.0) + loss.sum()
            statistics[layer_type].append(layer_statistics)
        joined = {
            layer_type: jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
            for layer_type, parts in statistics.items()
            if parts
        }
        return x, losses, joined

    def _layer_runs(self, layers: Params) -> Iterator[tuple[str, Params, Array]]:
        """Yield (type, parameters, indices) for each run of consecutive layers of the same type."""
        used = dict.fromkeys(self.model.layer_types, 0)
        number = 0
        for layer_type, run in itertools.groupby(self.model.layers):
            first, size = used[layer_type], len(list(run))
            used[layer_type] += size
            stack = layers[layer_type]
            if size < self.model.layers.count(layer_type):
                stack = jax.tree.map(lambda leaf, a=first, b=first + size: leaf[a:b], stack)
            yield layer_type, stack, jnp.arange(number, number + size)
            number += size

    def apply(self, params: Params, batch: Params, key: LayerKey = None) -> Float[Array, "B T V"]:
        """Return float32 logits computed by the non-pipelined loop."""
        return self.run(params, batch, key).logits

    def loss(self, params: Params, batch: Params, key: LayerKey = None) -> Float[Array, ""]:
        """Return the mean cross entropy in nats over the target tokens."""
        return cross_entropy(self.apply(params, batch, key), batch)

    def objective(self, params: Params, batch: Params, key: LayerKey = None) -> Float[Array, ""]:
        """Return the training objective: cross entropy plus weighted auxiliary losses."""
        return self.objective_from_output(self.run(params, batch, key), batch)

    def objective_from_output(self, output: DecoderOutput, batch: Params) -> Float[Array, ""]:
        """Return the training objective computed from the output of the non-pipelined loop."""
        total = cross_entropy(output.logits, batch)
        weights = {**self.model.losses, **self.model.ends.losses}
        for name, loss in output.losses.items():
            total += weights[name] * loss / _targets(batch)
        return total

    # Decoding.

    def by_layer(self, params: Params, split: Callable[[Array], Sequence[Array]] = list) -> Params:
        """Return the parameters with stacked layers replaced by a list of layers in model order.

        Decoding reads every layer for each token, and XLA would first copy each slice of a stacked
        array. `split` splits a stacked array into one array per layer.
        """
        stacks = params["layers"]
        if not isinstance(stacks, Mapping):
            return params
        layers = {}
        for layer_type, stack in stacks.items():
            leaves, form = jax.tree.flatten(stack)
            layers[layer_type] = iter(map(form.unflatten, zip(*map(split, leaves), strict=True)))
        return params | {"layers": [next(layers[layer_type]) for layer_type in self.model.layers]}

    def empty_cache(self, layer_type: str, rows: int, tokens: int) -> dict[str, Any]:
        """Return an empty cache for a layer of this type and `tokens` tokens per sequence."""
        return self._of_caching_parts(
            layer_type, lambda module, part: module.empty_cache(part, rows, tokens, self._dtype)
        )

    def cache_axes(self, layer_type: str) -> dict[str, Any]:
        """Return the logical axes of `empty_cache`, with one tuple per array."""
        return self._of_caching_parts(layer_type, lambda module, part: module.cache_axes(part))

    def _of_caching_parts(
        self, layer_type: str, read: Callable[[Any, Part], Any]
    ) -> dict[str, Any]:
        """Return `read(module, part)` for each sublayer with a cache, keyed by branch."""
        branches = self.model.layer_types[layer_type].branches
        values = {
            branch.name: read(sublayer_module(branch.part), branch.part) for branch in branches
        }
        return {name: value for name, value in values.items() if value is not None}

    def empty_caches(self, rows: int, tokens: int, piece: int = 0) -> list[Any]:
        """Return empty caches for all layers, in model order.

        `piece` is the maximum number of tokens appended at once. If `piece` is set, the cache of a
        sliding-window layer holds only these tokens and the window preceding them.
        """
        caches = []
        for number, layer_type in enumerate(self.model.layers):

            def empty(module: Any, part: Part, number: int = number) -> Any:
                # Name of the per-layer value that limits the cache size.
                window, places = module.cache_window(part), tokens
                if piece and window and (size := int(self.model.values[window][number])):
                    places = min(tokens, size - 1 + piece)
                return module.empty_cache(part, rows, places, self._dtype)

            caches.append(self._of_caching_parts(layer_type, empty))
        return caches

    def decode_layer(
        self, layer_type: str, params: Params, x: Array, batch: Params, index: Array, cache: Any
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Return the layer's output, and its cache extended by this batch's tokens."""
        context = self._context(batch, index, cache)
        output = self._layer(layer_type, params, x, context, None)
        return output.x, output.cache

    def extend(
        self, params: Params, batch: Params, caches: Sequence[Any], last: int = 0
    ) -> tuple[Float[Array, "B t V"], list[Any]]:
        """Return the logits of tokens that follow the cached tokens, and the extended caches.

        `last` limits logits to that many tokens at the end of each sequence; 0 returns the logits
        of all tokens.
        """
        x, extended = self.embed_batch(params, batch), []
        layers = zip(self.model.layers, self.by_layer(params)["layers"], caches, strict=True)
        for number, (layer_type, layer, cache) in enumerate(layers):
            x, cache = self.decode_layer(layer_type, layer, x, batch, jnp.asarray(number), cache)
            extended.append(cache)
        return self.logits(params, x[:, -last:]), extended


def pad_stream(x: Float[Array, "*dims D"], width: int) -> Float[Array, "*dims W"]:
    """Append zeros for the carried arrays, which layers set before they read them."""
    more = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),)) if more else x


def _targets(batch: Params) -> Float[Array, ""]:
    """Return the number of target tokens, or 1 if there are none."""
    return jnp.maximum(batch["loss_mask"].astype(jnp.float32).sum(), 1.0)


def cross_entropy(logits: Float[Array, "B T V"], batch: Params) -> Float[Array, ""]:
    """Return the mean cross entropy over the target tokens, in nats."""
    mask = jnp.asarray(batch["loss_mask"], jnp.float32)
    return _summed_cross_entropy(logits, batch["targets"], mask) / _targets(batch)


def _summed_cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], mask: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Return the summed cross entropy of the unmasked targets."""
    scores = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return -(picked * mask).sum()


def _split(build: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(build))


def _merge_module(split: tuple[Any, Any], params: Params) -> Any:
    """Return the module with the given parameters."""
    graph, state = split
    nnx.replace_by_pure_dict(state := jax.tree.map(lambda leaf: leaf, state), params)
    return nnx.merge(graph, state)
