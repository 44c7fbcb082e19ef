"""Mamba-2 compared with its token-by-token recurrence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.models.layers import mamba2
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.mamba2 import Mamba2
from tests.model.recurrent import Layer, Params

PART = mamba2.Mamba2(
    d_model=10,
    num_heads=6,
    head_dim=5,
    num_groups=2,
    state_size=7,
    kernel=4,
    conv_bias=True,
    norm=RMSNorm(30, 1e-4),
    out_gain=1.0,
    chunk=4,
)


def recurrence(w: Params, x: jax.Array, part: mamba2.Mamba2) -> jax.Array:
    """Compute one document `[tokens, D]`."""
    kernel, group, factors = part.kernel, part.group, part.multipliers

    def convolved(name: str) -> jax.Array:
        rows = jnp.einsum("td,dhp->thp", x, w[name]) * getattr(factors, name)
        before = jnp.concatenate([jnp.zeros((kernel - 1, *rows.shape[1:])), rows])
        taps = [before[at : at + len(rows)] * w[f"conv_{name}"][..., at] for at in range(kernel)]
        return jax.nn.silu(sum(taps, w.get(f"conv_{name}_bias", 0.0)))

    value, key, query = map(convolved, ("value", "key", "query"))
    key, query = (jnp.repeat(each, group, axis=1) for each in (key, query))
    time = jax.nn.softplus(factors.time_step * (x @ w["time_step"]) + w["time_step_bias"])
    time = jnp.maximum(time, part.min_time_step)
    kept = jnp.exp(-jnp.exp(w["decay"]) * time)

    def step(state: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
        key, query, value, time, kept = each
        new = (time[:, None] * key)[:, :, None] * value[:, None, :]
        state = state * kept[:, None, None] + new
        return state, jnp.einsum("hkv,hk->hv", state, query)

    state = jnp.zeros((part.num_heads, part.state_size, part.head_dim))
    _, found = jax.lax.scan(step, state, (key, query, value, time, kept))
    found = found + w["skip"][:, None] * value
    found = found * jax.nn.silu(factors.gate * jnp.einsum("td,dhp->thp", x, w["gate"]))
    if part.norm is None:
        return jnp.einsum("thv,hvd->td", found, w["out"])
    groups = found.reshape(len(x), part.num_groups, -1)
    groups = groups / jnp.sqrt((groups**2).mean(-1, keepdims=True) + part.norm.epsilon)
    return jnp.einsum("thv,hvd->td", groups.reshape(found.shape) * w["norm"], w["out"])


LAYER = Layer(Mamba2, PART, recurrence)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"num_groups": 1, "conv_bias": False}, {"chunk": 64}, {"min_time_step": 0.7}),
        {"norm": None, "multipliers": mamba2.Multipliers(0.4, 0.7, 1.3, 0.5, 1.6)},
    ],
)
def test_chunked_form_equals_token_recurrence(changes: dict[str, Any]) -> None:
    layer = LAYER.with_part(**changes)
    layer.check_values_and_gradients(*layer.draw())


def test_document_does_not_affect_other_documents() -> None:
    LAYER.check_documents_are_independent()


def test_chunked_decoding_equals_full_forward() -> None:
    LAYER.check_decoding()


def test_left_padding_does_not_change_result() -> None:
    LAYER.check_left_padding()


def test_gradients_are_finite_if_state_decays_at_once() -> None:
    LAYER.check_gradients_of_strong_decay("value")


def test_bfloat16_output_is_close_to_float32() -> None:
    LAYER.check_bfloat16()
