"""The KV cache: one page-major tensor for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The sizes of one rank's KV pool."""

    num_pages: int  # without the scratch page
    num_layers: int
    page_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """The bytes of one page of all layers."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The bytes of the pool."""
        return (self.num_pages + 1) * self.page_bytes


class KVPool:
    """The keys and values of all cached tokens of this rank.

    `data` is `[num_pages + 1, num_layers, 2, page_size, num_kv_heads, head_dim]` (2: key, value), so a page
    of all layers is contiguous. Token `offset` of page `page` has the KV slot `page * page_size + offset`.
    Kernels address memory by token row: a row is the `num_kv_heads * head_dim` numbers of one token, key or
    value, in one layer, and the rows of one layer's page are `page_rows` behind those of the page before.
    The last page is the scratch page: padding writes there, and nothing reads it.
    """

    def __init__(self, shape: KVShape, data: Tensor) -> None:
        """Use `data`: as many bytes as `shape` needs. They reach no output before they are written."""
        self.num_pages = shape.num_pages
        self.num_layers = shape.num_layers
        self.page_size = shape.page_size
        self.page_bytes = shape.page_bytes
        page = (shape.num_layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.data = data.view(shape.dtype).view(-1, *page)
        rows = self.data.view(-1, shape.num_kv_heads * shape.head_dim)
        # Views of `data`, by layer: the keys and the values by token row, `[*, num_kv_heads * head_dim]`.
        # Each begins at that layer's first row, so a token has the same row index in all of them.
        self.key_rows = [rows[2 * layer * shape.page_size :] for layer in range(shape.num_layers)]
        self.value_rows = [rows[(2 * layer + 1) * shape.page_size :] for layer in range(shape.num_layers)]

    @property
    def scratch_page(self) -> int:
        """The page that padding writes to."""
        return self.num_pages

    @property
    def page_rows(self) -> int:
        """The number of token rows from one page to the next: a token has row `page * page_rows + offset`."""
        return self.num_layers * 2 * self.page_size

    def token_rows(self, slots: Tensor) -> Tensor:
        """Turn KV slots (int64 `[T]`) into indices into the `key_rows` and `value_rows` of any layer.

        The layout stores all layers of a page together, so KV slots of two pages are further apart in memory.
        """
        return slots + slots // self.page_size * (self.page_rows - self.page_size)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value`, `[T, num_kv_heads, head_dim]`, at the token rows `rows` (int64 `[T]`)."""
        self.key_rows[layer].index_copy_(0, rows, key.flatten(1))
        self.value_rows[layer].index_copy_(0, rows, value.flatten(1))
