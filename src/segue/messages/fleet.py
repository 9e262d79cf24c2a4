"""What a worker tells a router about itself: once who it is, and every 100 ms its state and its load.

A router reads both from ``GET /watch``, as lines of JSON: a ``WorkerRecord`` first, and again when the role
changes, then ``WorkerReport`` after ``WorkerReport``. The end of the connection means that the worker is
dead.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.messages.kv import KVIdentity

FLEET_PROTOCOL = 1
REPORT_PERIOD_S = 0.1  # between two reports of a worker
REGISTER_PERIOD_S = 5.0  # between two registrations of a worker that registers itself
REGISTER_TTL_S = 15.0  # how long such a registration holds
MAX_TTL_S = 86400.0

# Which work a worker may be given. prefill: it computes prompts and hands over their KV. decode: it makes the
# output from KV that it was handed, and may compute short prompts itself. both: it serves whole requests.
Role = Literal["both", "prefill", "decode"]
MODES: dict[Role, str] = {"both": "null", "prefill": "prefill", "decode": "decode"}  # by SGLang's names
WorkerState = Literal["starting", "standby", "active", "draining", "dead"]


class WorkerRecord(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Who a worker is. All of it but the role stays the same for as long as the process lives."""

    protocol: int = FLEET_PROTOCOL
    worker_id: str
    url: str  # of its HTTP server
    cohort: str = ""  # only the highest epoch of a cohort serves; "": the worker is in no cohort
    epoch: int = 0  # grows whenever another process takes the worker's place
    incarnation: str  # names the process's memory; KV under another name no longer exists
    boot_id: str  # of the host: equal ones share memory
    kv_address: str = ""  # host:port where other workers connect to hand over KV; "": it hands over none
    role: Role
    model: str  # digest of the configuration and the weight map
    tokenizer: str  # digest; "": the worker has none
    page_size: int  # tokens
    max_seq_len: int  # tokens of one request, prompt and output together
    kv_bytes_per_token: int  # over all layers and ranks


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a worker is, and whose place it takes; the worker itself tells the rest by its record."""

    url: str  # of its HTTP server, as the router reaches it
    cohort: str = ""  # only the highest epoch of a cohort serves; "": the worker is in no cohort
    epoch: Annotated[int, Meta(ge=0)] = 0
    role: Role | None = None  # the only one that the worker may have; None: any


class Register(Registration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a router's ``POST /workers``."""

    # Seconds after which the registration ends unless it is renewed; 0: it ends now; None: it does not end.
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None = None


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How much work a worker has."""

    queued_s: float  # predicted seconds of the prompts that wait, and of the rest of those in progress
    step_s: float  # of the last steps, on average; 0: nothing decodes
    decode_rows: int  # requests that decode
    decode_kv: int  # tokens whose KV they read in each step
    num_pages: int
    taken_pages: int  # held by requests, offers and leases; all others are free or may be evicted


class WorkerReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The state and the load of a worker, sent every ``REPORT_PERIOD_S`` seconds."""

    epoch: int
    state: WorkerState
    paused: bool = False
    trouble: str = ""  # why it takes no requests although it is active, such as poisoned weights; "": it does
    heartbeat_age_s: float  # seconds since the last heartbeat of the rank that has been silent for longest
    load: WorkerLoad
    # `segue.laps.cost.Coefficients`, in its order: seconds of a step; all 0 before the first sample
    coefficients: tuple[float, float, float, float, float]
    identity: KVIdentity  # of KV that it computes now
    num_flushes: int = 0  # how often its prefix cache was emptied
    # Addresses where prefill workers hand KV over -> why none can come from there; those tried lately.
    refused: dict[str, str] = {}
