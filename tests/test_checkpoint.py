"""What is saved is read back bit for bit, or the reader is told why not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint import FOLDER, Checkpoints, digest, leaves, open_run, print_list, print_show
from maxpipe.errors import ConfigError, StorageError

Tree = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def tree(step: int) -> Tree:
    values = np.random.default_rng(step)
    params = {
        "embedding": jax.numpy.asarray(values.normal(size=(30, 8)), "float32"),
        "layers": {"scale": jax.numpy.asarray(values.normal(size=(4, 8)), "bfloat16")},
    }
    moments = {name: jax.tree.map(lambda leaf: leaf + 1, params) for name in ("mu", "nu")}
    return {"step": jax.numpy.int32(step), "params": params, "optimizer": moments}


def config(step: int) -> dict[str, Any]:
    return {"run": {"seed": step}, "optim": {"learning_rate": 1e-3}}


def data(step: int) -> dict[str, Any]:
    return {"step": step, "fingerprint": {"source": "corpus"}}


def save(run_dir: Path, *steps: int, keep: int = 5) -> Path:
    with Checkpoints(run_dir, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree(step), config(step), data(step))
    return run_dir


def restore(run_dir: Path, step: int, abstract: Tree | None = None) -> Tree:
    with open_run(run_dir) as checkpoints:
        return checkpoints.restore(step, abstract).state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with steps 3 and 6. Not to be changed."""
    return save(tmp_path_factory.mktemp("saved"), 3, 6)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


# --- saving and restoring -------------------------------------------------------------------


def test_restored_is_what_was_saved(saved: Path):
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3, 6] and checkpoints.latest() == 6
        for step in (3, 6):
            found = checkpoints.restore(step)
            assert found.step == step
            assert found.config == config(step) and found.data == data(step)
            assert digest(found.state) == digest(tree(step))
            for _, array in leaves(found.state):
                assert isinstance(array, np.ndarray)


def test_restored_lies_where_the_reader_wants_it(saved: Path, devices: list[Any]):
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    spec = jax.sharding.PartitionSpec
    split = jax.sharding.NamedSharding(mesh, spec("x"))
    whole = jax.sharding.NamedSharding(mesh, spec())
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split if leaf.ndim else whole
        ),
        tree(6),
    )
    state = restore(saved, 6, abstract)
    assert state["params"]["embedding"].sharding == split
    assert digest(state) == digest(tree(6))


def test_state_may_change_as_soon_as_save_returns(tmp_path: Path):
    state = tree(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, config(1), data(1))
        jax.tree.map(lambda leaf: leaf.delete(), state)
    assert digest(restore(tmp_path, 1)) == digest(tree(1))


def test_only_the_newest_are_kept_and_a_later_start_goes_on(tmp_path: Path):
    save(tmp_path, 1, 2, 3, keep=2)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["2", "3"]
    save(tmp_path, 4, keep=2)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["3", "4"]
    assert digest(restore(tmp_path, 3)) == digest(tree(3))


def test_due_counts_from_the_first_step(tmp_path: Path):
    with Checkpoints(tmp_path / "some", every=3) as checkpoints:
        assert [step for step in range(1, 10) if checkpoints.due(step)] == [3, 6, 9]
    with Checkpoints(tmp_path / "none", every=0) as checkpoints:
        assert not any(checkpoints.due(step) for step in range(1, 10))


@pytest.mark.parametrize("step", [3, 6])
def test_saved_step_is_never_overwritten(step: int, copy: Path):
    with Checkpoints(copy) as checkpoints, pytest.raises(StorageError, match=f"{step}"):
        checkpoints.save(step, tree(99), config(99), data(99))
    assert digest(restore(copy, step)) == digest(tree(step))


def test_unfinished_save_is_no_checkpoint(copy: Path):
    unfinished = copy / FOLDER / "9.orbax-checkpoint-tmp"
    shutil.copytree(copy / FOLDER / "6", unfinished)
    with open_run(copy) as checkpoints:
        assert checkpoints.latest() == 6
    assert unfinished.exists(), "a reader changes nothing"
    save(copy, 9)
    assert not unfinished.exists()
    assert digest(restore(copy, 9)) == digest(tree(9))


