"""Profiles of training runs: files, requests, failures and unchanged losses."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxpipe.config.sections.profile import ProfileConfig
from maxpipe.profiles.capture import (
    num_traces,
    profiled_steps,
    step_folder,
    trace_folder,
    trace_folders,
)
from maxpipe.train.profiler import StepProfiler, _ActiveProfile, _move_trace
from tests.train.runs import (
    Run,
    Start,
    ledger,
    losses,
    records,
    saved_digest,
    start_pair,
    wait_for,
    wait_for_outputs,
)

LONG = ("train.steps=800", "eval.every=0", "checkpoint.every=0", "log.every=20", "eval.batches=0")
"""Overrides of a run that lasts several seconds longer than the delay of a requested profile."""


@pytest.fixture(scope="module")
def profiled(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two profiles, with its output in `output.txt`."""
    folder = tmp_path_factory.mktemp("profiled")
    output = run("train", tiny, f"run.dir={folder}", "profile.at=[5,23]", "profile.steps=3")
    (folder / "run" / "output.txt").write_text(output)
    return folder / "run"


def test_profiles_do_not_change_the_run(profiled: Path, uninterrupted: Path):
    assert losses(profiled) == losses(uninterrupted)
    assert saved_digest(profiled) == saved_digest(uninterrupted)


