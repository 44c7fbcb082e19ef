"""Tests of maxpipe.pipeline.collectives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxpipe.mesh import STAGE
from maxpipe.pipeline.collectives import after
from tests.cases import Case, steps_of


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_after_changes_nothing_but_the_order(devices: list[Any], dtype: Any) -> None:
    mesh = steps_of(Case(2, 1, 2, schedule="1f1b"), 4).partition.mesh

    spec = PartitionSpec(STAGE)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, axis_names={STAGE}, in_specs=spec, out_specs=spec)
    def run(done: jax.Array, waiting: jax.Array) -> jax.Array:
        return after({"a": done, "b": -done}, waiting)

    done = jnp.asarray([[-1, 2], [3, 4]], dtype)
    waiting = jnp.arange(6, dtype=jnp.int32)
    np.testing.assert_array_equal(run(done, waiting), waiting)
    text = run.lower(done, waiting).compile().as_text() or ""
    (entry,) = [part for part in text.split("\n\n") if part.lstrip().startswith("ENTRY")]
    assert entry.count("parameter(") == 2, "the order is not in the compiled program"
