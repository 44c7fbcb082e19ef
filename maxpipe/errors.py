"""Errors a user can cause, and the exit code each one ends the process with.

A message has four parts: where, what was given, the rule with its numbers, and
one action that works. `assert` is for our own mistakes; everything a user can
get wrong raises a `MaxpipeError`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ExitCode(enum.IntEnum):
    """Exit codes, a contract with restart rules of clusters."""

    DONE = 0
    CONFIG = 2
    BUG = 70
    HANG = 71
    STORAGE = 74
    PREEMPTED = 75
    INTERRUPTED = 130


MAX_VALUE_CHARS = 500
"""Characters of a given value in a message."""
_MAX_WHERE, _MAX_PROSE, _MAX_TABLE = 1000, 4000, 60_000
_MAX_PROBLEMS = 120
"""Problems in one message."""


def truncate_middle(text: str, limit: int) -> str:
    """Return `text`, or both ends and the length of one with more than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 4]}... ({len(text):,} characters) ...{text[-(limit // 4) :]}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: `where` names file (or override) and full key.

    Every part is bounded here, so that no value from a file fills a screen.
    """

    where: str
    value: str
    rule: str
    action: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", truncate_middle(self.where, _MAX_WHERE))
        object.__setattr__(self, "value", truncate_middle(self.value, MAX_VALUE_CHARS))
        object.__setattr__(self, "rule", truncate_middle(self.rule, _MAX_PROSE))
        # An action of several lines is a translated file.
        longest = _MAX_TABLE if "\n" in self.action else _MAX_PROSE
        object.__setattr__(self, "action", truncate_middle(self.action, longest))

    def __str__(self) -> str:
        heading = f"{self.where} = {self.value}" if self.value else self.where
        heading = heading.replace("\n", "\\n")  # a value may hold line breaks
        return f"{heading}\n  {self.rule}\n  {self.action}"

    @property
    def line(self) -> str:
        """The same in one line, for a warning."""
        heading = f"{self.where} = {self.value}" if self.value else f"{self.where}:"
        return " ".join(filter(None, (heading, self.rule, self.action)))


class RuleViolation(NamedTuple):
    """A broken rule: the key to blame, the rule with its numbers, and what to do."""

    key: str
    rule: str
    action: str


def escape_control_chars(text: str) -> str:
    """`text` without control characters; line breaks are kept."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, once each: some libraries make cyclic chains."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


class MaxpipeError(Exception):
    """A failure that is explained to the user without a traceback."""

    exit_code = ExitCode.BUG


class ConfigError(MaxpipeError):
    """Everything wrong with a config or a command line, reported together."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:_MAX_PROBLEMS]]
        if more := len(self.problems) - len(lines):
            lines.append(f"{more:,} more problems")
        super().__init__("\n".join(lines))

    @classmethod
    def one(cls, where: str, given: object, rule: str, action: str) -> ConfigError:
        """The common case of a single mistake."""
        return cls([Problem(where, "" if given is None else str(given), rule, action)])


def out_of_memory_error(error: MemoryError) -> ConfigError:
    """The error for host memory, without further details."""
    return ConfigError.one(
        "memory",
        None,
        f"this host ran out: {str(error) or 'no more memory'}.",
        "End other programs, use a machine with more memory, or give the command less to read.",
    )


class UnreachableError(MaxpipeError):
    """Processes of a run did not connect in time or cannot be reached; a restart may help."""

    exit_code = ExitCode.HANG


class StorageError(MaxpipeError):
    """A run folder or checkpoint that cannot be read or written."""

    exit_code = ExitCode.STORAGE

    @classmethod
    def unwritable(cls, where: object, error: OSError, action: str = "") -> StorageError:
        """The common case; the default action is for the folder of a run."""
        action = action or "Free space, or set run.dir to a folder that can be written."
        return cls(f"{where}: cannot be written\n  {error.strerror or error}.\n  {action}")


class DivergenceError(MaxpipeError):
    """Loss or gradients with which the config does not let the run go on.

    A run is deterministic: started again, it would fail again. So the exit code is
    that of a config which has to be changed first.
    """

    exit_code = ExitCode.CONFIG


class ReplicaError(MaxpipeError):
    """A device's memory differs from its replicas'; checkpoints on disk are good."""

    exit_code = ExitCode.STORAGE


class Preemption(MaxpipeError):
    """The run was asked to stop, has saved its state, and can be restarted."""

    exit_code = ExitCode.PREEMPTED


class UserInterrupt(Preemption):
    """The same by Ctrl-C: a person wants it to stay stopped."""

    exit_code = ExitCode.INTERRUPTED
