"""Parse records into conversations: messages, tools, template settings and messages to train on.

A record produces the same conversation in every source format. Keys with null values in messages,
tools and template settings are treated as absent, because columnar formats store the same struct
fields in all rows. Unread keys are counted; see `ChatInput.unread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import default_of
from maxpipe.config.sections.source import (
    SourceConfig,
    is_template,
    parse_template_kwargs,
    split_template,
)
from maxpipe.data.formats.record_text import (
    SYSTEMS,
    BadRecord,
    chat_keys,
    chat_settings,
    fill_template,
    settings_text,
    shorten,
)
from maxpipe.data.images import IMAGES, take_images
from maxpipe.data.tokenizers.chat import SETTINGS, ChatInput, Message
from maxpipe.io.typed_json import parse_json

_MESSAGES, _SHAREGPT = "messages", "conversations"
"""Default of `data.messages_field`, and the messages field of ShareGPT records."""
_SYSTEM = "system"
"""Name of the field that contains the system message in ShareGPT records."""
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
"""Message keys that may be present instead of `content`."""
_TEXTS = ("content", "value", "tool_calls")
_MEDIA = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video")
_MEDIA += ("video_url", "file", "input_file")
"""Unsupported types of message parts, such as images."""
_FLAGS = ("weight", "train", "training")
"""Message keys that set whether a message is trained on; not passed to the template."""
_RESERVED = (_MESSAGES, "tools", "documents", "add_generation_prompt")
_ARGUMENTS = "arguments"
_MAX_JSON_DEPTH = 256
_TURN_ROLES = ("user", "assistant")
_PAIR = {"input", "output"}
"""Keys of an object that contains a user message and the assistant's response."""
_ANYTHING: Any = Any


def conversation_of(record: object, config: SourceConfig) -> ChatInput:
    """Return the conversation of a record. `data.chat` must be `messages` or `prompt`.

    Raises:
        BadRecord: a field is missing or has the wrong type, or a role is not in `data.chat_roles`.
    """
    fields = check_mapping(record, config)
    if config.chat == "messages":
        name = messages_field_name(fields, config.messages_field)
        names, key = [name], "data.messages_field"
        messages = parse_messages(turns_of(read_field(fields, name, key)), key)
    else:
        halves = config.prompt_field, config.response_field
        names = [column for name in halves for column in columns_of(fields, name)]
        messages = parse_text_or_messages(fields, halves[0], "data.prompt_field", "user")
        messages += parse_text_or_messages(fields, halves[1], "data.response_field", "assistant")
    if not messages:
        raise BadRecord("", "must have at least one message.", "Remove the record.")
    # In columnar formats, arguments that a call does not use are stored as null.
    values = [fields.get(name) for name in names]
    nulls = null_arguments(values) if config.source == "jsonl" else ()
    first, more = parse_system_message(fields, messages, config, is_sharegpt=names == [_SHAREGPT])
    messages, names = [*first, *messages], [*names, *more]
    images, uses_field = take_images(messages, fields)
    names = [*names, IMAGES] if uses_field else names
    trained = [
        number
        for number, message in enumerate(messages)
        if is_trained(message, config, f"message {number + 1}", images=bool(images))
    ]
    tools, settings = tools_and_settings(fields, config)
    keys = (*unread_field_names(fields, names, config), *nulls)
    return ChatInput(messages, tools, settings, trained, keys, images)


def parse_system_message(
    fields: Mapping[str, Any],
    messages: Sequence[Message],
    config: SourceConfig,
    *,
    is_sharegpt: bool = False,
) -> tuple[list[Message], list[str]]:
    """Return the system message of a record as a list, and the names of the fields that it was read
    from.

    The list is empty if the record has no system message, or if `messages` already begin with a
    system message.

    Raises:
        BadRecord: the field is not a string.
    """
    name = config.system_field or (_SYSTEM if is_sharegpt else "")
    names = columns_of(fields, name) if name else []
    if not any(has_value(fields.get(name)) for name in names):
        return [], names
    value = read_field(fields, name, "data.system_field")
    if not isinstance(value, str):
        if not config.system_field:
            return [], []
        rule = (
            f"must be a string in data.system_field; the value is of type {type(value).__name__}."
        )
        action = "Set data.system_field to a field that contains strings, or leave it empty."
        raise BadRecord(shorten(str(value)), rule, action)
    if messages and messages[0].get("role") in (_SYSTEM, "developer"):
        return [], names if messages[0].get("content") == value else []
    return [{"role": _SYSTEM, "content": value}], names


