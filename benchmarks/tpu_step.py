"""What a step on TPUs spends its cycles on, and what was tried to make it shorter.

    python benchmarks/tpu_step.py                # prints the page
    python benchmarks/tpu_step.py --write        # and writes tpu_step.md
    python benchmarks/tpu_step.py --only "8B"    # compiles the rows with this in their name only

Nothing runs on a TPU: each row is one `maxpipe compile --entries`, by libtpu on this machine
(`pip install '.[tpu]'`), in a process of its own, a few minutes each. Reports are kept in `--cache`
by row and version of libtpu; another folder compiles again. Rows of a version that is not installed
are taken from there, or left out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from maxpipe.plan import instruction_costs
from maxpipe.plan.compile import CompileReport

GIB = 2**30
OLD, NEW = "0.0.42", "0.0.50"
"""Versions of libtpu, those of jax 0.10.2 and 0.12.0."""
DENSE = (
    "model.num_kv_heads=32 model.attention=splash mesh.ici_stage=4 mesh.ici_fsdp=8 "
    "pipeline.schedule=interleaved pipeline.microbatches=16 train.batch_size=128 "
    "train.sequence_length=2048 train.steps=10"
)
STEP = f"llama3-8b {DENSE} pipeline.repeats=2 pipeline.weight_gather=step pipeline.remat=names"
SMALL = (
    f"llama3-8b {DENSE} model.num_layers=16 model.d_model=2048 model.d_mlp=8192 model.num_heads=16 "
    "model.num_kv_heads=16 model.vocab_size=8192 pipeline.repeats=2 "
    "pipeline.weight_gather=iteration pipeline.remat=full"
)
VISIT = (
    f"llama3-8b {DENSE} model.num_layers=16 pipeline.repeats=4 pipeline.group=16 "
    "pipeline.weight_gather=visit pipeline.remat=names"
)
LARGE = (
    "llama3-70b model.num_layers=16 model.attention=splash mesh.ici_stage=4 mesh.ici_fsdp=16 "
    "pipeline.schedule=interleaved pipeline.repeats=2 pipeline.microbatches=16 "
    "pipeline.weight_gather=step pipeline.remat=names train.batch_size=256 "
    "train.sequence_length=2048 train.steps=10"
)
EXPERTS = (
    "mixtral-8x7b model.num_layers=8 model.attention=splash mesh.ici_stage=4 mesh.ici_expert=8 "
    "pipeline.repeats=2 pipeline.microbatches=16 pipeline.weight_gather=step pipeline.remat=names "
    "train.batch_size=128 train.sequence_length=2048 train.steps=10"
)
NO_SPARSE_CORES = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather=",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=",
)
FUSED = (*NO_SPARSE_CORES, "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true")


@dataclass(frozen=True)
class Row:
    """One compilation."""

    name: str
    arguments: str
    topology: str = "v5p:2x4x4"
    options: tuple[str, ...] = ()
    """Of the compiler, in place of a run's: `--xla`."""
    version: str = OLD


MODELS = [
    Row("8B, step + names", STEP),
    Row("70B's widths, 16 layers, step + names", LARGE, "v5p:4x4x4"),
    Row("Mixtral, 8 layers, step + names", EXPERTS),
]
"""Of which the page lists the entries."""
TRIED = [
    Row("iteration + full, fused gathers", SMALL, options=FUSED),
    Row("iteration + full, plain", SMALL, options=NO_SPARSE_CORES),
    Row("iteration + full, as runs are", SMALL),
    Row("iteration + full, as runs are", SMALL, version=NEW),
    Row("iteration + full, plain", SMALL, "v6e:4x8", NO_SPARSE_CORES),
    Row("iteration + full, as runs are", SMALL, "v6e:4x8"),
    Row("visit + names, 16 layers, plain", VISIT, options=NO_SPARSE_CORES),
    Row("visit + names, 16 layers, as runs are", VISIT),
    Row("visit + names, 16 layers, as runs are", VISIT, version=NEW),
    Row("8B, 24 MiB of VMEM", STEP, options=("xla_tpu_scoped_vmem_limit_kib=24576",)),
]
HOST = [
    Row("8B, gate and up in host memory", f"{STEP} pipeline.offloaded_names=[gate,up]"),
    Row("8B, query and key in host memory", f"{STEP} pipeline.offloaded_names=[query,key]"),
    Row("8B, optimizer state in host memory", f"{STEP} optim.offload_state=true"),
]


