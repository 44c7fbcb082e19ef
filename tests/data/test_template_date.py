"""Chat templates that render the current date, such as those of Llama 3.2 and GPT-OSS.

The date is the day on which documents were indexed or prepared, whenever they are read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data import chat
from maxpipe.data.chat import ChatDocuments, ConversationEncoder, build_chat_index
from maxpipe.data.datasets import build_datasets, load_run_chat_template
from maxpipe.data.pairs import PairDocuments, PairEncoder
from maxpipe.data.prepared import prepare as prepare_module
from maxpipe.data.prepared.manifest import JOURNAL, MANIFEST_FILE, read_manifest
from maxpipe.data.prepared.prepare import PrepareJob, prepare
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import UserInterrupt
from tests.data.conversations import messages_of, write_records
from tests.data.test_prepared import digests, silent

TEMPLATE = """\
Today: {{ strftime_now('%d %b %Y') }}
{% for message in messages %}[{{ message.role }}]{{ message.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
FIRST, LATER = "2026-01-31", "2026-02-01"
TOKENIZER = ByteTokenizer()


def section(tmp_path: Path, kind: Literal["messages", "pairs"] = "messages") -> DataConfig:
    template = tmp_path / "t.jinja"
    template.write_text(TEMPLATE)
    asked, answered = messages_of(("user", "hi")), messages_of(("assistant", "yes"))
    record = {"messages": [*asked, *answered]}
    if kind == "pairs":
        record = {"prompt": asked, "chosen": answered, "rejected": messages_of(("assistant", "no"))}
    path = write_records(tmp_path / "a.jsonl", [record] * 40)
    return DataConfig(source="jsonl", path=str(path), chat=kind, chat_template=str(template))


def set_today(day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "today", lambda: day)


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_resume_on_another_day_keeps_date(
    kind: Literal["messages", "pairs"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, ids = section(tmp_path, kind), []
    for day in (FIRST, LATER):
        set_today(day, monkeypatch)
        source = open_source(data, 0)
        if kind == "pairs":
            pairs = PairEncoder(source, TOKENIZER, data, 256)
            index = build_chat_index(pairs, str(tmp_path / "index"))
            ids.append(PairDocuments(pairs, index)[7].ids)
        else:
            conversations = ConversationEncoder(source, TOKENIZER, data)
            index = build_chat_index(conversations, str(tmp_path / "index"))
            ids.append(ChatDocuments(conversations, index)[7].ids)
    assert TOKENIZER.decode(ids[0].tolist()).startswith("Today: 31 Jan 2026\n[user]hi")
    assert np.array_equal(*ids)


def test_prepare_over_two_days_keeps_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PrepareJob(
        data=section(tmp_path),
        tokenizer=TokenizerConfig(),
        seed=0,
        folder=tmp_path / "tokens",
        workers=1,
        shard_tokens=500,
    )
    set_today(FIRST, monkeypatch)
    prepare(plan, silent)
    whole = digests(plan.folder)
    assert read_manifest(str(plan.folder))["source"].get("day") == FIRST
    shutil.rmtree(plan.folder)

    def stopped(*_: object) -> None:
        if (plan.folder / JOURNAL).read_bytes().count(b"\n") > 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(UserInterrupt):
        patch.setattr(prepare_module, "_check_files_unchanged", stopped)
        prepare(plan, silent)
    assert not (plan.folder / MANIFEST_FILE).exists()
    set_today(LATER, monkeypatch)
    prepare(plan, silent)
    assert digests(plan.folder) == whole
    assert prepare(plan, silent).startswith(f"{plan.folder} is complete")


def test_prompts_keep_date_of_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    prompt = {"messages": messages_of(("user", "2+2=")), "answer": "4"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    config = load(
        [
            "tiny",
            "train.steps=2",
            "train.objective=grpo",
            "train.sequence_length=128",
            f"grpo.prompts={tmp_path / 'prompts.jsonl'}",
            "grpo.max_tokens=8",
            "grpo.group_size=2",
            f"data.chat_template={tmp_path / 't.jinja'}",
            "data.chat=messages",
            "data.source=jsonl",
            "data.path=none.jsonl",
            f"run.dir={tmp_path}",
            "run.name=first",
        ]
    ).config

    def prompt_of_today() -> str:
        datasets = build_datasets(config, lambda: None)
        return datasets.tokenizer.decode(datasets.train.batch(0)["tokens"][0].tolist())

    set_today(FIRST, monkeypatch)
    assert prompt_of_today().startswith("Today: 31 Jan 2026\n[user]2+2=")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / EVENTS_FILE).write_text("")
    set_today(LATER, monkeypatch)
    assert prompt_of_today().startswith("Today: 31 Jan 2026\n")
    template = load_run_chat_template(config, TOKENIZER)  # for samples and evaluation questions
    assert template is not None and template.day == FIRST
    shutil.rmtree(tmp_path / "first")  # another run
    assert prompt_of_today().startswith("Today: 01 Feb 2026\n")
