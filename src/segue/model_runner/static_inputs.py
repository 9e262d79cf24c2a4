"""One step's inputs on a CUDA device: one copy to addresses that never change, which captured graphs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.attention.base import PagedBackend
from segue.attention.context import Context
from segue.attention.query_blocks import block_table
from segue.kvcache.pool import KVPool
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState

Whole = TypeVar("Whole", Tensor, NDArray[np.int32])

_ALIGNMENT = 4  # words
RING = 4  # steps whose buffers on the host may still be in use, and one to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes a step is run with, padding included."""

    tokens: int
    decode: int  # decode sequences, at most
    sequences: int  # the dummy request not counted
    blocks: int  # of the attention backend, behind the decode slots
    logits: int  # slots that sample
    trims: bool = True  # the hidden states of other slots are not wanted
    prompt_len: int = (
        0  # tokens that each prompt is padded to, at its front; 0: prompts follow each other unpadded
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Views of one buffer, int32, for one shape."""

    token_slots: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens_q: Tensor
    num_decode: Tensor
    blocks: Tensor | None


class DeviceInputs:
    """Static buffers for the largest step.

    What sampling reads lies at the front, at the same place in every step; behind it the forward graph's
    inputs, laid out by shape. Tokens that pad a step belong to one dummy request behind the others, which has
    a single key: whatever they compute goes to the scratch page and to the dummy slot.
    """

    def __init__(
        self, state: BatchState, kv: KVPool, backend: PagedBackend, *, max_tokens: int, max_slots: int
    ) -> None:
        self._state = state
        self._kv = kv
        self._backend = backend
        self._dummy = state.page_table.dummy_slot
        self._max_slots = max_slots
        self._front_sizes = [3, max_slots, max_slots, max_slots]
        self._front = sum(map(_aligned, self._front_sizes))
        most_blocks = max(self.most_blocks(tokens, max_slots) for tokens in range(1, max_tokens + 1))
        largest = StepShape(
            tokens=max_tokens, decode=max_slots, sequences=max_slots, blocks=most_blocks, logits=max_slots
        )
        size = self._front + max(sum(map(_aligned, _sizes(largest))), 3 * _aligned(max_slots))
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)
        on_cuda = state.device.type == "cuda"
        self._staged = torch.zeros((RING, size), dtype=torch.int32, pin_memory=on_cuda)
        front = _cut(self._buffer, self._front_sizes)
        counts, self.sample_slots, self.sample_positions, self.logit_indices = front
        self.ring_index, self._num_tokens, self._num_wanted = counts[:1], counts[1:2], counts[2:]
        self.sample_slots.fill_(self._dummy)
        self._grid_steps: dict[StepShape, _Step] = {}  # those of captured grids

    def most_blocks(self, tokens: int, sequences: int) -> int:
        """Blocks that `tokens` of so many sequences can take, however they are cut; the dummy's included."""
        return tokens // self._backend.queries_per_block(tokens) + min(tokens, sequences) + 1

    def num_blocks(self, plan: StepPlan) -> int:
        """Blocks that a plan takes without padding."""
        per_block = self._backend.queries_per_block(plan.num_tokens)
        return len(block_table(plan.lens, plan.num_decode, per_block))

    def load_decode(self, plan: StepPlan, size: int, ring_index: int) -> None:
        """Copy in a step of decode slots only, padded to `size`."""
        count, host = len(plan.slots), self._staged[ring_index].numpy()
        host[:3] = ring_index, count, count
        end = self._front + 3 * _aligned(size)
        step = host[self._front : end].reshape(3, -1)[:, :size]
        step[0, count:], step[1, count:], step[2, count:] = self._dummy, 0, 1
        step[0, :count] = plan.slots
        step[1, :count] = plan.starts
        np.add(step[1, :count], 1, out=step[2, :count])
        self._copy(ring_index, end)

    def load(self, plan: StepPlan, shape: StepShape, ring_index: int) -> None:
        """Copy in any step, padded to `shape`."""
        host = self._staged[ring_index].numpy()
        lens, starts = np.array(plan.lens), np.array(plan.starts)
        kv_lens, ends = starts + lens, lens.cumsum()
        count, slots = int(ends[-1]), np.array(plan.slots)
        samples = np.array(plan.samples, dtype=np.bool_)
        places, of_sequence = np.arange(count), np.arange(len(lens)).repeat(lens)
        positions = places + (kv_lens - ends)[of_sequence]
        if shape.prompt_len:
            grid_ends = np.arange(1, len(lens) + 1) * shape.prompt_len
            places, ends = places + (grid_ends - ends)[of_sequence], grid_ends
        counts, sample_slots, sample_positions, logit_indices = _cut(host, self._front_sizes)
        counts[:] = ring_index, count, samples.sum()
        # To the end, every time: the sampling graph may be padded to more slots than the forward graph.
        _fill(sample_slots, slots[samples], self._dummy)
        _fill(sample_positions, kv_lens[samples], 1)
        _fill(logit_indices, (ends - 1)[samples], 0)
        parts = dict(zip(_PARTS, _cut(host[self._front :], _sizes(shape)), strict=True))
        for part, values, filler in (
            ("token_slots", slots[of_sequence], self._dummy),
            ("positions", positions, 0),
        ):
            parts[part].fill(filler)
            parts[part][places] = values
        _fill(parts["slots"], slots, self._dummy)
        _fill(parts["kv_lens"], kv_lens, 1)
        parts["num_decode"][0] = plan.num_decode
        if not shape.prompt_len:  # else they are fixed
            parts["cu_seqlens_q"][0] = 0
            _fill(parts["cu_seqlens_q"][1:], ends, shape.tokens)
            per_block = self._backend.queries_per_block(shape.tokens)
            blocks = block_table([*plan.lens, shape.tokens - count], plan.num_decode, per_block)
            _fill(parts["blocks"], blocks.ravel(), -1)
        self._copy(ring_index, self._front + sum(map(_aligned, _sizes(shape))))
        if shape.prompt_len:
            step = self._grid_steps[shape]
            self._backend.init_forward_metadata_replay_batch_prefill_cuda_graph(
                shape.sequences, shape.prompt_len, step.slots, step.kv_lens
            )

    def decode_slots(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows and sampled positions of a decode step."""
        slots, _, kv_lens = _cut(self._buffer[self._front :], [size] * 3)
        return slots, kv_lens

    def decode_context(self, size: int) -> Context:
        """The context of `size` decode slots."""
        slots, positions, kv_lens = _cut(self._buffer[self._front :], [size] * 3)
        return self._context(
            slots,
            positions,
            slots=slots,
            kv_lens=kv_lens,
            cu_seqlens_q=self._buffer[:0],
            num_decode=size,
            num_tokens=self._num_tokens,
        )

    def context(self, shape: StepShape) -> Context:
        """The context of any step of a shape."""
        step = self._step(shape)
        return self._context(
            step.token_slots,
            step.positions,
            slots=step.slots,
            kv_lens=step.kv_lens,
            cu_seqlens_q=step.cu_seqlens_q,
            num_decode=shape.decode,
            num_decode_device=step.num_decode,
            blocks=step.blocks,
            logits_indices=self.logit_indices[: shape.logits] if shape.trims else None,
            num_tokens=None
            if shape.prompt_len
            else self._num_tokens,  # slots have padding before their tokens
        )

    def _step(self, shape: StepShape) -> _Step:
        if shape in self._grid_steps:
            return self._grid_steps[shape]
        parts: dict[str, Any] = dict(
            zip(_PARTS, _cut(self._buffer[self._front :], _sizes(shape)), strict=True)
        )
        parts["blocks"] = parts["blocks"].view(-1, 2) if shape.blocks else None
        if shape.prompt_len:
            count = shape.sequences
            parts["slots"], parts["kv_lens"] = slots, kv_lens = (
                parts["slots"][:count],
                parts["kv_lens"][:count],
            )
            fixed = self._backend.init_forward_metadata_capture_batch_prefill_cuda_graph(
                count, shape.prompt_len, slots, kv_lens
            )
            parts["cu_seqlens_q"], parts["blocks"] = fixed.cu_seqlens_q, fixed.blocks
            self._grid_steps[shape] = _Step(**parts)
        return _Step(**parts)

    def _context(
        self,
        token_slots: Tensor,
        positions: Tensor,
        *,
        slots: Tensor,
        kv_lens: Tensor,
        cu_seqlens_q: Tensor,
        num_tokens: Tensor | None,
        num_decode: int = 0,
        num_decode_device: Tensor | None = None,
        blocks: Tensor | None = None,
        logits_indices: Tensor | None = None,
    ) -> Context:
        ids, slot_mapping = self._look_up(token_slots, positions)
        return Context(
            input_ids=ids,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=logits_indices,
            slots=(),
            q_lens=(),
            kv_lens=(),
            slots_device=slots,
            kv_lens_device=kv_lens,
            cu_seqlens_q_device=cu_seqlens_q,
            num_decode=num_decode,
            page_table=self._state.page_table,
            kv=self._kv,
            backend=self._backend,
            num_decode_device=num_decode_device,
            blocks=blocks,
            num_tokens=num_tokens,
            num_logits_indices=self._num_wanted,
        )

    def _look_up(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        from segue.kernels.triton.gather_inputs import gather_inputs

        state = self._state
        return gather_inputs(
            token_slots,
            positions,
            state.token_pool.data,
            state.page_table.data,
            page_size=self._kv.page_size,
            page_rows=self._kv.page_rows,
        )

    def _copy(self, ring_index: int, size: int) -> None:
        self._buffer[:size].copy_(self._staged[ring_index, :size], non_blocking=True)


_PARTS = ("token_slots", "positions", "slots", "kv_lens", "cu_seqlens_q", "num_decode", "blocks")


def _sizes(shape: StepShape) -> list[int]:
    """Of the parts, in order; the dummy request is one more sequence."""
    slots = shape.sequences + 1
    return [shape.tokens, shape.tokens, slots, slots, slots + 1, 1, 2 * shape.blocks]


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
