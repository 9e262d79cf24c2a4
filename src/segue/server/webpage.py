"""The files of the web page at ``/``: charts, a log of events and a chat.

The files need no key, and what they show does.

They load nothing from elsewhere, and their security policy lets them talk to this server alone.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from segue.server.access import Access, Endpoint, Routes

FOLDER = "webpage_files"
INDEX = "index.html"
PREFIX = "/page/"  # of the paths of all files but the page itself
ROOT = b"{{root}}"  # in the page: stands for what comes before `PREFIX` and before nothing else
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",  # which means: ask whether it has changed
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, as it is in the package."""

    name: str
    data: bytes

    @property
    def media_type(self) -> str:
        """What its content is."""
        return KINDS[self.name.rpartition(".")[2]]


@cache
def files() -> dict[str, PageFile]:
    """Returns all files by name."""
    folder = resources.files("segue.server").joinpath(FOLDER)
    found = (PageFile(each.name, each.read_bytes()) for each in _sorted(folder))
    return {each.name: each for each in found}


def _sorted(folder: resources.abc.Traversable) -> Iterator[resources.abc.Traversable]:
    yield from sorted((each for each in folder.iterdir() if each.is_file()), key=lambda each: each.name)


def file_routes() -> Routes:
    """Returns the routes of the files, for GET and HEAD."""
    routes = Routes(Access.OPEN, "About")
    for name, file in files().items():
        path = "/" if name == INDEX else PREFIX + name
        for method in ("GET", "HEAD"):
            routes.add(method, path, _endpoint(file), hidden=True)
    return routes


def _endpoint(file: PageFile) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        root_path: str = request.app.state.root_path
        # Without a root path the links are relative, for a proxy whose path nobody has told to this server.
        root = html.escape(root_path + "/" if root_path else "").encode()
        data = file.data.replace(ROOT, root) if file.name == INDEX else file.data
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = HEADERS | {"etag": etag}
        if etag in {each.strip().removeprefix("W/") for each in _known(request)}:
            return Response(status_code=304, headers=headers)
        headers["content-length"] = str(len(data))
        content = b"" if request.method == "HEAD" else data
        return Response(content, headers=headers, media_type=file.media_type)

    endpoint.__doc__ = f"A file of the web page: {file.name}."
    return endpoint


def _known(request: Request) -> list[str]:
    """Returns the etags of the versions that a client has."""
    return request.headers.get("if-none-match", "").split(",")
