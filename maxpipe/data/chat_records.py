"""Parse records into conversations: messages, tools, template settings and trained messages.

Every source gives the same conversation for the same record: a null key of a message, of a tool or
of template settings is a key that is absent, because columnar files have one struct for all rows.
A key that nothing reads is counted: see `ChatInput.unread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.data_sources import is_template, parse_template_kwargs, split_template
from maxpipe.config.keys import default_of
from maxpipe.config.rules import did_you_mean
from maxpipe.data.formats.record_text import (
    SYSTEMS,
    BadRecord,
    chat_keys,
    chat_settings,
    fill_template,
    settings_text,
    shorten,
)
from maxpipe.data.tokenizers.chat import SETTINGS, ChatInput, Message
from maxpipe.io.typed_json import parse_json

_MESSAGES, _SHAREGPT = "messages", "conversations"
"""The default of `data.messages_field`, and the name that ShareGPT records use for it."""
_SYSTEM = "system"
"""A system message as a field of a ShareGPT record."""
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
}
_CALL_AND_REASONING_KEYS = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)
"""Keys of a message that may take the place of `content`."""
_TEXTS = ("content", "value", "tool_calls")
_MEDIA = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video")
_MEDIA += ("video_url", "file", "input_file")
"""Types of a message's parts that no model here reads."""
_FLAGS = ("weight", "train", "training")
"""Keys that say whether a message is trained; no template sees them."""
_RESERVED = (_MESSAGES, "tools", "documents", "add_generation_prompt")
_ARGUMENTS = "arguments"
_MAX_JSON_DEPTH = 256
_TURN_ROLES = ("user", "assistant")
_PAIR = {"input", "output"}
"""Keys of an object with a user's message and the assistant's response."""
_ANYTHING: Any = Any


def conversation_of(record: object, config: SourceConfig) -> ChatInput:
    """The conversation of a record, for `data.chat` `messages` and `prompt`.

    Raises:
        BadRecord: a field is missing or of another type, or a role is none of `data.chat_roles`.
    """
    fields = check_mapping(record, config)
    if config.chat == "messages":
        name = messages_field_name(fields, config.messages_field)
        names, key = [name], "data.messages_field"
        messages = parse_messages(turns_of(read_field(fields, name, key)), key)
    else:
        given = config.prompt_field, config.response_field
        names = [each for name in given for each in columns_of(fields, name)]
        messages = parse_text_or_messages(fields, given[0], "data.prompt_field", "user")
        messages += parse_text_or_messages(fields, given[1], "data.response_field", "assistant")
    if not messages:
        raise BadRecord("", "must have a message: it has none.", "Remove the record.")
    # Columnar sources have nulls for the arguments of other calls.
    values = [fields.get(each) for each in names]
    nulls = null_arguments(values) if config.source == "jsonl" else ()
    first, more = parse_system_message(fields, messages, config, is_sharegpt=names == [_SHAREGPT])
    messages, names = [*first, *messages], [*names, *more]
    trained = [
        number
        for number, message in enumerate(messages)
        if is_trained(message, config, f"message {number + 1}")
    ]
    tools, settings = tools_and_settings(fields, config)
    keys = (*unread_field_names(fields, names, config), *nulls)
    return ChatInput(messages, tools, settings, trained, keys)


def parse_system_message(
    fields: Mapping[str, Any],
    messages: Sequence[Message],
    config: SourceConfig,
    *,
    is_sharegpt: bool = False,
) -> tuple[list[Message], list[str]]:
    """The system message of a record in front of its messages, and the fields that it is from.

    Neither if the record has none, or if `messages` begin with another one.

    Raises:
        BadRecord: the field holds something else than a text.
    """
    name = config.system_field or (_SYSTEM if is_sharegpt else "")
    names = columns_of(fields, name) if name else []
    if not any(has_value(fields.get(each)) for each in names):
        return [], names
    value = read_field(fields, name, "data.system_field")
    if not isinstance(value, str):
        if not config.system_field:
            return [], []
        rule = f"must have a text in data.system_field; it is of type {type(value).__name__}."
        action = "Set data.system_field to a field of texts, or leave it out."
        raise BadRecord(shorten(str(value)), rule, action)
    if messages and messages[0].get("role") in (_SYSTEM, "developer"):
        return [], names if messages[0].get("content") == value else []
    return [{"role": _SYSTEM, "content": value}], names


