"""Where the data of a run ends, and what that means for its steps."""

from __future__ import annotations

from maxpipe.config.check import total_steps, where
from maxpipe.config.load import Loaded
from maxpipe.data.loader import Loader
from maxpipe.data.sections import section_of
from maxpipe.errors import ConfigError
from maxpipe.io.text import counted
from maxpipe.telemetry.console import Console


def last_step(train: Loader, length: int, offset: int, first: int) -> int:
    """The last of `length` steps for which there is data, or `first`, the last that is done.

    `offset` batches were left out.
    """
    return int(max(first, min(length, train.last_batch - offset)))


def must_suffice(train: Loader, length: int, offset: int) -> None:
    """Raises ConfigError if `data.end` is `fail` and the data ends before the run."""
    if train.ending is None or train.ending.policy != "fail":
        return
    number, name = train.first_again()
    if train.ramp.before(length + offset) <= number:
        return
    steps = train.ramp.batches(number + 1) - 1 - offset
    raise ConfigError.one(
        "data.end",
        "fail",
        f"must be repeat or stop for {counted(length, 'step')}: {section_of(name)} has documents "
        f"for {max(0, steps)}.",
        f"Set train.steps={max(1, steps)}, data.end=stop to end there, or data.end=repeat.",
    )


def checked(loaded: Loaded, train: Loader, offset: int, first: int, console: Console) -> int:
    """The last step of a run that has done `first`; says so if the data ends before it.

    Raises:
        ConfigError: the run is over, or the data ends before it and `data.end` is `fail`.
    """
    config = loaded.config
    length = total_steps(config.train)
    if first > length:
        raise ConfigError.one(
            where("train.steps" if config.train.steps else "train.tokens", loaded.origins),
            config.train.steps or config.train.tokens,
            f"is {counted(length, 'step')}; must be at least {first}, the step that this "
            "run starts from.",
            f"Set train.steps={first} or more, or run.name to a new name.",
        )
    must_suffice(train, length, offset)
    last = last_step(train, length, offset, first)
    if last < length:
        console.note(
            f"data: ends with step {last} of {length}, and the run with it (data.end=stop); the "
            f"learning rate is planned for {counted(length, 'step')}"
        )
    return last
