"""The messages between a prefill worker and a decode worker, which hand over the KV of prompts.

One ordered connection carries them. It begins with ``Hello`` and ``Proof`` of both sides; then every message
is one of ``KVMessage``. A *handoff* is one request's way from the prefill worker to the decode worker; its id
of 63 bits is drawn by whoever splits the request. A *lease* is one attempt to move its pages: the prefill
worker numbers its leases, so that a message about an earlier attempt is recognised as such.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.messages.requests import FinishReason, TokenLogprob

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_LARGE_MESSAGE_BYTES = 4 << 20  # the limit of `Hello`, `Pools`, `Grant` and `Sent`
MAX_RANKS = 64  # per worker
MAX_DEVICES = 64  # that a rank names
MAX_OFFERS = 8  # transport offers per rank
NONCE_BYTES = 32
MAC_BYTES = 32  # HMAC-SHA256
MAX_BLOB_BYTES = 64 << 10  # per `TransportOffer`
MAX_REASON = 512  # characters of a text that explains a message to people

# Why the KV of a handoff does not come. unknown: there is no such handoff. taken: another decode worker has
# it. finished: the first token ended the request. aborted: the request ended before its first token.
# retracted: its KV was given up for memory or for other weights. expired: nobody claimed or granted in time.
# transport: a push failed. suspect: an earlier push to this decode worker is stuck. withdrawn: the decode
# worker gave up. link: the connection was lost. prompt_differs: the decode worker's prompt is another one.
GoneReason = Literal[
    "unknown",
    "taken",
    "finished",
    "aborted",
    "retracted",
    "expired",
    "transport",
    "suspect",
    "withdrawn",
    "link",
    "prompt_differs",
]
# Why a decode worker gives a handoff up. ended: the request has ended. memory: its pages are wanted back.
# version: the weights have changed. silent: nothing arrived for too long.
RevokeReason = Literal["ended", "memory", "version", "silent"]


class KVIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Names the weights that KV was computed with.

    ``commits`` counts how often the process has committed weights under this ``version``, because two updates
    may have the same name. KV of two identities is never mixed in a prefix cache.
    """

    version: str
    commits: int


class TransportOffer(msgspec.Struct, frozen=True, array_like=True):
    """One way to write into a rank's KV pool; ``blob`` is what the transport's other end needs to connect.

    Whoever has the blob may be able to write. So it is empty in `Hello`, whose reader has proven nothing yet.
    """

    kind: str  # name of the transport, such as shm
    blob: Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """How to reach the KV pool of one tensor-parallel rank."""

    path: str  # of the rank's unix socket, on its host
    device: str  # the GPU's UUID; empty: the CPU
    offers: Annotated[list[TransportOffer], Meta(max_length=MAX_OFFERS)]  # the best first
    # UUIDs of the GPUs to whose memory this rank's GPU can write, and which its process sees.
    reaches: Annotated[list[str], Meta(max_length=MAX_DEVICES)] = []


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of each side: who it is and what its KV looks like.

    It comes from someone who has not proven anything yet, so its lists are bounded: without that, 4 MiB of
    empty ranks took 160 MiB and 0.6 s to decode.
    """

    protocol: int = PROTOCOL
    engine_id: str
    epoch: int = 0  # grows whenever another process takes the engine's place
    incarnation: str  # names the process's memory; memory exported under another name no longer exists
    boot_id: str  # of the host: equal ones share memory
    work: Annotated[list[Literal["prefill", "decode"]], Meta(max_length=2)]
    model: str  # digest of the configuration and the weight map
    tokenizer: str  # digest; empty: the worker has none
    dtype: str
    kv_cache: str  # how keys and values are stored: `KVPool.format`
    layers: int
    kv_heads: int  # of the model, over all ranks
    head_dim: int
    page_size: int  # tokens
    tp: int
    num_pages: int
    max_seq_len: int  # tokens
    deterministic: bool
    numerics: str  # digest of what decides the bits of results, such as the device and the versions
    identity: KVIdentity
    ranks: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)]  # by rank, as many as `tp`
    # Random bytes, which the link draws anew for each connection: a proof is of no use on another one.
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)] = bytes(NONCE_BYTES)


class Proof(msgspec.Struct, frozen=True, tag=True):
    """Shows that a side knows ``--pd-key``: an HMAC-SHA256 over both ``Hello`` messages.

    The side that opened the connection sends its proof first; the other one answers once it has verified it.
    """

    mac: Annotated[bytes, Meta(max_length=MAC_BYTES)]  # empty: the side has no key


class Pools(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """How to write into the decode worker's KV pools: its first message, which comes once."""

    ranks: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)]  # those of its `Hello`, with blobs