def tools_and_settings(
    fields: Mapping[str, Any], config: SourceConfig
) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the tools of a record (None if it has none) and the chat-template settings.

    Settings in the record override `data.chat_template_kwargs`.

    Raises:
        BadRecord: the tools or the settings have the wrong type.
    """
    tools = tools_of(fields, config.tools_field)
    return tools, {**parse_template_kwargs(config.chat_template_kwargs), **settings_of(fields)}


def unread_field_names(
    fields: Mapping[str, Any], names: Sequence[str], config: SourceConfig
) -> tuple[str, ...]:
    """Return the non-empty fields of a record that are not in `names` and that no setting uses."""
    known = {*names, config.tools_field, SETTINGS}
    return tuple(str(name) for name in fields if name not in known and has_value(fields[name]))


def has_value(value: Any) -> bool:
    """Return True unless a value is null or an empty string, list or object."""
    return value is not None and not (isinstance(value, str | list | Mapping) and not value)


# Fields.


def check_mapping(record: object, config: SourceConfig) -> Mapping[str, Any]:
    """Return the record; raise BadRecord if it is not an object."""
    if not isinstance(record, Mapping):
        kind = type(record).__name__
        rule = f"must be an object if data.chat={config.chat}; the record is of type {kind}."
        raise BadRecord(shorten(str(record)), rule, "Set data.chat=off if the records are strings.")
    return record


def messages_field_name(fields: Mapping[str, Any], name: str) -> str:
    """Return the name of the messages field: `name`, or the field that ShareGPT records use."""
    is_absent = name == _MESSAGES and fields.get(name) is None
    return _SHAREGPT if is_absent and fields.get(_SHAREGPT) is not None else name


def columns_of(record: Mapping[str, Any], name: str) -> list[str]:
    """Return the fields that `read_field` reads: the field `name`, or the fields in the template
    `name`.
    """
    return [name] if name in record else fields_of(name)


def fields_of(name: str) -> list[str]:
    """Return the fields that a template uses, or the single field with this name."""
    return [field for _, field in split_template(name) if field] if is_template(name) else [name]


def read_field(record: Mapping[str, Any], name: str, key: str) -> Any:
    """Return the value of the field `name`, or if `name` is a template, the template filled with
    fields of the record.

    `key` is the config key that is set to `name`.

    Raises:
        BadRecord: the record lacks a field.
    """
    if name in record:
        return record[name]
    if is_template(name):
        return fill_template(record, name, key)
    names = [str(field) for field in record]
    guesses = [name for name in names if name.lower() not in SYSTEMS or key == "data.system_field"]
    guess = did_you_mean(name, guesses) or (names[0] if len(names) == 1 else "")
    settings = f"{key}={guess}" if guess else f"{key} to the right field"
    # If the config overrides the key, the error must suggest a value even if that is the default.
    is_default = name == default_of(key)
    chat = chat_settings(record) if is_default else settings_text(chat_keys(record))
    if "data.chat=pairs" in chat or key not in ("data.chosen_field", "data.rejected_field"):
        settings = chat or settings
    rule = f"must have the field named by {key} ({name})."
    raise BadRecord(shorten(f"fields {', '.join(names) or 'none'}"), rule, f"Set {settings}.")


def turns_of(value: Any) -> Any:
    """Convert a list of strings, or of objects with `input` and `output`, to messages.

    Strings alternate between the user and the assistant. Any other value is returned unchanged.
    """
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) > 1 and all(isinstance(item, str) for item in value):
        return [message_of_text(item, _TURN_ROLES[i % 2])[0] for i, item in enumerate(value)]
    if not all(isinstance(item, Mapping) for item in value):
        return value
    messages = []
    for turn in value:
        if "role" in turn or "from" in turn or not {*turn} >= _PAIR:
            return value
        others = {key: item for key, item in turn.items() if key not in _PAIR}
        messages.append({"role": _TURN_ROLES[0], "content": turn["input"]})
        if turn["output"] is not None:
            messages.append({"role": _TURN_ROLES[1], "content": turn["output"], **others})
    return messages


def message_of_text(text: str, role: str) -> list[Message]:
    """Return a list of one message with this text and role."""
    return [{"role": role, "content": text}]


def parse_text_or_messages(
    fields: Mapping[str, Any], name: str, key: str, role: str
) -> list[Message]:
    """Return the messages in a field of strings or messages; raise BadRecord for other types."""
    value = read_field(fields, name, key)
    return message_of_text(value, role) if isinstance(value, str) else parse_messages(value, key)


def parse_messages(value: object, key: str, what: str = "a list") -> list[Message]:
    """Return the messages in a list, or a single message as a list; raise BadRecord for other
    types.
    """
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
        return [message_of(item) for item in value]
    rule = f"must have {what} of objects in {key}; the value is of type {type(value).__name__}."
    action = 'Write it as [{"role": "user", "content": "..."}, ...].'
    raise BadRecord(shorten(str(value)), rule, action)


def drop_nulls(value: Any) -> Any:
    """Return the value with null-valued keys removed recursively."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    return value


