"""A manifest notices every change of every file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from etils import epath

from maxpipe.checkpoint import manifest
from tests.checkpoint.cases import files

STEP = 6


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "checkpoints" / str(STEP), tmp_path / str(STEP)))


def faults(step: Path, number: int = STEP) -> list[str]:
    return manifest.faults(epath.Path(step), number)


def test_what_was_saved_has_no_faults(step: Path):
    assert manifest.is_in(epath.Path(step))
    assert faults(step) == []
    content = json.loads((step / "manifest.json").read_text())
    listed = content["files"]
    assert list(map(str, files(step))) == [*listed, "manifest.json"]
    assert all(listed[name]["bytes"] == (step / name).stat().st_size for name in listed)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied", "zeroed"])
@pytest.mark.fault("F11")
def test_every_damaged_file_is_named(damage: str, step: Path):
    names = files(step)
    assert len(names) > 8
    for name in names:
        content = (step / name).read_bytes()
        left = {"truncated": content[:-1], "emptied": b"", "zeroed": bytes(len(content))}
        (step / name).unlink()
        if damage != "deleted":
            (step / name).write_bytes(left[damage])
        if damage == "deleted" and name.name == "manifest.json":
            assert not manifest.is_in(epath.Path(step))
        else:
            (fault,) = faults(step)
            assert fault.startswith(f"{name} ")
        (step / name).write_bytes(content)
    assert faults(step) == []


@pytest.mark.fault("F12")
def test_every_flipped_bit_is_noticed(step: Path):
    """200 bits, anywhere in the files with arrays; orbax alone notices about one of them."""
    chance = random.Random(5)
    arrays = [name for name in files(step) if name.parent.name == "d"]
    for _ in range(200):
        path = step / chance.choice(arrays)
        content = bytearray(path.read_bytes())
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        assert faults(step) == [f"{path.relative_to(step)} has other content than was saved"]
        content[place] ^= bit
        path.write_bytes(content)
    assert faults(step) == []


def test_flipped_bits_of_the_manifest_itself_are_noticed_or_harmless(step: Path):
    chance, path = random.Random(6), step / "manifest.json"
    good = path.read_bytes()
    noticed = 0
    for _ in range(100):
        content = bytearray(good)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        if found := faults(step):
            assert found[0].startswith("manifest.json cannot be used: ")
            noticed += 1
        else:  # white space
            assert json.loads(content) == json.loads(good)
    assert noticed > 80


def test_a_step_has_to_be_where_it_was_saved(step: Path):
    assert faults(step, 7) == ["manifest.json cannot be used: it is of step 6"]


def test_shares_of_several_readers_are_the_whole(step: Path):
    for name in files(step)[:-1]:
        content = (step / name).read_bytes()
        (step / name).write_bytes(bytes(len(content)))
        found = [manifest.faults(epath.Path(step), STEP, (i, 3)) for i in range(3)]
        assert sorted(map(len, found)) == [0, 0, 1]
        (step / name).write_bytes(content)


def test_a_manifest_that_cannot_be_finished_is_none(step: Path, monkeypatch: pytest.MonkeyPatch):
    (step / "manifest.json").unlink()

    def full(path: epath.Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        manifest.write(epath.Path(step), STEP)
    assert not manifest.is_in(epath.Path(step))
    monkeypatch.undo()
    manifest.write(epath.Path(step), STEP)
    assert faults(step) == [] and not list(step.glob("*.partial"))
