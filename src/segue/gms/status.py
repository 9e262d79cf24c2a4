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
    currents: dict[int, dict[str, str]] = {}  # the version, by generation and cohort
    for name, cohort in state.cohorts.items():
        if cohort.current is not None:
            currents.setdefault(cohort.current, {})[name] = cohort.version
    return {
        "incarnation": service.incarnation,
        "devices": service.store.bytes_by_device(),
        "num_slabs": service.store.num_slabs,
        "cohorts": {
            name: {"current": each.current, "version": each.version, "epoch": each.epoch}
            for name, each in state.cohorts.items()
        },
        "generations": [
            {
                "generation": number,
                "state": "committed",
                "version": ", ".join(dict.fromkeys(currents.get(number, {}).values())) or found.version,
                "cohorts": list(currents.get(number, {})),
                "bytes": sum(sum(slabs.sizes) for _, slabs in service.store.of(number)),
                "readers": [service.name(session) for session in state.readers(number)],
            }
            for number, found in state.generations.items()
        ]
        + [
            {
                "generation": lease.generation,
                "state": "being written",
                "version": "",
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
