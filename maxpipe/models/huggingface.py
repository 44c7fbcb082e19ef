"""Hugging Face format of a model family: tables of config keys and tensors, without jax.

Imports read both tables from left to right, and exports from right to left. The code that applies
the tables is in `maxpipe.huggingface`. Several families share rows of these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Theirs = Mapping[str, Any]
"""Content of `config.json`."""

Ours = Mapping[str, Any]
"""Config values keyed by name below `model`, such as `num_heads` and `llama.rope_factor`."""


class UnsupportedError(ValueError):
    """Error for a value that the other format cannot represent, with the key and violated rule."""

    def __init__(self, key: str, value: Any, rule: str, action: str = ""):
        super().__init__(f"{key} = {value!r} {rule}")
        self.key, self.value, self.rule, self.action = key, value, rule, action


class Row(Protocol):
    """A row of a family's key table."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the `config.json` keys that this row handles."""
        ...

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Convert `config.json` to maxpipe keys; `ours` has the values from the preceding rows.

        Raises:
            UnsupportedError: the model family does not support the value.
        """
        ...

    def write(self, ours: Ours) -> Theirs:
        """Convert maxpipe's config values to `config.json` keys.

        Raises:
            UnsupportedError: transformers cannot represent the value.
        """
        ...


@dataclass(frozen=True)
class Key:
    """A config key with the same meaning in both formats."""

    theirs: str
    ours: str
    default: Any = None
    """Value that transformers uses if `config.json` lacks the key, or a function that computes this
    value from maxpipe's values in the preceding rows."""
    zero_means: str = ""
    """Name of another maxpipe key, whose value is used if this key is 0."""
    is_integer: bool = False
    """Whether transformers stores an integer where the maxpipe config has a float."""
    also: str = ""
    """Alternative name of the key in some transformers releases. Exports write both names."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the key's name, or both names if it has two."""
        return (self.theirs, self.also) if self.also else (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the key's value in `config.json`, or the default."""
        value = theirs.get(self.theirs)
        if value is None and self.also:
            value = theirs.get(self.also)
        if value is None:
            value = self.default(ours) if callable(self.default) else self.default
        if value is None:
            raise UnsupportedError(self.theirs, None, "is missing and has no default.")
        if self.zero_means and value == ours[self.zero_means]:
            value = 0
        return {self.ours: value}

    def write(self, ours: Ours) -> Theirs:
        value = ours[self.ours]
        if self.zero_means and not value:
            value = ours[self.zero_means]
        if self.is_integer and value != (value := int(value)):
            raise UnsupportedError(f"model.{self.ours}", ours[self.ours], "must be a whole number.")
        return dict.fromkeys(self.names, value)


@dataclass(frozen=True)
class Fixed:
    """A `config.json` key for which the family supports only certain values."""

    theirs: str
    values: tuple[Any, ...]
    """Accepted values. Exports write the first value."""
    default: Any = None
    """Value that transformers uses if `config.json` lacks the key."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the value of the `config.json` key, which has no counterpart in maxpipe."""
        actual = theirs.get(self.theirs)
        actual = self.default if actual is None else actual
        # Python considers 0 equal to False, and 1 equal to True.
        if not any(
            actual == value and (type(actual) is bool) == (type(value) is bool)
            for value in self.values
        ):
            allowed = " or ".join("null" if value is None else repr(value) for value in self.values)
            raise UnsupportedError(
                self.theirs, actual, f"must be {allowed}: other values are unsupported."
            )
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the first accepted value; omit null, because even null affects some models."""
        return {} if self.values[0] is None else {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Only:
    """A maxpipe key that `config.json` lacks, and the only value that transformers supports."""

    ours: str
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        return {self.ours: self.value}

    def write(self, ours: Ours) -> Theirs:
        """Check the value of the maxpipe key, which has no counterpart in `config.json`."""
        if (value := ours[self.ours]) != self.value:
            raise UnsupportedError(f"model.{self.ours}", value, f"must be {self.value!r}.")
        return {}


@dataclass(frozen=True)
class Kept:
    """A `config.json` key that does not affect logits. Exports copy it from the imported model."""

    theirs: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return an empty dict; `maxpipe.huggingface` copies the key."""
        return {}


@dataclass(frozen=True)
class Rotary:
    """Rotary keys: `rope_parameters`, or `rope_theta` and `rope_scaling` in older releases."""

    theta: str
    """maxpipe key for the RoPE base."""
    default: float
    """Default RoPE base in transformers."""
    scalings: Mapping[str, tuple[Row, ...]]
    """Key-table rows for the other RoPE parameters, keyed by `rope_type`."""
    unscaled: Ours
    """maxpipe values for the `rope_type` `default`."""
    select_type: Callable[[Ours], str] = lambda ours: "default"
    """Function that returns the `rope_type` for maxpipe values."""
    layers: str = ""
    """Layer type to read, if `rope_parameters` has one entry per layer type."""
    legacy_theta_key: str = "rope_theta"
    """Name of the RoPE base key in older transformers releases."""
    legacy_type_key: str = "rope_type"
    """Name of the RoPE type key in older transformers releases."""
    top_level_keys: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """Key-table rows for keys outside the rotary parameters, keyed by `rope_type`."""
    always: tuple[Row, ...] = ()
    """Key-table rows for RoPE parameters of every `rope_type`."""
    defaults: Theirs = field(default_factory=dict)
    """Rotary parameters that transformers uses if `config.json` specifies only the base."""
    default_max_positions: int = 0
    """Default of `max_position_embeddings` in transformers."""
    default_original_positions: int = 0
    """Default of `original_max_position_embeddings` in transformers. 0 means no default."""
    has_legacy_keys: bool = True
    """Whether older transformers releases, which lack `rope_parameters`, support the model."""
    reads_flat: bool = False
    """Whether parameters outside the entries of `layers` apply to this layer type, except the
    base. The class then does not scale rotated dims."""
    enabled: str = ""
    """maxpipe key that enables RoPE, which a RoPE base of null disables. Empty if null means the
    default base."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the key names of current and older transformers releases."""
        legacy = (self.legacy_theta_key, "rope_scaling") if self.has_legacy_keys else ()
        return (*legacy, "rope_parameters")

    def rows(self, rope_type: str) -> tuple[Row, ...]:
        """Return the rows for a `rope_type`."""
        scaling, outside = (of.get(rope_type, ()) for of in (self.scalings, self.top_level_keys))
        return (*scaling, *outside, *self.always)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the RoPE base and scaling from the normalized `rope_parameters`.

        See `maxpipe.huggingface.config_json`.
        """
        rope_parameters = an_object(theirs, "rope_parameters")
        if self.layers:
            rope_parameters = an_object(rope_parameters, self.layers)
        ours_read, rope_type = (
            {self.theta: rope_parameters["rope_theta"]},
            rope_parameters["rope_type"],
        )
        if self.enabled:
            ours_read[self.enabled] = rope_parameters["rope_theta"] is not None
            if not ours_read[self.enabled]:
                return ours_read | {self.theta: self.default, **self.unscaled}
        if rope_type != "default" and (
            not isinstance(rope_type, str) or rope_type not in self.scalings
        ):
            known = " or ".join(repr(scaling) for scaling in ("default", *self.scalings))
            raise UnsupportedError("rope_type", rope_type, f"must be {known}.")
        if rope_type == "default":
            ours_read |= dict(self.unscaled)
        length = theirs.get("max_position_embeddings")
        lengths = {} if length is None else {"max_position_embeddings": length}
        for row in self.rows(rope_type):
            ours_read |= row.read({**lengths, **rope_parameters}, ours)
        return ours_read

    def write(self, ours: Ours) -> Theirs:
        """Return the keys of both current and older releases, so that both can read the file."""
        if self.enabled and not ours[self.enabled]:
            disabled = {"rope_theta": None, "rope_type": "default"}
            return {self.legacy_theta_key: None, "rope_scaling": None, "rope_parameters": disabled}
        rope_type, scaling = self.select_type(ours), {}
        if rope_type != "default":
            for row in self.scalings[rope_type]:
                scaling |= row.write(ours)
        always = {name: value for row in self.always for name, value in row.write(ours).items()}
        scaling |= always if scaling else {}
        stated = {"rope_theta": ours[self.theta], "rope_type": rope_type}
        rope_parameters = {**stated, **always, **scaling}
        written: dict[str, Any] = {}
        if self.has_legacy_keys:
            written[self.legacy_theta_key] = ours[self.theta]
        for row in self.top_level_keys.get(rope_type, ()):
            written |= row.write(ours)
        if self.scalings and self.has_legacy_keys:
            known_before = {self.legacy_type_key: rope_type, **scaling} if scaling else None
            written["rope_scaling"] = known_before
        return written | {
            "rope_parameters": {self.layers: rope_parameters} if self.layers else rope_parameters
        }


def an_object(theirs: Theirs, key: str) -> Theirs:
    """Return the JSON object stored under a key, or an empty dict for null.

    Raises:
        UnsupportedError: the value is not an object.
    """
    section = theirs.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UnsupportedError(key, section, "must be an object or null.")
    return section


def a_flag(theirs: Theirs, key: str, default: bool = False) -> bool:
    """Return true or false, or the default for null.

    Raises:
        UnsupportedError: the value has another type.
    """
    value = theirs.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedError(key, value, "must be true, false or null.")
    return default if value is None else value


@dataclass(frozen=True)
class Twice:
    """Two `config.json` keys with the same meaning. transformers prefers the first key."""

    primary: str
    other: str
    is_read: bool = True
    """Whether the second key is read if the first key is absent."""
    default: Any = None
    """Value to use if the second key is ignored."""


@dataclass(frozen=True)
class Tensor:
    """Mapping between a model parameter and the Hugging Face tensors that store it.

    Rows with the same tensor name are concatenated along the tensor's first dim.
    """

    ours: str
    """`PART.PARAM` for a layer parameter, or the checkpoint name of a parameter outside layers."""
    theirs: str
    """Tensor name with the placeholder `{layer}` (layer index) and optionally `{expert}`."""
    dims: str
    """Einops pattern from maxpipe's dims to Hugging Face's dims: `d n h -> (n h) d`. A dim that is
    missing on the right is `{expert}`."""
    interleaved: str = ""
    """Name of the dim along which the rows alternate, instead of being concatenated along the
    tensor's first dim."""
    is_column_block: bool = False
    """Whether the rows are concatenated along the tensor's last dim, instead of its first dim. If
    the name has no `{layer}`, these are the rows of all layers."""
    is_scalar: bool = False
    """Whether the tensor has no dims. `dims` then describes it with one dim of size 1."""


WITHOUT_MTP: Mapping[str, Any] = {"mtp_heads": 0, "mtp_kind": "projection"}
"""Values of the `model` section without multi-token prediction heads."""


@dataclass(frozen=True)
class VisionTable:
    """Conversion tables of the vision tower in a composite model."""

    model_type: str
    keys: tuple[Row, ...]
    """Rows for `vision_config`."""
    outer_keys: tuple[Row, ...]
    """Rows for the other keys of the composite model."""
    tensors: tuple[Tensor, ...]
    is_nested: bool = False
    """Whether published tensor names begin with `model.language_model` and, for example,
    `model.visual`, instead of `language_model` and `vision_tower`."""
    text_keys: tuple[Row, ...] = ()
    """Rows for additional keys of the language model's config."""
    other_tensors: tuple[str, ...] = ()
    """Tensor name patterns of components that maxpipe does not support."""


@dataclass(frozen=True)
class Whole:
    """A composite model that contains this model; exports need its vision table."""

    architecture: str
    section: str
    """`config.json` key that holds the component's config."""
    model_type: str
    other_tensors: tuple[str, ...]
    """Tensor name patterns of the other components."""
    inner_type: str = ""
    """`model_type` of the component's config, if a component can have another type."""
    vision: VisionTable | None = None


@dataclass(frozen=True)
class HuggingFace:
    """A transformers class that is equivalent to a model family."""

    architecture: str
    model_type: str
    keys: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    unused: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Name patterns of tensors that some releases saved but never read."""
    superfluous: tuple[str, ...] = ()
    """Name patterns of tensors that folders may contain for layers that do not use them."""
    containers: tuple[Whole, ...] = ()
    mtp_tensors: tuple[Tensor, ...] = ()
    """Tensors of multi-token prediction layers, in addition to those of ordinary layers. `{layer}`
    numbering continues after the decoder layers. Empty if the class has no such layers."""
    mtp_layer_tensors: tuple[Tensor, ...] = ()
    """Tensors of the transformer layer in a multi-token prediction layer, numbered from 0. Empty if
    these tensors have the names of ordinary layers."""
    copies: tuple[tuple[str, str], ...] = ()
    """(parameter, tensor) pairs for tensors duplicated in each multi-token prediction layer."""
    duplicate_keys: tuple[Twice, ...] = ()
    """Pairs of `config.json` keys with the same meaning."""
    split_tensors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(tensor, parts) pairs of names in a layer. Each part can have any number of rows."""
    has_transposed_experts: bool = False
    """Whether the transformers class declares that its expert matrices have the input dim first.
    PEFT reads this declaration (`is_transposed`) and not the computation."""
    modules_without_peft: tuple[str, ...] = ()
    """Names of modules to which PEFT does not apply adapters."""
    other_names: tuple[tuple[str, str], ...] = ()
    """(other name, name in `tensors`) pairs for tensors that some folders name differently. Names
    that start with a dot are the last parts of names."""
    modules: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names in published checkpoints, and the corresponding parts of the names in
    the transformers class, where both differ."""

    def names(self) -> frozenset[str]:
        """Return the `config.json` keys that the tables handle."""
        named = (name for row in self.keys for name in row.names)
        return frozenset(named) | {pair.other for pair in self.duplicate_keys}

    def table_name(self, tensor: str) -> str:
        """Return the name in `tensors` of a tensor with one of `other_names`."""
        for other, name in self.other_names:
            if tensor == other or (other.startswith(".") and tensor.endswith(other)):
                return tensor.removesuffix(other) + name
        return tensor

    def module_name(self, tensor: str) -> str:
        """Return the name in the transformers class of a tensor in a published checkpoint."""
        for published, name in self.modules:
            tensor = tensor.replace(published, name)
        return tensor


def written(keys: Iterable[Row], ours: Ours) -> dict[str, Any]:
    """Return the content of `config.json` for maxpipe config values.

    Raises:
        UnsupportedError: transformers cannot represent a value.
    """
    params: dict[str, Any] = {}
    for row in keys:
        for name, value in row.write(ours).items():
            before = params.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}  # entries of different layer types
            params[name] = value
    return params


def sizes(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp: int,
    vocab: int = 32000,
    epsilon: float = 1e-6,
    tied: bool = False,
    mlp_key: str = "intermediate_size",
) -> tuple[Row, ...]:
    """Return rows for common keys, with the defaults of one transformers class.

    If `kv_heads` is None, the default is the number of heads. If `head_dim` is None, the default is
    the width divided by the number of heads. `mlp_key` is the key for `d_mlp`.
    """
    return (
        Key("num_hidden_layers", "num_layers", layers),
        Key("hidden_size", "d_model", width),
        Key("num_attention_heads", "num_heads", heads),
        Key("num_key_value_heads", "num_kv_heads", kv_heads or (lambda ours: ours["num_heads"])),
        Key(
            "head_dim",
            "head_dim",
            head_dim or (lambda ours: ours["d_model"] // max(ours["num_heads"], 1)),
        ),
        Key(mlp_key, "d_mlp", mlp),
        Key("vocab_size", "vocab_size", vocab),
        Key("rms_norm_eps", "norm_epsilon", epsilon),
        Key("tie_word_embeddings", "tied_embeddings", tied),
        *KEPT,
    )


KEPT = tuple(
    Kept(name)
    for name in (
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp"),
    )
)
"""Keys that do not affect logits."""

BALANCED = tuple(map(Kept, ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")))
"""Expert keys that affect only training and whose meaning differs from that of maxpipe's keys."""


@dataclass(frozen=True)
class OrNone:
    """A numeric key that is disabled by null in `config.json` and by 0 in the maxpipe config."""

    theirs: str
    ours: str
    default: float
    """Value that transformers uses if `config.json` lacks the key."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the value of the key, or 0 if it is null in `config.json`."""
        value = theirs.get(self.theirs, self.default)
        return {self.ours: 0 if value is None else value}

    def write(self, ours: Ours) -> Theirs:
        """Return the value of the key for `config.json`: null instead of 0."""
        return {self.theirs: ours[self.ours] or None}


FULL, WINDOWED = "full_attention", "sliding_attention"
"""Layer type names used by transformers."""

PER_LAYER = "per_layer_config"
"""Key under which a transformers config can override values for individual layers."""


@runtime_checkable
class LayerList(Row, Protocol):
    """A row for a list with one entry per layer, and for a key with the interval of the list."""

    def restated(self, theirs: Theirs) -> tuple[str, Any] | None:
        """Return the key and value of an interval that contradicts the list, or None."""
        ...


YARN = (
    Fixed("attention_factor", (None,)),
    Fixed("beta_fast", (32, 32.0), 32),
    Fixed("beta_slow", (1, 1.0), 1),
)
"""Key-table rows for YaRN parameters other than the factor and the original context length."""

ENDS = (
    Tensor("embedding", "model.embed_tokens.weight", "v d -> v d"),
    Tensor("final_norm.scale", "model.norm.weight", "d -> d"),
    Tensor("head", "lm_head.weight", "d v -> v d"),
)

_LAYER = "model.layers.{layer}."

ATTENTION = (
    Tensor("attention.query", _LAYER + "self_attn.q_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.key", _LAYER + "self_attn.k_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.value", _LAYER + "self_attn.v_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.out", _LAYER + "self_attn.o_proj.weight", "n h d -> d (n h)"),
)

BIASES = tuple(
    Tensor(f"attention.{ours}_bias", f"{_LAYER}self_attn.{theirs}_proj.bias", "n h -> (n h)")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
)

SINKS = (
    Tensor("attention.out_bias", _LAYER + "self_attn.o_proj.bias", "d -> d"),
    Tensor("attention.sinks", _LAYER + "self_attn.sinks", "n -> n"),
)
"""Tensor-table rows for output biases and attention sinks, used in addition to `BIASES`."""

JOINT_NORMS = (
    Tensor("attention.query_norm", _LAYER + "self_attn.q_norm.weight", "n h -> (n h)"),
    Tensor("attention.key_norm", _LAYER + "self_attn.k_norm.weight", "n h -> (n h)"),
)
"""Tensor-table rows for query and key norms that normalize all heads of a token together."""

HEAD_NORMS = (
    Tensor("attention.query_norm", _LAYER + "self_attn.q_norm.weight", "h -> h"),
    Tensor("attention.key_norm", _LAYER + "self_attn.k_norm.weight", "h -> h"),
)

FUSED = (
    Tensor("attention.query", _LAYER + "self_attn.qkv_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.key", _LAYER + "self_attn.qkv_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.value", _LAYER + "self_attn.qkv_proj.weight", "d n h -> (n h) d"),
    ATTENTION[-1],
    Tensor("mlp.gate", _LAYER + "mlp.gate_up_proj.weight", "d f -> f d"),
    Tensor("mlp.up", _LAYER + "mlp.gate_up_proj.weight", "d f -> f d"),
    Tensor("mlp.down", _LAYER + "mlp.down_proj.weight", "f d -> d f"),
)
"""Tensor-table rows for attention and MLP with fused projections."""

MLP = (
    Tensor("mlp.gate", _LAYER + "mlp.gate_proj.weight", "d f -> f d"),
    Tensor("mlp.up", _LAYER + "mlp.up_proj.weight", "d f -> f d"),
    Tensor("mlp.down", _LAYER + "mlp.down_proj.weight", "f d -> d f"),
)


def experts(prefix: str, router: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """Return tensor-table rows for a router and experts. `prefix` precedes the tensor names."""
    below, each = f"{_LAYER}{prefix}.", f"{_LAYER}{prefix}.experts.{{expert}}."
    return (
        Tensor("experts.router", f"{below}{router}.weight", "d expert -> expert d"),
        Tensor("experts.gate", f"{each}{gate}.weight", "d expert f -> f d"),
        Tensor("experts.up", f"{each}{up}.weight", "d expert f -> f d"),
        Tensor("experts.down", f"{each}{down}.weight", "expert f d -> d f"),
    )


JOINED_EXPERTS = (
    Tensor("experts.router", _LAYER + "mlp.router.weight", "d e -> e d"),
    Tensor("experts.logit_bias", _LAYER + "mlp.router.bias", "e -> e"),
    Tensor("experts.gate", _LAYER + "mlp.experts.gate_up_proj", "d e f -> e d f", "f"),
    Tensor("experts.up", _LAYER + "mlp.experts.gate_up_proj", "d e f -> e d f", "f"),
    Tensor("experts.gate_bias", _LAYER + "mlp.experts.gate_up_proj_bias", "e f -> e f", "f"),
    Tensor("experts.up_bias", _LAYER + "mlp.experts.gate_up_proj_bias", "e f -> e f", "f"),
    Tensor("experts.down", _LAYER + "mlp.experts.down_proj", "e f d -> e f d"),
    Tensor("experts.down_bias", _LAYER + "mlp.experts.down_proj_bias", "e d -> e d"),
)
"""Tensor-table rows for a router and experts with biases; all experts share one tensor per row."""


def norms(**names: str) -> tuple[Tensor, ...]:
    """Return tensor-table rows for a layer's norm scales. `names` maps norms to tensor names."""
    return tuple(
        Tensor(f"{part}.scale", f"{_LAYER}{name}.weight", "d -> d") for part, name in names.items()
    )


NORMED = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
"""Tensor-table rows for the pre-norms of attention and MLP."""

SANDWICH = norms(
    attention_norm="input_layernorm",
    attention_after_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after_norm="post_feedforward_layernorm",
)
"""Tensor-table rows for the pre-norms and post-norms of attention and MLP."""

LLAMA = (*ENDS, *NORMED, *ATTENTION, *MLP)
"""Tensor table of Llama, whose rows other families share."""
