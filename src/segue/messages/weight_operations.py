"""The operations on weights that a client may ask for, each written once.

A struct here is an operation's route, its body with the rules of each field, its summary, and what the
scheduler is sent. The routes (`segue.server.control_routes`), the methods of `segue.Engine`
(`segue.api.weights`) and the OpenAPI schema are made from it. Names of fields are SGLang's, where
SGLang has the operation. Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta, Struct

Backend = Literal["nccl", "gloo"]
StagingPlace = Literal["auto", "device", "host"]
LoadFormat = Literal["flattened_bucket", "auto", "direct", ""]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Version = Annotated[str, Meta(min_length=1, max_length=256)]
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]
Checksum = Annotated[int, Meta(ge=0)]  # of 64 bits
MAX_TENSORS = 1 << 17  # named in one call; the largest mixtures of experts have some 100,000
MAX_PAYLOADS = 1024  # one per rank
MAX_WORLD = 1 << 14  # ranks of a group; gloo allocates for each connection before it meets any rank
# Lists with an item per tensor, or per bucket of tensors.
Names = Annotated[list[str], Meta(max_length=MAX_TENSORS)]
Shapes = Annotated[list[list[Size]], Meta(max_length=MAX_TENSORS)]
_PORT = r"^0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])$"
DEFAULT_GROUP = "weight_update_group"


class Bucket(Struct, frozen=True, kw_only=True):
    """Tensors that are sent together; the three lists are parallel."""

    names: Names  # Hugging Face names
    dtypes: Names  # as torch names them, with or without "torch."
    shapes: Shapes


class Group(Struct, frozen=True, kw_only=True):
    """A process group that a trainer, its rank 0, hosts."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int  # the rank that this engine's rank 0 has in the group
    world_size: int
    backend: Backend


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything that a trainer is going to broadcast, in order."""

    group_name: str
    buckets: list[Bucket]
    flattened: bool = False  # one uint8 broadcast per bucket, its tensors end to end; else one per tensor
    checksums: dict[str, int] | None = None  # tensor name -> `segue.weight_update.checksum` of it as sent
    partial: bool = False  # some weights may be missing
    staging: StagingPlace = "auto"
    discard: bool = False  # receive the broadcasts and keep nothing, so that the trainer does not hang


class Operation(Struct, frozen=True, kw_only=True, tag=True, tag_field="operation"):
    """One call of a client; the class variables say how the call is made and answered."""

    route: ClassVar[str]  # without the slash; also the name of the method of `segue.Engine`
    methods: ClassVar[tuple[str, ...]] = ("POST",)  # with GET, numbers may come as strings, as in a query
    failure_status: ClassVar[int] = 400  # 200: a failure is told in the reply alone
    reply: ClassVar[Mapping[str, Any]] = {}  # fields that every reply has beside `success` and `message`


class JoinGroup(Operation, frozen=True, kw_only=True):
    """Meet a trainer in a process group that the trainer, rank 0, hosts."""

    route: ClassVar = "init_weights_update_group"

    master_address: Annotated[str, Meta(min_length=1)]
    master_port: Annotated[int, Meta(ge=1, le=65535)] | Annotated[str, Meta(pattern=_PORT)]
    rank_offset: Count  # the rank that this engine's first rank has in the group
    world_size: Annotated[int, Meta(ge=0, le=MAX_WORLD)]
    group_name: str = DEFAULT_GROUP
    backend: Backend = "nccl"
    timeout_s: Seconds = 300.0

    @property
    def group(self) -> Group:
        """The group in the form that the ranks get: port as a number, IPv6 address without brackets."""
        return Group(
            name=self.group_name,
            master_address=self.master_address.removeprefix("[").removesuffix("]"),  # IPv6, as in a URL
            master_port=int(self.master_port),  # some clients send it as a string
            rank_offset=self.rank_offset,
            world_size=self.world_size,
            backend=self.backend,
        )


class LeaveGroup(Operation, frozen=True, kw_only=True):
    """Leave a group; an open session of it is aborted."""

    route: ClassVar = "destroy_weights_update_group"

    group_name: str = DEFAULT_GROUP


class Prepare(Operation, frozen=True, kw_only=True):
    """Announce everything that is going to be broadcast; `ready` once every rank receives."""

    route: ClassVar = "prepare_weights_update"
    failure_status: ClassVar = 200
    reply: ClassVar = {"status": "ready"}

    buckets: Annotated[list[Bucket], Meta(max_length=MAX_TENSORS)]
    group_name: str
    num_buckets: Count | None = None  # as the client counts them
    session_id: str | None = None
    weight_version: Version | None = None
    load_format: LoadFormat | None = None
    checksums: Annotated[dict[str, Checksum], Meta(max_length=MAX_TENSORS)] | None = None
    timeout_s: Seconds = 300.0  # of `Complete`, and of silence after the first byte
    arm_timeout_s: Seconds = 3600.0  # of silence before the first byte
    partial: bool = False
    staging: StagingPlace = "auto"

    def __post_init__(self) -> None:
        for name, checksum in (self.checksums or {}).items():
            if checksum >= 1 << 64:  # msgspec's own bounds end at 63 bits
                raise ValueError(f"checksums of {name[:80]!r}: {checksum} must be an integer below 2**64")

    @property
    def manifest(self) -> Manifest:
        """What is going to be broadcast, in the form that the ranks get."""
        return Manifest(
            group_name=self.group_name,
            buckets=self.buckets,
            flattened=self.load_format == "flattened_bucket",
            checksums=self.checksums,
            partial=self.partial,
            staging=self.staging,
        )


class Complete(Operation, frozen=True, kw_only=True):
    """Wait until everything was received, then serve it; with `commit` false leave that to another call."""

    route: ClassVar = "complete_weights_update"
    failure_status: ClassVar = 200
    reply: ClassVar = {"num_buckets_received": 0}

    group_name: str | None = None
    flush_cache: bool = False
    session_id: str | None = None
    commit: bool = True


class CommitSession(Operation, frozen=True, kw_only=True):
    """Serve what `complete_weights_update` with `commit` false has waited for."""

    route: ClassVar = "commit_weights_update"
    reply: ClassVar = {"num_buckets_received": 0}

    session_id: str | None = None
    flush_cache: bool = False


class AbortSession(Operation, frozen=True, kw_only=True):
    """End the open session; the served weights stay as they are."""

    route: ClassVar = "abort_weights_update"

    session_id: str | None = None


class GetUpdateStatus(Operation, frozen=True, kw_only=True):
    """Return the open session, the groups, and the figures of the last update."""

    route: ClassVar = "weights_update_status"
    methods: ClassVar = ("GET",)


class SingleUpdate(Operation, frozen=True, kw_only=True):
    """What the operations have in common that receive and commit in one call."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None


