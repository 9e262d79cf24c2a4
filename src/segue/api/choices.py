"""``n``: several choices per prompt. Each is a request of its own, and the prefix cache shares the prompt.

The choices of one prompt are neighbours. The first one computes the prompt; the others come behind it in the
queue, and find its pages in the cache, in the same step already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from segue.api.request_fields import check_rid
from segue.bootstrap_hosts import FAKE_HOST
from segue.errors import InvalidRequestError, UnsupportedFieldError, short_repr
from segue.frontend.choices import MAX_CHOICES
from segue.frontend.request import GenerateRequest

NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_MOST_ROOMS = 1 << 63


def num_choices(n: int | None, best_of: int | None = None) -> int:
    """Return how many choices a body asks for; raises UnsupportedFieldError for another ``best_of``."""
    count = 1 if n is None else n
    if best_of is not None and best_of != count:
        text = f"best_of={short_repr(best_of)} is supported only where it is n, which is {count}"
        raise UnsupportedFieldError(f"{text}; leave it out", param="best_of")
    return count


def in_choices(
    requests: Sequence[GenerateRequest], n: int, most: int, separator: str = "-"
) -> list[GenerateRequest]:
    """Return ``n`` requests for each prompt; those of the first prompt come first.

    The choices of the prompt ``rid`` are ``rid-0``, ``rid-1``, …, and aborting ``rid`` aborts all of them. A
    choice that is handed over has the prompt's room plus its own number.

    Args:
        requests: one per prompt.
        n: choices of each.
        most: requests that may go in one call.
        separator: of a rid and the number of a choice.

    Raises:
        InvalidRequestError: there are more than ``most``, a rid is too long, or two choices have one room.
    """
    if n == 1:
        return list(requests)
    if (count := len(requests) * n) > most:
        rule = f"at most {most} (--max-queued-requests) go in one call"
        text = f"n={n} for {len(requests)} prompts makes {count} choices; {rule}"
        raise InvalidRequestError(text, param="n")
    found = [_choice(request, i, separator) for request in requests for i in range(n)]
    rooms = [each.bootstrap.room for each in found if each.bootstrap and each.bootstrap.host != FAKE_HOST]
    if len(set(rooms)) != len(rooms):
        text = f"with n={n}, every prompt needs {n} rooms of its own, from its bootstrap_room upwards"
        raise InvalidRequestError(f"{text}; the rooms of two prompts overlap", param="bootstrap_room")
    return found


def _choice(request: GenerateRequest, number: int, separator: str) -> GenerateRequest:
    """Return choice ``number`` of a prompt."""
    bootstrap = request.bootstrap
    if bootstrap is not None:
        bootstrap = replace(bootstrap, room=(bootstrap.room + number) % _MOST_ROOMS)
    rid = f"{request.rid}{separator}{number}"
    check_rid(rid)
    return replace(request, rid=rid, group=request.rid, choice=number, bootstrap=bootstrap)
