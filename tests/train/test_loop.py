"""The run as its user sees it: files, resuming, stopping, and mistakes."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from maxpipe.checkpoint.manager import open_run
from maxpipe.config.load import load, to_dict
from tests.train.runs import (
    SAME,
    Run,
    Start,
    events,
    forget_after,
    losses,
    records,
    saved_digest,
)

STEPS = 24
TOLD = ("start", "checkpoint", "preempted", "done")


def is_explained(output: str) -> None:
    """An error in four parts, last in the output: where and what, rule, action."""
    assert "Traceback" not in output and "this is a bug" not in output
    *_, where, rule, action = output.rstrip("\n").splitlines()
    assert not where.startswith(" ")
    assert rule.startswith("  ") and action.startswith("  ") and action.endswith(".")


@pytest.fixture(scope="module")
def unbroken(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went through; its output is in `output.txt`. Not to be changed."""
    folder = tmp_path_factory.mktemp("unbroken")
    output = run("train", tiny, f"run.dir={folder}")
    (folder / "run" / "output.txt").write_text(output)
    return folder / "run"


@pytest.fixture
def copy(unbroken: Path, tmp_path: Path) -> Path:
    """A copy of the unbroken run that may be changed; `run.dir` is its parent."""
    return Path(shutil.copytree(unbroken, tmp_path / "copied" / "run"))


# --- files -------------------------------------------------------------------------------


def test_run_folder_holds_what_is_promised(unbroken: Path):
    names = {path.name for path in unbroken.iterdir()} - {"output.txt"}
    assert names == {"config.yml", "metrics.jsonl", "events.jsonl", "tensorboard", "checkpoints"}
    steps = {path.name for path in (unbroken / "checkpoints").iterdir()}
    assert steps == {"4", "8", "12", "16", "20", "24"}


def test_config_file_loads_to_the_config_of_the_run(unbroken: Path, tiny: Path):
    written = load([str(unbroken / "config.yml")]).config
    assert written == load([str(tiny), f"run.dir={unbroken.parent}"]).config
    with open_run(unbroken) as checkpoints:
        assert checkpoints.durable.facts(STEPS).config == to_dict(written)


def test_metrics_have_the_documented_tags(unbroken: Path):
    found = records(unbroken)
    assert list(found) == list(range(2, STEPS + 1, 2))
    always = {"step", "train/loss", "train/grad_norm", "train/lr", "train/tokens"}
    always |= {"perf/step_s", "perf/tokens_per_s", "perf/tflops_per_device", "perf/data_wait_s"}
    always |= {"pipe/bubble_pct", "train/skipped"}
    evaluated = {"eval/loss", "eval/nats_per_byte"}
    for step, record in found.items():
        assert set(record) == always | (evaluated if step in (12, 24) else set())
        assert record["train/tokens"] == step * 8 * 16
        assert all(math.isfinite(value) for value in record.values())
    assert found[STEPS]["train/loss"] < found[2]["train/loss"] - 1
    assert found[2]["pipe/bubble_pct"] == pytest.approx(100 * 3 / 7)


def test_events_tell_what_happened(unbroken: Path):
    saves = [("checkpoint", step) for step in range(4, STEPS + 1, 4)]
    assert events(unbroken, *TOLD) == [("start", 0), *saves, ("done", STEPS)]


def test_tensorboard_reads_its_files(unbroken: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(unbroken / "tensorboard"))
    reader.Reload()
    wanted = losses(unbroken)
    assert {event.step: event.value for event in reader.Scalars("train/loss")} == wanted
    assert [event.step for event in reader.Scalars("eval/loss")] == [12, 24]
    (text,) = reader.Tensors("config")
    assert (unbroken / "config.yml").read_text() in text.tensor_proto.string_val[0].decode()


