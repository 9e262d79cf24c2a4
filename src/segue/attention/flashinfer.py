"""FlashInfer's kernels, from an optional package: `pip install 'segue[flashinfer]'`.

They read the pool in place. Each half of a step is one launch per layer of FlashInfer's prefill kernel, which
has the method of FlashAttention-2 and runs from Ampere on: decode is prefill of one query. nvcc compiles the
kernel when a backend is made, before an engine is ready; FlashInfer keeps it in `~/.cache/flashinfer`.

The host plans what each program works on from the lengths of the step (`plan`), and copies plans and lengths
to the device before the step. A captured step holds the addresses and sizes of its plans. These depend on the
shape of the step alone, since all steps are planned in FlashInfer's mode for CUDA graphs. Eager steps are as
well, so that one of the same shape has the bits of a replay.

In that mode there are more programs than work. FlashInfer marks those without work if keys are split. If not,
they work on what the plan's memory had before: zeros, which are the first tile of the first sequence. So both
halves begin with a sequence that is empty.
"""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.attention.base import AttentionShape, Context, PagedBackend, StepLengths
from segue.extras import FLASHINFER
from segue.kernels import ops
from segue.kvcache.pool import KVPool
from segue.logs import logger
from segue.memory import backing
from segue.sizes import ceil_div, round_up

Buffer = TypeVar("Buffer", Tensor, NDArray[np.int32])

_VERSION = "0.6.15"  # whose functions have the arguments that `_Half` gives them, .post1 included
_WORKSPACE = 128 << 20  # bytes for the partial results of split keys, as FlashInfer recommends
_PLAN = 1 << 20  # bytes of a plan; FlashInfer says so if a step needs more
MOST_REQUESTS = 10_000  # of a step
_LENGTHS = 1 << 16  # int32 numbers, enough for the lengths of so many sequences
_RING = 4  # plans on the host: one per step in flight, and one to spare
_PROGRAMS_PER_SM = 2  # FlashInfer splits keys up to so many
_NO_POSITIONS, _FULL, _CAUSAL, _NHD = 0, 0, 1, 0  # FlashInfer's codes


def why_not() -> str:
    """Return why FlashInfer, which is installed, cannot be used on this machine: one clause, or ""."""
    import flashinfer

    if flashinfer.__version__.partition(".post")[0] != _VERSION:
        return (
            f"flashinfer-python {flashinfer.__version__} is installed, whose plans may have other arguments "
            f"than those of {_VERSION}; {FLASHINFER.remedy}"
        )
    from flashinfer.jit.cpp_ext import get_cuda_path
    from flashinfer.jit.env import has_flashinfer_jit_cache

    if has_flashinfer_jit_cache():  # a package with compiled kernels
        return ""
    try:
        has_nvcc = shutil.which(f"{get_cuda_path()}/bin/nvcc") is not None
    except RuntimeError:
        has_nvcc = False
    if not has_nvcc:
        return (
            "it compiles its kernels, and there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda; install "
            "the CUDA toolkit of torch's version of CUDA"
        )
    if shutil.which("ninja") is None:
        return (
            "it compiles its kernels by ninja, which is not in PATH; add its directory to PATH, or install it"
        )
    return ""


class _Shape(NamedTuple):
    """The shape of a step, with its padding."""

    max_decode: int
    sequences: int
    tokens: int
    has_prefill: bool


