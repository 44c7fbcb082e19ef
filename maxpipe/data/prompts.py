"""Prompts for reinforcement learning, by the number of a sample.

A file of prompts takes the place of documents: its records are the prompts, each as often in a row
as a group has completions. So order, epochs and position are those of all other data, and
the step alone says which prompts it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maxpipe.boundary import files
from maxpipe.boundary.typed import parse
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.ramp import Ramp
from maxpipe.config.schema import DataConfig
from maxpipe.config.tuning_schema import GrpoConfig
from maxpipe.data.chat_records import (
    check_content,
    listed,
    messages_name,
    system_of,
    tools_and_settings,
    unread,
)
from maxpipe.data.documents import Encoded
from maxpipe.data.formats.text_of import BadRecord
from maxpipe.data.loader import Datasets, Ending, Loader
from maxpipe.data.packing import Permutation, Piece, assembled
from maxpipe.data.stream import Part, Stream
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.chat_process import ChatInput
from maxpipe.data.tokenizers.files import naming
from maxpipe.errors import ConfigError

_KEY = "grpo.prompts"
_MAX_BYTES = 1 << 28
_SHOWN = 40
Check = Callable[[Mapping[str, Any]], object]
"""Raises ValueError for a record without what it needs."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, and what its completions are rewarded by."""

    record: Mapping[str, Any]
    """The object of its line."""
    text: str
    """As people read it: of a conversation the last message."""
    ids: np.ndarray
    """int32: its tokens, as a document of the model begins."""
    where: str
    """File and line."""


