"""One step's inputs on a CUDA device: one copy to fixed addresses, where captured graphs read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.attention.base import PagedBackend, block_table
from segue.attention.context import Context
from segue.kvcache.pool import KVPool
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState
from segue.sizes import round_up

Buffer = TypeVar("Buffer", Tensor, NDArray[np.int32])

_ALIGNMENT = 4  # int32 elements: 16 bytes
RING = 4  # ring buffers on the host: one per step in flight, and one to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes that a step is run with, padding included."""

    tokens: int
    decode: int  # the maximum number of decode sequences
    sequences: int  # without the dummy request
    blocks: int  # query blocks of the attention backend, for the sequences behind the decode sequences
    logits: int  # the number of sequences that sample
    sampled_only: bool = True  # the model returns the hidden states of the tokens that sample, and no others
    prompt_len: int = 0  # each prompt is padded at its front to this length; 0: prompts are not padded


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepViews:
    """The int32 views of the device buffer for one shape."""

    token_slots: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens_q: Tensor
    num_decode: Tensor
    blocks: Tensor | None


class DeviceInputs:
    """Static input buffers, large enough for the largest step.

    The inputs of sampling are at the front (the header), at the same addresses in every step. The inputs of
    the forward graph follow, laid out by shape. Tokens that pad a step belong to one dummy request, which is
    the last sequence and has a single key: their results go to the scratch page and to the dummy slot.
    """

    def __init__(
        self, state: BatchState, kv: KVPool, backend: PagedBackend, *, max_tokens: int, max_slots: int
    ) -> None:
        self._state = state
        self._kv = kv
        self._backend = backend
        self._dummy = state.page_table.dummy_slot
        self._max_slots = max_slots
        self._header_sizes = [3, max_slots, max_slots, max_slots]
        self._header_size = sum(map(_aligned, self._header_sizes))
        max_blocks = max(self.max_blocks(tokens, max_slots) for tokens in range(1, max_tokens + 1))
        largest = StepShape(
            tokens=max_tokens, decode=max_slots, sequences=max_slots, blocks=max_blocks, logits=max_slots
        )
        size = self._header_size + max(sum(map(_aligned, _sizes(largest))), 3 * _aligned(max_slots))
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)
        on_cuda = state.device.type == "cuda"
        self._staged = torch.zeros((RING, size), dtype=torch.int32, pin_memory=on_cuda)
        header = _split(self._buffer, self._header_sizes)
        counts, self.sample_slots, self.sample_positions, self.logits_indices = header
        self.ring_index, self._num_tokens, self._num_sampled = counts[:1], counts[1:2], counts[2:]
        self.sample_slots.fill_(self._dummy)
        self._grid_views: dict[StepShape, _StepViews] = {}  # the views of captured grid sizes

    def max_blocks(self, tokens: int, sequences: int) -> int:
        """Return the most query blocks that `tokens` tokens of `sequences` sequences take.

        The blocks of the dummy request are included.
        """
        return tokens // self._backend.queries_per_block(tokens) + min(tokens, sequences) + 1

    def num_blocks(self, plan: StepPlan) -> int:
        """Return the query blocks that a plan takes without padding."""
        per_block = self._backend.queries_per_block(plan.num_tokens)
        return len(block_table(plan.lens, plan.num_decode, per_block))

    def load_decode(self, plan: StepPlan, size: int, ring_index: int) -> None:
        """Copy the inputs of a decode step to the device, padded to `size` slots."""
        count, host = len(plan.slots), self._staged[ring_index].numpy()
        host[:3] = ring_index, count, count
        end = self._header_size + 3 * _aligned(size)
        step = host[self._header_size : end].reshape(3, -1)[:, :size]
        step[0, count:], step[1, count:], step[2, count:] = self._dummy, 0, 1
        step[0, :count] = plan.slots
        step[1, :count] = plan.starts
        np.add(step[1, :count], 1, out=step[2, :count])
        self._copy(ring_index, end)

    def load(self, plan: StepPlan, shape: StepShape, ring_index: int) -> None:
        """Copy the inputs of any step to the device, padded to `shape`."""
        host = self._staged[ring_index].numpy()
        lens, starts = np.array(plan.lens), np.array(plan.starts)
        kv_lens, ends = starts + lens, lens.cumsum()
        count, slots = int(ends[-1]), np.array(plan.slots)
        samples = np.array(plan.samples, dtype=np.bool_)
        token_indices, of_sequence = np.arange(count), np.arange(len(lens)).repeat(lens)
        positions = token_indices + (kv_lens - ends)[of_sequence]
        if shape.prompt_len:
            grid_ends = np.arange(1, len(lens) + 1) * shape.prompt_len
            token_indices, ends = token_indices + (grid_ends - ends)[of_sequence], grid_ends
        counts, sample_slots, sample_positions, logits_indices = _split(host, self._header_sizes)
        counts[:] = ring_index, count, samples.sum()
        # Always filled to the end: the sampling graph may be padded to more slots than the forward graph.
        _fill(sample_slots, slots[samples], self._dummy)
        _fill(sample_positions, kv_lens[samples], 1)
        _fill(logits_indices, (ends - 1)[samples], 0)
        views = dict(zip(_VIEW_NAMES, _split(host[self._header_size :], _sizes(shape)), strict=True))
        for name, values, filler in (
            ("token_slots", slots[of_sequence], self._dummy),
            ("positions", positions, 0),
        ):
            views[name].fill(filler)
            views[name][token_indices] = values
        _fill(views["slots"], slots, self._dummy)
        _fill(views["kv_lens"], kv_lens, 1)
        views["num_decode"][0] = plan.num_decode
        if not shape.prompt_len:  # for the grid, both were set at capture
            views["cu_seqlens_q"][0] = 0
            _fill(views["cu_seqlens_q"][1:], ends, shape.tokens)
            per_block = self._backend.queries_per_block(shape.tokens)
            blocks = block_table([*plan.lens, shape.tokens - count], plan.num_decode, per_block)
            _fill(views["blocks"], blocks.ravel(), -1)
        self._copy(ring_index, self._header_size + sum(map(_aligned, _sizes(shape))))
        if shape.prompt_len:
            fixed = self._grid_views[shape]
            self._backend.init_forward_metadata_replay_batch_prefill_cuda_graph(
                shape.sequences, shape.prompt_len, fixed.slots, fixed.kv_lens
            )

    def decode_slots(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the slots of a decode step and the positions of the tokens that they sample."""
        slots, _, kv_lens = _split(self._buffer[self._header_size :], [size] * 3)
        return slots, kv_lens

    def decode_context(self, size: int) -> Context:
        """Return the context of a decode step of `size` slots."""
        slots, positions, kv_lens = _split(self._buffer[self._header_size :], [size] * 3)
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
        """Return the context of any step of `shape`."""
        views = self._views(shape)
        return self._context(
            views.token_slots,
            views.positions,
            slots=views.slots,
            kv_lens=views.kv_lens,
            cu_seqlens_q=views.cu_seqlens_q,
            num_decode=shape.decode,
            num_decode_device=views.num_decode,
            blocks=views.blocks,
            logits_indices=self.logits_indices[: shape.logits] if shape.sampled_only else None,
            # In the grid the padding is not at the end, so no number of tokens describes it.
            num_tokens=None if shape.prompt_len else self._num_tokens,
        )

    def _views(self, shape: StepShape) -> _StepViews:
        """The parts of the buffer for a step of this shape.

        Where prompts are padded to one length (the grid), the attention backend gives `cu_seqlens_q` and
        `blocks`, which are the same at every replay.
        """
        if shape in self._grid_views:
            return self._grid_views[shape]
        views: dict[str, Any] = dict(
            zip(_VIEW_NAMES, _split(self._buffer[self._header_size :], _sizes(shape)), strict=True)
        )
        views["blocks"] = views["blocks"].view(-1, 2) if shape.blocks else None
        if shape.prompt_len:
            count = shape.sequences
            views["slots"], views["kv_lens"] = slots, kv_lens = (
                views["slots"][:count],
                views["kv_lens"][:count],
            )
            fixed = self._backend.init_forward_metadata_capture_batch_prefill_cuda_graph(
                count, shape.prompt_len, slots, kv_lens
            )
            views["cu_seqlens_q"], views["blocks"] = fixed.cu_seqlens_q, fixed.blocks
            self._grid_views[shape] = _StepViews(**views)
        return _StepViews(**views)

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
        ids, slot_mapping = self._gather_inputs(token_slots, positions)
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
            num_logits_indices=self._num_sampled,
        )

    def _gather_inputs(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
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


_VIEW_NAMES = ("token_slots", "positions", "slots", "kv_lens", "cu_seqlens_q", "num_decode", "blocks")


def _sizes(shape: StepShape) -> list[int]:
    """Return the sizes of the views by `_VIEW_NAMES`; the dummy request is one more sequence."""
    slots = shape.sequences + 1
    return [shape.tokens, shape.tokens, slots, slots, slots + 1, 1, 2 * shape.blocks]


def _split(buffer: Buffer, sizes: list[int]) -> list[Buffer]:
    """Return consecutive slices, each aligned to 16 bytes: Triton compiles a kernel for each alignment."""
    starts = np.cumsum([0, *map(_aligned, sizes)]).tolist()
    assert starts[-1] <= len(buffer), (starts, len(buffer))
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _aligned(size: int) -> int:
    return round_up(size, _ALIGNMENT)


def _fill(target: NDArray[np.int32], values: NDArray[Any], filler: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = filler
