"""Chat templates: from the messages of a conversation to the text that a model continues.

A template is a program that comes with a model, from strangers. It runs in jinja2's sandbox, in a
process of its own that has nothing but the messages, and that ends when it takes too long or too
much memory: the sandbox alone bounds neither.

A process of its own for a chat template, asked for one conversation after the other.

It has neither the environment's variables, which may hold secrets, nor this process' files. One
that takes too long, writes too much or ends is gone, and the conversation that it had is known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from maxpipe.data.tokenizers import render_chat
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.io.worker_process import WorkerProcess

_START_SECONDS = 60.0
"""For a machine that is busy; the processor's time is what a template is given."""
_MAX_REQUEST_BYTES = 1 << 24
_MAX_RESPONSE_BYTES = 1 << 28

SETTINGS = "chat_template_kwargs"
"""Name of the field of a record with names and values that its template is given."""

Message = dict[str, Any]
"""`role` and `content`, and whatever else a template reads."""


class ChatInput(NamedTuple):
    """What a chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = {}
    """Further names of the template, such as `enable_thinking`."""
    trained: Sequence[int] = ()
    """Numbers of the messages that are trained, from 0."""
    unread: tuple[str, ...] = ()
    """Fields of the record that are in nothing above."""

    def up_to(self, number: int) -> ChatInput:
        """The conversation that ends with a trained message, which alone is trained."""
        return self._replace(messages=self.messages[: number + 1], trained=[number])


class Masking(NamedTuple):
    """How the trained parts of a text are found."""

    by_blocks: bool
    """Whether the template's generation blocks, if any, say what assistants' messages are."""
    skips_rewritten: bool
    """Whether messages that the template rewrites later are left out; otherwise they are errors."""


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    text: str
    spans: list[tuple[int, int]]
    """Characters that are trained."""
    rewritten: int
    """Messages that would be trained, and are not because the template rewrites them later."""
    unread: tuple[str, ...]
    """What the conversation has and the template does not read."""


class _RenderResponse(TypedDict, total=False):
    """A line of the process; that to its settings is empty."""

    text: str
    spans: list[tuple[int, int]]
    rewritten: int
    unread: list[str]
    error: str
    kind: str


class RenderError(Exception):
    """A template, or a conversation, that gives no text.

    `kind` is `package` if there is no jinja2, and `prefix` if messages cannot be told apart.
    """

    def __init__(self, text: str, kind: str = ""):
        super().__init__(text[:300].rstrip("."))
        self.kind = kind


class ChatProcess:
    """One template; not for several threads at a time.

    Raises:
        RenderError: the template is none, or there is no jinja2.
    """

    def __init__(self, template: str, tokens: Mapping[str, str], cpu_seconds: int):
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = WorkerProcess(
            [sys.executable, "-P", render_chat.__file__],
            {"PYTHONPATH": paths},
            most_answer_bytes=_MAX_RESPONSE_BYTES,
            own_session=True,  # Ctrl-C is for the one that asks, which saves and ends it
        )
        self.close = self._process.close
        """Ends the process; also when nothing refers to this any more."""
        self._seconds = cpu_seconds + _START_SECONDS
        settings = {"template": template, "tokens": dict(tokens), "cpu_seconds": cpu_seconds}
        try:
            self._request(settings)
        except RenderError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.is_alive

    def render(
        self,
        conversation: ChatInput,
        *,
        add_generation_prompt: bool = False,
        masking: Masking | None = None,
        day: str = "",
    ) -> RenderedChat:
        """The text of a conversation; with `masking` also the spans of its trained messages.

        `day`, as 2026-01-31, is the one that the template reads as the current date; empty is now.

        Raises:
            RenderError: the template fails, refuses the messages, or takes too much.
        """
        answer = self._request(
            {
                "messages": conversation.messages,
                "tools": conversation.tools,
                "settings": dict(conversation.settings),
                "add_generation_prompt": add_generation_prompt,
                "day": day,
                "trained": None if masking is None else list(conversation.trained),
                **({} if masking is None else masking._asdict()),
            }
        )
        found = answer.get("spans", []), answer.get("rewritten", 0), answer.get("unread", [])
        return RenderedChat(answer.get("text", ""), *found[:2], unread=tuple(found[2]))

    def _request(self, request: Mapping[str, Any]) -> _RenderResponse:
        raw = json.dumps(request).encode() + b"\n"
        if len(raw) > _MAX_REQUEST_BYTES:
            raise RenderError(f"they take {len(raw)} bytes, at most {_MAX_REQUEST_BYTES} are read")
        try:
            answer = parse_json(self._process.request(raw, self._seconds), _RenderResponse)
        except TimeoutError:
            self.close()
            raise RenderError("it takes too long") from None
        except (OSError, ValueError):
            code = self._process.exit_code
            self.close()
            ended = code is None or code < 0
            text = "it takes too long or too much memory" if ended else "it ends its process"
            raise RenderError(text) from None
        if "error" in answer:
            raise RenderError(answer["error"], answer.get("kind", ""))
        return answer


_LOG = logging.getLogger(__name__)

_CPU_SECONDS = 10
"""For one conversation."""
_NAMED = 20
"""Keys that are named at most."""


class ChatTemplate:
    """A template as published in `chat_template.jinja` or `tokenizer_config.json`."""

    def __init__(
        self,
        template: str,
        path: str,
        tokens: Mapping[str, str],
        settings: Mapping[str, Any] | None = None,
    ):
        self.template = template
        self.path = path
        self.tokens = dict(tokens)
        """Control tokens that it may write, by roles such as `bos_token`."""
        self.settings = dict(settings or {})
        """Further names that it is given, unless a conversation has another value of them."""
        self.day = ""
        """Current date of the template, as 2026-01-31; empty is that of the clock."""

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplate:
        """The template with these settings."""
        return ChatTemplate(self.template, self.path, self.tokens, settings)

    def with_date(self, day: str) -> ChatTemplate:
        """The template with this current date."""
        template = self.with_settings(self.settings)
        template.day = day
        return template

    @property
    def reads_date(self) -> bool:
        """Whether it may write the current date."""
        return "strftime_now" in self.template

    def process(self) -> ChatProcess:
        """A process that renders conversations.

        Raises:
            ConfigError: no jinja2, or no template.
        """
        try:
            return ChatProcess(self.template, self.tokens, _CPU_SECONDS)
        except RenderError as error:
            raise self._template_error(error) from error

    def render(
        self, conversations: Sequence[ChatInput], *, add_generation_prompt: bool = True
    ) -> list[str]:
        """The text of each conversation, up to where the model's answer begins.

        Many conversations cost little more than one. What they have and the template does not
        read is named in the log.

        Raises:
            ConfigError: no jinja2, a template that fails, refuses the messages, or takes too much.
        """
        texts, unread = [], Counter[str]()
        with contextlib.ExitStack() as stack:
            process = self.process()
            stack.callback(process.close)
            try:
                for each in conversations:
                    full = each._replace(settings={**self.settings, **each.settings})
                    found = process.render(
                        full, add_generation_prompt=add_generation_prompt, day=self.day
                    )
                    texts.append(found.text)
                    unread.update((*each.unread, *found.unread))
            except RenderError as error:
                raise self._template_error(error) from error
        for remark in unread_remarks(unread, pluralize(len(conversations), "conversation")):
            _LOG.warning("%s: %s", self.path, remark)
        return texts

    def _template_error(self, error: RenderError) -> ConfigError:
        if error.kind == "package":
            action = "Run: pip install 'maxpipe[tokenizers]'"
            return ConfigError.one(self.path, None, f"needs the package jinja2: {error}.", action)
        return ConfigError.one(
            self.path,
            None,
            f"must be a chat template that takes these messages: {error}.",
            "Correct the messages or the template, or give the model plain text.",
        )


def unread_remarks(unread: Mapping[str, int], total: str, action: str = "") -> list[str]:
    """A line with the keys of conversations that nothing reads and how many have each.

    `action` names settings that read them.
    """
    if not unread:
        return []
    parts = [f"{name} (in {count})" for name, count in sorted(unread.items())]
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    keys = "this key is" if len(parts) == 1 else "these keys are"
    action = f". {action}" if action else ""
    return [f"{keys} not read, of {total}: {', '.join(parts[:_NAMED])}{more}{action}"]
