"""Prompt and conversation files: one line or one JSON object per prompt.

The module does not import jax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json

MAX_BYTES = 1 << 28
"""Maximum size of a file in bytes."""
_JSON = (".jsonl", ".json", ".ndjson")


def read_prompts(path: str | Path, where: str) -> list[str]:
    """Read the prompts in a file; `where` names the file in errors.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is not a prompt.
    """
    return parse_prompts(_read_file(path, where), where, is_json=str(path).endswith(_JSON))


def read_conversations(path: str | Path, where: str) -> list[ChatInput]:
    """Read the conversations in a file, from JSON lines or from one user message per line.

    Raises:
        ConfigError: as in `read_prompts`, or a line has no valid messages.
    """
    raw = _read_file(path, where)
    if not str(path).endswith(_JSON):
        return [user_chat(text) for text in parse_prompts(raw, where)]
    return [_conversation(line, f"{where}, line {place}") for place, line in _lines(raw, where)]


def user_chat(text: str) -> ChatInput:
    """Return a conversation with one user message."""
    return ChatInput([{"role": "user", "content": text}])


def _conversation(line: bytes, where: str) -> ChatInput:
    try:
        record = parse_json(line, dict[str, Any])
        from maxpipe.data.prompts import chat_of  # deferred, because it imports numpy

        if "messages" not in record and isinstance(record.get("prompt"), str):
            record = {**record, "prompt": [*user_chat(record["prompt"]).messages]}
        return chat_of(record)
    except ValueError as error:
        raise ConfigError.one(
            where,
            None,
            f"must be an object with messages: {error}.",
            'Write {"messages": [{"role": "user", "content": "Hello"}]}.',
        ) from error


def _read_file(path: str | Path, where: str) -> bytes:
    try:
        return files.read(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError.one(
            where,
            None,
            f"must be a readable file: {error.strerror or error}.",
            "Set a text file with one prompt per line, or JSON lines with `prompt` in each.",
        ) from error


def parse_prompts(raw: bytes, where: str, *, is_json: bool = False) -> list[str]:
    """Parse the prompts in the content of a file. See `read_prompts`."""
    lines = _lines(raw, where)
    return [parse_prompt(line, f"{where}, line {place}", is_json=is_json) for place, line in lines]


def _lines(raw: bytes, where: str) -> list[tuple[int, bytes]]:
    lines = [(place, line) for place, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError.one(
            where, None, "must have at least one line that is not blank.", "Write a prompt."
        )
    return lines


def parse_prompt(line: bytes, where: str, *, is_json: bool = False) -> str:
    """Parse the prompt in a line. See `read_prompts`."""
    try:
        if not is_json:
            return line.decode()
        prompt = parse_json(line, dict[str, Any]).get("prompt")
        if isinstance(prompt, str):
            return prompt
        raise ValueError("the object has no string `prompt`")
    except ValueError as error:  # includes encoding errors
        rule = "must be an object with a string `prompt`" if is_json else "must be UTF-8"
        raise ConfigError.one(
            where, None, f"{rule}: {error}.", "Correct the line, or remove it."
        ) from error
