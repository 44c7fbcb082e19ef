"""BOS, EOS and end-of-turn tokens from tokenizer files, and the required vocabulary size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from maxpipe.config.sections.data import DataConfig, MixedSourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.chat import resolve_chat_template
from maxpipe.data.chat_spec import (
    add_end_of_turn_ids,
    apply_chat_spec,
    build_chat_spec,
    chat_spec_of_prompts,
    end_of_turn_ids,
)
from maxpipe.data.tokenizer import Tokenizer as Opened
from maxpipe.data.tokenizer import fit_tokenizer, open_tokenizer
from maxpipe.errors import ConfigError
from maxpipe.generation.completions import parse_stops

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]


def folder(path: Path, post: str = "", extra: bool = False, **files: Any) -> Opened:
    """Write a byte-level tokenizer with control tokens 0 to 3 and JSON settings files; open it."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the sea was wide"] * 9, trainer)
    if post:
        names = [(name, i) for i, name in enumerate(SPECIAL) if name in post]
        made.post_processor = processors.TemplateProcessing(single=post, special_tokens=names)
    if extra:
        made.add_special_tokens([AddedToken("<image>", special=True)])
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return open_tokenizer(TokenizerConfig(kind="auto", path=str(path)))


EOS = {"eos_token": "<|endoftext|>", "bos_token": None}


@pytest.mark.parametrize(
    ("files", "begin", "ends"),
    [
        ({"tokenizer_config": EOS}, 0, (0, 2)),
        ({"tokenizer_config": {**EOS, "bos_token": "<|bos|>"}}, 3, (0, 2)),
        ({"tokenizer_config": EOS, "generation_config": {"eos_token_id": [0, 3]}}, 0, (0, 3)),
        ({"tokenizer_config": EOS, "config": {"eos_token_id": [2, 3]}}, 0, (0, 2, 3)),
        ({"tokenizer_config": EOS, "config": {"text_config": {"eos_token_id": 3}}}, 0, (0, 3)),
        (
            {
                "tokenizer_config": EOS,
                "generation_config": {"eos_token_id": 0},
                "config": {"eos_token_id": 3},
            },
            0,
            (0,),
        ),
        ({"config": {"eos_token_id": 2, "bos_token_id": 3}}, 3, (2,)),
        ({"tokenizer_config": EOS, "special_tokens_map": {"eos_token": "<|im_end|>"}}, 2, (2,)),
        (
            {
                "tokenizer_config": {**EOS, "added_tokens_decoder": {}},
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            0,
            (0, 2),
        ),
    ],
)
def test_bos_and_eos_come_from_tokenizer_files(
    tmp_path: Path, files: dict[str, Any], begin: int, ends: tuple[int, ...]
) -> None:
    tokenizer = folder(tmp_path, **files)
    assert (tokenizer.begin_id, tokenizer.end_ids) == (begin, ends)


@pytest.mark.parametrize(
    ("post", "before", "after"),
    [("", (), ()), ("<|bos|> $A", (3,), ()), ("<|bos|> $A <|im_end|>", (3,), (2,))],
)
def test_published_framing_matches_post_processor(
    tmp_path: Path, post: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    settings = {**EOS, "add_bos_token": True, "add_eos_token": True}  # not read with tokenizer.json
    tokenizer = folder(tmp_path, post, tokenizer_config=settings)
    plain = tokenizer.encode("the sea").tolist()
    assert tokenizer.encode_prompt("the sea") == [tokenizer.begin_id, *plain]
    published = tokenizer.with_control(framing=tokenizer.control.published)
    assert published.encode_prompt("the sea") == [*before, *plain, *after]
    assert published.encode_prompt("<|im_end|>") == [*before, 2, *after]
    assert published.encode_prompt("") == ([*before, *after] or [tokenizer.begin_id])


def test_control_tokens_without_embedding_row(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, extra=True, tokenizer_config=EOS)
    rows = tokenizer.vocab_size - 1
    assert tokenizer.min_embedding_rows == rows
    assert tokenizer.encode_chat("<image>").tolist() == [rows]
    small = fit_tokenizer(tokenizer, rows)
    assert small.encode_chat("<image>").tolist() == tokenizer.encode("<image>").tolist()
    assert max(small.encode_chat("<|im_end|><image>")) < rows
    assert fit_tokenizer(tokenizer, rows + 1).encode_chat("<image>").tolist() == [rows]
    with pytest.raises(ConfigError, match=f"model.vocab_size = {rows - 1}"):
        fit_tokenizer(tokenizer, rows - 1)
    with pytest.raises(ConfigError, match="Use the tokenizer of this model"):
        fit_tokenizer(tokenizer, rows - 1, model="run@3")


def test_end_of_turn_token_stops_generation(tmp_path: Path) -> None:
    settings = {**EOS, "chat_template": CHATML}
    tokenizer = folder(tmp_path, tokenizer_config=settings, generation_config={"eos_token_id": 0})
    assert tokenizer.chat is not None and tokenizer.end_ids == (0,)
    assert end_of_turn_ids(tokenizer.chat, tokenizer) == [2]
    assert add_end_of_turn_ids(tokenizer).end_ids == (0, 2)
    run = apply_chat_spec(tokenizer, {"template": "other", "begin_ids": [], "end_ids": [2]})
    assert run.end_ids == (0, 2) and run.chat is not None and run.chat.template == "other"
    assert run.encode_prompt("the sea") == tokenizer.encode("the sea").tolist()


def test_stop_strings_accept_control_tokens(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, tokenizer_config=EOS)
    assert parse_stops(["sea", "<|im_end|>"], tokenizer, "--stop") == (("sea",), frozenset({2}))
    with pytest.raises(ConfigError, match="control token <|im_end|>".replace("|", r"\|")):
        parse_stops(["<|im_end|>\n"], tokenizer, "--stop")
    with pytest.raises(ConfigError, match="every completion would end before its first token"):
        parse_stops(["sea", ""], tokenizer, "--stop")


def test_chat_spec_has_end_ids_of_every_mixture_source(tmp_path: Path) -> None:
    settings = {**EOS, "chat_template": CHATML}
    tokenizer = folder(tmp_path / "tok", tokenizer_config=settings)
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.replace("<|im_end|>", "<|bos|>"))
    sources = {
        "a": MixedSourceConfig(chat="messages"),
        "b": MixedSourceConfig(chat="messages", chat_template=str(other)),
    }
    for first, second in (("a", "b"), ("b", "a")):
        data = DataConfig(mixture={"first": sources[first], "second": sources[second]})
        record = build_chat_spec(data, tokenizer)
        assert record is not None and record["end_ids"] == [2, 3]
        assert record["template"] == (CHATML if first == "a" else other.read_text())


def test_rollout_prompts_record_run_chat_template(tmp_path: Path) -> None:
    settings = {**EOS, "chat_template": CHATML}
    tokenizer = folder(tmp_path / "tok", tokenizer_config=settings)
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.replace("<|im_end|>", "<|bos|>"))
    data = DataConfig(chat="messages", chat_template=str(other))
    record = chat_spec_of_prompts(resolve_chat_template(data, tokenizer), tokenizer)
    assert record is not None
    assert (record["template"], record["end_ids"]) == (other.read_text(), [3])
