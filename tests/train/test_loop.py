"""Training runs by the command: files, resuming, evaluation and errors."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import open_run
from maxpipe.cli import main
from maxpipe.config.load import load, to_dict
from tests.cases import keeping
from tests.train.runs import (
    SAME,
    Run,
    Start,
    events,
    forget_after,
    is_explained,
    losses,
    records,
    saved_digest,
    state_of,
    wait_for,
)

STEPS = 24
EVENTS = ("start", "checkpoint", "preempted", "done")


@pytest.fixture
def copy(uninterrupted: Path, tmp_path: Path) -> Path:
    """A writable copy of the uninterrupted run; `run.dir` is its parent."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copied" / "run"))


# --- files -------------------------------------------------------------------------------


def test_run_folder_has_documented_files(uninterrupted: Path):
    names = {path.name for path in uninterrupted.iterdir()} - {"output.txt"}
    assert names == {
        *("config.yml", "metrics.jsonl", "events.jsonl", "forecast.json"),
        *("tensorboard", "checkpoints"),
    }
    steps = {path.name for path in (uninterrupted / "checkpoints").iterdir()}
    assert steps == {"4", "8", "12", "16", "20", "24"}


def test_saved_config_file_loads_to_config_of_run(uninterrupted: Path, tiny: Path):
    written = load([str(uninterrupted / "config.yml")]).config
    assert written == load([str(tiny), f"run.dir={uninterrupted.parent}"]).config
    with open_run(uninterrupted) as checkpoints:
        assert checkpoints.durable.read_metadata(STEPS).config == to_dict(written)


def test_metrics_have_documented_tags(uninterrupted: Path):
    found = records(uninterrupted)
    assert list(found) == list(range(2, STEPS + 1, 2))
    always = {"step", "train/loss", "train/grad_norm", "train/lr", "train/tokens"}
    always |= {"perf/step_s", "perf/tokens_per_s", "perf/tflops_per_device", "perf/data_wait_s"}
    always |= {"pipe/bubble_pct", "train/skipped", "train/epochs", "memory/host_bytes"}
    evaluated = {"eval/loss", "eval/nats_per_byte"}
    for step, record in found.items():
        assert set(record) == always | (evaluated if step in (12, 24) else set())
        assert record["train/tokens"] == step * 8 * 16
        assert all(math.isfinite(value) for value in record.values())
    assert found[STEPS]["train/loss"] < found[2]["train/loss"] - 1
    assert found[2]["pipe/bubble_pct"] == pytest.approx(100 * 3 / 7)


def test_events_record_start_checkpoints_and_end(uninterrupted: Path):
    saves = [("checkpoint", step) for step in range(4, STEPS + 1, 4)]
    assert events(uninterrupted, *EVENTS) == [("start", 0), *saves, ("done", STEPS)]


def test_tensorboard_files_are_readable(uninterrupted: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(uninterrupted / "tensorboard"))
    reader.Reload()
    wanted = losses(uninterrupted)
    assert {event.step: event.value for event in reader.Scalars("train/loss")} == wanted
    assert [event.step for event in reader.Scalars("eval/loss")] == [12, 24]
    (text,) = reader.Tensors("about")
    table = text.tensor_proto.string_val[0].decode().splitlines()
    assert len(table) == 12  # the header, its rule, and ten rows
    assert "| tokens per step | 8 x 16 = 128 |" in table
    (text,) = reader.Tensors("config")
    assert (uninterrupted / "config.yml").read_text() in text.tensor_proto.string_val[0].decode()


