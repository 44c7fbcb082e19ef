"""How much better a completion is than the others of its group. No jax."""

from __future__ import annotations

from typing import Literal

import numpy as np


def advantages(rewards: np.ndarray, scale: Literal["std", "mean"]) -> np.ndarray:
    """float64 `[groups, members]`: rewards minus their group's mean, with `std` by its deviation.

    A group whose rewards are all the same has exactly 0: it says nothing.
    """
    rewards = np.asarray(rewards, np.float64)
    flat = rewards.min(axis=1, keepdims=True) == rewards.max(axis=1, keepdims=True)
    gain = np.where(flat, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    if scale == "mean":
        return gain
    return gain / np.where(flat, 1.0, rewards.std(axis=1, keepdims=True))
