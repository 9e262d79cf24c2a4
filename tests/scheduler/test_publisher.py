"""Which pages are published and forgotten, and when."""

from __future__ import annotations

from segue.kvcache.journal import ROOT, ForgottenCache, ForgottenPages, FoundPages, JournalChange, PageRecord
from segue.messages.steps import NON_FINITE, StepResult
from segue.scheduler.invariants import find_problems
from segue.scheduler.publisher import PagePublisher
from tests.scheduler.simulation import Simulation, prefix_of


class Publishing(Simulation):
    """A scheduler that publishes its pages; each page has 4 tokens."""

    def __init__(self, **options: int) -> None:
        super().__init__(warm_kv=True, **options)
        publisher = self.scheduler.resources.publisher
        assert publisher is not None
        self.publisher: PagePublisher = publisher

    def changes(self) -> list[JournalChange]:
        return self.publisher.take()


def records(*first: tuple[int, ...], start: int = 1) -> list[JournalChange]:
    """The records of one chain in pages 0, 1, …, as the first request of an engine gets them."""
    return [
        PageRecord(page, start + page, page - 1, start + page - 1 if page else 0, tokens)
        for page, tokens in enumerate(first)
    ]


def test_pages_are_published_with_the_result_of_their_step_and_not_before() -> None:
    sim = Publishing(chunked_prefill_size=8)
    sim.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=3)
    sim.launch()
    assert sim.scheduler.resources.prefix.num_pages == 2 and sim.changes() == []
    sim.apply()
    assert sim.changes() == records((1, 2, 3, 4), (5, 6, 7, 8))
    sim.run()
    assert sim.changes() == [], "the last page is not full"


def test_with_two_steps_in_flight_each_result_publishes_what_is_certain() -> None:
    sim = Publishing(chunked_prefill_size=4)
    sim.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=1)
    sim.launch()
    sim.launch()
    sim.apply()
    assert sim.changes() == records((1, 2, 3, 4))
    sim.apply()
    assert sim.changes() == records((1, 2, 3, 4), (5, 6, 7, 8))[1:]


def test_pages_of_generated_tokens_are_published_too() -> None:
    sim = Publishing()
    sim.add("a", [1, 2, 3], max_new_tokens=8)
    sim.run()
    tokens = [1, 2, 3, *sim.outputs["a"]]
    assert sim.changes() == records(tuple(tokens[:4]), tuple(tokens[4:8]))


def test_pages_that_become_free_are_forgotten_before_they_are_used_again() -> None:
    sim = Publishing(num_pages=25, max_running_requests=1)
    sim.add("a", list(range(40)), max_new_tokens=1)
    sim.run()
    published = {change.page for change in sim.changes() if isinstance(change, PageRecord)}
    assert len(published) == 10
    sim.add("b", [9] * 90, max_new_tokens=1)
    plan = sim.scheduler.plan(0.0)
    assert plan is not None
    (forgotten,) = sim.changes()
    assert isinstance(forgotten, ForgottenPages)
    used = {page for _, _, pages in plan.pages for page in pages}
    assert set(forgotten.pages) == published & used and forgotten.pages


def test_what_requests_cannot_match_any_more_is_forgotten() -> None:
    sim = Publishing(chunked_prefill_size=8)
    sim.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], max_new_tokens=3)
    sim.step()
    assert len(sim.changes()) == 2
    sim.launch()
    sim.results[-1] = StepResult(sim.results[-1].step, [NON_FINITE], 0.1)
    sim.apply()
    (forgotten,) = sim.changes()
    assert isinstance(forgotten, ForgottenPages) and sorted(forgotten.pages) == [0, 1]
    sim.add("b", [5, 6, 7, 8, 9], max_new_tokens=1)
    sim.run()
    assert [type(change) for change in sim.changes()] == [PageRecord], "the third page was never published"


def test_pages_of_a_salt_are_not_published() -> None:
    sim = Publishing()
    sim.add("a", [1, 2, 3, 4, 5], max_new_tokens=1, salt="one")
    sim.run()
    assert sim.changes() == []


def test_new_weights_and_a_flush_end_everything() -> None:
    sim = Publishing()
    sim.add("a", [1, 2, 3, 4, 5], max_new_tokens=1)
    sim.run()
    sim.changes()
    sim.scheduler.weights.commit("1", flush_cache=False)
    assert sim.changes() == [ForgottenCache()]
    sim.scheduler.forget_cache()
    assert sim.changes() == [ForgottenCache()]
    sim.add("b", [1, 2, 3, 4, 5], max_new_tokens=1)
    sim.run()
    (again,) = sim.changes()
    assert isinstance(again, PageRecord) and (again.seq, again.parent_page) == (2, ROOT)


def test_an_engine_goes_on_with_the_numbers_of_the_one_before() -> None:
    sim = Publishing()
    found = [PageRecord(7, 41, ROOT, 0, (1, 2, 3, 4)), PageRecord(2, 43, 7, 41, (5, 6, 7, 8))]
    sim.scheduler.adopt_pages(FoundPages(found, epoch=3, next_seq=50))
    assert find_problems(sim.scheduler) == [] and len(sim.scheduler.resources.free_pages) == 62
    assert sim.changes() == [], "they are in the journal"
    prompt = [1, 2, 3, 4, 9, 9, 9, 9, 5]
    for offset in range(4):
        sim.device.kv[7, offset] = (prefix_of(prompt[: offset + 1]), "0")
    sim.add("a", prompt, max_new_tokens=1)
    sim.run()
    assert sim.finished["a"].cached_tokens == 4
    (record,) = sim.changes()
    assert record == PageRecord(record.page, 50, 7, 41, (9, 9, 9, 9))


def test_without_warm_kv_nothing_is_noted() -> None:
    assert Simulation().scheduler.resources.publisher is None
