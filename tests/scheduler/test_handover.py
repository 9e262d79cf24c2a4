"""Requests that two workers share: what the scheduler of each makes of the other's messages."""

from __future__ import annotations

import pytest
from msgspec import structs

from segue.disagg.lease import WEIGHTS_S, Lease
from segue.disagg.offer import REMEMBERED_S, UNCLAIMED_S
from segue.errors import HandoverError, WrongRoleError
from segue.messages.control import Continue, Pause, PauseMode
from segue.messages.guided import GrammarSpec
from segue.messages.kv import Claim, First, Gone, Grant, KVIdentity, PushEnded, ReservePages, Revoke, Sent
from segue.messages.requests import (
    AddRequest,
    Handoff,
    PhaseTimes,
    Rejected,
    SamplingParams,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from segue.scheduler.adoption import _fits
from segue.scheduler.internal_state import internal_state
from segue.scheduler.pause import PauseControl, PauseState
from segue.scheduler.request import RequestPhase
from tests.disagg.cluster import Worker
from tests.scheduler.simulation import Simulation, next_token, prefix_of
from tests.support.kv_hello import hello

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two full pages of four tokens, and one token
PARAMS = SamplingParams(max_new_tokens=6)
OLD, NEW, NEXT = KVIdentity("0", 0), KVIdentity("1", 1), KVIdentity("2", 1)
OLDER = OLD  # weights that were served before
QUEUES = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")


class DecodeWorker(Worker):
    """A decode worker; the test says what its prefill worker says, and writes its pages."""

    def __init__(self, **options: int) -> None:
        super().__init__("d", "decode", "d#1", role="decode", **options)  # type: ignore[arg-type]
        self.machine.on_opened(1, "s", "p:1", hello("prefill"), "shm", 0.0)
        self.handover = self.scheduler.handover

    def claim(self, handoff: int = 1, prompt: list[int] = PROMPT, *, whole: bool = False) -> str:
        rid = f"r{handoff}"
        assert self.start(rid, prompt, PARAMS, Handoff(id=handoff, part="decode", peer="p:1", whole=whole))
        return rid

    def say(self, message: ReservePages | First | Sent | Gone) -> None:
        self.scheduler.now = self.now
        self.machine.on_message(1, message, self.now)
        self.take_replies()

    def reserve(self, handoff: int = 1, num_tokens: int = len(PROMPT)) -> Grant | None:
        """Ask for pages, and let the scheduler plan; returns the grant, if there is one."""
        self.say(ReservePages(handoff=handoff, lease=handoff, num_tokens=num_tokens))
        assert self.launch() is None
        return self.granted(handoff)

    def granted(self, handoff: int = 1) -> Grant | None:
        """The grant of a handoff, if it was sent."""
        grants = [message for _, message in self.machine.peers.messages if isinstance(message, Grant)]
        return next((grant for grant in grants if grant.handoff == handoff), None)

    def write(self, grant: Grant, prompt: list[int] = PROMPT, version: str = "0") -> None:
        """Write the KV of a prompt into granted pages."""
        size = self.limits.page_size
        for index, page in enumerate(unpack_ids(grant.pages), grant.first_page):
            for position in range(index * size, min((index + 1) * size, len(prompt))):
                self.device.kv[page, position % size] = prefix_of(prompt[: position + 1]), version

    def first(self, handoff: int = 1, prompt: list[int] = PROMPT) -> None:
        token = next_token(prompt, PARAMS.seed)
        self.say(First(handoff=handoff, token=token, version="0", cached_tokens=2, seed=PARAMS.seed))

    def sent(self, handoff: int = 1, identities: tuple[KVIdentity, ...] = (OLD,)) -> None:
        self.say(Sent(handoff=handoff, lease=handoff, pages=3, identities=list(identities)))

    def land(self, handoff: int = 1, prompt: list[int] = PROMPT) -> None:
        """Hand the KV of a prompt over from beginning to end."""
        grant = self.reserve(handoff, len(prompt))
        assert grant is not None
        self.write(grant, prompt)
        self.first(handoff, prompt)
        self.sent(handoff)

    def cached(self, prompt: list[int]) -> int:
        """The tokens of a prompt that a request finds in the prefix cache."""
        self.add("probe", [*prompt, 0], max_new_tokens=1)
        self.run()
        return self.finished["probe"].cached_tokens


@pytest.fixture
def decode() -> DecodeWorker:
    return DecodeWorker()


@pytest.fixture
def prefill() -> Worker:
    return Worker("p", "prefill", "p#1", role="prefill")  # type: ignore[arg-type]


def offer(worker: Worker, handoff: int = 1, **params: object) -> str:
    """Send a request whose KV will be handed over."""
    rid = f"r{handoff}"
    given = structs.replace(PARAMS, **params)
    assert worker.start(rid, PROMPT, given, Handoff(id=handoff, part="prefill"))
    return rid


def queues(worker: Simulation) -> tuple[int, ...]:
    state = internal_state(worker.scheduler)
    return tuple(state[f"disagg_{name}_queue_size"] for name in QUEUES)


def refusal(worker: Simulation, handoff: Handoff) -> Rejected:
    answer = worker.scheduler.add(
        AddRequest(rid="other", prompt=pack_ids(PROMPT), params=PARAMS, handoff=handoff), 0.0
    )
    assert isinstance(answer, Rejected)
    return answer


# --- the identity of KV ---


@pytest.mark.parametrize(
    ("here", "sent", "commits", "fits"),
    [
        (OLD, [OLD], [], True),
        (NEW, [OLD], [], None),
        (NEW, [NEW], [], True),
        (NEW, [OLD, NEW], [], False),  # committed in place at the prefill worker
        (OLD, [OLD, NEW], [], False),
        (NEXT, [OLD, NEW], [], None),
        (NEW, [OLD], [(OLD, NEW)], False),  # committed in place here
        (NEW, [NEW], [(OLD, NEW)], False),
        (NEW, [OLD, NEW], [(OLD, NEW)], False),  # at both
        (NEXT, [OLD], [(OLD, NEW), (NEW, NEXT)], None),
        (NEW, [NEXT], [(OLD, NEW)], None),
        (KVIdentity("0", 1), [OLD], [], None),  # another commit under the same name
    ],
)
def test_kv_of_one_identity_is_shared_and_that_of_two_only_if_one_was_committed_in_place(
    here: KVIdentity,
    sent: list[KVIdentity],
    commits: list[tuple[KVIdentity, KVIdentity]],
    fits: bool | None,
) -> None:
    lease = Lease(handoff=1, rid="r", address="p:1", num_tokens=1, prompt_hash=b"", order=(0, 1))
    lease.sent, lease.commits = Sent(handoff=1, lease=1, pages=1, identities=sent), commits
    assert _fits(lease, here) is fits


def test_kv_of_other_weights_is_computed_again(decode: DecodeWorker) -> None:
    decode.claim()
    decode.scheduler.weights.commit("1", flush_cache=False)
    decode.land()
    decode.run()
    counters = decode.handover.counters()
    assert (counters.recomputed, counters.num_adopted) == ({"version": 1}, 0)
    assert decode.finished["r1"].num_tokens == PARAMS.max_new_tokens
    assert decode.finished["r1"].versions[0] == ("0", 0, 1), "the first token keeps its version"


def test_kv_that_a_commit_in_place_has_overtaken_is_used_by_its_own_request_alone(
    decode: DecodeWorker,
) -> None:
    decode.claim()
    grant = decode.reserve()
    assert grant is not None
    decode.write(grant)
    decode.scheduler.weights.commit("1", flush_cache=False)
    decode.first()
    decode.sent()
    decode.run()
    assert decode.handover.counters().num_adopted == 1
    assert decode.cached(PROMPT) == 0


def test_kv_of_newer_weights_waits_for_an_open_update(decode: DecodeWorker) -> None:
    rid = decode.claim()
    grant = decode.reserve()
    assert grant is not None
    decode.scheduler.weights.is_updating = True
    decode.write(grant, version="1")
    decode.first()
    decode.sent(identities=(NEW,))
    assert decode.launch() is None and not decode.scheduler.has_work, "it waits, and the loop need not spin"
    assert decode.machine.next_deadline == decode.now + WEIGHTS_S
    decode.scheduler.weights.commit("1", flush_cache=False)
    decode.scheduler.weights.is_updating = False
    decode.run()
    assert decode.finished[rid].reason == "length"
    counters = decode.handover.counters()
    assert (counters.num_adopted, counters.recomputed) == (1, {})


def test_kv_of_newer_weights_waits_no_longer_than_its_time(decode: DecodeWorker) -> None:
    decode.claim()
    assert decode.reserve() is not None
    decode.scheduler.weights.is_updating = True
    decode.first()
    decode.sent(identities=(NEW,))
    assert decode.launch() is None
    decode.now += WEIGHTS_S
    decode.machine.advance(decode.now)
    decode.run()
    assert decode.handover.counters().recomputed == {"version": 1}


@pytest.mark.parametrize(("is_updating", "sent"), [(False, NEW), (True, OLDER)])
def test_kv_of_other_weights_does_not_wait_for_nothing(
    decode: DecodeWorker, is_updating: bool, sent: KVIdentity
) -> None:
    decode.scheduler.weights.commit("5", flush_cache=False)
    decode.claim()
    assert decode.reserve() is not None
    decode.scheduler.weights.is_updating = is_updating
    decode.first()
    decode.sent(identities=(sent,))
    decode.launch()
    assert decode.handover.counters().recomputed == {"version": 1}


# --- adoption ---


def test_a_request_whose_kv_has_landed_goes_on_behind_its_first_token(decode: DecodeWorker) -> None:
    decode.pass_time(1.0)
    rid = decode.claim()
    decode.pass_time(1.0)
    decode.land()
    decode.pass_time(1.0)
    plan = decode.launch()
    assert plan is not None
    assert (plan.num_decode, plan.starts, plan.lens) == (1, [len(PROMPT)], [1])
    decode.apply()
    decode.run()  # the device has checked each position that was read, and this checks the output
    assert decode.finished[rid].num_tokens == PARAMS.max_new_tokens
    assert decode.finished[rid].cached_tokens == 2, "what the prefill worker found in its cache"
    assert decode.finished[rid].times == PhaseTimes(added=1.0, prefilled=2.0, taken_over=3.0)


def test_a_guided_request_is_adopted_once_grammars_can_be_followed(decode: DecodeWorker) -> None:
    decode.scheduler.can_guide = False
    params = structs.replace(PARAMS, grammar=GrammarSpec("regex", "a"))
    assert decode.start("r1", PROMPT, params, Handoff(id=1, part="decode", peer="p:1", whole=False))
    decode.land()
    assert decode.launch() is None and decode.scheduler.wake_at is not None
    decode.scheduler.can_guide = True
    decode.run()
    assert decode.finished["r1"].reason == "length" and decode.handover.counters().num_adopted == 1


def test_nothing_is_adopted_before_its_kv_has_landed(decode: DecodeWorker) -> None:
    rid = decode.claim()
    decode.reserve()
    decode.first()
    assert decode.outputs[rid] == [next_token(PROMPT)], "the client has the first token already"
    assert decode.launch() is None and rid in decode.handover.awaiting
    assert not decode.scheduler.has_work


def test_adopted_pages_are_shared_with_other_requests(decode: DecodeWorker) -> None:
    decode.claim()
    decode.land()
    decode.run()
    assert decode.cached(PROMPT) == 8


def test_pages_in_the_own_prefix_cache_are_not_granted(decode: DecodeWorker) -> None:
    decode.claim(1)
    decode.land(1)
    decode.run()
    decode.machine.peers.messages.clear()
    decode.claim(2)
    grant = decode.reserve(2)
    assert grant is not None and grant.first_page == 2 and len(unpack_ids(grant.pages)) == 1
    decode.write(grant)
    decode.first(2)
    decode.sent(2)
    decode.run()
    assert decode.handover.counters().num_pages == 3 + 1


def test_the_time_from_the_first_token_to_the_adoption_is_counted(decode: DecodeWorker) -> None:
    decode.pass_time(100.0)
    decode.claim()
    grant = decode.reserve()
    assert grant is not None
    decode.write(grant)
    decode.first()
    decode.pass_time(0.25)
    decode.sent()
    decode.run()
    assert decode.handover.counters().adopt_s == pytest.approx(0.25)


def test_an_adopted_request_can_be_retracted_before_any_step_knows_it(decode: DecodeWorker) -> None:
    rid = decode.claim()
    decode.land()
    decode.handover.adoption.adopt(decode.now)
    request = decode.scheduler.requests[rid]
    decode.scheduler.retract(request)
    plan = decode.launch()
    assert plan is not None and [new.slot for new in plan.new_slots] == [request.slot], "it is new once"
    decode.apply()
    decode.run()
    assert decode.finished[rid].num_tokens == PARAMS.max_new_tokens


def test_a_first_token_that_ends_its_request_ends_it_here(decode: DecodeWorker) -> None:
    rid = decode.claim()
    token = next_token(PROMPT)
    decode.reserve()
    message = First(handoff=1, token=token, version="0", cached_tokens=0, seed=0, finished="stop")
    decode.say(message)
    assert (decode.finished[rid].reason, decode.outputs[rid]) == ("stop", [token])
    last = decode.machine.peers.messages[-1][1]
    assert isinstance(last, Revoke) and last.final, "the prefill worker may still write"
    decode.say(Gone(handoff=1, lease=1, reason="finished"))
    decode.check_memory()
    assert not decode.handover.owns_pages


def test_the_logprobs_of_prompt_tokens_come_with_the_first_token(decode: DecodeWorker) -> None:
    rid, entries = decode.claim(), [TokenLogprob(token, -1.0) for token in PROMPT[1:]]
    decode.machine.leases.active[1].logprobs += entries
    decode.first()
    assert decode.prompt_logprobs[rid] == PROMPT[1:]


# --- pages for leases ---


def test_a_lease_keeps_a_place_among_the_running_requests() -> None:
    decode = DecodeWorker(max_running_requests=1)
    decode.claim(1)
    assert decode.reserve(1) is not None
    decode.claim(2)
    assert decode.reserve(2) is None, "one place, which the first lease keeps"
    decode.add("own", [1, 2, 3])
    assert decode.launch() is None, "nor has a request of this worker one"
    decode.check_memory()


def test_a_lease_waits_for_a_slot_that_a_running_request_has() -> None:
    decode = DecodeWorker(max_running_requests=1)
    decode.add("own", [1, 2, 3], max_new_tokens=3)
    decode.step()
    decode.claim()
    decode.say(ReservePages(handoff=1, lease=1, num_tokens=len(PROMPT)))
    decode.step()
    assert decode.granted() is None
    decode.step()
    assert "own" in decode.finished
    decode.launch()
    assert decode.granted() is not None


def test_leases_leave_the_longest_running_request_room_to_the_end() -> None:
    decode = DecodeWorker(num_pages=8, max_seq_len=32)
    decode.add("own", [1] * 4, max_new_tokens=20)  # 6 pages at its end
    decode.step()
    decode.claim()
    decode.say(ReservePages(handoff=1, lease=1, num_tokens=len(PROMPT)))  # 3 pages
    decode.step()
    assert decode.granted() is None
    decode.run()
    decode.launch()
    assert decode.granted() is not None


def test_leases_get_pages_by_priority_and_then_in_the_order_of_arrival() -> None:
    decode = DecodeWorker(num_pages=8, max_seq_len=32)
    for handoff in (1, 2, 3):
        decode.claim(handoff, [*PROMPT[1:], handoff])
        decode.say(ReservePages(handoff=handoff, lease=handoff, num_tokens=len(PROMPT)))
    decode.machine.leases.active[3].order = (-1, 3)
    decode.launch()
    assert [decode.granted(handoff) is not None for handoff in (1, 2, 3)] == [True, False, True]


def test_granted_pages_come_home_when_the_request_is_aborted_and_the_last_word_is_said(
    decode: DecodeWorker,
) -> None:
    rid = decode.claim()
    decode.reserve()
    decode.abort(rid)
    assert decode.handover.owns_pages, "the prefill worker may still write"
    decode.say(Gone(handoff=1, lease=1, reason="withdrawn"))
    assert not decode.handover.owns_pages
    assert len(decode.scheduler.resources.free_pages) == decode.limits.num_pages


# --- KV that does not come ---


def test_without_a_first_token_a_part_of_a_request_fails_and_can_be_sent_again(decode: DecodeWorker) -> None:
    rid = decode.claim()
    decode.say(Gone(handoff=1, lease=0, reason="expired"))
    assert decode.errors == {rid: HandoverError.__name__}
    message = decode.finished[rid].message
    assert message == "the KV of request r1 will not come from p:1: expired; send it again"
    assert decode.handover.counters().failed == {"expired": 1}


def test_a_whole_request_computes_its_prompt_itself(decode: DecodeWorker) -> None:
    rid = decode.claim(whole=True)
    decode.say(Gone(handoff=1, lease=0, reason="expired"))
    decode.run()
    assert decode.finished[rid].num_tokens == PARAMS.max_new_tokens
    assert decode.handover.counters().recomputed == {"expired": 1}


def test_behind_its_first_token_any_request_goes_on(decode: DecodeWorker) -> None:
    rid = decode.claim()
    decode.reserve()
    decode.first()
    decode.say(Gone(handoff=1, lease=1, reason="transport"))
    decode.run()
    assert decode.finished[rid].num_tokens == PARAMS.max_new_tokens
    assert decode.handover.counters().recomputed == {"transport": 1}


# --- the prefill worker ---


def test_a_request_ends_with_its_first_token_and_its_offer_keeps_the_pages(prefill: Worker) -> None:
    rid = offer(prefill)
    prefill.step()
    assert (prefill.finished[rid].reason, prefill.finished[rid].num_tokens) == ("handoff", 1)
    (hold,) = [hold for _, hold in prefill.scheduler.handover.holds()]
    assert len(hold.pages) == 3
    prefill.check_memory()


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_request_that_its_first_token_ends_keeps_nothing(prefill: Worker, end: str) -> None:
    stop_ids = (next_token(PROMPT),) if end == "stop" else ()
    rid = offer(prefill, max_new_tokens=1 if end == "length" else 6, stop_token_ids=stop_ids)
    prefill.step()
    assert prefill.finished[rid].reason == end
    assert not prefill.scheduler.handover.owns_pages


def test_pages_that_nobody_claims_come_home(prefill: Worker) -> None:
    offer(prefill)
    prefill.step()
    prefill.machine.advance(prefill.now + UNCLAIMED_S)
    assert not prefill.scheduler.handover.owns_pages
    prefill.check_memory()


def test_a_claim_gets_the_first_token_of_a_request_that_has_ended(prefill: Worker) -> None:
    offer(prefill)
    prefill.step()
    prefill.machine.on_opened(1, "s", None, hello("decode"), "shm", 0.0)
    prompt_hash = prefill.machine.offers.by_handoff[1].prompt_hash
    claim = Claim(handoff=1, rid="r1", num_tokens=len(PROMPT), prompt_hash=prompt_hash)
    prefill.machine.on_message(1, claim, prefill.now)
    messages = [message for _, message in prefill.machine.peers.messages]
    assert [type(message) for message in messages] == [ReservePages, First]
    assert messages[1].token == next_token(PROMPT)  # type: ignore[union-attr]


# --- what is refused, and what is shown ---


def test_a_part_that_is_not_this_engines_is_refused(prefill: Worker, decode: DecodeWorker) -> None:
    answer = refusal(prefill, Handoff(id=1, part="decode", peer="p:1"))
    assert answer.kind == WrongRoleError.__name__
    assert "--role is prefill, and the request is for --role decode" in answer.message
    assert "for --role prefill" in refusal(decode, Handoff(id=1, part="prefill")).message


def test_a_handoff_is_used_once(prefill: Worker, decode: DecodeWorker) -> None:
    offer(prefill)
    decode.claim()
    for worker, handoff in (
        (prefill, Handoff(id=1, part="prefill")),
        (decode, Handoff(id=1, part="decode", peer="p:1")),
    ):
        assert (
            "handoff 1 is in use, or was within the last minute; draw another id"
            in refusal(worker, handoff).message
        )


def test_a_request_that_outlives_its_lease_does_not_end_the_next_one(decode: DecodeWorker) -> None:
    handoff = Handoff(id=1, part="decode", peer="p:1", whole=True)
    assert decode.start("first", PROMPT, PARAMS, handoff)
    decode.say(Gone(handoff=1, lease=0, reason="prompt_differs"))  # it computes its prompt itself
    other = [*PROMPT, 7]
    assert not decode.start("second", other, PARAMS, handoff), "the handoff is remembered for a while"
    decode.machine.advance(decode.now + REMEMBERED_S)
    assert decode.start("second", other, PARAMS, handoff)
    decode.run()
    assert "first" in decode.finished and decode.machine.leases.active[1].rid == "second"
    decode.land(prompt=other)
    decode.run()
    assert decode.finished["second"].reason == "length"


def test_a_request_that_outlives_its_offer_does_not_touch_the_next_one(prefill: Worker) -> None:
    prefill.machine.on_opened(1, "s", None, hello("decode"), "shm", 0.0)
    handoff = Handoff(id=1, part="prefill")
    assert prefill.start("first", PROMPT, PARAMS, handoff)
    prompt_hash = prefill.machine.offers.by_handoff[1].prompt_hash
    for message in (
        Claim(handoff=1, rid="first", num_tokens=len(PROMPT), prompt_hash=prompt_hash),
        Revoke(handoff=1, lease=0, reason="ended", final=True),
    ):
        prefill.machine.on_message(1, message, prefill.now)
    prefill.machine.advance(prefill.now + REMEMBERED_S)
    assert prefill.start("second", [*PROMPT, 7], PARAMS, handoff)
    prefill.abort("first")
    offer = prefill.machine.offers.by_handoff[1]
    assert offer.rid == "second" and offer.is_alive


def test_the_queues_of_a_prefill_worker(prefill: Worker) -> None:
    offer(prefill)
    assert queues(prefill) == (1, 0, 0, 0)
    prefill.step()
    assert queues(prefill) == (1, 0, 0, 0), "nobody has claimed it"
    prefill.machine.on_opened(1, "s", None, hello("decode"), "shm", 0.0)
    prompt_hash = prefill.machine.offers.by_handoff[1].prompt_hash
    claim = Claim(handoff=1, rid="r1", num_tokens=len(PROMPT), prompt_hash=prompt_hash)
    prefill.machine.on_message(1, claim, prefill.now)
    grant = Grant(handoff=1, lease=1, first_page=0, pages=pack_ids([7, 8, 9]))
    prefill.machine.on_message(1, grant, prefill.now)
    assert queues(prefill) == (0, 1, 0, 0)
    prefill.machine.offers.push_ended(PushEnded(ticket=1, at=prefill.now), prefill.now)
    assert queues(prefill) == (0, 0, 0, 0)
    counters = prefill.scheduler.handover.counters()
    assert (counters.num_sent, counters.num_pages) == (1, 3)


def test_the_queues_of_a_decode_worker(decode: DecodeWorker) -> None:
    decode.claim()
    assert queues(decode) == (0, 0, 1, 0)
    decode.say(ReservePages(handoff=1, lease=1, num_tokens=len(PROMPT)))
    assert queues(decode) == (0, 0, 1, 0)
    decode.launch()
    assert queues(decode) == (0, 0, 0, 1)
    decode.write(decode.granted())  # type: ignore[arg-type]
    decode.first()
    decode.sent()
    assert queues(decode) == (0, 0, 0, 1), "it has landed, and is adopted with the next step"
    decode.launch()
    assert queues(decode) == (0, 0, 0, 0)


def test_an_engine_that_does_both_has_no_such_queues() -> None:
    sim = Simulation()
    sim.add("r", PROMPT)
    assert queues(sim) == (0, 0, 0, 0)
    assert sim.scheduler.output().counters.handover is None


def test_a_request_that_awaits_its_kv_counts_as_waiting_for_the_limit() -> None:
    decode = DecodeWorker(max_queued_requests=1)
    decode.claim()
    assert decode.scheduler.requests["r1"].phase is RequestPhase.AWAIT
    assert "1 requests wait" in refusal(decode, Handoff(id=2, part="decode", peer="p:1")).message


def test_the_state_has_the_times_of_the_handovers_that_ended_last(decode: DecodeWorker) -> None:
    prefill = Worker("p", "prefill", "p#1", role="prefill", chunked_prefill_size=6)  # type: ignore[arg-type]
    offer(prefill)
    for _ in range(2):
        assert prefill.launch() is not None
        prefill.now += 0.5
        prefill.apply()
    prefill.machine.advance(prefill.now + UNCLAIMED_S)
    (ended,) = internal_state(prefill.scheduler)["handover"]["recent"]
    assert (ended["part"], ended["rid"], ended["num_tokens"]) == ("prefill", "r1", len(PROMPT))
    assert [(event["event"], event.get("count", 0)) for event in ended["events"]] == [
        ("begin", 0),
        ("launched", 6),
        ("computed", 6),
        ("launched", len(PROMPT)),
        ("computed", len(PROMPT)),
        ("first", 0),
        ("expired", 0),
    ]
    assert [event["at"] for event in ended["events"]] == [0, 0, 0.5, 0.5, 1, 1, 1 + UNCLAIMED_S]

    decode.claim()
    decode.land()
    decode.launch()
    (ended,) = internal_state(decode.scheduler)["handover"]["recent"]
    assert (ended["part"], ended["events"][-1]["event"]) == ("decode", "adopted")


# --- pauses of mode wait ---


def pause(worker: DecodeWorker, mode: PauseMode = "wait") -> PauseControl:
    """Pause a worker; the pause takes effect at once if nothing has to end before."""
    control = worker.scheduler.control
    control.pause(Pause(1, mode), worker.now)
    control.advance(worker.now)
    return control


def test_a_pause_does_not_await_a_prompt_that_its_prefill_worker_has_not_begun(decode: DecodeWorker) -> None:
    decode.claim()
    assert pause(decode).state is PauseState.PAUSED, "the prefill worker may be paused too"


def test_a_pause_awaits_a_prompt_that_its_prefill_worker_has_begun(decode: DecodeWorker) -> None:
    decode.claim()
    grant = decode.reserve()
    assert grant is not None
    control = pause(decode)
    assert control.state is PauseState.PAUSING
    decode.write(grant)
    decode.first()
    decode.sent()
    decode.run()
    control.advance(decode.now)
    assert control.state is PauseState.PAUSED and "r1" in decode.finished


def test_a_pause_does_not_await_newcomers_and_grants_them_no_pages(decode: DecodeWorker) -> None:
    decode.claim(1)
    assert decode.reserve(1) is not None
    control = pause(decode)
    decode.claim(2, PROMPT[::-1])
    assert decode.reserve(2) is None, "it came during the pause"
    decode.abort("r1")
    control.advance(decode.now)
    assert control.state is control.client_state is PauseState.PAUSED
    control.continue_(Continue(2))
    assert decode.launch() is None and decode.granted(2) is not None


def test_a_newcomer_of_a_pause_that_must_compute_its_prompt_waits_for_its_end(
    decode: DecodeWorker,
) -> None:
    decode.claim(1)
    assert decode.reserve(1) is not None
    control = pause(decode)
    decode.claim(2, whole=True)
    decode.say(Gone(handoff=2, lease=0, reason="unknown"))
    assert decode.launch() is None
    decode.abort("r1")
    control.advance(decode.now)
    assert control.state is PauseState.PAUSED


def test_a_newcomer_of_a_pause_whose_kv_lands_is_adopted_after_it(decode: DecodeWorker) -> None:
    decode.claim(1)
    decode.claim(2, PROMPT[::-1])
    grant = decode.reserve(2)
    assert grant is not None
    control = decode.scheduler.control
    control.pause(Pause(1, "in_place"), decode.now)
    control.advance(decode.now)
    decode.write(grant, PROMPT[::-1])
    decode.first(2, PROMPT[::-1])
    decode.sent(2)
    control.continue_(Continue(2))
    decode.run()
    assert "r2" in decode.finished


def test_a_pause_whose_pages_come_home_needs_no_deadline_if_nobody_awaits_its_answer(
    decode: DecodeWorker,
) -> None:
    decode.claim()
    assert decode.reserve() is not None
    control = pause(decode, "in_place")
    decode.scheduler.weights.hold("retract")  # a commit that flushes the prefix cache
    control.advance(decode.now)
    assert decode.handover.num_leaving, "the prefill worker may still write"
    assert control.next_deadline is None, "a deadline that nothing ends would keep the loop busy"
