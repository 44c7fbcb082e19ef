"""Chat templates are untrusted programs: access, time and memory are limited."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from maxpipe.data.tokenizers import chat, render_chat
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate
from maxpipe.errors import ConfigError
from maxpipe.io import worker_process

MESSAGES = [{"role": "user", "content": "Hi <there> é"}]


def render(template: str, tokens: dict[str, str] | None = None, prompt: bool = True) -> str:
    made = ChatTemplate(template, "chat_template.jinja", tokens or {})
    [text] = made.render([ChatInput(MESSAGES)], add_generation_prompt=prompt)
    return text


def rejected_rule(template: str) -> str:
    with pytest.raises(ConfigError) as error:
        render(template)
    [problem] = error.value.problems
    assert problem.where == "chat_template.jinja" and problem.action.endswith(".")
    return problem.rule


def test_template_variables_and_filters() -> None:
    """Blocks are trimmed, JSON is not HTML-escaped, and `generation` does not change the text."""
    template = """{% for message in messages %}
    {% generation %}
{{ bos_token + message.content }}{{ message | tojson }}
    {% endgeneration %}
    {% if loop.first %}{% continue %}{% endif %}
never
{% endfor %}
{% if add_generation_prompt %}{{ strftime_now('%%') }}>{% endif %}"""
    line = '<s>Hi <there> é{"role": "user", "content": "Hi <there> é"}\n'
    assert render(template, {"bos_token": "<s>"}) == f"{line}%>"
    assert render(template, {"bos_token": "<s>"}, prompt=False) == line


def test_conversations_are_rendered_in_one_call() -> None:
    made = ChatTemplate("{{ messages | length }}", "a", {})
    assert made.render([ChatInput(each) for each in (MESSAGES, [], MESSAGES * 3)]) == [
        "1",
        "0",
        "3",
    ]


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for", "unexpected 'end of template'"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages[0].nothing.more }}", "has no attribute"),
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_unsafe_or_invalid_templates_are_rejected(template: str, why: str) -> None:
    assert why in rejected_rule(template)


LOOP = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.fault("H8")
@pytest.mark.parametrize("template", [LOOP, "{{ 9 ** (9 ** 9) }}"])
def test_template_without_end_hits_time_limit(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_CPU_SECONDS", 1)
    assert "time or memory limit" in rejected_rule(template)


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    "template", ["{{ 'a' * 10 ** 10 }}", "{{ '%09999999999d' % 1 }}", "{{ 'a' | center(10**10) }}"]
)
def test_template_hits_memory_limit(template: str) -> None:
    assert "too much memory" in rejected_rule(template)


def test_template_output_length_is_limited() -> None:
    assert "renders more than" in rejected_rule(
        f"{{{{ 'a' * {render_chat._MAX_CHARACTERS + 1} }}}}"
    )


def test_template_process_gets_no_environment_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that escapes the sandbox finds no secrets in its process."""
    monkeypatch.setenv("MY_SECRET", "of the user")
    seen: list[dict[str, str]] = []
    start = worker_process.subprocess.Popen

    def watched(*args, **options):
        seen.append(options["env"])
        return start(*args, **options)

    monkeypatch.setattr(worker_process.subprocess, "Popen", watched)
    assert render("a") == "a" and [set(each) for each in seen] == [{"PYTHONPATH"}]


def test_missing_jinja_suggests_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('not here')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError) as error:
        render("a")
    assert error.value.problems[0].action == "Run: pip install 'maxpipe[tokenizers]'"
