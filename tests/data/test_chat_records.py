"""Conversation records: tools, training flags, ShareGPT format and unread keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.chat_records import conversation_of
from maxpipe.data.formats.record_text import BadRecord
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.pairs import PairEncoder
from maxpipe.data.prompts import chat_of, read_conversations
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import ConfigError
from tests.data.conversations import CHATML, Listed, messages_of, write_records
from tests.data.model_templates import GPT_OSS, QWEN2, QWEN3
from tests.data.test_conversations import conversations, records_of, trained_text
from tests.errors import raises

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
TURNS = messages_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
MESSAGES = DataConfig(chat="messages")


def text(found: Any) -> str:
    return ByteTokenizer().decode(found.ids)


def test_tools_and_template_kwargs_reach_template(tmp_path: Path) -> None:
    """Tools may be a list or JSON; template settings of a record override those of the config."""
    template = "{{ tools | tojson }}{{ enable_thinking }}{{ level }}|{{ messages[0].content }}"
    records = [
        {"messages": messages_of(("user", "a")), "tools": [TOOL]},
        {"messages": messages_of(("user", "a")), "tools": json.dumps([TOOL])},
        {
            "messages": messages_of(("user", "a")),
            "chat_template_kwargs": {"enable_thinking": True, "level": None},
        },
    ]
    settings = {"enable_thinking": "false", "level": "3"}
    made = conversations(template, records, tmp_path, chat_template_kwargs=settings)
    found = [text(made.encode(number)) for number in range(3)]
    assert found[0] == found[1] == f"{json.dumps([TOOL])}False3|a"
    assert found[2] == "nullTrue3|a"
    other = conversations(template, records, tmp_path)
    assert other.fingerprint() != made.fingerprint()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tools": "look"}, "list of objects in tools"),
        ({"tools": {"name": "look"}}, "list of objects in tools"),
        ({"chat_template_kwargs": {"messages": []}}, "without the keys messages, tools"),
        ({"chat_template_kwargs": 3}, "an object in chat_template_kwargs"),
    ],
)
def test_invalid_tools_are_rejected(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(BadRecord, match=rule):
        conversation_of({"messages": TURNS, **fields}, MESSAGES)


def test_tool_calls_without_content(tmp_path: Path) -> None:
    """Null and absent content are equivalent for templates that test for either."""
    template = (
        "{% if messages[1]['content'] is none %}none{% else %}{{ 'a' + messages[1]['content'] }}"
    )
    template += "{% endif %}"
    for message in ({"tool_calls": [CALL]}, {"content": None, "tool_calls": [CALL]}):
        record = {"messages": [*messages_of(("user", "a")), {"role": "assistant", **message}]}
        assert text(conversations(template, [record], tmp_path).encode(0)) == "none"
        record["messages"].append({"role": "tool", "content": "1"})
        found = conversations(QWEN2, [record], tmp_path).encode(0)
        call = json.dumps(CALL["function"])
        assert trained_text(found) == [f"<call>{call}</call><|im_end|>\n"]


def test_message_weight_and_train_flags(tmp_path: Path) -> None:
    """`weight` can exclude an assistant message; `train` decides for messages of any role."""
    flags: list[Any] = [{}, {"weight": 0}, {"train": True}, {"weight": 1}]
    messages = [{**each, **flag} for each, flag in zip(TURNS, flags, strict=True)]
    for template in (CHATML, QWEN2):
        found = conversations(template, records_of([messages]), tmp_path).encode(0)
        assert found.unread == ()
        parts = "".join(trained_text(found)).replace("<|im_end|>\n", "<|im_end|>")
        assert parts == "<|im_start|>user\nc<|im_end|>d<|im_end|>"
    for wrong in ({"weight": 0.5}, {"train": "yes"}, {"weight": 0, "train": True}):
        with pytest.raises(BadRecord, match="must"):
            conversation_of({"messages": [{**TURNS[1], **wrong}]}, MESSAGES)


def test_sharegpt_records_match_openai_records(tmp_path: Path) -> None:
    record = {
        "system": "s",
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"x": 1}})},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b"},
        ],
        "tools": json.dumps([TOOL]),
    }
    usual = {
        "messages": [
            *messages_of(("system", "s"), ("user", "a")),
            {"role": "assistant", "tool_calls": [CALL]},
            *messages_of(("tool", "1"), ("assistant", "b")),
        ],
        "tools": [TOOL],
    }
    made = conversations(QWEN2, [record, usual], tmp_path)
    one, other = made.encode(0), made.encode(1)
    assert one.ids.tolist() == other.ids.tolist() and trained_text(one) == trained_text(other)
    assert one.unread == other.unread == ()
    record["conversations"] = [{"from": "function_call", "value": "look(1)"}]
    with pytest.raises(ConfigError, match="call in JSON"):
        conversations(QWEN2, [record], tmp_path).encode(0)


def test_rewritten_history_policies_with_reasoning(tmp_path: Path) -> None:
    """`last` trains on the answer that is not rewritten, `each_turn` on every original answer."""
    messages = [dict(each) for each in TURNS]
    messages[1]["reasoning_content"] = messages[3]["reasoning_content"] = "why"
    record = {"messages": messages}
    found = conversations(QWEN3, [record], tmp_path).encode(0)
    last = "<think>\nwhy\n</think>\n\nd<|im_end|>\n"
    assert trained_text(found) == [last] and found.marks == 8
    with pytest.raises(ConfigError, match="message by message"):
        conversations(QWEN3, [record], tmp_path, rewritten_history="error").encode(0)
    path = write_records(tmp_path / "a.jsonl", [record] * 5)
    (tmp_path / "template.jinja").write_text(QWEN3)
    each = opened(path, tmp_path, rewritten_history="each_turn", packing="pad")
    assert each.corpora is not None
    documents = each.corpora[0].indexed[0].documents
    assert len(documents.lengths) == 10
    assert [trained_text(documents[n]) for n in (2, 3)] == [[last.replace("d<", "b<")], [last]]
    assert text(documents[2]).endswith("b<|im_end|>\n") and each.remarks == []
    assert each.train.where("", 3).endswith(":2, trained message 2")
    indexed = each.corpora[0].indexed[0]
    split = indexed._order("validation", 0.4)
    assert sorted(split.tolist()) == sorted(
        {2 * (n // 2) + m for n in split.tolist() for m in (0, 1)}
    )


def test_answer_is_trained_after_rewritten_history(tmp_path: Path) -> None:
    """GPT-OSS drops the reasoning before a tool call once a final answer exists."""
    messages = [
        *messages_of(("user", "a")),
        {"role": "assistant", "reasoning_content": "why", "tool_calls": [CALL]},
        *messages_of(("tool", "1"), ("assistant", "b")),
    ]
    found = conversations(GPT_OSS, records_of([messages]), tmp_path).encode(0)
    assert trained_text(found) == ["<channel>final b<end>"] and found.marks == 8


def opened(path: Path, tmp_path: Path, length: int = 200, **settings: Any) -> Datasets:
    data = DataConfig(
        source="jsonl",
        path=str(path),
        **{
            "chat": "messages",
            "chat_template": str(tmp_path / "template.jinja"),
            "validation_fraction": 0,
            **settings,
        },
    )
    return build_loaders(data, TokenizerConfig(), seed=0, batch_size=2, sequence_length=length)


def test_unread_keys_are_reported_with_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are reported at startup and by `data show`, `data stats` and `data prepare`."""
    records = [
        {"messages": [{**each, "mood": "good", "note": None} for each in TURNS], "id": n, "x": ""}
        for n in range(3)
    ]
    records[0]["tools"] = [TOOL]
    path = write_records(tmp_path / "a.jsonl", records)
    (tmp_path / "template.jinja").write_text(CHATML)
    line = (
        "these keys are not read in 3 conversations: id (in 3), message.mood (in 3), tools (in 1)"
    )
    bare = f"data: {line}"
    line += ". Set data.chat_template to a template file that reads tools."
    assert opened(path, tmp_path).remarks == [f"data: {line}"]
    keys = ["data.source=jsonl", f"data.path={path}", "data.chat=messages"]
    keys += [f"data.chat_template={tmp_path / 'template.jinja'}", f"run.dir={tmp_path}"]
    rest = ["data.validation_fraction=0", "eval.batches=0"]
    assert main(["data", "show", "quickstart", *keys, *rest, "-n", "1"]) == 0
    assert line in capsys.readouterr().err
    assert main(["data", "stats", "quickstart", *keys, *rest]) == 0
    assert line in capsys.readouterr().out
    out = tmp_path / "tokens"
    assert main(["data", "prepare", *keys, "--out", str(out), "--workers", "1"]) == 0
    assert line in capsys.readouterr().out
    data = DataConfig(source="tokens", path=str(out), validation_fraction=0)
    found = build_loaders(data, TokenizerConfig(), seed=0, batch_size=2, sequence_length=200)
    assert found.remarks == [bare]  # the records are no longer available
    assert found.train.fingerprint() == opened(path, tmp_path).train.fingerprint()


