"""What crosses process borders for weight updates.

Conversations: frontend -> scheduler (``WeightCall``, answered by ``WeightAnswer``), rank 0 -> every rank
(``WeightCommand``, itself included), and back (``RankReply`` to each command, and ``Received`` in between).
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.weight_operations import CheckWeights, GetWeights, Group, Manifest, WeightOperation


class _Struct(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    pass


class _Tagged(_Struct, frozen=True, tag=True):
    pass


class WeightCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An operation that a client asks for."""

    call: int
    operation: WeightOperation
    sent: float  # when, by the host's monotonic clock
    roots: list[str] | None = None  # directories that a checkpoint may be read from; None: any
    from_hub: bool = True  # whether a checkpoint may be named by its hub id


class WithdrawCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody waits for the answer to a :class:`WeightCall`; only joining a group ends with that."""

    call: int


class WeightAnswer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`WeightCall`; what ``fields`` has depends on the request."""

    call: int
    success: bool
    message: str = ""
    fields: dict[str, Any] = {}


class WeightNotice(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """What the frontend shows of the weights without asking; sent with every change."""

    version: str
    state: str = "idle"  # of the open session
    poisoned: str | None = None  # why nothing is generated
    model_path: str | None = None  # of the last checkpoint that was loaded, none since the start
    num_committed: int = 0
    num_failed: int = 0
    last: dict[str, Any] = {}  # figures of the last update that became live


# --- rank 0 -> every rank; each is answered by a `RankReply` with its `call` ---


class Join(_Tagged, frozen=True):
    """Join a group, as rank ``group.rank_offset`` + the tensor-parallel rank.

    A group of this name that is alive and was joined with the same parameters is kept, a dead one replaced.
    """

    call: int
    group: Group
    timeout_s: float


class StopJoin(_Tagged, frozen=True):
    """Give up joining a group, because of ``why``; its :class:`Join` is answered as one that failed."""

    call: int
    group: Group
    why: str


class Leave(_Tagged, frozen=True):
    """Leave a group."""

    call: int
    name: str


class Stage(_Tagged, frozen=True):
    """Check a manifest and take memory for what it brings; nothing collective.

    The reply lists the problems. A session that exists is added to, as with :class:`Load` and :class:`Take`.
    """

    call: int
    session: int
    manifest: Manifest


class Receive(_Tagged, frozen=True):
    """Receive what was staged; the reply says that a thread has entered the first broadcast.

    ``longest_s``: what may be left of a receive that nobody can end any more ends by itself after so long.
    """

    call: int
    session: int
    longest_s: float | None = None


class Load(_Tagged, frozen=True):
    """Read a whole checkpoint into memory of its own; see :class:`UpdateFromDisk`."""

    call: int
    session: int
    model_path: str
    load_format: str | None
    roots: list[str] | None = None
    from_hub: bool = True


class Take(_Tagged, frozen=True):
    """Take the tensors of a payload; with ``copy`` they may change once this is answered."""

    call: int
    session: int
    payload: str  # this rank's, in base64
    load_format: str | None
    copy: bool


class Commit(_Tagged, frozen=True):
    """Behind the steps sent before, copy all that the session brought onto the served weights.

    The reply's ``fields`` have ``touched``: whether served weights were written, also if it failed.
    """

    call: int
    session: int


class Discard(_Tagged, frozen=True):
    """Forget a session: stop receiving (its group is dead if a broadcast was entered and not ended)."""

    call: int
    session: int


class Inspect(_Tagged, frozen=True):
    """Look at the served weights between two steps."""

    call: int
    request: GetWeights | CheckWeights


WeightCommand = Join | StopJoin | Leave | Stage | Receive | Load | Take | Commit | Discard | Inspect


class RankReply(_Tagged, frozen=True):
    """A rank's answer to a command; ``errors``: what is wrong, in words; empty: done."""

    rank: int
    call: int
    errors: list[str] = []
    fields: dict[str, Any] = {}


class Received(_Tagged, frozen=True):
    """How far a rank has received: at the first byte, behind each bucket, and at the end.

    ``done``: all is there and was checked. With an error it is over. Deadlines are kept by rank 0, which
    sends :class:`Discard`.
    """

    rank: int
    session: int
    num_buckets: int
    num_bytes: int
    done: bool = False
    error: str | None = None
