"""LAPS' choice of prefill work, by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from segue.laps.classes import PromptClass
from segue.laps.cost import Coefficients, CostModel, StepWork, seconds_of
from segue.laps.pick import GROWTH, MIN_CHUNK, LapsPolicy, PrefillChoice, PrefillView
from segue.messages.control import LapsLimits

DEVICE = Coefficients(floor=0.005, start=0.001, per_token=2e-5, per_pair=2e-10, per_kv=4e-8)
LIMITS = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.03, window_s=0.006)
BUDGET = 8192


@dataclass(eq=False)
class Prompt:
    remaining: int
    prompt_class: PromptClass = "short"
    added_at: float = 0.0
    priority: int = 0
    history: int = 0


def short(tokens: int = 20, **fields: Any) -> Prompt:
    return Prompt(tokens, **fields)


def long(tokens: int = 10_000, **fields: Any) -> Prompt:
    return Prompt(tokens, "long", **fields)


class Laps(LapsPolicy[Prompt]):
    """The policy on a device that is known exactly, and that has run large steps before."""

    def __init__(self, *, busy: bool = False, sizes: list[int] | None = None, **limits: float) -> None:
        model = CostModel()
        model._coefficients, model.largest = DEVICE, BUDGET
        super().__init__(
            LapsLimits(**{name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__} | limits),
            model, 64, sizes or [],
        )  # fmt: skip
        self.ended(StepWork().plus(BUDGET, 0), 6.0 if busy else 0.0, 10.0)

    def at(self, now: float = 10.0, **view: Any) -> PrefillChoice[Prompt]:
        defaults: dict[str, Any] = {"started": [], "short": [], "num_slots": 100, "budget": BUDGET}
        return self.pick(PrefillView(**defaults | view), now)

    def tokens(self, choice: PrefillChoice[Prompt], beside: StepWork | None = None) -> list[int]:
        """The tokens of each prompt in the step, as the planner takes them."""
        assert choice.room is not None
        work, budget, taken = beside or StepWork(), choice.budget, []
        for prompt in choice.prompts:
            count = min(budget, choice.room(prompt, work))
            if count <= 0:
                break
            work, budget = work.plus(count, prompt.history), budget - count
            taken.append(count)
        return taken

    def earn(self, seconds: float) -> None:
        self.credit_s += seconds


def test_short_prompts_go_first_and_alone() -> None:
    laps = Laps()
    waiting = [short(), short()]
    choice = laps.at(short=waiting, long=[long()])
    assert list(choice.prompts[:2]) == waiting and laps.tokens(choice) == [20, 20]


def test_a_long_prompt_goes_on_if_there_is_no_room_for_a_short_one() -> None:
    """It may have the pages that the short one waits for."""
    laps, begun = Laps(), long()
    choice = laps.at(started=[begun], short=[short()])
    assert choice.room is not None and choice.prompts[-1] is begun
    assert 0 < choice.room(begun, StepWork(decode_rows=8)) < 2000
    assert choice.room(begun, StepWork().plus(20, 0)) == 0


def test_while_prefill_is_busy_long_ones_fill_what_short_ones_leave() -> None:
    laps = Laps(busy=True)
    waiting, behind = [short(), short()], [long(), long()]
    choice = laps.at(short=waiting, long=behind)
    assert list(choice.prompts) == waiting + behind
    first, second, *chunks = laps.tokens(choice)
    assert (first, second) == (20, 20) and len(chunks) == 1 and chunks[0] % 64 == 0
    assert 0.02 < seconds_of(DEVICE, StepWork().plus(40, 0).plus(chunks[0], 0)) <= 0.03


def test_long_prompts_alone_have_large_steps_unless_a_short_one_is_likely() -> None:
    laps = Laps()
    assert sum(laps.tokens(laps.at(long=[long(), long()]))) == BUDGET
    for number in range(50):
        laps.arrived(short(), 9 + number / 50)
    assert seconds_of(DEVICE, StepWork().plus(laps.tokens(laps.at(long=[long()]))[0], 0)) <= 0.03


def test_several_long_prompts_share_a_large_step() -> None:
    laps = Laps()
    assert laps.tokens(laps.at(long=[long(300), long(400), long(9000)])) == [300, 400, BUDGET - 700]


def test_what_long_prompts_have_earned_pays_for_a_chunk() -> None:
    laps = Laps()
    view = {"short": [short(added_at=10.0)], "long": [long()]}
    laps.earn(0.029)
    assert laps.at(**view).prompts[0] == view["short"][0]
    laps.earn(0.002)
    choice = laps.at(**view)
    assert choice.prompts == view["long"]
    chunk = StepWork().plus(laps.tokens(choice)[0], 0)
    laps.planned(chunk, chunk, long_waits=True)
    assert laps.credit_s < 0.031 - 0.02
    assert laps.at(**view).prompts[0] == view["short"][0]


def test_long_prompts_earn_their_share_while_they_wait() -> None:
    laps = Laps()
    work = StepWork().plus(200, 0)
    laps.planned(work, StepWork(), long_waits=False)
    laps.planned(StepWork(decode_rows=5), StepWork(), long_waits=True)
    assert laps.credit_s == 0
    laps.planned(work, StepWork(), long_waits=True)
    assert laps.credit_s == pytest.approx(0.2 * seconds_of(DEVICE, work))
    for _ in range(1000):
        laps.planned(work, StepWork(), long_waits=True)
    assert laps.credit_s == pytest.approx(2 * LIMITS.blocking_s), "no more than a chunk or two is owed"
    laps.at(short=[short()])
    assert laps.credit_s == 0, "nobody waits who could be owed anything"


def test_a_chunk_that_is_due_gives_way_once_to_a_deadline() -> None:
    laps = Laps()
    laps.earn(1.0)
    view = {"short": [short(added_at=9.62)], "long": [long()]}  # 20 ms are left
    first = [laps.at(**view).prompts[0].prompt_class for _ in range(3)]
    assert first == ["short", "long", "long"], "it may be that nothing could be computed"
    laps.planned(chunk := StepWork().plus(1000, 0), chunk, long_waits=True)
    assert laps.at(**view).prompts[0].prompt_class == "short", "once per chunk"


@pytest.mark.parametrize("added_at", [9.0, 10.0], ids=["missed", "far away"])
def test_a_chunk_that_is_due_does_not_give_way_to_any_other_deadline(added_at: float) -> None:
    laps = Laps()
    laps.earn(1.0)
    assert laps.at(short=[short(added_at=added_at)], long=[waiting := long()]).prompts == [waiting]


def test_a_long_prompt_of_higher_priority_goes_first_and_in_small_chunks() -> None:
    laps = Laps()
    choice = laps.at(short=[short()], long=[long(priority=1)])
    assert choice.prompts[0].prompt_class == "long"
    assert seconds_of(DEVICE, StepWork().plus(laps.tokens(choice)[0], 0)) <= 0.03


def test_short_prompts_that_have_begun_go_on_behind_a_chunk_that_is_due() -> None:
    """They may hold the pages that the long prompt waits for."""
    laps = Laps()
    laps.earn(1.0)
    begun, waiting = short(), long()
    assert laps.at(started=[begun], short=[short()], long=[waiting]).prompts == [waiting, begun]


def test_many_short_prompts_take_several_steps() -> None:
    laps = Laps()
    taken = laps.tokens(laps.at(short=[short(250) for _ in range(30)]))
    assert set(taken) == {250}
    assert seconds_of(DEVICE, StepWork().plus(sum(taken), 0)) <= 0.0301
    assert len(taken) > 4


def test_no_more_prompts_are_chosen_than_there_are_slots() -> None:
    laps = Laps(busy=True)
    choice = laps.at(started=[short()], short=[short(), short()], long=[long(), long()], num_slots=1)
    assert len(choice.prompts) == 3


def test_a_chunk_is_cut_to_a_captured_size_that_is_near() -> None:
    laps = Laps(busy=True, sizes=[256, 512, 1024, 4096])
    decode = StepWork(decode_rows=24, decode_kv=2400)
    choice = laps.at(short=[short(40)], long=[long()], beside=decode)
    assert laps.tokens(choice, decode) == [40, 1024 - 64]
    just = Laps(busy=True, sizes=[256, 1400])  # there is room for 1,376 tokens beside the others
    just._page_size = 1
    choice = just.at(short=[short(40)], long=[long()], beside=decode)
    assert just.tokens(choice, decode) == [40, 1400 - 64]
    far = Laps(busy=True, sizes=[64, 128])
    assert far.tokens(far.at(short=[short(40)], long=[long()]))[1] > 1024


def test_a_prediction_is_not_trusted_far_beyond_what_was_seen() -> None:
    laps = Laps()
    laps.earn(1.0)
    for largest, most in ((300, GROWTH * 300), (1, GROWTH * MIN_CHUNK)):
        laps._cost.largest = largest
        assert most - 63 <= laps.tokens(laps.at(short=[short(added_at=10.0)], long=[long()]))[0] <= most


def test_without_knowledge_everybody_gets_a_turn() -> None:
    laps = LapsPolicy[Prompt](LIMITS, CostModel(), 64)
    view = PrefillView(started=[], short=[short()], long=[long()], num_slots=9, budget=BUDGET)
    choice = laps.pick(view, 10.0)
    assert choice.prompts and choice.room is not None
    assert 0 < choice.room(choice.prompts[0], StepWork()) <= GROWTH * MIN_CHUNK


def test_an_idle_engine_waits_for_more_if_they_come_quickly() -> None:
    laps = Laps()
    for number in range(2000):
        laps.arrived(short(), 9 + number / 2000)
    view = {"short": [short(added_at=10.0)], "is_idle": True}
    assert laps.at(**view).wake_at == pytest.approx(10.006)
    assert laps.at(10.006, **view).prompts == view["short"]
    assert laps.at(**view | {"is_idle": False}).prompts == view["short"]
    assert laps.at(**view | {"long": [long()]}).prompts
    assert Laps(window_s=0.0).at(**view).prompts == view["short"]
    assert laps.picks["window"] == 1


def test_views_without_work_choose_nothing() -> None:
    assert not Laps().at().prompts
    assert replace(Laps().at(), room=None) == PrefillChoice(prompts=[], budget=BUDGET)


def test_a_debt_is_paid_back() -> None:
    """Where the smallest chunk takes longer than was earned, short prompts have their share all the same."""
    laps = Laps(blocking_s=0.001)
    view = {"short": [short(added_at=0.0)], "long": [long()]}
    seconds = {"short": 0.0, "long": 0.0}
    for _ in range(500):
        choice = laps.at(**view)
        of = choice.prompts[0].prompt_class
        work = StepWork().plus(laps.tokens(choice)[0], 0)
        laps.planned(work, work if of == "long" else StepWork(), long_waits=True)
        seconds[of] += seconds_of(DEVICE, work)
    assert 0.15 < seconds["long"] / sum(seconds.values()) < 0.25


def test_a_step_is_not_shorter_than_makes_sense() -> None:
    """The rows that decode take their time anyway, and so does the reading of the weights."""
    laps = Laps(blocking_s=0.001)
    decode = StepWork(decode_rows=100, decode_kv=1_000_000)  # 45 ms
    waiting = [short(100) for _ in range(50)]
    assert len(laps.tokens(laps.at(short=waiting))) >= 3
    assert len(laps.tokens(laps.at(short=waiting, beside=decode), decode)) >= 3


def test_what_was_earned_is_kept_while_there_is_no_slot() -> None:
    laps = Laps()
    laps.earn(0.02)
    laps.at(short=[short()], long=[long()], num_slots=0)
    assert laps.credit_s == 0.02


def test_priorities_go_before_what_has_begun() -> None:
    laps = Laps()
    urgent = long(priority=5)
    assert laps.at(started=[long()], short=[short()], long=[urgent]).prompts[0] is urgent
    first = short(priority=9)
    assert laps.at(started=[short(), long(priority=1)], short=[first]).prompts[0] is first


def test_a_long_prompt_is_not_called_short_for_want_of_knowledge() -> None:
    laps = Laps()
    laps._cost._coefficients = Coefficients(floor=0.005)  # after some short steps
    laps._cost.largest = 256
    assert laps.classify(300, 0) == "long"
    laps._cost.largest = 300
    assert laps.classify(300, 0) == "short"


@pytest.mark.parametrize("page", [256, 512, 1024])
def test_chunks_have_tokens_with_pages_of_any_size(page: int) -> None:
    laps = Laps()
    laps._page_size, laps._cost.largest = page, 1
    for history in range(0, 5000, 100):
        [count] = laps.tokens(laps.at(short=[], long=[long(history=history)], budget=200))
        assert count == 200
        laps.earn(1.0)
        assert laps.tokens(laps.at(short=[short()], long=[long(history=history)]))[0] > 0


def test_one_very_long_step_does_not_count_as_more_than_all_the_time() -> None:
    laps = Laps()
    laps.ended(StepWork().plus(100, 0), 100.0, 10.0)
    assert laps._busy.per_second(10.0) <= 1.0


def test_only_a_load_that_keeps_prefill_busy_fills_the_steps_of_short_prompts() -> None:
    reasons = []
    for share in (0.7, 0.9):
        laps = Laps()
        for number in range(400):  # a step of 20 ms, and a pause
            laps.ended(StepWork().plus(1000, 0), 0.02, 10 + number * 0.02 / share)
        laps.at(10 + 400 * 0.02 / share, short=[short(added_at=18.0)], long=[long()])
        laps.planned(StepWork().plus(20, 0), StepWork(), long_waits=True)
        reasons.append([reason for reason, count in laps.picks.items() if count])
    assert reasons == [["short"], ["filled"]]


def test_a_short_prompt_is_likely_if_one_comes_in_ten_chunks() -> None:
    """The whole step takes 0.17 s, so that is a prompt in 1.7 s."""
    whole = []
    for rate in (0.4, 0.8):
        laps = Laps()
        laps._arrivals._sum, laps._arrivals._at = rate, 10.0
        whole.append(sum(laps.tokens(laps.at(long=[long()]))) == BUDGET)
    assert whole == [True, False]


def test_decisions_and_chunks_are_counted() -> None:
    laps = Laps()
    laps.at(long=[long()])
    work = StepWork().plus(20, 0).plus(600, 0)
    laps.planned(work, StepWork().plus(600, 0), long_waits=True)
    laps.at(short=[short()], long=[long()])
    laps.planned(StepWork().plus(20, 0), StepWork(), long_waits=True)
    laps.at()
    laps.planned(StepWork(), StepWork(), long_waits=True)
    report = laps.report({"short": 2, "long": 3})
    assert (report.chunks, report.chunk_tokens, report.waiting) == (1, 600, {"short": 2, "long": 3})
    assert report.picks == {"short": 1, "long": 1, "share": 0, "filled": 0, "window": 0}


# --- what a chunk costs those who wait for long prompts ---

CHUNK = StepWork().plus(1000, 0)


def contend(laps: Laps) -> None:
    """Let prompts of both classes wait for the next step."""
    laps.at(short=[short(added_at=10.0)], long=[long()])


def test_a_chunk_beside_short_prompts_pays_for_what_it_adds() -> None:
    laps, beside = Laps(), StepWork().plus(200, 4000)
    laps.earn(0.05)
    contend(laps)
    whole = beside.plus(1000, 0)
    laps.planned(whole, CHUNK, long_waits=False)
    assert laps.credit_s == pytest.approx(0.05 - seconds_of(DEVICE, whole) + seconds_of(DEVICE, beside))


def test_a_chunk_beside_decode_rows_alone_pays_for_the_whole_step() -> None:
    laps, whole = Laps(), CHUNK._replace(decode_rows=100, decode_kv=200_000)
    laps.earn(0.05)
    contend(laps)
    laps.planned(whole, CHUNK, long_waits=False)
    assert laps.credit_s == pytest.approx(0.05 - seconds_of(DEVICE, whole))


def test_a_chunk_that_short_prompts_wait_for_leaves_a_debt_of_itself_at_most() -> None:
    laps, debts = Laps(), []
    laps.earn(0.005)
    for _ in range(2):
        contend(laps)
        laps.planned(CHUNK, CHUNK, long_waits=False)
        debts.append(laps.credit_s)
    assert debts == pytest.approx([0.005 - seconds_of(DEVICE, CHUNK), -seconds_of(DEVICE, CHUNK)])


@pytest.mark.parametrize("credit", [0.005, -0.01])
def test_a_chunk_that_nobody_waits_for_neither_makes_nor_pays_a_debt(credit: float) -> None:
    laps = Laps()
    laps.earn(credit)
    laps.at(long=[long()])
    laps.planned(CHUNK, CHUNK, long_waits=False)
    assert laps.credit_s == min(credit, 0.0)


def test_a_chunk_beside_short_prompts_makes_no_debt() -> None:
    laps = Laps(busy=True)
    contend(laps)
    laps.planned(CHUNK.plus(20, 0), CHUNK, long_waits=False)
    assert laps.credit_s == 0


def test_what_was_earned_limits_the_step_of_a_chunk_that_is_due() -> None:
    laps = Laps()
    laps.earn(0.01)
    choice = laps.at(short=[short(added_at=10.0)], long=[long(300), long()])
    assert laps.tokens(choice) == [300], "there is no time for 256 tokens of the other one"
    laps.earn(0.04)
    taken = laps.tokens(laps.at(short=[short(added_at=10.0)], long=[long()]))
    assert seconds_of(DEVICE, StepWork().plus(sum(taken), 0)) <= LIMITS.blocking_s


def test_what_decode_rows_take_does_not_count_for_a_chunk_that_is_due() -> None:
    laps, decode = Laps(), StepWork(decode_rows=100, decode_kv=200_000)  # 11 ms
    laps.earn(0.03)
    [count] = laps.tokens(laps.at(short=[short(added_at=10.0)], long=[long()], beside=decode), decode)
    seconds = seconds_of(DEVICE, decode.plus(count, 0))
    extra = seconds_of(DEVICE, decode) - DEVICE.floor
    assert LIMITS.blocking_s + extra - 0.003 < seconds <= LIMITS.blocking_s + extra


def test_the_rest_of_a_long_prompt_is_due_when_it_is_paid_for() -> None:
    laps = Laps()
    laps.earn(0.008)
    waiting = long(300)  # 7 ms
    assert laps.at(short=[short(added_at=10.0)], long=[waiting]).prompts == [waiting]


def test_the_time_of_the_short_prompt_counts_for_its_deadline() -> None:
    laps = Laps()
    laps.earn(1.0)
    late = short(256, added_at=10 - LIMITS.slo_s + 0.033)  # it takes 6 ms, so 27 ms are left
    assert laps.at(short=[late], long=[long()]).prompts[0] is late


# --- the size of steps ---


def test_what_decode_rows_take_beyond_the_floor_does_not_count_for_short_prompts() -> None:
    laps, decode = Laps(), StepWork(decode_rows=100, decode_kv=200_000)
    waiting = [short(100) for _ in range(50)]
    taken = laps.tokens(laps.at(short=waiting, beside=decode), decode)
    seconds = seconds_of(DEVICE, decode.plus(sum(taken), 0))
    extra = seconds_of(DEVICE, decode) - DEVICE.floor
    assert LIMITS.blocking_s + extra - 0.0025 < seconds <= LIMITS.blocking_s + extra


def test_the_first_short_prompt_of_a_step_is_taken_whole_however_long_it_takes() -> None:
    laps = Laps()
    behind = short(200, history=1_000_000)  # 41 ms
    assert laps.tokens(laps.at(short=[behind, short()])) == [200]


def test_the_rest_of_a_long_prompt_may_be_smaller_than_a_chunk() -> None:
    laps = Laps(busy=True)
    waiting = [short(250) for _ in range(5)]
    *_, rest = laps.tokens(laps.at(short=waiting, long=[long(150)]))
    assert rest == 150


def test_a_chunk_is_not_cut_to_a_captured_size_that_is_far() -> None:
    laps = Laps(busy=True, sizes=[256, 512])
    assert laps.tokens(laps.at(short=[short(40)], long=[long()]))[1] > 1024


def test_a_chunk_ends_with_a_page_wherever_it_begins() -> None:
    laps = Laps(busy=True)
    [_, count] = laps.tokens(laps.at(short=[short(40)], long=[long(history=10)]))
    assert (10 + count) % 64 == 0


def test_short_prompts_that_have_begun_go_on_behind_a_long_one_of_higher_priority() -> None:
    begun, urgent = short(), long(priority=1)
    assert Laps().at(started=[begun], long=[urgent]).prompts == [urgent, begun]


# --- the window ---


def flooded() -> Laps:
    """Make the policy expect 2,000 short prompts per second."""
    laps = Laps()
    for number in range(2000):
        laps.arrived(short(), 9 + number / 2000)
    return laps


def test_there_is_no_wait_for_others_while_a_prompt_has_begun() -> None:
    begun = short(added_at=10.0)
    assert flooded().at(started=[begun], is_idle=True).prompts == [begun]


def test_a_long_prompt_ends_a_wait_for_others() -> None:
    laps, waiting = flooded(), short(added_at=10.0)
    assert laps.at(short=[waiting], is_idle=True).wake_at is not None
    assert laps.at(10.002, short=[waiting], long=[long()], is_idle=True).prompts[0] is waiting
    assert laps.window.waited_s == pytest.approx(0.002)


def test_there_is_no_wait_for_others_if_the_first_would_miss_its_deadline_by_it() -> None:
    """4 ms are left to it, and its own step takes 5."""
    waiting = short(added_at=10 - LIMITS.slo_s + 0.004)
    assert flooded().at(short=[waiting], is_idle=True).prompts == [waiting]


def test_an_idle_engine_without_prompts_waits_for_none() -> None:
    assert flooded().at(is_idle=True).wake_at is None
