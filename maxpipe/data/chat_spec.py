"""Chat format of runs that train on conversations: chat template, BOS and EOS tokens.

Generation stops at the end-of-turn token, which closes an assistant message in training. To find
this token, a user message and an assistant message are rendered with the template. The end-of-turn
token is the first control token after the assistant text. The template of prepared conversations
may be unknown; the token is then inferred from the tokens that are trained on.

The module also applies `data.long_conversations` to conversations longer than a sequence. The
policy depends only on token counts and loss masks, so the result is the same for records and for
prepared folders.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.data import train_sources as sources_of
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat import load_chat_template, resolve_chat_template
from maxpipe.data.documents import Documents, EncodedDocument
from maxpipe.data.prepared.reader import TokenFiles
from maxpipe.data.sources import Heartbeat, Progress
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.data.tokenizers.control import Framing
from maxpipe.errors import Code, ConfigError
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import check_type

KEY = "conversation"
"""Name of the chat format entry in the data position of a checkpoint."""

_ANSWER = "A response of several words"
_TAIL = 4
"""Number of tokens, at the end of a message, that are searched for the end-of-turn token."""
_DOCUMENTS = 32
"""Maximum number of conversations per source that are searched for the end-of-turn token."""


class ChatSpec(TypedDict):
    """Chat format stored in the checkpoints of a run that trains on conversations."""

    template: str | None
    """Jinja source of the chat template; None if unknown."""
    begin_ids: list[int]
    """Ids of tokens that precede a prompt and are not rendered by the template."""
    end_ids: list[int]
    """Ids of the tokens that close an assistant message."""


def end_of_turn_ids(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    answering: str = "assistant",
    asking: Sequence[str] = ("user",),
) -> list[int]:
    """Return a list with the id of the control token that closes an assistant message; [] if none.

    `answering` is the assistant role, and `asking` lists other roles to try for the first message.
    """
    answer = {"role": answering, "content": _ANSWER}
    for role in asking:
        try:
            (text,) = chat.render(
                [ChatInput([{"role": role, "content": "A question"}, answer])],
                add_generation_prompt=False,
            )
        except ConfigError:  # the template does not accept this role
            continue
        begin = text.rfind(_ANSWER)
        if begin < 0:
            continue
        ids, offsets = tokenizer.encode_chat_offsets(text)
        after = ids[offsets[:, 0] >= begin + len(_ANSWER)].tolist()
        return [i for i in after if i in tokenizer.special_ids][:1]
    return []


def infer_end_of_turn_ids(documents: Documents, tokenizer: Tokenizer) -> list[int]:
    """Infer the end-of-turn token from the trained-on tokens of the first conversations."""
    tails = []
    # If documents are read in windows, `lengths` would load all lengths at once.
    count = getattr(documents, "num_documents", None)
    for document in range(min(len(documents.lengths) if count is None else count, _DOCUMENTS)):
        if tail := _tail(documents[document], tokenizer):
            tails.append(tail)
    counts = Counter(itertools.chain.from_iterable(map(dict.fromkeys, tails)))
    # If a message ends with several control tokens, the most frequent one is the end-of-turn token,
    # and the other tokens mark tool calls.
    return [max(tails[0], key=lambda i: counts[i])] if tails else []


def _tail(document: EncodedDocument, tokenizer: Tokenizer) -> list[int]:
    if document.trained is None or not document.trained.any():
        return []
    ids = document.ids.astype(int).tolist()
    end = int(np.flatnonzero(document.trained)[-1]) + 1
    closing = []
    for i in reversed(ids[max(end - _TAIL, 0) : end]):
        if i in tokenizer.special_ids:
            closing.append(i)
        elif tokenizer.decode([i]).strip():
            break
    following = [i for i in ids[end : end + 1] if i in tokenizer.special_ids]
    return closing[::-1] or following


def build_chat_spec(
    data: DataConfig, tokenizer: Tokenizer, documents: Iterable[Documents] = ()
) -> ChatSpec | None:
    """Return the chat format of a run; None if the run has no conversations.

    `documents` are the training conversations, one entry per source.

    Raises:
        ConfigError: the template file cannot be read.
    """
    sources = list(sources_of(data).values())
    chats = [source for source in sources if source.chat != "off"]
    masked = list(documents)
    if not chats and not masked:
        return None
    chat = (
        resolve_chat_template(data, tokenizer)
        if chats and _has_template(chats[0], tokenizer)
        else None
    )
    ends = [  # the template may differ between sources
        i
        for source in chats
        if _has_template(source, tokenizer)
        for i in end_of_turn_ids(load_chat_template(source, tokenizer), tokenizer, *_roles(source))
    ]
    if not ends:
        ends = [i for part in masked for i in infer_end_of_turn_ids(part, tokenizer)]
    is_all = bool(chats) and len(chats) == len(sources)
    begin = tokenizer.control.published.before if is_all else (tokenizer.begin_id,)
    return {
        "template": chat.template if chat else None,
        "begin_ids": list(begin),
        "end_ids": sorted({*ends}),
    }


def _has_template(config: SourceConfig, tokenizer: Tokenizer) -> bool:
    """Return whether a chat template is available. Pairs of plain text need no template."""
    return bool(config.chat_template) or tokenizer.chat is not None


def _roles(config: SourceConfig) -> tuple[str, list[str]]:
    trained = config.trained_roles
    answering = "assistant" if "assistant" in trained else trained[0]
    others = [role for role in config.chat_roles if role != answering]
    return answering, sorted(others, key=lambda role: role != "user")


def chat_spec_of_prompts(chat: ChatTemplate | None, tokenizer: Tokenizer) -> ChatSpec | None:
    """Return the chat format of prompts rendered with `chat`; None if `chat` is None."""
    if chat is None:
        return None
    return {
        "template": chat.template,
        "begin_ids": [tokenizer.begin_id],
        "end_ids": end_of_turn_ids(chat, tokenizer),
    }


def parse_chat_spec(position: Mapping[str, Any]) -> ChatSpec | None:
    """Return the chat format stored in a data position; raise ValueError if it is malformed."""
    entry = position.get(KEY)
    return None if entry is None else check_type(entry, ChatSpec)


def apply_chat_spec(tokenizer: Tokenizer, conversation: ChatSpec | None) -> Tokenizer:
    """Return a copy of the tokenizer with the control tokens and template of the chat format."""
    if conversation is None:
        return tokenizer
    template, chat = conversation["template"], tokenizer.chat
    if template is not None and (chat is None or chat.template != template):
        chat = ChatTemplate(template, "the run's chat template", tokenizer.role_texts)
    ends = {*tokenizer.end_ids, *conversation["end_ids"]}
    framing = Framing(tuple(conversation["begin_ids"]))
    return tokenizer.with_control(end_ids=tuple(sorted(ends)), framing=framing, chat=chat)


def add_end_of_turn_ids(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer whose EOS tokens include the end-of-turn tokens."""
    if tokenizer.chat is None:
        return tokenizer
    ends = {*tokenizer.end_ids, *end_of_turn_ids(tokenizer.chat, tokenizer)}
    return tokenizer.with_control(end_ids=tuple(sorted(ends)))


