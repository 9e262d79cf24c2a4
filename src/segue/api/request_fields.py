"""What every generating route takes beside the prompt and the options: its id, priority, and cache's salt."""

from __future__ import annotations

from typing import TypeVar

from segue.api.bootstrap import BootstrapFields
from segue.errors import InvalidRequestError, invalid_value, short_repr
from segue.frontend.request import MAX_PRIORITY

MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024

Rid = TypeVar("Rid", bound=str | list[str])


class RequestFields(BootstrapFields, frozen=True, kw_only=True):
    """Fields of a body; null is the default. ``rid``, and its other name, are those of each API."""

    # The larger runs first; vLLM has the opposite order, and so has its route for token ids.
    priority: int | None = None
    cache_salt: str | None = None  # requests share cached KV with those of the same salt only


def check_fields(body: RequestFields) -> tuple[int, str]:
    """Return the priority and the salt.

    Raises:
        InvalidRequestError: one of them breaks its rule.
    """
    priority, salt = body.priority or 0, body.cache_salt or ""
    if abs(priority) > MAX_PRIORITY:
        rule = f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise invalid_value("priority", priority, rule)
    _check_text("cache_salt", salt, MAX_SALT_CHARS)
    return priority, salt


def given_rid(rid: Rid | None, request_id: Rid | None) -> Rid | None:
    """Return the id that a client has given, under either name; empty: it has given none.

    Raises:
        InvalidRequestError: the two contradict each other.
    """
    if rid and request_id and rid != request_id:
        both = f"rid={short_repr(rid)} and request_id={short_repr(request_id)}"
        raise InvalidRequestError(f"{both} contradict each other; give one", param="request_id")
    return rid or request_id


def check_rid(rid: str, param: str = "rid") -> None:
    """Raise InvalidRequestError for a request id, the field ``param``, that is too long or cannot be sent."""
    _check_text(param, rid, MAX_RID_CHARS)


def _check_text(name: str, text: str, most: int) -> None:
    if len(text) > most:
        problem = f"{name}={short_repr(text)} has {len(text)} characters; at most {most} are allowed"
        raise InvalidRequestError(problem, param=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid_value(name, text, "must be valid Unicode") from None
