"""Checkpoints and locks in a store that tensorstore has no driver for."""

from __future__ import annotations

import functools
import http.client
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint import storage
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.lock import FILE, RunLock
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager, open_run
from maxpipe.checkpoint.storage import create, to_epath
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import store_server, stores
from maxpipe.io.array_store import array_store
from maxpipe.io.redact import redact_text
from tests.checkpoint.cases import abstract, put, tree
from tests.errors import raises
from tests.folder_store import FolderStore

Logs = pytest.LogCaptureFixture
RUN = "folder://bucket/runs/a"


@pytest.fixture
def saved(folder_store: Path) -> Path:
    """The folder of the checkpoints of a run with steps 3 and 6."""
    save(3, 6)
    return folder_store / "bucket/runs/a" / CHECKPOINTS_FOLDER


def save(*steps: int, **keys: Any) -> None:
    with CheckpointManager(RUN, CheckpointConfig(**keys)) as checkpoints:
        for step in steps:
            put(checkpoints, step)


def newest() -> int | None:
    with CheckpointManager(RUN) as checkpoints:
        found = checkpoints.restore_newest(abstract())
        assert found is None or tree_digest(found.state) == tree_digest(tree(found.step))
        return found and found.step


def test_concurrent_first_uses_start_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a server protects indexes only if all requests use this server."""

    class SlowServer(store_server._Server):
        def __init__(self, *arguments: Any):
            time.sleep(0.1)
            super().__init__(*arguments)

    started = store_server._server.__wrapped__
    monkeypatch.setattr(store_server, "_Server", SlowServer)
    monkeypatch.setattr(store_server, "_server", functools.cache(started))
    with ThreadPoolExecutor(4) as threads:
        specs = list(threads.map(store_server.served_array_store, ["folder://bucket"] * 4))
    assert len({spec["endpoint"] for spec in specs}) == 1
    store_server._server().shutdown()
    store_server._server().server_close()


# --- checkpoints ----------------------------------------------------------------------------


def test_restore_returns_saved_state(saved: Path) -> None:
    with open_run(RUN) as checkpoints:
        for step in (3, 6):
            assert tree_digest(checkpoints.restore(step).state) == tree_digest(tree(step))
    save(9, keep=2)
    assert set(os.listdir(saved)) == {"6", "9"} and newest() == 9


def test_damaged_and_unfinished_steps_are_skipped(saved: Path, caplog: Logs) -> None:
    save(9)
    for name in ("manifest.json", "commit_success.txt"):
        (saved / "9" / name).unlink()
    path = min((saved / "6/state/d").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert newest() == 3
    assert set(os.listdir(saved)) == {"3", "6.corrupt"} and "renamed 6.corrupt" in caplog.text


def test_store_without_copies_renames_damaged_steps(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cp_file(*arguments: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FolderStore, "cp_file", cp_file)
    (saved / "6/manifest.json").write_text("{}")
    assert newest() == 3 and set(os.listdir(saved)) == {"3", "6.corrupt"}


@pytest.mark.parametrize("error", [PermissionError("denied by the store"), OSError("status 500")])
def test_errors_of_the_store_are_not_damage(
    saved: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store_server.CONTEXT["s3_request_retries"], "max_retries", 1)
    before = set(os.listdir(saved))

    def fault(operation: str, path: str) -> None:
        if "/state/" in path:
            raise error

    monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
    with raises(StorageError, RUN, names=[str(error)], suggests="network"):
        newest()
    with pytest.raises(StorageError, match=str(error)):
        save(9)
    assert main(["checkpoints", "verify", RUN]) == 74
    assert set(os.listdir(saved)) >= before and not any("corrupt" in n for n in os.listdir(saved))


def test_temporary_errors_are_retried(folder_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store_server.CONTEXT["s3_request_retries"], "initial_delay", "10ms")
    left = {"wb": 2, "info": 1, "rb": 2}

    def fault(operation: str, path: str) -> None:
        if "/state/" in path and "request" in threading.current_thread().name:
            left[operation] = left.get(operation, 0) - 1
            if left[operation] >= 0:
                raise OSError("status 500")

    monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
    save(3)
    assert newest() == 3 and max(left.values()) < 0


# --- locks ----------------------------------------------------------------------------------


def test_second_run_cannot_take_the_lock(folder_store: Path) -> None:
    with RunLock(RUN):
        assert (folder_store / "bucket/runs/a" / FILE).exists()
        with raises(StorageError, RUN, suggests="run.name"), RunLock(RUN):
            pass
    assert not list(folder_store.rglob("*.json*"))


def test_only_the_last_of_concurrent_writers_creates_an_object(
    folder_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderStore, "exists", lambda store, path: False)
    monkeypatch.setattr(stores, "CREATE_SECONDS", 0.3)
    created, start = [], threading.Barrier(4)

    def run(name: str) -> None:
        start.wait()
        try:
            create("folder://bucket/a/lock", name * 1000)
            created.append(name)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (folder_store / "bucket/a/lock").read_text() == created[0] * 1000
    assert len(created) == 1


# --- the server -----------------------------------------------------------------------------


class Client:
    """A client of the server of this process, with the path `folder/bucket/x/NAME` for a name."""

    def __init__(self) -> None:
        self.spec = array_store("folder://bucket/x/")
        self.token = self.spec["bucket"]
        self.port = int(self.spec["endpoint"].rpartition(":")[2])

    def __call__(
        self, method: str, name: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        fields = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, f"/{self.token}/folder/bucket/x/{name}", body, fields)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, {k.lower(): v for k, v in answer.getheaders()}


@pytest.fixture
def client(folder_store: Path) -> Iterator[Client]:
    yield Client()


def test_requests_without_the_token_are_denied(client: Client, folder_store: Path) -> None:
    assert client("PUT", "a", b"secret")[0] == 200
    token, client.token = client.token, "0" * 32
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        status, content, _ = client(method, "a", b"" if method == "PUT" else None)
        assert status == 403 and b"secret" not in content
    assert client("GET", "a?list-type=2&prefix=folder/bucket/")[0] == 403
    assert (folder_store / "bucket/x/a").read_bytes() == b"secret"
    assert token not in redact_text(str(client.spec))
    assert client.spec["aws_credentials"] == {"type": "anonymous"}
    assert "127.0.0.1" in os.environ["no_proxy"].split(",")


def test_ranges_and_conditions(client: Client) -> None:
    assert client("GET", "a")[0] == client("HEAD", "a")[0] == 404
    assert client("PUT", "a", b"0123456789", If_Match='"x"')[0] == 412
    status, _, headers = client("PUT", "a", b"0123456789", If_None_Match="*")
    assert status == 200 and client("PUT", "a", b"", If_None_Match="*")[0] == 412
    tag = headers["etag"]
    for given, expected in (("2-4", b"234"), ("7-", b"789"), ("-2", b"89"), ("8-99", b"89")):
        status, content, headers = client("GET", "a", Range=f"bytes={given}")
        assert status == 206 and content == expected and headers["etag"] == tag
    assert headers["content-range"] == "bytes 8-9/10"
    assert client("GET", "a", Range="bytes=10-")[0] == 416
    assert client("GET", "a", If_None_Match=tag)[:2] == (304, b"")
    assert client("HEAD", "a", If_Match=tag)[2]["content-length"] == "10"
    assert client("HEAD", "a", If_Match='""')[0] == 412
    assert client("PUT", "a", b"9876543210", If_Match=tag)[0] == 200
    assert client("GET", "a", If_None_Match=tag)[1] == b"9876543210"
    assert client("DELETE", "a")[0] == client("DELETE", "a")[0] == 204
    assert client("GET", "a")[0] == 404


def test_large_objects_are_streamed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_BLOCK", 1000)
    content, name = os.urandom(3500), f"d/{'0' * 32}"
    assert client("PUT", name, content)[0] == 200
    assert client("GET", name)[1] == content
    status, found, headers = client("GET", name, Range="bytes=900-3100")
    assert status == 206 and found == content[900:3101]
    assert headers["content-range"] == "bytes 900-3100/3500"
    assert client("HEAD", name)[2]["content-length"] == "3500"


def test_interrupted_upload_is_not_committed(client: Client, folder_store: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.putrequest("PUT", f"/{client.token}/folder/bucket/x/a")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"incomplete")
    connection.close()
    assert client("PUT", "b", b"complete")[0] == 200
    assert {path.name for path in (folder_store / "bucket/x").iterdir()} == {"b"}


# --- other schemes --------------------------------------------------------------------------


@pytest.mark.parametrize("url", [RUN, "az://bucket/a", "abfs://c@account.dfs.core.windows.net/a"])
def test_paths_of_any_scheme(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "is_checkpoint_store", lambda path: True)
    monkeypatch.setattr(storage, "store_filesystem", lambda path: None)
    path = to_epath(url)
    assert str(path) == url and str(path / "b" / "c") == f"{url}/b/c"
    assert str((path / "b").parent) == url and str((path / "b").relative_to(path)) == "b"


def test_store_without_credentials_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with raises(StorageError, "az://bucket/a", suggests="credentials", code=Code.CKPT_STORAGE):
        to_epath("az://bucket/a")
    with raises(ConfigError, "memory://bucket/a", suggests="az://CONTAINER/PATH"):
        to_epath("memory://bucket/a")


@pytest.mark.parametrize("part", ["a*", "a?", "a[b]", "..", "."])
def test_glob_patterns_and_parent_folders_are_errors(
    folder_store: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"folder://bucket/{part}/a"
    assert main(["config", "print", "tiny", "train.steps=1", f"run.dir={url}"]) == 2
    assert f"run.dir = {url}" in capsys.readouterr().err
    with raises(ConfigError, url, suggests="folder://my-bucket"):
        to_epath(url)
    assert main(["checkpoints", "delete", f"{url}@1"]) == 2
    assert main(["generate", url, "--prompt", "a"]) == 2


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.dir"])
@pytest.mark.parametrize("scheme", ["gs", "s3", "az", "folder"])
def test_url_with_one_slash_is_not_a_local_folder(
    folder_store: Path, key: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["config", "print", "tiny", "train.steps=1", f"{key}={scheme}:/bucket/runs"]
    assert main(given) == 2
    message = capsys.readouterr().err
    assert "two slashes" in message and f"Set {key}={scheme}://bucket/runs." in message
    assert main(["config", "print", "tiny", "train.steps=1", f"{key}=./{scheme}:/bucket"]) == 0
