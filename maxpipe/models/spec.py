"""Model specs, the single source of truth for all other code. The module does not import jax.

A model is a stack of layers between an embedding and its output heads. Each layer has a *layer
type*, which is a sequence of residual branches: `x + scale * after(part(before(x)))`. A sublayer
(`Part`: attention, an MLP, experts or a norm) declares its parameters, the names of its
activations, its operations and the memory that its backward pass needs. Parameter counts,
initialization, sharding, the forecasts of `plan`, import and export are all derived from this spec;
no other list of weights exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from maxpipe.models.initialization import Constant, Entries, Made, Normal, TokenHash
from maxpipe.models.layer_reports import Follows, Summary

Dims = tuple[tuple[int, str], ...]
"""Size and logical axis of each dim of an array. Dims of activations exclude the batch and token
dims."""

Number = float | str
"""A number, or the name of a per-layer value (`Model.values`)."""


@dataclass(frozen=True)
class Param:
    """A parameter: its shape, its logical axes and its initialization."""

    dims: Dims
    init: Normal | Constant | Entries | Made | TokenHash
    decays: bool = True
    """Whether weight decay applies to the parameter."""
    trainable: bool = True
    """Whether the parameter has a gradient, optimizer state and updates. A model's `frozen`
    patterns override this value in `LayerType.params` and `Ends.params`."""
    own_dtype: str = ""
    """Dtype used for storage and computation in place of the dtypes in the config."""
    num_contracted_dims: int = 0
    """Number of leading dims that the matmul contracts. Set for weights that are used by exactly
    one matmul and that `model.matmul` may quantize to 8 bits."""
    linear: int = 0
    """Same as `num_contracted_dims`, for weights that are gathered in the compute dtype.
    `model.matmul` does not quantize them, or quantizes them only in the matmul."""
    expert_dim: int = -1
    """Index of the dim over which the matrices of several experts are stacked, or -1. The counts of
    contracted dims exclude this dim."""

    @property
    def is_of_heads(self) -> bool:
        """Whether the parameter belongs to attention."""
        return "head_dim" in self.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dim of the parameter."""
        return tuple(size for size, _ in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axis of each dim of the parameter."""
        return tuple(axis for _, axis in self.dims)


class Adapter(NamedTuple):
    """Low-rank adapter of a matrix: the product of two narrow matrices
    (`maxpipe.models.adapters`).
    """

    scale: float
    """Factor by which the product of the two matrices is multiplied."""
    dropout: float
    """Fraction of the adapter's inputs that are set to zero in training."""
    num_contracted_dims: int
    """Number of leading dims of the adapted matrix that its matmul contracts."""
    expert_dim: int = -1
    """Index of the dim that stacks the matrices of several experts, or -1 (`Param.expert_dim`)."""


class Matmul(NamedTuple):
    """A matmul of each token's activations with a parameter of the sublayer."""

    param: str
    needed: float = 1.0
    """Fraction of the parameter's elements that one token needs, to count the model's FLOPs."""
    computed: float = 1.0
    """Fraction of the parameter's elements that the matmul actually multiplies per token."""


ScoreStorage = Literal["scores", "mask", "block", "none"]
"""Token-pair arrays of attention that are stored in memory. `scores`: the scores of all heads,
which the backward pass reads. `mask`: one mask for all heads, used as input of a fused kernel.
`block`: the scores of one block of pairs at a time. Scores that are not stored are recomputed."""


class Scores(NamedTuple):
    """The two attention matmuls over pairs of tokens."""

    heads: int
    axis: str
    """Logical axis of the attention heads."""
    head_dim: float
    """Head dim of keys and values, or the mean of the two if they differ."""
    window: str = ""
    """Name of the per-layer value (`Model.values`) that stores the attention window in tokens; a
    window of 0 means all tokens. Pairs outside the window are not counted as model FLOPs, although
    they are computed, because one program serves all layers."""
    storage: ScoreStorage = "scores"
    """Token-pair arrays that are stored in memory."""
    query: Dims = ()
    """Dims of the queries."""
    keys: tuple[Dims, ...] = ()
    """Dims of the keys and of the values."""
    mixed: Dims = ()
    """Dims of the attention output."""
    chunked: bool = False
    """Whether a query token attends only to tokens of its chunk of `window` tokens."""


class Products(NamedTuple):
    """Matmuls between two activations whose cost per token is constant."""

    heads: int
    axis: str
    """Logical axis of the heads."""
    needed: float
    """Multiply-adds per token and head that count as model FLOPs."""
    computed: float
    """Multiply-adds per token and head that are actually computed."""


Operation = Matmul | Scores | Products


@dataclass(frozen=True)
class Held:
    """Arrays that are live in memory at the same time.

    Each entry holds the number of arrays per token and the dims of each array.
    """

    compute_dtype: tuple[tuple[float, Dims], ...] = ()
    """Arrays in the compute dtype."""
    float32: tuple[tuple[float, Dims], ...] = ()
    """Arrays in float32."""
    one_byte: tuple[tuple[float, Dims], ...] = ()
    """Arrays with one byte per element."""
    blocks: tuple[tuple[float, Dims], ...] = ()
    """Arrays in the compute dtype that hold up to `count.scored_keys` keys each; there is one such
    array per query block."""
    token_independent: tuple[Dims, ...] = ()
    """Arrays in the compute dtype that are stored once instead of per token, such as parameters."""
    float32_token_independent: tuple[Dims, ...] = ()
    """Arrays with four bytes per element that are stored once instead of per token."""
    documents: tuple[tuple[float, Dims], ...] = ()
    """Arrays in the compute dtype; there is one such array per packed document in a sequence, and
    at most `count.packed_documents`."""
    pairs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Memory per computed token pair, summed over all heads: number of elements in the compute
    dtype, number of elements in float32, and bytes in other dtypes."""
    shared_pairs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Same as `pairs`, for arrays without a dim of heads."""

    selections: int = 0
    """Arrays with one bit for each pair of a query token and a key, in words of four bytes per key
    and block of query tokens (`count.selection_words`)."""

    def __add__(self, other: Held) -> Held:
        def add(name: str) -> Any:
            ours, theirs = getattr(self, name), getattr(other, name)
            return (
                tuple(map(sum, zip(ours, theirs, strict=True)))
                if "pairs" in name
                else ours + theirs
            )

        return Held(**{each.name: add(each.name) for each in fields(self)})


NOTHING = Held()


@runtime_checkable
class Part(Protocol):
    """A sublayer, such as attention or an MLP. Subclasses in `maxpipe.models.layers` declare it,
    and a module in `maxpipe.nn` computes it.
    """

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the sublayer's parameters, keyed by name, in the order of initialization."""
        ...

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named matmul results that can be saved, in the order of computation."""
        ...

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """Return the float32 arrays to save along with each activation, keyed by activation name.

        The forward pass marks these arrays with jax's `checkpoint_name`, so results that depend
        only on them are not recomputed.
        """
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the matmul and attention-score operations of one forward pass."""
        ...

    @property
    def traffic(self) -> Held:
        """Return the activations that a forward pass reads from and writes to memory, excluding
        scores.
        """
        ...

    @property
    def backward_peak(self) -> Held:
        """Return the arrays in memory at the peak of the backward pass, excluding weights."""
        ...

    @property
    def backward_moments(self) -> tuple[tuple[Held, float | None], ...]:
        """Return candidates for the peak of the backward pass on TPUs: arrays, and the fraction of
        the gathered weights that is live (None: during the weight gradients). If empty, the peak is
        `backward_peak`, with the weights and gradients of the layer.
        """
        return ()

    @property
    def barrier_copies(self) -> Held:
        """Return the arrays in `backward_peak` that exist only if the compiler drops optimization
        barriers.
        """
        return NOTHING

    @property
    def residuals(self) -> Held:
        """Return the residuals that differentiation saves when nothing is recomputed."""
        ...

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the arrays that the weight gradients need when the backward pass is split.

        `recomputed`: the forward pass has been run again. The result then excludes the cotangent of
        the sublayer's output and the inputs of norms, because both are derived from arrays that the
        layer keeps (`LayerType.num_residual_arrays`). `normed`: a post-norm or hyper-connection
        reads the sublayer's output, which is therefore saved.
        """
        ...

    @property
    def statistics(self) -> Mapping[str, Dims]:
        """Return the arrays that the sublayer reports along with its output: sums over tokens, with
        gradients stopped.
        """
        return {}

    @property
    def balance_updates(self) -> Mapping[str, Follows]:
        """Return the update rules for parameters without a gradient, based on the sublayer's
        statistics.
        """
        return {}

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the sublayer's scalar losses, which are sums over target
        tokens.
        """
        return {}

    metrics: ClassVar[Mapping[str, Summary]] = {}
    """Metrics derived from the losses and statistics, keyed by tag."""

    @property
    def note(self) -> str:
        """Describe how the sublayer is computed. The description is shown in plans and on the
        start-up screen of a run.
        """
        return ""


@dataclass(frozen=True)
class Branch:
    """A residual branch, `x + scale * dropout(after(part(before(x))))`. Both norms are optional.

    Two branches can share one residual sum: `x + dropout(norm(first(x) + second(x)))` with a
    `sum_norm`, and `x + first(before(x)) + second(before(x))` with `shares_input`.
    """

    name: str
    part: Part
    pre_norm: Part | None
    post_norm: Part | None = None
    dropout: float = 0.0
    """Fraction of the branch's outputs that are set to zero in training."""
    scale: float = 1.0
    sum_norm: Part | None = None
    """If set, this branch has the same input as the preceding branch, and this norm is applied to
    the sum of the outputs of both branches."""
    shares_input: bool = False
    """Whether this branch, which has no pre-norm, reads the same normalized array as the preceding
    branch. The outputs of both branches are added to the residual stream together."""
    connection: Part | None = None
    """Hyper-connection between the branch and several residual streams (`Ends.num_streams`). If
    None, the branch reads one stream and its output is added to that stream."""

    @property
    def parts(self) -> Mapping[str, Part]:
        """Return the sublayer and its norms, keyed by the name under which their parameters are
        stored.
        """
        parts = {
            f"{self.name}_connection": self.connection,
            f"{self.name}_norm": self.pre_norm,
            self.name: self.part,
            f"{self.name}_after_norm": self.post_norm,
            f"{self.name}_sum_norm": self.sum_norm,
        }
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True, eq=False)  # compared by identity, so that counts can be cached per object
class LayerType:
    """A layer type: a sequence of residual branches."""

    branches: tuple[Branch, ...]
    frozen: frozenset[tuple[str, ...]] = frozenset()
    """(sublayer, name) of each parameter that is frozen regardless of the sublayer's
    declaration."""
    stored: Mapping[tuple[str, str], Param] = field(default_factory=dict)
    """Parameters that replace or extend those declared by the sublayers."""
    adapters: Mapping[tuple[str, str], Adapter] = field(default_factory=dict)
    """Low-rank adapters, keyed by the (sublayer, name) of the adapted matrix."""
    output_scale: Part | None = None
    """Sublayer that multiplies the layer's output."""
    input_stored_as: str = ""
    """Name of the carried array (`Model.carried`) that the layer sets to its input."""
    added_arrays: tuple[str, ...] = ()
    """Names of carried arrays. The layer adds the first array to its output. It replaces each array
    by the next one and the last by zeros, so that the n-th layer adds the n-th array."""
    in_compute_dtype: bool = False
    """Whether matmuls use the compute dtype even if `model.matmul` selects another format."""

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """Return all sublayers in order, keyed by name."""
        parts = {name: part for branch in self.branches for name, part in branch.parts.items()}
        return parts | ({"output": self.output_scale} if self.output_scale is not None else {})

    @cached_property
    def declared(self) -> Mapping[tuple[str, str], Param]:
        """Return a dict from (sublayer, name) to each parameter as declared by its sublayer."""
        return {
            (name, param): declared
            for name, part in self.parts.items()
            for param, declared in part.params.items()
        }

    @property
    def params_in_init_order(self) -> Mapping[tuple[str, str], Param]:
        """Return a dict from (sublayer, name) to parameter in the order of initialization, with
        declared parameters first.
        """
        return {**self.declared, **self.stored, **self.declared}

    @cached_property
    def params(self) -> Mapping[tuple[str, str], Param]:
        """Return a dict from (sublayer, name) to stored parameter."""
        params = {**self.declared, **self.stored}
        own = self.in_compute_dtype
        return {name: _unless(param, name in self.frozen, own) for name, param in params.items()}

    @cached_property
    def balance_updates(self) -> Mapping[tuple[str, str], Follows]:
        """Return a dict from (sublayer, name) to the update rule of each parameter that has no
        gradient and is not frozen.
        """
        return {
            (name, param): how
            for name, part in self.parts.items()
            for param, how in part.balance_updates.items()
            if (name, param) not in self.frozen
        }

    @cached_property
    def num_masks(self) -> int:
        """Return the number of dropout masks, which have the dims of the residual stream."""
        return sum(branch.dropout > 0 for branch in self.branches)

    @property
    def num_residual_arrays(self) -> int:
        """Return the number of residual-stream arrays that a split backward pass keeps for
        recomputation.

        Two of these arrays are the layer's input and the cotangent of its output. For each branch,
        the sublayer's output is also included if the sublayer is followed by a post-norm.
        Otherwise, the residual sum is included, unless this sum is the layer's output or the next
        branch shares it. The sum of two branches is included if a norm follows it.
        """
        following = (*(branch.shares_input for branch in self.branches[1:]), True)
        return 2 + sum(
            (branch.post_norm is not None or not shared) + (branch.sum_norm is not None)
            for branch, shared in zip(self.branches, following, strict=True)
        )

    @cached_property
    def activations(self) -> Mapping[str, Dims]:
        """Return the named activations of all sublayers."""
        return _joined(part.activations for part in self.parts.values())

    @cached_property
    def saved_with(self) -> Mapping[str, Dims]:
        """Return all float32 arrays that are saved along with an activation."""
        return _joined(saved for part in self.parts.values() for saved in part.saved_with.values())

    @cached_property
    def statistics(self) -> Mapping[str, Dims]:
        """Return the statistics reported by a layer of this type."""
        return _joined(part.statistics for part in self.parts.values())

    @cached_property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the scalar losses in a layer of this type."""
        return _joined(part.losses for part in self.parts.values())


def _unless(param: Param, frozen: bool, unquantized: bool = False) -> Param:
    """Return the parameter, which is not trained or not quantized if these arguments are set."""
    if unquantized and param.num_contracted_dims:
        param = replace(param, num_contracted_dims=0, linear=param.num_contracted_dims)
    return replace(param, trainable=False) if frozen else param


def _joined(mappings: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    joined: dict[str, Any] = {}
    for mapping in mappings:
        assert joined.keys().isdisjoint(mapping), "two sublayers of a layer have the same name"
        joined |= mapping
    return joined


STREAM_HEAD = "stream_head"
"""Key of the parameters that reduce several residual streams to one."""


@dataclass(frozen=True)
class Ahead:
    """Multi-token prediction heads, used in training only (arXiv:2404.19737).

    Head k, counted from 1, predicts the token k positions after the ordinary target. The head
    projects `h + silu(h W_k)` to the vocabulary, where h is the output of the final norm
    (arXiv:2401.10774). The ordinary head projects h itself. W_k is initialized to 0, so all heads
    are equal at initialization.
    """

    num_heads: int
    d_model: int
    loss_weight: float
    """Weight of the mean loss over the heads in the training objective."""

    @property
    def params_of_one(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters of one head in the order of initialization."""
        dims = ((self.d_model, "embed"), (self.d_model, "norm"))
        return {("transform",): Param(dims, Constant(0.0))}

    @property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters of all heads, stacked along a leading dim. Each head is initialized
        as in `params_of_one`.
        """
        stack = (self.num_heads, "ahead")
        return {
            name: replace(param, dims=(stack, *param.dims))
            for name, param in self.params_of_one.items()
        }

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the heads' losses, keyed by name."""
        weight = self.loss_weight / self.num_heads
        return {f"ahead_{number}": weight for number in range(1, self.num_heads + 1)}


