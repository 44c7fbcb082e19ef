"""A sparse 100 GB prepared folder that uses 40 MB of disk, and a program that opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.data.prepared.manifest import (
    BIN,
    CRC_FILE,
    IDX,
    MANIFEST_FILE,
    META,
    META_FILE,
    SPAN_DOCUMENTS,
    SPANS,
    encode_index,
    shard_name,
)
from maxpipe.data.prepared.range_reader import BLOCK_BYTES
from maxpipe.data.prepared.writer import ChecksummedWriter
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.io.typed_json import dump_checksummed

SHARDS, DOCUMENTS, TOKENS = 100, 1_000_000, 500
"""Dimensions of the 100 GB folder: 50 billion tokens of two bytes each."""


def write_sparse(folder: Path) -> None:
    """Write sparse files in which every token ID is 0. All shards share one index."""
    entries: dict[str, Any] = {}

    def written(suffix: str, parts: Any) -> list[int]:
        file = ChecksummedWriter(folder / shard_name(0, suffix))
        for part in parts:
            file.write(part)
        entries[suffix] = file.close()
        return file.crcs.tolist()

    lengths = np.full(DOCUMENTS, TOKENS)
    size = DOCUMENTS * TOKENS * 2
    with open(folder / shard_name(0, BIN), "wb") as file:
        file.truncate(size)
    zeros = ChecksummedWriter(folder / "zeros")
    zeros.write(bytes(BLOCK_BYTES + size % BLOCK_BYTES))
    zeros.close()
    (folder / "zeros").unlink()
    blocks = [zeros.crcs[0]] * (size // BLOCK_BYTES) + list(zeros.crcs[1:])
    entries[BIN] = {"bytes": size, "sha256": "0" * 64}
    index = written(IDX, encode_index(lengths, np.dtype("<u2")))
    meta = written(META_FILE, [bytes(DOCUMENTS * META.itemsize)])
    written(CRC_FILE, [np.array([*blocks, *index, *meta], "<u4").tobytes()])
    for number in range(1, SHARDS):
        for suffix in entries:
            os.link(folder / shard_name(0, suffix), folder / shard_name(number, suffix))
    spans = ChecksummedWriter(folder / SPANS)
    total = SHARDS * DOCUMENTS
    spans.write(
        (np.append(np.arange(0, total, SPAN_DOCUMENTS), total) * TOKENS).astype("<i8").tobytes()
    )
    shard = {
        "documents": DOCUMENTS,
        "unreadable": 0,
        "tokens": DOCUMENTS * TOKENS,
        "files": entries,
    }
    manifest = {
        "format": 1,
        "source": {
            "name": "zeros",
            "fingerprint": "zeros",
            "documents": total,
            "data": {},
            "seed": 0,
        },
        "tokenizer": {
            "kind": "bytes",
            "path": "",
            "fingerprint": ByteTokenizer().fingerprint(),
            "vocab_size": 259,
        },
        "shard_tokens": DOCUMENTS * TOKENS,
        "dtype": "<u2",
        "documents": total,
        "tokens": total * TOKENS,
        "text_bytes": total,
        "byte_counts": [total, *[0] * 255],
        "shards": [shard] * SHARDS,
        "spans": spans.close(),
    }
    (folder / MANIFEST_FILE).write_text(dump_checksummed(manifest))


MEASURED = """
import json, sys, time
import numpy
begin = time.perf_counter()
from maxpipe.config.schema import DataConfig, TokenizerConfig
from maxpipe.data.loader import build_loaders
from maxpipe.data.datasets import find_overlaps
data = DataConfig(source="tokens", path=sys.argv[1])
found = build_loaders(data, TokenizerConfig(), seed=0, batch_size=8, sequence_length=2048)
assert find_overlaps(*found.corpora, large=False) == []  # as a run does at its start
opened = time.perf_counter()
sizes = [found.train.batch(0)["tokens"].shape]
first = time.perf_counter()
times = []
for step in (10, 10_000_000, 10_000_001):
    start = time.perf_counter()
    sizes.append(found.train.batch(step)["tokens"].shape)
    times.append(time.perf_counter() - start)
# Not getrusage: its peak includes the memory of the parent process.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
peak = int(peak) * 1024
print(json.dumps({"open": opened - begin, "first": first - opened, "seeks": times, "peak": peak,
                  "sizes": sizes, "tokens": found.train.sequences.num_tokens}))
"""
"""Program that opens the folder, reads batches, and prints its times and peak memory."""