def null_arguments(value: Any, inside: str = "") -> tuple[str, ...]:
    """Return the null-valued keys in tool-call `arguments`, which `drop_nulls` removes."""
    names: dict[str, None] = {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            if item is None and (inside or key == _ARGUMENTS):
                names[f"{inside}.{key} (null)" if inside else f"{key} (null)"] = None
            elif inside or key == _ARGUMENTS:
                names.update(dict.fromkeys(null_arguments(item, _ARGUMENTS)))
            elif not isinstance(item, str):
                names.update(dict.fromkeys(null_arguments(item)))
    elif isinstance(value, list | tuple):
        for item in value:
            names.update(dict.fromkeys(null_arguments(item, inside)))
    return tuple(names)


# Messages.


def message_of(value: Mapping[str, Any]) -> Message:
    """Return a message with null-valued keys removed and ShareGPT keys renamed to `role` and
    `content`.

    Raises:
        BadRecord: a message with role `function_call` does not contain a call in JSON.
    """
    message = drop_nulls(value)
    if isinstance(message.get("refusal"), str) and not any(map(message.get, _TEXTS)):
        message["content"] = message.pop("refusal")  # OpenAI records use this key
    if "role" in message or "from" not in message:
        return message
    named = message.pop("from")
    role = _SHAREGPT_ROLES.get(named, named) if isinstance(named, str) else named
    content = message.pop("value", None)
    if named == "function_call":
        return {"role": role, "tool_calls": list(_calls(content)), **message}
    return {"role": role, **({} if content is None else {"content": content}), **message}


def _calls(text: object) -> Iterator[dict[str, Any]]:
    """Yield the tool calls of a `function_call` message: `text` is one or more calls in JSON."""
    rule = "must be a call in JSON with `name` and `arguments` if the role is function_call"
    action = 'Write {"name": "...", "arguments": {...}}, or use the role gpt for plain text.'
    try:
        calls = (
            parse_json(text, _ANYTHING, most_depth=_MAX_JSON_DEPTH)
            if isinstance(text, str)
            else text
        )
        for call in calls if isinstance(calls, list) else [calls]:
            if not isinstance(call, dict) or "name" not in call:
                raise ValueError("the call has no name")
            yield {"type": "function", "function": drop_nulls(call)}
    except ValueError as error:
        raise BadRecord(shorten(str(text)), f"{rule}: {error}.", action) from error


def is_trained(message: Message, config: SourceConfig, which: str, *, images: bool = False) -> bool:
    """Return whether to train on a message, according to its flags or to `data.trained_roles`.

    `train` overrides the role, and `weight` 0 excludes the message. The training flags are removed
    from the message. `images` allows content parts of type `image`.

    Raises:
        BadRecord: the role is not in `data.chat_roles`, content is missing, or a flag is invalid.
    """
    check_message(message, config, which, images=images)
    flags = {key: message.pop(key) for key in _FLAGS if key in message}
    for key, value in flags.items():
        if value not in (0, 1) or isinstance(value, str):
            rule = f"must set {key} to 0, 1, false or true; the value is {shorten(str(value))}."
            raise BadRecord(which, rule, "Use 1 to train on the message, or 0 to mask it.")
    if len({bool(value) for value in flags.values()}) > 1:
        stated = ", ".join(f"{key} {value}" for key, value in flags.items())
        rule = f"must have consistent training keys; found {stated}."
        raise BadRecord(which, rule, "Remove one of these keys.")
    by_role = message["role"] in config.trained_roles
    if "train" in flags or "training" in flags:
        return bool(flags.get("train", flags.get("training")))
    return by_role and bool(flags.get("weight", 1))


def check_message(
    message: Message, config: SourceConfig, which: str, *, images: bool = False
) -> None:
    """Check a message; raise BadRecord if the role is unknown or the content is missing."""
    role, roles = message.get("role"), config.chat_roles
    if role not in roles:
        guess = did_you_mean(role, roles) if isinstance(role, str) else ""
        raise BadRecord(
            shorten(f"role {role} of {which}" if "role" in message else f"{which} without role"),
            f"must have a role listed in data.chat_roles: {', '.join(roles)}.",
            f"{f'Write {guess}' if guess else 'Correct it'}, or add the role to data.chat_roles.",
        )
    check_content(message, which, images=images)


def check_content(message: Message, which: str, *, images: bool = False) -> None:
    """Raise BadRecord if a message has unsupported parts, or no text, tool calls or reasoning."""
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, Mapping) or (images and part.get("type") == "image"):
            continue
        if part.get("type") in _MEDIA:
            rule = f"must have text content; parts of type {part['type']} are not supported."
            raise BadRecord(which, rule, "Remove the record or this part of the message.")
    if isinstance(content, str | list) or (
        "content" not in message
        and any(has_value(message.get(key)) for key in _CALL_AND_REASONING_KEYS)
    ):
        return
    raise BadRecord(
        which,
        f"must have text content; the content is of type {type(content).__name__}."
        if "content" in message
        else f"must have content or tool_calls; its keys are {', '.join(map(str, message))}.",
        'Write {"role": "user", "content": "..."}.',
    )


