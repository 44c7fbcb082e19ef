"""`maxpipe fetch` against a fake hub: digests, resume, redirects, file names and tokens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub
from huggingface_hub import constants

from maxpipe.cli import main
from maxpipe.errors import Code, ConfigError, MaxpipeError, StorageError
from maxpipe.huggingface import hub as hub_module
from maxpipe.huggingface import hub_client
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.hub import MANIFEST, fetch, parse_hub_address
from maxpipe.io import redact
from maxpipe.io.redact import REDACTED
from tests.errors import raises
from tests.hub import Hub, Repository, redirect, reset_after, served_hub, stall_after, status, whole
from tests.huggingface import maker

TOKEN = "hf_" + "A1b2C3d4" * 4
WEIGHTS = "model.safetensors"
LARGE = bytes(range(256)) * 4000
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that `HF_ENDPOINT` names, for this process."""
    with served_hub() as served:
        served.token = TOKEN
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(hub_client, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(redact, "_registered_secrets", ())
        served.models["org/name"] = model()
        yield served
        huggingface_hub.close_session()


def model(**changes: object) -> Repository:
    files = {
        "config.json": b"{}",
        WEIGHTS: LARGE,
        "tokenizer.json": b'{"a": 1}',
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "README.md": b"text",
        "original/params.json": b"{}",
        "consolidated.safetensors": b"twice",
    }
    return Repository(files, frozenset({WEIGHTS}), **changes)  # type: ignore[arg-type]


def manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())


def names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_model_files_are_downloaded_and_recorded(hub: Hub, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "model"
    assert main(["fetch", "hf:org/name", "--out", str(out)]) == 0
    assert names(out) == [MANIFEST, "config.json", WEIGHTS, "tokenizer.json"]
    assert (out / WEIGHTS).read_bytes() == LARGE
    found = manifest(out)
    assert (found["repository"], found["revision"]) == ("hf:org/name", "main")
    assert (found["commit"], found["endpoint"]) == ("c" * 40, hub.url)
    digest = hashlib.sha256(LARGE).hexdigest()
    entry = {"size": len(LARGE), "stated": f"sha256:{digest}", "sha256": digest}
    assert found["files"][WEIGHTS] == entry
    config = found["files"]["config.json"]
    assert config["sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert config["stated"] == "git:9e26dfeeb6e641a33dae4961196235bdb965b21b"
    printed = capsys.readouterr().out
    assert f"hf:org/name@{'c' * 40}: 3 files, 2 MB" in printed and digest in printed


def test_complete_folder_is_verified_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    fetch("hf:org/name", str(tmp_path))
    hub.requests.clear()
    hub.faults["info"] = [status(500)] * 9
    fetch("hf:org/name", str(tmp_path))
    fetch(f"hf:org/name@{'c' * 40}", str(tmp_path))
    assert not hub.requests


def test_changed_file_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    fetch("hf:org/name", str(tmp_path))
    (tmp_path / WEIGHTS).write_bytes(LARGE[::-1])
    (tmp_path / "config.json").unlink()
    hub.requests.clear()
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE
    assert hub.of("config.json") and not hub.of("tokenizer.json")


def test_moved_branch_does_not_mix_commits(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [status(403)] * 9
    with raises(StorageError, "hf:org/name", suggests="same command"):
        fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / "config.json").exists() and not (tmp_path / WEIGHTS).exists()
    files = dict(hub.models["org/name"].files)
    hub.models["org/new"] = Repository(files)
    hub.faults.clear()
    hub.models["org/name"].revisions = ()  # the branch is gone, but its commit is known
    assert fetch("hf:org/name", str(tmp_path)) == "c" * 40
    for other in ("hf:org/new", "hf:org/name@v2"):
        with raises(ConfigError, "command line: --out", suggests="another folder"):
            fetch(other, str(tmp_path))


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "c" * 40])
def test_revision_is_resolved_to_a_commit(hub: Hub, tmp_path: Path, revision: str) -> None:
    hub.models["org/name"].revisions = ("main", "v1.0", "refs/pr/1")
    fetch(f"hf:org/name@{revision}", str(tmp_path))
    assert manifest(tmp_path)["commit"] == "c" * 40
    assert all(f"/resolve/{'c' * 40}/" in r.path for r in hub.of("config.json"))