def report_of(row: Row, cache: Path) -> CompileReport | None:
    """From the cache or a fresh process; None, with the reason on stderr, if there is none."""
    key = hashlib.sha256(repr(row).encode()).hexdigest()[:24]
    path = cache / f"{key}.json"
    if not path.exists():
        if not importlib.metadata.version("libtpu").startswith(row.version):
            print(f"left out: {row.name}: needs libtpu {row.version}", file=sys.stderr)
            return None
        print(f"compiling {row.name} on {row.topology}", file=sys.stderr, flush=True)
        command = ["-m", "maxpipe", "compile", *row.arguments.split(), "--json"]
        command += ["--topology", row.topology, *(["--xla", *row.options] if row.options else [])]
        run = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False
        )
        if run.returncode:
            reason = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
            print(f"left out: {row.name}: {reason[-1][:300]}", file=sys.stderr)
            return None
        path.write_text(run.stdout, encoding="utf-8")
    return CompileReport.from_json(json.loads(path.read_text(encoding="utf-8")))


def exposed(report: CompileReport) -> float:
    """Cycles in which the step waits for collectives."""
    waits = ("waited for", "left over")
    return sum(each.cycles for each in report.entries if each.kind.endswith(waits))


def figures(report: CompileReport) -> list[str]:
    """Cells of a table."""
    hidden = [each for each in report.collectives if each.asynchronous]
    sent = sum(each.total_bytes for each in report.collectives)
    return [
        f"{report.cycles / 1e9:.3f}",
        f"{exposed(report) / 1e9:.3f}",
        f"{sum(each.total_bytes for each in hidden) / GIB:.1f} of {sent / GIB:.1f}",
        f"{report.peak_bytes / GIB:.2f}",
    ]


HEAD = ["Gcycles", "waiting Gcycles", "asynchronous GiB", "peak GiB"]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def page(cache: Path, number: int) -> str:
    """All of it."""
    models = [(row, report_of(row, cache)) for row in MODELS]
    tried = [(row, report_of(row, cache)) for row in TRIED]
    host = [(row, report_of(row, cache)) for row in HOST]
    lines = ["## Models", ""]
    lines += table(
        ["model", "on", *HEAD],
        [[row.name, row.topology, *figures(found)] for row, found in models if found],
    )
    for row, found in models:
        if found is None:
            continue
        whole = sum(each.cycles for each in found.entries)
        sums = [
            [
                *(each.kind, each.place, f"{each.cycles / 1e6:.0f}"),
                *(f"{each.cycles / whole:.1%}", f"{each.of_peak:.0%}" if each.flops else ""),
            ]
            for each in instruction_costs.sum_by_kind(found.entries)[:number]
        ]
        head = ["kind", "place", "Mcycles", "share", "of the peak"]
        lines += [f"### {row.name}", "", *table(head, sums)]
    lines += ["## Options of the compiler", ""]
    lines += table(
        ["step", "on", "libtpu", "options", *HEAD],
        [
            [
                *(row.name, row.topology, row.version),
                "<br>".join(f"`{each}`" for each in row.options) or "a run's",
                *figures(found),
            ]
            for row, found in tried
            if found
        ],
    )
    lines += ["## Host memory", ""]
    cells = []
    for row, found in host:
        if found is None:
            continue
        moved = [
            f"{each.kind} {each.total_bytes / GIB:.1f} GiB behind "
            f"{each.cycles_behind / 1e6:.0f} Mcycles"
            for each in found.transfers
        ]
        sizes = [f"{each / GIB:.2f}" for each in (found.argument_bytes, found.working_bytes)]
        cells.append([row.name, *sizes, *figures(found)[::3], "<br>".join(moved)])
    head = ["step", "arguments GiB", "temporary GiB", "Gcycles", "peak GiB", "moved"]
    lines += table(head, cells)
    return "\n".join(lines)


