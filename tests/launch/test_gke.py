"""JobSets: validity, and restart rules for exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.launch.job import RestartPolicy
from tests.launch.conftest import QUICKSTART, Write

Capture = pytest.CaptureFixture[str]
SCHEMA = yaml.safe_load((Path(__file__).parent / "jobset_schema.yml").read_text())
NEEDED = (
    "launch.topology=v5e:2x4",
    "launch.image=us-docker.pkg.dev/p/r/maxpipe:0.1",
    "launch.volume=gs://bucket",
    "runtime.platform=tpu",
)
MULTISLICE = (
    "launch.topology=v5p:2x2x4",
    "launch.slices=2",
    "mesh.ici_fsdp=4",
    "mesh.dcn_fsdp=2",
    "train.batch_size=64",
)
# Records calls that change something, and stores the name and result of the applied JobSet in the
# file `state`. Like the real kubectl, it rejects changes of a JobSet.
KUBECTL = """\
#!/bin/bash
[ "$1" = --context=gke_p_us-east5_c ] || { echo "error: no such context" >&2; exit 1; }
shift
case "$1 $2" in
  "create secret")
    echo "$*" >>"$FAKE/secrets"
    cat "${5##*=}" >"$FAKE/secret"
    exit
    ;;
  "delete secret") echo "$*" >>"$FAKE/secrets"; exit ;;
esac
case "$1" in
  get) [ ! -e "$FAKE/state" ] || cat "$FAKE/state" ;;
  delete) echo "$*" >>"$FAKE/calls"; rm "$FAKE/state" ;;
  apply)
    echo "$*" >>"$FAKE/calls"
    [ ! -e "$FAKE/state" ] || { echo "field is immutable" >&2; exit 1; }
    printf 'quickstart ' >"$FAKE/state"
    ;;
