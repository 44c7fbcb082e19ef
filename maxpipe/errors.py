"""Errors that users can cause, and their exit codes.

An error message has four parts: the location, the given value, the violated rule with its numbers,
and one action that fixes the problem. `assert` is reserved for bugs in maxpipe. Every error that a
user can cause is a `MaxpipeError`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ExitCode(enum.IntEnum):
    """Exit codes. Restart rules of cluster launchers depend on these codes."""

    DONE = 0
    CONFIG = 2
    BUG = 70
    HANG = 71
    STORAGE = 74
    PREEMPTED = 75
    INTERRUPTED = 130


MAX_VALUE_CHARS = 500
"""Maximum length in characters of a value quoted in a message."""
_MAX_WHERE, _MAX_PROSE, _MAX_TABLE = 1000, 4000, 60_000
_MAX_PROBLEMS = 120
"""Maximum number of problems listed in one message."""


def truncate_middle(text: str, limit: int) -> str:
    """Return `text`, shortened if it has more than `limit` characters. A shortened string keeps
    only its beginning and end, with its original length inserted between them.
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 4]}... ({len(text):,} characters) ...{text[-(limit // 4) :]}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A single problem to report to the user. `where` names the file (or override) and the full
    key.

    The length of every field is limited, so that a value from a file cannot fill the screen.
    """

    where: str
    value: str
    rule: str
    action: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", truncate_middle(self.where, _MAX_WHERE))
        object.__setattr__(self, "value", truncate_middle(self.value, MAX_VALUE_CHARS))
        object.__setattr__(self, "rule", truncate_middle(self.rule, _MAX_PROSE))
        # Only an action that contains a translated config file can span several lines.
        longest = _MAX_TABLE if "\n" in self.action else _MAX_PROSE
        object.__setattr__(self, "action", truncate_middle(self.action, longest))

    def __str__(self) -> str:
        heading = f"{self.where} = {self.value}" if self.value else self.where
        heading = heading.replace("\n", "\\n")  # values may contain line breaks
        return f"{heading}\n  {self.rule}\n  {self.action}"

    @property
    def line(self) -> str:
        """Return the problem as a single line, for warnings."""
        heading = f"{self.where} = {self.value}" if self.value else f"{self.where}:"
        return " ".join(filter(None, (heading, self.rule, self.action)))


class RuleViolation(NamedTuple):
    """A violated rule: the config key, the rule's message with its numbers, and the suggested
    action.
    """

    key: str
    rule: str
    action: str


def escape_control_chars(text: str) -> str:
    """Escape control characters in `text`, except line breaks."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes. Each error is yielded only once, because some libraries
    create cyclic chains.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


class MaxpipeError(Exception):
    """Base class for errors that are reported to the user without a traceback."""

    exit_code = ExitCode.BUG


class ConfigError(MaxpipeError):
    """All problems found in a config or a command line, reported together."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:_MAX_PROBLEMS]]
        if more := len(self.problems) - len(lines):
            lines.append(f"and {more:,} more problems")
        super().__init__("\n".join(lines))

    @classmethod
    def one(cls, where: str, given: object, rule: str, action: str) -> ConfigError:
        """Return an error with a single problem."""
        return cls([Problem(where, "" if given is None else str(given), rule, action)])


def out_of_memory_error(error: MemoryError) -> ConfigError:
    """Return the error for exhausted host memory."""
    return ConfigError.one(
        "memory",
        None,
        f"this host is out of memory: {str(error) or 'an allocation failed'}.",
        "Close other programs, use a machine with more memory, or reduce the input.",
    )


class UnreachableError(MaxpipeError):
    """Raised if processes of a run do not connect in time, or become unreachable. Restarting the
    run may help.
    """

    exit_code = ExitCode.HANG


class StorageError(MaxpipeError):
    """Raised for a run folder or checkpoint that cannot be read or written."""

    exit_code = ExitCode.STORAGE

    @classmethod
    def unwritable(cls, where: object, error: OSError, action: str = "") -> StorageError:
        """Return the error for a failed write. The default action is for a run folder."""
        action = action or "Free up disk space, or set run.dir to a writable folder."
        return cls(f"{where}: cannot be written\n  {error.strerror or error}.\n  {action}")


class DivergenceError(MaxpipeError):
    """Raised if the loss, a gradient or the train state diverges, so that the run must not
    continue.

    Runs are deterministic, so a restarted run would fail in the same way. The exit code is
    therefore the same as for an invalid config.
    """

    exit_code = ExitCode.CONFIG


class ReplicaError(MaxpipeError):
    """Raised if devices hold different replicas of the same data. Checkpoints on disk are still
    valid.
    """

    exit_code = ExitCode.STORAGE


class Preemption(MaxpipeError):
    """Raised after a signal stops the run. The run's state has been saved, and the run can be
    restarted.
    """

    exit_code = ExitCode.PREEMPTED


class UserInterrupt(Preemption):
    """Raised after Ctrl-C stops the run. The run should not be restarted automatically."""

    exit_code = ExitCode.INTERRUPTED
