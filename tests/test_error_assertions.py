"""Tests of tests/errors.py: an error that differs in one field does not pass."""

from __future__ import annotations

from typing import Any

import pytest

from maxpipe.errors import Code, ConfigError, MaxpipeError, Problem, StorageError
from tests.errors import assert_error, contains, parse_problems, raises

PROBLEM = Problem(
    Code.CFG_SIZES,
    "run.yml:3: train.batch_size",
    "12",
    "must be a multiple of pipeline.microbatches (8), at most 8,434.5.",
    "Set train.batch_size=16, or run `maxpipe plan run.yml`.",
)
FACTS: dict[str, Any] = {
    "key": "train.batch_size",
    "value": 12,
    "names": ["pipeline.microbatches", 8, "8,434.5"],
    "suggests": ["train.batch_size=16", "`maxpipe plan run.yml`"],
    "code": Code.CFG_SIZES,
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("of 8.", 8),
        ("(8)", 8),
        ("key=8, or", 8),
        ("Did you mean llama3-8b?", "llama3-8b"),
        ("/tmp/run/lock.json: is in use", "/tmp/run"),
        ("/tmp/run/lock.json: is in use", "lock.json"),
        ("file.yml: data.sources[0]", "data.sources"),
        ("from -2**63 to 2**63 - 1.", "-2**63"),
        ("Set --out to `x`.", "--out"),
    ],
)
def test_contains_accepts_complete_name(text: str, name: object) -> None:
    assert contains(text, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("18", 8),
        ("80", 8),
        ("-8", 8),
        ("8.5", 8),
        ("1.8", 8),
        ("8,434", 8),
        ("1,008", "008"),
        ("1e8", 8),
        ("1e-8", 8),
        ("8B", 8),
        ("train.tokens", "tokens"),
        ("data.path", "data"),
        ("data.path_of", "data.path"),
        ("llama3-8b", "llama3"),
        ("llama3-8b", "8b"),
        ("a.jsonl", "jsonl"),
        ("/tmp/run2/lock.json", "/tmp/run"),
        ("model.mtp_heads", "model.mtp-heads"),
    ],
)
def test_contains_rejects_part_of_longer_name(text: str, name: object) -> None:
    assert not contains(text, name)


def test_contains_requires_nonempty_name() -> None:
    with pytest.raises(AssertionError, match="empty"):
        contains("text", "")


@pytest.mark.parametrize("error", [ConfigError([PROBLEM]), str(PROBLEM)], ids=["error", "text"])
@pytest.mark.parametrize("fact", FACTS)
def test_assert_error_compares_each_argument(error: ConfigError | str, fact: str) -> None:
    assert_error(error, **FACTS)
    assert_error(error, **{fact: FACTS[fact]})
    different: dict[str, list[Any]] = {
        "key": ["train", "batch_size", "train.batch_size=16", "pipeline.microbatches"],
        "value": [1, 8, "", "012"],
        # Names are not searched in the location or the action.
        "names": [["train.batch_size"], ["run.yml"], [16], [8, 9], ["434.5"]],
        # Suggestions are not searched in the rule.
        "suggests": ["8", "train.batch_size=1", ["train.batch_size=16", "train.steps=3"]],
        "code": [Code.CFG_VALUE],
    }
    for other in different[fact]:
        with pytest.raises(AssertionError, match="no problem with"):
            assert_error(error, **{**FACTS, fact: other})


def test_table_below_action_is_not_searched() -> None:
    action = "Write these lines.\nmodel: {num_layers: 8}\ndata: {path: text}"
    error = ConfigError(
        [Problem(Code.CFG_VALUE, "file.json", "", "is a config of another trainer.", action)]
    )
    assert_error(error, suggests="num_layers")
    with pytest.raises(AssertionError):
        assert_error(error, suggests="path")


def test_all_arguments_must_match_same_problem() -> None:
    other = Problem(Code.CFG_VALUE, "train.steps", "0", "must be at least 1.", "Set train.steps=1.")
    error = ConfigError([PROBLEM, other])
    assert assert_error(error, "train.steps", 0, [1], "train.steps=1") == other
    for facts in ({"key": "train.steps", "value": 12}, {"value": 0, "names": [8]}):
        with pytest.raises(AssertionError):
            assert_error(error, **facts)


def test_warnings_and_output_are_not_problems() -> None:
    warning = f"warning: {PROBLEM.line}"
    assert parse_problems(f"{warning}\nstep 3 = done\n  more\nWARNING x = 1\n  a\n  b") == []
    (found,) = parse_problems(f"{warning}\nsteps\n{PROBLEM}\n{warning}")
    assert found == PROBLEM
    with pytest.raises(AssertionError):
        assert_error(f"{warning}\nother = 1\n  rule\n  action", "train.batch_size")


def test_error_without_problem_does_not_pass() -> None:
    for error in ("", "one line", "where\n  only a rule", ValueError("a"), ConfigError([])):
        with pytest.raises(AssertionError):
            assert_error(error)


def test_raises_compares_exact_error_type() -> None:
    class OtherError(StorageError):
        """A subclass, which may have a different exit code."""

    text = "/tmp/run: cannot be written\n  No space left.\n  Free space."
    facts: dict[str, Any] = {"key": "/tmp/run", "names": "No space left", "suggests": "Free space"}
    with raises(StorageError, **facts) as caught:
        raise StorageError(Code.IO_UNWRITABLE, text)
    assert caught.value.message == text
    for kind in (StorageError, MaxpipeError):
        with pytest.raises(AssertionError, match="OtherError instead of"), raises(kind, **facts):
            raise OtherError(Code.IO_UNWRITABLE, text)
    with pytest.raises(ConfigError), raises(StorageError):
        raise ConfigError([PROBLEM])
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), raises(StorageError):
        pass
