"""The KV cache: one page-major tensor for all layers."""

import math

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """Keys and values of all cached tokens of this rank.

    `data` is `[num_pages + 1, num_layers, 2, page_size, num_kv_heads, head_dim]` (2: key, value), so a page of all layers is
    one contiguous run. Token `offset` of page `page` has slot `page * page_size + offset`. The last page is the scratch
    page: padding writes there, and nothing reads it.
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

    @property
    def scratch_page(self) -> int:
        """The page that padding writes to."""
        return self.num_pages

    @property
    def scratch_slot(self) -> int:
        """The slot that padding writes to."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.data[0].numel() * self.data.element_size()

    def keys(self, layer: int) -> Tensor:
        """All keys of one layer, `[num_pages + 1, page_size, num_kv_heads, head_dim]`, as a view."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """All values of one layer, `[num_pages + 1, page_size, num_kv_heads, head_dim]`, as a view."""
        return self.data[:, layer, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy takes pages that the kernel zeroes when they are first touched; torch.zeros touches all of them now,
    # which takes seconds for some GiB and memory that may never be used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
