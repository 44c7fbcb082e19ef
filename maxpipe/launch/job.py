"""A cluster job: files, and the command that submits them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.load import to_yaml
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io import files
from maxpipe.launch.hosts import Hosts

CONFIG_FILE = "config.yml"


@dataclass(frozen=True)
class Job:
    """A run whose mesh is resolved, the hosts that it is for, and where its files go."""

    config: Config
    hosts: Hosts
    folder: Path
    workdir: Path
    """On the hosts."""

    @property
    def name(self) -> str:
        """The run's name as clouds allow it: lower-case letters, digits and hyphens."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")[:40]
        return name.strip("-") if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def run_dir(self) -> Path:
        """The run's folder on the hosts."""
        return self.workdir / run_folder(self.config.run)

    def host_config(self, **mesh: int) -> str:
        """The config of every process, which finds the others from its cluster."""
        config = self.config
        runtime = dataclasses.replace(config.runtime, num_processes=0, process_id=0, coordinator="")
        resolved = dataclasses.replace(config.mesh, **mesh)
        return to_yaml(dataclasses.replace(config, runtime=runtime, mesh=resolved))


@dataclass(frozen=True)
class Submission:
    """Files by name, and the command that submits them."""

    files: Mapping[str, str]
    submit: Sequence[str]
    tool: str
    """What must be installed here to submit."""

    def printed(self, folder: Path) -> str:
        """All files, each under its path."""
        return "\n".join(f"# --- {folder / name}\n{text}" for name, text in self.files.items())

    def write(self, folder: Path) -> None:
        """Writes the files; scripts can be executed.

        Raises:
            StorageError: they cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                path = folder / name
                files.write(path, text)
                if text.startswith("#!"):
                    path.chmod(0o755)
        except OSError as error:
            action = "Name a folder that can be written with --write."
            raise StorageError.unwritable(folder, error, action) from error

    def run(self) -> int:
        """Submits the files; the tool's exit code.

        Raises:
            ConfigError: the tool is missing.
        """
        if shutil.which(self.tool) is None:
            raise ConfigError.one(
                "command line: --submit",
                None,
                f"needs {self.tool}, which is not on the PATH of this machine.",
                f"Run `{' '.join(self.submit)}` where {self.tool} is installed.",
            )
        return subprocess.run(self.submit, check=False).returncode


def required_variables(names: Sequence[str]) -> str:
    """Lines of a shell script that end it when a variable has no value."""
    return "".join(f': "${{{name}:?must be set, it is in launch.environment}}"\n' for name in names)
