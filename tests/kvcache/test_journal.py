"""The journal of the KV pages: what it proves, and what is left of it wherever its engine is killed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from segue.kvcache import journal as module
from segue.kvcache.journal import (
    NAME_BYTES,
    ROOT,
    ForgottenCache,
    ForgottenPages,
    PageJournal,
    PageRecord,
    journal_bytes,
    name_of,
    renew_name,
)
from tests.kvcache.torn_journal import TornJournal, write_all

NUM_PAGES, PAGE_SIZE, VOCAB = 6, 2, 50
FACTS, MEMORY, WEIGHTS = name_of("facts"), name_of("memory"), name_of("weights")


def make(cls: type[PageJournal] = PageJournal, memory: bytearray | None = None) -> PageJournal:
    memory = bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE)) if memory is None else memory
    journal = cls(memoryview(memory), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    journal.weights = WEIGHTS
    return journal


def begun() -> PageJournal:
    journal = make()
    journal.begin(FACTS, MEMORY)
    return journal


FIRST = PageRecord(3, 1, ROOT, 0, (1, 2))
SECOND = PageRecord(0, 2, 3, 1, (3, 4))
THIRD = PageRecord(5, 3, 0, 2, (5, 6))
OTHER = PageRecord(4, 4, 3, 1, (9, 9))


def test_it_proves_what_was_published_and_not_forgotten() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND, THIRD, OTHER, ForgottenPages((5,)))
    found = journal.read(WEIGHTS, VOCAB)
    assert found.records == [FIRST, SECOND, OTHER]
    assert (found.epoch, found.next_seq) == (1, 5)
    assert begun().read(WEIGHTS, VOCAB).records == []


def test_a_page_behind_one_that_is_missing_is_left_out() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND, THIRD, OTHER, ForgottenPages((0,)))
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST, OTHER]


def test_a_page_that_is_used_again_is_not_the_parent_of_what_was_behind_it() -> None:
    journal = begun()
    again = PageRecord(3, 4, ROOT, 0, (7, 7))
    write_all(journal, FIRST, SECOND, THIRD, ForgottenPages((3,)), again)
    assert journal.read(WEIGHTS, VOCAB).records == [again]


def test_kv_of_other_weights_is_left_out() -> None:
    journal = begun()
    write_all(journal, FIRST)
    journal.weights = name_of("others")
    write_all(journal, SECOND)
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST]
    assert journal.read(name_of("others"), VOCAB).records == [], "its parent is of other weights"


def test_nothing_that_was_there_when_all_was_forgotten_comes_back() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND, ForgottenCache())
    assert journal.read(WEIGHTS, VOCAB).records == []
    again = PageRecord(1, 3, ROOT, 0, (7, 7))
    write_all(journal, again)
    found = journal.read(WEIGHTS, VOCAB)
    assert (found.records, found.epoch) == ([again], 2)


def test_only_the_latest_epoch_counts() -> None:
    journal = begun()
    write_all(journal, FIRST)
    journal.epoch += 1
    write_all(journal, other := PageRecord(1, 2, ROOT, 0, (7, 7)))
    assert journal.read(WEIGHTS, VOCAB).records == [other]


def test_a_token_that_the_model_does_not_have_ends_the_chain() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND, THIRD)
    assert journal.read(WEIGHTS, 6).records == [FIRST, SECOND]


def test_of_two_pages_for_the_same_tokens_the_first_counts() -> None:
    journal = begun()
    write_all(journal, FIRST, PageRecord(1, 2, ROOT, 0, FIRST.tokens), PageRecord(2, 3, 1, 2, (8, 8)))
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST]


def test_a_slot_is_of_no_use_to_another_page() -> None:
    journal = begun()
    write_all(journal, FIRST)
    memory = journal._memory
    memory[journal._word_at(2) : journal._word_at(2) + 8] = memory[
        journal._word_at(3) : journal._word_at(3) + 8
    ]
    size, start = journal._slot_bytes, journal._slots_at
    memory[start + 2 * size : start + 3 * size] = memory[start + 3 * size : start + 4 * size]
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST]


@pytest.mark.parametrize("bit", range(0, 8 * 48, 5))
def test_a_changed_bit_of_a_record_is_noticed(bit: int) -> None:
    journal = begun()
    write_all(journal, FIRST)
    journal._memory[journal._slots_at + 3 * journal._slot_bytes + bit // 8] ^= 1 << bit % 8
    assert journal.read(WEIGHTS, VOCAB).records == []


def test_retaining_some_pages_forgets_all_others() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND, THIRD, OTHER)
    journal.retain({3, 4})
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST, OTHER]
    write_all(journal, PageRecord(0, 5, 3, 1, (3, 4)))  # the slot is free


def test_publishing_a_page_that_was_not_forgotten_is_a_bug() -> None:
    journal = begun()
    write_all(journal, FIRST)
    with pytest.raises(AssertionError, match="page 3 is published, and was not forgotten"):
        write_all(journal, PageRecord(3, 2, ROOT, 0, (7, 7)))


def test_a_journal_says_what_it_is_for() -> None:
    memory = bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE))
    assert make(memory=memory).mismatch(FACTS, MEMORY) == "journal", "nobody has begun it"
    make(memory=memory).begin(FACTS, MEMORY)
    assert make(memory=memory).mismatch(FACTS, MEMORY) is None
    assert make(memory=memory).mismatch(name_of("x"), MEMORY) == "facts"
    assert make(memory=memory).mismatch(FACTS, name_of("x")) == "memory"
    larger = PageJournal(memoryview(memory), num_pages=NUM_PAGES - 1, page_size=PAGE_SIZE)
    assert larger.mismatch(FACTS, MEMORY) == "journal"
    memory[40] ^= 1
    assert make(memory=memory).mismatch(FACTS, MEMORY) == "journal"


def test_memory_has_another_name_under_each_engine() -> None:
    memory = memoryview(bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE)))
    before, now = renew_name(memory)
    assert (before, len(now)) == (bytes(NAME_BYTES), NAME_BYTES)
    PageJournal(memory, num_pages=NUM_PAGES, page_size=PAGE_SIZE).begin(FACTS, MEMORY)
    again, other = renew_name(memory)
    assert again == now and other != now


def test_a_journal_goes_on_with_its_records_for_memory_of_another_name() -> None:
    journal = begun()
    write_all(journal, FIRST, SECOND)
    journal.go_on(FACTS, name_of("x"))
    assert journal.mismatch(FACTS, MEMORY) == "memory" and journal.mismatch(FACTS, name_of("x")) is None
    assert journal.read(WEIGHTS, VOCAB).records == [FIRST, SECOND]


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a journal of \d+ bytes is too small"):
        make(memory=bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE) - 1))


def test_an_engine_that_is_killed_while_it_begins_a_journal_leaves_none_or_an_empty_one() -> None:
    random = Random(0)
    for cut in range(200):
        journal = make(TornJournal)
        assert isinstance(journal, TornJournal)
        journal.begin(FACTS, MEMORY)
        write_all(journal, FIRST, SECOND)
        journal.mark()
        journal.begin(name_of("other facts"), name_of("other memory"))
        journal.tear(min(cut, journal.num_bytes), random)
        if journal.mismatch(FACTS, MEMORY) is None:
            assert cut >= journal.num_bytes - 8, "only the checksum was touched"
        elif journal.mismatch(name_of("other facts"), name_of("other memory")) is None:
            assert journal.read(WEIGHTS, VOCAB).records == []


# --- killed anywhere ---


class Ledger:
    """What a journal may prove: the pages that are published, by the account of who writes it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.memory = bytearray(journal_bytes(NUM_PAGES, PAGE_SIZE))
        self.records: dict[int, PageRecord] = {}  # by page
        self.changing: dict[int, PageRecord | None] = {}  # what the last change touched: from the one before
        self.weights, self.seq = 0, 0
        self.journal = self.open()
        self.journal.begin(FACTS, MEMORY)

    def open(self) -> TornJournal:
        journal = TornJournal(memoryview(self.memory), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        journal.weights = name_of(self.weights)
        return journal

    def act(self) -> None:
        """Make any change: pages are forgotten in any order, not only leaves first."""
        self.journal.mark()
        before, random = dict(self.records), self.random
        action = random.random()
        if action < 0.03:
            self.records.clear()
            self.journal.write(ForgottenCache())
            self.weights += random.random() < 0.7
            self.journal.weights = name_of(self.weights)
        elif action < 0.4 and self.records:
            pages = tuple(random.sample(sorted(self.records), random.randint(1, len(self.records))))
            for page in pages:
                del self.records[page]
            self.journal.write(ForgottenPages(pages))
        else:
            free = [page for page in range(NUM_PAGES) if page not in self.records]
            if free:
                self.publish(random.choice(free))
        pages = before.keys() | self.records.keys()
        self.changing = {
            page: before.get(page) for page in pages if before.get(page) != self.records.get(page)
        }

    def publish(self, page: int) -> None:
        parent = self.random.choice([None, *self.records.values()])
        self.seq += 1
        where = (ROOT, 0) if parent is None else (parent.page, parent.seq)
        tokens = (self.seq % VOCAB, self.seq // VOCAB % VOCAB)  # no two pages have the same
        self.records[page] = record = PageRecord(page, self.seq, *where, tokens)
        self.journal.write(record)

    def chain(self, record: PageRecord) -> bool:
        """Whether a record is published, with all that is before it."""
        while record.parent_page != ROOT:
            parent = self.records.get(record.parent_page)
            if parent is None or parent.seq != record.parent_seq:
                return False
            record = parent
        return True

    def kill(self) -> None:
        """Kill the engine in the middle of its last change, and let another one go on."""
        num_bytes = self.journal.num_bytes
        cut = self.random.choice([0, self.random.randint(0, num_bytes), self.random.randint(0, num_bytes)])
        self.journal.tear(cut, self.random)
        proved = self.open().read(name_of(self.weights), VOCAB)
        for record in proved.records:
            page = record.page
            is_one = record in (self.records.get(page), self.changing.get(page) if cut else None)
            assert is_one, f"page {page} does not have {record}"
        by_page = {record.page: record for record in proved.records}
        for record in proved.records:
            if record.parent_page != ROOT:
                assert by_page[record.parent_page].seq == record.parent_seq, "a chain is not whole"
        if not cut:
            expected = {page for page, record in self.records.items() if self.chain(record)}
            assert by_page.keys() == expected, "a page is lost"
        self.records = by_page
        self.journal = self.open()
        self.journal.retain(by_page)
        self.journal.epoch, self.seq = max(1, proved.epoch), proved.next_seq - 1
        self.changing = {}


def play(num_lives: int) -> None:
    random = Random(7)
    for _ in range(num_lives // 8):
        ledger = Ledger(random)
        for _ in range(8):
            for _ in range(random.randint(1, 12)):
                ledger.act()
            ledger.kill()


def test_wherever_an_engine_is_killed_the_journal_proves_no_page_that_is_not_so() -> None:
    play(8000)


_publish, _whole = PageJournal._publish, module._whole_chains


def writes_the_word_first(self: PageJournal, record: PageRecord) -> None:
    real, writes = self._write, list[tuple[int, bytes]]()
    self._write = lambda offset, data: writes.append((offset, data))  # type: ignore[method-assign]
    _publish(self, record)
    self._write = real  # type: ignore[method-assign]
    for offset, data in reversed(writes):
        self._write(offset, data)


def no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageJournal, "_word_of", lambda self, page, content: 1)
    monkeypatch.setattr(PageJournal, "_words_of", lambda self, pages, contents: pages * 0 + 1)


def ignores_the_parents_seq(records: Any) -> list[PageRecord]:
    missing, whole = list(records), list[PageRecord]()
    while found := [r for r in missing if r.parent_page in {ROOT, *(each.page for each in whole)}]:
        whole += found
        missing = [record for record in missing if record not in found]
    return whole


def ignores_the_weights(self: PageJournal, weights: bytes, vocab_size: int) -> Any:
    starts = [self._slots_at + page * self._slot_bytes for page in range(self._num_pages)]
    newest = max(module._FIELDS.unpack_from(self._memory, start) for start in starts)
    return _read(self, newest[-1], vocab_size)


def forgets_only_the_first_page(self: PageJournal, change: Any) -> None:
    _write(self, ForgottenPages(change.pages[:1]) if isinstance(change, ForgottenPages) else change)


_read, _write = PageJournal.read, PageJournal.write


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (PageJournal, "_publish", writes_the_word_first),
        (module, "_whole_chains", ignores_the_parents_seq),
        (PageJournal, "read", ignores_the_weights),
        (PageJournal, "write", forgets_only_the_first_page),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_seeded_bug_is_caught(
    where: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    if bug is writes_the_word_first:  # each of the two guards, the order and the checksum, holds alone
        play(500)
        no_checksum(monkeypatch)
    with pytest.raises(AssertionError):
        play(5000)


def test_the_order_of_the_writes_is_enough_without_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    no_checksum(monkeypatch)
    play(500)
