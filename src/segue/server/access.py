"""Who may use a route: each one declares its level, and the check runs where it was matched."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from segue.config import EngineConfig
from segue.errors import AuthenticationError, SegueError
from segue.http_guard import READING, Headers, HttpGuard, check_type
from segue.server.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


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


Refusal = Callable[[str, SegueError], dict[str, Any]]  # the path and the error -> the body of the refusal


class GuardedRoute(Route):
    """A route that checks a request before anything of its endpoint runs, whatever the method."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        access: Access,
        *,
        methods: Sequence[str],
        refusal: Refusal | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        """``refusal``: None lets the path decide its form; ``description``: OpenAPI's; None hides it."""
        super().__init__(path, endpoint, methods=list(methods))
        self.methods = set(methods)  # Starlette adds HEAD, which nobody needs here
        # Starlette's pattern ends with `$`, which matches before a newline at the end too.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self.access = access
        self.description = description
        self._refusal = refusal

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request whose path this route matched, then answer it."""
        try:
            scope["app"].state.gate.check(scope, self.access)
        except SegueError as error:
            body = None if self._refusal is None else self._refusal(self.path, error)
            await error_response(error, scope["path"], body)(scope, receive, send)
            return
        await super().handle(scope, receive, send)


class Routes(list[BaseRoute]):
    """The routes of one room, all of one level of access."""

    def __init__(self, access: Access, tag: str, refusal: Refusal | None = None) -> None:
        super().__init__()
        self._access = access
        self._tag = tag
        self._refusal = refusal

    def get(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Decorate the endpoint of a GET route; ``options`` are those of :meth:`add`."""
        return self._decorator(path, ("GET",), options)

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Decorate the endpoint of a POST route; ``options`` are those of :meth:`add`."""
        return self._decorator(path, ("POST",), options)

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        methods: Sequence[str],
        *,
        summary: str | None = None,
        hidden: bool = False,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a route.

        Args:
            path: Starlette's pattern.
            endpoint: gives a request's response.
            methods: HTTP's.
            summary: the first line of OpenAPI's description; None takes the endpoint's docstring.
            hidden: leave it out of OpenAPI's description.
            schema: more of that description, such as the schema of the body.
        """
        text = summary or endpoint.__doc__ or ""
        description = {"tags": [self._tag], "summary": text.partition("\n")[0], **(schema or {})}
        route = GuardedRoute(
            path,
            endpoint,
            self._access,
            methods=methods,
            refusal=self._refusal,
            description=None if hidden else description,
        )
        self.append(route)

    def _decorator(
        self, path: str, methods: Sequence[str], options: dict[str, Any]
    ) -> Callable[[Endpoint], Endpoint]:
        def decorate(endpoint: Endpoint) -> Endpoint:
            self.add(path, endpoint, methods, **options)
            return endpoint

        return decorate


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
                f"route {name}: it declares no level of access; add it by segue.server.access.Routes"
            )


def _carries(headers: Headers, keys: list[bytes]) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    # Each key is compared, in a time that does not tell where it differs.
    matches = [hmac.compare_digest(given.strip(), key) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)
