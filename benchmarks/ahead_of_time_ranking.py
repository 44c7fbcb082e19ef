"""Compare the predicted order of layouts with the order from the TPU compiler.

    python benchmarks/ahead_of_time_ranking.py                     # prints the table
    python benchmarks/ahead_of_time_ranking.py --write             # and ahead_of_time_ranking.md
    python benchmarks/ahead_of_time_ranking.py --keep /tmp/texts   # also keeps the programs

No TPU is used. libtpu compiles the train step of llama3-8b for 32 chips in different layouts on
this machine (`pip install '.[tpu]'`). The compiler time of a layout is the compiler's cycle
estimate on the busiest stages, plus the exposed time of collectives. The compiler has no estimate
for collectives, so their time is computed from their bytes at the published link bandwidth. A
synchronous collective is fully exposed. An asynchronous collective is exposed for the time that
exceeds the estimated cycles between its start and done operations. No cycle is counted as
overlapping with two collectives of the same device group. Each program is compiled in a separate
process. Results are cached in `--cache` by a digest of sources and settings.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scipy.stats import spearmanr

if TYPE_CHECKING:
    from maxpipe.config.schema import Config
    from maxpipe.hardware import Hardware
    from maxpipe.planner.hlo_profile import Profile

TOPOLOGY, MODEL = "v5p:2x4x4", "llama3-8b"
ROWS, TOKENS = 128, 4096
LEAST, AMONG = 0.9, 3
"""Required rank correlation, and maximum compiler rank of the layout predicted to be fastest."""


class Layout(NamedTuple):
    """A layout, which is one row of the table."""

    stage: int
    data: int
    fsdp: int
    tensor: int
    schedule: str
    repeats: int
    microbatches: int
    weight_gather: str
    remat: str

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments that select the layout."""
        mesh = [f"mesh.ici_{name}={getattr(self, name)}" for name in self._fields[:4]]
        pipeline = [f"pipeline.{name}={getattr(self, name)}" for name in self._fields[4:]]
        run = [f"train.batch_size={ROWS}", f"train.sequence_length={TOKENS}", "train.steps=10"]
        return [MODEL, *mesh, *pipeline, *run]

    @property
    def words(self) -> str:
        """Description of the layout in the table."""
        mesh = "x".join(map(str, self[:4]))
        turns = f"{self.schedule} {self.repeats}, M = {self.microbatches}"
        return f"{mesh}, {turns}, {self.weight_gather}, {self.remat}"


LAYOUTS = (
    Layout(1, 1, 32, 1, "interleaved", 1, 2, "iteration", "none"),
    Layout(1, 2, 16, 1, "interleaved", 1, 2, "iteration", "none"),
    Layout(1, 4, 8, 1, "interleaved", 1, 4, "iteration", "none"),
    Layout(1, 1, 32, 1, "interleaved", 1, 2, "iteration", "names"),
    Layout(1, 1, 32, 1, "interleaved", 1, 1, "iteration", "full"),
    Layout(1, 1, 16, 2, "interleaved", 1, 4, "iteration", "names"),
    Layout(1, 1, 8, 4, "interleaved", 1, 4, "iteration", "full"),
    Layout(2, 1, 16, 1, "1f1b", 1, 4, "iteration", "names"),
    Layout(2, 2, 8, 1, "interleaved", 8, 8, "iteration", "none"),
    Layout(2, 1, 16, 1, "interleaved", 4, 8, "step", "full"),
    Layout(2, 4, 4, 1, "interleaved", 2, 8, "step", "names"),
    Layout(2, 1, 8, 2, "interleaved", 2, 8, "step", "names"),
    Layout(4, 1, 8, 1, "interleaved", 8, 16, "iteration", "none"),
    Layout(4, 1, 8, 1, "interleaved", 2, 8, "step", "names"),
    Layout(4, 1, 8, 1, "interleaved", 4, 16, "window", "names"),
    Layout(4, 1, 8, 1, "1f1b", 1, 8, "step", "full"),
    Layout(4, 2, 4, 1, "interleaved", 2, 16, "step", "chunk"),
    Layout(4, 1, 8, 1, "zb_v", 2, 16, "step", "names"),
    Layout(8, 1, 4, 1, "interleaved", 4, 16, "step", "names"),
    Layout(8, 1, 4, 1, "1f1b", 1, 32, "step", "names"),
)


