"""Draw the pictures in docs/pictures that no command draws.

    python scripts/pictures.py            # writes all of them
    python scripts/pictures.py resume     # writes docs/pictures/resume.svg

Schedules and plans are computed. Measured values come from benchmarks/, which also contains the
programs that measure them. `scripts/diagrams.py` contains the diagrams without data.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diagrams

from maxpipe.cli import main as maxpipe
from maxpipe.planner.draw import draw_memory_bars
from maxpipe.schedule.canvas import GREY, HUES, LIMIT, PALE, SAVED, Box, Canvas, Label, text_width
from maxpipe.schedule.catalog import SCHEDULES, make_schedule
from maxpipe.schedule.chart import SMALL, TEXT, Axis, Chart
from maxpipe.schedule.pictures import Timeline, list_work, shade_of
from maxpipe.schedule.table import Costs, Schedule
from maxpipe.telemetry.curves import Style, draw_curves

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
BENCHMARKS = ROOT / "benchmarks"
BLUE, ORANGE, GREEN, VIOLET, ROSE = (dark for _, dark, _ in HUES[:5])


# Schedules.


def schedules() -> Canvas:
    """Draw 1F1B, interleaved and zero bubble on one time axis."""
    width, left, lane, pitch = 850.0, 70.0, 20.0, 23.0
    make = partial(make_schedule, stages=4, microbatches=8)
    drawn = (
        ("1F1B", make("1f1b")),
        ("Interleaved, 2 repeats", make("interleaved", repeats=2)),
        ("Zero bubble (zb_v)", make("zb_v", repeats=2)),
    )
    costs = [Costs(*(1 / schedule.num_repeats,) * 3) for _, schedule in drawn]
    ends = [float(Timeline(*each).ticks[-1]) for each in zip([s for _, s in drawn], costs)]  # noqa: B905
    unit = (width - left - 150) / max(ends)
    canvas = Canvas(width=width)
    y = 14.0
    for (title, schedule), cost, end in zip(drawn, costs, ends, strict=True):
        canvas.write(left, y + 18, title, TEXT + 1, bold=True)
        top = y + 28
        for stage in range(schedule.num_stages):
            canvas.boxes.append(Box(left, top + stage * pitch, end * unit, lane, PALE))
            canvas.write(left - 8, top + stage * pitch + 15, f"stage {stage}", SMALL, GREY, "r")
        _draw_work(canvas, schedule, cost, (left, top), (unit, lane, pitch))
        x = left + end * unit + 14
        canvas.write(x, top + 36, f"bubble {schedule.idle_fraction():.1%}", TEXT, bold=True)
        canvas.write(x, top + 58, f"saved {_saved_layers(schedule)}", TEXT)
        canvas.write(x, top + 76, "microbatches", SMALL, GREY)
        y = top + 4 * pitch + 8
    for time in range(0, round(max(ends)) + 1, 3):
        x = left + time * unit
        canvas.boxes.append(Box(x - 0.5, y, 1, 5, GREY))
        canvas.write(x, y + 19, f"{time}", SMALL, GREY, "m")
    axis = "time in forward passes of one stage; forward, input and weight gradient cost the same"
    canvas.write(left, y + 38, axis, SMALL, GREY)
    y = _schedules_legend(canvas, left, y + 66)
    text = (
        "Saved: activations and inputs of deferred weight gradients that one stage stores, in "
        "microbatches through all layers of the stage. With 2 repeats, a chunk holds half of these "
        "layers, so 11 saved chunks are 5.5 microbatches. GPipe saves every microbatch of a step; "
        "with these schedules, the number does not grow with the microbatches of a step."
    )
    y = canvas.write_lines(16, y, text, SMALL, GREY, width=width - 32)
    canvas.height = y
    canvas.title = "1F1B, interleaved and zero-bubble schedules on one time axis"
    canvas.description = "4 stages and 8 microbatches. " + ". ".join(
        f"{title}: bubble {schedule.idle_fraction():.1%}, "
        f"saved microbatches {_saved_layers(schedule)}"
        for title, schedule in drawn
    )
    return canvas


def _draw_work(
    canvas: Canvas,
    schedule: Schedule,
    costs: Costs,
    origin: tuple[float, float],
    scale: tuple[float, float, float],
) -> None:
    """Draw all slots, given the origin, and the unit of time, lane height and lane distance."""
    times, (left, top), (unit, lane, pitch) = Timeline(schedule, costs), origin, scale
    for work in list_work(schedule):
        shade = shade_of(work.kind, work.repeat)
        x, y = left + times.start(work) * unit, top + work.stage * pitch
        width, inside = costs.of(work.kind) * unit, 0.5 if shade.line else 0.0
        place = (x + 0.6 + inside, y + inside, width - 1.2 - 2 * inside, lane - 2 * inside)
        canvas.boxes.append(Box(*place, shade.fill, shade.line, 2.0))
        canvas.labels.append(Label(x + width / 2, y + 14.5, f"{work.microbatch}", 12, shade.text))


def _saved_layers(schedule: Schedule) -> str:
    """Return the buffers for saved activations and deferred weight gradients of a stage, in
    microbatches through all layers of the stage.
    """
    saved = f"{schedule.num_stash / schedule.num_repeats:g}"
    if not schedule.mixed:
        return saved
    return f"{saved} + {schedule.num_deferred / schedule.num_repeats:g} deferred"


def _schedules_legend(canvas: Canvas, x: float, y: float) -> float:
    entries = (
        ("F", 0, "forward"),
        ("B", 0, "backward"),
        ("I", 0, "input gradient"),
        ("W", 0, "weight gradient"),
        ("F", 1, "second repeat"),
    )
    for kind, repeat, text in entries:
        shade = shade_of(kind, repeat)  # type: ignore[arg-type]
        canvas.boxes.append(Box(x, y - 13, 18, 17, shade.fill, shade.line, 3))
        canvas.labels.append(Label(x + 9, y, kind, 12, shade.text))
        canvas.write(x + 24, y, text, SMALL)
        x += 24 + text_width(text, SMALL) + 16
    canvas.boxes.append(Box(x, y - 13, 18, 17, PALE, GREY, 3))
    canvas.write(x + 24, y, "idle (bubble)", SMALL)
    return y + 28


def memory_bubble() -> Canvas:
    """Draw the saved activations of all schedules against their bubble, for two cost ratios."""
    schedule_of = {
        name: make_schedule(
            name, stages=8, repeats=1 if name == "1f1b" else spec.repeats or 4, microbatches=32
        )
        for name, spec in SCHEDULES.items()
    }
    canvas = Canvas(width=850)
    for number, (text, costs, repeated) in enumerate(
        (
            ("F:I:W = 1:1:1 (activations saved)", Costs(), False),
            ("F:I:W = 1:2:1 (full recomputation)", Costs(1.0, 2.0, 1.0), True),
        )
    ):
        chart = Chart(
            Axis("bubble (% of the step)", 0, 50 if repeated else 25),
            Axis("", 3, 80, log=True, ticks=(4, 8, 16, 32, 64)),
            left=52,
            top=92,
            width=345,
            height=330,
        )
        chart.canvas.write(52, 66, text, TEXT, bold=True)
        spots = {}
        for name, schedule in schedule_of.items():
            peak = schedule.num_stash + schedule.num_deferred * schedule.mixed
            spots[name] = (100 * schedule.idle_fraction(costs), peak / schedule.num_repeats)
        _label_points(chart, spots)
        canvas.append_canvas(chart.canvas, 0, 425.0 * number)
    canvas.width = 850
    canvas.write(
        16, 28, "Activation memory against bubble, 8 stages, 32 microbatches", 16, bold=True
    )
    canvas.write(52, 84, "saved activations (microbatches, log scale)", SMALL, GREY)
    text = (
        "Saved activations: buffers of one stage for activations and deferred weight gradients, in "
        "microbatches through all layers of the stage. interleaved, circular and breadth_first "
        "have 4 repeats."
    )
    y = canvas.write_lines(16, canvas.height + 16, text, SMALL, GREY, width=818)
    canvas.height = y
    canvas.title = "Activation memory against bubble for all schedules"
    canvas.description = (
        "Two scatter plots with one point per schedule. Schedules with a split backward pass have "
        "the smallest bubbles if F, I and W cost the same, and the largest with full recomputation."
    )
    return canvas


def _label_points(chart: Chart, spots: dict[str, tuple[float, float]]) -> None:
    """Draw points with names. Points at the same place share a label, and labels do not overlap."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in spots.items():
        names.setdefault((round(x, 1), round(y, 2)), []).append(name)
    taken = [(u - 6, v - 6, u + 6, v + 6) for u, v in (chart.place(*spot) for spot in names)]
    right = chart.left + chart.width + 20
    for spot, shared in names.items():
        u, v = chart.place(*spot)
        text, colour = ", ".join(shared), _family_colour(shared[0])
        chart.point(*spot, colour, 5)
        width = text_width(text, SMALL)
        for dx, dy in (
            (10, 5),
            (-10 - width, 5),
            (-width / 2, -11),
            (-width / 2, 21),
            (8, -9),
            (8, 20),
        ):
            place = (u + dx, v + dy - 11, u + dx + width, v + dy + 3)
            inside = chart.left < place[0] and place[2] < right
            if inside and not any(_overlap(place, other) for other in taken):
                break
        else:
            raise ValueError(f"no place for the label {text}")
        taken.append(place)
        chart.canvas.write(place[0], v + dy, text, SMALL, colour)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    return not apart


