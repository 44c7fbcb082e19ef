"""Worker process that renders a chat template and communicates by JSON lines on stdin and stdout.

The first input line contains the template and its settings. All other lines contain one
conversation each. The worker writes one output line for each input line. Time and memory limits
apply to each conversation. The module imports nothing from maxpipe, so the process starts quickly.
Templates can use the same functions and variables as in `transformers`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MEMORY_BYTES = 1 << 30
_MAX_CHARACTERS = 1 << 24
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Maps the types of text message parts to the key that contains their text."""


class _NotPrefixError(Exception):
    """The rendered first messages are not a prefix of the full conversation."""


class _Limits:
    """Limits on CPU time and memory, enforced by the operating system."""

    def __init__(self, cpu_seconds: int):
        self._cpu_seconds = cpu_seconds
        with contextlib.suppress(ImportError, OSError, ValueError):  # not supported everywhere
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def renew(self) -> None:
        """Restart the CPU time limit for the next conversation."""
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            limit = math.ceil(time.process_time()) + self._cpu_seconds
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


class _Spans:
    """Positions of `{% generation %}` blocks in the rendered text."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Number of generation blocks in the template."""
        self.written = 0
        """Number of characters rendered so far."""
        self.found: list[tuple[int, str]] = []
        """Start position and text of each rendered block."""


class _Clock:
    """Clock for templates, which returns the date of the conversation or, if none is set, the
    current time.
    """

    day = ""

    def formatted(self, form: str) -> str:
        now = datetime.datetime.fromisoformat(self.day) if self.day else datetime.datetime.now()
        return now.strftime(form)


