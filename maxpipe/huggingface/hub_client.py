"""Requests to the Hugging Face Hub: lists of files and their content, with retries.

The package `huggingface_hub` lists the repository, finds the token and configures HTTP. The token
is sent only to the origin of the hub. Messages never contain the address of a redirect, which may
be signed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.huggingface.folder import PREFIX
from maxpipe.io import redact

T = TypeVar("T")

ATTEMPTS, FIRST_PAUSE_SECONDS, MAX_WAIT_SECONDS = 5, 1.0, 300.0
"""Number of attempts without progress, pause after the first attempt, and longest accepted
`Retry-After`."""
_TIMEOUT_SECONDS = 30.0
_MAX_REDIRECTS = 10

WHERE = "command line: REPOSITORY"
_DATASETS = "datasets/"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ADDRESS = re.compile(rf"hf:(?P<kind>datasets/)?(?P<name>({_NAME}/)?{_NAME})(@(?P<revision>.*))?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]{0,254}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository and a revision: `hf:[datasets/]ORG/NAME[@REVISION]`."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{PREFIX}{_DATASETS if self.kind == 'dataset' else ''}{self.name}"


class RemoteFile(NamedTuple):
    """A file of the repository and the digest that the hub states, `sha256:...` or `git:...`."""

    path: str
    size: int
    stated: str


class RetryableError(Exception):
    """Raised if an attempt failed and another attempt may succeed after `seconds`."""

    def __init__(self, reason: str, seconds: float | None = None):
        super().__init__(reason)
        self.seconds = seconds


def parse_hub_address(text: str) -> HubAddress:
    """Parse `hf:[datasets/]ORG/NAME[@REVISION]`. The default revision is `main`.

    Raises:
        ConfigError: the text does not have this form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        rule = "must have the form hf:ORG/NAME@REVISION, or hf:datasets/ORG/NAME@REVISION."
        action = "Write the name of the repository as on the hub, such as hf:ORG/NAME."
        raise ConfigError.one(Code.CLI_VALUE, WHERE, text or "''", rule, action)
    revision = match["revision"]
    if revision is not None and not _REVISION.fullmatch(revision):
        rule = "must name a branch, a tag or a commit after the @."
        action = "Write hf:ORG/NAME@main, or leave the revision out."
        raise ConfigError.one(Code.CLI_VALUE, WHERE, text, rule, action)
    return HubAddress("dataset" if match["kind"] else "model", match["name"], revision or "main")


