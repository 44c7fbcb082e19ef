"""Small tokenizers in the file formats of published models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = ["the sea was wide and the wind was cold", "A question of several words", "12 345 6"] * 20
SPACE = "\u2581"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def put(folder: Path, **files: Any) -> None:
    """Write JSON files."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The published pattern of Qwen2."""


def byte_level(folder: Path, special: Sequence[str], post: str = "") -> dict[str, int]:
    """Write a byte-level `tokenizer.json` with the template `post`; return control token IDs."""
    made: Any = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    return _saved(folder, made, special, post)


def _saved(folder: Path, made: Any, special: Sequence[str], post: str) -> dict[str, int]:
    """Write `tokenizer.json` with the template `post`; return control token IDs."""
    ids = {name: made.token_to_id(name) for name in special}
    if post:
        named = [(name, i) for name, i in ids.items() if name in post]
        made.post_processor = processors.TemplateProcessing(single=post, special_tokens=named)
    made.save(str(folder / "tokenizer.json"))
    return ids


def spaced(folder: Path, special: Sequence[str], post: str, *, prefix: bool) -> dict[str, int]:
    """Write a BPE tokenizer with byte fallback, as converted from SentencePiece.

    If `prefix` is true, a space is prepended to the input.
    """
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    made: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    before = [normalizers.Prepend(SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=pieces, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    definition = json.loads(made.to_str())
    definition["added_tokens"] = [
        each for each in definition["added_tokens"] if each["content"] in special
    ]
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made = Tokenizer.from_str(json.dumps(definition))
    made.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return _saved(folder, made, special, post)


def sentencepiece(folder: Path) -> dict[str, int]:
    """Write a BPE `tokenizer.model` with byte fallback, begin and end tokens."""
    import sentencepiece as library

    text = folder / "texts.txt"
    text.write_text("\n".join(TEXTS))
    library.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    return {"<unk>": 0, "<s>": 1, "</s>": 2}


Made = dict[str, int]


def llama3(folder: Path) -> Made:
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    ids = byte_level(folder, [begin, end, "<|eot_id|>"], f"{begin} $A")
    put(
        folder,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": "<|eot_id|>",
            "chat_template": LLAMA,
        },
    )
    return {"bos_token_id": ids[begin], "eos_token_id": ids["<|eot_id|>"]}


def qwen(folder: Path) -> Made:
    ids = byte_level(folder, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    put(
        folder,
        tokenizer_config={
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHATML,
        },
    )
    return {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}


def gemma(folder: Path) -> Made:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    ids = spaced(folder, special, "<bos> $A", prefix=False)
    put(
        folder,
        tokenizer_config={
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "chat_template": TURNS,
        },
    )
    return {"bos_token_id": 2, "eos_token_id": ids["<eos>"], "pad_token_id": 0}


def llama2(folder: Path) -> Made:
    spaced(folder, ["<unk>", "<s>", "</s>"], "<s> $A", prefix=True)
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    put(folder, tokenizer_config={**settings, "chat_template": INST})
    return {"bos_token_id": 1, "eos_token_id": 2}


def llama2_with(**settings: Any) -> Callable[[Path], Made]:
    """Return a maker of Llama 2 with changed settings."""

    def make(folder: Path) -> Made:
        ids = llama2(folder)
        changed(folder / "tokenizer_config.json", **settings)
        return ids

    return make


def llama2_first(folder: Path) -> Made:
    """Llama 2 as newer releases of transformers save it."""
    ids = llama2(folder)
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}
    changed(folder / "tokenizer.json", normalizer=None, pre_tokenizer={**metaspace, "split": False})
    return ids


def byte_level_with(name: str) -> Callable[[Path], Made]:
    """Split digits, no NFC, and a tokenizer class that may override both."""

    def make(folder: Path) -> Made:
        begin, end = "<|bos|>", "<|endoftext|>"
        ids = byte_level(folder, [begin, end], f"{begin} $A")
        steps = [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]
        steps[1]["trim_offsets"] = True
        changed(
            folder / "tokenizer.json",
            normalizer=None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        )
        settings = {"tokenizer_class": name, "bos_token": begin, "eos_token": end}
        put(folder, tokenizer_config={**settings, "unk_token": end, "chat_template": CHATML})
        return {"bos_token_id": ids[begin], "eos_token_id": ids[end]}

    return make


def gemma_without_class(folder: Path) -> Made:
    """Gemma without a tokenizer class, which then depends on the model type."""
    ids = gemma(folder)
    changed(folder / "tokenizer_config.json", tokenizer_class=None)
    return ids


def changed(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def mistral(folder: Path) -> Made:
    spaced(folder, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "<s> $A", prefix=True)
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True}
    put(folder, tokenizer_config={**settings, "chat_template": INST})
    return {"bos_token_id": 1, "eos_token_id": 2}


def gpt_oss(folder: Path) -> Made:
    special = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>"]
    ids = byte_level(folder, [*special, "<|end|>", "<|call|>"])
    put(
        folder,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
        },
        generation_config={
            "eos_token_id": [ids["<|return|>"], ids["<|endoftext|>"], ids["<|call|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    (folder / "chat_template.jinja").write_text(HARMONY)
    return {"eos_token_id": ids["<|return|>"]}


def phi3(folder: Path) -> Made:
    """No begin token is prepended, although one is defined and `add_bos_token` is set."""
    spaced(folder, ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"], "", prefix=True)
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    settings |= {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    put(folder, tokenizer_config={**settings, "chat_template": CHATML})
    return {"bos_token_id": 1, "eos_token_id": 4}


def mapped(folder: Path) -> Made:
    """Only a map of special tokens, and a post-processor that also appends an end token."""
    ids = byte_level(folder, ["<|bos|>", "<|eos|>"], "<|bos|> $A <|eos|>")
    put(folder, special_tokens_map={"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}})
    return {"bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|eos|>"]}


def model_file(**settings: Any) -> Callable[[Path], Made]:
    """Return a maker of a folder that has only a SentencePiece model."""

    def make(folder: Path) -> Made:
        sentencepiece(folder)
        whole = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        whole |= {"unk_token": "<unk>", **settings}
        put(folder, tokenizer_config={**whole, "chat_template": INST})
        return {"bos_token_id": 1, "eos_token_id": 2}

    return make
