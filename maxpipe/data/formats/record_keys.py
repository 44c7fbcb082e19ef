"""The settings that read a record, recognised by the names and values of its keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxpipe.config.keys import default_of

_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
RESPONSES = ("response", "completion", "output", "solution", "answer", "answers")
_HALVES = ("chosen", "rejected")
_MESSAGES = ("messages", "conversations", "conversation")
_TURNS = ("data", "dialog", "dialogue", "items", "turns")
"""Further names of lists of messages, if a record has nothing else that is one."""
CONTEXTS = ("input", "context", "passage", "history")
"""Names of texts that belong to the prompt in another field."""
SYSTEMS = ("system", "system_prompt", "system_message")

_WORDS = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")

Settings = Mapping[str, str]


def chat_keys(record: Mapping[str, Any], *, with_template: bool = True) -> dict[str, str]:
    """The keys that read a record of a conversation or pair; empty for another record.

    Without a chat template pairs of texts are read without their system message.
    """
    if len(halves := _present(record, _HALVES)) == len(_HALVES):
        found = _of_pairs(record, halves)
        is_text = all(isinstance(record[name], str) for name in halves)
        return found | (_system(record) if with_template or not is_text else {})
    if name := _messages_name(record):
        return {"data.chat": "messages", "data.messages_field": name} | _system(record)
    prompt = _prompt(record)
    responses = [name for name in _present(record, RESPONSES) if _is_said(record[name])]
    if not prompt or not responses:
        return {}
    fields = {"data.prompt_field": prompt, "data.response_field": responses[0]}
    return {"data.chat": "prompt"} | fields | _system(record)


def chat_settings(record: Mapping[str, Any]) -> str:
    """The same as `key=value` in the quotes of a shell, without keys that have their defaults."""
    return settings_text(changed(chat_keys(record)))


def changed(keys: Settings) -> dict[str, str]:
    """The keys that have other values than their defaults."""
    is_read = {"data.messages_field": ("messages", "conversations")}
    return {
        key: value
        for key, value in keys.items()
        if value not in is_read.get(key, (default_of(key),))
    }


def settings_text(keys: Settings) -> str:
    """`key=value` of each key, in the quotes of a shell."""
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in keys.items())


def text_template(record: Mapping[str, Any]) -> str:
    """A `data.template` with prompt and response of a record; empty where one is not text."""
    names = _present(record, (*_PROMPTS, *CONTEXTS)), _present(record, RESPONSES)
    joined = [name for each in names for name in each]
    if not all(names) or not all(isinstance(record[name], str) for name in joined):
        return ""
    return template_of_fields([*_texts(record, SYSTEMS), *joined])


def template_of_fields(names: Sequence[str]) -> str:
    """A template with a line for each field; empty if one has a name that it cannot have."""
    if any(not name.strip() or name != name.strip() or {*name} & {*"{}"} for name in names):
        return ""
    return r"\n".join(f"{{{name}}}" for name in dict.fromkeys(names))


def text_fields(record: Mapping[str, Any]) -> list[str]:
    """The names of the fields with texts, those in objects too, the most useful one first.

    A text of several words comes before others, and a long one before a short one. Of a record
    with `text` this field alone.
    """
    found = dict(_all_texts(record))
    if "text" in found:
        return ["text"]
    return sorted(found, key=lambda name: (not has_words(found[name]), -len(found[name])))


def _all_texts(record: Mapping[str, Any]) -> Iterator[tuple[str, str | bytes]]:
    for name, value in record.items():
        if isinstance(value, str | bytes):
            yield name, value
        elif isinstance(value, Mapping):
            for inner, text in value.items():
                if isinstance(text, str | bytes):
                    yield f"{name}.{inner}", text


def has_words(text: str | bytes) -> bool:
    """Whether a value has two adjacent words, so that it may be a text and not an id or a date."""
    found = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return _WORDS.search(found) is not None


# Parts of a record.


def _of_pairs(record: Mapping[str, Any], halves: Sequence[str]) -> dict[str, str]:
    names = dict(zip(("data.chosen_field", "data.rejected_field"), halves, strict=True))
    prompt = _prompt(record)
    if _are_whole(record, halves, prompt):
        prompt = ""
    elif not prompt:
        prompt = _messages_name(record)
    # `prompt` is read from the messages of records that have no prompt.
    prompt = "prompt" if prompt in ("messages", "conversations") else prompt
    keys = {"train.objective": "preference", "data.chat": "pairs"}
    return keys | {"data.prompt_field": prompt} | names


def _are_whole(record: Mapping[str, Any], halves: Sequence[str], prompt: str) -> bool:
    """Whether both responses have the prompt in front, and the record has no other to use."""
    values = [record[name] for name in halves]
    if all(_are_messages(each) for each in values):
        first = values[0][0]
        if first.get("role", first.get("from")) in ("assistant", "gpt"):
            return False
        said, text = record.get(prompt), first.get("content", first.get("value"))
        return said != text and not (isinstance(said, list) and said == values[0][: len(said)])
    return all(isinstance(each, str) for each in values) and not (prompt or _messages_name(record))


def _prompt(record: Mapping[str, Any]) -> str:
    """The field of the prompt, or the template of it and the fields that belong to it."""
    prompts = [name for name in _present(record, _PROMPTS) if _is_said(record[name])]
    if not prompts:
        return ""
    name = prompts[0]
    contexts = [each for each in _texts(record, CONTEXTS) if each != name]
    if not contexts or not isinstance(record[name], str):
        return name
    return template_of_fields([name, *contexts]) or name


def _system(record: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in _texts(record, SYSTEMS) if record[name]]
    return {"data.system_field": names[0]} if names else {}


def _messages_name(record: Mapping[str, Any]) -> str:
    """The field of messages; empty if there is none."""
    for name in _MESSAGES:
        if _are_messages(record.get(name)) or (name in record and _are_turns(record[name])):
            return name
    known = {*_PROMPTS, *RESPONSES, *_HALVES, *CONTEXTS}
    others = [name for name in record if str(name).lower() not in known]
    named = [name for name in _TURNS if name in record and _are_turns(record[name])]
    return next((name for name in others if _have_roles(record[name])), next(iter(named), ""))


def _present(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Fields of these names, in any case, that hold a text, a list or a message."""
    lower = {str(name).lower(): name for name in reversed([*record])}
    lower |= {name: name for name in names if name in record}
    found = [lower[name] for name in names if name in lower]
    return [name for name in dict.fromkeys(found) if _is_text_or_list(record[name])]


def _texts(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in _present(record, names) if isinstance(record[name], str)]


def _is_text_or_list(value: Any) -> bool:
    return isinstance(value, str | list | tuple) or _have_roles([value])


def _is_said(value: Any) -> bool:
    return isinstance(value, str) or _have_roles([value]) or _have_roles(value)


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(each, Mapping) for each in value)


def _have_roles(value: Any) -> bool:
    if not _are_messages(value):
        return False
    return all("role" in each or "from" in each or {*each} >= {"input", "output"} for each in value)


def _are_turns(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 1
    return is_list and all(isinstance(each, str) for each in value)
