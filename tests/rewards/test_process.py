"""Rewards computed in a worker process: failures of functions, and their error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.errors import ConfigError
from maxpipe.rewards.process import RewardFunction, RewardSettings
from tests.errors import raises

Opened = Callable[..., RewardFunction]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Return `opened(body)`, which opens `reward(completion, record)` with this body."""
    every: list[RewardFunction] = []

    def make(body: str, before: str = "") -> RewardFunction:
        path = tmp_path / "mine.py"
        path.write_text(f"{before}\ndef reward(completion, record):\n    {body}\n")
        config = GrpoConfig(reward_file=f"{path}:reward", allow_code=True, reward_timeout_seconds=2)
        every.append(RewardFunction(RewardSettings.from_grpo(config)))
        return every[-1]

    yield make
    for each in every:
        each.close()


def error_message(rewards: RewardFunction, completion: str = "7") -> str:
    with pytest.raises(ConfigError) as error:
        rewards.compute(completion, {"prompt": "3+4="}, "prompts.jsonl, line 3")
    text = str(error.value)
    assert "mine.py:reward" in text and "def reward(completion: str, record: dict)" in text
    return text


def test_function_receives_completion_and_record(opened: Opened) -> None:
    rewards = opened("print('said'); return len(completion) + record['more']")
    assert rewards.compute("abc", {"more": 0.5}, "line 1") == 3.5
    assert rewards.compute("", {"more": True}, "line 2") == 1


def test_reward_file_can_import_modules_from_its_folder(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORTH = 4")
    rewards = opened("import beside; return beside.WORTH")
    assert rewards.compute("", {}, "line 1") == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 'right'", "the function returned 'right', which is not a number"),
        ("return None", "the function returned None, which is not a number"),
        ("return float('nan')", "the function returned nan, which is not finite in float32"),
        ("return 1e39", "the function returned 1e+39, which is not finite in float32"),
        ("return 1 / 0", "the code raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "the code raised SystemExit: 3"),
        ("import os; os._exit(3)", "the code terminated its process"),
        ("import os; os.kill(os.getpid(), 9)", "the code terminated its process"),
        ("while True: pass", "the code exceeded the time limit"),
        ("import time; time.sleep(60)", "the code exceeded the time limit"),
    ],
)
def test_reward_function_failures_are_reported(opened: Opened, body: str, words: str) -> None:
    start = time.monotonic()
    text = error_message(opened(body))
    assert f"for prompts.jsonl, line 3 and the completion '7', {words}." in text
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("raise ValueError('mine')", "the code raised ValueError: mine"),
        ("import nothing_by_that_name", "the code raised ModuleNotFoundError"),
        ("def", "the code raised SyntaxError"),
    ],
)
def test_reward_file_that_fails_to_load_is_reported(
    opened: Opened, before: str, words: str
) -> None:
    text = error_message(opened("return 1", before))
    assert "cannot be loaded" in text and words in text


def test_missing_reward_function_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("reward = 3")
    config = GrpoConfig(reward_file=f"{path}:reward", allow_code=True)
    with raises(ConfigError, "grpo.reward_file", names=["mine.py:reward", "AttributeError"]):
        RewardFunction(RewardSettings.from_grpo(config)).compute("", {}, "line 1")
    config = GrpoConfig(reward_file=f"{tmp_path / 'other.py'}:reward", allow_code=True)
    with raises(ConfigError, "grpo.reward_file", names=["other.py:reward"]):
        RewardFunction(RewardSettings.from_grpo(config)).fingerprint()


def test_fingerprint_depends_on_file_content(opened: Opened) -> None:
    first, second = opened("return 1").fingerprint(), opened("return 2").fingerprint()
    assert first != second and opened("return 1").fingerprint() == first
    config = GrpoConfig(reward="regex")
    assert RewardFunction(RewardSettings.from_grpo(config)).fingerprint() == "regex"


def test_builtin_rewards_run_in_worker_with_time_limit() -> None:
    """Matching a pattern may take forever."""
    config = GrpoConfig(reward="regex", reward_timeout_seconds=1)
    rewards = RewardFunction(RewardSettings.from_grpo(config))
    assert rewards.compute("abc", {"pattern": "b"}, "line 1") == 1
    with raises(ConfigError, "grpo.reward", "regex", names=["1 seconds", "line 2"]):
        rewards.compute("a" * 60, {"pattern": "(a+)+$b"}, "line 2")
    rewards.close()


def test_worker_has_own_process_group(opened: Opened) -> None:
    rewards = opened("import os; return os.getpgid(0)")
    group = int(rewards.compute("", {}, "line 1"))
    assert group != os.getpgid(0)
    os.killpg(group, signal.SIGCONT)  # the group exists


def test_worker_prints_no_traceback_if_its_parent_is_killed(tmp_path: Path) -> None:
    """The parent closes the pipe while the function runs."""
    (tmp_path / "slow.py").write_text("import time\ndef reward(c, r): time.sleep(0.3); return 1\n")
    settings = {"kind": "", "field": "", "file": str(tmp_path / "slow.py"), "function": "reward"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "maxpipe.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert worker.stdin and worker.stdout and worker.stderr
    with worker.stdin, worker.stdout, worker.stderr:
        for request in (
            settings | {"seconds": 5, "start_seconds": 5},
            {"completion": "", "record": {}},
        ):
            worker.stdin.write(json.dumps(request).encode() + b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"{}\n"
        worker.stdout.close()
        assert worker.stderr.read() == b""
        worker.wait(10)
