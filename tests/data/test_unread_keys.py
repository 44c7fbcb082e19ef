"""Unread keys and columns are reported with settings that read them, and the settings work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.unread_keys import columns_not_read, suggest_settings
from tests.data.conversations import Listed, messages_of, write_records

TEMPLATE = (
    "{% for each in tools or [] %}[{{ each.name }}]{% endfor %}"
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}</s>{% endfor %}"
)
ALPACA = [
    {"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3", "id": 1},
    {"instruction": "Name a cat.", "input": "", "output": "Tom", "id": 2},
]
PROMPT = "data.chat=prompt data.prompt_field=instruction data.response_field=output"
TURNS = messages_of(("user", "Hi"), ("assistant", "Ho"))


def show(folder: Path, records: Sequence[Any], *settings: str, command: str = "show") -> int:
    (folder / "chat.jinja").write_text(TEMPLATE)
    write_records(folder / "a.jsonl", [*records] * 4)
    inputs = ["tiny", "data.source=jsonl", f"data.path={folder}/a.jsonl", f"run.dir={folder}"]
    inputs += ["train.sequence_length=256", "data.validation_fraction=0", "eval.batches=0"]
    inputs += ["train.steps=2", "train.batch_size=2"]
    chat = (
        [f"data.chat_template={folder}/chat.jinja"]
        if any("data.chat=" in s for s in settings)
        else []
    )
    return main(["data", command, *inputs, *settings, *chat])


def settings_in(remark: str) -> list[str]:
    """Return the settings that a remark suggests, parsed as by a shell."""
    found = re.search(r" Set ((?:(?:data|train)\.\w+=(?:'[^']*'|\S*) ?)+)", remark)
    assert found is not None, remark
    return shlex.split(found[1])


CASES: dict[str, tuple[list[Any], str, str, str]] = {
    "alpaca": (
        ALPACA,
        PROMPT,
        "these keys are not read in 8 conversations: id (in 8), input (in 4). "
        r"Set data.prompt_field='{instruction}\n{input}' to read input in the prompt.",
        "⟦<user>Sort.\n3 1 2</s>⟧<assistant>1 2 3</s>",
    ),
    "system": (
        [{"system_prompt": "Be brief.", "prompt": "Hi", "response": "Ho"}],
        "data.chat=prompt",
        "this key is not read in 4 conversations: system_prompt (in 4). "
        "Set data.system_field=system_prompt to read system_prompt as the system message.",
        "<system>Be brief.</s><user>Hi</s>",
    ),
    "system of messages": (
        [{"system": "Be brief.", "messages": TURNS}],
        "data.chat=messages",
        "this key is not read in 4 conversations: system (in 4). "
        "Set data.system_field=system to read system as the system message.",
        "<system>Be brief.</s><user>Hi</s>",
    ),
    "reasoning": (
        [{"prompt": "1+1?", "reasoning": "Count up.", "response": "2"}],
        "data.chat=prompt",
        "this key is not read in 4 conversations: reasoning (in 4). Set "
        r"data.response_field='<think>\n{reasoning}\n</think>\n{response}' "
        "to read reasoning in the response.",
        "<think>\nCount up.\n</think>\n2</s>",
    ),
    "two responses": (
        [{"prompt": "1+1?", "solution": "They are two.", "answer": "It is two."}],
        "data.chat=prompt data.response_field=solution",
        "this key is not read in 4 conversations: answer (in 4). "
        r"Set data.response_field='{solution}\n{answer}' to read answer in the response.",
        "They are two.\nIt is two.</s>",
    ),
    "functions": (
        [{"messages": TURNS, "functions": [{"name": "look"}]}],
        "data.chat=messages",
        "this key is not read in 4 conversations: functions (in 4). "
        "Set data.tools_field=functions to read functions as tools.",
        "[look]<user>Hi</s>",
    ),
    "pairs": (
        [
            {
                "messages": TURNS,
                "chosen": TURNS,
                "rejected": messages_of(("user", "Hi"), ("assistant", "No")),
            }
        ],
        "data.chat=messages",
        "these keys are not read in 4 conversations: chosen (in 4), rejected (in 4). Set "
        "train.objective=preference data.chat=pairs data.prompt_field='' "
        "to read chosen and rejected as preference pairs.",
        "<user>Hi</s>⟧<assistant>No</s>",
    ),
    "pairs of texts": (
        [{"question": "Hi?", "context": "At night.", "chosen": " Ho", "rejected": " No"}],
        "train.objective=preference data.chat=pairs data.prompt_field=question",
        "this key is not read in 4 pairs: context (in 4). "
        r"Set data.prompt_field='{question}\n{context}' to read context in the prompt.",
        "⟦<begin>⟧⟦Hi?\nAt night.⟧ Ho<end>",
    ),
    "columns": (
        [{"text": "One text.", "summary": "More words here", "url": "a/b"}],
        "data.text_field=text",
        "these columns are not read: summary, url. "
        r"Set data.template='{text}\n{summary}' to read summary.",
        "⟦<begin>⟧One text.\nMore words here<end>",
    ),
    "columns of a conversation": (
        [{"text": "Hi Ho", "messages": TURNS}],
        "data.text_field=text",
        "this column is not read: messages. Set data.chat=messages to read conversations.",
        "⟦<user>Hi</s>⟧<assistant>Ho</s>",
    ),
}
"""Records, settings that miss some keys, the remark, and the text with suggested settings."""


@pytest.mark.parametrize("name", CASES)
def test_suggested_settings_read_unread_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    records, settings, remark, text = CASES[name]
    given = shlex.split(settings)
    assert show(tmp_path, records, *given, "-n", "20") == 0
    found = capsys.readouterr()
    assert f"note: data: {remark}\n" in found.err and text not in found.out
    action = settings_in(remark)
    set_again = {each.partition("=")[0] for each in action}
    kept = [each for each in given if each.partition("=")[0] not in set_again]
    assert show(tmp_path, records, *kept, *action, "-n", "20") == 0
    found = capsys.readouterr()
    assert text in found.out
    assert " Set " not in found.err


@pytest.mark.parametrize("command", ["stats", "prepare"])
def test_stats_and_prepare_suggest_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = ["--out", str(tmp_path / "tokens"), "--workers", "1"] * (command == "prepare")
    remarks = [CASES["alpaca"][2], CASES["columns"][2]]
    for name, remark in zip(("alpaca", "columns"), remarks, strict=True):
        more[1:2] = [str(tmp_path / name)] * bool(more)
        settings = shlex.split(CASES[name][1])
        assert show(tmp_path, CASES[name][0], *settings, *more, command=command) == 0
        assert remark in capsys.readouterr().out


def test_negative_labels_suggest_removing_records() -> None:
    """KTO records of TRL have a label that marks good completions."""
    records = [{"prompt": "a", "completion": "b", "label": each} for each in (True, False)]
    config = SourceConfig(source="jsonl", chat="prompt", response_field="completion")
    line = "Responses whose label is false are also trained on: remove these records."
    assert suggest_settings(["label"], Listed(records), config) == line
    assert suggest_settings(["label"], Listed(records[:1]), config) == ""
    text = SourceConfig(source="jsonl", template="{prompt}{completion}")
    assert columns_not_read(Listed(records), text) == [f"this column is not read: label. {line}"]


@pytest.mark.parametrize(
    "labels", [(0, 1), ([0], [1]), ({"a": 1}, None), (True, "b"), (0.0, False)]
)
def test_non_boolean_labels_get_no_suggestion(labels: tuple[object, object]) -> None:
    records = [{"text": "one two", "label": label} for label in labels]
    config = SourceConfig(source="jsonl", path="a")
    assert columns_not_read(Listed(records), config) == ["this column is not read: label"]


def test_suggestions_read_limited_amount_of_text() -> None:
    """Reading all records could exceed memory: 32 records of 256 MiB each."""
    records = [{"text": "word " * (1 << 20)}, {"text": "a b", "note": "one two"}]
    config = SourceConfig(source="jsonl", path="a")
    assert columns_not_read(Listed(records), config) == []
    assert columns_not_read(Listed(records[::-1]), config) != []


def test_field_repeated_in_messages_gets_no_suggestion() -> None:
    records = [{"prompt": "Where is it?", "context": "Where is it?", "response": "Here."}]
    config = SourceConfig(source="jsonl", chat="prompt")
    assert suggest_settings(["context"], Listed(records), config) == ""


def test_failing_settings_are_not_suggested() -> None:
    """For example, a system message already exists, or a field is not a string in all records."""
    records = [{"system": "b", "messages": messages_of(("system", "a"), ("user", "c"))}]
    config = SourceConfig(source="jsonl", chat="messages")
    assert suggest_settings(["system"], Listed(records), config) == ""
    records = [{"prompt": "a", "context": each, "response": "b"} for each in ("two words", ["c"])]
    config = SourceConfig(source="jsonl", chat="prompt")
    assert suggest_settings(["context"], Listed(records), config) == ""
    records = [{"text": "a", "note": each} for each in ("two words", None)]
    config = SourceConfig(source="jsonl")
    assert columns_not_read(Listed(records), config) == ["this column is not read: note"]


def test_records_without_columns_have_no_remark() -> None:
    config = SourceConfig(source="jsonl")
    assert columns_not_read(Listed(["a", "b"]), config) == []
    assert columns_not_read(Listed([{"text": "a", "note": ""}]), config) == []
