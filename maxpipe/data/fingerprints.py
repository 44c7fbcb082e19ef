"""Differences between two fingerprints of a run's data, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxpipe.config import ramp as config_ramp
from maxpipe.config.ramp import Ramp
from maxpipe.data import mixture
from maxpipe.data.corpus import SOURCES
from maxpipe.data.prepared.manifest import CONTENT, changed_files, short_digests

_WORDS = {
    "documents": "the number of documents",
    "tokens": "the number of tokens",
    "order": "the order of documents",
    "source_digest": "the digest of names, sizes and content of the files",
    "tokenizer": "the tokenizer",
    "chat": "the chat template, fields or roles",
    "packing": "the packing",
    "long_conversations": "data.long_conversations",
    "pairs_per_row": "data.pairs_per_row",
    "order_version": "the order of samples",
    "group_size": "grpo.group_size",
    "updates_per_rollout": "grpo.updates_per_rollout",
    "reward": "the reward",
    "batch_size": "train.batch_size",
    "batch_ramp": "the stages of train.batch_ramp, as rows and steps,",
}


_UNSAID = {"packing": "cut", "long_conversations": "split"}
"""What a fingerprint means that does not have this entry."""


def compare(
    saved: Mapping[str, Any], current: Mapping[str, Any], step: int | None = None
) -> list[tuple[str, Any, Any]]:
    """The (name, saved, current) of each entry in which two fingerprints differ, for people.

    Sizes of batches do not, if all before `step` were the same: no row is lost or repeated then.
    Nor do weights of a mixture: see `Loader.go_on`.
    """
    names = [*saved, *(name for name in current if name not in saved)]
    if step is not None and Ramp.of_facts(saved).same_until(Ramp.of_facts(current), step):
        names = [name for name in names if name not in config_ramp.FACTS]
    of_sources = saved.get(SOURCES, {}), current.get(SOURCES, {})
    if of_sources[0].keys() != of_sources[1].keys():
        # All else follows from them.
        before, now = (", ".join(each) or None for each in of_sources)
        return [("the sources of data.mixture", before, now)]
    found = []
    for name in of_sources[0]:
        inner = compare(*(each[name] for each in of_sources))
        found += [(f"{name}: {words}", before, now) for words, before, now in inner]
    if found:
        # The totals follow from these.
        names = [name for name in names if name not in ("documents", "tokens", "source_digest")]
    names = [name for name in names if name not in (SOURCES, mixture.FACTS, CONTENT)]
    found += [
        (_WORDS.get(name, name), short_digests(before), short_digests(now))
        for name in names
        if (before := saved.get(name, _UNSAID.get(name)))
        != (now := current.get(name, _UNSAID.get(name)))
    ]
    return found + changed_files(saved.get(CONTENT), current.get(CONTENT))
