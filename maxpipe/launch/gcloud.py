"""TPU VMs of Google Cloud: a queued resource allocates slices, and every host starts the run.

Hosts monitor their own process with `maxpipe launch local`, so that the restart rule is the same.
"""

from __future__ import annotations

import shlex

from maxpipe.distributed.protocol import FILE_VARIABLE
from maxpipe.errors import ConfigError
from maxpipe.launch.job import CONFIG_FILE, KEY, Job, Submission, required_variables, tpu_of

_START, _STOP, _HOST, _SECRET = "start.sh", "stop.sh", "host.sh", "secret"

_MAX_FAILED_QUERIES = 10
"""Queries without an answer, half a minute apart, before giving up."""
_SETTINGS = """\
name={name}
location=({location})
"""

_START_SCRIPT = """\
#!/bin/bash
# The run {run} on {topology}. Made by `maxpipe launch gcloud`.
# Creates the slices unless they are there, waits for them, and starts the run on all hosts. Run it
# again when spot capacity was taken away: the run goes on from its newest checkpoint.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
{settings}
trouble=$(mktemp)
trap 'rm -f "$trouble"' EXIT

# The state of the request, or nothing when there is none; fails when there is no answer.
state() {{
  if gcloud compute tpus queued-resources describe "$name" "${{location[@]}}" \\
    --format='value(state.state)' 2>"$trouble"; then return; fi
  if grep -q NOT_FOUND "$trouble"; then return; fi
  cat "$trouble" >&2
  return 1
}}

now=$(state)
case $now in
  SUSPENDING | SUSPENDED | FAILED)
    gcloud compute tpus queued-resources delete "$name" "${{location[@]}}" --force --quiet
    now=
    ;;
esac
if [[ -z $now ]]; then
  gcloud compute tpus queued-resources create "$name" "${{location[@]}}" \\
    {request}
fi
empty=0
while true; do
  now=$(state || true)
  case $now in
    ACTIVE) break ;;
    SUSPENDING | SUSPENDED | FAILED)
      echo "the request for $name ended as $now" >&2
      exit 1
      ;;
    "")
      empty=$((empty + 1))
      if (( empty >= {patience} )); then
        echo "no answer about $name, {patience} times in a row" >&2
        echo "  Fix the error of gcloud above, then run this again." >&2
        exit 1
      fi
      ;;
    *) empty=0 ;;
  esac
  echo "waiting for {topology}: ${{now:-no answer}}"
  sleep "${{POLL_SECONDS:-30}}"
done
# The processes authenticate by it. It stays the same, so that a host that starts its process
# again besides this script has the same one. `stop.sh` removes it.
if [[ ! -s "$here/{secret}" || ! -O "$here/{secret}" ]]; then
  rm -f "$here/{secret}"
  (
    umask 077
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$here/{secret}"
  )
fi
nodes=({nodes})
for node in "${{nodes[@]}}"; do
  gcloud compute tpus tpu-vm ssh "$node" "${{location[@]}}" --worker=all \\
    --command="mkdir -p maxpipe-$name && chmod 700 maxpipe-$name"
  gcloud compute tpus tpu-vm scp "$here/{config}" "$here/{host}" "$here/{secret}" \\
    "$node:maxpipe-$name/" "${{location[@]}}" --worker=all
done
for node in "${{nodes[@]}}"; do
  gcloud compute tpus tpu-vm ssh "$node" "${{location[@]}}" --worker=all \\
    --command="bash maxpipe-$name/{host}"
done
echo "started; what process 0 prints:"
echo "gcloud compute tpus tpu-vm ssh ${{nodes[0]}} ${{location[*]}} --worker=0" \\
  "--command='tail -n 100 -f maxpipe-$name/output.log'"
"""

_STOP_SCRIPT = """\
#!/bin/bash
# Deletes the slices of the run {run}. Checkpoints stay where run.dir is.
set -euo pipefail
{settings}
gcloud compute tpus queued-resources delete "$name" "${{location[@]}}" --force --quiet
rm -f "$(dirname "${{BASH_SOURCE[0]}}")/{secret}"
"""

_HOST_SCRIPT = """\
#!/bin/bash
# Runs on each host: starts the run in the background, unless it runs.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
{variables}{chdir}
exec 9>"$here/lock"
if ! flock --nonblock 9; then
  echo "already runs on $(hostname)"
  exit 0
fi
chmod 600 "$here/{secret}"
export {variable}="$here/{secret}"
nohup {program} launch local "$here/{config}" >>"$here/output.log" 2>&1 </dev/null &
"""


def create_submission(job: Job) -> Submission:
    """The scripts.

    Raises:
        ConfigError: TPU VMs cannot run it.
    """
    topology, launch = job.hosts.topology, job.config.launch
    tpu = tpu_of(topology)
    if not tpu.runtime_version:
        rule = "is offered in Kubernetes clusters only."
        raise ConfigError.one(KEY, topology.name, rule, "Use `maxpipe launch gke`.")
    if not launch.zone:
        rule, action = "must name the zone of the TPUs.", "Set launch.zone=us-east5-a or another."
        raise ConfigError.one("launch.zone", "''", rule, action)
    location = [f"--zone={launch.zone}"]
    if launch.project:
        location.append(f"--project={launch.project}")
    nodes = [job.name]
    if topology.num_slices > 1:
        nodes = [f"{job.name}-{index}" for index in range(topology.num_slices)]
    words = {
        "run": job.config.run.name,
        "topology": topology,
        "settings": _SETTINGS.format(name=job.name, location=" ".join(location)),
        "patience": _MAX_FAILED_QUERIES,
        "request": _request(job, tpu.runtime_version),
        "nodes": " ".join(nodes),
        "config": CONFIG_FILE,
        "host": _HOST,
        "secret": _SECRET,
        "variable": FILE_VARIABLE,
        "variables": required_variables(launch.environment),
        "chdir": f"mkdir -p {launch.workdir}\ncd {launch.workdir}\n" if launch.workdir else "",
        "program": shlex.quote(launch.program),
    }
    files = {
        _START: _START_SCRIPT.format(**words),
        _STOP: _STOP_SCRIPT.format(**words),
        _HOST: _HOST_SCRIPT.format(**words),
        CONFIG_FILE: job.host_config(),
    }
    return Submission(files, ["bash", str(job.folder / _START)], "gcloud")


def _request(job: Job, runtime_version: str) -> str:
    """Options of the queued resource."""
    slices = job.hosts.topology.num_slices
    node = f"--node-id={job.name}"
    if slices > 1:
        node = f"--node-count={slices} --node-prefix={job.name}"
    options = [
        f"--accelerator-type={job.hosts.topology.accelerator}",
        f"--runtime-version={runtime_version}",
        node,
        *(["--spot"] if job.config.launch.spot else []),
    ]
    return " \\\n    ".join(options)