class PromptRows:
    """Each prompt `group_size` times in a row, one in each sequence: see `Sequences`."""

    def __init__(
        self, prompts: list[PromptRecord], group_size: int, sequence_length: int, pad_id: int
    ):
        self.prompts = prompts
        self.group_size = group_size
        self.sequence_length = sequence_length
        self.pad_id = pad_id
        self.lengths = np.array([len(each.ids) for each in prompts], np.int64)
        self.num_tokens = int(self.lengths.sum())
        self.num_targets = 0

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = index // self.group_size
        piece = Piece(number, 0, self.size(number))
        return assembled(_Untrained(self), [piece], self.sequence_length)

    def shuffled(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """Groups in another order, each with its members as they are."""
        order, size = Permutation(len(self.prompts), *key), self.group_size
        return lambda indices: order(indices // size) * size + indices % size

    def padding(self) -> dict[str, np.ndarray]:
        return assembled(_Untrained(self), (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        return [index // self.group_size]

    def where(self, document: int) -> str:
        return self.prompts[document].where

    def size(self, document: int) -> int:
        return int(self.lengths[document])


class _Untrained:
    """The prompts as documents of which no token counts."""

    def __init__(self, rows: PromptRows):
        self._rows = rows
        self.lengths, self.pad_id, self.where = rows.lengths, rows.pad_id, rows.where

    def __getitem__(self, document: int) -> Encoded:
        ids = self._rows.prompts[document].ids
        return Encoded(ids, np.zeros(len(ids), bool))


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
    """The prompts of a run as what it reads; `check` is asked about each record.

    `reward` is the function that rewards completions: a run resumes with the same. `template`
    renders prompts that are conversations.

    Raises:
        ConfigError: the file cannot be used, or a prompt is too long.
    """
    content = _content(config.prompts)
    records = _records(content, config.prompts, check)
    prompts = _encoded(records, tokenizer, template)
    _check_room(prompts, config, sequence_length)
    rows = PromptRows(prompts, config.group_size, sequence_length, tokenizer.pad_id)
    ramp = Ramp((), batch_size)
    facts = {
        "source": "prompts",
        "documents": len(prompts),
        "tokens": rows.num_tokens,
        "source_digest": hashlib.sha256(content).hexdigest(),
        "tokenizer": tokenizer.fingerprint(),
        "seed": seed,
        "sequence_length": sequence_length,
        "group_size": config.group_size,
        "updates_per_rollout": config.updates_per_rollout,
        "reward": reward,
        **ramp.facts(),
    }
    loader = Loader(
        Stream([Part("", rows, seed)], repeat=True),
        ramp=ramp,
        threads=data.threads,
        prefetch_batches=data.prefetch_batches,
        fingerprint=facts,
        ending=Ending("repeat", {"": len(rows)}, None),
    )
    return Datasets(
        train=loader,
        validation=None,
        tokenizer=tokenizer,
        unigram_entropy=None,
        unreadable=0,
        sets={},
        corpora=None,
    )


def _content(path: str) -> bytes:
    try:
        return files.read(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError.one(
            _KEY,
            path,
            f"must be a file that can be read: {error.strerror or error}.",
            'Name a file with lines such as {"prompt": "3+4=", "answer": "7"}.',
        ) from error


class _Parsed(NamedTuple):
    """A line that is not blank."""

    where: str
    """File and line."""
    record: dict[str, Any]
    chat: ChatInput | None
    """The conversation; None of a text."""

    @property
    def said(self) -> list[str]:
        """The text of each message."""
        if self.chat is None:
            return [self.record["prompt"]]
        found = [each.get("content", "") for each in self.chat.messages]
        return [each if isinstance(each, str) else json.dumps(each) for each in found]


def _records(content: bytes, path: str, check: Check) -> list[_Parsed]:
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse(line, dict[str, Any])
            chat = None if isinstance(record.get("prompt"), str) else chat_of(record)
            parsed = _Parsed(f"{path}, line {number}", record, chat)
            for each in parsed.said:
                each.encode()  # a JSON string may hold half of a surrogate pair
            check(record)
        except ValueError as error:  # that of an encoding, too
            raise ConfigError.one(
                f"{_KEY}: {path}, line {number}",
                None,
                f"must be an object with a prompt that can be rewarded: {error}.",
                "Correct the line, or take it out.",
            ) from error
        found.append(parsed)
    if not found:
        raise ConfigError.one(
            _KEY, path, "holds no prompt: each line that is not blank is one.", "Write some."
        )
    return found


def chat_of(record: Mapping[str, Any]) -> ChatInput:
    """The conversation of a record that has one: in `messages`, `prompt`, or as ShareGPT has it.

    Raises:
        ValueError: it has none.
    """
    config = SourceConfig(chat="messages")
    name = messages_name(record, "messages")
    if "prompt" in record and record.get(name) is None:
        name = "prompt"
        if not isinstance(record[name], list):
            kind = type(record[name]).__name__
            raise ValueError(f"its `prompt` is of type {kind}, neither a text nor a list")
    if not isinstance(record.get(name), list) or not record[name]:
        raise ValueError("it has neither a text `prompt` nor a list `messages`")
    try:
        messages = listed(record[name], name)
        first, _ = system_of(record, messages, config, is_sharegpt=name == "conversations")
        messages = [*first, *messages]
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} lacks a text `role`")
            check_content(message, f"message {number}")
        tools, settings = tools_and_settings(record, config)
    except BadRecord as error:
        raise ValueError(" ".join(filter(None, (error.given, error.rule)))) from error
    return ChatInput(messages, tools, settings, (), unread(record, [name], config))


def _encoded(
    records: list[_Parsed], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[PromptRecord]:
    texts = [each.record["prompt"] for each in records if each.chat is None]
    # A reward may read any other key of a record.
    chats = [each.chat._replace(unread=()) for each in records if each.chat is not None]
    if chats and template is None:
        raise ConfigError.one(
            _KEY,
            None,
            "has `messages`, which need the chat template of a model's folder, and the tokenizer "
            "has none.",
            "Give each line a `prompt`, or name the folder: tokenizer.kind=auto "
            "tokenizer.path=FOLDER.",
        )
    places = [each.where for each in records if each.chat is None]
    with naming(lambda number: places[number]):
        plain = iter(tokenizer.encode_batch(texts))
    rendered = iter(template.render(chats) if chats and template else ())
    found = []
    for each in records:
        if each.chat is None:
            ids = np.append(tokenizer.begin_id, next(plain))
        else:
            with naming(lambda _, where=each.where: where):
                ids = tokenizer.encode_chat(next(rendered))
        if not len(ids):
            rule = "must be messages of which the chat template makes a text, and it makes none."
            raise ConfigError.one(f"{_KEY}: {each.where}", None, rule, "Correct the messages.")
        found.append(PromptRecord(each.record, each.said[-1], ids.astype(np.int32), each.where))
    return found


def _check_room(prompts: list[PromptRecord], config: GrpoConfig, sequence_length: int) -> None:
    longest = max(prompts, key=lambda each: len(each.ids))
    size = len(longest.ids)
    if size + config.max_tokens > sequence_length:
        text = longest.text
        raise ConfigError.one(
            f"{_KEY}: {longest.where}",
            repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else ""),
            f"has {size} tokens, the begin token included, and with grpo.max_tokens "
            f"({config.max_tokens}) must fit in train.sequence_length ({sequence_length}).",
            f"Set train.sequence_length={size + config.max_tokens} or more, a smaller "
            "grpo.max_tokens, or take the prompt out.",
        )