esac
"""
WHERE = ("launch.project=p", "launch.zone=us-east5", "launch.cluster=c")


def manifests(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    text = (folder / "jobset.yml").read_text()
    config_map, jobset = yaml.safe_load_all(text)
    return config_map, jobset


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        MULTISLICE,
        ("launch.volume=claim", "launch.spot=true", "launch.environment=[MY_TOKEN]"),
        ("run.name=9.A_long_Name." + "x" * 80, "launch.queue=multislice-queue"),
        ("run.name=___",),
    ],
    ids=["one-host", "slices", "claim", "long-name", "odd-name"],
)
def test_jobsets_are_valid(write: Write, more: tuple[str, ...]):
    config_map, jobset = manifests(write("gke", *NEEDED, *more))
    checker = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
    assert [error.message for error in checker.iter_errors(jobset)] == []
    name = jobset["metadata"]["name"]
    assert config_map["kind"] == "ConfigMap" and config_map["metadata"]["name"] == name
    mounted = {mount["name"] for mount in job_of(jobset)["template"]["spec"]["volumes"]}
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    assert mounted == {mount["name"] for mount in container["volumeMounts"]}
    assert len(f"{name}-slice-99-9999") <= 63  # names of pods


def test_schema_rejects_invalid_restart_policy(write: Write):
    _, jobset = manifests(write("gke", *NEEDED))
    job_of(jobset)["template"]["spec"]["restartPolicy"] = "OnFailure"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, SCHEMA)


def test_kubelet_never_restarts_containers(write: Write):
    """A Job applies its exit code rules only to pods that are never restarted in place."""
    _, jobset = manifests(write("gke", *NEEDED))
    assert job_of(jobset)["template"]["spec"]["restartPolicy"] == "Never"


def outcome(jobset: dict[str, Any], code: int, disrupted: bool = False) -> str:
    """Return the action of the cluster: the Job's policy, its message, then the JobSet's rules."""
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job_of(jobset)["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        if "onExitCodes" in rule:
            matches = code in rule["onExitCodes"]["values"]
        else:
            matches = disrupted and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
        if matches:
            reason = "PodFailurePolicy"
            message = f"Container maxpipe for pod default/x-0 failed with exit code {code}"
            message += f" matching FailJob rule at index {index}"
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


ALWAYS, COUNTED, NEVER = "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet", "FailJobSet"


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        (75, False, ALWAYS),
        (75, True, ALWAYS),
        (137, True, ALWAYS),
        (74, True, ALWAYS),  # a failure on a disrupted node may be caused by the node
        *((code, False, NEVER) for code in (1, 2, 70, 74, 126, 127, 128)),
        *((code, False, COUNTED) for code in (71, 134, 137, 143, 255)),
    ],
)
def test_exit_code_determines_restart_action(write: Write, code: int, disrupted: bool, action: str):
    _, jobset = manifests(write("gke", *NEEDED))
    assert outcome(jobset, code, disrupted) == action
    assert job_of(jobset)["backoffLimit"] == 0  # one failed pod ends the Job


def test_max_restarts_is_multiple_of_launch_restarts(write: Write):
    """A JobSet cannot count consecutive failures, and most lost nodes cause exit code 71."""
    for restarts in (0, 3):
        _, jobset = manifests(write("gke", *NEEDED, f"launch.restarts={restarts}"))
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 10 * restarts


def test_exit_codes_follow_common_restart_policy(write: Write, tmp_path: Path):
    _, jobset = manifests(write("gke", *NEEDED))
    for code in range(1, 256):
        assert (outcome(jobset, code) == NEVER) != RestartPolicy(1, tmp_path).should_restart(code)


def test_every_host_of_every_slice_has_pod(write: Write):
    config_map, jobset = manifests(write("gke", *NEEDED, *MULTISLICE, "launch.queue=q"))
    (slices,) = jobset["spec"]["replicatedJobs"]
    job = job_of(jobset)
    assert (slices["replicas"], job["completions"], job["parallelism"]) == (2, 4, 4)
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["containers"][0]["command"] == ["maxpipe", "train", "/etc/maxpipe/config.yml"]
    text = config_map["data"]["config.yml"]
    assert "num_processes: 0\n" in text and "dcn_fsdp: 2\n" in text


def test_config_map_contains_config_of_run(write: Write):
    folder = write("gke", *NEEDED)
    config_map, _ = manifests(folder)
    assert config_map["data"]["config.yml"] == (folder / "config.yml").read_text()
    config = load([str(folder / "config.yml")]).config
    wanted = load([QUICKSTART, *NEEDED]).config
    assert (config.model, config.train, config.data) == (wanted.model, wanted.train, wanted.data)


def test_environment_variables_come_from_kubernetes_secret(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", "canary-5eb1")
    folder = write("gke", *NEEDED, "launch.environment=[MY_TOKEN]")
    assert not any("canary" in path.read_text() for path in folder.iterdir())
    _, jobset = manifests(folder)
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    own, variable = container["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "quickstart", "key": "MY_TOKEN"}}
    link = {"name": "quickstart-link", "key": "MAXPIPE_RUN_SECRET"}
    assert own == {"name": "MAXPIPE_RUN_SECRET", "valueFrom": {"secretKeyRef": link}}


def test_run_secret_is_new_for_each_submission_and_in_no_file(
    calls: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert submit(tmp_path / "job") == 0
    hint = capfd.readouterr().err.splitlines()[-1]
    assert "logs --follow --selector=jobset.sigs.k8s.io/jobset-name=quickstart," in hint
    first = (tmp_path / "secret").read_text()
    assert re.fullmatch("[0-9a-f]{64}", first)
    (tmp_path / "state").write_text("quickstart Failed")
    assert submit(tmp_path / "job") == 0
    assert (tmp_path / "secret").read_text() != first
    made = "create secret generic quickstart-link --from-file=MAXPIPE_RUN_SECRET=/dev/stdin"
    removed = "delete secret quickstart-link --ignore-not-found"
    assert (tmp_path / "secrets").read_text().splitlines() == [removed, made] * 2
    texts = [path.read_text() for path in (tmp_path / "job").iterdir()]
    assert not any(first in text for text in (*texts, *capfd.readouterr()))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the recorded calls of the fake kubectl."""
    tool = tmp_path / "bin/kubectl"
    tool.parent.mkdir()
    tool.write_text(KUBECTL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(tmp_path))
    return tmp_path / "calls"


