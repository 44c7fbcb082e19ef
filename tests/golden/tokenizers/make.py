"""Writes the files in this folder. Needs transformers, sentencepiece, tiktoken and tokenizers.

    python tests/golden/tokenizers/make.py

What is in `expected.json` comes from these libraries alone, not from maxpipe.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["<|begin_of_text|>", "<|end_of_text|>", "<|turn|>", "<|stop|>"]
TEXTS = [
    "",
    "a",
    " a  b ",
    "Hello, world: 12345 tokens.",
    "naïve 語 😀\n\tdef f(x):\n    return x  # <think> a.b </s>",
    "<s> <|turn|> <|end_of_text|>",
    "\u00a0e\u0301 \uff11\uff12 ﬁ",
]
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {{- '<|turn|>' + message['role'] + '\\n' + message['content'] | trim + '<|stop|>' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
{%- endif %}
"""
CHATS = [
    [{"role": "user", "content": ' Say "hi" & <b> \n'}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve 語?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ],
]


def library(name: str) -> Any:
    return importlib.import_module(name)


def corpus() -> list[str]:
    return [
        line
        for page in (*sorted((DOCS / "guides/data").glob("*.md")), DOCS / "concepts/engine.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def sentencepiece_model(kind: str) -> dict[str, Any]:
    library("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=(model := io.BytesIO()),
        vocab_size=421,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        user_defined_symbols=["<think>", "a.b"],
        control_symbols=["<|turn|>"],
        num_threads=1,
        minloglevel=2,
    )
    (HERE / f"{kind}.model").write_bytes(model.getvalue())
    found = library("sentencepiece").SentencePieceProcessor(model_proto=model.getvalue())
    return {text: [found.encode(text), found.decode(found.encode(text))] for text in TEXTS}


def ranks() -> dict[str, Any]:
    tokenizers = library("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=431, initial_alphabet=alphabet)
    found.train_from_iterator(corpus(), trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + number): byte for number, byte in enumerate(others)}
    table = {
        bytes(byte_of[each] for each in token): rank for token, rank in found.get_vocab().items()
    }
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in table.items()]
    lines.sort(key=lambda line: int(line.split()[1]))
    (HERE / "ranks.tiktoken").write_text("".join(lines))
    encoding = library("tiktoken").Encoding(
        "golden",
        pat_str=PATTERN,
        mergeable_ranks=table,
        special_tokens={name: len(table) + i for i, name in enumerate(CONTROL)},
    )
    return {
        text: [encoding.encode_ordinary(text), encoding.encode(text, allowed_special="all")]
        for text in TEXTS
    }


def folder() -> dict[str, Any]:
    tokenizers, transformers = library("tokenizers"), library("transformers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=433, initial_alphabet=alphabet, special_tokens=CONTROL
    )
    found.train_from_iterator(corpus(), trainer)
    found.add_tokens(["<think>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=found,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(HERE / "folder")
    generation = {"bos_token_id": 0, "eos_token_id": [1, 3], "temperature": 0.6}
    (HERE / "folder/generation_config.json").write_text(json.dumps(generation))
    fast = transformers.AutoTokenizer.from_pretrained(HERE / "folder")
    texts = [fast.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS]
    return {
        "texts": {text: fast.encode(text, add_special_tokens=False) for text in TEXTS[:-2]},
        "chats": [
            [chat, text, fast.encode(text, add_special_tokens=False)]
            for chat, text in zip(CHATS, texts, strict=True)
        ],
    }


if __name__ == "__main__":
    expected = {
        "unigram": sentencepiece_model("unigram"),
        "bpe": sentencepiece_model("bpe"),
        "pattern": PATTERN,
        "control": CONTROL,
        "ranks": ranks(),
        "folder": folder(),
    }
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (HERE / "expected.json").write_text(text + "\n", encoding="utf-8")
