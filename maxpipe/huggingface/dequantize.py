"""Readers of quantized tensors, which return dequantized values.

A reader has the interface of a file reader, so that imports read quantized and plain tensors in the
same way. Only the codes of the requested part are read, and the scales of the blocks that contain
them. Products of codes and scales are computed in float32 and rounded to the dtype in config.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.quantization import KEY, MXFP4, Quantization
from maxpipe.huggingface.safetensors import (
    DTYPES,
    SafetensorsReader,
    TensorEntry,
    format_shape,
    quote_name,
)
from maxpipe.huggingface.tensor_layouts import name_pattern
from maxpipe.io.formatting import pluralize

_COPY_WEIGHTS = "Copy the weight files again from the model's source."
_USE_CONFIG = "Use the config.json that was published with these weights."
_MAX_SCALE = 2.0**16
"""Largest accepted scale. A flipped exponent bit of a scale gives a much larger value."""
_CHUNK = 1 << 17
"""Number of elements that are dequantized at a time, so that intermediate arrays fit in caches."""


class TensorReader(Protocol):
    """Reader of tensors: a file, a tensor in parts, or a quantized tensor that is dequantized."""

    @property
    def path(self) -> Path:
        """Path of the file that messages name."""
        ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Dtypes and shapes, keyed by tensor name."""
        ...

    @property
    def is_finite(self) -> bool:
        """Whether `read` never returns NaN or infinity."""
        ...

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        row_shape: tuple[int, ...] | None = None,
        columns: tuple[int, int] | None = None,
        lines: slice = slice(None),
    ) -> np.ndarray:
        """Read a range of rows; see `SafetensorsReader.read`."""
        ...


@dataclass(frozen=True, eq=False)
class _StoredTensor:
    """A tensor in a file."""

    reader: SafetensorsReader
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.reader.entries[self.name]

    @property
    def where(self) -> str:
        return f"{self.reader.path}: {self.name}"

    def read(self, rows: tuple[int, int], row_shape: tuple[int, ...], **more: Any) -> np.ndarray:
        return self.reader.read(self.name, rows, row_shape, **more)


