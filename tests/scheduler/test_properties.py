"""Stateful property test: with events in any order, the invariants hold and the outputs are right."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue.laps.pick import PrefillPolicy
from segue.messages.control import LapsLimits
from segue.messages.guided import GrammarSpec
from segue.messages.requests import Abort, Finish
from segue.messages.steps import NON_FINITE
from segue.scheduler.prefill import FirstCome
from segue.scheduler.request import Request
from tests.scheduler.simulation import VOCAB, HoldBack, Simulation

# The prompts share prefixes, so that requests share pages of the prefix cache.
STEMS = [[7] * 40, list(range(30)), [1, 2, 3]]
prompts = st.builds(
    lambda stem, cut, suffix: (stem[:cut] + suffix) or [0],
    st.sampled_from(STEMS),
    st.integers(0, 40),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
)


LAPS = LapsLimits(threshold=6, long_share=0.3, slo_s=0.05, blocking_s=0.02, window_s=0.01)
# With LAPS the clock moves with every step. Each item has the first arguments of a simulation.
Policies = tuple[PrefillPolicy[Request] | None, LapsLimits | None]
policies: st.SearchStrategy[Policies] = st.sampled_from(
    [(FirstCome(), None), (HoldBack(3), None), (None, LAPS), (None, LAPS)]
)
grammars = st.sampled_from([None, None, GrammarSpec("regex", "a")])  # what it says makes no difference
# Output tokens that a request begins with: none in most cases, and sometimes all that it can have.
known = st.sampled_from([0, 0, 0, 1, 2, 7, 40])


class StepMachine(RuleBasedStateMachine):
    """The base of every machine: it runs steps, with up to two in flight, and moves the clock."""

    sim: Simulation

    @precondition(lambda self: len(self.sim.results) <= 1)
    @rule()
    def launch(self) -> None:
        self.sim.launch()

    @precondition(lambda self: self.sim.results)
    @rule()
    def apply(self) -> None:
        self.sim.apply()

    @rule(turns=st.integers(1, 12), overlap=st.booleans())
    def run_some(self, turns: int, overlap: bool) -> None:
        while len(self.sim.results) > (1 if overlap else 0):
            self.sim.apply()
        for _ in range(turns):
            if overlap:
                self.sim.overlapped_step()
            else:
                self.sim.step()

    @rule(can_guide=st.booleans())
    def guides(self, can_guide: bool) -> None:
        """Processes that follow grammars end, or are ready."""
        self.sim.scheduler.can_guide = can_guide

    @rule(seconds=st.integers(0, 6))
    def timer(self, seconds: int) -> None:
        self.sim.pass_time(seconds)


class SchedulerMachine(StepMachine):
    """Requests, steps, aborts, stop strings and new weights in any order, with up to two steps in flight."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        spare=st.integers(0, 8),
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 5, 16, 64]),
        prefix=st.booleans(),
        policy=policies,
    )
    def start(
        self,
        page_size: int,
        spare: int,
        slots: int,
        chunk: int,
        prefix: bool,
        policy: Policies,
    ) -> None:
        max_seq_len = 64
        self.sim = Simulation(
            *policy,
            num_pages=-(-max_seq_len // page_size) + spare,
            page_size=page_size,
            max_seq_len=max_seq_len,
            max_running_requests=slots,
            chunked_prefill_size=chunk,
            disable_prefix_cache=not prefix,
        )
        self.count = 0
        self.version = 0

    @rule(
        prompt=prompts,
        max_new_tokens=st.integers(0, 40),
        priority=st.integers(-1, 1),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        logprobs_from=st.sampled_from([-1, -1, 0, 3]),
        num_known=known,
        salt=st.sampled_from(["", "", "one", "other"]),
        grammar=grammars,
    )
    def add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        priority: int,
        stops: set[int],
        logprobs_from: int,
        num_known: int,
        salt: str,
        grammar: GrammarSpec | None,
    ) -> None:
        self.count += 1
        self.sim.add(
            f"r{self.count}",
            prompt,
            priority=priority,
            num_known=num_known,
            salt=salt,
            grammar=grammar,
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(stops),
            prompt_logprobs_start=logprobs_from,
        )

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.sim.scheduler.requests)))
        self.sim.end(self.sim.scheduler.abort(Abort(rid)))
        assert self.sim.finished[rid].reason == "abort"

    @precondition(lambda self: any(result.tokens for result in self.sim.results))
    @rule(data=st.data())
    def make_non_finite(self, data: st.DataObject) -> None:
        """Make the logits of one sequence in flight non-finite."""
        at = data.draw(st.sampled_from([i for i, result in enumerate(self.sim.results) if result.tokens]))
        tokens = list(self.sim.results[at].tokens)
        tokens[data.draw(st.integers(0, len(tokens) - 1))] = NON_FINITE
        self.sim.results[at] = msgspec.structs.replace(self.sim.results[at], tokens=tokens)

    @rule()
    def abort_all(self) -> None:
        self.sim.end(self.sim.scheduler.abort(Abort(abort_all=True)))
        assert not self.sim.scheduler.has_work

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.sim.scheduler.requests)))
        count = data.draw(st.integers(0, len(self.sim.outputs[rid])))
        self.sim.end(self.sim.scheduler.finish(Finish(rid, count)))
        assert self.sim.finished[rid].num_tokens == count

    @precondition(lambda self: not self.sim.results)
    @rule()
    def new_weights(self) -> None:
        self.version += 1
        self.sim.scheduler.weights.commit(str(self.version), flush_cache=False)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.scheduler.can_guide = True
        while len(self.sim.results) > 1:
            self.sim.apply()
        self.sim.run(overlap=True)
        sim = self.sim
        assert set(sim.finished) == set(sim.prompts), "every request ends exactly once"
        for rid in sim.finished:
            sim.check_end(rid)
        free = sim.scheduler.resources.num_available
        assert free == sim.limits.num_pages, "all pages are free or can be evicted"


def _settings(steps: int) -> settings:
    per_example = 50
    return settings(
        max_examples=steps // per_example,
        stateful_step_count=per_example,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # no Phase.shrink: it can take minutes
        print_blob=True,
    )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _settings(4_000)


class LongSchedulerMachine(SchedulerMachine):
    """The same machine with more steps, for ``make soak``."""


TestSchedulerLong = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestSchedulerLong.settings = _settings(50_000)


@pytest.mark.parametrize("seed", range(6))
def test_repeated_prompts_keep_their_pages_while_the_cache_is_full(seed: int) -> None:
    """Fills the cache and then matches pages that are about to be evicted, which Hypothesis seldom does."""
    random = Random(seed)
    size = random.choice([2, 4])
    sim = Simulation(num_pages=64 // size + 2, page_size=size, max_seq_len=64, max_running_requests=3)
    again = [random.choices(range(VOCAB), k=size * random.randint(1, 4)) for _ in range(4)]
    for number in range(150):
        prompt = random.choice([*again, random.choices(range(VOCAB), k=random.randint(1, 20))])
        sim.add(f"r{number}", list(prompt), max_new_tokens=random.randint(1, 12))
        for _ in range(random.randint(0, 6)):
            sim.overlapped_step()
        sim.check()
    sim.run(overlap=True)
