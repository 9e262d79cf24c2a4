"""The KV cache: one page-major tensor for all layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kernels.fp8 import FP8, dequantize_by, quantize_by

KVScales = Sequence[tuple[float, float]]
"""By layer: what keys and values in FP8 have to be multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The sizes of one rank's KV pool."""

    num_pages: int  # without the scratch page
    num_layers: int
    page_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the model
    fp8: bool = False  # whether keys and values are stored in FP8 (float8_e4m3fn) instead of `dtype`

    @property
    def stored(self) -> torch.dtype:
        """The dtype that keys and values are stored in."""
        return FP8 if self.fp8 else self.dtype

    @property
    def page_bytes(self) -> int:
        """The bytes of one page of all layers."""
        row = self.num_kv_heads * self.head_dim * self.stored.itemsize
        return self.num_layers * 2 * self.page_size * row

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

    In FP8, what is stored times the layer's scale is the key or value. `scales` never change, whatever
    weights the engine gets, because what is cached must be read with the scale that it was written with.
    """

    def __init__(self, shape: KVShape, data: Tensor, scales: KVScales | None = None) -> None:
        """Use `data`: as many bytes as `shape` needs. They reach no output before they are written.

        `scales` are those of FP8; None: all are 1.
        """
        self.dtype, self.is_fp8 = shape.dtype, shape.fp8
        self.scales = [(1.0, 1.0)] * shape.num_layers if scales is None else list(scales)
        self.num_pages = shape.num_pages
        self.num_layers = shape.num_layers
        self.page_size = shape.page_size
        self.page_bytes = shape.page_bytes
        page = (shape.num_layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.data = data.view(shape.stored).view(-1, *page)
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

    @property
    def format(self) -> str:
        """How keys and values are stored: pages of pools with another format cannot be read."""
        if not self.is_fp8:
            return str(self.dtype).removeprefix("torch.")
        if all(scale == 1 for pair in self.scales for scale in pair):
            return "fp8"
        return f"fp8 with scales {hashlib.sha256(repr(self.scales).encode()).hexdigest()[:16]}"

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store `key` and `value`, `[T, num_kv_heads, head_dim]`, at the token rows `rows` (int64 `[T]`).

        Returns both as whoever reads the pool finds them.
        """
        if not self.is_fp8:
            self.key_rows[layer].index_copy_(0, rows, key.flatten(1))
            self.value_rows[layer].index_copy_(0, rows, value.flatten(1))
            return key, value
        key_scale, value_scale = self.scales[layer]
        return (
            self._write_fp8(self.key_rows[layer], rows, key, key_scale),
            self._write_fp8(self.value_rows[layer], rows, value, value_scale),
        )

    def _write_fp8(self, target: Tensor, rows: Tensor, given: Tensor, scale: float) -> Tensor:
        stored = quantize_by(given, scale)
        target.view(torch.uint8).index_copy_(0, rows, stored.flatten(1).view(torch.uint8))
        return dequantize_by(stored, scale, self.dtype)
