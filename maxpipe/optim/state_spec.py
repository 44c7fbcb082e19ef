"""What each optimizer keeps for every parameter. No jax.

State in memory and in checkpoints, the predictions of `plan` and the room that a checkpoint needs
follow from this; `optim.update` computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from maxpipe.config.schema import OptimConfig
from maxpipe.models.spec import Dims, Normal, Param

EMA = "average"
"""Name of the tree of averaged parameters, which no update reads."""
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}


class StateArray(NamedTuple):
    """One array that is kept for a parameter."""

    dims: Dims
    """Of the parameter's dims those that it has."""
    dtype: str
    dropped_dims: tuple[int, ...] = ()
    """Numbers of those that it has not."""


MatrixDims = tuple[tuple[int, ...], tuple[int, ...]]


def matrix_dims(param: Param) -> MatrixDims | None:
    """Numbers of the dims that a product with activations sums over, and of those it makes.

    Further dims number matrices, as that of experts does. None: it is no matrix. A table that is
    looked up has its vocabulary in place of what is summed over.
    """
    if not isinstance(param.init, Normal) or param.dims[-1] == (param.init.fan_in, ""):
        return None  # the latter are taps of convolutions
    dims = [n for n, axis in enumerate(param.axes) if axis not in ("experts", "ahead")]
    for count in range(1, len(dims)):
        inputs = tuple(dims[:count])
        is_table = param.axes[:count] == ("vocab",)
        if is_table or math.prod(param.shape[n] for n in inputs) == param.init.fan_in:
            return inputs, tuple(dims[count:])
    return None


def state_arrays(config: OptimConfig, param: Param, param_dtype: str) -> Mapping[str, StateArray]:
    """What the config's optimizer keeps of a parameter, by the name of its tree in checkpoints.

    `mu` and `nu` are means of gradients and of their squares; `rows` and `columns` means of squares
    over the outputs and over the inputs of a matrix (arXiv:1804.04235).
    """
    if not param.trainable:
        return {}
    dtype = param_dtype if config.state_dtype == "same" else config.state_dtype
    found = {name: StateArray(param.dims, dtype) for name in _full_size_arrays(config, param)}
    if config.name == "adafactor" and (matrix := matrix_dims(param)) is not None:
        inputs, outputs = matrix
        for name, left_out in (("rows", outputs), ("columns", inputs)):
            dims = tuple(each for n, each in enumerate(param.dims) if n not in left_out)
            found[name] = StateArray(dims, "float32", left_out)
    if config.ema_decay:
        found[EMA] = StateArray(param.dims, "float32")
    return found


def _full_size_arrays(config: OptimConfig, param: Param) -> tuple[str, ...]:
    """Names of the arrays with all of the parameter's dims."""
    match config.name:
        case "adamw":
            return ("mu", "nu")
        case "lion":
            return ("mu",)
        case "adafactor":
            return () if matrix_dims(param) is not None else ("nu",)
        case "muon":
            return ("mu",) if is_orthogonalised(config, param) else ("mu", "nu")


def is_orthogonalised(config: OptimConfig, param: Param) -> bool:
    """Whether a parameter's updates are Muon's: a matrix, but no table of the vocabulary."""
    return config.name == "muon" and matrix_dims(param) is not None and "vocab" not in param.axes


def saved_bytes(
    config: OptimConfig, param: Param, param_dtype: str, *, trained_only: bool = False
) -> float:
    """Of a parameter and all that is kept for it, as a checkpoint holds them.

    `trained_only`: it holds no others, as that of adapters does.
    """
    if trained_only and not param.trainable:
        return 0.0
    own = StateArray(param.dims, param.own_dtype or param_dtype)
    held = (own, *state_arrays(config, param, param_dtype).values())
    return sum(math.prod(size for size, _ in each.dims) * BYTES[each.dtype] for each in held)
