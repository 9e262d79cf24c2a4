"""Attention on CUDA devices, in Triton, over the paged cache.

The rows of a tile are the query heads that share a key-value head (packed GQA), so each key and value is read
once for all of them. Decode splits a sequence's keys: of few sequences all alike, by the size of the batch;
of many only those that are much longer than the others, as the kernel `plan_decode` plans. The program that
ends last combines the splits' partial results in a fixed order. Prefill runs one program per block of
queries; a table maps blocks to sequences.

Batch-invariant attention divides a sequence's keys into spans of `_SPAN`, as the kernel `attend` explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.attention.base import AttentionShape, Context, PagedBackend, query_blocks
from segue.attention.tiles import choose_tiles
from segue.kernels.activations import TokenQKV
from segue.kernels.triton.attention import attend, decode, plan_decode
from segue.kernels.triton.launch import device_facts, launch_options
from segue.kernels.triton.token_attention import attend_token
from segue.kvcache.pool import KVPool
from segue.sizes import ceil_div, next_power_of_2

_MAX_SPLITS = 64
_PLANNED_SPLITS = 32  # maximum per row of a planned batch
_MIN_KEYS = 256  # a split of a planned batch has at least as many keys
_ROWS_PER_PLANNER = 8  # rows that a program of `plan_decode` plans
_FEW_ROWS = 8  # fewer rows take fewer warps
_STAGES, _WARPS = 2, 4  # of prefill
_MAX_QUERIES = 4096  # numbers of a group's queries that fit the registers of a program of `attend_token`
_SPAN = 512  # keys per span of batch-invariant attention
_LOG2_E = 1.4426950408889634  # the kernels use exp2


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a step's decode rows are divided among programs, and what the programs of a row share."""

    items: Tensor  # int32 [items, 4], see `plan_decode`
    counters: Tensor  # int32 [rows * key-value heads]
    partial: Tensor  # float32, the weighted values of each item and query head
    maxima: Tensor  # float32, their maxima and sums


