"""Attention on CUDA devices, in Triton: split-KV decode and ragged prefill over the paged cache.

The rows of a tile are the query heads that share a key-value head (packed GQA), so each key and value is read
once for all of them. Decode splits a sequence's keys; the number of splits depends only on the size of the
batch. The program that ends last combines the splits' partial results in a fixed order. Prefill runs one
program per block of queries; a table maps blocks to sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.attention.hybrid import prefill_and_decode
from segue.attention.prefill_grid import GridPrefill
from segue.attention.query_blocks import block_table
from segue.kernels.triton.attention import decode, prefill
from segue.kernels.triton.launch import is_hopper, launch_options
from segue.kvcache.pool import KVPool

_MAX_PROGRAMS = 256  # maximum of programs that split the keys of a small decode batch
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionTile:
    """The tile and launch options of prefill."""

    keys: int  # keys per iteration
    stages: int
    warps: int


_TILES_BY_ROWS = {
    32: _AttentionTile(keys=64, stages=2, warps=4),
    64: _AttentionTile(keys=64, stages=2, warps=4),
    128: _AttentionTile(keys=64, stages=2, warps=4),
}


class TritonAttention(GridPrefill):
    """Decode and prefill in Triton on one pool."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        self._shape = shape
        self._pool = pool
        self._group = shape.num_heads // shape.num_kv_heads
        device = pool.data.device
        self._partial = torch.empty(_MAX_PROGRAMS * self._group * shape.head_dim, device=device)
        self._maxima = torch.empty(_MAX_PROGRAMS * self._group * 2, device=device)
        self._counters = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._is_float32 = pool.data.dtype == torch.float32
        self._max_block_m = 64 if self._is_float32 else 128
        self._blocks: Tensor | None = None

    def queries_per_block(self, tokens: int) -> int:
        """Returns how many query tokens a prefill program takes: fewer in small steps, for more programs."""
        return self._rows_per_block(tokens) // self._group

    def _rows_per_block(self, tokens: int) -> int:
        rows = tokens * self._shape.num_heads
        return next(
            (size for size in (32, 64) if rows < 2 * _MAX_PROGRAMS * size and size > self._group),
            self._max_block_m,
        )

    def prepare(self, ctx: Context) -> None:
        """Lay out the blocks of the sequences after the decode rows, unless the context has them."""
        self._blocks = ctx.blocks
        if ctx.blocks is None and ctx.has_prefill:
            table = block_table(ctx.q_lens, ctx.num_decode, self.queries_per_block(len(ctx.positions)))
            self._blocks = torch.from_numpy(table).to(ctx.positions.device)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        return prefill_and_decode(self, self, query, layer, ctx)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`."""
        shape, splits = self._shape, self._num_splits(ctx.num_decode)
        heads = shape.num_kv_heads
        decode[(heads, ctx.num_decode) if splits == 1 else (splits, heads, ctx.num_decode)](
            query,
            self._pool.key_rows[layer],
            self._pool.value_rows[layer],
            ctx.page_table.data,
            ctx.slots_device,
            ctx.kv_lens_device,
            ctx.slots_device if ctx.num_decode_device is None else ctx.num_decode_device,
            output,
            self._partial,
            self._maxima,
            self._counters,
            shape.scale * 1.4426950408889634,  # log2(e): the kernels use exp2
            self._pool.page_rows,
            ctx.page_table.data.stride(0),
            BLOCK=32 if self._is_float32 else 64,
            SPLITS=splits,
            STAGES=2 if self._is_float32 else 3,
            GP=max(16, triton.next_power_of_2(self._group)),
            COUNTED=ctx.num_decode_device is not None,
            **self._constants(),
            **launch_options(2 if ctx.num_decode < 8 else 4, len(query)),
        )

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`."""
        blocks = self._blocks
        assert blocks is not None, "prepare comes first"
        shape, pool, rows = self._shape, self._pool, self._rows_per_block(len(query))
        tile = self._prefill_tile(rows)
        dim = shape.head_dim
        by_row = pool.data.view(-1, shape.num_kv_heads * dim)
        fits_tma = pool.page_size % tile.keys == 0 and dim >= 16 and dim & (dim - 1) == 0
        # TMA counts token rows in 32 bits.
        tma = is_hopper() and fits_tma and not self._is_float32 and len(by_row) < 2**31
        prefill[(shape.num_kv_heads, len(blocks))](
            query,
            pool.key_rows[layer],
            pool.value_rows[layer],
            TensorDescriptor.from_tensor(by_row, [tile.keys, dim]) if tma else by_row,
            layer * 2 * pool.page_size,
            ctx.page_table.data,
            ctx.slots_device,
            ctx.cu_seqlens_q_device,
            ctx.kv_lens_device,
            blocks,
            output,
            shape.scale * 1.4426950408889634,
            pool.page_rows,
            ctx.page_table.data.stride(0),
            BM=rows,
            BN=tile.keys,
            STAGES=tile.stages,
            TMA=tma,
            **self._constants(),
            **launch_options(tile.warps, len(query)),
        )

    def _prefill_tile(self, rows: int) -> _AttentionTile:
        if self._is_float32:
            return _AttentionTile(keys=32, stages=2, warps=4)
        return _TILES_BY_ROWS[rows]

    def _constants(self) -> dict[str, object]:
        dim = self._shape.head_dim
        return {
            "KV_HEADS": self._shape.num_kv_heads,
            "G": self._group,
            "D": dim,
            "DP": max(16, triton.next_power_of_2(dim)),  # the minimum for tensor cores
            "PAGE": self._pool.page_size,
            "PRECISION": "ieee" if self._is_float32 else "tf32",
        }

    def _num_splits(self, num_decode: int) -> int:
        tiles = num_decode * self._shape.num_kv_heads
        if tiles > _MAX_PROGRAMS // 2:
            return 1
        return min(_MAX_SPLITS, 1 << ((_MAX_PROGRAMS // tiles).bit_length() - 1))
