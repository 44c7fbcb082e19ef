"""The `maxpipe plan` command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from tests.errors import without_codes

RUN = ["plan", "configs/quickstart.yml", "--topology", "cpu:8"]
SEARCH = [*RUN, "--search", "--fix", "mesh.ici_stage=4", "pipeline.schedule=zb_v"]


def test_plan_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    text = capsys.readouterr().out
    assert main([*RUN, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and "fits" in text
    assert values["num_devices"] == 8 and text.startswith("8 devices of CPU")
    assert values["total_bytes"] == pytest.approx(sum(values["terms"].values()), rel=0.02)
    assert values["layout"]["mesh.ici_stage"] == 4


@pytest.mark.parametrize("gather", ["iteration", "window", "step"])
def test_plan_reports_prologue_layers(gather: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*RUN, "model.num_layers=11", f"pipeline.weight_gather={gather}"]
    found = []
    for outside in (0, 3):
        assert main([*arguments, f"pipeline.prologue_layers={outside}", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    without, values = found
    assert without["outside"] == {"layers": 0, "bytes": 0, "seconds": 0}
    assert sum(stage["layers"] for stage in values["stages"]) == 8
    assert values["outside"]["layers"] == values["layout"]["pipeline.prologue_layers"] == 3
    # Each of four stages runs two of eight microbatches through three prologue layers, and all
    # eight through two ring layers.
    share = values["outside"]["seconds"] / values["parts"]["layers"]
    assert share == pytest.approx(3 / 8, rel=0.01)
    assert 0 < values["outside"]["bytes"] < values["total_bytes"]
    assert main([*arguments, "pipeline.prologue_layers=3"]) == 0
    assert "prologue on every stage: the first 3 layers, " in capsys.readouterr().out


def test_plan_notes_that_a_time_excludes_copies_from_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "the step time excludes copies from and to host memory"
    arguments = ["plan", "tiny", "mesh.ici_fsdp=-1", "optim.offload_state=true", "--topology"]
    for topology, is_unknown in (("v5p:2x2x1", False), ("tpu7x:2x2x1", True)):
        assert main([*arguments, topology]) == 0
        text = capsys.readouterr().out
        assert (note in text, ", host " in text) == (is_unknown, not is_unknown)


def test_search_writes_and_draws_best_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, drawn = tmp_path / "best.yml", tmp_path / "best.svg"
    assert main([*SEARCH, "--write", str(best), "--draw", str(drawn), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["considered"] >= len(found["best"]) > 0 and found["compiled"] == []
    keys = found["best"][0]["layout"]
    assert keys["mesh.ici_stage"] == 4 and keys["pipeline.schedule"] == "zb_v"
    config = load([str(best)]).config
    assert config.mesh.ici_stage == 4 and config.pipeline.schedule == "zb_v"
    assert drawn.read_text(encoding="utf-8").startswith("<svg")


def test_search_for_mfu_writes_the_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, given = tmp_path / "best.yml", load(["configs/quickstart.yml"]).config.train.batch_size
    fixed = ["mesh.ici_fsdp=2", "pipeline.remat=full", "pipeline.weight_gather=iteration"]
    command = [*SEARCH[:-1], "pipeline.schedule=1f1b", *fixed]
    assert main([*command, "--objective", "mfu", "--write", str(best), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["best"][0]
    size = found["layout"]["train.batch_size"]
    assert size in (given, 2 * given, 4 * given)
    assert load([str(best)]).config.train.batch_size == size


@pytest.mark.long
def test_search_measures_best_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxpipe.planner.rerank.MEASURED_SECONDS", 0.0)
    small = tmp_path / "small.yml"
    small.write_text(
        "model: {num_layers: 2, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, "
        "d_mlp: 32, vocab_size: 259}\ntrain: {steps: 1, batch_size: 8, sequence_length: 16}\n"
        "runtime: {platform: cpu}\n"
    )
    best = tmp_path / "best.yml"
    searched = ["plan", str(small), "--devices", "8", "--search", "--measure", "2"]
    searched += ["--fix", "mesh.ici_data=8"]
    assert main([*searched, "--json", "--write", str(best)]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [each["measured_seconds"] for each in found["measured"]]
    assert len(seconds) == 2 and 0 < seconds[0] <= seconds[1]
    assert found["best"][0]["layout"] in [each["layout"] for each in found["measured"]]
    assert load([str(best)]).config.mesh.ici_data == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*RUN, "--search", "--measure", "3"], "runs layouts on the devices of this machine"),
        ([*RUN, "--search", "--measure", "3", "--compile", "3"], "not allowed with argument"),
        ([*RUN, "--write", "best.yml"], "--write\n  requires --search"),
        ([*RUN, "--fix", "mesh.ici_stage=4"], "--fix\n  requires --search"),
        ([*RUN, "--compile", "3"], "--compile\n  requires --search"),
        ([*RUN, "--objective", "mfu"], "--objective\n  requires --search"),
        ([*RUN, "--search", "--max-batch-size", "64"], "requires --objective=mfu"),
        ([*RUN, "--search", "--reports", "reports"], "--reports\n  requires --compile"),
        (
            [*RUN, "--search", "--objective", "mfu", "--max-batch-size", "4"],
            "must be at least train.batch_size, which is",
        ),
        ([*RUN, "--search", "--compile", "0"], "--compile: 0 is below the minimum of 1"),
        ([*RUN, "--slices", "-1"], "--slices: -1 is below the minimum of 1"),
        ([*RUN[:2], "--devices", "0"], "--devices: 0 is below the minimum of 1"),
        ([*RUN[:2], "--devices", "8", "--slices", "2"], "requires --topology"),
        ([*RUN[:2], "--calibrate", "--search"], "--search\n  has no effect"),
        ([*RUN[:2], "--calibrate", "--slices", "2"], "--slices\n  has no effect"),
        ([*RUN, "--search", "--fix", "train.steps=4"], "must be KEY=VALUE"),
        ([*RUN, "--search", "--fix", "mesh.ici_context=abc"], "must be an integer"),
        (
            [*RUN, "--search", "--fix", "mesh.context_attention=x"],
            "must be one of auto, all_gather",
        ),
        ([*RUN, "--search", "--fix", "mesh.ici_context=-1"], "must be a device count"),
        ([*RUN, "--calibrate"], "not allowed with argument --topology"),
        (
            ["plan", "configs/quickstart.yml", "--topology", "cpu:4"],
            "the topology is cpu:4, 4 devices",
        ),
        (["compile", *RUN[1:], "--save", "step"], "cannot be used by 8 CPU devices"),
        (["compile", *RUN[1:], "--xla", "fast"], "Write --xla fast=VALUE."),
        (["compile", *RUN[1:], "--xla", "xla_no=1"], "No such compile option: 'xla_no'"),
        (["compile", *RUN[1:], "--xla", "xla_cpu_use_xnnpack=2"], "xla_cpu_use_xnnpack, '2' is"),
        (["compile", *RUN[1:], "--xla", "a=1", "--save", "step"], "Leave out --xla or --save."),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in without_codes(capsys.readouterr().err)


def test_search_changes_only_layout_keys(tmp_path: Path) -> None:
    best = tmp_path / "best.yml"
    assert main([*SEARCH, "--write", str(best)]) == 0
    given, found = load(["configs/quickstart.yml"]).config, load([str(best)]).config
    for section in ("model", "train", "optim", "data", "tokenizer", "run"):
        assert getattr(given, section) == getattr(found, section), section


def test_bundled_model_does_not_require_train_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--topology", "h100:1"]) == 0
    out = capsys.readouterr().out
    assert "\n8.03 B parameters, 8,192 tokens and 375.5 TFLOP per step" in out
    assert main(["config", "print", "qwen3-8b"]) == 0
    assert "\n  steps: 0\n" in capsys.readouterr().out
    assert main(["compile", "tiny", "--topology", "cpu:1", "--save", "step"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("default: train.steps = 0  [MP-CFG-004]\n")
        and "Set train.steps=100," in error
    )


def test_plan_without_topology_uses_local_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from maxpipe.planner import topology

    def fake_local_topology(runtime: object, cpu_devices: int, count: int = 0) -> topology.Topology:
        assert (cpu_devices, count) == (3, 0)
        return topology.parse_topology("cpu:1")

    monkeypatch.setattr(topology, "local_topology", fake_local_topology)
    assert main(["plan", "tiny", "mesh.cpu_devices=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 device of CPU") and "\n1.05 M parameters" in out
    assert "GFLOP per step" in out and "0.00 " not in out.partition("memory of")[0]


def test_search_prints_small_memory_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["tiny", "model.d_model=16", "model.d_mlp=16", "train.sequence_length=16"]
    assert main(["plan", *small, "--topology", "cpu:2", "--search"]) == 0
    assert " 0.0 GiB" not in (out := capsys.readouterr().out) and " MiB: " in out
