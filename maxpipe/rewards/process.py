"""Rewards of completions, computed in a separate process with a time limit per completion.

If a reward function hangs or crashes, training does not block, and the error names the prompt
record.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.errors import Code, ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json
from maxpipe.io.worker_process import WorkerProcess
from maxpipe.rewards import builtin, worker

_START_SECONDS = 60.0
"""Time limit in seconds for loading the file of a reward function, including its imports."""
_MAX_REPLY_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 24
_MAX_SHOWN = 60


class _RewardReply(TypedDict, total=False):
    """Response line of the worker process. The response to the first request, which selects the
    function, is an empty object.
    """

    reward: float
    error: str


@dataclass(frozen=True)
class RewardSettings:
    """Selection of a reward function, which scores completions in training or evaluation."""

    kind: str
    """Name of a built-in function; ignored if `file` is set."""
    field: str
    """Record field that the built-in function reads; empty selects its default."""
    file: str
    """Function as `FILE.py:FUNCTION`, or an empty string."""
    allow_code: bool
    timeout_seconds: float
    kind_key: str
    """Config key or option that sets `kind`, for error messages."""
    file_key: str

    @classmethod
    def from_grpo(cls, config: GrpoConfig) -> RewardSettings:
        """Return the settings of the section `grpo`."""
        return cls(
            config.reward,
            config.reward_field,
            config.reward_file,
            config.allow_code,
            config.reward_timeout_seconds,
            "grpo.reward",
            "grpo.reward_file",
        )


class RewardFunction:
    """Compute the rewards of completions with the configured function."""

    def __init__(self, settings: RewardSettings):
        assert settings.allow_code or not settings.file, "a config rule requires allow_code"
        self._settings = settings
        self._path, _, self._function = settings.file.rpartition(":")
        self._process: WorkerProcess | None = None

    def fingerprint(self) -> str:
        """Return a string that identifies the function; for a function in a file, it includes the
        file's checksum.
        """
        if not self._settings.file:
            return f"{self._settings.kind} {self._settings.field}".strip()
        try:
            content = files.read(self._path, _MAX_FILE_BYTES)
        except OSError as error:
            rule = f"must be a readable Python file: {error.strerror or error}."
            raise self._config_error(rule) from error
        return f"{self._function} of {hashlib.sha256(content).hexdigest()}"

    def compute(self, completion: str, record: Mapping[str, Any], where: str) -> float:
        """Return the reward of a completion. `where` identifies the prompt record in error
        messages.

        Raises:
            ConfigError: the function raises an exception, exceeds the time limit, terminates its
                process, or does not return a finite number.
        """
        process = self.start()
        request = {"completion": completion, "record": record}
        try:
            reply = self._request(process, request, self._settings.timeout_seconds)
            if "reward" not in reply:
                raise _RewardError("the function returned no reward")
            return reply["reward"]
        except _RewardError as error:
            shown = completion if len(completion) <= _MAX_SHOWN else f"{completion[:_MAX_SHOWN]}..."
            rule = f"must return a finite number within {self._settings.timeout_seconds:g} "
            rule += (
                f"seconds for each completion; for {where} and the completion {shown!r}, {error}."
            )
            raise self._config_error(rule) from None

    def close(self) -> None:
        """Stop the worker process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def start(self) -> WorkerProcess:
        """Return the worker process, starting it on the first call.

        Raises:
            ConfigError: the file that defines the function cannot be loaded.
        """
        if self._process is not None:
            return self._process
        paths = os.pathsep.join(path for path in sys.path if path)
        process = self._process = WorkerProcess(
            [sys.executable, "-P", "-m", worker.__name__],
            os.environ | {"PYTHONPATH": paths},
            most_answer_bytes=_MAX_REPLY_BYTES,
            shows_errors=True,
            own_session=True,  # Ctrl-C reaches only the run, which then stops the worker
        )
        settings = {
            "kind": self._settings.kind,
            "field": self._settings.field,
            "file": self._path,
            "function": self._function,
            "seconds": self._settings.timeout_seconds,
            "start_seconds": _START_SECONDS,
        }
        try:
            self._request(process, settings, _START_SECONDS)
        except _RewardError as error:
            rule = (
                f"must be a Python file that defines this function, but cannot be loaded: {error}."
            )
            raise self._config_error(rule) from None
        return process

    def _request(
        self, process: WorkerProcess, request: Mapping[str, Any], seconds: float
    ) -> _RewardReply:
        try:
            line = process.request(json.dumps(request).encode() + b"\n", seconds)
            reply = parse_json(line, _RewardReply)
        except TimeoutError:
            self.close()
            raise _RewardError("the code exceeded the time limit") from None
        except (OSError, ValueError):
            self.close()
            raise _RewardError("the code terminated its process") from None
        if "error" in reply:
            raise _RewardError(reply["error"])
        return reply

    def _config_error(self, rule: str) -> ConfigError:
        if not self._settings.file:
            action = "Correct or remove the record."
            key, kind = self._settings.kind_key, self._settings.kind
            return ConfigError.one(Code.POST_REWARD, key, kind, rule, action)
        action = "Correct the function: `def reward(completion: str, record: dict) -> float`."
        key, file = self._settings.file_key, self._settings.file
        return ConfigError.one(Code.POST_REWARD, key, file, rule, action)


class _RewardError(Exception):
    """Raised if the worker process or its reward function fails."""


def check(settings: RewardSettings, record: Mapping[str, Any]) -> None:
    """Raise ValueError if the record lacks a field that the built-in reward requires."""
    if settings.file:
        return
    field = settings.field or builtin.FIELDS[settings.kind]
    if settings.kind == "regex":
        builtin.read_pattern(record, field)
    elif settings.kind == "number":
        builtin.read_number(record, field)
    elif settings.kind == "arithmetic":
        builtin.expected_value(record, field)
    else:
        builtin.read_text(record, field)
