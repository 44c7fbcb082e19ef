"""One layer, differentiated once: what a forward slot keeps and what backward slots make of it.

The layer is traced into a forward that also returns what its backward needs, and the backward as a
function of that. Weights and the batch's own arrays are at hand in a backward slot anyway: they and
what is computed from weights alone are never kept, as the data flow says, whatever its shape. With
a split backward the trace is cut in two (`split`).

Cuts a traced backward in two: gradients of the input first, gradients of the weights later.

Both halves come from one program, so that what they share is computed once, in the first half.
What the second half needs of it is kept in between: a minimum cut of the data flow finds the fewest
bytes. Cheap elementwise work may be repeated after the cut, matrix products never are.

Source: partitioning the backward's jaxpr is JaxPP's way to zero-bubble schedules
(arXiv:2412.14374); the cut is the one of arXiv:2206.11719 for recomputation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from maxpipe.parallel.collectives import mark_varying
from maxpipe.parallel.quantized_matmul import is_quantized_weight
from maxpipe.pipeline.weights import replace_subtree, select_trainable

Arrays = Sequence[Any]

_CALL_PRIMITIVES = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
}
"""Equations that only wrap a program; they are opened, so that it can be cut."""

_EXPENSIVE_PRIMITIVES = {
    "dot_general",
    "ragged_dot",
    "ragged_dot_general",
    "conv_general_dilated",
    "custom_call",
    "pallas_call",
    "shard_map",
    "while",
    "scan",
    "cond",
    "sort",
    "top_k",
    "cumsum",
    "random_bits",
    "threefry2x32",
    "psum",
    "psum_invariant",
    "all_gather",
    "all_to_all",
    "ppermute",
    "reduce_scatter",
    "optimization_barrier",
}
"""Equations that are never repeated: products, loops, collectives, and what must not be undone."""


@dataclass(frozen=True)
class SplitProgram:
    """A program in two parts; `kept` is what goes from the first to the second."""

    first: Callable[[Arrays], tuple[list[Any], list[Any]]]
    """All inputs -> (first outputs, kept)."""
    second: Callable[[Arrays, Arrays], list[Any]]
    """(kept, free inputs) -> the other outputs."""
    saved: tuple[Any, ...]
    """Abstract value of each kept array."""


def split_program(
    program: jex.ClosedJaxpr, *, first_outputs: Sequence[int], free_inputs: Sequence[int]
) -> SplitProgram:
    """Parts of `program`: the first computes `first_outputs`, the second all other outputs.

    `free_inputs` are given to both parts and cost nothing to keep.
    """
    flat = FlatJaxpr(program)
    chosen = [flat.outputs[i] for i in first_outputs]
    others = [out for i, out in enumerate(flat.outputs) if i not in set(first_outputs)]
    early = flat.dependencies(chosen)
    late = [e for e in sorted(flat.dependencies(others)) if e not in early]
    free = [flat.inputs[i] for i in free_inputs]
    kept, again = _min_cut(flat, early, late, others, free)
    second = sorted({*again, *late})

    def run_first(arguments: Arrays) -> tuple[list[Any], list[Any]]:
        env = flat.environment(flat.inputs, arguments)
        # Whatever the cut keeps is computed here, even what only the weights' gradients need.
        flat.run(sorted(flat.dependencies([*chosen, *kept])), env)
        return [env[v] for v in chosen], [env[v] for v in kept]

    def run_second(values: Arrays, arguments: Arrays) -> list[Any]:
        env = flat.environment([*kept, *free], [*values, *arguments])
        flat.run(second, env)
        return [env[v] for v in others]

    return SplitProgram(run_first, run_second, tuple(flat.aval[v] for v in kept))


class FlatJaxpr:
    """A program without wrapping calls: equations over numbered values."""

    def __init__(self, program: jex.ClosedJaxpr):
        self.equations: list[tuple[jex.JaxprEqn, list[int], list[int]]] = []
        self.aval: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.producer: dict[int, int] = {}
        self.inputs = [self._new(v.aval) for v in program.jaxpr.invars]
        self.outputs = self._inline(program.jaxpr, program.consts, self.inputs)

    def _new(self, aval: Any) -> int:
        self.aval.append(aval)
        return len(self.aval) - 1

    def _constant(self, value: Any) -> int:
        number = self._new(jax.typeof(value))
        self.constants[number] = value
        return number

    def _inline(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[int]) -> list[int]:
        env: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        env.update(zip(jaxpr.constvars, map(self._constant, consts), strict=True))

        def read(atom: Any) -> int:
            return self._constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            inner = _inner_program(equation)
            if inner is not None:
                outputs = self._inline(*inner, inputs)
            else:
                outputs = [self._new(v.aval) for v in equation.outvars]
                self.producer.update(dict.fromkeys(outputs, len(self.equations)))
                self.equations.append((equation, inputs, outputs))
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def dependencies(self, values: Sequence[int]) -> set[int]:
        """Equations that these values depend on."""
        found: set[int] = set()
        stack = list(values)
        while stack:
            equation = self.producer.get(stack.pop())
            if equation is not None and equation not in found:
                found.add(equation)
                stack += self.equations[equation][1]
        return found

    def equations_between(self, have: set[int], wanted: Sequence[int]) -> list[int]:
        """Equations on the way from values that are at hand to those that are wanted, in order."""
        found: set[int] = set()
        stack = [value for value in wanted if value not in have]
        while stack:
            equation = self.producer[stack.pop()]
            if equation not in found:
                found.add(equation)
                stack += [value for value in self.equations[equation][1] if value not in have]
        return sorted(found)

    def undo_reshape(self, value: int) -> int:
        """The value that this one is in another shape, itself if it is none."""
        while (number := self.producer.get(value)) is not None:
            equation, inputs, _ = self.equations[number]
            if equation.primitive.name != "reshape":
                break
            value = inputs[0]
        return value

    def input_dependencies(self, value: int) -> set[int]:
        """Inputs that a value depends on."""
        read = {
            number for index in self.dependencies([value]) for number in self.equations[index][1]
        }
        return {value, *read}.intersection(self.inputs)

    def environment(self, names: Sequence[int], values: Arrays) -> dict[int, Any]:
        """Values by number, constants included."""
        return {**self.constants, **dict(zip(names, values, strict=True))}

    def run(self, equations: Sequence[int], env: dict[int, Any]) -> None:
        """Evaluate these equations in order."""
        for index in equations:
            equation, inputs, outputs = self.equations[index]
            if equation.primitive.name == "pvary" and _is_marked_varying(env[inputs[0]], equation):
                env[outputs[0]] = env[inputs[0]]
                continue
            parameters: Any = equation.primitive.get_bind_params(equation.params)
            # Until 0.11 sub-programs came apart from the other parameters.
            subfuns, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
            with equation.ctx.manager:
                bound = equation.primitive.bind(*subfuns, *(env[v] for v in inputs), **parameters)
            found: Any = bound if equation.primitive.multiple_results else [bound]
            found = found.unflatten() if hasattr(found, "unflatten") else found  # 0.10's shard_map
            env.update(zip(outputs, found, strict=True))


def _is_marked_varying(value: Any, mark: jex.JaxprEqn) -> bool:
    """Whether a value is marked already as different on each device, as one that was kept is."""
    kind: Any = jax.typeof(value)
    known = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return set(mark.params["axes"]) <= set(known)


def _inner_program(equation: jex.JaxprEqn) -> tuple[Any, Sequence[Any]] | None:
    """(jaxpr, constants) that a wrapping equation calls with its own inputs."""
    if equation.primitive.name not in _CALL_PRIMITIVES:
        return None
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    if inner is None:
        return None
    if isinstance(inner, jex.ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return inner, ()


_INFINITE_CAPACITY = 2**31 - 1
"""The flow's numbers have 32 bits: the bytes of a whole program are scaled down to stay below."""


