"""Convert conversations to documents with a chat template, and mask tokens by message role.

The token ids are exactly the ids of the rendered text, including the control tokens of the
template. No tokens are added to the rendered text. The roles of the messages determine which tokens
the loss includes.

With `data.rewritten_history=each_turn`, every message that is trained on becomes a separate
document.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.config.image_format import ImageFormat
from maxpipe.config.sections.data import DataConfig, all_sources
from maxpipe.config.sections.source import SourceConfig, parse_template_kwargs
from maxpipe.data.chat_records import conversation_of
from maxpipe.data.documents import (
    DocumentIndex,
    EncodedDocument,
    EncodedDocuments,
    digest_of,
    load_or_build_index,
    mask_digest,
    verify_unchanged,
)
from maxpipe.data.formats.disk_cache import Arrays, CacheMessages, load_or_compute
from maxpipe.data.formats.files import digest
from maxpipe.data.formats.record_text import BadRecord
from maxpipe.data.formats.source import place_of, track_read
from maxpipe.data.images import BadImage, decode_images, expand_image_tokens, image_tokens_left
from maxpipe.data.sources import Heartbeat, Progress, Source, UnreadableRecord
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatProcess, ChatTemplate, Masking, RenderError
from maxpipe.data.tokenizers.files import wrap_text_errors
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io import files
from maxpipe.io.formatting import pluralize

_ANSWERS_VERSION = 1
_CACHE_MESSAGES = CacheMessages(
    "counting trained messages",
    "counting trained messages again",
    "the messages to train on will be counted again on the next start",
)


class TrainedMessage(NamedTuple):
    """A message that is trained on, identified by its record and its index."""

    record: Any
    number: int
    """Index of the message among the record's messages that are trained on."""


class TrainedMessageSource:
    """Source with one document for each trained message of another source; see `Source`."""

    def __init__(self, source: Source, counts: np.ndarray):
        """Create the source; `counts`, int64 [records], is the number of messages to train on in
        each record.
        """
        self._source = source
        self.ends = np.cumsum(counts)
        """int64 [records]: exclusive end index of each record's documents."""

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def unreadable(self) -> list[int]:
        return list(self._source.unreadable)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> str:
        return self._source[place_of(self.ends, index)[0]]

    def record(self, index: int) -> Any:
        record, number = place_of(self.ends, index)
        return TrainedMessage(self._source.record(record), number)

    def where(self, index: int) -> str:
        record, number = place_of(self.ends, index)
        return f"{self._source.where(record)}, trained message {number + 1}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._source.fingerprint().encode())
        digest.update(b"each_turn" + self.ends.astype("<i8").tobytes())
        return digest.hexdigest()

    def folder(self, index: int) -> str:
        return self._source.folder(place_of(self.ends, index)[0])

    def content(self, moved: Heartbeat | None = None) -> Mapping[str, str]:
        return self._source.content(moved)

    def check_unchanged(self, moved: Heartbeat | None = None) -> None:
        self._source.check_unchanged(moved)


def expand_trained_messages(
    source: Source,
    config: SourceConfig,
    cache_dir: str | None = None,
    moved: Heartbeat | None = None,
    *,
    keep: bool = False,
) -> Source:
    """Return the source; with `each_turn`, wrap it so that each trained message is a document."""
    if config.rewritten_history != "each_turn" or config.chat not in ("messages", "prompt"):
        return source

    def make(moved: Heartbeat | None) -> np.ndarray:
        counts = np.zeros(len(source), np.int64)
        progress = Progress(f"counting trained messages of {source.name}", len(source), moved)
        for number in range(len(source)):
            with wrap_record_errors(source, number):
                counts[number] = len(conversation_of(source.record(number), config).trained)
            progress.update(number + 1)
        source.check_unchanged(moved)
        return counts

    def of(arrays: Arrays) -> np.ndarray:
        if arrays["counts"].shape != (len(source),):
            raise ValueError("an array has an unexpected shape")
        return arrays["counts"]

    if cache_dir is None:
        counts = make(moved)
    else:
        fields = [config.messages_field, config.prompt_field, config.response_field]
        content = sorted(source.content(moved).items())
        key = [_ANSWERS_VERSION, source.fingerprint(), content, config.chat, fields]
        key += [sorted(config.trained_roles), sorted(config.chat_roles)]
        key += [config.system_field] if config.system_field else []
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        path = os.path.join(os.path.expanduser(cache_dir), f"answers-{name}.npz")
        counts = load_or_compute(
            path,
            of,
            make,
            lambda counts: {"counts": counts},
            _CACHE_MESSAGES,
            keep=keep,
            moved=moved,
        )
    return TrainedMessageSource(source, counts) if counts.any() else source


