"""The report page: series, damaged and hostile records, and the page in a browser."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.report import page, records

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def _write_run(folder: Path, *, steps: int = 5, text: str = "hello", rate: float = 0.1) -> Path:
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record: dict[str, Any] = {"step": step, "time": f"2026-01-01T00:{step % 60:02}:00Z"}
            record |= {"train/loss": 5.0 - step, "train/tokens": 100.0 * step}
            if step == 2:
                record |= {"eval/loss": 4.5, "train/loss": None}
            record |= {"source/a/tokens": 30.0 * step, "source/b/tokens": 70.0 * step}
            file.write(json.dumps(record) + "\n")
    events = [
        {"time": "2026-01-01T00:00:00Z", "uptime": 0.0, "event": "begin", "host": text},
        {"time": "2026-01-01T00:00:01Z", "uptime": 1.0, "event": "start", "step": 0},
        {"time": "2026-01-01T00:00:02Z", "uptime": 2.0, "event": "spike", "step": 3, "loss": 9.0},
        {"time": "2026-01-01T00:00:03Z", "uptime": 3.0, "event": "done", "step": steps},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    samples = [{"prompt": text, "text": text, "reward": 1.0}]
    (folder / "samples.jsonl").write_text(json.dumps({"step": 3, "samples": samples}) + "\n")
    (folder / "config.yml").write_text(f"optim:\n  learning_rate: {rate}\nrun:\n  name: x\n")
    return folder


def _values(entry: dict[str, Any], name: str = "mean") -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry[name]), "<f4")


def _data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_series_contain_all_values_of_short_runs(tmp_path: Path) -> None:
    run = page.read_run(_write_run(tmp_path / "base"), "base")
    loss, axis = run["series"]["tags"]["train/loss"], run["series"]["axes"][0]
    np.testing.assert_allclose(_values(loss), [4, math.nan, 2, 1, 0])
    steps = np.frombuffer(base64.b64decode(axis["steps"]), "<f8")
    np.testing.assert_array_equal(steps, [1, 2, 3, 4, 5])
    hours = np.frombuffer(base64.b64decode(axis["hours"]), "<f4")
    np.testing.assert_allclose(hours, np.arange(5) / 60, rtol=1e-6)
    assert run["status"] == "done" and run["last_step"] == 5
    assert run["evaluations"] == [
        {"tag": "eval/loss", "first": (2, 4.5), "best": (2, 4.5), "last": (2, 4.5)}
    ]
    assert [share["name"] for share in run["sources"]] == ["b", "a"]
    shares = {name: _values(run["series"]["tags"][f"source/{name}/share"]) for name in "ab"}
    np.testing.assert_allclose(shares["a"], [0.3] * 5, rtol=1e-6)
    np.testing.assert_allclose(shares["b"], [0.7] * 5, rtol=1e-6)
    assert [event["event"] for event in run["events"]] == ["begin", "start", "spike", "done"]


def test_token_shares_of_irregular_records() -> None:
    """Shares change over time; records without progress or with missing sources have none."""
    table = records.MetricTable()
    for step, tokens in enumerate(
        [{"a": 10, "b": 0}, {"a": 10, "b": 30}, {"a": 10}, {"a": 10, "b": 30}, {"a": None, "b": 40},
         {"a": 5, "b": 50}, {"a": 25, "b": 110}], 1
    ):  # fmt: skip
        table.add({"step": step, **{f"source/{name}/tokens": v for name, v in tokens.items()}})
    records.add_token_shares(table)
    assert [table.steps[index] for index in table.records["source/a/share"]] == [1, 2, 7]
    np.testing.assert_allclose(table.values["source/a/share"], [1, 0, 0.25])
    np.testing.assert_allclose(table.values["source/b/share"], [0, 1, 0.75])
    empty = records.MetricTable()
    records.add_token_shares(empty)
    assert not empty.values


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 250])
def test_long_series_keep_mean_and_range(count: int) -> None:
    table, rng = records.MetricTable(), np.random.default_rng(0)
    values = rng.normal(size=count)
    values[count // 2] = math.nan
    for step, value in enumerate(values):
        table.add({"step": step, "a/b": float(value) if value == value else None})
    entry = records.encode_series(table, 100)["tags"]["a/b"]
    size = -(-count // 100)
    groups = [values[start : start + size] for start in range(0, count, size)]
    known = [group[np.isfinite(group)] for group in groups]
    expected = [group.mean() if len(group) else math.nan for group in known]
    np.testing.assert_allclose(_values(entry), expected, rtol=1e-6)
    if size > 1:
        np.testing.assert_allclose(_values(entry, "low"), [group.min() for group in known])
        np.testing.assert_allclose(_values(entry, "high"), [group.max() for group in known])
    axis = records.encode_series(table, 100)["axes"][entry["axis"]]
    steps = np.frombuffer(base64.b64decode(axis["steps"]), "<f8")
    assert len(steps) == len(groups) and steps[-1] == count - 1


def test_layer_statistics_become_matrices(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    first = {"step": 2, "values": {"a": [1.0, None]}, "outside": {"b": 3.0}}
    second = {
        "step": 4,
        "values": {"a": [2.0, 5.0], "c": [7, "x"]},
        "experts": {"load": [None, [0.25, 0.75]]},
    }
    path.write_text(json.dumps(first) + "\n{broken\n" + json.dumps(second) + "\n")
    found = records.read_layers(path)
    assert found is not None and found["steps"] == [2, 4]
    assert found["rows"]["a"] == ["layer 0", "layer 1"]
    assert found["rows"]["load"] == ["layer 1, expert 0", "layer 1, expert 1"]
    nan = math.nan
    expected = {
        "a": [1, nan, 2, 5],
        "b": [3, nan],
        "c": [nan, nan, 7, nan],
        "load": [nan, nan, 0.25, 0.75],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(_values(found["values"], name), values)
    assert records.read_layers(tmp_path / "missing") is None


def test_layer_statistics_without_numbers(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    path.write_text('{"step": 1, "values": {"a": []}, "outside": {}, "experts": [1]}\n')
    assert records.read_layers(path) is None
    huge = "9" * 400
    path.write_text(f'{{"step": {huge}, "values": {{"a": [{huge}, -{huge}, 1]}}}}\n')
    found = records.read_layers(path)
    assert found is not None
    np.testing.assert_allclose(_values(found["values"], "a"), [math.nan, math.nan, 1])


def test_damaged_records_are_skipped_and_counted(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "base")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": "x"}\n[1]\nnull\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"step": 6, "train/loss": 1e400, "text": "x", "flag": true}\n{"step": 7, "tra')
    (run / "samples.jsonl").write_text('{"step": 1, "samples": [3, {"prompt": {"a": [1]}}]}\n[]\n')
    (run / "config.yml").write_text("a: [\n")
    found = page.read_run(run, "base")
    assert found["invalid_lines"] == 6 and found["last_step"] == 6
    assert math.isnan(_values(found["series"]["tags"]["train/loss"])[-1])
    assert set(found["series"]["tags"]) >= {"train/loss"} and "text" not in found["series"]["tags"]
    assert found["config"] == {}
    assert _data(page.render([found]))["runs"][0]["samples"][0]["samples"] == [
        {"prompt": "{'a': [1]}"}
    ]


def test_records_cannot_leave_the_data_element(tmp_path: Path) -> None:
    run = page.read_run(_write_run(tmp_path / "base", text=HOSTILE), HOSTILE)
    html = page.render([run])
    assert HOSTILE not in html and "<img" not in html
    assert _data(html)["runs"][0]["samples"][0]["samples"][0]["text"] == HOSTILE
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert (
        policy
        and "default-src 'none'" in policy[1]
        and "unsafe-inline" not in policy[1].split("script-src")[1]
    )
    assert not re.search(r"(src|href|url\()\s*=?\s*[\"']?\s*(https?:)?//", html)


def test_the_name_of_a_folder_may_be_invalid_unicode(tmp_path: Path) -> None:
    html = page.render([page.read_run(_write_run(tmp_path / "base"), "a\udcff")])
    assert "<title>a? - maxpipe report</title>" in html.encode().decode()


def test_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _write_run(tmp_path / "a" / "base")
    second = _write_run(tmp_path / "b" / "base", rate=0.2)
    out = tmp_path / "report.html"
    assert main(["report", str(first), str(second), "--out", str(out), "--watch"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    data = _data(out.read_text())
    assert [run["name"] for run in data["runs"]] == ["base", "base'"]
    assert data["differences"] == [{"key": "optim.learning_rate", "values": ["0.1", "0.2"]}]
    assert data["refresh"] == 0  # both runs have ended, so that --watch ends


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write_run(tmp_path / "base")
    assert main(["report", str(tmp_path / "missing"), "--out", str(tmp_path / "r.html")]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "r.svg")]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "r.html")]) == 74
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "--out", str(tmp_path / "r.html")]) == 2
    for out, suggestion in ((".", "./report.html"), ("", "report.html"), ("a.HTML", "a.html")):
        assert main(["report", str(run), "--out", out]) == 2
        assert f"Write --out {suggestion}.\n" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "empty"), "--out", str(tmp_path / "r.html")]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text and "must contain metrics.jsonl or events.jsonl" in text
    assert not (tmp_path / "r.html").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="requires chromium")
@pytest.mark.parametrize("text", ["hello", HOSTILE])
def test_page_in_a_browser(tmp_path: Path, text: str) -> None:
    folder = _write_run(tmp_path / "base", steps=300, text=text)
    (folder / "layers.jsonl").write_text('{"step": 1, "values": {"a": [1.0, 2.0]}}\n')
    run = page.read_run(folder, "base")
    out = tmp_path / "report.html"
    out.write_text(page.render([run]))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
    command += ["--window-size=1400,3000", "--virtual-time-budget=3000", f"file://{out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert messages == []
    assert "<title>base - maxpipe report</title>" in done.stdout
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", done.stdout)
    assert titles == [
        "Runs",
        "Curves",
        "Layers",
        "Goodput",
        "Data",
        "Evaluations",
        "Samples",
        "Events",
        "Config",
    ]
    assert "<canvas" in done.stdout  # the loss is drawn
