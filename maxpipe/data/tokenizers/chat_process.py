"""A process of its own for a chat template, asked for one conversation after the other.

It has neither the environment's variables, which may hold secrets, nor this process' files. One
that takes too long, writes too much or ends is gone, and the conversation that it had is known.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from maxpipe.boundary.asked import AskedProcess
from maxpipe.boundary.typed import parse
from maxpipe.data.tokenizers import render_chat

_START_SECONDS = 60.0
"""For a machine that is busy; the processor's time is what a template is given."""
_MOST_REQUEST_BYTES = 1 << 24
_MOST_ANSWER_BYTES = 1 << 28

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template reads."""


class Rendered(NamedTuple):
    """Of a conversation the text, and as spans of characters what is trained on."""

    text: str
    spans: list[tuple[int, int]]


class _Answer(TypedDict, total=False):
    """A line of the process; that to its settings is empty."""

    text: str
    spans: list[tuple[int, int]]
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
        self._process = AskedProcess(
            [sys.executable, "-P", render_chat.__file__],
            {"PYTHONPATH": paths},
            most_answer_bytes=_MOST_ANSWER_BYTES,
            own_session=True,  # Ctrl-C is for the one that asks, which saves and ends it
        )
        self.close = self._process.close
        """Ends the process; also when nothing refers to this any more."""
        self._seconds = cpu_seconds + _START_SECONDS
        settings = {"template": template, "tokens": dict(tokens), "cpu_seconds": cpu_seconds}
        try:
            self._ask(settings)
        except RenderError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.is_alive

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        roles: Sequence[str] | None = None,
    ) -> Rendered:
        """The text of a conversation; with `roles` also the spans of what they say.

        Raises:
            RenderError: the template fails, refuses the messages, or takes too much.
        """
        answer = self._ask(
            {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "roles": None if roles is None else list(roles),
            }
        )
        return Rendered(answer.get("text", ""), answer.get("spans", []))

    def _ask(self, request: Mapping[str, Any]) -> _Answer:
        raw = json.dumps(request).encode() + b"\n"
        if len(raw) > _MOST_REQUEST_BYTES:
            raise RenderError(f"they take {len(raw)} bytes, at most {_MOST_REQUEST_BYTES} are read")
        try:
            answer = parse(self._process.ask(raw, self._seconds), _Answer)
        except TimeoutError:
            self.close()
            raise RenderError("it takes too long") from None
        except (OSError, ValueError):
            code = self._process.code
            self.close()
            ended = code is None or code < 0
            text = "it takes too long or too much memory" if ended else "it ends its process"
            raise RenderError(text) from None
        if "error" in answer:
            raise RenderError(answer["error"], answer.get("kind", ""))
        return answer