def test_console_shows_our_lines_only(unbroken: Path):
    ours = ("reading data", "run ", "devices ", "mesh ", "model ", "pipeline ", "data ")
    ours += ("training ", "starting a new run in ", "compiling ", "step ", "validation after step ")
    ours += ("done: ", "final validation loss ")
    lines = (unbroken / "output.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith(ours)] == []
    assert sum(line.startswith("step ") for line in lines) == STEPS // 2


def test_checkpoint_commands_show_steps_and_digests(unbroken: Path, run: Run):
    listed = run("checkpoints", "list", unbroken).splitlines()
    assert [line.split()[0] for line in listed] == ["step", "4", "8", "12", "16", "20", "24"]
    shown = run("checkpoints", "show", unbroken, "--step", 12)
    rows = [line.split() for line in shown.splitlines() if line.startswith("sha256")]
    assert [row[1] for row in rows] == ["params", "optimizer", "data", "all"]
    assert all(len(row[2]) == 64 for row in rows)
    assert "params.layers.mlp.gate" in shown and "4 x 16 x 32" in shown
    assert "\nstep       12\n" in shown


# --- resuming ----------------------------------------------------------------------------


def test_finished_run_started_again_changes_nothing(
    copy: Path, unbroken: Path, tiny: Path, run: Run
):
    output = run("train", tiny, f"run.dir={copy.parent}")
    assert "all 24 steps are done: nothing is left to train" in output
    assert "compiling train step" not in output
    assert records(copy) == records(unbroken)
    assert saved_digest(copy) == saved_digest(unbroken)
    assert events(copy, *TOLD) == [*events(unbroken, *TOLD), ("start", STEPS), ("done", STEPS)]


@pytest.mark.slow
@pytest.mark.fault("F1", "F4", "D4")
@pytest.mark.faults
def test_killed_runs_end_as_the_unbroken_one(
    unbroken: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """kill -9 during set-up, at random steps and inside saves, again and again."""
    chance = random.Random(1)
    arguments = ("train", tiny, f"run.dir={tmp_path}", "checkpoint.every=3", "checkpoint.keep=2")
    starts = ("starting a new run", "resuming", "compiling train step: ")
    # Saves happen every third step and records every second, so both are interrupted.
    for moment in (starts[0], "step 4", "step 8", starts[1], starts[2], "step 14", "step 20"):
        with start(*arguments) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if " ".join(line.split()).startswith(moment):
                    break
            time.sleep(chance.uniform(0, 0.15))
            process.kill()
    run(*arguments)
    assert losses(tmp_path / "run") == losses(unbroken)
    assert losses(tmp_path / "run", "train/grad_norm") == losses(unbroken, "train/grad_norm")
    assert losses(tmp_path / "run", "eval/loss") == losses(unbroken, "eval/loss")
    assert saved_digest(tmp_path / "run") == saved_digest(unbroken)
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"21", "24"}
    resumed_at = [step for event, step in events(tmp_path / "run", *TOLD) if event == "start"]
    assert resumed_at[-1] > resumed_at[0] == 0


@pytest.mark.slow
@pytest.mark.fault("F8", "D4")
@pytest.mark.faults
def test_stopped_runs_end_as_the_unbroken_one(
    unbroken: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """SIGTERM while the step compiles, in the middle, and then to the end."""
    arguments = ("train", tiny, f"run.dir={tmp_path}", "checkpoint.every=0")
    stopped = []
    for moment in ("reading data", "compiling train step ...", "step 6", "step 14"):
        with start(*arguments) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if " ".join(line.split()).startswith(moment):
                    process.send_signal(signal.SIGTERM)
                    break
            rest = process.stdout.read()
        assert process.returncode == 75, rest
        is_explained(rest)
        stopped.append(events(tmp_path / "run", *TOLD)[-1])
        assert stopped[-1][0] == "preempted"
        if stopped[-1][1]:  # before the first step there is nothing to save
            with open_run(tmp_path / "run") as checkpoints:
                assert stopped[-1][1] == checkpoints.steps()[-1]
    assert [step for _, step in stopped[:2]] == [0, 0]
    assert 6 <= stopped[2][1] < 14 <= stopped[3][1] < STEPS
    run(*arguments)
    assert losses(tmp_path / "run") == losses(unbroken)
    assert saved_digest(tmp_path / "run") == saved_digest(unbroken)


# Overrides of layouts that have nothing in common with the unbroken run's.
LAYOUTS = {
    "repeats": "mesh.ici_stage=2 mesh.ici_fsdp=2 pipeline.repeats=2 pipeline.schedule=interleaved"
    " pipeline.microbatches=2 pipeline.weight_gather=step",
    "one stage": "mesh.ici_stage=1 mesh.ici_data=2 mesh.cpu_devices=2 pipeline.microbatches=1"
    " pipeline.schedule=gpipe",
    "padded": "mesh.ici_stage=3 mesh.ici_fsdp=2 mesh.cpu_devices=6 pipeline.microbatches=4"
    " pipeline.schedule=1f1b pipeline.idle=compute",
    "a layer outside": "mesh.ici_stage=3 mesh.cpu_devices=3 pipeline.microbatches=8"
    " pipeline.layers_outside=1",
}


@pytest.mark.slow
@pytest.mark.fault("D6")
@pytest.mark.faults
def test_run_goes_on_under_other_layouts(copy: Path, unbroken: Path, tiny: Path, run: Run):
    """Each layout makes the next steps; the loss curve is that of one layout."""
    for resumed, overrides in zip((4, 8, 16, 20), LAYOUTS.values(), strict=True):
        forget_after(copy, resumed)
        output = run("train", tiny, f"run.dir={copy.parent}", *overrides.split())
        assert f"after step {resumed}" in output
    assert losses(copy) == pytest.approx(losses(unbroken), rel=SAME)
    assert losses(copy, "eval/loss") == pytest.approx(losses(unbroken, "eval/loss"), rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.fault("D6")
def test_checkpoint_does_not_depend_on_the_layout(
    layout: str, unbroken: Path, tiny: Path, run: Run, tmp_path: Path
):
    """Read under another layout and saved again, every byte is the same."""
    restore = f"checkpoint.restore_from={unbroken}"
    run("train", tiny, f"run.dir={tmp_path}", restore, "eval.batches=0", *LAYOUTS[layout].split())
    assert saved_digest(tmp_path / "run") == saved_digest(unbroken)


def test_another_run_starts_from_the_newest_checkpoint(
    unbroken: Path, tiny: Path, run: Run, tmp_path: Path
):
    before = saved_digest(unbroken)
    arguments = ("run.name=next", f"run.dir={tmp_path}", "train.steps=28", "eval.batches=0")
    output = run("train", tiny, *arguments, f"checkpoint.restore_from={unbroken}")
    assert f"starting from {unbroken} after step {STEPS}" in output
    assert list(records(tmp_path / "next")) == [26, 28]
    assert losses(tmp_path / "next")[26] < losses(unbroken)[12]
    assert saved_digest(unbroken) == before


# --- mistakes ------------------------------------------------------------------------------


@pytest.mark.fault("F16")
def test_every_changed_model_key_is_named(copy: Path, tiny: Path, run: Run):
    changes = ("model.d_mlp=48", "model.tied_embeddings=true", "model.compute_dtype=bfloat16")
    output = run("train", tiny, f"run.dir={copy.parent}", "train.steps=28", *changes, code=2)
    is_explained(output)
    assert "command line: model.d_mlp = 48\n  must be 32" in output
    assert "command line: model.tied_embeddings = True\n  must be False" in output
    assert "model.compute_dtype" not in output
    assert saved_digest(copy)


def test_run_cannot_end_before_it_starts(copy: Path, tiny: Path, run: Run):
    output = run("train", tiny, f"run.dir={copy.parent}", "train.steps=8", code=2)
    is_explained(output)
    assert "command line: train.steps = 8" in output and "at least 24" in output


@pytest.mark.fault("F16")
def test_other_data_needs_a_flag(copy: Path, tiny: Path, run: Run):
    arguments = ("train", tiny, f"run.dir={copy.parent}", "data.validation_fraction=0.3")
    output = run(*arguments, code=2)
    is_explained(output)
    assert "when step 24 was saved: validation_fraction was 0.2 and is 0.3" in output
    more = copy.parent / "more"
    more.mkdir()
    (more / "a.txt").write_text("some other text\n" * 400)
    (more / "b.txt").write_text("and more of it\n" * 400)
    output = run(*arguments[:3], f"data.path={more}", code=2)
    assert re.search(rf"saved: data\.path was \S+ and is {re.escape(str(more))};", output)
    assert re.search(r"; the number of documents was \d+ and is 2; the number of tokens", output)
    assert re.search(
        r"the digest of names, sizes and content of the files was [0-9a-f]{12} and", output
    )
    assert not re.search(r"[0-9a-f]{20}", output)
    output = run(*arguments, "data.allow_change=true")
    assert "warning: data: validation_fraction was 0.2 when step 24 was saved and is 0.3" in output


@pytest.mark.fault("F16")
def test_changes_that_do_no_harm_are_noted(copy: Path, tiny: Path, run: Run):
    arguments = ("train", tiny, f"run.dir={copy.parent}", "optim.learning_rate=0.02")
    output = run(*arguments)
    assert "config: optim.learning_rate was 0.01 when step 24 was saved and is 0.02" in output
    assert output.count("config: ") == 1


def test_a_folder_that_nobody_can_make_is_explained(tiny: Path, run: Run):
    output = run("train", tiny, "run.dir=/proc/nowhere", code=74)
    is_explained(output)
    assert "/proc/nowhere" in output and "cannot be written" in output and "set run.dir" in output


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_file_in_the_place_of_a_folder(place: str, tiny: Path, run: Run, tmp_path: Path):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("not a folder")
    output = run("train", tiny, f"run.dir={tmp_path}", code=74)
    is_explained(output)
    assert "cannot be written" in output and "compiling" not in output


@pytest.mark.parametrize("every", [4, 0], ids=["next save", "last save"])
@pytest.mark.fault("F5")
def test_full_disk_stops_the_run_and_keeps_the_newest_checkpoint(
    every: int, copy: Path, tiny: Path, start: Start
):
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("the size of another process' files cannot be limited here")
    arguments = (f"run.dir={copy.parent}", "train.steps=40", f"checkpoint.every={every}")
    with start("train", tiny, *arguments) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        output, _ = process.communicate()
    assert process.returncode == 74, output
    is_explained(output)
    assert str(copy / "checkpoints") in output
    assert saved_digest(copy)


def test_restoring_from_a_folder_without_a_run(tiny: Path, run: Run, tmp_path: Path):
    restore = f"checkpoint.restore_from={tmp_path / 'nothing'}"
    output = run("train", tiny, f"run.dir={tmp_path}", restore, code=2)
    is_explained(output)
    assert f"command line: checkpoint.restore_from = {tmp_path / 'nothing'}" in output


def test_a_step_compiled_before_gives_the_same_losses(tiny: Path, run: Run, tmp_path: Path) -> None:
    alone = ("mesh.ici_stage=1", "mesh.cpu_devices=1", "train.steps=6", "eval.every=0")
    folder = tmp_path / "step"
    run("compile", tiny, *alone, "--topology", "cpu:1", "--save", folder)
    losses = []
    for name, more in (("fresh", ()), ("loaded", (f"runtime.executable={folder}",))):
        run("train", tiny, *alone, f"run.dir={tmp_path}", f"run.name={name}", *more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("train/loss") for line in lines])
    assert losses[0] == losses[1]
    more = (f"runtime.executable={folder}", f"run.dir={tmp_path}", "run.name=other")
    other = run("train", tiny, *alone, *more, "mesh.ici_fsdp=2", "mesh.cpu_devices=2", code=2)
    assert "was compiled for mesh.ici_fsdp = 1, and this run has 2." in other
