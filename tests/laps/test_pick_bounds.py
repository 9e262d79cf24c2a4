"""What LAPS promises, whatever arrives: nobody waits longer than its rules allow.

The scheduler runs on a simulated device whose times it knows, and there is room for every request, so that
every wait is the policy's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from bench.simulate import Arrival, HostCost, Simulation
from segue.laps.classes import PromptClass
from segue.laps.cost import Coefficients, CostModel, StepWork, seconds_of
from segue.laps.pick import MIN_CHUNK, LapsPolicy
from segue.laps.window import Window
from segue.messages.control import EngineLimits, LapsLimits
from segue.scheduler.request import Request, Step

DEVICE = Coefficients(floor=0.005, start=0.001, per_token=2e-5, per_pair=1.1e-9, per_kv=4e-8)
LAPS = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.03, window_s=0.006)
CHUNK, PAGE = 8192, 16
LIMITS = EngineLimits(
    num_pages=100_000, page_size=PAGE, max_seq_len=20_000, max_running_requests=5000,
    chunked_prefill_size=CHUNK, laps=LAPS,
)  # fmt: skip
SMALLEST_CHUNK_S = seconds_of(DEVICE, StepWork().plus(MIN_CHUNK, 20_000)) + 0.002  # beside decode rows


class KnownCost(CostModel):
    """A cost model that knows the truth from the start."""

    coefficients = DEVICE  # type: ignore[assignment]

    def add(self, work: StepWork, seconds: float) -> None:
        pass


@dataclass
class Wait:
    """What a request may wait for, as it was when it came."""

    of: PromptClass
    at: float
    most: float  # seconds: for a short prompt until it begins, for a long one of prefill until it is computed
    busy: float  # seconds of prefill until then


class Watched(Simulation):
    """Looks at every request and every step."""

    def __init__(self) -> None:
        super().__init__(limits=LIMITS, truth=DEVICE, host=HostCost(turn=0.0))
        policy = cast(LapsPolicy[Request], self.scheduler._prefill.policy)
        self.scheduler.cost = policy._cost = KnownCost()
        self.scheduler.cost.largest = CHUNK
        self.waits: dict[str, Wait] = {}
        self.problems: list[str] = []
        self.busy = 0.0  # seconds of all steps with prefill

    def add(self, arrival: Arrival, now: float) -> None:
        super().add(arrival, now)
        *others, request = self.scheduler.requests.values()
        of = request.prompt_class
        ahead = [r for r in others if r.num_outputs == 0 and self.waits[r.rid].of == of]
        if of == "short":
            # What is on the device, the two chunks that may be due and the one that is then earned, and the
            # short prompts ahead, one by one; of that time, long prompts have their share.
            alone = sum(seconds_of(DEVICE, StepWork().plus(r.remaining, 0)) for r in ahead)
            most = max(0.0, self.free - now) + LAPS.window_s + 3 * LAPS.blocking_s
            most += (alone + LAPS.blocking_s) / (1 - LAPS.long_share)
        else:
            most = sum(map(chunks_s, [*ahead, request])) / LAPS.long_share + 3 * LAPS.blocking_s
        self.waits[request.rid] = Wait(of, now, most, self.busy)

    def launch(self, step: Step, now: float) -> float:
        launched = super().launch(step, now)
        if not step.work.prompt_tokens:
            return launched
        seconds = seconds_of(DEVICE, step.work)
        self.busy += seconds
        slots = set(step.plan.slots[step.plan.num_decode :])
        prompts = [r for r in self.scheduler.running.values() if r.slot in slots]
        for request in prompts:
            wait = self.waits[request.rid]
            if wait.of == "short" and now - wait.at > wait.most:
                self.problems.append(f"a short prompt waited {now - wait.at:.3f} s of {wait.most:.3f} s")
            if wait.of == "long" and request.outputs_launched and self.busy - wait.busy > wait.most:
                self.problems.append(f"a long one took {self.busy - wait.busy:.2f} s of {wait.most:.2f} s")
        waits = bool(self.scheduler.waiting.of("short"))
        decode = StepWork(decode_rows=step.work.decode_rows, decode_kv=step.work.decode_kv)
        allowed = LAPS.blocking_s if len(prompts) > 1 else max(LAPS.blocking_s, SMALLEST_CHUNK_S)
        allowed += max(0.0, seconds_of(DEVICE, decode) - DEVICE.floor)
        if (waits or any(self.waits[r.rid].of == "short" for r in prompts)) and seconds > allowed + 1e-6:
            self.problems.append(f"a step takes {seconds:.3f} s with a short prompt in it, or waiting")
        return launched


def chunks_s(request: Request) -> float:
    """How long a long prompt takes in steps of ``blocking_s``, of which decode rows and pages take a part."""
    useful = LAPS.blocking_s - DEVICE.start - 0.004
    linear = DEVICE.per_token * request.remaining
    pairs = DEVICE.per_pair * request.remaining * (request.history + request.remaining)
    return (1 + (linear + pairs) // useful) * LAPS.blocking_s


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.03, 0.2]),  # seconds since the one before
        st.sampled_from([1, 20, 256]) | st.integers(1, 400) | st.integers(2000, 16_000),
        st.sampled_from([1, 1, 5]),  # output tokens: rows that decode take a part of each step
        st.sampled_from([1, 1, 1, 5, 30]),  # of them at the same time, if they are short
        st.sampled_from([1, 1, 1, 20]),  # times, one after the other
    ),
    min_size=1,
    max_size=20,
)
Drawn = list[tuple[float, int, int, int, int]]


def load(drawn: Drawn) -> list[Arrival]:
    now, found = 1.0, list[Arrival]()
    for gap, tokens, outputs, count, times in drawn:
        for _ in range(times if tokens <= 400 else 1):
            now += gap
            for _ in range(count if tokens <= 400 else 1):
                found.append(Arrival(at=now, prompt=[len(found)] * tokens, outputs=outputs))
    return found


def problems(drawn: Drawn) -> list[str]:
    watched = Watched()
    watched.run(load(drawn))
    return watched.problems


def search(examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    @given(drawn=ARRIVALS)
    @example(drawn=[(0.0, 16_000, 1, 1, 1), (0.03, 256, 1, 30, 24)])  # short prompts alone are too many
    def check(drawn: Drawn) -> None:
        assert problems(drawn) == []

    check()


def test_nobody_waits_longer_than_the_rules_allow() -> None:
    search(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nobody_waits_longer_than_the_rules_allow_for_long() -> None:
    search(2000)


# Bugs that the search must find: each test puts one of them into the policy.

_planned, _room, _choose = LapsPolicy.planned, LapsPolicy._room, LapsPolicy._choose


def earns_nothing(self: Any, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
    _planned(self, work, long, long_waits=False)


def pays_nothing(self: Any, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
    _planned(self, work, StepWork(), long_waits=long_waits)


def forgets_the_step_so_far(self: Any, reason: Any, seconds: float, prompt: Any, beside: StepWork) -> int:
    return _room(self, "filled", seconds, prompt, StepWork())


def allows_any_time_when_due(self: Any, reason: Any, prompts: Any, seconds: float, view: Any) -> Any:
    return _choose(self, reason, prompts, inf if reason == "share" else seconds, view)


def puts_off_for_ever(self: Any, long: Any, short: Any, now: float) -> bool:
    return False


def calls_everything_short(self: Any, tokens: int, history: int) -> PromptClass:
    return "short"


def waits_long(self: Any, count: int, *, now: float, **_: Any) -> float | None:
    if self._since is None:
        self._since = now
    if now < self._since + 0.3:
        return self._since + 0.3
    return self.stop(now)


BUGS: list[tuple[type, str, Callable[..., Any]]] = [
    (LapsPolicy, "planned", earns_nothing),
    (LapsPolicy, "planned", pays_nothing),
    (LapsPolicy, "_room", forgets_the_step_so_far),
    (LapsPolicy, "_choose", allows_any_time_when_due),
    (LapsPolicy, "_is_due", puts_off_for_ever),
    (LapsPolicy, "classify", calls_everything_short),
    (Window, "until", waits_long),
]


@pytest.mark.parametrize("owner, name, bug", BUGS, ids=[bug.__name__ for _, _, bug in BUGS])
def test_a_seeded_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, bug: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        search(400)
