"""Compare the memory that `maxpipe plan` predicts with the memory that the TPU compiler reports.

    python benchmarks/predicted_memory.py            # prints the table
    python benchmarks/predicted_memory.py --write    # and writes predicted_memory.md
    python benchmarks/predicted_memory.py --only 70b # only rows whose name contains 70b
    python benchmarks/predicted_memory.py --terms    # and the terms of each prediction

If `--write` is combined with `--only`, the page keeps the compiler results of all other rows.

Each row combines a config from `configs/model/` with a topology. `maxpipe compile` compiles the
real train step with libtpu (`pip install '.[tpu]'`), without a TPU, and `maxpipe plan` predicts its
memory. Each compilation is stopped before code generation, which dominates the compile time but
does not change the memory. Results are cached in `--cache` by row and by a digest of the package's
source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_assignment import LAST, read_sizes

ROOT = Path(__file__).parents[1]
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A table row: a config and a topology."""

    model: str
    topology: str
    slices: int
    keys: str
    """Config keys, without the section names `mesh`, `pipeline` and `train`."""

    @property
    def name(self) -> str:
        slices = f" x {self.slices}" if self.slices > 1 else ""
        return f"{self.model} {self.topology}{slices}: {self.keys}"

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments for `maxpipe plan` and `maxpipe compile`."""
        fixed = "train.steps=10 tokenizer.kind=huggingface tokenizer.path=none"
        placed = ["--topology", self.topology, "--slices", str(self.slices)]
        names = [(key, key.partition("=")[0]) for key in self.keys.split()]
        keys = [key if "." in name else f"{SECTION[name]}.{key}" for key, name in names]
        return [f"configs/model/{self.model}.yml", *fixed.split(), *keys, *placed]


PROGRAM = ("runtime.py", "compile.py", "hlo_parser.py", "instruction_costs.py")
"""Files outside `FOLDERS` in the cache digest: they affect the compiled program or its report."""
FOLDERS = {"models", "nn", "schedule", "parallel", "pipeline", "optim", "step"}
CACHE = Path(tempfile.gettempdir()) / "maxpipe-predicted-memory"
AXES = ("stage", "data", "fsdp", "expert", "tensor")
PIPELINE = ("schedule", "repeats", "group", "microbatches", "weight_gather", "remat")
SECTION = {
    **{f"{link}_{axis}": "mesh" for link in ("ici", "dcn") for axis in AXES},
    **dict.fromkeys(PIPELINE, "pipeline"),
    "batch_size": "train",
    "sequence_length": "train",
}

ROWS = [
    Row(*row)
    for row in (
        (
            "llama3-1b",
            "v5e:4x4",
            1,
            "ici_fsdp=16 microbatches=2 batch_size=64 sequence_length=2048",
        ),
        (
            "llama3-1b",
            "v5e:4x4",
            1,
            "ici_stage=4 ici_fsdp=4 repeats=2 microbatches=16 batch_size=64 sequence_length=2048",
        ),
        (
            "llama3-1b",
            "v4:2x2x4",
            1,
            "ici_stage=2 ici_fsdp=8 schedule=1f1b microbatches=8 batch_size=128 "
            "sequence_length=4096 remat=names weight_gather=step",
        ),
        (
            "llama3-1b",
            "v5p:2x2x4",
            1,
            "ici_stage=2 ici_fsdp=8 repeats=2 microbatches=8 batch_size=128 sequence_length=2048 "
            "remat=none",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 sequence_length=2048",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 sequence_length=8192",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=step remat=names",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=8 group=16 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=window",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 schedule=zb_h1 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=step remat=names",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 schedule=zb_v repeats=2 microbatches=16 batch_size=128 "
            "sequence_length=2048 remat=names",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=4 microbatches=16 batch_size=256 "
            "sequence_length=4096 remat=chunk",
        ),
        (
            "llama3-8b",
            "v6e:8x8",
            1,
            "ici_fsdp=16 ici_tensor=4 microbatches=4 batch_size=64 sequence_length=8192",
        ),
        (
            "llama3-8b",
            "v5e:8x8",
            1,
            "ici_stage=4 ici_fsdp=16 repeats=2 microbatches=8 batch_size=128 sequence_length=2048",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=32 microbatches=2 batch_size=128 sequence_length=2048 remat=names",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=32 microbatches=1 batch_size=128 sequence_length=2048",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=32 microbatches=1 batch_size=128 sequence_length=2048 remat=names",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=1024 sequence_length=512",
        ),
        (
            "llama3-70b",
            "v5p:4x4x8",
            1,
            "ici_stage=4 ici_fsdp=32 repeats=2 microbatches=8 batch_size=256 sequence_length=4096",
        ),
        (
            "llama3-70b",
            "v5p:4x4x8",
            1,
            "ici_stage=8 ici_fsdp=16 repeats=2 microbatches=16 batch_size=256 "
            "sequence_length=4096 weight_gather=step remat=full",
        ),
        (
            "llama3-70b",
            "v5p:8x8x8",
            1,
            "ici_stage=8 ici_fsdp=16 ici_tensor=4 repeats=2 microbatches=16 batch_size=256 "
            "sequence_length=8192",
        ),
        (
            "llama3-70b",
            "v6e:16x16",
            1,
            "ici_stage=4 ici_fsdp=16 ici_tensor=4 repeats=4 microbatches=8 batch_size=128 "
            "sequence_length=4096",
        ),
        (
            "llama3-70b",
            "v5p:4x4x4",
            2,
            "dcn_stage=2 ici_stage=2 ici_fsdp=32 repeats=2 microbatches=16 batch_size=512 "
            "sequence_length=4096",
        ),
        (
            "llama3-70b",
            "v5p:4x4x4",
            4,
            "dcn_data=4 ici_stage=4 ici_fsdp=16 repeats=2 microbatches=8 batch_size=512 "
            "sequence_length=4096",
        ),
        (
            "llama3-70b",
            "v5p:4x4x8",
            1,
            "ici_fsdp=64 ici_tensor=2 microbatches=4 batch_size=256 sequence_length=4096",
        ),
        (
            "llama3-405b",
            "v5p:8x8x8",
            1,
            "ici_stage=8 ici_fsdp=64 repeats=2 microbatches=16 batch_size=1024 "
            "sequence_length=4096",
        ),
        (
            "llama3-405b",
            "v5p:16x16x16",
            1,
            "ici_stage=16 ici_fsdp=64 ici_tensor=4 repeats=2 microbatches=32 "
            "batch_size=2048 sequence_length=8192",
        ),
        (
            "llama3-405b",
            "v5p:8x8x8",
            2,
            "dcn_stage=2 ici_stage=8 ici_fsdp=64 repeats=1 schedule=1f1b microbatches=16 "
            "batch_size=1024 sequence_length=4096",
        ),
        (
            "llama3-1b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 "
            "sequence_length=1024 weight_gather=step",
        ),
        (
            "llama3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=2 ici_fsdp=16 repeats=4 group=16 microbatches=16 batch_size=256 "
            "sequence_length=2048 weight_gather=window",
        ),
        (
            "gemma3-12b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 sequence_length=2048",
        ),
        (
            "gemma3-12b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=step remat=names",
        ),
        (
            "gemma3-12b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 schedule=zb_h1 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=step remat=names",
        ),
        (
            "gemma3-12b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=4 group=16 microbatches=16 batch_size=128 "
            "sequence_length=2048 weight_gather=window",
        ),
        (
            "gemma3-27b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=4 ici_tensor=2 repeats=2 microbatches=16 "
            "batch_size=64 sequence_length=4096",
        ),
        (
            "gemma3-4b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 "
            "sequence_length=2048 remat=none",
        ),
        (
            "mixtral-8x7b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 sequence_length=2048",
        ),
        (
            "mixtral-8x7b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=4 ici_tensor=2 schedule=zb_h1 microbatches=16 batch_size=64 "
            "sequence_length=2048 weight_gather=step remat=names",
        ),
        (
            "mixtral-8x7b",
            "v5p:2x4x4",
            1,
            "model.moe.num_dense_layers=4 ici_stage=4 ici_fsdp=4 ici_tensor=2 schedule=zb_h1 "
            "microbatches=16 batch_size=64 sequence_length=1024 remat=names",
        ),
        (
            "olmo3-7b",
            "v5p:2x2x4",
            1,
            "ici_fsdp=16 microbatches=2 batch_size=64 sequence_length=4096 remat=names",
        ),
        (
            "olmo3-7b",
            "v6e:4x8",
            1,
            "ici_stage=2 ici_fsdp=16 repeats=2 microbatches=8 batch_size=128 sequence_length=2048",
        ),
        (
            "smollm3-3b",
            "v5p:2x2x4",
            1,
            "ici_stage=4 ici_fsdp=4 repeats=3 microbatches=8 batch_size=64 "
            "sequence_length=4096 remat=full",
        ),
        (
            "smollm3-3b",
            "v6e:4x4",
            1,
            "ici_fsdp=8 ici_tensor=2 microbatches=2 batch_size=16 sequence_length=16384",
        ),
        (
            "ministral3-8b",
            "v5p:2x4x4",
            1,
            "ici_stage=2 ici_fsdp=16 schedule=1f1b microbatches=8 batch_size=128 "
            "sequence_length=4096 weight_gather=step remat=names",
        ),
        (
            "ministral3-8b",
            "v6e:4x8",
            1,
            "ici_fsdp=32 microbatches=1 batch_size=32 sequence_length=16384",
        ),
        (
            "llama4-scout-109b-a17b",
            "v5p:2x4x4",
            1,
            "model.num_layers=16 ici_stage=4 ici_fsdp=8 schedule=zb_h1 microbatches=8 "
            "batch_size=64 sequence_length=4096",
        ),
        (
            "llama4-scout-109b-a17b",
            "v6e:8x8",
            1,
            "model.num_layers=8 ici_fsdp=16 ici_expert=4 microbatches=1 batch_size=64 "
            "sequence_length=16384",
        ),
        (
            "qwen3.5-9b",
            "v5p:2x4x4",
            1,
            "ici_stage=4 ici_fsdp=8 repeats=2 microbatches=16 batch_size=128 sequence_length=2048",
        ),
        (
            "qwen3.5-9b",
            "v6e:4x8",
            1,
            "ici_fsdp=32 microbatches=2 batch_size=64 sequence_length=2048 remat=names",
        ),
        (
            "qwen3.5-35b-a3b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=8 ici_expert=4 microbatches=2 batch_size=64 sequence_length=4096",
        ),
        (
            "qwen3.5-35b-a3b",
            "v6e:8x8",
            1,
            "ici_stage=2 ici_fsdp=32 repeats=2 microbatches=8 batch_size=256 sequence_length=2048",
        ),
        (
            "qwen3.5-122b-a10b",
            "v5p:2x4x4",
            1,
            "model.num_layers=16 ici_stage=2 ici_fsdp=16 schedule=zb_h1 microbatches=8 "
            "batch_size=128 sequence_length=2048",
        ),
        (
            "qwen3.5-122b-a10b",
            "v6e:8x8",
            1,
            "model.num_layers=12 ici_fsdp=16 ici_expert=4 microbatches=2 batch_size=128 "
            "sequence_length=4096",
        ),
        (
            "glm4.5-air-106b-a12b",
            "v5p:2x4x4",
            1,
            "model.num_layers=9 ici_stage=2 ici_fsdp=16 repeats=4 microbatches=8 "
            "batch_size=128 sequence_length=4096 weight_gather=window",
        ),
        (
            "glm4.5-air-106b-a12b",
            "v6e:8x8",
            1,
            "model.num_layers=9 ici_fsdp=64 microbatches=1 batch_size=64 sequence_length=4096 "
            "remat=full",
        ),
        (
            "minimax-m2-230b-a10b",
            "v5p:2x4x4",
            1,
            "model.num_layers=8 ici_stage=4 ici_fsdp=8 schedule=1f1b microbatches=8 "
            "batch_size=64 sequence_length=4096 weight_gather=step remat=full",
        ),
        (
            "minimax-m2-230b-a10b",
            "v6e:8x8",
            1,
            "model.num_layers=8 ici_fsdp=16 ici_expert=4 microbatches=1 batch_size=64 "
            "sequence_length=4096",
        ),
        (
            "gemma4-31b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=32 microbatches=2 batch_size=64 sequence_length=4096",
        ),
        (
            "gemma4-e4b",
            "v5p:2x2x4",
            1,
            "ici_stage=4 ici_fsdp=4 microbatches=8 batch_size=64 sequence_length=2048",
        ),
        (
            "gemma4-e4b",
            "v6e:4x4",
            1,
            "ici_fsdp=16 microbatches=1 batch_size=16 sequence_length=4096",
        ),
        (
            "gemma4-26b-a4b",
            "v6e:8x8",
            1,
            "ici_fsdp=16 ici_expert=4 microbatches=1 batch_size=64 sequence_length=4096",
        ),
        (
            "kimi-k2-1t-a32b",
            "v5p:4x4x4",
            1,
            "model.num_layers=5 ici_fsdp=8 ici_expert=8 microbatches=1 batch_size=64 "
            "sequence_length=4096",
        ),
        (
            "kimi-k2-1t-a32b",
            "v6e:16x16",
            1,
            "model.num_layers=5 ici_fsdp=32 ici_expert=8 microbatches=1 batch_size=256 "
            "sequence_length=2048",
        ),
        (
            "olmo-hybrid-7b",
            "v5p:2x2x4",
            1,
            "ici_stage=2 ici_fsdp=8 schedule=1f1b microbatches=8 batch_size=64 "
            "sequence_length=4096",
        ),
        (
            "olmo-hybrid-7b",
            "v6e:4x8",
            1,
            "ici_fsdp=32 microbatches=1 batch_size=32 sequence_length=4096 remat=names",
        ),
        (
            "kimi-linear-48b-a3b",
            "v5p:2x4x4",
            1,
            "ici_fsdp=8 ici_expert=4 microbatches=1 batch_size=32 sequence_length=4096",
        ),
        (
            "kimi-linear-48b-a3b",
            "v6e:8x8",
            1,
            "ici_stage=2 ici_fsdp=32 schedule=1f1b microbatches=8 batch_size=256 "
            "sequence_length=2048",
        ),
        (
            "nemotron-nano2-9b",
            "v5p:2x2x4",
            1,
            "ici_stage=4 ici_fsdp=4 repeats=2 microbatches=8 batch_size=32 sequence_length=4096",
        ),
        (
            "nemotron-nano2-9b",
            "v6e:4x8",
            1,
            "ici_fsdp=32 microbatches=1 batch_size=32 sequence_length=4096",
        ),
        (
            "deepseek-v3.2",
            "v5p:4x4x4",
            1,
            "model.num_layers=5 ici_fsdp=8 ici_expert=8 microbatches=1 batch_size=64 "
            "sequence_length=4096",
        ),
        (
            "deepseek-v3.2",
            "v6e:16x16",
            1,
            "model.num_layers=5 ici_fsdp=32 ici_expert=8 microbatches=1 batch_size=256 "
            "sequence_length=4096",
        ),
        (
            "deepseek-v4-flash",
            "v5p:4x4x4",
            1,
            "model.num_layers=6 ici_fsdp=8 ici_expert=8 microbatches=1 batch_size=64 "
            "sequence_length=4096",
        ),
        (
            "deepseek-v4-flash",
            "v6e:16x16",
            1,
            "model.num_layers=6 ici_fsdp=32 ici_expert=8 microbatches=1 batch_size=256 "
            "sequence_length=4096",
        ),
        (
            "kimi-k2-1t-a32b",
            "v5p:8x8x16",
            1,
            "ici_stage=16 ici_fsdp=8 ici_expert=8 repeats=1 schedule=1f1b microbatches=32 "
            "batch_size=2048 sequence_length=4096",
        ),
        (
            "llama3.1-8b",
            "v5p:2x2x4",
            1,
            "ici_stage=2 ici_fsdp=8 schedule=1f1b microbatches=8 batch_size=64 "
            "sequence_length=8192",
        ),
        (
            "llama3.1-8b",
            "v6e:4x4",
            1,
            "ici_fsdp=16 microbatches=1 batch_size=16 sequence_length=8192",
        ),
        (
            "llama3.3-70b",
            "v5p:4x4x4",
            1,
            "ici_stage=4 ici_fsdp=16 repeats=4 microbatches=8 batch_size=128 sequence_length=8192",
        ),
        (
            "llama3.3-70b",
            "v6e:8x8",
            1,
            "ici_fsdp=32 ici_tensor=2 microbatches=2 batch_size=64 sequence_length=8192",
        ),
    )
]


def compiled(row: Row, cache: Path) -> dict[str, Any] | None:
    """Return the cached report, or compile the row in a new process. Return None on failure."""
    path = _cache_path(row, cache)
    if not path.exists():
        print(f"compiling {row.name}", file=sys.stderr)
        start = time.monotonic()
        run = subprocess.Popen(_maxpipe("compile", row), cwd=ROOT, stdout=subprocess.PIPE)
        assert run.stdout is not None
        printed = run.stdout.read()
        _, status, used = os.wait4(run.pid, 0)
        if status:
            print(f"skipped: the process ended with {status}", file=sys.stderr)
            return None
        took = {"wall_seconds": time.monotonic() - start, "process_bytes": 1024 * used.ru_maxrss}
        path.write_text(json.dumps(json.loads(printed) | took, indent=2), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def compiled_sizes(row: Row, cache: Path) -> tuple[float, ...] | None:
    """Return the results of `read_sizes` in GiB, cached or from a new process, which is stopped
    before code generation. Return None on failure.
    """
    path = _cache_path(row, cache).with_suffix(".sizes.json")
    if not path.exists():
        print(f"compiling {row.name}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as dump:
            flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}
            command, output = _maxpipe("compile", row), subprocess.DEVNULL
            with subprocess.Popen(command, cwd=ROOT, stdout=output, env=os.environ | flags) as run:
                while not (dumped := any(Path(dump).glob(LAST))) and run.poll() is None:
                    time.sleep(1)
                run.kill()
            if not dumped:
                print(f"skipped: the process ended with {run.returncode}", file=sys.stderr)
                return None
            path.write_text(json.dumps(read_sizes(Path(dump))), encoding="utf-8")
    return tuple(size / GIB for size in json.loads(path.read_text(encoding="utf-8")))


def _cache_path(row: Row, cache: Path) -> Path:
    key = hashlib.sha256(f"{_sources()}{row}".encode()).hexdigest()[:24]
    return cache / f"{key}.json"


def _maxpipe(command: str, row: Row) -> list[str]:
    return [sys.executable, "-m", "maxpipe", command, *row.arguments, "--json"]


def _sources() -> str:
    """Return a digest of all source files that affect the compiled program."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "maxpipe").rglob("*.py")):
        if FOLDERS.intersection(path.parts) or path.name in PROGRAM:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def table(rows: list[Row], cache: Path, *, terms: bool, page: str = "") -> str:
    """Return the new page content. Results of rows that are not in `rows` are read from `page`."""
    head = ["run", "arguments", "peak", "allocated", "predicted", "ratio"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    ratios, details, missing = [], [], []
    for row in ROWS:
        sizes = compiled_sizes(row, cache) if row in rows else _written(row, page)
        if sizes is None:
            missing.append(f"- {row.name}")
            continue
        plan = json.loads(subprocess.check_output(_maxpipe("plan", row), cwd=ROOT))
        predicted = plan["total_bytes"] / GIB
        ratios.append(predicted / sizes[1])
        numbers = " | ".join(f"{size:.2f}" for size in (*sizes, predicted))
        lines.append(f"| {row.name} | {numbers} | {ratios[-1]:.3f} |")
        if terms:
            listed = ", ".join(f"{k} {v / GIB:.2f}" for k, v in plan["terms"].items())
            details.append(f"{row.name}\n    {listed}")
    near = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    lines += ["", f"{near} of {len(ratios)} predictions are within 10%."]
    if ratios:
        lines[-1] += f" The ratios range from {min(ratios):.3f} to {max(ratios):.3f}."
    if missing:
        lines += ["", "Rows without a compiler result:", "", *missing]
    return "\n".join([*lines, *details])


def _written(row: Row, page: str) -> tuple[float, ...] | None:
    """Return the compiled sizes of a row in the existing page."""
    for line in page.splitlines():
        if line.startswith(f"| {row.name} | "):
            return tuple(map(float, line.split(" | ")[1:4]))
    return None


PREAMBLE = """\
# Predicted memory compared with the TPU compiler

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/predicted_memory.py --write`. No TPU was used. Sizes are in GiB. Arguments,
peak and allocated memory are those of the compiler's buffer assignment. The peak includes the
arguments. The allocated memory also includes the gaps that the compiler leaves between temporaries.
docs/decisions/0016-peak-memory.md explains why the peak is used. Compilations are stopped after the
buffer assignment: code generation dominates the compile time but does not change the memory. For
SmolLM3 on v6e and for OLMo 3 on v5p, complete compilations reported the same peaks. The column
"predicted" is the total predicted by `maxpipe plan`. The fitted factors in
`maxpipe/planner/memory.py` are based on the rows for Llama 3 from 1B to 70B and on the rows with
`weight_gather=window`, as compiled on 2026-11-23. The arrays that are live at the peak of a layer
and of the loss were read from the compiled programs of Llama 3, Mixtral, MiniMax M2, Kimi K2, GLM
4.5 and Qwen 3.5. The rows for Gemma, OLMo 3, SmolLM3, Ministral 3, Llama 3.1, Llama 3.3 and Llama 4
were used for neither.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="compile only rows whose name contains TEXT"
    )
    parser.add_argument("--terms", action="store_true")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if options.only in row.name]
    target = Path(__file__).with_suffix(".md")
    old = target.read_text(encoding="utf-8") if options.write else ""
    page = table(rows, options.cache, terms=options.terms, page=old)
    print(page)
    if options.write:
        target.write_text(PREAMBLE + page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
