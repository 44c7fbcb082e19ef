"""Every source encodes a conversation to the token IDs and mask of transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.chat import ConversationEncoder
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.sources import UnreadableRecord, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from tests.data.conversations import make_tokenizer, write_records
from tests.data.model_templates import STYLES

PYTHON = os.environ.get("ORACLE") or sys.executable
WORDS = ["weather", "Paris", "naïve 語", "two  words", "1234", "<b>", "ok.", "think"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return folder, open_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))


def random_words(draw: random.Random, most: int = 4) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def call(draw: random.Random) -> dict[str, Any]:
    name = draw.choice(["look", "move"])
    arguments = (
        {"city": random_words(draw, 1)} if name == "look" else {"x": draw.randint(0, 9), "y": 1}
    )
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def record(draw: random.Random) -> dict[str, Any]:
    """Draw a conversation whose keys are in a fixed order, as columnar files store them."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": random_words(draw)})
    if draw.random() < 0.1:
        messages.append({"role": "assistant", "content": random_words(draw)})
    has_tools = draw.random() < 0.4
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": random_words(draw)})
        if has_tools and draw.random() < 0.5:
            message: dict[str, Any] = {"role": "assistant"}
            if draw.random() < 0.3:
                message["content"] = random_words(draw)
            if draw.random() < 0.3:
                message["reasoning_content"] = random_words(draw)
            messages.append({**message, "tool_calls": [call(draw)]})
            messages.append({"role": "tool", "content": random_words(draw), "name": "look"})
        message = {"role": "assistant", "content": random_words(draw)}
        if draw.random() < 0.3:
            message["reasoning_content"] = random_words(draw)
        messages.append(message)
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": random_words(draw)})
    found: dict[str, Any] = {"messages": messages}
    if has_tools:
        properties = {"city": {"type": "string"}} if draw.random() < 0.5 else {"x": {"type": "int"}}
        parameters = {"type": "object", "properties": properties}
        function = {"name": "look", "parameters": parameters}
        found["tools"] = [{"type": "function", "function": function}]
    if draw.random() < 0.3:
        found["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5}
    return found


def as_jsonl(records: list[Any], folder: Path) -> dict[str, str]:
    return {"source": "jsonl", "path": str(write_records(folder / "a.jsonl", records))}


def as_parquet(records: list[Any], folder: Path) -> dict[str, str]:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{**dict.fromkeys(KEYS), **each} for each in records])
    parquet.write_table(table, folder / "a.parquet", row_group_size=16)
    return {"source": "parquet", "path": str(folder / "a.parquet")}


def as_arrow(records: list[Any], folder: Path) -> dict[str, str]:
    import pyarrow

    table = pyarrow.Table.from_pylist([{**dict.fromkeys(KEYS), **each} for each in records])
    saved = folder / "saved"
    saved.mkdir()
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state))
    return {"source": "huggingface", "path": str(saved)}


def as_array_record(records: list[Any], folder: Path) -> dict[str, str]:
    from array_record.python.array_record_module import ArrayRecordWriter

    path = folder / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for each in records:
        writer.write(json.dumps(each).encode())
    writer.close()
    return {"source": "arrayrecord", "path": str(path)}


KEYS = ("messages", "tools", "chat_template_kwargs")
KINDS: dict[str, Callable[[list[Any], Path], dict[str, str]]] = {
    "jsonl": as_jsonl,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "array_record": as_array_record,
}


def encoded(
    section: dict[str, str], template: str, tokenizer: Tokenizer, folder: Path
) -> list[EncodedDocument | None]:
    """Encode each conversation of a source; return None where the template rejects it."""
    path = folder / "template.jinja"
    path.write_text(template)
    config = DataConfig(**{**section, "chat": "messages", "chat_template": str(path)})  # type: ignore[arg-type]
    made = ConversationEncoder(open_source(config, 0), tokenizer, config)
    found: list[EncodedDocument | None] = []
    for number in range(len(made.source)):
        try:
            found.append(made.encode(number))
        except UnreadableRecord:
            found.append(None)
    return found


def same(one: EncodedDocument | None, other: EncodedDocument | None) -> bool:
    if one is None or other is None:
        return one is other
    assert one.trained is not None and other.trained is not None
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.trained, other.trained)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_all_sources_encode_conversations_identically(
    seed: int, tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    records = [record(draw) for _ in range(24)]
    sections = {kind: make(records, tmp_path) for kind, make in KINDS.items()}
    for style, template in STYLES.items():
        found = {
            kind: encoded(section, template, tokenizer[1], tmp_path)
            for kind, section in sections.items()
        }
        assert sum(each is not None for each in found["jsonl"]) > 4, style
        for kind in KINDS:
            pairs = zip(found["jsonl"], found[kind], strict=True)
            assert [n for n, pair in enumerate(pairs) if not same(*pair)] == [], (style, kind)


@pytest.mark.oracle
def test_random_conversations_match_transformers(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    """Compares 400 conversations in 8 template styles from 4 source formats."""
    probe = subprocess.run([PYTHON, "-c", "import transformers"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no transformers")
    draw = random.Random(11)
    records = [record(draw) for _ in range(400)]
    folder, encoder = tokenizer
    (folder / "jobs.json").write_text(json.dumps({"templates": STYLES, "records": records}))
    script = Path(__file__).with_name("sources_oracle.py")
    options: Any = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    result = subprocess.run([PYTHON, script, folder], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stderr
    answers = json.loads((folder / "answers.json").read_text())
    sections = {kind: make(records, tmp_path) for kind, make in KINDS.items()}
    compared = dict.fromkeys(STYLES, 0)
    for style, template in STYLES.items():
        for kind, section in sections.items():
            found = encoded(section, template, encoder, tmp_path)
            for number, (mine, wanted) in enumerate(zip(found, answers[style], strict=True)):
                place = (style, kind, number)
                if wanted is None:
                    continue  # a template that rejects null or absent content
                assert mine is not None and mine.trained is not None, place
                assert mine.ids.tolist() == wanted["ids"], place
                if "mask" in wanted:
                    assert mine.trained.astype(int).tolist() == wanted["mask"], place
                    compared[style] += 1
                elif (begin := wanted["last"]) is not None:
                    assert mine.trained[begin:].all(), place
                    assert begin == 0 or not mine.trained[begin - 1], place
                    compared[style] += 1
    assert all(count >= 400 for count in compared.values()), compared
