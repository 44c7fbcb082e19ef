"""The process in which a chat template runs: a request on stdin, the answer on stdout.

Imports no module of maxpipe, so that it starts at once. The names that templates may use are those
of `transformers`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from typing import Any

_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 1 << 24


def _limit(cpu_seconds: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant says, for training; here it is plain text."""

        tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

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


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        environment = _environment()
    except ImportError as error:
        return {"error": str(error), "kind": "package"}
    _limit(request["cpu_seconds"])
    try:
        template = environment.from_string(request["template"])
        texts, characters = [], 0
        for messages in request["conversations"]:
            text = template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=request["add_generation_prompt"],
                **request["tokens"],
            )
            characters += len(text)
            if characters > _MOST_CHARACTERS:
                return {"error": f"it writes more than {_MOST_CHARACTERS} characters"}
            # A template can write half of a surrogate pair, which no encoder takes.
            texts.append(text.encode("utf-8", "replace").decode())
        return {"texts": texts}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        return {"error": line or type(error).__name__}


if __name__ == "__main__":
    answer = _answer(json.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(json.dumps(answer).encode())
