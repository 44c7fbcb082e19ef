"""Prompts and conversations in files: a line each, or a JSON object a line. No jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json

MAX_BYTES = 1 << 28
"""Of a file."""
_JSON = (".jsonl", ".json", ".ndjson")


def read_prompts(path: str | Path, where: str) -> list[str]:
    """The prompts in a file; `where` names it in errors.

    Raises:
        ConfigError: it cannot be read, or holds none, or a line is not a prompt.
    """
    return parse_prompts(_read_file(path, where), where, is_json=str(path).endswith(_JSON))


def read_conversations(path: str | Path, where: str) -> list[ChatInput]:
    """The conversations in a file: that of each object of JSON lines, or a user's line each.

    Raises:
        ConfigError: as `read`, and where a line's messages are none.
    """
    raw = _read_file(path, where)
    if not str(path).endswith(_JSON):
        return [user_chat(text) for text in parse_prompts(raw, where)]
    return [_conversation(line, f"{where}, line {place}") for place, line in _lines(raw, where)]


def user_chat(text: str) -> ChatInput:
    """A conversation that begins with this."""
    return ChatInput([{"role": "user", "content": text}])


def _conversation(line: bytes, where: str) -> ChatInput:
    try:
        found = parse_json(line, dict[str, Any])
        from maxpipe.data.prompts import chat_of  # numpy: not for every command line

        if "messages" not in found and isinstance(found.get("prompt"), str):
            found = {**found, "prompt": [*user_chat(found["prompt"]).messages]}
        return chat_of(found)
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
            f"must be a file that can be read: {error.strerror or error}.",
            "Name a text file with a prompt a line, or JSON lines with `prompt` in each.",
        ) from error


def parse_prompts(raw: bytes, where: str, *, is_json: bool = False) -> list[str]:
    """The prompts in the content of a file; see `read`."""
    lines = _lines(raw, where)
    return [parse_prompt(line, f"{where}, line {place}", is_json=is_json) for place, line in lines]


def _lines(raw: bytes, where: str) -> list[tuple[int, bytes]]:
    lines = [(place, line) for place, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError.one(
            where, None, "holds no prompt: each line that is not blank is one.", "Write some."
        )
    return lines


def parse_prompt(line: bytes, where: str, *, is_json: bool = False) -> str:
    """The prompt in a line; see `read`."""
    try:
        if not is_json:
            return line.decode()
        found = parse_json(line, dict[str, Any]).get("prompt")
        if isinstance(found, str):
            return found
        raise ValueError("it has no text `prompt`")
    except ValueError as error:  # that of an encoding, too
        rule = "must be an object with a text `prompt`" if is_json else "must be UTF-8"
        raise ConfigError.one(
            where, None, f"{rule}: {error}.", "Correct the line, or take it out."
        ) from error
