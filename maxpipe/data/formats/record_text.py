"""Extract text from records, from one column or by filling a template with several columns.

The module also infers suitable settings from the names and values of a record's keys.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxpipe.config.schema import default_of
from maxpipe.config.sections.source import split_template
from maxpipe.io.typed_json import parse_json

_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
RESPONSES = ("response", "completion", "output", "solution", "answer", "answers")
_HALVES = ("chosen", "rejected")
_MESSAGES = ("messages", "conversations", "conversation")
_TURNS = ("data", "dialog", "dialogue", "items", "turns")
"""Names of fields that are read as the list of messages if a record has no other such list."""
CONTEXTS = ("input", "context", "passage", "history")
"""Names of text fields that usually belong to the prompt."""
SYSTEMS = ("system", "system_prompt", "system_message")

_WORDS = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")

Settings = Mapping[str, str]


def chat_keys(record: Mapping[str, Any], *, with_template: bool = True) -> dict[str, str]:
    """Return config settings for reading a record as a conversation or preference pair; empty for
    other records.

    Without a chat template, system messages are ignored for plain-text pairs.
    """
    if len(halves := _present_fields(record, _HALVES)) == len(_HALVES):
        keys = _pair_keys(record, halves)
        is_text = all(isinstance(record[name], str) for name in halves)
        return keys | (_system(record) if with_template or not is_text else {})
    if name := _messages_name(record):
        return {"data.chat": "messages", "data.messages_field": name} | _system(record)
    prompt = _prompt(record)
    responses = [
        name for name in _present_fields(record, RESPONSES) if _is_text_or_messages(record[name])
    ]
    if not prompt or not responses:
        return {}
    fields = {"data.prompt_field": prompt, "data.response_field": responses[0]}
    return {"data.chat": "prompt"} | fields | _system(record)


def chat_settings(record: Mapping[str, Any]) -> str:
    """Return `chat_keys` as shell-quoted `key=value` text. Keys with default values are omitted."""
    return settings_text(drop_default_keys(chat_keys(record)))


def drop_default_keys(keys: Settings) -> dict[str, str]:
    """Return only the keys whose values differ from the defaults."""
    is_read = {"data.messages_field": ("messages", "conversations")}
    return {
        key: value
        for key, value in keys.items()
        if value not in is_read.get(key, (default_of(key),))
    }


def settings_text(keys: Settings) -> str:
    """Return shell-quoted `key=value` text for all keys."""
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in keys.items())


def text_template(record: Mapping[str, Any]) -> str:
    """Return a `data.template` for the prompt and the response; empty if either is not text."""
    names = _present_fields(record, (*_PROMPTS, *CONTEXTS)), _present_fields(record, RESPONSES)
    joined = [name for group in names for name in group]
    if not all(names) or not all(isinstance(record[name], str) for name in joined):
        return ""
    return template_of_fields([*_present_text_fields(record, SYSTEMS), *joined])


def template_of_fields(names: Sequence[str]) -> str:
    """Return a template with one line per field; empty if a name is invalid in a template."""
    if any(not name.strip() or name != name.strip() or {*name} & {*"{}"} for name in names):
        return ""
    return r"\n".join(f"{{{name}}}" for name in dict.fromkeys(names))


def text_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the names of text fields, including nested fields, with the most useful fields first.

    Fields that contain several words come first, and longer fields precede shorter ones. If the
    record has a field `text`, only `text` is returned.
    """
    texts: dict[str, str | bytes] = {}
    for name, value in record.items():
        inner = value if isinstance(value, Mapping) else {}
        fields = {name: value} | {f"{name}.{key}": text for key, text in inner.items()}
        texts |= {key: text for key, text in fields.items() if isinstance(text, str | bytes)}
    if "text" in texts:
        return ["text"]
    return sorted(texts, key=lambda name: (not has_words(texts[name]), -len(texts[name])))


def has_words(text: str | bytes) -> bool:
    """Return whether a string contains two adjacent words, unlike an id or a date."""
    decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return _WORDS.search(decoded) is not None


# Parts of a record.


def _pair_keys(record: Mapping[str, Any], halves: Sequence[str]) -> dict[str, str]:
    names = dict(zip(("data.chosen_field", "data.rejected_field"), halves, strict=True))
    prompt = _prompt(record)
    if _are_whole_conversations(record, halves, prompt):
        prompt = ""
    elif not prompt:
        prompt = _messages_name(record)
    # For records without a prompt field, `prompt` is read from the messages.
    prompt = "prompt" if prompt in ("messages", "conversations") else prompt
    keys = {"train.objective": "preference", "data.chat": "pairs"}
    return keys | {"data.prompt_field": prompt} | names


