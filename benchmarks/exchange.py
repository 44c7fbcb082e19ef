"""Measure memory and time of Hugging Face imports and exports, compared with a checksummed copy.

    python benchmarks/exchange.py                        # prints the table
    python benchmarks/exchange.py --model llama3-1b      # measures a smaller model
    python benchmarks/exchange.py --write                # and writes exchange.md
    python benchmarks/exchange.py --mxfp4                # imports a quantized gpt-oss-20b

The script creates a folder with random bfloat16 weights in files of at most 5 GB. It then runs five
steps: copy the folder, import it, copy it again, export the imported checkpoint, and copy the
folder a third time. A copy computes the SHA-256 of each file and flushes the files to disk. The
exported files must be identical to the original files. Each command is compared with the copies
directly before and after it, because disk speed and other load vary. Files are dropped from the
page cache before they are read. Memory is the sampled peak resident set size of a process. The
script requires free disk space of three times the model size.

With `--mxfp4`, the experts are 4-bit codes with scales, as in the published GPT-OSS. Only the
import is measured, which writes bfloat16 weights of about 3 times the size of the folder. `--write`
replaces only the section of the measured kind of folder.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from maxpipe.config.load import load
from maxpipe.huggingface.config_json import FILE, table_for, to_json
from maxpipe.huggingface.export import SHARD_BYTES, shard_tensors
from maxpipe.huggingface.folder import INDEX
from maxpipe.huggingface.mapping import map_tensors
from maxpipe.huggingface.safetensors import SafetensorsWriter
from maxpipe.models.registry import describe

PAGE = Path(__file__).with_suffix(".md")
LIMITS = {"time": 1.5, "memory": 2.0}
QUANTIZED_TIME_LIMIT = 2.0
SECTIONS = {False: "Plain weights", True: "Quantized weights"}
_BLOCK = 1 << 23
_POOL = 1 << 25


@dataclass(frozen=True)
class Measured:
    """Wall time and CPU time (summed over cores) in seconds, and peak memory in bytes."""

    seconds: float
    cores: float
    peak: int = 0


def make(model: str, folder: Path) -> None:
    """Create a Hugging Face folder of the model with random weights."""
    values = {"train.steps": 1, "tokenizer.kind": "huggingface", "tokenizer.path": "none"}
    config = load([model, *(f"{key}={value}" for key, value in values.items())]).config.model
    table, said = table_for(config)
    both = map_tensors(describe(config), table)
    files = shard_tensors(both, dict.fromkeys(both.tensors, "BF16"), SHARD_BYTES)
    folder.mkdir()
    draw = np.random.default_rng(17)
    pool = (draw.standard_normal(_POOL, np.float32) * 0.02).astype("bfloat16")
    for name, tensors in files.items():
        with SafetensorsWriter(folder / name, tensors) as writer:
            for tensor, (_, shape) in tensors.items():
                width = int(np.prod(shape[1:]))
                step = max(1, _POOL // 2 // width)
                for first in range(0, shape[0], step):
                    rows = min(step, shape[0] - first)
                    begin = int(draw.integers(_POOL - rows * width + 1))
                    part = pool[begin : begin + rows * width]
                    writer.write(tensor, part.reshape(rows, *shape[1:]), first)
    if len(files) > 1:
        index = {tensor: name for name, group in files.items() for tensor in group}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / FILE).write_text(to_json(table, said, {}, "bfloat16", {}))


def make_quantized(model: str, layers: int, folder: Path) -> int:
    """Create a GPT-OSS folder with MXFP4 experts, and return the bytes of dequantized weights."""
    values = {"train.steps": 1, "tokenizer.kind": "huggingface", "tokenizer.path": "none"}
    values |= {"model.num_layers": layers} if layers else {}
    config = load([model, *(f"{key}={value}" for key, value in values.items())]).config.model
    table, said = table_for(config)
    both = map_tensors(describe(config), table)
    folder.mkdir()
    draw = np.random.default_rng(17)
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size, total = 0, 0
    for name, shape in both.tensors.items():
        total += 2 * math.prod(shape)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {name: ("BF16", shape)}
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            blocks = (experts, outputs, inputs // 32)
            parts = {f"{name}_blocks": ("U8", (*blocks, 16)), f"{name}_scales": ("U8", blocks)}
        more = sum(num_bytes(*part) for part in parts.values())
        if size + more > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1] |= parts
        size += more
    index = {}
    for number, tensors in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        index |= dict.fromkeys(tensors, file)
        place, header = 0, {}
        for name, (dtype, shape) in tensors.items():
            end = place + num_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
            place = end
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name, (dtype, shape) in tensors.items():
                left = num_bytes(dtype, shape)
                while left:
                    part = min(left, _POOL)
                    if dtype == "BF16":
                        values = draw.standard_normal(part // 2, np.float32) * 0.02
                        stream.write(values.astype("bfloat16").tobytes())
                    elif name.endswith("_scales"):
                        stream.write(draw.integers(112, 122, part, np.uint8).tobytes())
                    else:
                        stream.write(draw.bytes(part))
                    left -= part
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    said |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / FILE).write_text(to_json(table, said, {}, "bfloat16", {}))
    return total


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor of bfloat16 numbers or of bytes."""
    return math.prod(shape) * (2 if dtype == "BF16" else 1)


