"""Records of conversations as documents: a chat template writes the text, of which some is trained.

The ids are exactly what the template writes, with its own control tokens; none is added. Which
tokens count in the loss follows from the roles of the messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxpipe.boundary import files
from maxpipe.config.data import all_sources
from maxpipe.config.data_schema import DataConfig, SourceConfig
from maxpipe.config.rules import did_you_mean
from maxpipe.data.documents import (
    DocumentIndex,
    Encoded,
    EncodedDocuments,
    digest_of,
    kept_index,
    mask_digest,
    unchanged,
)
from maxpipe.data.formats.reads import reading
from maxpipe.data.formats.text_of import BadRecord, shortened
from maxpipe.data.sources import Moved, Progress, Source, UnreadableRecord
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.chat_process import ChatProcess, RenderError
from maxpipe.data.tokenizers.offsets import touched
from maxpipe.errors import ConfigError, Problem
from maxpipe.words import counted

_MOST_TEMPLATE_BYTES = 1 << 24
_PASS_RECORDS = 256

Message = dict[str, Any]


def template_of(config: SourceConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of `data.chat_template`, or of the tokenizer's folder.

    Raises:
        ConfigError: it cannot be read, or there is none.
    """
    path = config.chat_template
    if path:
        try:
            text = files.read(path, _MOST_TEMPLATE_BYTES).decode()
        except (OSError, ValueError) as error:
            rule = f"must be a file of UTF-8 text: {getattr(error, 'strerror', None) or error}."
            action = "Set data.chat_template to the file of a Jinja template."
            raise ConfigError.one("data.chat_template", path, rule, action) from error
        return ChatTemplate(text, path, tokenizer.role_texts)
    if tokenizer.chat is None:
        raise ConfigError.one(
            "data.chat",
            config.chat,
            "needs a chat template: the tokenizer's folder has none.",
            "Set data.chat_template to a Jinja file, or put chat_template.jinja into the folder of "
            "tokenizer.path.",
        )
    return tokenizer.chat