class Claim(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The decode worker asks for the KV of a handoff."""

    handoff: int
    rid: str
    num_tokens: int  # of the prompt
    prompt_hash: bytes  # SHA-256 of the prompt's int32 ids; with a salt, of that and the salt
    priority: int = 0


class ReservePages(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The prefill worker has begun to compute the prompt, and asks for pages."""

    handoff: int
    lease: int
    num_tokens: int  # whose KV will come


class Grant(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The decode worker grants pages for positions from ``first_page * page_size`` on."""

    handoff: int
    lease: int
    first_page: int  # pages before it are in the decode worker's prefix cache
    pages: bytes  # int32 ids of pages of the decode worker


class Pushed(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Shows that a lease lives: pushes were posted for so many of its pages, and none is late."""

    handoff: int
    lease: int
    pages: int


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """One part of the logprobs of prompt tokens; all parts come before ``First``."""

    handoff: int
    part: int  # 0, 1, 2, …
    entries: list[TokenLogprob]


class First(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The first output token, and the end of the request if this token ends it."""

    handoff: int
    token: int
    logprob: TokenLogprob | None = None
    version: str  # of the weights that made the token
    cached_tokens: int  # prompt tokens that the prefill worker found in its prefix cache
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # that the token was sampled with
    parts: int = 0  # number of `PromptLogprobs` that came before
    finished: FinishReason | None = None  # None: the request goes on
    message: str | None = None


class HeadSums(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Checksums of some heads of pages, one per page, in the order of the pages."""

    target_rank: int  # of the decode worker
    head: int  # the first of the heads, counted from that rank's first
    num_heads: int
    crcs: bytes  # CRC-32 of the bytes of these heads, as uint32


class Sent(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """All pages are written, and the prefill worker writes no more under this lease."""

    handoff: int
    lease: int
    pages: int
    # of the weights that computed the KV, in order
    identities: Annotated[list[KVIdentity], Meta(min_length=1)]
    sums: list[HeadSums] = []  # of the granted pages, with --pd-checksum; together they have all heads


class Gone(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The prefill worker writes no more under this lease, and its KV will not come.

    With ``again`` the claim stands, and another ``ReservePages`` follows.
    """

    handoff: int
    lease: int
    reason: GoneReason
    again: bool = False
    message: str = ""


class Revoke(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The decode worker wants its pages back; the prefill worker answers ``Gone`` once it writes no more.

    With ``final`` the decode worker has no more use for the handoff. Over a new connection the decode worker
    sends ``Revoke`` again for each lease that neither ``Sent`` nor ``Gone`` has ended.
    """

    handoff: int
    lease: int
    reason: RevokeReason
    final: bool


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Sent after a second in which nothing came. Three without an answer mean that the other side is lost."""

    step: int  # the last one that is launched and whose result is not read yet; 0: there is none
    busy: bool  # whether there is one


class Pong(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The answer to ``Ping``."""

    step: int
    busy: bool


class Bye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing new will come over this connection, and why."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)]


KVMessage = (
    Pools
    | Claim
    | ReservePages
    | Grant
    | Pushed
    | PromptLogprobs
    | First
    | Sent
    | Gone
    | Revoke
    | Ping
    | Pong
    | Bye
)


# --- rank 0 -> every rank of a worker, and back ---


class ConnectPeer(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells a prefill rank to open the KV pools of a decode worker's ranks.

    A *session* is one connection between two workers. A decode rank knows its writers by it: once the
    connection is lost, nobody may begin to write for this session any more.
    """

    session: str
    opened_at: float  # when the session began, by the host's monotonic clock
    transport: str  # the `TransportOffer.kind` to use
    tp: int
    kv_heads: int  # of the model
    ranks: list[RankAddress]


class DisconnectPeer(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells a prefill rank that nothing more will be pushed for a session."""

    session: str


class PushPages(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells a prefill rank to copy pages into a decode worker's pool, once a step has ended."""

    ticket: int
    session: str
    sources: list[int]  # pages of the prefill worker
    targets: list[int]  # pages of the decode worker, in the same order
    after_step: int  # the last step that writes to one of the sources


class PushEnded(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """A rank writes no more for a push. ``error`` says why it failed; empty: all pages are written."""

    ticket: int
    at: float  # when it wrote the last page or failed, in seconds of the monotonic clock
    error: str = ""
    sums: list[HeadSums] = []  # of the pages of the push, with --pd-checksum


class HeadPiece(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Some heads of a decode rank's pages, written one row behind the other (`segue.disagg.layout`)."""

    target_rank: int  # of the decode worker
    head: int  # the first of the heads, counted from that rank's first
    num_heads: int


class PreparePages(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells a decode rank to make pages that have landed ready for use.

    It puts the heads of pages that came in pieces in order, then compares its heads with their checksums.
    """

    ticket: int
    pages: list[int]
    pieces: list[HeadPiece]  # of all ranks whose pages came in pieces
    sums: list[HeadSums]  # of these pages, of all ranks


class PagesPrepared(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The answer to ``PreparePages``: the rank neither reads nor writes the pages for it any more.

    ``error`` says why they cannot be used, such as which page differs, and how; empty: they can.
    """

    ticket: int
    error: str = ""
    reason: Literal["checksum", "transport"] = "transport"  # checksum: a page differs


class BanWriters(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Tells a decode rank to let no writer of a session in any more, and to report when all have gone."""

    session: str


class WritersGone(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The answer to ``BanWriters``: nobody can write to this rank's pool for the session any more."""

    session: str


class RankJoined(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """A rank's first event: how other workers reach its pool."""

    rank: int
    address: RankAddress


KVCommand = ConnectPeer | DisconnectPeer | PushPages | PreparePages | BanWriters
KVEvent = PushEnded | PagesPrepared | WritersGone
