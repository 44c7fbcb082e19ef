"""Chat templates, which render a conversation as text for the model.

A template is an untrusted program that is published with a model. Templates run in the jinja2
sandbox in a separate process, because the sandbox does not limit time or memory. The process
receives only the messages, and has no access to the environment variables (which may contain
secrets) or open files of the parent process. A process that exceeds a limit is terminated, and the
error names the conversation.
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
from maxpipe.errors import Code, ConfigError
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.io.worker_process import WorkerProcess

_START_SECONDS = 60.0
"""Seconds by which the wall time limit exceeds the CPU time limit, since machines may be busy."""
_MAX_REQUEST_BYTES = 1 << 24
_MAX_RESPONSE_BYTES = 1 << 28

SETTINGS = "chat_template_kwargs"
"""Name of the record field that contains template settings."""

Message = dict[str, Any]
"""Message with `role`, `content` and any other keys that a template reads."""


class ImageReference(NamedTuple):
    """An image of a conversation."""

    message: int
    """Zero-based index of the message that contains the image."""
    path: str
    """Path relative to the folder of the record's file. If `raw` is set, the path is only used in
    messages, and may be empty."""
    raw: bytes | None
    """Content of the image file."""


class ChatInput(NamedTuple):
    """Input of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = {}
    """Additional variables for the template, such as `enable_thinking`."""
    trained: Sequence[int] = ()
    """Zero-based indices of the messages that are trained on."""
    unread: tuple[str, ...] = ()
    """Record fields that no other attribute of this class contains."""
    images: tuple[ImageReference, ...] = ()
    """Images in the order of the content parts of type `image`."""

    def up_to(self, number: int) -> ChatInput:
        """Return the conversation up to message `number`, the only message that is trained on."""
        images = tuple(image for image in self.images if image.message <= number)
        messages = self.messages[: number + 1]
        return self._replace(messages=messages, trained=[number], images=images)


class Masking(NamedTuple):
    """Options that determine which spans of the rendered text are trained on."""

    by_blocks: bool
    """Whether `{% generation %}` blocks in the template, if any, delimit the assistant messages."""
    skips_rewritten: bool
    """Whether messages that the template later rewrites are skipped; if false, they are rejected.
    """


class RenderedChat(NamedTuple):
    """Rendered text of a conversation, with the spans that are trained on."""

    text: str
    spans: list[tuple[int, int]]
    """Spans that are trained on, as (begin, end) in characters."""
    rewritten: int
    """Number of messages that are not trained on because the template later rewrites them."""
    unread: tuple[str, ...]
    """Keys of the conversation that the template does not read."""


class _RenderResponse(TypedDict, total=False):
    """Response of a chat process; empty for the first request, which transfers the settings."""

    text: str
    spans: list[tuple[int, int]]
    rewritten: int
    unread: list[str]
    error: str
    kind: str


class RenderError(Exception):
    """A template or conversation that cannot be rendered.

    `kind` is `package` if jinja2 is missing, and `prefix` if the messages cannot be located in the
    rendered text.
    """

    def __init__(self, text: str, kind: str = ""):
        super().__init__(text[:300].rstrip("."))
        self.kind = kind


class ChatProcess:
    """Process that renders one template; not thread-safe. Raises RenderError."""

    def __init__(self, template: str, tokens: Mapping[str, str], cpu_seconds: int):
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = WorkerProcess(
            [sys.executable, "-P", render_chat.__file__],
            {"PYTHONPATH": paths},
            most_answer_bytes=_MAX_RESPONSE_BYTES,
            # Ctrl-C reaches only the parent process, which saves its work and ends this process
            own_session=True,
        )
        self.close = self._process.close
        """Function that ends the process; also called when this `ChatProcess` is
        garbage-collected."""
        self._seconds = cpu_seconds + _START_SECONDS
        settings = {"template": template, "tokens": dict(tokens), "cpu_seconds": cpu_seconds}
        try:
            self._request(settings)
        except RenderError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process can render another conversation."""
        return self._process.is_alive

    def render(
        self,
        conversation: ChatInput,
        *,
        add_generation_prompt: bool = False,
        masking: Masking | None = None,
        day: str = "",
    ) -> RenderedChat:
        """Return the rendered conversation. If `masking` is set, the result includes the spans of
        trained messages.

        `day`, for example 2026-01-31, is the date that the template uses as the current date. An
        empty string selects the actual date.

        Raises:
            RenderError: the template fails, rejects the messages, or exceeds a limit.
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
            raise RenderError(
                f"the messages have {len(raw)} bytes; at most {_MAX_REQUEST_BYTES} are allowed"
            )
        try:
            answer = parse_json(self._process.request(raw, self._seconds), _RenderResponse)
        except TimeoutError:
            self.close()
            raise RenderError("the template exceeds the time limit") from None
        except (OSError, ValueError):
            code = self._process.exit_code
            self.close()
            ended = code is None or code < 0
            text = (
                "the template exceeds the time or memory limit"
                if ended
                else "the template terminates its process"
            )
            raise RenderError(text) from None
        if "error" in answer:
            raise RenderError(answer["error"], answer.get("kind", ""))
        return answer


