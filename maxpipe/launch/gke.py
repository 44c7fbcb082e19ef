"""A JobSet for GKE: one Job for each slice, one pod for each host, restarts by exit code.

A pod that fails ends its Job at once, and the JobSet starts all Jobs again or none: processes of
one run cannot go on without each other. Kueue admits it where a queue is named, as XPK's clusters
need it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from maxpipe.config.rules import value_of
from maxpipe.config.schema import LaunchConfig
from maxpipe.distributed.protocol import VARIABLE
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.launch.job import CONFIG_FILE, KEY, Job, Submission, is_final, tpu_of
from maxpipe.launch.preflight import is_remote, output_paths

_MANIFEST, _SUBMIT = "jobset.yml", "submit.sh"
_CONTAINER, _SLICE = "maxpipe", "slice"
_CONFIG_FOLDER = "/etc/maxpipe"
DEFAULT_WORKDIR = Path("/workdir")
_BUCKET = "gs://"
_MOUNT_OPTIONS = "implicit-dirs,file-mode=666,dir-mode=777"
"""The image's user is not root."""
_NODE_POOL = "cloud.google.com/gke-nodepool"

_PORTS = (8471, 8431, 8482)
"""Of libtpu between hosts, of its measurements, and of jax's coordinator."""

_RULES = (
    ("preempted", "RestartJobSetAndIgnoreMaxRestarts", {"values": [int(ExitCode.PREEMPTED)]}),
    ("nodeTaken", "RestartJobSetAndIgnoreMaxRestarts", {"condition": "DisruptionTarget"}),
    ("final", "FailJobSet", {"values": list(filter(is_final, range(1, 256)))}),
)
"""(name, what the JobSet does, which pods) in order. All other failures count as restarts: kills,
and 71, with which pods leave at once when a node dies, long before its own pod is known as lost."""
_TOTAL_RESTARTS_FACTOR = 10
"""A JobSet counts restarts over the whole run, not those in a row without a newer checkpoint."""


