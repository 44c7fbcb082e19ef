"""Specs of the optimizer-state arrays of each parameter.

The specs define the state in memory and in checkpoints. `plan` uses them to predict memory use and
checkpoint size. `optim.update` computes the arrays. This module does not import jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.models.spec import Dims, Normal, Param

EMA = "average"
"""Name of the tree that stores the EMA of the parameters; updates do not use the EMA."""
BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}


class StateArray(NamedTuple):
    """An optimizer-state array of one parameter."""

    dims: Dims
    """Dims that the array shares with the parameter."""
    dtype: str
    dropped_dims: tuple[int, ...] = ()
    """Indices of the parameter's dims that the array lacks."""


MatrixDims = tuple[tuple[int, ...], tuple[int, ...]]


def matrix_dims(param: Param) -> MatrixDims | None:
    """Return the indices of a matrix's contracted dims and output dims, or None.

    Other dims, such as the expert dim, are batch dims. In an embedding table, the vocabulary is the
    contracted dim. If the parameter is not a matrix, return None.
    """
    if not isinstance(param.init, Normal) or param.dims[-1] == (param.init.fan_in, ""):
        return None  # a vector or a convolution kernel
    dims = [n for n, axis in enumerate(param.axes) if axis not in ("experts", "ahead")]
    for count in range(1, len(dims)):
        inputs = tuple(dims[:count])
        is_table = param.axes[:count] == ("vocab",)
        if is_table or math.prod(param.shape[n] for n in inputs) == param.init.fan_in:
            return inputs, tuple(dims[count:])
    return None


def state_arrays(config: OptimConfig, param: Param, param_dtype: str) -> Mapping[str, StateArray]:
    """Return the optimizer-state arrays of a parameter, keyed by their tree name in checkpoints.

    `mu` and `nu` are moving averages of the gradients and of the squared gradients. `rows` and
    `columns` are moving averages of the squared gradients of a matrix, averaged over its outputs
    and over its inputs, respectively (arXiv:1804.04235).
    """
    if not param.trainable:
        return {}
    dtype = param_dtype if config.state_dtype == "same" else config.state_dtype
    arrays = {name: StateArray(param.dims, dtype) for name in _full_size_arrays(config, param)}
    if config.name == "adafactor" and (matrix := matrix_dims(param)) is not None:
        inputs, outputs = matrix
        for name, left_out in (("rows", outputs), ("columns", inputs)):
            dims = tuple(dim for n, dim in enumerate(param.dims) if n not in left_out)
            arrays[name] = StateArray(dims, "float32", left_out)
    if config.ema_decay:
        arrays[EMA] = StateArray(param.dims, "float32")
    return arrays


def _full_size_arrays(config: OptimConfig, param: Param) -> tuple[str, ...]:
    """Return the names of the state arrays that have all dims of the parameter."""
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
    """Return whether Muon orthogonalizes the updates, which is true for matrices without a vocab
    dim.
    """
    return config.name == "muon" and matrix_dims(param) is not None and "vocab" not in param.axes


def saved_bytes(
    config: OptimConfig, param: Param, param_dtype: str, *, trained_only: bool = False
) -> float:
    """Return the size in bytes of a parameter and its optimizer state in a checkpoint.

    If `trained_only` is set, the checkpoint contains only trainable parameters, as with adapters.
    """
    if trained_only and not param.trainable:
        return 0.0
    own = StateArray(param.dims, param.own_dtype or param_dtype)
    held = (own, *state_arrays(config, param, param_dtype).values())
    return sum(math.prod(size for size, _ in array.dims) * BYTES[array.dtype] for array in held)