LongConversationPolicy = Literal["truncate", "drop", "split", "error"]

_KEY = "data.long_conversations"
_PART = 1 << 20
"""Number of documents whose lengths are read at a time."""


class RemainingCounts(NamedTuple):
    """Numbers of nonempty conversations that the length policy keeps, and that it drops, as int64
    scalars.
    """

    with_tokens: np.ndarray
    left_out: np.ndarray


class LengthLimitedDocuments:
    """Conversations that are truncated or dropped to fit in one sequence; see `Documents`.

    With `truncate`, conversations with no tokens left to train on are dropped.
    """

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        policy: LongConversationPolicy,
        trains: Callable[[int, int], bool] | None = None,
    ):
        """Create the documents.

        `trains(document, count)` returns whether any of the first `count` tokens is trained on and
        has a preceding token. By default, the document is read to determine this.
        """
        self.pad_id = documents.pad_id
        self._documents = documents
        self._max_tokens = sequence_length + 1
        """Number of tokens in a sequence: T inputs and the target of the last input."""
        self._policy: LongConversationPolicy = policy
        self._has_target = trains or self._read_has_target
        self._lengths: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        if self._lengths is None:
            self._lengths = self._limited_lengths(self._documents.lengths, 0)
        return self._lengths

    def count_remaining(self, moved: Heartbeat | None = None) -> RemainingCounts:
        """Count the conversations that the length policy keeps and drops; call `moved` after each
        chunk.
        """
        return self._remaining_counts(self._documents.lengths, self.lengths)

    @staticmethod
    def _remaining_counts(before: np.ndarray, after: np.ndarray) -> RemainingCounts:
        num_left = np.count_nonzero(after)
        return RemainingCounts(np.array(num_left), np.array(np.count_nonzero(before) - num_left))

    def _read_has_target(self, document: int, count: int) -> bool:
        trained = self._documents[document].trained
        return trained is None or bool(trained[1:count].any())

    def _limited_lengths(self, lengths: np.ndarray, first: int) -> np.ndarray:
        limited = np.array(lengths)
        for at in np.flatnonzero(limited > self._max_tokens).tolist():
            is_left = self._policy == "truncate" and self._has_target(first + at, self._max_tokens)
            limited[at] = self._max_tokens if is_left else 0
        return limited

    def __getitem__(self, document: int) -> EncodedDocument:
        encoded = self._documents[document]
        if len(encoded.ids) <= self._max_tokens:
            return encoded
        trained = encoded.trained
        is_left = trained is None or bool(trained[1 : self._max_tokens].any())
        size = self._max_tokens if is_left and self._policy == "truncate" else 0
        trained = None if trained is None else trained[:size]
        return replace(encoded, ids=encoded.ids[:size], trained=trained)

    def where(self, document: int) -> str:
        return self._documents.where(document)