class _Lengths(NamedTuple, Generic[Buffer]):
    """The lengths of a step of S sequences in the form of the kernels, on the device or the host.

    `pages` has the index of each sequence's first page in the list of all pages, and the number of all. Each
    half has first tokens (`starts`) and pages of its own, in which the sequences of the other half are empty.
    FlashInfer writes outputs from the first row on: so in prefill the second sequence has the tokens of all
    decode rows, but no keys. It writes zeros there, before decode writes its outputs.
    """

    pages: Buffer  # [S + 1]
    last_pages: Buffer  # [S + 1], the number of tokens in each sequence's last page
    decode_starts: Buffer  # [max_decode + 2]; sequences behind the decode rows have no tokens
    decode_pages: Buffer  # [max_decode + 2]
    prefill_starts: Buffer  # [S + 2]
    prefill_pages: Buffer  # [S + 2]

    @classmethod
    def sizes(cls, shape: _Shape) -> list[int]:
        """Return the sizes of the views."""
        count, rows = shape.sequences, shape.max_decode
        return [count + 1, count + 1, rows + 2, rows + 2, count + 2, count + 2]

    @classmethod
    def end(cls, shape: _Shape) -> int:
        """Return the numbers that the views take together; each is aligned to 16 bytes."""
        return sum(round_up(size, 4) for size in cls.sizes(shape))

    @classmethod
    def of(cls, buffer: Buffer, shape: _Shape) -> _Lengths[Buffer]:
        """Return the views of an int32 buffer in which a step of `shape` has its lengths."""
        assert cls.end(shape) <= len(buffer), (shape, len(buffer))
        views, start = [], 0
        for size in cls.sizes(shape):
            views.append(buffer[start : start + size])
            start += round_up(size, 4)
        return cls(*views)


