"""Stateful property test: whenever an engine is killed, its successor adopts exactly what is there.

:class:`tests.scheduler.warming.WarmingSimulation` compares each adopted page with what the device wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec import structs

from segue.kvcache.journal import PageJournal, renew_name
from segue.kvcache.prefix_cache import Node, PrefixCache
from segue.messages.steps import NON_FINITE
from segue.scheduler.publisher import PagePublisher
from segue.scheduler.resources import Resources
from segue.worker.warm_kv import WarmKV
from tests.scheduler import warming
from tests.scheduler.test_pause_properties import MAX_SEQ_LEN, PauseMachine, find_bug, prove, requests
from tests.scheduler.warming import SharedMemory, WarmingSimulation


class WarmMachine(PauseMachine):
    """Every event of the scheduler in any order, in engines that are killed one after the other."""

    sim: WarmingSimulation
    lives: ClassVar[Counter[str]] = Counter()  # successors by why they adopted nothing, and adopted pages

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spare=st.integers(0, 24),
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 5, 16, 64]),
        initial=st.lists(requests, max_size=4),
    )
    def start(
        self, page_size: int, spare: int, slots: int, chunk: int, initial: list[dict[str, Any]]
    ) -> None:
        num_pages = -(-MAX_SEQ_LEN // page_size) + spare
        self.sim = WarmingSimulation(
            SharedMemory(num_pages, page_size),
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=MAX_SEQ_LEN,
            max_running_requests=slots,
            max_queued_requests=1000,
            chunked_prefill_size=chunk,
        )
        self.version = 0
        self.add(initial)

    @precondition(lambda self: self.sim.committing and not self.sim.results)
    @rule()
    def begin_flip(self) -> None:
        if self.sim.shared.generation == self.sim.served:
            self.sim.begin_flip()

    @precondition(lambda self: any(result.tokens for result in self.sim.results))
    @rule(data=st.data())
    def make_non_finite(self, data: st.DataObject) -> None:
        """Make the logits of one sequence in flight non-finite."""
        results = self.sim.results
        at = data.draw(st.sampled_from([i for i, result in enumerate(results) if result.tokens]))
        tokens = list(results[at].tokens)
        tokens[data.draw(st.integers(0, len(tokens) - 1))] = NON_FINITE
        results[at] = structs.replace(results[at], tokens=tokens)

    @rule(
        seed=st.integers(0, 1 << 30),
        torn=st.sampled_from([0, 0, 0.1, 0.5, 0.9, 1]),
        memory=st.sampled_from(["kept"] * 6 + ["new", "private", "used"]),
        added=st.lists(requests, max_size=4),
    )
    def kill(self, seed: int, torn: float, memory: Any, added: list[dict[str, Any]]) -> None:
        self.end_life(seed, torn, memory)
        self.add(added)

    @rule(
        added=st.lists(requests, min_size=1, max_size=4),
        turns=st.integers(1, 12),
        overlap=st.booleans(),
        launches=st.booleans(),
        seed=st.integers(0, 1 << 30),
        torn=st.sampled_from([0, 0, 0.1, 0.5, 0.9, 1]),
    )
    def kill_in_the_middle(
        self,
        added: list[dict[str, Any]],
        turns: int,
        overlap: bool,
        launches: bool,
        seed: int,
        torn: float,
    ) -> None:
        self.add(added)
        self.run_some(turns, overlap)
        if launches and len(self.sim.results) <= 1:
            self.sim.launch()
        self.end_life(seed, torn, "kept")

    @rule(added=st.lists(requests, min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
    def kill_in_a_commit(self, added: list[dict[str, Any]], seed: int) -> None:
        """The service has new weights already, and the engine has not heard of it."""
        self.add(added)
        self.run_some(6, overlap=False)
        if not self.sim.committing:
            self.sim.begin_commit()
        self.begin_flip()
        self.end_life(seed, 0, "kept")
        assert not self.sim.adopted

    @rule(
        added=st.lists(requests, min_size=1, max_size=4), seed=st.integers(0, 1 << 30), torn=st.floats(0, 1)
    )
    def kill_in_the_wake(self, added: list[dict[str, Any]], seed: int, torn: float) -> None:
        self.add(added)
        self.run_some(3, overlap=False)
        self.end_life(seed, 0, "kept", wakes=False)
        self.end_life(seed, torn, "kept")

    def end_life(self, seed: int, torn: float, memory: Any, *, wakes: bool = True) -> None:
        """Kill the engine, and let its successor wake; what that one writes then is whole if it ``wakes``."""
        before = self.sim
        self.sim = after = before.kill(Random(seed), torn=torn, memory=memory)
        if memory == "used":
            assert after.refused in ("memory", "journal")  # a kill may have left no journal
        elif memory != "kept":
            assert after.refused == {"new": "fresh"}.get(memory, memory)
        elif before.refused == "private":
            assert after.refused in ("memory", "fresh", "journal")
        elif not before.results and not torn and after.served == before.served:
            assert after.adopted == before.shared_pages(), "pages are lost"
        assert after.refused is None or not after.adopted
        if wakes:
            after.torn.mark()
        self.lives[after.refused or "adopted"] += 1
        self.lives["pages"] += len(after.adopted)
        self.version = 0


def test_whatever_a_successor_adopts_is_what_the_device_wrote() -> None:
    WarmMachine.lives.clear()
    count = prove(WarmMachine, examples=45)
    print(f"{count} events, {dict(WarmMachine.lives)}")
    assert WarmMachine.lives["adopted"] > 10 and WarmMachine.lives["pages"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_a_successor_adopts_is_what_the_device_wrote_for_long() -> None:
    count = prove(WarmMachine, examples=2000)
    print(f"{count} events, {dict(WarmMachine.lives)}")
    assert count >= 50_000


# Bugs that the machine must catch: each test puts one of them into the code.


def publishes_at_the_launch(self: PagePublisher, node: Node, step: int) -> None:
    _inserted(self, node, step)
    self.applied(step)


def forgets_when_the_page_is_used_again(self: WarmKV) -> None:
    """One write late: what a launch must write comes after it."""
    publisher = self._scheduler.resources.publisher
    assert publisher is not None
    late = self.__dict__.setdefault("late", [])
    changes = publisher.take()
    publisher._changes = late
    _write(self)
    self.__dict__["late"] = changes


def does_not_look_at_the_weights(self: PageJournal, weights: bytes, vocab_size: int) -> Any:
    found = [_read(self, each, vocab_size) for each in {weights, *_names_of_weights(self)}]
    return max(found, key=lambda each: len(each.records))


def _names_of_weights(journal: PageJournal) -> list[bytes]:
    starts = [journal._slots_at + page * journal._slot_bytes for page in range(journal._num_pages)]
    return [bytes(journal._memory[start + 24 : start + 40]) for start in starts]


def keeps_hidden_pages(self: PrefixCache, node: Node) -> list[int]:
    _hide(self, node)
    return []


def keeps_what_a_commit_forgets(self: PagePublisher) -> None:
    pass


def does_not_compare_the_memory(self: PageJournal, facts: bytes, memory: bytes) -> Any:
    return _mismatch(self, facts, bytes(self._memory[48:64]))


def does_not_rename_the_memory(memory: memoryview) -> tuple[bytes, bytes]:
    before, now = _renew(memory)
    if any(before):
        memory[:] = before
    return (before, before) if any(before) else (before, now)


def leaves_adopted_pages_free(self: Resources, found: Any, epoch: int) -> None:
    free = list(self.free_pages)
    _adopt(self, found, epoch)
    self.free_pages = free
    self._is_free[:] = b"\x01" * len(free)


_inserted, _write, _read = PagePublisher.inserted, WarmKV.write, PageJournal.read
_hide, _adopt, _mismatch, _renew = PrefixCache.hide, Resources.adopt, PageJournal.mismatch, renew_name

SEEDED: list[tuple[Any, str, Callable[..., Any]]] = [
    (PagePublisher, "inserted", publishes_at_the_launch),
    (WarmKV, "write", forgets_when_the_page_is_used_again),
    (PageJournal, "read", does_not_look_at_the_weights),
    (PrefixCache, "hide", keeps_hidden_pages),
    (PagePublisher, "forget_all", keeps_what_a_commit_forgets),
    (PageJournal, "mismatch", does_not_compare_the_memory),
    (warming, "renew_name", does_not_rename_the_memory),
    (Resources, "adopt", leaves_adopted_pages_free),
]


TAKE_LONG = (
    publishes_at_the_launch,
    keeps_hidden_pages,
    keeps_what_a_commit_forgets,
    does_not_rename_the_memory,
)


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
    cls: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, bug)
    with pytest.raises(AssertionError):
        find_bug(WarmMachine, examples=2000)
