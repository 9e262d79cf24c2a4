"""Where each guided request stands in its grammar, and the tokens that it may draw next.

:class:`Matchers` lives beside the sampler of rank 0. What takes time happens in one thread of its own, in the
order in which it was asked for: a mask is computed from a step's token while the next step's model runs.

The thread holds the GIL while it consumes tokens, and not while it computes masks. Beside a GPU `processes`
does the same without the GIL of the process that launches steps.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from segue.guided.follower import Follower, Guide, Mask
from segue.messages.guided import GuidedVocabulary
from segue.messages.requests import SamplingParams

# The phases of a step with guided rows: until its tokens are on the host; consuming them; computing the next
# masks, which with the phase before should take less than a forward pass; what then is left to wait for; and
# from there until sampling has been launched.
PHASES = ("tokens", "consume", "masks", "wait", "launch")
MAX_TIMED = 1024  # steps


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tokens the guided rows of a step may draw."""

    rows: NDArray[np.int64]  # `[G]`, the guided ones of the step's sampling rows
    masks: Mask  # `[G, ceil(V / 32)]`
    failures: dict[int, str]  # row -> why its grammar cannot be followed; its mask allows anything


class CompleteRows(Protocol):
    """The rows of a step whose grammars are complete, so that only EOS may follow."""

    def result(self) -> list[int]:
        """Return them, once the step's tokens are consumed; the next masks are computed meanwhile."""


class Matchers:
    """The guides of the request slots. A slot without a grammar has none, and costs nothing."""

    def __init__(self, masks: Mask) -> None:
        """Take the masks to write, `[slots, ceil(V / 32)]`.

        A slot's row is written until `wait` has returned for it, and then not before `take`.
        """
        self._masks = masks
        self._times = {name: deque[float](maxlen=MAX_TIMED) for name in PHASES}
        self._guides: dict[int, Guide] = {}
        self._thread: ThreadPoolExecutor | None = None  # None: nothing was ever guided
        self._follower = Follower(masks)
        self._waited_at = 0.0  # when `wait` returned

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """Take the vocabulary, which must come before the first grammar."""
        # More threads would have to be woken up, which takes longer than what they save. Without any, each
        # mask takes the GIL anew, which the thread that launches steps may hold for long.
        self._follower = Follower(self._masks, LLExecutor(1))
        self._submit(lambda: self._follower.prepare(vocabulary))

    def can_begin(self) -> bool:
        """Whether a guided request that begins now keeps no step waiting while something starts.

        True as well where nothing can be started: such a request fails at once.
        """
        return True  # the thread holds the GIL while it prepares the vocabulary

    def put(self, slot: int, params: SamplingParams, outputs: Sequence[int]) -> None:
        """Let a new request have a slot; ``outputs`` are the output tokens that it has already."""
        if params.grammar is None:
            self._guides.pop(slot, None)
            return
        spec = params.grammar
        guide = self._guides[slot] = Guide(slot, self._masks[slot], params.late_eos, ready=Future())
        guide.ready = self._submit(lambda: self._follower.begin(guide, spec, outputs))

    def forget(self, slots: Sequence[int]) -> None:
        """Free what is kept of slots whose requests have ended; no step that is still to run may use them."""
        guides = [guide for slot in slots if (guide := self._guides.pop(slot, None)) is not None]
        if guides:
            self._submit(lambda: _free(guides))

    def wait(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]] | None:
        """Wait until the masks of these slots are known.

        Returns the rows that are guided, and of them those whose grammars cannot be followed, with the
        reasons; None: none is guided.
        """
        guides = self._guided(slots)
        if not guides:
            return None
        began = time.perf_counter()
        for ready in {guide.ready for _, guide in guides}:
            assert ready is not None
            ready.result()
        self._waited_at = time.perf_counter()
        self._times["wait"].append(self._waited_at - began)
        failures = {row: guide.failure for row, guide in guides if guide.failure}
        return np.array([row for row, _ in guides], dtype=np.int64), failures

    def allowed(self, slots: NDArray[np.int64]) -> Allowed | None:
        """Return what the rows with these slots may draw, once that is known; None: none is guided."""
        if (found := self.wait(slots)) is None:
            return None
        rows, failures = found
        return Allowed(rows=rows, masks=self._masks[slots[rows]], failures=failures)

    def take(self, slots: NDArray[np.int64], read: Callable[[], Sequence[int]]) -> CompleteRows | None:
        """Go on from the tokens that a step has drawn for these slots, one each.

        ``read`` returns them, and may wait for them. It is called only if a slot is guided, by any thread.

        Returns the rows whose grammars are complete. None: no row is guided.
        """
        guides = self._guided(slots)
        if not guides:
            return None
        self._times["launch"].append(time.perf_counter() - self._waited_at)
        complete: Future[list[int]] = Future()
        ready = self._submit(lambda: self._advance(guides, read, complete))
        for _, guide in guides:
            guide.ready = ready
        return complete

    def close(self) -> None:
        """End the thread; nothing may be asked for afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def median_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each phase of the last guided steps."""
        return {name: round(1e3 * statistics.median(each), 3) for name, each in self._times.items() if each}

    def _guided(self, slots: NDArray[np.int64]) -> list[tuple[int, Guide]]:
        """Return the rows of these slots that are guided."""
        if not self._guides:
            return []
        return [(row, guide) for row, slot in enumerate(slots.tolist()) if (guide := self._guides.get(slot))]

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-guided")
        return self._thread.submit(work)

    def _advance(
        self,
        guides: Sequence[tuple[int, Guide]],
        read: Callable[[], Sequence[int]],
        complete: Future[list[int]],
    ) -> None:
        """In the thread: take a token per guide, by row, and compute the masks of the next tokens."""
        stamps = [time.perf_counter()]
        try:
            tokens = read()
            stamps.append(time.perf_counter())
            going_on, ended = self._follower.consume(guides, tokens)
        except BaseException as error:
            complete.set_exception(error)
            raise
        complete.set_result(ended)
        stamps.append(time.perf_counter())
        self._follower.fill(going_on)
        stamps.append(time.perf_counter())
        for name, start, end in zip(PHASES, stamps, stamps[1:], strict=False):
            self._times[name].append(end - start)


def _free(guides: Sequence[Guide]) -> None:
    for guide in guides:
        guide.matcher = None