def config_of(layout: Layout) -> Config:
    from maxpipe.config.load import load
    from maxpipe.planner import topology

    return topology.resolve_config(load(layout.arguments), topology.parse_topology(TOPOLOGY))


class Compiled(NamedTuple):
    """Time and memory of a layout, as reported by the compiler."""

    busy: float
    """Compute time in seconds, including kernels at their assumed FLOP rate."""
    exposed: float
    """Collective time in seconds that is not overlapped with compute."""
    peak: float
    capacity: float
    by_region: dict[str, float]
    by_collective: dict[str, list[float]]
    """Lists [count, GiB, seconds, exposed seconds], keyed by collective kind, region and group."""

    @property
    def seconds(self) -> float:
        """Step time in seconds."""
        return self.busy + self.exposed


def compile_one(layout: Layout, keep: Path | None) -> Compiled:
    """Compile and profile one program. This function runs in a separate process."""
    from maxpipe.planner import topology

    target = topology.parse_topology(TOPOLOGY)
    topology.prepare(target)

    from maxpipe.planner.compile import build_steps, kernel_cycles, profile_step

    config = config_of(layout)
    steps = build_steps(config, topology.topology_devices(target))
    compiled = steps.compile_train()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        name = "-".join(map(str, layout)) + ".hlo.gz"
        with gzip.open(keep / name, "wt", encoding="utf-8") as file:
            file.write(text)
    _, busiest = profile_step(text, steps, config.pipeline.weight_gather)
    clock = target.hardware.clock_ghz * 1e9
    regions: dict[str, float] = defaultdict(float)
    for each in busiest.entries:
        regions[each.region] += each.cycles / clock
    kernels = kernel_cycles(busiest, target.hardware)
    regions["kernels"] += kernels / clock
    found, moves = exposed(busiest, target.hardware)
    return Compiled(
        (busiest.cycles + kernels) / clock,
        found,
        memory.peak_memory_in_bytes,
        target.hardware.memory_bytes,
        regions,
        moves,
    )


def exposed(found: Profile, hardware: Hardware) -> tuple[float, dict[str, list[float]]]:
    """Return the exposed seconds of collectives, in total and by kind, region and group size."""
    from maxpipe.planner import instruction_costs

    rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for each, seconds in instruction_costs.exposed_collectives(found, hardware):
        row = rows[f"{each.kind} {each.region} {len(each.group)} {'async' * each.is_async}"]
        whole = (1.0, each.num_bytes / 2**30, instruction_costs.collective_seconds(each, hardware))
        added = (*(each.count * one for one in whole), seconds)
        row[:] = [old + new for old, new in zip(row, added, strict=True)]
    return sum(row[3] for row in rows.values()), dict(rows)


def result(layout: Layout, cache: Path, keep: Path | None) -> Compiled:
    """Return the cached report of a layout, or compile the layout in a new process.

    Raises:
        RuntimeError: the layout does not compile.
    """
    key = hashlib.sha256(f"{sources()}{layout}".encode()).hexdigest()[:24]
    path = cache / f"{key}.json"
    if not path.exists():
        print(f"compiling {layout.words}", file=sys.stderr, flush=True)
        task = ["--one", json.dumps(layout), "--out", str(path)]
        task += ["--keep", str(keep)] if keep else []
        run = subprocess.run(
            [sys.executable, __file__, *task], capture_output=True, text=True, check=False
        )
        if not path.exists():
            raise RuntimeError(f"{layout.words}: {run.stderr[-2000:]}")
    return Compiled(**json.loads(path.read_text(encoding="utf-8")))


FORECAST = (
    *("cost", "cost_model", "traffic", "memory", "memory_terms", "search", "search_space"),
    *("rerank", "calibrate", "report", "sizes", "shards", "shardings"),
)
"""Modules of `maxpipe.planner` omitted from the digest: they affect neither program nor profile."""


def sources() -> str:
    """Return a digest of all source files that affect the program or its profile."""
    package = Path(__file__).parents[1] / "maxpipe"
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(package.rglob("*.py")):
        if path.parent.name != "planner" or path.stem not in FORECAST:
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Row(NamedTuple):
    """A layout, its prediction and its compiler report."""

    layout: Layout
    predicted: float
    parts: dict[str, float]
    compiled: Compiled