class LengthLimitedTokenFiles(LengthLimitedDocuments):
    """Length-limited conversations that are read in windows; see `TokenFiles`."""

    def __init__(self, documents: TokenFiles, sequence_length: int, policy: LongConversationPolicy):
        super().__init__(documents, sequence_length, policy)
        self._files = documents
        self.num_documents, self.num_tokens = documents.num_documents, documents.num_tokens
        self.span_tokens: np.ndarray = documents.span_tokens
        self.is_length_limited = True
        """Whether long conversations are truncated; `span_tokens` counts the tokens before
        truncation."""

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """Return the token counts, int64, of documents `first` to `stop` - 1."""
        return self._limited_lengths(self._files.lengths_between(first, stop), first)

    def count_remaining(self, moved: Heartbeat | None = None) -> RemainingCounts:
        progress = Progress("counting long conversations", self.num_documents, moved)
        with_tokens = left_out = np.array(0)
        for first in range(0, self.num_documents, _PART):
            stop = min(first + _PART, self.num_documents)
            lengths = self._files.lengths_between(first, stop)
            part = self._remaining_counts(lengths, self._limited_lengths(lengths, first))
            with_tokens, left_out = with_tokens + part.with_tokens, left_out + part.left_out
            progress.update(stop)
        return RemainingCounts(np.array(with_tokens), np.array(left_out))


def limit_lengths(
    documents: Documents,
    sequence_length: int,
    policy: LongConversationPolicy,
    first_targets: np.ndarray,
) -> Documents:
    """Apply a policy to long conversations. `first_targets` is `DocumentIndex.first_targets`."""
    if policy not in ("truncate", "drop"):
        return documents
    return LengthLimitedDocuments(
        documents,
        sequence_length,
        policy,
        lambda document, count: 0 < first_targets[document] < count,
    )


def find_long_documents(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Return the indices of documents that do not fit in one sequence."""
    return np.flatnonzero(lengths > sequence_length + 1)


def count_long_documents(documents: TokenFiles, sequence_length: int) -> tuple[int, int]:
    """Return the number of documents longer than a sequence, and the index of the first (or 0)."""
    count = first = 0
    for begin in range(0, documents.num_documents, _PART):
        lengths = documents.lengths_between(begin, min(begin + _PART, documents.num_documents))
        numbers = find_long_documents(lengths, sequence_length)
        if len(numbers) and not count:
            first = begin + int(numbers[0])
        count += len(numbers)
    return count, first


def long_conversation_error(
    count: int, where: str, sequence_length: int, *, has_images: bool = False
) -> ConfigError:
    """Return the error for `count` conversations that are too long; `where` is the location of the
    first such conversation.
    """
    rule = f"allows no conversation longer than a sequence of {sequence_length} tokens: "
    rule += f"found {pluralize(count, 'longer conversation')}, the first at {where}."
    other = "drop" if has_images else "truncate"
    return _wrong("error", rule, f"data.long_conversations={other}")


def check_remaining(
    left: RemainingCounts,
    num_documents: int,
    sequence_length: int,
    policy: LongConversationPolicy,
    *,
    has_images: bool = False,
) -> None:
    """Raise ConfigError if no conversation is left after the policy is applied."""
    if left.with_tokens:
        return
    all_of = f"each of {pluralize(num_documents, 'conversation')}"
    sequence = f"a sequence of {sequence_length} tokens"
    if policy == "drop":
        rule = f"leaves no training examples: {all_of} is longer than {sequence}."
        raise _wrong(policy, rule, "" if has_images else "data.long_conversations=truncate")
    rule = f"leaves no training examples: in {all_of}, no token to train on fits in {sequence}."
    raise _wrong(policy, rule, "")


def _wrong(policy: str, rule: str, other: str) -> ConfigError:
    larger = "a larger train.sequence_length"
    return ConfigError.one(
        Code.DATA_EMPTY, _KEY, policy, rule, f"Set {f'{larger}, or {other}' if other else larger}."
    )