def tools_and_settings(
    fields: Mapping[str, Any], config: SourceConfig
) -> tuple[list[Any] | None, dict[str, Any]]:
    """The tools of a record, None without them, and settings of the template: those of the record
    over `data.chat_template_kwargs`.

    Raises:
        BadRecord: they are of another type.
    """
    found = tools_of(fields, config.tools_field)
    return found, {**parse_template_kwargs(config.chat_template_kwargs), **settings_of(fields)}


def unread_field_names(
    fields: Mapping[str, Any], names: Sequence[str], config: SourceConfig
) -> tuple[str, ...]:
    """Fields of a record with a value that are neither of `names` nor read by all conversations."""
    known = {*names, config.tools_field, SETTINGS}
    return tuple(str(each) for each in fields if each not in known and has_value(fields[each]))


def has_value(value: Any) -> bool:
    """Whether it is something else than null, an empty text, list or object."""
    return value is not None and not (isinstance(value, str | list | Mapping) and not value)


# Fields.


def check_mapping(record: object, config: SourceConfig) -> Mapping[str, Any]:
    """The record. Raises BadRecord if it has no fields."""
    if not isinstance(record, Mapping):
        rule = f"must have fields, for data.chat={config.chat}; it is of type "
        rule += f"{type(record).__name__}."
        raise BadRecord(shorten(str(record)), rule, "Set data.chat=off if these are texts.")
    return record


def messages_field_name(fields: Mapping[str, Any], name: str) -> str:
    """The name of the field of messages: by default also that of ShareGPT records."""
    is_absent = name == _MESSAGES and fields.get(name) is None
    return _SHAREGPT if is_absent and fields.get(_SHAREGPT) is not None else name


def columns_of(record: Mapping[str, Any], name: str) -> list[str]:
    """The fields that `column` reads: those of a template, or the one of this name."""
    return [name] if name in record else fields_of(name)


def fields_of(name: str) -> list[str]:
    """The fields of a template, or the one of this name."""
    return [each for _, each in split_template(name) if each] if is_template(name) else [name]


def read_field(record: Mapping[str, Any], name: str, key: str) -> Any:
    """The value of the field that `key` names, or the text of its template over several fields.

    Raises:
        BadRecord: the record lacks one.
    """
    if name in record:
        return record[name]
    if is_template(name):
        return fill_template(record, name, key)
    names = [str(each) for each in record]
    guesses = [each for each in names if each.lower() not in SYSTEMS or key == "data.system_field"]
    guess = did_you_mean(name, guesses) or (names[0] if len(names) == 1 else "")
    settings = f"{key}={guess}" if guess else f"{key} to the field that has it"
    # A key with another value than its default must be named even if the default is right.
    is_default = name == default_of(key)
    chat = chat_settings(record) if is_default else settings_text(chat_keys(record))
    if "data.chat=pairs" in chat or key not in ("data.chosen_field", "data.rejected_field"):
        settings = chat or settings
    raise BadRecord(
        shorten(f"fields {', '.join(names) or 'none'}"),
        f"must have the field of {key} ({name}).",
        f"Set {settings}.",
    )


