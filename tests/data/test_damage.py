"""Flipped bits in every file format: documents are unchanged, or an error names the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maxpipe.data.formats.array_records import ArrayRecords
from maxpipe.data.sources import open_source
from maxpipe.errors import ConfigError
from tests.data.formatted import FORMATS, formatted
from tests.errors import without_codes

TEXTS = [f"document {number} " * (1 + number * number % 40) for number in range(120)]
# These formats have no checksums: damage to the text itself cannot be detected.
UNCHECKED = ("text", "jsonl", "huggingface")


@pytest.mark.fault("F21")
@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bits_are_detected_or_harmless(kind: str, tmp_path: Path) -> None:
    data = formatted(kind, TEXTS, tmp_path)
    paths = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")
    draw = np.random.default_rng(len(kind))
    named = 0
    for number in range(40):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        raw = bytearray(whole)
        at = int(draw.integers(len(raw)))
        if number % 4:
            raw[at] ^= 1 << int(draw.integers(8))
        else:
            del raw[at:]
        path.write_bytes(raw)
        try:
            source = open_source(data, 0)
            found = [source[document] for document in range(len(source))]
            assert found == TEXTS or kind in UNCHECKED, (number, at)
        except ConfigError as error:
            named += str(path) in str(error) or str(tmp_path) in str(error)
        path.write_bytes(whole)
    assert named >= (2 if kind in ("text", "jsonl") else 8)
    source = open_source(data, 0)
    assert [source[document] for document in range(len(source))] == TEXTS


def test_damaged_record_is_named(tmp_path: Path) -> None:
    data = formatted("arrayrecord", TEXTS, tmp_path)
    path = Path(data.path)
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1  # after the record offsets
    path.write_bytes(raw)
    source = open_source(data, 0)
    broken = []
    for number in range(len(source)):
        try:
            source[number]
        except ConfigError as error:
            broken.append(number)
            assert f"{path}: record {number}\n  must be in a complete ArrayRecord" in without_codes(
                error
            )
    assert len(broken) == 1


def test_record_location_without_readable_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error can be located even if the file's index was overwritten."""
    data = formatted("arrayrecord", TEXTS, tmp_path)
    source = open_source(data, 0)
    Path(data.path).write_bytes(b"x" * 1000)
    assert isinstance(source.records, ArrayRecords)  # type: ignore[attr-defined]
    assert source.where(7) == f"{data.path}: record 7"
