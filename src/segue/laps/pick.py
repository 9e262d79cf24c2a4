"""Which prefill work a step takes: the interface of a policy, and the policy of LAPS.

Rows that decode are part of every step, whatever a policy chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import exp, inf
from typing import Generic, Literal, Protocol, TypeVar, get_args

from segue.laps.classes import PromptClass, classify
from segue.laps.cost import NO_WORK, Coefficients, CostModel, StepWork, tokens_within
from segue.laps.window import Rate, Window
from segue.messages.control import LapsCounters, LapsLimits

MIN_CHUNK = 256  # tokens of a long prompt, unless fewer are left: smaller chunks cost as much as this one
GROWTH = 4  # how many times larger than any step before a chunk may be: further the prediction is not trusted
BUSY = 0.8  # the share of time with prefill above which every step of short prompts is filled with long ones
BUSY_MEMORY_S = 2.0
# Why a step has the prefill work that it has. share: long prompts were due. filled: long prompts behind short
# ones. window: none, to wait for more short prompts.
Pick = Literal["short", "long", "share", "filled", "window"]
LIKELY = 0.1  # short prompts expected during a chunk, from which on the chunk is kept short


class Prompt(Protocol):
    """A request whose known tokens have to be computed."""

    priority: int
    added_at: float
    prompt_class: PromptClass

    @property
    def history(self) -> int:
        """Tokens whose KV is computed or found; for a waiting prompt, those that are expected to be found."""
        ...

    @property
    def remaining(self) -> int:
        """The other known tokens, which are still to be computed."""
        ...


P = TypeVar("P", bound=Prompt)
Room = Callable[[P, StepWork], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView(Generic[P]):
    """The prefill work that a policy may choose from."""

    started: Sequence[P]  # admitted, with known tokens that have no KV yet, in the order of admission
    short: Sequence[P]  # not admitted, in the order of the queue; without LAPS all of them
    long: Sequence[P] = ()  # the same
    num_slots: int  # waiting requests that the step may admit
    budget: int  # tokens that the step may compute
    beside: StepWork = NO_WORK  # the rows that decode
    is_idle: bool = False  # nothing is in flight, and no row decodes: waiting delays nobody who runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice(Generic[P]):
    """The prefill work of one step."""

    prompts: Sequence[P]  # in this order; the first that cannot be admitted ends the step
    budget: int  # tokens of all of them together
    wake_at: float | None = None  # when to ask again although nothing has arrived; None: never
    # Returns how many tokens of a prompt the step may compute beside its other work; the budget and the
    # prompt's length limit it further. 0 ends the step. None: any number.
    room: Room[P] | None = None


class PrefillPolicy(Protocol[P]):
    """Decides the order of prefill work, and is told what became of it. Times are in seconds."""

    def classify(self, tokens: int, history: int) -> PromptClass:
        """Returns the class of a prompt with so many tokens to compute, behind so many others."""
        ...

    def pick(self, view: PrefillView[P], now: float) -> PrefillChoice[P]:
        """Choose a step's prefill work. A policy that holds all work back must set ``wake_at``."""
        ...

    def expects_short(self, seconds: float, now: float) -> bool:
        """Whether a prompt that would go before long ones is likely to arrive within so many seconds."""
        ...

    def arrived(self, prompt: P, now: float) -> None:
        """Note a new request."""

    def planned(self, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
        """Note a step: ``work`` is all of it, ``long`` its chunks of long prompts."""

    def ended(self, work: StepWork, seconds: float, now: float) -> None:
        """Note that a step has taken so long."""

    def report(self, waiting: dict[str, int]) -> LapsCounters | None:
        """Returns what the metrics show, if there are classes; ``waiting``: requests of each class."""
        ...


class LapsPolicy(Generic[P]):
    """Short prompts first, and for long ones a share of the time; no long step while short ones wait.

    Long prompts earn ``long_share`` of the time of all steps with prefill while any of them waits. Once that
    pays for a chunk, they get one. In all other steps short prompts go first, and long ones fill what they
    leave free if prefill is busy for most of the time.
    """

    def __init__(
        self, limits: LapsLimits, cost: CostModel, page_size: int, sizes: Sequence[int] = ()
    ) -> None:
        """Start with nothing learned.

        Args:
            limits: the options.
            cost: predicts how long a step takes; somebody else teaches it.
            page_size: chunks of long prompts end with a page.
            sizes: the token counts of captured steps, ascending; a chunk is cut to one of them.
        """
        self.limits = limits
        self.window = Window(limits.window_s)
        self.picks: dict[str, int] = dict.fromkeys(get_args(Pick), 0)  # steps with prefill work; and waits
        self._reason: Pick = "short"  # of the last choice, which counts once a step has prefill work by it
        self.credit_s = 0.0  # that long prompts have earned and not used; negative: used before it was earned
        self._cost = cost
        self._page_size = page_size
        self._sizes = sizes
        self._arrivals = Rate()  # of short prompts
        self._busy = Rate(BUSY_MEMORY_S)  # seconds of prefill per second
        self._chunks = self._chunk_tokens = 0  # of long prompts
        self._is_contended = False  # whether prompts of both classes could be computed in the last step
        self._was_put_off = False  # whether a chunk that was due has given way to a short prompt

    # --- what the scheduler tells ---

    def classify(self, tokens: int, history: int) -> PromptClass:
        """Returns the class of a prompt with so many tokens to compute, behind so many others."""
        coefficients = self._cost.coefficients if tokens <= self._largest_known() else Coefficients()
        return classify(tokens, history, self.limits.threshold, coefficients)

    def arrived(self, prompt: P, now: float) -> None:
        """Count the arrivals of short prompts."""
        if prompt.prompt_class == "short":
            self._arrivals.add(now)

    def planned(self, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
        """Account for a step: ``work`` is all of it, ``long`` its chunks of long prompts."""
        if not work.prompt_tokens:
            return
        self.picks[self._reason] += 1
        total = self._cost.seconds(work)
        if long.prompt_tokens:
            self._chunks += 1
            self._chunk_tokens += long.prompt_tokens
            # A chunk pays for the whole step, or beside short prompts for what it adds to the step.
            short = work._replace(
                prompt_tokens=work.prompt_tokens - long.prompt_tokens, pairs=work.pairs - long.pairs
            )
            price = total - (self._cost.seconds(short) if short.prompt_tokens else 0.0)
            # Only a chunk that short prompts wait for leaves a debt.
            is_free = short.prompt_tokens or not self._is_contended
            self.credit_s = max(self.credit_s - price, min(self.credit_s, 0.0) if is_free else -price)
            self._was_put_off = False
        if long_waits:
            self.credit_s = min(self.credit_s + self.limits.long_share * total, 2 * self.limits.blocking_s)

    def ended(self, work: StepWork, seconds: float, now: float) -> None:
        """Note that a step has taken so long."""
        if work.prompt_tokens:
            # As if the step's time had been added piece by piece: a long one counts as 100 % at most.
            self._busy.add(now, BUSY_MEMORY_S * (1 - exp(-seconds / BUSY_MEMORY_S)))

    def report(self, waiting: dict[str, int]) -> LapsCounters:
        """Returns what the metrics show; ``waiting``: requests of each class."""
        return LapsCounters(
            waiting=waiting,
            picks=dict(self.picks),
            chunks=self._chunks,
            chunk_tokens=self._chunk_tokens,
            window_s=self.window.waited_s,
            error_p50=self._cost.error_p50,
            error_p90=self._cost.error_p90,
        )

    # --- what it decides ---

    def pick(self, view: PrefillView[P], now: float) -> PrefillChoice[P]:
        """Choose a step's prefill work."""
        started = [p for p in view.started if p.prompt_class == "short"]
        short = _by_priority([*started, *islice(view.short, view.num_slots)])
        begun = [p for p in view.started if p.prompt_class == "long"]
        long = _by_priority([*begun, *islice(view.long, view.num_slots)])
        self._is_contended = bool(short and long)
        extra = max(0.0, self._cost.seconds(view.beside) - self._cost.coefficients.floor)
        most = self._longest_step() + extra
        if not long:
            if not view.long:  # nobody waits for a slot either
                self.credit_s, self._was_put_off = 0.0, False
            return self._wait(view, short, now) or self._choose("short", short, most, view)
        self.window.stop(now)
        if not short:
            chunk = self._cost.seconds(NO_WORK.plus(view.budget, 0))
            return self._choose("long", long, most if self.expects_short(chunk, now) else inf, view)
        # Short prompts that have begun go on behind them: they may have the pages that a long one needs.
        if long[0].priority > short[0].priority:
            return self._choose("long", long + started, most, view)
        if self._is_due(long[0], short[0], now):
            return self._choose("share", long + started, min(self.credit_s + extra, most), view)
        fills = self._busy.per_second(now) >= BUSY
        return self._choose("filled" if fills else "short", short + long, most, view)

    def _wait(self, view: PrefillView[P], short: list[P], now: float) -> PrefillChoice[P] | None:
        """Choose nothing, to wait for more short prompts; None: that does not pay, or delays somebody."""
        if not short or not view.is_idle or view.started:
            return None
        floor = self._cost.coefficients.floor
        until = self.window.until(
            len(short),
            slack=short[0].added_at + self.limits.slo_s - now - floor,
            rate=self._arrivals.per_second(now),
            shortest=floor,
            now=now,
        )
        if until is None:
            return None
        self.picks["window"] += 1
        return PrefillChoice(prompts=(), budget=0, wake_at=until)

    def _choose(
        self, reason: Pick, prompts: Sequence[P], seconds: float, view: PrefillView[P]
    ) -> PrefillChoice[P]:
        """Choose prompts for a step that takes at most ``seconds``."""
        self._reason = reason
        return PrefillChoice(prompts=prompts, budget=view.budget, room=partial(self._room, reason, seconds))

    def _longest_step(self) -> float:
        """Returns how many seconds a step may take while short prompts wait, decode rows aside.

        A step that is hardly longer than the shortest one would compute hardly anything.
        """
        return max(self.limits.blocking_s, 2 * self._cost.coefficients.floor)

    def _largest_known(self) -> int:
        """Returns the tokens of a step up to which predictions are trusted."""
        return max(MIN_CHUNK, self._cost.largest)

    def expects_short(self, seconds: float, now: float) -> bool:
        """Whether a short prompt is likely to arrive within so many seconds."""
        return self._arrivals.per_second(now) * seconds > LIKELY

    def _is_due(self, long: P, short: P, now: float) -> bool:
        """Whether long prompts have earned a chunk.

        It gives way once to a short prompt whose deadline it would break, unless that is broken anyway.
        """
        if self.credit_s < min(self.limits.blocking_s, self._seconds_of(long)):
            return False
        left = short.added_at + self.limits.slo_s - now - self._seconds_of(short)
        if not self._was_put_off and 0 <= left < self.limits.blocking_s:
            self._was_put_off = True
            return False
        return True

    def _seconds_of(self, prompt: P) -> float:
        """Returns how long a step takes that computes what is left of a prompt, and nothing else."""
        return self._cost.seconds(NO_WORK.plus(prompt.remaining, prompt.history))

    def _room(self, reason: Pick, seconds: float, prompt: P, beside: StepWork) -> int:
        """Returns how many tokens of a prompt fit into a step of at most ``seconds``.

        A short prompt is taken whole, or not. The first prompt of a step is taken even if it takes longer. In
        a step for short prompts a long one goes on only if there is room for none of them, since it may have
        the slot or the pages that they need.
        """
        tokens = inf
        if seconds < inf:
            tokens = tokens_within(self._cost.coefficients, seconds, prompt.history, beside)
            tokens = min(tokens, GROWTH * self._largest_known())
        if prompt.prompt_class == "short":
            return prompt.remaining if tokens >= prompt.remaining or not beside.prompt_tokens else 0
        if reason == "short" and beside.prompt_tokens:
            return 0
        if tokens < min(MIN_CHUNK, prompt.remaining):
            if beside.prompt_tokens:
                return 0
            tokens = MIN_CHUNK
        return self._chunk(prompt, int(min(tokens, prompt.remaining)), beside.tokens)

    def _chunk(self, prompt: P, tokens: int, beside: int) -> int:
        """Returns a chunk of at most ``tokens``: of whole pages, in a step of a captured size if one is near.

        ``beside``: the step's other tokens.
        """
        if tokens >= prompt.remaining:
            return prompt.remaining
        fitting = [size - beside for size in self._sizes if MIN_CHUNK <= size - beside <= tokens]
        if fitting and fitting[-1] >= tokens // 2:
            tokens = fitting[-1]
        whole = tokens - (prompt.history + tokens) % self._page_size
        return whole if whole > 0 else tokens


def _by_priority(prompts: list[P]) -> list[P]:
    """Returns the prompts, those with the highest priority first; the queue is in this order already."""
    return sorted(prompts, key=lambda prompt: -prompt.priority) if prompts else prompts