def _min_cut(
    flat: FlatJaxpr, early: set[int], late: list[int], outputs: Sequence[int], free: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Values to keep between the parts, and early equations to repeat after it.

    Every value is an edge as wide as its bytes; cutting it means keeping it. What cannot be
    repeated hangs on the source, what the second part reads on the sink.
    """
    known = {*flat.constants, *free}
    wanted = {v for e in late for v in flat.equations[e][1]} | set(outputs)
    made_late = {v for e in late for v in flat.equations[e][2]}
    wanted -= known | made_late
    if not wanted:
        return [], []
    source, sink = 2 * len(flat.aval), 2 * len(flat.aval) + 1
    unit = 1 + sum(map(_bytes, flat.aval)) // _INFINITE_CAPACITY
    edges: dict[tuple[int, int], int] = {}
    stack, seen = list(wanted), set(wanted)
    while stack:
        value = stack.pop()
        edges[2 * value, 2 * value + 1] = max(1, _bytes(flat.aval[value]) // unit)
        equation = flat.producer.get(value)
        if equation is None or flat.equations[equation][0].primitive.name in _EXPENSIVE_PRIMITIVES:
            edges[source, 2 * value] = _INFINITE_CAPACITY
            continue
        inputs = [v for v in flat.equations[equation][1] if v not in known]
        for needed in inputs:
            edges[2 * needed + 1, 2 * value] = _INFINITE_CAPACITY
        new = set(inputs) - seen
        seen |= new
        stack += new
    for value in wanted:
        edges[2 * value + 1, sink] = _INFINITE_CAPACITY
    rows, columns = zip(*edges, strict=True)
    widths = np.array(list(edges.values()), np.int32)
    graph = coo_matrix((widths, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    residual = graph - maximum_flow(graph, source, sink).flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    kept = sorted(v for v in seen if 2 * v in reached and 2 * v + 1 not in reached)
    return kept, flat.equations_between(known | set(kept), list(wanted))


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


Tree = Any
Remat = Literal["chunk", "full", "names", "none"]


LayerFn = Callable[..., tuple[jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]]]
"""(weights, x [B, T, D], inputs, layer index, key) -> (output [B, T, D], losses, statistics).

Losses are scalars, summed over the target tokens of the rows: they are added up as they are, and
their gradients flow. Statistics are arrays, summed over tokens, without a gradient.
"""


@dataclass(frozen=True)
class RematPolicy:
    """What forward slots keep for backward slots.

    `chunk` and `full` keep inputs and recompute, of a chunk or of each layer; `names` keeps each
    layer's input and the activations with these names; `none` keeps all that the backward needs.
    """

    remat: Remat = "full"
    names: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Names kept in host memory instead of on the device, whether among `names` or not."""

    def wrap(self, layer: LayerFn) -> LayerFn:
        """The layer with what it recomputes marked."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            return layer
        policy = policies.nothing_saveable
        if self.remat == "names":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[n for n in self.names if n not in self.offloaded],
                names_which_can_be_offloaded=list(self.offloaded),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # Forward and backward are in different loops: there is nothing to be merged by mistake.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class SavedArray(NamedTuple):
    """An array that waits between slots."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    on_host: bool

    @classmethod
    def from_aval(cls, aval: Any) -> SavedArray:
        """The form of arrays with this abstract value."""
        return cls(aval.shape, aval.dtype, aval.memory_space == jax.memory.Space.Host)


class LayerConstants(NamedTuple):
    """What a layer reads besides weights and input. Nothing in it has a gradient."""

    inputs: Tree
    """The microbatch's arrays."""
    layer: jax.Array
    """The layer's position in the network."""
    key: jax.Array | None
    """Of the step's randomness."""
    seeds: Tree
    """Cotangent of each of the layers' losses; a layer may return some of them."""


@dataclass(frozen=True)
class LayerVJP:
    """The pieces of one layer, differentiated."""

    forward: Callable[
        [Tree, jax.Array, LayerConstants], tuple[jax.Array, list[jax.Array], Tree, Tree]
    ]
    """(weights, x, constants) -> (output, saved, losses, statistics)."""
    backward: Callable[[Tree, list[jax.Array], LayerConstants, jax.Array], tuple[Tree, jax.Array]]
    """(weights, saved, constants, cotangent) -> (weight gradients, input gradient)."""
    input_grad: Callable[..., tuple[jax.Array, list[jax.Array]]]
    """(weights, saved, constants, cotangent) -> (input gradient, deferred)."""
    weight_grad: Callable[[list[jax.Array], LayerConstants], Tree]
    """(deferred, constants) -> weight gradients."""
    saved: tuple[SavedArray, ...]
    deferred: tuple[SavedArray, ...]
    losses: tuple[str, ...]
    statistics: dict[str, tuple[int, ...]]
    """Shapes by name."""


def differentiate_layer(
    layer: LayerFn,
    keep: RematPolicy,
    weights: Tree,
    x: jax.Array,
    constants: LayerConstants,
    *,
    halves: bool,
    trainable: Tree = None,
) -> LayerVJP:
    """Trace a layer with arguments like these.

    `halves` makes `input_grad` and `weight_grad` as well as `backward`. `trainable` is a tree of
    bools, None for all: weight gradients are those of such weights.
    """
    structure: list[Any] = []  # of the pullback, known once the forward is traced
    wrapped = keep.wrap(layer)
    trainable = jax.tree.map(lambda _: True, weights) if trainable is None else trainable

    def run(weights: Tree, x: jax.Array, constants: LayerConstants) -> tuple[Any, list[jax.Array]]:
        def differentiable(mine: Tree, x: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
            output, losses, statistics = wrapped(replace_subtree(weights, mine), x, *constants[:3])
            return (output, losses), statistics

        mine = jax.tree.map(
            partial(_differentiable_weight, x.dtype),
            select_trainable(weights, trainable),
            is_leaf=is_quantized_weight,
        )
        (output, losses), pullback, statistics = jax.vjp(differentiable, mine, x, has_aux=True)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return (output, losses, statistics), leaves

    traced, (of_outputs, _) = jax.make_jaxpr(run, return_shape=True)(weights, x, constants)
    outputs = jax.tree.structure(of_outputs)
    flat = FlatJaxpr(traced)
    sources = _ValueSources.from_program(flat, len(jax.tree.leaves(weights)))
    leaves = flat.outputs[outputs.num_leaves :]
    # Several shapes of an array are one to keep.
    stored = [v for v in dict.fromkeys(map(flat.undo_reshape, leaves)) if sources.must_be_saved(v)]

    def forward(
        weights: Tree, x: jax.Array, constants: LayerConstants
    ) -> tuple[jax.Array, list[jax.Array], Tree, Tree]:
        found = jex.jaxpr_as_fun(traced)(*jax.tree.leaves((weights, x, constants)))
        output, losses, statistics = outputs.unflatten(found[: outputs.num_leaves])
        arrays = dict(zip(map(flat.undo_reshape, leaves), found[outputs.num_leaves :], strict=True))
        saved = [arrays[value].reshape(flat.aval[value].shape) for value in stored]
        return output, saved, losses, statistics

    def backward(
        weights: Tree, saved: list[jax.Array], constants: LayerConstants, cotangent: jax.Array
    ) -> tuple[Tree, jax.Array]:
        known = [*jax.tree.leaves(weights), *saved, *jax.tree.leaves(constants)]
        values = flat.environment([*sources.weights, *stored, *sources.constants], known)
        flat.run(flat.equations_between(set(values), leaves), values)
        pullback = jax.tree.unflatten(structure[-1], [values[leaf] for leaf in leaves])
        return pullback((cotangent, {name: constants.seeds[name] for name in of_outputs[1]}))

    output, saved, losses, statistics = forward(weights, x, constants)
    pieces = LayerVJP(
        forward,
        backward,
        _raise_not_split,
        _raise_not_split,
        saved=tuple(SavedArray.from_aval(jax.typeof(leaf)) for leaf in saved),
        deferred=(),
        losses=tuple(losses),
        statistics={name: leaf.shape for name, leaf in statistics.items()},
    )
    return _split_backward(pieces, weights, saved, constants, output) if halves else pieces


def _differentiable_weight(dtype: jnp.dtype, weight: Tree) -> jax.Array:
    """What has the gradient: a weight, or zeros of its shape in place of one in 8 bits."""
    return mark_varying(jnp.zeros(weight.shape, dtype)) if is_quantized_weight(weight) else weight


@dataclass(frozen=True)
class _ValueSources:
    """Where the values of a layer's forward come from, by their numbers in the flat program."""

    flat: FlatJaxpr
    weights: list[int]
    x: int
    constants: list[int]

    @classmethod
    def from_program(cls, flat: FlatJaxpr, num_weights: int) -> _ValueSources:
        weights, (x, *constants) = flat.inputs[:num_weights], flat.inputs[num_weights:]
        return cls(flat, weights, x, constants)

    def must_be_saved(self, value: int) -> bool:
        """Whether a value has to be kept from the forward slot to the backward slot.

        Inputs other than `x` are at hand there. What follows from weights without `x` is computed
        again, however dear: kept, it would take its room in every slot, and be the same in all of
        them. So is what depends on nothing, as zeros do that a mask leaves behind. What follows
        from the microbatch's own arrays alone waits: it is another one in each slot.
        """
        sources = self.flat.input_dependencies(value)
        if self.x in sources:
            return True
        return bool(sources) and sources.isdisjoint(self.weights) and value not in self.constants


def _split_backward(
    pieces: LayerVJP,
    weights: Tree,
    saved: list[jax.Array],
    constants: LayerConstants,
    like: jax.Array,
) -> LayerVJP:
    """The backward cut in two."""
    traced, (d_weights, _) = jax.make_jaxpr(pieces.backward, return_shape=True)(
        weights, saved, constants, like
    )
    sizes = [len(jax.tree.leaves(tree)) for tree in (weights, saved, constants)]
    first_constant = sizes[0] + sizes[1]
    parts = split_program(
        traced,
        first_outputs=[len(traced.out_avals) - 1],
        free_inputs=range(first_constant, first_constant + sizes[2]),
    )
    structure = jax.tree.structure(d_weights)

    def input_grad(
        weights: Tree, saved: list[jax.Array], constants: LayerConstants, cotangent: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        (found,), kept = parts.first(jax.tree.leaves((weights, saved, constants, cotangent)))
        return found, kept

    def weight_grad(deferred: list[jax.Array], constants: LayerConstants) -> Tree:
        return structure.unflatten(parts.second(deferred, jax.tree.leaves(constants)))

    return dataclasses.replace(
        pieces,
        input_grad=input_grad,
        weight_grad=weight_grad,
        deferred=tuple(map(SavedArray.from_aval, parts.saved)),
    )


def _raise_not_split(*_: Any) -> Any:
    raise AssertionError("this layer's backward was not cut in two")
