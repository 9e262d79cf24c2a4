from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.frontend.thread_pool import INLINE_ENTRIES, ThreadPool
from segue.server.responses import ITEMS, json_pieces, reply_response

CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(content=CONTENT)
def test_the_joined_pieces_are_the_same_json(content: Any) -> None:
    assert b"".join(json_pieces(content)) == msgspec.json.encode(content)


def test_long_lists_are_encoded_in_several_pieces() -> None:
    content = {"ids": list(range(3 * ITEMS + 1)), "top": [[[-0.5, 1, "a"]]] * (2 * ITEMS)}
    pieces = list(json_pieces(content))
    assert b"".join(pieces) == msgspec.json.encode(content)
    assert max(map(len, pieces)) < 20 * ITEMS


def test_a_large_reply_has_the_same_bytes_as_a_small_one() -> None:
    content = [{"text": "é", "output_ids": [1, 2]}] * 3

    async def work() -> None:
        small, large = [await reply_response(content, n, ThreadPool()) for n in (1, INLINE_ENTRIES + 1)]
        assert (small.body, small.headers) == (large.body, large.headers)
        assert json.loads(large.body) == content

    asyncio.run(work())
