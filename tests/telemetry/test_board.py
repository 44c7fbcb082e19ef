"""A run's event files as read by TensorBoard, and `maxpipe board`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from maxpipe.cli import main
from maxpipe.commands import board as command
from maxpipe.commands.board import link
from maxpipe.schedule.canvas import Canvas, text_width
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.pictures import draw_overview
from maxpipe.telemetry import writers
from maxpipe.telemetry.metrics import METRICS
from maxpipe.telemetry.writers import MetricWriter
from maxpipe.train import tensorboard
from maxpipe.train.loop import memory_in_use


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("run")
    writer = MetricWriter(folder, tensorboard=True, resume_step=0)
    writer.show(lambda: writers.hyperparameters({"optim.learning_rate": 0.5, "a.b": "c"}, "mine"))
    schedule = make_schedule("1f1b", stages=3, repeats=1, microbatches=5)
    writer.show(lambda: writers.image("run/timeline", draw_overview(schedule)))
    writer.write(3, {metric.tag: 1.0 for metric in METRICS})
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_custom_charts_begin_with_loss(found: EventAccumulator) -> None:
    (event,) = found.Tensors("custom_scalars__config__")
    layout: Any = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])  # pyright: ignore
    first, *others = layout.category[0].chart
    assert list(first.multiline.tag) == ["^train/loss$", "^eval/loss$"]
    assert {"throughput", "MFU", "memory"} <= {chart.title for chart in others}
    assert found.PluginTagToContent("custom_scalars")


def test_hyperparameters_match_run(found: EventAccumulator) -> None:
    data = found.PluginTagToContent("hparams")
    content: Any = plugin_data_pb2.HParamsPluginData.FromString(  # pyright: ignore
        data["_hparams_/session_start_info"]
    )
    values = content.session_start_info.hparams
    assert values["optim.learning_rate"].number_value == 0.5
    assert values["a.b"].string_value == "c"


def test_timeline_is_png_image(found: EventAccumulator) -> None:
    assert "run/timeline" in found.PluginTagToContent("images")
    (event,) = found.Tensors("run/timeline")
    width, height, png = event.tensor_proto.string_val
    with Image.open(BytesIO(png)) as image:
        assert image.format == "PNG"
        assert image.width >= int(width) > 100 and image.height >= int(height) > 50


def test_all_metrics_are_scalars(found: EventAccumulator) -> None:
    assert sorted(found.Tags()["scalars"]) == sorted(metric.tag for metric in METRICS)


def test_linked_runs_keep_their_names(tmp_path: Path, found: EventAccumulator) -> None:
    """TensorBoard shows all linked runs, including those that start later."""
    runs, links = tmp_path / "runs", tmp_path / "links"
    links.mkdir()
    (runs / "no-run").mkdir(parents=True)
    for name, count in (("mine", 1), ("a,b:c", 2)):
        (runs / name).mkdir()
        shutil.copytree(found.path, runs / name / "tensorboard")
        assert link(runs, links) == count
    seen = EventMultiplexer()
    seen.AddRunsFromDirectory(str(links))
    seen.Reload()
    assert set(seen.Runs()) == {"mine", "a,b:c"}
    assert seen.Tensors("mine", "train/loss")
    assert link(runs / "mine", tmp_path / "runs" / "no-run") == 1
    assert os.listdir(runs / "no-run") == ["mine"]


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_board_rejects_path_that_is_not_folder(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["board", str(tmp_path / folder)]) == 2
    assert "is not a folder of runs." in capsys.readouterr().err


def test_board_rejects_bucket_without_runs(
    folder_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["board", "folder://bucket/none"]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_ctrl_c_is_not_passed_to_tensorboard(tmp_path: Path) -> None:
    """The terminal signals the whole process group; TensorBoard would print a traceback."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").touch()
    (tmp_path / "tensorboard" / "main.py").write_text(
        "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    code = "import sys; from maxpipe.cli import main; sys.exit(main(['board', sys.argv[1]]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "up\n":
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


class FakeDevice:
    """Reports memory statistics like GPUs and TPUs, or none like CPUs."""

    def __init__(self, peak: int | None):
        self._peak = peak

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._peak is None else {"peak_bytes_in_use": self._peak}


@pytest.mark.parametrize(("peaks", "most"), [([3, 7, 5], 7.0), ([None, None], None)])
def test_device_memory_is_reported_if_available(
    peaks: list[int | None], most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(peak) for peak in peaks])
    found = memory_in_use()
    assert found.get("memory/device_peak_bytes") == most
    assert 2**20 < found["memory/host_bytes"] < 2**40


def test_sharding_table_shows_shape_per_device() -> None:
    mesh = jax.make_mesh((2, 1), ("fsdp", "tensor"), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    params = {"a": {"b": jax.ShapeDtypeStruct((6, 5), "float32", sharding=split)}}
    assert tensorboard.sharding_table(params)[1:] == [("a.b", "6 x 5", "3 x 5", "fsdp 2, -")]


def test_memory_image_has_bar_for_each_use() -> None:
    program = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((512, 256 * 2), "float32"))
    drawn = tensorboard.draw_memory(program.compile())
    texts = [label.text for label in drawn.labels]
    assert texts[0].startswith("memory per device: ")
    assert texts[1] == "arguments 1.0 MiB"
    assert texts[3] == "results 1.0 MiB"
    assert_legible(drawn)


@pytest.mark.parametrize(
    ("name", "stages", "repeats", "microbatches"),
    [("1f1b", 1, 1, 1), ("interleaved", 4, 2, 8), ("zb_h1", 8, 1, 32), ("1f1b", 64, 1, 128)],
)
def test_timeline_is_legible_at_list_width(
    name: str, stages: int, repeats: int, microbatches: int
) -> None:
    drawn = draw_overview(
        make_schedule(name, stages=stages, repeats=repeats, microbatches=microbatches)
    )
    assert_legible(drawn)
    assert any(f"{stages} stage" in label.text for label in drawn.labels)


def assert_legible(drawn: Canvas) -> None:
    """Assert that at a width of 300 pixels all labels but numbers are at least 11 pixels high."""
    words = [label for label in drawn.labels if not label.text.isdigit()]
    assert words and all(300 / drawn.width * label.size >= 11 for label in words)
    assert all(label.x + text_width(label.text, label.size) <= drawn.width for label in words)
    assert drawn.height <= 1.3 * drawn.width


def layouts(folder: Path) -> list[tuple[int, list[str]]]:
    """Return (step, chart titles) of each layout in a run's event files."""
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return [
        (event.step, [chart.title for chart in layout.category[0].chart])
        for event in reader.Tensors("custom_scalars__config__")
        for layout in [layout_of(event)]
    ]


def layout_of(event: Any) -> Any:
    return layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])  # pyright: ignore


