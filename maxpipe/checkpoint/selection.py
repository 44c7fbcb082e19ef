"""From the address of a checkpoint to the checkpoint: which steps there are, and which is meant."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.folder import Folder
from maxpipe.checkpoint.manager import Checkpoints, open_run
from maxpipe.checkpoint.restore import first_of_all
from maxpipe.checkpoint.retention import Better
from maxpipe.config.rules import did_you_mean

_SHOWN_STEPS = 12


def opened(address: Address) -> Checkpoints:
    """The checkpoints of the run, to be read only.

    Raises:
        ConfigError: there are none.
        StorageError: they cannot be reached.
    """
    return open_run(address.run_dir, address.where, address.parent)


def chosen(checkpoints: Checkpoints, address: Address) -> int:
    """The step that is meant, by default the newest; all processes of a run get the same.

    Raises:
        ConfigError: there is none of that step, or none that was evaluated.
    """
    is_first = jax.process_index() == 0
    return int(first_of_all(str(step_of(checkpoints.durable, address)) if is_first else ""))


def step_of(folder: Folder, address: Address) -> int:
    """The same as this process sees it, in a folder with checkpoints. Needs no devices.

    Raises:
        ConfigError: there is none of that step, or none that was evaluated.
    """
    steps, step = folder.steps(), address.step
    if step == "best":
        return best(folder, address, better_of(folder))[0]
    if step is None or step == "newest":
        return steps[-1]
    if step in steps:
        return step
    rule = f"must be one of the saved steps: {_listed(steps)}."
    aside = [name for name in folder.quarantined() if name.startswith(f"{step}.")]
    if aside:
        rule = f"was found damaged, and is {aside[-1]} now; the saved steps are {_listed(steps)}."
    raise address.wrong(rule, f"Take {address.at(steps[-1])}, the newest.")


def better_of(folder: Folder) -> Better:
    """By what the run compares its checkpoints: as the newest that can be read was saved with."""
    for step in reversed(folder.steps()):
        with contextlib.suppress(Damaged, FileNotFoundError):
            return Better.of(folder.facts(step).config.get("checkpoint", {}))
    return Better()


def best(folder: Folder, address: Address, better: Better) -> tuple[int, float]:
    """The step with the best value of a metric, the newest of equals, and that value.

    Raises:
        ConfigError: no checkpoint has it.
    """
    values: dict[int, float] = {}
    known: set[str] = set()
    for step in folder.steps():
        with contextlib.suppress(Damaged, FileNotFoundError):  # a run may be deleting it
            metrics = folder.facts(step).metrics or {}
            known |= metrics.keys()
            if (key := better.key(metrics)) is not None:
                values[step] = key
    if values:
        step = min(values, key=lambda each: (values[each], -each))
        return step, -values[step] if better.is_largest else values[step]
    if not known:
        raise address.wrong(
            "has no checkpoint that was evaluated at the step at which it was saved.",
            "Name a step, or train with eval.every at the same number as checkpoint.every; "
            "eval.every=0 evaluates the last step only.",
        )
    guess = did_you_mean(better.metric, known) or Better().metric
    raise address.wrong(
        f"has no checkpoint with a metric {better.metric}; they have {', '.join(sorted(known))}.",
        f"Take --metric {guess}.",
    )


def _listed(steps: Sequence[int]) -> str:
    words = [str(step) for step in steps]
    if len(words) > _SHOWN_STEPS:
        words = [*words[:3], f"... ({len(words)} in all)", *words[-(_SHOWN_STEPS - 4) :]]
    return ", ".join(words)
