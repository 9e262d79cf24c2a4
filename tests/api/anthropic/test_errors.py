"""Errors in Anthropic's form, by their status."""

from __future__ import annotations

import pytest

from segue.api.anthropic.errors import error_body
from segue.errors import (
    AuthenticationError,
    EngineDeadError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestTooLargeError,
    SegueError,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("no", param="top_k"), "invalid_request_error"),
        (AuthenticationError("no"), "authentication_error"),
        (ForbiddenError("no"), "permission_error"),
        (ModelNotFoundError("no"), "not_found_error"),
        (RequestTooLargeError("no"), "request_too_large"),
        (OverloadedError("no"), "overloaded_error"),
        (EngineDeadError("no"), "overloaded_error"),
        (SegueError("no"), "api_error"),
    ],
)
def test_the_type_is_the_one_of_the_status(error: SegueError, kind: str) -> None:
    fields = {"type": kind, "message": "no", "param": error.param, "code": error.code}
    assert error_body(error) == {"type": "error", "error": fields}
