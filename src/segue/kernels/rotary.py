"""Rotary position embedding."""

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]` by each token's angles.

    `cos` and `sin` are `[T, 1, D / 2]`.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = x.new_empty(x.shape)
    left, right = rotated.chunk(2, dim=-1)
    left.copy_(first * cos - second * sin)
    right.copy_(second * cos + first * sin)
    return rotated
