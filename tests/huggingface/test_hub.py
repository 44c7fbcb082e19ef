"""`maxpipe fetch` against a fake hub: digests, resume, file names and errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from maxpipe.cli import main
from maxpipe.errors import Code, ConfigError, MaxpipeError, StorageError
from maxpipe.huggingface import hub as hub_module
from maxpipe.huggingface import hub_client
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.hub import MANIFEST, fetch, parse_hub_address
from tests.errors import raises
from tests.hub import (
    LARGE,
    TOKEN,
    WEIGHTS,
    Hub,
    Repository,
    model,
    reset_after,
    stall_after,
    status,
    whole,
)
from tests.huggingface import maker

Capture = pytest.CaptureFixture[str]


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


# --- interrupted downloads -----------------------------------------------------------------


def test_wrong_part_of_a_file_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    other = lambda handler, content: handler.range(content[::-1])  # noqa: E731
    hub.faults[WEIGHTS] = [reset_after(300_000), other]
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE
    hub.faults[WEIGHTS] = [reset_after(300_000), other, reset_after(300_000), other]
    with raises(StorageError, WEIGHTS, suggests="HF_ENDPOINT", code=Code.HF_DIGEST):
        fetch("hf:org/name", str(tmp_path / "new"))


def test_progress_is_counted_from_the_largest_part(hub: Hub, tmp_path: Path) -> None:
    def part(count: int) -> Any:
        def answer(handler, content: bytes) -> None:
            handler.reply(200, content[:count], Content_Length=str(len(content)))
            handler.close_connection = True

        return answer

    hub.faults[WEIGHTS] = [part(count) for count in (400_000, *(100_000, 200_000) * 20)]
    with raises(StorageError, "hf:org/name", code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path))
    assert len(hub.faults[WEIGHTS]) == 36


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


def test_interrupted_command_prints_how_to_continue(hub: Hub, tmp_path: Path) -> None:
    stalled, ended = threading.Event(), threading.Event()
    hub.faults[WEIGHTS] = [stall_after(700_000, stalled, ended)]
    command = [sys.executable, "-m", "maxpipe", "fetch", "hf:org/name", "--out", str(tmp_path)]
    environment = os.environ | {"HF_ENDPOINT": hub.url}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert stalled.wait(60)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    ended.set()
    assert process.returncode == 130
    assert "interrupted; the same command continues the download" in output
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE


def test_complete_files_that_the_manifest_lacks_are_kept(hub: Hub, tmp_path: Path) -> None:
    fetch("hf:org/name", str(tmp_path))
    recorded = manifest(tmp_path)
    for entry in recorded["files"].values():
        entry["sha256"] = ""
    complete = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(json.dumps(recorded))
    hub.requests.clear()
    fetch("hf:org/name", str(tmp_path))
    assert not hub.requests and (tmp_path / MANIFEST).read_text() == complete


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
    "text", ["", "name", "hf:", "hf:a/b/c", "hf:../x", "hf:org/na me", "hf:org/name@", "hf:/a"]
)
def test_invalid_address_is_an_error(text: str, tmp_path: Path) -> None:
    with raises(ConfigError, "command line: REPOSITORY", code=Code.CLI_VALUE):
        fetch(text, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("org/name", "hf:org/name"),
        ("HF:org/name", "hf:org/name"),
        ("hf://org/name/", "hf:org/name"),
        (" hf:models/org/name", "hf:org/name"),
        ("huggingface.co/org/name", "hf:org/name"),
        ("https://huggingface.co/org/na.me?x=1", "hf:org/na.me"),
        ("https://huggingface.co/datasets/org/name/tree/v1", "hf:datasets/org/name@v1"),
        ("https://huggingface.co/org/name/blob/main/a/b.json", "hf:org/name@main"),
    ],
)
def test_other_forms_of_an_address_are_corrected(text: str, meant: str, tmp_path: Path) -> None:
    with raises(ConfigError, "command line: REPOSITORY", suggests=f"Did you mean {meant}?"):
        fetch(text, str(tmp_path / "out"))
    parse_hub_address(meant)


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
    hub.models["org/empty"] = Repository({})
    with raises(ConfigError, "command line: REPOSITORY", names=["is empty"], code=Code.HF_ACCESS):
        fetch("hf:org/empty", str(tmp_path / "out"))


def test_gated_repository_is_explained(hub: Hub, tmp_path: Path) -> None:
    hub.faults["info"] = [status(403, X_Error_Code="GatedRepo")]
    terms = f"Accept the terms at {hub.url}/org/name"
    with raises(ConfigError, "command line: REPOSITORY", suggests=terms, code=Code.HF_ACCESS):
        fetch("hf:org/name", str(tmp_path / "out"))


@pytest.mark.parametrize("out", ["s3://bucket/a", "gs:/bucket/a", "AZ://bucket/a", " "])
def test_folder_in_a_store_is_an_error(
    hub: Hub, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "command line: --out", suggests="./model", code=Code.CLI_OUTPUT):
        fetch("hf:org/name", out)
    assert not os.listdir(tmp_path) and not hub.requests


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
    "answer",
    [
        *(b"no JSON", b"[]", b'{"id": "x"}', b'{"id": "x", "sha": "main", "siblings": []}'),
        *(b"[" * 200_000, b'{"sha": "%s", "siblings": [{"rfilename": "a.json"}]}' % (b"c" * 40)),
        b" " * 2_000_000,
    ],
    ids=lambda answer: answer[:40].decode(),
)
def test_invalid_list_is_an_error(
    hub: Hub, tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "MAX_LIST_BYTES", 1_000_000)
    hub.faults["info"] = [lambda handler, content: handler.reply(200, answer)]
    with pytest.raises(MaxpipeError) as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert caught.value.code in (Code.HF_HUB, Code.HF_ACCESS)


def test_other_keys_of_the_list_are_ignored(hub: Hub, tmp_path: Path) -> None:
    more = {"lastModified": "today", "safetensors": 1, "transformersInfo": [], "self": {}}
    listed = model().info("org/name") | more
    hub.faults["info"] = [lambda handler, content: handler.reply(200, listed)]
    fetch("hf:org/name", str(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == LARGE


@pytest.mark.parametrize("kind", ["name", "type", "digest"])
def test_long_names_are_shortened_in_messages(hub: Hub, tmp_path: Path, kind: str) -> None:
    name = "a" * 10**6 + ".json" if kind != "type" else "a." + "b" * 10**6
    hub.datasets["org/name"] = Repository({name: b"{}"})
    if kind == "digest":
        hub.datasets["org/name"].stated[name] = "none"
    with raises(ConfigError, "command line: REPOSITORY") as caught:
        fetch("hf:datasets/org/name", str(tmp_path / "out"))
    assert len(str(caught.value)) < 1000


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
