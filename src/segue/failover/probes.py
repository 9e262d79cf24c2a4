"""What the probes of a supervisor, such as the kubelet's, are answered in each state of an engine.

Each probe has a meaning of its own. *Startup*: the model is loaded. *Live*: the process is worth keeping.
*Ready*: requests are taken. Each function returns why the answer is no, or None if it is yes.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue.failover.life import LifeState

PARKED_SILENCE_S = 5.0  # that the ranks of an engine which stands by may be silent
PROGRESS_S = 60.0  # that an engine which loads its model may go without progress
SERVING = frozenset({LifeState.ACTIVE, LifeState.DRAINED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What is known of an engine at one moment."""

    state: LifeState
    is_late: bool = False  # whether the state lasts longer than it may
    silent_s: float = 0.0  # since the last answer of the rank that has been silent for longest
    stuck_s: float | None = None  # since the last progress of the start; None: progress does not count
    is_healthy: bool = True  # by `SystemHealth`
    trouble: str = ""  # why no requests are taken; "": they are
    hang_timeout_s: float  # that the ranks of an engine which serves may be silent


def why_not_started(vitals: Vitals) -> str | None:
    """Returns why the engine has not started."""
    match vitals.state:
        case LifeState.INIT:
            return "the model is being loaded"
        case LifeState.DEAD:
            return "the engine is dead"
        case _:
            return None


def why_not_live(vitals: Vitals) -> str | None:
    """Returns why the engine should be killed, or, while it starts, why nobody can tell that it gets on."""
    silent = f"a worker rank has not answered for {vitals.silent_s:.1f} s"
    match vitals.state:
        case LifeState.INIT:
            if vitals.stuck_s is None:
                return "the model is being loaded"
            stuck = f"the start has made no progress for {vitals.stuck_s:.0f} s"
            return stuck if vitals.stuck_s > PROGRESS_S else None
        case LifeState.STANDBY:
            return silent if vitals.silent_s > PARKED_SILENCE_S else None
        case LifeState.WAKING:
            return "the wake takes longer than --wake-timeout-s" if vitals.is_late else None
        case LifeState.ACTIVE | LifeState.DRAINED:
            if not vitals.is_healthy:
                return "an endpoint is not ready (see endpoints)"
            return silent if vitals.silent_s > vitals.hang_timeout_s else None
        case LifeState.DRAINING:
            return "requests have had --drain-s seconds to end" if vitals.is_late else None
        case LifeState.DEAD:
            return "the engine is dead"


def why_not_ready(vitals: Vitals) -> str | None:
    """Returns why the engine takes no requests."""
    if vitals.state is LifeState.ACTIVE:
        return vitals.trouble or None
    return vitals.trouble or f"the engine is in the state {vitals.state.name.lower()}"
