"""Check and complete batches of numpy arrays that a user provides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.step.step import Steps

_REQUIRED = ("tokens", "targets")
_NOT_NEGATIVE = {
    "loss_mask": "To ignore a target, set its loss_mask to 0.",
    "segment_ids": "Number documents from 1, and mark padding with 0.",
    "positions": "Number the tokens of each document from 0.",
}
"""Actions for arrays with negative values, keyed by name."""


def complete_batch(batch: Mapping[str, Any], steps: Steps) -> dict[str, np.ndarray]:
    """Return the batch with default values for missing arrays, in the dtypes of the steps.

    Raises:
        ConfigError: an array is missing, unknown or has a wrong shape, or a token id is outside the
            vocabulary.
    """
    check_mapping(batch)
    arrays = {name: _as_array(name, array) for name, array in batch.items()}
    for name in _REQUIRED:
        if name not in arrays:
            rule = f"is missing: a batch must contain {' and '.join(_REQUIRED)}."
            raise _batch_error(name, None, rule, f"Add {name}, integers [sequences, T].")
    tokens, (size, length) = arrays["tokens"], steps.shape
    most, count = size, steps.train_schedule.num_microbatches
    if tokens.ndim != 2 or tokens.shape[1] != length:
        rule = f"must have shape [sequences, {length}] (train.sequence_length)."
        action = "Cut or pad the sequences, or set train.sequence_length."
        raise _batch_error("tokens", tokens.shape, rule, action)
    rows = len(tokens)
    if not 0 < rows <= most or rows * count % size:
        rule = (
            f"must have {size} sequences (train.batch_size), or a smaller multiple of "
            f"{size // count} (train.batch_size / pipeline.microbatches)."
        )
        raise _batch_error("tokens", tokens.shape, rule, "Change the batch, or train.batch_size.")
    arrays = _defaults(rows, length) | arrays
    wanted = steps.abstract_batch(rows)
    for name in arrays:
        if name not in wanted:
            rule = f"is not an array of a batch: the arrays are {', '.join(wanted)}."
            raise _batch_error(name, None, rule, "Remove the array.")
    for name, like in wanted.items():
        if name == "source_ids":
            arrays.setdefault(name, np.zeros(rows, np.int32))
        if name not in arrays or arrays[name].shape != like.shape:
            shape = arrays[name].shape if name in arrays else None
            rule = f"must be an array with shape {list(like.shape)}."
            raise _batch_error(name, shape, rule, f"Add {name}, or change its shape.")
    vocabulary = steps.param_layout.decoder.config.vocab_size
    for name in _REQUIRED:
        _check_ids(name, arrays[name], vocabulary)
    for name, like in wanted.items():
        _check_values(name, arrays[name], like.dtype)
    return {name: arrays[name].astype(like.dtype, copy=False) for name, like in wanted.items()}


def _defaults(rows: int, length: int) -> dict[str, np.ndarray]:
    shape = (rows, length)
    return {
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        "loss_mask": np.ones(shape, np.float32),
        "example_ids": np.arange(rows, dtype=np.int32),
    }


def check_mapping(batch: object) -> None:
    """Check the type of a batch.

    Raises:
        ConfigError: the batch is not a mapping from names to arrays.
    """
    if not isinstance(batch, Mapping):
        rule, action = "must be a dict of arrays.", 'Pass {"tokens": ..., "targets": ...}.'
        given = "None" if batch is None else type(batch).__name__
        raise ConfigError.one(Code.API_BATCH, "batch", given, rule, action)


def _as_array(name: str, content: Any) -> np.ndarray:
    try:
        array = np.asarray(content)
    except (TypeError, ValueError) as error:  # lists with different lengths
        rule = f"cannot be converted to an array: {error}."
        raise _batch_error(name, None, rule, "Pass a numpy array.") from error
    if not (np.issubdtype(array.dtype, np.number) or array.dtype.kind in "bV"):
        raise _batch_error(name, array.dtype, "must contain numbers.", "Pass a numpy array.")
    return array


def _check_values(name: str, array: np.ndarray, dtype: Any) -> None:
    """Check that an array can be converted to the dtype of the step, and its range."""
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(array.dtype, np.integer):
        raise _batch_error(name, array.dtype, "must be integers.", f"Convert {name} to int32.")
    if name in _NOT_NEGATIVE and array.size and not (least := array.astype(dtype).min()) >= 0:
        raise _batch_error(name, least, "must be at least 0, and not NaN.", _NOT_NEGATIVE[name])


def _check_ids(name: str, ids: np.ndarray, vocabulary: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise _batch_error(name, ids.dtype, "must be integers.", f"Convert {name} to int32.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise _batch_error(
            name,
            low if low < 0 else high,
            f"must be a token id from 0 to {vocabulary - 1} (model.vocab_size).",
            "Use the tokenizer of the model; to ignore a target, set its loss_mask to 0.",
        )


def _batch_error(name: str, value: object, rule: str, action: str) -> ConfigError:
    return ConfigError.one(Code.API_BATCH, f"batch: {name}", value, rule, action)
