"""A run's event log records checkpoints, but its checkpoint folder contains none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from etils import epath

from maxpipe.checkpoint.folder import CheckpointFolder
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import CheckpointManager, check_saved, find_lost_step
from maxpipe.errors import StorageError


def events(run_dir: Path, *saves: tuple[int, str]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [{"event": "checkpoint", "step": step, "folder": where} for step, where in saves]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (run_dir / "events.jsonl").write_text(text)


def error_text(run_dir: Path, folder: str | Path) -> str:
    with pytest.raises(StorageError) as error:
        check_saved(run_dir, epath.Path(folder))
    return str(error.value)


@pytest.mark.parametrize(
    ("saved_in", "setting"),
    [
        ("/one/run/checkpoints", "Set checkpoint.dir=/one,"),
        ("gs://bucket/one/run/checkpoints", "Set checkpoint.dir=gs://bucket/one,"),
        ("RUN/checkpoints", "Set checkpoint.dir='',"),
    ],
)
def test_checkpoint_folder_other_than_recorded_is_rejected(
    saved_in: str, setting: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    saved_in = saved_in.replace("RUN", str(run_dir))
    events(run_dir, (4, "/zero/run/checkpoints"), (8, saved_in))
    text = error_text(run_dir, "/two/run/checkpoints")
    assert f"records that step 8 was saved in {saved_in}. No file was changed." in text
    assert setting in text and "saved there" not in text


def test_equivalent_checkpoint_paths_are_recognized(tmp_path: Path) -> None:
    run_dir, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(tmp_path)
    events(run_dir, (8, str(link / "run" / "checkpoints")))
    assert "records that step 8 was saved there" in error_text(run_dir, run_dir / "checkpoints")
    events(run_dir, (8, "gs://bucket/one//run/checkpoints/"))
    folder = "gs://bucket/one/run/checkpoints"
    assert "records that step 8 was saved there" in error_text(run_dir, folder)


def test_checkpoints_on_a_local_disk_are_not_required(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    events(run_dir, (8, "/local/run-0123abcd"))
    check_saved(run_dir, epath.Path(run_dir / "checkpoints"))


def warning_text(run_dir: Path, restored: int) -> str:
    folder = CheckpointFolder(run_dir / "checkpoints")
    problem = find_lost_step(run_dir, folder, restored)
    return problem.line if problem else ""


def test_missing_newest_checkpoint_is_named_with_the_restored_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    events(run_dir, (30, str(run_dir / "checkpoints")), (40, str(run_dir / "checkpoints")))
    text = warning_text(run_dir, 30)
    assert "no checkpoint of step 40" in text and "resumes after step 30" in text
    assert text.endswith("[MP-CKPT-005]")
    assert not warning_text(run_dir, 40) and not warning_text(run_dir, 50)
    (run_dir / "checkpoints" / "40.corrupt").mkdir(parents=True)
    assert not warning_text(run_dir, 30)


@pytest.mark.parametrize("file", ["run", "run/checkpoints"])
def test_file_in_place_of_folder_is_named(file: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / file
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("text")
    with pytest.raises(StorageError) as error, RunLock(tmp_path / "run"):
        CheckpointManager(tmp_path / "run")
    rule, action = str(error.value).splitlines()[1:]
    assert rule == f"  must be a folder, but is a file: {path}."
    assert action.startswith(f"  Move {path} to another path, or set run.dir to another folder.")
    assert path.read_text() == "text"
