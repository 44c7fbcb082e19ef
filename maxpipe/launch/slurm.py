"""A SLURM job: `srun` starts a process on every GPU or node, and jax finds the others.

The job follows maxpipe's exit codes with the rule of `restart.py`, in shell.
"""

from __future__ import annotations

import re
import shlex
import signal

from maxpipe.config.bundled_configs import EVENTS_FILE
from maxpipe.distributed.protocol import FILE_VARIABLE
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.launch.job import (
    CONFIG_FILE,
    FINAL_EXIT_CODES,
    KEY,
    Job,
    Submission,
    required_variables,
)

_JOB, _TASK = "job.sh", "task.sh"

_SCRIPT = """\
#!/bin/bash
# The run {name} on {hosts}. Made by `maxpipe launch slurm`.
{directives}
set -uo pipefail

run={run}
restarts={restarts}
codes={folder}/codes-$SLURM_JOB_ID
{variables}
{newest_step}
# The processes of this job authenticate by it. `mktemp` makes a file for its owner only.
{secret}=$(mktemp {folder}/secret-XXXXXXXXXX) || exit {storage}
trap 'rm -f "${secret}"' EXIT
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"${secret}"
export {secret}

# The end of the time goes to the tasks only; this signal means that the job is cancelled.
cancelled=
trap 'cancelled=yes' TERM

fruitless=0
while true; do
  before=$(newest_step)
  : >"$codes"
  srun --cpu-bind=none --kill-on-bad-exit=1 {folder}/{task}
  code=$?
  # srun reports the highest exit code; that of the task that failed first counts.
  if (( code != 0 )) && read -r first <"$codes"; then code=$first; fi
  rm -f "$codes"
  echo "maxpipe ended with exit code $code; newest checkpoint: step $(newest_step)"
  if [[ -n $cancelled ]]; then exit "$code"; fi
  case $code in
    0 | {final}) exit "$code" ;;
    # The end of the time came before maxpipe could catch its signal: Python was starting.
    {preempted} | {terminated})
      scontrol requeue "$SLURM_JOB_ID"
      exit "$code"
      ;;
    {hang}) ;;
    *) if (( code <= 128 )); then exit "$code"; fi ;;
  esac
  if (( $(newest_step) > before )); then fruitless=0; else fruitless=$((fruitless + 1)); fi
  if (( fruitless > restarts )); then
    echo "$fruitless failures in a row without a newer checkpoint: giving up"
    exit "$code"
  fi
done
"""

_NEWEST_STEP = """\
newest_step() {
  local path step newest=-1
  for path in "$run"/checkpoints/*; do
    step=${path##*/}
    # Checkpoints that are not complete are not named by a number.
    if [[ $step =~ ^[0-9]+$ ]] && (( 10#$step > newest )); then newest=$((10#$step)); fi
  done
  echo "$newest"
}
"""
_NEWEST_STEP_ELSEWHERE = rf"""
# For checkpoints in other folders or buckets, the run's own records tell.
newest_step() {{
  local recorded='s/.*"event": "(start|checkpoint)", "step": ([0-9]+)[,}}].*/\2/p' newest
  newest=$(sed -nE "$recorded" "$run"/{EVENTS_FILE} 2>/dev/null | tail -n 1)
  if (( ${{newest:-0}} > 0 )); then echo "$newest"; else echo -1; fi
}}
"""
_TASK_SCRIPT = """\
#!/bin/bash
# One process of the run {name}. Leaves its exit code for the job that starts it everywhere.
# The signal is for maxpipe, which saves.
trap : TERM
{program} train {folder}/{config}
code=$?
if (( code != 0 )); then echo "$code" >>{folder}/codes-"$SLURM_JOB_ID"; fi
exit "$code"
"""


def create_submission(job: Job) -> Submission:
    """The job's files.

    Raises:
        ConfigError: SLURM cannot run it.
    """
    topology, launch = job.hosts.topology, job.config.launch
    if topology.platform == "tpu":
        rule = "must be GPUs or CPUs: TPUs are not SLURM nodes."
        action = f"Use `maxpipe launch gcloud` or `gke`, or set {KEY}=h100:8."
        raise ConfigError.one(KEY, topology.name, rule, action)
    _check_paths(job)
    per_host = job.hosts.num_processes // job.hosts.num_hosts
    checkpoint = job.config.checkpoint
    elsewhere = checkpoint.dir or checkpoint.local_dir
    # One process has the devices of a node's CPUs, but only one GPU.
    devices = {"cpu_devices": job.hosts.chips_per_host} if topology.platform == "cpu" else {}
    words = {
        "name": job.config.run.name,
        "hosts": f"{job.hosts}, {topology}",
        "directives": "\n".join(f"#SBATCH --{line}" for line in _directives(job, per_host)),
        "run": shlex.quote(str(job.run_dir)),
        "restarts": launch.restarts,
        "newest_step": _NEWEST_STEP_ELSEWHERE if elsewhere else _NEWEST_STEP,
        "folder": job.folder,
        "variables": required_variables(launch.environment),
        "task": _TASK,
        "final": " | ".join(str(int(code)) for code in FINAL_EXIT_CODES),
        "preempted": int(ExitCode.PREEMPTED),
        "terminated": 128 + signal.SIGTERM,
        "hang": int(ExitCode.HANG),
        "program": launch.program,
        "config": CONFIG_FILE,
        "secret": FILE_VARIABLE,
        "storage": int(ExitCode.STORAGE),
    }
    files = {
        _JOB: _SCRIPT.format(**words),
        _TASK: _TASK_SCRIPT.format(**words),
        CONFIG_FILE: job.host_config(**devices),
    }
    return Submission(files, ["sbatch", str(job.folder / _JOB)], "sbatch")


def _directives(job: Job, per_host: int) -> list[str]:
    launch = job.config.launch
    lines = [
        f"job-name={job.name}",
        f"nodes={job.hosts.num_hosts}",
        f"ntasks-per-node={per_host}",
    ]
    if job.hosts.topology.platform == "cuda":
        lines.append(f"gpus-per-node={per_host}")
    if launch.queue:
        lines.append(f"partition={launch.queue}")
    if launch.time_limit_minutes:
        lines.append(f"time={launch.time_limit_minutes}")
    return [
        *lines,
        f"chdir={job.workdir}",
        f"signal=TERM@{launch.grace_seconds}",
        "requeue",
        "open-mode=append",
        f"output={job.folder}/slurm-%j.log",
    ]


def _check_paths(job: Job) -> None:
    """Directives of sbatch are words, in which `%` and a backslash mean something."""
    for key, path, action in (
        ("command line: --write", job.folder, "Name another folder with --write."),
        ("launch.workdir", job.workdir, "Set launch.workdir to another folder."),
    ):
        if not re.fullmatch(r"[\w/.,+@:-]+", str(path)):
            rule = (
                "must be a path of letters, digits and `/._,+@:-`: sbatch reads it in the script."
            )
            raise ConfigError.one(key, path, rule, action)
