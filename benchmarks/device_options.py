"""Compare XLA options of the train step by the programs that the compilers produce.

    python benchmarks/device_options.py                  # prints the tables
    python benchmarks/device_options.py --write          # and writes device_options.{md,json}
    python benchmarks/device_options.py --only b200      # compiles only rows with b200

No accelerator is used. A program is traced once for each topology and compiled once for each row
(`pip install '.[gpu-aot]'` for GPU rows, `pip install '.[tpu]'` for TPU rows). Rows whose compiler
is not installed, or that `--only` excludes, keep their results in `device_options.json`.

GPU programs are only optimized and scheduled, because most of the compile time is spent on code
generation, which changes none of the figures. An invalid option for ptxas stops each compilation
after XLA has written the scheduled program and its buffers to a folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_assignment import read_sizes

RESULTS = Path(__file__).with_suffix(".json")
GIB = 2**30
SIZES = "train.steps=10 train.sequence_length=4096"
EXPERTS = "qwen3-30b-a3b model.num_layers=4 mesh.ici_expert=8 train.batch_size=8"
STAGES = (
    "llama3-8b model.num_layers=4 mesh.ici_stage=2 mesh.ici_fsdp=4 pipeline.microbatches=4 "
    "train.batch_size=32"
)
NODES = (
    "llama3-8b model.num_layers=4 mesh.dcn_data=2 mesh.ici_fsdp=4 mesh.ici_tensor=2 "
    "mesh.sequence_parallel=true train.batch_size=8"
)
PROGRAMS = {
    "fsdp 8": f"llama3-8b model.num_layers=4 mesh.ici_fsdp=8 train.batch_size=8 {SIZES}",
    "2 stages x fsdp 4": f"{STAGES} {SIZES}",
    "2 nodes x fsdp 4 x tensor 2": f"{NODES} {SIZES}",
    "expert 8, 1 chunk": f"{EXPERTS} model.qwen3_moe.all_to_all_chunks=1 {SIZES}",
    "expert 8, 2 chunks": f"{EXPERTS} model.qwen3_moe.all_to_all_chunks=2 {SIZES}",
}
"""Config keys of each program."""
TWO_SLICES = "2 nodes x fsdp 4 x tensor 2"

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler=True"
LARGE_COLLECTIVES = tuple(
    f"xla_gpu_{kind}_combine_threshold_bytes={8 * GIB}"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
SINGLE_COLLECTIVES = tuple(
    f"xla_gpu_{kind}_combine_threshold_bytes=1"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
PIPELINED = tuple(
    f"xla_gpu_enable_pipelined_{kind}=True"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
SPEED_OF_LIGHT = "xla_gpu_enable_analytical_sol_latency_estimator=True"
DOUBLE_BUFFER = (
    "xla_gpu_enable_while_loop_double_buffering=True",
    "xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
)
MESSAGES = (
    "xla_gpu_enable_pipelined_p2p=True",
    "xla_gpu_collective_permute_decomposer_threshold=1024",
)
GPU_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "default of XLA": (f"{SCHEDULER.partition('=')[0]}=",),
    "no scheduler": (SCHEDULER.replace("True", "False"),),
    "scheduler": (SCHEDULER,),
    "scheduler, pipelined, speed-of-light": (SCHEDULER, *PIPELINED, SPEED_OF_LIGHT),
    "scheduler, combined up to 8 GiB": (SCHEDULER, *LARGE_COLLECTIVES),
    "scheduler, 2 collectives at a time": (
        SCHEDULER,
        "xla_gpu_experimental_parallel_collective_overlap_limit=2",
    ),
    "scheduler, pipelined messages": (SCHEDULER, *MESSAGES),
    "scheduler, double buffering": (SCHEDULER, *DOUBLE_BUFFER),
    "scheduler, not combined": (SCHEDULER, *SINGLE_COLLECTIVES),
    "early starts": ("xla_gpu_experimental_collective_start_as_early_as_possible=True",),
}
"""Compiler options of each GPU row, which override the options of maxpipe."""
FOR_ALL = tuple(GPU_OPTIONS)[:5]
FOR_PROGRAM = {
    "fsdp 8": (
        "scheduler, 2 collectives at a time",
        "scheduler, double buffering",
        "scheduler, not combined",
        "early starts",
    ),
    "2 stages x fsdp 4": ("scheduler, pipelined messages",),
}
"""Rows for one program only, in addition to those for all programs."""
OTHER_KINDS = ("default of XLA", "scheduler")
"""Rows for GPUs other than the H100."""
LAYERS = "layers of llama3-8b, 2 microbatches of 8,192 tokens on each device"
"""Program of the TPU rows."""
NUM_LAYERS, NUM_MICROBATCHES = 4, 2
LAYER_SIZES = (
    f"llama3-8b model.num_layers={NUM_LAYERS} model.vocab_size=8192 train.steps=10 "
    f"train.sequence_length=8192 pipeline.microbatches={NUM_MICROBATCHES} "
    "pipeline.weight_gather=step pipeline.remat=names pipeline.saved_names=[attention,gate]"
)
TPU_MIB = {
    "v5e:2x2": (24, 48, 96),
    "v5p:2x2x1": (32, 48, 64),
    "v6e:2x2": (48, 80, 96),
    "tpu7x:2x2x1": (24, 48, 56),
}
"""VMEM limits of the TPU rows."""


@dataclass(frozen=True)
class Row:
    """A compilation of a program, which is one row of a table."""

    topology: str
    program: str
    name: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return the key of the row in the file of results."""
        return " | ".join((self.topology, self.program, self.name))


