"""Scripts for TPU VMs, run with a fake gcloud."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from tests.launch.conftest import QUICKSTART, Write

Capture = pytest.CaptureFixture[str]
NEEDED = ("launch.topology=v5e:2x4", "launch.zone=us-west4-a", "runtime.platform=tpu")
MULTISLICE = (
    "launch.topology=v5p:2x2x4",
    "launch.slices=2",
    "launch.project=p",
    "mesh.ici_fsdp=4",
    "mesh.dcn_fsdp=2",
    "train.batch_size=64",
)

# Records calls, and stores the state of a queued resource in the file `state`; the resource becomes
# active after one `describe`. If the file `trouble` exists, `describe` fails with its contents.
GCLOUD = """\
#!/bin/bash
printf '%s\\n' "$*" >>"$FAKE/calls"
case "$3 $4" in
  "queued-resources describe")
    if [ -e "$FAKE/trouble" ]; then cat "$FAKE/trouble" >&2; exit 1; fi
    if [ ! -e "$FAKE/state" ]; then
      echo "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource" >&2
      exit 1
    fi
    cat "$FAKE/state"
    echo ACTIVE >"$FAKE/state"
    ;;
  "queued-resources create") echo PROVISIONING >"$FAKE/state" ;;
  "queued-resources delete") rm "$FAKE/state" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the recorded calls of the fake gcloud."""
    tool = tmp_path / "bin/gcloud"
    tool.parent.mkdir()
    tool.write_text(GCLOUD)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("POLL_SECONDS", "0")
    return tmp_path / "calls"


def bash(script: Path, **variables: str) -> str:
    ran = subprocess.run(
        ["bash", script], capture_output=True, text=True, env=os.environ | variables
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def changing_calls(calls: Path) -> list[str]:
    """Return the calls other than `describe`, without their common prefix."""
    lines = calls.read_text().splitlines()
    return [line.removeprefix("gcloud ")[13:] for line in lines if " describe " not in line]


def test_scripts_pass_shellcheck(write: Write):
    folder = write("gcloud", *NEEDED, *MULTISLICE, "launch.environment=[A]", "launch.workdir=a/b")
    scripts = sorted(folder.glob("*.sh"))
    assert [path.name for path in scripts] == ["host.sh", "start.sh", "stop.sh"]
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", *scripts], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert all(os.access(path, os.X_OK) for path in scripts)


def test_slices_are_requested_awaited_and_started(write: Write, calls: Path, tmp_path: Path):
    folder = write("gcloud", *NEEDED, *MULTISLICE, "launch.spot=true")
    location = "--zone=us-west4-a --project=p"
    shown = bash(folder / "start.sh")
    assert shown.startswith("waiting for 2 slices of v5p:2x2x4, 32 devices: PROVISIONING\nstarted;")
    request, *others = changing_calls(calls)
    assert request == (
        f"queued-resources create quickstart {location} --accelerator-type=v5p-32 "
        "--runtime-version=v2-alpha-tpuv5 --node-count=2 --node-prefix=quickstart --spot"
    )
    assert others[:2] == [
        f"tpu-vm ssh quickstart-0 {location} --worker=all --command=mkdir -p maxpipe-quickstart "
        "&& chmod 700 maxpipe-quickstart",
        f"tpu-vm scp {folder}/config.yml {folder}/host.sh {folder}/secret "
        f"quickstart-0:maxpipe-quickstart/ {location} --worker=all",
    ]
    secret = folder / "secret"
    assert re.fullmatch("[0-9a-f]{64}", text := secret.read_text())
    assert secret.stat().st_mode & 0o777 == 0o600
    assert not any(text in path.read_text() for path in (*folder.glob("*.*"), calls))
    assert others[-2:] == [
        f"tpu-vm ssh quickstart-{node} {location} --worker=all "
        "--command=bash maxpipe-quickstart/host.sh"
        for node in (0, 1)
    ]
    # On a second start, the slices exist.
    calls.unlink()
    bash(folder / "start.sh")
    assert "create" not in calls.read_text() and "host.sh" in calls.read_text()
    assert secret.read_text() == text  # hosts may restart their processes in the meantime
    # If capacity was preempted, the suspended request is deleted first.
    calls.unlink()
    (tmp_path / "state").write_text("SUSPENDED\n")
    bash(folder / "start.sh")
    assert [line.split()[1] for line in changing_calls(calls)[:2]] == ["delete", "create"]
    bash(folder / "stop.sh")
    assert not (tmp_path / "state").exists() and not secret.exists()


def test_single_slice_is_requested_as_one_node(write: Write, calls: Path):
    bash(write("gcloud", *NEEDED) / "start.sh")
    assert "--accelerator-type=v5litepod-8 " in changing_calls(calls)[0]
    assert changing_calls(calls)[0].endswith("--node-id=quickstart")


def test_host_starts_run_only_once(write: Write, tmp_path: Path):
    program = tmp_path / "program"
    program.write_text('#!/bin/bash\necho "$PWD $*"\ncat "$MAXPIPE_RUN_SECRET_FILE"\nsleep 3\n')
    program.chmod(0o755)
    keys = (
        f"launch.program={program}",
        f"launch.workdir={tmp_path}/work",
        "launch.environment=[A]",
    )
    folder = write("gcloud", *NEEDED, *keys)
    (folder / "secret").write_text("known to all\n")
    with pytest.raises(AssertionError, match="A: must be set, because launch.environment lists it"):
        bash(folder / "host.sh")
    assert bash(folder / "host.sh", A="1") == ""
    assert "already running" in bash(folder / "host.sh", A="1")
    log, deadline = folder / "output.log", time.monotonic() + 10
    while log.read_text().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    said = f"{tmp_path}/work launch local {folder}/config.yml\nknown to all\n"
    assert log.read_text() == said
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert load([str(folder / "config.yml")]).config.runtime.num_processes == 0


def test_submit_starts_run(
    calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "gcloud", QUICKSTART, *NEEDED, "--submit"]) == 0
    assert "started; to follow the output of process 0:" in capfd.readouterr().out
    assert len(changing_calls(calls)) == 4


EXPIRED = "ERROR: (gcloud) There was a problem refreshing your current auth tokens\n"


def test_gcloud_error_does_not_request_slices(write: Write, calls: Path, tmp_path: Path):
    (tmp_path / "trouble").write_text(EXPIRED)
    ran = start(write("gcloud", *NEEDED))
    assert (ran.returncode, ran.stderr) == (1, EXPIRED)
    assert changing_calls(calls) == []


def test_wait_ends_after_repeated_gcloud_errors(write: Write, calls: Path, tmp_path: Path):
    """The credentials expire during the wait for slices."""
    tool = tmp_path / "bin/gcloud"
    expires = 'echo PROVISIONING >"$FAKE/state"; cp "$FAKE/expired" "$FAKE/trouble"'
    tool.write_text(tool.read_text().replace('echo PROVISIONING >"$FAKE/state"', expires))
    (tmp_path / "expired").write_text(EXPIRED)
    ran = start(write("gcloud", *NEEDED))
    assert ran.returncode == 1
    assert ran.stderr.count(EXPIRED) == 10 and ran.stdout.count("no state\n") == 9
    assert (
        ran.stderr.splitlines()[-2] == "gcloud reported no state for quickstart 10 times in a row"
    )


def test_wait_tolerates_single_gcloud_error(write: Write, calls: Path, tmp_path: Path):
    tool = tmp_path / "bin/gcloud"
    once = '[ -e "$FAKE/missed" ] || { touch "$FAKE/missed"; echo busy >&2; exit 1; }; cat'
    tool.write_text(tool.read_text().replace('cat "$FAKE/state"', f'{once} "$FAKE/state"'))
    ran = start(write("gcloud", *NEEDED))
    assert ran.returncode == 0 and ran.stderr == "busy\n"
    assert ": no state\n" in ran.stdout and "started;" in ran.stdout


def start(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", folder / "start.sh"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ("launch.zone=", "launch.zone = ''", "must name the zone"),
        ("launch.topology=tpu7x:2x2x1", "launch.topology = tpu7x:2x2x1", "maxpipe launch gke"),
        (
            "launch.topology=v6e:2x3 mesh.ici_stage=3",
            "launch.topology = v6e:2x3",
            "each TPU v6e host has",
        ),
        (
            "launch.topology=h100:8 runtime.platform=cuda",
            "launch.topology = h100:8",
            "be a TPU topology",
        ),
    ],
)
def test_gcloud_rejects_invalid_arguments(arguments: str, where: str, says: str, capsys: Capture):
    assert main(["launch", "gcloud", QUICKSTART, *NEEDED, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert where in err and says in err and not out