_SUBMIT_SCRIPT = """\
#!/bin/bash
# Submits the run {run}. Made by `maxpipe launch gke`.
# A JobSet cannot be changed: one that has ended is deleted first, one that runs is left alone, and
# so is its config.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
name={name}
kubectl=({kubectl})

state=$("${{kubectl[@]}}" get jobset "$name" --ignore-not-found \\
  --output='jsonpath={{.metadata.name}} {{.status.terminalState}}')
case ${{state% }} in
  "") ;;
  "$name Completed" | "$name Failed")
    "${{kubectl[@]}}" delete jobset "$name" --cascade=foreground
    ;;
  *)
    {{
      echo "the JobSet $name is in the cluster and has not ended"
      echo "  A run is submitted once; its JobSet starts again what fails."
      echo "  Set another run.name, or end it first: ${{kubectl[*]}} delete jobset $name"
    }} >&2
    exit {refused}
    ;;
esac
# The pods authenticate by it. It is in no file and no command line.
"${{kubectl[@]}}" delete secret {secret} --ignore-not-found
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' |
  "${{kubectl[@]}}" create secret generic {secret} --from-file={key}=/dev/stdin
"${{kubectl[@]}}" apply -f "$here/{manifest}"
"""
"""`terminalState` is empty until the end. Jobs and pods of the last run go before new ones of the
same names come."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and numbers side by side."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_list(self, data: Iterable[Any]) -> yaml.SequenceNode:
        flow = all(isinstance(item, int) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)


def create_submission(job: Job) -> Submission:
    """The manifest, and the script that submits it.

    Raises:
        ConfigError: GKE cannot run it.
    """
    launch = job.config.launch
    if not tpu_of(job.hosts.topology).node_label:
        rule = "is not offered in Kubernetes clusters."
        raise ConfigError.one(KEY, job.hosts.topology.name, rule, "Use `maxpipe launch gcloud`.")
    _check(job)
    manifests = yaml.dump_all(
        [_config_map(job), _jobset(job)], Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    header = f"# The run {job.config.run.name} on {job.hosts.topology}, {job.hosts}.\n"
    header += "# Made by `maxpipe launch gke`. Needs JobSet 0.10 or newer in the cluster.\n"
    kubectl = ["kubectl", *([f"--context={_context(launch)}"] if launch.cluster else [])]
    words = {
        "run": job.config.run.name,
        "name": job.name,
        "kubectl": shlex.join(kubectl),
        "manifest": _MANIFEST,
        "refused": int(ExitCode.CONFIG),
        "secret": _secret_name(job),
        "key": VARIABLE,
    }
    script = _SUBMIT_SCRIPT.format(**words)
    files = {_SUBMIT: script, _MANIFEST: header + manifests, CONFIG_FILE: job.host_config()}
    return Submission(files, ["bash", str(job.folder / _SUBMIT)], "kubectl")


def _check(job: Job) -> None:
    launch = job.config.launch
    if not launch.image:
        rule = "must name a container image that has maxpipe and can be pulled by the cluster."
        action = "Build one with the Dockerfile, then set launch.image=REGISTRY/maxpipe:TAG."
        raise ConfigError.one("launch.image", "''", rule, action)
    if not launch.volume:
        rule = "must name storage: what pods write elsewhere is lost when they end."
        action = "Set launch.volume=gs://BUCKET, or the name of a persistent volume claim."
        raise ConfigError.one("launch.volume", "''", rule, action)
    _check_volume(launch.volume)
    if launch.cluster and not (launch.project and launch.zone):
        rule = "is found with launch.project and launch.zone, and one of them is empty."
        action = "Set both, or leave launch.cluster empty to use kubectl's current cluster."
        raise ConfigError.one("launch.cluster", launch.cluster, rule, action)
    mount = job.workdir
    if not mount.is_absolute():
        rule = "must be an absolute path: the volume is mounted there."
        action = f"Set launch.workdir={DEFAULT_WORKDIR}."
        raise ConfigError.one("launch.workdir", launch.workdir, rule, action)
    for key, path in output_paths(job.config).items():
        folder = mount / path
        if is_remote(path) or (folder.is_relative_to(mount) and ".." not in folder.parts):
            continue
        rule = f"must lie in {mount}, where launch.volume is: other files are lost with their pod."
        action = (
            "Set run.dir=runs." if key == "run.dir" else "Set checkpoint.dir=gs://my-bucket/runs."
        )
        raise ConfigError.one(key, value_of(job.config, key), rule, action)


_BUCKET_NAME = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"


def _check_volume(volume: str) -> None:
    """A bucket is mounted as a whole."""
    if volume.startswith(_BUCKET):
        bucket, _, below = volume.removeprefix(_BUCKET).partition("/")
        if not re.fullmatch(_BUCKET_NAME, bucket) or volume != _BUCKET + bucket:
            is_name = re.fullmatch(_BUCKET_NAME, bucket)
            rule = "must be the name of a bucket, without a folder: it is mounted as a whole."
            if not is_name:
                rule = "must name a bucket: 3 to 63 lower-case letters, digits, `-`, `_` and `.`, "
                rule += "with a letter or digit at both ends."
            action = f"Set launch.volume=gs://{bucket if is_name else 'my-bucket'}"
            action += f" and run.dir={below.strip('/')}/runs." if below.strip("/") else "."
            raise ConfigError.one("launch.volume", volume, rule, action)
    elif not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", volume):
        rule = "must be gs://BUCKET, or a claim's name of lower-case letters, digits, `.` and `-`."
        raise ConfigError.one("launch.volume", volume, rule, "Set launch.volume=gs://my-bucket.")


def _context(launch: LaunchConfig) -> str:
    """The name that `gcloud container clusters get-credentials` gives a cluster."""
    return f"gke_{launch.project}_{launch.zone}_{launch.cluster}"


def _config_map(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": {CONFIG_FILE: job.host_config()},
    }


def _jobset(job: Job) -> dict[str, Any]:
    launch, hosts = job.config.launch, job.hosts
    metadata: dict[str, Any] = {"name": job.name}
    if launch.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": launch.queue}
    if hosts.topology.num_slices > 1:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": _NODE_POOL}
    template = {
        "parallelism": hosts.hosts_per_slice,
        "completions": hosts.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_pod_rule(pods) for _, _, pods in _RULES]},
        "template": _pod(job),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": launch.restarts * _TOTAL_RESTARTS_FACTOR,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    _jobset_rule(index, name, action)
                    for index, (name, action, _) in enumerate(_RULES)
                ],
            },
            "replicatedJobs": [
                {
                    "name": _SLICE,
                    "replicas": hosts.topology.num_slices,
                    "template": {"spec": template},
                }
            ],
        },
    }


def _pod_rule(pods: dict[str, Any]) -> dict[str, Any]:
    """The Job fails with a message that ends in the rule's index, by which the JobSet knows it."""
    if "condition" in pods:
        condition = {"type": pods["condition"], "status": "True"}
        return {"action": "FailJob", "onPodConditions": [condition]}
    codes = {"containerName": _CONTAINER, "operator": "In", "values": pods["values"]}
    return {"action": "FailJob", "onExitCodes": codes}


def _jobset_rule(index: int, name: str, action: str) -> dict[str, Any]:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {index}$"],
    }


def _pod(job: Job) -> dict[str, Any]:
    launch, topology = job.config.launch, job.hosts.topology
    bucket = launch.volume.removeprefix(_BUCKET) if launch.volume.startswith(_BUCKET) else ""
    selector = {
        "cloud.google.com/gke-tpu-accelerator": tpu_of(topology).node_label,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.dims)),
    }
    if launch.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": launch.grace_seconds,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "containers": [_container(job)],
        "volumes": [
            {"name": "config", "configMap": {"name": job.name}},
            {"name": "workdir"} | _volume(bucket, launch.volume),
        ],
    }
    annotations = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}} if bucket else {}
    return annotations | {"spec": spec}


def _volume(bucket: str, claim: str) -> dict[str, Any]:
    if not bucket:
        return {"persistentVolumeClaim": {"claimName": claim}}
    attributes = {"bucketName": bucket, "mountOptions": _MOUNT_OPTIONS}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _container(job: Job) -> dict[str, Any]:
    launch = job.config.launch
    workdir = str(job.workdir)
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": launch.image,
        "command": [launch.program, "train", f"{_CONFIG_FOLDER}/{CONFIG_FILE}"],
        "workingDir": workdir,
        "ports": [{"containerPort": port} for port in _PORTS],
        "resources": {"limits": {"google.com/tpu": job.hosts.chips_per_host}},
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "workdir", "mountPath": workdir},
        ],
    }
    secrets = {VARIABLE: _secret_name(job)} | dict.fromkeys(launch.environment, job.name)
    container["env"] = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for key, name in secrets.items()
    ]
    return container


def _secret_name(job: Job) -> str:
    """Of the Secret that `submit.sh` makes; that of the run's other variables is the user's."""
    return f"{job.name}-link"
