"""Export a checkpoint to a Hugging Face folder.

Output files are first allocated at full size. Each parameter is then read once, one slab at a time,
and written to the tensors that contain it. Peak memory is one slab per thread, regardless of model
size.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from maxpipe.checkpoint import digests, manifest, slab_writer
from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manager import open_address_folder, resolve_step
from maxpipe.checkpoint.reader import translate_storage_errors
from maxpipe.checkpoint.storage import DamagedError, in_bucket
from maxpipe.config.load import load
from maxpipe.config.plugins import check_plugins, with_needed_plugins
from maxpipe.config.schema import Config
from maxpipe.data.chat_spec import ChatSpec, parse_chat_spec
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.huggingface import mapping
from maxpipe.huggingface.config_json import FILE, TEXT_SECTION, table_for, to_json
from maxpipe.huggingface.folder import INDEX, SINGLE, HuggingFaceFolder
from maxpipe.huggingface.import_ import FOLDER, ORIGIN, WEIGHTS_ONLY, Origin, hub_id
from maxpipe.huggingface.mapping import (
    TensorMapping,
    TensorSlice,
    export_slab_shape,
    intersect,
    map_tensors,
)
from maxpipe.huggingface.output_folder import (
    ByteProgress,
    MessageCallback,
    ProgressCallback,
    atomic_folder,
    copy_tokenizer_files,
    ignore_progress,
)
from maxpipe.huggingface.peft import CheckpointAdapters, LazyArray, write_adapters
from maxpipe.huggingface.peft import open_lazy_array as readable_array
from maxpipe.huggingface.quantize import BlockScales
from maxpipe.huggingface.safetensors import DTYPES, INTEGERS, SafetensorsWriter
from maxpipe.io.files import expand_path, read, write
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.models.registry import describe
from maxpipe.optim.state_spec import EMA

TYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Supported values of `--dtype`, each mapped to the dtype name used in safetensors files."""

SHARD_BYTES = 5 * 10**9
"""Maximum size in bytes of a weight file, unless a single tensor is larger. transformers 4 supports
files of this size."""

