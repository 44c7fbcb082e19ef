"""Compare gather and remat modes by the TPU compiler's memory, cycle and traffic estimates.

    python benchmarks/tpu_ahead_of_time.py              # prints the table
    python benchmarks/tpu_ahead_of_time.py --write      # and writes tpu_ahead_of_time.md
    python benchmarks/tpu_ahead_of_time.py --entries 8  # and the largest HLO entries

No TPU is used. libtpu compiles the train step of an 8B-class model for 32 chips (v5p:2x4x4,
4 stages x 8 fsdp shards) on this machine (`pip install '.[tpu]'`). The script aggregates the
compiler's memory analysis and per-instruction cycle estimates in the same way as `maxpipe compile`.
The compiler does not estimate synchronous collectives, so their traffic is a separate column. Each
program is compiled in a separate process. Results are cached in `--cache` by a digest of sources
and settings, so an interrupted script can resume.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOPOLOGY, STAGES, FSDP = "v5p:2x4x4", 4, 8
LAYERS, TOKENS, WIDTH = 32, 2048, 4096
MICROBATCHES = (16, 64)
GIB = 2**30
ACTIVATION = TOKENS * WIDTH * 2
"""Size in bytes of the activations that a stage sends. Buffers hold at least two such arrays."""


@dataclass(frozen=True)
class Mode:
    """A gather and remat mode, which is one row of the table."""

    weight_gather: str
    remat: str
    schedule: str = "interleaved"
    repeats: int = 2
    group: int = 0
    attention: str = "xla"
    tokens: int = TOKENS
    kv_heads: int = 32

    @property
    def name(self) -> str:
        shape = f"{self.schedule}, {self.repeats} repeats"
        return f"{self.weight_gather} + {self.remat} ({shape}, group {self.group or STAGES})"

    @property
    def pipeline(self) -> dict[str, Any]:
        """Keys of the `pipeline` config section."""
        names = ("weight_gather", "remat", "schedule", "repeats", "group")
        return {name: getattr(self, name) for name in names}


MODES = [
    Mode("iteration", "chunk"),
    Mode("iteration", "full"),
    Mode("window", "full", repeats=8, group=16),
    Mode("step", "full"),
    Mode("step", "names"),
    Mode("window", "names", repeats=8, group=16),
]


def compile_one(mode: Mode, microbatches: int) -> dict[str, Any]:
    """Compile and profile one program. This function runs in a separate process."""
    from maxpipe.planner import topology

    target = topology.parse_topology(TOPOLOGY)
    topology.prepare(target)

    from maxpipe.config.load import from_dict
    from maxpipe.planner.compile import build_steps, kernel_cycles, profile_step

    config = from_dict(
        {
            "model": {
                "num_layers": LAYERS,
                "d_model": WIDTH,
                "num_heads": 32,
                "num_kv_heads": mode.kv_heads,
                "head_dim": 128,
                "d_mlp": 14336,
                "vocab_size": 128256,
                "attention": mode.attention,
            },
            "mesh": {"ici_stage": STAGES, "ici_fsdp": FSDP},
            "pipeline": {"microbatches": microbatches, **mode.pipeline},
            "train": {
                "batch_size": microbatches * FSDP,
                "sequence_length": mode.tokens,
                "steps": 10,
            },
        }
    )
    steps = build_steps(config, topology.topology_devices(target))
    compiled = steps.compile_train()
    memory = compiled.memory_analysis()
    average, busiest = profile_step(compiled.as_text(), steps, mode.weight_gather)
    large = [each for each in average.collectives if each.total_bytes >= ACTIVATION]
    permutes = [each for each in large if each.kind == "collective-permute"]
    sends = [each for each in permutes if len(each.group) == STAGES]
    return {
        "arguments": memory.argument_size_in_bytes / GIB,
        "temporary": memory.temp_size_in_bytes / GIB,
        "peak": memory.peak_memory_in_bytes / GIB,
        "gigacycles": (busiest.cycles + kernel_cycles(busiest, target.hardware)) / 1e9,
        "kernel_gigacycles": kernel_cycles(busiest, target.hardware) / 1e9,
        "teraflops": average.flops / 1e12,
        "fsdp": average.bytes_moved(group_size=FSDP) / GIB,
        "stage": average.bytes_moved(group_size=STAGES) / GIB,
        "collectives": len(large),
        "asynchronous": sum(each.is_async for each in large),
        "sends": len(sends),
        "overlapped": sum(bool(each.cycles_between > 0) for each in sends),
        "copies": len(average.copies),
        "unknown_loops": average.unknown_loops,
        "entries": [
            (each.cycles / 1e6, each.count, each.instruction.opcode, each.instruction.op_name)
            for each in busiest.largest(50)
        ],
    }


def result(mode: Mode, microbatches: int, cache: Path) -> dict[str, Any] | None:
    """Return a cached result, or compile the program in a new process. On failure, print the reason
    and return None.
    """
    key = hashlib.sha256(f"{sources()}{mode}{microbatches}".encode()).hexdigest()[:24]
    path = cache / f"{key}.json"
    if not path.exists():
        task = json.dumps({"mode": asdict(mode), "microbatches": microbatches})
        print(f"compiling {mode.name}, M = {microbatches}", file=sys.stderr)
        run = subprocess.run(
            [sys.executable, __file__, "--one", task, "--out", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            reason = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
            print(f"skipped: {mode.name}, M = {microbatches}: {reason[-1][:300]}", file=sys.stderr)
            return None
    return json.loads(path.read_text(encoding="utf-8"))


def sources() -> str:
    """Return a digest of all source files that affect the compiled program."""
    package = Path(__file__).parents[1] / "maxpipe"
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def table(modes: list[Mode], cache: Path, num_entries: int) -> str:
    """Return the Markdown table."""
    head = ["arguments GiB", *(f"temp GiB M = {m}" for m in MICROBATCHES)]
    head += [*(f"peak GiB M = {m}" for m in MICROBATCHES), "flat"]
    head += [*(f"Gcycles M = {m}" for m in MICROBATCHES), "fsdp GiB", "stage GiB"]
    head += ["TFLOP", "async", "sends hidden", "copies"]
    lines = ["| mode | " + " | ".join(head) + " |", "|" + "---|" * (len(head) + 1)]
    details: list[str] = []
    for mode in modes:
        results = [result(mode, count, cache) for count in MICROBATCHES]
        few, many = results
        if few is None or many is None:
            continue
        flat = all(abs(many[key] / few[key] - 1) <= 0.01 for key in ("temporary", "peak"))
        cells = [f"{few['arguments']:.2f}"]
        cells += [f"{each[key]:.2f}" for key in ("temporary", "peak") for each in (few, many)]
        cells += ["yes" if flat else "no"]
        cells += [f"{each['gigacycles']:.2f}" for each in (few, many)]
        cells += [f"{few['fsdp']:.1f}", f"{few['stage']:.1f}"]
        cells += [f"{few['teraflops']:.0f}", f"{few['asynchronous']} of {few['collectives']}"]
        cells += [f"{few['overlapped']} of {few['sends']}", f"{few['copies']}"]
        lines.append(f"| {mode.name} | " + " | ".join(cells) + " |")
        if few["unknown_loops"]:
            loops = ", ".join(few["unknown_loops"])
            details += [f"{mode.name}: loops with unknown trip count, counted once: {loops}", ""]
        if num_entries:
            details += _entries(mode, few["entries"][:num_entries])
    return "\n".join([*lines, "", *details])


def _entries(mode: Mode, entries: list[tuple[float, float, str, str]]) -> list[str]:
    rows = [f"| {c:.0f} | {n:.0f} | {kind} | `{name[-90:]}` |" for c, n, kind, name in entries]
    head = [f"Largest entries of {mode.name}:", "", "| Mcycles | times | kind | from |"]
    return [*head, "|---|---|---|---|", *rows, ""]


PREAMBLE = f"""\
# TPU compiler estimates for gather and remat modes

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/tpu_ahead_of_time.py --write`. No TPU was used. The full train step of an
8B-class model with AdamW ({LAYERS} layers, D 4096, F 14336, V 128256, T {TOKENS}) was compiled for
{TOPOLOGY} as {STAGES} stages x {FSDP} fsdp shards. Each microbatch has one sequence per device. The
columns have the following meaning:

- Cycles are the compiler's estimates along the busiest stages, without synchronous collectives.
- Traffic and TFLOP are averages over devices for a step with M = {MICROBATCHES[0]}.
- Peak includes the arguments and must fit in device memory. Temp is larger than the temporary
  memory that is in use at any time (docs/decisions/0016-peak-memory.md).
- Flat means that temp and peak differ by at most 1% between the two values of M.
- Async is the number of collectives with separate start and done instructions, out of all
  collectives that send at least {ACTIVATION >> 20} MiB.
- Sends hidden is the number of messages between stages that are overlapped with computation between
  start and done.
- Copies is the number of copies of at least {2 * ACTIVATION >> 20} MiB in loops.

All rows use plain JAX attention. The page attention_ahead_of_time.md compares plain attention and
attention kernels for some of the rows. With `window` and M = 16, all microbatches form one group,
which needs two window slots. Two or more groups need three slots, for any M.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="compile only modes whose name contains TEXT"
    )
    parser.add_argument("--entries", type=int, default=0, metavar="N")
    cache = Path(tempfile.gettempdir()) / "maxpipe-ahead-of-time"
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.one)
        found = compile_one(Mode(**task["mode"]), task["microbatches"])
        options.out.write_text(json.dumps(found, default=float), encoding="utf-8")
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    modes = [mode for mode in MODES if options.only in mode.name]
    page = table(modes, options.cache, options.entries)
    print(page)
    if options.write:
        target = Path(__file__).with_suffix(".md")
        target.write_text(PREAMBLE + page.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
