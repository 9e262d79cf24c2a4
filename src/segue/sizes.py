"""Arithmetic of sizes that is rounded up."""


def ceil_div(value: int, divisor: int) -> int:
    """Return `value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple
