"""Source paths: lists, folders and patterns, local or in a bucket, with range reads."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

from maxpipe.config.sections.data import DataConfig
from maxpipe.data.prepared.range_reader import open_range_reader
from maxpipe.data.sources import Source, find_files, infer_source, open_source
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import stores
from tests.bucket import Bucket
from tests.errors import raises


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def texts(source: Source) -> list[str]:
    return [source[i] for i in range(len(source))]


def opened(*paths: object, source: Any = "jsonl", **keys: Any) -> Source:
    return open_source(DataConfig(source=source, paths=list(map(str, paths)), **keys), 0)


def refusal(*paths: object, source: Any = "jsonl") -> str:
    with pytest.raises(ConfigError) as error:
        texts(opened(*paths, source=source))
    assert error.value.exit_code == 2
    return str(error.value)


def test_list_of_files_folders_and_patterns(tmp_path: Path) -> None:
    for name, text in {"z/b": "1", "z/a": "0", "y/1": "2", "y/2": "3", "x": "4"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_bytes(lines(text))
    (tmp_path / "z" / "c.jsonl.gz").write_bytes(gzip.compress(lines("1.5")))
    found = opened(tmp_path / "z", tmp_path / "y/*.jsonl", tmp_path / "x.jsonl")
    assert texts(found) == ["0", "1", "1.5", "2", "3", "4"]
    other = opened(tmp_path / "y/*.jsonl", tmp_path / "z", tmp_path / "x.jsonl")
    assert other.fingerprint() != found.fingerprint()
    one = open_source(DataConfig(source="jsonl", path=str(tmp_path / "z")), 0)
    assert opened(tmp_path / "z").fingerprint() == one.fingerprint()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "x.jsonl")
    message = refusal(tmp_path / "x.jsonl", tmp_path / "link.jsonl")
    assert "data.paths" in message and "must be matched by only one path" in message
    assert "0 files match" in refusal(tmp_path / "x.jsonl", tmp_path / "nothing")


def test_infer_source_from_file_names(tmp_path: Path) -> None:
    kinds = {"a.jsonl.zst": "jsonl", "b.parquet": "parquet", "c.txt": "text"}
    kinds |= {"d.array_record-0-of-1": "arrayrecord"}
    for name, kind in kinds.items():
        (tmp_path / name).touch()
        assert infer_source(str(tmp_path / name), "here") == kind
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    assert infer_source(str(tmp_path / "saved"), "here") == "huggingface"


@pytest.fixture
def filled(bucket: Bucket) -> Iterator[Bucket]:
    bucket.objects.clear()
    bucket.put("data/a.jsonl", lines("0", "1"))
    bucket.put("data/deep/b.jsonl", lines("2"))
    bucket.put("data/deep/c.jsonl.bz2", bz2.compress(lines("3", "4")))
    bucket.put("data/deep/notes.txt", b"not read")
    yield bucket
    bucket.objects.clear()


def test_json_lines_in_a_bucket(filled: Bucket, tmp_path: Path) -> None:
    found = opened("gs://bucket/data")
    assert texts(found) == ["0", "1", "2", "3", "4"]
    assert [found.where(i) for i in (1, 4)] == [
        "gs://bucket/data/a.jsonl:2",
        "gs://bucket/data/deep/c.jsonl.bz2:2",
    ]
    assert texts(opened("gs://bucket/data/a.jsonl")) == ["0", "1"]
    assert texts(opened("gs://bucket/data/deep/*.jsonl*")) == ["2", "3", "4"]
    (tmp_path / "own.jsonl").write_bytes(lines("own"))
    assert texts(opened(tmp_path / "own.jsonl", "gs://bucket/data/deep/b.jsonl")) == ["own", "2"]
    here = tmp_path / "data"
    for name, content in filled.objects.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert opened(here).fingerprint() == found.fingerprint()


def test_text_and_parquet_in_a_bucket(filled: Bucket, tmp_path: Path) -> None:
    assert texts(opened("gs://bucket/data/deep/*.txt", source="text")) == ["not read"]
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" for i in range(50)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=7)
    filled.put("tables/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert texts(opened("gs://bucket/tables", source="parquet")) == rows


def test_bucket_reads_fetch_only_needed_ranges(
    filled: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.put("large.jsonl", lines(*(f"{i:04}" * 250 for i in range(1000))))
    found = opened("gs://bucket/large.jsonl")
    asked: list[tuple[int, int]] = []
    whole = stores.store_filesystem("gs://bucket").cat_file

    def noted(path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return whole(path, start=start, end=end)

    monkeypatch.setattr(stores.store_filesystem("gs://bucket"), "cat_file", noted)
    assert found[999] == "0999" * 250 and found[3] == "0003" * 250
    assert [end - start for start, end in asked] == [1013, 1013]


def test_missing_or_forbidden_bucket_objects_are_rejected(filled: Bucket) -> None:
    for path in ("gs://bucket/none", "gs://bucket/none/*.jsonl"):
        message = refusal(path)
        assert path in message and "0 objects match" in message
    found = opened("gs://bucket/data/a.jsonl")
    filled.put("data/a.jsonl", lines("0")[:-1])
    with pytest.raises(ConfigError, match="must not change|must be readable"):
        found[1]
    del filled.objects["data/a.jsonl"]
    with pytest.raises(ConfigError) as error:
        found[0]
    assert "gs://bucket/data/a.jsonl" in str(error.value)
    filled.put("data/a.jsonl", lines("0"))
    filled.refused.add("GET")
    try:
        with raises(StorageError, "data.path gs://bucket/data/a.jsonl", names=["Forbidden"]):
            opened("gs://bucket/data/a.jsonl")
    finally:
        filled.refused.clear()
    for path in ("https://host/a.jsonl", "hf://datasets/a", "file:///a.jsonl", "none://a"):
        assert "must be in a file system or an object store" in refusal(path)
    for kind in ("arrayrecord", "huggingface"):
        assert "must be in a file system" in refusal("gs://bucket/data/a.jsonl", source=kind)


@pytest.mark.parametrize(
    ("scheme", "package", "action"),
    [
        ("gs", "gcsfs", "maxpipe[gcs]"),
        ("s3", "s3fs", "maxpipe[s3]"),
        ("az", "adlfs", "maxpipe[azure]"),
        ("abfss", "adlfs", "maxpipe[azure]"),
        ("oss", "ossfs", "pip"),
    ],
)
def test_missing_package_suggests_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, action: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    stores._filesystem.cache_clear()
    for name, known in _registry.copy().items():
        if known.__module__.startswith(package):
            monkeypatch.delitem(_registry, name)
    with raises(ConfigError, "data.path", suggests=action, code=Code.ENV_PACKAGE) as caught:
        find_files(f"{scheme}://bucket/a", ())
    assert package in str(caught.value)
    with raises(StorageError, f"{scheme}://bucket/a", suggests=action, code=Code.ENV_PACKAGE):
        open_range_reader(f"{scheme}://bucket/a")


def test_run_and_prepared_folders_are_not_read(tmp_path: Path) -> None:
    """With `data.path=.`, run folders and prepared folders are inside the data folder."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "manifest.json").write_text("{}")
    (tmp_path / "below" / "b.jsonl").write_text('{"text": "two"}\n')
    for folder, names in {
        "runs/mine": ("config.yml", "events.jsonl", "metrics.jsonl"),
        "runs/mine/more": ("c.jsonl",),
        "runs/.index/unpacked-0": ("lines.jsonl",),
        "tokens": ("manifest.json", "spans", "d.jsonl"),
        "part": ("unfinished", "e.jsonl"),
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / name).write_text("{}\n")
    found = find_files(str(tmp_path), (".jsonl",))
    assert [file.name for file in found] == ["a.jsonl", "below/b.jsonl"]
    [own] = find_files(str(tmp_path / "part"), (".jsonl",))  # a folder given explicitly is read
    assert own.name == "e.jsonl"


def test_infer_source_of_binary_files(tmp_path: Path) -> None:
    (tmp_path / "a.idx").touch()
    (tmp_path / "a.bin").touch()
    assert infer_source(str(tmp_path / "a.bin"), "--data") == "megatron"
    (tmp_path / "b.bin").touch()
    assert infer_source(str(tmp_path / "b.bin"), "--data") == "text"
    (tmp_path / "manifest.json").touch()
    assert infer_source(str(tmp_path), "--data") == "tokens"
