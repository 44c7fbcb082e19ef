"""The one description of a model, without jax: what everything else reads.

A model is a row of layers between an embedding and its output heads. Each layer is of a *kind*, and
a kind is a row of residual branches: `x + scale * after(part(before(x)))`. A part (attention, an
MLP, experts, a norm) declares its parameters, the names of its activations, its operations, and
what its backward needs. Counting, initialisation, sharding, the predictions of `plan`, import and
export read this; there is no second list of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

Dims = tuple[tuple[int, str], ...]
"""Sizes of an array's dims and their logical axes. Activations leave out batch and tokens."""

Number = float | str
"""A number, or the name of one that differs by layer (`Model.values`)."""


class Normal(NamedTuple):
    """Draws of mean 0 and variance `gain**2 / fan_in`."""

    fan_in: int
    gain: float = 1.0


class Constant(NamedTuple):
    """One value everywhere."""

    value: float


class Made(NamedTuple):
    """What follows from other parameters of the layer (`model.adapters`)."""

    of: tuple[str, str]


class Entries(NamedTuple):
    """A value for each entry of a vector."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Param:
    """One parameter: its shape by logical axes, and what it starts from."""

    dims: Dims
    init: Normal | Constant | Entries | Made
    decays: bool = True
    """Whether weight decay applies."""
    trainable: bool = True
    """Whether it has a gradient, moments and updates. `Kind.params` and `Ends.params` say so of a
    model's parameters."""
    own_dtype: str = ""
    """Its own type, in storage and where it is used, whatever types a config has."""
    num_contracted_dims: int = 0
    """Of a weight that is used in nothing but one product, which `model.matmul` may turn to 8 bits:
    how many of its first dims the product sums over."""
    linear: int = 0
    """The same of one that `model.matmul` leaves as it is."""

    @property
    def is_of_heads(self) -> bool:
        """Whether it belongs to attention."""
        return "head_dim" in self.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes alone."""
        return tuple(size for size, _ in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes alone."""
        return tuple(axis for _, axis in self.dims)


class Follows(NamedTuple):
    """How a step moves a parameter without a gradient: each entry up where the statistic's entry is
    below the mean of all, down where it is above (arXiv:2408.15664).
    """

    statistic: str
    """Of the same part, with the parameter's dims."""
    rate: float
    """By how much."""


class Adapter(NamedTuple):
    """A change of a matrix by a product of two narrow ones (`model.low_rank`)."""

    scale: float
    """What the product is multiplied with."""
    dropout: float
    """Fraction of its inputs that are set to zero in training."""
    num_contracted_dims: int
    """Over how many of the matrix' first dims its product sums."""


class Matmul(NamedTuple):
    """A product of each token's activations with a parameter of the part."""

    param: str
    needed: float = 1.0
    """Share of the parameter that a token uses: what the model's FLOPs count."""
    computed: float = 1.0
    """Share that is multiplied with each token."""


Stands = Literal["scores", "mask", "block"]
"""Of pairs of tokens: their `scores`, of all heads, which the backward reads again; a `mask`, one
for all heads, beside a kernel; or scores of a `block` of them at a time, which the backward
computes once more, as it does behind a mask."""


class Scores(NamedTuple):
    """Attention's two products over pairs of tokens."""

    heads: int
    axis: str
    """Logical axis of the heads."""
    head_dim: float
    """Of keys and of values; their mean where these differ."""
    window: str = ""
    """Per-layer value (`Model.values`) with the number of tokens that a query sees, 0 for all.
    The model needs no more pairs; all are computed, as one program serves all values."""
    storage: Stands = "scores"
    """What stands in memory."""
    query: Dims = ()
    """Of the activations that are scored and mixed, their dims: of queries,"""
    keys: tuple[Dims, ...] = ()
    """of keys and of values,"""
    mixed: Dims = ()
    """and of what is mixed."""


