"""Warm KV on rank 0: it adopts the pages that a dead engine has left, and keeps a journal of its own.

Nothing is adopted unless everything is proved: the KV memory of every rank is what the engine of the epoch
before wrote to, nobody writes to it any more, and the journal says with which weights, and for which tokens.
Otherwise the prefix cache begins empty, as without warm KV.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from segue.kvcache.journal import ForgottenCache, PageJournal, journal_bytes, name_of
from segue.logs import logger
from segue.messages.life import ColdReason, HeldKV, RankAnswer
from segue.scheduler.scheduler import Scheduler
from segue.version import __version__

if TYPE_CHECKING:  # it needs torch
    from segue.model_runner.runner import ModelRunner


class WarmKV:
    """The journal of one engine, from its wake on."""

    def __init__(
        self,
        scheduler: Scheduler,
        facts: bytes,
        name_weights: Callable[[], str],
        open_journal: Callable[[], PageJournal | None],
        num_ranks: int,
    ) -> None:
        """Begin without a journal: the wake brings one.

        Args:
            scheduler: has the prefix cache.
            facts: the name of what two engines must have in common to use each other's pages.
            name_weights: returns what tells the weights that are served now apart from all others.
            open_journal: returns the journal that came with the KV memory of this rank; None: there is none,
                or not enough memory for one.
            num_ranks: the number of ranks, each of which has KV memory.
        """
        self._scheduler = scheduler
        self._facts = facts
        self._name_weights = name_weights
        self._open_journal = open_journal
        self._num_ranks = num_ranks
        self._call: int | None = None  # of the wake
        self._held: dict[int, HeldKV | None] = {}  # by rank that has woken
        self._journal: PageJournal | None = None

    def await_ranks(self, call: int) -> None:
        """Begin a wake: every rank answers the call."""
        self._call = call

    def on_answer(self, answer: RankAnswer) -> None:
        """Take a rank's answer to any call; with the last one to the wake, adopt what is proved."""
        if answer.call != self._call or answer.error:
            return
        self._held[answer.rank] = answer.kv
        if len(self._held) == self._num_ranks:
            self._call = None
            self.wake(self._open_journal(), [self._held[rank] for rank in range(self._num_ranks)])

    def wake(self, journal: PageJournal | None, held: Sequence[HeldKV | None]) -> None:
        """Adopt what is proved, and go on with the journal, or begin it. No step has run yet.

        Args:
            journal: that came with the KV memory of this rank; None: there is none. If it should be there, it
                would be larger than the service keeps.
            held: the KV memory of each rank; None: it is the rank's own.
        """
        limits, totals = self._scheduler.limits, self._scheduler.totals
        reason: ColdReason | None = "private"
        kv = [each for each in held if each is not None]
        if len(kv) == len(held) and journal is None:
            reason = "size"
        elif len(kv) == len(held) and journal is not None:
            self._journal = journal
            gc.disable()  # it would look through all pages again and again, and take as long as all the rest
            try:
                reason = self._adopt(journal, kv)
            finally:
                gc.enable()
        totals.warm_refused = reason
        totals.warm_pages = self._scheduler.resources.prefix.num_pages
        if reason is None:
            num_tokens = totals.warm_pages * limits.page_size
            logger.info("KV is warm: %d pages of the engine before, %d tokens", totals.warm_pages, num_tokens)
        else:
            logger.info("KV is cold: %s", _WHY[reason])

    def write(self) -> None:
        """Bring the journal up to date; call it before each step is launched, and after each result.

        It must come before the answer to a flush, too: what was flushed comes back on no engine.
        """
        publisher, journal = self._scheduler.resources.publisher, self._journal
        assert publisher is not None
        for change in publisher.take():
            if journal is None:
                continue
            journal.write(change)
            if isinstance(change, ForgottenCache):
                journal.weights = name_of(self._name_weights())

    def _adopt(self, journal: PageJournal, held: Sequence[HeldKV]) -> ColdReason | None:
        """Adopt pages, or begin an empty journal; returns why nothing could be adopted, None: it was."""
        # An engine in between may have had memory of its own: what clients flushed there must not come back.
        epoch = held[0].epoch
        before = name_of(epoch - 1, *(each.before for each in held))
        now = name_of(epoch, *(each.now for each in held))
        journal.weights = name_of(self._name_weights())
        reason: ColdReason | None = "fresh"
        if not any(each.is_fresh for each in held):
            reason = journal.mismatch(self._facts, before)
        if reason is None:
            found = journal.read(journal.weights, self._scheduler.vocab_size)
            if found.records:
                journal.retain({record.page for record in found.records})
                journal.epoch = found.epoch
                journal.go_on(self._facts, now)
                self._scheduler.adopt_pages(found)
                return None
            reason = "empty" if found.next_seq == 1 else "weights"
        journal.begin(self._facts, now)
        return reason


def make_warm_kv(scheduler: Scheduler, runner: ModelRunner) -> WarmKV:
    """Return rank 0's warm KV of an engine whose weights are the memory service's."""
    config, limits, generations = scheduler.config, scheduler.limits, runner.memory.generations
    assert generations is not None
    facts = name_of(
        *(__version__, runner.source.config, runner.device.type, str(runner.dtype), runner.kv.format),
        *(runner.kv_bytes, limits.num_pages, limits.page_size, config.tp, runner.attention_backend),
        config.deterministic,
    )

    def open_journal() -> PageJournal | None:
        memory, sizes = runner.memory.kv_journal, (limits.num_pages, limits.page_size)
        if memory is None or memory.nbytes < journal_bytes(*sizes):
            return None
        return PageJournal(memory, num_pages=limits.num_pages, page_size=limits.page_size)

    return WarmKV(scheduler, facts, lambda: generations.name, open_journal, config.tp)


_WHY: dict[ColdReason, str] = {
    "private": "its memory is this engine's own",
    "size": "its journal would be larger than the memory service keeps; choose a larger --page-size",
    "fresh": "its memory is new, or that of a rank is",
    "journal": "the engine before has left no journal that is whole",
    "facts": "the engine before had other options, or another version",
    "memory": "it is not what the engine of the epoch before wrote to, or that one could not wake",
    "weights": "the engine before has computed it with other weights",
    "empty": "the engine before has left none",
}