def _are_whole_conversations(record: Mapping[str, Any], halves: Sequence[str], prompt: str) -> bool:
    """Return whether both responses include a prompt that the prompt field does not contain."""
    values = [record[name] for name in halves]
    if all(_are_messages(value) for value in values):
        first = values[0][0]
        if first.get("role", first.get("from")) in ("assistant", "gpt"):
            return False
        said, text = record.get(prompt), first.get("content", first.get("value"))
        return said != text and not (isinstance(said, list) and said == values[0][: len(said)])
    return all(isinstance(value, str) for value in values) and not (
        prompt or _messages_name(record)
    )


def _prompt(record: Mapping[str, Any]) -> str:
    prompts = [
        name for name in _present_fields(record, _PROMPTS) if _is_text_or_messages(record[name])
    ]
    if not prompts:
        return ""
    name = prompts[0]
    contexts = [field for field in _present_text_fields(record, CONTEXTS) if field != name]
    if not contexts or not isinstance(record[name], str):
        return name
    return template_of_fields([name, *contexts]) or name


def _system(record: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in _present_text_fields(record, SYSTEMS) if record[name]]
    return {"data.system_field": names[0]} if names else {}


def _messages_name(record: Mapping[str, Any]) -> str:
    for name in _MESSAGES:
        if _are_messages(record.get(name)) or (name in record and _are_turns(record[name])):
            return name
    known = {*_PROMPTS, *RESPONSES, *_HALVES, *CONTEXTS}
    others = [name for name in record if str(name).lower() not in known]
    named = [name for name in _TURNS if name in record and _are_turns(record[name])]
    return next((name for name in others if _have_roles(record[name])), next(iter(named), ""))