def measured_quantized(model: str, layers: int, base: Path) -> str:
    """Import a quantized folder between two copies, and return the page content."""
    source, copy, checkpoint = (base / name for name in ("hf", "copy", "ckpt"))
    total = make_quantized(model, layers, source)
    sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    load_before = os.getloadavg()[0]
    before, _ = copied(source, copy)
    shutil.rmtree(copy)
    found = run(source, "import", str(source), "--out", str(checkpoint))
    load_after = os.getloadavg()[0]
    shutil.rmtree(checkpoint)
    after, _ = copied(source, copy)
    ratio = 2 * found.seconds / (before.seconds + after.seconds)
    size, largest = sum(sizes.values()), max(sizes.values())
    part = f" with {layers} layers" if layers else ""
    return "\n".join(
        [
            f"{model}{part} has {size / 1e9:.1f} GB of weights with MXFP4 experts, and the largest "
            f"file has {largest / 1e9:.2f} GB. The import writes {total / 1e9:.1f} GB of bfloat16 "
            "weights: compared with a copy of that many bytes, its time is "
            f"{ratio * size / total:.2f}. The time for a copy with SHA-256 and fsync was "
            f"{before.seconds:.0f} s before and {after.seconds:.0f} s after the import. The load "
            f"average on {os.cpu_count()} cores was {load_before:.1f} before and {load_after:.1f} "
            "after the import.",
            "",
            "| command | time | relative to a copy | limit | CPU seconds | peak memory "
            "| relative to the largest file | limit |",
            "|---|---|---|---|---|---|---|---|",
            f"| `maxpipe import` (MXFP4) | {found.seconds:.0f} s | {ratio:.2f} | "
            f"{QUANTIZED_TIME_LIMIT} | {found.cores:.0f} | {found.peak / 1e9:.2f} GB | "
            f"{found.peak / largest:.2f} | {LIMITS['memory']:.0f} |",
        ]
    )


def copied(source: Path, target: Path) -> tuple[Measured, dict[str, str]]:
    """Copy the weights, and return the times and the SHA-256 of each file."""
    with cold(source):
        begin, before, digests = time.monotonic(), used(resource.RUSAGE_SELF), {}
        target.mkdir()
        for path in sorted(source.glob("*.safetensors")):
            total = hashlib.sha256()
            with open(path, "rb") as here, open(target / path.name, "wb") as there:
                while block := here.read(_BLOCK):
                    total.update(block)
                    there.write(block)
                there.flush()
                os.fsync(there.fileno())
            digests[path.name] = total.hexdigest()
        cores = used(resource.RUSAGE_SELF) - before
        return Measured(time.monotonic() - begin, cores), digests


def run(source: Path, *command: str) -> Measured:
    """Run a maxpipe command in a separate process and return its times and memory."""
    with cold(source):
        begin, before, peak = time.monotonic(), used(resource.RUSAGE_CHILDREN), 0
        process = subprocess.Popen(
            [sys.executable, "-m", "maxpipe", *command], stdout=subprocess.DEVNULL
        )
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(peak, 1024 * int(status.partition("VmHWM:")[2].split()[0]))
            time.sleep(0.05)
        assert process.returncode == 0, command
        cores = used(resource.RUSAGE_CHILDREN) - before
        return Measured(time.monotonic() - begin, cores, peak)