class Products(NamedTuple):
    """Products of activations with each other, of which there are as many for each token."""

    heads: int
    axis: str
    """Logical axis of the heads."""
    needed: float
    """Multiply-adds of a token and a head that the model's FLOPs count."""
    computed: float
    """Those that are computed."""


Operation = Matmul | Scores | Products


@dataclass(frozen=True)
class Held:
    """Arrays that are in memory at the same time: copies x dims, each for every token."""

    compute_dtype: tuple[tuple[float, Dims], ...] = ()
    """In the compute type."""
    float32: tuple[tuple[float, Dims], ...] = ()
    """In float32."""
    one_byte: tuple[tuple[float, Dims], ...] = ()
    """In one byte."""
    blocks: tuple[tuple[float, Dims], ...] = ()
    """In the compute type, for each block of queries a copy for the tokens that it sees at most
    (`count.scored_keys`)."""
    token_independent: tuple[Dims, ...] = ()
    """In the compute type, not for every token but once: parameters and their like."""
    float32_token_independent: tuple[Dims, ...] = ()
    """The same in four bytes."""
    documents: tuple[tuple[float, Dims], ...] = ()
    """In the compute type, for each document of a row that a kernel is given at most
    (`count.packed_documents`)."""
    pairs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """For each scored pair of tokens, over all heads: copies in the compute type, copies in
    float32, and bytes of other types."""

    def __add__(self, other: Held) -> Held:
        narrow, wide, rest = (sum(pair) for pair in zip(self.pairs, other.pairs, strict=True))
        return Held(
            self.compute_dtype + other.compute_dtype,
            self.float32 + other.float32,
            self.one_byte + other.one_byte,
            self.blocks + other.blocks,
            self.token_independent + other.token_independent,
            self.float32_token_independent + other.float32_token_independent,
            self.documents + other.documents,
            (narrow, wide, rest),
        )


NOTHING = Held()


class Summary(NamedTuple):
    """A number that a run writes of what layers return besides their output."""

    of: str
    """Name of the loss, or of the statistic."""
    take: Literal["mean", "largest", "smallest"]
    """`mean`: of a loss, over its layers and all target tokens, without its coefficient. `largest`
    and `smallest`: of a statistic, that entry of any layer, as a multiple of the mean of the
    layer's entries."""
    unit: str
    meaning: str


