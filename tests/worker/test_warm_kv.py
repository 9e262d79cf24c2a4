"""Warm KV in rank 0's loop: when the journal is written, and when pages are adopted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from segue.distributed.info import TPInfo
from segue.kvcache.journal import PageJournal, journal_bytes, name_of
from segue.messages.control import Flush, Flushed, SchedulerMessage, SchedulerOutput
from segue.messages.life import HeldKV, RankAnswer, WakeRanks
from segue.messages.requests import AddRequest, Finished, SamplingParams, pack_ids
from segue.messages.steps import NON_FINITE, RankMessage, StepPlan
from segue.scheduler.invariants import find_problems
from segue.worker.warm_kv import WarmKV, make_warm_kv
from tests.scheduler.simulation import VOCAB, Simulation, expected_output
from tests.worker.test_loop import DEADLINE_MS, Client, Done

NUM_PAGES, PAGE_SIZE = 26, 4
WEIGHTS = name_of("w")
PROMPT = list(range(40))
PARAMS = SamplingParams(max_new_tokens=3)


class Kept:
    """What outlives an engine of two ranks."""

    def __init__(self) -> None:
        self.journal = bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE))
        self.kv: dict[Any, Any] = {}
        self.held: list[HeldKV | None] = [HeldKV("", "a1", True, 1), HeldKV("", "b1", True, 1)]

    def published(self) -> set[int]:
        return {record.page for record in self.open().read(WEIGHTS, VOCAB).records}

    def open(self) -> PageJournal:
        return PageJournal(memoryview(self.journal), num_pages=NUM_PAGES, page_size=PAGE_SIZE)


class WarmClient(Client):
    """The frontend of an engine of two ranks, of which the test is the second one."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(overlap=True, ranks=2, num_pages=NUM_PAGES, warm_kv=True)
        self.kept = kept
        self.is_open = True
        self.runner.device.kv = kept.kv
        self.runner.tp = TPInfo(rank=0, size=2)
        self.runner.wake = lambda *_: kept.held[0]
        self.loop.scheduler.vocab_size = VOCAB
        self.loop.warm = WarmKV(self.loop.scheduler, name_of("facts"), lambda: "w", kept.open, num_ranks=2)
        self.writes: list[set[int]] = []  # per step, the pages that it writes to
        self.sent: list[tuple[SchedulerMessage, set[int]]] = []  # and the pages that are published by then
        self.is_finite = True
        forward, send = self.runner.forward_batch, self.loop._send

        def forward_batch(plan: StepPlan) -> Done:
            self.runner.device.unapplied.clear()  # nobody tells this device of results
            done = forward(plan)
            touched = [
                (slot, at)
                for slot, start, count in zip(plan.slots, plan.starts, plan.lens, strict=True)
                for at in range(start, start + count)
            ]
            pages = {self.runner.device.tables[slot][at // PAGE_SIZE] for slot, at in touched}
            assert not pages & kept.published(), "a step writes to pages that are published"
            self.writes.append(pages)
            if self.is_finite:
                return done
            return Done(msgspec.structs.replace(done.value, tokens=[NON_FINITE] * len(done.value.tokens)))

        def note(message: SchedulerMessage) -> None:
            self.sent.append((message, kept.published()))
            send(message)

        self.runner.forward_batch = forward_batch  # type: ignore[method-assign]
        self.loop._send = note  # type: ignore[method-assign]

    def wake(self) -> None:
        self.send(WakeRanks(5, 0.0, 1))
        while not isinstance(msgspec.msgpack.decode(self.plans.recv(), type=RankMessage), WakeRanks):
            pass
        assert self.receive() == RankAnswer(5, 0, "", self.kept.held[0])
        self.send_event(RankAnswer(4, 1))  # of an earlier ping
        assert self.receive() == RankAnswer(4, 1)
        assert (
            self.loop.scheduler.totals.warm_refused is None
            and not self.loop.scheduler.resources.prefix.num_pages
        )
        self.send_event(RankAnswer(5, 1, "", self.kept.held[1]))
        assert self.receive() == RankAnswer(5, 1, "", self.kept.held[1])

    def generate(self, rid: str, prompt: list[int], **options: Any) -> Finished:
        self.send(AddRequest(rid=rid, prompt=pack_ids(prompt), params=PARAMS, **options))
        tokens: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, SchedulerOutput)
            tokens += message.tokens
            if message.finished:
                assert tokens == expected_output(prompt, PARAMS, 100)
                return message.finished[0]

    def end(self) -> None:
        self.is_open = False
        self.close()
        self.close_sockets()
        assert find_problems(self.loop.scheduler) == []
        self.kept.held = [
            each and HeldKV(each.now, f"{each.now}+", False, each.epoch + 1) for each in self.kept.held
        ]


Start = Callable[[], WarmClient]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def start(kept: Kept) -> Iterator[Start]:
    """Returns what starts an engine; each one is ended, whatever comes of the test."""
    clients: list[WarmClient] = []

    def start() -> WarmClient:
        clients.append(WarmClient(kept))
        return clients[-1]

    yield start
    for client in clients:
        if client.is_open:
            client.end()


def test_a_successor_goes_on_with_the_pages_of_the_engine_before(kept: Kept, start: Start) -> None:
    first = start()
    first.wake()
    assert first.generate("a", PROMPT).cached_tokens == 0
    first.end()
    assert len(kept.published()) == 10, "40 tokens in pages of 4"
    second = start()
    second.wake()
    assert second.loop.scheduler.totals.warm_pages == 10
    assert second.generate("a", PROMPT).cached_tokens == 36, "the last token is always computed"
    second.end()


def test_pages_of_an_engine_that_is_not_the_last_one_are_left_alone(kept: Kept, start: Start) -> None:
    """The one in between had memory of its own. If its clients have flushed the cache, nothing comes back."""
    first = start()
    first.wake()
    first.generate("a", PROMPT)
    first.end()
    kept.held = [each and msgspec.structs.replace(each, epoch=each.epoch + 1) for each in kept.held]
    third = start()
    third.wake()
    assert third.loop.scheduler.totals.warm_refused == "memory" and not kept.published()
    assert third.generate("a", PROMPT).cached_tokens == 0
    third.end()
    fourth = start()
    fourth.wake()
    assert fourth.loop.scheduler.totals.warm_pages == 10
    fourth.end()


def test_a_page_is_forgotten_before_a_step_writes_to_it(kept: Kept, start: Start) -> None:
    client = start()
    client.wake()
    for number in range(8):  # each prompt evicts pages of the one before
        client.generate(str(number), [number, *PROMPT])
    client.end()
    assert len(client.writes) > 8 and kept.published()


def test_the_journal_has_the_pages_of_a_step_before_its_output_is_sent(kept: Kept, start: Start) -> None:
    client = start()
    client.wake()
    client.generate("a", PROMPT)
    client.end()
    outputs = [(message, pages) for message, pages in client.sent if isinstance(message, SchedulerOutput)]
    assert [len(pages) for message, pages in outputs if message.tokens] == [10] * 3


def test_pages_that_led_to_logits_that_are_not_finite_are_forgotten_before_the_reply(
    kept: Kept, start: Start
) -> None:
    """If the engine dies behind that reply, no other one goes on with them."""
    client = start()
    client.wake()
    client.generate("a", PROMPT)
    assert len(kept_before := kept.published()) == 10
    client.is_finite = False
    client.send(AddRequest(rid="b", prompt=pack_ids(PROMPT), params=PARAMS))
    while not (isinstance(message := client.receive(), SchedulerOutput) and message.finished):
        pass
    client.end()
    assert message.finished[0].error == "NonFiniteLogitsError"
    assert [pages for sent, pages in client.sent if isinstance(sent, SchedulerOutput) and sent.finished] == [
        kept_before,
        set(),
    ]


def test_what_was_flushed_is_forgotten_before_the_answer(kept: Kept, start: Start) -> None:
    client = start()
    client.wake()
    client.generate("a", PROMPT)
    assert kept.published()
    client.send(Flush(9))
    while not isinstance(answer := client.receive(), Flushed):
        pass
    assert answer.success and not kept.published()
    client.end()


def test_the_test_request_neither_uses_nor_changes_the_cache(kept: Kept, start: Start) -> None:
    client = start()
    client.wake()
    client.generate("a", PROMPT)
    before = kept.published()
    assert client.generate("b", PROMPT, shares_kv=False).cached_tokens == 0
    assert client.generate("c", [9, *PROMPT], shares_kv=False).cached_tokens == 0
    assert kept.published() == before and client.loop.scheduler.resources.prefix.num_pages == len(before)
    client.end()


def test_without_memory_of_the_service_the_cache_begins_empty(
    kept: Kept, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    kept.held = [HeldKV("a1", "a2", False, 2), None]
    client = start()
    with caplog.at_level("INFO"):
        client.wake()
    assert "KV is cold: its memory is this engine's own" in caplog.text
    client.generate("a", PROMPT)
    client.end()
    assert client.loop.scheduler.totals.warm_refused == "private" and not any(kept.journal)


def test_without_room_for_a_journal_the_cache_begins_empty() -> None:
    scheduler = Simulation(num_pages=NUM_PAGES, warm_kv=True).scheduler
    name = memoryview(bytearray(16))  # which every rank's memory has
    runner: Any = SimpleNamespace(
        memory=SimpleNamespace(generations=SimpleNamespace(name="w"), kv_journal=name),
        source=SimpleNamespace(config="c"),
        device=SimpleNamespace(type="cpu"),
        kv=SimpleNamespace(format="float32"),
        **{"dtype": "float32", "kv_bytes": 1, "attention_backend": "b"},
    )
    warm = make_warm_kv(scheduler, runner)
    runner.kv.format = "fp8"
    assert make_warm_kv(scheduler, runner)._facts != warm._facts
    warm.await_ranks(1)
    warm.on_answer(RankAnswer(1, 0, "", HeldKV("a", "b", False, 2)))
    assert scheduler.totals.warm_refused == "size"
    publisher = scheduler.resources.publisher
    assert publisher is not None
    publisher.forget_all()
    warm.write()
    assert not publisher.take(), "nothing is kept for a journal that never comes"


def test_a_rank_that_cannot_wake_leaves_everything_as_it_is(kept: Kept, start: Start) -> None:
    client = start()
    client.send(WakeRanks(5, 0.0, 1))
    assert client.receive() == RankAnswer(5, 0, "", kept.held[0])
    client.send_event(RankAnswer(5, 1, "no memory"))
    assert client.receive() == RankAnswer(5, 1, "no memory")
    assert client.plans.poll(DEADLINE_MS)
    client.end()
    assert not any(kept.journal)
