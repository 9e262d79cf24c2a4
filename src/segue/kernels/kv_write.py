"""Storing a step's keys and values in the paged pool."""

from torch import Tensor


def write_kv(pool: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Put `key` and `value`, `[T, num_kv_heads, D]`, into `slots` (int64 `[T]`) of one layer.

    `pool` is `[num_pages + 1, num_layers, 2, page_size, num_kv_heads, D]`.
    """
    page_size = pool.shape[3]
    pages, offsets = slots // page_size, slots % page_size
    pool[:, layer, 0][pages, offsets] = key
    pool[:, layer, 1][pages, offsets] = value
