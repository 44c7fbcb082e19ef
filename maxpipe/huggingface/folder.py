"""Look up tensors in Hugging Face folders and read parameter regions.

Only the headers of weight files are kept in memory. A parameter region is assembled from the tensor
rows that overlap it, one block at a time. jax is not imported.

The module also resolves the addresses of models (runs, checkpoints and Hugging Face folders).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import numpy as np

from maxpipe.checkpoint.address import Address, parse_address
from maxpipe.config.config_files import hub_download_action, is_hub_id
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface import mapping, safetensors, tensor_layouts
from maxpipe.huggingface.config_json import FILE, ModelDescription, read_description
from maxpipe.huggingface.dequantize import TensorReader, check_layouts, dequantized, is_transposed
from maxpipe.huggingface.mapping import (
    ColumnRange,
    TensorMapping,
    TensorSlice,
    intersect,
    map_tensors,
)
from maxpipe.huggingface.safetensors import (
    DTYPES,
    INTEGERS,
    JoinedReader,
    SafetensorsReader,
    quote_name,
)
from maxpipe.io.direct_io import empty_array
from maxpipe.io.files import expand_path, read
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.models.config import ModelConfig
from maxpipe.models.huggingface import WITHOUT_MTP, HuggingFace
from maxpipe.models.initialization import TokenHash
from maxpipe.models.layers.gemma4_vision import LARGEST_LIMIT
from maxpipe.models.registry import describe

HEAD, EMBEDDING = safetensors.HEAD, "embedding"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "hf:"
"""Prefix that marks a Hugging Face folder in `checkpoint.restore_from`."""


_MAX_INDEX_BYTES = 1 << 26
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_MISSING_TENSORS = 1000
"""Maximum number of missing tensors. If more tensors are missing, mapping the model is aborted."""
_UNKNOWN_LENGTH = 2048
"""Default sequence length in tokens, used if config.json has none."""
_SEPARATE_MTP = "mtp."
"""Prefix of the names of multi-token prediction tensors that are not numbered as layers."""
_VISION_HEAD = "vision_tower.head.*"
"""Tensors of the pooling head of a vision tower, whose output vision-language models do not use."""
_VOCAB = ("vocab", "layer_vocab")
_BLOCK_ELEMENTS = 1 << 22


class _Index(TypedDict):
    weight_map: dict[str, str]


def folder_of(text: str) -> str | None:
    """Return DIR if the address has the form `hf:DIR`, else None."""
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model folder whose tensors match its config.json."""

    folder: Path
    description: ModelDescription
    config: ModelConfig
    table: HuggingFace
    """Conversion table with the tensor layouts of the files."""
    mapping: TensorMapping
    unused_tensors: tuple[str, ...]
    """Names of recognized tensors that the model does not use."""
    num_missing_mtp_layers: int
    """Number of multi-token prediction layers that config.json declares but the folder lacks."""
    _files: Mapping[str, TensorReader]
    """Readers, keyed by tensor name in the conversion table."""
    _names: Mapping[str, str]
    """Tensor names in the files, keyed by tensor name in the conversion table."""

    def with_layer_types(self, model: ModelConfig) -> HuggingFaceFolder:
        """Return the folder with layers stacked as in `model`, whose last layers can have separate
        stacks because their matmuls are not quantized.
        """
        config = replace(
            self.config,
            matmul=model.matmul,
            matmul_unquantized_layers=model.matmul_unquantized_layers,
        )
        return replace(self, config=config, mapping=map_tensors(describe(config), self.table))

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """Return the dtype with which each tensor would be exported, keyed by tensor name.

        Duplicate tensors are included only if the folder has them.
        """
        both = map_tensors(describe(self.config), self.description.table)
        types: dict[str, str] = {}
        for name, pieces in both.slices.items():
            here = {_layer_and_expert(piece): piece.tensor for piece in self.mapping.slices[name]}
            for piece in pieces:
                dtype = self._entry(here[_layer_and_expert(piece)]).dtype
                # Slices of two dtypes in one tensor are stored in float32, which represents both.
                types[piece.tensor] = dtype if types.get(piece.tensor, dtype) == dtype else "F32"
        copies = {copy: types[name] for copy, name in both.originals.items() if copy in self._files}
        return types | copies

    @property
    def dtype(self) -> str:
        """Return the most common dtype of the tensors."""
        return Counter(self.dtypes.values()).most_common(1)[0][0]

    @property
    def model_dtypes(self) -> dict[str, str]:
        """Return dtypes for the `model` section that represent the weights without loss. Models
        stored in float32 also compute in float32.
        """
        if self.dtype == "F32":
            return {"param_dtype": "float32", "compute_dtype": "float32"}
        return {"param_dtype": "bfloat16" if self.dtype == "BF16" else "float32"}

    @property
    def sequence_length(self) -> int:
        """Return the maximum sequence length in config.json, or a default."""
        most = self.description.exported_keys.get("max_position_embeddings")
        return most if type(most) is int and 2 <= most < 2**31 else _UNKNOWN_LENGTH

    def stored_dtype(self, name: str) -> np.dtype:
        """Return a dtype that can represent all stored weights of a parameter."""
        if isinstance(self.mapping.params[name].init, TokenHash):
            return np.dtype(self.mapping.params[name].own_dtype)
        types = {DTYPES[self._entry(piece.tensor).dtype] for piece in self.mapping.slices[name]}
        return types.pop() if len(types) == 1 else np.dtype(np.float32)

    @property
    def num_files(self) -> int:
        """Return the number of weight files that contain tensors of the model."""
        return len({reader.path for reader in self._files.values()})

    def _entry(self, name: str):
        return self._files[name].entries[self._names[name]]

    def read_region(
        self, name: str, dtype: np.dtype, region: Sequence[slice], vocab_size: int = 0
    ) -> np.ndarray:
        """Read a region of a parameter in checkpoint layout, with layers stacked in model order.

        If `vocab_size` exceeds the number of rows of an embedding table or output projection, each
        added row is the mean of the existing rows.

        Raises:
            ConfigError: a file cannot be read, or a value is NaN, infinite or not an expert.
        """
        if isinstance(init := self.mapping.params[name].init, TokenHash):
            return self._read_table(name, init, dtype, region, vocab_size)
        return self._read_region(name, dtype, region, vocab_size)

    def _read_table(
        self,
        name: str,
        init: TokenHash,
        dtype: np.dtype,
        region: Sequence[slice],
        vocab_size: int,
    ) -> np.ndarray:
        """Read rows of a table of experts. Added rows are those of a new table."""
        *_, rows, choices = self.mapping.shapes[name]
        tokens = range(*region[-2].indices(max(rows, vocab_size)))
        stored = slice(min(tokens.start, rows), min(tokens.stop, rows))
        everything = slice(0, choices)
        values = self._read_region(name, dtype, [*region[:-2], stored, everything], 0)
        added = np.arange(max(tokens.start, rows), max(tokens.stop, rows))
        new = init.experts(added[:, None], np.arange(choices)).astype(dtype)
        new = np.broadcast_to(new, (*values.shape[:-2], *new.shape))
        in_order = np.sort(values, axis=-1)
        valid = (values >= 0).all() and (values < init.num_experts).all()
        if not valid or (in_order[..., 1:] == in_order[..., :-1]).any():
            tensor = self.mapping.slices[name][0].tensor
            raise ConfigError.one(
                Code.HF_TENSORS,
                f"{self._files[tensor].path}: {self._names[tensor]}",
                None,
                f"must contain {choices} different experts from 0 to {init.num_experts - 1} in "
                "each row, in all layers.",
                "Use the published weights: transformers initializes these tables with zeros.",
            )
        return np.concatenate([values, new], axis=-2)[..., region[-1]]

    def _read_region(
        self, name: str, dtype: np.dtype, region: Sequence[slice], vocab_size: int
    ) -> np.ndarray:
        """Read a region of any parameter."""
        sizes = list(self.mapping.shapes[name])
        axes = self.mapping.params[name].axes
        places = [
            place for place, axis in enumerate(axes, len(sizes) - len(axes)) if axis in _VOCAB
        ]
        dim = places[0] if places and vocab_size else -1
        old = sizes[dim]
        if dim >= 0:
            sizes[dim] = max(old, vocab_size)
        wanted = [range(*part.indices(size)) for part, size in zip(region, sizes, strict=True)]
        values = empty_array([len(indices) for indices in wanted], dtype)
        if dim >= 0 and (rows := wanted[dim]).stop > old:
            mean_at = [slice(indices.start, indices.stop) for indices in wanted]
            new_at = [slice(None)] * values.ndim
            mean_at[dim], new_at[dim] = slice(None), slice(max(old - rows.start, 0), None)
            values[tuple(new_at)] = self._mean(name, dim)[tuple(mean_at)].astype(dtype)
            wanted[dim] = range(min(rows.start, old), old)
        inner = values[tuple(slice(0, len(indices)) for indices in wanted)]
        for piece in self.mapping.slices[name]:
            if (parts := intersect(piece, tuple(wanted))) is not None and inner.size:
                inside, taken = parts
                self._read_into(inner[inside], piece, taken)
        return values

    def _read_into(self, target: np.ndarray, piece: TensorSlice, taken: tuple[slice, ...]) -> None:
        """Read part of a tensor slice, a few rows at a time, into `target` in parameter layout."""
        dim = piece.outer_remaining_dim
        wanted, columns = taken[dim], piece.columns(taken)
        for part, ours in self._blocks(piece, wanted, columns):
            first, end = max(part.start, wanted.start), min(part.stop, wanted.stop)
            there, here = [slice(None)] * target.ndim, [*taken]
            there[dim] = slice(first - wanted.start, end - wanted.start)
            here[dim] = slice(first - part.start, end - part.start)
            if columns is not None:
                here[columns.remaining_dim] = slice(None)
            mapping.copy(target[tuple(there)], ours[tuple(here)])

    def _blocks(
        self, piece: TensorSlice, part: slice, columns: ColumnRange | None = None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of limited size as (slice of the outer dim, array in parameter layout)."""
        width = math.prod(piece.shape) // piece.sizes[piece.outer_dim]
        step = max(1, _BLOCK_ELEMENTS // width)
        if not piece.is_divisible:
            part = slice(0, step := piece.sizes[piece.outer_dim])
        for first in range(part.start, part.stop, step):
            here = slice(first, min(first + step, part.stop))
            reader, name = self._files[piece.tensor], self._names[piece.tensor]
            rows = reader.read(
                name,
                piece.rows(here),
                piece.row_shape,
                columns and columns.columns,
                piece.interleave.lines,
            )
            if piece.is_scalar:  # a limit, which is infinite if nothing is clipped
                rows = np.clip(rows.astype(np.float32), -LARGEST_LIMIT, LARGEST_LIMIT)
            if not reader.is_finite:
                self._check_finite(piece.tensor, rows)
            yield here, piece.to_param(rows, here, columns)

    def _mean(self, name: str, dim: int) -> np.ndarray:
        if name not in self._means:
            shape = list(self.mapping.shapes[name])
            rows, shape[dim] = shape[dim], 1
            total = np.zeros(shape, np.float64)
            for piece in self.mapping.slices[name]:
                axis = dim - (len(shape) - len(piece.sizes))
                assert piece.outer_dim == axis, "each tensor row must be one vocabulary entry"
                columns = piece.columns([slice(0, size) for size in piece.sizes])
                for _, ours in self._blocks(piece, slice(0, rows), columns):
                    total[piece.at] += ours.astype(np.float32).sum(axis, np.float64, keepdims=True)
            self._means[name] = total / rows
        return self._means[name]

    @cached_property
    def _means(self) -> dict[str, np.ndarray]:
        return {}

    def _check_finite(self, name: str, tensor: np.ndarray) -> None:
        from maxpipe.checkpoint.digests import num_non_finite  # imports jax, which launchers lack

        if bad := num_non_finite(tensor):
            raise ConfigError.one(
                Code.HF_DAMAGED,
                f"{self._files[name].path}: {self._names[name]}",
                None,
                f"must be finite, but has {pluralize(bad, 'value')} that are NaN or infinite.",
                "Copy the file again, or use an earlier version of the weights.",
            )

    def check_copies(self) -> None:
        """Check that duplicate tensors are bitwise equal to their originals.

        Raises:
            ConfigError: a duplicate differs.
        """
        for copy, original in self.mapping.originals.items():
            if copy in self._files and not self._is_same(copy, original):
                raise ConfigError.one(
                    Code.HF_TENSORS,
                    f"{self._files[copy].path}: {self._names[copy]}",
                    None,
                    f"must be bitwise equal to {self._names[original]}, because multi-token "
                    "prediction layers share that tensor.",
                    f"Set num_nextn_predict_layers to 0 in {self.folder / FILE} to omit these "
                    "layers.",
                )
        if HEAD not in self._files or HEAD in self.mapping.tensors:
            return
        if not self._is_same(HEAD, self.mapping.slices[EMBEDDING][0].tensor):
            raise ConfigError.one(
                Code.HF_TENSORS,
                f"{self._files[HEAD].path}: {self._names[HEAD]}",
                None,
                "must be bitwise equal to the embedding table, because config.json ties the two.",
                f"Set tie_word_embeddings to false in {self.folder / FILE} if they are not tied.",
            )

    def _is_same(self, one: str, other: str) -> bool:
        """Return whether two tensors of the same shape are bitwise equal."""
        count, width = self.mapping.tensors[other]
        step = max(1, _BLOCK_ELEMENTS // width)
        for first in range(0, count, step):
            rows = (first, min(first + step, count))
            a, b = (self._files[name].read(self._names[name], rows) for name in (one, other))
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        return True


def _layer_and_expert(piece: TensorSlice) -> tuple[int, ...]:
    """Return the layer and expert indices of a slice, which are the same in all tensor layouts."""
    return tuple(index for index in piece.at if isinstance(index, int))


def open_folder(
    folder: str, where: str = "command line: DIR", *, images: bool = False
) -> HuggingFaceFolder:
    """Open a model folder and check the headers of its weight files.

    `where` is the command-line option that error messages name. `images` includes the vision tower.

    Raises:
        ConfigError: the folder has no supported model, or its tensors do not match config.json.
    """
    path = expand_path(folder, where)
    if not folder.strip() or "\0" in folder or not os.path.isdir(path):
        raise ConfigError.one(
            Code.HF_FOLDER,
            where,
            folder or "''",
            "must be a folder on this machine with config.json and safetensors files.",
            hub_download_action(folder)
            if is_hub_id(folder)
            else "Download the model with `maxpipe fetch`, and use the path of its folder.",
        )
    if not (path / FILE).exists() and (error := safetensors.adapter_error(path)) is not None:
        raise error
    said = read_description(path, images=images)
    files_of = _tensors(path)
    present: Mapping[str, TensorReader] = files_of
    if said.quantization is not None:
        present = dequantized(path, files_of, said.quantization)
    known = {name: said.table.table_name(tensor_layouts.canonical(name)) for name in present}
    said, lacking = _without_mtp(said, known.values())
    names: dict[str, str] = {}
    others: list[str] = []
    patterns = (
        *said.table.unused,
        *_undeclared_mtp_patterns(said, known.values()),
        *(said.whole.other_tensors if said.whole and not images else ()),
        *((_VISION_HEAD,) if images else ()),
        *(said.whole.vision.other_tensors if said.whole and said.whole.vision else ()),
    )
    for name, table_name in known.items():
        if any(fnmatchcase(n, pattern) for pattern in patterns for n in (name, table_name)):
            others.append(name)
            continue
        if table_name in names:
            raise safetensors.duplicate_tensor_error(path, names[table_name], name)
        names[table_name] = name
    files = {table_name: present[name] for table_name, name in names.items()}
    _join_parts(said.table.split_tensors, files, names)
    transposed = [name for name, reader in files.items() if is_transposed(reader)]
    table = tensor_layouts.adapt_table(said.table, names, transposed)
    try:
        model = map_tensors(describe(said.config), table, len(present) + _MAX_MISSING_TENSORS)
    except ValueError as error:
        raise safetensors.missing_tensors_error(path, len(present)) from error
    wanted, copies = dict(model.tensors), {*model.originals}
    if HEAD not in wanted:
        wanted[HEAD] = wanted[model.slices[EMBEDDING][0].tensor]
        copies.add(HEAD)
    wanted = {name: shape for name, shape in wanted.items() if name in names or name not in copies}
    for name in [name for name in names if name not in wanted]:
        if any(fnmatchcase(name, pattern) for pattern in said.table.superfluous):
            others.append(names.pop(name))
            del files[name]
    missing = [name for name in wanted if name not in names]
    surplus = [names[name] for name in names if name not in wanted]
    if missing or surplus:
        raise safetensors.tensor_mismatch_error(path, said, missing, surplus)
    tables = frozenset(
        piece.tensor
        for name, pieces in model.slices.items()
        if isinstance(model.params[name].init, TokenHash)
        for piece in pieces
    )
    _check_entries(path, wanted, files, names, tables)
    check_layouts(files, names, transposed)
    source = HuggingFaceFolder(
        path, said, said.config, table, model, tuple(others), lacking, files, names
    )
    source.check_copies()
    return source


def _join_parts(
    split: Iterable[tuple[str, tuple[str, ...]]],
    files: dict[str, TensorReader],
    names: dict[str, str],
) -> None:
    """Replace the parts of each split tensor by the joined tensor, in both mappings.

    Tensors are unchanged if the parts in a layer are missing or have several dtypes. Later checks
    then compare each part with config.json.
    """
    for whole, parts in split:
        ends = tuple(f".{part}" for part in parts)
        prefixes = {
            name[: name.rindex(end) + 1] for name in files for end in ends if name.endswith(end)
        }
        joined = {prefix: _joined(prefix, whole, parts, files, names) for prefix in prefixes}
        readers = {prefix: reader for prefix, reader in joined.items() if reader is not None}
        if len(readers) < len(joined):
            continue
        for prefix, reader in readers.items():
            for part in parts:
                del files[prefix + part], names[prefix + part]
            files[prefix + whole], names[prefix + whole] = reader, prefix + whole


def _joined(
    prefix: str,
    whole: str,
    parts: tuple[str, ...],
    files: Mapping[str, TensorReader],
    names: Mapping[str, str],
) -> JoinedReader | None:
    stored = [
        (names[each], reader)
        for each in (prefix + part for part in parts)
        if isinstance(reader := files.get(each), SafetensorsReader)
    ]
    if len(stored) < len(parts) or prefix + whole in files:
        return None
    try:
        return JoinedReader(prefix + whole, stored)
    except ValueError:
        return None


def _without_mtp(said: ModelDescription, present: Iterable[str]) -> tuple[ModelDescription, int]:
    """Remove multi-token prediction layers from the model description if the folder has none.

    Also return the number of removed layers. transformers drops these layers when it saves a model,
    but keeps the layer count in config.json.
    """
    count, layers = said.config.mtp_heads, said.config.num_layers
    prefixes = tuple(f"model.layers.{layers + number}." for number in range(count))
    if said.table.mtp_layer_tensors:
        prefixes = (_SEPARATE_MTP,)
    if not count or any(name.startswith(prefixes) for name in present):
        return said, 0
    return replace(said, section={**said.section, **WITHOUT_MTP}), count


def _undeclared_mtp_patterns(said: ModelDescription, present: Iterable[str]) -> frozenset[str]:
    """Return name patterns of multi-token prediction layers that config.json does not declare.

    Only layers with tensors specific to multi-token prediction match. A wrong layer count in
    config.json is therefore still detected.
    """
    if said.table.mtp_layer_tensors:
        return frozenset([] if said.config.mtp_heads else [f"{_SEPARATE_MTP}*"])
    first = said.config.num_layers + said.config.mtp_heads
    found = set[str]()
    for row in said.table.mtp_tensors:
        prefix, suffix = map(re.escape, row.theirs.split("{layer}"))
        pattern = re.compile(rf"({prefix}(\d{{1,9}})){suffix}")
        matches = filter(None, map(pattern.fullmatch, present))
        found |= {f"{match[1]}.*" for match in matches if int(match[2]) >= first}
    return frozenset(found)


def _tensors(folder: Path) -> dict[str, SafetensorsReader]:
    """Return the reader of each tensor, keyed by tensor name in the files."""
    if (folder / SINGLE).exists():
        reader = SafetensorsReader(folder / SINGLE)
        return dict.fromkeys(reader.entries, reader)
    path = folder / INDEX
    try:
        content = parse_json(read(path, _MAX_INDEX_BYTES), _Index)
    except FileNotFoundError as error:
        raise safetensors.missing_weights_error(folder, SINGLE, INDEX) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        rule = f"must map each tensor to a file: {reason}."
        raise ConfigError.one(
            Code.HF_DAMAGED, str(path), None, rule, "Copy the file again."
        ) from error
    listed = content["weight_map"]
    for name in dict.fromkeys(listed.values()):
        if not _FILE_NAME.fullmatch(name):
            rule = "must list only files in this folder, as NAME.safetensors."
            action = "Do not use this folder: no tool writes such names."
            raise ConfigError.one(Code.HF_FOLDER, str(path), quote_name(name), rule, action)
        if not (folder / name).exists():
            rule = f"must name existing files, but {folder} has no {name}."
            raise ConfigError.one(
                Code.HF_FOLDER, str(path), None, rule, "Download the missing files."
            )
    files = {name: SafetensorsReader(folder / name) for name in dict.fromkeys(listed.values())}
    readers: dict[str, SafetensorsReader] = {}
    for name, reader in files.items():
        for tensor in reader.entries:
            if listed.get(tensor) != name:
                there = f"to {listed[tensor]}" if tensor in listed else "to no file"
                rule = f"must map {quote_name(tensor)} to {name}, but maps it {there}."
                raise ConfigError.one(
                    Code.HF_DAMAGED, str(path), None, rule, "Copy the complete folder again."
                )
            readers[tensor] = reader
    if lacking := [name for name in listed if name not in readers]:
        rule = f"maps {quote_name(lacking[0])} to {listed[lacking[0]]}, which lacks this tensor."
        raise ConfigError.one(
            Code.HF_DAMAGED, str(path), None, rule, "Copy the complete folder again."
        )
    return readers


def _check_entries(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    files: Mapping[str, TensorReader],
    names: Mapping[str, str],
    tables: frozenset[str],
) -> None:
    """Check the dtype and shape of all tensors. `tables` are the tensors of integers."""
    for name, shape in wanted.items():
        reader, entry = files[name], files[name].entries[names[name]]
        where = f"{reader.path}: {names[name]}"
        dtypes = INTEGERS if name in tables else DTYPES
        if entry.dtype not in dtypes:
            rule = f"must have dtype {' or '.join(dtypes)}."
            action = (
                "Use unquantized weights, or the config.json that was published with these "
                "weights, whose quantization_config describes them."
            )
            raise ConfigError.one(Code.HF_TENSORS, where, entry.dtype, rule, action)
        if entry.shape != shape:
            raise safetensors.wrong_shape(folder, where, name, entry.shape, shape)


def num_params(source: HuggingFaceFolder) -> int:
    """Return the model's parameter count, in which a tied embedding table is counted once."""
    return sum(math.prod(shape) for shape in source.mapping.shapes.values())


def resolve_model(
    text: str, *, average: bool = False, where: str = "", runs: str = ""
) -> Address | Path:
    """Return the address of a run or checkpoint, or the path of a Hugging Face folder.

    `hf:DIR` and folders with a config.json are Hugging Face folders; a run's config is YAML.
    `average` selects the averaged parameters (EMA). `where` and `runs` are passed to
    `parse_address`.

    Raises:
        ConfigError: the address is invalid, or it is a Hugging Face folder and `average` is set.
    """
    folder = folder_of(text)
    if folder is None and os.path.isfile(os.path.join(os.path.expanduser(text), FILE)):
        folder = text
    if folder is None:
        return dataclasses.replace(parse_address(text, where, runs), average=average)
    if average:
        rule = "must be a run or checkpoint: a Hugging Face folder has no averaged parameters."
        raise ConfigError.one(
            Code.CLI_CONFLICT, "command line: --average", text, rule, "Omit --average."
        )
    return expand_path(folder, where) if where else expand_path(folder)
