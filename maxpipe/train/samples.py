"""Samples of text during training, of the parameters where they are.

The same prompts are drawn with the same randomness each time, and under every layout: what changes
from one sample to the next is the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxpipe.config.schema import EvalConfig
from maxpipe.data.conversation import for_chats
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.turns import Turn
from maxpipe.errors import ConfigError
from maxpipe.generate.completions import (
    Completion,
    Limits,
    Prompt,
    complete,
    encoded,
    encoded_chats,
)
from maxpipe.generate.decoding import Sampling
from maxpipe.generate.prompts import read, read_conversations, said
from maxpipe.generate.staged import decoding_of, for_decoding, prepared, prepared_shardings
from maxpipe.parallel.sharding import placed_on
from maxpipe.step.state import Partition


class Samples:
    """What a model makes of the prompts of `eval.sample_prompts` or `eval.sample_file`, and of
    `held_out` conversations.

    Raises:
        ConfigError: the file has none, a prompt leaves no room for a token, or there is no chat
            template for it.
    """

    def __init__(
        self,
        eval_config: EvalConfig,
        partition: Partition,
        tokenizer: Tokenizer,
        held_out: Sequence[Turn] = (),
        chat: ChatTemplate | None = None,
        *,
        room: int,
        seed: int,
    ):
        tokenizer = for_chats(tokenizer) if eval_config.sample_chat else tokenizer
        prompts = _prompts(eval_config, tokenizer, room, chat)
        first, self._answers = len(prompts), [turn.answer for turn in held_out]
        for number, turn in enumerate(held_out, first):
            prompts.append(Prompt(number, turn.text, turn.ids))
        if not prompts:
            raise ConfigError.one(
                "eval.sample_documents",
                eval_config.sample_documents,
                "finds no conversation that is held out for validation, has something trained "
                f"behind its first message, and fits into train.sequence_length ({room}).",
                "Set data.validation_fraction or train.sequence_length to more, or some "
                "eval.sample_prompts.",
            )
        self._tokenizer, self._prompts, self._first = tokenizer, prompts, first
        tokens = min(eval_config.sample_tokens, room)
        self._limits = Limits(tokens, room, batch_size=len(prompts))
        parts = for_decoding(partition)
        self._mesh = parts.mesh
        sampling = Sampling(temperature=eval_config.sample_temperature)
        self._decoding = decoding_of(parts, sampling, seed)
        self._convert = jax.jit(
            lambda params: prepared(parts, partition.unstack(params)),
            out_shardings=prepared_shardings(parts),
        )

    def take(self, params: Any) -> list[Mapping[str, object]]:
        """Of each prompt `prompt`, `text`, `tokens` and `finish_reason`, of stacked parameters.

        Of a conversation also `answer`: what was said in it there.

        All processes of a run call it together.

        Raises:
            NumbersError: the model gives numbers that are not finite.
        """
        found: list[Completion] = []
        converted = self._convert(placed_on(self._mesh, params))
        tokenizer = self._tokenizer
        complete(
            self._decoding, converted, tokenizer, self._prompts, self._limits, write=found.append
        )
        return [
            {
                "prompt": each.prompt.text,
                "text": each.text,
                "tokens": each.tokens,
                "finish_reason": each.finish,
                **self._answer(each.prompt.number),
            }
            for each in found
        ]

    def _answer(self, number: int) -> dict[str, str]:
        return {"answer": self._answers[number - self._first]} if number >= self._first else {}


def _prompts(
    config: EvalConfig, tokenizer: Tokenizer, room: int, chat: ChatTemplate | None
) -> list[Prompt]:
    """Those that the config names."""
    path, texts = config.sample_file, list(config.sample_prompts)
    where = f"eval.sample_file: {path}"
    if config.sample_chat:
        chats = read_conversations(path, where) if path else [said(each) for each in texts]
        return encoded_chats(chats, tokenizer, room, where="eval.sample_chat", chat=chat)
    return encoded(read(path, where) if path else texts, tokenizer, room)