def forecast(layout: Layout) -> tuple[float, dict[str, float]]:
    """Return the predicted step time in seconds, in total and per component."""
    from maxpipe.planner.search import evaluate
    from maxpipe.planner.topology import parse_topology

    cost = evaluate(config_of(layout), parse_topology(TOPOLOGY).hardware).cost
    return cost.seconds, cost.parts


def page_of(rows: Sequence[Row]) -> str:
    """Return the page content below the preamble: the correlation and the table."""
    predicted = [row.predicted for row in rows]
    seconds = [row.compiled.seconds for row in rows]
    by_compiler = sorted(range(len(rows)), key=seconds.__getitem__)
    by_forecast = sorted(range(len(rows)), key=predicted.__getitem__)
    place = by_compiler.index(by_forecast[0]) + 1
    correlation, _ = spearmanr(predicted, seconds)
    lines = [
        f"Spearman correlation of the two rankings: {correlation:.3f} (required: at least "
        f"{LEAST}). The layout that is predicted to be fastest has compiler rank {place} "
        f"(required: at most {AMONG}).",
        "",
        "| predicted rank | predicted ms | compiler rank | compiler ms | compute ms "
        "| exposed ms | predicted / compiler | peak GiB | layout |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rank, number in enumerate(by_forecast, 1):
        row = rows[number]
        cells = (
            rank,
            f"{1e3 * row.predicted:.0f}",
            by_compiler.index(number) + 1,
            f"{1e3 * seconds[number]:.0f}",
            f"{1e3 * row.compiled.busy:.0f}",
            f"{1e3 * row.compiled.exposed:.0f}",
            f"{row.predicted / seconds[number]:.2f}",
            f"{row.compiled.peak / 2**30:.1f}",
            row.layout.words,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def details(row: Row) -> str:
    """Return the predicted and the compiler-estimated time of each component of a layout."""
    lines = [row.layout.words]
    parts = {name: 1e3 * each for name, each in row.parts.items()}
    regions = {name or "else": 1e3 * each for name, each in row.compiled.by_region.items()}
    for who, found in (("forecast", parts), ("compiler", regions)):
        found = dict(sorted(found.items(), key=lambda pair: -pair[1]))
        lines.append(f"  {who}: " + ", ".join(f"{name} {each:.0f}" for name, each in found.items()))
    moves = sorted(row.compiled.by_collective.items(), key=lambda pair: -pair[1][3])
    for name, (times, gib, seconds, left) in moves[:8]:
        lines.append(
            f"  {name}: {times:.0f} collectives, {gib:.2f} GiB, {1e3 * seconds:.0f} ms, "
            f"{1e3 * left:.0f} ms exposed"
        )
    return "\n".join(lines)


PREAMBLE = f"""\
# Layouts ranked by prediction and by the TPU compiler

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/ahead_of_time_ranking.py --write`. No TPU was used. {MODEL} with all its
layers and {ROWS} sequences of {TOKENS} tokens was compiled for {TOPOLOGY} in {len(LAYOUTS)}
layouts. The last column describes a layout as stage x data x fsdp x tensor, schedule with repeats,
number of microbatches M, weight gather mode, and remat mode. The compiler time is the sum of
compute time and exposed time. The column "compute" is the compiler's cycle estimate along the
busiest stages. The column "exposed" is the time of the traffic that is not overlapped, at the
published link bandwidth. Attention kernels are assumed to run at a fixed FLOP rate. The prediction
uses the same bandwidth and FLOP rate, so this page does not test these assumptions.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="compile only layouts whose description contains TEXT",
    )
    parser.add_argument(
        "--details", action="store_true", help="print the time of each layout by component"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the compiled programs")
    cache = Path(tempfile.gettempdir()) / "maxpipe-ahead-of-time"
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = compile_one(Layout(*json.loads(options.one)), options.keep)
        options.out.write_text(json.dumps(found._asdict()), encoding="utf-8")
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    chosen = [layout for layout in LAYOUTS if options.only in layout.words]
    compiled = [result(layout, options.cache, options.keep) for layout in chosen]
    rows = [
        Row(layout, *forecast(layout), found)
        for layout, found in zip(chosen, compiled, strict=True)
    ]
    page = page_of(rows)
    print(page)
    if options.details:
        print("\n\n".join(map(details, rows)))
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