def test_dataset_files_are_usable_as_data(hub: Hub, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(3)).encode()
    files = {"en/a.jsonl": lines, "de/a.jsonl": lines, "load.py": b"code", "README.md": b"x"}
    hub.datasets["org/name"] = Repository(
        files | {"dataset_infos.json": b"{}", ".gitattributes": b"", ".x/y.json": b"{}"}
    )
    fetch("hf:datasets/org/name", str(tmp_path / "all"))
    assert names(tmp_path / "all") == [MANIFEST, "de/a.jsonl", "en/a.jsonl"]
    fetch("hf:datasets/org/name", str(tmp_path / "one"), ["en/*"])
    assert names(tmp_path / "one") == [MANIFEST, "en/a.jsonl"]
    fetch("hf:datasets/org/name", str(tmp_path / "one"), ["de/*"])
    assert names(tmp_path / "one") == [MANIFEST, "de/a.jsonl", "en/a.jsonl"]
    from maxpipe.config.sections.source import SourceConfig
    from maxpipe.data.sources import open_source

    source = open_source(SourceConfig(source="jsonl", path=str(tmp_path / "all")), seed=0)
    assert len(source) == 6


def test_model_can_be_opened(hub: Hub, tmp_path: Path) -> None:
    made = tmp_path / "made"
    maker.write(made, *maker.llama())
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    hub.models["org/llama"] = Repository(files, frozenset({WEIGHTS}))
    fetch("hf:org/llama", str(tmp_path / "copy"))
    assert open_folder(str(tmp_path / "copy")).config.num_layers == maker.LAYERS


# --- the network --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_failed_requests_are_repeated(hub: Hub, tmp_path: Path, code: int) -> None:
    hub.faults["info"] = [status(code)] * 2
    hub.faults["config.json"] = [status(code)] * 2
    hub.faults[WEIGHTS] = [status(code)] * 2
    fetch("hf:org/name", str(tmp_path))
    assert len(hub.of("config.json")) == 3 and (tmp_path / WEIGHTS).read_bytes() == LARGE


def test_retry_after_is_respected(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(hub_client.time, "sleep", pauses.append)
    hub.faults["info"] = [status(429, Retry_After="7")]
    hub.faults["config.json"] = [status(503, Retry_After="9"), status(429, Retry_After="Mon, 1")]
    fetch("hf:org/name", str(tmp_path))
    assert pauses == [7.0, 9.0, 0.02]
    hub.faults["info"] = [status(429, Retry_After="86400")]
    with raises(StorageError, "hf:org/name", names=["86,400"], code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_reset_connection_resumes_in_mid_file(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [reset_after(300_000), reset_after(0), status(500)]
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE
    starts = [r.range for r in hub.of(WEIGHTS) if r.server == "store"]
    assert starts[0] == "" and starts[-1].startswith("bytes=")
    assert int(starts[-1][6:-1]) > 0


def test_server_without_ranges_sends_the_file_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [reset_after(300_000), whole]
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE


def test_endless_failures_end_the_command(hub: Hub, tmp_path: Path, capsys: Capture) -> None:
    hub.faults[WEIGHTS] = [status(500)] * 50
    command = ["fetch", "hf:org/name", "--out", str(tmp_path)]
    assert main(command) == 74
    text = capsys.readouterr().err
    assert Code.HF_HUB in text and "signed-" not in text and "HTTP status 500" in text
    assert len(hub.faults[WEIGHTS]) == 45
    hub.faults.clear()
    hub.requests.clear()
    assert main(command) == 0
    assert not hub.of("config.json")


def test_unreachable_hub_is_an_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with raises(StorageError, "hf:org/name", names=["refused"], code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path / "out"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:password@127.0.0.1:1")
    with pytest.raises(ConfigError) as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert "password" not in str(caught.value)


def test_offline_mode_is_respected(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(ConfigError, "environment: HF_HUB_OFFLINE", code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path / "out"))
    assert not hub.requests


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_wrong_content_is_deleted(hub: Hub, tmp_path: Path, name: str) -> None:
    def flip(handler, content: bytes) -> None:
        handler.reply(200, content[:-1] + bytes([content[-1] ^ 1]))

    hub.faults[name] = [flip]
    with raises(StorageError, name, suggests="HF_ENDPOINT", code=Code.HF_DIGEST):
        fetch("hf:org/name", str(tmp_path))
    assert not (tmp_path / name).exists()
    assert manifest(tmp_path)["files"][name]["sha256"] == ""
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / name).read_bytes() == hub.models["org/name"].files[name]


def test_file_that_never_ends_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.faults["config.json"] = [lambda handler, content: handler.reply(200, b"{}" * 10**6)]
    with raises(StorageError, "config.json", names=["2"], code=Code.HF_DIGEST):
        fetch("hf:org/name", str(tmp_path))
    assert not (tmp_path / "config.json").exists()


def test_changed_partial_file_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [reset_after(300_000)] + [status(500)] * 9
    with pytest.raises(StorageError):
        fetch("hf:org/name", str(tmp_path))
    [partial] = (tmp_path / ".fetch").iterdir()
    assert partial.stat().st_size > 0
    partial.write_bytes(b"x" * 1000)
    hub.faults.clear()
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE
    assert not (tmp_path / ".fetch").exists()


def test_killed_command_continues(hub: Hub, tmp_path: Path) -> None:
    stalled, ended = threading.Event(), threading.Event()
    hub.faults[WEIGHTS] = [stall_after(700_000, stalled, ended)]
    command = [sys.executable, "-m", "maxpipe", "fetch", "hf:org/name", "--out", str(tmp_path)]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert stalled.wait(60)
        partial = tmp_path / ".fetch"
        while not (partial.is_dir() and sum(f.stat().st_size for f in partial.iterdir())):
            assert process.poll() is None
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended.set()
    hub.requests.clear()
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE
    assert not hub.of("config.json")
    [request] = [r for r in hub.of(WEIGHTS) if r.server == "store"]
    assert int(request.range[6:-1]) > 0
    assert TOKEN not in (tmp_path / MANIFEST).read_text()


# --- tokens and redirects -----------------------------------------------------------------


@pytest.mark.parametrize("source", ["environment", "login"])
def test_token_is_sent_only_to_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, capsys: Capture
) -> None:
    hub.models["org/name"].is_private = True
    with raises(ConfigError, "command line: REPOSITORY", suggests="HF_TOKEN"):
        fetch("hf:org/name", str(tmp_path / "out"))
    if source == "environment":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    hub.requests.clear()
    hub.faults["config.json"] = [redirect(f"{hub.store}/models//org/name//config.json")]
    assert main(["fetch", "hf:org/name", "--out", str(tmp_path / "out")]) == 0
    tokens = {(r.server, r.token) for r in hub.requests}
    assert tokens == {("hub", f"Bearer {TOKEN}"), ("store", "")}
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err + (tmp_path / "out" / MANIFEST).read_text()


def test_redirected_list_does_not_receive_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults["info"] = [redirect(f"{hub.store}/a//b//c")]
    hub.models["b"] = Repository({"c": b"{}"})
    with raises(StorageError, "hf:org/name", code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path))
    assert [r.token for r in hub.requests if r.server == "store"] == [""]


def test_token_of_a_login_is_redacted_in_messages(hub: Hub, monkeypatch, tmp_path: Path) -> None:
    secret = "a-token-without-known-form"
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: secret)
    fetch("hf:org/name", str(tmp_path))
    assert redact.redact_text(f"error {secret}") == f"error {REDACTED}"


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", "data:,x"]
)
def test_redirect_must_be_a_web_address(hub: Hub, tmp_path: Path, location: str) -> None:
    hub.faults["config.json"] = [redirect(location)]
    with raises(StorageError, "hf:org/name", code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path))


