"""A server that answers as the Hugging Face hub does, as far as its library asks when it fetches a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SMALL = 1 << 10  # bytes; a larger file has its SHA-256 for a name, as those that git keeps elsewhere


class FakeHub:
    """Repositories by name, with the files of each revision; use it as a context manager."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]) -> None:
        self.repositories = repositories
        self.cut_after: int | None = None  # bytes of a large file after which the connection breaks, once
        self.broken: set[str] = set()  # files that cannot be had now
        self.sent: list[tuple[str, int]] = []  # files, and the byte at which each began
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def commit_of(name: str, revision: str) -> str:
    return hashlib.sha1(f"{name} {revision}".encode()).hexdigest()


def hash_of(content: bytes) -> str:
    if len(content) > SMALL:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has ended
            super().handle()

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(revision|tree)/([\w.-]+)", path):
            name, what, revision = match.groups()
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)", path):
            name, what, revision = match[1], "revision", "main"
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path):
            name, revision, what = match.groups()
        else:
            return self._fail("EntryNotFound")
        if (found := self.hub.repositories.get(name)) is None:
            return self._fail("RepoNotFound")
        commits = {each: commit_of(name, each) for each in found}
        names = [each for each in found if revision in (each, commits[each])]
        if not names:
            return self._fail("RevisionNotFound")
        files, commit = found[names[0]], commits[names[0]]
        if what == "revision":
            self._send_json({"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]})
        elif what == "tree":
            self._send_json([_entry(file, content) for file, content in files.items()])
        elif what in files:
            self._send_file(what, files[what], commit, has_body)
        else:
            self._fail("EntryNotFound")

    def _send_json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, code: str, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def _send_file(self, name: str, content: bytes, commit: str, has_body: bool) -> None:
        start = 0
        if given := self.headers.get("range"):
            start = int(given.removeprefix("bytes=").partition("-")[0])
        if has_body and name in self.hub.broken:
            return self._fail("Busy", 500)
        cut = None
        if has_body:
            self.hub.sent.append((name, start))
            if len(content) > SMALL:
                cut, self.hub.cut_after = self.hub.cut_after, None
        self.send_response(206 if start else 200)
        self.send_header("x-repo-commit", commit)
        self.send_header("etag", f'"{hash_of(content)}"')
        self.send_header("content-length", str(len(content) - start))
        if start:
            self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if has_body:
            self.wfile.write(content[start:] if cut is None else content[:cut])
        self.close_connection = self.close_connection or cut is not None


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": hash_of(content)[:40]}
    if len(content) > SMALL:
        entry["lfs"] = {"oid": hash_of(content), "size": len(content), "pointerSize": 130}
    return entry
