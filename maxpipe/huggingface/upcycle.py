"""Sparse upcycling: initialize a mixture of experts from a dense Hugging Face folder.

Attention, norms, embeddings and dense layers are copied. Experts are copies or shards of the dense
MLP, and routers are initialized at random (arXiv:2212.05055). Whether two models match is decided
by comparing their specs, so no list of family pairs exists.

Let the dense MLP have width F, the experts width f, and the shared expert width S. The shared
expert stores the first S columns of the MLP, and G = (F - S) / f shards of width f store the other
columns. Expert e stores shard e mod G. Experts form virtual groups of G consecutive experts with
equal router weights, so a token selects complete groups (arXiv:2410.07524). If S = F, the shared
expert and the virtual groups each store the complete MLP with half the output.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.slab_writer import LazySlabArray, Region, regions
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.config.rules import format_value
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.huggingface import mapping
from maxpipe.huggingface.config_json import FILE
from maxpipe.huggingface.folder import HuggingFaceFolder
from maxpipe.huggingface.import_ import (
    SLAB_BYTES,
    ConvertedModel,
    Origin,
    import_folder,
    lazy_array,
)
from maxpipe.huggingface.mapping import import_slab_shape
from maxpipe.huggingface.output_folder import (
    MessageCallback,
    ProgressCallback,
    ignore_progress,
)
from maxpipe.io.direct_io import empty_array
from maxpipe.io.formatting import pluralize
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.param_names import names_in_layers
from maxpipe.models.registry import FAMILIES, describe
from maxpipe.models.spec import Branch, Constant, LayerType, Model, Param
from maxpipe.nn.decoder import init_params, normal_approximation
from maxpipe.step.state import PARAM_STREAM

Key = tuple[str, str]
"""Sublayer and name of a parameter."""


def import_upcycled(
    folder: str,
    out: str,
    say: MessageCallback,
    report: ProgressCallback = ignore_progress,
    options: UpcycleOptions | None = None,
) -> None:
    """Import a dense folder as a mixture of experts. See `import_folder`.

    Raises:
        ConfigError: the folder does not contain a supported dense model that matches the config, or
            `out` already exists.
        StorageError: `out` cannot be written.
    """
    import_folder(folder, out, say, report, partial(_convert, options or UpcycleOptions(), say))


def _convert(
    options: UpcycleOptions, say: MessageCallback, source: HuggingFaceFolder
) -> ConvertedModel:
    loaded = load_config(source, options)
    config = loaded.config
    upcycled = UpcycledModel(source, config.model, config.run.seed, options)
    for line in upcycled.lines():
        say(line)
    section = {**to_dict(config)["model"], "param_dtype": source.model_dtypes["param_dtype"]}
    origin: Origin = {"dtype": source.dtype, "dtypes": {}}
    return ConvertedModel(section, upcycled.lazy_arrays(), origin)


@dataclass(frozen=True)
class UpcycleOptions:
    """Options of `maxpipe import --upcycle`."""

    inputs: tuple[str, ...] = ()
    """Config files and overrides of the mixture of experts."""
    router_scale: float = 1.0
    """Factor that multiplies the standard deviation of the initial router weights."""
    drop_ratio: float = 0.0
    """Fraction of each expert's hidden dims that is initialized at random (arXiv:2502.19261)."""


@dataclass(frozen=True)
class ExpertSplit:
    """Assignment of the columns of a dense MLP to the experts of a layer."""

    num_shards: int
    """Number of shards, which is the number of experts in a virtual group."""
    first: int
    """Index of the first column that is stored in routed experts."""
    routed_scale: float
    """Factor that multiplies the down projections of routed experts."""
    shared_scale: float
    """Factor that multiplies the down projection of the shared expert."""
    width: int
    """Width of a routed expert."""
    is_exact: bool
    """Whether the experts compute the dense MLP, up to rounding."""


def split_of(part: Experts, width: int) -> ExpertSplit:
    """Return the assignment of an MLP with `width` columns to experts with valid sizes.

    The routing weights of a token's experts are assumed to have their exact sum if they are
    normalized, and the sum for router logits of 0 if they are not.
    """
    shared = 0 if part.shared is None else part.shared.d_mlp
    first, share = (0, 0.5) if shared == width else (shared, 1.0)
    num_shards = (width - first) // part.d_mlp
    total, is_exact = part.weight_scale, part.normalised
    if not part.normalised:
        total *= part.per_token * (0.5 if part.scores == "sigmoid" else 1 / part.num_experts)
        is_exact = part.scores == "softmax" and part.per_token == part.num_experts
    scale = share * num_shards / total
    return ExpertSplit(num_shards, first, scale, share, part.d_mlp, is_exact)


