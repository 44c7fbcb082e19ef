"""A fake bucket on 127.0.0.1: the part of the GCS JSON API that gcsfs and tensorstore use."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/[^/]+/o/([^/]+)")
_LIST = re.compile(r"(?:/upload)?/storage/v1/b/[^/]+/o")
_BUCKET = re.compile(r"/storage/v1/b/[^/]+")
_MOVE = re.compile(r"/storage/v1/b/[^/]+/o/([^/]+)/moveTo/o/([^/]+)")


@dataclass
class Bucket:
    """Objects, each with its generation and time. HTTP methods in `refused` return status 403."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    facts: dict[str, tuple[int, datetime]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0

    def put(self, name: str, content: bytes) -> None:
        self.generation += 1
        self.objects[name] = content
        self.facts[name] = self.generation, datetime.now(UTC)

    def generation_of(self, name: str) -> int:
        return self.facts[name][0] if name in self.objects else 0

    def resource(self, name: str) -> dict[str, Any]:
        generation, time = self.facts[name]
        stamp = f"{time:%Y-%m-%dT%H:%M:%S.%f}Z"
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "bucket",
            "size": str(len(self.objects[name])),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": stamp,
            "updated": stamp,
        }

    def listing(self, prefix: str, delimiter: str) -> dict[str, Any]:
        items, prefixes = [], set()
        for name in sorted(self.objects):
            if name.startswith(prefix):
                head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if found:
                    prefixes.add(prefix + head + delimiter)
                else:
                    items.append(self.resource(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # send each reply in one write
    bucket: Bucket

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _reply(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command in self.bucket.refused:
            return self._reply(403, {"error": {"code": 403, "message": "no permission"}})
        with self.bucket.lock:
            if found := _OBJECT.fullmatch(url.path):
                self._object(unquote(found[1]), query)
            elif found := _MOVE.fullmatch(url.path):
                self._move(unquote(found[1]), unquote(found[2]))
            elif _LIST.fullmatch(url.path):
                if self.command == "POST":
                    self._upload(query, body)
                else:
                    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
                    self._reply(200, self.bucket.listing(prefix, delimiter))
            elif _BUCKET.fullmatch(url.path):
                self._reply(200, {"kind": "storage#bucket", "name": "bucket"})
            else:
                self._reply(501, {"error": {"code": 501, "message": self.path}})

    do_GET = do_POST = do_DELETE = do_PUT = _answer

    def _object(self, name: str, query: dict[str, str]) -> None:
        content, generation = self.bucket.objects.get(name), self.bucket.generation_of(name)
        if content is None:
            self._reply(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        elif query.get("ifGenerationMatch", str(generation)) != str(generation):
            self._reply(412)
        elif self.command == "DELETE":
            del self.bucket.objects[name]
            self._reply(204)
        elif query.get("ifGenerationNotMatch") == str(generation):
            self._reply(304)
        elif query.get("alt") != "media":
            self._reply(200, self.bucket.resource(name))
        else:
            self._media(content, str(generation))

    def _media(self, content: bytes, generation: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._reply(200, content, x_goog_generation=generation)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first > last:
            return self._reply(416, b"not satisfiable")
        place = f"bytes {first}-{last}/{len(content)}"
        part = content[first : last + 1]
        self._reply(206, part, Content_Range=place, x_goog_generation=generation)

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        name = query.get("name", "")
        if query["uploadType"] == "resumable":
            place = f"{self.bucket.url}/upload/storage/v1/b/bucket/o?uploadType=rest&name={name}"
            return self._reply(200, Location=quote(place, safe=":/?=&"))
        if query["uploadType"] == "multipart":
            mark = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            _, facts, content, _ = re.split(rb"\r?\n?--" + re.escape(mark), body)
            name = json.loads(re.split(rb"\r?\n\r?\n", facts, maxsplit=1)[1])["name"]
            body = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
        assert not self.headers.get("Content-Range", "").endswith("/*"), (
            "only small files are supported"
        )
        generation = str(self.bucket.generation_of(name))
        if query.get("ifGenerationMatch", generation) != generation:
            return self._reply(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        self.bucket.put(name, body)
        self._reply(200, self.bucket.resource(name))

    def _move(self, name: str, target: str) -> None:
        if name not in self.bucket.objects:
            return self._reply(404)
        self.bucket.put(target, self.bucket.objects.pop(name))
        self._reply(200, self.bucket.resource(target))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # gcsfs closes idle connections
            super().handle_error(request, client_address)


@contextmanager
def served() -> Iterator[Bucket]:
    """Serve a bucket, which accepts any bucket name."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    with _Server(("127.0.0.1", 0), handler) as server:
        bucket.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield bucket
        finally:
            server.shutdown()
            thread.join()


def variables(bucket: Bucket) -> dict[str, str]:
    """Return the environment variables that redirect `gs://` to the bucket."""
    return {
        "STORAGE_EMULATOR_HOST": bucket.url,
        "TENSORSTORE_GCS_HTTP_URL": bucket.url,
        "FSSPEC_GCS_TOKEN": "anon",
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # queried with gRPC
    }