def _fill(host: _Lengths[NDArray[np.int32]], lengths: StepLengths, page_size: int) -> None:
    """Write the lengths of a step in the form of the kernels."""
    rows, num_decode, starts = lengths.max_decode, lengths.num_decode, lengths.cu_seqlens_q
    counts = -(-lengths.kv_lens // page_size)
    host.last_pages[0] = 0
    host.last_pages[1:] = lengths.kv_lens - (counts - 1) * page_size
    host.pages[0] = 0
    np.cumsum(counts, dtype=np.int32, out=host.pages[1:])
    decode_end = host.pages[num_decode]
    host.decode_starts[0] = host.decode_pages[0] = 0
    np.minimum(starts[: rows + 1], num_decode, out=host.decode_starts[1:])
    np.minimum(host.pages[: rows + 1], decode_end, out=host.decode_pages[1:])
    host.prefill_starts[:2] = 0
    np.maximum(starts[1:], num_decode, out=host.prefill_starts[2:])
    host.prefill_pages[0] = decode_end
    np.maximum(host.pages, decode_end, out=host.prefill_pages[1:])


class _Staged:
    """The plans and the lengths of one step on the host, which are copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self.plans = [backing.pinned((_PLAN,), torch.uint8, device) for _ in range(2)]
        self.lengths = backing.pinned((_LENGTHS,), torch.int32, device)
        self.copied = torch.Event(device) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until the copies of the last step that was staged here are done."""
        if self.copied is not None:
            self.copied.synchronize()

    def mark(self) -> None:
        """Note that all copies have been launched."""
        if self.copied is not None:
            self.copied.record()


@dataclass(eq=False, kw_only=True)
class _Half:
    """Decode or prefill: how FlashInfer plans it and launches it."""

    module: Any  # FlashInfer's compiled functions
    shape: AttentionShape
    page_size: int
    programs: int  # about as many as the device runs at a time
    workspace: Tensor
    plan_buffer: Tensor  # uint8, on the device
    mask: int
    info: Any = None  # of the last plan: the sizes and offsets that a launch needs

    def plan(
        self, staged: Tensor, starts: NDArray[np.int32], pages: NDArray[np.int32], max_tokens: int
    ) -> None:
        """Plan a step, and launch the copy of the plan to the device.

        `staged` is pinned memory for the plan. See `_Lengths` for `starts` and `pages`, and `max_tokens` is
        the most tokens of this half that the shape of the step allows.
        """
        shape, count = self.shape, len(starts) - 1
        max_tokens = max(max_tokens, count - 1)  # FlashInfer takes fewer for very many
        tile, tiles = self._tiles(max_tokens, count)
        partials = 4 * shape.num_heads * tiles * tile * (shape.head_dim + 1) + 64  # bytes
        staged[: 12 * round_up(tiles, 4)].zero_()  # three numbers per program
        self.info = self.module.plan(
            self.workspace,
            self.plan_buffer,
            staged,
            torch.from_numpy(starts),
            torch.from_numpy(pages),
            torch.from_numpy(pages),  # the numbers of keys, which this kernel's plan does not read
            max_tokens,
            count,
            shape.num_heads,
            shape.num_kv_heads,
            self.page_size,
            True,  # the mode for CUDA graphs
            shape.head_dim,
            shape.head_dim,
            self.mask == _CAUSAL,
            -1,  # no sliding window
            -1,  # no fixed size of splits
            partials > _WORKSPACE,  # whether not to split keys
            0,  # no programs of another kernel at the same time
        )

    def _tiles(self, max_tokens: int, count: int) -> tuple[int, int]:
        """Return the rows of FlashInfer's tile for a shape, and the most tiles and splits that a step has."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        rows = (max_tokens - count + 1) * group  # if all other sequences have one token
        tile = 16 if rows <= 16 else 64 if rows <= 64 or shape.head_dim >= 256 else 128
        tiles = ceil_div(max_tokens * group, tile) + count - 1
        return tile, max(self.programs // shape.num_kv_heads, tiles)

    def run(
        self,
        query: Tensor,
        output: Tensor,
        cache: tuple[Tensor, Tensor],
        starts: Tensor,
        pages: Tensor,
        last_pages: Tensor,
        page_list: Tensor,
        *,
        pdl: bool = False,
    ) -> None:
        """Attend into `output`, with `cache`, the keys and values of one layer, and the lengths of a step.

        With `pdl` the kernel starts before the one before it has ended, and then waits for it. Programs
        without work do not wait. So only a step that has work may use it: if no program waited, a kernel
        behind this one could start without those before it.
        """
        self.module.paged_run(
            float_workspace_buffer=self.workspace,
            int_workspace_buffer=self.plan_buffer,
            plan_info_vec=self.info,
            q=query,
            paged_k_cache=cache[0],
            paged_v_cache=cache[1],
            qo_indptr=starts,
            paged_kv_indptr=pages,
            paged_kv_indices=page_list,
            paged_kv_last_page_len=last_pages[: len(pages) - 1],
            o=output,
            maybe_lse=None,
            mask_mode=self.mask,
            layout=_NHD,
            window_left=-1,
            enable_pdl=pdl,
            maybe_custom_mask=None,
            maybe_mask_indptr=None,
            maybe_alibi_slopes=None,
            maybe_prefix_len_ptr=None,
            maybe_token_pos_in_items_ptr=None,
            maybe_max_item_len_ptr=None,
            logits_soft_cap=0.0,
            sm_scale=self.shape.scale,
            scale_q=None,
            scale_k=None,
            scale_v=None,
            rope_scale=1.0,
            rope_theta=1e4,
            token_pos_in_items_len=0,
            workspace_size=_WORKSPACE,
        )


class FlashInferAttention(PagedBackend):
    """Decode and prefill by FlashInfer's prefill kernel on one pool."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`; compiles the kernel if need be."""
        from flashinfer.jit.attention import gen_batch_prefill_module
        from flashinfer.prefill import get_batch_prefill_module

        data, dtype, dim = pool.data, pool.data.dtype, shape.head_dim
        # The kernel adds no positions, and has no sliding window, no cap and no sums in float16.
        options = _NO_POSITIONS, False, False, False
        variant = "fa2", dtype, dtype, dtype, torch.int32, dim, dim, *options
        if not gen_batch_prefill_module(*variant).is_compiled:
            logger.info("nvcc compiles FlashInfer's kernel for heads of %d in %s: up to a minute", dim, dtype)
        num_sms, self._has_pdl = _facts(data.device)
        half = partial(
            _Half,
            module=get_batch_prefill_module(*variant),
            shape=shape,
            page_size=pool.page_size,
            programs=_PROGRAMS_PER_SM * num_sms,
            workspace=data.new_empty(_WORKSPACE, dtype=torch.uint8),
        )
        self._decode, self._prefill = (
            half(mask=mask, plan_buffer=data.new_empty(_PLAN, dtype=torch.uint8)) for mask in (_FULL, _CAUSAL)
        )
        self._buffer = data.new_empty(_LENGTHS, dtype=torch.int32)  # of the step's lengths
        self.num_bytes = _WORKSPACE + 2 * _PLAN + self._buffer.nbytes
        self._page_size = pool.page_size
        self._cache = [(data[:, layer, 0], data[:, layer, 1]) for layer in range(pool.num_layers)]
        self._staged = deque(_Staged(data.device) for _ in range(_RING))
        self._planned: _Shape | None = None  # the shape of the last plan
        self._lengths: _Lengths[Tensor] | None = None
        self._page_list = self._buffer

    def queries_per_block(self, tokens: int) -> int:
        """Returns `tokens`: one block per sequence, since FlashInfer reads no blocks."""
        return tokens

    def plan(self, lengths: StepLengths) -> None:
        """See `PagedBackend.plan`: plans both halves, and copies plans and lengths to the device."""
        shape = _Shape(lengths.max_decode, len(lengths.kv_lens), lengths.tokens, lengths.has_prefill)
        staged = self._staged[0]
        self._staged.rotate(-1)
        staged.wait()
        host = _Lengths.of(staged.lengths.numpy(), shape)
        _fill(host, lengths, self._page_size)
        if shape.max_decode and self.serves_decode:
            self._decode.plan(staged.plans[0], host.decode_starts, host.decode_pages, shape.max_decode)
        if shape.has_prefill and self.serves_prefill:
            self._prefill.plan(staged.plans[1], host.prefill_starts, host.prefill_pages, shape.tokens)
        used = slice(_Lengths.end(shape))
        self._buffer[used].copy_(staged.lengths[used], non_blocking=True)
        staged.mark()
        self._planned = shape

    def prepare(self, ctx: Context) -> None:
        """Make the list of pages. Steps of the runner have been planned; other ones are planned here.

        A step that is captured has no lengths. It runs eagerly before, and is planned then, as a step without
        work: the capture itself must not plan, because the graph would hold the copies.
        """
        shape = _Shape(ctx.num_decode, len(ctx.slots_device), len(ctx.positions), ctx.has_prefill)
        if ctx.slots or shape != self._planned:
            self.plan(_lengths_of(ctx, shape))
        self._lengths = _Lengths.of(self._buffer, shape)
        self._page_list = ops.list_pages(ctx.page_table.data, ctx.slots_device, self._lengths.pages)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`."""
        lengths = self._lengths
        assert lengths is not None, "prepare comes first"
        step = lengths.decode_starts, lengths.decode_pages, lengths.last_pages, self._page_list
        pdl = self._has_pdl and not ctx.has_prefill  # else there may be no decode row
        self._decode.run(query, output, self._cache[layer], *step, pdl=pdl)

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`."""
        lengths = self._lengths
        assert lengths is not None, "prepare comes first"
        step = lengths.prefill_starts, lengths.prefill_pages, lengths.last_pages, self._page_list
        self._prefill.run(query, output, self._cache[layer], *step)


def _lengths_of(ctx: Context, shape: _Shape) -> StepLengths:
    """Return the lengths of a step by its host lists; without them those of a step without work."""
    kv_lens = np.zeros(shape.sequences, dtype=np.int32)
    starts = np.zeros(shape.sequences + 1, dtype=np.int32)
    if count := len(ctx.slots):  # there may be more sequences on the device, which are empty
        kv_lens[:count] = ctx.kv_lens
        np.cumsum(ctx.q_lens, dtype=np.int32, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
    return StepLengths(
        kv_lens=kv_lens,
        cu_seqlens_q=starts,
        tokens=shape.tokens,
        num_decode=shape.max_decode if ctx.slots else 0,
        max_decode=shape.max_decode,
        has_prefill=shape.has_prefill,
    )


def _facts(device: torch.device) -> tuple[int, bool]:
    """Return a device's number of streaming multiprocessors, and whether it has PDL. A host has neither."""
    if device.type != "cuda":
        return 1, False
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.major >= 9