@runtime_checkable
class Part(Protocol):
    """A piece of a layer. What its class in `maxpipe.models.layers` declares, a module computes."""

    @property
    def params(self) -> Mapping[str, Param]:
        """Parameters by name, in the order in which they are drawn."""
        ...

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Named results of matmuls that may be kept, in the order in which they are computed."""
        ...

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """By the name of an activation other arrays, in float32, that are kept where it is kept.

        They are named in the forward as it is named: what follows from them is not computed again.
        """
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Matmuls and scores of a forward pass."""
        ...

    @property
    def traffic(self) -> Held:
        """Activations that a forward pass moves through memory, scores left out."""
        ...

    @property
    def backward_peak(self) -> Held:
        """What its backward has in memory at its fullest moment, besides weights."""
        ...

    @property
    def barrier_copies(self) -> Held:
        """Of `working`, copies that compilers make where they drop its optimization barriers."""
        return NOTHING

    @property
    def residuals(self) -> Held:
        """What differentiating the part keeps where nothing is recomputed."""
        ...

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """What the gradients of its parameters wait for when the backward is split.

        `recomputed`: after the forward has been run again. Then neither the cotangent of the
        part's output nor a norm's input is among it: they follow from what the layer keeps
        (`Kind.num_streams`). `normed`: its output is, for the norm behind it.
        """
        ...

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Arrays that it returns besides its output, summed over tokens; without a gradient."""
        return {}

    @property
    def balance_updates(self) -> Mapping[str, Follows]:
        """Parameters that are not trained, and move with what the part reports."""
        return {}

    @property
    def losses(self) -> Mapping[str, float]:
        """Scalar losses that it returns, sums over target tokens, with their coefficients."""
        return {}

    metrics: ClassVar[Mapping[str, Summary]] = {}
    """What a run writes of both, by tag."""

    @property
    def note(self) -> str:
        """How it is computed, where a config does not say; for plans and for the start of a run."""
        return ""


@dataclass(frozen=True)
class Branch:
    """`x + scale * dropout(after(part(before(x))))`; either norm may be missing."""

    name: str
    part: Part
    pre_norm: Part | None
    post_norm: Part | None = None
    dropout: float = 0.0
    """Fraction of the outputs that are set to zero in training."""
    scale: float = 1.0

    @property
    def parts(self) -> Mapping[str, Part]:
        """Parts by the name under which their parameters are stored."""
        found = {
            f"{self.name}_norm": self.pre_norm,
            self.name: self.part,
            f"{self.name}_after_norm": self.post_norm,
        }
        return {name: part for name, part in found.items() if part is not None}


@dataclass(frozen=True, eq=False)  # compared by identity: what is counted of it can be cached
class Kind:
    """A layer: residual branches one after the other."""

    branches: tuple[Branch, ...]
    frozen: frozenset[tuple[str, ...]] = frozenset()
    """(part, name) of parameters that are not trained, whatever their part declares."""
    stored: Mapping[tuple[str, str], Param] = field(default_factory=dict)
    """Parameters in place of those that parts declare, and beside them."""
    adapters: Mapping[tuple[str, str], Adapter] = field(default_factory=dict)
    """(part, name) of matrices that have one."""

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """All parts by name, in order."""
        return {name: part for branch in self.branches for name, part in branch.parts.items()}

    @cached_property
    def declared(self) -> Mapping[tuple[str, str], Param]:
        """(part, name) -> parameter as its part declares it."""
        return {
            (name, param): declared
            for name, part in self.parts.items()
            for param, declared in part.params.items()
        }

    @property
    def params_in_init_order(self) -> Mapping[tuple[str, str], Param]:
        """(part, name) -> parameter, in the order in which they are drawn: first those of parts."""
        return {**self.declared, **self.stored, **self.declared}

    @cached_property
    def params(self) -> Mapping[tuple[str, str], Param]:
        """(part, name) -> parameter as it is stored."""
        found = {**self.declared, **self.stored}
        return {name: _unless(param, name in self.frozen) for name, param in found.items()}

    @cached_property
    def balance_updates(self) -> Mapping[tuple[str, str], Follows]:
        """(part, name) -> how a parameter moves without a gradient, unless it is frozen."""
        return {
            (name, param): how
            for name, part in self.parts.items()
            for param, how in part.balance_updates.items()
            if (name, param) not in self.frozen
        }

    @cached_property
    def num_masks(self) -> int:
        """Dropout masks, one for each token and entry of the residual stream."""
        return sum(branch.dropout > 0 for branch in self.branches)

    @property
    def num_streams(self) -> int:
        """Arrays of the stream's width that give all others for a split backward that recomputes.

        The layer's input and the cotangent of its output; of each branch its part's output if a
        norm follows, else the sum behind it unless that is the layer's output.
        """
        last = self.branches[-1]
        return 2 + sum(each.post_norm is not None or each is not last for each in self.branches)

    @cached_property
    def activations(self) -> Mapping[str, Dims]:
        """Named activations of all parts."""
        return _joined(part.activations for part in self.parts.values())

    @cached_property
    def saved_with(self) -> Mapping[str, Dims]:
        """All arrays in float32 that are kept with some activation."""
        return _joined(found for part in self.parts.values() for found in part.saved_with.values())

    @cached_property
    def statistics(self) -> Mapping[str, Dims]:
        """Arrays that a layer of this kind reports."""
        return _joined(part.statistics for part in self.parts.values())

    @cached_property
    def losses(self) -> Mapping[str, float]:
        """Coefficients of the scalar losses that a layer of this kind returns."""
        return _joined(part.losses for part in self.parts.values())


def _unless(param: Param, frozen: bool) -> Param:
    """The parameter, or the same not trained."""
    return replace(param, trainable=False) if frozen else param


def _joined(mappings: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for mapping in mappings:
        assert found.keys().isdisjoint(mapping), "two parts of a layer use one name"
        found |= mapping
    return found


@dataclass(frozen=True)
class Ahead:
    """Heads that predict tokens further ahead, in training only (arXiv:2404.19737).

    Head k, counted from 1, predicts the token k places behind the ordinary target. Of the final
    norm's output h it projects `h + silu(h W_k)` (arXiv:2401.10774) to the vocabulary, as the
    ordinary head projects h; W_k starts at 0, so that all heads start alike.
    """

    num_heads: int
    d_model: int
    loss_weight: float
    """Of the mean of their losses, in the objective."""

    @property
    def params_of_one(self) -> Mapping[tuple[str, ...], Param]:
        """Parameters of one head, in the order in which they are drawn."""
        dims = ((self.d_model, "embed"), (self.d_model, "norm"))
        return {("transform",): Param(dims, Constant(0.0))}

    @property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Of all heads, stacked: what each starts from is said of one."""
        stack = (self.num_heads, "ahead")
        return {
            name: replace(param, dims=(stack, *param.dims))
            for name, param in self.params_of_one.items()
        }

    @property
    def losses(self) -> Mapping[str, float]:
        """Coefficients of the heads' losses by name."""
        weight = self.loss_weight / self.num_heads
        return {f"ahead_{number}": weight for number in range(1, self.num_heads + 1)}


