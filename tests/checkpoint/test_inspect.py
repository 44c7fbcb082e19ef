"""The commands `maxpipe checkpoints list`, `show`, `verify`, `prune`, `delete` and `diff`."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.checkpoint import inspect
from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import diff_shapes, diff_trees, tree_digest
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import StorageError
from tests.checkpoint.cases import config, data, put, save, tree
from tests.errors import without_codes

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *args: object, code: int = 0) -> list[str]:
    """Run `maxpipe checkpoints` and return the lines of its output and error message."""
    assert main(["checkpoints", *map(str, args)]) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code not in (0, 1)) and "Traceback" not in err
    return without_codes(out + err).splitlines()


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS_FOLDER).iterdir())


def damage(run_dir: Path, step: int) -> None:
    (run_dir / CHECKPOINTS_FOLDER / str(step) / "facts" / "metadata").write_text("{}")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 6; even steps have a loss, lowest at 4. Tests must not modify this folder."""
    run_dir = tmp_path_factory.mktemp("evaluated")
    with CheckpointManager(run_dir, CheckpointConfig(keep=9)) as checkpoints:
        for step in range(1, 7):
            put(checkpoints, step, loss=None if step % 2 else abs(step - 4) + 1.5)
    return run_dir


@pytest.fixture
def six(evaluated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evaluated, tmp_path / "six"))


def test_list_and_verify_tolerate_concurrent_deletion(six: Path):
    found = inspect.format_checkpoint_list(parse_address(str(six)), None)
    lines = [next(found)]
    shutil.rmtree(six / CHECKPOINTS_FOLDER / "2")
    lines += found
    assert [line.split()[0] for line in lines[1:]] == ["1", "3", "4", "5", "6"]
    found = inspect.verify_checkpoints(parse_address(str(six)))
    lines = [next(found)]
    shutil.rmtree(six / CHECKPOINTS_FOLDER / "3")
    (six / CHECKPOINTS_FOLDER / "4" / "facts" / "metadata").unlink()
    with pytest.raises(StorageError, match="1 of 5 checkpoints are damaged"):
        lines += found
    assert "intact" in lines[0]


# --- list and show ---------------------------------------------------------------------------


