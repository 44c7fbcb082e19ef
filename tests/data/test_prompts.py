"""Prompts of a training step: order, groups, position, and invalid files."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.data import prompts as prompts_module
from maxpipe.data.chat import resolve_chat_template
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Datasets
from maxpipe.data.prompts import build_prompts
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError
from tests.data.conversations import TEMPLATES, messages_of

GROUP, ROWS, COUNT = 4, 8, 7


def opened(path: Path, **changes: Any) -> Datasets:
    sizes = {"batch_size": ROWS, "sequence_length": 32, "seed": 0}
    sizes |= {name: changes.pop(name) for name in list(changes) if name in sizes}
    config = GrpoConfig(prompts=str(path), group_size=GROUP, max_tokens=8)
    check = changes.pop("check", lambda record: None)
    return build_prompts(
        config,
        DataConfig(),
        ByteTokenizer(),
        **sizes,
        check=check,
        reward="exact",
        **{"template": None, **changes},
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{number}+{number}="}) for number in range(COUNT)]
    path.write_text("\n\n".join(lines))
    return path


def numbers(found: Datasets, step: int) -> list[int]:
    """Return the prompt index of each row of a step."""
    return [row.documents[0] for row in found.train.sequence_origins(step)]


def test_groups_stay_together_and_epochs_are_complete(prompts: Path) -> None:
    found = opened(prompts)
    groups = np.reshape([numbers(found, step) for step in range(2 * COUNT)], (-1, GROUP))
    assert (groups == groups[:, :1]).all()
    # An epoch has 28 rows and ends within a step, between two groups.
    order = groups[:, 0]
    epochs = order.reshape(-1, COUNT)
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


def test_prompts_depend_only_on_step_and_seed(prompts: Path) -> None:
    first, again = opened(prompts), opened(prompts)
    assert numbers(again, 11) == numbers(first, 11)
    assert [numbers(opened(prompts, seed=1), step) for step in range(4)] != [
        numbers(first, step) for step in range(4)
    ]


def test_prompt_rows_have_no_loss(prompts: Path) -> None:
    found = opened(prompts)
    batch, [first, *_] = found.train.batch(0), numbers(found, 0)
    ids = ByteTokenizer().encode(f"{first}+{first}=")
    assert batch["tokens"][0, 0] == ByteTokenizer().begin_id
    np.testing.assert_array_equal(batch["tokens"][0, 1 : 1 + len(ids)], ids)
    assert not batch["loss_mask"].any() and batch["tokens"].shape == (ROWS, 32)
    assert found.train.where("", first).endswith(f"line {2 * first + 1}")
    assert found.train.batch_contents(0)["documents"] == sorted({*numbers(found, 0)})


def test_fingerprint_changes_with_prompt_file(prompts: Path) -> None:
    before = opened(prompts).train.fingerprint()
    assert before["documents"] == COUNT and not compare_fingerprints(
        before, opened(prompts).train.fingerprint()
    )
    prompts.write_text(prompts.read_text().replace("0+0", "0+1"))
    names = [
        name for name, _, _ in compare_fingerprints(before, opened(prompts).train.fingerprint())
    ]
    assert names == ["the digest of file names, sizes and contents"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no prompts"),
        (" \n\n", "contains no prompts"),
        ("{", "line 1"),
        ("3+4=", "line 1"),
        (
            '{"prompt": "a"}\n{"answer": "7"}',
            "line 2[\\s\\S]*neither a string `prompt` nor a list `messages`",
        ),
        ('{"prompt": 7}', "`prompt` must be a string or a list, not a value of type int"),
        ('{"messages": [{"role": "user"}]}', "must have content or tool_calls"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "requires? the chat template"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ('{"prompt": "%s"}' % ("a" * 24), "has 25 tokens[\\s\\S]*train.sequence_length=33"),
    ],
)
def test_invalid_prompt_files_are_rejected(prompts: Path, text: str, words: str) -> None:
    prompts.write_text(text)
    with pytest.raises(ConfigError, match=words):
        opened(prompts)


def test_byte_order_mark_is_ignored_and_gzip_is_rejected(prompts: Path) -> None:
    content = prompts.read_bytes()
    prompts.write_bytes(codecs.BOM_UTF8 + content.replace(b"\n", b"\r\n"))
    opened(prompts)
    prompts.write_bytes(gzip.compress(content))
    with pytest.raises(ConfigError, match="is a gzip file[\\s\\S]*gunzip"):
        opened(prompts)


def test_missing_prompt_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        opened(tmp_path / "none.jsonl")


def test_check_runs_on_every_record(prompts: Path) -> None:
    def check(record: Any) -> None:
        if record["prompt"].startswith("3"):
            raise ValueError("it is the third")

    with pytest.raises(ConfigError, match=r"line 7[\s\S]*it is the third"):
        opened(prompts, check=check)


def test_each_conversation_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    chat_of = prompts_module.chat_of
    monkeypatch.setattr(prompts_module, "chat_of", lambda each: seen.append(each) or chat_of(each))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["chatml"])
    messages = [messages_of(("user", f"question {number}")) for number in range(COUNT)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    data = DataConfig(chat="messages", chat_template=str(template))
    found = build_prompts(
        GrpoConfig(prompts=str(path), group_size=GROUP, max_tokens=8),
        data,
        ByteTokenizer(),
        batch_size=ROWS,
        sequence_length=200,
        seed=0,
        check=lambda record: None,
        reward="exact",
        template=resolve_chat_template(data, ByteTokenizer()),
    )
    assert [each["messages"] for each in seen] == messages
    text = found.tokenizer.decode(found.train.batch(0)["tokens"][0].tolist())
    assert "question" in text


def fields(records: list[Any], tmp_path: Path, **settings: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the text of each prompt and the fingerprint of the data."""
    path = tmp_path / "fields.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["chatml"])
    data = DataConfig(**settings)
    spoken_as = DataConfig(chat="messages", chat_template=str(template))
    found = build_prompts(
        GrpoConfig(prompts=str(path), group_size=1, max_tokens=8),
        data,
        ByteTokenizer(),
        batch_size=len(records),
        sequence_length=200,
        seed=0,
        check=lambda record: None,
        reward="exact",
        template=resolve_chat_template(spoken_as, ByteTokenizer()),
    )
    batch = found.train.batch(0)
    rows = zip(batch["tokens"], batch["segment_ids"], strict=True)
    texts = [found.tokenizer.decode(ids[of > 0].tolist()) for ids, of in rows]
    return sorted(texts), found.train.fingerprint()


