"""Parquet files and saved Hugging Face datasets: correct rows, and hostile files."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.data.formats import parquet as parquet_format
from maxpipe.data.sources import Source, open_source
from maxpipe.errors import ConfigError
from tests.errors import assert_error

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {
        "text": f"document {i} é\0" * (i % 5),
        "id": i,
        "meta": {"title": f"title {i}", "score": i / 2},
        "messages": [{"role": "user", "content": f"hello {i}"}] * (i % 3),
        "raw": f"bytes {i}".encode(),
    }
    for i in range(97)
]


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **{"row_group_size": 10} | options)
    return path


def source(path: object, kind: str = "parquet", **keys: Any) -> Source:
    return open_source(DataConfig(source=kind, path=str(path), **keys), 0)  # type: ignore[arg-type]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        act()
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_rows_match_written_rows(
    compression: str, dictionary: bool, tmp_path: Path
) -> None:
    options = {"compression": compression, "use_dictionary": dictionary}
    write(tmp_path / "a.parquet", ROWS[:40], **options)
    write(tmp_path / "b.parquet", ROWS[40:], **options)
    (tmp_path / "notes.txt").write_text("not read")
    found = source(tmp_path)
    assert len(found) == len(ROWS) and found.name == "parquet"
    order = [*range(0, 97, 7), *range(96, -1, -1)]
    assert [found[i] for i in order] == [ROWS[i]["text"] for i in order]
    assert [found.record(i) for i in order] == [ROWS[i] for i in order]
    assert found.where(39) == f"{tmp_path}/a.parquet: row 39"
    assert found.where(40) == f"{tmp_path}/b.parquet: row 0"
    assert source(tmp_path, text_field="meta.title")[50] == "title 50"
    assert source(tmp_path, text_field="raw")[96] == "bytes 96"
    template = source(tmp_path, template=r"{meta.title}\n{{{text}}}: {meta.score}")
    assert template[43] == f"title 43\n{{{ROWS[43]['text']}}}: 21.5"
    assert source(tmp_path).fingerprint() == found.fingerprint() != template.fingerprint()


def test_only_needed_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet")
    read: list[Any] = []
    whole = pq.ParquetFile.read_row_group

    def noted(self: Any, group: int, columns: Any = None, **options: Any) -> Any:
        read.append((group, columns))
        return whole(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    found = source(tmp_path / "a.parquet", text_field="meta.title")
    assert [found[i] for i in (0, 9, 55, 50)] == ["title 0", "title 9", "title 55", "title 50"]
    assert read == [(0, ["meta"]), (5, ["meta"])]
    assert found.record(51) == ROWS[51] and read[2:] == [(5, None)]


def test_row_group_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "_CACHED_BYTES", 25_000)
    rows = [{"text": f"{i:04}" * 250} for i in range(100)]
    found = source(write(tmp_path / "a.parquet", rows, use_dictionary=False))
    cached = found.records._cache._values  # type: ignore[attr-defined]
    for i in [*range(0, 100, 9), 5, 95]:
        assert found[i] == rows[i]["text"]
        assert 1 <= len(cached) <= 2


def test_pickled_source_reads_same_rows_without_cache(tmp_path: Path) -> None:
    rows = [{"text": f"{i:04}" * 2500} for i in range(40)]
    records = source(write(tmp_path / "a.parquet", rows)).records  # type: ignore[attr-defined]
    before = [records.read(i) for i in range(40)]
    content = pickle.dumps(records)
    assert len(content) < 20_000
    assert [pickle.loads(content).read(i) for i in range(40)] == before


def test_concurrent_threads_read_same_rows(tmp_path: Path) -> None:
    found = source(write(tmp_path / "a.parquet"))
    seen: list[list[str]] = []

    def read() -> None:
        seen.append([found[i * 31 % 97] for i in range(97)])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[ROWS[i * 31 % 97]["text"] for i in range(97)]] * 4


def test_missing_columns_are_rejected(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    message = refusal(lambda: source(file, text_field="body")[12])
    assert f"{file}: row 12 = fields text, id, meta, messages, raw  [MP-DATA-005]\n" in message
    facts = ["data.text_field", "body", "missing"]
    assert_error(message, "row 12", names=facts, suggests="data.text_field=text")
    assert "which is of type int" in refusal(lambda: source(file, text_field="id")[0])
    message = refusal(lambda: source(file, text_field="meta.no")[0])
    assert_error(message, "row 0", names=["data.text_field", "meta.no", "missing"])
    message = refusal(lambda: source(file, template="{text}{title}")[3])
    assert_error(message, f"{file}: row 3", names=["data.template", "title", "missing"])
    assert "of type list" in refusal(lambda: source(file, template="{messages}")[3])


@pytest.mark.fault("F21")
def test_invalid_or_truncated_parquet_files_are_rejected(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    content = file.read_bytes()
    for wrong in (b"", b"plain text", b"PAR1" * 3, content[:-1], content[: len(content) // 2]):
        file.write_bytes(wrong)
        message = refusal(lambda: source(file))
        assert str(file) in message and "must be a complete Parquet file" in message
    file.write_bytes(content)
    found = source(file)
    file.write_bytes(content + b"x")
    assert "must not change" in refusal(lambda: found[0])
    os.unlink(file)
    assert "No such file" in refusal(lambda: found[50])
    empty = write(tmp_path / "b.parquet", [])
    assert "must contain rows" in refusal(lambda: source(empty))


def test_row_with_invalid_utf8_is_rejected(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"caf\xe9"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    file = tmp_path / "a.parquet"
    for use_dictionary in (True, False):
        pq.write_table(pa.table({"text": text}), file, use_dictionary=use_dictionary)
        found = source(file)
        assert found[0] == "a"
        message = refusal(lambda: found[1])  # noqa: B023
        assert f"{file}: row 1 = byte 0xe9 at offset 3" in message and "must be UTF-8" in message


def test_repeated_long_string_does_not_exhaust_memory(tmp_path: Path) -> None:
    """The column would take 100 GB in memory, but the file stores the string once."""
    texts = pa.array(["a" * (1 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), texts)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), file, store_schema=False)
    assert file.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    found = source(file)
    assert len(found) == 100_000 and len(found[99_999]) == 1 << 20
    assert pa.total_allocated_bytes() - before < 1 << 24


SAME = ["a" * (1 << 18)]
MANY = 5000
"""Number of repetitions at which the string takes more than 1 GiB."""


def repeated() -> Any:
    """Return a column that repeats one long string but stores it once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * MANY, pa.int32()), pa.array(SAME))


