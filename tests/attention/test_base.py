from hypothesis import given
from hypothesis import strategies as st

from segue.attention.base import query_blocks


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 20), st.data())
def test_every_query_after_the_decode_rows_is_in_one_block(
    lens: list[int], size: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(lens)))
    found = [
        (sequence, query)
        for sequence, start in query_blocks(lens, first, size).tolist()
        for query in range(start, min(start + size, lens[sequence]))
    ]
    assert found == [(s, q) for s in range(first, len(lens)) for q in range(lens[s])]
