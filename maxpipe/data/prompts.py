"""Read prompts and conversations from files, for generation and for reinforcement learning.

A prompt file for generation has one prompt per line, as plain text or as a JSON object.

Instead of documents, a reinforcement-learning run reads records of a prompt file by sample number.
Each prompt is repeated once per completion in its group. Order, epochs and data position are
handled as for other data: the step number alone determines the prompts of a step.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.config.sections.source import SourceConfig, is_template
from maxpipe.config.sections.train import BatchRamp
from maxpipe.data.chat_records import (
    check_content,
    fields_of,
    has_value,
    message_of_text,
    messages_field_name,
    parse_messages,
    parse_system_message,
    read_field,
    tools_and_settings,
    unread_field_names,
)
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.formats.record_text import (
    CONTEXTS,
    SYSTEMS,
    BadRecord,
    chat_keys,
    settings_text,
    template_of_fields,
)
from maxpipe.data.loader import Datasets, Loader, StreamEnd
from maxpipe.data.mixture import SourceSequences, Stream
from maxpipe.data.packing import Permutation, TokenSpan, assemble_sequence
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.data.tokenizers.files import wrap_text_errors
from maxpipe.errors import Code, ConfigError
from maxpipe.io import files
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json

# --- prompts for generation ---------------------------------------------------

_GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""
MAX_BYTES = 1 << 28
"""Maximum size of a prompt file in bytes."""
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
        if "messages" not in record and isinstance(record.get("prompt"), str):
            record = {**record, "prompt": [*user_chat(record["prompt"]).messages]}
        return chat_of(record)
    except ValueError as error:
        raise ConfigError.one(
            Code.GEN_PROMPT,
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
            Code.DATA_UNREADABLE,
            where,
            None,
            f"must be a readable file: {error.strerror or error}.",
            "Use a text file with one prompt per line, or a JSON Lines file with `prompt` keys.",
        ) from error


def parse_prompts(raw: bytes, where: str, *, is_json: bool = False) -> list[str]:
    """Parse the prompts in the content of a file. See `read_prompts`."""
    lines = _lines(raw, where)
    return [parse_prompt(line, f"{where}, line {place}", is_json=is_json) for place, line in lines]


def _lines(raw: bytes, where: str) -> list[tuple[int, bytes]]:
    lines = [(place, line) for place, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError.one(
            Code.DATA_EMPTY,
            where,
            None,
            "must have at least one non-blank line.",
            "Write a prompt.",
        )
    return lines


def parse_prompt(line: bytes, where: str, *, is_json: bool = False) -> str:
    """Parse one line of a prompt file. See `read_prompts`."""
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
            Code.GEN_PROMPT, where, None, f"{rule}: {error}.", "Correct the line, or remove it."
        ) from error


# --- prompts for reinforcement learning ---------------------------------------

_LOG = logging.getLogger(__name__)

_KEY = "grpo.prompts"
_PROMPT = "prompt"
_SHOWN = 40
Check = Callable[[Mapping[str, Any]], object]
"""Function that raises ValueError for a record that the reward function cannot use."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, with the record that the reward function reads."""

    record: Mapping[str, Any]
    """Parsed JSON object from the line of the prompt file."""
    text: str
    """Text to display; for a conversation, the text of the last message."""
    ids: np.ndarray
    """int32 [tokens]: token ids of the prompt, including BOS."""
    where: str
    """File and line of the prompt."""


