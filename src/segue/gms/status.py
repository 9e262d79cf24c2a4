"""The state of the memory service for people and tools."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.gms.service import MemoryService


def status_of(service: MemoryService) -> dict[str, object]:
    """Return the state for people and tools."""
    state, now = service.state, time.monotonic()
    writing = [lease for lease in state.leases.values() if lease.is_rw]
    currents: dict[int, list[str]] = {}
    for name, cohort in state.cohorts.items():
        if cohort.current is not None:
            currents.setdefault(cohort.current, []).append(name)
    return {
        "incarnation": service.incarnation,
        "devices": service.store.bytes_by_device(),
        "num_slabs": service.store.num_slabs,
        "cohorts": {name: {"current": c.current, "epoch": c.epoch} for name, c in state.cohorts.items()},
        "generations": [
            {
                "generation": number,
                "state": "committed",
                "cohorts": currents.get(number, []),
                "bytes": sum(sum(slabs.sizes) for _, slabs in service.store.of(number)),
                "readers": [service.name(session) for session in state.readers(number)],
            }
            for number in state.generations
        ]
        + [
            {
                "generation": lease.generation,
                "state": "being written",
                "cohorts": [lease.cohort],
                "bytes": sum(sum(slabs.sizes) for _, slabs in service.store.of(lease.generation)),
                "readers": [service.name(session) for session in lease.sessions],
            }
            for lease in writing
        ],
        "kv": service.kv.rows(),
        "waiting": [service.name(ask.session) for ask in state.waiting],
        "sessions": [
            {
                "session": number,
                "pid": session.pid,
                "tag": session.hello.tag,
                "cohort": session.hello.cohort,
                "engine": session.hello.engine,
                "rank": session.hello.rank,
                "device": session.hello.device,
                "seconds": round(now - session.since, 1),
            }
            for number, session in service.sessions.items()
        ],
    }