class Hub:
    """Client for one repository of the hub that `HF_ENDPOINT` names."""

    def __init__(self, address: HubAddress):
        try:
            import httpx2
            import huggingface_hub
            from huggingface_hub import constants
        except ImportError as error:
            rule = "requires the package huggingface_hub, which is not installed."
            action = "Run: pip install 'maxpipe[hub]'"
            raise ConfigError.one(Code.ENV_PACKAGE, WHERE, address, rule, action) from error
        # Messages of the library may contain signed URLs.
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        self._address, self._library, self._httpx = address, huggingface_hub, httpx2
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._token = huggingface_hub.get_token()
        if self._token:
            redact.register_secret(self._token)
        parts = urlsplit(self._endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            rule = "must be the http or https address of a hub, without a user name."
            action = "Unset HF_ENDPOINT to use https://huggingface.co."
            raise ConfigError.one(Code.HF_HUB, "environment: HF_ENDPOINT", None, rule, action)
        self.shown_endpoint = redact.redact_text(self._endpoint)

    def list_files(self, commit: str) -> tuple[str, list[RemoteFile]]:
        """Return the commit of the revision and all files of the repository.

        If `commit` is empty, the revision of the address is resolved.
        """
        revision = commit or self._address.revision
        api = self._library.HfApi(endpoint=self._endpoint, token=self._token or False)

        def ask() -> Any:
            with self._translate_http_errors():
                return api.repo_info(
                    self._address.name,
                    revision=revision,
                    repo_type=self._address.kind,
                    timeout=_TIMEOUT_SECONDS,
                    files_metadata=True,
                )

        try:
            info = self._with_retries("the list of files", ask)
            sha, siblings = info.sha, info.siblings
            files = [_remote_file(sibling) for sibling in siblings]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._invalid_response(f"the list of files is invalid: {error}") from error
        if not isinstance(sha, str) or not COMMIT.fullmatch(sha):
            raise self._invalid_response("the list of files names no commit")
        if COMMIT.fullmatch(revision) and sha != revision:
            raise self._invalid_response(f"commit {sha} was returned in place of {revision}")
        return sha, files

    def open(self, path: str, commit: str, start: int) -> Any:
        """Return a context manager that yields the response for a file from byte `start`."""
        kind = _DATASETS if self._address.kind == "dataset" else ""
        name = f"{kind}{self._address.name}"
        url = f"{self._endpoint}/{name}/resolve/{commit}/{quote(path)}"
        return self._open(url, start)

    @contextlib.contextmanager
    def _open(self, url: str, start: int) -> Iterator[Any]:
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers(token=self._token or False)
        headers |= {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        for _ in range(_MAX_REDIRECTS):
            if _origin(url) != _origin(self._endpoint):
                headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
            with self._translate_http_errors(), contextlib.ExitStack() as stack:
                response = stack.enter_context(
                    self._library.get_session().stream(
                        "GET",
                        url,
                        headers=headers,
                        follow_redirects=False,
                        timeout=_TIMEOUT_SECONDS,
                    )
                )
                if not response.has_redirect_location:
                    self._check_status(response, _origin(url) == _origin(self._endpoint))
                    yield response
                    return
                location = response.headers["Location"]
            url = self._redirected(url, location)
        raise self._invalid_response(f"more than {_MAX_REDIRECTS} redirects")

    def _redirected(self, url: str, location: str) -> str:
        """Return the target of a redirect, which must be a web address and keep encryption."""
        try:
            target = urljoin(url, location)
            scheme, host, _ = _origin(target)
        except ValueError:
            target = scheme = host = ""
        if scheme not in ("http", "https") or not host:
            raise self._invalid_response("a file is redirected to an address outside the web")
        if scheme == "http" and urlsplit(url).scheme == "https":
            raise self._invalid_response(f"a file is redirected to {host} without encryption")
        return target

    def _check_status(self, response: Any, at_hub: bool) -> None:
        status = response.status_code
        # A signed address of another host expires; the next attempt requests a new one.
        if status in _RETRIED or (not at_hub and status in (401, 403, 410)):
            raise RetryableError(f"HTTP status {status}", _retry_after(response.headers))
        if status in (401, 403, 404):
            raise self._access_error(f"HTTP status {status}")
        if status not in (200, 206, 416):
            raise self._invalid_response(f"HTTP status {status}")

    @contextlib.contextmanager
    def _translate_http_errors(self) -> Iterator[None]:
        """Convert errors of the libraries. Messages with addresses are never kept."""
        from huggingface_hub import errors

        try:
            yield
        except errors.OfflineModeIsEnabled:
            rule = "forbids all connections to the hub."
            action = "Unset HF_HUB_OFFLINE, and run the command again."
            raise ConfigError.one(
                Code.HF_HUB, "environment: HF_HUB_OFFLINE", None, rule, action
            ) from None
        except errors.HFValidationError:
            raise self._access_error("the hub accepts no such name") from None
        except errors.RevisionNotFoundError:
            rule = f"the repository has no revision {self._address.revision}."
            action = f"Write {self._address}@main, or the name of a branch, tag or commit."
            raise ConfigError.one(
                Code.HF_ACCESS,
                WHERE,
                f"{self._address}@{self._address.revision}",
                rule,
                action,
            ) from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in _RETRIED:
                seconds = _retry_after(error.response.headers)
                raise RetryableError(f"HTTP status {status}", seconds) from None
            if status in (401, 403, 404):
                raise self._access_error(f"HTTP status {status}") from None
            raise self._invalid_response(f"HTTP status {status}") from None
        except self._httpx.InvalidURL:
            raise self._invalid_response("an address is invalid") from None
        except self._httpx.HTTPError as error:
            raise RetryableError(_describe(error)) from None

    def _with_retries(self, what: str, call: Callable[[], T]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except RetryableError as error:
                self.pause(what, attempt, error)
        raise AssertionError("`pause` raises an error after the last attempt")

    def pause(self, what: str, attempt: int, error: RetryableError) -> None:
        """Wait before the next attempt.

        Raises:
            StorageError: this was the last attempt, or the hub requests a longer wait.
        """
        seconds = FIRST_PAUSE_SECONDS * 2**attempt if error.seconds is None else error.seconds
        if attempt + 1 == ATTEMPTS or seconds > MAX_WAIT_SECONDS:
            wait = f"; the hub requests a wait of {seconds:,.0f} s" if error.seconds else ""
            raise StorageError(
                Code.HF_HUB,
                f"{self._address}: {what} cannot be downloaded from {self.shown_endpoint}\n"
                f"  {error}{wait}. Complete files and partial files are kept.\n"
                "  Check the network, then run the same command again, which continues.",
            ) from None
        time.sleep(seconds)

    def _access_error(self, reason: str) -> ConfigError:
        kind = "dataset" if self._address.kind == "dataset" else "model"
        rule = f"must be a {kind} that you may download from {self.shown_endpoint}: {reason}."
        token = "the token has no access to it" if self._token else "set HF_TOKEN if it is private"
        action = f"Check the name; {token}, and accept its terms on the hub if it has any."
        return ConfigError.one(Code.HF_ACCESS, WHERE, self._address, rule, action)

    def _invalid_response(self, reason: str) -> StorageError:
        return StorageError(
            Code.HF_HUB,
            f"{self._address}: {self.shown_endpoint} sent an invalid response\n"
            f"  {reason}.\n"
            "  Check HF_ENDPOINT and the proxy, then run the same command again.",
        )


def _remote_file(sibling: Any) -> RemoteFile:
    path, size, lfs = sibling.rfilename, sibling.size, sibling.lfs
    stated = f"git:{sibling.blob_id}" if lfs is None else f"sha256:{lfs.sha256}"
    size = size if lfs is None else lfs.size
    if not isinstance(path, str):
        raise TypeError("a file name is not a string")
    if type(size) is not int or size < 0:
        raise ValueError(f"{path!r} has no size")
    return RemoteFile(path, size, stated)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After`, or None. Dates are ignored."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme)


_PORTS = {"http": 80, "https": 443}


def _describe(error: BaseException | None) -> str:
    """Return the reason of a failed connection; the error's own text may contain an address."""
    name = type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno) if error.errno > 0 else "the host name is unknown"
        error = error.__cause__ or error.__context__
    return name
