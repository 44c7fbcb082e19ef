"""Requests to the Hugging Face Hub: lists of files and their content, with retries.

The package `huggingface_hub` finds the token and configures HTTP. Its function that lists a
repository neither limits the size of a response nor rejects redirects without encryption. The token
is sent only to the origin of the hub. Messages never contain the address of a redirect, which may
be signed.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar
from urllib.parse import quote, urljoin, urlsplit

import maxpipe
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.huggingface.folder import PREFIX
from maxpipe.io import redact
from maxpipe.io.typed_json import parse_json

T = TypeVar("T")

ATTEMPTS, FIRST_PAUSE_SECONDS, MAX_WAIT_SECONDS = 5, 1.0, 300.0
"""Number of attempts without progress, pause after the first attempt, and longest accepted
`Retry-After`."""
_TIMEOUT_SECONDS = 30.0
SLOW_SECONDS, MIN_BYTES_PER_SECOND = 60.0, 1000
"""A connection that delivers fewer bytes for this time counts as an attempt without progress."""
_MAX_REDIRECTS = 10
MAX_LIST_BYTES = 1 << 28
_MAX_LIST_DEPTH = 200

WHERE = "command line: REPOSITORY"
_DATASETS = "datasets/"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ADDRESS = re.compile(rf"hf:(?P<kind>datasets/)?(?P<name>({_NAME}/)?{_NAME})(@(?P<revision>.*))?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]{0,254}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_LINK = re.compile(
    rf"\s*(hf:/*|https?://[^/]+/|huggingface\.co/|)(models/)?(?P<name>(datasets/)?{_NAME}/{_NAME}?)"
    r"(\.git|/(tree|blob|resolve|commit)/(?P<revision>[^/?#]+)[^?#]*)?/?([?#].*)?\s*",
    re.IGNORECASE,
)
"""Other forms of an address, such as the link to a page of the hub."""


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

    def __init__(self, reason: str, seconds: float | None = None, *, is_slow: bool = False):
        super().__init__(reason)
        self.seconds, self.is_slow = seconds, is_slow


class _LargeFile(TypedDict):
    size: int
    sha256: str


class _ListedFile(TypedDict):
    rfilename: str
    size: NotRequired[int | None]
    blobId: NotRequired[str | None]
    lfs: NotRequired[_LargeFile | None]


class _Listing(TypedDict):
    """Response to a request for the list of files. Other keys are ignored."""

    sha: str
    siblings: list[_ListedFile]


def parse_hub_address(text: str) -> HubAddress:
    """Parse `hf:[datasets/]ORG/NAME[@REVISION]`. The default revision is `main`.

    Raises:
        ConfigError: the text does not have this form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        rule = "must have the form hf:ORG/NAME@REVISION, or hf:datasets/ORG/NAME@REVISION."
        action = "Write the name of the repository as on the hub, such as hf:ORG/NAME."
        if link := _LINK.fullmatch(text):
            address = f"{PREFIX}{link['name']}" + (
                f"@{link['revision']}" if link["revision"] else ""
            )
            action = f"Did you mean {address}?"
        raise ConfigError.one(Code.CLI_VALUE, WHERE, text or "''", rule, action)
    revision = match["revision"]
    if revision is not None and not _REVISION.fullmatch(revision):
        rule = "must name a branch, a tag or a commit after the @."
        action = "Write hf:ORG/NAME@main, or leave the revision out."
        raise ConfigError.one(Code.CLI_VALUE, WHERE, text, rule, action)
    return HubAddress("dataset" if match["kind"] else "model", match["name"], revision or "main")


