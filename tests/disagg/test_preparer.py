"""Pages that were pushed are put in order, and compared with the checksums of what was sent."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from segue.disagg.checksums import checksums_of
from segue.disagg.preparer import PagePreparer
from segue.disagg.transports.pieces import head_mover
from segue.kvcache.pool import KVPool
from segue.messages.kv import HeadPiece, HeadSums, KVEvent, PagesPrepared, PreparePages, PushEnded
from tests.conftest import WaitUntil
from tests.disagg.test_mover import DecodeRank, PrefillRank
from tests.disagg.transports.ranks import shape_of_pool


@dataclass
class Ranks:
    """Prefill ranks that take checksums, and decode ranks, with the four KV heads of a model."""

    prefills: list[PrefillRank]
    decodes: list[DecodeRank]
    wait_until: WaitUntil

    def push(self, sources: list[int], targets: list[int]) -> list[HeadSums]:
        """Push pages from all ranks to all ranks; returns the checksums that they report."""
        sums: list[HeadSums] = []
        for prefill in self.prefills:
            prefill.connect(*self.decodes, kv_heads=2)
            prefill.push(sources, targets)
        for prefill in self.prefills:
            self.wait_until(lambda prefill=prefill: prefill.events, what="the end of a push")
            (event,) = prefill.events
            assert isinstance(event, PushEnded) and event.error == ""
            sums += event.sums
        return sums

    def prepare(self, pages: list[int], sums: list[HeadSums]) -> list[str]:
        """Returns what each decode rank says of its pages."""
        for decode in self.decodes:
            decode.mover.handle(PreparePages(ticket=7, pages=pages, pieces=[], sums=sums))
        for decode in self.decodes:
            self.wait_until(lambda decode=decode: decode.events, what="the answer")
        events = [event for decode in self.decodes for event in decode.events]
        assert all(isinstance(event, PagesPrepared) and event.ticket == 7 for event in events)
        return [event.error for event in events if isinstance(event, PagesPrepared)]


Make = Callable[..., Ranks]


@pytest.fixture
def make(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Make]:
    with ExitStack() as stack:

        def ranks(p_tp: int, d_tp: int, *, has_checksums: bool = True) -> Ranks:
            shape = shape_of_pool(num_kv_heads=2 // d_tp)
            decodes = [DecodeRank(tmp_path / f"kv{rank}", shape, rank) for rank in range(d_tp)]
            source = shape_of_pool(num_kv_heads=2 // p_tp)
            prefills = [
                PrefillRank(rank=rank, tp=p_tp, has_checksums=has_checksums, shape=source)
                for rank in range(p_tp)
            ]
            for each in (*prefills, *decodes):
                stack.callback(each.close)
            return Ranks(prefills, decodes, wait_until)

        yield ranks


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_pages_that_landed_have_their_checksums(make: Make, p_tp: int, d_tp: int) -> None:
    ranks = make(p_tp, d_tp)
    sums = ranks.push([0, 5], [4, 1])
    assert len(sums) == max(p_tp, d_tp) and all(len(each.crcs) == 8 for each in sums)
    assert ranks.prepare([4, 1], sums) == [""] * d_tp


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1)])
def test_a_flipped_bit_is_found_with_its_page_and_both_values(
    make: Make, p_tp: int, d_tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make(p_tp, d_tp)
    sums = ranks.push([0, 5], [4, 1])
    *others, last = ranks.decodes
    last.pool.data[1, -1, -1, -1, -1, -1] ^= 1  # the last byte of the second page
    *errors, error = ranks.prepare([4, 1], sums)
    assert errors == [""] * len(others)
    sent = int.from_bytes(sums[-1].crcs[4:], "little")
    assert f"page 1 of rank {d_tp - 1}" in error and f"had {sent:08x} at the prefill engine" in error
    assert error in caplog.text


def test_pages_in_the_wrong_order_are_found(make: Make) -> None:
    ranks = make(1, 1)
    sums = ranks.push([0, 5], [4, 1])
    (error,) = ranks.prepare([1, 4], sums)
    assert "page 1 of rank 0" in error


@pytest.mark.parametrize("crcs", [b"abc", b"", bytes(8)])
def test_checksums_that_do_not_fit_the_pages_are_an_error(make: Make, crcs: bytes) -> None:
    ranks = make(1, 1)
    (sums,) = ranks.push([0], [4])
    (error,) = ranks.prepare([4], [structs.replace(sums, crcs=crcs)])
    assert "checksums cannot be compared" in error


def test_without_the_option_nothing_is_computed(make: Make) -> None:
    ranks = make(1, 1, has_checksums=False)
    assert ranks.push([0], [4]) == []


# --- pieces ---


class PieceRank:
    """The second decode rank of two; its pages of three heads come from two prefill ranks."""

    PIECES = (
        HeadPiece(target_rank=0, head=0, num_heads=3),
        HeadPiece(target_rank=1, head=0, num_heads=1),
        HeadPiece(target_rank=1, head=1, num_heads=2),
    )

    def __init__(self) -> None:
        shape = shape_of_pool(num_kv_heads=3)
        self.pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))
        self.page = torch.randint(0, 256, self.pool.data.shape[1:], dtype=torch.uint8)
        pieces = self.page[..., :1, :].flatten(), self.page[..., 1:, :].flatten()
        self.pool.data[2].view(-1).copy_(torch.cat(pieces))
        self.events: list[KVEvent] = []
        self.checksums = checksums_of(self.pool)
        self.preparer = PagePreparer(head_mover(self.pool), self.checksums, self.events.append, rank=1)

    def prepare(self, pages: list[int], sums: list[HeadSums]) -> PagesPrepared:
        """Prepare pages; returns the answer."""
        self.preparer.prepare(PreparePages(ticket=3, pages=pages, pieces=[*self.PIECES], sums=sums))
        self.preparer.close()
        (event,) = self.events
        assert isinstance(event, PagesPrepared) and event.ticket == 3
        return event


def test_pieces_are_put_in_order_before_they_are_compared() -> None:
    rank = PieceRank()
    crc = np.array([zlib.crc32(rank.page[..., 1:, :].contiguous().numpy().data)], np.uint32).tobytes()
    sums = [HeadSums(target_rank=1, head=1, num_heads=2, crcs=crc)]
    assert not torch.equal(rank.pool.data[2], rank.page)
    assert rank.prepare([2], sums).error == ""
    assert torch.equal(rank.pool.data[2], rank.page)
    assert not rank.pool.data[[0, 1, 3, 4, 5, 6]].any(), "another page was written"


def test_a_flipped_bit_in_a_piece_is_found() -> None:
    rank = PieceRank()
    crc = np.array([zlib.crc32(rank.page[..., 1:, :].contiguous().numpy().data)], np.uint32).tobytes()
    rank.pool.data[2].view(-1)[-1] ^= 1
    event = rank.prepare([2], [HeadSums(target_rank=1, head=1, num_heads=2, crcs=crc)])
    assert "page 2 of rank 1, KV heads 1 to 2" in event.error and event.reason == "checksum"


def test_pages_whose_heads_cannot_be_put_in_order_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    event = PieceRank().prepare([99], [])
    assert "cannot be put in order: IndexError" in event.error and event.reason == "transport"
    assert "the heads of 1 KV pages cannot be put in order" in caplog.text