def test_list_has_a_line_for_each_step(six: Path, capsys: Capture):
    head, *lines = run(capsys, "list", six)
    assert head.split() == ["step", "saved", "size", "manifest", "loss"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5", "6"]
    assert re.fullmatch(r" +4  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +0.0 MiB  yes +1.5000", lines[3])
    (six / CHECKPOINTS_FOLDER / "6" / "manifest.json").unlink()
    (six / CHECKPOINTS_FOLDER / "5").rename(six / CHECKPOINTS_FOLDER / "5.corrupt")
    (six / CHECKPOINTS_FOLDER / "7.orbax-checkpoint-tmp").mkdir()
    (six / CHECKPOINTS_FOLDER / "8").mkdir()
    lines = run(capsys, "list", six)
    assert re.search(r"MiB  no +3.5000$", lines[-4])
    assert lines[-3] == "5.corrupt: damaged, not used"
    assert lines[-2] == "7.orbax-checkpoint-tmp: unfinished"
    assert "8: is ignored" in lines[-1]


def test_list_shows_retention_reasons(six: Path, capsys: Capture):
    rules = "checkpoint: {keep: 2, keep_best: 1, keep_every_steps: 3}\neval: {every: 2}\n"
    model = (Path(__file__).parents[2] / "configs/model/tiny.yml").read_text()
    (six / "config.yml").write_text(f"{model}\n{rules}train: {{steps: 6}}\n")
    _, *lines = run(capsys, "list", six)
    assert [line.split("  ")[-1].strip() for line in lines[2:]] == [
        "every 3 steps",
        "best, loss 1.5000",
        "newest",
        "newest; every 3 steps",
    ]
    (six / "config.yml").write_text("model: [")
    assert run(capsys, "list", six)[0].endswith("loss")


def test_list_json_matches_table(six: Path, capsys: Capture):
    (six / CHECKPOINTS_FOLDER / "5").rename(six / CHECKPOINTS_FOLDER / "5.corrupt")
    (six / CHECKPOINTS_FOLDER / "3" / "manifest.json").unlink()
    (six / CHECKPOINTS_FOLDER / "7.orbax-checkpoint-tmp").mkdir()
    lines = run(capsys, "list", six)
    found = json.loads("\n".join(run(capsys, "list", six, "--json")))
    assert [each["step"] for each in found["checkpoints"]] == [1, 2, 3, 4, 6]
    assert found["folder"] == str(six / CHECKPOINTS_FOLDER)
    assert found["damaged"] == ["5.corrupt"] and found["unfinished"] == ["7.orbax-checkpoint-tmp"]
    for each, line in zip(found["checkpoints"], lines[1:6], strict=True):
        assert (Path(each["path"]) / "facts").is_dir()
        assert each["manifest"] == (line.split()[5] == "yes") == (each["step"] != 3)
        loss = each["metrics"].get("eval/loss")
        assert line.endswith("" if loss is None else f"{loss:.4f}")
        when = datetime.fromisoformat(each["saved"]).astimezone()
        assert f"{when:%Y-%m-%d %H:%M:%S}" in line and each["bytes"] > 1000
    model = (Path(__file__).parents[2] / "configs/model/tiny.yml").read_text()
    (six / "config.yml").write_text(f"{model}\ncheckpoint: {{keep: 1}}\ntrain: {{steps: 6}}\n")
    found = json.loads("\n".join(run(capsys, "list", six, "--json")))
    assert [each["kept"] for each in found["checkpoints"]] == ["", "", "", "", "newest"]


def test_show_prints_arrays_and_digests(saved: Path, capsys: Capture):
    newest = run(capsys, "show", saved)
    assert any(re.fullmatch(r"params\.layers\.scale +bfloat16 +4 x 8", line) for line in newest)
    assert any(re.fullmatch(r"step +int32 +scalar", line) for line in newest)
    assert f"parameters {30 * 8 + 4 * 8}" in newest
    assert f"sha256     params     {tree_digest(tree(6)['params'])}" in newest
    assert run(capsys, "show", f"{saved}@6") == newest
    assert any(tree_digest(tree(3)["params"]) in line for line in run(capsys, "show", f"{saved}@3"))
    where, rule, action = run(capsys, "show", f"{saved}@4", code=2)
    assert where == f"command line: {saved}@4" and "3, 6" in rule
    assert action.startswith(f"  Use {saved}@6")


# --- verify ----------------------------------------------------------------------------------


def test_verify_names_each_damaged_file(six: Path, capsys: Capture):
    lines = run(capsys, "verify", six)
    assert [line.split("  intact")[0].strip() for line in lines] == list("123456")
    damage(six, 4)
    (six / CHECKPOINTS_FOLDER / "4" / "commit_success.txt").unlink()
    (six / CHECKPOINTS_FOLDER / "2" / "manifest.json").unlink()
    lines = run(capsys, "verify", six, code=74)
    assert lines[1] == f"{2:>10}  unknown: there is no manifest.json"
    assert lines[3] == f"{4:>10}  damaged: commit_success.txt is missing"
    assert re.fullmatch(r" +4  damaged: facts/metadata has 2 bytes instead of \d+", lines[4])
    assert lines[-3] == f"{six / CHECKPOINTS_FOLDER}: 1 of 6 checkpoints are damaged"
    assert len(run(capsys, "verify", f"{six}@5")) == 1
    assert run(capsys, "verify", f"{six}@4", code=74)[-3].endswith("1 of 1 checkpoints are damaged")
    run(capsys, "verify", f"{six}@40", code=2)
    assert steps(six) == list("123456"), "verify must not change any file"


# --- prune -----------------------------------------------------------------------------------


def test_prune_applies_retention_options(six: Path, capsys: Capture):
    rules = ("--keep", 1, "--keep-every-steps", 3, "--keep-best", 1)
    dry = run(capsys, "prune", six, "--dry-run", *rules)
    assert steps(six) == list("123456")
    assert [line.split()[0] for line in dry if "would be deleted" in line] == ["1", "2", "5"]
    done = run(capsys, "prune", six, *rules)
    assert [line.replace("would be ", "") for line in dry] == done
    assert steps(six) == ["3", "4", "6"]
    assert not (six / "lock.json").exists()


def test_prune_keeps_newest_intact_checkpoint(six: Path, capsys: Capture):
    damage(six, 6)
    lines = run(capsys, "prune", six, "--keep", 1)
    assert "         5  kept: newest intact checkpoint" in lines
    assert steps(six) == ["5", "6"]


def test_prune_requires_rules_and_unlocked_run(six: Path, capsys: Capture):
    assert "--keep 3" in run(capsys, "prune", six, code=2)[-1]
    assert "--keep-best = -1" in run(capsys, "prune", six, "--keep-best=-1", code=2)[0]
    assert "nan" in run(capsys, "prune", six, "--keep-every-hours=nan", code=2)[0]
    with RunLock(six):
        assert "is in use by another run" in run(capsys, "prune", six, "--keep", 1, code=74)[0]
        run(capsys, "prune", six, "--keep", 1, "--dry-run")
    assert steps(six) == list("123456")


# --- delete and best -------------------------------------------------------------------------


def test_delete_removes_one_step(six: Path, capsys: Capture):
    (line,) = run(capsys, "delete", f"{six}@3")
    assert re.fullmatch(r" +3  deleted, \d+\.\d MiB freed", line)
    run(capsys, "delete", six / CHECKPOINTS_FOLDER / "1")
    run(capsys, "delete", f"{six}@best")
    assert steps(six) == ["2", "5", "6"] and not (six / "lock.json").exists()
    where, rule, _ = run(capsys, "delete", f"{six}@3", code=2)
    assert where == f"command line: {six}@3" and "2, 5, 6" in rule
    where, _, action = run(capsys, "delete", six, code=2)
    assert where == f"command line: {six}" and action == f"  Give {six}@STEP."


def test_delete_of_newest_intact_checkpoint_requires_force(six: Path, capsys: Capture):
    where, rule, action = run(capsys, "delete", f"{six}@6", code=2)
    assert where == f"command line: {six}@6" and "the newest intact checkpoint" in rule
    assert "--force" in action
    damage(six, 6)
    assert "the newest intact checkpoint" in run(capsys, "delete", f"{six}@5", code=2)[1]
    run(capsys, "delete", f"{six}@newest")  # allowed because it is damaged
    (six / CHECKPOINTS_FOLDER / "5" / "manifest.json").unlink()
    run(capsys, "delete", f"{six}@5", code=2)  # may be intact: it has no manifest
    assert steps(six) == list("12345")
    run(capsys, "delete", f"{six}@5", "--force")
    for step in (1, 2, 3):
        run(capsys, "delete", f"{six}@{step}")
    assert "the only intact checkpoint" in run(capsys, "delete", f"{six}@4", code=2)[1]
    run(capsys, "delete", f"{six}@4", "--force")
    assert steps(six) == []


def test_delete_outside_run_folder_requires_elsewhere(six: Path, tmp_path: Path, capsys: Capture):
    """An untrusted config.yml or a link may refer to another run's checkpoints."""
    foreign, linked = tmp_path / "foreign", tmp_path / "linked"
    for folder in (foreign, linked):
        folder.mkdir()
    model = (Path(__file__).parents[2] / "configs/model/tiny.yml").read_text()
    leads = f"checkpoint: {{dir: {six.parent}}}\nrun: {{name: six}}\ntrain: {{steps: 6}}\n"
    (foreign / "config.yml").write_text(f"{model}\n{leads}")
    (linked / CHECKPOINTS_FOLDER).symlink_to(six / CHECKPOINTS_FOLDER)
    for folder in (foreign, linked):
        where, rule, action = run(capsys, "delete", f"{folder}@1", code=2)
        assert where == f"run folder {folder}" and str(six / CHECKPOINTS_FOLDER) in rule
        assert action.endswith("add --elsewhere.")
    assert steps(six) == list("123456")
    run(capsys, "delete", f"{foreign}@1", "--elsewhere")
    assert steps(six) == list("23456")


def test_delete_rejects_locked_run(six: Path, capsys: Capture):
    with RunLock(six):
        output = run(capsys, "delete", f"{six}@1", "--force", code=74)
        assert "is in use by another run" in output[0]
    assert steps(six) == list("123456")


def test_best_selects_smallest_loss(six: Path, saved: Path, capsys: Capture):
    assert run(capsys, "best", six) == [f"{six}@4  eval/loss 1.5"]
    found = json.loads("\n".join(run(capsys, "best", six, "--json")))
    assert found == {"checkpoint": f"{six}@4", "step": 4, "metric": "eval/loss", "value": 1.5}
    assert run(capsys, "show", found["checkpoint"]) == run(capsys, "show", f"{six}@best")
    _, rule, action = run(capsys, "best", six, "--metric", "eval/los", code=2)
    assert "no checkpoint with metric eval/los; the recorded metrics are eval/loss." in rule
    assert action == "  Use --metric eval/loss."
    damage(six, 4)  # damaged metadata is ignored; steps 2 and 6 have equal losses
    assert run(capsys, "best", six) == [f"{six}@6  eval/loss 3.5"]
    _, rule, action = run(capsys, "best", saved, code=2)
    assert "no saved step was evaluated" in rule
    assert "eval.every=0" in action
    assert "no saved step was evaluated" in run(capsys, "show", f"{saved}@best", code=2)[1]


def test_best_follows_direction_of_metric(tmp_path: Path, capsys: Capture):
    losses, accuracies = [1.0, 3.0, 2.0], [0.2, 0.9, 0.5]
    with CheckpointManager(tmp_path / "run", CheckpointConfig(keep=9)) as checkpoints:
        for step, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), 1):
            values = {"eval/loss": loss, "eval/q/accuracy": accuracy, "eval/margin": loss}
            checkpoints.save(
                step, lambda step=step: tree(step), config(step), data(step), values, last=False
            )
    best = {
        "eval/loss": 1,
        "eval/q/accuracy": 2,
        "eval/margin": 2,
        "eval/q/accuracy --mode min": 1,
        "eval/loss --mode max": 2,
    }
    for options, step in best.items():
        [line] = run(capsys, "best", tmp_path / "run", "--metric", *options.split())
        assert line.startswith(f"{tmp_path / 'run'}@{step}  "), options


