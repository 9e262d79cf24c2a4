"""A fake device under the pure scheduler: it checks every page that a plan reads.

Each KV position remembers a hash of its whole prefix and the version of the weights that wrote it, so a page
that was freed too early, shared wrongly or mapped twice is found at the first read. The next token is a
function of the prefix alone, so a request's output is known beforehand and does not depend on the schedule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from segue.config import EngineConfig
from segue.laps.pick import PrefillChoice, PrefillPolicy, PrefillView
from segue.messages.control import EngineLimits, LapsLimits, SchedulerOutput
from segue.messages.requests import (
    AddRequest,
    Finished,
    Rejected,
    SamplingParams,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from segue.messages.steps import StepPlan, StepResult
from segue.scheduler.invariants import find_problems
from segue.scheduler.prefill import FirstCome
from segue.scheduler.request import Request
from segue.scheduler.scheduler import Scheduler

VOCAB = 50


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake model."""
    return hash((VOCAB, seed, *tokens)) % VOCAB  # integers only: the hash of a string differs in each process


def prefix_of(tokens: list[int], salt: str = "") -> int:
    """Returns what the fake device writes as the KV of the last token: no two prefixes or salts share it."""
    return hash((salt, *tokens))


def expected_output(prompt: list[int], params: SamplingParams, max_seq_len: int) -> list[int]:
    """Returns the output tokens that a request must get under any schedule."""
    tokens = list(prompt)
    limit = min(params.max_new_tokens, max_seq_len - len(prompt))
    while len(tokens) - len(prompt) < limit:
        tokens.append(next_token(tokens, params.seed))
        if tokens[-1] in params.stop_token_ids and len(tokens) - len(prompt) >= params.min_new_tokens:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeDevice:
    """Executes plans in launch order, as one CUDA stream would."""

    limits: EngineLimits
    step: int = 0
    num_owners: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)  # slot -> token pool
    seeds: dict[int, int] = field(default_factory=dict)  # slot -> seed
    max_len: dict[int, int] = field(default_factory=dict)  # slot -> tokens at its end by length
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # slot -> page index -> page
    kv: dict[tuple[int, int], tuple[int, str]] = field(
        default_factory=dict
    )  # (page, offset) -> (prefix, version)
    born: dict[int, str] = field(default_factory=dict)  # slot -> weight version of its first KV
    owner: dict[int, int] = field(default_factory=dict)  # slot -> running number of its request
    salts: dict[int, str] = field(default_factory=dict)  # slot -> salt of its request, which no device knows
    unapplied: deque[dict[int, set[int]]] = field(
        default_factory=deque
    )  # per step in flight: page -> requests

    def launch(self, plan: StepPlan, version: str) -> StepResult:
        """Run a step; asserts that it reads only KV that was written for the same prefix."""
        assert plan.step == self.step + 1
        self.step = plan.step
        for new in plan.new_slots:
            self.tokens[new.slot] = unpack_ids(new.tokens)
            self.seeds[new.slot] = new.params.seed
            # A prompt that is only to be computed is sampled from, too: the scheduler drops that token.
            most = max(1, new.params.max_new_tokens)
            self.max_len[new.slot] = min(new.prompt_len + most, self.limits.max_seq_len)
            self.tables[new.slot] = {}
            self.born[new.slot] = version
            self.num_owners += 1
            self.owner[new.slot] = self.num_owners
        entries = [(slot, first + i) for slot, first, pages in plan.pages for i in range(len(pages))]
        assert len(entries) == len(set(entries)), "a plan sets an entry twice: a device may take either"
        for slot, first, pages in plan.pages:
            self.tables[slot].update(enumerate(pages, first))
        assert all(count > 0 for count in plan.lens), "a sequence without tokens"
        assert plan.lens[: plan.num_decode] == [1] * plan.num_decode
        assert len(set(plan.slots)) == len(plan.slots) <= self.limits.max_running_requests
        assert sum(plan.lens[plan.num_decode :]) <= self.limits.chunked_prefill_size
        touched: dict[int, set[int]] = {}
        sampled: list[int] = []
        prompt_logprobs = {}
        for index, slot in enumerate(plan.slots):
            start, end = plan.starts[index], plan.starts[index] + plan.lens[index]
            tokens, table = self.tokens[slot], self.tables[slot]
            assert end <= len(tokens), "a position is computed before its token is known"
            for position in range(end):
                entry = (table[position // self.limits.page_size], position % self.limits.page_size)
                prefix = prefix_of(tokens[: position + 1], self.salts.get(slot, ""))
                if position >= start:
                    self.kv[entry] = (prefix, version)
                    users = set().union(*(step.get(entry[0], ()) for step in self.unapplied))
                    assert users <= {self.owner[slot]}, (
                        f"page {entry[0]} is written, but a step in flight uses it"
                    )
                touched.setdefault(entry[0], set()).add(self.owner[slot])
                assert self.kv[entry][0] == prefix, f"slot {slot} reads foreign KV at position {position}"
                self.check_version(slot, self.kv[entry][1])
            if (n := plan.num_logits[index]) > plan.samples[index]:
                prompt_logprobs[slot] = [TokenLogprob(t, -1.0) for t in tokens[end - n + 1 : end + 1]]
            if plan.samples[index]:
                assert end == len(tokens)
                tokens.append(next_token(tokens, self.seeds[slot]))
                sampled.append(tokens[-1])
                assert len(tokens) <= self.max_len[slot], "a step for a request whose end by length was known"
        self.unapplied.append(touched)
        return StepResult(plan.step, sampled, 0.001, None, prompt_logprobs)

    def check_version(self, slot: int, version: str) -> None:
        """Assert that a request may read KV of a version of the weights."""
        assert int(version) >= int(self.born[slot]), "KV of old weights was shared"


@dataclass
class HoldBack(FirstCome):
    """A policy that lets every request wait for so many seconds first, and then takes the shortest one."""

    seconds: float

    def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
        due = {request: request.added_at + self.seconds for request in view.short}
        ready = sorted((r for r in due if now >= due[r]), key=lambda r: (len(r.tokens), r.arrival))
        later = [time for time in due.values() if time > now]
        prompts = [*view.started, *ready[: view.num_slots]]
        return PrefillChoice(prompts=prompts, budget=view.budget, wake_at=min(later, default=None))


class Simulation:
    """A scheduler, its fake device, and the outputs that the clients have received.

    Its clock ``now``, in seconds, moves by :meth:`pass_time`, and with ``laps`` by each token computed.
    """

    def __init__(
        self,
        policy: PrefillPolicy[Request] | None = None,
        laps: LapsLimits | None = None,
        **options: int | str,
    ) -> None:
        defaults: dict[str, int | str] = {
            "num_pages": 64,
            "page_size": 4,
            "max_seq_len": 100,
            "max_running_requests": 4,
            "max_queued_requests": 100,
            "chunked_prefill_size": 16,
        }
        options = defaults | options
        sizes = {name: options.pop(name) for name in EngineLimits.__struct_fields__ if name in options}
        self.limits = EngineLimits(**sizes, laps=laps)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.limits, EngineConfig(**options), policy)  # type: ignore[arg-type]
        self.holds_back = laps is not None or isinstance(policy, HoldBack)
        self.now = 0.0
        self.device = FakeDevice(self.limits)
        self.results: deque[StepResult] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.num_known: dict[str, int] = {}  # output tokens that a request began with
        self.outputs: dict[str, list[int]] = {}  # those tokens included
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}

    def add(
        self,
        rid: str,
        prompt: list[int],
        *,
        priority: int = 0,
        num_known: int = 0,
        salt: str = "",
        **params: object,
    ) -> None:
        """Send a request, which must be accepted; it begins with its first ``num_known`` output tokens."""
        self.prompts[rid] = prompt
        self.params[rid] = SamplingParams(**({"max_new_tokens": 8} | params))  # type: ignore[arg-type]
        known = self.expected(rid)[:num_known]
        self.num_known[rid], self.outputs[rid], self.prompt_logprobs[rid] = len(known), known, []
        message = AddRequest(
            rid=rid,
            prompt=pack_ids(prompt),
            params=self.params[rid],
            priority=priority,
            outputs=pack_ids(known),
            cache_salt=salt,
        )
        answer = self.scheduler.add(message, self.now)
        assert not isinstance(answer, Rejected)
        is_over = bool(known) and known == self.expected(rid)
        assert (answer is not None) == is_over, "it ends at once if nothing is left"
        self.end([answer] if answer else [])

    def expected(self, rid: str) -> list[int]:
        """Returns the output tokens that a request must get."""
        return expected_output(self.prompts[rid], self.params[rid], self.limits.max_seq_len)

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds

    def launch(self) -> StepPlan | None:
        """Plan and launch a step."""
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            can_guide = self.scheduler.can_guide
            guided = any(new.params.grammar is not None for new in plan.new_slots)
            assert can_guide or not guided, "a guided request begins before grammars can be followed"
            self.results.append(self.run_on_device(plan))
        return plan

    def run_on_device(self, plan: StepPlan) -> StepResult:
        """Launch a step, and return its result, which nobody knows yet."""
        self.device.salts |= {r.slot: r.cache_salt for r in self.scheduler.running.values()}
        return self.device.launch(plan, str(self.scheduler.kv_epoch))

    def apply(self) -> SchedulerOutput:
        """Apply the oldest result."""
        if self.limits.laps is not None:
            self.now += 0.004 + 0.001 * self.scheduler.in_flight[0].work.tokens
        output = self.scheduler.apply(self.results.popleft(), self.now)
        self.device.unapplied.popleft()
        for rid, token in zip(output.rids, output.tokens, strict=True):
            assert rid not in self.finished, "a token after the end"
            self.outputs[rid].append(token)
        for rid, logprobs in output.prompt_logprobs.items():
            self.prompt_logprobs[rid] += [entry.token for entry in logprobs]
        self.end(output.finished)
        return output

    def end(self, finished: list[Finished]) -> None:
        """Note the ends of requests; no request may end twice."""
        for item in finished:
            assert item.rid not in self.finished, "a request ended twice"
            self.finished[item.rid] = item

    def step(self) -> bool:
        """One turn of the normal loop: launch, then apply; False if there was nothing to launch."""
        if self.launch() is None:
            return False
        self.apply()
        return True

    def overlapped_step(self) -> bool:
        """One turn of the overlap loop: launch a step, then apply the one before; False if it did neither."""
        launched = self.launch() is not None
        if applies := len(self.results) > launched:
            self.apply()
        return launched or applies

    def run(self, *, overlap: bool = False) -> None:
        """Run until nothing is left to do; fails if work is left but no progress is made."""
        for _ in range(10_000):
            if self.overlapped_step() if overlap else self.step():
                continue
            if self.scheduler.wake_at is None:
                break
            assert self.scheduler.wake_at > self.now, "the policy holds nothing back any more"
            self.pass_time(self.scheduler.wake_at - self.now)
        self.check()
        assert not self.scheduler.has_work, "requests are left, but nothing is planned"

    def check(self) -> None:
        """Assert that the invariants hold and that the outputs so far are those of the fake model."""
        assert find_problems(self.scheduler) == []
        for rid, output in self.outputs.items():
            expected = self.expected(rid)
            assert output == expected[: len(output)]
            if rid in self.finished and self.finished[rid].reason == "length":
                assert output == expected

    def check_end(self, rid: str) -> None:
        """Assert that the end of a request reports its tokens, and that it got its prompt's logprobs."""
        finished, num_known = self.finished[rid], self.num_known[rid]
        num_covered = sum(end - start for _, start, end in finished.versions)
        assert num_covered == max(0, finished.num_tokens - num_known)
        assert finished.cached_tokens <= finished.prompt_tokens == len(self.prompts[rid])
        first = self.params[rid].prompt_logprobs_start
        is_scored = finished.reason == "length" and not self.params[rid].max_new_tokens
        has_run = len(self.outputs[rid]) > num_known or is_scored
        if first >= 0 and finished.reason in ("length", "stop") and has_run:
            assert self.prompt_logprobs[rid] == self.prompts[rid][max(1, first) :]
