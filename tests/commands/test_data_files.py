"""Data files in place of a config: the keys that read them are inferred and printed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from tests.errors import without_codes

_TOKENIZER = Path(__file__).parents[1] / "golden/tokenizers/folder"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"document {i} has a text of its own"} for i in range(6)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    return tmp_path


def _chats(path: Path, field: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text(f"{json.dumps({field: turns, 'id': 1})}\n" * 4)


def _run(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> tuple[str, str]:
    assert main(["data", *command]) == code
    found = capsys.readouterr()
    return found.out, found.err


def test_file_folder_and_glob_pattern_are_read(here: Path, capsys) -> None:
    (here / "folder").mkdir()
    shutil.copy("docs.jsonl", "folder/a.jsonl")
    for path in ("docs.jsonl", "folder", "*.jsonl"):
        out, err = _run(capsys, "stats", path, "--json")
        assert json.loads(out)["documents"] == 6
        assert f"{path}: read with data.source=jsonl" in err
    out, _ = _run(capsys, "stats", "docs.jsonl", "folder/a.jsonl", "--json")
    assert json.loads(out)["documents"] == 12
    out, _ = _run(capsys, "show", "docs.jsonl", "-n", "1")
    assert "docs.jsonl:1" in out and "⟦<begin>⟧document 0 has a text of its own<end>" in out


def test_file_replaces_documents_of_config(here: Path, capsys) -> None:
    mixed = ["data.mixture.a.source=corpus", "data.mixture.a.weight=1"]
    (here / "mine.yml").write_text("data: {mixture: {a: {source: corpus}}}\ntrain: {steps: 2}\n")
    out, _ = _run(capsys, "stats", "mine.yml", "docs.jsonl", "--json")
    assert json.loads(out)["documents"] == 6
    _, err = _run(capsys, "stats", "docs.jsonl", *mixed[:1], "data.path=x", code=2)
    assert "conflicts with data.path: both select the documents to read." in err


def test_prepared_folder_is_read_with_its_tokenizer(here: Path, capsys) -> None:
    keys = ["tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    _run(capsys, "prepare", "docs.jsonl", *keys, "--out", "tokens", "--workers", "1")
    out, err = _run(capsys, "show", "tokens", "-n", "1")
    assert "document 0 has a text of its own" in out
    assert f"tokenizer.kind=huggingface tokenizer.path={_TOKENIZER}" in err
    out, _ = _run(capsys, "stats", "tokens", "--json")
    assert json.loads(out)["documents"] == 6


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_conversations_are_recognized(here: Path, capsys, field: str) -> None:
    _chats(here / "chat.jsonl", field)
    keys = ["tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    out, err = _run(capsys, "show", "chat.jsonl", *keys, "-n", "1")
    assert "Hello<|stop|>" in out and "Hi⟧" in out
    named = "" if field == "messages" else f" data.messages_field={field}"
    assert err.startswith(
        f"chat.jsonl: read with data.source=jsonl data.path=chat.jsonl data.chat=messages{named} "
        "data.validation_fraction=0 eval.batches=0\n"
    )


_HI, _HO, _NO = (
    {"role": role, "content": text}
    for role, text in (("user", "Hi"), ("assistant", "Ho"), ("assistant", "No"))
)
_PAIRS = "train.objective=preference data.chat=pairs"
_BARE: dict[str, tuple[dict[str, Any], str, str]] = {
    "preference": (
        {"prompt": "Sky is", "chosen": " blue", "rejected": " red"},
        _PAIRS,
        "⟦<begin>⟧⟦Sky is⟧ red<end>",
    ),
    "implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is red."},
        f"{_PAIRS} data.prompt_field=",
        "⟦<begin>⟧⟦The sky is⟧ red.<end>",
    ),
    "dialogues": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
        f"{_PAIRS} data.prompt_field=",
        "⟦<begin>⟧⟦\n\nHuman: Hi\n\nAssistant:⟧ No<end>",
    ),
    "prompt and context": (
        {"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"},
        rf"{_PAIRS} 'data.prompt_field={{instruction}}\n{{input}}'",
        "⟦<begin>⟧⟦a\nb⟧d<end>",
    ),
    "instructions": (
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        r"'data.template={instruction}\n{input}\n{output}'",
        "⟦<begin>⟧Sort.\n3 1\n1 3<end>",
    ),
    "completion": (
        {"prompt": "Sky is", "completion": " blue"},
        r"'data.template={prompt}\n{completion}'",
        "⟦<begin>⟧Sky is\n blue<end>",
    ),
}
"""Records, the keys inferred without a chat template, and the expected output of `data show`."""
_WITH_TEMPLATE: dict[str, tuple[dict[str, Any], str, str]] = {
    "whole conversations": (
        {"prompt": "Hi", "chosen": [_HI, _HO], "rejected": [_HI, _NO], "messages": [_HI, _HO]},
        _PAIRS,
        "No<|stop|>",
    ),
    "conversations without prompt": (
        {"chosen": [_HI, _HO], "rejected": [_HI, _NO], "score_chosen": 8.5},
        f"{_PAIRS} data.prompt_field=",
        "No<|stop|>",
    ),
    "messages and responses": (
        {"prompt": [_HI], "chosen": [_HO], "rejected": [_NO]},
        _PAIRS,
        "No<|stop|>",
    ),
    "instructions": (
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        r"data.chat=prompt 'data.prompt_field={instruction}\n{input}' data.response_field=output",
        "1 3<|stop|>",
    ),
    "labels": (
        {"prompt": [_HI], "completion": [_HO], "label": True},
        "data.chat=prompt data.response_field=completion",
        "Ho<|stop|>",
    ),
    "system": (
        {"system": "Be brief.", "messages": [_HI, _HO]},
        "data.chat=messages data.system_field=system",
        "Ho<|stop|>",
    ),
}


@pytest.mark.parametrize("name", _BARE)
def test_keys_are_inferred_from_records_without_chat_template(
    here: Path, capsys, name: str
) -> None:
    record, keys, text = _BARE[name]
    (here / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    out, err = _run(capsys, "show", "a.jsonl", "-n", "1")
    *hint, line = err.splitlines()
    assert line == (
        f"a.jsonl: read with data.source=jsonl data.path=a.jsonl {keys} "
        "data.validation_fraction=0 eval.batches=0"
    )
    assert text in out and ("rejected, " in out) == keys.startswith(_PAIRS)
    template = "a.jsonl: if you set a chat template (tokenizer.* or data.chat_template), use "
    chat = f"{template}data.chat=prompt "
    assert [each.startswith(chat) for each in hint] == [True] * ("data.template" in keys)


@pytest.mark.parametrize("name", _WITH_TEMPLATE)
def test_keys_are_inferred_from_records_with_chat_template(here: Path, capsys, name: str) -> None:
    record, keys, text = _WITH_TEMPLATE[name]
    (here / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    inputs = ["a.jsonl", "tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    out, err = _run(capsys, "show", *inputs, "-n", "1")
    assert err.startswith(f"a.jsonl: read with data.source=jsonl data.path=a.jsonl {keys} data.val")
    assert text in out and out.count("Hi") == out.count("--- ") * ("Hi" in json.dumps(record))
    assert ("rejected, " in out) == keys.startswith(_PAIRS)


def test_inferred_fields_replace_fields_of_config(here: Path, capsys) -> None:
    """Defaults that are inferred for the file replace the config's fields as well."""
    _chats(here / "chat.jsonl", "messages")
    config = "data: {source: corpus, chat: messages, messages_field: talk}\ntrain: {steps: 2}\n"
    (here / "mine.yml").write_text(config)
    keys = ["tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    config_keys = ["data.validation_fraction=0", "eval.batches=0"]
    out, err = _run(capsys, "show", "mine.yml", "chat.jsonl", *keys, *config_keys, "-n", "1")
    assert "data.messages_field=messages" in err and "Hello<|stop|>" in out


def test_prepare_rejects_preference_pairs(here: Path, capsys) -> None:
    record = {"prompt": "Sky is", "chosen": " blue", "rejected": " red"}
    (here / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    _, err = _run(capsys, "prepare", "a.jsonl", "--out", "tokens", code=2)
    assert "data.chat = pairs\n  must be off, messages or prompt" in without_codes(err)


def test_folder_with_one_document_is_read(here: Path, capsys) -> None:
    (here / "one").mkdir()
    (here / "one/a.txt").write_text("a document of one file")
    out, err = _run(capsys, "show", "one", "-n", "1")
    assert "⟦<begin>⟧a document of one file<end>" in out
    assert err == (
        "one: read with data.source=text data.path=one data.validation_fraction=0 eval.batches=0\n"
    )


def test_config_with_only_data_overrides_no_model(here: Path, capsys) -> None:
    (here / "mine.yml").write_text("data: {source: jsonl, path: docs.jsonl}\n")
    _, err = _run(capsys, "show", "mine.yml", "-n", "1")
    assert err == ""


def test_conversations_split_by_packing_are_reported(here: Path, capsys) -> None:
    _chats(here / "chat.jsonl", "messages")
    keys = ["tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    for packing, is_cut in (("auto", False), ("concatenate", True)):
        _, err = _run(capsys, "show", "chat.jsonl", *keys, f"data.packing={packing}", "-n", "1")
        assert ("data.packing=concatenate splits 4 conversations across sequences" in err) == is_cut


def test_preference_pairs_of_full_conversations_are_read(here: Path, capsys) -> None:
    user, good = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    record = {"chosen": [user, good], "rejected": [user, {**good, "content": "No"}]}
    (here / "pairs.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    keys = ["tokenizer.kind=huggingface", f"tokenizer.path={_TOKENIZER}"]
    keys += ["data.chat=pairs", "train.objective=preference", "data.prompt_field="]
    out, _ = _run(capsys, "show", "pairs.jsonl", *keys, "-n", "1")
    assert "Hello<|stop|>" in out and "No<|stop|>" in out
    _, err = _run(capsys, "show", "docs.jsonl", "data.prompt_field=", "-n", "1", code=2)
    assert "data.prompt_field" in err and "must not be empty." in err


def test_explicit_key_disables_inference(here: Path, capsys) -> None:
    _chats(here / "chat.jsonl", "messages")
    _, err = _run(capsys, "stats", "chat.jsonl", "data.text_field=id", code=0)
    assert "data.chat" not in err


def test_paths_with_different_sources_are_rejected(here: Path, capsys) -> None:
    _run(capsys, "prepare", "docs.jsonl", "--out", "tokens", "--workers", "1")
    _, err = _run(capsys, "stats", "docs.jsonl", "tokens", code=2)
    rule = "command line: tokens\n  requires data.source=tokens, but docs.jsonl requires"
    assert rule in without_codes(err)
    _, err = _run(capsys, "stats", "nowhere.jsonl", code=2)
    assert "must be a file, a folder or a glob pattern that matches files" in err


def test_train_with_data_file_suggests_data_path(here: Path, capsys) -> None:
    assert main(["train", "docs.jsonl"]) == 2
    assert "data file" in (err := capsys.readouterr().err)
    assert "data.path=docs.jsonl" in err
