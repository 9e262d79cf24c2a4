"""The messages that release the engine's large memory, and take it again.

The frontend sends ``ReleaseMemory`` or ``ResumeMemory`` to the scheduler and gets a ``MemoryAnswer``. Rank 0
sends ``MemoryCommand`` to every rank, itself included, and gets a ``MemoryMoved`` to each.
"""

from __future__ import annotations

from typing import Literal

from segue.messages.weight_update import Call, RankCommand, RankReply

# The two kinds of memory that are large. weights: those that are served. kv_cache: the pool of KV pages.
MemoryTag = Literal["weights", "kv_cache"]


class ReleaseMemory(Call, frozen=True, tag=True, array_like=True):
    """Gives memory back to the system. Nothing is generated until it is there again."""

    tags: list[MemoryTag]
    backup: bool = False  # whether the weights are kept in the host's memory, and come back with the memory


class ResumeMemory(Call, frozen=True, tag=True, array_like=True):
    """Takes released memory again, at the same addresses."""

    tags: list[MemoryTag]


class MemoryAnswer(Call, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to both: what was moved; what had moved before is not named."""

    tags: list[MemoryTag]
    num_bytes: int = 0  # on all ranks together
    error: str = ""  # the name of a class in ``segue.errors``; empty: it is done
    message: str = ""


class UnmapMemory(RankCommand, frozen=True, kw_only=True):
    """Give this memory back, behind the steps that were sent before; what is away already stays away."""

    tags: list[MemoryTag]
    backup: bool


class MapMemory(RankCommand, frozen=True, kw_only=True):
    """Take this memory again: all of it or none. KV is zero, and so are weights without a backup."""

    tags: list[MemoryTag]


class MemoryMoved(RankReply, frozen=True, kw_only=True, tag=True):
    """A rank's answer to a command; the field ``num_bytes`` says how much it has moved."""


MemoryCommand = UnmapMemory | MapMemory