def _family_colour(name: str) -> str:
    """Return the color of a schedule: grows with M, one forward one backward, split backward."""
    if name in ("gpipe", "circular", "breadth_first"):
        return ROSE
    return BLUE if name in ("1f1b", "interleaved") else GREEN


# Measured values.


def table_rows(page: str, first_cell: str) -> dict[str, list[str]]:
    """Return the rows of the table on a benchmark page whose header starts with these cells."""
    text = (BENCHMARKS / page).read_text(encoding="utf-8")
    block = text[text.index(f"| {first_cell}") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


def memory_microbatches() -> Canvas:
    """Draw temporary memory against the number of microbatches."""
    rows = table_rows("schedules.md", "program | M = 8")
    counts = (8, 16, 32, 64)
    chart = Chart(
        Axis("microbatches per step", 8, 64, log=True, ticks=counts),
        Axis("temporary memory (MiB, log scale)", 10, 4000, log=True, ticks=(10, 100, 1000)),
        "Temporary memory against microbatches",
        width=360.0,
        height=280.0,
    )
    lines = (
        ("circular, autodiff through the scan", "circular, autodiff", ROSE),
        ("zb_v, gather per step, activations saved by name", "zb_v, saved by name", GREEN),
        ("gpipe, one repeat, gather per iteration", "gpipe", ORANGE),
        ("interleaved, gather per iteration", "interleaved", BLUE),
    )
    for row, name, colour in lines:
        points = [(m, float(value)) for m, value in zip(counts, rows[row], strict=True)]
        chart.line(points, colour)
        for point in points:
            chart.point(*point, colour)
        x, y = chart.place(*points[-1])
        shift = {"zb_v": -14, "gpip": 8}.get(name[:4], 0)
        chart.canvas.write(x + 12, y + shift - 3, name, TEXT, colour, bold=True)
        change = f"{points[0][1]:,} to {points[-1][1]:,} MiB"
        chart.canvas.write(x + 12, y + shift + 14, change, SMALL, GREY)
    chart.canvas.width = 640
    chart.note(
        "Value and gradients of a small model (benchmarks/schedules.md) in float32 on 8 virtual "
        "CPU devices, 4 stages x fsdp 2; memory as reported by the compiler."
    )
    chart.canvas.title = "Temporary memory against the number of microbatches"
    chart.canvas.description = "; ".join(
        f"{name}: {rows[row][0]} MiB at 8 and {rows[row][-1]} MiB at 64 microbatches"
        for row, name, _ in lines
    )
    return chart.canvas


def _training(name: str) -> dict[str, Any]:
    text = (BENCHMARKS / "training_curves.json").read_text(encoding="utf-8")
    return json.loads(text)[name]


def resume() -> Canvas:
    """Draw the losses of a run that is killed and resumed, over those of an uninterrupted run."""
    runs = {name: curves["train/loss"] for name, curves in _training("resume").items()}
    killed, last = runs["before"][-1][0], runs["whole"][-1][0]
    values = [value for _, value in runs["whole"]]
    chart = Chart(
        Axis("step", 0, last),
        Axis("training loss (nats per byte)", 2.0, 6.0, ticks=(2, 3, 4, 5, 6)),
        "A killed run resumes with the same losses",
        height=240,
    )
    assert min(values) > 2.0 and max(values) < 6.0
    whole = dict(map(tuple, runs["whole"]))
    resumed = [point for point in runs["after"] if point[0] > 40]
    error = max(abs(whole[step] - value) for step, value in (*runs["before"], *resumed))
    for step in range(20, last + 1, 20):
        x, y = chart.place(step, 2.0)
        chart.canvas.boxes.append(Box(x - 5, y - 5, 10, 10, HUES[3][0], VIOLET, 2))
    chart.line(runs["whole"], SAVED, 9)
    chart.line(runs["before"], BLUE, 3)
    chart.line(resumed, ORANGE, 3, "7 4")
    chart.vertical(killed, "", LIMIT)
    chart.vertical(40, "", ORANGE)
    (x, y), (u, _) = chart.place(40, 5.2), chart.place(killed, 5.2)
    chart.canvas.arrow([(u, y), (x, y)], LIMIT, 2)
    chart.canvas.write(u + 6, y - 20, f"kill -9 after step {killed}", SMALL)
    chart.canvas.write(u + 6, y + 5, "resumes at step 40", SMALL)
    chart.legend(
        [
            ("uninterrupted run", SAVED, ""),
            ("killed run", BLUE, ""),
            ("after the restart", ORANGE, "7 4"),
        ]
    )
    chart.canvas.boxes.append(
        Box(chart.left + 5, chart.canvas.height, 10, 10, HUES[3][0], VIOLET, 2)
    )
    chart.canvas.write(
        chart.left + 30, chart.canvas.height + 10, "checkpoint, every 20 steps", SMALL
    )
    chart.canvas.height += 20
    chart.note(
        f"Steps 41 to {killed} are computed again. Largest difference from the uninterrupted run: "
        f"{error:g}."
    )
    chart.canvas.title = "Losses of a killed and resumed run"
    chart.canvas.description = (
        f"The run is killed after step {killed} and resumes from the checkpoint at step 40. Its "
        "losses equal those of an uninterrupted run."
    )
    return chart.canvas


def distill() -> Canvas:
    """Draw the validation losses of students with and without a teacher, for three seeds."""
    runs = json.loads((BENCHMARKS / "distill.json").read_text(encoding="utf-8"))
    shown = {
        name: curves for name, curves in runs.items() if name.startswith(("alone-", "taught-"))
    }
    style = Style(
        band=True,
        titles={"loss": "Validation loss of two students"},
        units={"eval/loss": "cross-entropy (nats per byte)"},
        names={"alone  eval/loss": "alone", "taught  eval/loss": "taught"},
        note="A toy task: 2 layers of width 32, 120 steps, seeds 0 to 2.",
    )
    return draw_curves(shown, style)


def grpo() -> Canvas:
    """Draw the reward and entropy of the example in docs/tutorials/grpo.md."""
    style = Style(
        smooth=7,
        titles={"reward": "Reward", "entropy": "Entropy of the policy"},
        units={"rollout/reward": "fraction of correct completions"},
        names={"rollout/reward": "mean of 7 records", "train/entropy": "mean of 7 records"},
        note="A toy task: sums of two digits, 2 layers of width 64, one seed. Faint: every record.",
    )
    return draw_curves(_training("grpo"), style)


def preferences() -> Canvas:
    """Draw the margin and loss of the example in docs/tutorials/preferences.md."""
    style = Style(
        titles={"margin": "Reward margin", "loss": "DPO loss"},
        units={
            "train/margin": "chosen minus rejected (nats x beta)",
            "train/loss": "mean over pairs",
        },
        names={
            "train/margin": "training pairs",
            "eval/margin": "held-out pairs",
            "train/loss": "training pairs",
            "eval/loss": "held-out pairs",
        },
        note="A toy task that saturates: 36 synthetic questions, 2 layers of width 32, one seed.",
    )
    return draw_curves(_training("preferences"), style)


def sft() -> Canvas:
    """Draw the losses and accuracy of the example in docs/tutorials/finetune.md."""
    runs = _training("sft")
    accuracy = runs["chat"]["eval/sums/accuracy"]
    best, last = max(accuracy, key=lambda point: (point[1], -point[0]))[0], accuracy[-1][0]
    style = Style(
        titles={"loss": "Loss", "accuracy": "Accuracy on the multiple-choice task"},
        units={
            "train/loss": "cross-entropy (nats per token)",
            "eval/sums/accuracy": "fraction of questions",
        },
        names={
            "train/loss": "training conversations",
            "eval/loss": "held-out conversations",
            "eval/sums/accuracy": "task sums",
        },
        marks={best: f"best accuracy, step {best}", last: f"stopped early, step {last}"},
        note="A toy task: sums of two digits, 4 layers of width 64, one seed. train.steps is 300.",
    )
    return draw_curves(runs, style)


# Plans.

_ADAPTED = (
    "llama3-8b --topology v5e:2x4 train.steps=1000 train.batch_size=32 "
    "train.sequence_length=2048 mesh.ici_stage=2 mesh.ici_fsdp=4 pipeline.repeats=2 "
    "pipeline.microbatches=8 model.param_dtype=bfloat16"
)


def adapters() -> Canvas:
    """Draw the predicted memory of full fine-tuning and of an adapter with a quantized base."""
    plans = {
        "full fine-tuning": _plan(_ADAPTED),
        "LoRA, nf4 base": _plan(f"{_ADAPTED} adapter.rank=16 adapter.base_quantization=nf4"),
    }
    canvas = draw_memory_bars(plans)
    canvas.title = "Predicted memory of full fine-tuning and of LoRA"
    return canvas


def _plan(arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert maxpipe(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(out.getvalue())


PICTURES: dict[str, Callable[[], Canvas]] = {
    draw.__name__: draw
    for draw in (
        schedules,
        memory_bubble,
        memory_microbatches,
        resume,
        distill,
        grpo,
        preferences,
        sft,
        adapters,
        diagrams.mesh_axes,
        diagrams.axes,
        diagrams.architecture,
    )
}
"""Function that draws each picture, by name."""


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(PICTURES[name]().svg(), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
