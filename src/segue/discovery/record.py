"""What an engine that serves says about itself where routers look for it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from segue.messages.fleet import Role

DISCOVERY_PROTOCOL = 1


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that serves.

    A record says that requests may be sent to ``url`` now. So there is none of an engine that waits to take
    over: an engine puts its record once it accepts connections, and its epoch is its own by then.
    """

    protocol: int = DISCOVERY_PROTOCOL
    cohort: str  # engines that can serve in each other's place; only the highest epoch of them serves
    engine: str  # the engine's name in its cohort
    epoch: int  # that the engine has claimed; at least 1
    url: str  # of its HTTP server, as routers reach it
    system_url: str = ""  # of its health routes; "": it has none of their own
    model: str = ""
    tp: int = 1
    role: Role = "both"
    generation: int = 0  # of the weights in the memory service; 0: there is no service
    weight_version: str = ""
    boot_id: str = ""  # of its host
    started_at: float = 0.0  # seconds since 1970


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(EngineRecord).decode


def pack_record(record: EngineRecord) -> bytes:
    """Returns a record as JSON."""
    return _encode(record)


def unpack_record(data: bytes | str) -> EngineRecord | None:
    """Returns a record; None: it is not one of this version's."""
    try:
        record = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record if record.protocol == DISCOVERY_PROTOCOL else None


def highest(records: Iterable[EngineRecord]) -> list[EngineRecord]:
    """Returns the record with the highest epoch of each cohort, sorted by cohort."""
    best: dict[str, EngineRecord] = {}
    for record in records:
        known = best.get(record.cohort)
        if known is None or record.epoch > known.epoch:
            best[record.cohort] = record
    return [best[cohort] for cohort in sorted(best)]
