"""Third-party tokenizer files: the same IDs as the original libraries, and actionable errors.

Those libraries wrote the expected results: see `tests/golden/tokenizers/make.py`.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizer import ByteTokenizer, Tokenizer, open_text_stream, open_tokenizer
from maxpipe.data.tokenizers import sentencepiece, tiktoken
from maxpipe.data.tokenizers.byte_bpe import PRESETS
from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden/tokenizers"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
RANKS = TokenizerConfig(
    kind="tiktoken",
    path=str(GOLDEN / "ranks.tiktoken"),
    split_pattern=EXPECTED["pattern"],
    special_tokens=EXPECTED["control"],
)
CONFIGS = {
    "unigram": TokenizerConfig(kind="sentencepiece", path=str(GOLDEN / "unigram.model")),
    "bpe": TokenizerConfig(kind="sentencepiece", path=str(GOLDEN / "bpe.model")),
    "ranks": RANKS,
    "folder": TokenizerConfig(kind="huggingface", path=str(GOLDEN / "folder")),
}
UTF8 = st.text(st.characters(exclude_categories=["Cs"]))
MODELS = ("unigram", "bpe")


@pytest.fixture(scope="module")
def opened() -> dict[str, Tokenizer]:
    return {"bytes": ByteTokenizer()} | {
        name: open_tokenizer(config) for name, config in CONFIGS.items()
    }


@pytest.fixture(params=["bytes", *CONFIGS])
def tokenizer(request: pytest.FixtureRequest, opened: dict[str, Tokenizer]) -> Tokenizer:
    return opened[request.param]


def rejection(config: TokenizerConfig) -> str:
    with pytest.raises(ConfigError) as error:
        open_tokenizer(config)
    [problem] = error.value.problems
    assert problem.where and problem.rule.endswith(".") and problem.action.endswith(".")
    return str(problem)


# --- comparison with the libraries --------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_ids_match_library(name: str, opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened[name]
    assert tokenizer.vocab_size == 421
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.special_ids == {1, 2, tokenizer.special_tokens["<|turn|>"]}
    for text, (ids, back) in EXPECTED[name].items():
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == back
        assert list(tokenizer.count([text, text])) == [len(ids)] * 2
        # The space that the model prepends counts; repeated spaces are merged.
        counted = tokenizer.byte_lengths[ids].sum()
        assert counted == (len(back.encode()) + 1 if ids else 0)


def test_tiktoken_ids_match_library(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["ranks"]
    assert tokenizer.vocab_size == 435
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (431, 432, 432)
    for text, (ids, with_control) in EXPECTED["ranks"].items():
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.encode_chat(text).tolist() == with_control
        assert tokenizer.decode(ids) == text
        assert list(tokenizer.count([text])) == [len(ids)]
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_hugging_face_ids_match_library(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["folder"]
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (0, 1, 1)
    assert tokenizer.end_ids == (1, 3)  # from generation_config.json
    assert tokenizer.special_ids == {0, 1, 2, 3}
    for text, ids in EXPECTED["folder"]["texts"].items():
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_chat_rendering_matches_transformers(opened: dict[str, Tokenizer]) -> None:
    tokenizer, chats = opened["folder"], EXPECTED["folder"]["chats"]
    assert tokenizer.chat
    inputs = [ChatInput(messages) for messages, _, _ in chats]
    assert tokenizer.chat.render(inputs) == [text for _, text, _ in chats]
    for _, text, ids in chats:
        assert tokenizer.encode_chat(text).tolist() == ids
        assert set(tokenizer.encode_chat(text).tolist()) & tokenizer.special_ids
        assert not set(tokenizer.encode(text).tolist()) & tokenizer.special_ids


# --- contract of all tokenizers -------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(text=UTF8)
@pytest.mark.parametrize("name", ["bytes", *CONFIGS])
def test_round_trip_and_byte_counts(name: str, text: str, opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened[name]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert not set(ids.tolist()) & tokenizer.special_ids
    back = tokenizer.decode(ids)
    if name not in MODELS:  # these normalize spaces
        assert back == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    flow = open_text_stream(tokenizer)
    assert "".join([*map(flow.push, ids.tolist()), flow.finish()]) == back


LONG = "".join(f"語{i}😀 naïve é" for i in range(40)) + "\U0001f3f4\U000e0067" * 30


def test_text_stream_yields_whole_characters(tokenizer: Tokenizer) -> None:
    flow, ids = open_text_stream(tokenizer), tokenizer.encode(LONG).tolist()
    pieces = [flow.push(i) for i in [tokenizer.begin_id, *ids, tokenizer.end_id]]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + flow.finish() == tokenizer.decode(ids) == LONG
    assert sum(map(bool, pieces)) > len(ids) // 8  # streamed incrementally, not only at the end


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 600), max_size=90))
@pytest.mark.parametrize("name", ["bytes", *CONFIGS])
def test_decode_accepts_any_ids(name: str, ids: list[int], opened: dict[str, Tokenizer]) -> None:
    """A model may generate incomplete characters, control IDs and padded vocabulary IDs."""
    tokenizer = opened[name]
    known = [i for i in ids if i < tokenizer.vocab_size and i not in tokenizer.special_ids]
    assert tokenizer.decode(ids) == tokenizer.decode(known)
    flow = open_text_stream(tokenizer)
    for i in ids:
        flow.push(i)
    flow.finish()
    assert flow.push(tokenizer.encode("a")[-1]) == "a"


def test_control_tokens_have_zero_byte_length(tokenizer: Tokenizer) -> None:
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths.dtype == np.int32
    assert not tokenizer.byte_lengths[list(tokenizer.special_ids)].any()
    assert {tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id} <= tokenizer.special_ids
    assert tokenizer.end_id in tokenizer.end_ids


def test_visible_added_token_counts_its_bytes(opened: dict[str, Tokenizer]) -> None:
    [i] = opened["folder"].encode("<think>").tolist()
    assert opened["folder"].byte_lengths[i] == len("<think>")
    assert opened["unigram"].byte_lengths[opened["unigram"].encode("<think>")].sum() == 1 + 7


# --- file detection ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_auto_detects_tokenizer_kind(name: str, opened: dict[str, Tokenizer]) -> None:
    config = replace(CONFIGS[name], kind="auto")
    assert open_tokenizer(config).fingerprint() == opened[name].fingerprint()


def test_folder_must_contain_one_tokenizer(tmp_path: Path, opened: dict[str, Tokenizer]) -> None:
    auto = TokenizerConfig(kind="auto", path=str(tmp_path))
    assert "this folder does not" in rejection(auto)
    shutil.copy(GOLDEN / "unigram.model", tmp_path / "tokenizer.model")
    (tmp_path / "other.model").write_bytes(b"\x80no tokenizer")
    assert open_tokenizer(auto).fingerprint() == opened["unigram"].fingerprint()
    assert "this folder does not" in rejection(replace(auto, kind="tiktoken", preset="llama3"))
    shutil.copy(GOLDEN / "bpe.model", tmp_path / "b.model")
    message = rejection(auto)
    assert "b.model, tokenizer.model" in message
    assert f"Set tokenizer.path={tmp_path / 'b.model'}, or" in message
    shutil.copy(GOLDEN / "folder/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    assert open_tokenizer(auto).vocab_size == opened["folder"].vocab_size


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"words", b"# 1\n", b"a b 1\n"])
def test_auto_rejects_unknown_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    assert "or a folder with one of these" in rejection(
        TokenizerConfig(kind="auto", path=str(path))
    )


# --- settings of a folder ------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "folder", target)
    yield target


def in_folder(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(kind="huggingface", path=str(folder))


def test_control_tokens_from_special_tokens_map_and_names(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<|stop|>", "<|im_end|>"))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    tokenizer = open_tokenizer(in_folder(folder))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.end_ids) == (0, 1, (1, 3))


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("tokenizer_config.json", '{"eos_token": "<nothing>"}', "names: <nothing>"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|end_of_text|>", "chat_template": 3}',
            "string in chat_template",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}, 1]}',
            "a chat template named default",
        ),
        ("special_tokens_map.json", "[1]", "must be a JSON object"),
        ("generation_config.json", '{"eos_token_id": 10000000000}', "ids below 67108864"),
        ("generation_config.json", '{"eos_token_id": [1, -1]}', "found -1"),
        ("generation_config.json", '{"eos_token_id": [true]}', "found True"),
        ("generation_config.json", '{"eos_token_id": "1"}', "found 1"),
        ("generation_config.json", "[" * 99999, "brackets"),
        ("chat_template.jinja", b"\xff", "must be UTF-8 text"),
    ],
)
@pytest.mark.fault("H4")
def test_invalid_tokenizer_settings_are_rejected(
    name: str, content: str | bytes, rule: str, folder: Path
) -> None:
    (folder / "chat_template.jinja").unlink()
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(raw)
    assert rule in rejection(in_folder(folder))


def test_settings_path_that_is_a_folder_is_rejected(folder: Path) -> None:
    (folder / "special_tokens_map.json").mkdir()
    assert "Is a directory" in rejection(in_folder(folder))


# --- rank files ----------------------------------------------------------------------------------

BYTES = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            BYTES[: BYTES.index("gA==")],
            "128 of the 256 bytes have no rank; the file may be truncated",
        ),
        (BYTES[:-7], "must be a token in base64"),
        (BYTES + "YWI= 256\nYWI= 257\n", "the token on line 258 is repeated"),
        (BYTES + "YWI= 256\nYWM= 256\n", "two tokens have the same rank"),
        (BYTES + "YW!= 256\n", "line 257 is not valid base64"),
        (BYTES + "YWI 256\n", "line 257 is not valid base64"),
        (BYTES + "YWI= 999999999\n", "rank 999999999"),
        (BYTES + "YWI= 9999999999999999999\n", "line 257 must be"),
        (BYTES + "YWI= -1\n", "line 257 must be"),
        (BYTES + "YWI=\n", "line 257 must be"),
        (BYTES + " 256\n", "the token on line 257 is empty"),
        ("{}", "line 1 must be"),
    ],
)
@pytest.mark.fault("H4")
def test_invalid_rank_files_are_rejected(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_text(text)
    message = rejection(replace(RANKS, path=str(path)))
    assert "must be a tiktoken rank file" in message and rule in message


def test_invalid_split_patterns_are_rejected() -> None:
    assert "must be a tiktoken rank file" in rejection(replace(RANKS, split_pattern="(((a"))
    for leaves_out in (r"\w+", r"\S+", "a"):
        assert "must cover the entire input" in rejection(replace(RANKS, split_pattern=leaves_out))


@pytest.mark.fault("H4")
def test_slow_split_pattern_is_rejected() -> None:
    tokenizer = open_tokenizer(replace(RANKS, split_pattern=r"((x+)\2?)+(?!x)y|\s+|\S"))
    with pytest.raises(ConfigError, match="must be a tokenizer that can process any text"):
        tokenizer.encode("x" * 60)


def test_rank_file_requires_pattern_and_eos() -> None:
    plain = TokenizerConfig(kind="auto", path=RANKS.path)
    message = rejection(plain)
    assert "has 431 ranks and no pattern" in message and "tokenizer.split_pattern" in message
    assert "128000" in rejection(replace(plain, preset="llama3"))
    assert "must have an EOS token" in rejection(replace(RANKS, special_tokens=["<|a|>"]))


def test_matching_preset_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PRESETS["llama3"], ranks=431, special={"<|eot_id|>": 434, "</s>": 431})
    monkeypatch.setitem(PRESETS, "llama3", small)
    assert "tokenizer.preset=llama3" in rejection(TokenizerConfig(kind="auto", path=RANKS.path))
    tokenizer = open_tokenizer(TokenizerConfig(kind="auto", path=RANKS.path, preset="llama3"))
    assert (tokenizer.vocab_size, tokenizer.end_ids) == (435, (431, 434))
    assert tokenizer.decode([432, 433, 5000]) == ""  # unused IDs decode to nothing
    assert not tokenizer.byte_lengths[431:].any()


def test_presets_match_published_models() -> None:
    """Vocabulary sizes and IDs of published models."""
    import tiktoken as library

    sizes = {name: max(each.special.values()) + 1 for name, each in PRESETS.items()}
    assert sizes == {
        **{"gpt2": 50257, "p50k": 50257, "cl100k": 100277, "o200k": 200019},
        **{"o200k_harmony": 201088, "llama3": 128256, "qwen": 151851},
    }
    llama3 = PRESETS["llama3"].special
    assert (llama3["<|begin_of_text|>"], llama3["<|eot_id|>"]) == (128000, 128009)
    assert (llama3["<|python_tag|>"], llama3["<|reserved_special_token_247|>"]) == (128010, 128255)
    harmony = PRESETS["o200k_harmony"].special
    assert (harmony["<|call|>"], harmony["<|endofprompt|>"]) == (200012, 200018)
    assert PRESETS["qwen"].special["<|im_end|>"] == 151645
    single = {bytes([i]): i for i in range(256)}
    text = "It's 12345 words,\n\n  naïve 語 DON'T x_y\r\n"
    for preset in PRESETS.values():
        encoding = library.Encoding(
            "x", pat_str=preset.pattern, mergeable_ranks=single, special_tokens={}
        )
        assert encoding.decode(encoding.encode_ordinary(text)) == text


# --- SentencePiece files ------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.fault("H4")
def test_truncated_models_are_rejected(name: str, kept: float, tmp_path: Path) -> None:
    raw, path = (GOLDEN / f"{name}.model").read_bytes(), tmp_path / "tokenizer.model"
    path.write_bytes(raw[: int(len(raw) * kept)])
    config = TokenizerConfig(kind="sentencepiece", path=str(path))
    assert "must be a SentencePiece .model file" in rejection(config)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fault("H4")
def test_corrupt_models_work_or_are_rejected(name: str, tmp_path: Path) -> None:
    raw, path = (GOLDEN / f"{name}.model").read_bytes(), tmp_path / "tokenizer.model"
    generator = np.random.default_rng(7)
    refusals = 0
    for _ in range(150):
        changed = bytearray(raw)
        for at in generator.integers(len(raw), size=3):
            changed[at] = generator.integers(256)
        path.write_bytes(changed)
        try:
            tokenizer = open_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(path)))
            tokenizer.decode(tokenizer.encode("a text <think> 語"))
        except ConfigError as error:
            assert len(str(error).splitlines()) == 3
            refusals += 1
    assert 0 < refusals < 150


@pytest.mark.fault("H4")
def test_many_empty_pieces_do_not_exhaust_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n\0" * 1001)
    config = TokenizerConfig(kind="sentencepiece", path=str(path))
    monkeypatch.setattr(sentencepiece, "_MAX_FIELDS", 1000)
    assert "1000" in rejection(config)
    path.write_bytes(b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
    assert "more than 64 bits" in rejection(config)
    path.write_bytes(b"\n" + b"\xff" * 8)
    assert "truncated" in rejection(config)


# --- packages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unigram", "ranks"])
def test_missing_tokenizer_packages_suggest_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS[name]
    monkeypatch.setitem(sys.modules, config.kind, None)
    assert "pip install 'maxpipe[tokenizers]'" in refused_action(config)


def refused_action(config: TokenizerConfig) -> str:
    with pytest.raises(ConfigError) as error:
        open_tokenizer(config)
    return error.value.problems[0].action


def test_rank_files_are_read_without_tiktoken_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader of tiktoken would download files."""
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    monkeypatch.setitem(sys.modules, "requests", None)
    assert tiktoken.parse_ranks(Path(RANKS.path).read_bytes())
    assert open_tokenizer(RANKS).vocab_size == 435