@dataclass(frozen=True)
class LayersAhead(Ahead):
    """Heads of a whole layer each, one behind the other (arXiv:2412.19437, section 2.2).

    Head k reads h of the head before it and the embedding e of the token k places further on:
    `h_k = norm(layer_k([norm(e); norm(h_{k-1})] W_k))`, each norm with a scale of its own, and
    projects h_k to the vocabulary. The embedding's table and the output projection are those of the
    network. The paper leaves open where its h is normed. Here it is always what is projected: h_0
    is the final norm's output. So does transformers with the published weights, of which there is
    one head. The embedding comes first, as in the published `eh_proj`.
    """

    layer_type_name: str
    """Of the network's last layer; the layers count as those behind it."""
    kind: Kind
    norm: Part
    """In front of the projection twice, and behind the layer."""

    @property
    def params_of_one(self) -> Mapping[tuple[str, ...], Param]:
        """Three norms, a projection and a layer."""
        dims = ((2 * self.d_model, "embed"), (self.d_model, "norm"))
        found: dict[tuple[str, ...], Param] = {
            (name, param): declared
            for name in ("embedding_norm", "hidden_norm")
            for param, declared in self.norm.params.items()
        }
        found["projection",] = Param(dims, Normal(2 * self.d_model))
        found |= {("layer", *name): param for name, param in self.kind.params.items()}
        return found | {("norm", name): param for name, param in self.norm.params.items()}


