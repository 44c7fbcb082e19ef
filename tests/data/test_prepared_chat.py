"""Prepared conversations: IDs and masks match the records, and every damage is detected."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data import corpus
from maxpipe.data.chat import ConversationEncoder
from maxpipe.data.chat_spec import LengthLimitedTokenFiles
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.prepared import prepare as prepare_module
from maxpipe.data.prepared import writer
from maxpipe.data.prepared.manifest import MANIFEST_FILE, MASK_FILE, read_manifest
from maxpipe.data.prepared.prepare import PrepareJob, prepare, verify
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.typed_json import dump_checksummed
from tests.data.conversations import TEMPLATES, messages_of, without_blocks, write_records
from tests.data.test_prepared import digests, silent

NUM_RECORDS = 41
SHARD_TOKENS = 509
"""Not a multiple of 8, so that masks do not end at a byte boundary."""


def conversation(number: int) -> list[dict[str, str]]:
    """Return a conversation of varying length, sometimes without an answer."""
    turns = [("user", f"question {number} naïve 語 " * (1 + number % 3))]
    if number % 5:
        turns += [("assistant", f"answer {number} " * (number % 4))]
    if number % 7 == 3 and number % 5:
        turns += [("user", "and?"), ("assistant", "é\n")]
    return messages_of(*turns)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "a.jsonl"
    return write_records(path, [{"messages": conversation(i)} for i in range(NUM_RECORDS)])


def section(records: Path, template: str, **changes: Any) -> DataConfig:
    """Return the data config of the records, with the template in their folder."""
    path = records.with_name(f"{abs(hash(template))}.jinja")
    path.write_text(template)
    settings = {"chat": "messages", "chat_template": str(path), "validation_fraction": 0.2}
    return DataConfig(source="jsonl", path=str(records), **{**settings, **changes})


def plan(data: DataConfig, folder: Path, workers: int = 1, **changes: Any) -> PrepareJob:
    settings = {"data": data, "tokenizer": TokenizerConfig(), "seed": 0, "folder": folder}
    settings |= {"workers": workers, "shard_tokens": SHARD_TOKENS}
    return PrepareJob(**{**settings, **changes})


@pytest.fixture(scope="module")
def tokens(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare(plan(section(records, TEMPLATES["chatml"]), folder, workers=2), silent)
    return folder


def opened_from(data: DataConfig, length: int = 33) -> Datasets:
    return build_loaders(data, TokenizerConfig(), seed=3, batch_size=4, sequence_length=length)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize(
    "name",
    [
        *(
            each if each == "llama3" else pytest.param(each, marks=pytest.mark.long)
            for each in TEMPLATES
        ),
        "plain",
    ],
)
def test_prepared_batches_match_record_batches(
    name: str, packing: Any, records: Path, tmp_path: Path
) -> None:
    """Fingerprints match, too, so a run can switch between records and tokens."""
    template = TEMPLATES.get(name) or without_blocks(TEMPLATES["llama3"])
    policy, length = ("split", 33) if packing == "concatenate" else ("truncate", 150)
    direct = section(records, template, packing=packing, long_conversations=policy)
    prepare(plan(direct, tmp_path / "out"), silent)
    shards = read_manifest(str(tmp_path / "out"))["shards"]
    assert len(shards) > 3 and any(shard["tokens"] % 8 for shard in shards)
    prepared = DataConfig(
        source="tokens",
        path=str(tmp_path / "out"),
        validation_fraction=0.2,
        packing=packing,
        long_conversations=policy,
    )
    text, ids = opened_from(direct, length), opened_from(prepared, length)
    if policy == "truncate":
        assert text.remarks == ids.remarks
    if policy == "truncate" and name == "llama3":
        [line] = text.remarks
        assert "longer than a sequence: truncated to one" in line
        assert "dropped for having no tokens left to train on" in line
    assert compare_fingerprints(text.train.fingerprint(), ids.train.fingerprint()) == []
    assert text.train.fingerprint() == ids.train.fingerprint()
    assert text.unigram_entropy == ids.unigram_entropy
    untrained = 0.0
    for one, other in ((text.train, ids.train), (text.validation, ids.validation)):
        assert one is not None and other is not None
        for step in (*range(one.num_batches), 10_000_000):
            pair = one.batch(step), other.batch(step)
            assert all(np.array_equal(pair[0][each], pair[1][each]) for each in pair[0])
            same = pair[0]["segment_ids"] > 0
            untrained += float((same & (pair[0]["loss_mask"] == 0)).sum())
    assert untrained > 100


def test_prepared_documents_match_records(records: Path, tokens: Path) -> None:
    data = section(records, TEMPLATES["chatml"])
    made = ConversationEncoder(open_source(data, 0), ByteTokenizer(), data)
    found = PreparedDocuments(str(tokens), ByteTokenizer())
    for number in range(NUM_RECORDS):
        one, other = made.encode(number), found[number]
        assert one.trained is not None and other.trained is not None
        assert one.ids.tolist() == other.ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()
    counts = [shard.get("trained") for shard in found.manifest["shards"]]
    masks = [found[number].trained for number in range(NUM_RECORDS)]
    assert sum(filter(None, counts)) == sum(int(each.sum()) for each in masks if each is not None)
    assert found.remark == "prepared from conversations of jsonl"


def test_files_do_not_depend_on_workers_or_interruption(
    records: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = section(records, TEMPLATES["chatml"])

    class Stopped(Exception):
        """Simulates a kill."""

    entered = 0

    def enter(journal: Any, line: Any, before: Any = prepare_module.append_journal) -> None:
        nonlocal entered
        before(journal, line)
        entered += 1
        if entered == 3:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "append_journal", enter)
        with pytest.raises(Stopped):
            prepare(plan(data, tmp_path / "again"), silent)
    assert not (tmp_path / "again" / MANIFEST_FILE).exists()
    monkeypatch.setattr(writer, "_MAX_TOKENS", 50)  # batches of one or two conversations
    prepare(plan(data, tmp_path / "again"), silent)
    assert digests(tmp_path / "again") == digests(tokens)


@pytest.mark.long
def test_resume_after_kill_gives_identical_files(records: Path, tmp_path: Path) -> None:
    """The process is killed with SIGKILL midway."""
    template = records.with_name("slow.jinja")
    template.write_text(TEMPLATES["chatml"])
    command = [sys.executable, "-m", "maxpipe", "data", "prepare", "data.source=jsonl"]
    command += [f"data.path={records}", "data.chat=messages", f"data.chat_template={template}"]
    command += ["--workers", "1", "--shard-tokens", "97", f"run.dir={tmp_path}", "--out"]
    assert subprocess.run([*command, str(tmp_path / "whole")], check=False).returncode == 0
    running = subprocess.Popen([*command, str(tmp_path / "killed")])
    while running.poll() is None and len(list((tmp_path / "killed").glob("*.crc"))) < 2:
        time.sleep(0.002)
    running.kill()
    running.wait()
    assert subprocess.run([*command, str(tmp_path / "killed")], check=False).returncode == 0
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def read_all(folder: Path) -> list[tuple[list[int], list[bool]]]:
    found = PreparedDocuments(str(folder), ByteTokenizer())
    documents = [found[number] for number in range(found.num_documents)]
    return [(each.ids.tolist(), np.array(each.trained).tolist()) for each in documents]


@pytest.mark.fault("F22")
def test_flipped_mask_bits_are_detected(tokens: Path) -> None:
    """Reading and `verify` both detect them."""
    paths = sorted(tokens.glob(f"*{MASK_FILE}"))
    whole = read_all(tokens)
    draw = np.random.default_rng(5)
    for _ in range(200):
        path = paths[draw.integers(len(paths))]
        raw = bytearray(path.read_bytes())
        at, bit = int(draw.integers(len(raw))), 1 << int(draw.integers(8))
        raw[at] ^= bit
        path.write_bytes(raw)
        with pytest.raises(StorageError, match=re.escape(str(path))):
            read_all(tokens)
        assert [line.partition(":")[0] for line in verify(str(tokens), silent).damage] == [
            str(path)
        ]
        raw[at] ^= bit
        path.write_bytes(raw)
    raw = paths[0].read_bytes()
    paths[0].write_bytes(raw[:-1])
    with pytest.raises(StorageError, match="bytes instead of"):
        read_all(tokens)
    paths[0].write_bytes(raw)
    assert read_all(tokens) == whole and not verify(str(tokens), silent).damage


def test_manifests_with_inconsistent_masks_are_rejected(tokens: Path) -> None:
    path = tokens / MANIFEST_FILE
    before = path.read_text()
    changes: list[tuple[str, Callable[[Any], object]]] = [
        ("has the files", lambda found: found["shards"][0]["files"].pop(MASK_FILE)),
        ("1000000 trained", lambda found: found["shards"][0].update(trained=10**6)),
        ("None trained", lambda found: found["shards"][0].pop("trained")),
        (
            "invalid size: 1 bytes",
            lambda found: found["shards"][1]["files"][MASK_FILE].update(bytes=1),
        ),
        ("both conversations and plain text", lambda found: found["source"].pop("chat")),
        ("both conversations and plain text", lambda found: found.update(format=1)),
        ("has format 3", lambda found: found.update(format=3)),
    ]
    try:
        for words, change in changes:
            found = json.loads(before)
            del found["sha256"]
            change(found)
            path.write_text(dump_checksummed(found))
            with pytest.raises((StorageError, ConfigError), match=words):
                read_manifest(str(tokens))
    finally:
        path.write_text(before)


def test_changed_template_or_roles_are_rejected(
    records: Path, tokens: Path, tmp_path: Path
) -> None:
    other = section(records, TEMPLATES["mistral"])
    with pytest.raises(ConfigError, match=r"different settings: source\.chat"):
        prepare(plan(other, tokens), silent)
    roles = section(records, TEMPLATES["chatml"], trained_roles=["user"])
    with pytest.raises(ConfigError, match=r"different settings: source\.chat"):
        prepare(plan(roles, tokens), silent)
    text = DataConfig(source="jsonl", path=str(records), text_field="messages")
    with pytest.raises(ConfigError, match="different settings: format: 2 and 1"):
        prepare(plan(text, tokens), silent)


@pytest.mark.parametrize("what", ["nothing", "roles", "broken"])
def test_prepare_errors_match_direct_errors(what: str, tmp_path: Path) -> None:
    """`prepare` reports the same error as a run that reads the records directly."""
    talks = [conversation(1), conversation(2)]
    path = write_records(tmp_path / "a.jsonl", [{"messages": each} for each in talks])
    changes: dict[str, Any] = {}
    if what == "nothing":
        changes["trained_roles"] = ["tool"]
    elif what == "roles":
        write_records(path, [{"messages": talks[0]}, {"messages": messages_of(("me", "x"))}])
    else:
        path.write_text(path.read_text() + '{"messages": [\n')
    data = section(path, TEMPLATES["chatml"], **changes)
    with pytest.raises(ConfigError) as direct:
        opened_from(data)
    with pytest.raises(ConfigError) as prepared:
        prepare(plan(data, tmp_path / "out"), silent)
    assert str(prepared.value) == str(direct.value)


def test_data_show_and_stats_match_records(
    records: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares the output of both commands for records and for prepared tokens."""
    data = section(records, TEMPLATES["chatml"])
    chat = [f"data.chat_template={data.chat_template}", "data.chat=messages"]
    of_records = ["data.source=jsonl", f"data.path={records}", *chat]
    of_tokens = ["data.source=tokens", f"data.path={tokens}"]
    shown, counted = [], []
    for inputs in (of_records, of_tokens):
        more = [*inputs, "train.sequence_length=64", "data.validation_fraction=0"]
        more += ["eval.batches=0"]
        assert main(["data", "show", "quickstart", *more, "-n", "4"]) == 0
        shown.append(re.sub(r"(?m)^--- .*$", "", capsys.readouterr().out))
        assert main(["data", "stats", "quickstart", *more, "--json"]) == 0
        counted.append(json.loads(capsys.readouterr().out) | {"source": ""})
    assert shown[0] == shown[1] and "⟦" in shown[0]
    assert counted[0] == counted[1] and 0 < counted[0]["tokens_trained"] < counted[0]["tokens"]