class UpdateFromDistributed(SingleUpdate, frozen=True, kw_only=True):
    """Receive one bucket and serve it."""

    route: ClassVar = "update_weights_from_distributed"

    names: Names
    dtypes: Names
    shapes: Shapes
    group_name: str = DEFAULT_GROUP
    flush_cache: bool = True
    load_format: LoadFormat | None = None

    @property
    def manifest(self) -> Manifest:
        """What is going to be broadcast: one bucket, so some weights may be missing (`partial`)."""
        return Manifest(
            group_name=self.group_name,
            buckets=[Bucket(names=self.names, dtypes=self.dtypes, shapes=self.shapes)],
            flattened=self.load_format == "flattened_bucket",
            partial=True,
        )


class UpdateFromDisk(SingleUpdate, frozen=True, kw_only=True):
    """Load a whole checkpoint beside the served weights, then serve it."""

    route: ClassVar = "update_weights_from_disk"
    reply: ClassVar = {"num_paused_requests": 0}

    model_path: Annotated[str, Meta(min_length=1)]
    load_format: str | None = None  # see `WeightMachine.load`, so that a wrong one fails the whole update


class UpdateFromTensor(SingleUpdate, frozen=True, kw_only=True):
    """Serve the tensors that the request carries, or that it points to in the GPU's memory.

    `segue.Engine` takes `named_tensors`: pairs of a name and a tensor, or serialised payloads as bytes.
    """

    route: ClassVar = "update_weights_from_tensor"

    # Base64 of one payload per rank, or of one for all ranks.
    serialized_named_tensors: Annotated[list[str], Meta(min_length=1, max_length=MAX_PAYLOADS)]
    load_format: str | None = None  # "flattened_bucket" says nothing new: a payload shows its form


class BeginUpdate(Operation, frozen=True, kw_only=True):
    """Serve what the single calls that follow bring together, at `end_weight_update`."""

    route: ClassVar = "begin_weight_update"


class EndUpdate(Operation, frozen=True, kw_only=True):
    """Serve what came since `begin_weight_update`."""

    route: ClassVar = "end_weight_update"

    weight_version: Version | None = None  # None: as the last call that named one, else the next number


class SetVersion(Operation, frozen=True, kw_only=True):
    """Give the served weights another name."""

    route: ClassVar = "update_weight_version"

    new_version: Version
    abort_all_requests: bool = False


class GetWeights(Operation, frozen=True, kw_only=True):
    """Return the first values of a tensor, by its Hugging Face name."""

    route: ClassVar = "get_weights_by_name"
    methods: ClassVar = ("GET", "POST")

    name: str
    truncate_size: Annotated[int, Meta(ge=1, lt=1 << 31)] = 100


class CheckWeights(Operation, frozen=True, kw_only=True):
    """Return checksums of the weights, take a snapshot of them, compare them with it, or overwrite them.

    With `reset_tensors` every value becomes NaN, and requests wait until all tensors were sent again.
    """

    route: ClassVar = "weights_checker"
    methods: ClassVar = ("GET", "POST")

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"


GroupOperation = JoinGroup | LeaveGroup
SessionOperation = Prepare | Complete | CommitSession | AbortSession | GetUpdateStatus
UpdateOperation = UpdateFromDistributed | UpdateFromDisk | UpdateFromTensor | BeginUpdate | EndUpdate
Inspection = GetWeights | CheckWeights  # only read the weights
WeightOperation = GroupOperation | SessionOperation | UpdateOperation | SetVersion | Inspection
OPERATIONS: dict[str, type[WeightOperation]] = {kind.route: kind for kind in get_args(WeightOperation)}
