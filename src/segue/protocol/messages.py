"""Structs that cross a process border, encoded with msgspec.

Conversations: frontend -> scheduler (``FrontendMessage``), scheduler -> frontend (``SchedulerMessage``),
rank 0 -> the other tensor-parallel ranks (``RankMessage``), and back (``RankEvent``). Token ids travel as
int32 little-endian bytes where a list could be long, because msgpack would spend an object on each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from segue.protocol.weights import (
    RankReply,
    Received,
    WeightAnswer,
    WeightCall,
    WeightCommand,
    WeightNotice,
    WithdrawCall,
)

FIRST_WEIGHT_VERSION = "0"
BEFORE_PREFILL = "Abort before prefill"  # what is said of a request that was aborted then
NON_FINITE = -1  # in place of a sampled token: its logits were NaN, plus infinity, or only minus infinity
FinishReason = Literal["stop", "length", "abort", "error"]
# What a pause does to requests: lets those that run end; leaves all where they are; takes rows and pages back
# and has them wait; ends them. Each is stronger than the one before it.
PauseMode = Literal["wait", "in_place", "retract", "abort"]
Tail = Literal["plain", "filtered", "full"]  # each does what the one before it does, and more
# Why a step ran without a graph: there are none; no bucket holds its tokens, or it would be mostly padding;
# more prompts than a bucket has room for; hidden states are wanted that graphs do not keep.
EagerReason = Literal["disabled", "tokens", "prompts", "prompt_logprobs"]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`."""
    return array("i", data).tolist()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one request is sampled; validated by the frontend, so the scheduler and the runner trust it."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # random numbers are keyed by (seed, position), nothing else
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[
        int, ...
    ] = ()  # every id that ends the request: EOS (unless ignored) and the client's own
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: and of the n likeliest
    prompt_logprobs_start: int = -1  # -1: none; else the first prompt position whose logprob is wanted

    @property
    def tail(self) -> Tail:
        """What choosing a token takes.

        ``plain``: argmax, or temperature with keyed noise. ``filtered``: top-k, top-p or min-p too. Both give
        the chosen token's log-probability, which RL asks for with every token. ``full``: anything else.
        """
        if (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_new_tokens > 0
            or self.logprobs > 0
        ):
            return "full"
        return "filtered" if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 else "plain"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural-log probability of a token, and of the likeliest alternatives at its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


# --- rank 0 -> every rank: what to run ---


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row of the device's batch state; its pages come in the same plan."""

    row: int
    tokens: bytes  # all tokens known so far: the prompt, and after a retraction the output too
    prompt_len: int
    params: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step: deltas to the batch state, then the sequences to run, decode rows first.

    ``rows``, ``starts``, ``lens``, ``num_logits`` and ``samples`` are parallel, one entry a sequence.
    """

    step: int  # 1, 2, 3, …; a gap is fatal
    new_rows: list[NewRow]
    pages: list[tuple[int, int, list[int]]]  # (row, index of the first, page ids): appended to the page table
    num_decode: int  # the first so many sequences run one token each, the one their row sampled last
    rows: list[int]
    starts: list[int]  # first position computed
    lens: list[int]  # positions computed
    num_logits: list[int]  # trailing positions whose logits are needed: 0, 1, or more for prompt logprobs
    samples: list[bool]  # whether the last position samples a token
    tail: Tail

    @property
    def num_tokens(self) -> int:
        """Positions computed by the step."""
        return sum(self.lens)


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Finish every step sent before, then answer with :class:`Drained`."""


