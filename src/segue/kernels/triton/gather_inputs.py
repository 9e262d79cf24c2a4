"""The first kernel of a captured step: gathers its token ids and its slot mapping."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait

_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_inputs(
    token_slots,
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
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = token < num_tokens
    pdl_wait(PDL)
    slot = tl.load(token_slots + token, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=0).to(tl.int64)
    page = tl.load(page_table + slot * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    token_id = tl.load(token_pool + slot * pool_stride + position, mask=inside, other=0)
    pdl_launch_dependents(PDL)
    tl.store(slot_mapping + token, page * page_rows + position % PAGE, mask=inside)
    tl.store(ids + token, token_id.to(tl.int64), mask=inside)


def gather_inputs(
    token_slots: Tensor,
    positions: Tensor,
    token_pool: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    """Returns the token ids and the slot mapping, int64 `[T]` each.

    Args:
        token_slots: int32 `[T]`, each token's request slot.
        positions: int32 `[T]`.
        token_pool: int32 `[slots, max_seq_len + 1]`.
        page_table: int32 `[slots, columns]`.
        page_size: tokens per page.
        page_rows: the distance between two pages of the KV pool, in token rows.
    """
    num_tokens = len(token_slots)
    ids = torch.empty(num_tokens, dtype=torch.int64, device=token_slots.device)
    slot_mapping = torch.empty_like(ids)
    _gather_inputs[(triton.cdiv(num_tokens, _BLOCK.value),)](
        token_slots=token_slots,
        positions=positions,
        token_pool=token_pool,
        page_table=page_table,
        ids=ids,
        slot_mapping=slot_mapping,
        num_tokens=num_tokens,
        pool_stride=token_pool.stride(0),
        table_stride=page_table.stride(0),
        page_rows=page_rows,
        PAGE=page_size,
        **launch_options(4, num_tokens),
    )
    return ids, slot_mapping