def test_console_shows_only_expected_lines(uninterrupted: Path):
    ours = ("reading data", "run ", "devices ", "mesh ", "model ", "attention ", "pipeline ")
    ours += (
        "data ",
        "packing ",
        "training ",
        "starting a new run in ",
        "compiling ",
        "step ",
        "validation after step ",
    )
    ours += ("done: ", "final validation loss ")
    lines = (uninterrupted / "output.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith(ours)] == []
    assert sum(line.startswith("step ") for line in lines) == STEPS // 2


def test_checkpoint_commands_show_steps_and_digests(uninterrupted: Path, run: Run):
    listed = run("checkpoints", "list", uninterrupted).splitlines()
    assert [line.split()[0] for line in listed] == ["step", "4", "8", "12", "16", "20", "24"]
    shown = run("checkpoints", "show", f"{uninterrupted}@12")
    rows = [line.split() for line in shown.splitlines() if line.startswith("sha256")]
    assert [row[1] for row in rows] == ["params", "optimizer", "data", "all"]
    assert all(len(row[2]) == 64 for row in rows)
    assert "params.layers.mlp.gate" in shown and "4 x 16 x 32" in shown
    assert "\nstep       12\n" in shown


# --- resuming ----------------------------------------------------------------------------


def test_restarting_finished_run_keeps_metrics_and_checkpoints(
    copy: Path, uninterrupted: Path, tiny: Path, run: Run
):
    output = run("train", tiny, f"run.dir={copy.parent}")
    assert "all 24 steps are done: nothing is left to train" in output
    assert "compiling train step" not in output
    assert records(copy) == records(uninterrupted)
    assert saved_digest(copy) == saved_digest(uninterrupted)
    assert events(copy, *EVENTS) == [
        *events(uninterrupted, *EVENTS),
        ("start", STEPS),
        ("done", STEPS),
    ]


@pytest.mark.fault("F1", "F4", "D4")
@pytest.mark.faults
def test_resume_after_kills_is_bitwise_equal(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """Send SIGKILL during set-up, at random steps and during saves."""
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
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert losses(tmp_path / "run", "train/grad_norm") == losses(uninterrupted, "train/grad_norm")
    assert losses(tmp_path / "run", "eval/loss") == losses(uninterrupted, "eval/loss")
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"21", "24"}
    resumed_at = [step for event, step in events(tmp_path / "run", *EVENTS) if event == "start"]
    assert resumed_at[-1] > resumed_at[0] == 0


@pytest.mark.fault("F8", "D4")
@pytest.mark.faults
def test_resume_after_stop_requests_is_bitwise_equal(
    uninterrupted: Path, tiny: Path, start: Start, run: Run, tmp_path: Path
):
    """Send SIGTERM during set-up, compilation and training, then train to the end."""
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
        stopped.append(events(tmp_path / "run", *EVENTS)[-1])
        assert stopped[-1][0] == "preempted"
        if stopped[-1][1]:  # before the first step there is nothing to save
            with open_run(tmp_path / "run") as checkpoints:
                assert stopped[-1][1] == checkpoints.steps()[-1]
    assert [step for _, step in stopped[:2]] == [0, 0]
    assert 6 <= stopped[2][1] < 14 <= stopped[3][1] < STEPS
    run(*arguments)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


# Overrides of layouts that differ from that of the uninterrupted run.
LAYOUTS = {
    "repeats": "mesh.ici_stage=2 mesh.ici_fsdp=2 pipeline.repeats=2 pipeline.schedule=interleaved"
    " pipeline.microbatches=2 pipeline.weight_gather=step",
    "one stage": "mesh.ici_stage=1 mesh.ici_data=2 mesh.cpu_devices=2 pipeline.microbatches=1"
    " pipeline.schedule=gpipe",
    "padded": "mesh.ici_stage=3 mesh.ici_fsdp=2 mesh.cpu_devices=6 pipeline.microbatches=4"
    " pipeline.schedule=1f1b pipeline.idle=compute",
    "a layer outside": "mesh.ici_stage=3 mesh.cpu_devices=3 pipeline.microbatches=8"
    " pipeline.prologue_layers=1",
}


@pytest.mark.fault("D6")
@pytest.mark.faults
def test_resume_under_other_layouts(copy: Path, uninterrupted: Path, tiny: Path, run: Run):
    """Each layout trains the next steps; the loss curve equals that of one layout."""
    for resumed, overrides in zip((4, 8, 16, 20), LAYOUTS.values(), strict=True):
        forget_after(copy, resumed)
        output = run("train", tiny, f"run.dir={copy.parent}", *overrides.split())
        assert f"after step {resumed}" in output
    assert losses(copy) == pytest.approx(losses(uninterrupted), rel=SAME)
    assert losses(copy, "eval/loss") == pytest.approx(losses(uninterrupted, "eval/loss"), rel=SAME)


@pytest.mark.parametrize("layout", keeping(LAYOUTS, 0))
@pytest.mark.fault("D6")
def test_checkpoint_is_independent_of_layout(
    layout: str, uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
):
    """A checkpoint restored and saved under another layout has the same digest."""
    restore = f"checkpoint.restore_from={uninterrupted}"
    run("train", tiny, f"run.dir={tmp_path}", restore, "eval.batches=0", *LAYOUTS[layout].split())
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


def test_restore_from_newest_checkpoint_of_another_run(
    uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
):
    before = saved_digest(uninterrupted)
    arguments = ("run.name=next", f"run.dir={tmp_path}", "train.steps=28", "eval.batches=0")
    output = run("train", tiny, *arguments, f"checkpoint.restore_from={uninterrupted}")
    assert f"starting from {uninterrupted} after step {STEPS}" in output
    assert list(records(tmp_path / "next")) == [26, 28]
    assert losses(tmp_path / "next")[26] < losses(uninterrupted)[12]
    assert saved_digest(uninterrupted) == before


@pytest.mark.parametrize(("address", "step"), [("{}@12", 12), ("{}/checkpoints/8", 8)])
@pytest.mark.faults
def test_restore_from_any_step_of_another_run(
    address: str, step: int, uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
):
    source = address.format(uninterrupted)
    arguments = ("run.name=next", f"run.dir={tmp_path}", "train.steps=24", "eval.every=12")
    output = run("train", tiny, *arguments, f"checkpoint.restore_from={source}")
    assert f"starting from {source} after step {step}" in output
    # Data position, learning rate and moments are equal, so the remaining curve is, too.
    assert losses(tmp_path / "next") == {
        each: loss for each, loss in losses(uninterrupted).items() if each > step
    }
    assert saved_digest(tmp_path / "next") == saved_digest(uninterrupted)


@pytest.mark.long
def test_restoring_weights_only_starts_at_step_0(
    uninterrupted: Path, tiny: Path, run: Run, tmp_path: Path
):
    shutil.copytree(uninterrupted, tmp_path / "teacher")
    arguments = (tiny, f"run.dir={tmp_path}", "run.name=next", "train.steps=4", "eval.every=4")
    arguments += ("checkpoint.restore_from=teacher@best", "checkpoint.restore=weights")
    arguments += ("data.validation_fraction=0.3", "optim.schedule=constant")
    output = run("train", *arguments)
    assert "with the weights of teacher@best, step 24" in output
    assert "warning: data" not in output, "a new run may use other data without a warning"
    assert list(records(tmp_path / "next")) == [2, 4]
    assert losses(tmp_path / "next", "train/lr")[2] < 0.01  # warming up again
    assert losses(tmp_path / "next")[2] < losses(uninterrupted)[2] - 1
    with open_run(tmp_path / "next") as checkpoints:
        facts = checkpoints.durable.read_metadata(4)
        assert (facts.step, facts.data["step"]) == (4, 4)
    forget_after(tmp_path / "teacher", 0)  # the source is no longer needed
    output = run("train", *arguments)
    assert (
        "after step 4: the run's own checkpoints take precedence over checkpoint.restore_from"
        in output
    )


# --- evaluation --------------------------------------------------------------------------


def test_eval_reproduces_logged_metrics(uninterrupted: Path, run: Run):
    """Metrics are bitwise equal in the same layout, the run is locked, and no file changes."""
    before = state_of(uninterrupted.parent)
    with RunLock(uninterrupted):
        held = state_of(uninterrupted.parent)
        output = run("eval", f"{uninterrupted}@12", "--json")
        assert state_of(uninterrupted.parent) == held
    found = json.loads(output[output.index("{") :])
    logged = records(uninterrupted)[12]
    assert found["nats_per_token"] == logged["eval/loss"]
    assert found["nats_per_byte"] == logged["eval/nats_per_byte"]
    assert found["perplexity"] == math.exp(logged["eval/loss"])
    assert (found["checkpoint"], found["step"]) == (f"{uninterrupted}@12", 12)
    assert (found["split"], found["batches"], found["mesh"]) == ("validation", 4, "stage 4")
    assert set(before) == set(state_of(uninterrupted.parent))


@pytest.mark.faults
def test_eval_under_another_layout(uninterrupted: Path, run: Run):
    """The run's four stages do not fit two devices, so fsdp is used instead."""
    output = run("eval", f"{uninterrupted}@best", "mesh.cpu_devices=2", "--json")
    assert "the run's mesh (ici_stage 4) does not fit the 2 devices here" in output
    found = json.loads(output[output.index("{") :])
    assert (found["step"], found["mesh"]) == (STEPS, "fsdp 2")
    assert found["nats_per_token"] == pytest.approx(
        losses(uninterrupted, "eval/loss")[STEPS], rel=SAME
    )


@pytest.mark.faults
def test_eval_on_other_data(uninterrupted: Path, run: Run, tmp_path: Path):
    """All tokens are evaluated, with any batch size and an explicit mesh."""
    (tmp_path / "own.txt").write_text("the cat sat on the mat " * 20)
    text = (f"data.path={tmp_path}/own.txt", "eval.batch_size=3", "mesh.cpu_devices=1")
    layout = ("mesh.ici_stage=1", "pipeline.microbatches=2")
    output = run("eval", f"{uninterrupted}/checkpoints/24", *text, *layout)
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines()[-8:])
    # One document of 460 bytes: targets are all bytes and the end-of-document token.
    assert re.search(r"all documents, (\d+) of \1 batches, 461 tokens", rows["data"])
    loss = float(rows["loss"].split()[0])
    assert float(rows["perplexity"]) == pytest.approx(math.exp(loss), rel=1e-4)
    assert 1 < loss < 6