def test_quarantined_step_is_reported_as_damaged(six: Path, capsys: Capture):
    (six / CHECKPOINTS_FOLDER / "5").rename(six / CHECKPOINTS_FOLDER / "5.corrupt")
    _, rule, action = run(capsys, "verify", f"{six}@5", code=2)
    assert "5.corrupt" in rule and f"{six}@6" in action


def test_checkpoint_path_overrides_checkpoint_dir_in_config(
    six: Path, tmp_path: Path, capsys: Capture
):
    """A path inside `checkpoints` is used as given, even if config.yml refers to another folder."""
    model = (Path(__file__).parents[2] / "configs/model/tiny.yml").read_text()
    elsewhere = f"checkpoint: {{dir: {tmp_path}/elsewhere}}\nrun: {{name: six}}\n"
    (six / "config.yml").write_text(f"{model}\n{elsewhere}train: {{steps: 6}}\n")
    save(tmp_path / "elsewhere" / "six", 4)
    assert len(run(capsys, "verify", six)) == 1
    assert len(run(capsys, "verify", six / CHECKPOINTS_FOLDER)) == 6
    run(capsys, "show", six / CHECKPOINTS_FOLDER / "3")
    run(capsys, "show", f"{six}@3", code=2)
    assert "1, 2, 3" in run(capsys, "show", six / CHECKPOINTS_FOLDER / "9", code=2)[1]
    run(capsys, "delete", six / CHECKPOINTS_FOLDER / "4")
    assert "4" not in steps(six) and steps(tmp_path / "elsewhere" / "six") == ["4"]


