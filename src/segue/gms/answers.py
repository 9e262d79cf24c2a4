"""What the memory service answers for each effect of the lock, and how it words its refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.gms import messages as wire
from segue.gms.lock_state import (
    AbortEvent,
    BeatEvent,
    ClaimEvent,
    DoneEffect,
    GrantEffect,
    RefuseEffect,
    SealEvent,
    WeightsEvent,
)
from segue.gms.manifest import decode_manifest, difference
from segue.gms.session import GmsSession

if TYPE_CHECKING:
    from segue.gms.service import MemoryService

REFUSALS = {
    "committed": "the cohort has weights already, which a stray load must not replace; ask to read them",
    "nothing": "the cohort has no weights that could be updated",
    "stale_epoch": "a newer engine of the cohort has taken over; this one must end",
    "timeout": "the weights were not there in time; see `segue gms status` for who loads them",
    "busy": "this session waits already, or has a lease",
    "lease": "this session has no such lease to write; the service may have been started again",
    "rank": "this rank is taken, is not of this lease, or may not do this",
    "behind": "another engine of the cohort has just changed the weights, and this one has not taken them "
    "over yet; retry the update",
    "generation": "there is no such committed generation, or it is not the cohort's current one",
    "other": "the cohort has other weights than this engine, so one of them is stale; this one must end",
    "slabs": "the manifest is not one of the rank's slabs",
}


def answer(
    service: MemoryService,
    effect: GrantEffect | RefuseEffect | DoneEffect,
    call: int,
    event: WeightsEvent,
    session: GmsSession,
) -> wire.Reply:
    """Return the reply to a session's call, which the effect of an event answers."""
    match effect:
        case GrantEffect():
            service.note_event(f"{effect.mode}_granted", f"generation {effect.generation} to {session.name}")
            found, cohort = service.state.generations.get(effect.generation), session.hello.cohort
            version = "" if found is None else service.state.version_in(cohort, effect.generation)
            return wire.WeightsGranted(
                call=call,
                lease=effect.lease,
                generation=effect.generation,
                mode=effect.mode,
                parent=effect.parent,
                is_loaded=effect.parent is None if found is None else found.is_loaded,
                weight_version=version,
                model_path=None if found is None else found.model_path,
            )
        case RefuseEffect():
            return _refusal(service, effect, call, session)
        case DoneEffect():
            if isinstance(event, SealEvent):
                service.note_event("sealed", f"generation {effect.number} by {session.name}")
                return wire.RankSealed(call=call, missing=list(effect.missing))
            if isinstance(event, ClaimEvent):
                service.note_event("epoch_claimed", f"{effect.number} by {session.name}")
                return wire.EpochClaimed(call=call, epoch=effect.number)
            if isinstance(event, AbortEvent | BeatEvent):
                return wire.CallDone(call=call)
            return wire.GenerationNumber(call=call, generation=effect.number)


def _refusal(
    service: MemoryService, effect: RefuseEffect, call: int, session: GmsSession
) -> wire.CallRefused:
    text, field, have, want = REFUSALS.get(effect.code, ""), None, None, None
    if effect.code == "unsealed":
        text = f"ranks {', '.join(map(str, effect.ranks))} have not sealed their slabs"
    elif effect.code == "pinned":
        names = ", ".join(service.name(number) for number in effect.sessions)
        text = f"generation {effect.generation}, which is retired, is still read by {names}"
    elif effect.code == "mismatch" and effect.generation is not None and session.manifest is not None:
        served = decode_manifest(service.store.ranks[effect.generation, 0].manifest)
        found = difference(served.identity, session.manifest.identity)
        if found is not None:
            field, have, want = found.field, found.have, found.want
        text = (
            f"cohort {session.hello.cohort!r} has other weights: {field} is {have}, and this engine has "
            f"{want}; use the same model and options, or another --cohort"
        )
    service.note_event("refused", f"{effect.code}: {session.name}: {text}")
    return wire.CallRefused(call=call, code=effect.code, text=text, field=field, have=have, want=want)