@pytest.mark.parametrize("policy", ["truncate", "drop", "split", "error"])
def test_long_conversations(policy: str, tmp_path: Path) -> None:
    """By default, no answer is trained on without its question."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    turns = [("q" * 5, "a" * 5), ("r" * 5, "b" * 30), ("s" * 30, "c" * 5)]
    records = records_of([messages_of(("user", q), ("assistant", a)) for q, a in turns])
    path = write_records(tmp_path / "a.jsonl", records)
    if policy == "error":
        with raises(
            ConfigError,
            "data.long_conversations",
            "error",
            names=["2 longer conversations", "a.jsonl:2"],
            suggests=["train.sequence_length", "data.long_conversations=truncate"],
        ):
            opened(path, tmp_path, 20, long_conversations=policy)
        return
    found = opened(path, tmp_path, 20, long_conversations=policy)
    rows = [found.train.sequences[n] for n in range(len(found.train.sequences))]
    decode = ByteTokenizer().decode
    trained = sorted(decode(row["targets"][row["loss_mask"] > 0].tolist()) for row in rows)
    [remark] = found.remarks
    assert "2 of 3 conversations longer than a sequence" in remark
    if policy == "truncate":
        assert trained == ["aaaaa", "b" * 16] and "; 1 dropped" in remark
    elif policy == "drop":
        assert trained == ["aaaaa"] and "a sequence: dropped" in remark
    else:
        assert "".join(sorted("".join(trained))) == "a" * 5 + "b" * 30 + "c" * 5
        assert "without its prompt" in remark


def test_preference_pairs_support_tools(tmp_path: Path) -> None:
    """The prompt contains an earlier answer that the template rewrites."""
    (tmp_path / "template.jinja").write_text(QWEN3)
    prompt = [
        *messages_of(("user", "a")),
        {**TURNS[1], "reasoning_content": "why"},
        *messages_of(("user", "c")),
    ]
    record = {
        "prompt": prompt,
        "chosen": messages_of(("assistant", "yes")),
        "rejected": [{"from": "gpt", "value": "no"}],
        "tools": [TOOL],
        "id": 3,
    }
    whole = {**record, "chosen": [*prompt, *record["chosen"]]}
    whole["rejected"] = [*prompt, *messages_of(("assistant", "no"))]
    path = str(tmp_path / "template.jinja")
    config = DataConfig(chat="pairs", chat_template=path, packing="best_fit")
    made = PairEncoder(Listed([record, whole]), ByteTokenizer(), config, 900)
    found, other = made.encode(0), made.encode(1)
    assert found.ids.tolist() == other.ids.tolist() and found.unread == ("id",)
    assert "".join(trained_text(found)) == "".join(
        f"<think>\n\n</think>\n\n{each}<|im_end|>\n" for each in ("yes", "no")
    )
    assert text(found).startswith(f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>")
    assert np.array_equal(found.trained, other.trained)  # type: ignore[arg-type]


def test_prompts_support_tools(tmp_path: Path) -> None:
    """Applies to prompts of `generate --chat`, samples and rollouts."""
    records = [
        {"messages": messages_of(("user", "a")), "tools": [TOOL]},
        {"prompt": messages_of(("user", "a")), "tools": json.dumps([TOOL])},
        {"prompt": "a", "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
        {"conversations": [{"from": "human", "value": "a"}], "tools": [TOOL]},
    ]
    path = write_records(tmp_path / "prompts.jsonl", records)
    asked = read_conversations(path, "here")
    assert asked[0] == chat_of(records[0])
    template = ChatTemplate(QWEN3, "a.jinja", {})
    texts = template.render(asked)
    head = f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    plain = f"{head}<|im_start|>assistant\n"
    assert texts == [plain, plain, f"{plain}<think>\n\n</think>\n\n", plain]
    quiet = template.with_settings({"enable_thinking": False})
    assert quiet.render(asked[:1]) == texts[2:3]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Paris", "unit": None}, ("arguments.unit (null)",)),
        (None, ("arguments (null)",)),
        ({"where": {"zip": None}, "days": [{"x": None}, {"x": None}]}, None),
        ({"city": "Paris"}, ()),
        ('{"unit": null}', ()),
    ],
)
def test_null_tool_arguments_in_json_lines_are_reported(
    arguments: Any, expected: tuple[str, ...] | None
) -> None:
    """`transformers` would render null arguments; every source omits them."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "a", "name": None}, answer]}
    lines = DataConfig(source="jsonl", chat="messages")
    if expected is None:
        expected = ("arguments.zip (null)", "arguments.x (null)")
    assert conversation_of(record, lines).unread == expected
    columns = DataConfig(source="parquet", chat="messages")
    assert conversation_of(record, columns).unread == ()


def test_suggestion_includes_keys_set_to_wrong_fields() -> None:
    """The suggested settings read the record."""
    record = {"prompt": "a", "answer": "b"}
    config = DataConfig(
        source="jsonl", chat="prompt", prompt_field="instruction", response_field="output"
    )
    with pytest.raises(BadRecord) as error:
        conversation_of(record, config)
    action = "Set data.chat=prompt data.prompt_field=prompt data.response_field=answer."
    assert error.value.action == action
    read = conversation_of(
        record, DataConfig(source="jsonl", chat="prompt", response_field="answer")
    )
    assert [each["content"] for each in read.messages] == ["a", "b"]


def test_system_prompt_is_not_suggested_as_prompt_field() -> None:
    with pytest.raises(BadRecord, match="prompt") as error:
        conversation_of({"system_prompt": "a", "b": "c"}, DataConfig(source="jsonl", chat="prompt"))
    assert error.value.action == "Set data.prompt_field to the right field."
