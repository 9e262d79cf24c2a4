"""The messages from the frontend to the scheduler (``FrontendMessage``), and back (``SchedulerMessage``)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from segue.messages.fleet import Role, WorkerLoad
from segue.messages.guided import GuidedVocabulary
from segue.messages.kv import KVIdentity
from segue.messages.life import ColdReason, LifeMessage, RankAnswer
from segue.messages.memory import MemoryAnswer, MemoryTag, ReleaseMemory, ResumeMemory
from segue.messages.profile import ProfileAnswer, StartProfile, StopProfile
from segue.messages.requests import Abort, AddRequest, Finish, Finished, Rejected, TokenLogprob
from segue.messages.steps import EagerReason
from segue.messages.weight_update import Call, WeightAnswer, WeightCall, WeightNotice, WithdrawCall

# What a pause does to running requests. wait: it lets them end. in_place: they keep their slots and pages.
# retract: they give both back and wait. abort: it ends them. Each mode is stronger than the one before it.
PauseMode = Literal["wait", "in_place", "retract", "abort"]


class Pause(Call, frozen=True, tag=True, array_like=True):
    """Stops generation. The reply, :class:`Paused`, comes once no rank runs anything.

    While paused, another pause can make the mode stronger but not weaker; its ``ttl_s`` replaces the old one.
    """

    mode: PauseMode
    ttl_s: float | None = None  # seconds until generation continues by itself; None: never
    sent: float | None = None  # when, by the host's monotonic clock, as the scheduler may be busy; None: now


class Continue(Call, frozen=True, tag=True, array_like=True):
    """Continues generation. The reply is :class:`Continued`, also if nothing was paused."""


class Flush(Call, frozen=True, tag=True, array_like=True):
    """Empties the prefix cache and resets what is measured since a flush. The reply is :class:`Flushed`."""

    timeout_s: float = 0.0  # how long to wait until no request holds KV
    retract: bool = False  # whether requests that run give their KV back for it, and compute it anew


class GetState(Call, frozen=True, tag=True, array_like=True):
    """Asks for the scheduler's state (``internal_states``); ``check`` also checks its invariants."""

    check: bool = False


class GetLoad(Call, frozen=True, tag=True, array_like=True):
    """Asks how much work the scheduler has. The reply is :class:`EngineLoad`."""


class SetRole(Call, frozen=True, tag=True, array_like=True):
    """Changes the role, once nothing is left of the work that goes. The reply is :class:`RoleSet`."""

    role: Role
    timeout_s: float  # after which the role stays what it is


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends the scheduler loop."""


FrontendMessage = (
    AddRequest
    | GuidedVocabulary
    | Finish
    | Abort
    | Pause
    | Continue
    | Flush
    | GetState
    | GetLoad
    | SetRole
    | ReleaseMemory
    | ResumeMemory
    | StartProfile
    | StopProfile
    | Shutdown
    | LifeMessage
    | WeightCall
    | WithdrawCall
)


class InitStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of the runner's initialisation: the seconds that it took, and the bytes that it allocated."""

    name: str
    seconds: float
    num_bytes: int
    detail: str = ""


class GraphCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the captured CUDA graphs of one kind have cost at start."""

    num_graphs: int
    seconds: float  # that capturing them took, with the eager runs before each capture
    num_bytes: int  # of device memory, on the rank where it is most; kinds share it, so the order matters


class LapsLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of length-aware prefill scheduling, in tokens and seconds."""

    threshold: int  # tokens of the longest short prompt
    long_share: float  # of the time of prefill, for long prompts while any of them waits
    slo_s: float  # from a short prompt's arrival to its first token
    blocking_s: float  # that a short prompt may wait for a step with a chunk of a long one
    window_s: float  # that a short prompt may wait for others to be computed with


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has room for, decided at start; the same on every rank."""

    num_pages: int
    page_size: int  # tokens
    max_seq_len: int  # tokens of one request, prompt and output together
    max_running_requests: int
    chunked_prefill_size: int  # prompt tokens per step; decode tokens come on top
    step_sizes: list[int] = []  # tokens of the captured steps that prompts can be part of, ascending
    laps: LapsLimits | None = None  # None: prompts are computed in the order of their arrival


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Reports that the engine can serve, and the sizes chosen at start."""

    limits: EngineLimits
    vocab_size: int
    device: str
    dtype: str
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    init_steps: list[InitStep]
    role: Role = "both"
    control_address: str | None = None  # where KV is handed over; None: nowhere
    graphs: dict[str, GraphCost] = {}  # by kind; empty: steps run eagerly


class StartStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reports the step of its start that a rank takes now, and the bytes of weights that it has loaded."""

    rank: int
    step: str
    number: int  # of the step, from 1
    num_steps: int
    num_bytes: int = 0
    total_bytes: int = 0  # 0: not known
    detail: str = ""  # how far it is, in words


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reports that the engine cannot start. ``kind`` is the name of the error's class in ``segue.errors``."""

    kind: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Shows that a worker process lives. Each rank sends one about once per second."""

    rank: int
    turn_s: float  # seconds that its loop has spent on the current turn, such as a step; 0: it waits
    owner_lost: bool = False  # the memory service that has its memory is away


class LapsCounters(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What length-aware prefill scheduling has done since the start, and how things are now."""

    waiting: dict[str, int]  # requests, by class
    picks: dict[str, int]  # steps with prefill work, and waits for short prompts, by reason
    chunks: int  # steps with chunks of long prompts
    chunk_tokens: int  # in them
    window_s: float  # that short prompts have waited for others
    error_p50: float  # of the predicted seconds of steps, relative, lately
    error_p90: float