def all_rows() -> list[Row]:
    """Return the rows of the page in order."""
    rows = [
        Row("h100:8", program, name, GPU_OPTIONS[name])
        for program in PROGRAMS
        for name in (*FOR_ALL, *FOR_PROGRAM.get(program, ()))
    ]
    rows += [
        Row(topology, program, name, GPU_OPTIONS[name])
        for topology in ("h200:8", "b200:8", "gb200:8")
        for program in ("fsdp 8", "expert 8, 2 chunks")
        for name in OTHER_KINDS
    ]
    rows += [
        Row(topology, LAYERS, f"{mib} MiB", (f"xla_tpu_scoped_vmem_limit_kib={mib * 1024}",))
        for topology, limits in TPU_MIB.items()
        for mib in limits
    ]
    return rows


def compile_rows(rows: Sequence[Row]) -> None:
    """Trace the program of these rows, compile each row, and print its results as a line of
    JSON.
    """
    from maxpipe.commands.parser import read_config
    from maxpipe.planner.topology import parse_topology, prepare

    topology, program = rows[0].topology, rows[0].program
    target = parse_topology(topology, 2 if program == TWO_SLICES else 1)
    settings = PROGRAMS.get(program, LAYER_SIZES).split()
    if program == LAYERS:
        devices = target.num_devices
        settings += [f"mesh.ici_fsdp={devices}", f"train.batch_size={NUM_MICROBATCHES * devices}"]
    loaded = read_config(settings)
    prepare(target)
    from maxpipe.planner.compile import lower_step

    lowered = lower_step(loaded, target)
    figures = layer_figures if program == LAYERS else figures_of
    for row in rows:
        given = dict(option.split("=", 1) for option in row.options)
        print(json.dumps({row.key: figures(lowered, given)}), flush=True)


