"""Preference pairs as documents: a chosen and a rejected response to the same prompt.

A pair is one document with two halves: the prompt with the chosen response, followed by the prompt
with the rejected response. A packing strategy that does not split documents therefore keeps both
halves in one sequence. Only response tokens are trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat import ChatDocuments, ConversationEncoder, wrap_record_errors
from maxpipe.data.chat_records import (
    check_mapping,
    columns_of,
    is_trained,
    message_of_text,
    messages_field_name,
    parse_messages,
    parse_system_message,
    read_field,
    tools_and_settings,
    unread_field_names,
)
from maxpipe.data.documents import DocumentIndex, EncodedDocument
from maxpipe.data.formats.files import digest
from maxpipe.data.formats.record_text import BadRecord, shorten
from maxpipe.data.sources import Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, Message
from maxpipe.errors import Code, ConfigError
from maxpipe.io.formatting import pluralize

TRUNCATED, DROPPED, IDENTICAL = 1, 2, 4
"""Bits of `EncodedDocument.marks` for pairs that are truncated, dropped or have equal responses."""
HALVES = ("chosen", "rejected")

TextOrMessages = str | list[Message]


class PreferencePair(NamedTuple):
    """A prompt and two responses. All three are strings or lists of messages."""

    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    template_input: ChatInput
    """Tools, template settings and unread fields of the record."""


class PairEncoder:
    """Encoder for the preference pairs in a source. Thread-safe."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, config: SourceConfig, sequence_length: int
    ):
        self.source = source
        self.tokenizer = tokenizer
        self._config = config
        self._max_tokens = sequence_length + 1
        """Number of tokens in a sequence: T inputs and the target of the last input."""
        has_template = bool(config.chat_template) or tokenizer.chat is not None
        self._chat = ConversationEncoder(source, tokenizer, config) if has_template else None

    @property
    def day(self) -> str:
        """See `ConversationEncoder`."""
        return "" if self._chat is None else self._chat.day

    @day.setter
    def day(self, day: str) -> None:
        if self._chat is not None:
            self._chat.day = day

    def encode(self, document: int) -> EncodedDocument:
        """Return the token ids and the loss mask of both halves; empty for a dropped pair.

        Raises:
            UnreadableRecord: a prompt or response is missing, or the template cannot render the
                record.
        """
        with wrap_record_errors(self.source, document):
            pair = pair_of(self.source.record(document), self._config)
            halves = [
                self._encode_half(pair, response) for response in (pair.chosen, pair.rejected)
            ]
            for name, half in zip(HALVES, halves, strict=True):
                if not _has_target(half):
                    rule = f"must have two responses to train on: {name} has no token to train on."
                    action = "Remove the record, or correct the chat template."
                    raise BadRecord("", rule, action)
            return self._join_halves(halves)

    def _encode_half(self, pair: PreferencePair, response: TextOrMessages) -> EncodedDocument:
        prompt, chat = pair.prompt, pair.template_input
        if isinstance(prompt, str) and isinstance(response, str):
            prompt_ids, response_ids = self.tokenizer.encode_batch([_text(prompt), _text(response)])
            begin, end = [self.tokenizer.begin_id], [self.tokenizer.end_id]
            ids = np.concatenate([begin, prompt_ids, response_ids, end]).astype(np.int32)
            names = (self._config.tools_field if chat.tools else "", *chat.settings)
            keys = (*chat.unread, *filter(None, names))
            return EncodedDocument(ids, np.arange(len(ids)) > len(prompt_ids), unread=keys)
        if self._chat is None:
            rule = "must be strings, or have a chat template: the tokenizer folder has none."
            action = (
                "Set data.chat_template to a Jinja file, or tokenizer.kind=auto and "
                "tokenizer.path to a model folder with a chat template."
            )
            raise BadRecord("lists of messages", rule, action)
        first = [dict(turn) for turn in _messages(prompt, "user")]
        last = [dict(turn) for turn in _messages(response, "assistant")]
        for number, message in enumerate(first, 1):
            is_trained(message, self._config, f"message {number} of the prompt")
        trained = [
            number
            for number, message in enumerate(last, len(first))
            if is_trained(message, self._config, f"message {number + 1}")
        ]
        return self._chat.encode_conversation(
            chat._replace(messages=[*first, *last], trained=trained)
        )

    def _join_halves(self, halves: Sequence[EncodedDocument]) -> EncodedDocument:
        sizes, marks = [len(half.ids) for half in halves], halves[0].marks | halves[1].marks
        unread = tuple(sorted({*halves[0].unread, *halves[1].unread}))
        if sum(sizes) > self._max_tokens:
            if self._config.long_pairs == "error":
                rule = f"must fit in a sequence of {self._max_tokens} tokens with "
                rule += "data.long_pairs=error."
                action = "Set data.long_pairs to truncate or drop, or a larger "
                action += "train.sequence_length."
                raise BadRecord(f"{sizes[0]} + {sizes[1]} tokens", rule, action)
            most = self._max_tokens
            first = min(sizes[0], max(most - most // 2, most - sizes[1]))
            kept_sizes = first, min(sizes[1], most - first)
            halves = [
                EncodedDocument(half.ids[:size], half.trained[:size])  # type: ignore[index]
                for half, size in zip(halves, kept_sizes, strict=True)
            ]
            if self._config.long_pairs == "drop" or not all(map(_has_target, halves)):
                empty = np.zeros(0, np.int32), np.zeros(0, bool)
                return EncodedDocument(*empty, marks=DROPPED, unread=unread)
            marks |= TRUNCATED
        marks |= IDENTICAL if np.array_equal(halves[0].ids, halves[1].ids) else 0
        ids = np.concatenate([half.ids for half in halves])
        trained = np.concatenate([half.trained for half in halves])  # type: ignore[arg-type]
        return EncodedDocument(
            ids, trained, second_half_start=len(halves[0].ids), marks=marks, unread=unread
        )

    def check(self, index: DocumentIndex) -> None:
        """Raise ConfigError if all pairs are too long and were dropped."""
        if index.lengths.any():
            return
        pairs, row = pluralize(len(self.source), "pair"), f"a sequence of {self._max_tokens} tokens"
        rule = f"leaves no training examples: each of {pairs} is longer than {row}."
        action = "Set a larger train.sequence_length, or data.long_pairs=truncate."
        if self._config.long_pairs == "truncate":
            rule = f"leaves no training examples: in each of {pairs}, the prompts alone fill {row}."
            action = "Set a larger train.sequence_length, or shorten the prompts."
        raise ConfigError.one(
            Code.DATA_EMPTY, "data.long_pairs", self._config.long_pairs, rule, action
        )

    def fingerprint(self) -> str:
        """Return a digest of the settings that determine the token ids and loss masks."""
        config = self._config
        fields = [config.prompt_field, config.chosen_field, config.rejected_field]
        parts: list[Any] = [2, "pairs", fields, sorted(config.trained_roles)]
        # earlier releases named this value `stop`
        parts += ["stop" if config.long_pairs == "error" else config.long_pairs, self._max_tokens]
        if self._chat is not None:
            parts += self._chat.masking_metadata()
        return digest(parts)


def pair_of(record: object, config: SourceConfig) -> PreferencePair:
    """Return the pair in a record; raise BadRecord if a field is missing or invalid."""
    fields = check_mapping(record, config)
    keys = ("data.chosen_field", "data.rejected_field")
    given = [config.chosen_field, config.rejected_field]
    values = [read_field(fields, name, key) for name, key in zip(given, keys, strict=True)]
    names = [column for name in given for column in columns_of(fields, name)]
    if config.prompt_field:
        name = config.prompt_field
        # ShareGPT records contain the prompt in the messages field
        if name == "prompt" and name not in fields:
            other = messages_field_name(fields, "messages")
            name = other if other in fields else name
        names += columns_of(fields, name)
        try:
            prompt = read_field(fields, name, "data.prompt_field")
        except BadRecord as error:
            action = f"{error.action} Set data.prompt_field='' if both responses are full "
            raise BadRecord(error.value, error.rule, f"{action}conversations.") from error
    else:
        prompt, values = _split_common_prefix(values)
    parts: list[Any] = [prompt, *values]
    system, more = _system(fields, parts, config)
    names += more
    if system or not all(isinstance(part, str) for part in parts):
        roles = ("user", "assistant", "assistant")
        keys = ("data.prompt_field", *keys)
        parts = [
            message_of_text(value, role)
            if isinstance(value, str)
            else parse_messages(value, key, "a string or a list")
            for value, role, key in zip(parts, roles, keys, strict=True)
        ]
        parts = _strip_repeated_prompt(parts)
        parts[0] = [*system, *parts[0]]
        for name, messages in zip(("prompt", *HALVES), parts, strict=True):
            for number, message in enumerate(messages, 1):
                assert not isinstance(message, str)
                is_trained(dict(message), config, f"message {number} of {name}")
            if not messages and name != "prompt":
                rule = f"must have two responses: {name} has no message."
                raise BadRecord("", rule, "Remove the record.")
    first, second, third = parts
    tools, settings = tools_and_settings(fields, config)
    given = ChatInput([], tools, settings, (), unread_field_names(fields, names, config))
    return PreferencePair(first, second, third, given)


def _system(
    fields: Mapping[str, Any], parts: Sequence[Any], config: SourceConfig
) -> tuple[list[Message], list[str]]:
    if not config.system_field:
        return [], []
    first: Any = next((part for part in parts if not isinstance(part, str) and part), [])
    return parse_system_message(
        fields, parse_messages(first, "data.prompt_field") if first else [], config
    )


def _strip_repeated_prompt(parts: list[list[Message]]) -> list[list[Message]]:
    """Return the prompt and the responses. If both responses repeat the prompt, it is removed from
    the responses.

    Raises:
        BadRecord: the common prefix of the responses contains the prompt but does not start with
            it.
    """
    prompt, *responses = parts
    size = len(prompt)
    if size and all(len(response) > size and response[:size] == prompt for response in responses):
        return [prompt, *(response[size:] for response in responses)]
    alike = min(_common_prefix_length(*responses), *(len(response) - 1 for response in responses))
    if size == 1 and any(
        _is_same(prompt[0], response) for response in responses[0][: max(0, alike)]
    ):
        rule = (
            "must contain responses to the prompt, but both are full conversations whose common "
            "prefix contains the prompt but does not start with it."
        )
        raise BadRecord(shorten(str(prompt[0])), rule, "Set data.prompt_field=''.")
    return parts


def _is_same(one: Message, other: Message) -> bool:
    """Return whether two messages have the same role and text, ignoring surrounding whitespace."""
    text, another = one.get("content"), other.get("content")
    if not (isinstance(text, str) and isinstance(another, str)):
        return one == other
    return one.get("role") == other.get("role") and text.strip() == another.strip()


def _split_common_prefix(values: list[Any]) -> tuple[Any, list[Any]]:
    """Return the common prefix of two conversations, and the remainder of each conversation."""
    one, other = values
    if isinstance(one, str) and isinstance(other, str):
        if one == other:
            rule = (
                "must have two different responses: they are identical, so the prompt cannot be "
                "separated from the response."
            )
            raise BadRecord("", rule, "Remove the record.")
        alike = _common_prefix_length(one, other)
        # As in most tokenizers, a space belongs to the word that follows it.
        alike -= alike > 0 and one[alike - 1] == " "
        return one[:alike], [one[alike:], other[alike:]]
    lists = [
        parse_messages(value, f"data.{HALVES[number]}_field") for number, value in enumerate(values)
    ]
    alike = max(0, min(_common_prefix_length(*lists), len(lists[0]) - 1, len(lists[1]) - 1))
    return lists[0][:alike], [turns[alike:] for turns in lists]


def _common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _messages(text: TextOrMessages, role: str) -> list[Message]:
    return message_of_text(text, role) if isinstance(text, str) else text


def _text(value: str) -> str:
    """Return the text without unpaired surrogates, which encoders reject."""
    return value.encode("utf-8", "replace").decode()


def _has_target(half: EncodedDocument) -> bool:
    assert half.trained is not None
    return bool(half.trained[1:].any())


class PairDocuments(ChatDocuments):
    """Token ids of preference pairs, with a cache of recently used pairs. Thread-safe."""

    digest: str
    """Digest of all inputs on which the token ids and loss masks depend."""
    reference: np.ndarray | None = None
    """float32 [documents, 2]: log-probabilities of both responses under the initial weights of the
    run; None until computed. See `PairSequences`.
    """

    def __init__(self, pairs: PairEncoder, index: DocumentIndex):
        super().__init__(pairs, index)
        source, parts = pairs.source, [pairs.tokenizer.fingerprint(), pairs.fingerprint()]
        parts = [source.fingerprint(), source.content(), *parts]
        self.digest = digest(parts)