class HandoverCounters(msgspec.Struct, array_like=True, kw_only=True):
    """What handing over has done since the start, and how things are now."""

    offers: dict[str, int] = {}  # by state
    leases: dict[str, int] = {}  # by state
    num_sent: int = 0  # requests whose KV was handed over to another worker
    num_adopted: int = 0  # requests that go on with KV of another worker
    recomputed: dict[str, int] = {}  # requests that computed their prompts themselves, by reason
    failed: dict[str, int] = {}  # requests that failed because their KV did not come, by reason
    num_pages: int = 0  # pages that were sent to other workers, or that adopted requests got from others
    adopt_s: float = 0.0  # from the first tokens of adopted requests to their adoption, in sum


class Counters(msgspec.Struct, array_like=True, kw_only=True):
    """State and totals for metrics. Every scheduler output carries them."""

    paused: PauseMode | None = None  # the pause that a client asked for; None: none, or it was ended
    is_paused: bool = False  # whether the pause has taken effect
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0  # pages of requests and of the prefix cache
    cached_pages: int = 0  # pages of the prefix cache
    num_preemptions: int = 0  # from here on, totals since the start
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    graph_hits: dict[str, int] = {}  # steps that replayed a graph, by its kind
    eager_steps: dict[EagerReason, int] = {}  # steps that replayed none, by reason
    padded_tokens: int = 0  # tokens computed only to fill a graph's bucket
    non_finite_logits: int = 0  # requests that ended because of such logits
    num_accepted: int = 0  # requests accepted, ended ones included
    laps: LapsCounters | None = None  # None: LAPS is off
    handover: HandoverCounters | None = None  # None: the engine hands no KV over
    released: list[MemoryTag] = []  # memory that was given back to the system, and is not here
    warm_pages: int = 0  # KV pages that this engine took over from the one before, when it woke
    warm_refused: ColdReason | None = None  # why it took none; None: it did, or there is no --warm-kv
    taken_pages: int = 0  # held by requests, offers and leases; all others are free or may be evicted
    # rank -> kernels that it has compiled since it was ready, and that it has loaded from the cache on disk;
    # ranks that have done neither are not there
    compiled_kernels: dict[int, int] = {}
    loaded_kernels: dict[int, int] = {}


class SchedulerOutput(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The output of one turn of the scheduler. ``tokens[i]`` is the new token of request ``rids[i]``."""

    rids: list[str]
    tokens: list[int]
    finished: list[Finished]
    counters: Counters
    step_seconds: float = 0.0  # 0: no step ended in this turn
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    long: list[str] = []  # requests that came as long prompts, of those that have their first token now


class State(Call, frozen=True, tag=True, array_like=True):
    """The reply to :class:`GetState`."""

    state: dict[str, Any]
    problems: list[str]  # violated invariants


class EngineLoad(Call, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to :class:`GetLoad`: what a router needs to know in order to choose between engines."""

    load: WorkerLoad
    coefficients: tuple[float, float, float, float, float]  # as in `WorkerReport`
    identity: KVIdentity  # of KV that is computed now
    num_flushes: int  # how often the prefix cache was emptied
    refused: dict[str, str]  # as in `WorkerReport`


class RoleSet(Call, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to :class:`SetRole`: the present role."""

    role: Role
    control_address: str | None = None  # where KV is handed over; None: nowhere, or as before an ``error``
    error: str = ""  # why the role was not changed; empty: it was


class PauseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a pause on the requests. Nothing runs any more."""

    mode: PauseMode | None  # the present mode, perhaps stronger than the one asked for; None: continued since
    num_running: int
    num_waiting: int
    num_retracted: int  # by this pause
    num_aborted: int
    num_pages_leaving: int = 0  # that other workers may still read or write; they come home without a call
    drained_ms: float  # from when the pause was sent to the end of the last step


class Paused(PauseResult, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to :class:`Pause`: nothing runs on any rank."""

    call: int


class Continued(Call, frozen=True, tag=True, array_like=True):
    """The reply to :class:`Continue`."""


class FlushResult(msgspec.Struct, frozen=True):
    """Whether the KV cache was emptied."""

    success: bool
    flushed_items: int = 0  # tokens whose KV was dropped
    error_msg: str = ""  # why the cache was not emptied, and the remedy


class Flushed(FlushResult, frozen=True, tag=True, array_like=True, kw_only=True):
    """The reply to :class:`Flush`."""

    call: int


CallAnswer = (
    State | EngineLoad | RoleSet | Paused | Continued | Flushed | WeightAnswer | MemoryAnswer | ProfileAnswer
)
# What the workers say of themselves.
WorkerMessage = Ready | StartFailed | StartStep | Heartbeat | RankAnswer
SchedulerMessage = WorkerMessage | SchedulerOutput | Rejected | CallAnswer | WeightNotice
