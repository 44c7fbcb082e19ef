"""Conversation records: IDs and masks match `transformers`; errors name the invalid record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data import loader
from maxpipe.data.chat import REWRITTEN, ChatDocuments, ConversationEncoder, build_chat_index
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.packing import split_documents
from maxpipe.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from maxpipe.data.tokenizers import chat
from maxpipe.errors import ConfigError
from tests.conftest import GOLDEN
from tests.data.conversations import (
    CHATML,
    CONVERSATIONS,
    LLAMA3,
    TEMPLATES,
    Listed,
    make_tokenizer,
    messages_of,
    without_blocks,
    write_records,
)

ANSWERS = GOLDEN / "chat_masks.json"
PYTHON = os.environ.get("ORACLE") or sys.executable
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))


def conversations(
    template: str,
    records: list[Any],
    tmp_path: Path,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> ConversationEncoder:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    config = DataConfig(**{"chat": "messages", "chat_template": str(path), **settings})
    return ConversationEncoder(Listed(records), tokenizer or ByteTokenizer(), config)


def records_of(messages: list[Any]) -> list[Any]:
    return [{"messages": each} for each in messages]


def trained_text(found: EncodedDocument) -> list[str]:
    """Return the text of each contiguous run of trained tokens."""
    assert found.trained is not None
    names = {256: "<begin>", 257: "<end>"}
    runs = np.flatnonzero(np.diff(np.concatenate([[0], found.trained, [0]]).astype(int)))
    pairs = runs.reshape(-1, 2).tolist()
    decode = ByteTokenizer().decode
    return [
        "".join(names.get(i) or decode([i]) for i in found.ids[begin:end].tolist())
        for begin, end in pairs
    ]


def rejection(
    template: str, records: list[Any], tmp_path: Path, **settings: Any
) -> tuple[str, str]:
    """Return value and rule of the last record's error; earlier records must be valid."""
    made = conversations(template, records, tmp_path, **settings)
    for number in range(len(records) - 1):
        made.encode(number)
    with pytest.raises(ConfigError) as error:
        made.encode(len(records) - 1)
    [problem] = error.value.problems
    assert problem.where == f"records.jsonl:{len(records)}" and problem.action.endswith(".")
    return problem.value, problem.rule


# --- ids and masks -----------------------------------------------------------------------------


def test_ids_and_masks_match_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The next test writes the golden file with transformers."""
    answers = json.loads(ANSWERS.read_text())
    assert answers.keys() == TEMPLATES.keys()
    trained = 0
    for name, template in TEMPLATES.items():
        made = conversations(template, records_of(CONVERSATIONS), tmp_path, tokenizer)
        for number, wanted in enumerate(answers[name]):
            found = made.encode(number)
            assert found.trained is not None
            assert found.ids.tolist() == wanted["ids"]
            assert found.trained.astype(int).tolist() == wanted["mask"], (name, number)
            trained += sum(wanted["mask"])
    assert trained > 70


@pytest.mark.oracle
def test_golden_masks_match_transformers(folder: Path, update_golden: bool) -> None:
    jobs = {"templates": TEMPLATES, "conversations": CONVERSATIONS}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    code = "import transformers"
    probe = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(probe.stderr.strip().rpartition("\n")[2])
    script = Path(__file__).with_name("chat_oracle.py")
    result = subprocess.run(
        [PYTHON, script, folder],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    text = json.dumps(json.loads((folder / "answers.json").read_text())) + "\n"
    if update_golden:
        ANSWERS.write_text(text)
    assert ANSWERS.read_text() == text


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_prefix_masks_match_generation_block_masks(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Holds for templates that render nothing between an answer's block and the next message."""
    template = TEMPLATES[name]
    with_blocks = conversations(template, records_of(CONVERSATIONS), tmp_path, tokenizer)
    plain = conversations(without_blocks(template), records_of(CONVERSATIONS), tmp_path, tokenizer)
    for number in range(len(CONVERSATIONS)):
        found, wanted = plain.encode(number), with_blocks.encode(number)
        assert found.trained is not None and wanted.trained is not None
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.trained.tolist() == wanted.trained.tolist()


