"""Read errors are classified as damage or as storage failures."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest

from maxpipe.checkpoint.storage import (
    DamagedError,
    call_with_retries,
    is_damage,
    outage,
    remedy,
    root_cause_text,
)
from maxpipe.errors import exception_chain


def chained(*errors: BaseException) -> BaseException:
    """Return the first error with each error's `__cause__` set to the next one."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.fault("L2")
def test_cyclic_exception_chain_terminates():
    first, second = ValueError("first"), ValueError("second")
    assert list(exception_chain(chained(first, second, first))) == [first, second]
    assert root_cause_text(first) == "second" and outage(first) is None
    itself = OSError(errno.EIO, "Input/output error")
    assert root_cause_text(chained(itself, itself)) == "Input/output error"
    assert root_cause_text(ValueError("The container does not exist.\nRequest: 1")) == (
        "The container does not exist"
    )
    spec = r"""[http_response_code='403'] [tensorstore_spec='{\"path\":\"it\'s/\"}']"""
    denied = ValueError(f"PERMISSION_DENIED: [source locations='s3.cc:1\\na.h:2'] {spec}")
    assert root_cause_text(denied) == "PERMISSION_DENIED: [http_response_code='403']"


@pytest.mark.fault("L2")
def test_outage_can_be_raised_from_its_original_error():
    cause = OSError(errno.ESTALE, "Stale file handle", "file")
    for error in (cause, chained(ValueError("no metadata"), cause)):
        failure = outage(error)
        assert isinstance(failure, OSError) and failure.filename == "file"
        assert list(exception_chain(chained(failure, error))) == [failure, *exception_chain(error)]
        assert root_cause_text(failure) == "Stale file handle: file"


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (ValueError("Error reading [os_error_code='5']"), False),
        (ValueError("UNAVAILABLE: no answer"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
        (ValueError("DATA_LOSS: checksum"), True),
        (KeyboardInterrupt(), False),
    ],
)
def test_is_damage_excludes_storage_errors(error: BaseException, damaged: bool):
    assert is_damage(error) is damaged


def test_only_storage_errors_are_retried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("maxpipe.checkpoint.storage.PAUSE_SECONDS", 0)
    left: list[BaseException] = [OSError(errno.EIO, "once"), OSError(errno.EIO, "twice")]

    def call() -> int:
        if left:
            raise left.pop()
        return len(left)

    assert call_with_retries(call) == 0
    left.append(DamagedError("a"))
    with pytest.raises(DamagedError):
        call_with_retries(call)
    assert not left


def test_broken_link_is_named_in_reason_and_remedy(tmp_path: Path):
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError) as caught:
        link.mkdir(exist_ok=True)
    reason = f"{link} is a link to {tmp_path}/nowhere, which does not exist"
    assert root_cause_text(caught.value) == reason
    for path in (link, link / "checkpoints"):
        assert f"Create the target of {link}," in remedy(path, "run.dir")
    assert "Free disk space" in remedy(tmp_path / "new", "run.dir")
