"""Scripts and notebooks in examples/ run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import environment_of_command

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("devices")
def test_own_loop_lowers_loss_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = load_example("own_loop")
    example.main(last=40)
    example.main(last=60)
    lines = re.findall(r"(\d+): ([\d.]+), eval ([\d.]+)", capsys.readouterr().out)
    assert [int(step) for step, _, _ in lines] == [20, 40, 60]
    held_out = [float(loss) for _, _, loss in lines]
    assert held_out == sorted(held_out, reverse=True) and held_out[-1] < 2.8


def test_own_loop_is_short() -> None:
    assert len((EXAMPLES / "own_loop.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.source


def test_quickstart_notebook_trains_draws_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of_command().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    drawings = [out.data for out in outputs if "image/svg+xml" in out.get("data", {})]
    assert len(drawings) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    loss = re.search(r"loss after step 80: ([\d.]+) nats per token", printed)
    assert loss and float(loss[1]) < 3.0
    assert "def " in printed and "import " in printed
    assert (tmp_path / "runs" / "notebook" / "checkpoints" / "80").is_dir()
