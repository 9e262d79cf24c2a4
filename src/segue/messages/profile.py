"""The messages that profile an engine's steps.

The frontend sends ``StartProfile`` and ``StopProfile`` to the scheduler and gets a ``ProfileAnswer``. Rank 0
sends ``ProfileCommand`` to every rank, itself included, and gets a ``Traced`` to each.
"""

from __future__ import annotations

from typing import Literal

from segue.messages.weight_update import Call, RankCommand, RankReply

Activity = Literal["CPU", "GPU"]


class StartProfile(Call, frozen=True, tag=True, array_like=True, kw_only=True):
    """Begins to trace the steps of every rank."""

    path: str  # of the traces, without the rank and the ending of each
    activities: list[Activity]
    num_steps: int | None = None  # after which the profile ends by itself; None: at `StopProfile`
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(Call, frozen=True, tag=True, array_like=True):
    """Ends the profile, and writes a trace per rank."""


class ProfileAnswer(Call, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to both."""

    error: str = ""  # why it was not done; empty: it was
    files: tuple[str, ...] = ()  # the traces that were written, by rank


class BeginTrace(RankCommand, frozen=True, kw_only=True):
    """Trace the steps that are sent from now on."""

    path: str
    activities: list[Activity]
    with_stack: bool
    record_shapes: bool


class EndTrace(RankCommand, frozen=True, kw_only=True):
    """Trace no further steps, and write the trace."""


class Traced(RankReply, frozen=True, kw_only=True, tag=True):
    """A rank's answer to a command; the field ``file`` names the trace that it has written."""


ProfileCommand = BeginTrace | EndTrace
