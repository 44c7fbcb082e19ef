"""Sequence-parallel matmuls against plain matmuls: values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules
from tests.cases import TOLERANCE, keeping

AXES = (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"), ("embed", "mlp"))


def split_of(size: int, *, rings: bool, **table: list[str]) -> tuple[Mesh, AxisRules]:
    mesh = Mesh(np.array(jax.devices()[:size]), ("tensor",), axis_types=(AxisType.Auto,))
    config = MeshConfig(axis_rules=table, sequence_parallel=True, collective_matmul=rings)
    return mesh, AxisRules.from_config(config)


def arrays_of(size: int, dtype: Any) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    shapes = [(2, 3 * size, 5), (5, 2 * size, 3), (5, size, 2), (5, 3 * size)]
    shapes += [(2 * size, 3, 5), (3 * size, 5)]
    keys = jax.random.split(jax.random.key(size), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    x, *weights = (jax.random.normal(*pair).astype(dtype) for pair in pairs)
    return x, weights[:3], weights[3:]


def total(split: SequenceParallel, x: Any, into: Any, out_of: Any) -> Any:
    heads, few, wide = split.column_parallel(x, into, AXES)
    first = split.row_parallel(jnp.tanh(heads), out_of[0], AXES[0][1:] + AXES[0][:1])
    second = split.row_parallel(jnp.tanh(wide), out_of[1], AXES[2][::-1])
    return split.split_tokens(first) + second, jnp.tanh(few)


def summed(split: SequenceParallel, *arrays: Any) -> Any:
    return sum((each.astype(jnp.float32) ** 2).sum() for each in total(split, *arrays))


def unsharded_value_and_grad(split: SequenceParallel, *arrays: Any) -> Any:
    """Return value and gradients without a mesh."""
    run = jax.value_and_grad(summed, (1, 2, 3))
    return jax.jit(lambda *arrays: run(split, *arrays))(*arrays)


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("size", keeping([2, 3, 8], 0))
def test_values_and_gradients_match_plain_matmuls(size: int, rings: bool) -> None:
    mesh, rules = split_of(size, rings=rings, kv_heads=[] if size == 3 else ["tensor"])
    arrays = arrays_of(size, jnp.float32)
    wanted = unsharded_value_and_grad(SequenceParallel(rules), *arrays)

    def run(*arrays: Any) -> Any:
        split = SequenceParallel.from_rules(rules)
        assert split.axis == "tensor"
        return jax.value_and_grad(summed, (1, 2, 3))(split, *arrays)

    with jax.set_mesh(mesh):
        found = jax.jit(run)(*jax.device_put(arrays, NamedSharding(mesh, PartitionSpec())))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() < TOLERANCE * np.abs(a).max()


def test_bfloat16_ring_sums_accumulate_in_float32() -> None:
    """The error to float32 is at most about that of plain bfloat16 matmuls."""
    mesh, rules = split_of(4, rings=True)
    narrow, wide = arrays_of(4, jnp.bfloat16), arrays_of(4, jnp.float32)
    run = jax.value_and_grad(summed, (1, 2, 3))
    exact = unsharded_value_and_grad(SequenceParallel(rules), *wide)
    plain = run(SequenceParallel(rules), *narrow)  # eager: every operation rounds its result
    with jax.set_mesh(mesh):
        placed = jax.device_put(narrow, NamedSharding(mesh, PartitionSpec()))
        found = jax.jit(lambda *arrays: run(SequenceParallel.from_rules(rules), *arrays))(*placed)
    for a, b, c in zip(*map(jax.tree.leaves, (exact, plain, found)), strict=True):
        assert c.dtype == b.dtype
        scale, of = np.abs(a).max(), lambda each: np.asarray(each, np.float32)
        assert np.abs(of(c) - a).max() < 2 * np.abs(of(b) - a).max() + 0.01 * scale


def test_sequence_parallel_is_off_if_all_axes_are_automatic() -> None:
    rules = split_of(2, rings=True)[1]
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with jax.set_mesh(Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)):
        assert not SequenceParallel.from_rules(rules).axis
    assert not SequenceParallel.from_rules(rules).axis


def contracted_dims(split: SequenceParallel, *arrays: Any) -> list[int]:
    """Return the number of contracted dims of each weight-gradient matmul."""
    program = jax.make_jaxpr(jax.grad(lambda *weights: summed(split, arrays[0], *weights), (0, 1)))
    rows_and_tokens, found = arrays[0].shape[0] * arrays[0].shape[1], []
    for each in program(*arrays[1:]).eqns:
        if each.primitive.name == "dot_general":
            ((dims, _), _), shape = each.params["dimension_numbers"], each.invars[0].aval.shape
            if np.prod([shape[dim] for dim in dims]) == rows_and_tokens:
                found.append(len(dims))
    return found


def test_cpu_weight_gradients_contract_one_dim_unless_tokens_are_sharded() -> None:
    """With two contracted dims, XLA for CPU transposes an operand of each matmul."""
    rules, (_, into, out_of) = (
        split_of(2, rings=False)[1].for_platform("cpu"),
        arrays_of(2, jnp.float32),
    )
    x = jax.random.normal(jax.random.key(0), (3, 8, 5))  # contraction sizes are distinct
    arrays = x, into, out_of
    wanted = unsharded_value_and_grad(SequenceParallel(rules), *arrays)
    assert contracted_dims(SequenceParallel(rules), *arrays) == [1] * 5
    assert contracted_dims(SequenceParallel(rules.for_platform("tpu")), *arrays) == [2] * 5
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert contracted_dims(SequenceParallel.from_rules(rules), *arrays) == [2] * 5
        placed = NamedSharding(mesh, PartitionSpec(None, "context"))
        given = jax.device_put(x, placed), into, out_of
        run = lambda *arrays: jax.value_and_grad(summed, (1, 2, 3))(  # noqa: E731
            SequenceParallel.from_rules(rules), *arrays
        )
        found = jax.jit(run)(*given)
    heads, few, wide = (jnp.einsum("btd,d...->bt...", x, weight) for weight in into)
    plain = jnp.einsum("btnh,nhd->btd", jnp.tanh(heads), out_of[0])
    plain += jnp.einsum("btf,fd->btd", jnp.tanh(wide), out_of[1])
    total = (plain**2).sum() + (jnp.tanh(few) ** 2).sum()
    assert wanted[0] == pytest.approx(float(total), rel=TOLERANCE)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() < TOLERANCE * np.abs(a).max()


@pytest.mark.parametrize("wide", [True, False])
def test_cpu_weight_gradients_contract_inner_dims(wide: bool) -> None:
    """Checks the compiled program, because XLA for CPU is slow if it contracts outer dims."""
    rules = split_of(2, rings=False)[1].for_platform("cpu")
    inside, outside = (64, 160) if wide else (160, 64)
    x, weight = jnp.ones((2, 48, inside)), jnp.ones((inside, outside))

    def run(x: Any, weight: Any, cotangent: Any) -> Any:
        _, pullback = jax.vjp(
            lambda w: SequenceParallel(rules).row_parallel(x, w, ("mlp", "embed")), weight
        )
        return pullback(cotangent)[0]

    cotangent = jnp.ones((2, 48, outside))
    compiled = jax.jit(run).lower(x, weight, cotangent).compile().as_text() or ""
    dots = [line for line in compiled.splitlines() if " dot(" in line]
    assert len(dots) == 1 and "f32[64,160]" in dots[0]
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in dots[0]
