"""The KV cache: one page-major tensor for all layers."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


class KVPool:
    """The keys and values of all cached tokens of this rank.

    `data` is `[num_pages + 1, num_layers, 2, page_size, num_kv_heads, head_dim]` (2: key, value), so a page
    of all layers is contiguous. Token `offset` of page `page` has the KV slot `page * page_size + offset`.
    The last page is the scratch page: padding writes there, and nothing reads it.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate the pool, zeroed."""
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_pages + 1, num_layers, 2, page_size, num_kv_heads, head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))
        rows = self.data.view(-1, num_kv_heads * head_dim)
        # Views of `data`, by layer: the keys and the values by token row, `[*, num_kv_heads * head_dim]`.
        self.key_rows = [rows[2 * layer * page_size :] for layer in range(num_layers)]
        self.value_rows = [rows[(2 * layer + 1) * page_size :] for layer in range(num_layers)]

    @property
    def scratch_page(self) -> int:
        """The page that padding writes to."""
        return self.num_pages

    @property
    def scratch_slot(self) -> int:
        """The KV slot that padding writes to."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """The bytes of one page of all layers."""
        return self.data[0].numel() * self.data.element_size()

    @property
    def page_rows(self) -> int:
        """The number of token rows from one page to the next: a token has row `page * page_rows + offset`."""
        return self.num_layers * 2 * self.page_size

    def token_rows(self, slots: Tensor) -> Tensor:
        """Return the indices into `key_rows` and `value_rows`, of any layer, of KV slots (int64 `[T]`)."""
        return slots + slots // self.page_size * (self.page_rows - self.page_size)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value`, `[T, num_kv_heads, head_dim]`, at the token rows `rows` (int64 `[T]`)."""
        self.key_rows[layer].index_copy_(0, rows, key.flatten(1))
        self.value_rows[layer].index_copy_(0, rows, value.flatten(1))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory is zero and costs nothing until it is touched; torch.zeros would touch all of it at
    # start, which takes seconds.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may have been built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
