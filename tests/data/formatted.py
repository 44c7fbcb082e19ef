"""Write the same documents in every supported file format."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.data import DataConfig

PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
FORMATS = ["text", "jsonl", *(f"jsonl.{each}" for each in (*PACKED, "zst"))]
FORMATS += ["parquet", "huggingface", "arrayrecord"]


def formatted(kind: str, texts: Sequence[str], folder: Path) -> DataConfig:
    """Write nonempty documents in one format; return the data config that reads them."""
    folder.mkdir(exist_ok=True)
    rows = [{"text": text} for text in texts]
    lines = [json.dumps(row).encode() for row in rows]
    path = folder / f"a.{kind}"
    if kind == "text":
        for number, text in enumerate(texts):
            (folder / f"{number:05}.txt").write_text(text)
        return DataConfig(source="text", path=f"{folder}/*.txt")
    if kind.startswith("jsonl"):
        raw = b"\n".join(lines) + b"\n"
        if kind.endswith(".zst"):
            pack: Any = (
                pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress
            )
        else:
            pack = PACKED.get(kind.partition(".")[2], bytes)
        path.write_bytes(pack(raw))
        return DataConfig(source="jsonl", path=str(path))
    if kind == "arrayrecord":
        path = folder / "a.array_record"
        module = pytest.importorskip("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(str(path), "group_size:1")
        for line in lines:
            writer.write(line)
        writer.close()
        return DataConfig(source="arrayrecord", path=str(path))
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(table, path, row_group_size=37, write_page_checksum=True)
        return DataConfig(source="parquet", path=str(path))
    assert kind == "huggingface"
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=50)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return DataConfig(source="huggingface", path=str(folder))
