"""Log-likelihoods of tokens that follow others, in rows side by side.

Rows are padded on the right, where no token of them looks, so that the rows beside one do not
change it. Logits are made of a block of tokens at a time: those of whole rows would be many times
as large as all else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.errors import NumbersError
from maxpipe.evals.texts import Row, Score, laid_out
from maxpipe.generate.decoding import padded
from maxpipe.generate.weights import Weights
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC

_LOGITS = 1 << 26
"""Most logits that are in memory at a time, over all devices."""


@dataclass(frozen=True)
class Scorer:
    """A model on a mesh without stages that scores rows."""

    weights: Weights
    batch_size: int = 16

    def score(
        self,
        rows: Sequence[Row],
        *,
        stops: Callable[[], bool] = lambda: False,
        moved: Callable[[int], object] = lambda done: None,
    ) -> list[Score]:
        """The score of each row. The result does not depend on the rows beside it.

        After each batch `stops` is called, and `moved` with the number of rows that are done.

        Raises:
            NumbersError: the model gives numbers that are not finite.
            KeyboardInterrupt: `stops` says so; no device computes any more.
        """
        # Rows of about one length together; the longest first, as memory ends there if anywhere.
        order = sorted(range(len(rows)), key=lambda row: -rows[row].length)
        found: list[Score | None] = [None] * len(rows)
        for first in range(0, len(order), self.batch_size):
            mine = order[first : first + self.batch_size]
            scores = self._batch([rows[row] for row in mine], len(rows))
            for row, score in zip(mine, scores, strict=True):
                found[row] = score
            moved(first + len(mine))
            if stops():
                raise KeyboardInterrupt
        return [score for score in found if score is not None]

    def _batch(self, rows: Sequence[Row], most: int) -> list[Score]:
        mesh = self.weights.mesh
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        count = math.ceil(min(self.batch_size, most) / shards) * shards
        batch = laid_out(rows, count, padded(max(row.length for row in rows)))
        with jax.set_mesh(mesh):
            placed = jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))
            logprobs, best = jax.device_get(self._program(self.weights.params, placed))
        return [_score(row, logprobs[number], best[number]) for number, row in enumerate(rows)]

    @cached_property
    def _program(self) -> Any:
        """(parameters, batch) -> log-probabilities of targets, and whether they are the best."""
        rows = NamedSharding(self.weights.mesh, BATCH_SPEC)
        return jax.jit(partial(_scored, dropless(self.weights.decoder)), out_shardings=rows)


def dropless(decoder: Decoder) -> Decoder:
    """The model with room for all tokens in each expert, as in generation."""
    config: ModelConfig = decoder.config
    own: Any = config.own
    if getattr(own, "capacity_factor", 0):
        own = dataclasses.replace(own, capacity_factor=0.0)
        config = dataclasses.replace(config, own=own)
    return dataclasses.replace(decoder, config=config)


def _scored(decoder: Decoder, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    hidden = decoder.hidden(params, batch)
    count, width, _ = hidden.shape
    block = width
    while block % 2 == 0 and count * block * decoder.config.vocab_size > _LOGITS:
        block //= 2

    def of_block(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, targets = each
        logits = decoder.logits(params, x)
        logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(BATCH_AXES, None, None))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return picked, logits.argmax(-1) == targets

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(count, width // block, block, *x.shape[2:]), 1, 0)

    found = jax.lax.map(of_block, (cut(hidden), cut(batch["targets"])))
    return tuple(jnp.moveaxis(each, 0, 1).reshape(count, width) for each in found)  # pyright: ignore[reportReturnType]


def _score(row: Row, logprobs: np.ndarray, best: np.ndarray) -> Score:
    mine = row.predicting
    logprob = float(logprobs[mine].sum(dtype=np.float64))
    if not math.isfinite(logprob):
        raise NumbersError(
            f"a text of {row.length} tokens has the log-probability {logprob}\n"
            "  the model's parameters give numbers that are not finite.\n"
            "  Take an earlier step, or set model.compute_dtype=float32."
        )
    return Score(logprob, bool(best[mine].all()))