@pytest.mark.faults
@pytest.mark.parametrize("after", [0.0, 4.0, 6.0])
def test_eval_stops_at_first_interrupt(
    uninterrupted: Path, start: Start, tmp_path: Path, after: float
):
    """Interrupt compilation and computation."""
    (tmp_path / "long.txt").write_text("the cat sat on the mat " * 100_000)
    process = start("eval", uninterrupted, "--data", tmp_path / "long.txt", "eval.batch_size=4")
    wait_for(process, "compiling")
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output


MISTAKES = {
    "{}@13": "must be one of the saved steps: 4, 8, 12, 16, 20, 24.",
    "{} train.sequence_length=0": "train.sequence_length",
    "{} --splits all": "is not an option of `maxpipe eval`",
    "{} mesh.ici_stage=3": "must multiply to the number of devices",
    "{} data.validation_fraction=0 eval.batches=0": "--split all",
    "{} data.path=nowhere": "data.path",
    "{} model.d_mlp=48 model.tied_embeddings=true": "model.d_mlp = 48  [MP-CKPT-006]\n  must be 32",
}


@pytest.mark.parametrize("arguments", list(MISTAKES)[:3])
def test_eval_rejects_invalid_arguments(
    arguments: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", *arguments.format(uninterrupted).split()]) == 2
    output = capsys.readouterr().err
    is_explained(output)
    assert MISTAKES[arguments] in output


@pytest.mark.faults
@pytest.mark.parametrize("arguments", list(MISTAKES)[3:])
def test_eval_rejects_incompatible_overrides(arguments: str, uninterrupted: Path, run: Run):
    output = run("eval", *arguments.format(uninterrupted).split(), code=2)
    is_explained(output)
    assert MISTAKES[arguments] in output and "compiling" not in output


def test_eval_of_a_damaged_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]):
    (copy / "checkpoints" / "24" / "facts" / "metadata").write_text("{}")
    assert main(["eval", str(copy)]) == 74
    output = capsys.readouterr().err
    is_explained(output)
    assert f"{copy / 'checkpoints' / '24'}: " in output and "20" in output
    assert (copy / "checkpoints" / "24").is_dir(), "nothing is renamed"