def _environment(spans: _Spans, clock: _Clock) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` blocks, which mark assistant text for training."""

        tags = {"generation"}  # noqa: RUF012 jinja2 declares it this way

        def parse(self, parser: Any) -> Any:
            spans.num_blocks += 1
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block opens a new scope, as in `transformers`.
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
    environment.globals["strftime_now"] = clock.formatted
    return environment


class _TrackedMessage(dict[str, Any]):
    """A message that records which keys were read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self._read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self._read.update(super().keys())
        return super().values()

    def keys(self) -> Any:
        self._read.update(super().keys())
        return super().keys()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def _unread(self) -> list[str]:
        values = dict.items(self)
        return [
            key
            for key, value in values
            if key not in self._read and key != "role" and value not in (None, "", [], {})
        ]


class _Renderer:
    """A compiled template that renders conversations."""

    def __init__(self, request: dict[str, Any]):
        import jinja2.meta

        self._spans = _Spans()
        self._clock = _Clock()
        environment = _environment(self._spans, self._clock)
        self._limits = _Limits(request["cpu_seconds"])
        self._limits.renew()
        parsed = environment.parse(request["template"])
        self._names = jinja2.meta.find_undeclared_variables(parsed)
        self._spans.num_blocks = 0  # the next compilation counts all blocks again
        self._template = environment.from_string(request["template"])
        self._tokens = request["tokens"]
        self._template_arguments: dict[str, Any] = {}

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the text of a conversation, and the spans to train on if `trained` is set."""
        self._limits.renew()
        self._clock.day = request["day"]
        self._template_arguments = {
            **self._tokens,
            **request["settings"],
            "tools": request["tools"],
        }
        messages = [_TrackedMessage(message) for message in request["messages"]]
        if any(isinstance(dict.get(message, "content"), list) for message in messages):
            messages = self._join_content_lists(messages, prompt=request["add_generation_prompt"])
        try:
            return self._render_response(request, messages)
        except MemoryError:
            raise
        except Exception:
            # Some templates compare missing content with none; others test whether content is
            # defined. Sources do not distinguish null from missing content, so both variants are
            # tried.
            without = [message for message in messages if not dict.__contains__(message, "content")]
            if not without:
                raise
            for message in without:
                message["content"] = None
            with contextlib.suppress(Exception):
                return self._render_response(request, messages)
            raise

    def _join_content_lists(
        self, messages: list[_TrackedMessage], *, prompt: bool
    ) -> list[_TrackedMessage]:
        """Return the messages, joining lists of strings if the template does not support lists."""
        joined = [
            message
            if (parts := _texts_of(dict.get(message, "content"))) is None
            else _TrackedMessage({**dict(dict.items(message)), "content": "".join(parts)})
            for message in messages
        ]
        texts = [
            text.strip()
            for message in messages
            for text in _texts_of(dict.get(message, "content")) or []
        ]
        as_parts, as_text = (
            self._try_render(messages, prompt=prompt),
            self._try_render(joined, prompt=prompt),
        )
        if as_text is not None and (
            as_parts is None
            or _has_lists(as_parts, messages)
            or any(text in as_text and text not in as_parts for text in texts)
        ):
            messages, as_parts = joined, as_text
        if as_parts is not None and _has_lists(as_parts, messages):
            raise ValueError(
                "the content of a message is a list, which the template does not support"
            )
        return messages

    def _render_response(
        self, request: dict[str, Any], messages: Sequence[_TrackedMessage]
    ) -> dict[str, Any]:
        text = self._render(messages, prompt=request["add_generation_prompt"])
        response: dict[str, Any] = {"text": text}
        if request["trained"] is not None:
            spans, rewritten = self._trained_spans(request, messages, text)
            spans = sorted(span for span in spans if span[0] < span[1])
            response |= {"spans": [list(span) for span in spans], "rewritten": rewritten}
        return {**response, "unread": self._unread(request, messages)}

    def _unread(self, request: dict[str, Any], messages: Sequence[_TrackedMessage]) -> list[str]:
        keys = {f"message.{key}" for message in messages for key in message._unread()}
        keys |= {f"chat_template_kwargs.{key}" for key in {*request["settings"]} - self._names}
        if request["tools"] and "tools" not in self._names:
            keys.add("tools")
        return sorted(keys)

    def _render(self, messages: Sequence[Any], *, prompt: bool = False) -> str:
        spans = self._spans
        spans.written, spans.found, pieces = 0, [], []
        for piece in self._template.generate(
            messages=messages,
            documents=None,
            add_generation_prompt=prompt,
            **self._template_arguments,
        ):
            pieces.append(piece)
            spans.written += len(piece)
            if spans.written > _MAX_CHARACTERS:
                raise ValueError(f"the template renders more than {_MAX_CHARACTERS} characters")
        # The rendered text may contain unpaired surrogates, which encoders reject.
        return "".join(pieces).encode("utf-8", "replace").decode()

    def _try_render(self, messages: Sequence[Any], *, prompt: bool = False) -> str | None:
        try:
            return self._render(messages, prompt=prompt)
        except MemoryError:
            raise
        except Exception:
            return None

    def _trained_spans(
        self, request: dict[str, Any], messages: Sequence[Any], text: str
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the spans of trained messages, and the number of rewritten messages."""
        trained, spans = request["trained"], []
        if self._spans.num_blocks and request["by_blocks"]:
            speaks = {
                n for n, message in enumerate(messages) if dict.get(message, "role") == "assistant"
            }
            blocks = self._generation_blocks(text)
            if wanted := [number for number in trained if number in speaks]:
                is_all = len(wanted) == len(speaks)
                spans = blocks if is_all else self._blocks_of(messages, wanted, blocks)
            trained = [number for number in trained if number not in speaks]
        rewritten = 0
        for number in trained:
            try:
                end = self._message_end(messages, number, text)
            except _NotPrefixError:
                if not request["skips_rewritten"]:
                    raise
                rewritten += 1
                continue
            spans.append((self._message_begin(messages, number, text), end))
        return spans, rewritten

    # Spans with generation blocks.

    def _generation_blocks(self, text: str) -> list[tuple[int, int]]:
        spans = [(begin, begin + len(block)) for begin, block in self._spans.found]
        for (begin, end), (_, block) in zip(spans, self._spans.found, strict=True):
            # The position of a block inside a macro or `set` is unknown.
            if text[begin:end] != block.encode("utf-8", "replace").decode():
                raise ValueError(
                    "the position of a generation block is unknown: move the block out of the "
                    "enclosing macro, filter or set"
                )
        return spans

    def _blocks_of(
        self, messages: Sequence[Any], wanted: Sequence[int], blocks: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the blocks that the `wanted` messages add to the rendered text."""

        def before(number: int) -> int:
            if number in (0, len(messages)):
                return len(blocks) if number else 0
            if self._try_render(messages[:number]) is None:
                raise _NotPrefixError(f"the template fails on the first {number} messages")
            return len(self._spans.found)

        return [block for n in wanted for block in blocks[before(n) : before(n + 1)]]

    # Spans without generation blocks.

    def _message_end(self, messages: Sequence[Any], number: int, text: str) -> int:
        """Return the end of a message: the length of the text rendered up to this message."""
        count = number + 1
        if count == len(messages):
            return len(text)
        try:
            prefix = self._render(messages[:count])
        except MemoryError:
            raise
        except Exception as error:
            raise _NotPrefixError(
                f"the template fails on the first {count} messages: {_line(error)}"
            ) from error
        if not text.startswith(prefix):
            raise _NotPrefixError(
                f"the first {count} messages do not render to a prefix of the full conversation"
            )
        return len(prefix)

    def _message_begin(self, messages: Sequence[Any], number: int, text: str) -> int:
        """Return the start position of a message in the text.

        An assistant message begins after the generation prompt. The first message begins at the
        message's content, because a template may render other text before it, such as a default
        system message.
        """
        is_answer = dict.get(messages[number], "role") == "assistant"
        prompted = (
            self._try_render(messages[:number], prompt=True) if number and is_answer else None
        )
        if prompted is not None and text.startswith(prompted):
            return len(prompted)
        low: int | None = 0
        if number:
            before = self._try_render(messages[:number])
            low = len(before) if before is not None and text.startswith(before) else None
            if low is not None and not is_answer:
                return low
        high = self._content_begin(messages, number, text)
        header = self._generation_prompt() if is_answer else ""
        if header:
            least = 0 if low is None else low
            find = text.rfind if low is None else text.find
            if (at := find(header, least, high)) >= 0:
                return at + len(header)
        if low and prompted is not None:
            high = min(high, _common_prefix_length(text, prompted))
        return max(high, low or 0)

    def _content_begin(self, messages: Sequence[Any], number: int, text: str) -> int:
        """Return the number of characters before the content of a message."""
        message = messages[number]
        for kept in ({"role": dict.get(message, "role")}, dict(dict.items(message))):
            others = [
                [*messages[:number], {**kept, "content": content}, *messages[number + 1 :]]
                for content in ("a", "b")
            ]
            rendered = [self._try_render(turns) for turns in others]
            if None not in rendered:
                return min(
                    _common_prefix_length(text, other) for other in rendered if other is not None
                )
        rule = f"message {number + 1} cannot be separated from the text before it"
        raise _NotPrefixError(rule)

    def _generation_prompt(self) -> str:
        """Return the generation prompt that follows the messages, or an empty string if none is
        found.
        """
        messages = [{"role": "user", "content": "a"}]
        before, prompted = self._try_render(messages), self._try_render(messages, prompt=True)
        if before is None or prompted is None or not prompted.startswith(before):
            return ""
        return prompted[len(before) :]


def _texts_of(content: Any) -> list[str] | None:
    """Return the strings in parts such as `{"type": "text", ...}`; None if a part is not text."""
    if not isinstance(content, list):
        return None
    parts = [part if isinstance(part, dict) else {} for part in content]
    texts = [part.get(_TEXT_KEYS.get(part.get("type", "text"), "")) for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    return strings if len(strings) == len(texts) else None


def _has_lists(text: str, messages: Sequence[_TrackedMessage]) -> bool:
    """Return whether the text contains a message's content in Python or JSON list syntax."""
    lists = [dict.get(message, "content") for message in messages]
    lists = [parts for parts in lists if isinstance(parts, list) and parts]
    written = [
        [str(parts), json.dumps(parts), json.dumps(parts, ensure_ascii=False)] for parts in lists
    ]
    return any(form in text for forms in written for form in forms)


def _common_prefix_length(one: str, other: str) -> int:
    size = min(len(one), len(other))
    pairs = zip(one[:size], other[:size], strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), size)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _error_response(error: Exception) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "the template uses too much memory"}
    kinds = (_NotPrefixError, "prefix"), (ImportError, "package")
    kind = next((name for of, name in kinds if isinstance(error, of)), "")
    return {"error": _line(error), "kind": kind}


def _serve() -> None:

    def say(answer: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()

    lines = iter(sys.stdin.buffer)
    try:
        renderer = _Renderer(json.loads(next(lines)))
    except Exception as error:
        return say(_error_response(error))
    say({})
    for line in lines:
        try:
            answer = renderer.respond(json.loads(line))
        except Exception as error:
            answer = _error_response(error)
        say(answer)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _serve()
