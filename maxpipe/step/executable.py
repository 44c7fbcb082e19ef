"""A compiled train step on disk, loaded only if its owner, digest and facts are right.

A compiled program is code, and jax stores part of it as a pickle, which is code too. So it is kept
in a folder that only its owner can write, with a digest and the facts that it was made of; nothing
of it is read before all three are checked.
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

from maxpipe.errors import ConfigError, StorageError
from maxpipe.io import files, redact
from maxpipe.io.typed_json import parse_json

PROGRAM, PROVENANCE = "program.bin", "provenance.json"
CONFIG_KEY = "runtime.compiled_step"
_MAX_PROVENANCE_BYTES = 1 << 20
PROGRAM_SECTIONS = ("model", "mesh", "pipeline", "train", "optim")
"""Config sections that determine the program."""
PROGRAM_KEYS = ("run.seed", "guard.spike_sigmas", "guard.spike_window", "guard.on_spike")
"""Keys of other sections that determine it."""


class Provenance(TypedDict):
    """The facts beside a program."""

    sha256: str
    facts: dict[str, str]


def save(compiled: Any, folder: Path, facts: Mapping[str, str]) -> None:
    """Writes a program with the facts that it was made of.

    Raises:
        StorageError: the folder cannot be written, or others could write it.
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
        raise StorageError.unwritable(folder, error, "Name another folder with --save.") from error


def load(
    folder: Path, facts: Mapping[str, str], in_tree: Any, out_tree: Any, devices: Sequence[Any]
) -> Any:
    """The program in a folder, if it was made of these facts.

    Raises:
        ConfigError: it was made for something else, which is named; or devices cannot use it.
        StorageError: it is not there, damaged, or others could have written it.
    """
    try:
        _check_private(folder, folder.stat())
        record = parse_json(_read_private(folder / PROVENANCE, _MAX_PROVENANCE_BYTES), Provenance)
        payload = _read_private(folder / PROGRAM)
        made_of, digest = record["facts"], record["sha256"]
    except OSError as error:
        raise StorageError(
            f"{CONFIG_KEY} = {folder}\n  cannot be read: {error.strerror}.\n"
            f"  Make it with `maxpipe compile ... --save {folder}`, or leave out {CONFIG_KEY}."
        ) from error
    except ValueError as error:
        raise _damage_error(folder) from error
    for name in dict.fromkeys((*facts, *made_of)):
        mine, its = facts.get(name), made_of.get(name)
        if mine != its:
            raise ConfigError.one(
                CONFIG_KEY,
                folder,
                f"was compiled for {name} = {its}, and this run has {mine}.",
                f"Compile it again with `maxpipe compile ... --save`, or leave out {CONFIG_KEY}.",
            )
    action = f"Leave out {CONFIG_KEY}, or train on one CPU device."
    check_devices(devices[0].platform, len(devices), CONFIG_KEY, folder, action)
    if hashlib.sha256(payload).hexdigest() != digest:
        raise _damage_error(folder)
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=devices[0].client, execution_devices=list(devices)
    )


def check_devices(platform: str, count: int, where: str, folder: Path, action: str) -> None:
    """Checks that this number of devices of a platform, as jax names it, can load programs.

    Raises:
        ConfigError: they cannot.
    """
    if platform == "cpu" and count > 1:
        rule = f"cannot be used by {count} CPU devices: XLA loses the order in which the devices "
        raise ConfigError.one(where, folder, f"{rule}of a loaded program meet.", action)


def _damage_error(folder: Path) -> StorageError:
    return StorageError(
        f"{CONFIG_KEY} = {folder}\n  is damaged: its digest is not that of its program.\n"
        "  Compile it again with `maxpipe compile ... --save`."
    )


def _read_private(path: Path, most: int = -1) -> bytes:
    """At most `most` bytes of a file, of the very file that was checked."""
    with open(files.open_regular(path), "rb") as stream:
        _check_private(path, os.fstat(stream.fileno()))
        return stream.read(most)


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"{CONFIG_KEY} = {path}\n  can be written by others, and a program is code.\n"
            f"  chown it to yourself and chmod 700 the folder, if you trust its content."
        )


def program_metadata(
    sections: Mapping[str, Mapping[str, Any]], lowered: Any, devices: Sequence[Any]
) -> dict[str, str]:
    """The facts of a train step: config, devices, compiler, and the program itself.

    `sections` are those of a config whose mesh is resolved, by name.
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
