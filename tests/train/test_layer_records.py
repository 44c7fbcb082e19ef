"""Layer statistics in real runs: records, resume, several processes, TensorBoard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.train.layer_records import HeatMaps, draw_heat_map
from tests.train.runs import (
    SAME,
    Run,
    Start,
    forget_after,
    losses,
    records,
    saved_digest,
    start_pair,
    wait_for_outputs,
)

RECORDED = ("layer_stats.every=3",)


def layer_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of layers.jsonl by step, without times; check that steps increase."""
    lines = [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    return {line.pop("step"): line for line in lines if line.pop("time")}


@pytest.fixture(scope="module")
def recorded(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run with statistics and histograms. Read-only for tests."""
    folder = tmp_path_factory.mktemp("recorded")
    run("train", tiny, f"run.dir={folder}", *RECORDED, "layer_stats.histograms=true")
    return folder / "run"


def test_recording_does_not_change_training(recorded: Path, uninterrupted: Path) -> None:
    assert losses(recorded) == losses(uninterrupted)
    assert saved_digest(recorded) == saved_digest(uninterrupted)
    found = layer_records(recorded)
    assert [*found] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert all(record["layers"] == 4 for record in found.values())
    values = found[3]["values"]
    assert len(values["grad_norm/attention.query"]) == 4
    assert min(values["update_ratio/mlp.down"]) > 0


def test_metrics_summarize_records(recorded: Path, uninterrupted: Path) -> None:
    """Metrics are in the next record of metrics.jsonl; without statistics, there are none."""
    of_run, found = records(recorded), layer_records(recorded)
    for step, metrics in of_run.items():
        tags = [tag for tag in metrics if tag.startswith("layers/")]
        newest = max((each for each in found if each <= step), default=0)
        # Every second step is logged, and every third step is recorded.
        assert bool(tags) == (newest > step - 2)
        if tags:
            values = found[newest]["values"]
            every = [v for name in values if "activation_max" in name for v in values[name]]
            assert metrics["layers/activation_max"] == max(every)
            row = int(metrics["layers/activation_max_layer"])
            own = [values[name][row] for name in values if "activation_max" in name]
            assert max(own) == max(every)
    plain = records(uninterrupted)
    assert not any(tag.startswith("layers/") for metrics in plain.values() for tag in metrics)
    assert not (uninterrupted / "layers.jsonl").exists()


def test_resumed_run_has_the_same_records(
    recorded: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    """Records after the restored step are removed and written again."""
    folder = Path(shutil.copytree(recorded, tmp_path / "copied" / "run"))
    forget_after(folder, 12)
    options = (*RECORDED, "layer_stats.histograms=true")
    run("train", tiny, f"run.dir={folder.parent}", *options)
    assert layer_records(folder) == layer_records(recorded)
    assert saved_digest(folder) == saved_digest(recorded)


def test_tensorboard_shows_heat_maps_and_histograms(recorded: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(recorded / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    tag = "layers/grad_norm/attention.query"
    assert read.SummaryMetadata(tag).plugin_data.plugin_name == "images"
    images = read.Tensors(tag)
    assert [image.step for image in images] == [3, 6, 12, 24]
    width, _, png = images[-1].tensor_proto.string_val
    assert int(width) > 300 and png.startswith(b"\x89PNG")
    tag = "layers/param/attention.query/003"
    assert read.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    tensor = read.Tensors(tag)[0].tensor_proto
    rows = np.reshape(tensor.double_val, [dim.size for dim in tensor.tensor_shape.dim])
    assert rows.shape[1] == 3 and rows[:, 2].sum() == 16 * 2 * 8
    assert (rows[:, 0] < rows[:, 1]).all()
    assert not any(each.startswith("layers/param_norm") for each in read.Tags()["scalars"])


def test_batch_ramp_compiles_both_steps_for_each_size(tiny: Path, run: Run, tmp_path: Path) -> None:
    ramp = "train.batch_ramp=[{batch_size: 4, steps: 4}]"
    output = run("train", tiny, f"run.dir={tmp_path}", *RECORDED, ramp, "train.steps=8")
    for rows in (4, 8):
        assert f"train step with layer statistics for batches of {rows} sequences" in output
    assert [*layer_records(tmp_path / "run")] == [3, 6]


@pytest.mark.multihost
def test_two_processes_record_the_same_statistics(
    start: Start, tiny: Path, recorded: Path, tmp_path: Path
) -> None:
    """The stage axis spans two processes; only process 0 writes."""
    options = (*RECORDED, "train.steps=6", "eval.batches=0", "mesh.cpu_devices=2")
    with start_pair(start, tiny, f"run.dir={tmp_path}", *options) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    found, wanted = layer_records(tmp_path / "run"), layer_records(recorded)
    # The learning rate depends on the number of steps, so only the first record is comparable
    # within the rounding of another reduction order.
    for name, values in wanted[3]["values"].items():
        if name.startswith(("activation", "attention", "param", "grad")):
            assert found[3]["values"][name] == pytest.approx(values, rel=1e-3), name
    assert [*found] == [3, 6] and SAME


def test_heat_map_marks_missing_cells() -> None:
    """A PNG has the stated size, grey cells for NaN, and the extreme colors for extreme values."""
    from io import BytesIO

    from PIL import Image

    cells = np.array([[1.0, np.nan, 100.0], [10.0, 1.0, np.inf]])
    png, size = draw_heat_map("x", cells, [10, 20, 30])
    image = Image.open(BytesIO(png))
    assert image.size == size
    pixels = np.asarray(image.convert("RGB"))
    top = 6 + 14 + 4
    columns = [6 + 106 * number + 50 for number in range(3)]
    colours = [f"#{bytes(pixels[top, column]).hex()}" for column in columns]
    assert colours == ["#440154", "#dddddd", "#fde725"]
    assert tuple(pixels[top + 8, columns[2]]) == (0xDD,) * 3


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "values": [1, 2]}',
        '{"step": 2, "values": {"grad_norm/a": [[1]]}}',
        '{"step": "2", "values": {}}',
        '{"values": {}}',
        "[1]",
    ],
)
def test_damaged_record_is_a_warning(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "layers.jsonl"
    path.write_text(f'{{"step": 1, "values": {{"grad_norm/a": [null, 1.5]}}}}\n{line}\n')
    HeatMaps(path, before=3)
    assert "heat maps start at step 3" in caplog.text


def test_intact_records_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "layers.jsonl"
    path.write_text('{"step": 1, "values": {"grad_norm/a": [null, 1.5, 2]}}\n')
    HeatMaps(path, before=3)
    assert not caplog.text
