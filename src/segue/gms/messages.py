"""What goes over the memory service's socket: one msgpack frame per message, with at most 64 descriptors.

A client numbers its calls from 1, and each call has one reply with the same number; 0 is for notices. What
may be larger than a frame, such as a manifest, is in a memfd, whose descriptor goes with the message.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.gms.lock_state import AskMode

PROTOCOL = 4
MAX_FRAME = 64 << 10  # bytes of a message
MAX_DESCRIPTORS = 64  # of a message
MAX_SESSIONS = 256
MAX_WAITING = 64  # sessions that wait for weights
MAX_SLABS = 4096  # of the service
MAX_NOTES = 64
MAX_MANIFEST = 64 << 20  # bytes
MAX_RANKS = 64
MAX_JOURNAL = 1 << 30  # bytes

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Version = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
NoteText = Annotated[bytes, Meta(max_length=32 << 10)]
Tag = Literal[
    "weights", "front", "watch"
]  # a rank's weights; an engine's front process; a tool that only looks


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all messages."""

    call: Number = 0


class OpenSession(Message, frozen=True):
    """The first message of a client. The reply is :class:`SessionOpened`."""

    protocol: int
    tag: Tag
    cohort: Name = "default"
    engine: Name = "-"  # for people, and to tell engines of a cohort apart
    rank: RankNumber = 0
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # ranks of the engine
    device: Name = "cpu"  # or the UUID of a GPU
    epoch: Number = 0  # that the engine has claimed; 0: it does not serve, or is in no cohort
    nonce: Annotated[bytes, Meta(max_length=16)] = b""  # the same after a reconnect
    token: Annotated[str, Meta(max_length=256)] | None = None
    pins: Annotated[
        list[Number], Meta(max_length=16)
    ] = []  # generations that it still reads, after a reconnect
    lineage: Annotated[str, Meta(max_length=64)] = ""  # whose numbers these are; "": those of this service


class AskWeights(Message, frozen=True):
    """Asks for weights, with the manifest's descriptor. Reply, perhaps late: :class:`WeightsGranted`."""

    mode: AskMode
    is_update: bool = False
    epoch: Number = 0
    wait_s: Seconds = 60.0


class JoinLease(Message, frozen=True):
    """Joins the lease of rank 0. The reply is :class:`WeightsGranted`."""

    lease: Number


class AllocateSlabs(Message, frozen=True):
    """Takes more memory for a rank of a lease to write. Replies: one or more :class:`SlabsGiven`."""

    lease: Number
    sizes: Annotated[list[Annotated[int, Meta(gt=0, lt=1 << 48)]], Meta(max_length=MAX_SLABS)]
    wait_s: Seconds = 0.0  # how long it is tried again if the device is out of memory


class ExportSlabs(Message, frozen=True):
    """Asks for the slabs of a rank of a committed generation. Replies: :class:`SlabsGiven`."""

    generation: Number
    rank: RankNumber


class GetManifest(Message, frozen=True):
    """Asks for the manifest of a rank of a committed generation. Reply: :class:`ManifestGiven`, with it."""

    generation: Number
    rank: RankNumber


class SealRank(Message, frozen=True):
    """Says that a rank's slabs are complete and unmapped; its manifest is with it. Reply: RankSealed.

    An update says which of the manifest's slabs it has taken, in the order in which it took them; the others
    are those of the generation that it updates.
    """

    lease: Number
    places: Annotated[list[Number], Meta(max_length=MAX_SLABS)] | None = None  # None: all, in their order


class CommitLease(Message, frozen=True):
    """Makes a lease's generation the cohort's current one. The reply is :class:`GenerationNumber`."""

    lease: Number
    weight_version: Version
    model_path: Version | None = None  # where an update has read the weights


class AbortLease(Message, frozen=True):
    """Gives a lease to write up. The reply is :class:`CallDone`."""

    lease: Number
    is_abandoned: bool = False  # the process may still write to its slabs, so nobody else gets their memory


class RenameGeneration(Message, frozen=True):
    """Gives the current generation another version in the cohort. The reply is :class:`GenerationNumber`."""

    generation: Number
    epoch: Number
    weight_version: Version