def submit(folder: Path, *more: str) -> int:
    given = (QUICKSTART, *NEEDED, *WHERE, *more)
    return main(["launch", "gke", *given, "--submit", "--write", str(folder)])


@pytest.mark.parametrize("ended", ["Completed", "Failed"])
def test_finished_run_can_be_submitted_again(calls: Path, tmp_path: Path, ended: str):
    apply = f"apply -f {tmp_path}/job/jobset.yml"
    assert submit(tmp_path / "job") == 0
    assert calls.read_text().splitlines() == [apply]
    (tmp_path / "state").write_text(f"quickstart {ended}")
    assert submit(tmp_path / "job", "train.steps=9") == 0
    delete = "delete jobset quickstart --cascade=foreground"
    assert calls.read_text().splitlines() == [apply, delete, apply]


def test_running_jobset_is_not_replaced(
    calls: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert submit(tmp_path / "job") == 0
    assert submit(tmp_path / "job", "train.steps=9") == 2
    assert len(calls.read_text().splitlines()) == 1
    *_, what, why, action = capfd.readouterr().err.splitlines()
    assert what == "the JobSet quickstart exists in the cluster and has not finished"
    assert why.startswith("  ") and "kubectl --context=gke_p_us-east5_c delete jobset" in action


def test_failed_kubectl_get_prevents_submission(calls: Path, write: Write):
    script = write("gke", *NEEDED) / "submit.sh"  # without the existing context
    ran = subprocess.run(["bash", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1, "error: no such context\n")
    assert not calls.exists()


def test_submit_script_passes_shellcheck(write: Write):
    script = write("gke", *NEEDED, *WHERE, "launch.project=a.b:c") / "submit.sh"
    tool = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([tool, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ("launch.image=", "launch.image = ''", "that the cluster can pull"),
        ("launch.volume=", "launch.volume = ''", "must name persistent storage"),
        ("launch.volume=gs://b-1/a/", "= gs://b-1/a/", "Set launch.volume=gs://b-1 and run.dir=a/"),
        ("launch.volume=gs://b-1/", "launch.volume = gs://b-1/", "Set launch.volume=gs://b-1.\n"),
        ("launch.volume=gs://", "launch.volume = gs://", "Set launch.volume=gs://my-bucket."),
        ("launch.volume=gs://b", "launch.volume = gs://b", "must name a bucket: 3 to 63"),
        ("launch.volume=gs://b", "launch.volume = gs://b", "Set launch.volume=gs://my-bucket."),
        ("launch.volume=s3://b-1", "launch.volume = s3://b-1", "must be gs://BUCKET or a claim"),
        ("launch.volume=My/claim", "launch.volume = My/claim", "must be gs://BUCKET or a claim"),
        ("launch.cluster=c", "launch.cluster = c", "one of them is empty"),
        ("launch.workdir=work", "launch.workdir = work", "must be an absolute path"),
        ("run.dir=/elsewhere", "run.dir = /elsewhere", "must be in /workdir"),
        ("run.dir=../x", "run.dir = ../x", "must be in /workdir"),
        ("checkpoint.dir=/elsewhere", "checkpoint.dir = /elsewhere", "must be in /workdir"),
        ("launch.topology=v2:2x2", "launch.topology = v2:2x2", "maxpipe launch gcloud"),
        ("launch.topology=v5p:2x2x4", "mesh = stage 4 x fsdp 2", "must multiply"),
        (
            "launch.topology=h100:8 runtime.platform=auto",
            "launch.topology = h100:8",
            "be a TPU topology",
        ),
    ],
)
def test_gke_rejects_invalid_arguments(arguments: str, where: str, says: str, capsys: Capture):
    assert main(["launch", "gke", QUICKSTART, *NEEDED, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert where in err and says in err and not out
