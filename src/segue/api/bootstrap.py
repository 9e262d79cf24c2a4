"""The fields of a body that say where the prefill engine and the decode engine of its prompts meet.

They have SGLang's names and meaning: whoever sends a request to both engines gives both the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from segue.bootstrap_hosts import FAKE_HOST
from segue.errors import InvalidRequestError, invalid_value
from segue.frontend.request import Bootstrap

# What the fields may be, for errors.
BOOTSTRAP_RULES = {
    "bootstrap_host": "a string or a list of strings",
    "bootstrap_port": "an integer or a list of integers",
    "bootstrap_room": "an integer or a list of integers",
}


class BootstrapFields(Struct, frozen=True, kw_only=True):
    """A body's fields: host and room, or none of them; a list has one value per prompt."""

    bootstrap_host: str | list[str] | None = None  # of the prefill engine
    bootstrap_port: int | list[int | None] | None = None  # its port, by default this engine's own option
    bootstrap_room: int | list[int] | None = None  # 63 bits that no other prompt has


def bootstraps(body: BootstrapFields, count: int) -> Sequence[Bootstrap | None]:
    """Return where each of ``count`` prompts' engines meet; one value of a field holds for all prompts.

    Raises:
        InvalidRequestError: a field is missing, has another number of values, or breaks its rule.
    """
    fields = {
        "bootstrap_host": body.bootstrap_host,
        "bootstrap_port": body.bootstrap_port,
        "bootstrap_room": body.bootstrap_room,
    }
    missing = [name for name in ("bootstrap_host", "bootstrap_room") if fields[name] is None]
    if len(missing) == 2 and body.bootstrap_port is None:
        return [None] * count
    if missing:
        text = f"{missing[0]} is missing; give bootstrap_host and bootstrap_room, or no bootstrap field"
        raise InvalidRequestError(text, param=missing[0])
    columns: list[list[Any]] = []
    for name, value in fields.items():
        column = value if isinstance(value, list) else [value] * count
        if len(column) != count:
            text = f"{name} has {len(column)} values for {count} prompts; give one each"
            raise InvalidRequestError(text, param=name)
        columns.append(column)
    hosts, ports, rooms = columns
    for port, room in zip(ports, rooms, strict=True):
        if port is not None and not 0 < port <= 65535:
            raise invalid_value("bootstrap_port", port, "must be between 1 and 65535")
        if not 0 <= room < 1 << 63:
            raise invalid_value("bootstrap_room", room, "must be between 0 and 2**63 - 1")
    used = [room for host, room in zip(hosts, rooms, strict=True) if host != FAKE_HOST]
    if len(set(used)) != len(used):
        raise InvalidRequestError("every prompt needs a bootstrap_room of its own", param="bootstrap_room")
    return [Bootstrap(host=h, port=p, room=r) for h, p, r in zip(hosts, ports, rooms, strict=True)]
