"""Copies some KV heads of pages into another pool, which may be memory of another device.

It is for ranks of unequal tensor parallelism, whose pages have different numbers of heads. Each row of a page
(one token, key or value, in one layer) gives one run of bytes, so the copy is strided on both sides.
"""

import triton
import triton.language as tl
from torch import Tensor

from segue.sizes import next_power_of_2

NUM_PROGRAMS = 16  # few: the steps need the SMs
_BLOCK_ROWS = 32
_MAX_BLOCK_WORDS = 128
_WORD_BYTES = 8


# The geometry is another pool's: a hint about it would need a kernel per pool, and words are moved one by one
# anyway, as nothing is known of the addresses.
@triton.jit(
    do_not_specialize=["source", "target", "num_pages", "num_rows", "source_row", "target_row", "run"]
)
def _copy_slices(
    source,  # address of a pool's first byte, and of the first head to copy
    target,
    pages,  # int64 [2, num_pages]: pages of the source, then those of the target
    num_pages,
    num_rows,
    source_row,  # words of a row
    target_row,
    run,  # words to copy of each row
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Copy a run of each row of each page; the programs take turns with blocks of rows."""
    word = tl.pointer_type(tl.int64)
    lane = tl.arange(0, BLOCK_WORDS)[None, :]
    row_of_block = tl.arange(0, BLOCK_ROWS)[:, None]
    blocks_per_page = tl.cdiv(num_rows, BLOCK_ROWS)
    for block in range(tl.program_id(0), num_pages * blocks_per_page, tl.num_programs(0)):
        page = block // blocks_per_page
        rows = (block % blocks_per_page) * BLOCK_ROWS + row_of_block
        from_row = tl.load(pages + page) * num_rows + rows
        to_row = tl.load(pages + num_pages + page) * num_rows + rows
        for start in range(0, run, BLOCK_WORDS):
            i = start + lane
            mask = (rows < num_rows) & (i < run)
            values = tl.load(source.to(word) + from_row * source_row + i, mask=mask)
            tl.store(target.to(word) + to_row * target_row + i, values, mask=mask)


def copy_slices(
    source: int,
    target: int,
    pages: Tensor,
    *,
    num_rows: int,
    source_row: int,
    target_row: int,
    run: int,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copy one run of bytes per row of each source page to the target page in the same column of `pages`.

    It runs on the current stream. Its reference for a CPU is `disagg/transports/page_copy.py`.

    Args:
        source: address of the run in the first row of the source's page 0.
        target: the same of the target, which may be memory of another device.
        pages: int64 `[2, n]` on the current device: the pages of the source, and those of the target.
        num_rows: of a page.
        source_row: bytes of a row of the source; rows of a page, and pages, follow each other.
        target_row: bytes of a row of the target.
        run: bytes to copy of each row. This and the two above are multiples of 8.
        num_programs: each takes one SM or a part of it.
    """
    sizes = (source_row, target_row, run)
    assert not any(size % _WORD_BYTES for size in sizes), f"{sizes} are not multiples of {_WORD_BYTES} bytes"
    source_row, target_row, run = (size // _WORD_BYTES for size in sizes)
    _copy_slices[(num_programs,)](
        source=source,
        target=target,
        pages=pages,
        num_pages=pages.shape[1],
        num_rows=num_rows,
        source_row=source_row,
        target_row=target_row,
        run=run,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_WORDS=min(_MAX_BLOCK_WORDS, next_power_of_2(run)),
        num_warps=8,
    )