def test_trained_roles_select_messages(tmp_path: Path) -> None:
    messages = messages_of(("system", "Hi"), ("user", "é?"), ("assistant", "so"), ("tool", "1"))
    for roles, wanted in (
        (["assistant"], ["so<|im_end|>\n"]),
        (["tool"], ["<|im_start|>tool\n1<|im_end|>\n"]),
        (["system", "assistant"], ["Hi<|im_end|>\n", "so<|im_end|>\n"]),
    ):
        template = without_blocks(CHATML) if roles == ["assistant"] else CHATML
        made = conversations(template, records_of([messages]), tmp_path, trained_roles=roles)
        assert trained_text(made.encode(0)) == wanted


def test_leading_assistant_message_is_trained(tmp_path: Path) -> None:
    """Only its content and end token are trained on, not BOS or the message header."""
    template = without_blocks(LLAMA3)
    messages = messages_of(("assistant", "Hello"), ("user", "Hi"))
    made = conversations(template, records_of([messages]), tmp_path)
    [text] = trained_text(made.encode(0))
    assert text == "Hello<|eot_id|>"


def test_prompt_response_records(tmp_path: Path) -> None:
    """Fields contain strings or lists of messages and may have other names."""
    records: list[Any] = [
        {"prompt": "a", "response": "b"},
        {
            "prompt": messages_of(("system", "s"), ("user", "a")),
            "response": messages_of(("assistant", "b")),
        },
    ]
    made = conversations(PLAIN, records, tmp_path, chat="prompt")
    assert trained_text(made.encode(0)) == trained_text(made.encode(1)) == ["assistant: b<end>"]
    text = ByteTokenizer().decode(made.encode(1).ids)
    assert text == "system: suser: aassistant: b"
    others = [{"q": "a", "a": "b"}]
    settings: dict[str, Any] = {"chat": "prompt", "prompt_field": "q", "response_field": "a"}
    named = conversations(PLAIN, others, tmp_path, **settings)
    assert named.encode(0).ids.tolist() == made.encode(0).ids.tolist()


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface", "bytes"])
def test_token_offsets_match_text(kind: str, tmp_path: Path, folder: Path) -> None:
    """Holds for every tokenizer kind."""
    made = {
        "bytes": lambda: ByteTokenizer(),
        "huggingface": lambda: open_tokenizer(
            TokenizerConfig(kind="huggingface", path=str(folder))
        ),
        "sentencepiece": lambda: _sentencepiece(tmp_path),
        "tiktoken": lambda: _tiktoken(tmp_path),
    }[kind]()
    end = next(name for name, i in made.special_tokens.items() if i == made.end_id)
    text = f"naïve words 😀 here{end}and 語{end}{end} more\n\ntext"
    ids, offsets = made.encode_chat_offsets(text)
    assert ids.tolist() == made.encode_chat(text).tolist()
    assert offsets.shape == (len(ids), 2) and offsets.dtype == np.int64
    assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
    assert (np.diff(offsets, axis=0) >= 0).all() and (offsets[:, 0] <= offsets[:, 1]).all()
    at = [i for i, each in enumerate(ids.tolist()) if each == made.end_id]
    assert [text[slice(*offsets[i])] for i in at] == [end] * 3
    assert offsets[at, 0].tolist() == [i for i in range(len(text)) if text.startswith(end, i)]
    parts = np.split(np.arange(len(ids)), np.sort([*at, *(i + 1 for i in at)]))
    for part in parts[::2]:
        if len(part):
            begin, stop = offsets[part[0], 0], offsets[part[-1], 1]
            # Some tokenizers merge repeated spaces.
            assert made.decode(ids[part]).split() == text[begin:stop].split()


def _sentencepiece(tmp_path: Path) -> Tokenizer:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter(["words here and more text naïve"] * 20),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return open_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(path)))