def test_endless_redirect_is_an_error(hub: Hub, tmp_path: Path) -> None:
    place = f"{hub.url}/org/name/resolve/{'c' * 40}/config.json"
    hub.faults["config.json"] = [redirect(place)] * 20
    with raises(StorageError, "hf:org/name", names=["10"], code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path))


# --- file names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("../x.json", "a/../../x.json", "/etc/x.json", "a//x.json", "./x.json"),
        *("..\\x.json", "C:x.json", "a\x00.json", "a\n.json", "a/../x.json"),
        *("aux.json", "NUL/x.json", "com1.json", "a./x.json", "a /x.json", " x.json"),
        *("Config.json", "A.json/x.json", f"{'x' * 250}.json"),
    ],
)
def test_unsafe_names_are_rejected(hub: Hub, tmp_path: Path, path: str) -> None:
    files = {"a.json": b"{}", "config.json": b"{}", path: b"{}"}
    hub.datasets["org/name"] = Repository(files)
    with raises(ConfigError, "command line: REPOSITORY", code=Code.HF_NAMES):
        fetch("hf:datasets/org/name", str(tmp_path / "a" / "b" / "out"))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not hub.of("config.json")


def test_names_that_differ_in_normalization_are_rejected(hub: Hub, tmp_path: Path) -> None:
    hub.datasets["org/name"] = Repository({"\u00e9.json": b"{}", "e\u0301.json": b"{}"})
    with raises(ConfigError, "command line: REPOSITORY", code=Code.HF_NAMES):
        fetch("hf:datasets/org/name", str(tmp_path / "out"))


