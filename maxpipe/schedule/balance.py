"""The cut of the layer stack into chunks, as even as the layers' costs allow. No jax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced_cut(
    costs: Sequence[float], num_chunks: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Layers of each chunk, at least one, such that the costliest chunk is as cheap as possible.

    `costs` are those of the layers; `first` and `last` are added to the first and the last chunk,
    for an embedding and a loss head that one stage does alone. Among equally good cuts the most
    even one is taken, longer chunks first: stages advance in lockstep, so long chunks should meet.

    Source: dynamic programming over contiguous cuts, as in Alpa (arXiv:2201.12023).
    """
    if not first and not last and min(costs, default=0.0) == max(costs, default=0.0):
        size, longer = divmod(len(costs), num_chunks)
        return (size + 1,) * longer + (size,) * (num_chunks - longer)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    ends = np.zeros(num_chunks)
    ends[0] += first
    ends[-1] += last
    points = np.arange(len(total))
    # Of the layers from one point to a later one; to any other point there is no chunk.
    spans = np.where(points[:, None] > points, total[:, None] - total, np.inf)

    def best(limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Of the first n layers in k chunks: the worst chunk, or the squares when limited."""
        value = np.full((num_chunks + 1, len(total)), np.inf)
        taken = np.zeros(value.shape, np.int32)
        value[0, 0] = 0.0
        for chunk in range(1, num_chunks + 1):
            before, cost = value[chunk - 1], spans + ends[chunk - 1]
            if np.isinf(limit):
                found = np.maximum(before, cost)
            else:
                found = np.where(cost <= limit * (1 + 1e-9), before + cost**2, np.inf)
            # Of equals the last: the shortest last chunk, so the longer ones come first.
            start = points[-1] - np.argmin(found[:, ::-1], axis=1)
            value[chunk], taken[chunk] = found[points, start], points - start
        return value, taken

    limit = best(np.inf)[0][-1, -1]
    taken = best(float(limit))[1]
    sizes, end = [], len(costs)
    for chunk in range(num_chunks, 0, -1):
        sizes.append(int(taken[chunk, end]))
        end -= sizes[-1]
    return tuple(reversed(sizes))
