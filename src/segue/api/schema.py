"""OpenAPI's description of the routes, made from the structs of their bodies and queries.

The parts of the routes are declared while they are imported, at each start. The schemas of the structs take a
tenth of a second, so they are made when the whole document is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from segue.version import __version__

ERRORS = {  # by status, for the description
    400: "A wrong value, or a field that is not supported",
    401: "No key, or a wrong one",
    403: "For another host, or from a web page of another origin",
    404: "No such model",
    408: "The request did not arrive in time",
    409: "Not possible in the present state",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    503: "The server cannot serve now: it is starting, full, paused, draining, or its engine has failed",
}
_DONE = "Done"
_JSON = "application/json"
_CDN = "https://cdn.jsdelivr.net/npm"
_SWAGGER = """<!doctype html><title>{title}</title>
<link rel="stylesheet" href="{cdn}/swagger-ui-dist@5/swagger-ui.css"><div id="page"></div>
<script src="{cdn}/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#page"}})</script>"""
_REDOC = """<!doctype html><title>{title}</title><redoc spec-url="openapi.json"></redoc>
<script src="{cdn}/redoc@2/bundles/redoc.standalone.js"></script>"""


@dataclass(frozen=True, slots=True)
class _Later:
    """A part of the document that is made with it."""

    make: Callable[[], Any]


def body_schema(kind: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """The part of a route's description that says what its body is."""
    content = {_JSON: {"schema": _Later(partial(_schema, kind))}}
    return {"requestBody": {"required": required, "content": content}}


def query_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The part of a route's description that says what its query is."""
    return {"parameters": _Later(partial(_parameters, kind))}


def reply_schema(kind: Any, *, has_stream: bool = False) -> dict[str, Any]:
    """The part of a route's description that says what its reply is.

    Args:
        kind: a struct, or another type that msgspec can describe.
        has_stream: the reply may also be a stream of events, whose data is JSON.
    """
    content: dict[str, Any] = {_JSON: {"schema": _Later(partial(_schema, kind))}}
    if has_stream:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot say what the events of a stream are
    return _responses({200: content})


def text_schema(media_type: str, *statuses: int) -> dict[str, Any]:
    """The part of a route's description that says with which statuses it answers a text of ``media_type``.

    Where an error's status is one of them, it may have the form of an error as well.
    """
    return _responses({status: {media_type: {"schema": {"type": "string"}}} for status in statuses or (200,)})


def with_errors(described: Mapping[str, Any], form: type[msgspec.Struct], statuses: Iterable[int]) -> Any:
    """Returns a route's description with the errors that it may answer, each in the form of ``form``."""
    responses = {"200": {"description": _DONE}, **described.get("responses", {})}
    for status in statuses:
        name = str(status)
        if name in responses:  # a text, or the error
            content = responses[name]["content"] | _content_of(form)
            responses[name] = responses[name] | {"content": content}
        else:
            responses[name] = {"$ref": f"#/components/responses/{form.__name__}{status}"}
    return {**described, "responses": dict(sorted(responses.items()))}


def openapi(
    title: str,
    routes: Iterable[tuple[str, str, dict[str, Any]]],
    error_forms: Iterable[type[msgspec.Struct]] = (),
    root_path: str = "",
) -> dict[str, Any]:
    """The document that describes routes, each given as its path, its method and its description.

    ``error_forms`` are the structs that :func:`with_errors` was given. ``root_path`` is what stands before
    each path for clients, because of a proxy.
    """
    paths: dict[str, dict[str, Any]] = {}
    for path, method, described in routes:
        operation_id = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
        operation = {"operationId": operation_id, "responses": {"200": {"description": _DONE}}}
        paths.setdefault(path, {})[method.lower()] = operation | described
    info = {"title": title, "version": __version__}
    document: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths}
    if root_path:
        document["servers"] = [{"url": root_path}]
    forms = list(error_forms)
    if forms:
        document["components"] = _error_components(forms)
    made: dict[str, Any] = _made(document)
    return made


def _made(node: Any) -> Any:
    """A node of the document with everything that was left for later."""
    if isinstance(node, _Later):
        return node.make()
    if isinstance(node, dict):
        return {key: _made(value) for key, value in node.items()}
    return node


def _error_components(forms: list[type[msgspec.Struct]]) -> dict[str, Any]:
    """The forms of errors and the replies with them, which routes refer to."""
    responses = {
        f"{form.__name__}{status}": {"description": text, "content": _content_of(form)}
        for form in forms
        for status, text in ERRORS.items()
    }
    schemas = {form.__name__: _schema(form) for form in forms}
    return {"schemas": schemas, "responses": responses}


def swagger_page(title: str) -> str:
    """A page beside ``openapi.json`` to try requests on."""
    return _SWAGGER.format(title=title, cdn=_CDN)


def redoc_page(title: str) -> str:
    """A page beside ``openapi.json`` to read."""
    return _REDOC.format(title=title, cdn=_CDN)


def _responses(contents: Mapping[int, Any]) -> dict[str, Any]:
    """A route's replies, by status."""
    return {
        "responses": {
            str(status): {"description": ERRORS.get(status, _DONE), "content": content}
            for status, content in contents.items()
        }
    }


def _content_of(form: type[msgspec.Struct]) -> dict[str, Any]:
    """The content of an error; its schema is one of the document's components."""
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{form.__name__}"}}}


def _parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """A query's fields, as parameters of its routes."""
    schema = _schema(kind)
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]


@cache  # the document may be asked for again and again, on the event loop
def _schema(kind: Any) -> dict[str, Any]:
    """A type's JSON schema, with each definition where it is used; our structs do not recurse."""
    (schema,), definitions = msgspec.json.schema_components([kind])

    def resolve(node: Any) -> Any:
        """Return a node with every reference replaced by the definition that it refers to."""
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                return resolve(definitions[reference.rsplit("/", 1)[-1]])
            # Which of several structs it is, their tags say too; msgspec's mapping refers to the definitions.
            return {key: resolve(each) for key, each in node.items() if key != "discriminator"}
        return [resolve(each) for each in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    # The tag tells messages apart; no client sends it.
    config = getattr(kind, "__struct_config__", None)
    if config is not None and (tag := config.tag_field) is not None:
        del resolved["properties"][tag]
        resolved["required"] = [name for name in resolved["required"] if name != tag]
    return resolved
