"""Samples of text during training, of the parameters where they are.

The same prompts are drawn with the same randomness each time, and under every layout: what changes
from one sample to the next is the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from maxpipe.config.schema import EvalConfig
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.generate.completions import Completion, Limits, complete, encoded
from maxpipe.generate.prompts import read
from maxpipe.generate.sampling import Sampling
from maxpipe.parallel.explicit import placed_on
from maxpipe.train.decoders import decoding_of, for_decoding, prepared, prepared_shardings
from maxpipe.train.state import Partition


class Samples:
    """What a model makes of the prompts of `eval.sample_prompts` or `eval.sample_file`.

    Raises:
        ConfigError: the file has none, or a prompt leaves no room for a token.
    """

    def __init__(
        self,
        eval_config: EvalConfig,
        partition: Partition,
        tokenizer: Tokenizer,
        *,
        room: int,
        seed: int,
    ):
        texts = list(eval_config.sample_prompts)
        if eval_config.sample_file:
            texts = read(eval_config.sample_file, f"eval.sample_file: {eval_config.sample_file}")
        self._tokenizer, self._prompts = tokenizer, encoded(texts, tokenizer, room)
        self._limits = Limits(min(eval_config.sample_tokens, room), room, batch_size=len(texts))
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
            }
            for each in found
        ]
