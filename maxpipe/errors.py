"""Errors that users can cause, and their exit codes.

An error message has four parts: the location, the given value, the violated rule with its numbers,
and one action that fixes the problem. `assert` is reserved for bugs in maxpipe. Every error that a
user can cause is a `MaxpipeError`.
"""

from __future__ import annotations

import enum
import textwrap
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


class ExitCodeEntry(NamedTuple):
    """An exit code with its meaning, and the action of a restart rule."""

    code: ExitCode
    meaning: str
    restart: str


EXIT_CODES = (
    ExitCodeEntry(ExitCode.DONE, "success", "stop: the command is complete"),
    ExitCodeEntry(
        ExitCode.CONFIG,
        "error in the config, command line or data; device or host out of memory; divergence",
        "stop: the run would fail again until its cause is fixed",
    ),
    ExitCodeEntry(
        ExitCode.BUG, "bug in maxpipe", "stop: report the bug with the printed traceback"
    ),
    ExitCodeEntry(
        ExitCode.HANG,
        "hang, lost process, or processes that do not connect",
        "restart: resume from the newest checkpoint",
    ),
    ExitCodeEntry(
        ExitCode.STORAGE,
        "storage error, damaged or missing checkpoint, folder in use by another run, or replicas "
        "that differ",
        "stop: check the storage or the devices first",
    ),
    ExitCodeEntry(
        ExitCode.PREEMPTED,
        "stopped by SIGTERM or SIGHUP",
        "restart: resume from the newest checkpoint",
    ),
    ExitCodeEntry(
        ExitCode.INTERRUPTED,
        "stopped by Ctrl-C",
        "stop: the same command resumes from the newest checkpoint",
    ),
)
"""The only definition of the exit codes' meanings: help, docs and launchers print these texts."""


def format_exit_codes() -> str:
    """Format the exit codes for `maxpipe --help`, with at most 100 characters a line."""
    return "\n".join(
        textwrap.fill(
            f"{entry.meaning} ({entry.restart})",
            _HELP_WIDTH,
            initial_indent=f"  {entry.code:<5}",
            subsequent_indent=" " * 7,
        )
        for entry in EXIT_CODES
    )


