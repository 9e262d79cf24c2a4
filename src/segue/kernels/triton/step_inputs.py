"""The kernels before the first layer: device writes, embeddings and slot mapping, lists of pages.

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
_PAGES = tl.constexpr(128)  # that a program of `_list_pages` copies at a time
_COLUMNS = tl.constexpr(1024)  # per program of `_embed_inputs`


@triton.jit
def _scatter(writes, PDL: tl.constexpr):
    """Do _WORDS of the writes of `scatter`."""
    i = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    pdl_wait(PDL)
    count = tl.load(writes.to(tl.pointer_type(tl.int64)))
    addresses = writes.to(tl.pointer_type(tl.int64)) + 1
    to = tl.load(addresses + i, mask=i < count, other=0).to(tl.pointer_type(tl.int32))
    value = tl.load(writes + 2 + 2 * count + i, mask=i < count, other=0)
    pdl_launch_dependents(PDL)
    tl.store(to, value, mask=i < count)


def scatter(writes: Tensor, most: int) -> None:
    """Write 4-byte words to any tensors on the device; an element of 8 bytes takes two.

    Args:
        writes: int32, aligned to 16 bytes: the number of words (8 bytes), the byte address of each (8 bytes)
            and the words. No address may occur twice.
        most: an upper bound of the number of words. The kernel reads the number itself.
    """
    # As if of one row: PDL is early in steps of any size.
    _scatter[(ceil_div(most, _WORDS.value),)](writes=writes, **launch_options(4, 1))


@triton.jit
def _embed_inputs(
    token_slots,
    positions,
    token_pool,
    page_table,
    weight,
    embeddings,
    slot_mapping,
    pool_stride,
    table_stride,
    page_rows,
    vocab_start,
    num_rows,
    size,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy _COLUMNS columns of one token's embedding; the first program also stores its row in the pool."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside = columns < size
    pdl_wait(PDL)
    slot = tl.load(token_slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    row = tl.load(token_pool + slot * pool_stride + position).to(tl.int64) - vocab_start
    page = tl.load(page_table + slot * table_stride + position // PAGE).to(tl.int64)
    here = (row >= 0) & (row < num_rows)
    value = tl.load(weight + row * size + columns, mask=inside & here, other=0.0)
    pdl_launch_dependents(PDL)
    tl.store(embeddings + token * size + columns, value, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(slot_mapping + token, page * page_rows + position % PAGE)


def embed_inputs(
    token_slots: Tensor,
    positions: Tensor,
    token_pool: Tensor,
    page_table: Tensor,
    weight: Tensor,
    vocab_start: int,
    *,
    page_size: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    """Returns the embeddings of a step's tokens, `[T, N]`, and their slot mapping, int64 `[T]`.

    The ids are read on the device, since the previous step may still be sampling them. An id of another
    rank's shard has zeros, as in `segue.kernels.ops.embed`. The slot mapping has the KV pool's token row for
    each token's key and value.

    Args:
        token_slots: int32 `[T]`, each token's request slot.
        positions: int32 `[T]`, each token's index in its sequence.
        token_pool: int32 `[slots, max_seq_len + 1]`, the token ids of each request.
        page_table: int32 `[slots, columns]`, the pages of each request.
        weight: `[rows, N]`, this rank's shard of the embeddings.
        vocab_start: the id of the shard's first row.
        page_size: tokens per page.
        page_rows: the distance between two pages of the KV pool, in token rows.
    """
    num_tokens, (num_rows, size) = len(token_slots), weight.shape
    embeddings = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=weight.device)
    _embed_inputs[(num_tokens, ceil_div(size, _COLUMNS.value))](
        token_slots=token_slots,
        positions=positions,
        token_pool=token_pool,
        page_table=page_table,
        weight=weight,
        embeddings=embeddings,
        slot_mapping=slot_mapping,
        pool_stride=token_pool.stride(0),
        table_stride=page_table.stride(0),
        page_rows=page_rows,
        vocab_start=vocab_start,
        num_rows=num_rows,
        size=size,
        PAGE=page_size,
        **launch_options(4, num_tokens),
    )
    return embeddings, slot_mapping


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
