"""Conversion of texts to token sequences that a model scores, without jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError


class ScoringSequence(NamedTuple):
    """A target token sequence and its context."""

    context: Sequence[int]
    """Context tokens, at least one."""
    target: Sequence[int]

    @property
    def length(self) -> int:
        """Number of input tokens; the last target token is not an input."""
        return len(self.context) + len(self.target) - 1

    @property
    def target_positions(self) -> slice:
        """Positions of the input tokens whose next tokens are the target."""
        return slice(len(self.context) - 1, self.length)


class Score(NamedTuple):
    """Score of a target sequence."""

    logprob: float
    """Log-probability of all target tokens, in nats."""
    is_greedy: bool
    """Whether every target token is the most likely token."""


def right_pad(rows: Sequence[ScoringSequence], count: int, width: int) -> dict[str, np.ndarray]:
    """Return the int32 arrays `[count, width]` of a batch, padded on the right."""
    names = ("tokens", "targets", "segment_ids", "positions")
    batch: dict[str, np.ndarray] = {name: np.zeros((count, width), np.int32) for name in names}
    for number, row in enumerate(rows):
        whole = [*row.context, *row.target]
        batch["tokens"][number, : row.length] = whole[:-1]
        batch["targets"][number, : row.length] = whole[1:]
        batch["segment_ids"][number, : row.length] = 1
        batch["positions"][number, : row.length] = np.arange(row.length)
    return batch


@dataclass
class ScoringTokenizer:
    """Converts texts to token sequences, with the same prefix tokens as prompts."""

    tokenizer: Tokenizer
    max_length: int
    """Maximum sequence length of the model in tokens."""
    is_chat: bool = False
    """Whether contexts come from a chat template, so that control tokens in the text are parsed."""
    skips_bos: bool = False
    """Whether to omit the BOS token before the output of a chat template, as in training."""

    @property
    def _bos_ids(self) -> list[int]:
        return list(self.tokenizer.framing.before)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with its prefix tokens, at least one id."""
        before, reads_control = self._bos_ids, self.tokenizer.framing.reads_control
        encode = self.tokenizer.encode_chat if self.is_chat or reads_control else None
        ids = (encode or self.tokenizer.encode)(text).tolist()
        if self.is_chat and (self.skips_bos or ids[: len(before)] == before):
            before = []
        return [*before, *ids] or [self.tokenizer.begin_id]

    def drop_leading(self, ids: Sequence[int], over: int) -> list[int]:
        """Remove the first `over` token ids after the prefix tokens of a text."""
        before = self._bos_ids
        kept = len(before) if list(ids[: len(before)]) == before else 0
        return [*ids[:kept], *ids[kept + over :]]

    def sequence(self, context: str, continuation: str) -> ScoringSequence:
        """Return the scoring sequence of a continuation after a context.

        A token that spans the boundary belongs to the continuation.
        """
        before = self.encode(context)
        whole = self.encode(context + continuation) if continuation else before
        same = (mine == other for mine, other in zip(before, whole, strict=False))
        shared = sum(itertools.takewhile(bool, same))
        if not shared:  # a scoring sequence needs at least one context token
            return ScoringSequence([self.tokenizer.begin_id], whole)
        return ScoringSequence(whole[:shared], whole[shared:])

    def truncate(self, row: ScoringSequence) -> ScoringSequence:
        """Truncate the context after its prefix tokens so that the sequence fits.

        Raises:
            ConfigError: the target alone is too long.
        """
        over = row.length - self.max_length
        if over <= 0:
            return row
        if over > len(row.context) - max(len(self._bos_ids), 1):
            raise ConfigError.one(
                "a continuation",
                f"{len(row.target)} tokens",
                f"must fit into {self.max_length} tokens (train.sequence_length).",
                "Set a larger train.sequence_length, if the model supports it.",
            )
        return ScoringSequence(self.drop_leading(row.context, over), row.target)

    def windows(self, text: str) -> list[ScoringSequence]:
        """Return sequences in which every token of a text is predicted exactly once.

        The last sequence has as much context as possible.
        """
        ids = self.encode(text)
        if not self._bos_ids:
            ids = [self.tokenizer.begin_id, *ids] if text else ids
        found = []
        for first in range(1, len(ids), self.max_length):
            end = min(first + self.max_length, len(ids))
            begin = max(end - self.max_length - 1, 0)
            found.append(ScoringSequence(ids[begin:first], ids[first:end]))
        return found
