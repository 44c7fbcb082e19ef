"""List the estimated TPU cycles of a train step by operation, and the tested optimizations.

    python benchmarks/tpu_step.py                # prints the page
    python benchmarks/tpu_step.py --write        # and writes tpu_step.md
    python benchmarks/tpu_step.py --only "8B"    # compiles only rows whose name contains 8B

No TPU is used. Each row is one run of `maxpipe compile --entries` with libtpu on this machine
(`pip install '.[tpu]'`), in a separate process that runs for a few minutes. Reports are cached in
`--cache` by row and libtpu version. Rows for a libtpu version that is not installed are read from
the cache, or omitted if the cache does not contain them.
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

from maxpipe.planner import instruction_costs
from maxpipe.planner.compile import CompileReport

GIB = 2**30
OLD, NEW = "0.0.42", "0.0.50"
"""libtpu versions that JAX 0.10.2 and 0.12.0 require."""
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
WINDOW = (
    f"llama3-8b {DENSE} model.num_layers=16 pipeline.repeats=4 pipeline.group=16 "
    "pipeline.weight_gather=window pipeline.remat=names"
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
    """A compilation, which is one row of a table."""

    name: str
    arguments: str
    topology: str = "v5p:2x4x4"
    options: tuple[str, ...] = ()
    """Compiler options that override maxpipe's own options (`--xla`)."""
    version: str = OLD


MODELS = [
    Row("8B, step + names", STEP),
    Row("70B's widths, 16 layers, step + names", LARGE, "v5p:4x4x4"),
    Row("Mixtral, 8 layers, step + names", EXPERTS),
]
"""Models for which the page lists the HLO entries with the most cycles."""
TRIED = [
    Row("iteration + full, fused gathers", SMALL, options=FUSED),
    Row("iteration + full, no overlap options", SMALL, options=NO_SPARSE_CORES),
    Row("iteration + full, default options", SMALL),
    Row("iteration + full, default options", SMALL, version=NEW),
    Row("iteration + full, no overlap options", SMALL, "v6e:4x8", NO_SPARSE_CORES),
    Row("iteration + full, default options", SMALL, "v6e:4x8"),
    Row("window + names, 16 layers, no overlap options", WINDOW, options=NO_SPARSE_CORES),
    Row("window + names, 16 layers, default options", WINDOW),
    Row("window + names, 16 layers, default options", WINDOW, version=NEW),
    Row("8B, 24 MiB of VMEM", STEP, options=("xla_tpu_scoped_vmem_limit_kib=24576",)),
]
HOST = [
    Row("8B, gate and up in host memory", f"{STEP} pipeline.offloaded_names=[gate,up]"),
    Row("8B, query and key in host memory", f"{STEP} pipeline.offloaded_names=[query,key]"),
    Row("8B, optimizer state in host memory", f"{STEP} optim.offload_state=true"),
]


def report_of(row: Row, cache: Path) -> CompileReport | None:
    """Return the cached report, or compile the row in a new process. On failure, print the reason
    and return None.
    """
    key = hashlib.sha256(repr(row).encode()).hexdigest()[:24]
    path = cache / f"{key}.json"
    if not path.exists():
        if not importlib.metadata.version("libtpu").startswith(row.version):
            print(f"skipped: {row.name}: needs libtpu {row.version}", file=sys.stderr)
            return None
        print(f"compiling {row.name} on {row.topology}", file=sys.stderr, flush=True)
        command = ["-m", "maxpipe", "compile", *row.arguments.split(), "--json"]
        command += ["--topology", row.topology, *(["--xla", *row.options] if row.options else [])]
        run = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False
        )
        if run.returncode:
            reason = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
            print(f"skipped: {row.name}: {reason[-1][:300]}", file=sys.stderr)
            return None
        path.write_text(run.stdout, encoding="utf-8")
    return CompileReport.from_json(json.loads(path.read_text(encoding="utf-8")))


def exposed(report: CompileReport) -> float:
    """Return the number of cycles that the step spends waiting for collectives."""
    return sum(each.cycles for each in report.entries if each.is_exposed)


