"""The files of the web page at ``/``: charts, a log of events and a chat.

The files need no key, and what they show does.

They load nothing from elsewhere, and their security policy lets them talk to this server alone.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from segue.server.access import Access, Routes
from segue.server.responses import RouteError

FOLDER = "webpage_files"
INDEX = "index.html"
ROOT = b"{{root}}"  # in the page: stands for what comes before the paths of its files
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


routes = Routes(Access.OPEN, "About")


@routes.get("/", hidden=True)
@partial(routes.add, "HEAD", "/", hidden=True)
async def index(request: Request) -> Response:
    """The page itself."""
    return _sent(request, files()[INDEX])


@routes.get("/page/{name:path}", hidden=True)
@partial(routes.add, "HEAD", "/page/{name:path}", hidden=True)
async def file(request: Request) -> Response:
    """A file that the page needs."""
    found = files().get(request.path_params["name"])
    if found is None or found.name == INDEX:
        raise RouteError(404, request)
    return _sent(request, found)


def _sent(request: Request, file: PageFile) -> Response:
    """Returns a file, or 304 if the client has it."""
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


def _known(request: Request) -> list[str]:
    """Returns the etags of the versions that a client has."""
    return request.headers.get("if-none-match", "").split(",")
