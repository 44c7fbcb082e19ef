"""Secrets are redacted by format, by name and by environment variable; other text is kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load, to_dict, to_yaml
from maxpipe.config.schema import KEYS
from maxpipe.errors import Code, ConfigError
from maxpipe.io import redact
from maxpipe.io.redact import REDACTED

ROOT = Path(__file__).parents[2]
TINY = [str(ROOT / "configs/model/tiny.yml"), "train.steps=3"]
TOKEN = "hf_" + "aB3dE5gH7jK9" * 3

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2_" * 10,
        "glpat-" + "a1B2-" * 4,
        "AKIA" + "ABCD1234" * 2,
        "ASIA" + "ABCD1234" * 2,
        "sk-ant-api03-" + "a1B2" * 8,
        "sk-" + "a1B2" * 8,
        "xoxb-" + "1234-" * 4 + "abc",
        "AIza" + "a1B2-" * 7,
        "ya29." + "a1B2" * 8,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("around", ["{}", "before {}", "x={}", "'{}'", "/data/{}", "[{}]"])
def test_known_secret_formats_are_redacted(secret: str, around: str):
    assert redact.redact_text(around.format(secret)) == around.format(REDACTED)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("https://me:pass@host/x", "https://<redacted>@host/x"),
        ("https:/me:pass@host/x", "https:/<redacted>@host/x"),  # as pathlib writes it
        ("'s3://me:p@ss@host/x', 'a@b'", "'s3://<redacted>@host/x', 'a@b'"),
        (f"https://{'x' * 20}@host/x", "https://<redacted>@host/x"),
        ("--api-key=abc", "--api-key=<redacted>"),
        ("WANDB_API_KEY=abc XLA_FLAGS=--x", "WANDB_API_KEY=<redacted> XLA_FLAGS=--x"),
        ("password='two words', b=1", "password=<redacted>, b=1"),
        ('{"client_secret": "abc", "b": 1}', '{"client_secret": <redacted>, "b": 1}'),
        ("https://h/x?token=abc&b=1", "https://h/x?token=<redacted>&b=1"),
        ("https://h/x?b=1&sig=abc", "https://h/x?b=1&sig=<redacted>"),
        ("https://h/x?X-Amz-Signature=abc", "https://h/x?X-Amz-Signature=<redacted>"),
        ("alerts.webhook=https://h:8/a/b?c=d", "alerts.webhook=https://h:8/<redacted>"),
        ("  webhook: https://h/a/b\n  x: 1", "  webhook: https://h/<redacted>\n  x: 1"),
        ("webhook: $ALERT_URL", "webhook: $ALERT_URL"),
        ("OTEL_EXPORTER_OTLP_HEADERS=x-team=abc", "OTEL_EXPORTER_OTLP_HEADERS=<redacted>"),
        ("Authorization: Bearer abc", "Authorization: Bearer <redacted>"),
        ("bearer abc", "bearer <redacted>"),
        ("a -----BEGIN OPENSSH PRIVATE KEY-----\nthe end is cut off", "a <redacted>"),
    ],
)
def test_named_secrets_and_url_credentials_are_redacted(given: str, left: str):
    assert redact.redact_text(given) == left


@pytest.mark.parametrize(
    "text",
    [
        "train.tokens=1000",
        "tokenizer.path=/data/tokenizer.json",
        '{"eos_token": "</s>"}',
        "pad_token=<pad>",
        "model.moe.experts_per_token = 20",
        "runtime.coordinator=10.0.0.1:1234",
        "ssh://git@host/x",
        "gs://bucket/a:b@c",
        "https://host:8080/x?page=1",
        "pipeline.saved_names=[key, value]",
        "0dcbd540775a6da5229919e6cdff02118433bf25",
        "risk-aware-learning-rates-everywhere",
        '  File "loop.py", line 3, in tokens\n    return tokenizer.encode(text)',
    ],
)
def test_ordinary_text_is_not_redacted(text: str):
    assert redact.redact_text(text) == text


def test_secrets_in_environment_are_redacted_anywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKER_API_KEY", "correct horse")
    monkeypatch.setenv("LONGER_API_KEY", "correct horse battery")
    monkeypatch.setenv("SHORT_TOKEN", "false")
    monkeypatch.setenv("JAX_NOTE", "an open word")
    given = "correct horse battery, /x/correct horse/y, false, an open word"
    assert redact.redact_text(given) == "<redacted>, /x/<redacted>/y, false, an open word"


@pytest.mark.parametrize("value", ["SEKRET" * 3, f"before-{TOKEN}-behind", f"{TOKEN}-behind"])
def test_overlapping_secrets_are_redacted(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", value)
    assert redact.redact_text(f"/x/hf_{'SEKRET' * 4}abcd") == f"/x/{REDACTED}"
    assert redact.redact_text(f"/x/{value}/y, z={value}") == f"/x/{REDACTED}/y, z={REDACTED}"


def test_multiline_secret_in_message_is_redacted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "first line\nsecond line")
    output = str(
        ConfigError.one(
            Code.CFG_VALUE, "run.name", "first line\nsecond line", "is wrong.", "Correct it."
        )
    )
    assert (
        redact.redact_for_terminal(output).splitlines()[0] == f"run.name = {REDACTED}  [MP-CFG-003]"
    )


def test_redact_value_of_nested_containers():
    given = {"a": [TOKEN, 1, None], "b": {"api_key": "x", "hub_token": ("y", 2)}, "c": (True, "d")}
    assert redact.redact_value(given) == {
        "a": [REDACTED, 1, None],
        "b": {"api_key": REDACTED, "hub_token": (REDACTED, 2)},
        "c": (True, "d"),
    }


def test_redact_value_preserves_config_type():
    config = load([*TINY, f"data.path=s3://me:{TOKEN}@host/x"]).config
    cleaned = redact.redact_value(config)
    assert type(cleaned) is type(config) and cleaned.data.path == "s3://<redacted>@host/x"
    assert to_dict(cleaned)["model"] == to_dict(config)["model"]
    assert TOKEN in to_yaml(config) and TOKEN not in to_yaml(cleaned)


def test_no_config_key_is_a_secret_name():
    """Otherwise the value would be redacted, and a resumed run could not compare it."""
    assert not [key for key in KEYS if redact.is_secret_name(key)]
    config = load(TINY).config
    assert redact.redact_value(config) == config


def test_redact_argv():
    argv = ["train", "--token", "abc", "--json", "x", "--api-key=abc", f"data.path={TOKEN}"]
    cleaned = ["train", "--token", REDACTED, "--json", "x", f"--api-key={REDACTED}"]
    assert redact.redact_argv(argv) == [*cleaned, f"data.path={REDACTED}"]


def test_redaction_time_is_linear_in_text_length():
    """A text of eight times the length takes about eight times as long, not 64 times."""

    def seconds(word: str, length: int) -> float:
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            redact.redact_text(word * (length // len(word)))
            taken.append(time.perf_counter() - begin)
        return min(taken)

    for word in ("a", "token", "eyJa", "https://a:", "-----BEGIN PRIVATE KEY-----", "x=", "'"):
        assert seconds(word, 160_000) < 24 * seconds(word, 20_000) + 0.01, word


# --- the command ----------------------------------------------------------------------------


def test_error_messages_are_redacted(capsys: Capture):
    assert main(["train", *TINY, f"model.num_layers={TOKEN}", f"--{TOKEN}", f"{TOKEN}.yml"]) == 2
    err = capsys.readouterr().err
    assert TOKEN not in err and "model.num_layers = <redacted>" in err
    assert "--<redacted>" in err and "<redacted>.yml" in err
    # Recognized as a secret only by the name of its key.
    assert main(["train", *TINY, "data.api_key=hunter22", "api_key=hunter22"]) == 2
    err = capsys.readouterr().err
    assert "hunter22" not in err and "data.api_key = <redacted>" in err


def test_tracebacks_are_redacted(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object):
        secret = f"cannot reach https://me:{TOKEN}@host/x"
        raise ZeroDivisionError(secret)

    monkeypatch.setattr("maxpipe.api.config.load_config", broken)
    assert main(["config", "print", *TINY]) == 70
    err = capsys.readouterr().err
    assert TOKEN not in err
    assert "ZeroDivisionError: cannot reach https://<redacted>@host/x" in err
    assert "line" in err and "this is a bug in maxpipe" in err


def test_config_print_is_redacted(capsys: Capture):
    assert main(["config", "print", *TINY, f"data.path={TOKEN}", "--origin"]) == 0
    out = capsys.readouterr().out
    assert TOKEN not in out and "path: <redacted>  # data.path=<redacted>" in out


@pytest.mark.fault("H7")
@pytest.mark.parametrize(
    "arguments",
    [
        "train TINY --token hunter2x",
        "train TINY --token=hunter2x",
        "train --password hunter2x TINY",
        "plan TINY --api-key hunter2x",
        "goodput --token hunter2x",
        "hunter2x --token hunter2x",
        "train TINY run.name=password=hunter2x",
        "train TINY run.nme=password=hunter2x",
        "train TINY password=hunter2x",
        "train TINY launch.environment=[A=hunter2x]",
        "train TINY launch.environment=A=hunter2x",
        "train TINY launch.environment={A:hunter2x}",
        "train TINY launch.environment.A=hunter2x",
        "config print TINY launch.environment=[hunter2x!]",
        "launch slurm TINY launch.environment=[A=hunter2x]",
    ],
)
def test_messages_do_not_repeat_secrets_from_command_line(
    arguments: str, capsys: pytest.CaptureFixture[str]
):
    argv = [TINY[0] if word == "TINY" else word for word in arguments.split()]
    assert main(argv) == 2
    output = "".join(capsys.readouterr())
    assert "hunter2x" not in output and "Traceback" not in output


@pytest.mark.fault("H7")
def test_redact_variable_names_redacts_values():
    given = ["HF_TOKEN", "A=hunter2x", "hunter2x!", "=x"]
    assert redact.redact_variable_names(given) == ["HF_TOKEN", f"A={REDACTED}", REDACTED, REDACTED]
    assert redact.redact_value({"environment": given})["environment"][1] == f"A={REDACTED}"


def test_the_path_of_a_webhook_is_redacted_in_configs():
    values = {"alerts": {"webhook": "https://h/services/abc", "url": "https://h/a"}}
    redacted = {"alerts": {"webhook": "https://h/<redacted>", "url": "https://h/a"}}
    assert redact.redact_value(values) == redacted
    assert redact.redact_value({"webhook": "$ALERT_URL"}) == {"webhook": "$ALERT_URL"}