# Config of the mixture of experts, and checks.


def load_config(source: HuggingFaceFolder, options: UpcycleOptions) -> LoadedConfig:
    """Load the config of the mixture of experts. Keys that the inputs do not set have the folder's
    values.

    Raises:
        ConfigError: the config is invalid, or does not match the folder.
    """
    section = dict(source.description.section)
    del section[source.config.family]
    known = {"train": {"steps": 1}, "model": {**source.model_dtypes, **section}}
    origin = str(source.folder / FILE)
    family = load(options.inputs, known, origin).config.model.family
    known["model"]["family"] = family
    known["model"][family] = _inherited(source.config.own, family)
    loaded = load(options.inputs, known, origin)
    for check in (_family_problems, _key_problems, _layer_problems, _size_problems):
        if problems := [_problem(loaded, *each) for each in check(source, loaded.config.model)]:
            raise ConfigError(problems)
    return loaded


def _inherited(own: Any, family: str) -> dict[str, Any]:
    """Return the values of a family's keys that the section of another family also has."""
    names = {each.name for each in dataclasses.fields(FAMILIES[family].section)}
    return {name: value for name, value in dataclasses.asdict(own).items() if name in names}


def has_experts(model: Model) -> bool:
    """Return whether any layer has experts."""
    return any(_experts_of(each) is not None for each in model.layer_types.values())


def _experts_of(layer_type: LayerType) -> Experts | None:
    parts = (branch.part for branch in layer_type.branches)
    return next((part for part in parts if isinstance(part, Experts)), None)


_Violation = tuple[str, str, str]
"""Key below `model`, violated rule and action."""


def _problem(loaded: LoadedConfig, key: str, rule: str, action: str) -> Problem:
    """Return the problem with the value of a key."""
    value = to_dict(loaded.config)["model"]
    for name in key.split("."):
        value = value[name]
    place = error_location(f"model.{key}", loaded.origins)
    return Problem(Code.HF_UPCYCLE, place, format_value(value), rule, action)


def _family_problems(source: HuggingFaceFolder, config: ModelConfig) -> Iterator[_Violation]:
    """Check that the folder has no experts, and that the family has experts."""
    if has_experts(describe(source.config)):
        rule = f"cannot be upcycled from {source.folder}, which already has experts."
        yield "family", rule, "Omit --upcycle to import this folder, or use a dense model."
    elif not has_experts(describe(config)):
        yield "family", "must be a family with experts.", _families_action(source)


def _key_problems(source: HuggingFaceFolder, config: ModelConfig) -> Iterator[_Violation]:
    """Check the keys that all families have. Experts can have another width than the MLP."""
    ignored = {"family", source.config.family}
    if all(map(_experts_of, describe(config).layer_types.values())):
        ignored.add("d_mlp")
    for name, wanted in source.description.section.items():
        if name not in ignored and getattr(config, name) != wanted:
            yield _must_equal(source, name, wanted)
    if config.mtp_heads:
        rule = "must be 0, because the folder has no weights of multi-token prediction heads."
        yield "mtp_heads", rule, "Set model.mtp_heads=0."


def _must_equal(source: HuggingFaceFolder, key: str, wanted: object) -> _Violation:
    text = format_value(wanted)
    rule = f"must be {text}, the value in {source.folder / FILE}."
    return key, rule, f"Set model.{key}={text}, or omit the key."


def _layer_problems(source: HuggingFaceFolder, config: ModelConfig) -> Iterator[_Violation]:
    """Check that the layers are equal except for the MLPs."""
    dense = replace(source.config, attention=config.attention, dropout=config.dropout)
    if not (difference := _difference(describe(dense), _describe(config))):
        return
    own = _inherited(source.config.own, config.family)
    keys = [name for name, value in own.items() if getattr(config.own, name) != value]
    for name in keys:
        yield _must_equal(source, f"{config.family}.{name}", own[name])
    if not keys:
        architecture = source.description.table.architecture
        rule = f"must have the layers of {architecture} except for the MLPs, but {difference}."
        yield "family", rule, _families_action(source)


def _describe(config: ModelConfig) -> Model:
    """Return the spec of a model whose parameters are all trained."""
    return describe(replace(config, frozen=[], adapter=None))