def turns_of(value: Any) -> Any:
    """Messages of a field that holds texts in turns, or objects with `input` and `output`.

    Texts are of the user and the assistant, in this order. Any other value is returned unchanged.
    """
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) > 1 and all(isinstance(each, str) for each in value):
        return [message_of_text(each, _TURN_ROLES[i % 2])[0] for i, each in enumerate(value)]
    if not all(isinstance(each, Mapping) for each in value):
        return value
    found = []
    for each in value:
        if "role" in each or "from" in each or not {*each} >= _PAIR:
            return value
        others = {key: item for key, item in each.items() if key not in _PAIR}
        found.append({"role": _TURN_ROLES[0], "content": each["input"]})
        if each["output"] is not None:
            found.append({"role": _TURN_ROLES[1], "content": each["output"], **others})
    return found


def message_of_text(text: str, role: str) -> list[Message]:
    """A text as the only message."""
    return [{"role": role, "content": text}]


def parse_text_or_messages(
    fields: Mapping[str, Any], name: str, key: str, role: str
) -> list[Message]:
    """A field that holds a text, or messages. Raises BadRecord if it holds something else."""
    value = read_field(fields, name, key)
    return message_of_text(value, role) if isinstance(value, str) else parse_messages(value, key)


def parse_messages(value: object, key: str, what: str = "a list") -> list[Message]:
    """The messages in a field, or the only one. Raises BadRecord if it has something else."""
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
        return [message_of(each) for each in value]
    raise BadRecord(
        shorten(str(value)),
        f"must have {what} of objects in {key}; it is of type {type(value).__name__}.",
        'Write it as [{"role": "user", "content": "..."}, ...].',
    )