class Hub:
    """Client for one repository of the hub that `HF_ENDPOINT` names."""

    def __init__(self, address: HubAddress, say: Callable[[str], None] = lambda line: None):
        self._address, self._say = address, say
        try:
            import httpx2
            import huggingface_hub
            from huggingface_hub import constants
            from huggingface_hub.utils import logging
        except ImportError as error:
            rule = "requires the package huggingface_hub, which is not installed."
            action = "Run: pip install 'maxpipe[hub]'"
            raise ConfigError.one(Code.ENV_PACKAGE, WHERE, address, rule, action) from error
        except ValueError as error:  # the package reads its variables when it is imported
            _check_endpoint(os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT))
            where = "environment: variables that begin with HF_"
            rule = f"must have values that huggingface_hub accepts: {error}."
            action = "Unset the variable with this value."
            raise ConfigError.one(Code.HF_HUB, where, None, rule, action) from error
        self._httpx = httpx2
        self._endpoint = constants.ENDPOINT.rstrip("/")
        _check_endpoint(self._endpoint)
        self.shown_endpoint = redact.redact_text(self._endpoint)
        self._token = _read_token()
        with _translate_session_errors():
            self._session = huggingface_hub.get_session()
        # Messages of the library may contain signed URLs.
        logging.get_logger().setLevel("CRITICAL")

    def list_files(self, commit: str) -> tuple[str, list[RemoteFile]]:
        """Return the commit of the revision and all files of the repository.

        If `commit` is empty, the revision of the address is resolved.
        """
        revision = commit or self._address.revision
        url = f"{self._endpoint}/api/{self._address.kind}s/{self._address.name}/revision/"
        url += f"{quote(revision, safe='')}?blobs=true"
        text = self._with_retries("the list of files", lambda: self._read_list(url))
        try:
            listing = parse_json(text, _Listing, most_depth=_MAX_LIST_DEPTH)
            files = [_remote_file(file) for file in listing["siblings"]]
        except ValueError as error:
            raise self._invalid_response(f"the list of files is invalid: {error}") from error
        if not COMMIT.fullmatch(sha := listing["sha"]):
            raise self._invalid_response("the list of files names no commit")
        if COMMIT.fullmatch(revision) and sha != revision:
            raise self._invalid_response(f"commit {sha} was returned in place of {revision}")
        return sha, files

    def _read_list(self, url: str) -> bytes:
        content = bytearray()
        with self._open(url, 0) as response:
            if response.status_code != 200:
                raise self._invalid_response(f"HTTP status {response.status_code}")
            for data in read_blocks(response):
                content += data
                if len(content) > MAX_LIST_BYTES:
                    rule = f"the list of files has more than {MAX_LIST_BYTES:,} bytes"
                    raise self._invalid_response(rule)
        return bytes(content)

    def open(self, path: str, commit: str, start: int) -> Any:
        """Return a context manager that yields the response for a file from byte `start`."""
        kind = _DATASETS if self._address.kind == "dataset" else ""
        name = f"{kind}{self._address.name}"
        url = f"{self._endpoint}/{name}/resolve/{commit}/{quote(path)}"
        return self._open(url, start)

    @contextlib.contextmanager
    def _open(self, url: str, start: int) -> Iterator[Any]:
        headers = {"Accept-Encoding": "identity", "User-Agent": f"maxpipe/{maxpipe.__version__}"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if start:
            headers["Range"] = f"bytes={start}-"
        for _ in range(_MAX_REDIRECTS):
            if _origin(url) != _origin(self._endpoint):
                headers.pop("Authorization", None)
            with self._translate_http_errors(), contextlib.ExitStack() as stack:
                response = stack.enter_context(
                    self._session.stream(
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
            raise self._invalid_response("a request is redirected to an address outside the web")
        if scheme == "http" and urlsplit(url).scheme == "https":
            raise self._invalid_response(f"a request is redirected to {host} without encryption")
        return target

    def _check_status(self, response: Any, at_hub: bool) -> None:
        status, cause = response.status_code, response.headers.get("X-Error-Code", "")
        # A signed address of another host expires; the next attempt requests a new one.
        is_expired = not at_hub and status in (401, 403, 410)
        if status in (408, 425, 429) or status >= 500 or is_expired:
            raise RetryableError(f"HTTP status {status}", _retry_after(response.headers))
        if cause == "RevisionNotFound":
            raise self._unknown_revision()
        if status in (400, 401, 403, 404):
            raise self._access_error(status, is_gated=cause == "GatedRepo")
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
                "  Check the network and the proxy, then run the same command again to continue.",
            ) from None
        self._say(f"{what}: {error}; the next attempt is in {seconds:,.0f} s")
        time.sleep(seconds)

    def _unknown_revision(self) -> ConfigError:
        rule = f"the repository has no revision {self._address.revision}."
        action = f"Write {self._address}@main, or the name of a branch, tag or commit."
        given = f"{self._address}@{self._address.revision}"
        return ConfigError.one(Code.HF_ACCESS, WHERE, given, rule, action)

    def _access_error(self, status: int, *, is_gated: bool) -> ConfigError:
        kind = self._address.kind
        rule = f"must be a {kind} that you may download from {self.shown_endpoint}: "
        rule += f"HTTP status {status}."
        action = "Check the name; "
        action += (
            "a model is hf:ORG/NAME" if kind == "dataset" else "a dataset is hf:datasets/ORG/NAME"
        )
        action += ". If it is private, "
        action += "use a token with access." if self._token else "set HF_TOKEN."
        if is_gated:
            rule = f"is gated by terms that the account must accept: HTTP status {status}."
            page = f"{self.shown_endpoint}/{str(self._address).removeprefix(PREFIX)}"
            action = f"Accept the terms at {page}, and set HF_TOKEN to a token of the account."
        return ConfigError.one(Code.HF_ACCESS, WHERE, self._address, rule, action)

    def _invalid_response(self, reason: str) -> StorageError:
        return StorageError(
            Code.HF_HUB,
            f"{self._address}: {self.shown_endpoint} sent an invalid response\n"
            f"  {reason}.\n"
            "  Check HF_ENDPOINT and the proxy, then run the same command again.",
        )


_DEFAULT_ENDPOINT = "https://huggingface.co"


def _check_endpoint(endpoint: str) -> None:
    """Check that the endpoint is a web address without a user name, query or fragment."""
    try:
        is_valid = re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", endpoint) is not None
        is_valid = is_valid and bool(urlsplit(endpoint).hostname) and urlsplit(endpoint).port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        rule = "must be the http or https address of a hub, without a user name."
        action = f"Unset HF_ENDPOINT to use {_DEFAULT_ENDPOINT}."
        raise ConfigError.one(Code.HF_HUB, "environment: HF_ENDPOINT", None, rule, action)


def _read_token() -> str:
    """Return the token in the environment or of the login, or an empty string."""
    import huggingface_hub

    try:
        token = huggingface_hub.get_token() or ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        rule = f"must be a file with a token: {reason}."
        action = "Set HF_TOKEN_PATH to another path."
        where = "environment: HF_TOKEN_PATH"
        raise ConfigError.one(Code.HF_HUB, where, None, rule, action) from error
    if token:
        redact.register_secret(token)
    if not re.fullmatch(r"[!-~]*", token):
        rule = "must consist of ASCII characters, without spaces and control characters."
        action = "Set HF_TOKEN to the token as the hub shows it."
        raise ConfigError.one(Code.HF_HUB, "environment: HF_TOKEN", None, rule, action)
    return token


@contextlib.contextmanager
def _translate_session_errors() -> Iterator[None]:
    """Convert errors of the HTTP library in the configuration of proxies and certificates."""
    try:
        yield
    except ImportError as error:
        where = "environment: ALL_PROXY, HTTP_PROXY or HTTPS_PROXY"
        rule = "is a SOCKS proxy, which requires the package socksio."
        raise ConfigError.one(
            Code.ENV_PACKAGE, where, None, rule, "Run: pip install socksio"
        ) from error
    except OSError as error:
        where, reason = "environment: SSL_CERT_FILE", _describe(error)
        rule = f"must be a file with certificates: {reason}."
        action = "Unset SSL_CERT_FILE, or set it to another file."
        raise ConfigError.one(
            Code.HF_HUB, where, os.environ.get("SSL_CERT_FILE"), rule, action
        ) from error
    except ValueError as error:
        where = "environment: ALL_PROXY, HTTP_PROXY or HTTPS_PROXY"
        rule = "must be the http, https or socks5 address of a proxy."
        action = "Unset the variable, or correct its value."
        raise ConfigError.one(Code.HF_HUB, where, None, rule, action) from error


def read_blocks(response: Any) -> Iterator[bytes]:
    """Yield the content of a response.

    Raises:
        RetryableError: the connection is slower than `MIN_BYTES_PER_SECOND` for `SLOW_SECONDS`.
    """
    begin, received = time.monotonic(), 0
    for data in response.iter_bytes():
        yield data
        received += len(data)
        if (seconds := time.monotonic() - begin) > SLOW_SECONDS:
            if received < seconds * MIN_BYTES_PER_SECOND:
                reason = f"only {received:,} bytes arrived in {seconds:,.0f} s"
                raise RetryableError(reason, is_slow=True)
            begin, received = time.monotonic(), 0


def _remote_file(listed: _ListedFile) -> RemoteFile:
    large = listed.get("lfs")
    size = large["size"] if large else listed.get("size")
    stated = f"sha256:{large['sha256']}" if large else f"git:{listed.get('blobId')}"
    if size is None or size < 0:
        raise ValueError(f"{shown_name(listed['rfilename'])} has no size")
    return RemoteFile(listed["rfilename"], size, stated)


def shown_name(path: str) -> str:
    """Return a name of the hub for a message: quoted, and shortened if it is long."""
    return repr(path if len(path) <= 200 else f"{path[:100]}...")


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
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the certificate of the server is not valid: {error.verify_message}"
        if isinstance(error, ssl.SSLError):
            return f"TLS failed: {(error.reason or name).replace('_', ' ').lower()}"
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno) if error.errno > 0 else "the host name is unknown"
        error = error.__cause__ or error.__context__
    if name.endswith("Timeout"):
        return f"the server sent nothing for {_TIMEOUT_SECONDS:.0f} s"
    return f"the connection failed ({name})"
