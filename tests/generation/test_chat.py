"""Conversations from files and interactive input, formatted by a model's chat template."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.prompts import read_conversations, user_chat
from maxpipe.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError
from maxpipe.generation.completions import encode_chats
from maxpipe.generation.decoding import DecodeShape

FOLDER = Path(__file__).parents[1] / "golden/tokenizers/folder"
ANSWERS = ["first", "second"]


class Model:
    """Return fixed answers in turn, each with an end-of-turn token, and record the prompts."""

    batch_multiple, supports_refill, name, max_length = 1, False, "folder", 200
    template_settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.tokenizer: Tokenizer = open_tokenizer(TokenizerConfig(kind="auto", path=str(FOLDER)))
        self.asked: list[str] = []

    def load_decode_engine(self, say: Any, sampling: Any, seed: int) -> tuple[Any, Any]:
        return self, None

    def run(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Any = None,
        images: Sequence[Any] = (),
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        (end,) = {*self.tokenizer.end_ids} - {self.tokenizer.end_id}
        rows = []
        for prompt, number in zip(prompts, numbers, strict=True):
            self.asked.append(self.tokenizer.decode(prompt))
            rows.append([*self.tokenizer.encode(ANSWERS[number % 2]).tolist(), end])
        for step in range(size.max_new_tokens):
            yield np.asarray([row[min(step, len(row) - 1)] for row in rows]), np.zeros(len(rows))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    monkeypatch.setattr("maxpipe.api.generation.open_model", lambda *given: made)
    return made


def set_stdin(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    raw = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=raw, isatty=lambda: False))


def test_interactive_chat_keeps_conversation_history(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generation stops at the end of a turn; the next prompt contains all previous turns."""
    set_stdin(monkeypatch, "Hi", "", "And?")
    assert main(["generate", f"hf:{FOLDER}", "--chat", "--interactive"]) == 0
    assert capsys.readouterr().out == "first\nsecond\n"
    one, two = (model.tokenizer.encode_chat(text).tolist() for text in turns())
    assert model.asked == [model.tokenizer.decode(one), model.tokenizer.decode(two)]
    assert "first" in model.asked[1] and "And?" in model.asked[1]


def turns() -> list[str]:
    """Return the formatted prompts of both turns of the conversation."""
    first = "<|begin_of_text|><|turn|>user\nHi<|stop|><|turn|>assistant\n"
    return [first, f"{first}first<|stop|><|turn|>user\nAnd?<|stop|><|turn|>assistant\n"]


def test_conversations_are_read_from_file(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user_chat("Hi").messages]
    lines = [{"messages": messages}, {"prompt": "Hi"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--chat", "--prompts", str(tmp_path / "chats.jsonl"), "--json")
    assert main(["generate", f"hf:{FOLDER}", *given]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["prompt"], each["text"]) for each in found] == [("Hi", "first"), ("Hi", "second")]
    assert {each["finish_reason"] for each in found} == {"end"}
    assert "Be brief." in model.asked[0] and "Be brief." not in model.asked[1]


@pytest.mark.parametrize(
    "line", ['{"messages": []}', '{"messages": [{"role": "user"}]}', "[]", '{"messages": "Hi"}']
)
def test_invalid_conversation_line_is_rejected(line: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 2") as caught:
        read_conversations(path, str(path))
    (problem,) = caught.value.problems
    assert "must be an object with messages" in problem.rule and "Write {" in problem.action


def test_chat_requires_template() -> None:
    with pytest.raises(ConfigError, match="requires a chat template"):
        encode_chats([user_chat("Hi")], ByteTokenizer(), 99)


def test_oversized_standard_input_is_rejected_not_truncated(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxpipe.data.prompts.MAX_BYTES", 9)
    for text, code in ((b"one\ntwo\n", 0), (b"one\ntwo\nthree\n", 2)):
        given = SimpleNamespace(buffer=io.BytesIO(text), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", given)
        assert main(["generate", f"hf:{FOLDER}", "--prompts", "-"]) == code