@dataclass(frozen=True)
class Ends:
    """What is in front of the first layer and behind the last one."""

    embedding: Param
    norm: Part
    """In front of the output projection; its parameters are stored as `final_norm`."""
    head: Param | None
    """The output projection. None: the embedding's table is used as well."""
    embed_scale: float = 1.0
    """Factor of the embedding, rounded to the compute type."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    final_logit_softcapping: float = 0.0
    """Scaled logits become `cap * tanh(logits / cap)`. 0: as they are."""
    mtp: Ahead | None = None
    frozen: frozenset[tuple[str, ...]] = frozenset()
    """Where parameters are stored that are not trained."""

    @cached_property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Parameters by where they are stored."""
        found = {("embedding",): self.embedding}
        found |= {("final_norm", name): param for name, param in self.norm.params.items()}
        if self.mtp is not None:
            found |= {("ahead", *name): param for name, param in self.mtp.params.items()}
        found |= {} if self.head is None else {("head",): self.head}
        return {name: _unless(param, name in self.frozen) for name, param in found.items()}

    @property
    def losses(self) -> Mapping[str, float]:
        """Coefficients of the losses of heads ahead."""
        return {} if self.mtp is None else self.mtp.losses

    @property
    def mtp_layers(self) -> LayersAhead | None:
        """Heads ahead, if they are layers."""
        return self.mtp if isinstance(self.mtp, LayersAhead) else None

    @cached_property
    def balance_updates(self) -> Mapping[tuple[str, str], Follows]:
        """(part, name) -> how a parameter of layers ahead moves without a gradient."""
        if (heads := self.mtp_layers) is None:
            return {}
        return {
            name: how
            for name, how in heads.kind.balance_updates.items()
            if ("ahead", "layer", *name) not in self.frozen
        }


@dataclass(frozen=True, eq=False)
class Model:
    """A whole model."""

    layer_types: Mapping[str, Kind]
    layers: tuple[str, ...]
    """The kind of each layer, in network order."""
    ends: Ends
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers in which layers differ, for each of `all_layers`: read by the layer's index."""

    def map_parts(self, change: Callable[[Part], Part]) -> Model:
        """The same with what `change` makes of the part of each branch; itself if nothing else."""

        def changed(branch: Branch) -> Branch:
            part = change(branch.part)
            return branch if part is branch.part else replace(branch, part=part)

        kinds = dict(self.layer_types)
        for name, kind in self.layer_types.items():
            branches = tuple(map(changed, kind.branches))
            if any(new is not old for new, old in zip(branches, kind.branches, strict=True)):
                kinds[name] = replace(kind, branches=branches)
        same = all(kinds[name] is kind for name, kind in self.layer_types.items())
        return self if same else replace(self, layer_types=kinds)

    @property
    def all_layers(self) -> tuple[str, ...]:
        """The kind of each layer, with those of heads ahead behind the network's own."""
        heads = self.ends.mtp_layers
        return self.layers + (() if heads is None else (heads.layer_type_name,) * heads.num_heads)

    @cached_property
    def losses(self) -> Mapping[str, float]:
        """Coefficient of each scalar loss that some layer returns; those of heads are in `ends`."""
        found: dict[str, float] = {}
        for kind in self.layer_types.values():
            found |= kind.losses
        return found

    @cached_property
    def metrics(self) -> Mapping[str, Summary]:
        """Numbers that a run writes of what layers return, by tag."""
        found: dict[str, Summary] = {}
        for kind in self.layer_types.values():
            for part in kind.parts.values():
                found |= part.metrics
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of its parts, each once."""
        parts = (part for kind in self.layer_types.values() for part in kind.parts.values())
        return tuple(dict.fromkeys(part.note for part in parts if part.note))

    @cached_property
    def activations(self) -> Mapping[str, tuple[str, ...]]:
        """What may be kept by name: each activation, and by the names of presets several.

        `matmuls` are all, and a branch's name stands for those of its part. Each activation stands
        for what is kept with it, too.
        """
        single: dict[str, tuple[str, ...]] = {}
        presets: dict[str, dict[str, None]] = {"matmuls": {}}
        for kind in self.layer_types.values():
            for branch in kind.branches:
                part, found = branch.part, presets.setdefault(branch.name, {})
                for name in part.activations:
                    own = single.get(name, (name,)) + tuple(part.saved_with.get(name, ()))
                    single[name] = tuple(dict.fromkeys(own))
                    found |= dict.fromkeys(single[name])
                presets["matmuls"] |= found
        return single | {preset: tuple(names) for preset, names in presets.items()}
