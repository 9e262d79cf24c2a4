"""A device tensor with one row per request slot: the pages of each running request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.sizes import ceil_div, round_up

_ALIGNMENT = 32  # int32 columns: each row starts at a multiple of 128 bytes


class PageTable:
    """The block table: the pages of each running request, in order.

    `data` is int32 `[max_running + 1, align_up(ceil(max_seq_len / page_size), 32)]`; entries not in use hold
    the scratch page. The last slot is that of the dummy request, which pads captured graphs. A request slot
    is a row of this table. A KV slot is the place of one token in the pool: `page * page_size + offset`.
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
        """Allocate the table and fill it with the scratch page."""
        self.page_size = page_size
        self.scratch_page = scratch_page
        self.dummy_slot = max_running
        columns = round_up(ceil_div(max_seq_len, page_size), _ALIGNMENT)
        self.data = torch.full((max_running + 1, columns), scratch_page, dtype=torch.int32, device=device)

    def assign(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write `pages` (page ids) into the columns `first`, `first + 1`, … of request slot `slot`."""
        self.data[slot, first : first + len(pages)] = torch.tensor(
            pages, dtype=torch.int32, device=self.data.device
        )

    def kv_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the KV slots, int64 `[T]`, of T tokens.

        Token t is at `positions[t]` (int64) of the sequence in request slot `slots[t]` (any integer type).
        """
        pages = self.data[slots, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size
