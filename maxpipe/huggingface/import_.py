"""Import a Hugging Face folder as a weights-only checkpoint."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from maxpipe.checkpoint import slab_writer
from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manifest import SaveVerificationError
from maxpipe.config.config_files import CHECKPOINTS_FOLDER, CONFIG_FILE
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.config.rules import folder_name
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.config.yaml_values import to_yaml_line
from maxpipe.data.tokenizer import fit_tokenizer, open_tokenizer
from maxpipe.errors import ConfigError
from maxpipe.huggingface import config_json
from maxpipe.huggingface.config_json import FILE
from maxpipe.huggingface.folder import (
    HuggingFaceFolder,
    num_params,
    open_folder,
)
from maxpipe.huggingface.mapping import import_slab_shape
from maxpipe.huggingface.output_folder import (
    TOKENIZER_FILES,
    ByteProgress,
    MessageCallback,
    ProgressCallback,
    atomic_folder,
    copy_tokenizer_files,
    ignore_progress,
    unwritable_error,
    vocabularies,
)
from maxpipe.io.files import expand_path
from maxpipe.io.formatting import pluralize
from maxpipe.models.param_names import unflatten

FOLDER = "huggingface"
"""Name of the folder next to `checkpoints` that contains config.json and the tokenizer files."""

WEIGHTS_ONLY, ORIGIN = "weights_only", "huggingface"
"""Keys of the data position that a checkpoint stores."""

SLAB_BYTES = 1 << 24
"""Size in bytes of the slabs in which parameters are read. The operating system would reclaim
larger allocations after each use, and would have to zero their pages again before the next use.
"""


class Origin(TypedDict):
    """Record of an import, from which an export reproduces the imported files bit for bit."""

    dtype: str
    """Dtype of most tensors, as named in safetensors files."""
    dtypes: dict[str, str]
    """Dtypes of the other tensors, keyed by tensor name."""
    folder: NotRequired[str]
    """Absolute path of the imported folder, or its hub id if it is a Hugging Face hub snapshot."""


_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]{40}")


def hub_id(folder: Path) -> str | None:
    """Return the hub id of a snapshot in the Hugging Face cache, or None for other folders."""
    match = _SNAPSHOT.fullmatch("/".join(folder.absolute().parts[-3:]))
    return f"{match[1]}/{match[2]}" if match else None


class ConvertedModel(NamedTuple):
    """A model to write as a checkpoint."""

    section: Mapping[str, Any]
    """Section `model` of its config."""
    params: Mapping[str, slab_writer.LazySlabArray]
    """Lazily read parameters in checkpoint layout, keyed by name."""
    origin: Origin


def convert_unchanged(source: HuggingFaceFolder) -> ConvertedModel:
    """Return the model of a folder."""
    section = {**source.model_dtypes, **source.description.section}
    origin: Origin = {
        "dtype": source.dtype,
        "dtypes": {n: dtype for n, dtype in source.dtypes.items() if dtype != source.dtype},
        "folder": hub_id(source.folder) or str(source.folder.absolute()),
    }
    params = {name: lazy_array(source, name) for name in source.mapping.shapes}
    return ConvertedModel(section, params, origin)


def import_folder(
    folder: str,
    out: str,
    say: MessageCallback,
    report: ProgressCallback = ignore_progress,
    convert: Callable[[HuggingFaceFolder], ConvertedModel] = convert_unchanged,
    *,
    images: bool = False,
) -> None:
    """Write `<out>/checkpoints/0`, the tokenizer files, and a config.yml for runs that start from
    this checkpoint.

    `say` receives messages for the user, and `report` receives the progress in megabytes. `convert`
    returns the model to write. `images` includes the vision tower.

    Raises:
        ConfigError: the folder does not contain a supported model, or `out` already exists.
        StorageError: `out` cannot be written.
    """
    source = open_folder(folder, images=images)
    for line in describe_source(source):
        say(line)
    model = convert(source)
    target = expand_path(out, _OUT).absolute()
    length = min(source.sequence_length, TrainConfig().sequence_length)
    with atomic_folder(out, _OUT) as here:
        files = here / FOLDER
        files.mkdir()
        copied = copy_tokenizer_files(source.folder, files, (FILE, *TOKENIZER_FILES))
        rows = source.description.config.vocab_size
        tokenizer, fingerprint = _tokenizer(files, target / FOLDER, copied, rows, say)
        saved = load(
            [],
            {
                "train": {"steps": 1, "sequence_length": length},
                "model": model.section,
                "tokenizer": tokenizer,
            },
            str(source.folder / FILE),
        )
        data = {"fingerprint": fingerprint, ORIGIN: model.origin}
        write_import(here, target, saved, model.params, data, tokenizer, report)
    for line in next_steps(target, f"train.sequence_length={length}"):
        say(line)


_OUT = "command line: --out"


def describe_source(source: HuggingFaceFolder) -> list[str]:
    """Return lines for the user that describe a Hugging Face folder."""
    table = source.description.table
    types = ", ".join(sorted(set(source.dtypes.values())))
    if (quantized := source.description.quantization) is not None:
        types += f" (dequantized from {quantized.encoding.name})"
    lines = [
        f"{source.folder}: {table.architecture}, {num_params(source):,} parameters in {types}, "
        f"{pluralize(source.num_files, 'file')}"
    ]
    if source.unused_tensors:
        names = ", ".join(source.unused_tensors[:3])
        count = len(source.unused_tensors)
        more = f" and {count - 3} more" if count > 3 else ""
        lines.append(f"omitted, because this model does not use them: {names}{more}")
    if source.num_missing_mtp_layers:
        lines.append(
            f"{FILE} declares "
            f"{pluralize(source.num_missing_mtp_layers, 'multi-token prediction layer')}, "
            "but the folder has none: the model starts without them (model.mtp_heads=0)"
        )
    lines += config_json.lines(source.description.differences)
    if unknown := source.description.unknown:
        lines.append(
            f"{FILE}: {table.architecture} does not define the keys "
            f"{', '.join(map(repr, unknown[:8]))}, which are ignored"
        )
    return lines


def write_import(
    folder: Path,
    target: Path,
    loaded: LoadedConfig,
    params: Mapping[str, slab_writer.LazySlabArray],
    data: Mapping[str, Any],
    tokenizer: Mapping[str, str],
    report: ProgressCallback,
) -> None:
    """Write a weights-only checkpoint, and a config for runs that start from it.

    Args:
        folder: folder to write.
        target: final location of the folder.
        loaded: config of the imported model.
        params: lazily read parameters in checkpoint layout, keyed by name.
        data: entries of the data section of the checkpoint.
        tokenizer: section `tokenizer` of the config for runs.
        report: function that receives the progress in megabytes.

    Raises:
        StorageError: the checkpoint cannot be written.
    """
    facts = CheckpointMetadata(
        0, to_dict(loaded.config), {"step": 0, WEIGHTS_ONLY: True, **data}, time.time()
    )
    state = {"params": unflatten({tuple(name.split(".")): each for name, each in params.items()})}
    (checkpoints := folder / CHECKPOINTS_FOLDER).mkdir()
    total = sum(array.nbytes for array in leaves_by_name(state).values())
    written = ByteProgress("writing", total, report)
    try:
        slab_writer.save(CheckpointFolder(checkpoints), facts, state, written.add)
    except SaveVerificationError as error:
        raise unwritable_error(target, OSError(f"{error} during verification")) from error
    section = to_dict(loaded.config)["model"]
    del section["param_dtype"]  # new runs use the default parameter dtype
    text = _starter_config(section, tokenizer, target)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def next_steps(target: Path, *settings: str) -> list[str]:
    """Return lines that name the written folder and the command that trains from it."""
    config = shlex.quote(str(target / CONFIG_FILE))
    more = " ".join(["data.source=text", "data.path=...", *settings, "train.steps=..."])
    return [f"wrote {target}", f"next: maxpipe train {config} {more}"]


def lazy_array(source: HuggingFaceFolder, name: str) -> slab_writer.LazySlabArray:
    """Return a lazily read parameter in checkpoint layout, in the dtype of the weight files."""
    dtype = source.stored_dtype(name)
    slab = import_slab_shape(source.mapping, name, SLAB_BYTES // dtype.itemsize)
    read = partial(source.read_region, name, dtype)
    shape = source.mapping.shapes[name]
    return slab_writer.LazySlabArray(shape, dtype, slab, read, is_finite=True, is_fork_safe=True)


def _tokenizer(
    here: Path, later: Path, copied: list[str], rows: int, say: MessageCallback
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the `tokenizer` section of the config, and the tokenizer's entry in the data
    fingerprint.
    """
    section = {"kind": "auto", "path": str(later)}
    if _TOKENIZER not in copied and not vocabularies(here):
        names = f"{_TOKENIZER} or tokenizer.model"
        say(f"the folder has no {names}: add one to {later}, or set tokenizer.path")
        return section, {}
    try:
        config = TokenizerConfig(kind="auto", path=str(here))
        return section, {"tokenizer": fit_tokenizer(open_tokenizer(config), rows).fingerprint()}
    except ConfigError as error:
        say(f"the tokenizer was copied but cannot be used yet: {error.problems[0].rule}")
        return section, {}


_TOKENIZER = "tokenizer.json"


def _starter_config(section: dict[str, Any], tokenizer: Mapping[str, str], target: Path) -> str:
    """Return a config for `maxpipe train` that lacks only the data source and the number of
    steps.
    """
    family = section["family"]
    own = section.pop(family, {})
    return "\n".join(
        [
            f"# A run that starts from the weights in {to_yaml_line(str(target))}.",
            "run:",
            f"  name: {to_yaml_line(f'{folder_name(target.name)}-tuned')}",
            "model:",
            *(f"  {name}: {to_yaml_line(value)}" for name, value in section.items()),
            *([f"  {family}:"] if own else []),
            *(f"    {name}: {to_yaml_line(value)}" for name, value in own.items()),
            "tokenizer:",
            *(f"  {name}: {to_yaml_line(value)}" for name, value in tokenizer.items()),
            "checkpoint:",
            f"  restore_from: {to_yaml_line(str(target))}",
            "  restore: weights",
            "",
        ]
    )