class Code(enum.StrEnum):
    """Stable codes of errors and warnings: the area of the cause and a number.

    A code identifies one cause with the same ways out, described in `error_codes.yml`. A number is
    never changed or reused: append new codes to their area.
    """

    CFG_UNKNOWN_KEY = "MP-CFG-001"
    CFG_TYPE = "MP-CFG-002"
    CFG_VALUE = "MP-CFG-003"
    CFG_MISSING = "MP-CFG-004"
    CFG_CONFLICT = "MP-CFG-005"
    CFG_IGNORED = "MP-CFG-006"
    CFG_SIZES = "MP-CFG-007"
    CFG_YAML = "MP-CFG-008"
    CFG_FILE = "MP-CFG-009"
    CFG_FOREIGN = "MP-CFG-010"
    CFG_NO_LEARNING = "MP-CFG-011"
    CFG_RENAMED = "MP-CFG-012"
    CFG_PEER = "MP-CFG-013"
    CLI_USAGE = "MP-CLI-001"
    CLI_VALUE = "MP-CLI-002"
    CLI_CONFLICT = "MP-CLI-003"
    CLI_OUTPUT = "MP-CLI-004"
    MESH_DEVICES = "MP-MESH-001"
    MESH_AXIS_RULE = "MP-MESH-002"
    MESH_REPLICATED = "MP-MESH-003"
    MESH_UNSUPPORTED = "MP-MESH-004"
    SCHED_NAME = "MP-SCHED-001"
    SCHED_SIZES = "MP-SCHED-002"
    SCHED_FILE = "MP-SCHED-003"
    SCHED_INVALID = "MP-SCHED-004"
    MODEL_SIZES = "MP-MODEL-001"
    MODEL_ATTENTION = "MP-MODEL-002"
    MODEL_MATMUL = "MP-MODEL-003"
    MODEL_ADAPTER = "MP-MODEL-004"
    MODEL_PARAMS = "MP-MODEL-005"
    MODEL_EXPERTS = "MP-MODEL-006"
    MODEL_IMAGES = "MP-MODEL-007"
    MEM_PREDICTED = "MP-MEM-001"
    MEM_DEVICE = "MP-MEM-002"
    MEM_HOST = "MP-MEM-003"
    DATA_MISSING = "MP-DATA-001"
    DATA_UNREADABLE = "MP-DATA-002"
    DATA_DAMAGED = "MP-DATA-003"
    DATA_FORMAT = "MP-DATA-004"
    DATA_RECORD = "MP-DATA-005"
    DATA_EMPTY = "MP-DATA-006"
    DATA_FIELDS = "MP-DATA-007"
    DATA_MIXTURE = "MP-DATA-008"
    DATA_VALIDATION = "MP-DATA-009"
    DATA_END = "MP-DATA-010"
    DATA_CHANGED = "MP-DATA-011"
    DATA_PREPARED = "MP-DATA-012"
    DATA_IMAGE = "MP-DATA-013"
    TOK_FILE = "MP-TOK-001"
    TOK_VOCABULARY = "MP-TOK-002"
    TOK_TEMPLATE = "MP-TOK-003"
    TOK_MISMATCH = "MP-TOK-004"
    TOK_SETTINGS = "MP-TOK-005"
    GEN_PROMPT = "MP-GEN-001"
    POST_TEACHER = "MP-POST-001"
    POST_LOGITS = "MP-POST-002"
    POST_REFERENCE = "MP-POST-003"
    POST_REWARD = "MP-POST-004"
    CKPT_MISSING = "MP-CKPT-001"
    CKPT_DAMAGED = "MP-CKPT-002"
    CKPT_FORMAT = "MP-CKPT-003"
    CKPT_LOCKED = "MP-CKPT-004"
    CKPT_LOST = "MP-CKPT-005"
    CKPT_MODEL = "MP-CKPT-006"
    CKPT_RESUME = "MP-CKPT-007"
    CKPT_STORAGE = "MP-CKPT-008"
    CKPT_ADDRESS = "MP-CKPT-009"
    CKPT_BASE = "MP-CKPT-010"
    RUN_RECORDS = "MP-RUN-001"
    RUN_FINISHED = "MP-RUN-002"
    RUN_DIVERGED = "MP-RUN-003"
    RUN_NOT_FINITE = "MP-RUN-004"
    RUN_REPLICAS = "MP-RUN-005"
    RUN_COMPILED_STEP = "MP-RUN-006"
    NET_CONNECT = "MP-NET-001"
    NET_LOST = "MP-NET-002"
    NET_STALL = "MP-NET-003"
    NET_SECRET = "MP-NET-004"
    NET_FOLDERS = "MP-NET-005"
    ENV_PACKAGE = "MP-ENV-001"
    ENV_PLATFORM = "MP-ENV-002"
    HF_FOLDER = "MP-HF-001"
    HF_UNSUPPORTED = "MP-HF-002"
    HF_TENSORS = "MP-HF-003"
    HF_DAMAGED = "MP-HF-004"
    HF_EXPORT = "MP-HF-005"
    HF_ACCESS = "MP-HF-006"
    HF_NAMES = "MP-HF-007"
    HF_DIGEST = "MP-HF-008"
    HF_HUB = "MP-HF-009"
    HF_OUT = "MP-HF-010"
    HF_QUANTIZED = "MP-HF-011"
    HF_UPCYCLE = "MP-HF-012"
    MT_CHECKPOINT = "MP-MT-001"
    MT_UNSUPPORTED = "MP-MT-002"
    MT_PARAMS = "MP-MT-003"
    LAUNCH_SETTING = "MP-LAUNCH-001"
    LAUNCH_HOSTS = "MP-LAUNCH-002"
    LAUNCH_TOOL = "MP-LAUNCH-003"
    LAUNCH_SECRET = "MP-LAUNCH-004"
    PLAN_TOPOLOGY = "MP-PLAN-001"
    PLAN_COMPILER = "MP-PLAN-002"
    PLAN_NO_LAYOUT = "MP-PLAN-003"
    PLAN_CALIBRATION = "MP-PLAN-004"
    PLUG_NOT_ALLOWED = "MP-PLUG-001"
    PLUG_LOAD = "MP-PLUG-002"
    PLUG_REGISTER = "MP-PLUG-003"
    PLUG_FAILED = "MP-PLUG-004"
    PLUG_CHANGED = "MP-PLUG-005"
    API_BATCH = "MP-API-001"
    API_STATE = "MP-API-002"
    API_OPTIMIZER = "MP-API-003"
    API_OBJECTIVE = "MP-API-004"
    API_PROCESS = "MP-API-005"
    API_SAVED = "MP-API-006"
    API_LOSS = "MP-API-007"
    API_ARGUMENT = "MP-API-008"
    IO_UNWRITABLE = "MP-IO-001"
    IO_UNSAFE = "MP-IO-002"
    IO_PATH = "MP-IO-003"