@dataclass(frozen=True, eq=False)
class QuantizedReader:
    """Reader of one quantized tensor, which returns dequantized values."""

    quantization: Quantization
    name: str
    shape: tuple[int, ...]
    codes: _StoredTensor
    scales: _StoredTensor

    @property
    def path(self) -> Path:
        """Path of the file with the codes."""
        return self.codes.reader.path

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Dtype and shape of the dequantized tensor. The byte range is empty."""
        return {self.name: TensorEntry(self.quantization.dtype, self.shape, 0, 0)}

    @property
    def is_finite(self) -> bool:
        """Whether all codes, multiplied by the largest accepted scale, are finite in the dtype."""
        return self.quantization.is_float4 and self.quantization.dtype != "F16"

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        row_shape: tuple[int, ...] | None = None,
        columns: tuple[int, int] | None = None,
        lines: slice = slice(None),
    ) -> np.ndarray:
        """Dequantize a range of rows; see `SafetensorsReader.read`.

        Only the codes of these rows and columns are read, and the scales of the blocks that
        contain them. Only the selected lines are dequantized.

        Raises:
            ConfigError: a file cannot be read, or a scale is invalid.
        """
        assert name == self.name
        row_shape = self.shape[1:] if row_shape is None else row_shape
        rows = (0, math.prod(self.shape) // math.prod(row_shape)) if rows is None else rows
        columns = (0, self.shape[-1]) if columns is None else columns
        # Matrix rows are numbered across all leading dims.
        first, end = (math.prod(row_shape[:-1]) * row for row in rows)
        numbers = np.arange(first, end).reshape(rows[1] - rows[0], *row_shape[:-1])
        numbers = numbers[..., lines]
        values = np.empty(
            (*numbers.shape, columns[1] - columns[0]), DTYPES[self.quantization.dtype]
        )
        codes, skipped = self._read_codes((first, end), columns)
        index, scales = self._read_scales((first, end), columns)
        chosen = numbers.reshape(-1) - first
        target = values.reshape(len(chosen), -1)
        step = max(1, _CHUNK // target.shape[1])
        for begin in range(0, len(chosen), step):
            here = chosen[begin : begin + step]
            here = slice(here[0], here[-1] + 1) if lines == slice(None) else here
            self._dequantize(
                target[begin : begin + step], codes[here], skipped, scales[index[here]], columns[0]
            )
        return values

    def _dequantize(
        self,
        target: np.ndarray,
        codes: np.ndarray,
        skipped: int,
        scales: np.ndarray,
        first_column: int,
    ) -> None:
        """Dequantize lines of codes, without the first `skipped` values of each line."""
        encoding = self.quantization.encoding
        width = self.quantization.block[1] or self.shape[-1]
        has_full_blocks = not (first_column % width or target.shape[1] % width)
        if self.quantization.is_float4 and target.dtype == ml_dtypes.bfloat16 and has_full_blocks:
            _look_up_float4(target, codes, scales)
            return
        values = np.take(encoding.values, codes, axis=0, mode="clip").reshape(len(codes), -1)
        values = values[:, skipped : skipped + target.shape[1]]
        _multiply(values, scales, width, first_column % width)
        types = [DTYPES[self.quantization.dtype]]
        if encoding.rounds_to_scale_dtype:
            types.insert(0, DTYPES[self.scales.entry.dtype])
        _round(target, values, types, is_exact=self.quantization.is_float4)

    def _read_codes(
        self, lines: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[np.ndarray, int]:
        """Return bytes of codes, and the number of values to skip in each row."""
        entry = self.codes.entry
        packed = math.prod(entry.shape) // math.prod(self.shape[:-1])  # elements of one row
        per_element = self.quantization.encoding.values[0].size * _ITEM_BYTES[entry.dtype]
        part = (columns[0] // per_element, min(packed, -(-columns[1] // per_element)))
        part = None if part == (0, packed) else part
        codes = self.codes.read(lines, (packed,), columns=part).view(np.uint8)
        return codes, columns[0] - per_element * (part[0] if part else 0)

    def _read_scales(
        self, lines: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each row's scales, and the scales of the blocks with these columns.

        Raises:
            ConfigError: a scale is negative, not finite or too large.
        """
        grid = self.quantization.grid(self.shape)
        height, width = (
            size or whole
            for size, whole in zip(self.quantization.block, self.shape[-2:], strict=True)
        )
        matrix, line = np.divmod(np.arange(*lines), self.shape[-2])
        index = matrix * grid[-2] + line // height
        first, end = int(index[0]), int(index[-1]) + 1
        part = (columns[0] // width, -(-columns[1] // width))
        part = None if part == (0, grid[-1]) else part
        stored = self.scales.read((first, end), (grid[-1],), columns=part)
        if stored.dtype == np.uint8:
            stored = stored.view(ml_dtypes.float8_e8m0fnu)
        scales = stored.astype(np.float32)
        valid = (scales >= 0) & (scales <= _MAX_SCALE)
        if not valid.all():
            bad = int(scales.size - np.count_nonzero(valid))
            raise ConfigError.one(
                Code.HF_DAMAGED,
                self.scales.where,
                None,
                f"must have scales from 0 to {_MAX_SCALE:g}, but has "
                f"{pluralize(bad, 'scale')} outside this range or NaN, such as "
                f"{scales[~valid].flat[0]:g}.",
                _COPY_WEIGHTS,
            )
        return index - first, scales


_ITEM_BYTES = {"F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4}


def _look_up_float4(target: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """Dequantize lines of complete blocks of float4 codes to bfloat16.

    Every pair of values is looked up by its scale and its byte of codes, which is faster than
    arithmetic in float32.
    """
    # The exponents of the scales, in the upper byte.
    exponents = (scales.view(np.uint32) >> 15 & 0xFF00).astype(np.uint16)
    blocks = codes.reshape(*scales.shape, -1)
    index = np.bitwise_or(blocks, exponents[..., None], dtype=np.uint16).reshape(codes.shape)
    np.take(_float4_pairs(), index, out=target.view(np.uint32), mode="clip")


@functools.cache
def _float4_pairs() -> np.ndarray:
    """Return pairs of bfloat16 values as 32-bit words, indexed by 256 * scale + byte of codes."""
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = MXFP4.values[None] * scales[:, None, None]  # [scales, bytes, values of a byte]
    return (pairs.view(np.uint32) >> 16).astype(np.uint16).reshape(-1, 2).view(np.uint32)[:, 0]


def _multiply(values: np.ndarray, scales: np.ndarray, width: int, first: int) -> None:
    """Multiply float32 values `[rows, columns]` in place by the scales `[rows, blocks]`.

    Each block has `width` columns, except that the first `first` columns of the first block are
    missing, and the last block may be narrower.
    """
    begin, count = 0, values.shape[1]
    if first:
        begin = min(width - first, count)
        values[:, :begin] *= scales[:, :1]
        scales = scales[:, 1:]
    full = (count - begin) // width
    end = begin + full * width
    if full:
        blocks = values[:, begin:end].reshape(len(values), full, width)
        blocks *= scales[:, :full, None]
    if end < count:
        values[:, end:] *= scales[:, full : full + 1]


def _round(
    target: np.ndarray, values: np.ndarray, types: list[np.dtype], *, is_exact: bool
) -> None:
    """Round float32 values to each dtype in turn, and write them to the target.

    If `is_exact` is set, bfloat16 represents all values.
    """
    with np.errstate(over="ignore"):
        for dtype in types[:-1]:
            if dtype not in (types[-1], values.dtype):
                values = values.astype(dtype).astype(np.float32)
        if target.dtype != ml_dtypes.bfloat16:
            target[...] = values
            return
    if is_exact:
        target.view(np.uint16)[...] = values.view(np.uint16)[:, 1::2]
        return
    # Integer arithmetic rounds to the nearest even value. numpy's cast to bfloat16 holds the GIL.
    words = np.ascontiguousarray(values).view(np.uint32)
    odd = words >> 16
    odd &= 1
    odd += 0x7FFF
    odd += words
    odd >>= 16
    target.view(np.uint16)[...] = odd


def is_transposed(reader: TensorReader) -> bool:
    """Return whether stacked matrices have the output dim first, unlike in the plain folder."""
    return isinstance(reader, QuantizedReader) and reader.quantization.is_transposed


def check_layouts(
    readers: Mapping[str, TensorReader], names: Mapping[str, str], transposed: Iterable[str]
) -> None:
    """Check that a tensor is transposed in all layers if it is transposed in one layer.

    `names` contains the tensor names in the files, keyed like `readers` and `transposed`.

    Raises:
        ConfigError: a tensor has another layout than the same tensor of another layer.
    """
    like = {name_pattern(name): names[name] for name in transposed}
    for name, reader in readers.items():
        other = like.get(name_pattern(name))
        if other is not None and not is_transposed(reader):
            where = f"{reader.path}: {names[name]}"
            rule = f"must be quantized like {quote_name(other)}, which has another layout."
            raise ConfigError.one(Code.HF_QUANTIZED, where, None, rule, _COPY_WEIGHTS)


def dequantized(
    folder: Path, present: Mapping[str, SafetensorsReader], quantization: Quantization
) -> dict[str, TensorReader]:
    """Return the reader of each tensor, keyed by the name of the dequantized tensor.

    Tensors without scales are plain tensors. Activations are not quantized, so tensors with their
    scales are omitted.

    Raises:
        ConfigError: codes or scales are missing, or their dtypes or shapes do not match the format.
    """
    readers: dict[str, TensorReader] = {}
    plain = dict(present)
    for each in (*quantization.others, quantization):
        endings = each.encoding.activation_scales
        plain = {name: reader for name, reader in plain.items() if not name.endswith(endings)}
        more, used = _quantized_readers(folder, plain, each)
        readers |= more
        plain = {name: reader for name, reader in plain.items() if name not in used}
    _check_scales_have_codes(plain, quantization)
    for name, reader in plain.items():
        if name in readers:
            rule = f"must not be present in addition to {name}{quantization.encoding.codes}."
            where = f"{reader.path}: {name}"
            raise ConfigError.one(Code.HF_QUANTIZED, where, None, rule, _COPY_WEIGHTS)
    return readers | plain


def _check_scales_have_codes(
    plain: Mapping[str, SafetensorsReader], quantization: Quantization
) -> None:
    """Check that the dtypes of codes identified all scales of formats in which codes have the names
    of plain matrices.

    Raises:
        ConfigError: scales belong to a tensor of another dtype.
    """
    formats = [each.encoding for each in quantization.others if each.encoding.weight]
    for name in plain:
        for scales, codes in {(each.scales, each.codes) for each in formats}:
            reader = plain.get(name.removesuffix(scales) + codes) if name.endswith(scales) else None
            if reader is None:
                continue
            weight = name.removesuffix(scales) + codes
            dtypes = " or ".join(each.code_dtype for each in formats)
            rule = f"must have dtype {dtypes}, because {quote_name(name)} has its scales. Only "
            rule += "config.json with expert_dtype fp4 describes I8."
            where = f"{reader.path}: {weight}"
            given = reader.entries[weight].dtype
            raise ConfigError.one(Code.HF_QUANTIZED, where, given, rule, _USE_CONFIG)


def _quantized_readers(
    folder: Path, present: Mapping[str, SafetensorsReader], quantization: Quantization
) -> tuple[dict[str, TensorReader], set[str]]:
    """Return the reader of each tensor in one format, and the names of all codes and scales."""
    readers: dict[str, TensorReader] = {}
    used = set[str]()
    encoding = quantization.encoding
    for name, codes in _quantized(folder, present, quantization):
        if (module := _excluded(name, quantization)) is not None:
            rule = f"must not be quantized, because {KEY} in config.json excludes {module!r}."
            raise ConfigError.one(
                Code.HF_QUANTIZED, codes.where, codes.entry.dtype, rule, _USE_CONFIG
            )
        _check_dtype(codes, (encoding.code_dtype,), quantization)
        shape = _shape(name, codes, present, quantization)
        scales = _stored(folder, present, name, encoding.scales, f"the scales of {codes.name}")
        _check_dtype(scales, encoding.scale_dtypes, quantization)
        _check_scale_shape(scales, shape, quantization)
        used |= {codes.name, scales.name, name + encoding.shape if encoding.shape else codes.name}
        weight = name + encoding.weight
        readers[weight] = QuantizedReader(quantization, weight, shape, codes, scales)
    return readers, used


def _quantized(
    folder: Path, present: Mapping[str, SafetensorsReader], quantization: Quantization
) -> Iterator[tuple[str, _StoredTensor]]:
    """Yield the name and the codes of each quantized tensor."""
    encoding = quantization.encoding
    names = dict[str, None]()
    for name, reader in present.items():
        if encoding.weight:
            # Plain matrices and other formats have the same names.
            has_dtype = reader.entries[name].dtype == encoding.code_dtype
            if name.endswith(encoding.codes) and has_dtype and f"{name}_scale_inv" not in present:
                names[name.removesuffix(encoding.codes)] = None
        elif name.endswith(encoding.scales):
            names[name.removesuffix(encoding.scales)] = None
        elif encoding.codes:
            if name.endswith(encoding.codes):
                names[name.removesuffix(encoding.codes)] = None
        elif reader.entries[name].dtype == encoding.code_dtype:
            names[name] = None
    for name in names:
        yield name, _stored(folder, present, name, encoding.codes, f"the codes of {name}")


def _stored(
    folder: Path, present: Mapping[str, SafetensorsReader], name: str, suffix: str, about: str
) -> _StoredTensor:
    """Return a tensor that a quantized tensor requires.

    Raises:
        ConfigError: the tensor is missing.
    """
    if (reader := present.get(name + suffix)) is None:
        rule = f"lacks the tensor {quote_name(name + suffix)}, {about}."
        raise ConfigError.one(Code.HF_QUANTIZED, str(folder), None, rule, _COPY_WEIGHTS)
    return _StoredTensor(reader, name + suffix)


def _excluded(name: str, quantization: Quantization) -> str | None:
    """Return the name with which config.json excludes a tensor's module from quantization.

    Regular expressions are not applied: they come from an untrusted file.
    """
    parts = name.removesuffix(".weight").split(".")
    for count in range(len(parts), 0, -1):
        if (module := ".".join(parts[:count])) in quantization.excluded_modules:
            return module
    return None


def _check_dtype(
    tensor: _StoredTensor, dtypes: tuple[str, ...], quantization: Quantization
) -> None:
    if tensor.entry.dtype not in dtypes:
        rule = (
            f"must have dtype {' or '.join(dtypes)} in {quantization.encoding.name} weights, which "
            f"{KEY} in config.json declares."
        )
        raise ConfigError.one(
            Code.HF_QUANTIZED, tensor.where, tensor.entry.dtype, rule, _USE_CONFIG
        )


def _shape(
    name: str,
    codes: _StoredTensor,
    present: Mapping[str, SafetensorsReader],
    quantization: Quantization,
) -> tuple[int, ...]:
    """Return the shape of the dequantized tensor.

    Raises:
        ConfigError: the codes do not have a valid shape.
    """
    encoding, shape = quantization.encoding, codes.entry.shape

    def refuse(rule: str) -> ConfigError:
        where, given = codes.where, format_shape(shape)
        return ConfigError.one(Code.HF_QUANTIZED, where, given, rule, _COPY_WEIGHTS)

    if encoding is MXFP4:
        if len(shape) < 3 or shape[-1] != 16 or 0 in shape:
            raise refuse("must have blocks of 16 bytes as its last dim: 32 codes of 4 bits.")
        return (*shape[:-2], 32 * shape[-2])
    if len(shape) < 2 or 0 in shape:
        raise refuse("must be a matrix.")
    if not encoding.shape:
        return (*shape[:-1], 2 * shape[-1]) if quantization.is_float4 else shape
    stored = _stored(
        codes.reader.path.parent, present, name, encoding.shape, f"the shape of {name}"
    )
    _check_dtype(stored, ("I64", "I32"), quantization)
    if stored.entry.shape != (len(shape),):
        rule = f"must have {len(shape)} elements, one for each dim of {codes.name}."
        given = format_shape(stored.entry.shape)
        raise ConfigError.one(Code.HF_QUANTIZED, stored.where, given, rule, _COPY_WEIGHTS)
    sizes = tuple(int(size) for size in stored.read((0, len(shape)), ()))
    if (*sizes[:-1], -(-sizes[-1] // 8)) != shape:
        wanted = format_shape((*sizes[:-1], -(-sizes[-1] // 8)))
        raise refuse(
            f"must have the shape {wanted} to pack 8 codes per element, because {stored.name} is "
            f"{format_shape(sizes)}."
        )
    return sizes


def _check_scale_shape(
    scales: _StoredTensor, shape: tuple[int, ...], quantization: Quantization
) -> None:
    wanted = quantization.grid(shape)
    if scales.entry.shape == wanted:
        return
    if math.prod(wanted) == 1 and scales.entry.shape in ((), (1,)):
        return
    rows, columns = quantization.block
    block = f"{rows or 'all'} x {columns or 'all'}"
    rule = (
        f"must have the shape {format_shape(wanted)}: one scale for each block of {block} entries "
        f"of a tensor of the shape {format_shape(shape)}."
    )
    given = format_shape(scales.entry.shape)
    raise ConfigError.one(Code.HF_QUANTIZED, scales.where, given, rule, _USE_CONFIG)
