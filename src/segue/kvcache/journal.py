"""A table in shared memory that says which tokens the pages of the prefix cache have: for a successor.

An engine that takes the KV memory of a dead one over also gets this table, and can go on with the pages that
it proves. The table may have been left in the middle of any write, so each slot has a *word*: the checksum of
its contents, or 0. The contents are written before the word, and the word is cleared before the page may be
written to again. Therefore a slot whose word fits its contents describes what the page has.

    name of the KV memory, 16 bytes | header | words from byte 128 on, uint64 [num_pages] | a slot per page

All numbers are little-endian. The kernel keeps every write that a process has made before it was killed, in
their order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from segue.sizes import round_up

FORMAT = b"segueKV1"  # of the table: another layout gets another one
NAME_BYTES = 16  # of the names of weights, memory and facts
ROOT = -1  # the parent page of the first page of a chain

_HEADER = struct.Struct(f"<8sQQ{NAME_BYTES}s{NAME_BYTES}s")  # FORMAT, num_pages, page_size, facts, memory
_HEADER_AT = NAME_BYTES
_CHECKSUM_AT = _HEADER_AT + _HEADER.size
_WORDS_AT = 128
_FIELDS = struct.Struct(f"<QQiI{NAME_BYTES}s")  # seq, the parent's seq, the parent's page, epoch, weights
_WORD = struct.Struct("<Q")
_FIELD_TYPES = np.dtype(
    [("seq", "<u8"), ("parent_seq", "<u8"), ("parent_page", "<i4"), ("epoch", "<u4"), ("weights", "V16")]
)
_MASK = (1 << 64) - 1
_LAST_FACTOR = 0x9E3779B97F4A7C15  # an odd one


class PageRecord(msgspec.Struct, frozen=True, gc=False):
    """One page of the prefix cache: its tokens, and the page that has the tokens before them."""

    page: int
    seq: int  # the number of the record, which grows; a page that is used again has another one
    parent_page: int  # ROOT: none
    parent_seq: int  # of the record of that page; 0 with ROOT
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgottenPages:
    """Pages that may be written to from now on."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgottenCache:
    """No page that was published so far may be used any more."""


JournalChange = PageRecord | ForgottenPages | ForgottenCache


@dataclass(frozen=True, slots=True)
class FoundPages:
    """What a journal proves."""

    records: list[PageRecord]  # whole chains, each page behind its parent
    epoch: int  # of these records; 0: there is none
    next_seq: int  # greater than that of any record


def journal_bytes(num_pages: int, page_size: int) -> int:
    """Return the bytes of a journal for so many pages of ``page_size`` tokens."""
    return _slots_at(num_pages) + num_pages * _slot_bytes(page_size)


def renew_name(memory: memoryview) -> tuple[bytes, bytes]:
    """Name the KV memory of a rank anew, in its journal; returns its name so far, and the new one.

    An engine does this before it writes to the KV memory, with every rank's; the ranks but the first have
    journals for that alone. So a journal names what all ranks had when it was written.
    """
    before, now = bytes(memory[:NAME_BYTES]), os.urandom(NAME_BYTES)
    memory[:NAME_BYTES] = now
    return before, now


def name_of(*facts: object) -> bytes:
    """Return a name of ``NAME_BYTES`` bytes that equal facts, and only these, have in common."""
    return blake2b(repr(facts).encode(), digest_size=NAME_BYTES).digest()


