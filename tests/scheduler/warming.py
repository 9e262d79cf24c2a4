"""The simulation of engines one after the other; each may be killed, and leaves its KV and its journal.

The loop is that of rank 0: the journal is written before a step is launched, and after its result was
applied. What a step has written to the device counts once its result is there. When the engine is killed,
steps in flight may have run, or not, or in part.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, Literal

from segue.kvcache.journal import NAME_BYTES, journal_bytes, name_of, renew_name
from segue.kvcache.prefix_cache import Node
from segue.messages.control import Flushed, SchedulerMessage, SchedulerOutput
from segue.messages.life import ColdReason, HeldKV, RankAnswer
from segue.messages.steps import StepPlan, StepResult
from segue.scheduler.invariants import find_problems
from segue.scheduler.scheduler import Scheduler
from segue.worker.warm_kv import WarmKV
from tests.kvcache.torn_journal import TornJournal
from tests.scheduler.pausing import PausingSimulation
from tests.scheduler.simulation import VOCAB, FakeDevice, prefix_of

FACTS = name_of("facts")
Memory = Literal["kept", "new", "private", "used"]
Entry = tuple[int, int]  # (page, offset)
Value = tuple[int, str]  # (prefix, version), as in `FakeDevice.kv`


class KVMemory(dict[Entry, Value]):
    """KV that outlives its engine. It remembers what each step in flight has overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.overwritten: deque[list[tuple[Entry, Value | None]]] = deque()  # by step in flight

    def __setitem__(self, entry: Entry, value: Value) -> None:
        self.overwritten[-1].append((entry, self.get(entry)))
        super().__setitem__(entry, value)

    def undo(self, num_ran: int, random: Random | None = None) -> None:
        """Undo all but ``num_ran`` steps in flight; with ``random``, the next one may have run in part."""
        is_partial = random is not None and random.random() < 0.5
        while len(self.overwritten) > num_ran:
            is_next = len(self.overwritten) == num_ran + 1
            for entry, old in reversed(self.overwritten.pop()):
                if is_next and is_partial and random is not None and random.random() < 0.5:
                    continue
                if old is None:
                    self.pop(entry, None)
                else:
                    super().__setitem__(entry, old)


