"""The OpenAPI page: bodies are parsed by us, so their schemas are given by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_schema(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is ``model``, its definitions inside."""
    schema = _inlined(model.model_json_schema())
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def query_schema(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose query is ``model``."""
    properties = _inlined(model.model_json_schema()).get("properties", {})
    return {
        "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    }


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace each ``$ref`` by what it refers to; our models do not recurse."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                return resolve(definitions[reference.rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(each) for each in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