def test_repeated_strings_in_nested_columns_are_stored_once(tmp_path: Path) -> None:
    """Holds for struct fields and lists, and for single columns and whole records."""
    inner = pa.StructArray.from_arrays([repeated(), pa.array(range(MANY))], ["content", "id"])
    ones = pa.ListArray.from_arrays(pa.array(range(MANY + 1), pa.int32()), inner)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"meta": inner, "messages": ones}), file, store_schema=False)
    assert file.stat().st_size < 1 << 21
    before = pa.default_memory_pool().bytes_allocated()
    found = source(file, text_field="meta.content")
    assert found[MANY - 1] == SAME[0]
    assert found.record(7) == {
        "meta": {"content": SAME[0], "id": 7},
        "messages": [{"content": SAME[0], "id": 7}],
    }
    assert pa.default_memory_pool().bytes_allocated() - before < 1 << 25


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_row_with_repeated_long_string_is_rejected(kind: str, tmp_path: Path) -> None:
    inner = pa.StructArray.from_arrays([repeated()], ["content"])
    rows = pa.ListArray.from_arrays(pa.array([0, 1, MANY], pa.int32()), inner)
    table = pa.table({"messages": rows, "text": pa.array(["x", "y"])})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    else:
        save(tmp_path / "a.parquet", [table])
    found = source(tmp_path / "a.parquet", kind)
    assert found[1] == "y"
    assert found.record(0) == {"messages": [{"content": SAME[0]}], "text": "x"}
    message = refusal(lambda: found.record(1))
    assert "row 1 = " in message and "268435456" in message


