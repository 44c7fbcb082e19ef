"""Sources of a run's secret, and the permissions of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maxpipe.distributed import protocol
from maxpipe.errors import ConfigError, StorageError

GOOD = "0123456789" * 4


def error_of(environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        protocol.secret_from_environment(environment)
    text = str(caught.value)
    where, rule, action = text.splitlines()
    assert where.startswith("MAXPIPE_RUN_SECRET") and rule[:2] == action[:2] == "  "
    return text


@pytest.mark.fault("P7")
def test_secret_from_environment_takes_precedence(tmp_path: Path) -> None:
    assert protocol.secret_from_environment({}) is None
    assert protocol.secret_from_environment({protocol.VARIABLE: f" {GOOD}\n"}) == GOOD.encode()
    for text in ("", "short", "x" * 2000):
        message = error_of({protocol.VARIABLE: text})
        assert "32 to 1024" in message and "openssl rand -hex 32" in message
        assert not text or text not in message


@pytest.mark.fault("P7")
def test_secret_file_must_be_private_to_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    named = {protocol.FILE_VARIABLE: str(path)}
    message = error_of(named)
    assert "No such file" in message and "openssl rand -hex 32 > FILE" in message
    path.write_text(GOOD + "\n")
    for mode in (0o640, 0o604, 0o620, 0o666):
        path.chmod(mode)
        message = error_of(named)
        assert f"the file mode is {mode:o}" in message and "chmod 600" in message
    path.chmod(0o600)
    assert protocol.secret_from_environment(named) == GOOD.encode()
    assert (
        protocol.secret_from_environment(named | {protocol.VARIABLE: GOOD[::-1]})
        == GOOD[::-1].encode()
    )
    for text in ("", "short", "x" * 5000):
        path.write_text(text)
        message = error_of(named)
        assert "32 to 1024" in message and "openssl rand -hex 32 > FILE" in message
    me = os.geteuid()
    path.write_text(GOOD)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert "belongs to another user" in error_of(named)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "not a regular file" in error_of(named)


@pytest.mark.fault("P7")
def test_process_0_publishes_new_secret_while_processes_connect(
    tmp_path: Path,
) -> None:
    folder, planted = tmp_path / "runs" / "run", tmp_path / "planted"
    assert protocol.read_published_secret(folder, 1) is None
    with protocol.publish_secret(folder, 1) as first:
        assert protocol.read_published_secret(folder, 1) == first and len(first) == 64
        assert protocol.read_published_secret(folder, 2) is None  # belongs to another run
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
    assert not list(folder.iterdir())
    # A file that already exists, such as one left by a killed process, is not used.
    planted.write_text(GOOD)
    protocol.secret_path(folder, 1).symlink_to(planted)
    with protocol.publish_secret(folder, 1) as second:
        assert protocol.read_published_secret(folder, 1) == second not in (first, GOOD.encode())
    assert planted.read_text() == GOOD and not list(folder.iterdir())
    # A killed process leaves its secret, which the next run in the folder removes, for any port.
    for port in (1, 2):
        protocol.secret_path(folder, port).write_text(GOOD)
    (folder / "config.yml").touch()
    protocol.remove_stale_secrets(folder)
    assert [path.name for path in folder.iterdir()] == ["config.yml"]


@pytest.mark.fault("P7")
def test_folder_without_private_file_modes_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted buckets and Windows shares ignore file modes."""
    opened = os.open

    def open_for_all(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        descriptor = opened(path, flags, mode, **more)
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o666)
        return descriptor

    monkeypatch.setattr(os, "open", open_for_all)
    rule = "the file mode is 666"
    with pytest.raises(ConfigError, match=rule) as caught, protocol.publish_secret(tmp_path, 1):
        pass
    assert "MAXPIPE_RUN_SECRET" in str(caught.value) and not list(tmp_path.iterdir())
    protocol.secret_path(tmp_path, 1).write_text(GOOD)
    protocol.secret_path(tmp_path, 1).chmod(0o644)
    with pytest.raises(ConfigError, match="the file mode is 644"):
        protocol.read_published_secret(tmp_path, 1)


def test_unwritable_folder_is_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file"
    with pytest.raises(StorageError, match="cannot be written"), protocol.publish_secret(folder, 1):
        pass
