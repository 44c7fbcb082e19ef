"""Each check of `maxpipe doctor` passes on valid input and fails on invalid input."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pwd
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint import storage
from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.diagnosis import doctor, environment
from maxpipe.diagnosis.doctor import CheckResult, CheckTarget
from maxpipe.planner import topology
from tests.bucket import Bucket

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "aB3dE5gH7jK9" * 3

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    """Arguments of a run on four devices with a temporary folder."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("four words of text")
    keys = ("train.steps=1", "mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=2")
    keys += ("train.batch_size=4", f"run.dir={tmp_path / 'runs'}", "data.source=text")
    keys += (f"data.path={tmp_path / 'text'}", f"runtime.compilation_cache={tmp_path / 'cache'}")
    return [str(ROOT / "configs/model/tiny.yml"), "runtime.platform=cpu", *keys]


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks that start processes."""
    monkeypatch.setattr(doctor, "check_devices", lambda target: iter(()))
    monkeypatch.setattr(doctor, "check_loopback", lambda: CheckResult("two processes", "ok", ""))


def by_name(checks: list[CheckResult]) -> dict[str, CheckResult]:
    return {check.name: check for check in checks}


def assert_failed(check: CheckResult, *words: str) -> None:
    """Assert that a check failed, with its cause and an action on one line."""
    assert check.status == "FAILED" and check.action.endswith((".", "?", ")"))
    assert "\n" not in str(check)
    assert all(word in str(check) for word in words), str(check)


# --- the command ----------------------------------------------------------------------------


def test_valid_run_passes_all_checks(config: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "maxpipe", "doctor", *config]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert all(line.startswith(("ok ", "warning ")) for line in lines)
    names = [re.split(r" {2,}", line)[1] for line in lines]
    assert names == [
        *("versions", "config", "run folder", "compilation cache", "data", "tokenizer", "clock"),
        *("devices", "mesh", "attention", "collectives over stage", "collectives over fsdp"),
        "two processes",
    ]
    assert "4 x cpu in 1 process" in ran.stdout and "stage 2 x fsdp 2" in ran.stdout
    # doctor leaves no files.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_unknown_config_key_is_reported(capsys: Capture, no_devices: None):
    assert main(["doctor", str(ROOT / "configs/model/tiny.yml"), "train.stesp=3"]) == 2
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert len(failed) == 1 and "Did you mean train.steps?" in failed[0]
    # Checks that need no config still run.
    assert {"run folder", "clock"} <= {re.split(r" {2,}", line)[1] for line in lines}


def test_json_report_contains_no_secrets(
    capsys: Capture, no_devices: None, monkeypatch: pytest.MonkeyPatch, config: list[str]
):
    monkeypatch.setenv("XLA_FLAGS", TOKEN)
    monkeypatch.setattr("sys.argv", ["maxpipe", "doctor", f"data.path={TOKEN}"])
    assert main(["doctor", *config, f"data.path=/nowhere/https://me:{TOKEN}@x/", "--json"]) == 2
    out = capsys.readouterr().out
    assert TOKEN not in out and "<redacted>" in out
    found = json.loads(out)
    assert found["well"] is False and found["environment"]["versions"]["jax"]
    assert found["config"]["mesh"]["ici_stage"] == 2
    assert {"name", "status", "text", "action", "code"} == set(found["checks"][0])


def test_printed_lines_contain_no_secrets():
    assert TOKEN not in str(CheckResult("data", "FAILED", f"s3://me:{TOKEN}@x", f"Set a={TOKEN}."))


# --- versions, folders, data ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ({"jax": "0.9.9"}, "jax 0.9.9 is older than 0.10.2"),
        ({"optax": None}, "optax is not installed"),
    ],
)
def test_outdated_or_missing_packages_are_reported(
    present: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
):
    assert doctor.check_versions().status == "ok"
    right = environment.installed_version
    monkeypatch.setattr(
        environment,
        "installed_version",
        lambda name: present[name] if name in present else right(name),
    )
    assert_failed(doctor.check_versions(), words)


def test_gpu_plugin_of_different_jax_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = environment.installed_version
    monkeypatch.setattr(
        environment,
        "installed_version",
        lambda name: "0.9" if name in topology.PLUGINS else right(name),
    )
    monkeypatch.setattr(topology, "missing_compiler", lambda: ("needs another", "pip install x"))
    assert_failed(doctor.check_versions(), "jax for GPUs needs another")
    monkeypatch.setattr(topology, "missing_compiler", lambda: None)
    assert doctor.check_versions().status == "ok"


@pytest.mark.parametrize(
    ("lower", "higher"),
    [("0.9.9", "0.10.2"), ("2.4", "2.4.1"), ("0.10.2", "0.10.10"), ("1", "1.0.1"), ("", "1")],
)
def test_versions_are_compared_numerically(lower: str, higher: str):
    assert doctor._numbers(lower) < doctor._numbers(higher)
    assert doctor._numbers("2.0.0rc1") == doctor._numbers("2")


def test_unwritable_run_folder_is_reported(config: list[str], tmp_path: Path):
    (tmp_path / "runs").write_text("not a folder")
    found = by_name(list(doctor.check_folders(CheckTarget.of(load(config)))))
    assert_failed(found["run folder"], "Not a directory", "Set run.dir")
    assert found["compilation cache"].status == "ok"


def test_checkpoint_folder_is_checked(
    config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def folders(value: object) -> dict[str, CheckResult]:
        loaded = load([*config, f"checkpoint.dir={value}"])
        return by_name(list(doctor.check_folders(CheckTarget.of(loaded))))

    def without_gcsfs(path: str) -> None:
        raise ImportError

    assert "a checkpoint needs" in folders(tmp_path / "saved")["checkpoint folder"].text
    assert "a checkpoint needs" not in folders(tmp_path / "saved")["run folder"].text
    (tmp_path / "saved").write_text("not a folder")
    assert_failed(folders(tmp_path / "saved")["checkpoint folder"], "Set checkpoint.dir")
    monkeypatch.setattr(storage, "store_filesystem", without_gcsfs)
    found = folders("gs://bucket/runs")["checkpoint folder"]
    assert found.status == "FAILED" and found.action == "Run: pip install 'maxpipe[gcs]'"


def test_checkpoint_folder_in_bucket_is_checked(config: list[str], bucket: Bucket):
    loaded = load([*config, "checkpoint.dir=gs://bucket/runs"])
    found = by_name(list(doctor.check_folders(CheckTarget.of(loaded))))["checkpoint folder"]
    assert found == CheckResult(found.name, "ok", "gs://bucket/runs/tiny can be written")
    bucket.refused.add("POST")
    try:
        found = by_name(list(doctor.check_folders(CheckTarget.of(loaded))))["checkpoint folder"]
        assert_failed(found, "Forbidden", "Storage Object User")
    finally:
        bucket.refused.clear()


def test_restore_source_is_checked(config: list[str], tmp_path: Path):
    def checks(source: str) -> CheckResult:
        loaded = load([*config, f"run.dir={tmp_path}", f"checkpoint.restore_from={source}"])
        (check,) = doctor.check_restore_source(loaded.config)
        return check

    (tmp_path / "base" / "checkpoints" / "120").mkdir(parents=True)
    for source, step in (("base", "newest"), ("base@120", "120"), ("base@best", "best")):
        check = checks(source)
        assert (check.status, check.text) == ("ok", f"{tmp_path}/base, step {step}, restores all")
    assert_failed(checks("base@7"), "base@7 does not exist", "has steps 120", "RUN@newest")
    assert_failed(checks("bse"), "checkpoint.restore_from = bse", "Did you mean base?")
    (tmp_path / "none").mkdir()
    assert_failed(checks(f"{tmp_path}/none"), "has no checkpoint")
    own = load([*config, f"run.dir={tmp_path}", "run.name=base", "checkpoint.restore_from=nothing"])
    (check,) = doctor.check_restore_source(own.config)
    assert check.status == "ok" and "is ignored" in check.text
    assert list(doctor.check_restore_source(load(config).config)) == []


def test_unwritable_cache_is_reported_as_warning(config: list[str], tmp_path: Path):
    (tmp_path / "cache").write_text("not a folder")
    found = by_name(list(doctor.check_folders(CheckTarget.of(load(config)))))
    assert found["compilation cache"].status == "warning"
    assert "runtime.compilation_cache" in found["compilation cache"].action


def test_default_cache_without_home_folder_is_warning(
    config: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    default = RuntimeConfig().compilation_cache
    target = CheckTarget.of(load([*config, f"runtime.compilation_cache={default}"]))
    found = by_name(list(doctor.check_folders(target)))["compilation cache"]
    assert (found.status, found.text) == (
        "warning",
        "~/.cache/maxpipe/compiled cannot be used: HOME is not set.",
    )


@pytest.mark.parametrize(("free", "status"), [(1, "FAILED"), (2.5, "warning"), (4.1, "ok")])
def test_free_space_for_checkpoints_is_checked(
    free: float, status: str, config: list[str], monkeypatch: pytest.MonkeyPatch
):
    """`free` is in checkpoints; three are kept while one is written."""
    from maxpipe.models.count import num_params
    from maxpipe.models.registry import describe

    target = CheckTarget.of(load(config))
    assert target.config is not None and target.config.checkpoint.keep == 3
    one = num_params(describe(target.config.model)) * 3 * 4
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(0, 0, one * free - 1))
    found = by_name(list(doctor.check_folders(target)))["run folder"]
    assert found.status == status
    assert found.status == "ok" or "Free " in found.action


def test_clock_of_file_server_is_compared(config: list[str], monkeypatch: pytest.MonkeyPatch):
    real = time.time
    monkeypatch.setattr(doctor.time, "time", lambda: real() - 60)
    found = by_name(list(doctor.check_folders(CheckTarget.of(load(config)))))["run folder"]
    assert found.status == "warning" and "differs from this machine's by 60." in found.text


def test_data_and_tokenizer_are_checked(config: list[str], tmp_path: Path):
    read, tokens = doctor.check_data(load(config).config)
    assert read.text == "text, 1 document, the first has 18 characters"
    assert tokens.text == "bytes, 259 ids, 18 tokens for 18 characters"
    # The tokenizer is checked even if the data is invalid, and vice versa.
    missing, tokens = doctor.check_data(load([*config, f"data.path={tmp_path}/none"]).config)
    assert_failed(missing, "data.path = ", "0 files match", "Set data.path")
    assert tokens.status == "ok"
    (tmp_path / "tokenizer.json").write_text("{}")
    both = ["tokenizer.kind=huggingface", f"tokenizer.path={tmp_path}/tokenizer.json"]
    read, tokens = doctor.check_data(load([*config, *both]).config)
    assert read.status == "ok"
    assert_failed(tokens, "tokenizer.path", "must be a tokenizer.json file")


def test_vocab_size_smaller_than_tokenizer_is_reported(config: list[str]):
    whole = load(config).config
    small = dataclasses.replace(whole, model=dataclasses.replace(whole.model, vocab_size=100))
    read, tokens = doctor.check_data(small)
    assert read.status == "ok"
    assert_failed(tokens, "model.vocab_size = 100", "259")


# --- clocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["", "UTC", "Europe/Zurich", "EST5EDT", "<+03>-3", ":UTC"])
def test_valid_time_zone_passes(zone: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", zone)
    assert doctor.check_clock().status == "ok"


def test_invalid_time_zone_is_reported_as_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "Mars/Base")
    found = doctor.check_clock()
    assert found.status == "warning" and "TZ=Mars/Base is not a time zone" in found.text


def test_clock_jump_is_reported(monkeypatch: pytest.MonkeyPatch):
    readings = iter([1e9, 1e9 + 40])
    monkeypatch.setattr(doctor.time, "time", lambda: next(readings))
    assert_failed(doctor.check_clock(), "the wall clock advanced by 40.00 s")


# --- devices ----------------------------------------------------------------------------------


def fake_probe(monkeypatch: pytest.MonkeyPatch, *records: dict[str, Any]) -> list[Any]:
    """Replace probe processes by these records, and return a list of the calls."""
    calls: list[Any] = []

    def probe(specs: list[Any], seconds: float, **options: Any) -> list[list[dict[str, Any]]]:
        calls.append((specs, seconds, options))
        return [list(records) for _ in specs]

    monkeypatch.setattr(environment, "probe", probe)
    return calls


def test_mesh_of_config_is_checked(config: list[str], monkeypatch: pytest.MonkeyPatch):
    calls = fake_probe(monkeypatch, {"name": "mesh", "status": "ok", "text": "stage 2"})
    (found,) = doctor.check_devices(
        CheckTarget.of(load([*config, "runtime.init_timeout_seconds=77"]))
    )
    assert found == CheckResult("mesh", "ok", "stage 2")
    ((specs, seconds, _),) = calls
    assert specs[0]["mesh"]["ici_stage"] == 2 and specs[0]["runtime"]["platform"] == "cpu"
    assert seconds == doctor.DEVICE_SECONDS
    fake_probe(monkeypatch, {"name": "mesh", "status": "ok", "text": "one", "platform": "gpu"})
    target = CheckTarget.of(load([*config, "train.sequence_length=4096"]))
    assert [each.name for each in doctor.check_devices(target)] == ["mesh", "attention"]
    named = CheckTarget.of(load([*config, "model.attention=xla"]))
    assert [each.name for each in doctor.check_devices(named)] == ["mesh"]
    calls = fake_probe(monkeypatch)
    several = load([*config, "runtime.num_processes=0", "runtime.init_timeout_seconds=77"])
    list(doctor.check_devices(CheckTarget.of(several)))
    assert calls[0][1] == doctor.DEVICE_SECONDS + 77


def test_unresponsive_devices_are_reported(monkeypatch: pytest.MonkeyPatch):
    fake_probe(
        monkeypatch, {"name": "devices", "status": "FAILED", "text": "no answer within 9 s."}
    )
    (found,) = doctor.check_devices(CheckTarget())
    assert_failed(found, "no answer within 9 s.", "Stop other programs")
    assert_failed(doctor.check_loopback(), "process 0: no answer within 9 s.", "no_proxy")
    assert doctor.count_device_kinds() == "no answer within 9 s."


def test_wrong_mesh_size_and_missing_platform_are_reported(config: list[str]):
    found = list(doctor.check_devices(CheckTarget.of(load([*config, "mesh.ici_fsdp=4"]))))
    assert [check.status for check in found] == ["ok", "FAILED"]
    assert_failed(found[1], "the run needs 8, but there are 4", "set mesh.cpu_devices=8")
    (found,) = doctor.check_devices(CheckTarget.of(load([*config, "runtime.platform=tpu"])))
    assert_failed(found, "runtime.platform", "must have devices on this machine")


@pytest.mark.multihost
@pytest.mark.faults
def test_failed_loopback_connection_is_reported(monkeypatch: pytest.MonkeyPatch):
    # Another program listens at process 0's port.
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(doctor, "free_port", lambda: other.getsockname()[1])
        monkeypatch.setattr(doctor, "LOOPBACK_SECONDS", 15.0)
        begin = time.monotonic()
        assert_failed(doctor.check_loopback(), "process ", "127.0.0.1")
        assert time.monotonic() - begin < 25


def test_help_does_not_import_jax():
    code = (
        "import sys; from maxpipe.cli import main\n"
        "for args in (['doctor', '--help'], ['env', '--help']):\n"
        "    try: main(args)\n"
        "    except SystemExit: pass\n"
        "import maxpipe.diagnosis.doctor\n"
        "sys.exit('jax' in sys.modules)"
    )
    environ = os.environ | {"COLUMNS": "100"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True)
    assert ran.returncode == 0 and b"collective" in ran.stdout
