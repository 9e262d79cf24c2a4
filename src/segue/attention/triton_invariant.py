"""Batch-invariant attention on CUDA devices, for `--deterministic`.

`segue.kernels.triton.batch_invariant_attention` explains the method.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.attention.hybrid import prefill_and_decode
from segue.attention.prefill_grid import GridPrefill
from segue.attention.query_blocks import block_table
from segue.kernels.triton.batch_invariant_attention import attend
from segue.kernels.triton.launch import LATE, is_hopper
from segue.kvcache.pool import KVPool

_BLOCK_M, _BLOCK_N, _SPAN = 64, 64, 512  # query heads per tile, keys per block, keys per span
_STAGES, _WARPS = 2, 4
_MAX_PROGRAMS = 256  # maximum of programs that split the spans of a small decode batch


class TritonInvariantAttention(GridPrefill):
    """Decode and prefill by one kernel: decode is prefill of one query."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        self._shape, self._pool = shape, pool
        self._group = shape.num_heads // shape.num_kv_heads
        self._counters = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=pool.data.device)
        self._partial = self._maxima = pool.data.new_empty(0, dtype=torch.float32)
        self._max_spans = 0
        self._blocks: Tensor | None = None

    def queries_per_block(self, tokens: int) -> int:
        """Returns how many query tokens one program takes, which is the same in every step."""
        return _BLOCK_M // self._group

    def prepare(self, ctx: Context) -> None:
        """Lay out the blocks of the sequences after the decode rows, unless the context has them."""
        self._blocks = ctx.blocks
        if ctx.blocks is None and ctx.has_prefill:
            table = block_table(ctx.q_lens, ctx.num_decode, self.queries_per_block(len(ctx.positions)))
            self._blocks = torch.from_numpy(table).to(ctx.positions.device)
        spans = triton.cdiv(ctx.page_table.data.shape[1] * self._pool.page_size, _SPAN)
        if spans > self._max_spans:
            rows = _MAX_PROGRAMS // 2 * spans * self._group
            self._max_spans = spans
            self._partial = self._partial.new_empty(rows * self._shape.head_dim)
            self._maxima = self._maxima.new_empty(rows * 2)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        return prefill_and_decode(self, self, query, layer, ctx)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`."""
        self._attend(query, output, layer, ctx, None)

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`."""
        assert self._blocks is not None, "prepare comes first"
        self._attend(query, output, layer, ctx, self._blocks)

    def _attend(self, query: Tensor, output: Tensor, layer: int, ctx: Context, blocks: Tensor | None) -> None:
        shape, pool, dim = self._shape, self._pool, self._shape.head_dim
        by_row = pool.data.view(-1, shape.num_kv_heads * dim)
        fits_tma = pool.page_size % _BLOCK_N == 0 and dim >= 16 and dim & (dim - 1) == 0
        # TMA counts token rows in 32 bits.
        tma = is_hopper() and fits_tma and len(by_row) < 2**31
        splits = self._num_splits(ctx.num_decode) if blocks is None else 1
        attend[(shape.num_kv_heads, ctx.num_decode if blocks is None else len(blocks), splits)](
            query,
            pool.key_rows[layer],
            pool.value_rows[layer],
            TensorDescriptor.from_tensor(by_row, [_BLOCK_N, dim]) if tma else by_row,
            layer * 2 * pool.page_size,
            ctx.page_table.data,
            ctx.slots_device,
            ctx.kv_lens_device if blocks is None else ctx.cu_seqlens_q_device,
            ctx.kv_lens_device,
            ctx.kv_lens_device if blocks is None else blocks,
            ctx.kv_lens_device if ctx.num_decode_device is None else ctx.num_decode_device,
            output,
            self._partial,
            self._maxima,
            self._counters,
            self._max_spans,
            shape.scale * 1.4426950408889634,  # log2(e): the kernel uses exp2
            pool.page_rows,
            ctx.page_table.data.stride(0),
            KV_HEADS=shape.num_kv_heads,
            G=self._group,
            D=dim,
            DP=max(16, triton.next_power_of_2(dim)),  # the minimum for tensor cores
            PAGE=pool.page_size,
            BM=_BLOCK_M,
            BN=_BLOCK_N,
            SPAN=_SPAN,
            STAGES=_STAGES,
            TMA=tma,
            DECODE=blocks is None,
            COUNTED=blocks is None and ctx.num_decode_device is not None,
            SPLITS=splits,
            PDL=LATE.value if is_hopper() else 0,
            launch_pdl=is_hopper(),
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    def _num_splits(self, num_decode: int) -> int:
        """Returns how many programs share the spans of a decode row: more than one in small batches."""
        tiles = num_decode * self._shape.num_kv_heads
        if tiles > _MAX_PROGRAMS // 2:
            return 1
        max_splits = 1 << ((_MAX_PROGRAMS // tiles).bit_length() - 1)
        return min(max_splits, 1 << (self._max_spans - 1).bit_length())
