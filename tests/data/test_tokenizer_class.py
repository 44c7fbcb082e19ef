"""Tokenizer components that a transformers class replaces, and the class of a folder."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from maxpipe.cli import main
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxpipe.data.tokenizers.tokenizer_class import CORRECTED, REGISTERED, class_name
from maxpipe.errors import ConfigError
from tests.huggingface.test_oracle import PYTHON, reason

SPACE = "\u2581"
PUBLISHED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
"""The normalizer published with Llama 2."""
DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b"]
A, B = VOCABULARY.index("a"), VOCABULARY.index("b")
GAP, SPACED_A, END = A - 1, len(VOCABULARY), 2


def opened(folder: Path, model_type: str = "llama", **settings: Any) -> Tokenizer:
    special = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, name in enumerate(VOCABULARY[:3])
    ]
    ids = {name: i for i, name in enumerate([*VOCABULARY, f"{SPACE}a"])}
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    definition = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": PUBLISHED,
        "decoder": DECODER,
        "model": {**model, "vocab": ids, "merges": [f"{SPACE} a"]},
    }
    folder.mkdir(exist_ok=True)
    parsed = Library.from_str(json.dumps(definition))
    (folder / "tokenizer.json").write_text(parsed.to_str())
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return open_tokenizer(TokenizerConfig(kind="auto", path=str(folder)))


FILE = {
    "a": [SPACED_A],
    " a": [GAP, SPACED_A],
    "a</s>a": [SPACED_A, END, SPACED_A],
    "</s> a": [END, GAP, SPACED_A],
}
FIRST = {"a": [SPACED_A], " a": [SPACED_A], "a</s>a": [SPACED_A, END, A], "</s> a": [END, SPACED_A]}
ALWAYS = {**FIRST, "a</s>a": [SPACED_A, END, SPACED_A]}
NEVER = {**FIRST, "a": [A], "a</s>a": [A, END, A]}


@pytest.mark.parametrize(
    ("settings", "model_type", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "llama", FIRST),
        ({"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, "llama", FIRST),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True}, "llama", ALWAYS),
        ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, "llama", NEVER),
        ({"tokenizer_class": "LlamaTokenizer"}, "mistral", FILE),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", FILE),
        ({}, "llama", FILE),
    ],
)
def test_leading_space_follows_tokenizer_class(
    settings: dict[str, Any], model_type: str, ids: dict[str, list[int]], tmp_path: Path
) -> None:
    tokenizer = opened(tmp_path, model_type, **settings)
    assert {text: tokenizer.encode_chat(text).tolist() for text in ids} == ids
    assert tokenizer.encode("a").tolist() == ids["a"]
    assert tokenizer.decode(ids["a"]) == "a"


def test_fingerprint_changes_with_token_ids(tmp_path: Path) -> None:
    classes = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer")
    before, same, after = (
        opened(tmp_path / name, tokenizer_class=name).fingerprint() for name in classes
    )
    assert before == same != after


def test_ids_prepared_without_class_are_rejected_with_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tokens = tmp_path / "model", str(tmp_path / "tokens")
    opened(folder, tokenizer_class="TokenizersBackend")
    (tmp_path / "docs.jsonl").write_text('{"text": "a b a"}\n')
    given = [f"data.path={tmp_path / 'docs.jsonl'}", "data.source=jsonl", "tokenizer.kind=auto"]
    given += [f"tokenizer.path={folder}", "--out", tokens, "--workers", "1"]
    assert main(["data", "prepare", *given]) == 0, capsys.readouterr().err
    with pytest.raises(ConfigError) as refused:
        PreparedDocuments(tokens, opened(folder, tokenizer_class="LlamaTokenizer"))
    [problem] = refused.value.problems
    setting = re.match(
        r'Set "(\w+)": "(\w+)" in the tokenizer_config.json of (\S+),', problem.action
    )
    assert setting is not None and setting[3] == str(folder), problem.action
    PreparedDocuments(tokens, opened(folder, **{setting[1]: setting[2]}))
    # The setting has no effect for model types with their own tokenizer class.
    for kind in ("qwen2", "llama"):
        other = opened(tmp_path / kind, model_type=kind, tokenizer_class="LlamaTokenizer")
        assert isinstance(other, HuggingFaceTokenizer)
        assert bool(other.file_fingerprint) == (kind == "llama")


@pytest.mark.parametrize(
    ("stated", "model_type", "byte_level", "name"),
    [
        ("LlamaTokenizerFast", "llama", True, ""),
        ("LlamaTokenizerFast", "qwen2", True, "Qwen2Tokenizer"),
        ("LlamaTokenizer", "phi3", False, ""),
        ("PreTrainedTokenizerFast", "qwen2", True, "Qwen2Tokenizer"),
        ("PreTrainedTokenizerFast", "qwen3", True, ""),
        ("GPT2Tokenizer", "granite", True, ""),
        ("GPT2Tokenizer", "llama", True, "GPT2Tokenizer"),
        ("GemmaTokenizerFast", "gemma3_text", False, "GemmaTokenizer"),
        (None, "gemma2", False, "GemmaTokenizer"),
        (None, "llama", False, ""),
        ("LlamaTokenizer", None, False, "LlamaTokenizer"),
    ],
)
def test_tokenizer_class_of_folder(
    stated: str | None, model_type: str | None, byte_level: bool, name: str
) -> None:
    found = class_name(
        {"tokenizer_class": stated}, {"model_type": model_type}, byte_level=byte_level
    )
    assert found == name


def test_eos_id_in_padded_vocabulary_is_kept(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 300]}))
    tokenizer = open_tokenizer(TokenizerConfig(kind="auto", path=str(tmp_path)))
    assert (tokenizer.end_id, tokenizer.end_ids) == (2, (2, 300))
    assert tokenizer.vocab_size == 263


@pytest.mark.oracle
def test_transformers_registers_the_same_classes() -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    code = (
        "import json; from transformers.models.auto import tokenization_auto as auto; "
        "print(json.dumps([dict(auto.TOKENIZER_MAPPING_NAMES), "
        "sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)]))"
    )
    run = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    registered, corrected = json.loads(run.stdout)
    known = {*REGISTERED.values()}
    assert {k: v for k, v in registered.items() if v in known} == REGISTERED
    assert {*corrected} == CORRECTED