def used(whose: int) -> float:
    """Return the CPU time of this process or of its finished children, in seconds."""
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def cold(folder: Path) -> Iterator[None]:
    """Flush pending writes and drop the files of the folder from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield


def measured(model: str, base: Path) -> str:
    """Run all steps and return the page content."""
    source, copy, checkpoint, out = (base / name for name in ("hf", "copy", "ckpt", "out"))
    make(model, source)
    sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    copies: list[Measured] = []
    found: dict[str, Measured] = {}
    loads = [os.getloadavg()[0]]
    for name, at, command in (
        ("import", source, ("import", str(source), "--out", str(checkpoint))),
        ("export", checkpoint, ("export", str(checkpoint), str(out))),
    ):
        copies.append(copied(source, copy)[0])
        shutil.rmtree(copy)
        found[name] = run(at, *command)
        loads.append(os.getloadavg()[0])
        print(f"copy {copies[-1].seconds:.1f} s, {name} {found[name].seconds:.1f} s", flush=True)
    shutil.rmtree(checkpoint)
    last, digests = copied(source, copy)
    copies.append(last)
    for name, digest in digests.items():
        with open(out / name, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest, name
    largest = max(sizes.values())
    lines = [
        f"{model} has {sum(sizes.values()) / 1e9:.1f} GB of bfloat16 weights, and the largest file "
        f"has {largest / 1e9:.2f} GB. The time for a copy with SHA-256 and fsync was "
        f"{', '.join(f'{one.seconds:.0f} s' for one in copies)} before, between and after the "
        "commands. Each command is compared with the copies directly before and after it. The CPU "
        f"time of the copies was {', '.join(f'{one.cores:.0f} s' for one in copies)}. The "
        "exported files are identical to the original files. The load average on "
        f"{os.cpu_count()} cores was {', '.join(f'{load:.1f}' for load in loads)} at the start, "
        "after the import and after the export.",
        "",
        "| command | time | relative to a copy | limit | CPU seconds | peak memory "
        "| relative to the largest file | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for at, (name, one) in enumerate(found.items()):
        ratio = 2 * one.seconds / sum(each.seconds for each in copies[at : at + 2])
        lines.append(
            f"| `maxpipe {name}` | {one.seconds:.0f} s | {ratio:.2f} | {LIMITS['time']} | "
            f"{one.cores:.0f} | {one.peak / 1e9:.2f} GB | {one.peak / largest:.2f} | "
            f"{LIMITS['memory']:.0f} |"
        )
    return "\n".join(lines)


def write(kind: str, section: str) -> None:
    """Replace a section of the page."""
    sections = dict.fromkeys(SECTIONS.values(), "")
    if PAGE.exists():
        for name, text in re.findall(r"(?ms)^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", PAGE.read_text()):
            sections[name] = text.rstrip()
    sections[kind] = section
    parts = [f"## {name}\n\n{text}\n" for name, text in sections.items() if text]
    PAGE.write_text("\n".join(["# Import and export of Hugging Face folders\n", *parts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name of a bundled model")
    parser.add_argument("--mxfp4", action="store_true", help="import a folder with MXFP4 experts")
    parser.add_argument("--layers", type=int, default=0, help="number of layers with --mxfp4")
    parser.add_argument("--folder", help="folder to write to (default: the temporary folder)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    model = options.model or ("gpt-oss-20b" if options.mxfp4 else "llama3-8b")
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        if options.mxfp4:
            table = measured_quantized(model, options.layers, Path(base))
        else:
            table = measured(model, Path(base))
    print(table)
    if options.write:
        words = ["python benchmarks/exchange.py", f"--model {model}"]
        words += ["--mxfp4"] * options.mxfp4
        words += [f"--layers {options.layers}"] if options.layers else []
        command, today = " ".join([*words, "--write"]), datetime.now(UTC).date()
        about = f"`{command}`, on {os.cpu_count()} CPU cores, {today}."
        write(SECTIONS[options.mxfp4], f"{about}\n\n{table}")


if __name__ == "__main__":
    main()