def test_template_process_ignores_ctrl_c(records: Path) -> None:
    """A terminal signals the whole process group, which must not look like a template error."""
    code = (
        "import os, signal, sys\n"
        "from maxpipe.data.tokenizers.chat import ChatTemplate\n"
        "from maxpipe.data.tokenizers.chat import ChatInput\n"
        "process = ChatTemplate('{{ messages[0].content }}', 'x.jinja', {}).process()\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "for _ in range(3):\n"
        "    print(process.render(ChatInput([{'role': 'user', 'content': 'still here'}])).text)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    signal.signal(signal.SIGINT, before)
    assert result.stdout == "still here\n" * 3, result.stderr


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_long_conversations_in_windows_are_reported(
    policy: Any, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts match those without windows; a second start reads them from the cache."""
    prepare(plan(section(records, TEMPLATES["llama3"]), tmp_path / "out"), silent)
    data = DataConfig(source="tokens", path=str(tmp_path / "out"), long_conversations=policy)
    whole = opened_from(data, 150).remarks
    monkeypatch.setattr(corpus, "needs_windows", lambda documents: True)
    num_read, reads = [0], LengthLimitedTokenFiles._read_has_target

    def counted(self: LengthLimitedTokenFiles, document: int, count: int) -> bool:
        num_read[0] += 1
        return reads(self, document, count)

    monkeypatch.setattr(LengthLimitedTokenFiles, "_read_has_target", counted)

    def start() -> list[str]:
        num_read[0] = 0
        return build_loaders(
            data,
            TokenizerConfig(),
            seed=3,
            batch_size=4,
            sequence_length=150,
            cache_dir=str(tmp_path / ".index"),
        ).remarks

    assert start() == whole and any("longer than a sequence" in line for line in whole)
    assert (num_read[0] > 0) == (policy == "truncate")
    assert start() == whole and num_read[0] == 0
    with pytest.raises(ConfigError, match="leaves no training examples"):
        opened_from(data, 2)
