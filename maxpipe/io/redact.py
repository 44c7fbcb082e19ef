"""Redact secrets in everything that maxpipe prints and writes.

No config key holds a secret, and maxpipe never requests secrets: libraries read them from the
environment. A path, override or traceback may still contain a secret. The run still works, and the
secret is redacted wherever maxpipe writes it: console, error messages, tracebacks, `config.yml`,
TensorBoard, `events.jsonl`, metadata of checkpoints and compiled steps, and reports. Redaction does
not affect resuming: a resumed run reads its config from the command line, and only sections that
hold numbers and choices are compared with the checkpoint.

A value counts as a secret in three cases: it matches the pattern of a known type of secret, it
follows the name of a secret, or it equals the value of an environment variable with such a name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from maxpipe.errors import escape_control_chars

REDACTED = "<redacted>"

_T = TypeVar("_T")

_SECRET_FORMS = re.compile(
    r"""
    -----BEGIN[ A-Z]*PRIVATE[ ]KEY-----.*?(?:-----END[ A-Z]*PRIVATE[ ]KEY-----|\Z)
    | \bhf_[A-Za-z0-9]{16,}
    | \bgh[oprsu]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{20,} | \bglpat-[\w-]{16,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \bAIza[\w-]{30,} | \bya29\.[\w.-]{20,}
    | \bsk-[A-Za-z0-9_-]{16,} | \bxox[abeprs]-[\w-]{10,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?                    # a JSON web token
    | (?<=:/)(?P<slash>/?)[^\s/?\#"']*:[^\s/?\#]*@              # user:password@ of a URL
    | (?<=:/)(?P<more>/?)[^\s/?\#"']{20,}@                      # token@ of a URL
    """,
    re.VERBOSE | re.DOTALL,
)
"""Regular expression that matches known types of secrets. In a URL that was normalized as a path,
one of the two slashes may be missing."""

_SECRET_NAME = (
    r"pass(?:word|wd|phrase)|secret|(?:api|access|account|private)[_-]?key|credential"
    r"|connection[_-]?string"
    r"|otlp\w*_headers|authorization|signature|(?:access|api|auth|bearer|id|refresh|session)-?token"
    r"|(?<![A-Za-z])(?<!bos_|eos_|pad_|unk_|sep_|cls_|per_|end_)(?<!mask_)"
    r"(?<!image_|video_|begin_)token(?![A-Za-z])"
)
"""Regular expression that matches names of secrets. It matches `HF_TOKEN`, but not `eos_token`,
`experts_per_token`, `train.tokens` or `tokenizer`."""
_SECRET_NAME_PATTERN = re.compile(_SECRET_NAME, re.IGNORECASE)
_NAMED_SECRET = re.compile(
    rf"""((?<![\w.-])[\w.-]*(?:{_SECRET_NAME})[\w.-]*(?:[ ]?=[ ]?|["']\s*[:=]\s*)"""
    r"""|\bauthorization:\s*(?:\w+\s+)?|\bbearer\s+|[?&]sig=)"""
    r"""("[^"]*"|'[^']*'|[^\s"'&,;]+)""",
    re.IGNORECASE,
)
"""Regular expression that matches a secret after its name, as in `--api-key=...`, `?token=...` or
`Authorization: ...`."""

_WEBHOOK = re.compile(
    r"""webhook[\w.-]*["']?\s*[:=]\s*["']?https?://[^/?\s"']+[/?]([^\s"',}\]]+)""", re.IGNORECASE
)
"""Regular expression that matches the path of a URL after the name of a webhook. The path permits
anyone to post messages, as in `https://hooks.slack.com/services/...`."""

_MIN_ENVIRONMENT_CHARS = 8
"""Minimum length of a secret in an environment variable; shorter values may be ordinary words."""
_MIN_ARGUMENT_CHARS = 4
"""Minimum length of a secret on the command line."""

_registered_secrets: tuple[str, ...] = ()
"""Secrets that were passed on the command line of this process."""


@functools.lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return True if a value with this name counts as a secret."""
    return _SECRET_NAME_PATTERN.search(name) is not None


def redact_text(given: str) -> str:
    """Return `given` with secrets redacted."""
    return _redact_spans(given, _known_secrets())


def _known_secrets() -> tuple[str, ...]:
    """Return the registered secrets and those in environment variables."""
    # Most variables are not secrets, and reading a value costs more than reading a name.
    variables = {os.environ.get(name, "") for name in os.environ if is_secret_name(name)}
    secrets = [value for value in variables if len(value) >= _MIN_ENVIRONMENT_CHARS]
    return (*_registered_secrets, *secrets)


def _redact_spans(given: str, known_secrets: Sequence[str]) -> str:
    left, end = [], 0
    for start, stop in sorted(_secret_spans(given, known_secrets)):
        if start >= end:
            left += [given[end:start], REDACTED]
        end = max(end, stop)
    return "".join([*left, given[end:]])


def _secret_spans(given: str, known_secrets: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the span of each secret in the original text; spans may overlap."""
    for secret in known_secrets:
        for text in {secret, secret.replace("\n", "\\n")}:  # some messages escape line breaks
            start = given.find(text)
            while start >= 0:
                yield start, start + len(text)
                start = given.find(text, start + 1)
    for match in _SECRET_FORMS.finditer(given):
        slash = match["slash"] if match["slash"] is not None else match["more"]
        is_address = slash is not None
        yield match.start() + len(slash or ""), match.end() - is_address
    for match in _NAMED_SECRET.finditer(given):
        yield match.span(2)
    for match in _WEBHOOK.finditer(given):
        yield match.span(1)


def redact_for_terminal(given: str) -> str:
    """Redact secrets and escape control characters in text that is printed to the terminal.

    The text may come from a file or another process; line breaks are kept.
    """
    return escape_control_chars(redact_text(given))


def redact_value(value: _T, name: str = "") -> _T:
    """Redact secrets in nested mappings, sequences and dataclasses. `name` is the key of
    `value`.
    """
    return _redact(value, name, _known_secrets())


def _redact(value: Any, name: str, known_secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        if value and is_secret_name(name):
            return REDACTED
        if "webhook" in name.lower() and (match := _WEBHOOK.match(f"webhook={value}")):
            value = value.replace(match[1], REDACTED)
        return _redact_spans(value, known_secrets)
    if isinstance(value, Mapping):
        return {key: _redact(item, str(key), known_secrets) for key, item in value.items()}
    if name == "environment" and isinstance(value, list):
        return [_redact(item, "", known_secrets) for item in redact_variable_names(value)]
    if isinstance(value, list | tuple):
        return type(value)([_redact(item, name, known_secrets) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **_redact(fields, name, known_secrets))
    return value


def register_secrets(argv: Sequence[str]) -> None:
    """Register the secrets on this command line, so that all messages redact them.

    Messages may quote the values in modified form: for `run.name=password=X`, a message would
    suggest `run.name=password-X`.
    """
    global _registered_secrets
    secrets = [value for _, value in _NAMED_SECRET.findall("\n".join(argv))]
    for option, value in itertools.pairwise(argv):
        if option.startswith("-") and "=" not in option and is_secret_name(option):
            secrets.append(value)
    for arg in argv:  # entries should be variable names, but users may pass secrets instead
        if arg.startswith("launch.environment"):
            secrets += re.findall(
                r"[=:]\s*([^\s\[\]{},=:]*[^\s\[\]{},=:A-Z0-9_][^\s\[\]{},]*)", arg
            )
    values = {value.strip("\"'") for value in secrets}
    _registered_secrets = tuple(value for value in values if len(value) >= _MIN_ARGUMENT_CHARS)


def register_secret(secret: str) -> None:
    """Register a secret that a library has read, such as a token of its login."""
    global _registered_secrets
    if secret not in _registered_secrets:
        _registered_secrets = (*_registered_secrets, secret)


def redact_variable_names(names: Any) -> Any:
    """Redact every entry in a list of variable names that is not a valid variable name."""
    if isinstance(names, list | tuple):
        return [redact_variable_names(each) for each in names]
    if isinstance(names, Mapping):
        return dict.fromkeys(names, REDACTED)
    if not isinstance(names, str) or re.fullmatch(r"[A-Za-z_]\w*", names):
        return names
    name = re.match(r"[A-Za-z_]\w*(?==)", names)
    return f"{name[0] if name else ''}={REDACTED}".removeprefix("=")


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Redact secrets on a command line, including the value after an option such as `--token`."""
    names = ["", *(arg if arg.startswith("-") and "=" not in arg else "" for arg in argv)]
    return [redact_value(arg, name) for name, arg in zip(names, argv, strict=False)]
