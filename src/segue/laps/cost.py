"""How long a step takes, predicted from the steps that have run.

A step reads all weights once, however few tokens it has, and this hides the arithmetic of its first tokens.
Attention comes on top. So a step takes, in seconds,

    max(floor, start + per_token * tokens) + per_pair * pairs + per_kv * decode_kv

where ``tokens`` are those of its prompts and one per decode row. The coefficients are fitted to samples of
every size of step, the newest ones of each: a day of short steps does not make it forget how long a long one
takes, and a single step that waited for something else weighs little.
"""

from __future__ import annotations

from collections import deque
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Sample = tuple[int, "StepWork", float]  # its number, and the seconds that the work took

PER_SIZE = 5  # samples kept of each size of step
NUM_SMALLEST, LOW = 8, 0.4  # the floor is this quantile of the sizes with the fewest tokens
TRUSTED = 0.1  # a sample that deviates by more than this share weighs less, in proportion
FORGET, REMEMBER = 0.98, 0.02  # what a sample weighs after one further sample, and at least
EVERY = 64  # samples between two fits, once there are as many
ROUNDS = 3  # of a fit: which samples are above the floor, and which deviate, depends on the coefficients
NUM_ERRORS = 256  # predictions whose errors are kept
QUICK = 0.25  # a time per token below this quantile is too good to be true, at the beginning of a fit
SHORTEST_S, LONGEST_S = 1e-6, 1e4  # of a step; anything else is not a measurement


class StepWork(NamedTuple):
    """What a step computes."""

    prompt_tokens: int = 0
    pairs: float = 0.0  # of a prompt token and one before it, or itself: see `pairs_of`
    decode_rows: int = 0
    decode_kv: int = 0  # tokens whose KV the decode rows read

    @property
    def tokens(self) -> int:
        """The rows of the step's matrices."""
        return self.prompt_tokens + self.decode_rows

    def plus(self, tokens: int, history: int) -> StepWork:
        """Returns this work and a prompt's next tokens, behind ``history`` others."""
        return self._replace(
            prompt_tokens=self.prompt_tokens + tokens, pairs=self.pairs + pairs_of(tokens, history)
        )


NO_WORK = StepWork()


class StepTime(NamedTuple):
    """How long a step took."""

    work: StepWork
    seconds: float


class Coefficients(NamedTuple):
    """Of the formula above, in seconds."""

    floor: float = 0.0
    start: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_kv: float = 0.0


def pairs_of(tokens: int, history: int) -> float:
    """Returns the pairs of query and key for ``tokens`` prompt tokens behind ``history`` others."""
    return tokens * (history + tokens / 2)


def seconds_of(c: Coefficients, work: StepWork) -> float:
    """Returns how long ``work`` takes by these coefficients."""
    dense = max(c.floor, c.start + c.per_token * work.tokens)
    return dense + c.per_pair * work.pairs + c.per_kv * work.decode_kv


def prompt_seconds(c: Coefficients, tokens: int, history: int) -> float:
    """Returns how long ``tokens`` tokens of one prompt take alone, behind ``history`` others.

    It is `seconds_of` for such work, and takes a third of its time: a router asks this of every worker.
    """
    dense = max(c.floor, c.start + c.per_token * tokens)
    return dense + c.per_pair * tokens * (history + tokens / 2)


def tokens_within(c: Coefficients, seconds: float, history: int, beside: StepWork) -> float:
    """Returns how many tokens of one prompt, behind ``history`` others, a step can compute in ``seconds``.

    ``beside`` is the step's other work. It is 0 if that alone takes as long, and infinite if tokens cost
    nothing by what is known.
    """
    left = seconds - c.per_pair * beside.pairs - c.per_kv * beside.decode_kv
    by_tokens = _root(
        c.per_pair / 2, c.per_token + c.per_pair * history, left - c.start - c.per_token * beside.tokens
    )
    return min(by_tokens, _root(c.per_pair / 2, c.per_pair * history, left - c.floor))


def _root(square: float, linear: float, total: float) -> float:
    """Returns the largest x >= 0 with ``square * x**2 + linear * x <= total``, for positive factors."""
    if total <= 0:
        return 0.0
    if square == 0:
        return total / linear if linear else inf
    return (sqrt(linear * linear + 4 * square * total) - linear) / (2 * square)


