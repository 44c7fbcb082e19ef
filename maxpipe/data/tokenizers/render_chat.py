"""The process in which a chat template runs: JSON lines on stdin, a line for each on stdout.

The first line is the template with its settings, each other one a conversation. Limits of time and
memory hold for each conversation. Imports no module of maxpipe, so that it starts at once. The
names that templates may use are those of `transformers`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 1 << 24


class _NotPrefixError(Exception):
    """The first messages alone are rendered as another text than the whole begins with."""


class _Limits:
    """What the operating system ends this process for."""

    def __init__(self, cpu_seconds: int):
        self._cpu_seconds = cpu_seconds
        with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def renew(self) -> None:
        """From now on the whole time again."""
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            limit = math.ceil(time.process_time()) + self._cpu_seconds
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


class _Spans:
    """Where `{% generation %}` blocks are in the text that a template writes."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """In the template."""
        self.written = 0
        """Characters so far."""
        self.found: list[tuple[int, str]] = []
        """Begin and text of each."""


def _environment(spans: _Spans) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant says, for training."""

        tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            spans.num_blocks += 1
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block has a scope of its own, as that of `transformers` has.
            block = jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body)
            return block.set_lineno(line)

        def _marked(self, caller: Any) -> str:
            text = caller()
            spans.found.append((spans.written, text))
            return text

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Renderer:
    """A template, ready for conversations."""

    def __init__(self, request: dict[str, Any]):
        self._spans = _Spans()
        environment = _environment(self._spans)
        self._limits = _Limits(request["cpu_seconds"])
        self._limits.renew()
        self._template = environment.from_string(request["template"])
        self._tokens = request["tokens"]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The text of a conversation; with `roles` also the spans that are trained on."""
        self._limits.renew()
        messages, roles = request["messages"], request["roles"]
        text = self._written(messages, prompt=request["add_generation_prompt"])
        if roles is None:
            return {"text": text}
        if self._spans.num_blocks and roles == ["assistant"]:
            spans = self._marked(text)
        else:
            spans = self._by_prefixes(messages, roles, text)
        return {"text": text, "spans": [[begin, end] for begin, end in spans if begin < end]}

    def _written(self, messages: Sequence[Any], *, prompt: bool) -> str:
        spans = self._spans
        spans.written, spans.found, pieces = 0, [], []
        for piece in self._template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=prompt,
            **self._tokens,
        ):
            pieces.append(piece)
            spans.written += len(piece)
            if spans.written > _MOST_CHARACTERS:
                raise ValueError(f"it writes more than {_MOST_CHARACTERS} characters")
        # A template can write half of a surrogate pair, which no encoder takes.
        return "".join(pieces).encode("utf-8", "replace").decode()

    def _marked(self, text: str) -> list[tuple[int, int]]:
        spans = [(begin, begin + len(block)) for begin, block in self._spans.found]
        for (begin, end), (_, block) in zip(spans, self._spans.found, strict=True):
            # Of a block inside a macro or `set` nothing says where its text goes.
            if text[begin:end] != block.encode("utf-8", "replace").decode():
                raise ValueError(
                    "the text of a generation block is not where the block is: take it out of the "
                    "macro, filter or set that it is inside"
                )
        return spans

    def _by_prefixes(
        self, messages: Sequence[Any], roles: Sequence[str], text: str
    ) -> list[tuple[int, int]]:
        """For each message of the roles, what it adds to the text of those before it.

        What a model is given before it answers is not part of an answer.
        """
        spans = []
        for number, message in enumerate(messages):
            if message["role"] not in roles:
                continue
            begin = self._end(messages[:number], text) if number else 0
            if number and message["role"] == "assistant":
                asked = self._written(messages[:number], prompt=True)
                begin = len(asked) if text.startswith(asked) else begin
            last = number + 1 == len(messages)
            end = len(text) if last else self._end(messages[: number + 1], text)
            spans.append((begin, end))
        return spans

    def _end(self, messages: Sequence[Any], text: str) -> int:
        """Where the text of the first messages ends in that of all."""
        try:
            prefix = self._written(messages, prompt=False)
        except MemoryError:
            raise
        except Exception as error:
            raise _NotPrefixError(f"of {len(messages)} it says: {_line(error)}") from error
        if not text.startswith(prefix):
            raise _NotPrefixError(f"of {len(messages)} it writes a text that the whole lacks")
        return len(prefix)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _failed(error: Exception) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "it takes too much memory"}
    kinds = (_NotPrefixError, "prefix"), (ImportError, "package")
    kind = next((name for of, name in kinds if isinstance(error, of)), "")
    return {"error": _line(error), "kind": kind}


def _serve() -> None:
    """Answers lines until there are no more."""

    def say(answer: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()

    lines = iter(sys.stdin.buffer)
    try:
        renderer = _Renderer(json.loads(next(lines)))
    except Exception as error:
        return say(_failed(error))
    say({})
    for line in lines:
        try:
            answer = renderer.answer(json.loads(line))
        except Exception as error:
            answer = _failed(error)
        say(answer)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _serve()
