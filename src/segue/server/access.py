"""Who may use a route: each one declares its level by its class, and the check runs where it was matched."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from segue.config import EngineConfig
from segue.errors import AuthenticationError, SegueError
from segue.http_guard import READING, Headers, HttpGuard, check_type
from segue.server.errors import error_response


class Access(Enum):
    """What a request needs to reach a route."""

    OPEN = "open"  # nothing: not even the host is checked
    METRICS = "metrics"  # as OPEN with --open-metrics, else as USER
    USER = "user"  # the API key or the admin key, where an API key is set
    ADMIN = "admin"  # the admin key, where one is set; else as USER


class Gate:
    """The checks of one server, in their order: key, host, origin, type of the body."""

    def __init__(self, config: EngineConfig) -> None:
        self.guard = HttpGuard.create(
            config.host, allowed_hosts=config.allowed_hosts, cors_origin=config.cors_origin
        )
        admin = [config.admin_api_key.encode()] if config.admin_api_key else []
        self._user_keys = [config.api_key.encode(), *admin] if config.api_key else []
        self._admin_keys = admin or self._user_keys
        self._metrics = Access.OPEN if config.open_metrics else Access.USER

    def check(self, scope: Scope, access: Access) -> None:
        """Let a request for a route pass.

        Raises:
            AuthenticationError: it carries no key that the route needs.
            ForbiddenError: it is for another host, or comes from a page of another origin.
            MediaTypeError: its body is not declared as JSON.
        """
        if access is Access.METRICS:
            access = self._metrics
        if access is Access.OPEN:
            return
        headers = dict(scope["headers"])
        self.check_client(headers, access)
        method = scope["method"]
        # Other pages do not even read control routes, since a few of those change something on GET.
        if method not in READING or (access is Access.ADMIN and method != "OPTIONS"):
            self.guard.check_origin(headers, scope["scheme"])
        if method not in READING:
            check_type(headers)

    def check_client(self, headers: Headers, access: Access) -> None:
        """Check key and host alone; raises as :meth:`check` does."""
        keys = self._admin_keys if access is Access.ADMIN else self._user_keys
        if keys and not _carries(headers, keys):
            raise AuthenticationError("a valid key is needed: send the header 'Authorization: Bearer <key>'")
        self.guard.check_host(headers)


class GuardedRoute(APIRoute):
    """A route that checks a request before anything of its endpoint runs, whatever the method.

    Routers are made with one of the classes below, which is how a route declares its level.
    """

    access: ClassVar[Access]

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # Starlette's pattern ends with `$`, which matches before a newline at the end too.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request whose path this route matched, then answer it."""
        try:
            scope["app"].state.gate.check(scope, self.access)
        except SegueError as error:
            await error_response(error, scope["path"], self.error_body(error))(scope, receive, send)
            return
        await super().handle(scope, receive, send)

    def error_body(self, error: SegueError) -> dict[str, Any] | None:
        """The body of a refusal; None: the path decides its form."""
        return None


class OpenRoute(GuardedRoute):
    """A route for probes."""

    access = Access.OPEN


class MetricsRoute(GuardedRoute):
    """A route for Prometheus."""

    access = Access.METRICS


class UserRoute(GuardedRoute):
    """A route for clients that generate."""

    access = Access.USER


class AdminRoute(GuardedRoute):
    """A route that controls the server, or shows its state."""

    access = Access.ADMIN


class Unmatched:
    """Answers requests that no route matches; without a key nobody learns which routes there are."""

    def __init__(self, gate: Gate, routes: list[BaseRoute]) -> None:
        self._gate = gate
        self._router = Router(routes)  # redirects where only a slash at the end differs, else answers 404

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; raises as :meth:`Gate.check` does."""
        if scope["type"] == "http":
            self._gate.check_client(dict(scope["headers"]), Access.USER)
        await self._router(scope, receive, send)


def require_levels(routes: Iterable[BaseRoute]) -> None:
    """Make sure that no route is reachable without a check.

    Raises:
        TypeError: a route declares no level of access.
    """
    for route in routes:
        if not isinstance(route, GuardedRoute) or not isinstance(getattr(route, "access", None), Access):
            name = getattr(route, "path", route)
            raise TypeError(
                f"route {name}: it declares no level of access; register it on a router whose route_class is "
                "one of segue.server.access"
            )


def _carries(headers: Headers, keys: list[bytes]) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    # Each key is compared, in a time that does not tell where it differs.
    matches = [hmac.compare_digest(given.strip(), key) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)