_Tensors = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor, keyed by tensor name."""

_PARAMS, _EMA_PREFIX = "params.", f"optimizer.{EMA}."
BOS_KEY, EOS_KEY, PAD_KEY = "bos_token_id", "eos_token_id", "pad_token_id"
_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class _ExportedCheckpoint:
    """The checkpoint to export, and the config of its run."""

    name: str
    path: epath.Path
    facts: CheckpointMetadata
    config: Config
    average: bool
    """Whether to export the averaged parameters (EMA)."""
    tokenizer_folders: tuple[Path, ...]
    """Folders from which tokenizer and generation files are copied, in order of precedence."""
    adapters: CheckpointAdapters | None
    """Adapters and their base model, or None if the checkpoint has no adapters."""

    def array(self, name: str, full_name: str, shape: tuple[int, ...]) -> LazyArray:
        """Open a parameter of the merged model. `full_name` is its name in the checkpoint."""
        if self.adapters is not None:
            return self.adapters.array(name, shape)
        return readable_array(self.path, full_name)


def export(
    address: Address,
    out: str,
    dtype: str | None,
    say: MessageCallback,
    shard_bytes: int = SHARD_BYTES,
    report: ProgressCallback = ignore_progress,
    overrides: Sequence[str] = (),
    quantize: bool = False,
) -> None:
    """Write config.json, the safetensors files, and the tokenizer files if they exist.

    `dtype` is a key of `TYPES`. If `dtype` is None, tensors have the dtypes of the imported
    weights, or the stored dtype if the weights were not imported. If `quantize` is set, the
    matrices of all layers are written in FP8; see `BlockScales`. `overrides` are settings of the
    section `plugins`.

    Raises:
        ConfigError: no transformers class supports the model, or `out` already exists.
        StorageError: the checkpoint is damaged, or `out` cannot be written.
    """
    chosen = _open_checkpoint(address, overrides)
    model = chosen.config.model
    table, said = table_for(model)
    both = map_tensors(describe(replace(model, adapter=None)), table)
    if model.mtp_heads and not any(name.startswith("ahead.") for name in both.slices):
        say("omitted: the multi-token prediction heads, which are used only in training")
    types = _types(chosen, both, dtype)
    scales = BlockScales(both) if quantize else None
    say(f"{chosen.name}: {table.architecture}, verifying the checkpoint files")
    target = expand_path(out, _OUT).absolute()
    with atomic_folder(out, _OUT) as here, _verify_files_in_background(chosen):
        files = shard_tensors(both, types, shard_bytes, scales)
        names = _write_tensors(chosen, both, files, here, report, scales)
        kept, trained = _imported_config(chosen.tokenizer_folders), _trained_tokenizer(chosen, say)
        if TEXT_SECTION in said:
            kept = {**kept.get(TEXT_SECTION, {}), **kept}
        most = next(name for name, short in TYPES.items() if short == _most_common_dtype(types))
        kept |= trained.in_config(kept) if EOS_KEY in kept else {}
        said |= scales.config if scales else {}
        text = to_json(table, said, kept, most, _defaults(chosen.config, kept, trained))
        (here / FILE).write_text(text, encoding="utf-8")
        copied: list[str] = []
        for folder in chosen.tokenizer_folders:
            copied += copy_tokenizer_files(folder, here)
        trained.write(here, copied, say)
    if not copied:
        say("no tokenizer files: the run's tokenizer is either built in or not on this machine")
    fp8 = "FP8 and " if scales else ""
    say(f"wrote {target}: {pluralize(len(names), 'file')} of weights in {fp8}{most}")


def export_adapters(
    addresses: Mapping[str, Address] | Address,
    out: str,
    dtype: str | None,
    say: MessageCallback,
    overrides: Sequence[str] = (),
) -> None:
    """Write only the adapters of a checkpoint, in PEFT format. See `export`.

    If `addresses` maps adapter names to checkpoints, each adapter is written to the folder
    `out/NAME`. All adapters must have the same base model.

    Raises:
        ConfigError: a checkpoint has no adapters or another base model, PEFT does not support one
            of them, or `out` already exists.
        StorageError: a checkpoint is damaged, or `out` cannot be written.
    """
    named = {"": addresses} if isinstance(addresses, Address) else addresses
    chosen = {name: _open_checkpoint(each, overrides) for name, each in named.items()}
    digest = ""
    for name, each in chosen.items():
        if each.adapters is None:
            rule = "has no adapters, because its run trained all parameters of the model."
            raise named[name].error(rule, "Omit --adapter.")
        if (own := each.adapters.base_record["digest"]) != (digest := digest or own):
            rule = (
                "must have the same base model as the first adapter, but the base weights differ."
            )
            where, given = named[name].where or "command line", named[name].given
            action = "Export this adapter to another folder."
            raise ConfigError.one(Code.CKPT_BASE, where, given, rule, action)
    target = expand_path(out, _OUT).absolute()
    with atomic_folder(out, _OUT) as here:
        bases = {
            name: _write_adapter(each, here / name, dtype, target / name, say)
            for name, each in chosen.items()
        }
    for name, base in bases.items():
        adapters = chosen[name].adapters
        if base is None and adapters is not None:
            address = adapters.base_record["address"]
            say(
                f"{target / name}: base_model_name_or_path is {address}, a checkpoint that PEFT "
                f"cannot load: run maxpipe export {shlex.quote(address)} NEW, then set "
                "base_model_name_or_path to NEW"
            )


def _write_adapter(
    chosen: _ExportedCheckpoint, here: Path, dtype: str | None, target: Path, say: MessageCallback
) -> str | None:
    """Write the adapters of one checkpoint, and return the base model that PEFT can load."""
    assert chosen.adapters is not None
    model = chosen.config.model
    table, _ = table_for(model)
    here.mkdir(exist_ok=True)
    try:
        with _verify_files_in_background(chosen):
            base, short = _loadable_base(chosen.adapters), TYPES[dtype or model.param_dtype]
            tensors = write_adapters(chosen.adapters, describe(model), table, here, short, base)
    except DamagedError as damage:
        raise _damaged(chosen.path, str(damage)) from damage
    say(f"wrote {target}: adapters for {pluralize(len(tensors), 'tensor')} in PEFT format")
    return base


def _loadable_base(adapters: CheckpointAdapters) -> str | None:
    """Return the base model's folder or hub id, or None if PEFT cannot load the base model."""
    base = adapters.base
    if isinstance(base, HuggingFaceFolder):
        return hub_id(base.folder) or str(base.folder.absolute())
    with translate_storage_errors(base):
        data = CheckpointFolder(str(base.parent)).read_metadata(int(base.name)).data
    if not data.get(WEIGHTS_ONLY) or ORIGIN not in data:
        return None
    return check_type(data[ORIGIN], Origin).get("folder")


_OUT = "command line: OUT"


