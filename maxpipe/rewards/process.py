"""Rewards of completions, computed in a process of their own with a limit of time for each.

Whatever a function does, training does not hang with it: the record that it failed on is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from maxpipe.config.tuning_schema import GrpoConfig
from maxpipe.errors import ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json
from maxpipe.io.worker_process import WorkerProcess
from maxpipe.rewards import builtin, worker

_KEY = "grpo.reward_file"
_START_SECONDS = 60.0
"""In which a file with a function is loaded, and all that it imports."""
_MAX_REPLY_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 24
_MAX_SHOWN = 60


class _RewardReply(TypedDict, total=False):
    """A line of the process; that to its settings is empty."""

    reward: float
    error: str


class RewardFunction:
    """What completions are worth, by the function that the config names."""

    def __init__(self, config: GrpoConfig):
        assert config.allow_code or not config.reward_file, "a rule of the config asks for this"
        self._config = config
        self._path, _, self._function = config.reward_file.rpartition(":")
        self._process: WorkerProcess | None = None

    def fingerprint(self) -> str:
        """Which function it is: for a file, with its digest."""
        if not self._config.reward_file:
            return f"{self._config.reward} {self._config.reward_field}".strip()
        try:
            content = files.read(self._path, _MAX_FILE_BYTES)
        except OSError as error:
            rule = f"must be a Python file that can be read: {error.strerror or error}."
            raise self._config_error(rule) from error
        return f"{self._function} of {hashlib.sha256(content).hexdigest()}"

    def compute(self, completion: str, record: Mapping[str, Any], where: str) -> float:
        """The reward of a completion; `where` names the record of its prompt in errors.

        Raises:
            ConfigError: the function raises, takes too long, ends its process, or returns anything
                but a finite number.
        """
        process = self.start()
        request = {"completion": completion, "record": record}
        try:
            answer = self._request(process, request, self._config.reward_timeout_seconds)
            if "reward" not in answer:
                raise _RewardError("it gave none")
            return answer["reward"]
        except _RewardError as error:
            shown = completion if len(completion) <= _MAX_SHOWN else f"{completion[:_MAX_SHOWN]}..."
            rule = (
                f"must give a finite number within {self._config.reward_timeout_seconds:g} seconds for "
                f"each completion; of {where} and the completion {shown!r} {error}."
            )
            raise self._config_error(rule) from None

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def start(self) -> WorkerProcess:
        """The process, started if it is not yet.

        Raises:
            ConfigError: the file with the function cannot be loaded.
        """
        if self._process is not None:
            return self._process
        paths = os.pathsep.join(path for path in sys.path if path)
        process = self._process = WorkerProcess(
            [sys.executable, "-P", "-m", worker.__name__],
            os.environ | {"PYTHONPATH": paths},
            most_answer_bytes=_MAX_REPLY_BYTES,
            shows_errors=True,
            own_session=True,  # Ctrl-C is for the run, which ends it
        )
        config = self._config
        settings = {
            "kind": config.reward,
            "field": config.reward_field,
            "file": self._path,
            "function": self._function,
            "seconds": config.reward_timeout_seconds,
            "start_seconds": _START_SECONDS,
        }
        try:
            self._request(process, settings, _START_SECONDS)
        except _RewardError as error:
            rule = f"must be a Python file with this function, and cannot be loaded: {error}."
            raise self._config_error(rule) from None
        return process

    def _request(
        self, process: WorkerProcess, request: Mapping[str, Any], seconds: float
    ) -> _RewardReply:
        try:
            answer = parse_json(
                process.request(json.dumps(request).encode() + b"\n", seconds), _RewardReply
            )
        except TimeoutError:
            self.close()
            raise _RewardError("it took longer") from None
        except (OSError, ValueError):
            self.close()
            raise _RewardError("it ended its process") from None
        if "error" in answer:
            raise _RewardError(answer["error"])
        return answer

    def _config_error(self, rule: str) -> ConfigError:
        if not self._config.reward_file:
            action = "Correct the record, or take it out."
            return ConfigError.one("grpo.reward", self._config.reward, rule, action)
        action = "Correct the function: `def reward(completion: str, record: dict) -> float`."
        return ConfigError.one(_KEY, self._config.reward_file, rule, action)


class _RewardError(Exception):
    """What the process or its function did, in words."""


def check(config: GrpoConfig, record: Mapping[str, Any]) -> None:
    """Raises ValueError if the record lacks what a built-in reward reads."""
    if config.reward_file:
        return
    field = config.reward_field or builtin.FIELDS[config.reward]
    if config.reward == "regex":
        builtin.read_pattern(record, field)
    elif config.reward == "arithmetic":
        builtin.expected_value(record, field)
    else:
        builtin.read_text(record, field)
