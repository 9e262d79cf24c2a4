"""One row per request slot on the device: which pages a request holds and which tokens it consists of."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 32  # int32 columns: rows start on 128-byte borders


class PageTable:
    """Pages of each running request, in order.

    `data` is int32 `[max_running + 1, align_up(ceil(max_seq_len / page_size), 32)]`; entries not in use hold
    the scratch page. The last row is the dummy request that pads captured graphs.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_seq_len: int,
        page_size: int,
        scratch_page: int,
        device: torch.device | str,
    ) -> None:
        """Allocate the table, every entry the scratch page."""
        self.page_size = page_size
        self.scratch_page = scratch_page
        self.dummy_slot = max_running
        columns = -(-max_seq_len // page_size)
        columns = -(-columns // _ALIGNMENT) * _ALIGNMENT
        self.data = torch.full((max_running + 1, columns), scratch_page, dtype=torch.int32, device=device)

    def assign(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Put `pages` into columns `first`, `first + 1`, … of `slot`."""
        self.data[slot, first : first + len(pages)] = torch.tensor(
            pages, dtype=torch.int32, device=self.data.device
        )

    def kv_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Places in the KV pool, int64 `[T]`: token `i` is at `positions[i]` (int64) of `slots[i]` (int)."""
        pages = self.data[slots, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size


class TokenPool:
    """Tokens of each running request: prompt, then sampled tokens, where the next step reads its input.

    `data` is int32 `[max_running + 1, max_seq_len + 1]`: a request of full length still has room for the
    token sampled last.
    """

    def __init__(self, *, max_running: int, max_seq_len: int, device: torch.device | str) -> None:
        """Allocate the pool, zeroed."""
        self.data = torch.zeros((max_running + 1, max_seq_len + 1), dtype=torch.int32, device=device)

    def tokens(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Tokens, int64 `[T]`, at `positions[i]` of slot `slots[i]`."""
        return self.data[slots, positions].to(torch.int64)
