"""The OpenAPI page: bodies are parsed by us, so their schemas are given by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from segue.api.validation import inlined


def body_schema(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is ``model``, its definitions inside."""
    schema = inlined(model.model_json_schema())
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def query_schema(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose query is ``model``."""
    properties = inlined(model.model_json_schema()).get("properties", {})
    return {
        "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    }
