"""What calls about an engine's place among others are given, and what ``POST /role`` answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from segue.api.control import MAX_S
from segue.messages.fleet import Role

ROLE_S = 60.0  # that the work of the old role has to end


class RoleRequest(Struct, frozen=True, kw_only=True):
    """``POST /role``: the role, and the seconds after which it stays what it is."""

    role: Role
    timeout: Annotated[float, Meta(ge=0, le=MAX_S)] = ROLE_S


class RoleChanged(Struct, frozen=True, kw_only=True):
    """The answer to ``POST /role``."""

    role: Role
    kv_address: str | None  # where KV is handed over; None: nowhere


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /drain``: whether an engine refuses new requests, or a router sends it none."""

    drain: bool = True
