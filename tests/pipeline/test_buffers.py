"""Memory layout of the buffers that store arrays between slots."""

import jax
import jax.numpy as jnp
import pytest

from maxpipe.pipeline.slots import layout_order, read_slots, write_slots


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 40, 24), (0, 2, 1)),
        ((3, 40, 128), (0, 1, 2)),
        ((3, 400, 6, 128), (0, 2, 1, 3)),
        ((3, 40, 60, 128), (0, 1, 2, 3)),
        ((2, 300, 8), (0, 2, 1)),
        ((2, 4, 3, 300, 300), (0, 1, 2, 3, 4)),
        ((3, 128, 128), (0, 1, 2)),
        ((5, 3), (1, 0)),
    ],
    ids=str,
)
def test_layout_order_puts_long_dims_last(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert layout_order(shape) == expected


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_slots_have_layout_constraints_on_write_and_read(
    platform: str, pinned: bool
) -> None:
    def run(buffer: jax.Array, value: jax.Array) -> jax.Array:
        written = write_slots([buffer], jnp.int32(1), [value], None, pinned=pinned)
        return read_slots(written, jnp.int32(1), pinned=pinned)[0]

    traced = jax.jit(run).trace(jnp.zeros((3, 2, 40, 6, 128)), jnp.ones((2, 40, 6, 128)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("LayoutConstraint") == (2 if pinned and platform == "tpu" else 0)
