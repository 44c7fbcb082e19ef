"""Texts as rows of tokens, of which a model says how likely some are. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError


class Row(NamedTuple):
    """Tokens to look at, and tokens that follow them."""

    context: Sequence[int]
    """At least one."""
    target: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens that are predicted from: the last one is only predicted."""
        return len(self.context) + len(self.target) - 1

    @property
    def predicting(self) -> slice:
        """Places of the tokens from which the target's are predicted."""
        return slice(len(self.context) - 1, self.length)


class Score(NamedTuple):
    """What a model says of a row's target."""

    logprob: float
    """In nats, of all its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one."""


def laid_out(rows: Sequence[Row], count: int, width: int) -> dict[str, np.ndarray]:
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
class Texts:
    """Texts as rows of tokens. They begin with the begin token, as documents in training."""

    tokenizer: Tokenizer
    room: int
    """Tokens of a row that the model was trained on."""
    is_chat: bool = False
    """Whether contexts come from a chat template: what spells a control token in them is one."""
    as_written: bool = False
    """Whether no begin token is put in front of what a template writes, as in training."""

    def encoded(self, text: str) -> list[int]:
        """With the begin token."""
        encode = self.tokenizer.encode_chat if self.is_chat else self.tokenizer.encode
        ids = encode(text).tolist()
        begin = self.tokenizer.begin_id
        whole = self.is_chat and (ids[:1] == [begin] or (self.as_written and ids))
        return ids if whole else [begin, *ids]

    def row(self, context: str, continuation: str) -> Row:
        """The tokens of a continuation, and of what is before it.

        A token that has text of both is the continuation's.
        """
        before = self.encoded(context)
        whole = self.encoded(context + continuation) if continuation else before
        same = (mine == other for mine, other in zip(before, whole, strict=False))
        shared = sum(itertools.takewhile(bool, same))
        return Row(whole[:shared], whole[shared:])

    def fitted(self, row: Row) -> Row:
        """The row without what of its context exceeds the room, behind the begin token.

        Raises:
            ConfigError: its target alone exceeds the room.
        """
        over = row.length - self.room
        if over <= 0:
            return row
        if over > len(row.context) - 1:
            raise ConfigError.one(
                "a continuation",
                f"{len(row.target)} tokens",
                f"must fit into a row of {self.room} tokens (train.sequence_length).",
                "Set a larger train.sequence_length, if the model can do more.",
            )
        return Row([*row.context[:1], *row.context[1 + over :]], row.target)

    def windows(self, text: str) -> list[Row]:
        """Rows in which each token of a text is predicted once, the last with most context."""
        ids = self.encoded(text)
        found = []
        for first in range(1, len(ids), self.room):
            end = min(first + self.room, len(ids))
            begin = max(end - self.room - 1, 0)
            found.append(Row(ids[begin:first], ids[first:end]))
        return found