def drop_nulls(value: Any) -> Any:
    """A value without the null keys of its objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(each) for each in value]
    return value


def null_arguments(value: Any, inside: str = "") -> tuple[str, ...]:
    """Names of the null keys in `arguments` of calls, which `without_nulls` leaves out."""
    found: dict[str, None] = {}
    if isinstance(value, Mapping):
        for key, each in value.items():
            if each is None and (inside or key == _ARGUMENTS):
                found[f"{inside}.{key} (null)" if inside else f"{key} (null)"] = None
            elif inside or key == _ARGUMENTS:
                found.update(dict.fromkeys(null_arguments(each, _ARGUMENTS)))
            elif not isinstance(each, str):
                found.update(dict.fromkeys(null_arguments(each)))
    elif isinstance(value, list | tuple):
        for each in value:
            found.update(dict.fromkeys(null_arguments(each, inside)))
    return tuple(found)


# Messages.


def message_of(value: Mapping[str, Any]) -> Message:
    """A message without null keys, with `role` and `content` also where it is ShareGPT's.

    Raises:
        BadRecord: a call of a function is not the JSON of one.
    """
    message = drop_nulls(value)
    if isinstance(message.get("refusal"), str) and not any(map(message.get, _TEXTS)):
        message["content"] = message.pop("refusal")  # as OpenAI's records have it
    if "role" in message or "from" not in message:
        return message
    named = message.pop("from")
    role = _SHAREGPT_ROLES.get(named, named) if isinstance(named, str) else named
    content = message.pop("value", None)
    if named == "function_call":
        return {"role": role, "tool_calls": list(_calls(content)), **message}
    return {"role": role, **({} if content is None else {"content": content}), **message}


def _calls(text: object) -> Iterator[dict[str, Any]]:
    """The calls in a message of the role `function_call`: JSON of one, or of a list."""
    rule = "must hold the JSON of a call with `name` and `arguments` in a message of function_call"
    action = 'Write {"name": "...", "arguments": {...}}, or use the role gpt for plain text.'
    try:
        found = (
            parse_json(text, _ANYTHING, most_depth=_MAX_JSON_DEPTH)
            if isinstance(text, str)
            else text
        )
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, dict) or "name" not in each:
                raise ValueError("it has no name")
            yield {"type": "function", "function": drop_nulls(each)}
    except ValueError as error:
        raise BadRecord(shorten(str(text)), f"{rule}: {error}.", action) from error


def is_trained(message: Message, config: SourceConfig, which: str) -> bool:
    """Whether a message is trained: its role is of `data.trained_roles`, unless it says itself.

    `weight` 0 leaves it out, and `train` decides alone. Both are taken out of the message.

    Raises:
        BadRecord: it has no role of `data.chat_roles`, no content, or flags of other values.
    """
    check_message(message, config, which)
    flags = {key: message.pop(key) for key in _FLAGS if key in message}
    for key, value in flags.items():
        if value not in (0, 1) or isinstance(value, str):
            rule = f"must have a {key} of 0 or 1, or false or true: it has {shorten(str(value))}."
            raise BadRecord(which, rule, "Write 1 for a message that is trained, 0 for others.")
    if len({bool(value) for value in flags.values()}) > 1:
        given = ", ".join(f"{key} {value}" for key, value in flags.items())
        rule = f"must say once whether it is trained: it has {given}."
        raise BadRecord(which, rule, "Leave one of these keys out.")
    by_role = message["role"] in config.trained_roles
    if "train" in flags or "training" in flags:
        return bool(flags.get("train", flags.get("training")))
    return by_role and bool(flags.get("weight", 1))


def check_message(message: Message, config: SourceConfig, which: str) -> None:
    """Raises BadRecord for a message of an unknown role, or without content."""
    role, roles = message.get("role"), config.chat_roles
    if role not in roles:
        guess = did_you_mean(role, roles) if isinstance(role, str) else ""
        raise BadRecord(
            shorten(f"role {role} of {which}" if "role" in message else f"{which} without role"),
            f"must have a role of data.chat_roles: {', '.join(roles)}.",
            f"{f'Write {guess}' if guess else 'Correct it'}, or add the role to data.chat_roles.",
        )
    check_content(message, which)


def check_content(message: Message, which: str) -> None:
    """Raises BadRecord for a message that has no content, nor a call of tools or reasoning."""
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and part.get("type") in _MEDIA:
            rule = f"must have texts as content; it has a part of type {part['type']}, and models "
            raise BadRecord(which, f"{rule}here read text only.", "Remove the record or the part.")
    if isinstance(content, str | list) or (
        "content" not in message
        and any(has_value(message.get(each)) for each in _CALL_AND_REASONING_KEYS)
    ):
        return
    raise BadRecord(
        which,
        f"must have a text as content; it is of type {type(content).__name__}."
        if "content" in message
        else f"must have content, or tool_calls; it has {', '.join(map(str, message))}.",
        'Write {"role": "user", "content": "..."}.',
    )


# What else a template is given.


def tools_of(fields: Mapping[str, Any], name: str) -> list[Any] | None:
    """The tools of a record: a list of objects, or the JSON of one.

    Raises:
        BadRecord: the field has something else.
    """
    found = _from_json(fields.get(name))
    if isinstance(found, list | tuple):
        tools = [_from_json(each) for each in found]
        if all(isinstance(each, Mapping) for each in tools):
            return [
                tool if isinstance(each, str) else drop_nulls(tool)
                for tool, each in zip(tools, found, strict=True)
            ]
    elif found is None:
        return None
    raise BadRecord(
        shorten(str(fields[name])),
        f"must have a list of objects in {name}, or its JSON.",
        'Write it as [{"type": "function", "function": {"name": "...", ...}}, ...].',
    )


def settings_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a record gives its template by name, in `chat_template_kwargs`.

    Raises:
        BadRecord: it is not an object, or has a name of something else.
    """
    found = _from_json(fields.get(SETTINGS))
    if found is None:
        return {}
    if isinstance(found, Mapping):
        settings = drop_nulls(found)
        if not any(each in settings for each in _RESERVED):
            return settings
    raise BadRecord(
        shorten(str(fields[SETTINGS])),
        f"must have an object in {SETTINGS}, without {', '.join(_RESERVED)}.",
        'Write it as {"enable_thinking": false}.',
    )


def _from_json(value: Any) -> Any:
    """A value that may be there as JSON text; None if that is empty, or none."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, _ANYTHING, most_depth=_MAX_JSON_DEPTH) if value.strip() else None
    except ValueError:
        return value
