"""The messages of weight updates that cross process borders.

The frontend sends ``WeightCall`` to the scheduler and gets a ``WeightAnswer``. Rank 0 sends ``WeightCommand``
to every rank, itself included, and gets a ``RankReply`` to each command, and ``Received`` in between.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages import weight_operations as operations


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call of the frontend that the scheduler answers, or the answer: both carry the same number."""

    call: int


class WeightCall(Call, frozen=True, tag=True, array_like=True):
    """An operation that a client asks for."""

    operation: operations.WeightOperation
    roots: list[str] | None = None  # directories that a checkpoint may be read from; None: any
    from_hub: bool = True  # whether a checkpoint may be named by its hub id


class WithdrawCall(Call, frozen=True, tag=True, array_like=True):
    """The client of a :class:`WeightCall` has gone; this ends the joining of a group, and no other call."""


class WeightAnswer(Call, frozen=True, tag=True, array_like=True):
    """The answer to :class:`WeightCall`; the content of ``fields`` depends on the request."""

    success: bool
    message: str = ""
    fields: dict[str, Any] = {}


class EndedUpdate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """When a weight update went through its phases. Times are of the host's monotonic clock, in seconds."""

    id: str
    kind: str  # as `UpdateSession` has it
    began: float
    ended: float
    times: dict[str, float]  # phase, "WRITING" or "SERVED" -> when it began first
    num_bytes: int
    error: str | None = None  # why it failed; None: its weights are served


class WeightNotice(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The state of the weights that the frontend shows without asking; it is sent with every change."""

    version: str
    state: str = "idle"  # that of `WeightMachine`
    poisoned: str | None = None  # why the weights are poisoned and nothing is generated; None: they are not
    missing: str | None = None  # what is missing of released weights, so that requests wait; None: nothing
    generation: str | None = None  # what tells shared weights apart; None: they are this engine's own
    model_path: str | None = None  # the last checkpoint that was committed; None: none since the start
    num_committed: int = 0
    num_failed: int = 0
    last: dict[str, Any] = {}  # figures of the last committed update
    ended: EndedUpdate | None = None  # the update that ended last; None: none has


# --- rank 0 -> every rank; each is answered by a `RankReply` with its `call` ---


class RankCommand(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A command to every rank."""

    call: int = 0  # its number, which the sender sets


class _SessionCommand(RankCommand, frozen=True, kw_only=True):
    """A command of one session; the first command of `AddCommand` with a new number opens the session."""

    session: int  # its number


class Join(RankCommand, frozen=True, kw_only=True):
    """Join a group, as rank ``group.rank_offset`` + the tensor-parallel rank.

    A living group of this name that was joined with the same parameters is kept; a dead one is replaced.
    """

    group: operations.Group
    timeout_s: float


class StopJoin(RankCommand, frozen=True, kw_only=True):
    """Stop joining a group for the reason ``why``; the reply to its :class:`Join` is then an error."""

    group: operations.Group
    why: str


class Leave(RankCommand, frozen=True, kw_only=True):
    """Leave a group."""

    name: str


class Stage(_SessionCommand, frozen=True, kw_only=True):
    """Check a manifest and take memory for its tensors; no collective operation runs.

    The reply lists the problems. If the session exists, the tensors are added to it; the same goes for
    :class:`Load` and :class:`Take`.
    """

    manifest: operations.Manifest


class Receive(_SessionCommand, frozen=True, kw_only=True):
    """Receive the tensors of the last :class:`Stage`; the reply comes once the first broadcast is entered.

    ``gloo_timeout_s``: a receive that cannot be cancelled any more ends by itself after this time.
    """

    gloo_timeout_s: float = 86_400.0


class OpenGeneration(_SessionCommand, frozen=True, kw_only=True):
    """Begin to write the next generation of shared weights: rank 0 asks the memory service for a lease.

    The ``fields`` of its reply have the ``lease``. The other ranks do nothing yet.
    """


class JoinGeneration(_SessionCommand, frozen=True, kw_only=True):
    """Join the lease of rank 0, which has done so already."""

    lease: int


class SealGeneration(_SessionCommand, frozen=True, kw_only=True):
    """Make this rank's part of the next generation final. The session can only be committed or discarded."""


class FlipGeneration(_SessionCommand, frozen=True, kw_only=True):
    """Make the sealed generation the current one of the cohort, which rank 0 does; a :class:`Commit` follows.

    ``model_path``: where the weights were read; None: they were sent.
    """

    version: str
    model_path: str | None = None


class FetchGeneration(RankCommand, frozen=True, kw_only=True):
    """Get a generation that another engine has committed, and check its bytes, while steps go on."""

    generation: int


class AdoptGeneration(RankCommand, frozen=True, kw_only=True):
    """After the steps sent before, serve the generation that was fetched last."""


class DropGeneration(RankCommand, frozen=True, kw_only=True):
    """Give up the generation that was fetched last, because another rank could not fetch it."""


class RenameWeights(RankCommand, frozen=True, kw_only=True):
    """Give the shared weights another version, which rank 0 does."""

    version: str


class Load(_SessionCommand, frozen=True, kw_only=True):
    """Read a whole checkpoint into staging memory; :class:`WeightCall` explains the other fields."""

    request: operations.UpdateFromDisk
    roots: list[str] | None = None
    from_hub: bool = True


class Take(_SessionCommand, frozen=True, kw_only=True):
    """Take the tensors of a payload; with ``copy`` the client may overwrite them after the reply."""

    payload: str  # this rank's, in base64
    copy: bool


class Commit(_SessionCommand, frozen=True, kw_only=True):
    """After the steps sent before, copy all tensors of the session onto the served weights.

    Shared weights are not written: the slabs of the new generation take the places of the served ones.

    The reply's ``fields`` have ``touched``: whether served weights were written, even if the commit failed.
    They have ``num_missing`` and ``missing``, the count and one name of the tensors that are still to be sent
    after the weights were released or reset, if there are any.
    """


class Discard(_SessionCommand, frozen=True, kw_only=True):
    """Drop a session and stop receiving; its group is dead if a broadcast was entered but has not ended."""


class Inspect(RankCommand, frozen=True, kw_only=True):
    """Read the served weights between two steps, or overwrite them while nothing runs."""

    request: operations.Inspection


AddCommand = OpenGeneration | Stage | Load | Take  # what opens a session, or adds tensors to it
SessionCommand = AddCommand | JoinGeneration | Receive | SealGeneration | FlipGeneration | Commit | Discard
GenerationCommand = FetchGeneration | AdoptGeneration | DropGeneration | RenameWeights
WeightCommand = Join | StopJoin | Leave | SessionCommand | GenerationCommand | Inspect


class RankReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A rank's answer to a command; it is done if ``errors``, a list of sentences, is empty."""

    rank: int
    call: int
    errors: list[str] = []
    fields: dict[str, Any] = {}


class Received(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A rank's progress report: sent at the first byte, after each bucket, and at the end.

    With ``done`` everything was received and checked; with ``error`` the receive has failed. Deadlines are
    kept by rank 0, which sends :class:`Discard`.
    """

    rank: int
    session: int
    num_buckets: int
    num_bytes: int
    done: bool = False
    error: str | None = None


class WeightsChanged(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A notice of the memory service: another engine has changed the shared weights, or their version."""

    generation: int
    version: str
    model_path: str | None = None
