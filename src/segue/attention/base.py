"""The interface of attention backends, and the context of a step that they read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.kernels.activations import TokenQKV
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The sizes of one rank's attention, which are the same in every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the scores before the softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A batch of ragged sequences, decode rows first: T tokens, S sequences, L rows of logits.

    Where there are host lists, they hold the values of the device tensors. The model reads only tensors, so a
    captured step can be replayed with new values at the same addresses.
    """

    input_ids: Tensor | None  # int64 [T]; None where there are `input_embeds`
    positions: Tensor  # int64, or int32 on CUDA, [T], each token's index in its sequence
    slot_mapping: Tensor  # int64 [T], the pool's token row for each K and V; padding: in the scratch page
    logits_indices: Tensor | None  # int [L], the tokens whose hidden states the model returns; None: all
    slots_device: Tensor  # int64, or int32 on CUDA, [S]
    kv_lens_device: Tensor  # int32 [S]
    cu_seqlens_q_device: Tensor  # int32 [S + 1], the index of each sequence's first token
    num_decode: int  # the number of leading sequences that have one token each
    page_table: PageTable
    kv: KVPool
    backend: AttentionBackend
    # Lists of the host, for backends on a CPU and for steps that `build` has made:
    slots: Sequence[int] = ()  # S request slots, which are rows of the page table
    q_lens: Sequence[int] = ()  # S numbers of tokens in this step
    kv_lens: Sequence[int] = ()  # S numbers of tokens in the cache, including this step's
    # Fields of steps of the runner on CUDA, captured or not:
    input_embeds: Tensor | None = None  # [T, hidden], 0 for ids of other ranks' shards
    num_decode_device: Tensor | None = None  # int32 [1]; num_decode is its upper bound
    blocks: Tensor | None = None  # the backend's blocks of the sequences after the decode rows
    num_tokens: Tensor | None = None  # int32 [1], tokens without the padding at the end; None: unknown
    num_logits_indices: Tensor | None = None  # int32 [1], `logits_indices` without their padding

    @property
    def has_prefill(self) -> bool:
        """Whether the step may have sequences after the decode rows.

        A captured step that may have them has `blocks`, though a replay of it may have none.
        """
        return self.blocks is not None or self.num_decode < len(self.slots)

    @classmethod
    def build(
        cls,
        *,
        input_ids: Tensor,
        slots: Sequence[int],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        num_decode: int,
        page_table: PageTable,
        kv: KVPool,
        backend: AttentionBackend,
        logits_indices: Tensor | None = None,
    ) -> Context:
        """Make the context of an eager step: computes positions, slot mapping and device tensors.

        The arguments are the fields of the same names. There has to be at least one sequence.
        """
        device = kv.data.device
        slots_device = torch.tensor(slots, dtype=torch.int64, device=device)
        ends = list(accumulate(q_lens))  # the index behind each sequence's last token
        # This step's tokens are the last q of the kv tokens that a sequence then has.
        positions = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)]).to(
            device
        )
        # int32 on CUDA, as in captured steps, so that kernels are compiled for one type only.
        index = torch.int64 if device.type == "cpu" else torch.int32
        token_slots = slots_device.repeat_interleave(
            torch.tensor(q_lens, device=device), output_size=ends[-1]
        )
        return cls(
            input_ids=input_ids,
            positions=positions.to(index),
            slot_mapping=kv.token_rows(page_table.kv_slots(token_slots, positions)),
            logits_indices=logits_indices,
            slots=slots,
            q_lens=q_lens,
            kv_lens=kv_lens,
            slots_device=slots_device.to(index),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            cu_seqlens_q_device=torch.tensor([0, *ends], dtype=torch.int32, device=device),
            num_decode=num_decode,
            page_table=page_table,
            kv=kv,
            backend=backend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """What the host knows of the lengths of a step of S sequences: the values that its context will have."""

    kv_lens: NDArray[np.int32]  # [S]
    cu_seqlens_q: NDArray[np.int32]  # [S + 1]
    tokens: int  # T
    num_decode: int  # the number of leading sequences that have one token each
    max_decode: int  # the context's `num_decode`
    has_prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GridMetadata:
    """The fields of a context that are fixed for a graph of `bs` prompts of `seq_len` queries each."""

    cu_seqlens_q: Tensor  # int32 [bs + 1], the context's `cu_seqlens_q_device`
    blocks: Tensor  # of queries, int32 [*, 2], see `query_blocks`


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over the paged KV cache.

    Masks are bottom-right aligned: of a sequence's `q_len` queries, query `p` attends to key `j` if and only
    if `j <= p + kv_len - q_len`. The output of a query that attends to no key is 0. Pool contents beyond
    `kv_len` and in the scratch page never influence an output, even if they are NaN.

    Four methods, those with `batch_prefill_cuda_graph` in their names, are for the grid of prefill graphs
    (`model_runner.grid`): each graph is for one size, which is `bs` prompts of `seq_len` queries each.
    Prompts are padded at the front, so that the bottom-right aligned mask is right for the real queries.
    Between replays the values of `slots` and `kv_lens` change, their addresses do not.
    """

    num_bytes: int = 0  # of the device: buffers that the backend keeps between steps, if they count

    def prepare(self, ctx: Context) -> None:
        """Compute what all layers of a step share. Called once per step, before the first `forward`."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend over the pool, which already holds this step's keys and values.

        `query` is `[T, num_heads, head_dim]`. `key` and `value`, `[T, num_kv_heads, head_dim]`, are those of
        this step's tokens, so that a backend need not read them from the pool; on CUDA they are None.
        Returns `[T, num_heads, head_dim]`, contiguous.
        """
        ...

    def supports_batch_prefill_cuda_graph(self) -> bool:
        """Whether the backend implements the three methods below, for the grid of prefill graphs."""
        return False

    def init_batch_prefill_cuda_graph_state(self, max_bs: int, max_seq_len: int) -> None:
        """Allocate what the grid's sizes share: up to `max_bs` prompts of up to `max_seq_len` queries."""
        _unsupported(self)

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> GridMetadata:
        """Called before a size of the grid is captured.

        Returns what its graph reads in addition to `slots` and `kv_lens` (int32 `[bs]`). The graph holds the
        addresses of all of these tensors, so they have to stay the same.
        """
        _unsupported(self)

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Called before each replay of a size of the grid, when `slots` and `kv_lens` have new values.

        It updates in place what the backend derived from them, without waiting for the device.
        """
        _unsupported(self)


def _unsupported(backend: AttentionBackend) -> NoReturn:
    """Reject a call that the runner makes only if `supports_batch_prefill_cuda_graph()`."""
    raise NotImplementedError(f"{type(backend).__name__} has no grid of prefill graphs")


class PagedBackend(AttentionBackend):
    """A CUDA backend whose decode and prefill can be called separately, and which reads no host lists.

    `decode` and `prefill` write their own sequences' tokens of `output`, which like `query` is
    `[T, num_heads, head_dim]`. `prefill` comes first, and may write anything to the decode rows.

    The methods of the grid (`model_runner.grid`: prefill graphs by number and length of prompts) are those of
    a backend that derives nothing from slots and lengths outside the graph: it reads them directly from the
    step's inputs, so that a replay has nothing to update.
    """

    # Whether it serves each half; if not, another backend does, and nothing has to be prepared for it.
    serves_decode = serves_prefill = True

    @abstractmethod
    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows, the leading sequences of one query each, as `forward` does for all.

        Their number is in `ctx.num_decode_device`, or is `ctx.num_decode` if there is no such tensor.
        """

    @abstractmethod
    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the sequences after the decode rows, as `forward` does for all."""

    def attend_token(self, token: TokenQKV, layer: int, ctx: Context) -> Tensor | None:
        """Does the QK-norm, RoPE, the store and `forward` of a step of one token, which decodes.

        Returns `[1, num_heads, head_dim]`, or None if the backend cannot, and has done nothing.
        """
        return None

    def plan(self, lengths: StepLengths) -> None:
        """Called by the runner before it launches or replays a step, when the step's inputs are on their way.

        It is for backends that need lengths on the host; others read them on the device. When a graph is
        captured, and in steps that `Context.build` has made, `prepare` comes without it.
        """

    @abstractmethod
    def queries_per_block(self, tokens: int) -> int:
        """Returns the maximum of queries per row of `ctx.blocks` in a step of `tokens` tokens."""

    def row_steps(self, max_rows: int) -> set[int]:
        """Returns the tokens, or decode rows, up to which steps launch the same kernels, for the warm-up.

        There may be more of them, and those above `max_rows` do not matter.
        """
        return set()

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend for all sequences, see `AttentionBackend.forward`; `key` and `value` are not read."""
        output = torch.empty_like(query)
        if ctx.has_prefill:
            self.prefill(query, output, layer, ctx)
        if ctx.num_decode:
            self.decode(query, output, layer, ctx)
        return output

    def supports_batch_prefill_cuda_graph(self) -> bool:
        """Returns True."""
        return True

    def init_batch_prefill_cuda_graph_state(self, max_bs: int, max_seq_len: int) -> None:
        """Does nothing: sizes share only the step's inputs."""

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> GridMetadata:
        """Returns the prompts' `cu_seqlens_q` and query blocks, which are fixed for a size."""
        blocks = query_blocks([seq_len] * bs, first=0, per_block=self.queries_per_block(bs * seq_len))
        return GridMetadata(
            cu_seqlens_q=torch.arange(bs + 1, dtype=torch.int32, device=slots.device) * seq_len,
            blocks=torch.from_numpy(blocks).to(slots.device),
        )

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Does nothing: `slots` and `kv_lens` are already updated."""


def query_blocks(q_lens: Sequence[int], first: int, per_block: int) -> NDArray[np.int32]:
    """Splits the queries of ragged prefill into the blocks that the programs of a kernel work on.

    Args:
        q_lens: queries of each sequence.
        first: the first sequence to split; those before it decode.
        per_block: queries per block, at most; a block has queries of one sequence.

    Returns:
        int32 `[blocks, 2]`: each block's sequence, and its first query within the sequence.
    """
    blocks = [
        number
        for sequence in range(first, len(q_lens))
        for start in range(0, q_lens[sequence], per_block)
        for number in (sequence, start)
    ]
    return np.array(blocks, dtype=np.int32).reshape(-1, 2)