def spoken(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a run's conversations, or where it has none that of the tokenizer's folder.

    Raises:
        ConfigError: its file cannot be read.
    """
    chats = [each for each in all_sources(data).values() if each.chat != "off"]
    return template_of(chats[0], tokenizer) if chats else tokenizer.chat


def messages_of(record: object, config: SourceConfig) -> list[Message]:
    """The messages of a record, as `data.chat` says where they are.

    Raises:
        BadRecord: a field is missing or of another type, or a role is none of `data.chat_roles`.
    """
    fields = with_fields(record, config)
    if config.chat == "messages":
        key = "data.messages_field"
        found = listed(column(fields, config.messages_field, key), key)
    else:
        asked = (config.prompt_field, "data.prompt_field", "user")
        answered = (config.response_field, "data.response_field", "assistant")
        found = []
        for name, key, role in (asked, answered):
            value = column(fields, name, key)
            found += said(value, role) if isinstance(value, str) else listed(value, key)
    if not found:
        raise BadRecord("", "must have a message: it has none.", "Remove the record.")
    for number, message in enumerate(found, 1):
        check_message(message, config, f"message {number}")
    return found


def with_fields(record: object, config: SourceConfig) -> Mapping[str, Any]:
    """The record. Raises BadRecord if it has no fields."""
    if not isinstance(record, Mapping):
        rule = f"must have fields, for data.chat={config.chat}; it is of type "
        rule += f"{type(record).__name__}."
        raise BadRecord(shortened(str(record)), rule, "Set data.chat=off if these are texts.")
    return record


def said(text: str, role: str) -> list[Message]:
    """A text as the only message."""
    return [{"role": role, "content": text}]


def column(record: Mapping[str, Any], name: str, key: str) -> Any:
    """The value of the field that `key` names. Raises BadRecord if there is none."""
    if name in record:
        return record[name]
    names = [str(each) for each in record]
    guess = did_you_mean(name, names) or (names[0] if len(names) == 1 else "")
    raise BadRecord(
        shortened(f"fields {', '.join(names) or 'none'}"),
        f"must have the field of {key} ({name}).",
        f"Set {key}={guess}." if guess else f"Set {key} to the field that has it.",
    )


def listed(value: object, key: str, what: str = "a list") -> list[Message]:
    """The messages in a field. Raises BadRecord if it has something else."""
    if isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
        return [dict(each) for each in value]
    raise BadRecord(
        shortened(str(value)),
        f"must have {what} of objects in {key}; it is of type {type(value).__name__}.",
        'Write it as [{"role": "user", "content": "..."}, ...].',
    )


def check_message(message: Message, config: SourceConfig, which: str) -> None:
    """Raises BadRecord for a message of an unknown role, or without content."""
    role, roles = message.get("role"), config.chat_roles
    if role not in roles:
        guess = did_you_mean(role, roles) if isinstance(role, str) else ""
        raise BadRecord(
            shortened(f"role {role} of {which}" if "role" in message else f"{which} without role"),
            f"must have a role of data.chat_roles: {', '.join(roles)}.",
            f"{f'Write {guess}' if guess else 'Correct it'}, or add the role to data.chat_roles.",
        )
    content = message.get("content")
    # Without content a message may be a call of tools; a list is of texts, images and so on.
    if "content" not in message or not (content is None or isinstance(content, str | list)):
        raise BadRecord(
            which,
            f"must have a text as content; it is of type {type(content).__name__}."
            if "content" in message
            else f"must have content; it has {', '.join(map(str, message))}.",
            'Write {"role": "user", "content": "..."}.',
        )


@contextlib.contextmanager
def named(source: Source, document: int) -> Iterator[None]:
    """A record that is at fault is named, as `UnreadableRecord`."""
    try:
        yield
    except BadRecord as error:
        problem = Problem(source.where(document), error.given, error.rule, error.action)
        raise UnreadableRecord([problem]) from error


class Counted(NamedTuple):
    """A conversation as ids, with what is counted of it."""

    ids: np.ndarray
    trained: np.ndarray
    raw: bytes
    """UTF-8 of what is trained."""
    digest: int
    """`digest_of` the ids, as int64."""
    marks: int
    """See `Encoded.marks`."""


class Conversations:
    """The records of a source, encoded. Safe in threads: each takes a process of its own."""

    def __init__(self, source: Source, tokenizer: Tokenizer, config: SourceConfig):
        self.source = source
        self.tokenizer = tokenizer
        self.template = template_of(config, tokenizer)
        self._config = config
        self._idle: list[ChatProcess] = []

    def encode(self, document: int) -> Encoded:
        """The ids of a record and which of them are trained.

        Raises:
            UnreadableRecord: it has no messages or the template fails with them.
        """
        with named(self.source, document):
            return self.encoded(messages_of(self.source.record(document), self._config))

    def encoded(self, messages: Sequence[Message], prompt: Sequence[Message] = ()) -> Encoded:
        """The same of messages, of which the first ones are a prompt that is not trained on.

        Raises:
            BadRecord: the template fails with them.
        """
        with self._process() as process:
            try:
                found = process.render(messages, roles=self._config.trained_roles)
                asked = process.render(prompt).text if prompt else ""
            except RenderError as error:
                raise self._refused(error) from error
            except (TypeError, ValueError) as error:
                rule = f"must have messages that JSON can hold: {error}."
                raise BadRecord("", rule, "Leave other values out.") from error
        if not found.text.startswith(asked):
            rule = f"must begin with its prompt: {self.template.path} writes the prompt alone as "
            rule += "another text than in front of a response."
            raise BadRecord("", rule, "Correct the template in a copy, for data.chat_template.")
        ids, offsets = self.tokenizer.encode_chat_offsets(found.text)
        if not len(ids):
            rule = f"must give a text: {self.template.path} writes none."
            raise BadRecord("", rule, "Remove the record, or correct the template.")
        spans = [(max(begin, len(asked)), end) for begin, end in found.spans if end > len(asked)]
        return Encoded(ids, touched(offsets, spans))

    def check(self, index: DocumentIndex) -> None:
        """Checks that some token is trained.

        Raises:
            ConfigError: none is.
        """
        if index.trained is None or index.trained.any():
            return
        raise nothing_trained(self.template.path, len(self.source))

    @contextlib.contextmanager
    def _process(self) -> Iterator[ChatProcess]:
        try:
            process = self._idle.pop()  # one operation: no other thread gets the same
        except IndexError:
            process = self.template.process()
        try:
            yield process
        finally:
            if process.is_alive:
                self._idle.append(process)

    def _refused(self, error: RenderError) -> BadRecord:
        path = self.template.path
        if error.kind != "prefix":
            rule = f"must be messages that {path} takes: {error}."
            return BadRecord("", rule, "Correct the record or the template.")
        return BadRecord(
            "",
            f"must be rendered message by message, to know what is trained: {path} writes the "
            f"first messages alone as another text than among all; {error}.",
            "Mark what is trained by {% generation %} ... {% endgeneration %} in a copy of the "
            "template, set data.chat_template to it, and data.trained_roles=[assistant].",
        )

    def fingerprint(self) -> str:
        """Digest of all that decides ids and mask, beside source and tokenizer."""
        config, template = self._config, self.template
        fields = [config.messages_field]
        if config.chat == "prompt":
            fields = [config.prompt_field, config.response_field]
        parts = [1, config.chat, fields, sorted(config.trained_roles)]
        parts += [template.template, sorted(template.tokens.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class ChatRecords(Protocol):
    """Records that are encoded as a whole; see `Conversations`. Safe in threads."""

    @property
    def source(self) -> Source: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, document: int) -> Encoded: ...

    def check(self, index: DocumentIndex) -> None: ...

    def fingerprint(self) -> str: ...


class ChatDocuments(EncodedDocuments):
    """Token ids of conversations; keeps those read last. Safe in threads."""

    def __init__(self, conversations: ChatRecords, index: DocumentIndex):
        super().__init__(conversations.source, conversations.tokenizer, index)
        self._conversations, self._masks = conversations, index.masks

    def _read(self, document: int) -> Encoded:
        found = self._conversations.encode(document)
        assert found.trained is not None and self._masks is not None
        if ids_digest(found.ids) != self._digests[document]:
            raise self._changed(document)
        if mask_digest(found.trained) != self._masks[document]:
            raise self._changed(document)
        return found


def build_chat_index(
    conversations: ChatRecords,
    cache_dir: str | None,
    moved: Moved | None = None,
    *,
    threads: int = 1,
    keep: bool = True,
) -> DocumentIndex:
    """The index of conversations; see `build_index`. Bytes are those of what is trained.

    Raises:
        ConfigError: naming a record that cannot be used, or no token is trained.
    """
    source, tokenizer = conversations.source, conversations.tokenizer
    parts = [source.fingerprint(), source.content(moved)]
    parts += [tokenizer.fingerprint(), conversations.fingerprint()]
    index = kept_index(
        ["chat", 3, *parts],
        len(source),
        cache_dir,
        lambda moved: unchanged(source, moved, _read_all(conversations, moved, threads)),
        keep=keep,
        moved=moved,
        task=f"rendering conversations of {source.name}",
    )
    conversations.check(index)
    return index


def nothing_inside(path: str | None, documents: int, chat: str) -> ConfigError:
    """The error for documents of which none has a character that would be trained on."""
    rule = f"must hold text: {counted(documents, 'document')} with nothing inside."
    action = "Set data.path to documents with text, or data.field to the field that holds it."
    if chat == "pairs":
        rule = f"must hold responses: those of {counted(documents, 'pair')} are empty."
        action = "Set data.chosen_field and data.rejected_field to the fields that hold them."
    return ConfigError.one("data.path", path, rule, action)


def nothing_trained(template: str, count: int) -> ConfigError:
    """The error for conversations of which no token is trained."""
    return ConfigError.one(
        template,
        None,
        f"must mark what is trained: none of {counted(count, 'conversation')} has any.",
        "Set data.trained_roles to roles that speak there, or correct the template's "
        "{% generation %} blocks.",
    )


def count(conversations: ChatRecords, document: int) -> Counted:
    """A record as `encode` has it, with what is counted of it; raises as that does."""
    with reading(partial(conversations.source.where, document)):
        found = conversations.encode(document)
    assert found.trained is not None
    text = conversations.tokenizer.decode(found.ids[found.trained].tolist())
    digest = ids_digest(found.ids)
    return Counted(found.ids, found.trained, text.encode(), digest, found.marks)


def ids_digest(ids: np.ndarray) -> int:
    """`digest_of` ids as int64."""
    return digest_of(ids.astype("<i8").tobytes())


def _read_all(conversations: ChatRecords, moved: Moved | None, threads: int) -> DocumentIndex:
    source = conversations.source
    lengths, trained = np.zeros(len(source), np.int64), np.zeros(len(source), np.int64)
    byte_counts, digests = np.zeros(256, np.int64), np.zeros(len(source), np.uint64)
    marks, masks = np.zeros(len(source), np.uint8), np.zeros(len(source), np.uint64)
    progress = Progress(f"rendering conversations of {source.name}", len(source), moved)

    with ThreadPoolExecutor(max(1, threads), "conversations") as pool:
        for first in range(0, len(source), _PASS_RECORDS):
            numbers = range(first, min(first + _PASS_RECORDS, len(source)))
            read = pool.map(partial(count, conversations), numbers)
            for document, found in zip(numbers, read, strict=True):
                lengths[document], trained[document] = len(found.ids), int(found.trained.sum())
                digests[document], marks[document] = found.digest, found.marks
                masks[document] = mask_digest(found.trained)
                byte_counts += np.bincount(np.frombuffer(found.raw, np.uint8), minlength=256)
            progress.update(numbers.stop)
    found_marks = marks if marks.any() else None
    return DocumentIndex(
        lengths, byte_counts, trained, digests=digests, marks=found_marks, masks=masks
    )