def test_charts_without_data_are_not_in_layout(tmp_path: Path) -> None:
    """A chart is added with its first value, even after a resume; the newest layout applies."""
    writer = MetricWriter(tmp_path, tensorboard=True, resume_step=0)
    writer.write(1, {"train/lr": 1.0, "train/entropy": 1.0})
    writer.write(2, {"train/lr": 1.0})
    writer.write(2, {"eval/loss": 1.0})
    writer.write(3, {"source/a/loss": 1.0, "train/lr": 1.0})
    begun = [(1, ["learning rate"]), (2, ["loss", "learning rate"])]
    begun.append((3, ["loss", "source loss", "learning rate"]))
    assert layouts(tmp_path) == begun
    writer = MetricWriter(tmp_path, tensorboard=True, resume_step=2)
    writer.write(3, {"train/lr": 1.0})
    writer.write(4, {"eval/web/loss": 1.0, "eval/quiz/accuracy": 1.0})
    both = ["loss", "validation set loss", "task accuracy", "learning rate"]
    assert layouts(tmp_path)[-2:] == [(3, ["loss", "learning rate"]), (4, both)]


def test_no_summary_is_built_without_tensorboard(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, tensorboard=False, resume_step=0)
    writer.show(lambda: pytest.fail("the summary was built"))


def test_board_accepts_run_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    shown: list[Path] = []

    def ends(process: object, folder: Path, links: Path) -> int:
        shown.append(folder)
        return 0

    monkeypatch.setattr(command, "_watch", ends)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(command.subprocess, "Popen", lambda _: contextlib.nullcontext(Ended()))
    assert main(["board", "mine"]) == 0
    assert main(["board", "runs/mine"]) == 0
    assert [str(folder) for folder in shown] == ["runs/mine", "runs/mine"]


class Ended:
    """A process that has exited."""

    def terminate(self) -> None: ...


@pytest.mark.parametrize("port", ["-1", "70000", "9" * 400, "x"])
def test_board_rejects_invalid_port(
    port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", str(tmp_path), f"--port={port}"]) == 2
    shown = capsys.readouterr().err
    assert ("not a port from 0 to 65535" in shown) or (port == "x" and "not an integer" in shown)
