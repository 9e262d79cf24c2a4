"""OpenAPI's description of the routes, made from the structs of their bodies and queries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from segue.version import __version__

_CDN = "https://cdn.jsdelivr.net/npm"
_SWAGGER = """<!doctype html><title>{title}</title>
<link rel="stylesheet" href="{cdn}/swagger-ui-dist@5/swagger-ui.css"><div id="page"></div>
<script src="{cdn}/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#page"}})</script>"""
_REDOC = """<!doctype html><title>{title}</title><redoc spec-url="openapi.json"></redoc>
<script src="{cdn}/redoc@2/bundles/redoc.standalone.js"></script>"""


def body_schema(kind: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """The part of a route's description that says what its body is."""
    content = {"application/json": {"schema": _schema(kind)}}
    return {"requestBody": {"required": required, "content": content}}


def query_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The part of a route's description that says what its query is."""
    schema = _schema(kind)
    required = schema.get("required", [])
    parameters = [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]
    return {"parameters": parameters}


def reply_schema(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of a route's description that says what its reply is: fields, by examples; None: a list."""
    kinds = {str: "string", bool: "boolean", int: "integer"}
    schema: dict[str, Any] = {"type": "array"}
    if fields is not None:
        properties = {name: {"type": kinds[type(value)]} for name, value in fields.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
    content = {"application/json": {"schema": schema}}
    return {"responses": {"200": {"description": "Done", "content": content}}}


def openapi(
    title: str, routes: Iterable[tuple[str, str, dict[str, Any]]], root_path: str = ""
) -> dict[str, Any]:
    """The document that describes routes, each given as its path, its method and its description.

    ``root_path`` is what stands before each path for clients, because of a proxy.
    """
    paths: dict[str, dict[str, Any]] = {}
    for path, method, described in routes:
        operation_id = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
        operation = {"operationId": operation_id, "responses": {"200": {"description": "Done"}}}
        paths.setdefault(path, {})[method.lower()] = operation | described
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return {"openapi": "3.1.0", "info": {"title": title, "version": __version__}, **servers, "paths": paths}


def swagger_page(title: str) -> str:
    """A page beside ``openapi.json`` to try requests on."""
    return _SWAGGER.format(title=title, cdn=_CDN)


def redoc_page(title: str) -> str:
    """A page beside ``openapi.json`` to read."""
    return _REDOC.format(title=title, cdn=_CDN)


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's JSON schema, with each definition where it is used; our structs do not recurse."""
    (schema,), definitions = msgspec.json.schema_components([kind])

    def resolve(node: Any) -> Any:
        """Return a node with every reference replaced by the definition that it refers to."""
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                return resolve(definitions[reference.rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(each) for each in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    if (tag := kind.__struct_config__.tag_field) is not None:  # tells messages apart; no client sends it
        del resolved["properties"][tag]
        resolved["required"] = [name for name in resolved["required"] if name != tag]
    return resolved
