"""Stateful property test: pauses, continues, aborts and flushes in any order lose, keep and repeat nothing.

:class:`tests.scheduler.pausing.PausingSimulation` makes the comparisons after every event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from segue.laps.classes import PromptClass
from segue.messages.control import Pause, PauseMode
from segue.scheduler.pause import PauseControl
from segue.scheduler.prefill import PrefillPlanner
from segue.scheduler.request import Request
from segue.scheduler.resources import Resources
from segue.scheduler.scheduler import GUIDES_LOOK_S, Scheduler
from tests.scheduler.pausing import MODES, PausingSimulation
from tests.scheduler.test_properties import Policies, StepMachine, grammars, known, policies, prompts

MAX_SEQ_LEN = 64
modes = st.sampled_from(["in_place", "retract", *MODES])
salts = st.sampled_from(["", "", "one", "other"])
ttls = st.sampled_from([None, None, 0, 2, 9])
PHASES = (Phase.generate,)  # add Phase.shrink to debug a failure; it can take minutes


requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "params": st.fixed_dictionaries(
            {
                "max_new_tokens": st.integers(0, 40),
                "priority": st.integers(-1, 1),
                "num_known": known,
                "stop_token_ids": st.sampled_from([(), (), (3, 4)]),
                "prompt_logprobs_start": st.sampled_from([-1, -1, 0, 3]),
                "seed": st.integers(0, 3),
                "salt": salts,
                "grammar": grammars,
            }
        ),
    }
)


class PauseMachine(StepMachine):
    """Every event of the scheduler in any order, with up to two steps in flight."""

    sim: PausingSimulation
    num_steps = 0

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spare=st.integers(0, 8),  # hardly more pages than one request needs: requests are preempted
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 5, 16, 64]),
        prefix=st.booleans(),
        policy=policies,
        initial=st.lists(requests, max_size=4),
    )
    def start(
        self,
        page_size: int,
        spare: int,
        slots: int,
        chunk: int,
        prefix: bool,
        policy: Policies,
        initial: list[dict[str, Any]],
    ) -> None:
        self.sim = PausingSimulation(
            *policy,
            num_pages=-(-MAX_SEQ_LEN // page_size) + spare,
            page_size=page_size,
            max_seq_len=MAX_SEQ_LEN,
            max_running_requests=slots,
            max_queued_requests=1000,
            chunked_prefill_size=chunk,
            disable_prefix_cache=not prefix,
        )
        self.version = 0
        self.add(initial)

    @rule(added=st.lists(requests, min_size=1, max_size=4))
    def add(self, added: list[dict[str, Any]]) -> None:
        for fields in added:
            self.sim.add(f"r{len(self.sim.prompts)}", list(fields["prompt"]), **fields["params"])

    # With settle=False the next message arrives in the same turn of the loop.

    @rule(mode=modes, ttl_s=ttls, settle=st.booleans())
    def pause(self, mode: PauseMode, ttl_s: int | None, settle: bool) -> None:
        self.sim.pause(mode, ttl_s, settle=settle)

    @rule(turns=st.integers(1, 12), overlap=st.booleans(), mode=modes, ttl_s=ttls, settle=st.booleans())
    def pause_in_the_middle(
        self, turns: int, overlap: bool, mode: PauseMode, ttl_s: int | None, settle: bool
    ) -> None:
        self.run_some(turns, overlap)
        self.sim.pause(mode, ttl_s, settle=settle)

    @rule(settle=st.booleans())
    def proceed(self, settle: bool) -> None:
        self.sim.proceed(settle=settle)

    @rule(turns=st.integers(1, 12), overlap=st.booleans())
    def proceed_and_run(self, turns: int, overlap: bool) -> None:
        self.sim.proceed()
        self.run_some(turns, overlap)

    @rule(timeout_s=st.sampled_from([0, 0, 1, 5]), retract=st.booleans(), settle=st.booleans())
    def flush(self, timeout_s: int, retract: bool, settle: bool) -> None:
        self.sim.flush(timeout_s, retract=retract, settle=settle)

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), settle=st.booleans())
    def abort_or_disconnect(self, data: st.DataObject, settle: bool) -> None:
        """Abort one request, or seldom all requests."""
        self.sim.abort(data.draw(st.sampled_from([*self.sim.live, ""])), settle=settle)

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.sim.live))
        self.sim.stop(rid, data.draw(st.integers(0, len(self.sim.outputs[rid]))))

    @precondition(lambda self: not self.sim.committing)
    @rule()
    def begin_commit(self) -> None:
        self.sim.begin_commit()

    @precondition(lambda self: self.sim.committing and not self.sim.results)
    @rule()
    def end_commit(self) -> None:
        self.version += 1
        self.sim.end_commit(str(self.version))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            type(self).num_steps += 1
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim") or sys.exc_info()[0] is not None:
            return
        sim = self.sim
        sim.scheduler.can_guide = True
        while sim.results:
            sim.apply()
        sim.pass_time(100)
        if sim.committing:
            sim.end_commit(str(self.version + 1))
        sim.proceed()
        sim.run(overlap=True)
        assert not sim.owed, "a call was never answered"
        assert not sim.live, "a request never ended"
        for rid in sim.finished:
            sim.check_end(rid)
        flush = sim.flushed(sim.flush())
        assert flush.success, flush.error_msg


def prove(machine: Any, *, examples: int) -> int:
    """Run the machine; returns the number of events, the first of each example included."""
    machine.num_steps = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
            database=None,
            report_multiple_bugs=False,
        ),
    )
    return machine.num_steps


def find_bug(machine: Any, *, examples: int) -> None:
    """Run the machine until an assertion fails; the caller expects that.

    A search that begins badly often goes on so: one took half a minute where others took a second. So the
    search begins anew after every 100 examples.
    """
    for number in range(examples // 100):
        anew = seed(number)(type(machine.__name__, (machine,), {}))
        prove(anew, examples=100)


def test_pauses_flushes_and_aborts_in_any_order() -> None:
    print(f"{prove(PauseMachine, examples=90)} events without a violation")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pauses_flushes_and_aborts_in_any_order_for_long() -> None:
    count = prove(PauseMachine, examples=2000)
    print(f"{count} events without a violation")
    assert count >= 50_000


# Bugs that the machine must catch: each test puts one of them into the scheduler.

_settle, _retract, _forget_kv = Resources.settle, Scheduler.retract, Request.forget_kv
_post_init, _pause, _try_flush = Request.__post_init__, PauseControl.pause, PauseControl._try_flush
_plan = Scheduler.plan


def frees_what_a_step_in_flight_uses(self: Resources, oldest: int) -> None:
    _settle(self, 1 << 60)


def drops_the_waiting_queue_at_a_retraction(self: Scheduler, request: Request) -> None:
    for other in list(self.waiting):
        self.waiting.remove(other)
    _retract(self, request)


def queues_retracted_requests_last(self: Scheduler, request: Request) -> None:
    self._arrivals += 1
    request.arrival = self._arrivals
    _retract(self, request)


def answers_a_pause_before_the_drain(self: PauseControl, message: Pause, now: float) -> None:
    _pause(self, message, now)
    self._answer_pauses(now)


def flushes_the_kv_of_running_requests(self: PauseControl, flush: Any, now: float) -> bool:
    scheduler = self._scheduler
    running, scheduler.running = scheduler.running, {}
    try:
        return _try_flush(self, flush, now)
    finally:
        scheduler.running = running


def loses_a_token_at_a_retraction(self: Request) -> None:
    if self.num_outputs:
        self.tokens.pop()
    _forget_kv(self)


def ignores_the_time_to_live(self: PauseControl, message: Pause, now: float) -> None:
    _pause(self, Pause(message.call, message.mode), now)


def awaits_a_continued_request_that_came_during_the_pause(self: Request) -> None:
    _post_init(self)
    self.has_begun = self.num_outputs > 0


def forgets_the_outputs_that_a_request_began_with(self: Request) -> None:
    _post_init(self)
    del self.tokens[self.prompt_len :]
    self.outputs_launched = 0


def begins_guided_requests_too_early(self: PrefillPlanner, prompt_class: PromptClass) -> Sequence[Request]:
    scheduler = self._scheduler
    return [r for r in scheduler.waiting.of(prompt_class) if scheduler.control.admits or r.has_begun]


def lets_others_wait_behind_guided_requests(
    self: PrefillPlanner, prompt_class: PromptClass
) -> Sequence[Request]:
    scheduler, waiting = self._scheduler, self._scheduler.waiting.of(prompt_class)
    return list(takewhile(scheduler.may_guide, waiting)) if scheduler.control.admits else []


def forgets_to_look_again(self: Scheduler, now: float) -> Any:
    plan = _plan(self, now)
    if not self.can_guide and self.wake_at == now + GUIDES_LOOK_S:
        self.wake_at = None
    return plan


SEEDED: list[tuple[type, str, Callable[..., Any]]] = [
    (Resources, "settle", frees_what_a_step_in_flight_uses),
    (Scheduler, "retract", drops_the_waiting_queue_at_a_retraction),
    (Scheduler, "retract", queues_retracted_requests_last),
    (PauseControl, "pause", answers_a_pause_before_the_drain),
    (PauseControl, "_try_flush", flushes_the_kv_of_running_requests),
    (Request, "forget_kv", loses_a_token_at_a_retraction),
    (PauseControl, "pause", ignores_the_time_to_live),
    (Request, "__post_init__", awaits_a_continued_request_that_came_during_the_pause),
    (Request, "__post_init__", forgets_the_outputs_that_a_request_began_with),
    (PrefillPlanner, "_waiting", begins_guided_requests_too_early),
    (PrefillPlanner, "_waiting", lets_others_wait_behind_guided_requests),
    (Scheduler, "plan", forgets_to_look_again),
]
TAKE_LONG = (queues_retracted_requests_last, lets_others_wait_behind_guided_requests)  # to be found


@pytest.mark.parametrize(
    ("cls", "name", "bug"),
    [
        pytest.param(
            *each,
            id=each[2].__name__,
            marks=[pytest.mark.slow] if each[2] in TAKE_LONG else [],
        )
        for each in SEEDED
    ],
)
def test_a_seeded_bug_is_caught(
    cls: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, bug)
    with pytest.raises(AssertionError):
        find_bug(PauseMachine, examples=2000)
