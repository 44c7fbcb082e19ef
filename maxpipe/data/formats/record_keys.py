"""The settings that read a record, recognised by the names of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxpipe.config.keys import default_of

_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
_RESPONSES = ("response", "completion", "output", "answer", "solution")
_MESSAGES = ("messages", "conversations", "conversation")


def chat_settings(record: Mapping[str, Any]) -> str:
    """The `key=value` settings that read a record of a conversation; empty for another record."""
    messages = [name for name in _MESSAGES if isinstance(record.get(name), list | tuple)]
    prompts = _present(record, _PROMPTS)
    if len(messages) == 1 and _are_messages(record[messages[0]]):
        is_default = messages[0] in ("messages", "conversations")
        field = "" if is_default else f" data.messages_field={messages[0]}"
        return f"data.chat=messages{field}"
    if len(prompts) > 1 or not prompts:
        return ""
    if _present(record, ("chosen", "rejected")) == ["chosen", "rejected"]:
        return f"train.objective=preference data.chat=pairs{_field('prompt_field', prompts[0])}"
    responses = _present(record, _RESPONSES)
    if len(responses) != 1:
        return ""
    fields = _field("prompt_field", prompts[0]) + _field("response_field", responses[0])
    return f"data.chat=prompt{fields}"


def text_template(record: Mapping[str, Any]) -> str:
    """A `data.template` with prompt and response of a record; empty where one is not text."""
    names = _present(record, _PROMPTS), _present(record, _RESPONSES)
    joined = [name for each in names for name in each]
    if not all(names) or not all(isinstance(record[name], str) for name in joined):
        return ""
    return r"\n".join(f"{{{name}}}" for name in joined)


def _present(record: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if isinstance(record.get(name), str | list | tuple)]


def _are_messages(value: Any) -> bool:
    return bool(value) and all(isinstance(each, Mapping) for each in value)


def _field(key: str, name: str) -> str:
    return "" if default_of(f"data.{key}") == name else f" data.{key}={name}"
