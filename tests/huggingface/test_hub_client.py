"""Requests of `maxpipe fetch` to a fake hub: retries, redirects, tokens and variables."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub
from huggingface_hub import constants

from maxpipe.cli import main
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.huggingface import hub_client
from maxpipe.huggingface.hub import MANIFEST, fetch
from maxpipe.io import redact
from maxpipe.io.redact import REDACTED
from tests.errors import raises
from tests.hub import (
    LARGE,
    TOKEN,
    WEIGHTS,
    Hub,
    Repository,
    redirect,
    reset_after,
    status,
    whole,
)

Capture = pytest.CaptureFixture[str]


# --- the network --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504, 507, 520])
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


@pytest.mark.parametrize("name", ["info", WEIGHTS])
def test_slow_connection_ends_the_command(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: Capture
) -> None:
    def trickle(handler, content: bytes) -> None:
        handler.send_response(206 if handler.headers.get("Range") else 200)
        first = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        size = len(content) or 10_000
        handler.send_header("Content-Length", str(size - first))
        handler.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for place in range(first, size):
                handler.wfile.write(content[place : place + 1] or b" ")
                time.sleep(0.02)
        handler.close_connection = True

    monkeypatch.setattr(hub_client, "SLOW_SECONDS", 0.1)
    hub.faults[name] = [trickle] * 9
    assert main(["fetch", "hf:org/name", "--out", str(tmp_path / "out")]) == 74
    text = "".join(capsys.readouterr())
    assert "bytes arrived in" in text and "the next attempt is in" in text
    assert len(hub.faults[name]) == 4


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


@pytest.mark.parametrize(
    "endpoint",
    [
        *("http://user:password@127.0.0.1:1", "http://[", "http://127.0.0.1:99999", "ftp://x"),
        *("http://h:abc", "http://127.0.0.1/?x=1", "http://h#x", "http://a b", " http://h", ""),
        "http://h\n",
    ],
)
def test_invalid_endpoint_is_an_error(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with raises(ConfigError, "environment: HF_ENDPOINT", suggests="Unset") as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert "password" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("HF_ENDPOINT", "http://[::1"), ("HF_HUB_ETAG_TIMEOUT", "soon")]
)
def test_variables_that_the_library_rejects_are_an_error(
    name: str, value: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "maxpipe", "fetch", "hf:org/name", "--out", str(tmp_path)]
    ended = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert Code.HF_HUB in ended.stderr and "environment: " in ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "pip install socksio"),
        ("ALL_PROXY", "ftp://user:password@127.0.0.1", "address of a proxy"),
        ("SSL_CERT_FILE", "/nonexistent", "No such file"),
        ("SSL_CERT_FILE", __file__, "TLS failed: no certificate or crl found"),
    ],
)
def test_invalid_proxies_and_certificates_are_errors(
    hub: Hub, name: str, value: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rule.startswith("pip") and importlib.util.find_spec("socksio"):
        pytest.skip("the package for SOCKS proxies is installed")
    huggingface_hub.close_session()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert name in str(caught.value) and rule in str(caught.value)
    assert "password" not in redact.redact_text(str(caught.value))


def test_invalid_certificate_of_the_server_is_explained() -> None:
    error = ssl.SSLCertVerificationError(1, "failed")
    error.verify_message = "self-signed certificate"
    assert "self-signed certificate" in hub_client._describe(error)


def test_offline_mode_is_respected(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(ConfigError, "environment: HF_HUB_OFFLINE", code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path / "out"))
    assert not hub.requests


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


@pytest.mark.parametrize("token", [f"{TOKEN}\u00e9", f"{TOKEN}\x01", "hf_ a"])
def test_invalid_token_is_an_error_without_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with raises(ConfigError, "environment: HF_TOKEN", code=Code.HF_HUB) as caught:
        fetch("hf:org/name", str(tmp_path / "out"))
    assert token not in str(caught.value) and not hub.requests


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_token_of_a_login_is_an_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "token"
    path.mkdir() if content is None else path.write_bytes(content)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
    with raises(ConfigError, "environment: HF_TOKEN_PATH", suggests="another path"):
        fetch("hf:org/name", str(tmp_path / "out"))


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", "data:,x"]
)
def test_redirect_must_be_a_web_address(hub: Hub, tmp_path: Path, location: str) -> None:
    for name in ("config.json", "info"):
        hub.faults[name] = [redirect(location)]
        with raises(StorageError, "hf:org/name", code=Code.HF_HUB):
            fetch("hf:org/name", str(tmp_path / name))


def test_redirect_must_keep_encryption(hub: Hub) -> None:
    client = hub_client.Hub(hub_client.parse_hub_address("hf:org/name"))
    with raises(StorageError, "hf:org/name", names=["without encryption"], code=Code.HF_HUB):
        client._redirected("https://hub.test/a", "http://store.test/b")
    assert client._redirected("https://hub.test/a", "/b") == "https://hub.test/b"


def test_endless_redirect_is_an_error(hub: Hub, tmp_path: Path) -> None:
    place = f"{hub.url}/org/name/resolve/{'c' * 40}/config.json"
    hub.faults["config.json"] = [redirect(place)] * 20
    with raises(StorageError, "hf:org/name", names=["10"], code=Code.HF_HUB):
        fetch("hf:org/name", str(tmp_path))
