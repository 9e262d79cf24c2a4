"""What crosses process borders for weight updates.

Conversations: frontend -> scheduler (``WeightCall``, answered by ``WeightAnswer``), rank 0 -> every rank
(``WeightCommand``, itself included), and back (``RankReply`` to each command, and ``Received`` in between).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StagingPlace = Literal["auto", "device", "host"]
Backend = Literal["nccl", "gloo"]


class _Struct(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    pass


class _Tagged(_Struct, frozen=True, tag=True):
    pass


class Bucket(_Struct, frozen=True):
    """Tensors sent together; the three lists are parallel."""

    names: list[str]  # Hugging Face names
    dtypes: list[str]  # as torch names them, "torch." before it or not
    shapes: list[list[int]]


class Group(_Struct, frozen=True):
    """A process group that a trainer, its rank 0, hosts."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int  # rank 0 of this engine has this rank there
    world_size: int
    backend: Backend


class Manifest(_Struct, frozen=True):
    """All that a trainer is going to broadcast, in order."""

    group_name: str
    buckets: list[Bucket]
    flattened: bool = (
        False  # one uint8 broadcast a bucket, its tensors end to end; else one broadcast a tensor
    )
    checksums: dict[str, int] | None = None  # tensor name -> `segue.weight_update.checksum` of it as sent
    partial: bool = False  # not every weight has to be there
    staging: StagingPlace = "auto"
    discard: bool = False  # take the broadcasts from the wire and keep nothing: the sender must not hang


# --- frontend -> scheduler ---


class JoinGroup(_Tagged, frozen=True):
    """Meet the trainer in a group; within ``timeout_s``, a store that it hosts included."""

    group: Group
    timeout_s: float = 300.0


class LeaveGroup(_Tagged, frozen=True):
    """Leave a group; an open session of it is aborted."""

    name: str


class Prepare(_Tagged, frozen=True):
    """Open a session and start to receive; answered once every rank waits for the first broadcast."""

    manifest: Manifest
    session_id: str | None = None
    weight_version: str | None = None
    num_buckets: int | None = None  # as the client counts them
    timeout_s: float = 300.0  # of `Complete`, and of silence behind the first byte
    arm_timeout_s: float = 3600.0  # of silence before it


class Complete(_Tagged, frozen=True):
    """Wait until all has been received, then commit it, unless that is left to :class:`CommitSession`."""

    group_name: str | None = None
    session_id: str | None = None
    flush_cache: bool = False
    commit: bool = True


class CommitSession(_Tagged, frozen=True):
    """Commit what :class:`Complete` has waited for."""

    session_id: str | None = None
    flush_cache: bool = False


class AbortSession(_Tagged, frozen=True):
    """End the open session; the weights stay as they are."""

    session_id: str | None = None


class GetUpdateStatus(_Tagged, frozen=True):
    """Ask for the session, the groups and the last update's figures."""


class UpdateFromDistributed(_Tagged, frozen=True):
    """The old single call: one bucket, received and committed by itself, or received and dropped if wrong."""

    manifest: Manifest
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class UpdateFromDisk(_Tagged, frozen=True):
    """Load a whole checkpoint beside the served weights, then commit it.

    It and all its files must be below one of ``roots``, links followed; None: anywhere.
    """

    model_path: str
    load_format: str | None = None
    roots: list[str] | None = None
    from_hub: bool = True  # ``model_path`` may be a hub id
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class UpdateFromTensor(_Tagged, frozen=True):
    """Take tensors that travelled in the request, or in the GPU's memory; ``payloads``: one a rank."""

    payloads: list[bytes]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class BeginUpdate(_Tagged, frozen=True):
    """The single calls that follow are received one by one and committed together."""


class EndUpdate(_Tagged, frozen=True):
    """Commit what came since :class:`BeginUpdate`."""


class SetVersion(_Tagged, frozen=True):
    """Give the served weights another name."""

    version: str
    abort_all: bool = False


class GetWeights(_Tagged, frozen=True):
    """Ask for the first values of a tensor, by its Hugging Face name."""

    name: str
    truncate_size: int = 100


class CheckWeights(_Tagged, frozen=True):
    """Ask for checksums, remember the weights, or hold them against those remembered."""

    action: Literal["checksum", "snapshot", "compare"]


WeightRequest = (
    JoinGroup
    | LeaveGroup
    | Prepare
    | Complete
    | CommitSession
    | AbortSession
    | GetUpdateStatus
    | UpdateFromDistributed
    | UpdateFromDisk
    | UpdateFromTensor
    | BeginUpdate
    | EndUpdate
    | SetVersion
    | GetWeights
    | CheckWeights
)


class WeightCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request of the frontend; ``sent``: when, by the host's monotonic clock."""

    call: int
    request: WeightRequest
    sent: float


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
    state: str = "idle"  # of `WeightControl`
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
    payload: bytes  # this rank's
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