@dataclass(frozen=True)
class LayersAhead(Ahead):
    """Multi-token prediction heads that each consist of one transformer layer and are applied in
    sequence.

    Source: arXiv:2412.19437, section 2.2. Head k combines the hidden state h of the previous head
    with the embedding e of the token k positions ahead, `h_k = norm(layer_k([norm(e);
    norm(h_{k-1})] W_k))`. Each norm has a separate scale. Head k projects h_k to the vocabulary.
    The heads share the embedding table and the output projection with the network. The paper does
    not specify where h is normalized. Here, h is always the normalized input of the output
    projection, so h_0 is the output of the final norm. The transformers implementation uses the
    same input for the published weights. The embedding comes first in the concatenation, as in the
    published `eh_proj`.
    """

    layer_type_name: str
    """Name of the layer type of the network's last layer. The layers of the heads are numbered
    after the network's layers."""
    layer_type: LayerType
    norm: Part
    """Norm applied twice before the projection and once after the layer."""
    stream_head: Part | None = None
    """Sublayer that reduces the layer's residual streams (`Ends.stream_head`)."""

    @property
    def params_of_one(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters of one head: three norms, a projection and a layer."""
        dims = ((2 * self.d_model, "embed"), (self.d_model, "norm"))
        params: dict[tuple[str, ...], Param] = {
            (name, param): declared
            for name in ("embedding_norm", "hidden_norm")
            for param, declared in self.norm.params.items()
        }
        params["projection",] = Param(dims, Normal(2 * self.d_model))
        params |= {("layer", *name): param for name, param in self.layer_type.params.items()}
        reduction = {} if self.stream_head is None else self.stream_head.params
        params |= {(STREAM_HEAD, name): param for name, param in reduction.items()}
        return params | {("norm", name): param for name, param in self.norm.params.items()}


@dataclass(frozen=True)
class Ends:
    """Embedding, final norm and output heads."""

    embedding: Param
    norm: Part
    """Final norm, applied before the output projection. The parameters of this norm are stored
    under `final_norm`."""
    head: Param | None
    """Output projection. If None, the embedding table is used."""
    embed_scale: float = 1.0
    """Factor, rounded to the compute dtype, that multiplies the embedding."""
    logit_scale: float = 1.0
    """Factor by which the logits are multiplied."""
    final_logit_softcapping: float = 0.0
    """Soft cap on the scaled logits: `cap * tanh(logits / cap)`. 0 disables the cap."""
    mtp: Ahead | None = None
    vision: Any = None
    """Vision tower that computes the embeddings of images, or None."""
    frozen: frozenset[tuple[str, ...]] = frozenset()
    """Storage paths of the frozen parameters."""
    num_streams: int = 1
    """Number of residual streams, to which the embedding is copied. With several streams, every
    branch has a hyper-connection."""
    stream_head: Part | None = None
    """Sublayer that reduces several residual streams to the input of the final norm."""

    @cached_property
    def params(self) -> Mapping[tuple[str, ...], Param]:
        """Return the parameters, keyed by storage path."""
        params = {("embedding",): self.embedding}
        params |= {("final_norm", name): param for name, param in self.norm.params.items()}
        reduction = {} if self.stream_head is None else self.stream_head.params
        params |= {("final_norm", STREAM_HEAD, name): param for name, param in reduction.items()}
        if self.mtp is not None:
            params |= {("ahead", *name): param for name, param in self.mtp.params.items()}
        params |= {} if self.head is None else {("head",): self.head}
        params |= {} if self.vision is None else self.vision.params
        return {name: _unless(param, name in self.frozen) for name, param in params.items()}

    @property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the losses of the multi-token prediction heads."""
        return {} if self.mtp is None else self.mtp.losses

    @property
    def mtp_layers(self) -> LayersAhead | None:
        """Return the multi-token prediction heads if they contain layers, else None."""
        return self.mtp if isinstance(self.mtp, LayersAhead) else None

    @cached_property
    def balance_updates(self) -> Mapping[tuple[str, str], Follows]:
        """Return a dict from (sublayer, name) to the update rule of each parameter that has no
        gradient, in the layers of multi-token prediction heads.
        """
        if (heads := self.mtp_layers) is None:
            return {}
        return {
            name: how
            for name, how in heads.layer_type.balance_updates.items()
            if ("ahead", "layer", *name) not in self.frozen
        }


@dataclass(frozen=True, eq=False)
class Model:
    """Spec of a complete model."""

    layer_types: Mapping[str, LayerType]
    layers: tuple[str, ...]
    """Layer type of each layer, from first to last."""
    ends: Ends
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values that differ between layers, with one entry per layer of `all_layers`."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Arrays that layers pass to later layers: name and number of entries per token. The input and
    output of a layer are the residual stream followed by these arrays, so that a pipeline sends
    them in the same messages."""

    @property
    def stream_width(self) -> int:
        """Return the number of entries per token in the input and output of a layer."""
        return self.residual_width + sum(self.carried.values())

    @property
    def residual_width(self) -> int:
        """Return the number of entries per token in all residual streams."""
        return self.ends.num_streams * self.ends.embedding.shape[1]

    def map_parts(self, change: Callable[[Part], Part]) -> Model:
        """Return the model with `change` applied to the sublayer of each branch; return the same
        object if nothing changes.
        """

        def changed(branch: Branch) -> Branch:
            part = change(branch.part)
            return branch if part is branch.part else replace(branch, part=part)

        layer_types = dict(self.layer_types)
        for name, layer_type in self.layer_types.items():
            branches = tuple(map(changed, layer_type.branches))
            if any(new is not old for new, old in zip(branches, layer_type.branches, strict=True)):
                layer_types[name] = replace(layer_type, branches=branches)
        same = all(layer_types[name] is layer_type for name, layer_type in self.layer_types.items())
        return self if same else replace(self, layer_types=layer_types)

    @property
    def all_layers(self) -> tuple[str, ...]:
        """Return the layer types of all layers, including those of multi-token prediction heads."""
        heads = self.ends.mtp_layers
        return self.layers + (() if heads is None else (heads.layer_type_name,) * heads.num_heads)

    @cached_property
    def losses(self) -> Mapping[str, float]:
        """Return the coefficients of the scalar losses of all layers, without those in `ends`."""
        losses: dict[str, float] = {}
        for layer_type in self.layer_types.values():
            losses |= layer_type.losses
        return losses

    @cached_property
    def metrics(self) -> Mapping[str, Summary]:
        """Return the metrics derived from the layers' losses and statistics, keyed by tag."""
        metrics: dict[str, Summary] = {}
        for layer_type in self.layer_types.values():
            for part in layer_type.parts.values():
                metrics |= part.metrics
        return metrics

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the descriptions of the sublayers (`Part.note`), without duplicates."""
        types = self.layer_types.values()
        parts = (part for layer_type in types for part in layer_type.parts.values())
        return tuple(dict.fromkeys(part.note for part in parts if part.note))

    @cached_property
    def activations(self) -> Mapping[str, tuple[str, ...]]:
        """Return a dict that maps each savable name to the activations that the name selects.

        A name denotes an activation or a preset. `matmuls` selects all activations, and a branch's
        name selects its sublayer's activations. Each activation includes the arrays that are saved
        along with the activation.
        """
        single: dict[str, tuple[str, ...]] = {}
        presets: dict[str, dict[str, None]] = {"matmuls": {}}
        for layer_type in self.layer_types.values():
            for branch in layer_type.branches:
                part, names = branch.part, presets.setdefault(branch.name, {})
                for name in part.activations:
                    own = single.get(name, (name,)) + tuple(part.saved_with.get(name, ()))
                    single[name] = tuple(dict.fromkeys(own))
                    names |= dict.fromkeys(single[name])
                presets["matmuls"] |= names
        return single | {preset: tuple(names) for preset, names in presets.items()}