def test_init_creates_config_that_trains(run: Run, tmp_path: Path):
    assert "maxpipe train" in run("init", tmp_path / "first")
    file, small = tmp_path / "first/run.yml", ("train.sequence_length=32", "eval.batches=1")
    output = run("train", file, "train.steps=6", *small, "log.every=1", f"run.dir={tmp_path}/runs")
    assert f"done: 6 steps, files in {tmp_path}/runs/first" in output
    found = losses(tmp_path / "runs/first")
    assert found[6] < found[1]


# --- errors --------------------------------------------------------------------------------


@pytest.mark.fault("F16")
def test_resume_with_changed_model_reports_every_key(copy: Path, tiny: Path, run: Run):
    changes = ("model.d_mlp=48", "model.tied_embeddings=true", "model.compute_dtype=bfloat16")
    output = run("train", tiny, f"run.dir={copy.parent}", "train.steps=28", *changes, code=2)
    is_explained(output)
    assert "command line: model.d_mlp = 48  [MP-CKPT-006]\n  must be 32" in output
    assert "command line: model.tied_embeddings = true  [MP-CKPT-006]\n  must be false" in output
    assert "model.compute_dtype" not in output
    assert saved_digest(copy)


def test_resume_rejects_steps_below_checkpoint_step(copy: Path, tiny: Path, run: Run):
    output = run("train", tiny, f"run.dir={copy.parent}", "train.steps=8", code=2)
    is_explained(output)
    assert "command line: train.steps = 8" in output and "at least 24" in output