def _open_checkpoint(address: Address, overrides: Sequence[str]) -> _ExportedCheckpoint:
    folder = open_address_folder(address)
    step = resolve_step(folder, address)
    path = folder / step
    try:
        with translate_storage_errors(path):
            facts = folder.read_metadata(step)
        address.check_average(facts.config.get("optim"))
        saved = {name: facts.config[name] for name in ("model", "tokenizer", "train")}
        # Objectives other than the default are valid only together with a data section.
        saved["train"] = {**saved["train"], "objective": "pretrain", "objective_options": {}}
        saved["adapter"] = facts.config.get("adapter", {})
        saved = with_needed_plugins(saved, facts.config)
        loaded = load(overrides, saved, address.address_at(step))
        check_plugins(facts.data, loaded, step)
        config = loaded.config
        prefix = _EMA_PREFIX if address.average else _PARAMS
        has_any = config.adapter.rank > 0
        adapters = CheckpointAdapters.of(path, prefix, config, facts.data) if has_any else None
    except (DamagedError, KeyError, ValueError) as damage:
        raise _damaged(path, str(damage)) from damage
    folders = [] if in_bucket(address.run_dir) else [expand_path(address.run_dir) / FOLDER]
    if config.tokenizer.path:
        tokenizer = expand_path(config.tokenizer.path, "tokenizer.path")
        folders.insert(0, tokenizer if tokenizer.is_dir() else tokenizer.parent)
    present = tuple(folder for folder in dict.fromkeys(folders) if folder.is_dir())
    return _ExportedCheckpoint(
        address.address_at(step), path, facts, config, address.average, present, adapters
    )


def _damaged(path: epath.Path, reason: str) -> StorageError:
    return StorageError(
        Code.CKPT_DAMAGED,
        f"{path}: cannot be exported\n"
        f"  {reason}.\n"
        "  Use another step (`maxpipe checkpoints list RUN`), or restore this step's files.",
    )


@contextlib.contextmanager
def _verify_files_in_background(chosen: _ExportedCheckpoint) -> Iterator[None]:
    """Verify the checksums of all checkpoint files in a background thread.

    A checkpoint without a manifest has no checksums, but its decoded arrays are still compared with
    the saved digests.

    Raises:
        StorageError: a file is damaged or cannot be reached.
    """
    stopped = threading.Event()

    def check() -> list[str]:
        if not manifest.has_manifest(chosen.path):
            return []
        return manifest.verify_files(chosen.path, chosen.facts.step, stopped=stopped.is_set)

    with ThreadPoolExecutor(1) as pool:
        verification = pool.submit(check)
        try:
            yield
            with translate_storage_errors(chosen.path):
                wrong = verification.result()
        finally:
            stopped.set()
    if wrong:
        raise _damaged(chosen.path, "; ".join(wrong[:3]))


def _types(chosen: _ExportedCheckpoint, both: TensorMapping, dtype: str | None) -> dict[str, str]:
    """Return the safetensors dtype of each tensor, keyed by tensor name."""
    exact = {
        piece.tensor: {**TYPES, "int32": next(iter(INTEGERS))}[both.params[name].own_dtype]
        for name, pieces in both.slices.items()
        if both.params[name].own_dtype
        for piece in pieces
    }
    if dtype is not None:
        return dict.fromkeys(both.tensors, TYPES[dtype]) | exact
    stored = dict.fromkeys(both.tensors, TYPES[chosen.config.model.param_dtype]) | exact
    if (said := chosen.facts.data.get(ORIGIN)) is None:
        return stored
    try:
        origin = check_type(said, Origin)
        if not {origin["dtype"], *origin["dtypes"].values()} <= DTYPES.keys() | INTEGERS.keys():
            raise ValueError("unknown dtype")
    except ValueError as error:
        raise _damaged(chosen.path, f"the import record is invalid: {error}") from error
    return {name: origin["dtypes"].get(name, origin["dtype"]) for name in both.tensors}


def _most_common_dtype(types: Mapping[str, str]) -> str:
    values = list(types.values())
    return max(dict.fromkeys(values), key=values.count)


def shard_tensors(
    both: TensorMapping,
    types: Mapping[str, str],
    shard_bytes: int,
    scales: BlockScales | None = None,
) -> dict[str, _Tensors]:
    """Assign tensors, in layer order, to files of at most `shard_bytes`; a larger tensor has its
    own file. The scales of a quantized tensor follow it.
    """
    groups: list[_Tensors] = [{}]
    size = 0
    for name, shape in both.tensors.items():
        tensors: _Tensors = {name: ({**DTYPES, **INTEGERS}[types[name]], shape)}
        if scales is not None and name in scales:
            tensors = scales.tensors(name, shape)
        more = _num_bytes(tensors)
        if groups[-1] and size + more > shard_bytes:
            groups.append({})
            size = 0
        groups[-1] |= tensors
        size += more
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _num_bytes(tensors: _Tensors) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values())


