"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from segue.errors import SegueError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesErrorFields(Struct):
    """The error of :class:`MessagesError`; its last two fields are those of OpenAI's errors."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessagesError(Struct):
    """An error of Anthropic's routes."""

    type: Literal["error"]
    error: MessagesErrorFields


def error_body(error: SegueError) -> dict[str, Any]:
    """Return the body of an error, which is also the data of a stream's event ``error``."""
    fields = {
        "type": _type_of(error.status),
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    return {"type": "error", "error": fields}


def _type_of(status: int) -> str:
    return _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
