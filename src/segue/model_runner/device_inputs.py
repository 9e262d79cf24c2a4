"""One step's inputs on a CUDA device: one copy to addresses that never change, which captured graphs read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.attention.blocks import block_table
from segue.attention.context import Context
from segue.kvcache.pool import KVPool
from segue.model_runner.batch_state import BatchState
from segue.protocol.messages import StepPlan

if TYPE_CHECKING:
    from segue.attention.triton import TritonAttention

Whole = TypeVar("Whole", Tensor, NDArray[np.int32])

_ALIGNMENT = 4  # words
RING = 4  # steps whose buffers on the host may still be in use, and one to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes a step is run with, padding included."""

    tokens: int
    decode: int  # decode rows, at most
    sequences: int  # the dummy request not counted
    blocks: int  # of the attention backend, behind the decode rows
    logits: int  # rows that sample
    trims: bool = True  # the hidden states of other rows are not wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Views of one buffer, int32, for one shape."""

    token_rows: Tensor
    positions: Tensor
    rows: Tensor
    kv_lens: Tensor
    q_starts: Tensor
    num_decode: Tensor
    blocks: Tensor


class DeviceInputs:
    """Static buffers for the largest step.

    What the tail reads lies at the front, at the same place in every step; behind it the trunk's inputs, laid
    out by shape. Tokens that pad a step belong to one dummy request behind the others, which has a single
    key: whatever they compute goes to the scratch page and to the dummy row.
    """

    def __init__(
        self, state: BatchState, kv: KVPool, backend: TritonAttention, *, max_tokens: int, max_rows: int
    ) -> None:
        self._state = state
        self._kv = kv
        self._backend = backend
        self._dummy = state.page_table.dummy_row
        self._max_rows = max_rows
        self._front_sizes = [1, max_rows, max_rows, max_rows]
        self._front = sum(map(_aligned, self._front_sizes))
        most_blocks = max(self.most_blocks(tokens, max_rows) for tokens in range(1, max_tokens + 1))
        largest = StepShape(
            tokens=max_tokens, decode=max_rows, sequences=max_rows, blocks=most_blocks, logits=max_rows
        )
        size = self._front + max(sum(map(_aligned, _sizes(largest))), _aligned(3 * max_rows))
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)
        on_cuda = state.device.type == "cuda"
        self._staged = torch.zeros((RING, size), dtype=torch.int32, pin_memory=on_cuda)
        front = _cut(self._buffer, self._front_sizes)
        self.slot, self.sample_rows, self.sample_positions, self.logit_indices = front
        self.sample_rows.fill_(self._dummy)

    def most_blocks(self, tokens: int, sequences: int) -> int:
        """Blocks that `tokens` of so many sequences can take, however they are cut; the dummy's included."""
        return tokens // self._backend.queries_per_block(tokens) + min(tokens, sequences) + 1

    def num_blocks(self, plan: StepPlan) -> int:
        """Blocks that a plan takes without padding."""
        per_block = self._backend.queries_per_block(plan.num_tokens)
        return len(block_table(plan.lens, plan.num_decode, per_block))

    def load_decode(self, plan: StepPlan, size: int, slot: int) -> None:
        """Copy in a step of decode rows only, padded to `size`."""
        count, host = len(plan.rows), self._staged[slot].numpy()
        host[0] = slot
        step = host[self._front : self._front + 3 * size].reshape(3, size)
        step[0, count:], step[1, count:], step[2, count:] = self._dummy, 0, 1
        step[0, :count] = plan.rows
        step[1, :count] = plan.starts
        np.add(step[1, :count], 1, out=step[2, :count])
        self._copy(slot, self._front + 3 * size)

    def load(self, plan: StepPlan, shape: StepShape, slot: int) -> None:
        """Copy in any step, padded to `shape`."""
        host = self._staged[slot].numpy()
        lens, starts = np.array(plan.lens), np.array(plan.starts)
        kv_lens, ends = starts + lens, lens.cumsum()
        count, rows = int(ends[-1]), np.array(plan.rows)
        samples = np.array(plan.samples, dtype=np.bool_)
        per_block = self._backend.queries_per_block(shape.tokens)
        blocks = block_table([*plan.lens, shape.tokens - count], plan.num_decode, per_block)
        host[0] = slot
        _, sample_rows, sample_positions, logit_indices = _cut(host, self._front_sizes)
        # To the end, every time: the tail may be padded to more rows than the trunk.
        _fill(sample_rows, rows[samples], self._dummy)
        _fill(sample_positions, kv_lens[samples], 1)
        _fill(logit_indices, (ends - 1)[samples], 0)
        parts = dict(zip(_PARTS, _cut(host[self._front :], _sizes(shape)), strict=True))
        _fill(parts["token_rows"], rows.repeat(lens), self._dummy)
        _fill(parts["positions"], np.arange(count) + (kv_lens - ends).repeat(lens), 0)
        _fill(parts["rows"], rows, self._dummy)
        _fill(parts["kv_lens"], kv_lens, 1)
        parts["q_starts"][0] = 0
        _fill(parts["q_starts"][1:], ends, shape.tokens)
        parts["num_decode"][0] = plan.num_decode
        _fill(parts["blocks"], blocks.ravel(), -1)
        self._copy(slot, self._front + sum(map(_aligned, _sizes(shape))))

    def decode_rows(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows and sampled positions of a decode step."""
        rows, _, kv_lens = self._buffer[self._front :][: 3 * size].view(3, size)
        return rows, kv_lens

    def decode_context(self, size: int) -> Context:
        """The context of `size` decode rows."""
        rows, positions, kv_lens = self._buffer[self._front :][: 3 * size].view(3, size)
        ids, kv_rows = self._look_up(rows, positions)
        return Context(
            input_ids=ids,
            positions=positions,
            kv_rows=kv_rows,
            wanted=None,
            rows=(),
            q_lens=(),
            kv_lens=(),
            rows_device=rows,
            kv_lens_device=kv_lens,
            q_starts_device=self._buffer[:0],
            num_decode=size,
            page_table=self._state.page_table,
            kv=self._kv,
            backend=self._backend,
        )

    def context(self, shape: StepShape) -> Context:
        """The context of any step of a shape."""
        step = _Step(**dict(zip(_PARTS, _cut(self._buffer[self._front :], _sizes(shape)), strict=True)))
        ids, kv_rows = self._look_up(step.token_rows, step.positions)
        return replace(
            self.decode_context(0),
            input_ids=ids,
            positions=step.positions,
            kv_rows=kv_rows,
            wanted=self.logit_indices[: shape.logits] if shape.trims else None,
            rows_device=step.rows,
            kv_lens_device=step.kv_lens,
            q_starts_device=step.q_starts,
            num_decode=shape.decode,
            num_decode_device=step.num_decode,
            blocks=step.blocks.view(-1, 2) if shape.blocks else None,
        )

    def _look_up(self, token_rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        from segue.kernels.cuda.lookup import look_up

        state = self._state
        return look_up(
            token_rows,
            positions,
            state.token_pool.data,
            state.page_table.data,
            page_size=self._kv.page_size,
            page_rows=self._kv.page_rows,
        )

    def _copy(self, slot: int, size: int) -> None:
        self._buffer[:size].copy_(self._staged[slot, :size], non_blocking=True)


_PARTS = ("token_rows", "positions", "rows", "kv_lens", "q_starts", "num_decode", "blocks")


def _sizes(shape: StepShape) -> list[int]:
    """Of the parts, in order; the dummy request is one more sequence."""
    rows = shape.sequences + 1
    return [shape.tokens, shape.tokens, rows, rows, rows + 1, 1, 2 * shape.blocks]


def _cut(whole: Whole, sizes: list[int]) -> list[Whole]:
    """Slices one behind the other, each at a multiple of 16 bytes: Triton compiles by alignment."""
    starts = np.cumsum([0, *map(_aligned, sizes)]).tolist()
    assert starts[-1] <= len(whole), (starts, len(whole))
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _fill(target: NDArray[np.int32], values: NDArray[Any], filler: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = filler