def _write_tensors(
    chosen: _ExportedCheckpoint,
    both: TensorMapping,
    files: Mapping[str, _Tensors],
    here: Path,
    report: ProgressCallback,
    scales: BlockScales | None,
) -> list[str]:
    """Write all weight files (and an index if there are several), and return their names."""
    total = sum(map(_num_bytes, files.values()))
    place = {tensor: name for name, group in files.items() for tensor in group}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(SafetensorsWriter(here / name, group))
            for name, group in files.items()
        }
        try:
            with translate_storage_errors(chosen.path):
                recorded = manifest.read_expected_digests(chosen.path, chosen.facts.step)
        except DamagedError as damage:
            raise _damaged(chosen.path, str(damage)) from damage
        expected = recorded.arrays if recorded else {}

        def put(written: ByteProgress, piece: TensorSlice, tensor: np.ndarray, first: int) -> None:
            writer = writers[place[piece.tensor]]
            if scales is not None and piece.tensor in scales:
                cast = scales.quantize(piece.tensor, tensor, first)
            else:
                cast = mapping.cast(tensor, writer.dtype(piece.tensor), piece.tensor)
            writer.write(
                piece.tensor, cast, first, *piece.interleave[:2], piece.interleave.is_block
            )
            written.add(cast.nbytes)

        def add(read: ByteProgress, piece: TensorSlice, tensor: np.ndarray, first: int) -> None:
            if scales is not None and piece.tensor in scales:
                scales.add(piece.tensor, tensor, first)
            read.add(tensor.nbytes)

        if scales is not None:
            matrices = {
                name: shape
                for name, shape in both.shapes.items()
                if any(piece.tensor in scales for piece in both.slices[name])
            }
            size = sum(map(math.prod, matrices.values()))
            itemsize = np.dtype(chosen.config.model.param_dtype).itemsize
            read = ByteProgress("computing scales", size * itemsize, report)
            for name, shape in matrices.items():
                _read_param(chosen, both, name, shape, expected, partial(add, read))
        written = ByteProgress("writing", total, report)
        for name, shape in both.shapes.items():
            _read_param(chosen, both, name, shape, expected, partial(put, written))
        for name, values in (scales.scales if scales else {}).items():
            writers[place[name]].write(name, values)
            written.add(values.nbytes)
    if chosen.adapters is not None:
        chosen.adapters.check()
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (here / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(files)


_PutRows = Callable[[TensorSlice, np.ndarray, int], None]
"""Function that receives rows of a tensor slice and the index of the first row in the tensor."""


def _read_param(
    chosen: _ExportedCheckpoint,
    both: TensorMapping,
    name: str,
    shape: tuple[int, ...],
    expected: Mapping[str, digests.ArrayDigest],
    put_rows: _PutRows,
) -> None:
    """Pass a parameter to `put_rows` in the layout of its tensors, and check the parameter against
    its digest. Several threads call `put_rows`.
    """
    averaged = chosen.average and both.params[name].trainable
    full_name = f"{_EMA_PREFIX if averaged else _PARAMS}{name}"
    try:
        array = manifest.call_detecting_damage(lambda: chosen.array(name, full_name, shape))
        if array.shape != shape:
            raise DamagedError(f"array {full_name} does not have the shape that the config defines")
        total, lock = digests.ArrayDigest(str(array.dtype), shape), threading.Lock()

        def put(region: slab_writer.Region) -> None:
            values = manifest.call_detecting_damage(lambda: array.read(region))
            part = digests.ArrayDigest(total.dtype, shape)
            part.add(values, [indices.start for indices in region])
            with lock:
                total.merge(part)
            wanted = tuple(range(indices.start, indices.stop) for indices in region)
            for piece in (*both.slices[name], *both.copied_slices.get(name, ())):
                if (parts := intersect(piece, wanted)) is not None:
                    inside, taken = parts
                    tensor = piece.axis_mapping.to_hf(values[inside])
                    first, _ = piece.rows(taken[piece.outer_remaining_dim])
                    put_rows(piece, tensor, first)

        slab_writer.run_in_threads(
            put, slab_writer.regions(shape, export_slab_shape(both, name, array.chunk_shape))
        )
        wrong = digests.describe_non_finite({full_name: total})
        if full_name in expected:
            before = {full_name: expected[full_name]}
            wrong += digests.diff_digests(before, {full_name: total})
        if wrong:
            raise DamagedError("; ".join(wrong))
    except DamagedError as damage:
        raise _damaged(chosen.path, str(damage)) from damage


def _imported_config(folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return the config.json that the import saved, from which an export copies some keys."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            return parse_json(read(folder / FILE, _MAX_BYTES), dict[str, Any])
    return {}


# Chat template and special tokens.


@dataclass(frozen=True)
class TrainedTokenizer:
    """Tokenizer and chat format with which a run was trained.

    `tokenizer` is None if it cannot be opened. `is_run` is False if the weights were imported and
    have not been trained since.
    """

    tokenizer: Tokenizer | None
    conversation: ChatSpec | None
    is_run: bool

    def in_config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the special-token keys to change in a config.json or generation_config.json."""
        tokenizer = self.tokenizer
        if not self.is_run or tokenizer is None:
            return {}
        changed: dict[str, Any] = {}
        before = content.get(EOS_KEY)
        before = before if isinstance(before, list) else [] if before is None else [before]
        ends = self.conversation["end_ids"] if self.conversation is not None else []
        after = [*dict.fromkeys([*before, tokenizer.end_id, *ends])]
        if after != before:
            changed[EOS_KEY] = after if len(after) > 1 else after[0]
        if content.get(PAD_KEY) is None and tokenizer.pad_id != tokenizer.end_id:
            changed[PAD_KEY] = tokenizer.pad_id
        return changed

    def write(self, here: Path, copied: Sequence[str], say: MessageCallback) -> None:
        """Update the tokenizer files and generation_config.json in an export folder.

        Raises:
            ConfigError: a copied file cannot be read.
            OSError: a file cannot be written.
        """
        has_generation = _GENERATION in copied
        content = _read_json(here / _GENERATION) if has_generation else {}
        changed = self.in_config(content)
        if changed and (has_generation or (self.conversation and self.conversation["end_ids"])):
            _write_json(here / _GENERATION, content | changed)
        if self.conversation is None or (template := self.conversation["template"]) is None:
            return
        if not copied:
            say("omitted: the chat template, because the export has no tokenizer files")
            return
        chat = self.tokenizer.chat if self.tokenizer else None
        if chat is not None and chat.template == template:
            return
        write(here / _TEMPLATE, template.encode())
        for name in (_SETTINGS, _TEMPLATE_JSON):  # older transformers releases read this file
            if name in copied:
                _write_json(here / name, _read_json(here / name) | {"chat_template": template})
        say(f"{_TEMPLATE}: the chat template with which the run was trained")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_json(read(path, _MAX_BYTES), dict[str, Any])
    except (OSError, ValueError) as error:
        rule = f"must be a JSON object: {getattr(error, 'strerror', None) or error}."
        action = "Fix this file in the folder of tokenizer.path."
        raise ConfigError.one(Code.HF_DAMAGED, path.name, None, rule, action) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write(path, text.encode("utf-8", "surrogatepass"))


def _trained_tokenizer(chosen: _ExportedCheckpoint, say: MessageCallback) -> TrainedTokenizer:
    """Return the tokenizer and the chat format recorded in a checkpoint."""
    data = chosen.facts.data
    try:
        conversation = parse_chat_spec(data)
    except ValueError as error:
        raise _damaged(chosen.path, f"the chat format record is invalid: {error}") from error
    try:
        tokenizer = open_tokenizer(chosen.config.tokenizer)
        if tokenizer.min_embedding_rows <= (rows := chosen.config.model.vocab_size):
            tokenizer = tokenizer.with_embedding_rows(rows)
    except ConfigError as error:
        say(f"{FILE} has no special-token ids: {error.problems[0].rule}")
        tokenizer = None
    return TrainedTokenizer(tokenizer, conversation, is_run="source" in data.get("fingerprint", {}))


def _defaults(config: Config, kept: Mapping[str, Any], trained: TrainedTokenizer) -> dict[str, Any]:
    """Return the sequence length and special-token ids for keys that the imported config lacks."""
    length = {"max_position_embeddings": config.train.sequence_length}
    if EOS_KEY in kept:
        return length
    if (tokenizer := trained.tokenizer) is None:
        return {**length, **dict.fromkeys((BOS_KEY, EOS_KEY, PAD_KEY))}
    ids = {BOS_KEY: tokenizer.begin_id, EOS_KEY: tokenizer.end_id, PAD_KEY: tokenizer.pad_id}
    return {**length, **ids, **trained.in_config(ids)}