def _families_action(source: HuggingFaceFolder) -> str:
    """Return an action that names the families with experts that match the folder."""
    dense, names = describe(source.config), []
    for family in FAMILIES.values():
        own = family.section(**_inherited(source.config.own, family.name))
        config = replace(source.config, family=family.name, own=own)
        if not any(family.rules(config)) and not _difference(dense, model := describe(config)):
            names += [family.name] if has_experts(model) else []
    if not names:
        return "Use another folder: no family with experts has such layers."
    return f"Set model.family={' or model.family='.join(names)}, and omit keys of its section."


def _difference(dense: Model, moe: Model) -> str:
    """Describe the first difference between two models with the same number of layers, other than
    experts in place of MLPs, or return "".
    """
    for pair in dict.fromkeys(zip(dense.layers, moe.layers, strict=True)):
        branches = dense.layer_types[pair[0]].branches, moe.layer_types[pair[1]].branches
        if len(branches[0]) != len(branches[1]):
            return f"a layer has {len(branches[1])} branches instead of {len(branches[0])}"
        for ours, theirs in zip(*branches, strict=True):
            if found := _field_difference(_as_experts(ours, theirs), theirs, theirs.name):
                return found
    ends = replace(dense.ends, mtp=None), replace(moe.ends, mtp=None)
    return _field_difference(*ends, "ends") or _field_difference(dense.values, moe.values, "values")


def _as_experts(dense: Branch, moe: Branch) -> Branch:
    """Return the branch with experts that equals `moe` if `moe` can be upcycled from `dense`."""
    if not isinstance(dense.part, MLP) or not isinstance(moe.part, Experts):
        return dense
    width, function = dense.part.d_model, dense.part.function
    shared = moe.part.shared and replace(moe.part.shared, d_model=width, function=function)
    part = replace(
        moe.part,
        d_model=width,
        function=function,
        shared=shared,
        shared_gated=False,
        biased=False,
    )
    return replace(dense, name=moe.name, part=part)


def _field_difference(dense: Any, moe: Any, path: str) -> str:
    """Describe the first field that differs, or return ""."""
    if isinstance(dense, Rope) and isinstance(moe, Rope):
        dense, moe = map(_without_unused_scaling, (dense, moe))
    if dense == moe:
        return ""
    if type(dense) is type(moe) and dataclasses.is_dataclass(dense):
        for name in (each.name for each in dataclasses.fields(dense)):
            pair = getattr(dense, name), getattr(moe, name)
            inner = path if name == "part" else f"{path}.{name}"
            if found := _field_difference(*pair, inner):
                return found
    texts = [
        type(each).__name__ if dataclasses.is_dataclass(each) else repr(each)
        for each in (moe, dense)
    ]
    return f"{path} is {texts[0]} instead of {texts[1]}"


def _without_unused_scaling(rope: Rope) -> Rope:
    """Return rotary positions in which keys without effect have their default values."""
    is_scaled = rope.factor != 1 or rope.attention_factor != 1 or rope.stretch
    if is_scaled or rope.scaling == "dynamic":
        return rope
    return replace(
        rope, scaling="linear", original_tokens=0, truncate=True, fast=0.0, slow=0.0, scaled=""
    )


def _size_problems(source: HuggingFaceFolder, config: ModelConfig) -> Iterator[_Violation]:
    """Check that the experts can store the MLP."""
    parts = filter(None, map(_experts_of, describe(config).layer_types.values()))
    part, width, family = next(parts), source.config.d_mlp, config.family
    shared = 0 if part.shared is None else part.shared.d_mlp
    stored = width if shared == width else width - shared
    if stored < part.d_mlp or stored % part.d_mlp:
        rule = f"must divide the width of the dense MLP ({width})"
        rule += "" if stored == width else f" minus that of the shared expert ({shared})"
        count = getattr(config.own, "num_shared_experts", 0)
        sizes = range(min(part.d_mlp, width), 0, -1)
        size = next((n for n in sizes if not width % n and count * n <= width), 1)
        shards = width // size - (count if count * size < width else 0)
        yield f"{family}.d_expert", f"{rule}.", _sizes_action(config, shards, d_expert=size)
        return
    shards = stored // part.d_mlp
    rule = f"must be a multiple of {shards}, the number of shards of the dense MLP."
    if part.per_token % shards:
        yield f"{family}.top_k", rule, _sizes_action(config, shards)
    elif part.num_experts % shards:
        yield f"{family}.num_experts", rule, _sizes_action(config, shards)
    elif part.groups is not None and part.num_experts // part.groups.num_groups % shards:
        rule = f"must leave a multiple of {shards} experts, the number of shards, in each group."
        yield f"{family}.num_expert_groups", rule, f"Set model.{family}.num_expert_groups=1."


