"""Bodies of errors."""

from __future__ import annotations

import pytest

from segue.router.answers import code_of
from tests.router.fake_servers import overloaded


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "m", "code": "draining"}}', "draining"),
        (b'{"error": {"message": "m", "code": null}}', None),
        (overloaded(), "overloaded"),
        (b'{"type": "server_error", "code": 503}', None),
        (b'{"type": "server_error", "code": 503, "error_code": null}', None),
        (b"[]", None),
        (b"3", None),
        (b"<html>", None),
    ],
)
def test_the_code_of_an_error_is_found_in_both_forms(body: bytes, code: str | None) -> None:
    assert code_of(body) == code
