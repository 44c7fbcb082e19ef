"""All records and observers together: they agree, and do not change the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxpipe.cli import main
from tests.train.runs import records, saved_digest

_KEYS = ("train.steps=12", "eval.every=6", "log.every=1", "checkpoint.every=6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain run, and a run with all records and observers that need no server."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"prompt": "import o", "answer": "s"}\n')
    everything = (
        "log.trackers=[tensorboard, prometheus]",
        "tracker.prometheus_port=0",
        f"tracker.prometheus_file={folder / 'maxpipe.prom'}",
        "layer_stats.every=2",
        "layer_stats.histograms=true",
        "profile.at=[5]",
        "profile.steps=2",
        "profile.slow_step=1.1",
        "alerts.enable=[loss_spike, grad_norm_trend, throughput_drop, data_wait, disk_full]",
        "eval.sample_every=6",
        f"eval.generative_tasks.code.path={tasks}",
        "eval.generative_tasks.code.max_tokens=4",
    )
    for name, keys in (("plain", ("log.trackers=[]",)), ("all", everything)):
        given = (f"run.dir={folder}", f"run.name={name}", *_KEYS, *keys)
        assert main(["train", "quickstart", *given]) == 0
    return folder / "plain", folder / "all"


def test_results_have_the_same_bits(runs: tuple[Path, Path]) -> None:
    plain, everything = map(records, runs)
    names = ("train/loss", "train/grad_norm", "train/lr", "eval/loss")
    assert plain.keys() == everything.keys()
    for step, record in plain.items():
        assert [record.get(name) for name in names] == [
            everything[step].get(name) for name in names
        ]
    assert saved_digest(runs[0], 12) == saved_digest(runs[1], 12)


def test_layer_records_skip_profiled_steps(runs: tuple[Path, Path]) -> None:
    lines = (runs[1] / "layers.jsonl").read_text().splitlines()
    recorded = [json.loads(line)["step"] for line in lines]
    assert {2, 4, 6, 8, 10, 12}.issuperset(recorded) and 6 not in recorded and 2 in recorded


def test_report_shows_all_sections(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    text = out.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    first, second = data["runs"]
    assert first["layers"] is None and second["layers"]["steps"][0] == 2
    assert [picture["title"] for picture in second["pictures"]][1] == "Profile of step 5"
    measured = {term["name"]: term["measured"] for term in second["forecast"]["time"]}
    assert measured["layers"] and measured["update"]
    assert {row["key"] for row in data["differences"]} >= {"layer_stats.every", "profile.at"}
    tags = set(second["series"]["tags"])
    assert tags >= {"eval/code/score", "perf/bubble", "layers/activation_max"}
