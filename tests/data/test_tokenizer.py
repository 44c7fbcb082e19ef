"""Tokenizers: round trip, separate control IDs, and actionable errors."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizer import ByteTokenizer, Tokenizer, fit_tokenizer, open_tokenizer
from maxpipe.errors import ConfigError
from tests.errors import raises

TEXT = "def add(a, b):\n    return a + b  # é 語 <|endoftext|> </s>"
UTF8 = st.text(st.characters(exclude_categories=["Cs"]))


def train_byte_level(path: Path, special: list[str]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    return str(path)


def write_byte_fallback(path: Path) -> str:
    """Write a SentencePiece-style vocabulary with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
    vocabulary |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocabulary |= {"\u2581": 259, "a": 260, "\u2581a": 261, "é": 262}
    merges = [("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore
    tokenizer.decoder = decoders.Sequence(  # type: ignore
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def byte_level_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    return Path(train_byte_level(folder / "tokenizer.json", ["<|endoftext|>"]))


@pytest.fixture(scope="module")
def byte_level(byte_level_file: Path) -> Tokenizer:
    return open_tokenizer(TokenizerConfig(kind="huggingface", path=str(byte_level_file)))


def check_contract(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert list(tokenizer.count([text, "", text])) == [len(ids), 0, len(ids)]
    assert not set(ids.tolist()) & {tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id}
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    control = [tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id]
    assert not tokenizer.byte_lengths[control].any()
    assert tokenizer.decode([tokenizer.begin_id, *ids, tokenizer.end_id]) == text


@given(UTF8)
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    check_contract(tokenizer, text)
    assert tokenizer.encode(text).tolist() == list(text.encode())


def test_byte_tokenizer_control_ids() -> None:
    tokenizer = open_tokenizer(TokenizerConfig())
    ids = (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id, tokenizer.vocab_size)
    assert ids == (256, 257, 258, 259)
    assert tokenizer.decode([0xC3, 256, 0x61]) == "\ufffda"


def test_byte_level_bpe_round_trip(byte_level: Tokenizer) -> None:
    """Truncation and padding settings of the file and control tokens in the text are ignored."""
    check_contract(byte_level, TEXT)
    check_contract(byte_level, "😀 unseen\ttext")
    assert len(byte_level.encode(TEXT)) < len(TEXT.encode())
    assert byte_level.begin_id == byte_level.end_id == byte_level.pad_id == 0


def test_byte_fallback_bpe_round_trip(tmp_path: Path) -> None:
    path = write_byte_fallback(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(TokenizerConfig(kind="huggingface", path=path))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (0, 1, 263)
    check_contract(tokenizer, "a aé語 b")


def test_control_tokens_from_tokenizer_config(tmp_path: Path) -> None:
    path = train_byte_level(tmp_path / "tokenizer.json", ["<go>", "<stop>", "<none>"])
    config = TokenizerConfig(kind="huggingface", path=path)
    with pytest.raises(ConfigError) as error:
        open_tokenizer(config)
    assert "<go>, <stop>, <none>" in error.value.problems[0].rule
    entries = {"bos_token": "<go>", "eos_token": {"content": "<stop>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    tokenizer = open_tokenizer(config)
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (0, 1, 1)
    before = tokenizer.fingerprint()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**entries, "pad_token": "<none>"}))
    assert open_tokenizer(config).pad_id == 2
    assert open_tokenizer(config).fingerprint() != before
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        open_tokenizer(config)


def test_missing_or_invalid_tokenizer_file_is_rejected(tmp_path: Path) -> None:
    for path, text in [("", "No such file"), (str(tmp_path), "this folder does not")]:
        with pytest.raises(ConfigError) as error:
            open_tokenizer(TokenizerConfig(kind="huggingface", path=path))
        [problem] = error.value.problems
        assert problem.where == "tokenizer.path" and text in problem.rule
        assert "tokenizer.kind=bytes" in problem.action
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    with raises(ConfigError, "tokenizer.path", suggests=["tokenizer.path", "tokenizer.json"]):
        open_tokenizer(TokenizerConfig(kind="huggingface", path=str(bad)))


def test_missing_tokenizers_package_suggests_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as error:
        open_tokenizer(TokenizerConfig(kind="huggingface", path=str(path)))
    assert error.value.problems[0].action == "Run: pip install 'maxpipe[tokenizers]'"


def test_fit_tokenizer_rejects_small_model_vocabulary() -> None:
    fit_tokenizer(ByteTokenizer(), 259)
    with pytest.raises(ConfigError) as error:
        fit_tokenizer(ByteTokenizer(), 258)
    [problem] = error.value.problems
    assert (problem.where, problem.value) == ("model.vocab_size", "258")
    assert "at least 259" in problem.rule and "model.vocab_size=384" in problem.action


@pytest.mark.fault("H4")
def test_tokenizer_panic_raises_config_error(byte_level_file: Path, tmp_path: Path) -> None:
    """A Rust panic raises an exception that is not a subclass of `Exception`."""
    content = json.loads(byte_level_file.read_text())
    table = base64.b64encode(b"\x10\0\0\0abcdefghijklmnopqrst").decode()
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(path)))
    for act in (lambda: tokenizer.encode("a text"), lambda: tokenizer.count(["a text"])):
        with raises(ConfigError, "tokenizer.path", suggests="tokenizer.path"):
            act()


@pytest.mark.fault("H4")
def test_huge_token_ids_do_not_exhaust_memory(byte_level_file: Path, tmp_path: Path) -> None:
    content = json.loads(byte_level_file.read_text())
    content["added_tokens"][0]["id"] = 2**32 - 1
    content["model"]["vocab"]["<|endoftext|>"] = 2**32 - 1
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with raises(ConfigError, "tokenizer.path", names=[4294967295, 67108864]):
        open_tokenizer(TokenizerConfig(kind="huggingface", path=str(path)))