def layer_figures(lowered: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """Compile a traced step for TPUs with these options, and return the cycles of a layer without
    attention kernels.
    """
    from maxpipe.planner.compile import profile_step, versions

    start = time.monotonic()
    compiled = lowered.compile(given)
    _, found = profile_step(
        compiled.as_text(), lowered.steps, lowered.config.pipeline.weight_gather
    )
    cycles = {
        region: sum(each.cycles for each in found.entries if each.region == region)
        for region in ("forward", "backward")
    }
    return {
        **{f"{region}_cycles": each for region, each in cycles.items()},
        "memory_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": time.monotonic() - start,
        "versions": versions(),
    }


def figures_of(lowered: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """Compile a traced step with these options, and return the figures of its program."""
    from maxpipe.planner.compile import profile_step, versions
    from maxpipe.planner.hlo_parser import parse_hlo
    from maxpipe.planner.hlo_profile import profile_program
    from maxpipe.planner.instruction_costs import exposed_collectives

    steps, hardware = lowered.steps, lowered.topology.hardware
    start = time.monotonic()
    text, memory = optimize(lowered, given)
    seconds = time.monotonic() - start
    mesh = steps.param_layout.mesh
    if mesh.shape["stage"] > 1:  # stages run different numbers of layers in a tick
        found, _ = profile_step(text, steps, lowered.config.pipeline.weight_gather)
    else:  # the program states how often it runs each loop, also if the compiler unrolled it
        found = profile_program(parse_hlo(text))
    slices = [device.process_index for device in mesh.devices.flat]
    sent = [each for each in found.collectives if len(each.group) > 1]
    return {
        "sent_bytes": sum(each.total_bytes for each in sent),
        "asynchronous_bytes": sum(each.total_bytes for each in sent if each.is_async),
        "overlapped_bytes": sum(each.total_bytes for each in sent if each.flops_between),
        "collectives": sum(each.count for each in sent),
        "exposed_seconds": sum(
            exposed for _, exposed in exposed_collectives(found, hardware, slices)
        ),
        "matmul_seconds": found.flops / hardware.flops / hardware.matmul_efficiency,
        "memory_bytes": memory,
        "unknown_loops": len(found.unknown_loops),
        "seconds": seconds,
        "versions": versions(),
    }


def optimize(lowered: Any, given: Mapping[str, str]) -> tuple[str, int]:
    """Optimize and schedule a step for absent GPUs, and return its text and memory in bytes."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        stop = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": "True",
            "xla_gpu_ptx_compiler_extra_flags": "--stop",
        }
        try:
            lowered.compile({**given, **stop})
        except jax.errors.JaxRuntimeError as error:
            if "ptxas" not in str(error):
                raise
        (program,) = Path(folder).glob("*_after_optimizations.txt")
        _, _, allocated = read_sizes(Path(folder))
        return program.read_text(encoding="utf-8"), allocated


def run_rows(only: str, results: dict[str, Any]) -> Iterator[None]:
    """Compile the rows whose key contains `only`, and yield after adding each result."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in all_rows():
        if only in row.key:
            groups.setdefault((row.topology, row.program), []).append(row)
    for (topology, program), rows in groups.items():
        print(f"compiling {program} on {topology}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--compile", *(row.key for row in rows)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                results |= json.loads(line)
                yield
        if run.returncode:
            print(f"skipped: {program} on {topology}", file=sys.stderr)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    found = [row for row in all_rows() if row.key in results]
    versions = sorted({_describe(results[row.key]["versions"]) for row in found})
    lines = [PREAMBLE.format(versions="; ".join(versions)), "## Options of the rows", ""]
    named = {row.name: row.options for row in found}
    lines += table(
        ["row", "options"],
        [[name, "<br>".join(f"`{each}`" for each in given)] for name, given in named.items()],
    )
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.topology, row.program), []).append(row)
    for (topology, program), rows in groups.items():
        lines += [f"## {topology}: {program}", ""]
        if program == LAYERS:
            lines += [f"`{LAYER_SIZES}`", ""]
            lines += table(LAYER_HEAD, [[row.name, *layer_cells(results[row.key])] for row in rows])
            continue
        lines += [f"`{PROGRAMS[program]}`", ""]
        lines += table(HEAD, [[row.name, *cells(results[row.key])] for row in rows])
    if absent := [row for row in all_rows() if row.key not in results]:
        lines += ["## Rows without a result", "", "These rows have not been compiled yet:", ""]
        lines += [f"- {row.topology}: {row.program}: {row.name}" for row in absent] + [""]
    return "\n".join(lines)


def _describe(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items() if name != "jaxlib")


HEAD = (
    *("row", "collectives", "sent GiB", "asynchronous GiB", "overlapped GiB"),
    *("exposed ms", "memory GiB"),
)


def cells(found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row after its name."""
    sizes = (found[f"{kind}_bytes"] for kind in ("sent", "asynchronous", "overlapped"))
    return [
        f"{found['collectives']:.0f}",
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{1e3 * found['exposed_seconds']:.1f}",
        f"{found['memory_bytes'] / GIB:.2f}",
    ]


LAYER_HEAD = ("row", "forward Mcycles", "backward Mcycles", "temporary GiB")


def layer_cells(found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a TPU row after its name, per layer and microbatch."""
    count = 1e6 * NUM_LAYERS * NUM_MICROBATCHES
    return [
        *(f"{found[f'{region}_cycles'] / count:.2f}" for region in ("forward", "backward")),
        f"{found['memory_bytes'] / GIB:.2f}",
    ]


PREAMBLE = """\
# XLA options by device

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/device_options.py --write`, with {versions}. The programs are compiled without a
GPU, so no kernel was timed and no Triton matmul is used. A compiled program shows the operations
that can overlap with a collective. It does not show the speed of a step.

Columns of the tables:

- "collectives": number of executed collectives of one device and step
- "sent": bytes that one device sends in a step
- "asynchronous": bytes of collectives with separate start and done instructions. XLA for GPUs
  splits almost every collective, so this column hardly differs between rows.
- "overlapped": bytes of collectives with a matmul or an attention kernel between start and done
- "exposed": time of collectives at the published bandwidth, minus the time of the matmuls and
  kernels between start and done at `matmul_efficiency`. Two collectives of a group cannot overlap
  with the same matmul. Real bandwidth is lower and depends on the message size.
- "memory": all allocations of the program

## Options that maxpipe sets

| device | program | options | evidence |
|---|---|---|---|
| NVIDIA GPUs | experts with several chunks of tokens | latency-hiding scheduler | [decision 49](../docs/decisions/0049-expert-kernels-on-gpus.md) |
| NVIDIA GPUs | all others | none | the tables below |
| v5e | all | all-gathers by fusions, asynchronous all-to-alls, 48 MiB of scoped VMEM | [tpu_step](tpu_step.md), [decision 31](../docs/decisions/0031-collective-overlap-on-tpus.md) |
| v5p, v6e | all | sparse cores for all-gathers and reduce-scatters, asynchronous all-to-alls, 48 MiB (v5p) or 96 MiB (v6e) of scoped VMEM | the same, and [low_precision](low_precision.md) |
| TPU7x | all | the options of v6e, with 56 MiB of scoped VMEM | the tables below, for the limit only |

## Observations

- *Latency-hiding scheduler.* In dense programs, every figure equals that of the default. The
  default schedule already starts a gather before a matmul that does not need it. On one H100, the
  scheduler made a step 1% slower ([gpu_checklist](gpu_checklist.md)). maxpipe does not set the
  option for dense models. The row with the value `False` was not compiled.
- *Combined collectives.* NVIDIA's guide for JAX recommends thresholds of at least the size of a
  layer, such as 8 GiB, because large messages reach a higher bandwidth. With these thresholds, all
  gathers of a layer become one collective, which cannot overlap with the matmuls of the same layer.
  The exposed time doubles. Only a measurement can show whether the bandwidth outweighs this loss.
- *Pipelined collectives and speed-of-light estimates.* NVIDIA's guide enables both with the
  optimization level `O1`. Without stages, XLA moves some gathers to the previous iteration of their
  loop. Memory falls by 6%, and the exposed time rises by 12%. The same figures result without the
  estimates if only all-gathers are pipelined (one compilation, not in the tables). With stages, the
  number of layers in a tick is known only at run time, and the options change none of the figures.
- *Two collectives at a time.* 4% more bytes overlap, but several collectives share the same matmul,
  so the exposed time rises.
- *Pipelined messages.* XLA converts the messages between stages to sends and receives, which the
  columns do not include. Apart from these messages, the figures do not change.
- *Double buffering.* XLA duplicates the bodies of the loops over layers. The sent, overlapped and
  exposed figures of one layer do not change (one compilation, not in the tables).
- *Thresholds of 1 byte* and *early starts* do not reduce the exposed time.
- *The loss head.* The gather and the reduce-scatter of its weight do not overlap with matmuls. They
  account for 6.1 of the 8.4 ms of the program with fsdp 8. Both belong to a conditional branch, and
  their size does not depend on the number of layers.
- *Two nodes.* The latency-hiding scheduler changes no figure. Pipelined collectives reduce the
  exposed time by 2% and the memory by 9%. Combined collectives overlap almost nothing, and the
  exposed time rises by 10%.
- *Experts on GPUs.* With one chunk, the scheduler changes the overlap by 3%. With two chunks, the
  scheduler raises the overlapped bytes by 69% and reduces the exposed time by 7%, at the cost of 19%
  more memory. This is the case in which maxpipe sets the option. On H200, B200 and GB200, the
  overlapped bytes and the memory change by the same factors. The exposed time falls by 6 to 7%.
  With pipelined collectives on H100, 15% fewer bytes overlap than with the scheduler alone.
- *H200 and H100* have the same XLA target apart from the memory size. All figures of H200 are equal
  to those of H100, except that the memory is up to 0.6% larger.
- *GB200.* In the program with fsdp 8, XLA overlaps 30% fewer bytes than on B200, and the exposed
  time is 5.7 instead of 4.3 ms. The two targets differ in the numbers of cores, the clock rate, the
  L2 cache and the memory. Which of these changes the schedule was not determined.
- *Scoped VMEM on TPUs.* Larger limits allow larger tiles of matmuls. The tables show the cycles of
  a layer without attention kernels. On v5p, 64 MiB gains less than 1% over 48 MiB. On v6e, 96
  MiB needs 8% fewer cycles than 48 MiB, and on TPU7x, 56 MiB needs 40% fewer than 24 MiB, which was
  the limit until these figures existed.
- *Command buffers.* By default, XLA places 238 of the 374 kernels, copies and collectives of the
  program with fsdp 8 in 16 CUDA graphs (one complete compilation, not in the tables). NVIDIA's
  guide recommends `FUSION,CUSTOM_CALL` for B200. This value was not tested, because a compiled
  program does not show launch times.

A layer on v5e needed 4.4% fewer cycles with 48 than with 24 MiB, and 0.3% fewer with 96 MiB (one
compilation each, not in the tables).

NVIDIA's guide is `docs/GPU_performance.md` of JAX-Toolbox, read on 2026-11-30. XLA of jax 0.10.2
rejects these names from published recipes: `xla_gpu_graph_level`,
`xla_gpu_enable_triton_softmax_fusion`, `xla_gpu_enable_async_collectives`,
`xla_gpu_enable_async_all_to_all`, `xla_gpu_lhs_enable_gpu_async_tracker` and
`xla_gpu_enable_custom_fusions`. The value `+WHILE` of `xla_gpu_enable_command_buffer` is rejected,
but complete lists are accepted.
"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="compile only rows with TEXT")
    parser.add_argument("--compile", nargs="+", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_rows([row for row in all_rows() if row.key in options.compile])
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for _ in run_rows(options.only, results):
        if options.write:  # after each row, because all rows together need hours
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = page(results)
    print(text)
    if options.write:
        RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
