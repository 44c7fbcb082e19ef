"""Validation prompts: held-out conversations up to their last answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.loader import build_loaders
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.train.samples import ValidationPrompt, last_turn, load_validation_prompts
from tests.data.conversations import messages_of, write_records

BYTES = ByteTokenizer()
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def last_turn_of(text: str, marks: str) -> ValidationPrompt | None:
    trained = np.array([mark == "x" for mark in marks])
    return last_turn(EncodedDocument(np.frombuffer(text.encode(), np.uint8), trained), BYTES)


def test_last_trained_message_is_the_answer() -> None:
    assert last_turn_of("abcdef", "..xx..") == ValidationPrompt([*b"ab"], "ab", "cd")
    assert last_turn_of("abcdef", ".x..xx") == ValidationPrompt([*b"abcd"], "abcd", "ef")
    assert last_turn_of("abcdef", "xx..x.") == ValidationPrompt([*b"abcd"], "abcd", "e")
    assert last_turn_of("abcdef", "......") is None and last_turn_of("abcdef", "xx....") is None
    assert last_turn_of("abcdef", "xxxxxx") is None
    assert last_turn(EncodedDocument(np.zeros(3, np.uint8)), BYTES) is None


def test_validation_prompts_come_from_held_out_documents(tmp_path: Path) -> None:
    """Prompts come from the validation split or from validation sets and must fit the context."""
    chats = [
        messages_of(("user", f"q{n}" * (1 + 9 * (n % 3))), ("assistant", f"a{n}"))
        for n in range(30)
    ]
    chats[4] = messages_of(("user", "no answer"))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    path = write_records(tmp_path / "c.jsonl", [{"messages": each} for each in chats])
    shared: dict[str, Any] = {"source": "jsonl", "path": str(path), "chat": "messages"}
    shared |= {"chat_template": str(tmp_path / "t.jinja")}
    known = {f"u:{c[0]['content']}a:": c[-1]["content"] for c in chats if len(c) > 1}

    def found(config: DataConfig, count: int, room: int) -> list[ValidationPrompt]:
        data = build_loaders(config, TokenizerConfig(), seed=0, batch_size=2, sequence_length=64)
        return load_validation_prompts(data, config.validation_fraction, count, room)

    config = DataConfig(**shared, validation_fraction=0.4)
    turns = found(config, 20, 64)
    assert 8 < len(turns) <= 12 and len({turn.text for turn in turns}) == len(turns)
    for turn in turns:
        assert known[turn.text] == turn.answer and bytes(turn.ids).decode() == turn.text
    assert found(config, 3, 64) == turns[:3]
    short = found(config, 20, 24)
    assert short and short == [turn for turn in turns if len(turn.ids) < 24]
    assert found(DataConfig(**shared, validation_fraction=0.0), 3, 64) == []
    sets = {"other": config}
    text = DataConfig(source="corpus", validation_fraction=0.0, validation=sets)  # type: ignore[arg-type]
    assert len(found(text, 2, 64)) == 2
