from hypothesis import given
from hypothesis import strategies as st

from segue.sizes import ceil_div, round_up


@given(st.integers(0, 1 << 70), st.integers(1, 1 << 40))
def test_sizes_are_rounded_up_exactly(value: int, step: int) -> None:
    count = ceil_div(value, step)
    assert (count - 1) * step < value <= count * step
    assert round_up(value, step) == count * step
