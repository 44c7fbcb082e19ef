"""Contents of the wheel and of the Docker image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from maxpipe.config import config_files
from tests import dockerfile

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [
    found[1]
    for line in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]
PROMISED = (
    *("jax", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "omegaconf"),
    *("absl-py", "tensorboard"),
)
"""Packages that are part of every installation."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = folder.iterdir()
    return found


def test_wheel_contains_only_package_and_all_configs(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        for path in (ROOT / "configs").rglob("*.yml"):
            copy = f"maxpipe/{path.relative_to(ROOT).as_posix()}"
            assert opened.read(copy) == path.read_bytes()
            names.remove(copy)
    files = [path for end in ("*.py", "*.yml") for path in (ROOT / "maxpipe").rglob(end)]
    files += (ROOT / "maxpipe" / "report" / "assets").iterdir()  # scripts of the report page
    assert names == {path.relative_to(ROOT).as_posix() for path in files}


def test_promised_packages_are_dependencies():
    needed = {re.split(r"[\[>=]", text)[0] for text in PROJECT["dependencies"]}
    assert needed >= set(PROMISED)
    for file in (ROOT / "constraints").iterdir():
        pinned = set(re.findall(r"(?m)^([\w.-]+)==", file.read_text(encoding="utf-8")))
        assert needed <= pinned and "hatchling" in pinned


@pytest.mark.fault("U3")
@pytest.mark.parametrize("extras", ["", "tpu"])
def test_docker_image_builds_from_copied_files(extras: str, tmp_path: Path):
    image = dockerfile.build(ROOT / "Dockerfile", tmp_path, {"EXTRAS": extras})
    installed = (image.root / "installed.log").read_text().splitlines()[-1]
    assert installed.endswith(f".whl[{extras}]" if extras else ".whl")
    where = "import maxpipe; print(maxpipe.__file__)"
    assert image.run(sys.executable, "-c", where).stdout.startswith(str(image.site))
    assert image.run(*image.start).stdout.startswith("usage: maxpipe")
    assert image.folder == image.root / "home/maxpipe"
    if not extras:
        listed = image.run("maxpipe", "configs", "list").stdout
        assert all(f"\n{name} " in f"\n{listed}" for name in config_files.bundled_configs())
        plan = image.run("maxpipe", "plan", "quickstart", "--topology", "cpu:8", "--json")
        assert json.loads(plan.stdout)


# --- installed, on every Python; `make test-wheel` ---------------------------------------


def interpreter(version: str) -> str | None:
    """Return a Python of this version on the PATH or in pyenv, or None."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [shutil.which(name), *pyenv.glob(f"versions/{version}.*/bin/{name}")]
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        candidates.insert(0, sys.executable)
    for each in map(str, filter(None, candidates)):
        # pyenv puts shims on the PATH that fail unless their version is selected.
        told = subprocess.run([each, "--version"], capture_output=True, text=True)
        if told.stdout.startswith(f"Python {version}."):
            return each
    return None


@pytest.mark.wheel
@pytest.mark.fault("U3")
@pytest.mark.parametrize("version", PYTHONS)
def test_installed_wheel_trains_in_empty_folder(version: str, wheel: Path, tmp_path: Path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*command: object) -> str:
        ran = subprocess.run(
            list(map(str, command)), cwd=empty, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
        return ran.stdout

    empty, binaries = tmp_path / "empty", tmp_path / "venv/bin"
    empty.mkdir()
    run(python, "-m", "venv", tmp_path / "venv")
    lane = "py311" if version == "3.11" else "py312"
    constraints = ("-c", ROOT / f"constraints/{lane}.txt")
    run(binaries / "python", "-m", "pip", "install", "-qq", *constraints, wheel)
    versions = "from importlib.metadata import version; print(*map(version, {}))"
    assert len(run(binaries / "python", "-c", versions.format(PROMISED)).split()) == len(PROMISED)
    maxpipe = binaries / "maxpipe"
    run(maxpipe, "configs", "copy", "quickstart", "mine.yml")
    short = ("train.steps=3", "train.sequence_length=32", "eval.batches=1", "log.every=1")
    assert "done: 3 steps, files in runs/mine" in run(maxpipe, "train", "mine.yml", *short)
    assert "nothing is left to train" in run(maxpipe, "train", "mine.yml", *short)
    run(maxpipe, "init", "first")
    assert "done: 3 steps, files in runs/first" in run(
        maxpipe, "train", "first/run.yml", *short, "model.num_layers=2"
    )
    assert sorted(path.name for path in empty.iterdir()) == ["first", "mine.yml", "runs"]
