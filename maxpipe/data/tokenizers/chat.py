"""Chat templates: from the messages of a conversation to the text that a model continues.

A template is a program that comes with a model, from strangers. It runs in jinja2's sandbox, in a
process of its own that has nothing but the messages, and that ends when it takes too long or too
much memory: the sandbox alone bounds neither.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from maxpipe.data.tokenizers.chat_process import ChatInput, ChatProcess, RenderError
from maxpipe.errors import ConfigError
from maxpipe.io.text import counted

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

    def on(self, day: str) -> ChatTemplate:
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
            raise self._wrong(error) from error

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
                raise self._wrong(error) from error
        for remark in unread_remarks(unread, counted(len(conversations), "conversation")):
            _LOG.warning("%s: %s", self.path, remark)
        return texts

    def _wrong(self, error: RenderError) -> ConfigError:
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
