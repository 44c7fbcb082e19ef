"""Hyper-connections in the engine against autodiff of the unpipelined model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.moe import MoeConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline import program, prologue, slots
from tests.cases import Case, keeping
from tests.pipeline.test_engine import check_gradients
from tests.streams import StreamsConfig, registered

STREAMS = StreamsConfig(num_iterations=4)
TWO = StreamsConfig(num_streams=2, num_iterations=3)
MOE = StreamsConfig(MoeConfig(num_experts=6, num_dense_layers=2, d_expert=12), num_iterations=4)


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with registered():
        yield


CASES = [
    Case(2, 1, 2, own=STREAMS, epsilon=1.0, layers=5, schedule="1f1b", fsdp=2),
    Case(
        2, 2, 3, own=STREAMS, epsilon=1.0, layers=5, schedule="zb_v", remat="none", fsdp=2, tensor=2
    ),
    Case(
        4,
        1,
        5,
        own=STREAMS,
        epsilon=1.0,
        layers=6,
        schedule="zb_h1",
        remat="names",
        data=2,
        tied=True,
    ),
    Case(2, 1, 5, own=STREAMS, epsilon=1.0, layers=5, schedule="gpipe", context=2, gather="step"),
    Case(3, 2, 4, own=STREAMS, epsilon=1.0, layers=8, outside=2, remat="chunk", idle="compute"),
    Case(
        2, 2, 3, own=STREAMS, epsilon=1.0, layers=5, gather="window", fsdp=2, dropout=0.3, ahead=2
    ),
    Case(
        2, 2, 3, own=STREAMS, epsilon=1.0, layers=5, schedule="circular", tensor=2, split="sequence"
    ),
    Case(
        2, 1, 3, own=MOE, epsilon=1.0, layers=5, expert=2, schedule="zb_h1", ahead=1, form="layer"
    ),
    Case(2, 2, 3, own=TWO, epsilon=1.0, layers=5, loss_block=5, tensor=2, remat="none"),
]


@pytest.mark.parametrize("case", keeping(CASES, 1, 4, 5), ids=str)
def test_loss_and_gradients(case: Case) -> None:
    check_gradients(case)


def test_idle_slots_do_not_affect_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are filled with NaN before their first write."""

    def nan_slots(count: int, like: Any) -> Any:
        empty = slots.empty_slots(count, like)
        return jnp.full_like(empty, jnp.nan) if jnp.issubdtype(empty.dtype, jnp.floating) else empty

    for module in (program, prologue):
        monkeypatch.setattr(module, "empty_slots", nan_slots)
    check_gradients(Case(3, 1, 4, own=STREAMS, epsilon=1.0, layers=5, schedule="zb_h1"))


def test_cached_decoding_equals_full_forward_pass() -> None:
    case = Case(own=STREAMS, layers=3)
    decoder = Decoder(case.model, AxisRules.from_config(MeshConfig()))
    params = jax.jit(decoder.init)(jax.random.key(0))
    tokens, rows = case.tokens, 2
    ids = np.random.default_rng(0).integers(0, case.model.vocab_size, (rows, tokens))
    batch = {
        "tokens": ids.astype(np.int32),
        "segment_ids": np.ones_like(ids, np.int32),
        "positions": np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape),
        "example_ids": np.arange(rows, dtype=np.int32),
    }
    wanted = jax.jit(decoder.apply)(params, batch)
    caches, extend = decoder.empty_caches(rows, tokens), jax.jit(decoder.extend)
    for part in (slice(0, 3), slice(3, 4), slice(4, tokens)):
        piece = {k: v[:, part] if v.ndim == 2 else v for k, v in batch.items()}
        found, caches = extend(params, piece, caches)
        np.testing.assert_allclose(found, wanted[:, part], rtol=1e-5, atol=1e-5)
