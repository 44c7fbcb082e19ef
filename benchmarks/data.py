"""Measure data loading: preparation compared with `datasets.map`, start-up, seeks and input rates.

    DATASETS=.../bin/python python benchmarks/data.py           # prints the tables
    DATASETS=.../bin/python python benchmarks/data.py --write   # and writes data.md

`DATASETS` is a Python interpreter with datasets, tokenizers and transformers. maxpipe and datasets
read the same JSON Lines file, which is generated from the source files of the Python standard
library. Both use the same tokenizer, trained on this file, and the same number of processes.
Repetitions alternate, and each ratio is the median over pairs of repetitions. For maxpipe, the full
command is measured, from its start until the checksums are written. For datasets, only `map` is
measured, excluding the JSON conversion before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.data.large import MEASURED, write_sparse  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
ORACLE = Path(__file__).with_name("data_oracle.py")
WAYS = ("library", "transformers")
REPEATS, PROCESSES = 5, 2
DOCUMENT_CHARACTERS, MEGABYTES = 3000, 60
VOCABULARY = 32768
LIMITS = {"prepare": 1.5, "start": 5.0, "memory": 1e9, "input": 5.0, "wait": 0.01}
STEPS = 60


def write_lines(path: Path) -> int:
    """Write documents of about 3000 characters each, and return their total size in bytes."""
    size = 0
    with path.open("w") as out:
        while size < MEGABYTES * 1e6:
            for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
                if "test" in file.parts or "site-packages" in file.parts:
                    continue
                text = file.read_text("utf-8", "replace")
                for start in range(0, len(text), DOCUMENT_CHARACTERS):
                    part = text[start : start + DOCUMENT_CHARACTERS]
                    out.write(json.dumps({"text": part}) + "\n")
                    size += len(part.encode())
                if size > MEGABYTES * 1e6:
                    break
    return size


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "maxpipe", *arguments]


def run(arguments: list[str], **variables: str) -> str:
    """Run a program and return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    ran = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    if ran.returncode:
        sys.exit(f"{' '.join(arguments)}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def prepared(folder: Path, lines: Path, tokenizer: Path, number: int) -> tuple[float, int]:
    """Return the time of `data prepare` in seconds, and the token count excluding BOS and EOS."""
    out = folder / f"tokens-{number}"
    start = time.perf_counter()
    keys = ["data.source=jsonl", f"data.path={lines}", "tokenizer.kind=huggingface"]
    keys.append(f"tokenizer.path={tokenizer}")
    run(command("data", "prepare", *keys, "--out", str(out), "--workers", str(PROCESSES)))
    seconds = time.perf_counter() - start
    manifest = json.loads((out / "manifest.json").read_text())
    return seconds, manifest["tokens"] - 2 * manifest["documents"]


def compare(folder: Path) -> list[str]:
    """Return the table that compares `maxpipe data prepare` with `datasets.map`."""
    lines, tokenizer = folder / "documents.jsonl", folder / "tokenizer"
    size = write_lines(lines)
    sample = folder / "sample.jsonl"
    with lines.open() as all_lines, sample.open("w") as few:
        few.writelines(line for number, line in enumerate(all_lines) if number % 8 == 0)
    options = ["--vocab-size", str(VOCABULARY), "--out", str(tokenizer)]
    run(command("tokenizer", "train", str(sample), *options))
    python = os.environ.get("DATASETS") or sys.exit(
        "DATASETS must name a Python interpreter with datasets"
    )
    times: dict[str, list[float]] = {name: [] for name in ("maxpipe", *WAYS)}
    for number in range(REPEATS):
        seconds, tokens = prepared(folder, lines, tokenizer, number)
        times["maxpipe"].append(seconds)
        for way in WAYS:
            arguments = [python, str(ORACLE), str(lines), str(tokenizer), str(PROCESSES), way]
            found = json.loads(run(arguments, TOKENIZERS_PARALLELISM="false"))
            assert found["tokens"] == tokens, (
                "maxpipe and datasets return different numbers of tokens"
            )
            times[way].append(found["seconds"])
        print({name: round(each[-1], 1) for name, each in times.items()}, file=sys.stderr)
    names = {
        "maxpipe": "`maxpipe data prepare`, full command",
        "library": "`datasets.map` with `encode_batch` of tokenizers, `map` only",
        "transformers": "`datasets.map` with a transformers tokenizer, `map` only",
    }
    rows = [f"{size / 1e6:.0f} MB of text, {tokens / 1e6:.1f} M tokens, {PROCESSES} processes.", ""]
    rows += ["| | seconds | MB/s | speedup of maxpipe | required |", "|---|---|---|---|---|"]
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        pairs = zip(seconds, times["maxpipe"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        last = f"{ratio:.2f} | {LIMITS['prepare']}" if name != "maxpipe" else "| "
        rows.append(f"| {names[name]} | {middle:.1f} | {size / middle / 1e6:.2f} | {last} |")
    return rows


def start(folder: Path) -> list[str]:
    """Return the table of start-up times for a run with 100 GB of data."""
    large = folder / "large"
    large.mkdir()
    write_sparse(large)
    found = [json.loads(run([sys.executable, "-c", MEASURED, str(large)])) for _ in range(REPEATS)]

    def row(name: str, values: list[float], limit: str, digits: int = 3) -> str:
        return f"| {name} | {statistics.median(values):.{digits}f} | {limit} |"

    return [
        "| 50 billion tokens in 100 million documents, 100 GB of sparse files | | limit |",
        "|---|---|---|",
        row(
            "opening the dataset, seconds",
            [each["open"] for each in found],
            f"{LIMITS['start']:.0f}",
            2,
        ),
        row("peak process memory, GB", [each["peak"] / 1e9 for each in found], "1", 2),
        row("first batch of 8 x 2048 tokens, seconds", [each["first"] for each in found], ""),
        row("batch of step 10, seconds", [each["seeks"][0] for each in found], ""),
        row("batch of step 10,000,000, seconds", [each["seeks"][1] for each in found], ""),
        row("next batch, seconds", [each["seeks"][2] for each in found], ""),
    ]


INPUT = """
import json, sys, time
from maxpipe.config.load import load
from maxpipe.data.loader import build_loaders
config = load(["quickstart", *sys.argv[1:]]).config
found = build_loaders(config.data, config.tokenizer, seed=0, batch_size=config.train.batch_size,
              sequence_length=config.train.sequence_length)
with found.train.batches(0, stop_step=3000) as batches:
    for _ in range(500):
        next(batches)
    start = time.perf_counter()
    count = sum(batch["tokens"].size for batch in batches)
print(json.dumps(count / (time.perf_counter() - start)))
"""


def rates(folder: Path) -> list[str]:
    """Return the table of quickstart input rates, for raw text and for prepared tokens."""
    tokens = folder / "corpus-tokens"
    run(command("data", "prepare", "quickstart", "--out", str(tokens), "--workers", "2"))
    rows = ["| data source | input, tokens/s | training, tokens/s | ratio | required |"]
    rows[0] += " wait time per step | limit |"
    rows.append("|---|---|---|---|---|---|---|")
    for name, keys in {
        "text": [],
        "prepared tokens": ["data.source=tokens", f"data.path={tokens}"],
    }.items():
        rate = json.loads(run([sys.executable, "-c", INPUT, *keys]))
        more = [f"run.dir={folder / 'runs'}", f"run.name={name.replace(' ', '-')}"]
        more += [f"train.steps={STEPS}", "eval.every=0", "eval.batches=0", "checkpoint.every=0"]
        run(command("train", "quickstart", *keys, *more))
        path = folder / "runs" / name.replace(" ", "-") / "metrics.jsonl"
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        logged = [each for each in logged if "perf/step_s" in each][1:]
        used = statistics.median(each["perf/tokens_per_s"] for each in logged)
        wait = statistics.median(each["perf/data_wait_s"] / each["perf/step_s"] for each in logged)
        rows.append(
            f"| {name} | {rate:,.0f} | {used:,.0f} | {rate / used:.0f} | {LIMITS['input']:.0f} | "
            f"{wait:.3%} | {LIMITS['wait']:.0%} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        parts = [part(Path(name)) for part in (start, rates, compare)]
    page = "\n".join("\n".join([*part, ""]) for part in parts)
    print(page)
    if options.write:
        PAGE.write_text(f"{PREAMBLE}\n{page}", encoding="utf-8")


PREAMBLE = f"""\
# Data loading

`DATASETS=.../bin/python python benchmarks/data.py --write`, on {PROCESSES} CPU cores. All results
are medians. For each comparison, the two programs run alternately, {REPEATS} times each. In the
comparison of `data prepare`, both programs read the same JSON Lines file, which is generated from
the source files of the Python standard library. Both programs use the same byte-level BPE tokenizer
with a vocabulary of {VOCABULARY}. For such tokenizers, maxpipe encodes with tiktoken if the
resulting token IDs are identical. For all other tokenizer types, both programs use the same
library, so only the surrounding code differs.
"""

if __name__ == "__main__":
    main()
