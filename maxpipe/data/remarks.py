"""Lines printed at the start of a run about documents that are shortened, dropped or masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxpipe.data.chat import REWRITTEN
from maxpipe.data.pairs import DROPPED, SAME, TRUNCATED
from maxpipe.data.tokenizers.chat import unread_remarks
from maxpipe.io.text import counted

_MARKS = {
    TRUNCATED: "are longer than a row and lose their ends: see data.long_pairs",
    DROPPED: "are longer than a row and are left out: see data.long_pairs",
    SAME: "have the same response twice: they teach nothing",
    REWRITTEN: "have earlier answers that the chat template rewrites once others follow: these "
    "are read and not trained, see data.rewritten_history",
}
_LONG = {
    "truncate": "truncated to one",
    "drop": "dropped",
    "split": "split across sequences, where an answer may be trained without its question",
}


class Long(NamedTuple):
    """Conversations that are longer than a sequence."""

    policy: str
    """`data.long_conversations`."""
    number: int
    left_out: int = 0
    """Those that have no tokens left."""


def marks_of(marks: np.ndarray | None) -> dict[int, int]:
    """How many documents have each mark; `marks` uint8 [documents] are `Encoded.marks`."""
    if marks is None:
        return {}
    return {mark: int(np.count_nonzero(marks & mark)) for mark in _MARKS}


def remarks(
    what: str,
    num_documents: int,
    unread: Mapping[str, int],
    marks: Mapping[int, int],
    long: Long | None = None,
    packing: str = "",
    action: str = "",
) -> list[str]:
    """Lines about conversations or pairs, which `what` is the noun of.

    `action` names settings that read keys of `unread`.
    """
    total = counted(num_documents, what)
    found = unread_remarks(unread, total, action)
    found += [f"{marks[each]} of {total} {_MARKS[each]}" for each in _MARKS if marks.get(each)]
    if long is not None and long.number and long.policy in _LONG:
        words = f"{long.number} of {total} longer than a sequence, {_LONG[long.policy]}"
        if long.left_out and long.policy != "drop":
            words += f"; {long.left_out} of these dropped, as no trained token is left"
        found.append(f"{words}: see data.long_conversations")
    if packing == "cut":
        found.append(
            f"data.packing=cut splits {total} across sequences, where an answer may be trained "
            "without its question: data.packing=best_fit keeps them whole"
        )
    return found
