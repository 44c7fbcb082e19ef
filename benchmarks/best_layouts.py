"""List the layouts with the highest MFU that `maxpipe plan --search --objective=mfu` finds.

    python benchmarks/best_layouts.py                      # prints the page
    python benchmarks/best_layouts.py --write              # and writes best_layouts.{md,json}
    python benchmarks/best_layouts.py --rows v6e Mixtral   # runs only rows that match a text

No accelerator is used. Each row is one run of the command on the page, in a separate process. Rows
on TPUs require libtpu (`pip install '.[tpu]'`), and rows on GPUs require `pip install
'.[gpu-aot]'`. Rows whose compiler is not installed, or that `--rows` excludes, keep their figures
in `best_layouts.json`. `--cache` contains the reports of all compiled layouts, which `--reports`
reuses.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxpipe.config.load import load
from maxpipe.hardware import Hardware, published_hardware
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.registry import describe
from maxpipe.planner.compile import CompileReport
from maxpipe.planner.instruction_costs import ProfileLine

RESULTS = Path(__file__).with_suffix(".json")
GIB = 2**30
EXPERTS = "experts"
"""Name of the sublayer whose kernels multiply the rows of experts."""


@dataclass(frozen=True)
class Row:
    """A run whose best layout is searched."""

    name: str
    run: str
    """Model and overrides of the run."""
    topology: str
    fixed: str
    """Keys that are not searched."""
    slices: int = 1
    compiled: int = 1
    """Number of layouts to compile."""
    goal: float = 0.0
    """Required MFU according to the compiler."""
    published: str = "-"
    """Published MFU of another trainer for the most similar run."""

    @property
    def kind(self) -> str:
        """Prefix of the topology."""
        return self.topology.partition(":")[0]

    @property
    def hardware(self) -> Hardware:
        """Specifications of one device."""
        return published_hardware()[self.kind]

    @property
    def where(self) -> str:
        """Devices as in the table."""
        return f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology

    @property
    def key(self) -> str:
        """Key of the row in the file of results."""
        return f"{self.name} on {self.where}"

    @property
    def arguments(self) -> list[str]:
        """Arguments of `maxpipe`, without the folder of reports."""
        slices = ["--slices", str(self.slices)] if self.slices > 1 else []
        search = ["--search", "--objective", "mfu", "--max-batch-size", self.batch_size]
        fixed = ["--fix", *self.fixed.split()] if self.fixed else []
        run = [*self.run.split(), "--topology", self.topology, *slices]
        return ["plan", *run, *search, *fixed, "--compile", str(self.compiled)]

    @property
    def batch_size(self) -> str:
        """Value of `train.batch_size` in the run, which is also the maximum batch size."""
        (value,) = [each for each in self.run.split() if each.startswith("train.batch_size=")]
        return value.partition("=")[2]

    @property
    def all_pairs_factor(self) -> float:
        """Model FLOPs with all query-key pairs, relative to those with the causal half."""
        config = load(self.run.split()).config
        model, tokens = describe(config.model), config.train.sequence_length
        # The FLOPs of causal attention grow linearly with the sequence length, and all pairs are
        # twice as many as the causal pairs.
        return train_flops_per_token(model, 2 * tokens) / train_flops_per_token(model, tokens)


NO_SHARDED_TOKENS = "mesh.ici_context=1 mesh.ici_tensor=1"
NAMES = "pipeline.remat=names pipeline.saved_names=[matmuls]"
ROWS = (
    Row(
        "Llama 3 8B",
        "llama3-8b train.sequence_length=2048 train.batch_size=4096",
        "v5p:4x4x4",
        f"{NO_SHARDED_TOKENS} mesh.ici_stage=1 pipeline.remat=names",
        goal=0.74,
        published="71.5% (MaxText, 32B on 64 chips, 2048 tokens)",
    ),
    Row(
        "Llama 3 70B",
        "llama3-70b train.sequence_length=2048 train.batch_size=1024",
        "v5p:4x4x4",
        f"{NO_SHARDED_TOKENS} mesh.ici_stage=16 mesh.ici_fsdp=4 pipeline.repeats=5 "
        "pipeline.microbatches=256 pipeline.weight_gather=step pipeline.schedule=interleaved "
        f"{NAMES}",
        goal=0.74,
        published="65.4% (MaxText, Llama 2 70B on 512 chips, 4096 tokens, all pairs)",
    ),
    Row(
        "Llama 3 8B",
        "llama3-8b train.sequence_length=8192 train.batch_size=2048",
        "v6e:8x8",
        f"{NO_SHARDED_TOKENS} mesh.ici_stage=8 mesh.ici_fsdp=8 pipeline.repeats=4 "
        "pipeline.microbatches=256 pipeline.weight_gather=step pipeline.schedule=interleaved "
        "pipeline.remat=names pipeline.saved_names=[attention,gate]",
        goal=0.52,
        published="45.5% (MaxText, 256 chips, 8192 tokens)",
    ),
    Row(
        "Mixtral 8x7B",
        "mixtral-8x7b train.sequence_length=4096 train.batch_size=2048 "
        "model.moe.all_to_all_capacity_factor=1.25",
        "v5p:4x8x8",
        f"{NO_SHARDED_TOKENS} mesh.ici_stage=4 mesh.ici_data=8 mesh.ici_expert=8 "
        "pipeline.repeats=8 pipeline.microbatches=16 pipeline.weight_gather=iteration "
        f"pipeline.schedule=interleaved {NAMES}",
        goal=0.55,
        published="52.6% (MaxText, 256 chips)",
    ),
    Row(
        "DeepSeek-V3",
        "deepseek-v3 train.sequence_length=4096 train.batch_size=8192 model.mtp_heads=0 "
        "model.deepseek.all_to_all_capacity_factor=1.5 model.deepseek.all_to_all_chunks=4",
        "v5p:8x8x8",
        f"{NO_SHARDED_TOKENS} mesh.ici_stage=8 mesh.ici_expert=64 pipeline.repeats=4 "
        "pipeline.microbatches=128 pipeline.weight_gather=iteration "
        "pipeline.schedule=interleaved pipeline.remat=names "
        "pipeline.saved_names=[query_latent,latent,context,attention_out]",
        goal=0.4,
        published="33.2% (MaxText, 512 chips, sequence length not stated)",
    ),
    Row(
        "Llama 3 8B",
        "llama3-8b train.sequence_length=8192 train.batch_size=64",
        "h100:8",
        f"{NO_SHARDED_TOKENS}",
        compiled=2,
    ),
    Row(
        "Llama 3 8B",
        "llama3-8b train.sequence_length=8192 train.batch_size=512",
        "h100:8",
        f"{NO_SHARDED_TOKENS} mesh.ici_fsdp=8 pipeline.remat=names",
        slices=8,
        compiled=2,
    ),
    Row(
        "Qwen3 30B-A3B",
        "qwen3-30b-a3b train.sequence_length=4096 train.batch_size=64",
        "h100:8",
        f"{NO_SHARDED_TOKENS} mesh.ici_data=1",
        compiled=2,
    ),
    Row(
        "Qwen3 30B-A3B",
        "qwen3-30b-a3b train.sequence_length=4096 train.batch_size=512",
        "h100:8",
        f"{NO_SHARDED_TOKENS} mesh.ici_data=1 pipeline.weight_gather=iteration",
        slices=8,
        compiled=2,
    ),
)


@dataclass(frozen=True)
class Figures:
    """The best layout of a row. Shares are fractions of the cycles of a step."""

    layout: dict[str, Any]
    predicted_mfu: float
    predicted_bytes: float
    bubble: float
    compiled_bytes: float
    flops_ratio: float
    """FLOPs of all executed matmuls relative to the model FLOPs."""
    sent_bytes: float | None = None
    asynchronous: float | None = None
    """Fraction of the sent bytes. None on TPUs, as `sent_bytes`."""
    compiled_mfu: float | None = None
    """MFU according to the compiler, including exposed collectives. This figure and the following
    ones are None on GPUs."""
    all_pairs_mfu: float | None = None
    """`compiled_mfu` with all query-key pairs counted."""
    matmuls: float | None = None
    matmul_rate: float | None = None
    """Fraction of the peak that matmuls outside kernels reach."""
    attention_kernels: float | None = None
    expert_kernels: float | None = None
    exposed: float | None = None
    other: float | None = None


def search(row: Row, cache: Path) -> Figures | None:
    """Run the command of a row and return the figures of its best compiled layout. On failure,
    print the reason and return None.
    """
    compiler = "libtpu" if row.hardware.is_tpu else "jax-cuda12-plugin"
    try:
        importlib.metadata.distribution(compiler)
    except importlib.metadata.PackageNotFoundError:
        print(f"skipped: {row.key}: needs {compiler}", file=sys.stderr)
        return None
    print(f"searching {row.key}", file=sys.stderr, flush=True)
    command = [*row.arguments, "--reports", str(cache), "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "maxpipe", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        reason = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        print(f"skipped: {row.key}: {reason[-1][:300]}", file=sys.stderr)
        return None
    for values in json.loads(run.stdout)["compiled"]:
        if values["compiled_fits"]:
            return figures_of(row, values, CompileReport.from_json(values["report"]))
    print(f"skipped: {row.key}: no compiled layout fits", file=sys.stderr)
    return None


def figures_of(row: Row, values: Mapping[str, Any], report: CompileReport) -> Figures:
    """Return the figures of a compiled layout."""
    mfu = values["compiled_mfu"]
    figures: dict[str, Any]
    if mfu is None:
        sent = sum(each.total_bytes for each in report.collectives)
        figures = {"sent_bytes": sent, "asynchronous": report.asynchronous_share}
    else:
        figures = {"compiled_mfu": mfu, "all_pairs_mfu": mfu * row.all_pairs_factor}
        figures |= shares_of(report.entries)
    return Figures(
        layout=values["layout"],
        predicted_mfu=values["mfu"],
        predicted_bytes=values["total_bytes"],
        bubble=values["bubble"],
        compiled_bytes=report.total_bytes,
        flops_ratio=report.flops / report.model_flops,
        **figures,
    )


def shares_of(lines: Sequence[ProfileLine]) -> dict[str, float]:
    """Return the shares of kinds of operations in the cycles of a step."""

    def cycles(kind: str, part: str | None = None) -> float:
        return sum(each.cycles for each in lines if each.kind == kind and part in (None, each.part))

    whole = sum(each.cycles for each in lines)
    exposed = sum(each.cycles for each in lines if each.is_exposed)
    matmuls, kernels, experts = cycles("matmul"), cycles("kernel"), cycles("kernel", EXPERTS)
    at_peak = sum(each.cycles * each.of_peak for each in lines if each.kind == "matmul")
    return {
        "matmuls": matmuls / whole,
        "matmul_rate": at_peak / matmuls,
        "attention_kernels": (kernels - experts) / whole,
        "expert_kernels": experts / whole,
        "exposed": exposed / whole,
        "other": (whole - matmuls - kernels - exposed) / whole,
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def page(results: Mapping[str, Figures]) -> str:
    """Return the page content below the preamble."""
    found = [(row, results[row.key]) for row in ROWS if row.key in results]
    tpu = [(row, best) for row, best in found if row.hardware.is_tpu]
    gpu = [(row, best) for row, best in found if not row.hardware.is_tpu]
    head = ["model", "devices", "predicted MFU", "compiled MFU", "all pairs counted", "goal"]
    head += ["published", "predicted GiB", "compiled GiB"]
    lines = ["## TPUs", "", *table(head, [_tpu_cells(row, best) for row, best in tpu])]
    lines += ["Shares of the cycles of a step, including exposed collectives:", ""]
    head = ["model", "devices", "matmuls", "rate of matmuls", "attention kernels"]
    head += ["expert kernels", "exposed collectives", "other", "FLOPs / model FLOPs", "bubble"]
    lines += table(head, [_shares(row, best) for row, best in tpu])
    head = ["model", "devices", "predicted MFU", "FLOPs / model FLOPs", "sent GiB", "asynchronous"]
    head += ["predicted GiB", "compiled GiB"]
    lines += ["## GPUs", "", *table(head, [_gpu_cells(row, best) for row, best in gpu])]
    lines += ["## Layouts and commands", ""]
    for row, best in found:
        layout = " ".join(f"{key}={value}" for key, value in best.layout.items())
        lines += [f"{row.key}:", "", f"`{layout}`", ""]
        lines += [f"    maxpipe {' '.join(row.arguments)}", ""]
    if absent := [row.key for row in ROWS if row.key not in results]:
        lines += ["## Rows without a result", ""]
        lines += [f"The script also lists {', '.join(absent)}. No layout of these rows has been"]
        lines += ["compiled yet.", ""]
    return "\n".join(lines)


def _tpu_cells(row: Row, best: Figures) -> list[str]:
    assert best.compiled_mfu is not None, "the TPU compiler estimates cycles"
    return [
        *(row.name, row.where),
        *map(percent, (best.predicted_mfu, best.compiled_mfu, best.all_pairs_mfu)),
        f"{row.goal:.0%}, {'met' if best.compiled_mfu >= row.goal else 'missed'}",
        *(row.published, *_memory(best)),
    ]


def _shares(row: Row, best: Figures) -> list[str]:
    shares = [best.matmuls, best.matmul_rate, best.attention_kernels, best.expert_kernels]
    shares += [best.exposed, best.other]
    ratio = f"{best.flops_ratio:.2f}"
    return [row.name, row.where, *map(percent, shares), ratio, percent(best.bubble)]


def _gpu_cells(row: Row, best: Figures) -> list[str]:
    assert best.sent_bytes is not None
    return [
        *(row.name, row.where, percent(best.predicted_mfu), f"{best.flops_ratio:.2f}"),
        *(f"{best.sent_bytes / GIB:.1f}", percent(best.asynchronous), *_memory(best)),
    ]


def _memory(best: Figures) -> list[str]:
    return [f"{size / GIB:.1f}" for size in (best.predicted_bytes, best.compiled_bytes)]


PREAMBLE = """\
# Layouts with the highest MFU

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/best_layouts.py --write`. No accelerator was used. Each row is the result of one
`maxpipe plan --search --objective mfu --compile N`, which is listed at the end of the page. The
values after `--fix` in these commands limit the search to one mesh or to a few meshes, because each
compilation uses minutes of CPU time. They were chosen by predicting the layouts around them.

- "predicted MFU" is the prediction that ranks the layouts of a search.
- "compiled MFU" divides the model FLOPs by the peak FLOP rate and by the compiler's step time. This
  time consists of the compiler's cycle estimate on the busiest stages, so that it contains the
  bubble, and the time of the collectives that do not overlap with compute, at the published link
  bandwidth.
- The compiler has no estimate for custom kernels (splash attention, grouped matmuls of experts).
  They are counted at the rates that follow from their instruction schedules:
  [kernel_schedules](kernel_schedules.md) and [experts](experts.md). Gathers of rows and some
  changes of the memory layout have no estimate either, and are counted at the memory bandwidth.
- Model FLOPs count the causal half of the query-key pairs, 6 FLOPs per active parameter and token,
  and no recomputation. "all pairs counted" is the same figure with all query-key pairs, as some
  publications count them.
- "published" is the MFU that another trainer measured for the most similar run. It was measured on
  devices, and the figures of this page were not.
- "goal" applies to the compiled MFU.

The GPU compiler has no time estimates, so the MFU of GPUs is a prediction. All rows were compiled
on 2026-12-01. On TPUs, a batch has 8M tokens (8B on v5p, Mixtral), 17M tokens (8B on v6e), 34M
tokens (DeepSeek-V3) or 2M tokens (70B). These batches are larger than those of the publications.

## Observations

- 70B reaches its MFU with a pipeline of 16 stages: the 16 stages hold gathered weights (`step`),
  and 256 microbatches with 5 repeats leave a bubble of 1%. One layer per chunk keeps the saved
  activations small enough for `names`, which recomputes nothing.
- 8B on v5p needs no stages. At an earlier revision, 16 instead of 8 microbatches raised the
  compiled MFU from 73.7% to 78.3%. With `mesh.ici_fsdp=64`, `weight_gather=iteration`, 8192 tokens
  per sequence and 512 sequences, it was 44.3%, because XLA replaces all gathers over all 64 chips
  by synchronous all-reduces, which send twice the bytes. The prediction for this layout was 55.7%.
  Neither layout is in the tables.
- Five changes raised 8B on v6e from 33.8% to 52.6%: attention kernels with fewer matmuls ([decision
  52](../docs/decisions/0052-attention-kernels-on-tpus.md)), a larger VMEM limit
  ([device_options](device_options.md)), fixed memory layouts of saved activations, which XLA had
  copied at 10% of the cycles, fewer passes over activations in ticks without a loss, and a receive
  buffer with a single slot. With two slots, XLA copied each message to and from the buffer, and the
  MFU was 51.6%. Attention kernels still reach only 44% of the peak, compared with 87% on v5p.
  `names` without `up` is used because complete `names` needs 35.7 GiB. With `mesh.ici_stage=4
  mesh.ici_fsdp=16 pipeline.repeats=8`, which has a smaller bubble, XLA recomputes more operations
  to fit into the memory (1.18 instead of 1.10 times the model FLOPs), and the step takes longer
  (compiled at an earlier revision). Saving `up` instead of recomputing it lowers the MFU to 48.2%:
  XLA then computes the activation function in a separate pass (one compilation at an earlier
  revision, not in the tables).
- Mixtral needs an expert axis, so that a device holds one expert. Without it (8 stages x 32 fsdp
  shards), the compiled MFU was 30.3%: a device holds the weights of all experts of its layers,
  2.6 GiB per layer, for microbatches of only 4096 tokens. XLA copies these weights out of the stack
  for each kernel (14% of the cycles), and adds their gradients in a separate pass (10%). The row
  limits the rows that a device receives to 1.25 times the mean.
- With 2048 tokens, attention kernels reach 76% of the peak on v5p, less than the 87% that the table
  assumes. With 76%, the MFU of 8B and 70B would be 0.3 to 0.7 points lower.
- DeepSeek-V3 on v5p:8x8x8 had 34.9% at an earlier revision, counted in the same way. Attention
  kernels that read the RoPE dims of latent attention as separate arrays, and exchanges in tiles of
  rows, raised it to 40.6%. The order of exchanges ([decision
  55](../docs/decisions/0055-exchanges-of-experts-on-tpus.md)) raised it to 42.5%, gathers on sparse
  cores ([decision 31](../docs/decisions/0031-collective-overlap-on-tpus.md)) to 44.1%, and the
  receive buffer with a single slot to 44.3%. In the step of 142 Gcycles, exposed exchanges over 64
  devices need 5.7%, copies 6.4%, and gathers of rows 5.8% (with 44.1%). Exchanges are counted with
  the capacity of the buffers, 1.5 times the mean. Almost half of the copies change the memory
  layout of one weight, because its shards have 112 columns, which do not fill the lanes. A stage
  has 8 of 61 layers, which costs 4.7%. Attention kernels reach 80% of the peak in this model, less
  than the 87% that the table assumes. With 80%, the MFU would be 0.3 points lower.
  `weight_gather=window` needs 105 GiB, or 88 GiB if `context` is recomputed (compiled at an earlier
  revision).
- Fused kernels for the loss head, rotary embeddings and norms would gain little. Outside of its
  matmuls, the head needs 0.2 to 1.0% of the cycles on v5p and 3.0% on v6e, half of them for the
  sums over stages, which a kernel does not save. Rotary embeddings and norms need 2 to 3.4% on v5p
  and 6.4% on v6e. XLA already fuses them into one pass over the activations, which a kernel
  also needs.
- *8B on 8 H100.* XLA overlaps collectives only within 95% of the memory that arguments do not
  occupy. maxpipe lets programs use 92% of the memory of a GPU. With 75%, the default of jax, XLA
  executed all gathers and reductions of this layout synchronously.
- *Qwen3 30B-A3B on 8 H100.* The best layout has 8 stages and no expert axis, so only messages
  between stages and sums of the loss head are sent. The prediction of its memory is 12% too high.
  On 64 GPUs, 99% of the sent bytes are asynchronous.
- 70B on v6e:8x8 was not compiled. All predicted layouts without tensor or context sharding exceed
  31.25 GiB at 8192 tokens per sequence.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="run only rows whose name or devices contain one of the texts",
    )
    cache = Path(tempfile.gettempdir()) / "maxpipe-best-layouts"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of compile reports")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    values = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for row in ROWS:
        if not any(text in row.key for text in options.rows):
            continue
        if best := search(row, options.cache):
            known = {name: value for name, value in asdict(best).items() if value is not None}
            values[row.key] = known
            if options.write:  # after each row, because all rows together need hours
                RESULTS.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    text = page({key: Figures(**figures) for key, figures in values.items()})
    print(text)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + text, encoding="utf-8")


if __name__ == "__main__":
    main()
