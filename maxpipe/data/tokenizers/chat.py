"""Chat templates: from the messages of a conversation to the text that a model continues.

A template is a program that comes with a model, from strangers. It runs in jinja2's sandbox, in a
process of its own that has nothing but the messages, and that ends when it takes too long or too
much memory: the sandbox alone bounds neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from maxpipe.boundary.typed import parse
from maxpipe.data.tokenizers import render_chat
from maxpipe.errors import ConfigError

_CPU_SECONDS = 10
_START_SECONDS = 60.0
"""For a machine that is busy; the processor's time is what a template is given."""
_CONVERSATIONS_PER_SECOND = 200

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template reads."""


class _Answer(TypedDict, total=False):
    texts: list[str]
    error: str
    kind: str


class ChatTemplate:
    """A template as published in `chat_template.jinja` or `tokenizer_config.json`."""

    def __init__(self, template: str, path: str, tokens: Mapping[str, str]):
        self.template = template
        self.path = path
        self._tokens = dict(tokens)

    def render(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool = True
    ) -> list[str]:
        """The text of each conversation, up to where the model's answer begins.

        Many conversations cost little more than one.

        Raises:
            ConfigError: no jinja2, a template that fails, refuses the messages, or takes too much.
        """
        request = {
            "template": self.template,
            "tokens": self._tokens,
            "conversations": [[dict(each) for each in messages] for messages in conversations],
            "add_generation_prompt": add_generation_prompt,
            "cpu_seconds": _CPU_SECONDS + len(conversations) // _CONVERSATIONS_PER_SECOND,
        }
        answer = self._asked(json.dumps(request), request["cpu_seconds"] + _START_SECONDS)
        if "texts" in answer and len(answer["texts"]) == len(conversations):
            return answer["texts"]
        error = answer.get("error", "it gave no answer")
        if answer.get("kind") == "package":
            action = "Run: pip install 'maxpipe[tokenizers]'"
            raise ConfigError.one(self.path, None, f"needs the package jinja2: {error}.", action)
        raise self._wrong(error)

    def _asked(self, request: str, seconds: float) -> _Answer:
        # Neither the environment, which may hold secrets, nor this process' files are passed on.
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", render_chat.__file__]
        try:
            ran = subprocess.run(
                command,
                input=request.encode(),
                capture_output=True,
                timeout=seconds,
                env={"PYTHONPATH": paths},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._wrong("it takes too long") from error
        try:
            return parse(ran.stdout, _Answer)
        except ValueError:
            ended = ran.returncode < 0
            raise self._wrong(
                "it takes too long or too much memory" if ended else "it ends its process"
            ) from None

    def _wrong(self, error: str) -> ConfigError:
        return ConfigError.one(
            self.path,
            None,
            f"must be a chat template that takes these messages: {error[:300].rstrip('.')}.",
            "Correct the messages or the template, or give the model plain text.",
        )
