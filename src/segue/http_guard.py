"""The checks that protect a server on the user's machine or network from web pages.

A browser sends requests on behalf of any page that it shows, also to a server that only this machine can
reach. The checks use what the browser says about the page: the host that the page addresses, the page's
origin, and the type of the body. The HTTP server and the training server share them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from segue.errors import ConfigError, ForbiddenError, InvalidRequestError, MediaTypeError, SegueError

ANY = "*"
READING = frozenset(("GET", "HEAD", "OPTIONS"))  # methods that change nothing, unless a route says otherwise

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d*)?")  # a Host header: name, with or without port
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")

Headers = Mapping[bytes, bytes]  # names in lower case; of a repeated header, the last value


class HttpGuard:
    """The host names that a server answers for, and the web pages that may change something on it.

    It is made for a server that listens on ``host``, from the options of the same names. Hosts are checked if
    the server listens on a loopback address, or if ``allowed_hosts`` is given.

    Raises:
        ConfigError: an entry is not a host name, or not an origin.
    """

    def __init__(
        self, host: str, *, allowed_hosts: str | None = None, cors_origin: str | None = None
    ) -> None:
        """Parse the options; both are lists with commas, and None is an empty list."""
        names = _entries(allowed_hosts, "allowed_hosts", _is_host, "a host name without port, like gpu-1.lan")
        rule = "an origin, like https://chat.example"
        # Those allowed besides the server's own; ``*``: all are.
        self.origins = _entries(cors_origin, "cors_origin", _ORIGIN.fullmatch, rule)
        # Those allowed besides localhost and loopback addresses; None: all are.
        self.hosts: frozenset[str] | None = None
        if ANY not in names and (names or is_loopback(host)):
            self.hosts = frozenset(name.strip("[]") for name in names | {host.lower()})

    def check_host(self, headers: Headers) -> None:
        """Refuse other servers' host names: in DNS rebinding, a page's own name points to this address.

        A request without a Host header passes, because every browser sends one.

        Raises:
            ForbiddenError: the name is not allowed.
        """
        if self.hosts is None or (authority := headers.get(b"host")) is None:
            return
        found = _AUTHORITY.fullmatch(authority.decode("latin-1").lower())
        name = found[1].strip("[]").removesuffix(".") if found else ""
        address = _address(name)
        is_local = name == "localhost" or name.endswith(".localhost") or (address and address.is_loopback)
        if not (is_local or name in self.hosts):
            raise ForbiddenError(
                f"this server does not answer for the host {_shown(authority)}; use localhost, or start the "
                "server with --allowed-hosts and that name"
            )

    def check_origin(self, headers: Headers, scheme: str) -> None:
        """Refuse a request from a page of another origin. Programs other than browsers declare no origin.

        Raises:
            ForbiddenError: the origin is neither this server's nor an allowed one.
        """
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", b"none")
        if ANY in self.origins or (origin is not None and origin.decode("latin-1") in self.origins):
            return
        own = b"%s://%s" % (scheme.encode(), headers.get(b"host", b""))
        if origin in (None, own) and site in (b"none", b"same-origin"):
            return
        # Some requests of a browser have no origin, but Sec-Fetch-Site says that the page is another site's.
        page = "another site" if origin is None else f"the origin {_shown(origin)}"
        raise ForbiddenError(
            f"a web page of {page} may not send this request; if you trust that page, start the server with "
            "--cors-origin and its origin"
        )

    def check(self, scope: Scope, headers: Headers, *, guards_reading: bool = False) -> None:
        """Check the host and, of a request that may change something, the origin and the body's type.

        With ``guards_reading``, the origin of GET and HEAD requests is checked too. That of a CORS preflight
        (OPTIONS) is not: its answer alone gives a page nothing.

        Raises:
            ForbiddenError: it is for another host, or comes from a page of another origin.
            MediaTypeError: its body is not declared as JSON.
        """
        method = scope["method"]
        self.check_host(headers)
        if method not in READING or (guards_reading and method != "OPTIONS"):
            self.check_origin(headers, scope["scheme"])
        if method not in READING:
            check_type(headers)


def check_path(scope: Scope) -> None:
    """Refuse a path with control characters: route patterns could match it differently than the checks do.

    Raises:
        InvalidRequestError: the path has a control character, plain or percent-encoded.
    """
    if _CONTROL.search(scope["path"]):
        raise InvalidRequestError(
            f"the path {scope['path']!r} contains a control character; send the path without it"
        )


def check_type(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON: a page may send some other types without a CORS preflight.

    Raises:
        MediaTypeError: the type is not JSON.
    """
    given = headers.get(b"content-type")
    if not given or given == b"application/json":
        return
    kind = given.partition(b";")[0].strip().lower()
    if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
        return
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    if kind == b"application/octet-stream" and not has_body:  # aiohttp declares this type for an empty body
        return
    raise MediaTypeError(
        f"Content-Type {_shown(given)}: the body must be JSON; send 'Content-Type: application/json', or none"
    )


def install(
    app: Starlette,
    guard: HttpGuard,
    refuse: Callable[[SegueError, str], ASGIApp],
    *,
    checks_all: bool,
) -> None:
    """Check requests before all else, and let pages of the allowed origins read the answers.

    Args:
        app: the server's application.
        guard: the checks.
        refuse: makes the answer to a request that fails a check, from the error and the request's path.
        checks_all: make all checks of ``guard`` here. Otherwise only paths are checked here, and the
            application makes the other checks.
    """
    if guard.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(guard.origins),
            allow_methods=["GET", "POST"],
            allow_headers=[ANY],
            expose_headers=["X-Request-Id"],
        )

    def middleware(app: ASGIApp) -> ASGIApp:
        """Wrap the application ``app`` in the checks."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            """Answer a request that fails a check; pass on any other, to the application."""
            answer = app
            if scope["type"] == "http":
                try:
                    check_path(scope)
                    if checks_all:
                        guard.check(scope, dict(scope["headers"]))
                except SegueError as error:
                    answer = refuse(error, scope["path"])
            await answer(scope, receive, send)

        return checked

    app.add_middleware(middleware)


def _entries(text: str | None, option: str, is_valid: Callable[[str], object], rule: str) -> frozenset[str]:
    """Return the entries of an option that is a list with commas, in lower case; None: no entries.

    Raises ConfigError for an entry that is neither ``*`` nor valid; ``rule`` says what a valid one is.
    """
    entries = [] if text is None else [entry.strip().lower() for entry in text.split(",")]
    for entry in entries:
        if entry != ANY and not is_valid(entry):
            raise ConfigError(f"{option}={text!r}: {entry!r} is not {rule}, nor *", param=option)
    return frozenset(entries)


def _is_host(name: str) -> bool:
    return _NAME.fullmatch(name) is not None or (":" in name and _address(name.strip("[]")) is not None)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address to which ``bind`` resolves ``host``."""
    try:
        address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        return False
    return ipaddress.ip_address(address).is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``name`` is, or None if it is a host name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _shown(header: bytes) -> str:
    text = header.decode("latin-1")
    return repr(text if len(text) <= 100 else text[:100] + "…")
