"""The messages of weight updates that cross process borders.

The frontend sends ``WeightCall`` to the scheduler and gets a ``WeightAnswer``. Rank 0 sends ``WeightCommand``
to every rank, itself included, and gets a ``RankReply`` to each command, and ``Received`` in between.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.weight_operations import CheckWeights, GetWeights, Group, Manifest, WeightOperation


class _Struct(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    pass


class _Tagged(_Struct, frozen=True, tag=True):
    pass


class Bucket(_Struct, frozen=True):
    """Tensors that are sent together; the three lists are parallel."""

    names: list[str]  # Hugging Face names
    dtypes: list[str]  # torch's names, with or without "torch."
    shapes: list[list[int]]


class Group(_Struct, frozen=True):
    """A process group that a trainer hosts as its rank 0."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int  # the rank in the group that this engine's rank 0 has
    world_size: int
    backend: Backend


class Manifest(_Struct, frozen=True):
    """All tensors that a trainer is going to broadcast, in order."""

    group_name: str
    buckets: list[Bucket]
    flattened: bool = False  # one uint8 broadcast per bucket, tensors end to end; False: one per tensor
    checksums: dict[str, int] | None = None  # tensor name -> its `segue.weight_update.checksum` as sent
    partial: bool = False  # whether weights may be missing
    staging: StagingPlace = "auto"
    discard: bool = False  # receive the broadcasts and drop them, so that the sender does not hang


# --- frontend -> scheduler ---


class JoinGroup(_Tagged, frozen=True):
    """Join a trainer's group within ``timeout_s``, which includes the connection to the trainer's store."""

    group: Group
    timeout_s: float = 300.0


class LeaveGroup(_Tagged, frozen=True):
    """Leave a group; an open session that receives from it is aborted."""

    name: str


class Prepare(_Tagged, frozen=True):
    """Open a session and start to receive; it is answered once every rank waits for the first broadcast."""

    manifest: Manifest
    session_id: str | None = None
    weight_version: str | None = None
    num_buckets: int | None = None  # the client's own count, which must equal the manifest's
    timeout_s: float = 300.0  # the limit of `Complete`, and of silence after the first byte
    arm_timeout_s: float = 3600.0  # the limit of silence before the first byte, and before the commit


class Complete(_Tagged, frozen=True):
    """Wait until everything was received, then commit it; without ``commit`` :class:`CommitSession` does."""

    group_name: str | None = None
    session_id: str | None = None
    flush_cache: bool = False
    commit: bool = True


class CommitSession(_Tagged, frozen=True):
    """Commit the open session; everything must have been received."""

    session_id: str | None = None
    flush_cache: bool = False


class AbortSession(_Tagged, frozen=True):
    """End the open session; the weights stay as they are."""

    session_id: str | None = None


class GetUpdateStatus(_Tagged, frozen=True):
    """Ask for the open session, the groups and the figures of the last update."""


class UpdateFromDistributed(_Tagged, frozen=True):
    """The older single call: one bucket, received and then committed, or received and dropped if wrong."""

    manifest: Manifest
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class UpdateFromDisk(_Tagged, frozen=True):
    """Load a whole checkpoint beside the served weights, then commit it.

    With links followed, the checkpoint and all its files must be below one of ``roots``; None: anywhere.
    """

    model_path: str
    load_format: str | None = None
    roots: list[str] | None = None
    from_hub: bool = True  # ``model_path`` may be a hub id
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class UpdateFromTensor(_Tagged, frozen=True):
    """Take tensors that came in the request or are in GPU memory.

    ``payloads`` has one entry per rank, or one entry for all ranks.
    """

    payloads: list[bytes]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


class BeginUpdate(_Tagged, frozen=True):
    """Begin a group of calls: the single calls that follow are received one by one and committed together."""


class EndUpdate(_Tagged, frozen=True):
    """End a group of calls: commit all tensors that came since :class:`BeginUpdate`."""


class SetVersion(_Tagged, frozen=True):
    """Give the served weights another name."""

    version: str
    abort_all: bool = False


