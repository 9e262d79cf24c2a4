"""One step's inputs on a CUDA device: one copy to fixed addresses, where captured graphs read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segue.attention.base import Context, GridMetadata, PagedBackend, StepLengths, query_blocks
from segue.kvcache.pool import KVPool
from segue.memory import backing
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.inputs import PlanArrays
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
    # In the grid (see `grid.py`) each prompt is padded at its front to this length; 0: it is no grid shape.
    prompt_len: int = 0


class _Views(NamedTuple, Generic[Buffer]):
    """The int32 views of a buffer for one shape, of the device or of the host; `_sizes` has their sizes.

    There are T tokens and S sequences, the dummy request and padding included.
    """

    token_slots: Buffer  # [T], the request slot of each token
    positions: Buffer  # [T]
    slots: Buffer  # [S], the request slot of each sequence
    kv_lens: Buffer  # [S]
    cu_seqlens_q: Buffer  # [S + 1]
    num_decode: Buffer  # [1]
    blocks: Buffer  # query blocks, two numbers each


class DeviceInputs:
    """Static input buffers, large enough for the largest step.

    `load` and `load_decode` write a step's values to a pinned buffer of the host, one of a ring, and copy
    them to the device. `context` and `decode_context` return tensors that are views of the device's buffer:
    they are made once for a captured graph, and every replay reads the values that were loaded last.

    The inputs of sampling are at the front (the header), at the same addresses in every step. The inputs of
    the forward graph follow, laid out by shape. Tokens that pad a step belong to one dummy request, which is
    the last sequence and has a single key: their results go to the scratch page and to the dummy slot.
    """

    def __init__(
        self,
        state: BatchState,
        kv: KVPool,
        backend: PagedBackend,
        embedding: nn.Embedding,
        *,
        vocab_start: int,
        max_tokens: int,
        max_slots: int,
    ) -> None:
        """Allocate the buffers for steps of up to `max_tokens` tokens and `max_slots` sequences.

        `embedding` has this rank's shard of the embeddings, from the id `vocab_start` on.
        """
        self._state = state
        self._kv = kv
        self._backend = backend
        self._embedding = embedding
        self._vocab_start = vocab_start
        self._dummy = state.page_table.dummy_slot
        # Three counts; then slots, positions and indices of the tokens that sample.
        self._header_sizes = 3, max_slots, max_slots, max_slots
        self._header_size = _slices(self._header_sizes)[1]
        self._ends_of_decode = np.arange(max_slots + 1, dtype=np.int32)  # each sequence has one token
        max_blocks = max(self.max_blocks(tokens, max_slots) for tokens in range(1, max_tokens + 1))
        largest = StepShape(
            tokens=max_tokens, decode=max_slots, sequences=max_slots, blocks=max_blocks, logits=max_slots
        )
        size = self._header_size + max(_slices(_sizes(largest))[1], 3 * _aligned(max_slots))
        self._buffer = torch.zeros(size, dtype=torch.int32, device=state.device)
        self._staged = backing.pinned((RING, size), torch.int32, state.device).zero_()
        self._host = self._staged.numpy()
        header = _split(self._buffer, self._header_sizes)
        counts, self.sample_slots, self.sample_positions, self.logits_indices = header
        self.ring_index, self._num_tokens, self._num_sampled = counts[:1], counts[1:2], counts[2:]
        self.clear()
        self._grid: dict[StepShape, tuple[Tensor, Tensor, GridMetadata]] = {}  # of captured grid sizes

    def clear(self) -> None:
        """Make the inputs those of a step without requests, whatever shape they are read in."""
        self._buffer.zero_()
        self.sample_slots.fill_(self._dummy)

    def max_blocks(self, tokens: int, sequences: int) -> int:
        """Return the most query blocks that `tokens` tokens of `sequences` sequences take.

        The blocks of the dummy request are included.
        """
        return tokens // self._backend.queries_per_block(tokens) + min(tokens, sequences) + 1

    def num_blocks(self, plan: StepPlan) -> int:
        """Return the query blocks that a plan takes without padding."""
        per_block = self._backend.queries_per_block(plan.num_tokens)
        return len(query_blocks(plan.lens, plan.num_decode, per_block))

    def load_decode(self, arrays: PlanArrays, size: int, ring_index: int, *, apart: bool = False) -> None:
        """Copy the inputs of a decode step to the device, padded to `size` slots.

        A decode step has a layout of its own: slots, positions and lengths, as each sequence has one token.
        With `apart`, sampling is a graph of its own, which reads the header.
        """
        count, host = len(arrays.slots), self._host[ring_index]
        if apart:
            self._fill_samples(host, arrays)
        host[:3] = ring_index, count, count
        step = self._rows(host, size)
        for row, values, filler in zip(
            step, (arrays.slots, arrays.starts, arrays.kv_lens), (self._dummy, 0, 1), strict=True
        ):
            _fill(row, values, filler)
        self._copy(ring_index, self._header_size + 3 * _aligned(size))
        self._backend.plan(
            StepLengths(
                kv_lens=step[2],
                cu_seqlens_q=self._ends_of_decode[: size + 1],
                tokens=size,
                num_decode=size,
                max_decode=size,
                has_prefill=False,
            )
        )

    def load(self, arrays: PlanArrays, shape: StepShape, ring_index: int) -> None:
        """Copy the inputs of any step to the device, padded to `shape`, from ring buffer `ring_index`.

        Padding tokens have the dummy request's slot and position 0; what they sample goes to its position 1.
        `ring_index` itself is an input, too: the sampling graph writes the tokens to that ring buffer. In the
        grid padding is in front of each prompt, so the tokens are spread; in all other shapes it is behind
        all tokens.
        """
        plan, host, ends = arrays.plan, self._host[ring_index], arrays.ends
        count = int(ends[-1])
        token_indices: Any = slice(count)
        if shape.prompt_len:  # prompt i ends at (i + 1) * prompt_len, however many tokens it has
            grid_ends = np.arange(1, len(ends) + 1) * shape.prompt_len
            token_indices = np.arange(count) + (grid_ends - ends).repeat(arrays.lens)
            ends = grid_ends
        counts, logits_indices = self._fill_samples(host, arrays)
        counts[:] = ring_index, count, len(arrays.sample_slots)
        _fill(logits_indices, (ends - 1)[arrays.samples], 0)
        views = _Views(*_split(host[self._header_size :], _sizes(shape)))
        views.token_slots.fill(self._dummy)
        views.token_slots[token_indices] = arrays.token_slots
        views.positions.fill(0)
        views.positions[token_indices] = arrays.positions
        _fill(views.slots, arrays.slots, self._dummy)
        _fill(views.kv_lens, arrays.kv_lens, 1)
        views.num_decode[0] = plan.num_decode
        if not shape.prompt_len:  # in the grid the backend set `cu_seqlens_q` and `blocks` at capture
            views.cu_seqlens_q[0] = 0
            _fill(views.cu_seqlens_q[1:], ends, shape.tokens)
            per_block = self._backend.queries_per_block(shape.tokens)
            blocks = query_blocks([*plan.lens, shape.tokens - count], plan.num_decode, per_block)
            _fill(views.blocks, blocks.ravel(), -1)  # -1: no block
        self._copy(ring_index, self._header_size + _slices(_sizes(shape))[1])
        self._plan(views, shape, plan.num_decode)
        if shape.prompt_len:
            slots, kv_lens, _ = self._grid[shape]
            self._backend.init_forward_metadata_replay_batch_prefill_cuda_graph(
                shape.sequences, shape.prompt_len, slots, kv_lens
            )

    def _fill_samples(self, host: NDArray[np.int32], arrays: PlanArrays) -> list[NDArray[np.int32]]:
        """Write the slots and positions that sample to the header; returns its other parts.

        They are filled to the end: the sampling graph may be padded to more slots than the forward graph.
        """
        counts, sample_slots, sample_positions, logits_indices = _split(host, self._header_sizes)
        _fill(sample_slots, arrays.sample_slots, self._dummy)
        _fill(sample_positions, arrays.sample_positions, 1)
        return [counts, logits_indices]

    def _plan(self, views: _Views[NDArray[np.int32]], shape: StepShape, num_decode: int) -> None:
        """Let the attention backend plan a step, with what the views of the host's buffer have."""
        kv_lens, cu_seqlens_q = views.kv_lens, views.cu_seqlens_q
        if length := shape.prompt_len:  # the grid has no dummy request, and its prompts have one length
            kv_lens = kv_lens[: shape.sequences]
            cu_seqlens_q = np.arange(0, shape.tokens + 1, length, dtype=np.int32)
        self._backend.plan(
            StepLengths(
                kv_lens=kv_lens,
                cu_seqlens_q=cu_seqlens_q,
                tokens=shape.tokens,
                num_decode=num_decode,
                max_decode=shape.decode,
                has_prefill=bool(shape.blocks or length),
            )
        )

    def decode_slots(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the slots of a decode step and the positions of the tokens that they sample.

        A token is sampled at the position behind the last key, which is the sequence's length.
        """
        slots, _, kv_lens = self._rows(self._buffer, size)
        return slots, kv_lens

    def decode_context(self, size: int) -> Context:
        """Return the context of a decode step of `size` slots."""
        slots, positions, kv_lens = self._rows(self._buffer, size)
        return self._context(
            slots,
            positions,
            slots_device=slots,
            kv_lens_device=kv_lens,
            cu_seqlens_q_device=self._buffer[:0],
            num_decode=size,
            num_tokens=self._num_tokens,
        )

    def context(self, shape: StepShape) -> Context:
        """Return the context of any step of `shape`.

        Where prompts are padded to one length (the grid), the attention backend gives `cu_seqlens_q` and
        `blocks`, which are the same at every replay.
        """
        views = _Views(*_split(self._buffer[self._header_size :], _sizes(shape)))
        slots, kv_lens = views.slots, views.kv_lens
        cu_seqlens_q, blocks = views.cu_seqlens_q, views.blocks.view(-1, 2) if shape.blocks else None
        if shape.prompt_len:
            slots, kv_lens, fixed = self._grid_metadata(shape, slots, kv_lens)
            cu_seqlens_q, blocks = fixed.cu_seqlens_q, fixed.blocks
        return self._context(
            views.token_slots,
            views.positions,
            slots_device=slots,
            kv_lens_device=kv_lens,
            cu_seqlens_q_device=cu_seqlens_q,
            num_decode=shape.decode,
            num_decode_device=views.num_decode,
            blocks=blocks,
            logits_indices=self.logits_indices[: shape.logits] if shape.sampled_only else None,
            # In the grid the padding is not at the end, so no number of tokens describes it.
            num_tokens=None if shape.prompt_len else self._num_tokens,
        )

    def _grid_metadata(
        self, shape: StepShape, slots: Tensor, kv_lens: Tensor
    ) -> tuple[Tensor, Tensor, GridMetadata]:
        """Return the slots and lengths of the prompts alone, and what the backend made at the first call.

        `slots` and `kv_lens` have the dummy request at their end. The result is kept per shape, because a
        captured graph needs the same addresses at every replay.
        """
        if shape not in self._grid:
            count = shape.sequences
            slots, kv_lens = slots[:count], kv_lens[:count]
            fixed = self._backend.init_forward_metadata_capture_batch_prefill_cuda_graph(
                count, shape.prompt_len, slots, kv_lens
            )
            self._grid[shape] = slots, kv_lens, fixed
        return self._grid[shape]

    def _context(
        self, token_slots: Tensor, positions: Tensor, *, logits_indices: Tensor | None = None, **fields: Any
    ) -> Context:
        """Return a context of the given tensors, with the embeddings and KV rows that follow from them."""
        embeddings, slot_mapping = self._embed_inputs(token_slots, positions)
        return Context(
            input_ids=None,
            input_embeds=embeddings,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=logits_indices,
            page_table=self._state.page_table,
            kv=self._kv,
            backend=self._backend,
            num_logits_indices=self._num_sampled,
            **fields,
        )

    def _rows(self, buffer: Buffer, size: int) -> list[Buffer]:
        """Return the slots, positions and lengths of a decode step of `size` slots."""
        return _split(buffer[self._header_size :], (size,) * 3)

    def _embed_inputs(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Launch the kernel that looks up each token's embedding, and its row in the KV pool, int64 `[T]`.

        It belongs to the captured graph: the ids that the last step sampled are known on the device only.
        """
        from segue.kernels.triton.step_inputs import embed_inputs

        state = self._state
        return embed_inputs(
            token_slots,
            positions,
            state.token_pool,
            state.page_table.data,
            self._embedding.weight,
            self._vocab_start,
            page_size=self._kv.page_size,
            page_rows=self._kv.page_rows,
        )

    def _copy(self, ring_index: int, size: int) -> None:
        self._buffer[:size].copy_(self._staged[ring_index, :size], non_blocking=True)


def _sizes(shape: StepShape) -> tuple[int, ...]:
    """Return the sizes of `_Views`; the dummy request is one more sequence."""
    slots = shape.sequences + 1
    return shape.tokens, shape.tokens, slots, slots, slots + 1, 1, 2 * shape.blocks


def _split(buffer: Buffer, sizes: tuple[int, ...]) -> list[Buffer]:
    """Return consecutive slices, each aligned to 16 bytes: Triton compiles a kernel for each alignment."""
    slices, end = _slices(sizes)
    assert end <= len(buffer), (sizes, len(buffer))
    return [buffer[each] for each in slices]


@lru_cache(maxsize=4096)
def _slices(sizes: tuple[int, ...]) -> tuple[list[slice], int]:
    """Return where the parts of a buffer are, and where the last one ends, its padding included."""
    starts = [0, *accumulate(map(_aligned, sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)], starts[-1]


def _aligned(size: int) -> int:
    return round_up(size, _ALIGNMENT)


def _fill(target: NDArray[np.int32], values: NDArray[Any], filler: int) -> None:
    """Write `values` to the front of `target`, and `filler` to the rest, which is padding."""
    target[: len(values)] = values
    target[len(values) :] = filler