class CostModel:
    """Learns the coefficients of one engine."""

    def __init__(self) -> None:
        self.error_p50 = self.error_p90 = 0.0  # quantiles of |predicted / measured - 1| of the last samples
        self.largest = 0  # tokens of the largest step that was learned from
        self._coefficients = Coefficients()
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._samples: dict[tuple[int, int], deque[Sample]] = {}
        self._count = 0
        self._fit_at = 1  # the number of samples from which on the coefficients are fitted again

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients; they are fitted when they are asked for and enough samples are new."""
        if self._count >= self._fit_at:
            self._fit_at = self._count + min(self._count, EVERY)
            if self._errors:
                self.error_p50, self.error_p90 = map(float, np.quantile(self._errors, (0.5, 0.9)))
            self._coefficients = self._fit()
        return self._coefficients

    @property
    def is_ready(self) -> bool:
        """Whether there was a sample to learn from."""
        return self._count > 0

    def add(self, work: StepWork, seconds: float) -> None:
        """Learn that a step with prompt tokens took so long; others tell nothing of what a prompt costs."""
        if not work.prompt_tokens or not SHORTEST_S < seconds < LONGEST_S:
            return
        if self._coefficients != Coefficients():
            self._errors.append(abs(seconds_of(self._coefficients, work) / seconds - 1))
        self._count += 1
        self.largest = max(self.largest, work.tokens)
        size = work.tokens.bit_length(), int(work.pairs / work.tokens).bit_length() // 3
        self._samples.setdefault(size, deque(maxlen=PER_SIZE)).append((self._count, work, seconds))

    def seconds(self, work: StepWork) -> float:
        """Returns how long ``work`` is expected to take; 0 before the first sample."""
        return seconds_of(self.coefficients, work) if work.tokens else 0.0

    def _fit(self) -> Coefficients:
        """Fit the samples by weighted least squares of the relative errors.

        To tell which samples deviate, they are compared with coefficients: the last ones, or those that fit
        the middle sample of each size, whose time is hardly an unusual one. The better of the two fits wins.
        """
        sizes = list(self._samples.values())
        middle = [sorted(size, key=_seconds_per_token)[(len(size) - 1) // 2] for size in sizes]
        everything = [sample for size in sizes for sample in size]
        fresh = self._improved(self._improved(Coefficients(), middle, 1.0), middle, 1.0)
        found = []
        for c in {self._coefficients, fresh} - {Coefficients()}:
            for _ in range(ROUNDS):
                c = self._improved(c, everything, FORGET)
            found.append((self._loss(c, middle), c))
        return min(found)[1]

    def _loss(self, c: Coefficients, samples: list[Sample]) -> float:
        """Returns how badly the coefficients fit; one sample that deviates widely counts once."""
        return sum(
            min(1.0, abs(log(seconds / max(seconds_of(c, work), 1e-9)))) for _, work, seconds in samples
        )

    def _improved(self, c: Coefficients, samples: list[Sample], forget: float) -> Coefficients:
        """Returns better coefficients than ``c``, which say where the floor is, and what deviates."""
        columns = np.array([(1.0, work.tokens, work.pairs, work.decode_kv) for _, work, _ in samples])
        measured = np.array([seconds for _, _, seconds in samples])
        age = np.array([self._count - number for number, _, _ in samples])
        tokens = columns[:, 1]
        linear = c.start + c.per_token * tokens
        rest = measured - columns[:, 2:] @ c[3:]
        smallest = np.argsort(tokens)[:NUM_SMALLEST]
        floor = max(0.0, float(np.quantile(rest[smallest], LOW)))
        weights = np.maximum(forget**age, REMEMBER)
        above = np.ones(len(samples), bool)
        expected = tokens * np.quantile(measured / tokens, QUICK)
        if c.floor or c.start or c.per_token:
            above = linear > floor
            expected = np.maximum(np.maximum(floor, linear) + columns[:, 2:] @ c[3:], 1e-9)
            weights *= TRUSTED / np.maximum(TRUSTED, np.abs(np.log(measured / expected)))
        weights /= np.maximum(measured, expected) ** 2
        used = np.where(above[:, None], columns, columns * (0, 0, 1, 1))
        return Coefficients(floor, *_solve(used, np.where(above, measured, measured - floor), weights))


def warm_up() -> None:
    """Fit once: numpy's routines take 12 ms when a process calls them first, and later 1 ms."""
    model = CostModel()
    model.add(StepWork(prompt_tokens=1, pairs=pairs_of(1, 0)), 1.0)
    _ = model.coefficients


def _seconds_per_token(sample: Sample) -> float:
    _, work, seconds = sample
    return seconds / work.tokens


def _solve(columns: Matrix, target: Matrix, weights: Matrix) -> list[float]:
    """Returns the weighted least-squares solution in which no coefficient is negative.

    While the best solution has negative coefficients, the most negative one becomes 0 and is left out.
    """
    moments, products = columns.T @ (columns * weights[:, None]), columns.T @ (target * weights)
    norms = np.sqrt(moments.diagonal())
    kept, found = [i for i in range(len(norms)) if norms[i] > 0], [0.0] * len(norms)
    while kept:
        scaled = moments[np.ix_(kept, kept)] / np.outer(norms[kept], norms[kept])
        scaled += 1e-6 * np.eye(len(kept))
        solution = np.linalg.solve(scaled, products[kept] / norms[kept])
        if solution.min() >= 0:
            for index, value in zip(kept, solution / norms[kept], strict=True):
                found[index] = float(value)
            break
        del kept[int(solution.argmin())]
    return found
