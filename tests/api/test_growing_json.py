"""JSON that grows has the same bytes as JSON of the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.api.growing_json import GrowingList, GrowingText

# Everything that JSON escapes, and characters of one to four bytes, are frequent.
CHARACTERS = st.one_of(
    st.sampled_from('"\\/\x00\x1f\x7f\n\u2028é東🙂'), st.characters(exclude_categories=["Cs"])
)
VALUES = st.one_of(
    st.none(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(CHARACTERS, max_size=3),
    st.lists(st.integers(0, 9), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(CHARACTERS, max_size=6), max_size=8))
def test_a_text_in_pieces_has_the_bytes_of_the_whole(pieces: list[str]) -> None:
    grown, whole = GrowingText(), ""
    assert grown.json == msgspec.json.encode(whole)
    for piece in pieces:
        grown.extend(piece)
        whole += piece
        assert grown.json == msgspec.json.encode(whole)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(VALUES, max_size=4), max_size=8))
def test_a_list_in_parts_has_the_bytes_of_the_whole(parts: list[list[Any]]) -> None:
    grown, whole = GrowingList(), []
    assert grown.json == msgspec.json.encode(whole)
    for part in parts:
        grown.extend(part)
        whole += part
        assert grown.json == msgspec.json.encode(whole)
        assert grown.num_items == len(whole)


def test_a_lone_surrogate_is_refused_as_in_the_whole_and_changes_nothing() -> None:
    grown = GrowingText()
    grown.extend("a")
    with pytest.raises(UnicodeEncodeError):
        msgspec.json.encode("\ud83d")
    with pytest.raises(UnicodeEncodeError):
        grown.extend("\ud83d")
    assert grown.json == b'"a"'