def _present_fields(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the fields with these names (ignoring case) that are text, a list or a message."""
    lower = {str(name).lower(): name for name in reversed([*record])}
    lower |= {name: name for name in names if name in record}
    present = [lower[name] for name in names if name in lower]
    return [
        name
        for name in dict.fromkeys(present)
        if isinstance(record[name], str | list | tuple) or _have_roles([record[name]])
    ]


def _present_text_fields(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in _present_fields(record, names) if isinstance(record[name], str)]


def _is_text_or_messages(value: Any) -> bool:
    return isinstance(value, str) or _have_roles([value]) or _have_roles(value)


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(item, Mapping) for item in value)


def _have_roles(value: Any) -> bool:
    if not _are_messages(value):
        return False
    return all("role" in item or "from" in item or {*item} >= {"input", "output"} for item in value)


def _are_turns(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 1
    return is_list and all(isinstance(item, str) for item in value)


_MAX_DEPTH = 256
"""Maximum nesting depth of a JSON record."""
_ANYTHING: Any = Any
_SHOWN = 120
MAX_RECORD_BYTES = 1 << 28
"""Maximum size of a record in bytes. Text and tokens of a document must fit in memory."""


class BadRecord(Exception):
    """Raised for a record with invalid content. The source adds the record's location."""

    def __init__(self, given: str, rule: str, action: str):
        super().__init__(rule)
        self.value, self.rule, self.action = given, rule, action


_MISSING = object()


class TextExtractor:
    """Text extractor, which returns the record itself, a column, or a filled template."""

    def __init__(self, field: str = "text", template: str = ""):
        self._field = field
        self._template = template
        self._pieces = split_template(template)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read. A dot separates the parts of a nested column name."""
        return [name for _, name in self._pieces if name] if self._template else [self._field]

    @property
    def fingerprint_key(self) -> str:
        """Column or template, used as part of a source's fingerprint."""
        return f"template {self._template}" if self._template else self._field

    def __call__(self, record: str | Mapping[str, Any]) -> str:
        """Return the text of a record; raise BadRecord if no column contains text."""
        if isinstance(record, str):
            return record
        if self._template:
            parts, size = [], 0
            for fixed, name in self._pieces:
                parts += fixed, _fill_field(record, name) if name else ""
                size += len(parts[-2]) + len(parts[-1])
                check_length(size)  # a template may contain the same column many times
            return "".join(parts)
        value = value_of(record, self._field)
        if isinstance(value, (str, bytes)):
            return _text(value)
        raise self._no_text(record, value)

    def _no_text(self, record: Mapping[str, Any], value: object) -> BadRecord:
        state = "is missing" if value is _MISSING else f"is of type {type(value).__name__}"
        rule = f"must have text in data.text_field ({self._field}), which {state}."
        return BadRecord(_fields(record), rule, _suggest_settings(record))


def _suggest_settings(record: Mapping[str, Any]) -> str:
    chat, template = chat_settings(record), text_template(record)
    actions = [f"{chat} to render conversations with a chat template"] if chat else []
    if template:
        actions.append(f"data.template={shlex.quote(template)} to train on these fields as text")
    if actions:
        return f"Set {', or '.join(actions)}."
    texts = text_fields(record)
    useful = [name for name in texts if has_words(str(value_of(record, name)))] or texts
    names = [name for name in record if name in useful]
    if len(names) > 1 and (template := template_of_fields(names)):
        both = f"data.text_field={shlex.quote(texts[0])}, or data.template={shlex.quote(template)}"
        return f"Set {both} to read several fields."
    if texts:
        return f"Set data.text_field={shlex.quote(texts[0])}."
    if isinstance(record.get("prompt"), list | tuple):
        return "Set grpo.prompts to the file if its records are prompts for train.objective=grpo."
    return "Add a text field to every record."


def fill_template(record: Mapping[str, Any], template: str, key: str) -> str:
    """Fill the template set by the config key `key`. Lines whose columns are all empty are omitted.

    Null and missing columns are replaced by empty strings.

    Raises:
        BadRecord: the record has none of the columns, or a column has the wrong type.
    """
    pieces = split_template(template)
    names = [name for _, name in pieces if name]
    if all(_is_absent(value_of(record, name)) for name in names):
        rule = f"must have one of the columns that {key} uses: {', '.join(names)}."
        raise BadRecord(_fields(record), rule, f"Correct {key}, or add a column to the record.")
    lines, values = [""], [list[str]()]
    for fixed, name in pieces:
        first, *others = fixed.split("\n")
        lines[-1] += first
        lines += others
        values += [list[str]() for _ in others]
        if name:
            is_empty = _is_absent(value_of(record, name))
            values[-1].append("" if is_empty else _fill_field(record, name, key))
            lines[-1] += values[-1][-1]
        check_length(sum(map(len, lines)))
    kept = [line for line, of in zip(lines, values, strict=True) if not of or any(of)]
    text = "\n".join(kept)
    return text if len(kept) == len(lines) else text.strip("\n")


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column. `a.b` is field `b` of `a` unless a column has this name."""
    if name in record:
        return record[name]
    first, dot, inner_name = name.partition(".")
    inner = record.get(first)
    return value_of(inner, inner_name) if dot and isinstance(inner, Mapping) else _MISSING


def _fill_field(record: Mapping[str, Any], name: str, key: str = "data.template") -> str:
    value = value_of(record, name)
    if isinstance(value, (str, bytes)):
        return _text(value)
    if isinstance(value, (bool, int, float, np.generic)):
        return str(value)
    state = "is missing" if value is _MISSING else f"is of type {type(value).__name__}"
    rule = f"must have text or a number in the column {name} of {key}, which {state}."
    raise BadRecord(_fields(record), rule, f"Correct {key}, or add the column to every record.")


def _is_absent(value: object) -> bool:
    return value is None or value is _MISSING


def _fields(record: Mapping[str, Any]) -> str:
    return shorten(f"fields {', '.join(map(str, record)) or 'none'}")


def _text(value: str | bytes) -> str:
    check_length(len(value))
    if isinstance(value, bytes):
        return decode_utf8(value)
    # A JSON string may contain an unpaired surrogate, which encoders reject.
    return value.encode("utf-8", "replace").decode()


def check_length(size_bytes: int) -> None:
    """Raise BadRecord if a record is too large."""
    if size_bytes > MAX_RECORD_BYTES:
        rule = f"must be at most {MAX_RECORD_BYTES} bytes long to fit in memory."
        raise BadRecord(f"{size_bytes} bytes", rule, "Split the document.")


def from_json(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a record; raise ValueError for other values or deep nesting."""
    value = parse_json(raw, _ANYTHING, most_depth=_MAX_DEPTH)
    if not isinstance(value, dict):
        raise ValueError(f"the value is of type {type(value).__name__}")
    return value


def decode_utf8(raw: bytes, errors: str = "strict") -> str:
    """Return UTF-8 bytes as text; raise BadRecord if they are not UTF-8."""
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"byte 0x{raw[error.start]:02x} at offset {error.start}",
            "must be UTF-8 text.",
            "Convert the text to UTF-8, or exclude the file from data.path with a glob pattern.",
        ) from error


def shorten(text: str | bytes, limit: int = _SHOWN) -> str:
    """Return the text as a single line of at most `limit` characters."""
    if isinstance(text, bytes):
        text = text[: 8 * limit].decode("utf-8", "replace")
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
