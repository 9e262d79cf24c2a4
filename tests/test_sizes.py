import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.sizes import ceil_div, next_power_of_2, round_up


@given(st.integers(0, 1 << 70), st.integers(1, 1 << 40))
def test_sizes_are_rounded_up_exactly(value: int, step: int) -> None:
    count = ceil_div(value, step)
    assert (count - 1) * step < value <= count * step
    assert round_up(value, step) == count * step


@pytest.mark.parametrize(
    ("value", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), ((1 << 40) + 1, 1 << 41)]
)
def test_the_next_power_of_2_is_at_least_the_value(value: int, power: int) -> None:
    assert next_power_of_2(value) == power
