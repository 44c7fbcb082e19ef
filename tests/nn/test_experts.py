"""The exchange of expert tokens by a ragged all-to-all, which XLA for CPUs does not have."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.nn import experts
from maxpipe.parallel.mesh import EXPERT

SIZE, WIDTH = 4, 3


def ragged_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_name: str,
) -> Array:
    """Emulate the operation of the same name by copies of all devices' arrays."""
    sources = (operand, input_offsets, send_sizes, output_offsets)
    everything = [lax.all_gather(each, axis_name) for each in sources]
    me, place = lax.axis_index(axis_name), jnp.arange(len(output))
    for rows, starts, sizes, targets in zip(*everything, strict=True):
        inside = place - targets[me]
        moved = rows[jnp.clip(starts[me] + inside, 0, len(rows) - 1)]
        used = (inside >= 0) & (inside < sizes[me])
        output = jnp.where(used.reshape(-1, *[1] * (output.ndim - 1)), moved, output)
    return output


@pytest.mark.parametrize(("room", "together"), [(16, 8), (24, 8), (12, 1)])
def test_used_rows_arrive_with_tiles_of_rows(
    room: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks with 0 to `room` used rows, and with numbers that are not multiples of a tile."""
    assert experts._rows_together(room) == together
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    mesh = Mesh(np.array(jax.devices()[:SIZE]), (EXPERT,))
    counts = np.random.default_rng(0).integers(0, room + 1, (SIZE, SIZE)).astype(np.int32)
    counts[0, :3] = 0, room, 9
    x = np.arange(SIZE * SIZE * room * WIDTH, dtype=np.float32).reshape(SIZE, -1, WIDTH)

    @partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec(EXPERT), out_specs=PartitionSpec(EXPERT)
    )
    def exchange(x: Any, sent: Any, received: Any) -> Any:
        return experts._ragged(x[0], sent[0], received[0], together)[None]

    found = np.asarray(exchange(x, counts, counts.T.copy())).reshape(SIZE, SIZE, room, WIDTH)
    sent = x.reshape(SIZE, SIZE, room, WIDTH)
    for source in range(SIZE):
        for target in range(SIZE):
            used = counts[source, target]
            np.testing.assert_array_equal(found[target, source, :used], sent[source, target, :used])


def test_start_after_passes_values_and_gradients() -> None:
    x, other = jnp.arange(6.0).reshape(2, 3), jnp.ones(4)
    value, pull = jax.vjp(experts.start_after, x, other)
    d_x, d_other = pull(2 * x)
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(d_x, 2 * x)
    assert not np.any(d_other)