class PromptSequences:
    """Sequences with one prompt each. A prompt is repeated `group_size` times; see `Sequences`."""

    def __init__(
        self, prompts: list[PromptRecord], group_size: int, sequence_length: int, pad_id: int
    ):
        self.prompts = prompts
        self.group_size = group_size
        self.sequence_length = sequence_length
        self.pad_id = pad_id
        self.lengths = np.array([len(prompt.ids) for prompt in prompts], np.int64)
        self.num_tokens = int(self.lengths.sum())
        self.num_targets = 0

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = index // self.group_size
        piece = TokenSpan(number, 0, self.size(number))
        return assemble_sequence(_PromptDocuments(self), [piece], self.sequence_length)

    def epoch_permutation(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return a permutation that shuffles the groups and keeps the order within each group."""
        order, size = Permutation(len(self.prompts), *key), self.group_size
        return lambda indices: order(indices // size) * size + indices % size

    def padding(self) -> dict[str, np.ndarray]:
        return assemble_sequence(_PromptDocuments(self), (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        return [index // self.group_size]

    def where(self, document: int) -> str:
        return self.prompts[document].where

    def size(self, document: int) -> int:
        return int(self.lengths[document])


class _PromptDocuments:
    def __init__(self, rows: PromptSequences):
        self._rows = rows
        self.lengths, self.pad_id, self.where = rows.lengths, rows.pad_id, rows.where

    def __getitem__(self, document: int) -> EncodedDocument:
        ids = self._rows.prompts[document].ids
        return EncodedDocument(ids, np.zeros(len(ids), bool))


def build_prompts(
    config: GrpoConfig,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    check: Check,
    reward: str,
    template: ChatTemplate | None,
) -> Datasets:
    """Build the datasets of a run that reads prompts. `check` is called for each record.

    `reward` is the fingerprint of the reward function, which becomes part of the data fingerprint.
    `template` renders the prompts that are conversations.

    Raises:
        ConfigError: the prompt file cannot be used, or a prompt is too long.
    """
    prompts, digest = read_prompt_records(config.prompts, _KEY, check, data, tokenizer, template)
    check_prompt_lengths(prompts, config.max_tokens, sequence_length, _KEY, "grpo.max_tokens")
    rows = PromptSequences(prompts, config.group_size, sequence_length, tokenizer.pad_id)
    ramp = BatchRamp((), batch_size)
    facts = {
        "source": "prompts",
        "documents": len(prompts),
        "tokens": rows.num_tokens,
        "source_digest": digest,
        "tokenizer": tokenizer.fingerprint(),
        "seed": seed,
        "sequence_length": sequence_length,
        "group_size": config.group_size,
        "updates_per_rollout": config.updates_per_rollout,
        "reward": reward,
        **_field_metadata(data),
        **ramp.metadata(),
    }
    loader = Loader(
        Stream([SourceSequences("", rows, seed)], repeat=True),
        ramp=ramp,
        threads=data.threads,
        prefetch_batches=data.prefetch_batches,
        fingerprint=facts,
        ending=StreamEnd("repeat", {"": len(rows)}, None),
    )
    return Datasets(
        train=loader,
        validation=None,
        tokenizer=tokenizer,
        unigram_entropy=None,
        unreadable=0,
        validation_sets={},
        corpora=None,
    )


def read_prompt_records(
    path: str,
    key: str,
    check: Check,
    data: SourceConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    chat: bool = False,
) -> tuple[list[PromptRecord], str]:
    """Read and tokenize the prompts in a JSON Lines file, and return the file's SHA-256 digest.

    Args:
        path: file with one JSON object per line; see `grpo.prompts`.
        key: config key or option that names the file, for error messages.
        check: called for each record; raises ValueError for a record that cannot be scored.
        data: settings that select the fields of the prompt.
        tokenizer: tokenizer of the model.
        template: template that renders prompts that are conversations.
        chat: whether string prompts are rendered as user messages.

    Raises:
        ConfigError: the file cannot be read, or a line is not a valid prompt.
    """
    content = _content(path, key).removeprefix(codecs.BOM_UTF8)
    if content.startswith(_GZIP):
        rule, action = "must be uncompressed text, but is a gzip file.", f"Run `gunzip -k {path}`."
        raise ConfigError.one(Code.DATA_UNREADABLE, key, path, rule, action)
    records = _records(content, path, check, data, key)
    if chat:
        records = [
            each._replace(prompt=user_chat(each.prompt)) if isinstance(each.prompt, str) else each
            for each in records
        ]
    return _encode_prompts(records, tokenizer, template, key), hashlib.sha256(content).hexdigest()


def _field_metadata(data: SourceConfig) -> dict[str, str]:
    """Return prompt fields for the fingerprint. As in earlier releases, defaults are omitted."""
    fields = {"prompt_field": data.prompt_field, "system_field": data.system_field}
    return {key: value for key, value in fields.items() if value not in ("", _PROMPT)}


def _content(path: str, key: str) -> bytes:
    try:
        return files.read(path, MAX_BYTES)
    except OSError as error:
        rule = f"must be a readable file: {error.strerror or error}."
        name = key.rpartition(" ")[2]
        action = f'Set {name} to a file with lines such as {{"prompt": "3+4=", "answer": "7"}}.'
        raise ConfigError.one(Code.DATA_UNREADABLE, key, path, rule, action) from error


class _PromptLine(NamedTuple):
    where: str
    """File and line of the prompt."""
    record: dict[str, Any]
    prompt: str | ChatInput
    """Prompt as text or as a conversation."""

    @property
    def chat(self) -> ChatInput | None:
        return None if isinstance(self.prompt, str) else self.prompt

    @property
    def message_texts(self) -> list[str]:
        """Text of each message."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        contents = [message.get("content", "") for message in self.prompt.messages]
        return [part if isinstance(part, str) else json.dumps(part) for part in contents]


def _records(
    content: bytes, path: str, check: Check, data: SourceConfig, key: str
) -> list[_PromptLine]:
    lines: list[_PromptLine] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, dict[str, Any])
            parsed = _PromptLine(f"{path}, line {number}", record, prompt_of(record, data))
            for text in parsed.message_texts:
                text.encode()  # a JSON string may contain an unpaired surrogate
            check(record)
        except ValueError as error:  # includes encoding errors
            rule = f"must be an object with a prompt that the reward function accepts: {error}."
            action = "Correct or remove the line."
            raise ConfigError.one(
                Code.DATA_RECORD, f"{key}: {path}, line {number}", None, rule, action
            ) from error
        lines.append(parsed)
    if not lines:
        raise ConfigError.one(
            Code.DATA_EMPTY,
            key,
            path,
            "contains no prompts: each non-blank line must contain one.",
            "Add prompts.",
        )
    if remark := _unread_fields_remark([part.record for part in lines], data):
        _LOG.warning("%s: %s", path, remark)
    return lines