class ReportProgress(Message, frozen=True):
    """Reports the bytes that a rank has loaded. The reply is :class:`CallDone`."""

    lease: Number
    num_bytes: Number


class PinGeneration(Message, frozen=True):
    """Keeps a committed generation for this session. The reply is :class:`GenerationNumber`."""

    generation: Number


class UnpinGeneration(Message, frozen=True):
    """Gives a generation up. The reply is :class:`GenerationNumber`."""

    generation: Number


class OfferRank(Message, frozen=True):
    """Offers what a rank reads, to a service that has lost it. The reply is :class:`GenerationNumber`.

    With it are the descriptors of the rank's manifest, and of its slabs from number `first` on. A rank with
    more slabs than a message can have sends several messages. The number in the reply is 0 until the service
    has all slabs of all ranks of the engine, and then the one that the service has given to the weights.
    """

    generation: Number  # the number that the lost service had given to it
    first: Number
    epoch: Number  # of the engine; 0: it does not serve
    is_loaded: bool  # from files; otherwise it came from a weight update
    weight_version: Version = ""
    model_path: Version | None = None


class AskKV(Message, frozen=True):
    """Asks for the KV memory of a rank whose engine has claimed an epoch.

    Replies, perhaps late: one or more :class:`KVGranted`. With `journal_bytes` the set also has a journal: a
    memfd that can be written, of this size rounded up to 2 MiB, which lives as long as the set.
    """

    epoch: Number
    pool_bytes: Annotated[int, Meta(gt=0, lt=1 << 48)]
    slab_bytes: Annotated[int, Meta(gt=0, lt=1 << 48)]  # the last slab has the rest
    journal_bytes: Annotated[int, Meta(ge=0, le=MAX_JOURNAL)] = 0
    wait_s: Seconds = 0.0  # for the end of the process that wrote before, or for memory


class KVPrepared(Message, frozen=True):
    """Says that the KV memory of this session, which was fresh, is prepared: on a device, it is zeroed.

    Until then the memory is fresh for whoever gets it next. The reply is :class:`CallDone`.
    """


class WithdrawKV(Message, frozen=True):
    """Says that this process uses no KV memory of the service: it has, or takes, memory of its own.

    An ask of the session is over; what it was granted, and may not have received yet, is taken back. What the
    cohort's newest engine does not use in this way is freed. The reply is :class:`CallDone`.
    """


class ReleaseKV(Message, frozen=True):
    """Gives the KV memory of this session back, which is unmapped. The reply is :class:`CallDone`."""


class ClaimEpoch(Message, frozen=True):
    """Takes the next epoch of the cohort. The reply is :class:`EpochClaimed`."""

    seen: Number = 0  # the highest epoch that was found elsewhere


class FenceEngines(Message, frozen=True):
    """Waits for the processes of engines that have served with a lower epoch. Reply: EnginesFenced."""

    below: Number  # the epoch of the engine that asks
    kills: bool = False  # whether these processes are killed
    wait_s: Seconds = 0.0


class PutNote(Message, frozen=True):
    """Sets a note of the cohort, if it has the value `expect`. Reply: :class:`NoteValue`, with what holds.

    A note that sessions keep is gone with the last session that has asked for it by `keeps`.
    """

    name: Name
    value: NoteText
    expect: NoteText | None = None  # None: it must not be there
    keeps: bool = False


class GetNote(Message, frozen=True):
    """Asks for a note of the cohort. The reply is :class:`NoteValue`."""

    name: Name


class GetServiceState(Message, frozen=True):
    """Asks for the state of the service. The reply is :class:`StateGiven`."""


class GetServiceEvents(Message, frozen=True):
    """Asks for what has happened after event number `since`. The reply is :class:`EventsGiven`."""

    since: Number = 0


Request = (
    OpenSession
    | AskWeights
    | JoinLease
    | AllocateSlabs
    | ExportSlabs
    | GetManifest
    | SealRank
    | CommitLease
    | AbortLease
    | RenameGeneration
    | ReportProgress
    | PinGeneration
    | UnpinGeneration
    | OfferRank
    | AskKV
    | KVPrepared
    | WithdrawKV
    | ReleaseKV
    | ClaimEpoch
    | FenceEngines
    | PutNote
    | GetNote
    | GetServiceState
    | GetServiceEvents
)


