"""The messages of an engine's life: the frontend sends them to rank 0, which sends them on to every rank.

Each rank answers a :class:`PingRanks` and a :class:`WakeRanks` by itself, with a :class:`RankAnswer`, which
rank 0 sends on to the frontend.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.messages.weight_update import Call

# Why an engine with --warm-kv takes no KV pages over; see `worker.warm_kv`.
ColdReason = Literal["private", "size", "fresh", "journal", "facts", "memory", "weights", "empty"]


class PingRanks(Call, frozen=True, tag=True, array_like=True):
    """Asks every rank whether it lives.

    With ``is_deep`` a rank first runs a tiny operation on the stream of the steps, and waits for it. That
    shows that its device works; but it also waits for all steps before it, so it is for ranks without steps.
    """

    is_deep: bool


class WakeRanks(Call, frozen=True, tag=True, array_like=True):
    """Has every rank prepare to serve. An answer means that the rank has all of its memory.

    A rank that has not received :class:`EndWake` after ``timeout_s`` seconds ends itself; 0: there is no
    limit. ``epoch`` is that of the engine in its cohort; 0: it is in none.
    """

    timeout_s: float
    epoch: int = 0


class EndWake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Says that the engine is awake. There is no answer."""


class HeldKV(msgspec.Struct, frozen=True, array_like=True):
    """The KV memory that a rank has from the memory service."""

    before: str  # its name under the engine before, unlike any other
    now: str  # its name from now on
    is_fresh: bool  # whether no engine had prepared it before
    epoch: int  # with which this engine has it


class RankAnswer(Call, frozen=True, tag=True, array_like=True):
    """The answer of one rank to a ping or a wake."""

    rank: int
    error: str = ""  # why the rank cannot wake; "": it can
    kv: HeldKV | None = None  # of a rank that has woken; None: its KV memory is its own


LifeMessage = PingRanks | WakeRanks | EndWake
