"""Import a checkpoint of MaxText as a weights-only checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from maxpipe.checkpoint import slab_writer
from maxpipe.config.config_files import SUFFIXES
from maxpipe.config.load import LoadedConfig, load
from maxpipe.config.migration import maxtext
from maxpipe.config.migration.maxtext_files import is_maxtext_file
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.import_ import SLAB_BYTES, next_steps, write_import
from maxpipe.huggingface.output_folder import (
    MessageCallback,
    ProgressCallback,
    atomic_folder,
    ignore_progress,
)
from maxpipe.io.files import expand_path, url_scheme
from maxpipe.maxtext.layout import ParamLayout, RopeLayout, is_interleaved, lay_out
from maxpipe.maxtext.orbax_arrays import ParamArrays, open_arrays

PREFIX = "maxtext:"
"""Prefix that denotes a checkpoint of MaxText on the command line."""

_OUT, _CONFIG = "command line: --out", "command line: --config"
_NEIGHBORS = ("config.yml", "run.yml")
_LEVELS = 4
"""Number of folders above the arrays in which a config is looked for."""


def import_checkpoint(
    folder: str,
    out: str,
    say: MessageCallback,
    report: ProgressCallback = ignore_progress,
    *,
    config: str = "",
    rope: RopeLayout = "auto",
) -> None:
    """Write `<out>/checkpoints/0`, and a config.yml for runs that start from this checkpoint.

    `config` is a config of maxpipe or of MaxText. If empty, a config next to the checkpoint is
    used. `rope` overrides how the dims of rotated pairs are stored.

    Raises:
        ConfigError: the checkpoint cannot be read or does not match the config, or `out` exists.
        StorageError: `out` cannot be written.
    """
    if url_scheme(folder):
        rule = "must be a folder on this machine."
        action = "Copy the checkpoint first, for example with `gcloud storage cp -r`."
        raise ConfigError.one(Code.CLI_CONFLICT, f"command line: {PREFIX}", folder, rule, action)
    arrays = open_arrays(expand_path(folder, f"command line: {PREFIX}"))
    path, loaded = _read_config(config, arrays)
    full = loaded.config
    layouts = lay_out(full.model, arrays, rope)
    say(_describe(arrays, layouts, path))
    pairs = "adjacent" if is_interleaved(full.model, rope) else "split into halves"
    say(f"rotated pairs of dims in the checkpoint: {pairs}")
    if (stored := arrays.shape("token_embedder.embedding")[0]) > full.model.vocab_size:
        say(f"the last {stored - full.model.vocab_size} of {stored} token embeddings are left out")
    target = expand_path(out, _OUT).absolute()
    tokenizer = {"kind": full.tokenizer.kind, "path": full.tokenizer.path}
    tokenizer = tokenizer if full.tokenizer.path else {}
    with atomic_folder(out, _OUT) as here:
        params = _params(arrays, layouts)
        write_import(here, target, loaded, params, {"fingerprint": {}}, tokenizer, report)
    for line in next_steps(target):
        say(line)


def _read_config(config: str, arrays: ParamArrays) -> tuple[Path, LoadedConfig]:
    """Return the config of the checkpoint, and its file."""
    if config:
        path = expand_path(config, _CONFIG)
    else:
        folders = [arrays.folder, *arrays.folder.absolute().parents[:_LEVELS]]
        paths = (folder / name for folder in folders for name in _NEIGHBORS)
        found = next((each for each in paths if each.is_file()), None)
        if found is None:
            rule = f"has no {' or '.join(_NEIGHBORS)} next to it."
            action = (
                "Add --config FILE: the config in MaxText's format, or the file that `maxpipe "
                "config from-maxtext` writes."
            )
            raise ConfigError.one(Code.CFG_FILE, f"checkpoint {arrays.folder}", None, rule, action)
        path = found
    if path.suffix in SUFFIXES and is_maxtext_file(path):
        return path, maxtext.convert(str(path), [], None).load()
    return path, load([str(path)], {"train": {"steps": 1}}, str(path))


def _describe(arrays: ParamArrays, layouts: Mapping[str, ParamLayout], config: Path) -> str:
    count = sum(math.prod(layout.shape) for layout in layouts.values())
    types = sorted({str(arrays.dtype(name)) for name in arrays.arrays})
    return f"{arrays.folder}: {count:,} parameters in {', '.join(types)}; model: {config}"


def _params(
    arrays: ParamArrays, layouts: Mapping[str, ParamLayout]
) -> dict[str, slab_writer.LazySlabArray]:
    """Return lazily read parameters in checkpoint layout."""
    lazy: dict[str, slab_writer.LazySlabArray] = {}
    for name, layout in layouts.items():
        dtype = arrays.dtype(layout.slices[0].array)
        slab = _slab(layout, SLAB_BYTES // dtype.itemsize)
        read = partial(layout.read, arrays)
        lazy[name] = slab_writer.LazySlabArray(layout.shape, dtype, slab, read)
    return lazy


def _slab(layout: ParamLayout, most: int) -> tuple[int, ...]:
    """Return the shape of a slab of at most `most` elements, unless one row has more."""
    stacked, inner = (1,) if layout.is_stacked else (), layout.shape[int(layout.is_stacked) :]
    rows = max(1, min(inner[0], most // max(1, math.prod(inner[1:]))))
    return (*stacked, rows, *inner[1:])