def _unread_fields_remark(records: Sequence[Mapping[str, Any]], data: SourceConfig) -> str:
    """Return a note about unread fields that usually belong to the prompt."""
    fields_read = {
        field for name in (data.prompt_field, data.system_field) for field in fields_of(name)
    }
    names = dict.fromkeys(name for record in records for name in record if name not in fields_read)
    counts = {name: sum(has_value(record.get(name)) for record in records) for name in names}
    systems = [name for name in names if name.lower() in SYSTEMS and counts[name]]
    contexts = [name for name in names if name.lower() in CONTEXTS and counts[name]]
    # The field `system` of ShareGPT records is read by default.
    if data.system_field or all("conversations" in record for record in records):
        systems = []
    field = data.prompt_field or _PROMPT
    if not all(
        isinstance(record.get(name), str) for record in records for name in fields_of(field)
    ):
        contexts = []
    settings = {"data.system_field": systems[0]} if systems else {}
    if contexts and (more := template_of_fields(contexts)):
        first = field if is_template(field) else template_of_fields([field])
        settings["data.prompt_field"] = rf"{first}\n{more}"
    if not settings:
        return ""
    shown = ", ".join(f"{name} (in {counts[name]})" for name in (*systems[:1], *contexts))
    total = pluralize(len(records), "record")
    action = f"Set {settings_text(settings)} if these keys belong to the prompt."
    return f"keys not used in the prompts of {total}: {shown}. {action}"


def prompt_of(record: Mapping[str, Any], data: SourceConfig) -> str | ChatInput:
    """Return a record's prompt, as text or as a conversation; raise ValueError if it has none."""
    name, value = data.prompt_field or _PROMPT, record.get(_PROMPT)
    try:
        if name != _PROMPT:
            value = read_field(record, name, "data.prompt_field")
            others = ("messages", "conversations")
            record = {key: item for key, item in record.items() if key not in others}
            record = {**record, _PROMPT: value}
        messages = message_of_text(value, "user") if isinstance(value, str) else None
        chat = chat_of(record) if messages is None else None
        first, _ = parse_system_message(record, chat.messages if chat else [], data)
        if chat is not None:
            return chat._replace(messages=[*first, *chat.messages]) if first else chat
        if not first:
            return str(value)
        tools, settings = tools_and_settings(record, SourceConfig(chat="messages"))
        return ChatInput([*first, *(messages or [])], tools, settings)
    except BadRecord as error:
        parts = filter(None, (error.value, error.rule, error.action))
        raise ValueError(" ".join(parts).removesuffix(".")) from error