class PageJournal:
    """The journal of one KV memory, as one engine after the other reads it and goes on with it."""

    def __init__(self, memory: memoryview, *, num_pages: int, page_size: int) -> None:
        """Use writable ``memory`` of at least :func:`journal_bytes` bytes, whatever it has."""
        needed = journal_bytes(num_pages, page_size)
        if memory.nbytes < needed:
            raise ValueError(f"a journal of {memory.nbytes} bytes is too small; {needed} are needed")
        self._memory = memory
        self._num_pages = num_pages
        self._page_size = page_size
        self._slots_at = _slots_at(num_pages)
        self._slot_bytes = _slot_bytes(page_size)
        self._tokens = struct.Struct(f"<{page_size}i")
        self._content_bytes = _FIELDS.size + self._tokens.size
        self._factors = _odd_numbers(1 + self._content_bytes // 4)  # of the page, and of each number
        self.epoch = 1  # of the records that are published: grows whenever all of them are forgotten
        self.weights = bytes(NAME_BYTES)  # with which the KV of published pages is computed

    # --- what the memory is for ---

    def begin(self, facts: bytes, memory: bytes) -> None:
        """Begin an empty journal.

        Args:
            facts: the name of all that two engines must have in common to use each other's pages.
            memory: the name of the KV memory of all ranks, and of the engine that has it.
        """
        self._write(_CHECKSUM_AT, bytes(8))
        self._clear()
        self.go_on(facts, memory)

    def go_on(self, facts: bytes, memory: bytes) -> None:
        """Keep the records for memory that has other names now."""
        header = _HEADER.pack(FORMAT, self._num_pages, self._page_size, facts, memory)
        self._write(_CHECKSUM_AT, bytes(8))
        self._write(_HEADER_AT, header)
        self._write(_CHECKSUM_AT, _WORD.pack(_checksum(header)))

    def mismatch(self, facts: bytes, memory: bytes) -> Literal["journal", "facts", "memory"] | None:
        """Return what is not as in :meth:`begin`; "journal": nothing is, None: all is."""
        header = bytes(self._memory[_HEADER_AT:_CHECKSUM_AT])
        (checksum,) = _WORD.unpack_from(self._memory, _CHECKSUM_AT)
        if checksum != _checksum(header):
            return "journal"
        found, num_pages, page_size, its_facts, its_memory = _HEADER.unpack(header)
        if (found, num_pages, page_size) != (FORMAT, self._num_pages, self._page_size):
            return "journal"
        if its_facts != facts:
            return "facts"
        return None if its_memory == memory else "memory"

    # --- reading ---

    def read(self, weights: bytes, vocab_size: int) -> FoundPages:
        """Return the pages whose KV is that of these weights, and of whose chain every page is there.

        What was not written whole, or is of another time, is left out, and so is all that comes behind it.
        """
        # All slots at once, because an engine that wakes is waited for.
        words = np.frombuffer(self._memory, "<u8", self._num_pages, _WORDS_AT)
        pages = np.flatnonzero(words)
        slots = np.frombuffer(self._memory, np.uint8, self._num_pages * self._slot_bytes, self._slots_at)
        contents = slots.reshape(self._num_pages, -1)[pages, : self._content_bytes]
        are_whole = words[pages] == self._words_of(pages, contents.view("<u4"))
        pages, contents = pages[are_whole], contents[are_whole]
        fields = contents[:, : _FIELDS.size].copy().view(_FIELD_TYPES)[:, 0]
        next_seq = int(fields["seq"].max(initial=0)) + 1
        is_found = fields["weights"] == np.void(weights)
        epoch = int(fields["epoch"].max(initial=0, where=is_found))
        tokens = contents[:, _FIELDS.size :].view("<i4")
        is_found &= (fields["epoch"] == epoch) & (tokens.min(1) >= 0) & (tokens.max(1) < vocab_size)
        order = np.flatnonzero(is_found)[np.argsort(fields["seq"][is_found])]
        columns = (pages, *(fields[name] for name in ("seq", "parent_page", "parent_seq")))
        rows = zip(
            *(each[order].tolist() for each in columns), map(tuple, tokens[order].tolist()), strict=True
        )
        return FoundPages(_whole_chains(PageRecord(*row) for row in rows), epoch, next_seq)

    # --- writing ---

    def write(self, change: JournalChange) -> None:
        """Note a change; changes must come in their order."""
        if isinstance(change, PageRecord):
            self._publish(change)
        elif isinstance(change, ForgottenPages):
            for page in change.pages:
                self._write(self._word_at(page), bytes(8))
        else:
            self._clear()
            self.epoch += 1

    def retain(self, pages: Collection[int]) -> None:
        """Forget all pages but these."""
        words = np.frombuffer(self._memory, "<u8", self._num_pages, _WORDS_AT)
        kept = set(pages)
        gone = tuple(page for page in np.flatnonzero(words).tolist() if page not in kept)
        self.write(ForgottenPages(gone))

    def _publish(self, record: PageRecord) -> None:
        """Write a slot: its contents, then its word, which a page that was forgotten does not have."""
        page = record.page
        assert not any(self._memory[self._word_at(page) : self._word_at(page) + 8]), (
            f"page {page} is published, and was not forgotten"
        )
        fields = _FIELDS.pack(record.seq, record.parent_seq, record.parent_page, self.epoch, self.weights)
        content = fields + self._tokens.pack(*record.tokens)
        self._write(self._slots_at + page * self._slot_bytes, content)
        self._write(self._word_at(page), _WORD.pack(self._word_of(page, content)))

    def _clear(self) -> None:
        self._write(_WORDS_AT, bytes(8 * self._num_pages))

    def _write(self, offset: int, data: bytes) -> None:
        """Write bytes; every change of the memory goes through here."""
        self._memory[offset : offset + len(data)] = data

    def _word_at(self, page: int) -> int:
        return _WORDS_AT + 8 * page

    def _word_of(self, page: int, content: bytes) -> int:
        """Return the word of a slot with these contents, never 0; those of another page's slot do not fit."""
        numbers = np.frombuffer(content, "<u4").astype(np.uint64)
        total = (int(numbers @ self._factors[1:]) + (page + 1) * int(self._factors[0])) & _MASK
        return (((total ^ total >> 32) * _LAST_FACTOR) & _MASK) | 1

    def _words_of(self, pages: NDArray[np.int64], contents: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Return the words of slots: the same function, for contents `[slots, numbers]`."""
        totals = contents.astype(np.uint64) @ self._factors[1:]
        totals += (pages.astype(np.uint64) + np.uint64(1)) * self._factors[0]
        return (totals ^ totals >> np.uint64(32)) * np.uint64(_LAST_FACTOR) | np.uint64(1)


def _slots_at(num_pages: int) -> int:
    return round_up(_WORDS_AT + 8 * num_pages, 64)


def _slot_bytes(page_size: int) -> int:
    return round_up(_FIELDS.size + 4 * page_size, 8)


def _checksum(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """Return different factors, each of which changes a checksum with any change of its number."""
    numbers = [int.from_bytes(blake2b(_WORD.pack(n), digest_size=8).digest(), "little") for n in range(count)]
    return np.array(numbers, np.uint64) | np.uint64(1)


def _whole_chains(records: Iterable[PageRecord]) -> list[PageRecord]:
    """Return the records, in the order of ``seq``, whose parents are there too, up to the root.

    A parent was published before its children. Of two pages that stand for the same tokens, the first counts.
    """
    seqs = {ROOT: 0}
    keys: set[tuple[int, tuple[int, ...]]] = set()
    whole: list[PageRecord] = []
    for record in records:
        key = (record.parent_page, record.tokens)
        if seqs.get(record.parent_page) == record.parent_seq and key not in keys:
            seqs[record.page] = record.seq
            keys.add(key)
            whole.append(record)
    return whole
