"""Conversations from field templates over several columns, system fields, or lists of turns.

Expected messages are written out in full.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat_records import conversation_of
from maxpipe.data.formats.record_text import BadRecord
from maxpipe.data.pairs import pair_of
from maxpipe.data.prompts import chat_of
from tests.data.conversations import messages_of
from tests.errors import contains, without_codes

ALPACA = {"prompt_field": r"{instruction}\n{input}", "response_field": "output"}


def turns(record: Any, chat: Any = "prompt", **settings: Any) -> list[tuple[str, str]]:
    """Return (role, content) of each message."""
    found = conversation_of(record, SourceConfig(chat=chat, source="jsonl", **settings))
    return [(each["role"], each["content"]) for each in found.messages]


def unread(record: Any, chat: Any = "prompt", **settings: Any) -> tuple[str, ...]:
    return conversation_of(record, SourceConfig(chat=chat, source="jsonl", **settings)).unread


@pytest.mark.parametrize("empty", [{"input": ""}, {"input": None}, {}])
def test_template_line_with_empty_field_is_omitted(empty: dict[str, Any]) -> None:
    record = {"instruction": "Sort.", "input": "3 1\n2", "output": "1 2 3", "id": 5}
    assert turns(record, **ALPACA) == [("user", "Sort.\n3 1\n2"), ("assistant", "1 2 3")]
    assert unread(record, **ALPACA) == ("id",)
    bare = {"instruction": "Name a cat.", "output": "Tom", **empty}
    assert turns(bare, **ALPACA)[0] == ("user", "Name a cat.")
    headed = ALPACA | {"prompt_field": r"# Task\n{instruction}\n\nInput: {input}"}
    assert turns(record, **headed)[0] == ("user", "# Task\nSort.\n\nInput: 3 1\n2")
    assert turns(bare, **headed)[0] == ("user", "# Task\nName a cat.")


def test_template_with_all_columns_missing_is_rejected() -> None:
    with pytest.raises(BadRecord) as error:
        turns({"question": "a?", "output": "b"}, **ALPACA)
    assert (
        str(error.value)
        == "must have one of the columns that data.prompt_field uses: instruction, input."
    )
    with pytest.raises(BadRecord) as error:
        turns({"instruction": ["a"], "output": "b"}, **ALPACA)
    assert contains(str(error.value), "column instruction of data.prompt_field")
    assert contains(str(error.value), "type list")


def test_response_field_supports_templates() -> None:
    record = {"q": "1+1?", "why": "Count.", "a": 2}
    settings = {"prompt_field": "q", "response_field": r"<think>\n{why}\n</think>\n{a}"}
    answer = "<think>\nCount.\n</think>\n2"
    assert turns(record, **settings) == [("user", "1+1?"), ("assistant", answer)]
    assert unread(record, **settings) == ()


def test_field_name_with_braces_is_read() -> None:
    assert turns({"{a}": "b", "response": "c"}, prompt_field="{a}")[0] == ("user", "b")


def test_unparsable_field_template_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ["quickstart", "data.source=jsonl", "data.path=a.jsonl", "data.chat=prompt"]
    assert main(["config", "print", *inputs, "data.prompt_field={a"]) == 2
    error = capsys.readouterr().err
    assert "data.prompt_field = {a\n  cannot be parsed: the { at character 1" in without_codes(
        error
    )


SYSTEM = ("system", "Be brief.")


def test_system_field_is_prepended_to_messages() -> None:
    record = {"system_prompt": "Be brief.", "prompt": "Hi", "response": "Ho"}
    said_ = [("user", "Hi"), ("assistant", "Ho")]
    assert turns(record) == said_ and unread(record) == ("system_prompt",)
    assert turns(record, system_field="system_prompt") == [SYSTEM, *said_]
    assert unread(record, system_field="system_prompt") == ()
    assert turns({**record, "system_prompt": None}, system_field="system_prompt") == said_
    listed = {"system": "Be brief.", "messages": messages_of(*said_)}
    assert turns(listed, "messages") == said_ and unread(listed, "messages") == ("system",)
    assert turns(listed, "messages", system_field="system") == [SYSTEM, *said_]
    with pytest.raises(BadRecord, match="string in data.system_field; the value is of type list"):
        turns({**listed, "system": ["a"]}, "messages", system_field="system")


def test_existing_system_message_is_kept() -> None:
    """The record's system field is not read in that case."""
    record = {"system": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}]}
    assert turns(record, "messages") == [SYSTEM] and unread(record, "messages") == ("system",)
    same = {**record, "system": "Be brief."}
    assert turns(same, "messages") == [SYSTEM] and unread(same, "messages") == ()


def test_pairs_support_system_field() -> None:
    config = SourceConfig(chat="pairs", system_field="system", prompt_field="question")
    record = {"system": "Be brief.", "question": "Hi", "chosen": "Ho", "rejected": "No"}
    pair = pair_of(record, config)
    assert pair.prompt == messages_of(SYSTEM, ("user", "Hi"))
    assert (pair.chosen, pair.rejected) == (
        messages_of(("assistant", "Ho")),
        messages_of(("assistant", "No")),
    )
    assert pair.template_input.unread == ()
    assert pair_of({**record, "system": ""}, config).prompt == "Hi"


def test_pairs_support_prompt_templates() -> None:
    config = SourceConfig(chat="pairs", prompt_field=r"{instruction}\n{input}")
    pair = pair_of({"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"}, config)
    assert pair == ("a\nb", "c", "d", pair.template_input) and pair.template_input.unread == ()


def test_prompt_repeated_in_pair_conversations_is_rejected() -> None:
    """The prompt would be in the sequence twice; the error suggests the correct setting."""
    whole = [messages_of(SYSTEM, ("user", "Hi"), ("assistant", each)) for each in ("Ho", "No")]
    record = {"prompt": "Hi ", "chosen": whole[0], "rejected": whole[1]}
    with pytest.raises(BadRecord) as error:
        pair_of(record, SourceConfig(chat="pairs"))
    assert error.value.action == "Set data.prompt_field=''."
    pair = pair_of(record, SourceConfig(chat="pairs", prompt_field=""))
    assert pair.prompt == messages_of(SYSTEM, ("user", "Hi"))
    assert pair.chosen == messages_of(("assistant", "Ho"))
    assert pair.rejected == messages_of(("assistant", "No"))


def test_prompts_include_sharegpt_system_message() -> None:
    record = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]}
    assert chat_of(record).messages == messages_of(SYSTEM, ("user", "Hi"))


def test_messages_as_alternating_turns() -> None:
    roles = itertools.cycle(("user", "assistant"))
    texts = ["Hi", "Ho", "And?"]
    wanted = list(zip(roles, texts, strict=False))
    assert turns({"data": texts}, "messages", messages_field="data") == wanted
    objects = [{"input": "Hi", "output": "Ho"}, {"input": "And?", "output": None}]
    assert turns({"messages": objects}, "messages") == wanted