def test_reader_leaves_no_trace(saved: Path, tmp_path: Path, capsys: Capture):
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    print_list(str(saved))
    print_show(str(saved), None)
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert capsys.readouterr().err == ""
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="one checkpoint is complete"):
            open_run(missing)
    assert list(tmp_path.iterdir()) == []


# --- faults ---------------------------------------------------------------------------------


def test_every_damaged_file_is_noticed_or_harmless(copy: Path, saved: Path):
    """Each file is removed, cut in half and emptied: a StorageError, or the right bytes."""
    good, noticed = digest(tree(6)), 0
    files = [path.relative_to(saved) for path in (saved / FOLDER / "6").rglob("*")]
    for path in files:
        if not (saved / path).is_file():
            continue
        content = (saved / path).read_bytes()
        for left in (None, content[: len(content) // 2], b""):
            (copy / path).unlink()
            if left is not None:
                (copy / path).write_bytes(left)
            try:
                found = restore(copy, 6)
            except StorageError as error:
                noticed += 1
                assert re.match(rf"{copy / FOLDER}/6: cannot be restored\n  .+\n  .+", str(error))
                assert "step 3" in str(error)
            else:
                assert digest(found) == good, path
            (copy / path).write_bytes(content)
    assert noticed > 6


def test_oldest_checkpoint_damaged(tmp_path: Path):
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / FOLDER / "2" / "state")
    with pytest.raises(StorageError, match="It is the oldest"):
        restore(tmp_path, 2)


def test_other_shape_than_saved(saved: Path, devices: list[Any]):
    place = jax.sharding.SingleDeviceSharding(devices[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree(6)
    )
    wide = jax.ShapeDtypeStruct((30, 16), "float32", sharding=place)
    abstract["params"]["embedding"] = wide
    with pytest.raises(StorageError, match="cannot be restored"):
        restore(saved, 6, abstract)


def test_checkpoint_of_another_format(copy: Path):
    facts = copy / FOLDER / "6" / "facts" / "metadata"
    facts.write_text(facts.read_text().replace('"format": 1', '"format": 7'))
    with open_run(copy) as checkpoints, pytest.raises(StorageError, match="format 7"):
        checkpoints.facts(6)


def test_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path):
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        Checkpoints(tmp_path)


# --- list and show --------------------------------------------------------------------------


def test_list_has_a_line_for_each_step(saved: Path, capsys: Capture):
    print_list(str(saved))
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "saved", "size"]
    assert [line.split()[0] for line in lines] == ["3", "6"]


def test_show_prints_arrays_and_digests(saved: Path, capsys: Capture):
    print_show(str(saved), None)
    newest = capsys.readouterr().out
    assert re.search(r"^params\.layers\.scale +bfloat16 +4 x 8$", newest, re.MULTILINE)
    assert re.search(r"^step +int32 +scalar$", newest, re.MULTILINE)
    assert f"parameters {30 * 8 + 4 * 8}\n" in newest
    assert f"params     {digest(tree(6)['params'])}" in newest
    print_show(str(saved), 6)
    assert capsys.readouterr().out == newest
    print_show(str(saved), 3)
    assert digest(tree(3)["params"]) in capsys.readouterr().out
    with pytest.raises(ConfigError, match="3, 6"):
        print_show(str(saved), 4)


def test_digest_sees_names_types_shapes_and_values():
    array = np.arange(6, dtype=np.float32)
    trees = [
        {"a": array},
        {"b": array},
        {"a": array.astype(np.int32)},
        {"a": array.reshape(2, 3)},
        {"a": array[::-1]},
        {"a": np.where(array == 0, -0.0, array).astype(np.float32)},
    ]
    assert len({digest(tree) for tree in trees}) == len(trees)
    assert digest({"a": array, "b": {"c": array}}) == digest({"b": {"c": array}, "a": array})
    assert digest({"a": jax.numpy.asarray(array)}) == digest({"a": array})