def test_profile_has_all_files_and_is_reported(profiled: Path):
    assert profiled_steps(profiled) == [5, 23]
    folder = step_folder(profiled, 5)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("plugins", "profile.json", "train_step.hlo.gz", "memory.json"),
        *("timeline.json", "timeline.svg", "perfetto.json", "report.json"),
    }
    assert num_traces(folder) == 1
    found = [(line["step"], line["steps"], line["reason"]) for line in ledger(profiled, "profile")]
    assert found == [(5, 3, "config"), (23, 2, "config")]  # the run has 24 steps
    assert all(
        0 < line["perf/bubble"] < 1 for line in records(profiled).values() if "perf/bubble" in line
    )
    assert sum("perf/bubble" in line for line in records(profiled).values()) == 2
    output = (profiled / "output.txt").read_text()
    assert "profiled 3 steps from step 5" in output
    assert "profile of step 23: bubble: planned 42.9%" in output
    timeline = json.loads((folder / "timeline.json").read_text())
    assert timeline["schedule"] == "1f1b" and timeline["num_steps"] == 3
    assert len(timeline["cells"]) == timeline["num_ticks"] * 4
    work = [slot for cell in timeline["cells"] for slot in cell["slots"]]
    assert len(work) == 2 * 4 * 4 and all(slot["seconds"] > 0 for slot in work)
    events = json.loads((folder / "perfetto.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) >= 2 * len(work)


def test_command_prints_a_profile(profiled: Path, run: Run, tmp_path: Path):
    text = run("profile", profiled, "--svg", tmp_path / "timeline.svg")
    assert "3 steps" not in text and text.startswith("2 steps of ")  # the newest profile
    for part in ("attention", "mlp", "head", "embed", "optimizer update", "idle", "input wait"):
        assert f"\n{part}" in text
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    values = json.loads(run("profile", f"{profiled}@5", "--json", "--top", "3"))
    assert values["num_steps"] == 3 and values["num_devices"] == 4
    assert len(values["longest_operations"]) == 3
    assert values["bubble"]["planned"] == pytest.approx(3 / 7)
    assert {"all-reduce", "collective-permute"} <= {each["kind"] for each in values["collectives"]}
    busy = values["busy_seconds"] + values["idle_seconds"]
    assert busy == pytest.approx(values["step_seconds"])


def test_command_names_the_profiles_of_a_run(profiled: Path, uninterrupted: Path, run: Run):
    text = run("profile", f"{profiled}@6", code=2)
    assert "profiles start at: 5, 23" in text and f"{profiled}@23" in text
    assert "has no profile" in run("profile", uninterrupted, code=2)


def test_signal_starts_a_profile(tiny: Path, start: Start, tmp_path: Path):
    process = start("train", tiny, f"run.dir={tmp_path}", *LONG, "profile.steps=2")
    with process:
        wait_for(process, "step 20/")
        process.send_signal(signal.SIGUSR1)
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    (event,) = ledger(tmp_path / "run", "profile")
    assert event["reason"] == "signal" and event["steps"] == 2 and event["step"] > 20
    assert profiled_steps(tmp_path / "run") == [event["step"]]


@pytest.mark.long
def test_signal_profiles_the_same_steps_on_all_processes(tiny: Path, start: Start, tmp_path: Path):
    every = (tiny, f"run.dir={tmp_path}", *LONG, "mesh.cpu_devices=2", "profile.steps=2")
    every += ("train.steps=200",)
    with start_pair(start, *every) as processes:
        wait_for(processes[0], "step 20/")
        processes[1].send_signal(signal.SIGUSR1)
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    (step,) = profiled_steps(tmp_path / "run")
    assert num_traces(step_folder(tmp_path / "run", step)) == 2
    timeline = json.loads((step_folder(tmp_path / "run", step) / "timeline.json").read_text())
    assert timeline["num_stages"] == 4  # two stages are on the devices of the other process


def test_slow_step_starts_a_profile(tiny: Path, start: Start, tmp_path: Path):
    every = ("profile.slow_step=2", "profile.max_profiles=1", "profile.steps=1")
    process = start("train", tiny, f"run.dir={tmp_path}", *LONG, *every)
    with process:
        wait_for(process, "step 100/")
        process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)  # and other load: some step takes twice the median
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert [line["reason"] for line in ledger(tmp_path / "run", "profile")] == ["slow step"]


def profiler_with(
    channel: Any, tmp_path: Path, warnings: list[str] | None = None, **fields: Any
) -> StepProfiler:
    """Return a profiler of a run without a model, which appends its messages to `warnings`."""
    nothing: Any = None
    warnings = [] if warnings is None else warnings
    console = SimpleNamespace(warn=warnings.append, note=warnings.append, warnings=warnings)
    outputs: Any = SimpleNamespace(run_dir=tmp_path, console=console)
    return StepProfiler(ProfileConfig(**fields), nothing, channel, outputs, {}, lambda: 0.0)


def test_pauses_do_not_count_as_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    written: list[Any] = []
    monkeypatch.setattr(StepProfiler, "_write", lambda _, active: written.append(active))
    profiler = profiler_with(SimpleNamespace(profile_at=0, step_seconds=1.0), tmp_path, at=[1])
    with profiler.paused():
        profiler.start(1)
    for step in (1, 2, 3):
        with profiler.step(step, 8):
            pass
        with profiler.paused():  # an evaluation
            time.sleep(0.2)
    with profiler.paused():
        profiler.finish()
    profiler.wait()
    assert written[0].num_steps == 3 and 0.6 / 3 > 0.1 > written[0].step_seconds


def test_step_time_of_a_run_that_pauses_at_every_step_is_measured(tmp_path: Path):
    """Otherwise, a requested profile would never start."""
    channel = SimpleNamespace(profile_at=0, step_seconds=0.0, index=0, count=1)
    profiler = profiler_with(channel, tmp_path)
    for step in range(1, 6):
        assert channel.step_seconds == 0 or step == 5
        with profiler.data_wait(step), profiler.paused():
            time.sleep(0.01)
    assert 0.01 <= channel.step_seconds < 0.5


def test_dispatch_of_a_step_does_not_count_as_its_time(tmp_path: Path):
    """The loop waits for a step while the next one is in flight, and not after a pause."""
    channel = SimpleNamespace(profile_at=0, step_seconds=0.0, index=0, count=1)
    profiler = profiler_with(channel, tmp_path)
    for step in range(1, 22):
        with profiler.data_wait(step), profiler.step(step, 8):
            time.sleep(0.01 if step % 7 != 1 else 0)
        if step % 7 == 0:
            with profiler.paused():
                pass
    assert channel.step_seconds >= 0.009
    assert len(profiler._recent) == 15 and min(profiler._recent) >= 0.009


def test_step_time_of_a_run_that_pauses_at_every_other_step_is_measured(tmp_path: Path):
    channel = SimpleNamespace(profile_at=0, step_seconds=0.0, index=0, count=1)
    profiler = profiler_with(channel, tmp_path)
    for step in range(1, 9):
        with profiler.data_wait(step), profiler.step(step, 8):
            pass
        if step % 2 == 0:
            with profiler.paused():
                time.sleep(0.02)
    assert channel.step_seconds >= 0.01 and not profiler._recent


def test_batch_ramp_ends_a_profile(tiny: Path, run: Run, tmp_path: Path):
    """The next steps run another program."""
    every = ("train.batch_ramp=[{batch_size: 4, steps: 6}]", "profile.at=[5]", "profile.steps=4")
    output = run("train", tiny, f"run.dir={tmp_path}", "train.steps=8", *every, "eval.every=6")
    (event,) = ledger(tmp_path / "run", "profile")
    assert (event["step"], event["steps"]) == (5, 2) and "warning: profile" not in output
    values = json.loads((step_folder(tmp_path / "run", 5) / "profile.json").read_text())
    assert values["table"]["num_microbatches"] == 2


def test_signal_before_the_first_step_starts_a_profile(tiny: Path, start: Start, tmp_path: Path):
    process = start("train", tiny, f"run.dir={tmp_path}", *LONG, "profile.steps=1")
    with process:
        wait_for(process, "reading data")
        for _ in range(10):
            process.send_signal(signal.SIGUSR1)
        wait_for(process, "compiling")
        process.send_signal(signal.SIGUSR1)
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert [line["reason"] for line in ledger(tmp_path / "run", "profile")] == ["signal"]


def test_signal_never_ends_the_command(tiny: Path, start: Start, tmp_path: Path):
    process = start("train", tiny, f"run.dir={tmp_path}", "train.steps=2", "profile.max_profiles=0")
    with process:
        time.sleep(0.5)  # Python has started, and jax has not
        ended = threading.Thread(target=process.communicate)  # otherwise, the pipe fills
        ended.start()
        while ended.is_alive():
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
    assert process.returncode == 0


def test_second_profile_of_a_step_does_not_use_folders_of_the_first(tmp_path: Path):
    folder = trace_folder(tmp_path, "9999_01_01_00_00_00")
    folder.mkdir(parents=True)
    older = frozenset(trace_folders(tmp_path))
    active = _ActiveProfile(1, "config", tmp_path, tmp_path / ".trace-0", older=older)
    active.temporary.mkdir()
    (active.temporary / "host.xplane.pb").write_bytes(b"")
    _move_trace(active)
    assert trace_folders(tmp_path) == ["9999_01_01_00_00_00", "9999_01_01_00_00_00_1"]
    assert not list(folder.iterdir()) and num_traces(tmp_path) == 1


@pytest.mark.timing
def test_profiler_without_profiles_adds_microseconds_to_a_step():
    """The bound is 0.1% of a step of 20 ms."""
    channel: Any = SimpleNamespace(profile_at=0, index=0, count=1, step_seconds=0.0)
    nothing: Any = None
    profiler = StepProfiler(ProfileConfig(), nothing, channel, nothing, {}, lambda: 0.0)
    count = 10_000
    begin = time.perf_counter()
    for step in range(count):
        assert not profiler.starts_at(step)
        with profiler.data_wait(step):
            pass
        with profiler.step(step, 8):
            pass
        assert not profiler.ends_after(step, count)
    assert (time.perf_counter() - begin) / count < 20e-6


def test_failure_to_profile_is_a_warning(tiny: Path, run: Run, uninterrupted: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profiles").write_text("a file in place of the folder")
    output = run("train", tiny, f"run.dir={tmp_path}", "profile.at=[5]")
    assert "profile: step 5 is not profiled" in output
    assert losses(tmp_path / "run") == losses(uninterrupted)


def test_profile_that_cannot_be_written_does_not_prevent_the_next_one(tmp_path: Path):
    warnings: list[str] = []
    profiler = profiler_with(SimpleNamespace(profile_at=0), tmp_path, warnings, at=[1, 5, 9])
    first, second, third = (step_folder(tmp_path, step) for step in (1, 5, 9))

    def profile(step: int) -> None:
        profiler.start(step)
        with profiler.step(step, 8):
            pass

    profile(1)
    (first / ".trace-0").rmdir()
    (first / ".trace-0").write_text("a file in place of the folder")
    profiler.finish()
    (first / ".trace-0").unlink()
    profile(5)
    profiler.discard()
    assert not second.exists()  # nothing was written
    profile(9)
    profiler.finish()
    profiler.wait()
    assert num_traces(third) == 1
    lost, discarded, *_ = warnings
    assert "the profile of step 1 is lost" in lost and "step 5 was discarded" in discarded


def test_trace_of_a_killed_process_is_not_used(tmp_path: Path):
    trace = step_folder(tmp_path, 5) / ".trace-0" / "old.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"")
    profiler = profiler_with(SimpleNamespace(profile_at=0), tmp_path, at=[5])
    profiler.start(5)
    assert profiler.is_active and not trace.exists()
    profiler.discard()


def test_full_disk_is_a_warning(tiny: Path, run: Run, uninterrupted: Path, tmp_path: Path):
    every = ("profile.at=[5,15]", "profile.steps=2", "log.tensorboard=false")
    output = run("train", tiny, f"run.dir={tmp_path}", *every, file_bytes=300_000)
    assert output.count("warning: profile: ") == 2
    assert losses(tmp_path / "run") == losses(uninterrupted)