class SharedMemory:
    """What outlives an engine: the KV of all ranks, the journal, and the weights of the memory service."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.kv = KVMemory()
        self.journal = bytearray(journal_bytes(num_pages, page_size))
        self.names = [memoryview(bytearray(NAME_BYTES)) for _ in range(2)]  # each rank's journal, or its head
        self.is_fresh = [True, True]
        self.is_private = [False, False]  # whether a rank of the next engine gets memory of its own
        self.epoch = 0  # of the last engine
        self.generation = 0  # that the service has; an engine may serve the one before for a moment


class WarmingSimulation(PausingSimulation):
    """An engine with ``--warm-kv``."""

    def __init__(self, shared: SharedMemory, **limits: Any) -> None:
        super().__init__(warm_kv=True, **limits)
        self.shared = shared
        self.arguments = limits
        self.device = FakeDevice(self.limits, kv=shared.kv)
        self.scheduler.vocab_size = VOCAB
        self.served = shared.generation
        sizes = {"num_pages": self.limits.num_pages, "page_size": self.limits.page_size}
        self.torn = TornJournal(memoryview(shared.journal), **sizes)
        self.is_launching = False  # whether the last writes of the journal belong to a step that runs since
        has_journal = not shared.is_private[0]
        self.warm = WarmKV(
            self.scheduler,
            FACTS,
            lambda: str(self.served),
            lambda: self.torn if has_journal else None,
            num_ranks=2,
        )
        self.wake()

    def wake(self) -> None:
        """Adopt what the engine before has left, and check that it is what it is said to be."""
        shared = self.shared
        shared.epoch += 1
        self.warm.await_ranks(7)
        for rank in range(2):
            held = None
            if not shared.is_private[rank]:
                before, now = renew_name(shared.names[rank])
                held = HeldKV(before.hex(), now.hex(), shared.is_fresh[rank], shared.epoch)
                shared.is_fresh[rank] = False
            self.warm.on_answer(RankAnswer(call=7, rank=rank, kv=held))
        self.adopted = self.shared_pages()
        assert self.scheduler.totals.warm_pages == len(self.adopted)
        for page, tokens in self.adopted.items():
            for offset in range(self.limits.page_size):
                count = len(tokens) - self.limits.page_size + offset + 1
                expected = prefix_of(tokens[:count]), str(self.served)
                found = self.shared.kv.get((page, offset))
                assert found == expected, f"page {page} was adopted, and has other KV"
        assert find_problems(self.scheduler) == []
        if self.refused != "private":
            self.check_journal()

    @property
    def refused(self) -> ColdReason | None:
        """Why nothing was adopted."""
        return self.scheduler.totals.warm_refused

    def shared_pages(self) -> dict[int, list[int]]:
        """Returns the cached pages that a new request could match, each with all tokens up to its end."""
        return pages_of(self.scheduler)

    # --- the loop ---

    def run_on_device(self, plan: StepPlan) -> StepResult:
        self.write()
        self.is_launching = True
        self.shared.kv.overwritten.append([])
        return self.device.launch(plan, str(self.served))

    def apply(self) -> SchedulerOutput:
        output = super().apply()
        self.shared.kv.overwritten.popleft()
        return output

    def settle(self) -> None:
        super().settle()
        self.write()

    def write(self) -> None:
        """Bring the journal up to date."""
        self.is_launching = False
        self.torn.mark()
        self.warm.write()

    def _take(self, message: SchedulerMessage) -> None:
        super()._take(message)
        if isinstance(message, Flushed) and message.success and self.refused != "private":
            self.write()
            assert self.torn.read(self.torn.weights, VOCAB).records == [], "a flush is answered too early"

    def begin_flip(self) -> None:
        """The memory service has other weights, and this engine does not serve them yet."""
        self.shared.generation += 1

    def end_commit(self, version: str) -> None:
        if self.shared.generation == self.served:
            self.begin_flip()
        self.served = self.shared.generation
        super().end_commit(version)

    # --- checks ---

    def check(self) -> None:
        super().check()
        if self.settled and self.refused != "private":
            self.check_journal()

    def check_journal(self) -> None:
        """The journal has what can be matched, as far as it is computed, and nothing else."""
        proved = {record.page for record in self.torn.read(self.torn.weights, VOCAB).records}
        cached = self.shared_pages()
        assert proved <= cached.keys(), f"pages {proved - cached.keys()} are published, and not in the cache"
        if not self.results:
            assert proved == cached.keys(), f"pages {cached.keys() - proved} are cached, and not published"

    # --- the end ---

    def kill(
        self,
        random: Random,
        *,
        torn: float,
        memory: Memory = "kept",
        **changes: Any,
    ) -> WarmingSimulation:
        """Kill the engine; returns its successor.

        Args:
            random: decides what is left of what was under way.
            torn: the share of the last batch of the journal's writes that was not made.
            memory: what the successor gets. "new": other memory, or a rank does; "private": a rank has memory
                of its own; "used": an engine between them had the memory of a rank, and could not wake.
            changes: options of the successor that differ.
        """
        num_bytes = int(torn * self.torn.num_bytes)
        self.torn.tear(num_bytes, random)
        if self.is_launching and num_bytes:  # the last step came after these writes
            self.shared.kv.undo(len(self.results) - 1)
        self.shared.kv.undo(random.randint(0, len(self.shared.kv.overwritten)), random)
        self.shared.kv.overwritten.clear()
        shared, first = self.shared, random.random() < 0.5
        shared.is_private = [memory == "private" and first, memory == "private" and not first]
        if memory == "used":
            renew_name(shared.names[first])
        elif memory == "new":
            for rank in {1, 0 if first else 1}:  # all ranks get other memory, or the second one alone
                shared.is_fresh[rank] = True
                shared.names[rank][:] = bytes(NAME_BYTES)
                if rank == 0:
                    shared.kv.clear()
                    shared.journal[:] = bytes(len(shared.journal))
        return WarmingSimulation(shared, **(self.arguments | changes))


def pages_of(scheduler: Scheduler) -> dict[int, list[int]]:
    """Returns the pages that a request could match now, each with all tokens up to its end."""
    found: dict[int, list[int]] = {}
    stack: list[tuple[Node, list[int]]] = [(scheduler.resources.prefix.root(scheduler.kv_epoch), [])]
    while stack:
        node, tokens = stack.pop()
        for child in node.children.values():
            found[child.page] = [*tokens, *child.key]
            stack.append((child, found[child.page]))
    return found
