"""Chat templates: from the messages of a conversation to the text that a model continues.

A template is a program that comes with a model, from strangers. It runs in jinja2's sandbox, in a
process of its own that has nothing but the messages, and that ends when it takes too long or too
much memory: the sandbox alone bounds neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from maxpipe.data.tokenizers.chat_process import ChatProcess, Message, RenderError
from maxpipe.errors import ConfigError

_CPU_SECONDS = 10
"""For one conversation."""


class ChatTemplate:
    """A template as published in `chat_template.jinja` or `tokenizer_config.json`."""

    def __init__(self, template: str, path: str, tokens: Mapping[str, str]):
        self.template = template
        self.path = path
        self.tokens = dict(tokens)
        """Control tokens that it may write, by roles such as `bos_token`."""

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
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool = True
    ) -> list[str]:
        """The text of each conversation, up to where the model's answer begins.

        Many conversations cost little more than one.

        Raises:
            ConfigError: no jinja2, a template that fails, refuses the messages, or takes too much.
        """
        with contextlib.ExitStack() as stack:
            process = self.process()
            stack.callback(process.close)
            try:
                return [
                    process.render(
                        [dict(each) for each in messages],
                        add_generation_prompt=add_generation_prompt,
                    ).text
                    for messages in conversations
                ]
            except RenderError as error:
                raise self._wrong(error) from error

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
