"""A manifest detects every change to the files of a checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.errors import StorageError
from maxpipe.io.typed_json import dump_checksummed
from tests.checkpoint.cases import files

STEP = 6


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "checkpoints" / str(STEP), tmp_path / str(STEP)))


def faults(step: Path, number: int = STEP) -> list[str]:
    return manifest.verify_files(epath.Path(step), number)


def test_saved_step_passes_verification(step: Path):
    assert manifest.has_manifest(epath.Path(step))
    assert faults(step) == []
    content = json.loads((step / "manifest.json").read_text())
    listed = content["files"]
    assert list(map(str, files(step))) == [*listed, "manifest.json"]
    assert all(listed[name]["bytes"] == (step / name).stat().st_size for name in listed)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied", "zeroed"])
@pytest.mark.fault("F11")
def test_verify_files_names_each_damaged_file(damage: str, step: Path):
    names = files(step)
    assert len(names) > 8
    for name in names:
        content = (step / name).read_bytes()
        left = {"truncated": content[:-1], "emptied": b"", "zeroed": bytes(len(content))}
        (step / name).unlink()
        if damage != "deleted":
            (step / name).write_bytes(left[damage])
        if damage == "deleted" and name.name == "manifest.json":
            assert not manifest.has_manifest(epath.Path(step))
        else:
            (fault,) = faults(step)
            assert fault.startswith(f"{name} ")
        (step / name).write_bytes(content)
    assert faults(step) == []


@pytest.mark.fault("F12")
def test_every_flipped_bit_in_array_files_is_detected(step: Path):
    """Of 200 random bit flips in array files, orbax alone would detect about one."""
    chance = random.Random(5)
    arrays = [name for name in files(step) if name.parent.name == "d"]
    for _ in range(200):
        path = step / chance.choice(arrays)
        content = bytearray(path.read_bytes())
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        assert faults(step) == [f"{path.relative_to(step)} differs from the saved content"]
        content[place] ^= bit
        path.write_bytes(content)
    assert faults(step) == []


def test_flipped_manifest_bits_are_detected_or_harmless(step: Path):
    chance, path = random.Random(6), step / "manifest.json"
    good = path.read_bytes()
    noticed = 0
    for _ in range(100):
        content = bytearray(good)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        if found := faults(step):
            assert found[0].startswith("manifest.json is invalid: ")
            noticed += 1
        else:  # white space
            assert json.loads(content) == json.loads(good)
    assert noticed > 80


def test_manifest_of_other_step_is_rejected(step: Path):
    assert faults(step, 7) == ["manifest.json is invalid: the manifest belongs to step 6"]


def test_verification_is_partitioned_across_readers(step: Path):
    for name in files(step)[:-1]:
        content = (step / name).read_bytes()
        (step / name).write_bytes(bytes(len(content)))
        found = [manifest.verify_files(epath.Path(step), STEP, (i, 3)) for i in range(3)]
        assert sorted(map(len, found)) == [0, 0, 1]
        (step / name).write_bytes(content)


def test_failed_manifest_write_leaves_no_manifest(step: Path, monkeypatch: pytest.MonkeyPatch):
    (step / "manifest.json").unlink()

    def full(path: epath.Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        manifest.verify_and_write_manifest(epath.Path(step), STEP)
    assert not manifest.has_manifest(epath.Path(step))
    monkeypatch.undo()
    manifest.verify_and_write_manifest(epath.Path(step), STEP)
    assert faults(step) == [] and not list(step.glob("*.partial"))


Cut = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda content: content.pop("arrays"), "lists no arrays"),
        (lambda content: content["arrays"].clear(), "lists no arrays"),
        (lambda content: content["arrays"].pop("params.embedding"), None),
        (lambda content: content["files"].pop("facts/metadata"), "does not list facts/metadata"),
        (lambda content: content["files"].pop("state/_METADATA"), "does not list state/_METADATA"),
        (lambda content: content["files"].clear(), "does not list facts/metadata"),
        (lambda content: content.pop("files"), "it lacks files"),
        (lambda content: content.update(files=[]), "files must be an object"),
        (lambda content: content.update(version=1.5), "version must be"),
        (lambda content: content["files"].pop(_array_file(content)), "is not in manifest.json"),
    ],
)
@pytest.mark.fault("K6")
def test_incomplete_manifest_is_rejected(cut: Cut, message: str | None, step: Path):
    """The digest of the manifest itself is correct."""
    path = step / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    cut(content)
    path.write_text(dump_checksummed(content))
    found = faults(step)
    if message is None:  # only a comparison with the expected arrays detects it
        expected = manifest.read_expected_digests(epath.Path(step), STEP)
        found = manifest.verify_arrays(epath.Path(step), STEP, expected)
        message = "array params.embedding was not saved"
    assert len(found) == 1 and message in found[0]


def _array_file(content: dict[str, Any]) -> str:
    return next(name for name in content["files"] if name.startswith("state/d/"))


def test_manifest_of_newer_release_is_not_damage(step: Path):
    content = json.loads((step / "manifest.json").read_text()) | {"version": 3}
    del content["sha256"]
    (step / "manifest.json").write_text(dump_checksummed(content))
    with pytest.raises(StorageError, match="Use the release of maxpipe that saved"):
        faults(step)