class TritonAttention(PagedBackend):
    """Decode and prefill by a kernel each.

    `_group` is the number of query heads per key-value head. `_partial` and `_maxima` are buffers for what
    a sequence's splits leave for the program that combines them. `_blocks` is the table of query blocks,
    and `_plan` the plan of a step with many decode rows.
    """

    _span: int | None = None  # keys per span; None: not batch-invariant, and there are no spans

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        device = device_facts()
        self._shape, self._pool, dim = shape, pool, shape.head_dim
        self._max_programs = device.max_split_programs  # that split the keys of a small decode batch
        self._group = shape.num_heads // shape.num_kv_heads
        # Per split and query head: the weighted values in `_partial`, the maximum and the sum in `_maxima`.
        self._partial = pool.data.new_empty(self._max_programs * self._group * dim, dtype=torch.float32)
        self._maxima = pool.data.new_empty(self._max_programs * self._group * 2, dtype=torch.float32)
        self._max_spans = 0  # of a sequence; only batch-invariant attention has any
        self._tiles = tiles = choose_tiles(shape, pool.dtype, device, fp8=pool.is_fp8)
        is_float32 = pool.dtype == torch.float32
        self._decode_stages = 2 if is_float32 else 3
        self._decode_words = pool.is_fp8 and dim % 4 == 0 and dim >= 64
        rows = pool.data.view(-1, shape.num_kv_heads * dim)
        fits_tma = pool.page_size % tiles.keys == 0 and dim >= 16 and dim & (dim - 1) == 0
        # TMA counts token rows in 32 bits.
        tma = device.has_tma and fits_tma and not is_float32 and len(rows) < 2**31
        self._rows = TensorDescriptor.from_tensor(rows, [tiles.keys, dim]) if tma else None
        # The arguments that are the same in every launch of both kernels.
        self._constants: dict[str, object] = {
            "counters": pool.data.new_zeros(self._max_programs, dtype=torch.int32),
            "page_rows": pool.page_rows,
            "KV_HEADS": shape.num_kv_heads,
            "G": self._group,
            "D": dim,
            "DP": max(16, next_power_of_2(dim)),  # the minimum for tensor cores
            "PAGE": pool.page_size,
            "PRECISION": "ieee" if is_float32 else "tf32",
        }
        self._blocks: Tensor | None = None
        self._plan: _Plan | None = None

    def queries_per_block(self, tokens: int) -> int:
        """Returns how many query tokens a prefill program takes: fewer in small steps, for more programs."""
        return self._rows_per_block(tokens) // self._group

    def _rows_per_block(self, tokens: int) -> int:
        """Returns the rows of a prefill tile: a query token has one per query head of the group.

        It is the smallest size that the group fits in and that gives fewer than about `2 * _max_programs`
        programs, or else the largest size.
        """
        rows = tokens * self._shape.num_heads
        return min(
            self._tiles.rows,
            next(
                (size for size in (32, 64) if rows < 2 * self._max_programs * size and size > self._group),
                128,
            ),
        )

    def row_steps(self, max_rows: int) -> set[int]:
        """See `PagedBackend.row_steps`: the sizes of prefill tiles, splits, warps and tables of plans."""
        shape = self._shape
        tiles = {(2 * self._max_programs * size - 1) // shape.num_heads for size in (32, 64)}
        splits = {(self._max_programs >> power) // shape.num_kv_heads for power in range(1, 9)}
        tables = {1 << power for power in range(8, max_rows.bit_length())}
        return tiles | splits | tables | {_FEW_ROWS - 1}

    def prepare(self, ctx: Context) -> None:
        """Lay out the blocks of the sequences after the decode rows, unless the context has them."""
        self._blocks = ctx.blocks
        if ctx.blocks is None and ctx.has_prefill:
            table = query_blocks(ctx.q_lens, ctx.num_decode, self.queries_per_block(len(ctx.positions)))
            self._blocks = torch.from_numpy(table).to(ctx.positions.device)
        plans = self._span is None and self.serves_decode and ctx.num_decode
        self._plan = self._planned(ctx) if plans else None

    def _planned(self, ctx: Context) -> _Plan | None:
        """Returns how the keys of many decode rows are divided; None: there are few, all divided alike."""
        rows, heads = ctx.num_decode, self._shape.num_kv_heads
        if self._num_splits(rows, _MAX_SPLITS) > 1:
            return None
        # More of them would divide long rows more finely, but unused ones cost short rows time.
        items = rows + max(self._max_programs // 2 // heads, rows // 2, 1)
        parts = items * heads * self._group
        new = self._partial.new_empty
        plan = _Plan(
            items=new((items, 4), dtype=torch.int32),
            counters=new(rows * heads, dtype=torch.int32),
            partial=new(parts * self._shape.head_dim),
            maxima=new(parts * 2),
        )
        plan_decode[(ceil_div(rows, _ROWS_PER_PLANNER),)](
            kv_lens=ctx.kv_lens_device,
            slots=ctx.slots_device,
            num_decode=ctx.num_decode_device,
            items=plan.items,
            counters=plan.counters,
            rows=rows,
            max_items=items,
            MAX_SPLITS=_PLANNED_SPLITS,
            MIN_KEYS=_MIN_KEYS,
            HEADS=heads,
            ROWS=_ROWS_PER_PLANNER,
            ALL=max(256, next_power_of_2(rows)),
        )
        return plan

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`. Programs: one per key-value head, sequence and split of its keys."""
        heads, plan, arguments = self._shape.num_kv_heads, self._plan, self._cache_arguments(layer, ctx)
        if plan:
            splits, items, num_decode = _PLANNED_SPLITS, plan.items, None  # the plan knows the number
            grid: tuple[int, ...] = heads, len(items)
            arguments.update(counters=plan.counters, partial=plan.partial, maxima=plan.maxima)
        else:
            splits, items = self._num_splits(ctx.num_decode, _MAX_SPLITS), None
            grid, num_decode = (splits, heads, ctx.num_decode), ctx.num_decode_device
        decode[grid](
            query=query,
            output=output,
            num_decode=num_decode,
            items=items,
            BLOCK=self._tiles.decode_keys,
            SPLITS=splits,
            STAGES=self._decode_stages,
            WORDS=self._decode_words,
            GP=max(16, next_power_of_2(self._group)),
            **arguments,
            **launch_options(2 if ctx.num_decode < _FEW_ROWS else 4, len(query)),
        )

    def attend_token(self, token: TokenQKV, layer: int, ctx: Context) -> Tensor | None:
        """See `PagedBackend.attend_token`."""
        shape, pool = self._shape, self._pool
        dim = shape.head_dim
        # Tiles in float32 do not fit the registers, nor do those of so many queries.
        fits = pool.dtype != torch.float32 and self._group * dim <= _MAX_QUERIES
        if self._span is not None or not fits or dim < 16 or dim & (dim - 1):
            return None
        arguments = self._cache_arguments(layer, ctx)
        del arguments["DP"]  # which is D
        output = token.qkv.new_empty((1, shape.num_heads, shape.head_dim), dtype=pool.dtype)
        attend_token(
            token,
            output=output,
            scales=pool.scales[layer] if pool.is_fp8 else None,
            splits=self._num_splits(1, _MAX_SPLITS),
            num_decode=ctx.num_decode_device,
            num_kv_heads=shape.num_kv_heads,
            arguments=arguments,
        )
        return output

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`. Programs: one per key-value head and query block."""
        assert self._blocks is not None, "prepare comes first"
        self._attend(query, output, layer, ctx, self._blocks)

    def _attend(
        self, query: Tensor, output: Tensor, layer: int, ctx: Context, blocks: Tensor | None, splits: int = 1
    ) -> None:
        """Launch `attend` for the query `blocks`, or with None for the decode rows, one query per block.

        `splits` is the number of programs that share a block's spans; more than one only without `blocks`.
        """
        # Batch-invariant attention is launched alike in every step, and without fused multiply-adds.
        options = launch_options(_WARPS, None if self._span else len(query))
        if self._span:
            options["enable_fp_fusion"] = False
        count = ctx.num_decode if blocks is None else len(blocks)
        attend[(self._shape.num_kv_heads, count, splits)](
            query=query,
            output=output,
            pool=self._rows,
            layer_row=layer * 2 * self._pool.page_size,
            cu_seqlens_q=ctx.cu_seqlens_q_device,
            blocks=blocks,
            num_decode=ctx.num_decode_device if blocks is None else None,
            max_spans=self._max_spans,
            BM=self._rows_per_block(len(query)),
            BN=self._tiles.keys,
            SPAN=self._span,
            STAGES=_STAGES,
            SPLITS=splits,
            **self._cache_arguments(layer, ctx),
            **options,
        )

    def _cache_arguments(self, layer: int, ctx: Context) -> dict[str, object]:
        """Returns the arguments of both kernels that describe the cache and where splits meet."""
        key_scale, value_scale = self._pool.scales[layer]
        return {
            "scale": self._shape.scale * _LOG2_E * key_scale,
            "value_scale": value_scale if self._pool.is_fp8 else None,
            "keys": self._pool.key_rows[layer],
            "values": self._pool.value_rows[layer],
            "page_table": ctx.page_table.data,
            "table_stride": ctx.page_table.data.stride(0),
            "slots": ctx.slots_device,
            "kv_lens": ctx.kv_lens_device,
            "partial": self._partial,
            "maxima": self._maxima,
            **self._constants,
        }

    def _num_splits(self, num_decode: int, max_splits: int) -> int:
        """Returns how many programs share the keys of a decode row and key-value head, a power of two.

        It is more than one where the batch alone would leave much of the device idle.
        """
        tiles = num_decode * self._shape.num_kv_heads
        if tiles > self._max_programs // 2:
            return 1
        return min(max_splits, 1 << ((self._max_programs // tiles).bit_length() - 1))


class TritonInvariantAttention(TritonAttention):
    """Batch-invariant attention, for `--deterministic`: a query's bits depend only on it and its keys.

    Decode and prefill are by one kernel, `segue.kernels.triton.attention.attend`, which explains the method:
    decode is prefill of one query.
    """

    _span = _SPAN

    def _rows_per_block(self, tokens: int) -> int:
        return min(64, self._tiles.rows)  # in every step: a query's bits do not depend on the step's size

    def prepare(self, ctx: Context) -> None:
        """Lay out the blocks, and make buffers for as many spans as a sequence can have."""
        super().prepare(ctx)
        spans = ceil_div(ctx.page_table.data.shape[1] * self._pool.page_size, _SPAN)
        if spans > self._max_spans:
            rows = self._max_programs // 2 * spans * self._group
            self._max_spans = spans
            self._partial = self._partial.new_empty(rows * self._shape.head_dim)
            self._maxima = self._maxima.new_empty(rows * 2)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`. The splits share a row's spans, so there are not many more of them."""
        splits = self._num_splits(ctx.num_decode, next_power_of_2(self._max_spans))
        self._attend(query, output, layer, ctx, blocks=None, splits=splits)
