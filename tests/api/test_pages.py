"""The pages about the Python API match the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.api.reference import python_api
from tests.test_docs import DOCS, replace_block


def test_reference_matches_docstrings(update_golden: bool) -> None:
    replace_block(DOCS / "reference" / "python_api.md", "api", f"\n{python_api()}\n", update_golden)


def test_reference_lists_shapes_and_errors_of_train_step() -> None:
    text = (DOCS / "reference" / "python_api.md").read_text(encoding="utf-8")
    section = text.partition("### train_step\n")[2].partition("\n### ")[0]
    assert "`[sequences, T]`" in section and "- `ConfigError`: an array" in section


@pytest.mark.usefixtures("devices")
def test_code_in_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "guides" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(blocks) >= 10 and sum(bool(shown) for _, shown in blocks) >= 6
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code, shown in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        assert not shown or out.getvalue() == shown
