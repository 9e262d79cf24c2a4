"""Addresses of pages in the memory of GPUs; `tests/gpu/test_cuda_ipc.py` moves pages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from segue.disagg.transports.cuda_ipc import page_addresses

BASE = 0x7F12_3400_0000


@pytest.mark.parametrize("page_bytes", [4096, 9 << 20, (1 << 33) + 64])
def test_addresses_of_pages_do_not_overflow(page_bytes: int) -> None:
    pages = [0, *random.Random(page_bytes).sample(range(5000), 40)]
    found = page_addresses(BASE, pages, page_bytes)
    assert found.dtype == np.uint64
    assert found.tolist() == [BASE + page * page_bytes for page in pages]


def test_no_pages_have_no_addresses() -> None:
    assert page_addresses(BASE, [], 4096).tolist() == []
