"""Record keys that a run does not read, and suggested settings that read them.

Settings are tested on the first records of a source before they are suggested. The module also
formats the notes that a run prints at startup about truncated, dropped or masked documents.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.sections.source import SourceConfig, has_columns, is_template
from maxpipe.data.chat import REWRITTEN, TrainedMessage
from maxpipe.data.chat_records import conversation_of, has_value
from maxpipe.data.formats.record_text import (
    CONTEXTS,
    RESPONSES,
    SYSTEMS,
    BadRecord,
    TextExtractor,
    chat_keys,
    chat_settings,
    drop_default_keys,
    has_words,
    settings_text,
    template_of_fields,
)
from maxpipe.data.pairs import DROPPED, IDENTICAL, TRUNCATED, pair_of
from maxpipe.data.sources import Source
from maxpipe.data.tokenizers.chat import ChatInput, unread_remarks
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize

_RECORDS, _CHARACTERS = 32, 1 << 22
"""Maximum number and total length in characters of the records on which settings are tested."""
_NAMED = 20
_MAX_JOINED = 4
_TOOLS = ("tools", "functions")
_OF_TEMPLATE = ("message.tool_calls", "message.reasoning_content", "message.thinking")
"""Message keys that only a chat template can read."""
_REASONING = ("reasoning", "reasoning_content", "thinking", "thought", "cot", "complex_cot")

Fields = Mapping[str, Any]


class Trial(NamedTuple):
    """Candidate settings that may use some unread keys."""

    settings: dict[str, str]
    """Maps field names of `SourceConfig` to values."""
    names: Sequence[str]
    how: str
    """Phrase that describes in messages how the settings use the keys, such as `as tools`."""


def first_records(source: Source) -> list[Fields]:
    """Return the first records that have fields, up to the limits `_RECORDS` and `_CHARACTERS`."""
    records: list[Fields] = []
    size = 0
    for number in range(min(_RECORDS, len(source))):
        if size > _CHARACTERS:
            break
        try:
            record: Any = source.record(number)
        except ConfigError:  # the error is reported later, when all records are read
            continue
        record = record.record if isinstance(record, TrainedMessage) else record
        if isinstance(record, Mapping):
            records.append(record)
            size += len(str(record))
    return records


def suggest_settings(unread: Collection[str], source: Source, config: SourceConfig) -> str:
    """Suggest settings that use more keys of conversations or pairs; empty if none are known."""
    if not unread or config.chat == "off":
        return ""
    records = first_records(source)
    suggestions = []
    for trial in _trials(unread, records, config):
        try:
            tried = replace(config, **trial.settings)
            chats = [_parse_record(record, tried) for record in records]
        except (BadRecord, ValueError):
            continue
        if not any(name in chat.unread for chat in chats for name in trial.names):
            settings = settings_text({f"data.{key}": v for key, v in trial.settings.items()})
            suggestions.append(f"{settings} to read {' and '.join(trial.names)} {trial.how}")
    if {"chosen", "rejected"} <= {*unread} and (pairs := _pairs_of(records)):
        suggestions.append(f"{pairs} to read chosen and rejected as preference pairs")
    lines = [f"Set {', and '.join(suggestions)}."] if suggestions else []
    of_template = [key for key in unread if key in (config.tools_field, *_OF_TEMPLATE)]
    if of_template:
        names = " and ".join(sorted(of_template))
        lines.append(f"Set data.chat_template to a template file that reads {names}.")
    return " ".join([*lines, *(_labels(unread, records) if config.chat == "prompt" else ())])


def columns_not_read(source: Source, config: SourceConfig) -> list[str]:
    """Return notes about text columns of the first records that no setting reads."""
    if config.chat != "off" or not has_columns(config.source):
        return []
    records = first_records(source)
    text = TextExtractor(config.text_field, config.template)
    names = dict.fromkeys(
        name for record in records for name in _unread_fields(record, text.columns)
    )
    if not names:
        return []
    columns = "this column is" if len(names) == 1 else "these columns are"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    line = f"{columns} not read: {', '.join([*names][:_NAMED])}{more}"
    actions = [*_templates(names, records, text, config), *_chats(names, records, config)]
    lines = [f"Set {', or '.join(actions)}."] if actions else []
    return [". ".join([line, *lines, *_labels(names, records)])]


def _templates(
    names: Collection[str], records: Sequence[Fields], text: TextExtractor, config: SourceConfig
) -> Iterator[str]:
    try:
        texts = [text(record) for record in records]
    except BadRecord:
        return
    joined = [
        name
        for name in names
        if _is_content(name, records)
        and not all(
            str(record.get(name) or "").strip() in of
            for record, of in zip(records, texts, strict=True)
        )
    ]
    first = config.template or _as_template(config.text_field)
    more = template_of_fields(joined[:_MAX_JOINED])
    template = rf"{first}\n{more}"
    if not (first and more and _can_be_joined(template, records)):
        return
    shown = " and ".join(joined[:_MAX_JOINED])
    yield f"data.template={shlex.quote(template)} to read {shown}"


def _chats(
    names: Collection[str], records: Sequence[Fields], config: SourceConfig
) -> Iterator[str]:
    """Yield settings that use some of these columns as conversations or preference pairs."""
    keys = chat_keys(records[0])
    fields = {
        key.removeprefix("data."): value for key, value in keys.items() if key.startswith("data.")
    }
    try:
        if not fields or all(
            {*names} <= {*_parse_record(record, replace(config, **fields)).unread}
            for record in records
        ):
            return
    except (BadRecord, ValueError):
        return
    kind = "pairs" if keys["data.chat"] == "pairs" else "conversations"
    yield f"{settings_text(drop_default_keys(keys))} to read {kind}"


def _labels(names: Collection[str], records: Sequence[Fields]) -> list[str]:
    """Return a warning if records whose `label` is false would be used for training."""
    labels = [record.get("label") for record in records] if "label" in names else []
    is_binary = all(label is None or isinstance(label, bool) for label in labels)
    if not is_binary or all(label is not False for label in labels):
        return []
    return ["Responses whose label is false are also trained on: remove these records."]


def _unread_fields(record: Fields, read: Sequence[str]) -> Iterator[str]:
    """Yield the non-empty unread fields, and the unread keys of objects that are read in part."""
    for name, value in record.items():
        if name in read or not has_value(value):
            continue
        parts = [path for path in read if path.startswith(f"{name}.")]
        if parts and isinstance(value, Mapping):
            inner = [f"{name}.{key}" for key in value if has_value(value[key])]
            yield from (path for path in inner if path not in read)
        else:
            yield str(name)


def _can_be_joined(template: str, records: Sequence[Fields]) -> bool:
    try:
        for record in records:
            TextExtractor(template=template)(record)
    except BadRecord:
        return False
    return True


# Candidate settings to test.


def _trials(
    unread: Collection[str], records: Sequence[Fields], config: SourceConfig
) -> Iterator[Trial]:
    names = [key for key in unread if any(has_value(record.get(key)) for record in records)]
    for name in names:
        if name.lower() in SYSTEMS and not config.system_field:
            yield Trial({"system_field": name}, [name], "as the system message")
        elif name.lower() in _TOOLS and name != config.tools_field:
            yield Trial({"tools_field": name}, [name], "as tools")
    texts = [name for name in names if name.lower() not in SYSTEMS and _is_content(name, records)]
    texts = [text for text in texts if not _is_in_messages(text, records, config)]
    if config.chat == "messages":
        contexts = [text for text in texts if text.lower() in CONTEXTS and not config.system_field]
        if contexts:
            yield Trial({"system_field": contexts[0]}, contexts[:1], "as the system message")
        return
    thoughts = [text for text in texts if text.lower() in _REASONING]
    responses = [text for text in texts if text.lower() in RESPONSES]
    others = [text for text in texts if text not in (*thoughts, *responses)][:_MAX_JOINED]
    if others and config.prompt_field:
        template = rf"{_as_template(config.prompt_field)}\n{template_of_fields(others)}"
        yield Trial({"prompt_field": template}, others, "in the prompt")
    if config.chat == "prompt" and (thoughts or responses):
        lines = [rf"<think>\n{_as_template(thought)}\n</think>" for thought in thoughts[:1]]
        lines += [_as_template(name) for name in (config.response_field, *responses)]
        names = [*thoughts[:1], *responses]
        yield Trial({"response_field": r"\n".join(lines)}, names, "in the response")


def _as_template(field: str) -> str:
    return field if is_template(field) else template_of_fields([field])


def _is_content(name: str, records: Sequence[Fields]) -> bool:
    texts = [record[name] for record in records if has_value(record.get(name))]
    if not texts or not all(isinstance(text, str) for text in texts):
        return False
    return name.lower() in (*CONTEXTS, *_REASONING) or any(map(has_words, texts))


def _is_in_messages(name: str, records: Sequence[Fields], config: SourceConfig) -> bool:
    for record in records:
        if not has_value(record.get(name)):
            continue
        try:
            text = "\n".join(
                str(message.get("content")) for message in _parse_record(record, config).messages
            )
        except BadRecord:
            return False
        if record[name].strip() not in text:
            return False
    return True


def _parse_record(record: Fields, config: SourceConfig) -> ChatInput:
    if config.chat != "pairs":
        return conversation_of(record, config)
    pair = pair_of(record, config)
    parts = [pair.prompt, pair.chosen, pair.rejected]
    messages = [
        message
        for part in parts
        for message in ([{"content": part}] if isinstance(part, str) else part)
    ]
    return pair.template_input._replace(messages=messages)


def _pairs_of(records: Sequence[Fields]) -> str:
    """Return settings that read every record as a preference pair, or "" if there are none."""
    settings = {chat_settings(record) for record in records}
    return settings.pop() if len(settings) == 1 and "data.chat=pairs" in min(settings) else ""


_MARK_REMARKS = {
    TRUNCATED: "are longer than a sequence and are truncated: see data.long_pairs",
    DROPPED: "are longer than a sequence and are dropped: see data.long_pairs",
    IDENTICAL: "have two identical responses and do not affect training",
    REWRITTEN: "have earlier responses that the chat template rewrites when later messages follow: "
    "these responses are context only and not trained on, see data.rewritten_history",
}
_POLICY_REMARKS = {
    "truncate": "truncated to one",
    "drop": "dropped",
    "split": "split across sequences, so a response may be trained on without its prompt",
}


class LongConversations(NamedTuple):
    """Statistics of the conversations that are longer than a sequence."""

    policy: str
    """Value of `data.long_conversations`."""
    number: int
    left_out: int = 0
    """Number of conversations that have no tokens left after the policy is applied."""


def marks_of(marks: np.ndarray | None) -> dict[int, int]:
    """Return the number of documents with each mark, given the `marks` of all documents."""
    if marks is None:
        return {}
    return {mark: int(np.count_nonzero(marks & mark)) for mark in _MARK_REMARKS}


def remarks(
    what: str,
    num_documents: int,
    unread: Mapping[str, int],
    marks: Mapping[int, int],
    long: LongConversations | None = None,
    packing: str = "",
    action: str = "",
) -> list[str]:
    """Return notes about documents, which are called `what` in the notes. `action` suggests
    settings for the `unread` keys.
    """
    total = pluralize(num_documents, what)
    lines = unread_remarks(unread, total, action)
    lines += [
        f"{marks[mark]} of {total} {_MARK_REMARKS[mark]}"
        for mark in _MARK_REMARKS
        if marks.get(mark)
    ]
    if long is not None and long.number and long.policy in _POLICY_REMARKS:
        words = f"{long.number} of {total} longer than a sequence: {_POLICY_REMARKS[long.policy]}"
        if long.left_out and long.policy != "drop":
            words += f"; {long.left_out} dropped for having no tokens left to train on"
        lines.append(f"{words}: see data.long_conversations")
    if packing == "concatenate":
        lines.append(
            f"data.packing=concatenate splits {total} across sequences, so a response may be "
            "trained on without its prompt: data.packing=best_fit does not split them"
        )
    return lines
