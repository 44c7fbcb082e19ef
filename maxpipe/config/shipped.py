"""The configs that come with maxpipe: `configs/` of a checkout, or their copy in the package."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

SUFFIX = ".yml"
_FOLDERS = (
    Path(__file__).parents[1] / "configs",  # installed
    Path(__file__).parents[2] / "configs",  # a checkout
)


@dataclass(frozen=True, slots=True)
class Shipped:
    """A config that can be named instead of a file."""

    name: str
    kind: Literal["run", "model", "sft"]
    """A `model` merges with a file or overrides that say how it is trained; `sft` is a run that
    fine-tunes a model's folder, named `base`, on conversations."""
    path: Path

    @property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def about(self) -> str:
        """The first sentence of the comment that the file begins with."""
        lines = []
        for line in self.text.splitlines():
            if not line.startswith("# "):
                break
            lines.append(line[2:].strip())
        return re.split(r"(?<=\.)\s", " ".join(lines), maxsplit=1)[0]


@cache
def folder() -> Path:
    """Where the files are."""
    found = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    assert found is not None, f"configs are in none of {_FOLDERS}"
    return found


@cache
def configs() -> Mapping[str, Shipped]:
    """By name: runs first, then models by size, then runs that fine-tune them."""
    runs = [Shipped(path.stem, "run", path) for path in sorted(folder().glob(f"*{SUFFIX}"))]
    found = {
        kind: [
            Shipped(path.stem, kind, path)
            for path in sorted((folder() / kind).glob(f"*{SUFFIX}"), key=_by_number)
        ]
        for kind in ("model", "sft")
    }
    return {each.name: each for each in (*runs, *found["model"], *found["sft"])}


def _by_number(path: Path) -> list[str]:
    """A key that puts 8b before 70b."""
    return [part.zfill(9) if part.isdecimal() else part for part in re.split(r"(\d+)", path.stem)]


def meant(argument: str) -> Shipped | None:
    """The config that an argument names; None when it names none, or a file that is here."""
    return None if os.path.isfile(argument) else configs().get(argument)