class SessionOpened(Message, frozen=True):
    """The client is admitted."""

    session: Number
    incarnation: str  # of the service; another one after it was started again
    lineage: str  # the same after that, if the service has got back what it had
    devices: list[str]
    current: Number | None  # generation of the cohort
    epoch: Number
    lost_pins: list[Number]  # of those that the client named: the service does not have these


class WeightsGranted(Message, frozen=True):
    """The client may write, or read, a generation."""

    lease: Number
    generation: Number
    mode: Literal["rw", "ro"]
    parent: Number | None = None
    is_loaded: bool = True  # from files, or it will be; otherwise it came from a weight update
    weight_version: Version = ""  # of a generation to read
    model_path: Version | None = None


class SlabsGiven(Message, frozen=True):
    """Slabs, in order; their descriptors are with the message."""

    sizes: list[int]
    more: bool  # whether another reply with further slabs follows


class ManifestGiven(Message, frozen=True):
    """A manifest; its descriptor is with the message."""


class RankSealed(Message, frozen=True):
    """The rank is sealed."""

    missing: list[int]  # ranks that are not


class GenerationNumber(Message, frozen=True):
    """The call is done, and is about this generation."""

    generation: Number


class KVGranted(Message, frozen=True):
    """The client alone may write to these slabs; their descriptors are with the message.

    The last descriptor of the last message is that of the journal, if the set has one.
    """

    sizes: list[int]  # of the slabs whose descriptors are with this message
    is_fresh: bool  # no engine has prepared it (`KVPrepared`): on a device its contents are undefined
    more: bool  # whether another reply with further slabs follows


class EpochClaimed(Message, frozen=True):
    """The engine has the highest epoch of its cohort."""

    epoch: Number


class EnginesFenced(Message, frozen=True):
    """The processes of older engines have ended, or the wait for them has."""

    alive: list[int]  # ids of processes that have not ended
    is_proved: bool  # whether all processes of engines can be watched


class NoteValue(Message, frozen=True):
    """The value of a note; None: there is none."""

    value: bytes | None


class StateGiven(Message, frozen=True):
    """The state of the service as JSON, in the memfd that is with the message."""


class ServiceEvent(msgspec.Struct, frozen=True):
    """Something that has happened in the service."""

    number: int
    at: float  # seconds since 1970
    kind: str
    text: str


class EventsGiven(Message, frozen=True):
    """The events that were asked for, as far as the service still has them."""

    events: list[ServiceEvent]


class CallDone(Message, frozen=True):
    """The call is done."""


class CallRefused(Message, frozen=True):
    """The call is not done. The session goes on, unless the code is "protocol" or "access"."""

    code: str
    text: str  # for people
    field: str | None = None  # of the manifest, for the code "mismatch"
    have: str | None = None
    want: str | None = None


class StillWaiting(Message, frozen=True):
    """The weights are not there yet; comes every five seconds."""

    position: Number  # of the session among those that wait


class GenerationChanged(Message, frozen=True):
    """A notice: the cohort has a new current generation, or its current one has another version."""

    generation: Number
    weight_version: Version
    model_path: Version | None = None


class EpochChanged(Message, frozen=True):
    """A notice: another engine of the cohort has claimed an epoch, and serves from now on."""

    epoch: Number


class LeaseLost(Message, frozen=True):
    """A notice: another rank of the engine, or the service, has ended the lease to write."""

    lease: Number
    reason: str


Reply = (
    SessionOpened
    | WeightsGranted
    | SlabsGiven
    | ManifestGiven
    | RankSealed
    | GenerationNumber
    | KVGranted
    | EpochClaimed
    | EnginesFenced
    | NoteValue
    | StateGiven
    | EventsGiven
    | CallDone
    | CallRefused
    | StillWaiting
    | GenerationChanged
    | EpochChanged
    | LeaseLost
)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
Notice = GenerationChanged | EpochChanged | LeaseLost  # what comes without having been asked for
