"""Safetensors files: validated reading, incremental writing, and errors about their tensors.

The numpy interface of the `safetensors` package does not support bfloat16, so this module has its
own reader, which reads each tensor into a single array. Because model folders come from untrusted
sources, the reader rejects headers with duplicate names or gaps between tensors.

If a folder does not match its config.json, the error names the detected layout.

Source of the format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.config_json import FILE, ModelDescription
from maxpipe.io.direct_io import read_bytes
from maxpipe.io.files import open_regular
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported weight dtypes, keyed by their name in safetensors files."""

INTEGERS: Mapping[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
"""Supported dtypes of integer parameters. Exports write the first one, as transformers does."""

_STORED: Mapping[str, np.dtype] = {
    **DTYPES,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E8M0"), np.dtype(np.uint8)),
    **INTEGERS,
}
"""Dtypes in which tensors are read. Codes of 8-bit floats are read as bytes."""

_NAMES = {dtype: name for name, dtype in (*DTYPES.items(), *INTEGERS.items())}
_NAMES[np.dtype(ml_dtypes.float8_e4m3fn)] = "F8_E4M3"
_WRITTEN = {name: dtype for dtype, name in _NAMES.items()}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64},
    **{"I64": 64, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
}
"""Number of bits per element for every dtype in the safetensors format."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # limit of the format
_MAX_DIMS = 16
"""Maximum number of dims of a tensor. Weights of published models have at most 6 dims."""
_METADATA = "__metadata__"
_ALIGNMENT = 8


class TensorEntry(NamedTuple):
    """Dtype, shape and byte range of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte, relative to the end of the header."""
    end: int


class SafetensorsReader:
    """Reader of one file, which is reopened for each read because a folder may have hundreds of
    files.
    """

    def __init__(self, path: Path):
        """Read and check the header.

        Raises:
            ConfigError: the file is not a valid safetensors file.
        """
        self.path = path
        try:
            self._start, self.entries = _header(path)
        except (OSError, ValueError, RecursionError) as error:
            raise damaged_file_error(
                path, getattr(error, "strerror", None) or str(error)
            ) from error

    is_finite = False
    """Whether `read` never returns NaN or infinity."""

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        row_shape: tuple[int, ...] | None = None,
        columns: tuple[int, int] | None = None,
        lines: slice = slice(None),
    ) -> np.ndarray:
        """Read a tensor or a range of its rows.

        A row is an entry along the first dim. If `row_shape` is set, all dims before it are merged
        into one row dim. If `columns` is set, only this range of the last dim is read. `lines`
        selects entries of the second-to-last dim.

        Raises:
            ConfigError: the file ends too early or cannot be read.
        """
        entry = self.entries[name]
        dtype, shape, begin = _STORED[entry.dtype], entry.shape, entry.begin
        if rows is not None:
            row_shape = shape[1:] if row_shape is None else row_shape
            begin += rows[0] * math.prod(row_shape) * dtype.itemsize
            shape = (rows[1] - rows[0], *row_shape)
        step, count = 0, 1  # distance and number of the parts to read
        if columns is not None:
            step, count = shape[-1] * dtype.itemsize, math.prod(shape[:-1])
            begin += columns[0] * dtype.itemsize
            shape = (*shape[:-1], columns[1] - columns[0])
        size = math.prod(shape) * dtype.itemsize
        place = self._start + begin
        try:
            with open(open_regular(self.path), "rb", buffering=0) as stream:
                file = stream.fileno()
                if count == 1:
                    array = read_bytes(file, place, size).view(dtype).reshape(shape)
                else:
                    array = np.empty(shape, dtype)
                    buffer, part_size = _bytes(array), size // max(count, 1)
                    for part in range(count):
                        part_buffer = buffer[part * part_size : (part + 1) * part_size]
                        _read(file, part_buffer, place + part * step)
        except EOFError as error:
            reason = f"ends inside the tensor {quote_name(name)}"
            raise damaged_file_error(self.path, reason) from error
        except OSError as error:
            raise damaged_file_error(self.path, error.strerror or str(error)) from error
        return array if lines == slice(None) else array[..., lines, :]


class JoinedReader:
    """Reader of one tensor whose rows are stored in several tensors."""

    def __init__(self, name: str, parts: Sequence[tuple[str, SafetensorsReader]]):
        """Declare the tensor `name`; `parts` has the names and readers of the stored tensors.

        Raises:
            ValueError: the stored tensors differ in more than their number of rows.
        """
        stored = [reader.entries[part] for part, reader in parts]
        if len({(entry.dtype, entry.shape[1:]) for entry in stored}) > 1 or not stored[0].shape:
            raise ValueError(f"the parts of {quote_name(name)} have different dtypes or shapes")
        num_rows = sum(entry.shape[0] for entry in stored)
        entry = stored[0]._replace(shape=(num_rows, *stored[0].shape[1:]))
        self.path, self.entries = parts[0][1].path, {name: entry}
        self._parts = parts

    is_finite = False
    """Whether `read` never returns NaN or infinity."""

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        row_shape: tuple[int, ...] | None = None,
        columns: tuple[int, int] | None = None,
        lines: slice = slice(None),
    ) -> np.ndarray:
        """Read the tensor or a range of its rows, as `SafetensorsReader.read`."""
        shape = self.entries[name].shape
        if rows is None:
            rows, row_shape = (0, shape[0]), None
        row_shape = shape[1:] if row_shape is None else row_shape
        row_size, offset, arrays = math.prod(row_shape), 0, []
        for part, reader in self._parts:
            size = math.prod(reader.entries[part].shape)
            first, end = max(rows[0] * row_size - offset, 0), min(rows[1] * row_size - offset, size)
            if first < end:
                arrays.append(reader.read(part, (first, end), ()))
            offset += size
        array = np.concatenate(arrays).reshape(rows[1] - rows[0], *row_shape)
        if columns is not None:
            array = array[..., columns[0] : columns[1]]
        return array if lines == slice(None) else array[..., lines, :]


def damaged_file_error(path: Path, reason: str) -> ConfigError:
    """Return the error for an invalid file."""
    return ConfigError.one(
        Code.HF_DAMAGED,
        str(path),
        None,
        f"cannot be used as a safetensors file: {reason}.",
        "Copy the file again from its source, and compare sizes or digests.",
    )


def quote_name(name: str) -> str:
    """Return a tensor's name for messages, quoted and truncated."""
    return repr(name if len(name) <= 100 else f"{name[:97]}...")