PREAMBLE = """\
# A step on TPUs: where its cycles go, and what was tried

`python benchmarks/tpu_step.py --write`. Nothing ran on a TPU: all figures are those of the TPU
compiler, by `maxpipe compile`, whose `--entries N` lists the same for any run and whose `--xla
NAME=VALUE` tries other options. Cycles are the compiler's estimates along the busiest stages;
kernels, for which it has none, count at half of the peak. Waiting: collectives, or what is left
of them, that no work hides, by their bytes at the links' published rate, not in the cycles beside
it. Asynchronous: bytes of collectives that have work between start and done, of all that a device
sends.

What was read from it:
- Dense layers run their matmuls, with all that is joined to them, at 83 to 98% of the peak. The
  largest of the rest are the gate (2%, bound by memory), rotary (2%), messages and slots of ticks
  (2%, less with more layers in a chunk), and the head's softmax (1%). Norms and rotary in
  bfloat16 were not tried: all norms are joined to matmuls or sums, and the products of rotary
  already are bfloat16.
- Experts on the expert axis: XLA copied all rows before each exchange, as they were both what is
  sent and what is written to; an empty buffer in that place took 216 of 322 Mcycles of copies
  away, and the row of zeros that tokens without an expert got, another 20: 2.31 to 2.07 Gcycles.
  By one compile each, not among the rows: a program with one exchange each way takes 7.7 Mcycles
  with the copy, 5.1 with the empty buffer, 11.2 with zeros, 11.6 with rows in two dims as
  the compiler lays them out, 16.2 with pairs as words of 32 bits. Kernels of experts were counted
  for all the room there is, four times the rows in use, and state now what they multiply.
  Experts' rows not in use still cost gates and copies: `model.moe.all_to_all_capacity_factor` makes room for
  fewer, and drops those beyond it.
- What the exchange leaves unwritten is not read: `tests/pipeline/test_axes.py` runs it with NaN
  there.
- Gathers and sums in loops over layers: fused gathers (v5e only, says the newer compiler, which
  refuses them elsewhere) against sparse cores, below and in decision 31. With libtpu 0.0.42 only
  sums go to the sparse cores: fewer cycles and less memory than with fused gathers, and a little
  more waiting. With 0.0.50 (jax 0.12) the same step takes 0.449 Gcycles, and all but 4.8 GiB are
  asynchronous, by one compile, not among the rows.
- Gathers of `visit` stand in front of the loop over ticks whatever is asked of the older compiler
  (`xla_tpu_enable_async_collective_fusion_while_loops=true`, sparse cores: no byte more is
  asynchronous). The newer one has them on the sparse cores, beside each other and the reductions
  that are due: of 16 layers 1.284 Gcycles, 2.3 GiB waited for, where it was 1.286 and 9.3 GiB;
  all by one compile each, not among the rows.
- 32 MiB of working memory for a fusion in place of 24: 0.9 to 2% fewer cycles of dense steps, with
  layers split over tensor, too (by one compile each, not among the rows); none with experts.
- Activations in host memory come and go beside the loops
  over layers, all of them; `maxpipe compile` says from which rate of the link on that hides them.
  Gate and up are more than a link to a host carries: name smaller ones.
- Optimizer state in host memory comes and goes in loops over layers, a slice of each array at a
  time, at the step's end; the update has next to no work to hide it behind, so that it is time
  against memory. XLA's figure for the peak counts host memory too: reports leave that out since.
  By one compile each, not among the rows, of 8 layers of the 8B model with 8192 words on v5p:2x2x1
  (2 stages x fsdp 2, 3.75 GiB of moments): arguments 5.63 to 1.88 GiB, peak 11.45 to 7.88; 3.75 GiB
  go to the host, and of the 7.5 that the report has come from it half are in the branch that
  looks at an update, which is all but never taken.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="compile these rows, no page")
    parser.add_argument("--kinds", type=int, default=14, metavar="N", help="lines of each model")
    cache = Path(tempfile.gettempdir()) / "maxpipe-tpu-step"
    parser.add_argument("--cache", type=Path, default=cache)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.only:
        for row in (*MODELS, *TRIED, *HOST):
            if options.only in f"{row.name} {row.topology} {row.version}":
                report_of(row, options.cache)
        return
    text = page(options.cache, options.kinds)
    print(text)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + text, encoding="utf-8")


if __name__ == "__main__":
    main()
