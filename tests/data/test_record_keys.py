"""Records in a format other than the configured one: the error suggests the right settings."""

import json
import shlex
from pathlib import Path

import pytest

from maxpipe.cli import main

TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content }}</s>{% endfor %}"
ASKED = [{"role": "user", "content": "Is it there?"}]
SAID = [{"role": "assistant", "content": "Yes, it is."}]

RECORDS = {
    "completion": (
        {"prompt": "a?", "completion": "b"},
        "data.chat=prompt data.response_field=completion",
    ),
    "lists": (
        {"prompt": ASKED, "completion": SAID},
        "data.chat=prompt data.response_field=completion",
    ),
    "instruction": (
        {"instruction": "a?", "output": "b"},
        "data.chat=prompt data.prompt_field=instruction data.response_field=output",
    ),
    "response": ({"prompt": "a?", "response": "b"}, "data.chat=prompt"),
    "messages": ({"messages": ASKED + SAID}, "data.chat=messages"),
    "conversation": (
        {"conversation": ASKED + SAID},
        "data.chat=messages data.messages_field=conversation",
    ),
    "alpaca": (
        {"instruction": "a?", "input": "b", "output": "c"},
        r"data.chat=prompt data.prompt_field='{instruction}\n{input}' data.response_field=output",
    ),
    "system": (
        {"system_prompt": "a", "question": "b?", "response": "c"},
        "data.chat=prompt data.prompt_field=question data.system_field=system_prompt",
    ),
    "case": (
        {"Question": "a?", "Response": "b"},
        "data.chat=prompt data.prompt_field=Question data.response_field=Response",
    ),
    "turns": (
        {"conversation": [{"input": "a?", "output": "b"}]},
        "data.chat=messages data.messages_field=conversation",
    ),
    "texts in turns": ({"data": ["a?", "b"]}, "data.chat=messages data.messages_field=data"),
    "other name": (
        {"items": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
        "data.chat=messages data.messages_field=items",
    ),
    "whole responses": (
        {"chosen": ASKED + SAID, "rejected": ASKED + SAID * 2},
        "train.objective=preference data.chat=pairs data.prompt_field=''",
    ),
    "preference": (
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        "train.objective=preference data.chat=pairs",
    ),
}
"""Records and the settings that read them."""


def show(folder: Path, record: object, *settings: str) -> int:
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "records.jsonl").write_text((json.dumps(record) + "\n") * 40)
    return main(
        [
            *("data", "show", "tiny", "train.steps=2", "train.batch_size=2"),
            *("train.sequence_length=64", "data.source=jsonl", f"run.dir={folder}"),
            f"data.path={folder}/records.jsonl",
            *settings,
        ]
    )


@pytest.mark.parametrize("chat", ["off", "messages", "prompt"])
@pytest.mark.parametrize("name", RECORDS)
def test_error_suggests_settings_that_read_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, chat: str
):
    record, settings = RECORDS[name]
    template = f"data.chat_template={tmp_path}/chat.jinja"
    with_template = [] if chat == "off" else [template]
    if settings == f"data.chat={chat}":
        assert show(tmp_path, record, f"data.chat={chat}", *with_template) == 0
        return
    assert show(tmp_path, record, f"data.chat={chat}", *with_template) == 2
    assert f"  Set {settings}" in capsys.readouterr().err
    assert show(tmp_path, record, *shlex.split(settings), template) == 0


def test_error_suggests_text_template_without_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = {"instruction": "a?", "input": "b", "output": "c"}
    assert show(tmp_path, record) == 2
    (action,) = [line for line in capsys.readouterr().err.splitlines() if "data.template" in line]
    assert action.endswith(
        r", or data.template='{instruction}\n{input}\n{output}' to train on these fields as text."
    )
    (setting,) = [each for each in shlex.split(action) if each.startswith("data.template=")]
    assert show(tmp_path, record, setting) == 0
    assert "a?\nb\nc" in capsys.readouterr().out


@pytest.mark.parametrize("chat", ["messages", "prompt"])
def test_unknown_record_format_gets_generic_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chat: str
):
    record = {"title": "a", "body": "b"}
    assert (
        show(tmp_path, record, f"data.chat={chat}", f"data.chat_template={tmp_path}/chat.jinja")
        == 2
    )
    assert "to the right field." in capsys.readouterr().err


def test_error_suggests_text_field_for_plain_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Fields with several words are suggested first."""
    record = {"id": "0" * 40, "title": "Two words", "body": {"text": "These are more words"}}
    assert show(tmp_path, record) == 2
    assert "  Set data.text_field=body.text.\n" in capsys.readouterr().err
    assert show(tmp_path, {**record, "body": "These are more words"}) == 2
    action = capsys.readouterr().err
    assert r"data.text_field=body, or data.template='{title}\n{body}'" in action
    assert show(tmp_path, {**record, "body": "More"}, r"data.template={title}\n{body}") == 0
    assert "Two words\nMore" in capsys.readouterr().out


def test_prompts_without_responses_suggest_grpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert show(tmp_path, {"prompt": ASKED}) == 2
    assert "grpo.prompts" in capsys.readouterr().err