def chat_of(record: Mapping[str, Any]) -> ChatInput:
    """Return the conversation of a prompt record; raise ValueError if it has none."""
    config = SourceConfig(chat="messages")
    name = messages_field_name(record, "messages")
    if "prompt" in record and record.get(name) is None:
        name = "prompt"
        if not isinstance(record[name], list):
            kind = type(record[name]).__name__
            raise ValueError(f"`prompt` must be a string or a list, not a value of type {kind}")
    if not isinstance(record.get(name), list) or not record[name]:
        rule = "the record has neither a string `prompt` nor a list `messages`"
        keys = chat_keys(record)
        field = keys.get("data.prompt_field") or keys.get("data.messages_field")
        setting = f"; set {settings_text({'data.prompt_field': field})}" if field else ""
        names = ", ".join(map(str, record)) or "no key"
        raise ValueError(f"{rule}; its keys: {names}{setting}")
    try:
        messages = parse_messages(record[name], name)
        first, _ = parse_system_message(
            record, messages, config, is_sharegpt=name == "conversations"
        )
        messages = [*first, *messages]
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} lacks a string `role`")
            check_content(message, f"message {number}")
        tools, settings = tools_and_settings(record, config)
    except BadRecord as error:
        raise ValueError(" ".join(filter(None, (error.value, error.rule)))) from error
    return ChatInput(messages, tools, settings, (), unread_field_names(record, [name], config))


def _encode_prompts(
    records: list[_PromptLine], tokenizer: Tokenizer, template: ChatTemplate | None, key: str
) -> list[PromptRecord]:
    texts = [record.prompt for record in records if isinstance(record.prompt, str)]
    # The reward function may read any other key of a record.
    chats = [record.chat._replace(unread=()) for record in records if record.chat is not None]
    if chats and template is None:
        rule = "has `messages`, which require the chat template of a model folder, but the "
        rule += "tokenizer has none."
        action = "Write a `prompt` in each line, or set the model folder: tokenizer.kind=auto "
        action += "tokenizer.path=FOLDER."
        raise ConfigError.one(Code.TOK_TEMPLATE, key, None, rule, action)
    places = [record.where for record in records if record.chat is None]
    with wrap_text_errors(lambda number: places[number]):
        plain = iter(tokenizer.encode_batch(texts))
    rendered = iter(template.render(chats) if chats and template else ())
    prompts = []
    for record in records:
        if record.chat is None:
            ids = np.append(tokenizer.begin_id, next(plain))
        else:
            with wrap_text_errors(lambda _, where=record.where: where):
                ids = tokenizer.encode_chat(next(rendered))
        if not len(ids):
            rule = "must be messages that the chat template renders to non-empty text."
            raise ConfigError.one(
                Code.TOK_TEMPLATE, f"{key}: {record.where}", None, rule, "Correct the messages."
            )
        prompts.append(
            PromptRecord(
                record.record, record.message_texts[-1], ids.astype(np.int32), record.where
            )
        )
    return prompts


def check_prompt_lengths(
    prompts: list[PromptRecord], max_tokens: int, sequence_length: int, key: str, tokens_key: str
) -> None:
    """Check that each prompt fits in the sequence length together with its completion.

    Args:
        prompts: the prompts.
        max_tokens: maximum length of a completion in tokens.
        sequence_length: maximum length of prompt and completion in tokens.
        key: config key or option that names the prompt file, for error messages.
        tokens_key: config key or option that sets `max_tokens`.

    Raises:
        ConfigError: the longest prompt does not fit.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    size = len(longest.ids)
    if size + max_tokens > sequence_length:
        text = longest.text
        raise ConfigError.one(
            Code.GEN_PROMPT,
            f"{key}: {longest.where}",
            repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else ""),
            f"has {size} tokens, including BOS: with {tokens_key} ({max_tokens}) "
            f"added, they must fit in train.sequence_length ({sequence_length}).",
            f"Set train.sequence_length={size + max_tokens} or more, a smaller "
            f"{tokens_key}, or remove the prompt.",
        )
