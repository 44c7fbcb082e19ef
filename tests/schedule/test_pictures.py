"""SVG and PNG images and Perfetto traces: complete, correctly placed and deterministic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxpipe.cli import main
from maxpipe.schedule import draw, pictures
from maxpipe.schedule.catalog import SCHEDULES, make_forward_schedule, make_schedule
from maxpipe.schedule.table import Costs, Ring, Schedule

Golden = Callable[[str, str], None]
SVG = "{http://www.w3.org/2000/svg}"
UNEQUAL = Costs(1.0, 1.5, 0.5)


def small(name: str, **more: Any) -> Schedule:
    repeats = SCHEDULES[name].repeats or 2
    return make_schedule(name, stages=3, repeats=repeats, microbatches=4, **more)


def num_slots(schedule: Schedule) -> int:
    return sum(int(slots.active.sum()) for _, slots in schedule.kinds)


def slot_boxes(text: str) -> dict[str, tuple[float, float, float, float]]:
    """Return {tooltip of a box: (x, y, width, height)}."""
    found = {}
    for box in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            assert title.text not in found
            x, y, width, height = (float(box.attrib[n]) for n in ("x", "y", "width", "height"))
            found[title.text] = (x, y, width, height)
    return found


@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
def test_svg_matches_golden(name: str, golden: Golden) -> None:
    schedule = make_schedule(name, stages=2, repeats=2, microbatches=3)
    golden(f"schedule-{name}.svg", pictures.svg(schedule, UNEQUAL))


@pytest.mark.parametrize("costs", [Costs(), UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_one_box_per_slot_without_overlap(name: str, costs: Costs) -> None:
    schedule = small(name)
    text = pictures.svg(schedule, costs)
    assert text == pictures.svg(schedule, costs)
    boxes = slot_boxes(text)
    assert len(boxes) == num_slots(schedule)
    size = ElementTree.fromstring(text).attrib
    lanes: dict[int, list[tuple[float, float]]] = {}
    for x, y, width, height in boxes.values():
        assert 0 < x < x + width < float(size["width"])
        assert 0 < y < y + height < float(size["height"])
        lanes.setdefault(int(y), []).append((x, x + width))
    assert len(lanes) % schedule.num_stages == 0
    for lane in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(lane)):
            assert end < start


def test_svg_box_width_is_proportional_to_slot_cost() -> None:
    boxes = slot_boxes(pictures.svg(small("zb_h1"), Costs(2.0, 3.0, 1.0)))
    widths: dict[str, set[float]] = {}
    for title, (_, _, width, _) in boxes.items():
        widths.setdefault(title.partition(" of ")[0], set()).add(width)
    forward, backward, weight = (
        widths[name].pop() for name in ("forward", "input gradient", "weight gradient")
    )
    assert not any(widths.values()), "slots of one kind have equal width"
    assert (forward + 1.5) / 2 == pytest.approx((backward + 1.5) / 3, abs=0.01)
    # This box has an outline, half of which is drawn outside.
    assert weight + 1 + 1.5 == pytest.approx((forward + 1.5) / 2, abs=0.02)


def test_svg_has_microbatches_axis_legend_and_summary() -> None:
    schedule = small("zb_v")
    texts = [
        text.text or ""
        for text in ElementTree.fromstring(pictures.svg(schedule, UNEQUAL)).iter(f"{SVG}text")
    ]
    count = Counter(texts)
    for line in draw.summary(schedule, UNEQUAL).splitlines():
        assert line in " ".join(texts)
    first, second = "chunks 0 to 2, first to last stage", "chunks 3 to 5, back to the first stage"
    for word in (f"repeat 0: {first}", f"repeat 1: {second}", "chunks 2, 3", "peak"):
        assert count[word] == 1
    for word in ("stage 0", "stage 2", "F forward", "W weight gradient", "idle (bubble)"):
        assert count[word] == 1
    assert count["width: time, I = 1.5 F, W = 0.5 F"] == 1
    for microbatch in map(str, range(4)):
        assert count[microbatch] >= 3 * 2 * 3
    assert count[str(schedule.num_ticks - 2)] + count[str(schedule.num_ticks - 1)] >= 1
    assert [str(depth) for depth in schedule.stash_depth().max(axis=0)] == texts[-3:]


def test_svg_edge_cases(tmp_path: Path) -> None:
    file = tmp_path / "a&b<c>.csv"
    file.write_text("0F0,0B0\n")
    named = pictures.svg(make_schedule(f"file:{file}", stages=1, microbatches=1))
    assert "a&amp;b&lt;c&gt;.csv" in named and ElementTree.fromstring(named) is not None
    only = make_forward_schedule(Ring(3, 2), 5)
    assert "polygon" not in pictures.svg(only) and "saved" in pictures.svg(only)
    assert '"ph": "C"' not in pictures.perfetto_trace(only)
    many = pictures.svg(make_schedule("interleaved", stages=1, repeats=12, microbatches=1))
    assert "repeat 7, and so on" in many and "repeat 8<" not in many
    # The size is bounded for any number of ticks; indices that do not fit are omitted.
    long = make_schedule("interleaved", stages=1, repeats=2, microbatches=1000)
    for costs in (Costs(), Costs(1.0, 1.0, 1000.0)):
        picture = ElementTree.fromstring(pictures.svg(long, costs))
        assert float(picture.attrib["width"]) <= 850
        assert float(picture.attrib["height"]) < 2000
    # All ticks may be much shorter or much longer than one time unit.
    for cost in (1e-6, 1e6):
        boxes = slot_boxes(pictures.svg(small("gpipe"), Costs(cost, cost, cost)))
        assert min(width for _, _, width, _ in boxes.values()) > 10


@pytest.mark.parametrize("microbatches", [8, 16, 32, 64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_long_schedule_continues_in_rows(name: str, microbatches: int) -> None:
    repeats = SCHEDULES[name].repeats or 2
    schedule = make_schedule(name, stages=4, repeats=repeats, microbatches=microbatches)
    text = pictures.svg(schedule)
    root = ElementTree.fromstring(text)
    boxes = slot_boxes(text)
    assert len(boxes) == num_slots(schedule)
    assert float(root.attrib["width"]) <= 850
    assert all(x + width < 850 for x, _, width, _ in boxes.values())
    # Every row has the lanes of all stages.
    lanes = {int(y) for _, y, _, _ in boxes.values()}
    stages = [
        each.text for each in root.iter(f"{SVG}text") if (each.text or "").startswith("stage ")
    ]
    assert len(stages) % schedule.num_stages == 0 and len(lanes) <= len(stages)


def test_deferred_gradients_are_part_of_saved_chunks() -> None:
    schedule = small("zb_v")
    deferred, saved = schedule.deferred_depth(), schedule.stash_depth()
    assert (deferred <= saved).all() and deferred.min() == 0
    assert deferred.max() == schedule.num_deferred
    areas = [
        area.attrib for area in ElementTree.fromstring(pictures.svg(schedule)).iter(f"{SVG}polygon")
    ]
    assert len(areas) == 2 * schedule.num_stages and len({area["fill"] for area in areas}) == 2


def test_svg_stash_depths_are_to_scale() -> None:
    schedule = small("circular")
    areas = list(ElementTree.fromstring(pictures.svg(schedule)).iter(f"{SVG}polygon"))
    assert len(areas) == 3
    depths = schedule.stash_depth()
    for stage, area in enumerate(areas):
        heights = [float(point.split(",")[1]) for point in area.attrib["points"].split()]
        steps = 1 + np.count_nonzero(np.diff(np.append(0, depths[:, stage])))
        assert max(heights) - min(heights) == pytest.approx(
            14 * depths[:, stage].max() / depths.max()
        )
        assert len(set(pairwise(heights))) <= 2 * steps + 1


@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
def test_png_matches_svg(name: str, tmp_path: Path) -> None:
    schedule = small(name)
    path = tmp_path / "drawing"  # works with any file name
    pictures.png(schedule, path, UNEQUAL)
    text = pictures.svg(schedule, UNEQUAL)
    root = ElementTree.fromstring(text)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == tuple(2 * int(root.attrib[side]) for side in ("width", "height"))
        for box in root.iter(f"{SVG}rect"):
            if box.find(f"{SVG}title") is None:
                continue
            x, y, width = (float(box.attrib[key]) for key in ("x", "y", "width"))
            # Near the upper edge, above the number.
            pixel = image.getpixel((round(2 * (x + width / 2)), round(2 * (y + 3))))
            assert isinstance(pixel, tuple)
            assert "#" + bytes(pixel[:3]).hex() == box.attrib["fill"]


@pytest.mark.parametrize("costs", [Costs(), UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_perfetto_trace_has_every_slot_message_and_depth(name: str, costs: Costs) -> None:
    schedule = small(name)
    trace = json.loads(pictures.perfetto_trace(schedule, costs))
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        by_phase.setdefault(event["ph"], []).append(event)
    slices = by_phase["X"]
    assert len(slices) == num_slots(schedule)
    names = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    assert names == {stage: f"stage {stage}" for stage in range(3)}
    end = 1000 * float(schedule.tick_costs(costs).sum())
    for stage in range(3):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == stage)
        assert own[0][0] >= 0 and own[-1][1] <= end + 1e-6
        assert all(first[1] <= then[0] + 1e-6 for first, then in pairwise(own))
    for event in slices:
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", event["name"])
        assert match
        chunk, kind, microbatch = match.groups()
        args = event["args"]
        assert (int(chunk), int(microbatch)) == (args["chunk"], args["microbatch"])
        assert schedule.ring.locate_chunk(args["chunk"]) == (event["tid"], args["repeat"])
        (slots,) = (slots for own, slots in schedule.kinds if own == kind)
        assert slots.microbatch[args["tick"], event["tid"]] == args["microbatch"]
        price = {"F": costs.forward, "B": costs.backward, "I": costs.input, "W": costs.weight}
        assert event["dur"] == 1000 * price[kind]
    # Each arrow goes from inside a slot to the later start of a slot on another stage.
    starts, ends = ({e["id"]: e for e in by_phase[phase]} for phase in "sf")
    assert starts.keys() == ends.keys() and len(starts) == num_messages(schedule)
    for number, start in starts.items():
        assert start["tid"] != ends[number]["tid"] and start["ts"] < ends[number]["ts"]
        assert any(
            e["tid"] == start["tid"] and e["ts"] < start["ts"] < e["ts"] + e["dur"] for e in slices
        )
        assert any(
            e["tid"] == ends[number]["tid"] and e["ts"] == ends[number]["ts"] for e in slices
        )
    # The counters hold the depths.
    for stage, depths in enumerate(schedule.stash_depth().T):
        own = [e for e in by_phase["C"] if e["name"] == f"saved chunks, stage {stage}"]
        assert max(e["args"]["chunks"] for e in own) == depths.max()
        assert own[-1]["args"]["chunks"] == 0 and own[-1]["ts"] == pytest.approx(end)


def num_messages(schedule: Schedule) -> int:
    """Return the number of messages between consecutive chunks on different stages."""
    ring = schedule.ring
    homes = [ring.locate_chunk(chunk)[0] for chunk in range(ring.num_chunks)]
    hops = sum(one != two for one, two in pairwise(homes))
    return 2 * hops * schedule.num_microbatches


def test_drawing_without_png_does_not_import_pillow_or_jax() -> None:
    code = (
        "import sys\n"
        "from maxpipe.schedule import catalog, pictures\n"
        "drawn = catalog.make_schedule('zb_v', stages=2, repeats=2, microbatches=2)\n"
        "pictures.svg(drawn), pictures.perfetto_trace(drawn)\n"
        "print([name for name in ('jax', 'PIL') if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_compare_svg_stacks_schedules_vertically(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "both.svg"
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["schedule", "--compare", "1f1b,zb_v", *sizes, "--svg", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {path}\n")
    both = path.read_text()
    alone = [
        pictures.draw_schedule(make_schedule(name, stages=2, repeats=r, microbatches=4))
        for name, r in (("1f1b", 1), ("zb_v", 2))
    ]
    assert f'height="{round(sum(each.height for each in alone))}"' in both
    titles = [label.text for each in alone for label in each.labels if label.bold]
    assert all(title in both for title in titles) and len(titles) == 2


@pytest.mark.parametrize("ending", ["svg", "png", "csv", "json"])
def test_out_format_follows_file_extension(tmp_path: Path, ending: str) -> None:
    kind = {"json": "perfetto"}.get(ending, ending)
    one, other = tmp_path / f"a.{ending}", tmp_path / "b"
    assert main(["schedule", "zb_v", "--out", str(one), f"--{kind}", str(other)]) == 2
    assert main(["schedule", "zb_v", "--out", str(one)]) == 0
    assert main(["schedule", "zb_v", f"--{kind}", str(other)]) == 0
    assert one.read_bytes() == other.read_bytes()