def test_delta_encoded_strings_do_not_exhaust_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_format, "MAX_GROUP_BYTES", 1 << 26)
    file = tmp_path / "a.parquet"
    coded = {"use_dictionary": False, "store_schema": False}
    long = pa.array(["a" * (1 << 20)] * 500)
    pq.write_table(
        pa.table({"text": long}), file, column_encoding={"text": "DELTA_BYTE_ARRAY"}, **coded
    )
    assert file.stat().st_size < 1 << 17
    found = source(file)
    before = pa.default_memory_pool().bytes_allocated()
    message = refusal(lambda: found[0])
    assert f"{file}: row group 0 = 500 rows" in message and "67108864" in message
    assert pa.default_memory_pool().bytes_allocated() - before < 1 << 28  # of 500 MiB
    # A single row may contain all strings in a list.
    name = "messages.list.element"
    lists = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 500], pa.int32()), long)})
    pq.write_table(lists, file, column_encoding={name: "DELTA_BYTE_ARRAY"}, **coded)
    message = refusal(lambda: source(file).record(0))
    assert f"{file}: row group 0 = 1 rows" in message and "may need more" in message
    # Columns within the limit are read in any encoding.
    texts = [f"a common beginning {i}" * (i % 4) for i in range(50)]
    monkeypatch.setattr(parquet_format, "MAX_GROUP_BYTES", 10_000)
    pq.write_table(
        pa.table({"text": texts}), file, column_encoding={"text": "DELTA_BYTE_ARRAY"}, **coded
    )
    found = source(file)
    assert [found[i] for i in range(50)] == texts


def test_fixed_length_values_count_at_decoded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_format, "MAX_GROUP_BYTES", 1 << 22)
    one = pa.array([b"a" * (1 << 16)], pa.binary(1 << 16))
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), one)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), file, store_schema=False)
    assert file.stat().st_size < 1 << 20
    message = refusal(lambda: source(file)[0])
    assert f"{file}: row group 0 = 100 rows" in message and f"need {100 << 16}" in message


def test_oversized_row_groups_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(
        tmp_path / "a.parquet", [{"text": "x" * i, "more": "y" * 10_000} for i in range(50)]
    )
    monkeypatch.setattr(parquet_format, "_SLOW_GROUP_BYTES", 500)
    found = source(file)
    assert "write smaller row groups" in caplog.text
    monkeypatch.setattr(parquet_format, "MAX_GROUP_BYTES", 1000)
    assert found[0] == ""
    message = refusal(lambda: found.record(49))
    assert f"{file}: row group 4 = 10 rows  [MP-DATA-005]\n" in message and "1000" in message


def test_missing_pyarrow_suggests_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for kind in ("parquet", "huggingface"):
        assert "pip install 'maxpipe[parquet]'" in refusal(lambda: source(file, kind))  # noqa: B023


# --- Hugging Face datasets on disk -----------------------------------------------------------