# --- diff ------------------------------------------------------------------------------------


def test_diff_of_equal_checkpoints(saved: Path, copy: Path, capsys: Capture):
    assert run(capsys, "diff", saved, f"{copy}@6") == ["same"]
    assert run(capsys, "diff", saved, f"{copy}@6", "--exit-code") == ["same"]


def test_diff_lists_arrays_config_and_data(saved: Path, tmp_path: Path, capsys: Capture):
    lines = run(capsys, "diff", f"{saved}@3", saved)
    assert [line.split("  ")[0] for line in lines] == [
        *(f"optimizer.{name}.{leaf}" for name in ("mu", "nu") for leaf in LEAVES),
        *(f"params.{leaf}" for leaf in LEAVES),
        "step",
        "config run.seed",
        "data step",
    ]
    assert lines[-1] == "data step  3 in the first checkpoint, 6 in the second"
    apart = np.abs(np.asarray(tree(3)["params"]["embedding"] - tree(6)["params"]["embedding"]))
    assert f"by at most {apart.max():.6g}" in lines[4]
    assert run(capsys, "diff", f"{saved}@3", saved, "--exit-code", code=1) == lines
    where, rule, _ = run(capsys, "diff", f"{saved}@4", saved, code=2)
    assert f"{saved}@4" in where and "3, 6" in rule
    run(capsys, "diff", saved, tmp_path, code=2)


