"""Pages that were pushed are compared with the checksums of what was sent, on real shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from segue.messages.kv import HeadSums, PagesVerified, PushEnded, VerifyPages
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

    def verify(self, pages: list[int], sums: list[HeadSums]) -> list[str]:
        """Returns what each decode rank says of its pages."""
        for decode in self.decodes:
            decode.mover.handle(VerifyPages(ticket=7, pages=pages, sums=sums))
        for decode in self.decodes:
            self.wait_until(lambda decode=decode: decode.events, what="the comparison")
        events = [event for decode in self.decodes for event in decode.events]
        assert all(isinstance(event, PagesVerified) and event.ticket == 7 for event in events)
        return [event.error for event in events if isinstance(event, PagesVerified)]


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
    assert ranks.verify([4, 1], sums) == [""] * d_tp


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1)])
def test_a_flipped_bit_is_found_with_its_page_and_both_values(
    make: Make, p_tp: int, d_tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make(p_tp, d_tp)
    sums = ranks.push([0, 5], [4, 1])
    *others, last = ranks.decodes
    last.pool.data[1, -1, -1, -1, -1, -1] ^= 1  # the last byte of the second page
    *errors, error = ranks.verify([4, 1], sums)
    assert errors == [""] * len(others)
    sent = int.from_bytes(sums[-1].crcs[4:], "little")
    assert f"page 1 of rank {d_tp - 1}" in error and f"had {sent:08x} at the prefill engine" in error
    assert error in caplog.text


def test_pages_in_the_wrong_order_are_found(make: Make) -> None:
    ranks = make(1, 1)
    sums = ranks.push([0, 5], [4, 1])
    (error,) = ranks.verify([1, 4], sums)
    assert "page 1 of rank 0" in error


@pytest.mark.parametrize("crcs", [b"abc", b"", bytes(8)])
def test_checksums_that_do_not_fit_the_pages_are_an_error(make: Make, crcs: bytes) -> None:
    ranks = make(1, 1)
    (sums,) = ranks.push([0], [4])
    (error,) = ranks.verify([4], [structs.replace(sums, crcs=crcs)])
    assert "checksums cannot be compared" in error


def test_without_the_option_nothing_is_computed(make: Make) -> None:
    ranks = make(1, 1, has_checksums=False)
    assert ranks.push([0], [4]) == []
