"""What a captured step looks up first: its token ids, and where their K and V go."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import begin, launch_options, let_next_start

_BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _look_up(
    token_rows,
    positions,
    token_pool,
    page_table,
    ids,
    slot_mapping,
    num_tokens,
    pool_stride,
    table_stride,
    page_rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    begin(PDL)
    row = tl.load(token_rows + token, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=0).to(tl.int64)
    page = tl.load(page_table + row * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    known = tl.load(token_pool + row * pool_stride + position, mask=inside, other=0)
    let_next_start(PDL)
    tl.store(slot_mapping + token, page * page_rows + position % PAGE, mask=inside)
    tl.store(ids + token, known.to(tl.int64), mask=inside)


def gather_inputs(
    token_rows: Tensor,
    positions: Tensor,
    token_pool: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    """Token ids and KV token rows, int64 `[T]` each.

    Args:
        token_rows: int32 `[T]`, the batch row each token belongs to.
        positions: int32 `[T]`.
        token_pool: int32 `[rows, max_seq_len + 1]`.
        page_table: int32 `[rows, columns]`.
        page_size: tokens a page.
        page_rows: token rows from one page of the KV pool to the next.
    """
    num_tokens = len(token_rows)
    ids = torch.empty(num_tokens, dtype=torch.int64, device=token_rows.device)
    slot_mapping = torch.empty_like(ids)
    _look_up[(triton.cdiv(num_tokens, _BLOCK),)](
        token_rows,
        positions,
        token_pool,
        page_table,
        ids,
        slot_mapping,
        num_tokens,
        token_pool.stride(0),
        page_table.stride(0),
        page_rows,
        PAGE=page_size,
        BLOCK=_BLOCK,
        **launch_options(4, num_tokens),
    )
    return ids, slot_mapping
