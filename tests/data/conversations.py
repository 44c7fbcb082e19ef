"""Conversations, chat templates in three published styles, and a tokenizer for chat tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set said = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set said = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (said if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<start_of_image>' }}
            {%- else %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
GEMMA4 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content if message.content is string else message.content[0].text }}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.content + '<|im_end|>' }}
    {%- else %}
        {%- for part in message.content %}
            {{- '\\n\\n<|image|>\\n\\n' if part.type == 'image' else part.text }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN_VL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content if message.content is string else message.content[0].text }}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.content + '<|im_end|>' }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
GEMMA4_TOKENS = ("<|image>", "<|image|>", "<image|>", "<|video|>")
IMAGE_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
)


def messages_of(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """Build messages from (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS = [
    messages_of(
        ("user", "Where is the station?"), ("assistant", "Behind the market, on the left.")
    ),
    messages_of(
        ("system", "Answer in one word."),
        ("user", "Colour of grass?\n\nPlease."),
        ("assistant", "Green 🌱"),
        ("user", "And of  snow"),
        ("assistant", "White,\nmostly. "),
    ),
    messages_of(
        ("user", "naïve 語 😀"), ("assistant", ""), ("user", " "), ("assistant", "é\n\n1234567")
    ),
    messages_of(("user", "A question without an answer")),
]


def without_blocks(template: str) -> str:
    """Remove the generation blocks from a chat template."""
    for each in ("{%- generation %}", "{%- endgeneration %}"):
        template = template.replace(each, "")
    return template


def make_tokenizer(folder: Path, template: str = "", more: Sequence[str] = ()) -> Path:
    """Write a Hugging Face tokenizer folder with a small, deterministic byte-level BPE.

    `more` lists control tokens that follow the vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [each["content"] for messages in CONVERSATIONS for each in messages]
    made.train_from_iterator([*texts, "user assistant system"] * 3, trainer)
    made.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, *more)])
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {**ROLES, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_records(path: Path, records: Sequence[Any]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


class Listed:
    """In-memory source of records."""

    name = "listed"
    unreadable: tuple[int, ...] = ()

    def __init__(self, records: Sequence[Any]):
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:
        return str(self.records[index])

    def record(self, index: int) -> Any:
        return self.records[index]

    def where(self, index: int) -> str:
        return f"records.jsonl:{index + 1}"

    def fingerprint(self) -> str:
        return str(len(self.records))

    def folder(self, index: int) -> str:
        return "."

    def content(self, moved: object = None) -> dict[str, str]:
        return {}

    def check_unchanged(self, moved: object = None) -> None:
        """Do nothing: an in-memory source has no files."""
