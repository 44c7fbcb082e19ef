"""Save and load compiled train steps, verifying the owner, metadata and checksum before loading.

A compiled program is executable code, and JAX stores some of it as a pickle, which can also run
code. The folder must therefore be writable only by its owner. The folder contains the program, a
checksum, and the metadata of the compilation. The program is deserialized only after all three
checks have passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
from jax.experimental import serialize_executable

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import files, redact
from maxpipe.io.typed_json import parse_json

PROGRAM, PROVENANCE = "program.bin", "provenance.json"
CONFIG_KEY = "runtime.compiled_step"
_MAX_PROVENANCE_BYTES = 1 << 20
PROGRAM_SECTIONS = ("model", "mesh", "pipeline", "train", "optim")
"""Config sections that affect the program."""
PROGRAM_KEYS = ("run.seed", "guard.spike_sigmas", "guard.spike_window", "guard.on_spike")
"""Keys outside these sections that affect the program."""


class Provenance(TypedDict):
    """Contents of a program's metadata file."""

    sha256: str
    facts: dict[str, str]


def save(compiled: Any, folder: Path, facts: Mapping[str, str]) -> None:
    """Write a program and its compilation metadata.

    Raises:
        StorageError: the folder cannot be written, or other users can write to it.
    """
    payload, _, _ = serialize_executable.serialize(compiled)
    digest = hashlib.sha256(payload).hexdigest()
    record = json.dumps({"sha256": digest, "facts": dict(facts)}, indent=2)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, folder.stat())
        for name, content in ((PROGRAM, payload), (PROVENANCE, record.encode())):
            path = folder / name
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(files.open_regular(path, flags, 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise StorageError.unwritable(
            folder, error, "Use --save to choose a different folder."
        ) from error


def load(
    folder: Path, facts: Mapping[str, str], in_tree: Any, out_tree: Any, devices: Sequence[Any]
) -> Any:
    """Return the program stored in a folder if its metadata matches `facts`.

    Raises:
        ConfigError: the metadata differs from `facts`, or the program cannot be loaded on these
            devices.
        StorageError: the program is missing or corrupted, or other users can write to it.
    """
    try:
        _check_private(folder, folder.stat())
        record = parse_json(_read_private(folder / PROVENANCE, _MAX_PROVENANCE_BYTES), Provenance)
        payload = _read_private(folder / PROGRAM)
        made_of, digest = record["facts"], record["sha256"]
    except OSError as error:
        raise StorageError(
            Code.RUN_COMPILED_STEP,
            f"{CONFIG_KEY} = {folder}\n  cannot be read: {error.strerror}.\n  Create it with "
            f"`maxpipe compile ... --save {folder}`, or omit {CONFIG_KEY}.",
        ) from error
    except ValueError as error:
        raise _damage_error(folder) from error
    for name in dict.fromkeys((*facts, *made_of)):
        mine, its = facts.get(name), made_of.get(name)
        if mine != its:
            raise ConfigError.one(
                Code.RUN_COMPILED_STEP,
                CONFIG_KEY,
                folder,
                f"was compiled for {name} = {its}, but this run has {mine}.",
                f"Recompile with `maxpipe compile ... --save`, or omit {CONFIG_KEY}.",
            )
    action = f"Omit {CONFIG_KEY}, or train on one CPU device."
    check_devices(devices[0].platform, len(devices), CONFIG_KEY, folder, action)
    if hashlib.sha256(payload).hexdigest() != digest:
        raise _damage_error(folder)
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=devices[0].client, execution_devices=list(devices)
    )


def check_devices(platform: str, count: int, where: str, folder: Path, action: str) -> None:
    """Check that `count` devices of a platform can load compiled programs. `platform` is the
    platform name used by JAX.

    Raises:
        ConfigError: the devices cannot load compiled programs.
    """
    if platform == "cpu" and count > 1:
        rule = f"cannot be used by {count} CPU devices: XLA loses the device order "
        raise ConfigError.one(
            Code.RUN_COMPILED_STEP, where, folder, f"{rule}of a loaded program.", action
        )


def _damage_error(folder: Path) -> StorageError:
    return StorageError(
        Code.RUN_COMPILED_STEP,
        f"{CONFIG_KEY} = {folder}\n  is damaged: the program's checksum does not match.\n  "
        "Recompile with `maxpipe compile ... --save`.",
    )


def _read_private(path: Path, most: int = -1) -> bytes:
    """Read at most `most` bytes, after checking the owner and mode of the opened file."""
    with open(files.open_regular(path), "rb") as stream:
        _check_private(path, os.fstat(stream.fileno()))
        return stream.read(most)


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            Code.IO_UNSAFE,
            f"{CONFIG_KEY} = {path}\n  can be written by other users, who could replace the "
            "program code.\n  If you trust the content, chown the folder to yourself and chmod it "
            "to 700.",
        )


def program_metadata(
    sections: Mapping[str, Mapping[str, Any]], lowered: Any, devices: Sequence[Any]
) -> dict[str, str]:
    """Return the metadata of a train step: config, devices, JAX version and program checksum.

    `sections` are the sections of a config with a resolved mesh, keyed by name.
    """
    values = {
        f"{section}.{key}": json.dumps(value)
        for section in PROGRAM_SECTIONS
        for key, value in redact.redact_value(sections[section]).items()
    }
    for key in PROGRAM_KEYS:
        section, name = key.split(".")
        values[key] = json.dumps(sections[section][name])
    values.pop("mesh.cpu_devices")
    device = devices[0]
    values |= {
        "jax": jax.__version__,
        "device kind": str(device.device_kind),
        "number of devices": str(len(devices)),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
    return values