def _header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    with open(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise ValueError(f"the file has only {size} bytes and cannot contain a header")
        (length,) = _LENGTH.unpack(first)
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the header size is {length:,} bytes, but the limit is 100 million")
        if length > size - _LENGTH.size:
            raise ValueError(f"the header size is {length:,} bytes, but the file has {size:,}")
        text = stream.read(length)
    start = _LENGTH.size + length
    parse_json(text, dict[str, Any])  # enforces limits; the next line detects duplicate names
    content = json.loads(text, object_pairs_hook=_unique)
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{_METADATA} is not a JSON object")
    entries = {name: _entry(name, value) for name, value in content.items()}
    _check_places(entries, size - start)
    return start, entries


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the header contains {quote_name(name)} twice")
        content[name] = value
    return content


def _entry(name: str, value: Any) -> TensorEntry:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"the header entry of {quote_name(name)} {reason}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("must have exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refuse(f"has the unknown dtype {quote_name(str(dtype))}")
    if isinstance(shape, list) and len(shape) > _MAX_DIMS:
        raise refuse(f"has {len(shape):,} dims, but at most {_MAX_DIMS} are allowed")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise refuse("must have lists of integers from 0 to 2**63 - 1 as its shape and offsets")
    begin, end = offsets
    bits = _BITS[dtype]
    for size in sorted(shape):  # zero sizes come first
        bits *= size
        if bits >= 2**66:
            raise refuse(f"has the shape {shape}, which needs more than 2**63 bytes")
    if 8 * (end - begin) != bits:
        raise refuse(f"has {end - begin} bytes, but {dtype} {shape} needs {bits / 8:g}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_places(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Check that the tensors fill the file exactly, without overlaps or gaps."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != place:
            words = "overlaps the previous tensor" if entry.begin < place else "follows a gap"
            raise ValueError(f"the tensor {quote_name(name)} {words}")
        place = entry.end
    if place != size:
        words = "is too long" if size > place else "ends too early"
        raise ValueError(
            f"the file {words}: tensors need {place:,} bytes, but the file has {size:,}"
        )


class SafetensorsWriter:
    """Writer of one file with predefined tensors, whose rows can be written in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
        """Create the file at full size.

        Raises:
            OSError: the file cannot be created, or the disk is full.
        """
        place = 0
        header: dict[str, Any] = {_METADATA: {"format": "pt"}}
        self._entries: dict[str, TensorEntry] = {}
        for name, (dtype, shape) in tensors.items():
            end = place + math.prod(shape) * dtype.itemsize
            self._entries[name] = TensorEntry(_NAMES[dtype], shape, place, end)
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = _LENGTH.size + len(text)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Allocate all space now, so that a full disk is detected before any computation.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self._start + place)
            else:
                os.ftruncate(self._file, self._start + place)
            _write(self._file, _LENGTH.pack(len(text)) + text, 0)
        except BaseException:
            os.close(self._file)
            raise

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor."""
        return _WRITTEN[self._entries[name].dtype]

    def write(
        self,
        name: str,
        values: np.ndarray,
        row: int = 0,
        number: int = 0,
        every: int = 1,
        is_block: bool = False,
    ) -> None:
        """Write `values` to the rows of a tensor, starting at index `row`.

        A row has the shape `values.shape[1:]`. The tensor's dims before these are merged. If
        `every` is larger than 1, only every `every`-th entry of the last dim is written, starting
        at index `number`, or only block `number` of `every` blocks if `is_block` is set.

        Raises:
            OSError: the rows cannot be written.
        """
        entry = self._entries[name]
        dtype = _WRITTEN[entry.dtype]
        *most, last = values.shape
        shape = (*most, last * every)
        row_shape = entry.shape[len(entry.shape) - len(most) :]
        assert values.dtype == dtype and shape[1:] == row_shape
        place = self._start + entry.begin + row * math.prod(shape[1:]) * dtype.itemsize
        if is_block:
            for index, part in enumerate(np.ascontiguousarray(values).reshape(-1, last)):
                _write(self._file, _bytes(part), place + (index * every + number) * part.nbytes)
            return
        if every > 1:
            # Keep the entries of the other interleaved parameters, which may already have been
            # written.
            rows = np.empty(shape, dtype)
            try:
                _read(self._file, _bytes(rows), place)
            except EOFError as error:
                raise OSError(errno.EIO, str(error)) from error
            rows[..., number::every] = values
            values = rows
        data = _bytes(np.ascontiguousarray(values))
        assert place + len(data) <= self._start + entry.end
        _write(self._file, data, place)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _read(file: int, view: memoryview, place: int) -> None:
    """Fill `view` with the bytes at `place`.

    Raises:
        EOFError: the file ends too early.
        OSError: the file cannot be read.
    """
    while view:
        if not (count := os.preadv(file, [view], place)):
            raise EOFError("the file was truncated")
        view, place = view[count:], place + count


def _write(file: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, place)
        view, place = view[count:], place + count


_SHOWN = 5
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\..*", re.DOTALL)
ADAPTER_CONFIG = "adapter_config.json"
HEAD = "lm_head.weight"

_TRANSFORMERS_ACTION = "Use a folder with the same model in transformers format."

_KNOWN_MISMATCHES: Sequence[tuple[str, str, str]] = (
    (
        r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)\.",
        "has PEFT adapters that are not merged into the weights",
        'Merge them with PEFT, model.merge_and_unload().save_pretrained("NEW"), and use NEW.',
    ),
    (
        r"\.(qweight|qzeros|g_idx)$",
        "has weights quantized by GPTQ or AWQ",
        "Use a folder with unquantized weights: no tool can restore the original weights.",
    ),
    (
        r"\.(weight_scale(_inv)?|weight_packed|absmax|quant_map|SCB"
        r"|\w+_blocks|\w+_scales)$|\.quant_state\.",
        f"has quantized weights that quantization_config in {FILE} does not describe",
        f"Restore the {FILE} that was published with these weights.",
    ),
    (
        r"(^|\.)(tok_embeddings\.|attention\.w[qkvo]\.|feed_forward\.w[123]\.)",
        "has the tensor names of Meta's and Mistral's original releases, which order query and key "
        "rows differently",
        _TRANSFORMERS_ACTION,
    ),
    (
        r"^(blk\.\d+\.|token_embd\.)",
        "has the tensor names of a GGUF file",
        _TRANSFORMERS_ACTION,
    ),
    (
        r"(query_key_value|linear_qkv|\.wqkv|\.c_attn)\.",
        "stores the queries, keys and values of each head group in one tensor, as in Megatron and "
        "GPT-2",
        _TRANSFORMERS_ACTION,
    ),
    (
        r"^(score|classifier)\.",
        "has a classification head",
        "Use a folder with a language model saved by AutoModelForCausalLM.",
    ),
    (
        r"(^|\.)v_head\.",
        "has a value head (v_head), as in TRL's PPO models",
        'Save only its language model with TRL, model.pretrained_model.save_pretrained("NEW"), '
        "and use NEW.",
    ),
)
"""Name patterns that identify the origin of a folder, each with a rule and an action for the
error."""


def tensor_mismatch_error(
    folder: Path, said: ModelDescription, missing: Sequence[str], surplus: Sequence[str]
) -> ConfigError:
    """Return the error for missing tensors, or for unexpected (`surplus`) tensors in the files."""
    for pattern, rule, action in _KNOWN_MISMATCHES:
        if names := [name for name in surplus if re.search(pattern, name)]:
            return _error(Code.HF_TENSORS, folder, f"{rule}: {format_names(names)}.", action)
    config = folder / FILE
    if [*missing] == [HEAD] and not surplus:
        rule = f"has no {HEAD}, but {FILE} sets tie_word_embeddings = false."
        action = (
            "If the embedding table is also the output projection, set tie_word_embeddings to "
            f"true in {config}. Otherwise, save the model with AutoModelForCausalLM."
        )
        return _error(Code.HF_TENSORS, folder, rule, action)
    if error := _layers(folder, said, missing, surplus):
        return error
    name = said.table.architecture
    parts = (
        [f"lacks {pluralize(len(missing), 'tensor')}: {format_names(missing)}"] if missing else []
    )
    action = f"Save the model again with all tensors of {name}: some are missing from the files."
    if surplus:
        of = f"has {pluralize(len(surplus), 'tensor')} that {FILE} does not describe"
        parts.append(f"{of}: {format_names(surplus)}")
        action = f"Use the {FILE} that was saved with these weights: this one is for another model."
    if missing and surplus:
        action = (
            "If a tool saved these weights with other names, load them with that tool and save "
            f"them with save_pretrained from transformers. Otherwise, use the {FILE} that was "
            "saved with these weights."
        )
    return _error(Code.HF_TENSORS, folder, f"{'; it '.join(parts)}.", action)


def _layers(
    folder: Path, said: ModelDescription, missing: Sequence[str], surplus: Sequence[str]
) -> ConfigError | None:
    """Return an error if entire layers at the end are missing or unexpected, else None."""
    numbers = [int(m[1]) if (m := _LAYER.fullmatch(name)) else -1 for name in (*missing, *surplus)]
    said_count = said.config.num_layers
    if -1 in numbers or (missing and surplus):
        return None
    of_table = sum("{layer}" in row.theirs for row in said.table.tensors)
    if missing:
        count = min(numbers)
        whole = len(missing) >= (said_count - count)
        if not whole or {*range(count, said_count)} != {*numbers} or not count:
            return None
        if said_count - count == 1 and len(missing) < min(of_table, 4):
            return None
    else:
        count = max(numbers) + 1
        if min(numbers) < said_count or len(surplus) < 4 * (count - said_count):
            return None
    rule = (
        f"has {pluralize(count, 'layer')} of weights, but {FILE} sets num_hidden_layers = "
        f"{said_count}."
    )
    return _error(
        Code.HF_TENSORS, folder, rule, f"Set num_hidden_layers to {count} in {folder / FILE}."
    )


def duplicate_tensor_error(folder: Path, first: str, second: str) -> ConfigError:
    """Return the error for two tensors with equivalent names."""
    rule = f"has {quote_name(first)} and {quote_name(second)}, which are the same tensor."
    return _error(
        Code.HF_TENSORS, folder, rule, "Save the model again with only one of the two names."
    )


def missing_tensors_error(folder: Path, count: int) -> ConfigError:
    """Return the error for a config.json that describes a much larger model than the weights."""
    rule = f"has {pluralize(count, 'tensor')}, but {FILE} describes a much larger model."
    return _error(
        Code.HF_TENSORS, folder, rule, f"Use the {FILE} that was saved with these weights."
    )


def adapter_error(folder: Path) -> ConfigError | None:
    """Return the error for a folder with a PEFT adapter instead of a model."""
    if not (folder / ADAPTER_CONFIG).exists():
        return None
    rule = f"is a PEFT adapter ({ADAPTER_CONFIG}) without a base model."
    return _error(
        Code.HF_FOLDER,
        folder,
        rule,
        f"Use the folder of its base model, and set adapter.restore_from={folder}.",
    )


def missing_weights_error(folder: Path, single: str, index: str) -> ConfigError:
    """Return the error for a folder without weight files."""
    if (error := adapter_error(folder)) is not None:
        return error
    names = sorted(each.name for each in folder.iterdir())
    rule = f"must contain {single}, or {index} and the files that it lists."
    action = "Download the model's safetensors files."
    others = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    packed = [name for name in names if name.endswith(".gguf")]
    if len(others) == 1 and not re.search(r"-of-0*(?!1\.)[1-9]\d*\.", others[0]):
        rule += f" The folder has {others[0]} instead."
        action = f"Rename the file to {single}, or also download {index}."
    elif others:
        rule += f" The folder has {others[0]} and {pluralize(len(others) - 1, 'other file')}."
        action = f"Also download {index}."
    elif pickled:
        rule += f" {pickled[0]} is a pickle file, which can run any code and is never read."
        action = (
            "If you trust the file, convert it: python -c 'from transformers import "
            'AutoModelForCausalLM as M; M.from_pretrained("DIR").save_pretrained("NEW")\''
        )
    elif packed:
        rule += f" {packed[0]} is a llama.cpp (GGUF) file, which maxpipe does not read."
        action = "Download the safetensors files from which the file was converted."
    return _error(Code.HF_FOLDER, folder, rule, action)


def format_names(names: Sequence[str]) -> str:
    """Return the first few names in quotes, followed by the number of remaining names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(quote_name, names[:_SHOWN])) + more


def wrong_shape(
    folder: Path, where: str, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> ConfigError:
    """Return the error for a tensor whose shape does not match config.json."""
    action = f"Use the {FILE} that was saved with these weights."
    of_vocabulary = name in (HEAD, "model.embed_tokens.weight")
    if of_vocabulary and shape[1:] == wanted[1:]:
        action = (
            f"If tokens were added or removed, set vocab_size to {shape[0]} in {folder / FILE}."
        )
    if len(shape) == len(wanted) > 1 and shape == (*wanted[:-2], wanted[-1], wanted[-2]):
        action = "Transpose the last two dims of the tensor, as in the transformers layout."
    rule = f"must have the shape {format_shape(wanted)} from {FILE}."
    return ConfigError.one(Code.HF_TENSORS, where, format_shape(shape), rule, action)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape for messages."""
    return " x ".join(map(str, shape)) or "scalar"


def _error(code: Code, folder: Path, rule: str, action: str) -> ConfigError:
    return ConfigError.one(code, str(folder), None, rule, action)
