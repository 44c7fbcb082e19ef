"""Messages whose content is a list of text parts, as in records for OpenAI and Gemma 3."""

from __future__ import annotations

from typing import Any

import pytest

from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat_records import conversation_of
from maxpipe.data.formats.record_text import BadRecord
from maxpipe.data.tokenizers.chat import ChatInput, ChatTemplate, Masking, RenderedChat, RenderError

CONFIG = SourceConfig(chat="messages")
TEMPLATES = {
    "adds": "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}</s>{% endfor %}",
    "trims": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "skips": "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}"
    "</s>{% endfor %}",
    "dumps": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content | tojson }}{% endif %}</s>{% endfor %}",
}
READS = """\
{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}\
{% else %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}</s>{% endfor %}"""


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def rendered(template: str, messages: list[dict[str, Any]]) -> RenderedChat:
    found: ChatInput = conversation_of({"messages": messages}, CONFIG)
    asked = "{% if add_generation_prompt %}<assistant>{% endif %}"
    process = ChatTemplate(template + asked, "t.jinja", {}).process()
    try:
        return process.render(found, masking=Masking(by_blocks=True, skips_rewritten=True))
    finally:
        process.close()


def trained(found: RenderedChat) -> list[str]:
    return [found.text[begin:end] for begin, end in found.spans]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_text_parts_are_joined_for_string_templates(template: str) -> None:
    said = [
        {"role": "user", "content": parts("é", "?", kind="input_text"), "name": "x"},
        {"role": "assistant", "content": parts("yes")},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    found = rendered(template, said)
    assert found.text == "<user>é?</s><assistant>yes</s><user>and</s><assistant>no</s>"
    assert trained(found) == ["yes</s>", "no</s>"]
    assert found.unread == ("message.name",)


def test_list_templates_receive_content_parts() -> None:
    said = [{"role": "user", "content": parts("a", "b")}, {"role": "assistant", "content": "c"}]
    found = rendered(READS, said)
    assert found.text == "<user>(a)(b)</s><assistant>c</s>"
    assert trained(found) == ["c</s>"]


def test_unsupported_content_part_is_rejected() -> None:
    said = [{"role": "user", "content": [{"type": "thing"}]}, {"role": "assistant", "content": "c"}]
    with pytest.raises(RenderError, match="a list, which the template does not support"):
        rendered(TEMPLATES["trims"], said)


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "file"])
def test_non_text_parts_are_rejected(kind: str) -> None:
    with pytest.raises(BadRecord) as error:
        conversation_of({"messages": [{"role": "user", "content": [{"type": kind}]}]}, CONFIG)
    assert error.value.value == "message 1"
    assert f"parts of type {kind} are not supported" in error.value.rule


def test_refusal_is_used_as_assistant_content() -> None:
    said = [
        {"role": "user", "content": "how?"},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
    ]
    found = rendered(TEMPLATES["adds"], said)
    assert trained(found) == ["I cannot.</s>"] and not found.unread