_MAX_TEMPLATE_BYTES = 1 << 24
_PASS_RECORDS = 256
_VERSION = 2
"""Version number, incremented if a release changes the ids or masks for the same records."""
REWRITTEN = 8
"""Bit of `EncodedDocument.marks`, set if the template rewrites messages, which are then masked."""


def load_chat_template(config: SourceConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template set by `data.chat_template`, or else the template in the tokenizer's
    folder.

    Raises:
        ConfigError: the template cannot be read, or no template exists.
    """
    path, settings = config.chat_template, parse_template_kwargs(config.chat_template_kwargs)
    if path:
        try:
            text = files.read(path, _MAX_TEMPLATE_BYTES).decode()
        except (OSError, ValueError) as error:
            rule = f"must be a UTF-8 text file: {getattr(error, 'strerror', None) or error}."
            action = "Set data.chat_template to a Jinja template file."
            raise ConfigError.one(
                Code.TOK_TEMPLATE, "data.chat_template", path, rule, action
            ) from error
        return ChatTemplate(text, path, tokenizer.role_texts, settings)
    if tokenizer.chat is None:
        rule = "requires a chat template, but the tokenizer folder does not contain one."
        action = "Set data.chat_template to a Jinja file, or put chat_template.jinja into the "
        action += "folder of tokenizer.path."
        raise ConfigError.one(Code.TOK_TEMPLATE, "data.chat", config.chat, rule, action)
    return tokenizer.chat.with_settings(settings)


def today() -> str:
    """Return the current date in ISO 8601 format, for example 2026-01-31."""
    return datetime.date.today().isoformat()


def resolve_chat_template(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template that a run configures, or else the template in the tokenizer's
    folder; None if neither exists.

    Raises:
        ConfigError: the template file cannot be read.
    """
    chats = [source for source in all_sources(data).values() if source.chat != "off"]
    if chats:
        return load_chat_template(chats[0], tokenizer)
    settings = parse_template_kwargs(data.chat_template_kwargs)
    return None if tokenizer.chat is None else tokenizer.chat.with_settings(settings)


def load_start_date(run: str, cache_dir: str) -> str:
    """Return the date on which the run in folder `run` was first started, stored in `cache_dir`."""
    name = hashlib.sha256(run.encode()).hexdigest()[:32]
    path = os.path.join(cache_dir, f"day-{name}.npz")
    if not os.path.exists(os.path.join(run, EVENTS_FILE)):
        with contextlib.suppress(OSError):
            os.unlink(path)  # an earlier run in the same folder left this file
    words = CacheMessages(
        "reading the date of the run's first start",
        "prompts use the current date",
        "prompts will use a different date if the run resumes on another day",
    )
    return load_or_compute(
        path,
        lambda arrays: datetime.date.fromisoformat(str(arrays["day"][0])).isoformat(),
        lambda _: today(),
        lambda day: {"day": np.array([day], np.str_)},
        words,
        keep=True,
        moved=None,
    )


@contextlib.contextmanager
def wrap_record_errors(source: Source, document: int) -> Iterator[None]:
    """Convert errors about a record to `UnreadableRecord` errors whose message names the record."""
    try:
        with wrap_text_errors(lambda _: source.where(document)):
            yield
    except BadRecord as error:
        code = Code.DATA_IMAGE if isinstance(error, BadImage) else Code.DATA_RECORD
        problem = Problem(code, source.where(document), error.value, error.rule, error.action)
        raise UnreadableRecord([problem]) from error


class CountedConversation(NamedTuple):
    """Token ids and loss mask of a conversation, with statistics."""

    ids: np.ndarray
    trained: np.ndarray
    raw: bytes
    """The text that is trained on, encoded as UTF-8."""
    digest: int
    """Digest of the token ids; see `ids_digest`."""
    marks: int
    """See `EncodedDocument.marks`."""
    unread: tuple[str, ...]
    """See `EncodedDocument.unread`."""
    num_images: int = 0


class ConversationEncoder:
    """Encoder for conversations. Thread-safe, because each thread uses a separate process."""

    def __init__(self, source: Source, tokenizer: Tokenizer, config: SourceConfig):
        self.source = source
        self.tokenizer = tokenizer
        self.template = load_chat_template(config, tokenizer)
        self.day = today() if self.template.reads_date else ""
        """Date that the template renders in every record; empty if the template renders no date."""
        self._config = config
        self._idle: list[ChatProcess] = []

    def encode(self, document: int) -> EncodedDocument:
        """Return the token ids and the loss mask of a record.

        Raises:
            UnreadableRecord: the record has no messages, or the template cannot render it.
        """
        with wrap_record_errors(self.source, document):
            record = self.source.record(document)
            if isinstance(record, TrainedMessage):
                chat = conversation_of(record.record, self._config)
                chat = chat.up_to(chat.trained[record.number])
            else:
                chat = conversation_of(record, self._config)
            return self.encode_conversation(chat, partial(self.source.folder, document))

    def encode_conversation(
        self, conversation: ChatInput, folder: Callable[[], str] = str
    ) -> EncodedDocument:
        """Return the token ids, the loss mask and the images of a conversation.

        `folder` returns the folder to which paths of images are relative.

        Raises:
            BadRecord: the template cannot render the conversation, or an image cannot be used.
        """
        count, image = len(conversation.images), self.tokenizer.images
        if count > (image.max_images if image is not None else 0):
            raise _too_many_images(conversation.images[0].message, count, image)
        masking = Masking(
            by_blocks=list(self._config.trained_roles) == ["assistant"],
            skips_rewritten=self._config.rewritten_history != "error",
        )
        with self._process() as process:
            try:
                rendered = process.render(conversation, masking=masking, day=self.day)
            except RenderError as error:
                raise self._render_error(error) from error
            except (TypeError, ValueError) as error:
                rule = f"must have messages that can be written as JSON: {error}."
                raise BadRecord("", rule, "Remove values that JSON cannot represent.") from error
        text, spans = rendered.text, rendered.spans
        decoded = None
        if image is not None:
            if count:
                decoded = decode_images(conversation.images, folder, image)
            counts, special = decoded.num_tokens if decoded else [], self.tokenizer.special_tokens
            text, spans = expand_image_tokens(text, spans, counts, image, special)
        ids, offsets = self.tokenizer.encode_chat_offsets(text)
        if not len(ids):
            rule = f"must not be empty when rendered: {self.template.path} renders no text."
            raise BadRecord("", rule, "Remove the record, or correct the template.")
        marks = REWRITTEN if rendered.rewritten else 0
        unread = (*conversation.unread, *rendered.unread)
        trained = _mask_of_spans(offsets, spans)
        document = EncodedDocument(ids, trained, marks=marks, unread=unread)
        if image is None or decoded is None:
            return document
        left = image_tokens_left(ids, image, decoded.num_tokens)
        return replace(
            document,
            trained=trained & (left == 0),
            images=decoded.pixels,
            image_tokens_left=left,
            image_grids=decoded.grids,
            rotary_positions=decoded.rotary_positions(left, image),
            image_digest=decoded.digest,
        )

    def check(self, index: DocumentIndex) -> None:
        """Raise ConfigError if no token is trained on."""
        if index.trained is None or index.trained.any():
            return
        raise no_trained_tokens_error(self.template.path, len(self.source))

    @contextlib.contextmanager
    def _process(self) -> Iterator[ChatProcess]:
        try:
            process = self._idle.pop()  # `pop` is atomic, so no other thread gets the same process
        except IndexError:
            process = self.template.process()
        try:
            yield process
        finally:
            if process.is_alive:
                self._idle.append(process)

    def _render_error(self, error: RenderError) -> BadRecord:
        path = self.template.path
        if error.kind != "prefix":
            rule = f"must have messages that {path} can render: {error}."
            return BadRecord("", rule, "Correct the record or the template.")
        rule = f"must render message by message, so that trained text can be found: {path} renders "
        rule += f"the first messages differently when later messages follow; {error}."
        action = "Set data.rewritten_history=last or each_turn. Or mark the text to train on with "
        action += "{% generation %} ... {% endgeneration %} in a copy of the template, and set "
        action += "data.chat_template to the copy and data.trained_roles=[assistant]."
        return BadRecord("", rule, action)

    def fingerprint(self) -> str:
        """Return a digest of the settings that determine the token ids and loss masks."""
        config = self._config
        fields = [config.messages_field]
        if config.chat == "prompt":
            fields = [config.prompt_field, config.response_field]
        image = self.tokenizer.images
        more = [] if image is None else [["images", *image.fingerprint()]]
        return digest([config.chat, fields, *self.masking_metadata(), *more])

    def masking_metadata(self) -> list[Any]:
        """Return the settings that determine the token ids and the loss mask, as JSON values."""
        config, template = self._config, self.template
        facts = [_VERSION, sorted(config.trained_roles), config.rewritten_history]
        facts += [config.tools_field, sorted(template.settings.items())]
        facts += [["system", config.system_field]] if config.system_field else []
        return [*facts, template.template, sorted(template.tokens.items())]


def _mask_of_spans(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return a bool [tokens] mask that is true for tokens that overlap a span. A token without
    characters is included if it is inside a span.
    """
    # The tokenizer library may report arbitrary positions for tokens without characters.
    begins = np.maximum.accumulate(offsets[:, 0]) if len(offsets) else offsets[:, 0]
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
    mask = np.zeros(len(offsets), bool)
    for begin, end in spans:
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end, "left")
        mask[first:last] = True
    return mask


class ChatEncoder(Protocol):
    """Encoder that converts each record to one document; see `ConversationEncoder`. Thread-safe."""

    @property
    def source(self) -> Source: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def day(self) -> str:
        """See `ConversationEncoder`."""
        ...

    @day.setter
    def day(self, day: str) -> None: ...

    def encode(self, document: int) -> EncodedDocument: ...

    def check(self, index: DocumentIndex) -> None: ...

    def fingerprint(self) -> str: ...


class ChatDocuments(EncodedDocuments):
    """Token ids of conversations, with a cache of recently used conversations. Thread-safe."""

    def __init__(self, conversations: ChatEncoder, index: DocumentIndex):
        super().__init__(conversations.source, conversations.tokenizer, index)
        self._conversations, self._masks = conversations, index.masks
        # A resumed run keeps using the date on which the documents were indexed.
        conversations.day = index.day

    def _read(self, document: int) -> EncodedDocument:
        encoded = self._conversations.encode(document)
        assert encoded.trained is not None and self._masks is not None
        if document_digest(encoded) != self._digests[document]:
            raise self._changed_error(document)
        if mask_digest(encoded.trained) != self._masks[document]:
            raise self._changed_error(document)
        return encoded


def build_chat_index(
    conversations: ChatEncoder,
    cache_dir: str | None,
    moved: Heartbeat | None = None,
    *,
    threads: int = 1,
    keep: bool = True,
) -> DocumentIndex:
    """Load or build the index of conversations; see `build_index`. Byte counts include only text
    that is trained on.

    Raises:
        ConfigError: a record cannot be used, or no token is trained on.
    """
    source, tokenizer = conversations.source, conversations.tokenizer
    parts = [source.fingerprint(), source.content(moved)]
    parts += [tokenizer.fingerprint(), conversations.fingerprint()]
    # Indexes written by earlier releases contain no date.
    parts += ["day"] if conversations.day else []
    index = load_or_build_index(
        ["chat", 3, *parts],
        len(source),
        cache_dir,
        lambda moved: verify_unchanged(
            source, moved, _index_conversations(conversations, moved, threads)
        ),
        keep=keep,
        moved=moved,
        task=f"rendering conversations of {source.name}",
    )
    conversations.check(index)
    return index


def empty_documents_error(path: str | None, documents: int, chat: str) -> ConfigError:
    """Return the error for documents that contain no text to train on."""
    rule = f"must contain text: found {pluralize(documents, 'document')}, all empty."
    action = "Set data.path to documents with text, or data.text_field to the field with the text."
    if chat in ("messages", "prompt"):
        rule = (
            f"must contain text to train on: in {pluralize(documents, 'conversation')}, "
            "all messages to train on are empty."
        )
        action = "Add content to them, or set data.trained_roles to roles whose messages have text."
    if chat == "pairs":
        rule = f"must contain responses: found {pluralize(documents, 'pair')}, all empty."
        action = "Set data.chosen_field and data.rejected_field to the response fields."
    return ConfigError.one(Code.DATA_EMPTY, "data.path", path, rule, action)


def no_trained_tokens_error(template: str, count: int) -> ConfigError:
    """Return the error for conversations with no tokens to train on."""
    rule = f"must mark text to train on: no token of {pluralize(count, 'conversation')} is marked."
    action = "Set data.trained_roles to roles in the conversations, or correct `weight` and "
    action += "`train` of the messages or the template's {% generation %} blocks."
    return ConfigError.one(Code.TOK_TEMPLATE, template, None, rule, action)


def encode_and_count(conversations: ChatEncoder, document: int) -> CountedConversation:
    """Return token ids, loss mask and statistics of one record. See `encode` for errors."""
    with track_read(partial(conversations.source.where, document)):
        encoded = conversations.encode(document)
    assert encoded.trained is not None
    text = conversations.tokenizer.decode(encoded.ids[encoded.trained].tolist())
    return CountedConversation(
        encoded.ids,
        encoded.trained,
        text.encode(),
        document_digest(encoded),
        encoded.marks,
        encoded.unread,
        encoded.num_images,
    )


def first_target(trained: np.ndarray) -> int:
    """Return the index of the first token to train on that has a preceding token; 0 if none."""
    return 1 + int(trained[1:].argmax()) if trained[1:].any() else 0


def ids_digest(ids: np.ndarray) -> int:
    """Return the digest of token ids: `digest_of` applied to the ids as int64."""
    return digest_of(ids.astype("<i8").tobytes())


def document_digest(document: EncodedDocument) -> int:
    """Return the digest of a document's token ids and encoded images."""
    return digest_of(document.ids.astype("<i8").tobytes() + document.image_digest)


def _too_many_images(message: int, count: int, image: ImageFormat | None) -> BadRecord:
    if image is None:
        rule = "must have text content: parts of type image are not supported with "
        rule += "data.max_images_per_sequence=0."
        action = "Set data.max_images_per_sequence, or remove the record."
        return BadImage(f"message {message + 1}", rule, action)
    rule = f"must have at most data.max_images_per_sequence ({image.max_images}) images."
    action = f"Set data.max_images_per_sequence={count}, or remove the record."
    return BadImage(pluralize(count, "image"), rule, action)


def _index_conversations(
    conversations: ChatEncoder, moved: Heartbeat | None, threads: int
) -> DocumentIndex:
    source = conversations.source
    lengths, trained = np.zeros(len(source), np.int64), np.zeros(len(source), np.int64)
    byte_counts, digests = np.zeros(256, np.int64), np.zeros(len(source), np.uint64)
    marks, masks = np.zeros(len(source), np.uint8), np.zeros(len(source), np.uint64)
    firsts, unread = np.zeros(len(source), np.int64), Counter[str]()
    images = np.zeros(len(source), np.int64)
    progress = Progress(f"rendering conversations of {source.name}", len(source), moved)

    with ThreadPoolExecutor(max(1, threads), "conversations") as pool:
        for first in range(0, len(source), _PASS_RECORDS):
            numbers = range(first, min(first + _PASS_RECORDS, len(source)))
            chats = pool.map(partial(encode_and_count, conversations), numbers)
            for document, chat in zip(numbers, chats, strict=True):
                lengths[document], trained[document] = len(chat.ids), int(chat.trained.sum())
                digests[document], marks[document] = chat.digest, chat.marks
                masks[document] = mask_digest(chat.trained)
                firsts[document] = first_target(chat.trained)
                images[document] = chat.num_images
                unread.update(chat.unread)
                byte_counts += np.bincount(np.frombuffer(chat.raw, np.uint8), minlength=256)
            progress.update(numbers.stop)
    found_marks = marks if marks.any() else None
    return DocumentIndex(
        lengths,
        byte_counts,
        trained,
        digests=digests,
        marks=found_marks,
        masks=masks,
        first_targets=firsts,
        unread_keys=np.array(sorted(unread), np.str_),
        unread_counts=np.array([unread[key] for key in sorted(unread)], np.int64),
        days=np.array([conversations.day] if conversations.day else [], np.str_),
        images=images if images.any() else None,
    )