def _tiktoken(tmp_path: Path) -> Tokenizer:
    import base64

    tokens = [bytes([i]) for i in range(256)] + [b" w", b"or", b"he", b"re"]
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    path = tmp_path / "ranks.tiktoken"
    path.write_text("".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return open_tokenizer(
        TokenizerConfig(
            kind="tiktoken",
            path=str(path),
            split_pattern=r"\w+|\s+|[^\w\s]+",
            special_tokens=["<|end|>"],
        )
    )


# --- rejected records ----------------------------------------------------------------------------


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    ("record", "given", "rule"),
    [
        ({"text": "a"}, "fields text", "the field named by data.messages_field"),
        ("only text", "only text", "must be an object if data.chat="),
        (
            {"messages": "a"},
            "a",
            "list of objects in data.messages_field; the value is of type str",
        ),
        ({"messages": ["a"]}, "['a']", "list of objects"),
        ({"messages": []}, "", "at least one message"),
        ({"messages": [{"content": "a"}]}, "message 1 without role", "data.chat_roles: system"),
        (
            {"messages": messages_of(("user", "a"), ("asistant", "b"))},
            "role asistant of message 2",
            "data.chat_roles",
        ),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role ['user']", "data.chat_roles"),
        (
            {"messages": [{"role": "user"}]},
            "message 1",
            "must have content or tool_calls; its keys are role",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1", "of type int"),
        ({"messages": [{"role": "user", "content": [b"a"]}]}, "", "written as JSON"),
        ({"messages": messages_of(("user", "a" * (1 << 24)))}, "", "at most 16777216 are allowed"),
        ({"messages": messages_of(("user", ""))}, "", "renders no text"),
    ],
)
def test_invalid_records_are_rejected(record: Any, given: str, rule: str, tmp_path: Path) -> None:
    """A misspelled role, for example, would silently change the trained tokens."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    good = {"messages": messages_of(("user", "a"))}
    found = rejection(template, [good, record], tmp_path)
    assert given in found[0] and rule in found[1]


def test_misspelled_field_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        conversations(PLAIN, [{"mesages": [], "id": 1}], tmp_path).encode(0)
    assert error.value.problems[0].action == "Set data.messages_field=mesages."


LOOP = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (LOOP, "time or memory limit"),
        ("{{ 9 ** (9 ** (8 + messages | length)) }}", "time or memory limit"),
        ("{{ 'a' * 10 ** 10 }}", "too much memory"),
        ("{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "renders more than"),
    ],
)
def test_template_limits_name_offending_record(
    template: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits apply per record; the time of earlier records does not count."""
    monkeypatch.setattr(chat, "_CPU_SECONDS", 1)
    bad = (
        "{% if messages[0].content == 'bad' %}" + template + "{% endif %}{{ messages[0].content }}"
    )
    records = records_of([messages_of(("user", "a")), messages_of(("user", "bad"))])
    assert rule in rejection(bad, records, tmp_path)[1]


def test_time_limit_applies_per_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, the records take longer than the limit."""
    monkeypatch.setattr(chat, "_CPU_SECONDS", 1)
    template = "{% for a in range(99999) %}{% for a in range(30) %}{% endfor %}{% endfor %}a"
    made = conversations(template, records_of([messages_of(("user", "a"))]), tmp_path)
    for _ in range(12):
        assert len(made.encode(0).ids) == 1


def test_killed_template_process_is_replaced(tmp_path: Path) -> None:
    made = conversations(PLAIN, records_of([messages_of(("user", "a"))]), tmp_path)
    before = made.encode(0)
    [process] = made._idle
    process._process._process.kill()
    process._process._process.wait()
    with pytest.raises(ConfigError, match="time or memory limit"):
        made.encode(0)
    assert not made._idle
    assert made.encode(0).ids.tolist() == before.ids.tolist()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        # As in some templates, earlier messages are rendered differently.
        (
            "{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}",
            "first messages differently",
        ),
        (
            "{% if messages | length < 3 %}{{ raise_exception('3') }}{% endif %}a",
            "first 2 messages: 3",
        ),
    ],
)
def test_template_that_rewrites_history(template: str, why: str, tmp_path: Path) -> None:
    messages = messages_of(("user", "a"), ("assistant", "b"), ("user", "c"))
    records = records_of([messages])
    _, rule = rejection(template, records, tmp_path, rewritten_history="error")
    assert "message by message" in rule and why in rule
    if "raise" not in template:
        found = conversations(template, records, tmp_path).encode(0)
        assert found.marks == REWRITTEN and not trained_text(found)


def test_generation_block_inside_macro_is_rejected(tmp_path: Path) -> None:
    """The position of a macro's output in the rendered text is unknown."""
    template = (
        "{% macro one(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
        "{% for m in messages %}{{ one(m) }}{% endfor %}"
    )
    messages = messages_of(("user", "abc"), ("assistant", "def"))
    assert "macro" in rejection(template, records_of([messages]), tmp_path)[1]


def test_missing_chat_template_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        ConversationEncoder(Listed([]), ByteTokenizer(), DataConfig(chat="messages"))
    assert error.value.problems[0].where == "data.chat"


def test_unreadable_template_file_is_rejected(tmp_path: Path) -> None:
    config = DataConfig(chat="messages", chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError) as error:
        ConversationEncoder(Listed([]), ByteTokenizer(), config)
    assert error.value.problems[0].where == "data.chat_template"


# --- documents ----------------------------------------------------------------------------------


def test_index_counts_trained_tokens(tmp_path: Path) -> None:
    records = records_of(CONVERSATIONS)
    made = conversations(CHATML, records, tmp_path)
    index = build_chat_index(made, str(tmp_path / "index"), threads=3)
    found = [made.encode(number) for number in range(len(records))]
    assert index.lengths.tolist() == [len(each.ids) for each in found]
    assert index.trained is not None
    masks = [np.asarray(each.trained) for each in found]
    assert index.trained.tolist() == [int(mask.sum()) for mask in masks]
    assert index.trained[-1] == 0 < index.trained.sum() < index.lengths.sum()
    text = "".join(ByteTokenizer().decode(each.ids[each.trained]) for each in found)
    assert index.byte_counts.sum() == len(text.encode())
    # The cache is used again, but not for another template.
    made.encode = None  # type: ignore[assignment]
    again = build_chat_index(made, str(tmp_path / "index"))
    assert again.trained is not None and again.trained.tolist() == index.trained.tolist()
    other = conversations(LLAMA3, records, tmp_path)
    assert build_chat_index(other, str(tmp_path / "index")).lengths[0] != index.lengths[0]


def test_records_without_trained_tokens_are_rejected(tmp_path: Path) -> None:
    made = conversations(CHATML, records_of([messages_of(("user", "a"))]), tmp_path)
    with pytest.raises(ConfigError, match="no token of 1 conversation is marked"):
        build_chat_index(made, None)


def test_loss_mask_of_packed_conversations(tmp_path: Path) -> None:
    """The mask applies to targets, and the first token of a document is never a target."""
    records = records_of(CONVERSATIONS * 5)
    path = write_records(tmp_path / "records.jsonl", records)
    (tmp_path / "template.jinja").write_text(CHATML)
    config = DataConfig(
        source="jsonl",
        path=str(path),
        chat="messages",
        chat_template=str(tmp_path / "template.jinja"),
        validation_fraction=0,
        packing="concatenate",
        long_conversations="split",
    )
    length, seed = 50, 3
    found = loader.build_loaders(
        config, TokenizerConfig(), seed=seed, batch_size=2, sequence_length=length
    )
    made = conversations(CHATML, records, tmp_path)
    documents = ChatDocuments(made, build_chat_index(made, None))
    order = split_documents(len(records), 0, seed)[0].tolist()
    ids = np.concatenate([documents[i].ids for i in order])
    # No token is predicted from another document's tokens.
    trained = np.concatenate([np.append(False, documents[i].trained[1:]) for i in order])  # type: ignore[index]
    total = 0
    for step in range(found.train.num_batches):
        batch = found.train.batch(step)
        for row, place in enumerate(found.train.sequence_origins(step)):
            first = place.sequence * length
            wanted = trained[first + 1 : first + 1 + length]
            mask = batch["loss_mask"][row]
            assert (
                batch["tokens"][row][: len(wanted)].tolist() == ids[first:][: len(wanted)].tolist()
            )
            assert mask[: len(wanted)].tolist() == wanted.tolist() and not mask[len(wanted) :].any()
            total += int(wanted.sum()) if step * 2 + row < len(found.train.sequences) else 0
    assert total == trained.sum()
    assert found.train.fingerprint()["chat"] == made.fingerprint()
    other = conversations(CHATML, records, tmp_path, trained_roles=["user"])
    assert other.fingerprint() != made.fingerprint()
