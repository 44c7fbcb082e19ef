"""`maxpipe launch`: start a run in several local processes or on a cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, Parser, add_inputs, integer, read_config, subcommands
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io.files import expand_path
from maxpipe.io.formatting import capitalize_first

if TYPE_CHECKING:
    from maxpipe.config.load import LoadedConfig
    from maxpipe.launch.job import Job, Submission

_CLUSTERS = {
    "slurm": (
        "write or submit a SLURM job",
        "Write or submit a SLURM job with one process per GPU, or per node on nodes without\n"
        "GPUs. The job is requeued if it saved a checkpoint before it stopped, for example at\n"
        "its time limit.",
        "launch.topology=h100:8 launch.slices=4 launch.queue=gpu",
    ),
    "gcloud": (
        "write or run scripts that train on Google Cloud TPU VMs",
        "Write or run scripts that create TPU slices through a queued resource and start the run\n"
        "on all hosts.",
        "launch.topology=v5p:2x4x4 launch.slices=2 launch.zone=us-east5-a",
    ),
    "gke": (
        "write or submit a JobSet for GKE",
        "Write or submit a JobSet with one pod per TPU host. The exit code of maxpipe\n"
        "determines whether the JobSet is restarted.",
        "launch.topology=v5p:2x4x4 launch.image=REGISTRY/maxpipe:TAG launch.volume=gs://BUCKET",
    ),
}


def _local(options: argparse.Namespace) -> int:
    from maxpipe.config.load import load
    from maxpipe.launch import local

    return local.launch(load(options.inputs, to_train=True), options.inputs, options.processes)


def _cluster(options: argparse.Namespace) -> int:
    from maxpipe.launch.job import add_origins

    loaded = read_config(options.inputs, to_train=True)
    try:
        report, job, submission = _create_submission(options, loaded)
    except ConfigError as error:
        raise add_origins(error, loaded.origins) from error
    print(report, file=sys.stderr, flush=True)
    if options.write or options.submit:
        submission.write(job.folder)
        print(f"wrote {', '.join(submission.files)} to {job.folder}", file=sys.stderr, flush=True)
    else:
        print(submission.render(job.folder), end="")
    if options.submit:
        code = submission.run()
        if code == ExitCode.DONE and submission.follow_command:
            print(f"submitted; follow the run: {submission.follow_command}", file=sys.stderr)
        return code
    submit = shlex.join(submission.submit_command)
    hint = f"submit with: {submit}"
    if not options.write:
        hint = f"add --submit to write these files to {job.folder} and run `{submit}`"
    print(f"not submitted; {hint}", file=sys.stderr)
    return ExitCode.DONE


def _create_submission(
    options: argparse.Namespace, loaded: LoadedConfig
) -> tuple[str, Job, Submission]:
    """Return the preflight report, the job, and its files and submit command."""
    from maxpipe.checkpoint.storage import run_folder
    from maxpipe.launch import gcloud, gke, slurm
    from maxpipe.launch.job import Job, check_hosts

    named = loaded.config.launch.workdir
    defaults = {"slurm": Path.cwd(), "gcloud": Path(), "gke": gke.DEFAULT_WORKDIR}
    workdir = Path(named) if named else defaults[options.cluster]
    shared = options.cluster == "slurm"
    if shared:
        workdir = workdir.absolute()  # the job script reads the run folder
    config, hosts, report = check_hosts(loaded, workdir, shared=shared)
    folder = (
        expand_path(options.write, "command line: --write")
        if options.write
        else run_folder(config.run) / "launch"
    )
    job = Job(config, hosts, folder.absolute(), workdir)
    modules = {"slurm": slurm, "gcloud": gcloud, "gke": gke}
    return report, job, modules[options.cluster].create_submission(job)


def add(commands: Commands) -> None:
    """Add the `launch` command."""
    about = "start a run in local processes, or on SLURM, TPU VMs or GKE"
    parser = commands.add_parser("launch", help=about, description=f"{capitalize_first(about)}.")
    actions = subcommands(parser)
    _add_local(actions)
    for name, (help_text, description, example) in _CLUSTERS.items():
        cluster = actions.add_parser(
            name,
            help=help_text,
            description=description,
            epilog=f"example: maxpipe launch {name} run.yml {example} --write job\n"
            "`maxpipe config explain launch` lists the keys.",
        )
        _add_cluster(cluster, name)
    parser.command_names = tuple(actions.choices)


def _add_local(actions: Commands) -> None:
    local = actions.add_parser(
        "local",
        help="train in local processes, which are restarted after failures",
        description="Train in several processes on this machine, which divide mesh.cpu_devices\n"
        "equally. The processes are restarted if one of them is killed, hangs, or stops after\n"
        "saving a checkpoint. If the launcher receives SIGTERM, SIGHUP or Ctrl-C, the run saves a\n"
        "checkpoint and stops. A single process may be part of a multi-host run.",
        epilog="example: maxpipe launch local --processes 4 quickstart",
    )
    add_inputs(local)
    local.add_argument(
        "--processes",
        type=integer,
        default=1,
        metavar="NUMBER",
        help="number of processes (default: 1)",
    )
    local.set_defaults(command=_local)


def _add_cluster(parser: Parser, name: str) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--write", metavar="FOLDER", help="write the files to FOLDER instead of printing them"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--dry-run",
        action="store_true",
        default=True,
        help="do not submit the job (default)",
    )
    what.add_argument(
        "--submit",
        action="store_true",
        help="write the files to FOLDER (default: `launch` in the run folder) and submit them",
    )
    parser.set_defaults(command=_cluster, cluster=name)