class GetWeights(_Tagged, frozen=True):
    """Ask for the first ``truncate_size`` rows of a tensor, by its Hugging Face name."""

    name: str
    truncate_size: int = 100


class CheckWeights(_Tagged, frozen=True):
    """Ask for checksums, keep a snapshot of the weights, or compare the weights with the snapshot."""

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
    """A request of the frontend; ``sent`` is its time by the host's monotonic clock."""

    call: int
    operation: WeightOperation
    sent: float  # when, by the host's monotonic clock
    roots: list[str] | None = None  # directories that a checkpoint may be read from; None: any
    from_hub: bool = True  # whether a checkpoint may be named by its hub id


class WithdrawCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The client of a :class:`WeightCall` has gone; this ends the joining of a group, and no other call."""

    call: int


class WeightAnswer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`WeightCall`; the content of ``fields`` depends on the request."""

    call: int
    success: bool
    message: str = ""
    fields: dict[str, Any] = {}


class WeightNotice(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The state of the weights that the frontend shows without asking; it is sent with every change."""

    version: str
    state: str = "idle"  # that of `WeightControl`
    poisoned: str | None = None  # why the weights are poisoned and nothing is generated; None: they are not
    model_path: str | None = None  # the last checkpoint that was committed; None: none since the start
    num_committed: int = 0
    num_failed: int = 0
    last: dict[str, Any] = {}  # figures of the last committed update


# --- rank 0 -> every rank; each is answered by a `RankReply` with its `call` ---


class Join(_Tagged, frozen=True):
    """Join a group, as rank ``group.rank_offset`` + the tensor-parallel rank.

    A living group of this name that was joined with the same parameters is kept; a dead one is replaced.
    """

    call: int
    group: Group
    timeout_s: float


class StopJoin(_Tagged, frozen=True):
    """Stop joining a group for the reason ``why``; the reply to its :class:`Join` is then an error."""

    call: int
    group: Group
    why: str


class Leave(_Tagged, frozen=True):
    """Leave a group."""

    call: int
    name: str


class Stage(_Tagged, frozen=True):
    """Check a manifest and take memory for its tensors; no collective operation runs.

    The reply lists the problems. If the session exists, the tensors are added to it; the same goes for
    :class:`Load` and :class:`Take`.
    """

    call: int
    session: int
    manifest: Manifest


class Receive(_Tagged, frozen=True):
    """Receive the tensors of the last :class:`Stage`; the reply comes once the first broadcast is entered.

    ``longest_s``: a receive that cannot be cancelled any more ends by itself after this time.
    """

    call: int
    session: int
    longest_s: float | None = None


class Load(_Tagged, frozen=True):
    """Read a whole checkpoint into staging memory; see :class:`UpdateFromDisk`."""

    call: int
    session: int
    model_path: str
    load_format: str | None
    roots: list[str] | None = None
    from_hub: bool = True


class Take(_Tagged, frozen=True):
    """Take the tensors of a payload; with ``copy`` the client may overwrite them after the reply."""

    call: int
    session: int
    payload: bytes  # the one for this rank
    load_format: str | None
    copy: bool


class Commit(_Tagged, frozen=True):
    """After the steps sent before, copy all tensors of the session onto the served weights.

    The reply's ``fields`` have ``touched``: whether served weights were written, even if the commit failed.
    """

    call: int
    session: int


class Discard(_Tagged, frozen=True):
    """Drop a session and stop receiving; its group is dead if a broadcast was entered but has not ended."""

    call: int
    session: int


class Inspect(_Tagged, frozen=True):
    """Read the served weights between two steps."""

    call: int
    request: GetWeights | CheckWeights


WeightCommand = Join | StopJoin | Leave | Stage | Receive | Load | Take | Commit | Discard | Inspect


class RankReply(_Tagged, frozen=True):
    """A rank's answer to a command; it is done if ``errors``, a list of sentences, is empty."""

    rank: int
    call: int
    errors: list[str] = []
    fields: dict[str, Any] = {}


class Received(_Tagged, frozen=True):
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
