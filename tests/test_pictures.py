"""Pictures in docs/pictures: current, legible in light and dark, and described on their pages."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.planner.draw import COLOURS
from maxpipe.schedule import pictures
from maxpipe.schedule.canvas import BOX_INK, PAGE_WIDTH, Box, Canvas
from maxpipe.schedule.catalog import SCHEDULES, make_schedule
from maxpipe.schedule.table import Costs

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"
SCHEMES = ("light", "dark")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Canvas]]:
    """Return the functions of `scripts/pictures.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("pictures").PICTURES


DRAWN = re.findall(
    r"^        (?:diagrams\.)?(\w+),$", (ROOT / "scripts/pictures.py").read_text(), re.M
)
"""Names of the pictures, without importing the script and jax during collection."""


def test_every_picture_of_script_is_compared(script: dict[str, Callable[[], Canvas]]) -> None:
    assert [*script] == DRAWN


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", DRAWN)
def test_picture_matches_script(
    name: str, script: dict[str, Callable[[], Canvas]], update_golden: bool
) -> None:
    drawn, path = script[name]().svg(), FOLDER / f"{name}.svg"
    if update_golden:
        path.write_text(drawn, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn, "run: python scripts/pictures.py"


# --- legibility ------------------------------------------------------------------------------


def smallest_text(text: str) -> float:
    """Return the smallest font size in pixels if the picture is shown at `PAGE_WIDTH`."""
    root = ElementTree.fromstring(text)
    sizes = [float(each.attrib["font-size"]) for each in root.iter(f"{SVG}text")]
    return min(sizes) * PAGE_WIDTH / float(root.attrib["width"])


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_is_described_and_large_enough(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.attrib["role"] == "img"
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and description is not None
    assert len((title.text or "").split()) >= 3 and len((description.text or "").split()) >= 8
    assert smallest_text(text) >= 11
    assert float(root.attrib["width"]) <= PAGE_WIDTH


@pytest.mark.parametrize("microbatches", [4, 16, 64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_text_of_any_schedule_is_large_enough(name: str, microbatches: int) -> None:
    repeats = SCHEDULES[name].repeats or 2
    schedule = make_schedule(name, stages=8, repeats=repeats, microbatches=microbatches)
    for costs in (Costs(), Costs(1.0, 2.0, 0.5)):
        assert smallest_text(pictures.svg(schedule, costs)) >= 11


def luminance(colour: str) -> float:
    """Return the relative luminance of a color (WCAG 2)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def low_contrast(text: str, scheme: str) -> list[str]:
    """Return the texts of a drawing whose contrast with the box below is less than 4.5."""
    root = ElementTree.fromstring(text)
    style = root.findtext(f"{SVG}style") or ""
    dark = {
        (element, light): dark
        for element, light, dark in re.findall(r'(\w+)\[fill="(#\w+)"\]\{fill:(#\w+)\}', style)
    }

    def fill(element: str, light: str) -> str:
        return dark.get((element, light), light) if scheme == "dark" else light

    boxes = [
        Box(
            x=float(box.attrib["x"]),
            y=float(box.attrib["y"]),
            width=float(box.attrib["width"]),
            height=float(box.attrib["height"]),
            fill=box.attrib["fill"],
        )
        for box in root.iter(f"{SVG}rect")
    ]
    wrong = []
    for label in root.iter(f"{SVG}text"):
        x, y, size = (float(label.attrib[key]) for key in ("x", "y", "font-size"))
        u, v = x + {"start": 3, "middle": 0, "end": -3}[label.attrib["text-anchor"]], y - size / 3
        below = [
            box.fill
            for box in boxes
            if 0 <= u - box.x <= box.width and 0 <= v - box.y <= box.height
        ]
        ratio = contrast(fill("text", label.attrib["fill"]), fill("rect", below[-1]))
        if ratio < 4.5:
            wrong.append(f"{label.text}: {ratio:.2f}")
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_text_contrasts_with_background(path: Path, scheme: str) -> None:
    assert not low_contrast(path.read_text(encoding="utf-8"), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_on_every_color_has_contrast(scheme: str) -> None:
    schedule = make_schedule("interleaved", stages=2, repeats=8, microbatches=2)
    split = make_schedule("zb_v", stages=2, repeats=2, microbatches=4)
    for each in (schedule, split):
        assert not low_contrast(pictures.svg(each), scheme)
    dark = importlib.import_module("maxpipe.planner.draw")._DARK_COLOURS
    canvas = Canvas(width=40.0 * len(COLOURS), height=40)
    for number, colour in enumerate(COLOURS.values()):
        canvas.boxes.append(Box(40.0 * number, 0, 40, 40, colour))
        text = "#ffffff" if colour in dark else BOX_INK
        canvas.write(40.0 * number + 20, 24, colour, 12, text, "m")
    assert not low_contrast(canvas.svg(), scheme)


def test_contrast_test_finds_low_contrast() -> None:
    canvas = Canvas(width=100, height=100)
    canvas.write(50, 50, "light", 12, "#bbbbbb")
    canvas.write(50, 80, "dark", 12, "#333333")
    assert low_contrast(canvas.svg(), "light") == ["light: 1.92"]
    assert low_contrast(canvas.svg(), "dark") == ["dark: 1.37"]


# --- pages -----------------------------------------------------------------------------------


def test_alternative_texts_say_what_is_seen() -> None:
    images = [
        (page.name, " ".join(alt.split()), Path(target).name)
        for page in PAGES
        for alt, target in re.findall(r"!\[([^\]]*)\]\((\S*?)\)", page.read_text(encoding="utf-8"))
        if "pictures/" in target
    ]
    short = [f"{page}: {alt}" for page, alt, _ in images if len(alt.split()) < 5]
    assert not short, "\n".join(short)
    texts = [alt for alt, _ in {(alt, picture) for _, alt, picture in images}]
    assert len(texts) == len(set(texts)), "two pictures have the same alternative text"