_LOG = logging.getLogger(__name__)

_CPU_SECONDS = 10
"""CPU time limit per conversation in seconds."""
_NAMED = 20
"""Maximum number of keys listed in a log message."""


class ChatTemplate:
    """Chat template from `chat_template.jinja` or `tokenizer_config.json`."""

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
        """Control-token strings, keyed by role (such as `bos_token`)."""
        self.settings = dict(settings or {})
        """Template settings. The settings of a conversation take precedence."""
        self.day = ""
        """Date that the template renders as the current date, for example 2026-01-31; empty for the
        actual date.
        """

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplate:
        """Return a copy of the template with these settings."""
        return ChatTemplate(self.template, self.path, self.tokens, settings)

    def with_date(self, day: str) -> ChatTemplate:
        """Return a copy of the template that uses this date as the current date."""
        template = self.with_settings(self.settings)
        template.day = day
        return template

    @property
    def reads_date(self) -> bool:
        """Whether the template may render the current date."""
        return "strftime_now" in self.template

    def process(self) -> ChatProcess:
        """Return a process that renders conversations; raise ConfigError if it cannot start."""
        try:
            return ChatProcess(self.template, self.tokens, _CPU_SECONDS)
        except RenderError as error:
            raise self._template_error(error) from error

    def render(
        self, conversations: Sequence[ChatInput], *, add_generation_prompt: bool = True
    ) -> list[str]:
        """Return each conversation as rendered text that ends where the model's response begins.

        Rendering many conversations in one call is much faster than rendering them one by one. Keys
        that the template does not read are logged.

        Raises:
            ConfigError: jinja2 is missing, or the template fails or exceeds a limit.
        """
        texts, unread = [], Counter[str]()
        with contextlib.ExitStack() as stack:
            process = self.process()
            stack.callback(process.close)
            try:
                for conversation in conversations:
                    full = conversation._replace(
                        settings={**self.settings, **conversation.settings}
                    )
                    rendered = process.render(
                        full, add_generation_prompt=add_generation_prompt, day=self.day
                    )
                    texts.append(rendered.text)
                    unread.update((*conversation.unread, *rendered.unread))
            except RenderError as error:
                raise self._template_error(error) from error
        for remark in unread_remarks(unread, pluralize(len(conversations), "conversation")):
            _LOG.warning("%s: %s", self.path, remark)
        return texts

    def _template_error(self, error: RenderError) -> ConfigError:
        if error.kind == "package":
            action = "Run: pip install 'maxpipe[tokenizers]'"
            return ConfigError.one(
                Code.ENV_PACKAGE, self.path, None, f"requires jinja2: {error}.", action
            )
        rule = f"must be a chat template that can render these messages: {error}."
        action = "Correct the messages or the template, or use plain text."
        return ConfigError.one(Code.TOK_TEMPLATE, self.path, None, rule, action)


def unread_remarks(unread: Mapping[str, int], total: str, action: str = "") -> list[str]:
    """Return a note that lists the unread keys and how many conversations contain each key.

    `action` suggests settings that use the keys.
    """
    if not unread:
        return []
    parts = [f"{name} (in {count})" for name, count in sorted(unread.items())]
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    keys = "this key is" if len(parts) == 1 else "these keys are"
    action = f". {action}" if action else ""
    return [f"{keys} not read in {total}: {', '.join(parts[:_NAMED])}{more}{action}"]