@pytest.mark.fault("F16")
def test_resume_with_changed_data_requires_flag(copy: Path, tiny: Path, run: Run):
    arguments = ("train", tiny, f"run.dir={copy.parent}", "data.validation_fraction=0.3")
    arguments = (*arguments, "train.steps=25")
    output = run(*arguments, code=2)
    is_explained(output)
    assert "since step 24 was saved: validation_fraction was 0.2 and is 0.3" in output
    more = copy.parent / "more"
    more.mkdir()
    (more / "a.txt").write_text("some other text\n" * 400)
    (more / "b.txt").write_text("and more of it\n" * 400)
    output = run(*arguments[:3], f"data.path={more}", code=2)
    assert re.search(rf"saved: data\.path was \S+ and is {re.escape(str(more))};", output)
    assert re.search(r"; the number of documents was \d+ and is 2; the number of tokens", output)
    assert re.search(r"the digest of file names, sizes and contents was [0-9a-f]{12} and", output)
    assert not re.search(r"[0-9a-f]{20}", output)
    output = run(*arguments, "data.allow_change=true")
    assert "warning: data: validation_fraction was 0.2 when step 24 was saved and is 0.3" in output


@pytest.mark.long
@pytest.mark.fault("F24")
def test_resume_detects_changed_byte_in_data(copy: Path, tiny: Path, run: Run):
    """A copy of the files is the same data; a copy with one changed byte is not."""
    texts = Path(shutil.copytree(tiny.parent / "text", copy.parent / "text"))
    arguments = ("train", tiny, f"run.dir={copy.parent}", f"data.path={texts}", "train.steps=25")
    before, raw = (texts / "7.txt").stat(), (texts / "7.txt").read_bytes()
    (texts / "7.txt").write_bytes(raw[:10] + bytes([raw[10] ^ 1]) + raw[11:])
    os.utime(texts / "7.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    output = run(*arguments, code=2)
    is_explained(output)
    assert re.search(
        r"since step 24 was saved: .*the content of 7\.txt was [0-9a-f]{12} and", output
    )
    assert "the content of 8.txt" not in output and "data.allow_change=true" in output
    (texts / "7.txt").write_bytes(raw)
    assert "resuming" in run(*arguments)
    (texts / "7.txt").write_bytes(raw[:10] + bytes([raw[10] ^ 1]) + raw[11:])
    output = run(*arguments[:-1], "train.steps=26", "data.allow_change=true")
    assert "warning: data: the content of 7.txt was" in output


@pytest.mark.long
@pytest.mark.fault("F16")
def test_resume_logs_compatible_config_changes(copy: Path, tiny: Path, run: Run):
    changes = ("optim.learning_rate=0.02", "model.dropout=0.1", "train.steps=25")
    output = run("train", tiny, f"run.dir={copy.parent}", *changes)
    assert "config: optim.learning_rate was 0.01 when step 24 was saved and is 0.02" in output
    assert "config: model.dropout was 0.0 when step 24 was saved and is 0.1" in output
    assert "config: train.steps was 24 when step 24 was saved and is 25" in output
    assert output.count("config: ") == 3


CHANGES = {
    "optim.learning_rate=0.02": "optim.learning_rate was 0.01 and is 0.02",
    "run.seed=1": "run.seed was 0 and is 1",
    "model.dropout=0.1": "model.dropout was 0.0 and is 0.1",
    "mesh.ici_stage=2": "mesh.ici_stage was 4 and is 2",
}


@pytest.mark.fault("U1")
def test_finished_run_rejects_changed_settings_and_suggests_run_name(
    copy: Path, uninterrupted: Path, tiny: Path, run: Run
):
    """Every changed setting is listed by name; settings without effect on training are allowed."""
    (copy.parent / "run-2").mkdir()
    harmless = ("checkpoint.keep=9", "eval.batches=5", "data.threads=1", "log.every=3")
    arguments = (f"run.dir={copy.parent}", "mesh.cpu_devices=2", *harmless, *CHANGES)
    output = run("train", tiny, *arguments, code=2)
    is_explained(output)
    *_, where, rule, action = output.rstrip("\n").splitlines()
    assert where == f"{copy}  [MP-RUN-002]" and "all of its 24 steps are done" in rule
    listed = rule.partition("would have no effect: ")[2].removesuffix(".").split("; ")
    assert sorted(listed) == sorted(CHANGES.values())
    assert "run.name=run-3" in action and "train.steps=48" in action
    assert saved_digest(copy) == saved_digest(uninterrupted)
    assert events(copy, "done") == events(uninterrupted, "done")


@pytest.mark.long
def test_finished_run_accepts_equivalent_settings(copy: Path, tiny: Path, run: Run):
    """Another name and path, other evaluation settings, and an automatic mesh size."""
    moved = copy.rename(copy.parent / "moved")
    changes = ("run.name=moved", "eval.batches=5", "checkpoint.every=7", "mesh.ici_stage=-1")
    changes = (*changes, "mesh.cpu_devices=2", "train.steps=0", f"train.tokens={24 * 8 * 16}")
    output = run("train", tiny, f"run.dir={moved.parent}", *changes)
    assert "all 24 steps are done: nothing is left to train" in output
    assert "config: eval.batches was 4 when step 24 was saved and is 5" in output


def test_unwritable_run_dir_is_rejected(tiny: Path, run: Run):
    output = run("train", tiny, "run.dir=/proc/nowhere", code=74)
    is_explained(output)
    assert "/proc/nowhere" in output and "cannot be written" in output and "set run.dir" in output


@pytest.mark.parametrize("place", ["run", pytest.param("run/checkpoints", marks=pytest.mark.long)])
def test_file_in_place_of_folder_is_rejected(place: str, tiny: Path, run: Run, tmp_path: Path):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("not a folder")
    output = run("train", tiny, f"run.dir={tmp_path}", code=74)
    is_explained(output)
    assert "cannot be written" in output and "compiling" not in output


@pytest.mark.parametrize(
    "every", [4, pytest.param(0, marks=pytest.mark.long)], ids=["next save", "last save"]
)
@pytest.mark.fault("F5")
def test_full_disk_stops_run_and_keeps_newest_checkpoint(
    every: int, copy: Path, tiny: Path, run: Run
):
    pytest.importorskip("resource")
    arguments = (f"run.dir={copy.parent}", "train.steps=40", f"checkpoint.every={every}")
    output = run("train", tiny, *arguments, code=74, file_bytes=20_000)
    is_explained(output)
    assert str(copy / "checkpoints") in output
    assert saved_digest(copy)


def test_restore_from_folder_without_run_is_rejected(tiny: Path, run: Run, tmp_path: Path):
    restore = f"checkpoint.restore_from={tmp_path / 'nothing'}"
    output = run("train", tiny, f"run.dir={tmp_path}", restore, code=2)
    is_explained(output)
    assert f"command line: checkpoint.restore_from = {tmp_path / 'nothing'}" in output


@pytest.mark.long
def test_precompiled_step_gives_same_losses(tiny: Path, run: Run, tmp_path: Path) -> None:
    alone = ("mesh.ici_stage=1", "mesh.cpu_devices=1", "train.steps=6", "eval.every=0")
    folder = tmp_path / "step"
    run("compile", tiny, *alone, "--topology", "cpu:1", "--save", folder)
    losses = []
    for name, more in (("fresh", ()), ("loaded", (f"runtime.compiled_step={folder}",))):
        run("train", tiny, *alone, f"run.dir={tmp_path}", f"run.name={name}", *more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("train/loss") for line in lines])
    assert losses[0] == losses[1]
    more = (f"runtime.compiled_step={folder}", f"run.dir={tmp_path}", "run.name=other")
    other = run("train", tiny, *alone, *more, "mesh.ici_fsdp=2", "mesh.cpu_devices=2", code=2)
    assert "was compiled for mesh.ici_fsdp = 1, but this run has 2." in other
