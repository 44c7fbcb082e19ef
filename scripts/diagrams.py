"""Diagrams without data: the mesh, the traffic of each mesh axis, and the architecture."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from maxpipe.schedule.canvas import (
    BOX_INK,
    DEFERRED,
    GREY,
    HUES,
    INK,
    PALE,
    RULE,
    Box,
    Canvas,
    Curve,
    text_width,
)
from maxpipe.schedule.chart import SMALL, TEXT

LIGHT = tuple(light for light, _, _ in HUES)
BLUE, ORANGE, GREEN, VIOLET, ROSE, TEAL = (dark for _, dark, _ in HUES[:6])

AXES = (
    ("stage", "different layers", BLUE),
    ("data", "copies of the parameters, different sequences", GREEN),
    ("fsdp", "shards of the parameters, different sequences", ORANGE),
    ("expert", "different experts, different sequences", VIOLET),
    ("context", "different tokens of the same sequences", TEAL),
    ("tensor", "shards of each layer's heads and MLP", ROSE),
)
"""Mesh axes in the order of `parallel.axes.MESH_AXES`, content of their devices, and a color."""


def mesh_axes() -> Canvas:
    """Draw 16 devices as a mesh of 4 stages x fsdp 2 x tensor 2, and list all axes."""
    canvas = Canvas(width=850)
    canvas.write(16, 28, "16 devices: stage 4 x fsdp 2 x tensor 2", 16, bold=True)
    keys = "mesh.ici_stage=4 mesh.ici_fsdp=2 mesh.ici_tensor=2"
    canvas.write(16, 50, keys, SMALL, GREY)
    left, top, chip, high = 96.0, 98.0, 56.0, 40.0
    group = 2 * chip + 30
    for stage in range(4):
        y = top + stage * (high + 38)
        canvas.boxes.append(Box(left - 12, y - 12, 2 * group + 12, high + 24, PALE, BLUE, 6))
        canvas.write(left - 22, y + 18, "stage", SMALL, BLUE, "r", bold=True)
        canvas.write(left - 22, y + 34, f"{stage}", SMALL, BLUE, "r", bold=True)
        for shard in range(2):
            x = left + shard * (group + 6)
            canvas.boxes.append(Box(x - 4, y - 6, group - 8, high + 12, "#fdebd3", ORANGE, 5))
            for part in range(2):
                u = x + 4 + part * (chip + 8)
                device = 4 * stage + 2 * shard + part
                canvas.boxes.append(Box(u, y, chip, high, LIGHT[4], ROSE, 4))
                canvas.write(u + chip / 2, y + 25, f"{device}", TEXT, BOX_INK, "m", bold=True)
    for shard in range(2):
        x = left + shard * (group + 6)
        canvas.write(x + group / 2 - 8, top - 22, f"fsdp {shard}", SMALL, ORANGE, "m", bold=True)
    bottom = top + 4 * (high + 38) - 12
    for part in range(4):
        u = left + 4 + (part // 2) * (group + 6) + (part % 2) * (chip + 8) + chip / 2
        canvas.write(u, bottom + 6, f"tensor {part % 2}", SMALL, ROSE, "m", bold=True)
    x, y = 440.0, 106.0
    canvas.write(x, y - 18, "axis", SMALL, GREY)
    canvas.write(x + 82, y - 18, "size", SMALL, GREY)
    canvas.write(x + 126, y - 18, "devices along the axis hold", SMALL, GREY)
    sizes = {"stage": 4, "fsdp": 2, "tensor": 2}
    for name, text, colour in AXES:
        canvas.boxes.append(Box(x, y - 6, 394, 1, RULE))
        canvas.write(x, y + 16, name, TEXT, colour, bold=True)
        canvas.write(x + 92, y + 16, f"{sizes.get(name, 1)}", TEXT, INK, "m")
        end = canvas.write_lines(x + 126, y + 16, text, SMALL, width=270)
        y = max(end + 8, y + 30)
    canvas.arrow([(x + 4, y + 12), (x + 4, y + 52)], GREY, 2)
    canvas.write(x + 18, y + 22, "slowest links: dcn_* across slices", SMALL, GREY)
    canvas.write(x + 18, y + 50, "fastest links: neighbors in a slice", SMALL, GREY)
    canvas.height = max(bottom + 24, y + 68)
    canvas.title = "Mesh axes and devices"
    canvas.description = (
        "A grid of 16 numbered devices: four stages as rows, two fsdp shards in each stage, and "
        "two tensor shards in each fsdp shard. A table lists the six axes and the content of "
        "their devices."
    )
    return canvas


class Traffic(NamedTuple):
    """Contents of one panel of `axes`."""

    name: str
    held: tuple[str, str, str, str]
    """Content of each device."""
    sent: str
    when: str


TRAFFIC = (
    Traffic("data", ("W", "W", "W", "W"), "gradients: all-reduce", "once per step"),
    Traffic(
        "fsdp",
        ("W 1/4", "W 2/4", "W 3/4", "W 4/4"),
        "weights: all-gather; gradients: reduce-scatter",
        "per use, window or step (weight_gather)",
    ),
    Traffic(
        "tensor",
        ("heads 0-7", "8-15", "16-23", "24-31"),
        "activations: all-reduce",
        "in every attention and MLP, both passes",
    ),
    Traffic(
        "context",
        ("tokens a", "tokens b", "tokens c", "tokens d"),
        "keys and values: all-gather or ring; or heads: all-to-all",
        "in every attention, both passes",
    ),
    Traffic(
        "expert",
        ("experts 0-1", "2-3", "4-5", "6-7"),
        "tokens: all-to-all, there and back",
        "in every MoE layer, both passes",
    ),
    Traffic(
        "stage",
        ("layers 0-7", "8-15", "16-23", "24-31"),
        "activations forward, gradients back",
        "per microbatch and chunk",
    ),
)
"""Panels of `axes`: content of the devices, sent data, and frequency."""


def axes() -> Canvas:
    """Draw where bytes travel for each mesh axis, in six panels of four devices."""
    canvas = Canvas(width=850)
    canvas.write(16, 28, "Traffic of each mesh axis", 16, bold=True)
    colours = {name: colour for name, _, colour in AXES}
    for number, traffic in enumerate(TRAFFIC):
        panel = _traffic_panel(traffic, colours[traffic.name])
        canvas.append_canvas(panel, 44.0 + (number // 2) * 186, 14.0 + (number % 2) * 414)
    canvas.width, canvas.height = 850, 44 + 3 * 186 + 4
    canvas.title = "Traffic of each mesh axis"
    canvas.description = " ".join(f"{t.name}: {t.sent}, {t.when}." for t in TRAFFIC)
    return canvas


def _traffic_panel(traffic: Traffic, colour: str) -> Canvas:
    width, chip, gap = 408.0, 84.0, 12.0
    if traffic.name == "stage":
        chip, gap = 72.0, 28.0
    canvas = Canvas(width=width, height=180)
    canvas.boxes.append(Box(0, 0, width, 176, PALE, RULE, 8))
    canvas.write(14, 24, traffic.name, TEXT + 1, colour, bold=True)
    canvas.write(80, 24, traffic.when, SMALL, GREY)
    left, top, high = 18.0, 42.0, 44.0
    centers = []
    for number, held in enumerate(traffic.held):
        x = left + number * (chip + gap)
        centers.append(x + chip / 2)
        canvas.boxes.append(Box(x, top, chip, high, "#ffffff", colour, 5))
        canvas.write(x + chip / 2, top + 27, held, SMALL, INK, "m")
    below = top + high
    if traffic.name == "stage":
        for one, other in pairwise(centers):
            start, end = one + chip / 2 + 2, other - chip / 2 - 2
            canvas.arrow([(start, top + 14), (end, top + 14)], colour, 2.5)
            canvas.arrow([(end, top + 32), (start, top + 32)], DEFERRED, 2.5)
    canvas.boxes.append(Box(left, below + 40, width - 2 * left, 34, "#ffffff", colour, 5))
    canvas.write(width / 2, below + 62, traffic.sent, SMALL, INK, "m")
    for center in centers if traffic.name != "stage" else ():
        canvas.arrow([(center, below + 38), (center, below + 3)], colour, 2, both=True)
    return canvas


class Part(NamedTuple):
    """A box of the architecture diagram."""

    x: float
    y: float
    title: str
    lines: tuple[str, ...]
    hue: int
    width: float = 182.0


PARTS = {
    "config": Part(16, 150, "config", ("keys from YAML files", "and the command line"), 7),
    "model": Part(232, 50, "model description", ("layers, parameters,", "saved activations"), 2),
    "table": Part(
        232, 150, "schedule table", ("work of every stage", "in every tick, verified"), 2
    ),
    "mesh": Part(232, 250, "mesh and sharding", ("axes of devices,", "shards of each array"), 2),
    "engine": Part(448, 100, "engine", ("runs the table over the", "chunks of the model"), 0),
    "planner": Part(448, 250, "planner", ("predicted memory and", "time, layout search"), 1),
    "step": Part(652, 100, "compiled step", ("one XLA program:", "loss, gradients, update"), 0),
    "loop": Part(652, 250, "training loop", ("steps, evaluation,", "memory check, metrics"), 0),
    "data": Part(448, 372, "data", ("batches computed from", "the step number"), 3),
    "checkpoints": Part(652, 372, "checkpoints", ("state with checksums,", "for any layout"), 3),
}
"""Boxes of the architecture diagram, by name."""
_PART_HEIGHT = 74.0


def architecture() -> Canvas:
    """Draw the path from a config to a compiled step and the training loop."""
    canvas = Canvas(width=850, height=464)
    canvas.write(16, 28, "From a config to a training run", 16, bold=True)
    for part in PARTS.values():
        light, _, pale = HUES[part.hue]
        canvas.boxes.append(Box(part.x, part.y, part.width, _PART_HEIGHT, pale, light, 7))
        canvas.write(part.x + 12, part.y + 24, part.title, TEXT + 1, INK, bold=True)
        for number, line in enumerate(part.lines):
            canvas.write(part.x + 12, part.y + 44 + 18 * number, line, SMALL, INK)
            assert text_width(line, SMALL) < part.width - 12, line
    middle = _PART_HEIGHT / 2

    def right(name: str) -> tuple[float, float]:
        return PARTS[name].x + PARTS[name].width + 2, PARTS[name].y + middle

    def left(name: str) -> tuple[float, float]:
        return PARTS[name].x - 3, PARTS[name].y + middle

    # The three descriptions start at one vertical line and end at another.
    inputs = ("model", "table", "mesh")
    for x in (PARTS["model"].x - 18, PARTS["engine"].x - 18):
        ends = [(x, left(name)[1]) for name in ("model", "mesh")]
        canvas.curves.append(Curve(ends, GREY, 2))
    for name in inputs:
        canvas.arrow([(left(name)[0] - 15, left(name)[1]), left(name)], GREY, 2)
        canvas.curves.append(Curve([right(name), (right(name)[0] + 16, right(name)[1])], GREY, 2))
    for name in ("engine", "planner"):
        canvas.arrow([(left(name)[0] - 15, left(name)[1]), left(name)], GREY, 2)
    start = right("config")
    canvas.curves.append(Curve([start, (PARTS["model"].x - 18, start[1])], GREY, 2))
    canvas.arrow([right("engine"), left("step")], GREY, 2)
    canvas.arrow([right("planner"), left("loop")], GREY, 2)
    x = PARTS["step"].x + 91
    canvas.arrow([(x, PARTS["step"].y + 77), (x, PARTS["loop"].y - 3)], GREY, 2)
    canvas.arrow([(x, PARTS["loop"].y + 77), (x, PARTS["checkpoints"].y - 3)], GREY, 2, both=True)
    u, v = right("data")
    end = (left("loop")[0], left("loop")[1] + 24)
    canvas.arrow([(u, v), (u + 9, v), (u + 9, end[1]), end], GREY, 2)
    canvas.title = "Architecture of maxpipe"
    canvas.description = (
        "The config selects a model description, a schedule table and a mesh. The engine runs the "
        "table over the chunks of the model, and is compiled to one step. The training loop runs "
        "the step on batches of data, and saves and restores checkpoints. The planner predicts "
        "memory and time from the same descriptions."
    )
    return canvas