class Drained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Drain`: this rank runs nothing."""


RankMessage = StepPlan | Drain | WeightCommand
RankEvent = Drained | RankReply | Received


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step made: one token, or ``NON_FINITE``, for each sampling sequence, in plan order."""

    step: int
    tokens: list[int]
    seconds: float  # from launch to the tokens on the host
    logprobs: list[TokenLogprob | None] | None = None  # parallel to tokens
    prompt_logprobs: dict[
        int, list[TokenLogprob]
    ] = {}  # row -> of the prompt tokens behind the chunk's logits
    eager: EagerReason | None = "disabled"  # None: a graph was replayed
    padded_tokens: int = 0


# --- frontend -> scheduler ---


class AddRequest(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """A new request. ``priority``: larger runs first."""

    rid: str
    prompt: bytes  # int32 token ids
    params: SamplingParams
    priority: int = 0


class Finish(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The detokenizer found a stop string: the request ends with its first ``num_tokens`` output tokens."""

    rid: str
    num_tokens: int


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End one request, or all, wherever it is; an unknown rid does nothing."""

    rid: str = ""
    abort_all: bool = False
    message: str | None = None


class Pause(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop generating; answered by :class:`Paused` once no rank runs anything.

    Paused already, it may make the mode stronger, not weaker, and its time to live replaces the one before.
    """

    call: int
    mode: PauseMode
    ttl_s: float | None = None  # continue by itself after so long; None: never
    sent: float | None = None  # when, by the host's monotonic clock: the scheduler may be busy; None: now


class Continue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Generate again; answered by :class:`Continued`, also if nothing was paused."""

    call: int


class Flush(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget all cached KV and reset the scheduler's measures; answered by :class:`Flushed`."""

    call: int
    timeout_s: float = 0.0  # how long to wait until no live request owns KV


class GetState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the scheduler's state (``internal_states``); ``check`` also proves the invariants."""

    call: int
    check: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the scheduler loop."""


FrontendMessage = (
    AddRequest | Finish | Abort | Pause | Continue | Flush | GetState | Shutdown | WeightCall | WithdrawCall
)


# --- scheduler -> frontend ---


class InitStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of the runner's initialisation: its seconds and the bytes it took."""

    name: str
    seconds: float
    num_bytes: int
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The engine can serve; what was decided at start."""

    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    device: str
    dtype: str
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    init_steps: list[InitStep]


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start; ``kind`` is the name of the error's class in ``segue.errors``."""

    kind: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker process lives; sent by each rank about once per second."""

    rank: int
    turn_s: float  # seconds that its loop has been at one turn, such as a step; 0: it waits for messages


class Finished(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request's end, sent exactly once."""

    rid: str
    reason: FinishReason
    num_tokens: int  # output tokens that count
    prompt_tokens: int
    cached_tokens: int
    matched: int | None = None  # the stop token, where one ended it
    message: str | None = None
    versions: list[tuple[str, int, int]] = []  # (weight version, start, end) over the output tokens
    error: str | None = None  # the class in ``segue.errors`` of the error that ended it; None: it has a reply


class Counters(msgspec.Struct, array_like=True, kw_only=True):
    """State and running totals that ride on every output, for metrics."""

    paused: PauseMode | None = None  # what a client has asked for; None: nothing, or to continue
    is_paused: bool = False  # whether that has taken effect
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0  # pages of live requests and of the prefix cache
    cached_pages: int = 0  # pages of the prefix cache
    num_preemptions: int = 0  # totals from here on
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    graph_hits: int = 0  # steps that replayed a graph
    eager_steps: dict[EagerReason, int] = {}  # steps that did not, by reason
    padded_tokens: int = 0  # computed to fill graphs
    non_finite_logits: int = 0  # requests that ended because of them
    num_accepted: int = 0  # requests taken in, whatever has become of them


class StepOutput(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """What one turn of the scheduler tells the frontend. ``rids`` and ``tokens`` are parallel."""

    rids: list[str]
    tokens: list[int]
    finished: list[Finished]
    counters: Counters
    step_seconds: float = 0.0  # 0: no step was applied
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that was never accepted; ``kind`` is the name of the error's class in ``segue.errors``."""

    rid: str
    kind: str
    message: str


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`GetState`."""

    call: int
    state: dict[str, Any]
    problems: list[str] = []  # broken invariants


class Paused(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The answer to :class:`Pause`: nothing runs on any rank."""

    call: int
    mode: PauseMode | None  # the present one, perhaps stronger than what was asked for; None: continued since
    num_running: int
    num_waiting: int
    num_retracted: int  # by this pause
    num_aborted: int
    drained_ms: float  # from the sending of the message to the end of the last step


class Continued(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Continue`."""

    call: int


class Flushed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Flush`."""

    call: int
    success: bool
    flushed_items: int  # tokens whose KV was cached
    error_msg: str = ""  # why not, and the way out


SchedulerMessage = (
    Ready
    | StartFailed
    | Heartbeat
    | StepOutput
    | Rejected
    | State
    | Paused
    | Continued
    | Flushed
    | WeightAnswer
    | WeightNotice
)
