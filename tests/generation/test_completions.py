"""Completions of prompts: finish reasons, output order and interrupts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import ConfigError, DivergenceError
from maxpipe.generation.completions import (
    Completion,
    GenerationLimits,
    complete,
    encode_chats,
    encode_prompts,
)
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, Refill
from tests.errors import raises

BYTES = ByteTokenizer()
GOLDEN = Path(__file__).parents[1] / "golden/tokenizers/folder"
FOLDER = open_tokenizer(TokenizerConfig(kind="auto", path=str(GOLDEN)))


class Script:
    """A decode engine that returns scripted tokens and ignores the model."""

    batch_multiple, supports_refill = 2, False

    def __init__(self, *texts: bytes, logprob: float = -0.5):
        self.texts, self.logprob = texts, logprob
        self.sizes: list[DecodeShape] = []
        self.steps = 0

    def run(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: DecodeShape,
        refill: Refill | None = None,
        images: Sequence[Any] = (),
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        assert refill is None
        self.sizes.append(size)
        for step in range(size.max_new_tokens):
            self.steps += 1
            rows = [[*self.texts[number], BYTES.end_id] for number in numbers]
            tokens = [row[step] if step < len(row) else BYTES.pad_id for row in rows]
            tokens += [BYTES.pad_id] * (size.batch_size - len(tokens))
            yield np.asarray(tokens), np.full(size.batch_size, self.logprob)


def completed(
    script: Script, texts: Sequence[str], limits: GenerationLimits, **options: Any
) -> tuple[list[Completion], str]:
    """Return the completions written and the concatenated streamed text."""
    written: list[Completion] = []
    streamed: list[str] = []
    prompts = encode_prompts(texts, BYTES, limits.max_length)
    given = (cast(DecodeEngine, script), None, BYTES, prompts, limits)
    try:
        complete(*given, write=written.append, stream=streamed.append, **options)
    except KeyboardInterrupt:
        written.append(cast(Completion, SimpleNamespace(finish_reason="raised")))
    return written, "".join(streamed)


def test_finish_reasons() -> None:
    script = Script(b"short", b"up to here. More", b"too long for that", b"no room is left")
    limits = GenerationLimits(max_tokens=14, max_length=18, stops=("here",))
    found, _ = completed(script, ["a", "b", "c", "12345678"], limits)
    assert [each.finish_reason for each in found] == ["end", "stop", "length", "room"]
    assert [each.text for each in found] == ["short", "up to ", "too long for t", "no room i"]
    assert found[0].tokens == [*b"short", BYTES.end_id] and found[1].tokens == list(b"up to here")
    assert found[2].logprobs == [-0.5] * 14
    assert script.steps == 14  # decoding stops once all rows are finished


def test_batches_share_one_shape_and_keep_prompt_order() -> None:
    script = Script(b"0 0 0", b"1", b"2 2", b"3", b"4")
    found, streamed = completed(
        script, ["x" * 20, "a", "b", "c", "d"], GenerationLimits(9, 99, (), 3)
    )
    assert [each.text for each in found] == ["0 0 0", "1", "2 2", "3", "4"]
    assert (
        script.sizes == [DecodeShape(4, 32, 9)] * 2
    )  # two shards; the longest prompt has 21 tokens
    assert sorted(streamed) == sorted("0 0 0" + "1" + "2 2" + "3" + "4")


def test_completion_is_written_once_earlier_ones_are_written() -> None:
    script = Script(b"abc", b"d", b"efghij")
    steps: list[int] = []
    prompts = encode_prompts(["", "", ""], BYTES, 99)
    given = (cast(DecodeEngine, script), None, BYTES, prompts, GenerationLimits(20, 99))
    complete(*given, write=lambda done: steps.append(script.steps))
    assert steps == [4, 4, 7]


def test_interrupt_keeps_partial_completions() -> None:
    script = Script(b"ab", "cdefg é".encode(), b"hijklmn")
    asked = iter([False] * 6 + [True])
    found, _ = completed(script, ["", "", ""], GenerationLimits(20, 99), stops=lambda: next(asked))
    assert [each.finish_reason for each in found] == ["end", "interrupted", "interrupted", "raised"]
    assert [each.text for each in found[:3]] == ["ab", "cdefg \ufffd", "hijklmn"]
    assert script.steps == 7


def test_non_finite_logprob_raises_divergence_error() -> None:
    place = "prompt 1: token 1 has the log-probability nan"
    with raises(DivergenceError, place, suggests="model.compute_dtype=float32"):
        completed(Script(b"a", logprob=float("nan")), ["x"], GenerationLimits(5, 99))


def test_prompt_that_fills_context_is_rejected() -> None:
    assert encode_prompts(["abc"], BYTES, 5, 7)[0].ids == [BYTES.begin_id, *b"abc"]
    with pytest.raises(ConfigError) as caught:
        encode_prompts(["ok", "abcd"], BYTES, 5)
    (problem,) = caught.value.problems
    assert (problem.where, problem.value) == ("prompt 2", "'abcd'")
    assert "has 5 tokens" in problem.rule and "5 (train" in problem.rule
    assert problem.action.endswith("set train.sequence_length=10 for longer sequences.")


@pytest.mark.parametrize("tokenizer", [BYTES, FOLDER])
def test_prompt_with_invalid_unicode_is_rejected(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "prompt 2", suggests="`iconv -t UTF-8`") as caught:
        encode_prompts(["ok", "\udcff"], tokenizer, 99)
    assert caught.value.problems[0].where == "prompt 2"


def test_chat_message_with_invalid_unicode_is_rejected() -> None:
    said = [ChatInput([{"role": "user", "content": text}]) for text in ("ok", "\ud800")]
    with raises(ConfigError, "prompt 2", suggests="`iconv -t UTF-8`") as caught:
        encode_chats(said, FOLDER, 999)
    assert caught.value.problems[0].where == "prompt 2"


@pytest.mark.parametrize("template", ["", "{{ nothing }}", "{% if false %}x{% endif %}"])
def test_chat_template_with_empty_output_is_rejected(template: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(TokenizerConfig(kind="auto", path=str(tmp_path / "folder")))
    with raises(ConfigError, "chat_template.jinja", names=["prompt 1"], suggests="--chat"):
        encode_chats([ChatInput([{"role": "user", "content": "Hi"}])], tokenizer, 99)
