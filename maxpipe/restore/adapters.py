"""Runs with adapters: their checkpoints hold these alone, and say which base they belong to.

The base stays where it is: a Hugging Face folder, or a checkpoint of another run. Its content is
compared by a digest each time it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from maxpipe.checkpoint.folder import BASE, Base, Facts
from maxpipe.checkpoint.restore import content_digest
from maxpipe.config.check import where
from maxpipe.config.keys import default_of, names_in
from maxpipe.config.load import Loaded
from maxpipe.config.rules import shown
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io.typed import checked
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.models.registry import describe
from maxpipe.restore.initial_weights import KEY, Says, Weights, read_weights
from maxpipe.step.step import Steps

_SECTION = "adapter"
_FREE = frozenset({"dropout", "targets"})
"""Keys that may change: what targets mean is compared by itself."""


def said_of(found: Weights, given: str) -> Base:
    """What checkpoints say of a base that was read."""
    return {"address": found.address, "given": given, "digest": content_digest(found.params)}


def read_base(
    facts: Facts, loaded: Loaded, steps: Steps, console: Says, *, own: bool = True
) -> tuple[Any, Base]:
    """The base of a checkpoint's adapters in the form of checkpoints, and what is said of it.

    Of a run's `own` checkpoint it is read from where `checkpoint.restore_from` says if that has
    changed; else that key names the checkpoint.

    Raises:
        ConfigError: there is no such base, or its weights have changed.
        StorageError: it cannot be read, or the checkpoint does not say which it is.
    """
    try:
        said = checked(facts.data[BASE], Base)
    except (ValueError, KeyError) as error:
        raise StorageError(
            f"step {facts.step}: does not say which base its adapters belong to\n"
            f"  {error}.\n  Take another step."
        ) from error
    given = loaded.config.checkpoint.restore_from
    moved = own and given not in ("", said["given"])
    found = read_weights(given if moved else said["address"], loaded, steps, console)
    now = said_of(found, said["given"] if own and not moved else given)
    if now["digest"] != said["digest"]:
        raise ConfigError.one(
            where(KEY, loaded.origins),
            found.address,
            f"must hold the weights that the adapters of step {facts.step} were trained beside: "
            f"their digest was {said['digest'][:16]}, and this is {now['digest'][:16]}.",
            f"Bring the base back as it was, or set {KEY} to where it is now.",
        )
    return found.params, now


def check_adapter(facts: Facts, loaded: Loaded, *, own: bool) -> None:
    """A run goes on with the adapters that it has.

    Raises:
        ConfigError: the checkpoint's are other ones than the config's, or only one of both has any.
    """
    saved, now = facts.config.get(_SECTION, {}), loaded.config.adapter
    names = [name for name in names_in(_SECTION) if name not in _FREE]
    then = {name: saved.get(name, default_of(f"{_SECTION}.{name}")) for name in names}
    if not then["rank"] and not now.rank:
        return
    action = "run.name to a new name" if own else f"checkpoint.restore=weights, or {KEY}=''"
    for name, before in then.items():
        if before != getattr(now, name):
            key = f"{_SECTION}.{name}"
            raise ConfigError.one(
                where(key, loaded.origins),
                shown(getattr(now, name)),
                f"must be {shown(before)}, which step {facts.step} was saved with: its parameters "
                "are those of its own adapters.",
                f"Set {key}={shown(before)}, or {action}.",
            )
    targets = checked(saved.get("targets", []), list[str])
    before, after = (_adapted(loaded.config.model, each) for each in (targets, now.targets))
    if before != after:
        key = f"{_SECTION}.targets"
        changes = [f"{', '.join(sorted(before - after))} had one"] if before - after else []
        changes += [f"{', '.join(sorted(after - before))} had none"] if after - before else []
        raise ConfigError.one(
            where(key, loaded.origins),
            shown(now.targets),
            f"must match the matrices that had an adapter when step {facts.step} was saved: "
            f"{'; '.join(changes)}.",
            f"Set {key}=[{','.join(targets)}], or {action}.",
        )


def _adapted(model: ModelConfig, targets: list[str]) -> frozenset[str]:
    adapter = model.adapter
    assert isinstance(adapter, AdapterConfig)
    kinds = describe(replace(model, adapter=replace(adapter, targets=targets))).kinds
    several = len(kinds) > 1
    return frozenset(
        ".".join((*([kind] if several else []), *key))
        for kind, each in kinds.items()
        for key in each.adapters
    )
