"""Chat template, begin tokens and end tokens of a run that trains on conversations.

The token that closes an answer in training ends generated text. It follows from the template: the
control token after the answer in a conversation of two messages. Of prepared conversations, whose
template may be unknown, it follows from the tokens that are trained.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from maxpipe.config.data import sources as sources_of
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.schema import DataConfig
from maxpipe.data.chat import spoken, template_of
from maxpipe.data.documents import Documents, Encoded
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.chat_process import ChatInput
from maxpipe.data.tokenizers.control import Framing
from maxpipe.errors import ConfigError
from maxpipe.io.typed import checked

KEY = "conversation"
"""Name of the entry in the data position of a checkpoint."""

_ANSWER = "An answer of several words"
_TAIL = 4
"""Tokens at the end of an answer among which its closing token is."""
_DOCUMENTS = 32
"""Conversations of a source that are looked at."""


class Conversation(TypedDict):
    """What a checkpoint of a run that reads conversations records of them."""

    template: str | None
    """Text of the chat template; None if it is unknown."""
    begin_ids: list[int]
    """Tokens in front of a prompt that no template writes."""
    end_ids: list[int]
    """Tokens that close an answer."""


def closing_ids(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    answering: str = "assistant",
    asking: Sequence[str] = ("user",),
) -> list[int]:
    """The control token that closes an answer, in a list; empty if there is none.

    `answering` is the role whose messages are answers, and `asking` are other roles.
    """
    answer = {"role": answering, "content": _ANSWER}
    for role in asking:
        try:
            (text,) = chat.render(
                [ChatInput([{"role": role, "content": "A question"}, answer])],
                add_generation_prompt=False,
            )
        except ConfigError:  # the template wants other roles
            continue
        begin = text.rfind(_ANSWER)
        if begin < 0:
            continue
        ids, offsets = tokenizer.encode_chat_offsets(text)
        after = ids[offsets[:, 0] >= begin + len(_ANSWER)].tolist()
        return [i for i in after if i in tokenizer.special_ids][:1]
    return []


def closing_of(documents: Documents, tokenizer: Tokenizer) -> list[int]:
    """The same from the first of these conversations, by the tokens that are trained."""
    tails = []
    # The lengths of a folder that is read in windows are never read as a whole.
    count = getattr(documents, "num_documents", None)
    for document in range(min(len(documents.lengths) if count is None else count, _DOCUMENTS)):
        if tail := _tail(documents[document], tokenizer):
            tails.append(tail)
    counts = Counter(itertools.chain.from_iterable(map(dict.fromkeys, tails)))
    # Of answers that end with several control tokens those of calls have others in front.
    return [max(tails[0], key=lambda i: counts[i])] if tails else []


def _tail(document: Encoded, tokenizer: Tokenizer) -> list[int]:
    """The control tokens with which the last trained message ends."""
    if document.trained is None or not document.trained.any():
        return []
    ids = document.ids.astype(int).tolist()
    end = int(np.flatnonzero(document.trained)[-1]) + 1
    found = []
    for i in reversed(ids[max(end - _TAIL, 0) : end]):
        if i in tokenizer.special_ids:
            found.append(i)
        elif tokenizer.decode([i]).strip():
            break
    following = [i for i in ids[end : end + 1] if i in tokenizer.special_ids]
    return found[::-1] or following


def conversation_record(
    data: DataConfig, tokenizer: Tokenizer, documents: Iterable[Documents] = ()
) -> Conversation | None:
    """The record of a run that reads these sources; None if they hold no conversations.

    `documents` are the conversations of the training.

    Raises:
        ConfigError: the template's file cannot be read.
    """
    sources = list(sources_of(data).values())
    chats = [each for each in sources if each.chat != "off"]
    masked = list(documents)
    if not chats and not masked:
        return None
    chat = spoken(data, tokenizer) if chats and _has_template(chats[0], tokenizer) else None
    ends = [  # every source may have a template of its own
        i
        for each in chats
        if _has_template(each, tokenizer)
        for i in closing_ids(template_of(each, tokenizer), tokenizer, *_roles(each))
    ]
    if not ends:
        ends = [i for each in masked for i in closing_of(each, tokenizer)]
    is_all = bool(chats) and len(chats) == len(sources)
    begin = tokenizer.control.published.before if is_all else (tokenizer.begin_id,)
    return {
        "template": chat.template if chat else None,
        "begin_ids": list(begin),
        "end_ids": sorted({*ends}),
    }


def _has_template(config: SourceConfig, tokenizer: Tokenizer) -> bool:
    """Pairs of texts have none."""
    return bool(config.chat_template) or tokenizer.chat is not None


def _roles(config: SourceConfig) -> tuple[str, list[str]]:
    """A role that is trained, and the others."""
    trained = config.trained_roles
    answering = "assistant" if "assistant" in trained else trained[0]
    others = [each for each in config.chat_roles if each != answering]
    return answering, sorted(others, key=lambda role: role != "user")


def of_prompts(chat: ChatTemplate | None, tokenizer: Tokenizer) -> Conversation | None:
    """The record of a run whose prompts `chat` renders; None without a template."""
    if chat is None:
        return None
    return {
        "template": chat.template,
        "begin_ids": [tokenizer.begin_id],
        "end_ids": closing_ids(chat, tokenizer),
    }


def recorded(position: Mapping[str, Any]) -> Conversation | None:
    """What the data position of a checkpoint says.

    Raises:
        ValueError: it is damaged.
    """
    found = position.get(KEY)
    return None if found is None else checked(found, Conversation)


def speaking(tokenizer: Tokenizer, conversation: Conversation | None) -> Tokenizer:
    """The tokenizer with which text ends, and prompts begin, as in these conversations.

    Its template is theirs.
    """
    if conversation is None:
        return tokenizer
    template, chat = conversation["template"], tokenizer.chat
    if template is not None and (chat is None or chat.template != template):
        chat = ChatTemplate(template, "the run's chat template", tokenizer.role_texts)
    ends = {*tokenizer.end_ids, *conversation["end_ids"]}
    framing = Framing(tuple(conversation["begin_ids"]))
    return tokenizer.with_control(end_ids=tuple(sorted(ends)), framing=framing, chat=chat)


def for_chats(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with which text ends where its own template closes an answer."""
    if tokenizer.chat is None:
        return tokenizer
    ends = {*tokenizer.end_ids, *closing_ids(tokenizer.chat, tokenizer)}
    return tokenizer.with_control(end_ids=tuple(sorted(ends)))
