"""The kernels before the first layer: device writes, token ids and slot mapping, embeddings.

Device writes are the values that a step changes in the tensors on the device that outlive it, such as the
page table: one kernel scatters all of them, to any number of tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div

_WORDS = tl.constexpr(512)  # per program of `_scatter`
_TOKENS = tl.constexpr(128)  # per program of `_gather_inputs`
_PAGES = tl.constexpr(128)  # that a program of `_list_pages` copies at a time
_COLUMNS = tl.constexpr(1024)  # per program of `_embed`


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["addresses", "values"])
def _scatter(addresses, values, count, PDL: tl.constexpr):
    """Do _WORDS of the writes of `scatter`."""
    i = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    pdl_wait(PDL)
    to = tl.load(addresses + i, mask=i < count, other=0).to(tl.pointer_type(tl.int32))
    value = tl.load(values + i, mask=i < count, other=0)
    pdl_launch_dependents(PDL)
    tl.store(to, value, mask=i < count)


def scatter(addresses: Tensor, values: Tensor, count: int) -> None:
    """Write `values[i]` (int32) to the byte address `addresses[i]` (int64), i < `count`.

    No address may occur twice. The addresses may belong to any tensors on the device; an element of 8
    bytes takes two writes.
    """
    # As if of one row: PDL is early in steps of any size.
    _scatter[(ceil_div(count, _WORDS.value),)](
        addresses=addresses, values=values, count=count, **launch_options(4, 1)
    )


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
    """Look up the id and the pool's token row of _TOKENS tokens, see `gather_inputs`."""
    token = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
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

    The ids are read on the device, since the previous step may still be sampling them. The slot mapping has
    the KV pool's token row for each token's key and value.

    Args:
        token_slots: int32 `[T]`, each token's request slot.
        positions: int32 `[T]`, each token's index in its sequence.
        token_pool: int32 `[slots, max_seq_len + 1]`, the token ids of each request.
        page_table: int32 `[slots, columns]`, the pages of each request.
        page_size: tokens per page.
        page_rows: the distance between two pages of the KV pool, in token rows.
    """
    num_tokens = len(token_slots)
    ids = torch.empty(num_tokens, dtype=torch.int64, device=token_slots.device)
    slot_mapping = torch.empty_like(ids)
    _gather_inputs[(ceil_div(num_tokens, _TOKENS.value),)](
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


@triton.jit
def _list_pages(page_table, slots, starts, pages, table_stride, PDL: tl.constexpr):
    """Copy the pages of one sequence, see `segue.kernels.ops.list_pages`."""
    row = tl.program_id(0)
    pdl_wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    for first in range(0, count, _PAGES):
        column = first + tl.arange(0, _PAGES)
        page = tl.load(page_table + slot * table_stride + column, mask=column < count, other=0)
        tl.store(pages + start + column, page, mask=column < count)
    pdl_launch_dependents(PDL)


def list_pages(page_table: Tensor, slots: Tensor, starts: Tensor, pages: Tensor) -> None:
    """See `segue.kernels.ops.list_pages`; `pages` is the result, and `slots` are int32."""
    _list_pages[(len(slots),)](
        page_table=page_table,
        slots=slots,
        starts=starts,
        pages=pages,
        table_stride=page_table.stride(0),
        **launch_options(4, len(slots)),
    )


@triton.jit
def _embed(ids, weight, output, start, num_rows, size, PDL: tl.constexpr):
    """Copy _COLUMNS columns of one token's embedding, or zeros if another rank's shard has the token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside = columns < size
    pdl_wait(PDL)
    row = tl.load(ids + token) - start
    here = (row >= 0) & (row < num_rows)
    value = tl.load(weight + row * size + columns, mask=inside & here, other=0.0)
    pdl_launch_dependents(PDL)
    tl.store(output + token * size + columns, value, mask=inside)


def embed(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """See `segue.kernels.ops.embed`: `[T, N]`, with zeros for ids of other ranks' shards."""
    num_rows, size = weight.shape
    output = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    _embed[(len(ids), ceil_div(size, _COLUMNS.value))](
        ids=ids,
        weight=weight,
        output=output,
        start=start,
        num_rows=num_rows,
        size=size,
        **launch_options(4, len(ids)),
    )
    return output