def test_links_in_the_folder_are_not_followed(hub: Hub, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    hub.datasets["org/name"] = Repository({"a/x.json": b"{}", "b.json": b"{}"})
    fetch("hf:datasets/org/name", str(out), ["b.json"])
    (out / "a").symlink_to(elsewhere)
    (elsewhere / "kept").write_text("kept")
    (out / "b.json").unlink()
    (out / "b.json").symlink_to(elsewhere / "kept")
    with raises(ConfigError, str(out / "a"), code=Code.IO_UNSAFE):
        fetch("hf:datasets/org/name", str(out), [])
    (out / "a").unlink()
    fetch("hf:datasets/org/name", str(out), [])
    assert names(elsewhere) == ["kept"] and (elsewhere / "kept").read_text() == "kept"
    assert not (out / "b.json").is_symlink()


# --- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "org/name", "hf:", "hf:a/b/c", "hf:../x", "hf:org/na me", "hf:org/name@", "hf:/a"]
)
def test_invalid_address_is_an_error(text: str, tmp_path: Path) -> None:
    with raises(ConfigError, "command line: REPOSITORY", code=Code.CLI_VALUE):
        fetch(text, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_address_has_parts() -> None:
    address = parse_hub_address("hf:datasets/org/na.me@refs/pr/1")
    assert (address.kind, address.name, address.revision) == ("dataset", "org/na.me", "refs/pr/1")
    assert str(parse_hub_address("hf:gpt2")) == "hf:gpt2"


@pytest.mark.parametrize("name", ["hf:org/none", "hf:org/name@none", f"hf:org/name@{'d' * 40}"])
def test_unknown_repository_is_an_error(hub: Hub, tmp_path: Path, name: str) -> None:
    with raises(ConfigError, "command line: REPOSITORY", code=Code.HF_ACCESS):
        fetch(name, str(tmp_path / "out"))


def test_repository_of_pickles_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/old"] = Repository({"config.json": b"{}", "pytorch_model.bin": b""})
    with raises(ConfigError, "command line: REPOSITORY", names=[".bin"], code=Code.HF_ACCESS):
        fetch("hf:org/old", str(tmp_path / "out"))
    with raises(ConfigError, "command line: REPOSITORY", code=Code.HF_ACCESS):
        fetch("hf:org/old", str(tmp_path / "out"), ["*.bin"])
    assert not hub.of("pytorch_model.bin")


@pytest.mark.parametrize("given", ["full", "file", "manifest"])
def test_other_folder_is_an_error(hub: Hub, tmp_path: Path, given: str) -> None:
    out = tmp_path / "out"
    if given == "file":
        out.write_text("")
    else:
        out.mkdir()
        (out / (MANIFEST if given == "manifest" else "x")).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        fetch("hf:org/name", str(out))
    assert caught.value.code == Code.HF_OUT and not hub.of("config.json")


def test_missing_space_is_reported_before_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage)
    with raises(StorageError, str(tmp_path), names=["1,000"], code=Code.IO_UNWRITABLE):
        fetch("hf:org/name", str(tmp_path))
    assert not hub.of("config.json")


@pytest.mark.parametrize(
    "answer", [b"no JSON", b"[]", b'{"id": "x"}', b'{"id": "x", "sha": "main", "siblings": []}']
)
def test_invalid_list_is_an_error(hub: Hub, tmp_path: Path, answer: bytes) -> None:
    hub.faults["info"] = [lambda handler, content: handler.reply(200, answer)]
    with pytest.raises(MaxpipeError) as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert caught.value.code in (Code.HF_HUB, Code.HF_ACCESS)


def test_file_without_digest_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/name"].stated[WEIGHTS] = ""
    with raises(ConfigError, "command line: REPOSITORY", names=[WEIGHTS], code=Code.HF_ACCESS):
        fetch("hf:org/name", str(tmp_path / "out"))


def test_missing_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(ConfigError, "command line: REPOSITORY", suggests="pip install 'maxpipe[hub]'"):
        fetch("hf:org/name", str(tmp_path / "out"))


@pytest.mark.parametrize("command", ["generate", "import"])
def test_other_commands_suggest_fetch(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--out", "runs/x"] if command == "import" else ["--prompt", "a"]
    name = "org/name" if command == "import" else "hf:org/name"
    assert main([command, name, *more]) == 2
    text = capsys.readouterr().err
    assert "maxpipe fetch hf:org/name --out name" in text and Code.HF_FOLDER in text


def test_second_fetch_to_the_folder_is_an_error(hub: Hub, tmp_path: Path) -> None:
    with (
        hub_module._locked(tmp_path),
        raises(ConfigError, "command line: --out", names=["maxpipe fetch"]),
    ):
        fetch("hf:org/name", str(tmp_path))


def test_progress_counts_every_byte(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [reset_after(300_000), whole]
    reports: list[tuple[str, int, int]] = []
    fetch("hf:org/name", str(tmp_path), report=lambda *fields: reports.append(fields))
    assert reports[-1][1:] == (1, 2) and {r[0] for r in reports} >= {WEIGHTS, "config.json"}
