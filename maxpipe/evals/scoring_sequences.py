"""Texts as rows of tokens, of which a model says how likely some are. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError


class ScoringSequence(NamedTuple):
    """Tokens to look at, and tokens that follow them."""

    context: Sequence[int]
    """At least one."""
    target: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens that are predicted from: the last one is only predicted."""
        return len(self.context) + len(self.target) - 1

    @property
    def target_positions(self) -> slice:
        """Places of the tokens from which the target's are predicted."""
        return slice(len(self.context) - 1, self.length)


class Score(NamedTuple):
    """What a model says of a row's target."""

    logprob: float
    """In nats, of all its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one."""


def right_pad(rows: Sequence[ScoringSequence], count: int, width: int) -> dict[str, np.ndarray]:
    """Arrays int32 [count, width] of a batch: rows from the left on, and padding behind them."""
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
    """Texts as rows of tokens. They begin as the tokenizer's framing begins prompts."""

    tokenizer: Tokenizer
    max_length: int
    """Tokens of a row that the model was trained on."""
    is_chat: bool = False
    """Whether contexts come from a chat template: what spells a control token in them is one."""
    skips_bos: bool = False
    """Whether no begin token is put in front of what a template writes, as in training."""

    @property
    def _bos_ids(self) -> list[int]:
        return list(self.tokenizer.framing.before)

    def encode(self, text: str) -> list[int]:
        """At least one token, with the begin tokens."""
        before, reads_control = self._bos_ids, self.tokenizer.framing.reads_control
        encode = self.tokenizer.encode_chat if self.is_chat or reads_control else None
        ids = (encode or self.tokenizer.encode)(text).tolist()
        if self.is_chat and (self.skips_bos or ids[: len(before)] == before):
            before = []
        return [*before, *ids] or [self.tokenizer.begin_id]

    def drop_leading(self, ids: Sequence[int], over: int) -> list[int]:
        """The ids of a text without the first `over` ids after its begin tokens."""
        before = self._bos_ids
        kept = len(before) if list(ids[: len(before)]) == before else 0
        return [*ids[:kept], *ids[kept + over :]]

    def sequence(self, context: str, continuation: str) -> ScoringSequence:
        """The tokens of a continuation, and of what is before it.

        A token that has text of both is the continuation's.
        """
        before = self.encode(context)
        whole = self.encode(context + continuation) if continuation else before
        same = (mine == other for mine, other in zip(before, whole, strict=False))
        shared = sum(itertools.takewhile(bool, same))
        if not shared:  # a row needs a token to look at
            return ScoringSequence([self.tokenizer.begin_id], whole)
        return ScoringSequence(whole[:shared], whole[shared:])

    def truncate(self, row: ScoringSequence) -> ScoringSequence:
        """The row without what of its context exceeds the room, after the begin tokens.

        Raises:
            ConfigError: its target alone exceeds the room.
        """
        over = row.length - self.max_length
        if over <= 0:
            return row
        if over > len(row.context) - max(len(self._bos_ids), 1):
            raise ConfigError.one(
                "a continuation",
                f"{len(row.target)} tokens",
                f"must fit into a row of {self.max_length} tokens (train.sequence_length).",
                "Set a larger train.sequence_length, if the model can do more.",
            )
        return ScoringSequence(self.drop_leading(row.context, over), row.target)

    def windows(self, text: str) -> list[ScoringSequence]:
        """Rows in which each token of a text is predicted once, the last with most context."""
        ids = self.encode(text)
        if not self._bos_ids:
            ids = [self.tokenizer.begin_id, *ids] if text else ids
        found = []
        for first in range(1, len(ids), self.max_length):
            end = min(first + self.max_length, len(ids))
            begin = max(end - self.max_length - 1, 0)
            found.append(ScoringSequence(ids[begin:first], ids[first:end]))
        return found