MAX_VALUE_CHARS = 500
"""Maximum length in characters of a value quoted in a message."""
_MAX_WHERE, _MAX_PROSE, _MAX_TABLE = 1000, 4000, 60_000
_HELP_WIDTH = 100
_MAX_PROBLEMS = 120
"""Maximum number of problems listed in one message."""


def truncate_middle(text: str, limit: int) -> str:
    """Return `text`, shortened if it has more than `limit` characters. A shortened string keeps
    only its beginning and end, with its original length inserted between them.
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 4]}... ({len(text):,} characters) ...{text[-(limit // 4) :]}"


def with_code(code: Code, message: str) -> str:
    """Return the message with the code at the end of its first line."""
    first, line_break, rest = message.partition("\n")
    return f"{first}  [{code}]{line_break}{rest}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A single problem to report to the user. `where` names the file (or override) and the full
    key. `code` is printed at the end of the first line.

    The length of every field is limited, so that a value from a file cannot fill the screen.
    """

    code: Code
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
        return with_code(self.code, self.message)

    @property
    def message(self) -> str:
        """Return the message without the code."""
        heading = f"{self.where} = {self.value}" if self.value else self.where
        heading = heading.replace("\n", "\\n")  # values may contain line breaks
        return f"{heading}\n  {self.rule}\n  {self.action}"

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Return all fields except the code."""
        return self.where, self.value, self.rule, self.action

    @property
    def line(self) -> str:
        """Return the problem as a single line, for warnings."""
        heading = f"{self.where} = {self.value}" if self.value else f"{self.where}:"
        return " ".join(filter(None, (heading, self.rule, self.action, f"[{self.code}]")))


class RuleViolation(NamedTuple):
    """A violated rule: the code, the config key, the rule's message with its numbers, and the
    suggested action.
    """

    code: Code
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

    def __init__(self, code: Code | None, message: str):
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        """Return the message, with the code at the end of its first line."""
        return with_code(self.code, self.message) if self.code else self.message


class ConfigError(MaxpipeError):
    """All problems found in a config or a command line, reported together.

    `code` is the code of the first problem.
    """

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:_MAX_PROBLEMS]]
        if more := len(self.problems) - len(lines):
            lines.append(f"and {more:,} more problems")
        super().__init__(self.problems[0].code if self.problems else None, "\n".join(lines))

    def __str__(self) -> str:
        return self.message  # every problem contains its own code

    @classmethod
    def one(cls, code: Code, where: str, given: object, rule: str, action: str) -> ConfigError:
        """Return an error with a single problem."""
        return cls([Problem(code, where, "" if given is None else str(given), rule, action)])


def out_of_memory_error(error: MemoryError) -> ConfigError:
    """Return the error for exhausted host memory."""
    return ConfigError.one(
        Code.MEM_HOST,
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
        message = f"{where}: cannot be written\n  {error.strerror or error}.\n  {action}"
        return cls(Code.IO_UNWRITABLE, message)


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
    restarted. A requested stop has no error code.
    """

    exit_code = ExitCode.PREEMPTED

    def __init__(self, message: str):
        super().__init__(None, message)


class UserInterrupt(Preemption):
    """Raised after Ctrl-C stops the run. The run should not be restarted automatically."""

    exit_code = ExitCode.INTERRUPTED
