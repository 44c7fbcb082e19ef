"""Report versions, hardware and environment variables for bug reports.

This module does not import jax or use a device. `probe.py` tests devices in a separate process.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import maxpipe
from maxpipe.io import redact

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorstore",
    "numpy",
)
"""Packages whose versions affect a run's results."""

_VARIABLES = re.compile(
    r"XLA_FLAGS|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|(?:JAX|TPU|SLURM|TF_CPP|OMPI_COMM_WORLD)_\w+"
)
_GIT_SECONDS = 10.0
FAILED = "FAILED"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def versions() -> dict[str, str | None]:
    """Return the versions of Python, maxpipe and `PACKAGES`, with None for missing packages."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["maxpipe"] = maxpipe.__version__
    return found | {name: installed_version(name) for name in PACKAGES}


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Return the operating system, CPUs and memory, with the limits that apply to this process."""
    memory = None
    with contextlib.suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _distribution(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable,
        "memory_bytes": memory,
        "memory_limit_bytes": None if memory is None or limit >= memory else limit,
    }


def _distribution() -> str | None:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def _memory_limit() -> float:
    """Return the memory limit of this container in bytes, or infinity if there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    return float("inf")


def variables() -> dict[str, str]:
    """Return the environment variables that affect jax and XLA, with secrets redacted."""
    found = {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}
    return redact.redact_value(dict(sorted(found.items())))


def commit() -> str | None:
    """Return the commit of this checkout, with the suffix `-dirty` if there are local changes."""
    root = _PROJECT.parent
    if not (root / ".git").exists() or not _PROJECT.is_file():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=True)
        return ran.stdout.decode(errors="replace").strip() or None
    return None


def probe(
    specs: Sequence[Mapping[str, Any]], seconds: float, *, inherit: bool = True
) -> list[list[dict[str, Any]]]:
    """Run one `probe` process per spec, concurrently and with a time limit. Return their records.

    If `inherit` is False, the processes do not receive the environment variables listed by
    `variables`. The last record of a failed process has status FAILED.
    """
    # The processes import the same modules as this process, but never from the working directory.
    paths = [path or str(Path.cwd()) for path in sys.path]
    values = {
        name: value
        for name, value in os.environ.items()
        if inherit or not _VARIABLES.fullmatch(name)
    }
    values["PYTHONPATH"] = os.pathsep.join(paths)
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        started = []
        for spec in specs:
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = [sys.executable, "-P", "-m", "maxpipe.diagnosis.probe", json.dumps(spec)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=values
            )
            stack.callback(_end, process)
            started.append((process, out, err))
        return [_records(*each, end=end, seconds=seconds) for each in started]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _records(
    process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], *, end: float, seconds: float
) -> list[dict[str, Any]]:
    try:
        code = process.wait(max(0.0, end - time.monotonic()))
        reason = f"the process exited with code {code}: {_last_error_line(err)}"
    except subprocess.TimeoutExpired:
        code, reason = -1, f"no result within {seconds:.0f} s"
    out.seek(0)
    records = [json.loads(line) for line in out.read().splitlines() if line.startswith(b'{"name"')]
    if code != 0 and not any(record["status"] == FAILED for record in records):
        last = f", after {records[-1]['name']}" if records else ""
        records.append({"name": "devices", "status": FAILED, "text": f"{reason}{last}."})
    return records


def _last_error_line(err: IO[bytes]) -> str:
    """Return the last lines of a process's stderr, joined into one line."""
    err.seek(0)
    lines = err.read().decode(errors="replace").splitlines()[-3:]
    return redact.redact_text(" ".join(line.strip() for line in lines)) or "no output"


def report() -> dict[str, Any]:
    """Return the environment report as JSON-compatible data, with secrets redacted."""
    return redact.redact_value(
        {
            "versions": versions(),
            "commit": commit(),
            "machine": machine(),
            "command_line": redact.redact_argv(sys.argv[1:]),
            "variables": variables(),
        }
    )


def requirements() -> Iterator[tuple[str, str, bool]]:
    """Yield the package name, its minimum version and whether it is required, for every requirement
    in pyproject.toml. Packages in extras are optional. Development packages are skipped.
    """
    for extra, text in _requirements():
        if extra == "dev":
            continue
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\d.]+)", text)
        if match:
            yield match[1], match[2], not extra


def _requirements() -> Iterator[tuple[str, str]]:
    """Yield the (extra, requirement) pairs of the checkout or, outside a checkout, of the installed
    package.
    """
    if _PROJECT.is_file():
        project: Mapping[str, Any] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
        yield "", f"python{project['requires-python']}"
        yield from (("", text) for text in project["dependencies"])
        for extra, texts in project["optional-dependencies"].items():
            yield from ((extra, text) for text in texts)
        return
    with contextlib.suppress(metadata.PackageNotFoundError):
        about = metadata.metadata("maxpipe")
        yield "", f"python{about['Requires-Python']}"
        for text in metadata.requires("maxpipe") or ():
            extra = re.search(r"extra == ['\"]([\w-]+)", text)
            yield extra[1] if extra else "", text
