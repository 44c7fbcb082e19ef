"""Differentiate a layer once, to obtain its forward, backward and weight-gradient functions.

A layer is traced into a forward function and a backward function. The forward function also returns
residuals for the backward function. Weights, batch arrays and anything computed from weights alone
are never saved, because a backward slot has access to the weights and the batch. These arrays are
identified by data flow, not by shape.

A split backward pass divides the traced program into two parts: input gradients first, weight
gradients later. Both parts come from the same program, so intermediates that both parts use are
computed once, in the first part. Intermediates that the second part needs are saved between the
parts; a minimum cut of the data-flow graph minimizes their size in bytes. Cheap elementwise
operations can be recomputed in the second part; matmuls are never recomputed.

Source: JaxPP partitions the jaxpr of the backward pass for zero-bubble schedules
(arXiv:2412.14374). The minimum cut follows arXiv:2206.11719, which uses it to select the values to
recompute.
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

from maxpipe.parallel.collectives import Statistic, mark_varying
from maxpipe.parallel.matmul_quantizer import is_quantized_weight
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
"""Primitives that only call a jaxpr; their jaxprs are inlined so that the program can be split."""

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
"""Primitives that are never recomputed: matmuls, loops, collectives, barriers and similar."""


@dataclass(frozen=True)
class SplitProgram:
    """A program split into two parts; `kept` values are passed from the first part to the
    second.
    """

    first: Callable[[Arrays], tuple[list[Any], list[Any]]]
    """Function that maps all inputs to (leading outputs, kept values)."""
    second: Callable[[Arrays, Arrays], list[Any]]
    """Function that maps (kept values, free inputs) to the remaining outputs."""
    saved: tuple[Any, ...]
    """Shapes and dtypes of the kept values."""


def split_program(
    program: jex.ClosedJaxpr, *, first_outputs: Sequence[int], free_inputs: Sequence[int]
) -> SplitProgram:
    """Split `program` so that the first part computes `first_outputs`, and the second part the
    remaining outputs.

    `free_inputs` are available to both parts, so keeping these inputs costs no memory.
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
        # The first part computes all kept values, including those that only weight gradients need.
        flat.run(sorted(flat.dependencies([*chosen, *kept])), env)
        return [env[v] for v in chosen], [env[v] for v in kept]

    def run_second(values: Arrays, arguments: Arrays) -> list[Any]:
        env = flat.environment([*kept, *free], [*values, *arguments])
        flat.run(second, env)
        return [env[v] for v in others]

    return SplitProgram(run_first, run_second, tuple(flat.aval[v] for v in kept))


class FlatJaxpr:
    """A program with all calls inlined, as equations over numbered values."""

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
        """Return the indices of the equations that these values depend on."""
        equations: set[int] = set()
        stack = list(values)
        while stack:
            equation = self.producer.get(stack.pop())
            if equation is not None and equation not in equations:
                equations.add(equation)
                stack += self.equations[equation][1]
        return equations

    def equations_between(self, have: set[int], wanted: Sequence[int]) -> list[int]:
        """Return the equations, in order, that compute the `wanted` values from the values in
        `have`.
        """
        equations: set[int] = set()
        stack = [value for value in wanted if value not in have]
        while stack:
            equation = self.producer[stack.pop()]
            if equation not in equations:
                equations.add(equation)
                stack += [value for value in self.equations[equation][1] if value not in have]
        return sorted(equations)

    def undo_reshape(self, value: int) -> int:
        """Return the value from which a chain of reshapes starts. Equal values without a gradient
        are part of the chain.
        """
        while (number := self.producer.get(value)) is not None:
            equation, inputs, _ = self.equations[number]
            if equation.primitive.name not in ("reshape", "stop_gradient"):
                break
            value = inputs[0]
        return value

    def input_dependencies(self, value: int) -> set[int]:
        """Return the program inputs that a value depends on."""
        read = {
            number for index in self.dependencies([value]) for number in self.equations[index][1]
        }
        return {value, *read}.intersection(self.inputs)

    def environment(self, names: Sequence[int], values: Arrays) -> dict[int, Any]:
        """Return a dict that maps value numbers to arrays, including the constants."""
        return {**self.constants, **dict(zip(names, values, strict=True))}

    def run(self, equations: Sequence[int], env: dict[int, Any]) -> None:
        """Evaluate these equations in order."""
        for index in equations:
            equation, inputs, outputs = self.equations[index]
            if equation.primitive.name == "pvary" and _is_marked_varying(env[inputs[0]], equation):
                env[outputs[0]] = env[inputs[0]]
                continue
            parameters: Any = equation.primitive.get_bind_params(equation.params)
            # Before JAX 0.11, sub-functions were returned separately from the other parameters.
            subfuns, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
            with equation.ctx.manager:
                bound = equation.primitive.bind(*subfuns, *(env[v] for v in inputs), **parameters)
            results: Any = bound if equation.primitive.multiple_results else [bound]
            results = (
                results.unflatten() if hasattr(results, "unflatten") else results
            )  # shard_map in JAX 0.10
            env.update(zip(outputs, results, strict=True))