def test_prompts_from_several_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names unused keys and suggests settings that include them in the prompt."""
    records = [
        {"instruction": "Sort.", "input": "3 1", "system": "Be brief.", "answer": "1 3"},
        {"instruction": "Name a cat.", "input": "", "answer": "Tom"},
    ]
    joined = {"prompt_field": r"{instruction}\n{input}"}
    texts, facts = fields(records, tmp_path, **joined)
    assert (
        texts == ["Name a cat.", "Sort.\n3 1"] and facts["prompt_field"] == joined["prompt_field"]
    )
    (line,) = caplog.messages
    assert line.endswith(
        "fields.jsonl: keys not used in the prompts of 2 records: system (in 1). "
        "Set data.system_field=system if these keys belong to the prompt."
    )
    caplog.clear()
    texts, facts = fields(records, tmp_path, **joined, system_field="system")
    assert not caplog.messages and facts["system_field"] == "system"
    assert texts[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSort.\n3 1<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plain = [{"prompt": "Where?", "context": "At night.", "answer": "Here."}]
    texts, facts = fields(plain, tmp_path)
    assert texts == ["Where?"] and "prompt_field" not in facts
    action = r"Set data.prompt_field='{prompt}\n{context}' if these keys belong to the prompt."
    assert action in caplog.messages[0]
    assert fields(plain, tmp_path, prompt_field=r"{prompt}\n{context}")[0] == ["Where?\nAt night."]


def test_missing_prompt_error_suggests_prompt_field(tmp_path: Path) -> None:
    records = [{"question": "1+1?", "answer": "2"}]
    with pytest.raises(ConfigError) as error:
        fields(records, tmp_path)
    (problem,) = error.value.problems
    assert "its keys: question, answer; set data.prompt_field=question" in problem.rule
    assert fields(records, tmp_path, prompt_field="question")[0] == ["1+1?"]
    with pytest.raises(ConfigError, match=r"named by data.prompt_field \(query\)"):
        fields(records, tmp_path, prompt_field="query")
