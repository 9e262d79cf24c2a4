"""Arithmetic of sizes that is rounded up."""


def ceil_div(value: int, divisor: int) -> int:
    """Return `value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`, which is positive.

    Triton's own function is for the code of kernels, too, and takes 2 us on the host, as its `cdiv` does.
    """
    return 1 << (value - 1).bit_length()