def _is_marked_varying(value: Any, mark: jex.JaxprEqn) -> bool:
    """Return whether a value is already marked as varying over the mesh axes of the equation
    `mark`.
    """
    kind: Any = jax.typeof(value)
    known = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return set(mark.params["axes"]) <= set(known)


def _inner_program(equation: jex.JaxprEqn) -> tuple[Any, Sequence[Any]] | None:
    """Return the (jaxpr, constants) that an equation calls, or None for other equations."""
    if equation.primitive.name not in _CALL_PRIMITIVES:
        return None
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    if inner is None:
        return None
    if isinstance(inner, jex.ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return inner, ()


_INFINITE_CAPACITY = 2**31 - 1
"""Maximum capacity of an edge in the graph whose minimum cut is computed. Capacities are int32, so
byte counts are scaled down to fit.
"""


def _min_cut(
    flat: FlatJaxpr, early: set[int], late: list[int], outputs: Sequence[int], free: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the values to keep between the two parts, and the first-part equations to recompute.

    Every value is an edge whose capacity is its size in bytes; cutting the edge means keeping the
    value. Values that must not be recomputed are connected to the source, and values that the
    second part uses are connected to the sink.
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


LayerFn = Callable[..., tuple[jax.Array, Mapping[str, jax.Array], Mapping[str, Statistic]]]
"""Function that maps (weights, x [B, T, D], inputs, layer index, key) to (output [B, T, D], losses,
statistics).

Losses are scalars, summed over the target tokens of the sequences. The losses are added to the
step's sums without a weight, and gradients flow through them. Statistics are sums or maxima over
tokens; no gradients flow through them."""


@dataclass(frozen=True)
class RematPolicy:
    """Policy that selects which activations forward slots save for backward slots.

    `chunk` saves the input of each chunk, and `full` the input of each layer; both recompute all
    other activations. `names` saves the input of each layer and the activations listed in `names`.
    `none` saves all residuals of the backward pass.
    """

    remat: Remat = "full"
    names: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Names of activations saved in host memory instead of device memory. These names can also be
    listed in `names`."""

    def wrap(self, layer: LayerFn) -> LayerFn:
        """Return the layer wrapped in `jax.checkpoint` according to the policy."""
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
        # The forward and backward passes run in different loops, so XLA cannot merge their
        # computations.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class SavedArray(NamedTuple):
    """Shape, dtype and memory space of an array that is saved between slots."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    on_host: bool

    @classmethod
    def from_aval(cls, aval: Any) -> SavedArray:
        """Return the `SavedArray` that describes an abstract value."""
        return cls(aval.shape, aval.dtype, aval.memory_space == jax.memory.Space.Host)


class LayerConstants(NamedTuple):
    """Inputs of a layer other than its weights and activations. These inputs have no gradients."""

    inputs: Tree
    """Arrays of the microbatch."""
    layer: jax.Array
    """Network index of the layer."""
    key: jax.Array | None
    """Random key of the training step."""
    seeds: Tree
    """Cotangents of all losses that any layer returns; an individual layer may return only some of
    these losses."""


@dataclass(frozen=True)
class LayerVJP:
    """Functions of one differentiated layer."""

    forward: Callable[
        [Tree, jax.Array, LayerConstants], tuple[jax.Array, list[jax.Array], Tree, Tree]
    ]
    """Function that maps (weights, x, constants) to (output, saved, losses, statistics)."""
    backward: Callable[[Tree, list[jax.Array], LayerConstants, jax.Array], tuple[Tree, jax.Array]]
    """Function that maps (weights, saved, constants, cotangent) to (weight gradients, input
    gradient).
    """
    input_grad: Callable[..., tuple[jax.Array, list[jax.Array]]]
    """Function that maps (weights, saved, constants, cotangent) to (input gradient, deferred)."""
    weight_grad: Callable[[list[jax.Array], LayerConstants], Tree]
    """Function that maps (deferred, constants) to weight gradients."""
    saved: tuple[SavedArray, ...]
    deferred: tuple[SavedArray, ...]
    losses: tuple[str, ...]
    statistics: dict[str, Any]
    """Abstract values of the layer's statistics, keyed by name."""


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
    """Trace and differentiate a layer for arguments of these shapes.

    If `halves` is set, `input_grad` and `weight_grad` are also defined. `trainable` is a tree of
    bools that selects the weights with gradients; None selects all weights.
    """
    structure: list[Any] = []  # tree structure of the pullback, set when `run` is traced
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
    # If a value and reshapes of that value must be saved, save one array.
    stored = [v for v in dict.fromkeys(map(flat.undo_reshape, leaves)) if sources.must_be_saved(v)]

    def forward(
        weights: Tree, x: jax.Array, constants: LayerConstants
    ) -> tuple[jax.Array, list[jax.Array], Tree, Tree]:
        results = jex.jaxpr_as_fun(traced)(*jax.tree.leaves((weights, x, constants)))
        output, losses, statistics = outputs.unflatten(results[: outputs.num_leaves])
        arrays = dict(
            zip(map(flat.undo_reshape, leaves), results[outputs.num_leaves :], strict=True)
        )
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
        statistics=jax.tree.map(jax.typeof, statistics),
    )
    return _split_backward(pieces, weights, saved, constants, output) if halves else pieces


def _differentiable_weight(dtype: jnp.dtype, weight: Tree) -> jax.Array:
    """Return the array with respect to which a weight is differentiated. A quantized weight is
    replaced with zeros of the same shape.
    """
    return mark_varying(jnp.zeros(weight.shape, dtype)) if is_quantized_weight(weight) else weight


@dataclass(frozen=True)
class _ValueSources:
    """Value numbers that the flat program assigns to a layer's weights, input and constants."""

    flat: FlatJaxpr
    weights: list[int]
    x: int
    constants: list[int]

    @classmethod
    def from_program(cls, flat: FlatJaxpr, num_weights: int) -> _ValueSources:
        weights, (x, *constants) = flat.inputs[:num_weights], flat.inputs[num_weights:]
        return cls(flat, weights, x, constants)

    def must_be_saved(self, value: int) -> bool:
        """Return whether the forward slot must save a value for the backward slot.

        Inputs other than `x` are available in the backward slot. Values that depend on weights but
        not on `x` are always recomputed. Such values are identical in all slots, so saving a copy
        per slot would waste memory. Values that depend on no input, such as the zeros of a mask,
        are also recomputed. Values that depend only on the microbatch's arrays are saved, because
        they differ between slots.
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
    """Return the layer's functions, with the backward pass split into input and weight
    gradients.
    """
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
        (d_input,), kept = parts.first(jax.tree.leaves((weights, saved, constants, cotangent)))
        return d_input, kept

    def weight_grad(deferred: list[jax.Array], constants: LayerConstants) -> Tree:
        return structure.unflatten(parts.second(deferred, jax.tree.leaves(constants)))

    return dataclasses.replace(
        pieces,
        input_grad=input_grad,
        weight_grad=weight_grad,
        deferred=tuple(map(SavedArray.from_aval, parts.saved)),
    )


def _raise_not_split(*_: Any) -> Any:
    raise AssertionError(
        "the backward pass of this layer was not split into input and weight gradients"
    )