def save(folder: Path, parts: Sequence[Any], batch_rows: int = 8) -> Path:
    """Write a dataset as `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0" * 16,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_saved_dataset_rows_match_written_rows(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [ROWS[:50], ROWS[50:]])
    found = source(folder, "huggingface")
    order = [*range(0, 97, 5), *range(96, -1, -1)]
    assert len(found) == 97
    assert [found[i] for i in order] == [ROWS[i]["text"] for i in order]
    assert [found.record(i) for i in order] == [ROWS[i] for i in order]
    assert found.where(49) == f"{folder}/data-00000-of-00002.arrow: row 49"
    assert found.where(67) == f"{folder}/data-00001-of-00002.arrow: row 17"
    assert source(folder, "huggingface", text_field="meta.title")[9] == "title 9"
    assert "which is missing" in refusal(lambda: source(folder, "huggingface", text_field="b")[0])
    twice = DataConfig(source="huggingface", paths=[str(folder), str(save(tmp_path / "b", [ROWS]))])
    assert open_source(twice, 0)[100] == ROWS[3]["text"]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_dataset_saved_by_datasets_library_is_read(tmp_path: Path) -> None:
    # Explicit fingerprints: computing them pickles the table, which some pyarrow versions reject.
    code = (
        "import json, sys, datasets, pyarrow\n"
        "rows = [dict(text=f'document {i}', n=i, part=dict(a=str(i))) for i in range(30)]\n"
        "table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows))\n"
        "data = datasets.Dataset(table, fingerprint='a' * 16)\n"
        "data = data.select([*range(29, 0, -2), *range(15)], new_fingerprint='b' * 16)\n"
        "datasets.DatasetDict(train=data, test=data).save_to_disk("
        "sys.argv[1], num_shards=dict(train=3, test=1))\n"
        "print(json.dumps([dict(row) for row in datasets.load_from_disk(sys.argv[1])['train']]))\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])
    found = source(tmp_path / "saved", "huggingface")
    assert [found.record(i) for i in range(30)] == rows
    assert [found[i] for i in range(30)] == [row["text"] for row in rows]


def test_saved_dataset_with_splits(tmp_path: Path) -> None:
    for name in ("train", "test"):
        save(tmp_path / "saved" / name, [[{"text": name}]])
    about = tmp_path / "saved" / "dataset_dict.json"
    about.write_text('{"splits": ["train", "test"]}')
    assert source(tmp_path / "saved", "huggingface")[0] == "train"
    assert source(tmp_path / "saved" / "test", "huggingface")[0] == "test"
    about.write_text('{"splits": ["validation", "test"]}')
    message = refusal(lambda: source(tmp_path / "saved", "huggingface"))
    assert "a split train (found validation, test)" in message


@pytest.mark.fault("F21")
def test_invalid_saved_datasets_are_rejected(tmp_path: Path) -> None:
    def refused(*words: str) -> None:
        message = refusal(lambda: source(tmp_path / "saved", "huggingface"))
        assert all(word in message for word in words), message

    refused("must be a folder written by save_to_disk", "maxpipe fetch")
    folder = save(tmp_path / "saved", [ROWS])
    [file] = folder.glob("*.arrow")
    state, content = (folder / "state.json").read_text(), file.read_bytes()
    for wrong in ("", "[]", "{}", '{"_data_files": [{}]}', "[" * 10_000):
        (folder / "state.json").write_text(wrong)
        refused("state.json", "must be a file written by save_to_disk")
    for name in ("../saved/x.arrow", "/etc/passwd", "a.py"):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        refused("state.json", name, "must list Arrow files in this folder")
    indices = json.loads(state) | {"_indices_data_files": [{"filename": "i.arrow"}]}
    (folder / "state.json").write_text(json.dumps(indices))
    refused("flatten_indices")
    (folder / "state.json").write_text(state)
    for wrong in (
        b"",
        b"text",
        content[:-8],
        content[: len(content) // 2],
        content[:-9] + b"x" * 9,
    ):
        file.write_bytes(wrong)
        refused(str(file), "must be a complete file of a saved dataset")
    file.write_bytes(content)
    found = source(folder, "huggingface")
    file.write_bytes(content + b"x")
    assert "must not change" in refusal(lambda: found[0])
    file.unlink()
    os.mkfifo(file)
    refused("is not a regular file")


def test_compressed_arrow_batches_are_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [ROWS])
    [file] = folder.glob("*.arrow")
    table = pa.table({"text": ["a" * 1000] * 10_000})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(file), table.schema, options=options) as writer:
        writer.write_table(table)
    message = refusal(lambda: source(folder, "huggingface"))
    assert str(file) in message and "compressed batches" in message


def test_arrow_offsets_beyond_file_are_rejected(tmp_path: Path) -> None:
    """Such offsets would read unrelated memory."""
    folder = save(tmp_path / "saved", [[{"text": "abc"}, {"text": "defg"}]])
    [file] = folder.glob("*.arrow")
    content = file.read_bytes()
    offsets = b"".join(each.to_bytes(4, "little") for each in (0, 3, 7))
    wrong = b"".join(each.to_bytes(4, "little") for each in (0, 3, 1 << 30))
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, wrong))
    found = source(folder, "huggingface")
    message = refusal(lambda: found[1])
    assert f"{file}: row 1" in message


def test_saved_dataset_is_not_loaded_into_memory(tmp_path: Path) -> None:
    rows = [{"text": "a" * 10_000} for _ in range(5000)]
    folder = save(tmp_path / "saved", [rows], 100)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    found = source(folder, "huggingface")
    assert len(found[4999]) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23 and pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
def test_column_name_with_invalid_utf8_is_rejected(kind: str, tmp_path: Path) -> None:
    """The error is raised when a row is read."""
    if kind == "huggingface":
        folder = save(tmp_path / "saved", [[{"text": "one", "label": 1}]])
        [file] = folder.glob("*.arrow")
    else:
        folder = file = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist([{"text": "one", "label": 1}]), file)
    file.write_bytes(file.read_bytes().replace(b"label", b"labe\xf4"))
    message = refusal(lambda: source(folder, kind)[0])
    assert str(file) in message and "utf-8" in message.lower()