def _sizes_action(config: ModelConfig, shards: int, **sizes: int) -> str:
    """Return an action that sets sizes with which each token selects all shards."""
    own: Any = config.own
    top_k, experts = (-(-count // shards) * shards for count in (own.top_k, own.num_experts))
    sizes |= {"top_k": top_k, "num_experts": max(top_k, experts)}
    changes = [
        f"model.{config.family}.{key}={value}"
        for key, value in sizes.items()
        if getattr(own, key) != value
    ]
    return f"Set {' and '.join(changes)}."


# Parameters.


@dataclass(frozen=True)
class UpcycledModel:
    """A mixture of experts whose parameters are read from a dense folder.

    Random values depend only on the seed and the model.
    """

    source: HuggingFaceFolder
    config: ModelConfig
    seed: int
    options: UpcycleOptions
    _known_moments: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def dense(self) -> Model:
        """Return the spec of the dense model."""
        return describe(self.source.config)

    @cached_property
    def model(self) -> Model:
        """Return the spec of the mixture of experts."""
        return _describe(self.config)

    def lines(self) -> list[str]:
        """Return lines for the user that describe the experts and the initial logits."""
        lines, width = [], self.source.config.d_mlp
        for name, spec in self.model.layer_types.items():
            if (part := _experts_of(spec)) is None:
                continue
            split = split_of(part, width)
            copies = "a copy" if split.num_shards == 1 else f"one of {split.num_shards} shards"
            columns = f"columns {split.first} to {width - 1} of " if split.first else ""
            lines.append(
                f"{pluralize(self.model.layers.count(name), 'layer')} with "
                f"{pluralize(part.num_experts, 'expert')} of width {part.d_mlp}, each {copies} of "
                f"{columns}the dense MLP; "
                f"their down projections are multiplied by {split.routed_scale:g}"
            )
            if part.shared is not None:
                columns = f"columns 0 to {split.first - 1} of " if split.first else ""
                lines.append(
                    f"the shared expert stores {columns}the dense MLP; "
                    f"its down projection is multiplied by {split.shared_scale:g}"
                )
            if self.options.drop_ratio:
                count = round(self.options.drop_ratio * part.d_mlp)
                lines.append(
                    f"{count} of {part.d_mlp} hidden dims of each expert are initialized at "
                    "random: the initial logits differ from those of the dense model"
                )
            elif split.is_exact:
                lines.append("the initial logits equal those of the dense model up to rounding")
            else:
                lines.append(
                    "the initial logits differ from those of the dense model, because "
                    f"model.{self.config.family}.norm_topk_prob=false"
                )
        return lines

    def lazy_arrays(self) -> dict[str, LazySlabArray]:
        """Return lazily read parameters in checkpoint layout, in the dtypes of the weight files.

        Each dense weight is read once for all experts of a layer.
        """
        arrays = {
            name: lazy_array(self.source, name) for name in map(".".join, self.model.ends.params)
        }
        for layer_type, spec in self.model.layer_types.items():
            names = names_in_layers(self.model, layer_type)
            layers = [n for n, each in enumerate(self.model.layers) if each == layer_type]
            for key, param in spec.params.items():
                arrays[names[key]] = self._array(layer_type, key, param, layers)
        return arrays

    def _array(
        self, layer_type: str, key: Key, param: Param, layers: Sequence[int]
    ) -> LazySlabArray:
        """Return the lazily read parameter of all layers of one type."""
        part, shape = self.model.layer_types[layer_type].parts[key[0]], (len(layers), *param.shape)
        if isinstance(part, Experts) and (key[1] == "router" or isinstance(param.init, Constant)):
            name, _ = self._dense_param(layers[0], (key[0], "gate"))
            dtype = np.dtype(param.own_dtype or self.source.stored_dtype(name))
            read = self._initializer(layer_type, key, dtype)
            return LazySlabArray(shape, dtype, (1, *param.shape), _stacked(read, layers))
        name, _ = self._dense_param(layers[0], key)
        dtype = self.source.stored_dtype(name)
        slab = self._slab(name, param, SLAB_BYTES // dtype.itemsize)
        read, is_finite = self._reader(layer_type, key, param, dtype)
        return LazySlabArray(shape, dtype, slab, _stacked(read, layers), is_finite)

    def _slab(self, name: str, param: Param, most: int) -> tuple[int, ...]:
        """Return a slab shape of at most `most` elements, which has all experts of one layer.

        A slab covers complete rows of the dense tensor with the checkpoint name `name`.
        """
        if "experts" not in param.axes:
            return import_slab_shape(self.source.mapping, name, most)
        dim = param.axes.index("experts")
        dense = math.prod(self.source.mapping.shapes[name][1:])
        slab: tuple[int, ...] = ()
        # If the rows are divided along the hidden dim, a dense slab can cover several shards.
        for limit in (most * dense // math.prod(param.shape), most // param.shape[dim]):
            of_dense = import_slab_shape(self.source.mapping, name, max(1, limit))[1:]
            inner = (*of_dense[:dim], param.shape[dim], *of_dense[dim:])
            slab = (1, *map(min, inner, param.shape))
            if math.prod(slab) <= most:
                break
        return slab

    def _dense_param(self, layer: int, key: Key) -> tuple[str, int]:
        """Return the checkpoint name and the stacked index of the dense parameter that a parameter
        of a layer is read from.
        """
        types = self.dense.layers[layer], self.model.layers[layer]
        dense, moe = self.dense.layer_types[types[0]], self.model.layer_types[types[1]]
        part = dict(zip(moe.parts, dense.parts, strict=True))[key[0]]
        param = key[1] if part == key[0] else key[1].removeprefix(_SHARED)
        name = names_in_layers(self.dense, types[0])[part, param]
        return name, self.dense.layers[:layer].count(types[0])

    def _reader(
        self, layer_type: str, key: Key, param: Param, dtype: np.dtype
    ) -> tuple[_LayerReader, bool]:
        """Return a function that reads one layer's parameter, and whether the function raises an
        error for NaN and infinity.
        """

        def copy(layer: int, region: Region) -> np.ndarray:
            name, place = self._dense_param(layer, key)
            return self.source.read_region(name, dtype, (slice(place, place + 1), *region))[0]

        part = self.model.layer_types[layer_type].parts[key[0]]
        if not isinstance(part, Experts):
            return copy, True
        split = split_of(part, self.source.config.d_mlp)
        is_shared = key[1].startswith(_SHARED)
        scale = 1.0
        if key[1].removeprefix(_SHARED) == "down":
            scale = split.shared_scale if is_shared else split.routed_scale

        def scaled(layer: int, region: Region) -> np.ndarray:
            values = copy(layer, region)
            return values if scale == 1 else (values.astype(np.float32) * scale).astype(dtype)

        if is_shared:
            return scaled, scale == 1
        read = partial(_read_experts, scaled, param, split)
        if self.options.drop_ratio:
            read = partial(self._with_dropped_dims, read, key, param, scale)
        return read, scale == 1

    def _initializer(self, layer_type: str, key: Key, dtype: np.dtype) -> _LayerReader:
        """Return a function that computes the initial value of one layer's parameter, as in a new
        run with the same seed. The experts of a virtual group have equal router weights.
        """
        spec = self.model.layer_types[layer_type]
        part = spec.parts[key[0]]
        assert isinstance(part, Experts)
        group = split_of(part, self.source.config.d_mlp).num_shards

        stream, float32 = jax.random.fold_in(self._key, 0), jnp.dtype("float32")

        @jax.jit
        def init(layer: jax.Array) -> jax.Array:
            params = spec.params_in_init_order
            values = init_params(params, jax.random.fold_in(stream, layer), float32)[key]
            if key[1] != "router":
                return values
            return jnp.repeat(values[:, ::group], group, 1) * self.options.router_scale

        return lambda layer, region: np.asarray(init(layer))[region].astype(dtype)

    @cached_property
    def _key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.seed), PARAM_STREAM)

    # Drop-Upcycling.

    def _with_dropped_dims(
        self,
        read: _LayerReader,
        key: Key,
        param: Param,
        scale: float,
        layer: int,
        region: Region,
    ) -> np.ndarray:
        """Read a region of a parameter of routed experts, and replace the weights of the dropped
        hidden dims by normal values with the mean and standard deviation of the dense weights.
        """
        values = read(layer, region)
        experts, hidden = param.axes.index("experts"), param.axes.index("mlp")
        (other,) = {0, 1, 2} - {experts, len(param.shape) - 1}
        mean, stddev = (scale * each for each in self._moments(layer, key))
        stream = jax.random.fold_in(jax.random.fold_in(self._key, _DROP_STREAM), layer)
        sizes = param.shape[experts], param.shape[hidden]
        is_dropped = np.asarray(_dropped_dims(stream, *sizes, self.options.drop_ratio))
        stream = jax.random.fold_in(stream, 1 + _PROJECTIONS.index(key[1]))
        columns = jnp.arange(region[-1].start, region[-1].stop)
        for number, target in enumerate(np.moveaxis(values, experts, 0), region[experts].start):
            noise = _normal(jax.random.fold_in(stream, number), columns, param.shape[other])
            drawn = (mean + stddev * np.asarray(noise)[region[other]]).astype(values.dtype)
            mask = is_dropped[number, region[hidden]]
            np.copyto(target, drawn, where=mask if hidden > other else mask[:, None])
        return values

    def _moments(self, layer: int, key: Key) -> tuple[float, float]:
        """Return the mean and the standard deviation of a layer's dense parameter."""
        name, place = self._dense_param(layer, key)
        with self._lock:
            if (name, place) not in self._known_moments:
                shape = self.source.mapping.shapes[name]
                slab = import_slab_shape(self.source.mapping, name, SLAB_BYTES // 4)
                total = np.zeros(2)
                for region in regions(shape[1:], slab[1:]):
                    whole = (slice(place, place + 1), *region)
                    values = self.source.read_region(name, np.dtype(np.float32), whole)
                    total += values.sum(dtype=np.float64), np.square(values).sum(dtype=np.float64)
                mean, square = total / math.prod(shape[1:])
                self._known_moments[name, place] = mean, math.sqrt(max(square - mean**2, 0.0))
        return self._known_moments[name, place]


@partial(jax.jit, static_argnums=(1, 2, 3))
def _dropped_dims(key: jax.Array, num_experts: int, width: int, ratio: float) -> jax.Array:
    """Return a mask with the shape [experts, width] that selects the dropped hidden dims."""
    order = jnp.argsort(jax.random.bits(key, (num_experts, width)), axis=-1)
    return jnp.argsort(order, axis=-1) < round(ratio * width)


@partial(jax.jit, static_argnums=2)
def _normal(key: jax.Array, columns: jax.Array, size: int) -> jax.Array:
    """Return approximately normal values with the shape [size, columns]. Each column depends only
    on the key and its index.
    """
    keys = jax.vmap(partial(jax.random.fold_in, key))(columns)
    return jax.vmap(lambda each: normal_approximation(each, (size,), 1.0))(keys).T


_SHARED = "shared_"
_PROJECTIONS = ("gate", "up", "down")
_DROP_STREAM = 4
"""Index of the random stream for dropped hidden dims. `maxpipe.nn.decoder` uses the others."""

_LayerReader = Callable[[int, Region], np.ndarray]
"""Function that reads a region of one layer's parameter."""


def _stacked(read: _LayerReader, layers: Sequence[int]) -> Callable[[Region], np.ndarray]:
    """Return a function that reads a region of a parameter with stacked layers."""

    def stack(region: Region) -> np.ndarray:
        values = [read(layer, region[1:]) for layer in layers[region[0]]]
        return values[0][None] if len(values) == 1 else np.stack(values)

    return stack


def _read_experts(
    read: _LayerReader, param: Param, split: ExpertSplit, layer: int, region: Region
) -> np.ndarray:
    """Read a region of a parameter of routed experts. `read` reads the dense parameter."""
    dims = param.axes.index("experts"), param.axes.index("mlp")
    experts, columns = (region[dim] for dim in dims)
    numbers = range(experts.start, experts.stop)
    values: np.ndarray | None = None
    for shard in dict.fromkeys(number % split.num_shards for number in numbers):
        first = split.first + shard * split.width
        dense = list(region)
        dense[dims[1]] = slice(first + columns.start, first + columns.stop)
        del dense[dims[0]]
        block = read(layer, tuple(dense))
        if values is None:
            values = empty_array([part.stop - part.start for part in region], block.dtype)
        for number in numbers:
            if number % split.num_shards == shard:
                mapping.copy(np.moveaxis(values, dims[0], 0)[number - experts.start], block)
    assert values is not None
    return values
