"""Read the arrays of a MaxText checkpoint, which Orbax stores in the Zarr format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from maxpipe.errors import Code, ConfigError
from maxpipe.io.files import read
from maxpipe.io.typed_json import parse_json

_METADATA = "_METADATA"
_MAX_METADATA_BYTES = 1 << 28
_OPTIMIZER = ("opt_state", "optimizer")
_ROOTS = ("decoder", "token_embedder")
"""First components of the names of a model's parameters, below `params` and `params.params`."""
_WHERE = "command line: maxtext"


@dataclass(frozen=True)
class ParamArrays:
    """Parameter arrays of a checkpoint, keyed by name, such as `decoder.decoder_norm.scale`."""

    folder: Path
    arrays: Mapping[str, Any]
    """tensorstore arrays, which are read region by region."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        return tuple(self.arrays[name].shape)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of an array."""
        return self.arrays[name].dtype.numpy_dtype

    def read(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Read a region of an array.

        Raises:
            ConfigError: the files of the array cannot be read.
        """
        try:
            return cast(np.ndarray, self.arrays[name][index].read().result())
        except (ValueError, OSError) as error:
            raise _unreadable(self.folder, f"{name}: {_first_line(error)}") from error


def open_arrays(folder: Path) -> ParamArrays:
    """Open the parameters of a checkpoint: with or without optimizer state, at a step or not.

    Raises:
        ConfigError: the folder is not a checkpoint of MaxText, or an array cannot be opened.
    """
    items = _find_items(folder)
    try:
        content = parse_json(read(items / _METADATA, _MAX_METADATA_BYTES), dict[str, Any])
    except (OSError, ValueError) as error:
        raise _unreadable(items, f"{_METADATA}: {_first_line(error)}") from error
    names = _param_names(content.get("tree_metadata"))
    if not names:
        rule = "contains no parameters of MaxText: no array below decoder or token_embedder."
        action = "Use a checkpoint of MaxText's trainer or of its to_maxtext conversion."
        raise ConfigError.one(Code.MT_CHECKPOINT, _WHERE, items, rule, action)
    return ParamArrays(items, _open(items, content, names))


def _find_items(folder: Path) -> Path:
    """Return the folder of the arrays: the folder itself, its `items`, or those of its last
    step.
    """
    steps = [each for each in folder.glob("*") if each.name.isdecimal() and each.is_dir()]
    steps.sort(key=lambda each: int(each.name), reverse=True)
    candidates = [folder, folder / "items", folder / "checkpoints"]
    for step in steps[:1]:
        candidates += [step / "items", step / "default", step]
    found = next((each for each in candidates if (each / _METADATA).is_file()), None)
    if found is None and (folder / "checkpoints").is_dir():
        return _find_items(folder / "checkpoints")
    if found is None:
        rule = f"is not a checkpoint of Orbax: it has no {_METADATA}, items/ or step folders."
        action = "Use a local copy of the checkpoint: DIR, DIR/STEP or DIR/STEP/items."
        raise ConfigError.one(Code.MT_CHECKPOINT, _WHERE, folder, rule, action)
    return found


def _param_names(tree: object) -> dict[str, str]:
    """Return the stored name of each parameter, keyed by its name without `params` prefixes."""
    found: dict[str, str] = {}
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not all(isinstance(each, dict) for each in keys):
            continue
        parts = tuple(str(each.get("key")) for each in keys)
        root = next((place for place, part in enumerate(parts) if part in _ROOTS), None)
        if root is None or set(parts[:root]) & set(_OPTIMIZER) or "/" in "".join(parts):
            continue
        name = parts[root:-1] if parts[-1] == "value" else parts[root:]
        found[".".join(name)] = ".".join(parts)
    return found


def _open(items: Path, content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Open all arrays, without reading their content."""
    import tensorstore  # slow to import

    base = f"file://{items.absolute()}/"
    driver = "zarr3" if content.get("use_zarr3") else "zarr"
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 1 << 26}})
    pending = {}
    for name, stored in names.items():
        kvstore: Any = (
            {"driver": "ocdbt", "base": base, "path": f"{stored}/"}
            if content.get("use_ocdbt")
            else f"{base}{stored}/"
        )
        spec = {"driver": driver, "kvstore": kvstore}
        pending[name] = tensorstore.open(spec, read=True, open=True, context=context)
    try:
        return {name: future.result() for name, future in pending.items()}
    except (ValueError, OSError) as error:
        raise _unreadable(items, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).splitlines()[0][:300]


def _unreadable(folder: Path, reason: str) -> ConfigError:
    rule = f"cannot be read: {reason}."
    return ConfigError.one(
        Code.MT_CHECKPOINT, _WHERE, folder, rule, "Copy the complete checkpoint again."
    )
