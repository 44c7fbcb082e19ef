"""Text of records: columns, templates, and unreadable records."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.source import split_template
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.documents import build_index
from maxpipe.data.formats.record_text import BadRecord, TextExtractor
from maxpipe.data.loader import build_loaders
from maxpipe.data.prepared.prepare import PrepareJob, prepare
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError, StorageError
from tests.errors import assert_error, raises

RECORD = {
    "title": "A {title}",
    "body": "b\n%s",
    "n": 3,
    "share": 0.5,
    "yes": True,
    "no": None,
    "a": {"b": {"c": "deep"}, "b.c": "near"},
    "a.x": "whole name",
    "many": ["x"],
    "raw": b"bytes",
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{title}: {body}", "A {title}: b\n%s"),
        (r"{n}\n\n{share}\t{yes}\\n", "3\n\n0.5\tTrue\\n"),
        ("{{{n}}} {{}}", "{3} {}"),
        ("{a.b.c} {a.x} {raw}", "near whole name bytes"),
        ("{n}{n}", "33"),
        (r"\d %s $n {n}", r"\d %s $n 3"),
    ],
)
def test_template_is_filled_from_record(template: str, text: str) -> None:
    assert TextExtractor(template=template)(RECORD) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{nothing}", "column nothing of data.template, which is missing"),
        ("{no}", "is of type NoneType"),
        ("{many}", "is of type list"),
        ("{a}", "is of type dict"),
        # Formats, conversions, indices and attributes of str.format are not supported.
        ("{n:>1000000000}", "column n:>1000000000 of"),
        ("{n!r}", "column n!r of"),
        ("{many[0]}", "column many[0] of"),
        ("{title.__class__}", "column title.__class__ of"),
        ("{a.b.__class__}", "column a.b.__class__ of"),
        ("{0}", "column 0 of"),
    ],
)
def test_template_with_unknown_column_is_rejected(template: str, words: str) -> None:
    with pytest.raises(BadRecord, match="must have text or a number") as error:
        TextExtractor(template=template)(RECORD)
    assert words in error.value.rule


@pytest.mark.parametrize("template", ["{", "}", "a } b", "{a} {b", "{{a}", "{}", "{ a}", "{a{b}}"])
def test_template_with_invalid_braces_is_rejected(template: str) -> None:
    with pytest.raises(ValueError, match="is unmatched|is not a column name"):
        split_template(template)


@pytest.mark.parametrize(
    ("field", "text"),
    [("a.b.c", "near"), ("a.x", "whole name"), ("raw", "bytes"), ("title", "A {title}")],
)
def test_dotted_field_reads_nested_column(field: str, text: str) -> None:
    assert TextExtractor(field)(RECORD) == text


BROKEN = {
    3: b'{"text": "cut',
    5: b'{"body": "other"}',
    8: b'{"text": "caf\xe9"}',
    9: b"[" * 1000,
    11: b"\0" * 20,
    14: b'"text"',
}


def broken_lines(folder: Path) -> Path:
    lines = [json.dumps({"text": f"document {i}"}).encode() for i in range(20)]
    file = folder / "a.jsonl"
    file.write_bytes(b"\n".join(BROKEN.get(i, line) for i, line in enumerate(lines)))
    return file


def config(path: Path, **keys: Any) -> DataConfig:
    return DataConfig(source="jsonl", path=str(path), **keys)


@pytest.mark.parametrize("number", sorted(BROKEN))
def test_unreadable_record_raises_error(number: int, tmp_path: Path) -> None:
    file = broken_lines(tmp_path)
    source = open_source(config(file), 0)
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            source[number]
        assert error.value.exit_code == 2
        assert error.value.problems[0].where == f"{file}:{number + 1}"
    assert source[number + 1 if number + 1 not in BROKEN else number + 2].startswith("document")


def test_unreadable_records_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = broken_lines(tmp_path)
    skipping = config(file, bad_records="skip", max_bad_records=6)
    with caplog.at_level(logging.WARNING):
        source = open_source(skipping, 0)
        texts = [source[i] for i in range(20)]
    assert texts == ["" if i in BROKEN else f"document {i}" for i in range(20)]
    assert source.unreadable == sorted(BROKEN)
    assert [texts[i] for i in (19, 8, 3)] == [source[i] for i in (19, 8, 3)]
    assert source.record(3) == "" and source.record(5) == {"body": "other"}
    named = [message for message in caplog.messages if "Skipped" in message]
    assert len(named) == 6 and f"{file}:4" in named[0]


def test_exceeding_max_bad_records_raises_error(tmp_path: Path) -> None:
    file = broken_lines(tmp_path)
    source = open_source(config(file, bad_records="skip", max_bad_records=5), 0)
    for number in sorted(BROKEN)[:5]:
        assert source[number] == "" == source[number]
    with pytest.raises(ConfigError) as error:
        source[14]
    [problem] = error.value.problems
    assert problem.where == f"{file}:15"
    assert_error(error.value, f"{file}:15", names=["exceeds data.max_bad_records", 5])
    assert source[14 + 1] == "document 15"


def test_unreadable_files_are_never_skipped(tmp_path: Path) -> None:
    file = broken_lines(tmp_path)
    source = open_source(config(file, bad_records="skip"), 0)
    file.write_bytes(file.read_bytes() + b"\n{}")
    with raises(ConfigError, "data.path", file, names=["1407 bytes", "1410 bytes"]):
        source[0]
    file.unlink()
    cause = os.strerror(errno.ENOENT)
    with raises(ConfigError, "data.path", file, names=cause, suggests="data.path"):
        source[0]


def test_prepare_skips_and_counts_bad_records(tmp_path: Path) -> None:
    """Workers share one count, and skipped records are listed in the manifest."""
    texts = [json.dumps({"text": f"document {i} " * 9}).encode() for i in range(400)]
    broken = dict(zip(range(5, 400, 67), BROKEN.values(), strict=True))
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(broken.get(i, line) for i, line in enumerate(texts)))

    def run(folder: str, **keys: Any) -> str:
        out = tmp_path / folder
        section, tokenizer = config(file, **keys), TokenizerConfig()
        plan = PrepareJob(
            data=section, tokenizer=tokenizer, seed=0, folder=out, workers=2, shard_tokens=2000
        )
        return prepare(plan, lambda *_: None)

    assert len(broken) == 6
    for keys in ({}, {"bad_records": "skip", "max_bad_records": 5}):
        with pytest.raises(ConfigError):
            run("tokens", **keys)
    # Completed shards are kept, and a changed limit does not change the source.
    assert "(6 unreadable, written as empty)" in run("tokens", bad_records="skip")
    found = PreparedDocuments(str(tmp_path / "tokens"), ByteTokenizer())
    assert found.unreadable == 6
    empty = [i for i, length in enumerate(found.lengths.tolist()) if length == 2]
    assert empty == sorted(broken)
    assert found.byte_counts.any()
    with pytest.raises(ConfigError) as error:
        run("tokens", bad_records="skip", max_bad_records=5)
    assert error.value.problems[0].where == "data.max_bad_records"
    with pytest.raises(ConfigError) as error:
        run("tokens")
    assert error.value.problems[0].where == "data.bad_records"


def test_index_stores_skipped_records(tmp_path: Path) -> None:
    file = broken_lines(tmp_path)
    for _ in range(2):  # built, then read from the cache
        source = open_source(config(file, bad_records="skip"), 0)
        index = build_index(source, ByteTokenizer(), str(tmp_path / "cache"))
        assert index.unreadable.tolist() == sorted(BROKEN) == list(source.unreadable)
        assert index.lengths[sorted(BROKEN)].tolist() == [2] * len(BROKEN)
    # An index built with skipped records does not bypass stricter settings.
    for keys in ({}, {"bad_records": "skip", "max_bad_records": 2}):
        with pytest.raises(ConfigError, match=f"{file}:"):
            source = open_source(config(file, **keys), 0)
            build_index(source, ByteTokenizer(), str(tmp_path / "cache"))


def test_skipping_does_not_change_other_documents(tmp_path: Path) -> None:
    """Batches match those of a file in which the unreadable lines are empty documents."""
    file = broken_lines(tmp_path)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "a.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines = [b'{"text": ""}' if i in BROKEN else line for i, line in enumerate(lines)]
    other.write_bytes(b"\n".join(lines))

    def batches(config: DataConfig) -> tuple[list[Any], int]:
        datasets = build_loaders(
            config, TokenizerConfig(), seed=3, batch_size=2, sequence_length=16
        )
        found = [datasets.train.batch(step) for step in range(20)]
        return [{name: value.tolist() for name, value in each.items()} for each in found], (
            datasets.unreadable
        )

    skipped, count = batches(config(file, bad_records="skip"))
    assert count == len(BROKEN)
    assert (skipped, 0) == batches(config(other))


def test_record_damaged_after_indexing_raises_error(tmp_path: Path) -> None:
    """Treating the record as empty after indexing would change all later batches."""
    file = broken_lines(tmp_path)
    datasets = build_loaders(
        config(file, bad_records="skip", validation_fraction=0.0),
        TokenizerConfig(),
        seed=0,
        batch_size=1,
        sequence_length=1000,
    )
    file.write_bytes(
        file.read_bytes().replace(b'{"text": "document 0"}', b'{"text": "document 0"x')
    )
    with raises(StorageError, "a.jsonl:1", names=["document 0"]):
        datasets.train.batch(0)


def test_control_characters_in_records_are_escaped_in_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log messages are printed to terminals without further escaping."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"te\x1b]0;title\x07\u202exx\n')
    source = open_source(
        DataConfig(source="jsonl", path=str(path), bad_records="skip", max_bad_records=3), 0
    )
    assert source[1] == ""
    [line] = caplog.messages
    assert "\\x1b]0;title\\x07\\u202exx" in line and line.isprintable()
