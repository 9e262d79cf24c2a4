"""One request inside the scheduler: its phase, tokens, slot and pages; and one step that runs requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import get_args

from segue.kvcache.prefix_cache import Node
from segue.laps.classes import PromptClass
from segue.laps.cost import NO_WORK, StepWork
from segue.messages.requests import FinishReason, Handoff, SamplingMode, SamplingParams
from segue.messages.steps import StepPlan

_SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)


class RequestPhase(Enum):
    """The phase of a request; it owns a slot and pages in PREFILL and DECODE only.

    Admission leads from WAITING to PREFILL, the last prefill chunk to DECODE, a retraction back to WAITING.
    A request whose prompt another worker computes begins in AWAIT, and goes on in DECODE, or in WAITING if
    the KV does not come. A request may end in any phase: it is FINISHED.
    """

    AWAIT = auto()
    WAITING = auto()
    PREFILL = auto()  # some of its known tokens have no KV yet
    DECODE = auto()  # one token per step
    FINISHED = auto()


# The same phases; on Python 3.11 reading one from its class takes 140 ns, for each request and step.
AWAIT, WAITING, PREFILL, DECODE, FINISHED = RequestPhase

_NEXT = {
    AWAIT: {DECODE, WAITING, FINISHED},
    WAITING: {PREFILL, FINISHED},
    PREFILL: {DECODE, WAITING, FINISHED},
    DECODE: {WAITING, FINISHED},
    FINISHED: set[RequestPhase](),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request. Positions count from the first prompt token; a position is computed once its KV is.

    ``launched`` and ``outputs_launched`` count the work of steps in flight too. With overlap they are
    therefore ahead of ``tokens``, which has only the tokens whose ids the host knows.
    """

    rid: str
    params: SamplingParams
    tokens: list[int]  # the prompt, then the output tokens known on the host
    prompt_len: int
    num_given: int = 0  # output tokens that it arrived with
    most_outputs: int  # output tokens that it may have here; those that it arrived with count too
    hands_over: bool = False  # whether it goes on elsewhere once it has that many
    handoff: Handoff | None = None
    priority: int
    arrival: int  # 1, 2, 3, …; a retracted request keeps its number, and so its queue position
    added_at: float  # seconds, by the clock of `Scheduler.plan`
    deadline: float = inf  # when its first token is due, by the same clock
    admitted_at: float = 0.0  # when it was first admitted; 0: it was not
    first_at: float = 0.0  # when its first token was known, or came from a prefill worker; 0: it was not
    taken_over_at: float = 0.0  # when the KV of its prompt had come from a prefill worker; 0: it did not
    # Whether it was admitted before, arrived with output tokens, or awaits KV that was begun before a pause.
    has_begun: bool
    shares_kv: bool = True  # whether it uses the prefix cache
    cache_salt: str = ""  # it shares KV with requests of the same salt only
    stop_ids: frozenset[int] = field(init=False)
    sampling_mode: SamplingMode = field(init=False)
    phase: RequestPhase = WAITING
    outputs_launched: int = field(init=False)  # output tokens known, or sampled by a step in flight
    versions: list[tuple[str, int, int]] = field(default_factory=list)  # (weight version, start, end)
    prompt_logprobs_next: int = field(init=False)  # first prompt position still owed; -1: none
    prompt_class: PromptClass = "short"  # without LAPS all prompts are
    came_long: bool = False  # whether it was a long one when it arrived, until it has its first token
    expected_hit: int = 0  # tokens that the prefix cache had when it was last classified while it waited
    cached_tokens: int = -1  # prompt tokens that its first admission found cached; -1: not admitted

    slot: int = -1
    launched: int = 0  # positions that all launched steps compute
    pages: list[int] = field(default_factory=list)  # in token order: first the prefix cache's, then its own
    capacity: int = 0  # positions that the pages have room for
    node: Node | None = None  # the deepest locked node of the prefix cache
    num_inserted: int = 0  # leading pages that belong to the prefix cache
    kv_epoch: int = -1  # the weights' epoch at its admission

    def __post_init__(self) -> None:
        """Derive what the parameters and tokens imply."""
        self.stop_ids = frozenset(self.params.stop_token_ids)
        self.sampling_mode = self.params.sampling_mode
        self.outputs_launched = self.num_outputs
        self.prompt_logprobs_next = self.params.prompt_logprobs_start

    def queue_key(self) -> tuple[int, float, int]:
        """The place in the waiting queue: the highest priority, then the earliest deadline, then arrival."""
        return (-self.priority, self.deadline, self.arrival)

    @property
    def history(self) -> int:
        """Known tokens with KV; while it waits, those that are expected to be found in the prefix cache."""
        return self.expected_hit if self.phase is WAITING else self.launched

    @property
    def remaining(self) -> int:
        """Known tokens without KV."""
        return len(self.tokens) - self.history

    @property
    def num_outputs(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_decode(self) -> bool:
        """Whether it takes part in the next decode.

        It does not once its last output token is launched, even if the host does not know that token yet.
        """
        return self.phase is DECODE and self.outputs_launched < self.most_outputs

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens were asked for and some are not launched yet."""
        return 0 <= self.prompt_logprobs_next < self.prompt_len

    @property
    def own_pages(self) -> list[int]:
        """Pages that belong to this request and not to the prefix cache."""
        return self.pages[self.num_inserted :]

    def enter(self, phase: RequestPhase) -> None:
        """Change the phase; nothing else changes it."""
        assert phase in _NEXT[self.phase], f"request {self.rid}: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def add_token(self, token: int, version: str) -> None:
        """Append a sampled token; ``version`` is that of the weights that made it.

        Consecutive tokens of the same version share one entry of ``versions``.
        """
        at = len(self.tokens) - self.prompt_len
        self.tokens.append(token)
        spans = self.versions
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + 1)
        else:
            spans.append((version, at, at + 1))

    def end_by_output(self) -> FinishReason | None:
        """Returns how the last output token ends the request; None if it goes on."""
        count = len(self.tokens) - self.prompt_len  # 0: the last token is the prompt's, and ends nothing
        # Under a grammar a stop token is drawn too early only where nothing else may come.
        least = self.params.min_new_tokens if self.params.grammar is None else 0
        if self.tokens[-1] in self.stop_ids and 0 < count >= least:
            return "stop"
        if count < self.most_outputs:
            return None
        return "handoff" if self.hands_over else "length"

    def forget_kv(self) -> None:
        """Reset all KV state but keep the tokens; its slot, pages and lock have been released before."""
        self.slot = self.kv_epoch = -1
        self.launched = self.capacity = self.num_inserted = 0
        self.pages = []
        self.node = None
        self.outputs_launched = self.num_outputs


@dataclass(slots=True, eq=False)
class Step:
    """One step: it is filled while it is planned, and kept until its result is applied."""

    plan: StepPlan  # the message to the model runners; nothing changes it once it is sent
    version: str  # name of the weights that the step runs with
    planned_at: float  # seconds; it is launched at once
    sampling: list[Request] = field(default_factory=list)  # they sample a token, in the order of the result
    prompt_logprobs: list[tuple[Request, int]] = field(default_factory=list)  # (request, number of them)
    work: StepWork = NO_WORK  # what it computes
    long_work: StepWork = NO_WORK  # its part for long prompts
    came_long: list[Request] = field(default_factory=list)  # long prompts that get their first token by it

    def decode(self, requests: list[Request]) -> None:
        """Add the decode part, one token per request, before any prefill: decode sequences come first.

        Each request computes the position of its newest token, whose id only the device may know, and samples
        the next one.
        """
        plan, count = self.plan, len(requests)
        plan.num_decode = count
        plan.slots = [r.slot for r in requests]
        plan.starts = [r.launched for r in requests]
        self.work = StepWork(decode_rows=count, decode_kv=sum(plan.starts))
        plan.lens, plan.num_logits, plan.samples = [1] * count, [1] * count, [True] * count
        self.sampling = requests
        for request in requests:
            request.launched += 1
            request.outputs_launched += 1
        self._sample_with(*{request.sampling_mode for request in requests})

    def prefill(self, request: Request, budget: int) -> int:
        """Add the next prefill chunk of a request, at most ``budget`` tokens; returns its length.

        The last chunk samples a token. The request decodes from then on, if it may draw further tokens.
        """
        plan, start = self.plan, request.launched
        count = min(budget, len(request.tokens) - start)
        assert count > 0, f"request {request.rid}: a chunk of {count} tokens"
        last = start + count == len(request.tokens)
        num_logits = int(last)
        if request.owes_prompt_logprobs:
            # The logits at position p score the token at p + 1. A chunk therefore needs the logits of all its
            # positions but the last prompt position, which samples. The token at position 0 has no logprob.
            first = max(start, request.prompt_logprobs_next - 1)
            end = min(start + count, request.prompt_len - 1)
            if first < end:
                num_logits = start + count - first
                request.prompt_logprobs_next = end + 1
                self.prompt_logprobs.append((request, end - first))
                self._sample_with("full")
        self.work = self.work.plus(count, start)
        if request.prompt_class == "long":
            self.long_work = self.long_work.plus(count, start)
        plan.slots.append(request.slot)
        plan.starts.append(start)
        plan.lens.append(count)
        plan.num_logits.append(num_logits)
        plan.samples.append(last)
        request.launched += count
        if last:
            if request.most_outputs:  # else the sampled token is of no interest, see `take_result`
                request.outputs_launched += 1
            request.enter(DECODE)
            self.sampling.append(request)
            if request.came_long:
                request.came_long = False
                self.came_long.append(request)
            self._sample_with(request.sampling_mode)
        return count

    def _sample_with(self, *modes: SamplingMode) -> None:
        """Make the step's sampling mode the most general of ``modes`` and its own: a step has one mode."""
        self.plan.sampling_mode = max([self.plan.sampling_mode, *modes], key=_SAMPLING_MODES.index)