# Tools and template settings.


def tools_of(fields: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a record's list of tools, parsed if it is JSON; raise BadRecord for other types."""
    entries = _from_json(fields.get(name))
    if isinstance(entries, list | tuple):
        tools = [_from_json(tool) for tool in entries]
        if all(isinstance(tool, Mapping) for tool in tools):
            return [
                tool if isinstance(value, str) else drop_nulls(tool)
                for tool, value in zip(tools, entries, strict=True)
            ]
    elif entries is None:
        return None
    rule = f"must have a list of objects in {name}, or such a list encoded as JSON."
    action = 'Write it as [{"type": "function", "function": {"name": "...", ...}}, ...].'
    raise BadRecord(shorten(str(fields[name])), rule, action)


def settings_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template settings of a record; raise BadRecord for reserved names."""
    content = _from_json(fields.get(SETTINGS))
    if content is None:
        return {}
    if isinstance(content, Mapping):
        settings = drop_nulls(content)
        if not any(name in settings for name in _RESERVED):
            return settings
    rule = f"must have an object in {SETTINGS}, without the keys {', '.join(_RESERVED)}."
    raise BadRecord(shorten(str(fields[SETTINGS])), rule, 'Write it as {"enable_thinking": false}.')


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, _ANYTHING, most_depth=_MAX_JSON_DEPTH) if value.strip() else None
    except ValueError:
        return value
