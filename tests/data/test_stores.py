"""Data in S3 and in other stores that fsspec opens."""

from __future__ import annotations

import gzip
import json
import socket
import struct
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.data.prepared import range_reader
from maxpipe.data.prepared.prepare import verify
from maxpipe.data.sources import Source, open_source
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io import redact
from tests.data.test_prepared import all_ids
from tests.errors import raises
from tests.s3 import KEY, SECRET, Store


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def opened(*paths: str, source: Any = "jsonl") -> Source:
    return open_source(DataConfig(source=source, paths=list(paths)), 0)


def texts(source: Source) -> list[Any]:
    return [source[i] for i in range(len(source))]


def fill(store: Any, root: str) -> None:
    store.pipe_file(f"{root}/a.jsonl", lines("0", "1"))
    store.pipe_file(f"{root}/deep/b.jsonl", lines("2"))
    store.pipe_file(f"{root}/deep/c.jsonl.gz", gzip.compress(lines("3", "4")))
    store.pipe_file(f"{root}/deep/notes.txt", b"not read")


def check(root: str) -> None:
    found = opened(f"{root}")
    assert texts(found) == ["0", "1", "2", "3", "4"]
    assert found.where(1) == f"{root}/a.jsonl:2"
    assert texts(opened(f"{root}/a.jsonl", f"{root}/deep/*.jsonl*")) == ["0", "1", "2", "3", "4"]
    assert texts(opened(f"{root}/deep/*.txt", source="text")) == ["not read"]
    assert opened(root).fingerprint() == found.fingerprint()
    for path in (f"{root}/none", f"{root}/none/*.jsonl"):
        with raises(ConfigError, "data.path", path):
            opened(path)


@pytest.mark.parametrize("path", ["s3://", "gs:///"])
def test_url_without_a_bucket_is_an_error(path: str) -> None:
    scheme = path.partition(":")[0]
    with raises(ConfigError, "data.path", path, suggests=f"{scheme}://my-bucket/data"):
        opened(path)


def test_files_in_s3(s3: Store) -> None:
    fill(s3.filesystem, "bucket/data")
    check("s3://bucket/data")
    before = opened("s3://bucket/data").fingerprint()
    s3.filesystem.pipe_file("bucket/data/a.jsonl", lines("0", "2"))
    assert opened("s3://bucket/data").fingerprint() != before


def test_files_in_any_store_of_fsspec() -> None:
    store = fsspec.filesystem("memory")
    fill(store, "bucket/data")
    try:
        check("memory://bucket/data")
    finally:
        store.rm("bucket", recursive=True)


def test_parquet_in_s3(s3: Store, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "x.parquet")
    s3.filesystem.put(str(tmp_path / "x.parquet"), "bucket/t/x.parquet")
    assert texts(opened("s3://bucket/t", source="parquet")) == ["a", "b"]


def test_prepared_tokens_in_s3(s3: Store, tmp_path: Path) -> None:
    from maxpipe.cli import main

    (tmp_path / "a.txt").write_text("some text " * 100)
    out = tmp_path / "tokens"
    data = ["data.source=text", f"data.path={tmp_path / 'a.txt'}", "train.sequence_length=16"]
    assert main(["data", "prepare", *data, "--out", str(out)]) == 0
    s3.filesystem.put(str(out), "bucket/tokens", recursive=True)
    assert not verify("s3://bucket/tokens", lambda *fields: None).damage
    assert all_ids(cast(Path, "s3://bucket/tokens")) == all_ids(out)


def failing(*faults: Any) -> Any:
    """Return a fault that answers the next requests for data by these functions."""
    left = list(faults)

    def fault(handler: Any) -> bool:
        if not left or handler.command != "GET" or "list-type" in handler.path:
            return False
        left.pop(0)(handler)
        return True

    return fault


def unavailable(handler: Any) -> None:
    handler.send_response(503)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def slow_down(handler: Any) -> None:
    body = b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"
    handler.send_response(429)
    handler.send_header("Retry-After", "1")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def reset(handler: Any) -> None:
    """Send a part of the content and reset the connection."""
    handler.send_response(206)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 100)
    handler.wfile.flush()
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True


@pytest.mark.parametrize("fault", [unavailable, slow_down, reset])
def test_failed_reads_are_repeated(s3: Store, fault: Any) -> None:
    s3.filesystem.pipe_file("bucket/data/a.jsonl", lines("0", "1"))
    found = opened("s3://bucket/data")
    s3.fault = failing(fault, fault)
    assert texts(found) == ["0", "1"]


def test_refused_reads_are_reported_without_secrets(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handler: Any) -> bool:
        body = f"<Error><Code>AccessDenied</Code><Message>{KEY} {SECRET}</Message></Error>"
        handler.send_response(403)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body.encode())
        return True

    s3.fault = refuse
    monkeypatch.setattr(range_reader.time, "sleep", lambda seconds: None)
    with pytest.raises(StorageError, match="data.path s3://bucket/data: cannot be read") as caught:
        opened("s3://bucket/data")
    text = redact.redact_for_terminal(str(caught.value))
    assert SECRET not in text and KEY not in text
    with pytest.raises(StorageError) as error:
        range_reader.open_range_reader("s3://bucket/data")
    text = redact.redact_for_terminal(str(error.value))
    assert SECRET not in text and KEY not in text
