"""Who may use a route.

Each route declares its level of :class:`Access`. When Starlette has matched a :class:`GuardedRoute`, the
route asks the server's :class:`Gate` before its endpoint runs. :func:`unmatched` asks it for all other
requests.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from segue.api.schema import openapi, with_errors
from segue.api.shapes import NativeError, OpenAIError
from segue.errors import AuthenticationError, SegueError
from segue.http_guard import Headers, HttpGuard
from segue.server.responses import OPENAI_PATHS, error_response

Endpoint = Callable[[Request], Awaitable[ASGIApp]]  # what answers a request, a `Response` for example


class Access(Enum):
    """What a request needs to reach a route."""

    OPEN = "open"  # nothing: not even the host is checked
    METRICS = "metrics"  # as OPEN with --open-metrics, else as USER
    USER = "user"  # the API key or the admin key, where an API key is set
    ADMIN = "admin"  # the admin key, where one is set; else as USER


class GateOptions(Protocol):
    """The options that decide who may use a server; the engine's server and the router have them."""

    @property
    def host(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def admin_api_key(self) -> str | None: ...
    @property
    def open_metrics(self) -> bool: ...
    @property
    def allowed_hosts(self) -> str | None: ...
    @property
    def cors_origin(self) -> str | None: ...


class Gate:
    """The checks of one server, in their order: key, host, origin, type of the body."""

    def __init__(self, config: GateOptions) -> None:
        """Keep the keys that each level accepts; raises ConfigError if a host or an origin is not valid.

        The admin key opens the user's routes too, so that one client needs one key.
        """
        self.guard = HttpGuard(
            config.host, allowed_hosts=config.allowed_hosts, cors_origin=config.cors_origin
        )
        admin = [config.admin_api_key.encode()] if config.admin_api_key else []
        user = [config.api_key.encode(), *admin] if config.api_key else []
        self._keys: dict[Access, list[bytes] | None] = {
            # None: nothing is checked. An empty list: no key is needed, but all else is checked.
            Access.OPEN: None,
            Access.METRICS: None if config.open_metrics else user,
            Access.USER: user,
            Access.ADMIN: admin or user,
        }

    def check(self, scope: Scope, access: Access) -> None:
        """Let a request for a route pass.

        Raises:
            AuthenticationError: it carries no key that the route needs.
            ForbiddenError: it is for another host, or comes from a page of another origin.
            MediaTypeError: its body is not declared as JSON.
        """
        if self._keys[access] is None:
            return
        headers = dict(scope["headers"])
        self.check_key(headers, access)
        # Other pages do not even read control routes, since a few of those change something on GET.
        self.guard.check(scope, headers, guards_reading=access is Access.ADMIN)

    def check_key(self, headers: Headers, access: Access) -> None:
        """Raise AuthenticationError unless ``headers`` carry a key of the level.

        Where the level needs no key, every request passes. A header whose key is empty counts as none.
        """
        if not (keys := self._keys[access]):
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        found = [bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        given = [key for each in found if (key := each.strip())]
        # All are compared, each in a time that does not tell where it differs.
        matches = [[hmac.compare_digest(each, key) for key in keys] for each in given]
        one = "'Authorization: Bearer <key>' or 'x-api-key: <key>'"
        if not any(map(any, matches)):
            raise AuthenticationError(f"a valid key is needed: send the header {one}")
        if not hmac.compare_digest(given[0], given[-1]):
            raise AuthenticationError(f"the two headers have different keys: send one, {one}")

    def has_key(self, headers: Headers, access: Access) -> bool:
        """Whether ``headers`` carry a key of the level, or the level needs none."""
        try:
            self.check_key(headers, access)
        except AuthenticationError:
            return False
        return True


Refusal = Callable[[SegueError, str], Response]  # makes the answer to an error, for a path


class GuardedRoute(Route):
    """A route that checks a request before anything of its endpoint runs, whatever the method."""

    def __init__(self, path: str, endpoint: Endpoint, method: str, group: Routes) -> None:
        """Make a route of one ``method``, with the level of access and the form of errors of ``group``."""
        super().__init__(path, endpoint, methods=[method])
        self.methods = {method}  # Starlette adds HEAD, which nobody needs here
        # Starlette's pattern ends with `$`, which matches before a newline at the end too.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self.access = group.access
        self.allowed = {method}  # those of all routes of this path; `join_methods` adds the others'
        self.description: dict[str, Any] | None = None  # OpenAPI's; None: the route is hidden there
        self.error_form = group.error_form or (OpenAIError if path.startswith(OPENAI_PATHS) else NativeError)
        self._refusal = group.refusal

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request that this route matched, then answer it; raises what :meth:`Gate.check` does."""
        scope["refusal"] = self._refusal  # by this the application's error handler answers
        scope["app"].state.gate.check(scope, self.access)
        if scope["method"] not in self.allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self.allowed))})
        await super().handle(scope, receive, send)


class Routes(list[BaseRoute]):
    """Routes that share a level of access, a tag in OpenAPI and, in ``refusal``, the form of their errors.

    A module of routes makes one such list, and adds its endpoints by the decorators.
    """

    def __init__(
        self,
        access: Access,
        tag: str,
        refusal: Refusal = error_response,
        error_form: type[Struct] | None = None,
    ) -> None:
        """Begin an empty list; ``error_form`` describes what ``refusal`` makes, None: it goes by the path."""
        super().__init__()
        self.access = access
        self.refusal = refusal
        self.error_form = error_form
        self._tag = tag

    def get(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Decorate the endpoint of a GET route; ``options`` are those of :meth:`add`."""
        return partial(self.add, "GET", path, **options)

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Decorate the endpoint of a POST route; ``options`` are those of :meth:`add`."""
        return partial(self.add, "POST", path, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Decorate the endpoint of a DELETE route; ``options`` are those of :meth:`add`."""
        return partial(self.add, "DELETE", path, **options)

    def add(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        *,
        hidden: bool = False,
        schema: Mapping[str, Any] | None = None,
        errors: Iterable[int] = (),
    ) -> Endpoint:
        """Add a route; returns its endpoint.

        Args:
            method: HTTP's.
            path: Starlette's pattern.
            endpoint: gives a request's response; the first line of its docstring describes the route.
            hidden: leave it out of OpenAPI's description.
            schema: more of that description, such as the schemas of the body and of the reply.
            errors: statuses of errors of this route alone.
        """
        route = GuardedRoute(path, endpoint, method, self)
        if not hidden:
            text = endpoint.__doc__ or ""
            named = {"in": "path", "required": True, "schema": {"type": "string"}}
            parameters = [{"name": name, **named} for name in sorted(route.param_convertors)]
            found: dict[str, Any] = {"parameters": parameters} if parameters else {}
            found |= {"tags": [self._tag], "summary": text.partition("\n")[0], **(schema or {})}
            statuses = {*_errors_of(self.access, method, path), *errors}
            route.description = with_errors(found, route.error_form, statuses)
        self.append(route)
        return endpoint


def unmatched(gate: Gate, routes: list[BaseRoute], root_path: str = "") -> ASGIApp:
    """Returns what answers requests that no route matches; without a key nobody learns which routes exist."""
    router = Router(routes)  # redirects where only a slash at the end differs, else answers 404

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and the host, which no route has done, then redirect or answer 404."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            gate.check_key(headers, Access.USER)
            gate.guard.check_host(headers)
            if root_path:  # so that a redirect leads to where the client finds the routes
                scope = {**scope, "root_path": root_path, "path": root_path + scope["path"]}
        await router(scope, receive, send)

    return answer


def _errors_of(access: Access, method: str, path: str) -> set[int]:
    """Returns the statuses of the errors that every route of this kind may answer."""
    statuses = {400, 503}
    if access is not Access.OPEN:
        statuses |= {401, 403}
    if method == "POST":
        statuses |= {408, 413, 415}
    return statuses | ({404} if path.startswith(OPENAI_PATHS) else set())


def describe(title: str, routes: Iterable[BaseRoute], root_path: str = "") -> dict[str, Any]:
    """Returns OpenAPI's description of all routes that are not hidden; ``root_path``: see :func:`openapi`."""
    shown = [route for route in routes if isinstance(route, GuardedRoute) and route.description is not None]
    described = [
        (route.path_format, method, route.description or {})
        for route in shown
        for method in sorted(route.methods or ())
    ]
    forms = {route.error_form.__name__: route.error_form for route in shown}
    return openapi(title, described, forms.values(), root_path)


def join_methods(routes: Iterable[BaseRoute]) -> None:
    """Have each route know all methods of its path, for the answer to a request with another one."""
    allowed: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, GuardedRoute):
            route.allowed = allowed.setdefault(route.path, set())
            route.allowed |= route.methods or set()


def require_levels(routes: Iterable[BaseRoute]) -> None:
    """Make sure that no route is reachable without a check.

    Raises:
        TypeError: a route declares no level of access.
    """
    for route in routes:
        if not isinstance(route, GuardedRoute):
            text = "it declares no level of access; add it by segue.server.access.Routes"
            raise TypeError(f"route {getattr(route, 'path', route)}: {text}")