LEAVES = ("embedding", "layers.scale")


def test_diff_trees_detects_shapes_dtypes_bits_and_names():
    ones = np.ones((2, 3), np.float32)
    assert diff_trees({"a": ones}, {"a": jax.numpy.ones((2, 3))}) == []
    assert diff_trees({"a": ones}, {"b": ones}) == [
        "a  is only in the first checkpoint",
        "b  is only in the second checkpoint",
    ]
    assert diff_trees({"a": ones}, {"a": ones[:1]}) == [
        "a  float32 2 x 3 in the first checkpoint, float32 1 x 3 in the second"
    ]
    assert "int32" in diff_trees({"a": ones}, {"a": ones.astype(np.int32)})[0]
    zero = np.zeros(2, np.float32)
    assert diff_trees({"a": zero}, {"a": -zero}) == [
        "a  2, 0% of the elements differ, by at most 0"
    ]
    assert diff_shapes({"a": ones}, {"a": ones.astype(np.int32)}) == []


def test_metadata_file_is_plain_json(saved: Path):
    facts = json.loads((saved / CHECKPOINTS_FOLDER / "6" / "facts" / "metadata").read_text())
    assert sorted(facts) == ["config", "data", "format", "metrics", "step", "time"]


def test_diff_accepts_run_name_with_at_sign(tmp_path: Path, capsys: Capture):
    save(tmp_path / "a@1", 1, 2)
    assert run(capsys, "diff", f"{tmp_path}/a@1@2", f"{tmp_path}/a@1@2") == ["same"]


@pytest.mark.parametrize("has_gone", [False, True])
def test_stdout_write_error_is_not_a_storage_error(
    has_gone: bool, six: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    error = BrokenPipeError() if has_gone else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Output(io.StringIO):
        def flush(self) -> None:
            raise error

    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Output())
        code = main(["checkpoints", "prune", str(six), "--keep", "2"])
    written = capsys.readouterr().err
    if has_gone:  # the reader closed the pipe, but the command completed
        assert (code, written, steps(six)) == (0, "", ["5", "6"])
    else:
        assert code == 74
        assert without_codes(written).startswith(
            "standard output: cannot be written\n  No space left on device."
        )
