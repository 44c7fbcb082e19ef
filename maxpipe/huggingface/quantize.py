"""Quantization of exported weight matrices to FP8 (e4m3) with a scale per 128 x 128 block.

The scale of a block depends on all of its rows, which an export reads in slabs of any size. The
checkpoint is therefore read twice: `BlockScales.add` collects the largest magnitude of each block,
and `BlockScales.quantize` then converts the rows. Only one float32 per block is kept in memory.
Source: arXiv:2412.19437, section 3.3. Codes and scales equal those of transformers 5.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.mapping import TensorMapping
from maxpipe.huggingface.quantization import FP8, FP8_BLOCK, KEY

OPTION = "command line: --quantize"
_WEIGHT, _SCALES = ".weight", "_scale_inv"
_MAX_FP8 = 448.0
_SMALLEST = 2.0**-100
"""Blocks with smaller values are stored as zeros, because the reciprocal scale would overflow."""


class BlockScales:
    """Scales of all matrices that an export quantizes."""

    def __init__(self, both: TensorMapping):
        """Select the matrices of all layers except routers and multi-token prediction projections.

        Raises:
            ConfigError: the experts of a layer share one tensor, for which no FP8 format exists.
        """
        self._maxima: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        for name, pieces in both.slices.items():
            if not name.startswith(("layers.", "ahead.layer.")) or name.endswith(".router"):
                continue
            for tensor in (piece.tensor for piece in pieces):
                shape = both.tensors[tensor]
                if len(shape) == 3 and not tensor.endswith(_WEIGHT):
                    raise ConfigError.one(
                        Code.HF_EXPORT,
                        OPTION,
                        "fp8",
                        f"is not supported for this model, because {tensor} contains the matrices "
                        "of all experts.",
                        "Omit --quantize.",
                    )
                if len(shape) == 2 and min(shape) > 1 and tensor.endswith(_WEIGHT):
                    grid = [-(-size // block) for size, block in zip(shape, FP8_BLOCK, strict=True)]
                    self._maxima[tensor] = np.zeros(grid, np.float32)
        self.plain_modules = sorted(
            {"lm_head"}
            | {
                name.removesuffix(_WEIGHT)
                for name, shape in both.tensors.items()
                if len(shape) > 1 and name.endswith(_WEIGHT) and name not in self._maxima
            }
        )
        """Names of the modules whose matrices are not quantized."""

    def __contains__(self, tensor: str) -> bool:
        """Return whether a tensor is quantized."""
        return tensor in self._maxima

    def tensors(
        self, tensor: str, shape: tuple[int, ...]
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return the dtypes and shapes of the codes and scales of a tensor."""
        scales = (np.dtype(np.float32), self._maxima[tensor].shape)
        return {tensor: (FP8, shape), tensor + _SCALES: scales}

    def add(self, tensor: str, values: np.ndarray, first: int) -> None:
        """Include rows of a tensor, which start at row `first`, in the maxima. Thread-safe."""
        height, width = FP8_BLOCK
        magnitudes = np.abs(values.astype(np.float32))
        columns = np.arange(0, values.shape[1], width)
        of_rows = np.maximum.reduceat(magnitudes, columns, axis=1)
        blocks, starts = np.unique(
            np.arange(first, first + len(values)) // height, return_index=True
        )
        of_blocks = np.maximum.reduceat(of_rows, starts, axis=0)
        with self._lock:
            maxima = self._maxima[tensor]
            maxima[blocks] = np.maximum(maxima[blocks], of_blocks)

    def quantize(self, tensor: str, values: np.ndarray, first: int) -> np.ndarray:
        """Return the codes of rows of a tensor, which start at row `first`."""
        height, width = FP8_BLOCK
        factors = self._factors(tensor)[np.arange(first, first + len(values)) // height]
        factors = np.repeat(factors, width, axis=1)[:, : values.shape[1]]
        scaled = values.astype(np.float32) * factors
        return np.clip(scaled, -_MAX_FP8, _MAX_FP8, out=scaled).astype(FP8)

    def _factors(self, tensor: str) -> np.ndarray:
        maxima = self._maxima[tensor]
        is_zero = maxima < _SMALLEST
        # transformers multiplies by the reciprocal, which is rounded differently than a division.
        factors = np.float32(1) / np.where(is_zero, np.float32(1), maxima) * np.float32(_MAX_FP8)
        return np.where(is_zero, np.float32(1), factors)

    @property
    def scales(self) -> Mapping[str, np.ndarray]:
        """Scales by which codes are multiplied, keyed by tensor name."""
        return {tensor + _SCALES: np.float32(1) / self._factors(tensor) for tensor in self._maxima}

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        return {
            KEY: {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(FP8_BLOCK),
                "modules_to_not_convert": self.plain_modules,
            }
        }