def figures(report: CompileReport) -> list[str]:
    """Return the table cells for a compilation report."""
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
    """Return the page content below the preamble."""
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
        head = ["kind", "place", "Mcycles", "share", "share of peak"]
        lines += [f"### {row.name}", "", *table(head, sums)]
    lines += ["## Compiler options", ""]
    lines += table(
        ["step", "on", "libtpu", "options", *HEAD],
        [
            [
                *(row.name, row.topology, row.version),
                "<br>".join(f"`{each}`" for each in row.options) or "default",
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
            f"{each.kind} {each.total_bytes / GIB:.1f} GiB during "
            f"{each.cycles_behind / 1e6:.0f} Mcycles"
            for each in found.transfers
        ]
        sizes = [f"{each / GIB:.2f}" for each in (found.argument_bytes, found.working_bytes)]
        cells.append([row.name, *sizes, *figures(found)[::3], "<br>".join(moved)])
    head = ["step", "arguments GiB", "temporary GiB", "Gcycles", "peak GiB", "transfers"]
    lines += table(head, cells)
    return "\n".join(lines)


PREAMBLE = """\
# Cycles of a train step on TPUs by operation

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/tpu_step.py --write`. No TPU was used. All values come from the TPU compiler and
are reported by `maxpipe compile`. The option `--entries N` lists the same entries for any run, and
`--xla NAME=VALUE` tests other compiler options. Cycles are the compiler's estimates along the
busiest stages. The compiler has no estimate for custom kernels, which are counted at the rates of
`kernel_efficiency` and `expert_kernel_efficiency`. The "waiting" column is the time of collectives
that is not overlapped, computed from their bytes at the published link bandwidth. The cycles column
does not include this time. The "asynchronous" column is the traffic of collectives with computation
between start and done, relative to all traffic that a device sends.

## Observations

- The matmuls of dense layers, including fused operations, run at 83 to 98% of the peak. The next
  largest entries are the gate (2%, limited by memory bandwidth), RoPE (2%), and the messages and
  buffer slots of ticks (2%, less with more layers per chunk). The softmax of the loss head accounts
  for 1%. bfloat16 norms and RoPE were not tested. All norms are fused with matmuls or sums, and the
  RoPE matmuls are already in bfloat16.
- With the expert axis, XLA copied all rows before each exchange, because the same buffer was input
  and output. With a separate, uninitialized output buffer, 216 of the 322 Mcycles of copies are
  avoided. Removing the row of zeros for tokens without an expert saves another 20 Mcycles. The step
  improved from 2.31 to 2.07 Gcycles.
- Variants of the exchange were compiled once each, in a separate program with one exchange in each
  direction (not in the tables). This program takes 7.7 Mcycles with the copy and 5.1 Mcycles with
  the uninitialized buffer. It takes 11.2 Mcycles with a buffer of zeros, 11.6 Mcycles with rows in
  two dims in the compiler's layout, and 16.2 Mcycles with pairs of elements as 32-bit words.
- Expert kernels were previously counted for the full buffer, which has four times as many rows as
  are occupied. They now report the rows that they multiply. Activations and copies still process
  the unused rows. A smaller `model.moe.all_to_all_capacity_factor` reduces the buffer and drops the
  tokens that exceed it.
- No operation reads the region of the buffer that the exchange does not write.
  `tests/pipeline/test_axes.py` runs the exchange with NaN in this region.
- Gathers and sums in loops over layers can use fusions or sparse cores (see the tables below and
  decision 31). Newer compilers reject fused gathers on chips other than v5e. With libtpu 0.0.42,
  only sums run on the sparse cores. Sums on the sparse cores need fewer cycles and less memory than
  fused gathers, but the step waits slightly longer for them. With 0.0.50 (JAX 0.12) the same step
  takes 0.449 Gcycles, and all but 4.8 GiB of the traffic is asynchronous (one compilation, not in
  the tables).
- The older compiler always runs the gathers of `window` before the loop over ticks. Neither
  `xla_tpu_enable_async_collective_fusion_while_loops=true` nor sparse cores make these gathers
  asynchronous. The newer compiler runs the gathers on the sparse cores, in parallel with each other
  and with pending reductions. With 16 layers, the step takes 1.284 Gcycles with 2.3 GiB exposed.
  The older compiler's program takes 1.286 Gcycles with 9.3 GiB exposed (one compilation each, not
  in the tables).
- A scoped VMEM limit of 32 MiB instead of 24 MiB saves 0.9 to 2% of the cycles of dense steps,
  including with tensor parallelism (one compilation each, not in the tables). The limit has no
  effect on steps with experts.
- Activations in host memory are transferred during the loops over layers. `maxpipe compile` reports
  the link rate that is necessary to overlap these transfers fully. Transferring the gate and up
  activations exceeds the bandwidth of a host link, so smaller activations should be offloaded.
- Optimizer state in host memory is transferred at the end of the step. Loops over layers transfer
  one slice of each array at a time. The update has almost no computation that could overlap with
  the transfer, so offloading saves memory at the cost of time. XLA's peak also includes host
  memory, which maxpipe's reports now exclude.
- Offloaded optimizer state was also compiled once for 8 layers of the 8B model on v5p:2x2x1 (not in
  the tables). The vocabulary size is 8192. The mesh has 2 stages x fsdp 2, and the moments take
  3.75 GiB. Arguments fall from 5.63 to 1.88 GiB, and the peak from 11.45 to 7.88 GiB. The step
  sends 3.75 GiB to the host, and the report lists 7.5 GiB from the host. Half of this traffic
  belongs to the branch that checks an update, which almost never runs.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="compile only rows whose name contains TEXT, and print no page",
    )
    parser.add_argument(
        "--kinds", type=int, default=14, metavar="N", help="number of entries per model"
    )
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
