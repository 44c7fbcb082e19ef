"""Run the steps of a Dockerfile in folders, which contain only the copied files.

Only instructions in the project's Dockerfile are supported. The root of an image is a folder, base
images are empty, and `pip` and `useradd` are replaced by stand-ins on the PATH.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PIP = f"""#!/bin/sh
# Without a network, and without dependencies.
echo "$@" >> "$INSTALLED"
command=$1; shift
if [ "$command" = install ]; then set -- --no-deps --target "$SITE" "$@"; fi
exec {sys.executable} -m pip "$command" --no-index --no-build-isolation "$@"
"""


@dataclass
class Stage:
    """An image that is being built."""

    root: Path
    cwd: str = "/"
    arguments: dict[str, str] = field(default_factory=dict)
    start: list[str] = field(default_factory=list)
    """Command of a container: ENTRYPOINT and CMD."""

    @property
    def site(self) -> Path:
        """Folder of the installed packages."""
        return self.root / "site"

    @property
    def folder(self) -> Path:
        return self.at(self.cwd)

    def at(self, path: str) -> Path:
        return self.root / os.path.normpath(os.path.join(self.cwd, path)).lstrip("/")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, with missing packages from the Python of the test."""
        tools = self.root.parent / "tools"
        environment = {"PATH": f"{self.site}/bin:{tools}:{os.environ['PATH']}"}
        environment |= {"HOME": str(self.root), "PYTHONPATH": str(self.site)}
        environment |= {"SITE": str(self.site), "INSTALLED": str(self.root / "installed.log")}
        environment |= self.arguments
        ran = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert not check or ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
        return ran


def build(file: Path, to: Path, arguments: Mapping[str, str]) -> Stage:
    """Build in `to` from the Dockerfile's folder, and return the last stage."""
    context = file.parent
    _write_tools(to / "tools")
    stages: dict[str, Stage] = {}
    stage = Stage(to)
    for instruction, rest in _instructions(file):
        match instruction:
            case "FROM":
                name = rest.partition(" AS ")[2] or str(len(stages))
                stage = stages[name] = Stage(to / f"stage-{name}")
                stage.root.mkdir()
            case "ARG":
                name, _, default = rest.partition("=")
                stage.arguments[name] = arguments.get(name, default.strip('"'))
            case "WORKDIR":
                stage.cwd = rest
                stage.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(shlex.split(rest), context, stages, stage)
            case "RUN":
                stage.run("sh", "-e", "-c", rest)
            case "ENTRYPOINT" | "CMD":
                stage.start += json.loads(rest)
            case "USER":
                pass
            case _:
                raise AssertionError(f"unsupported instruction: {instruction}")
    return stage


def _instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", file.read_text(encoding="utf-8")).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def _write_tools(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in (("pip", PIP), ("useradd", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def _copy(words: list[str], context: Path, stages: Mapping[str, Stage], stage: Stage) -> None:
    options = [word for word in words if word.startswith("--")]
    *sources, target = words[len(options) :]
    origin = next((word.removeprefix("--from=") for word in options if "--from=" in word), None)
    for source in sources:
        if origin is None:
            assert not _ignored(source, context), f"{source} is excluded by .dockerignore"
            path = context / source
        else:
            path = stages[origin].root / source.lstrip("/")
        goal = stage.at(target)
        if path.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, goal, ignore=skipped, dirs_exist_ok=True)
        else:
            into = goal / path.name if target.endswith("/") else goal
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)


def _ignored(source: str, context: Path) -> bool:
    """Return whether the last matching pattern excludes the file."""
    found = False
    for pattern in (context / ".dockerignore").read_text(encoding="utf-8").split():
        if fnmatch.fnmatch(source, pattern.removeprefix("!")):
            found = not pattern.startswith("!")
    return found
