"""The interface of attention backends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from segue.attention.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The sizes of one rank's attention, which are the same in every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the scores before the softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class GridMetadata:
    """The fields of a context that are fixed for `bs` sequences of `seq_len` queries each."""

    cu_seqlens_q: Tensor  # int32 [bs + 1]
    blocks: Tensor  # int32 [*, 2], see `block_table`


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over the paged KV cache.

    Masks are bottom-right aligned: of a sequence's `q_len` queries, query `p` attends to key `j` if and only
    if `j <= p + kv_len - q_len`. The output of a query that attends to no key is 0. Pool contents beyond
    `kv_len` and in the scratch page never influence an output, even if they are NaN.
    """

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

    # The grid of prefill graphs: `bs` prompts of `seq_len` queries each. Prompts are padded at the front, so
    # that the bottom-right aligned mask is right for the real queries. Between replays the values of `slots`
    # and `kv_lens` change, their addresses do not.

    def supports_batch_prefill_cuda_graph(self) -> bool:
        """Whether the backend implements the methods below."""
        return False

    def init_batch_prefill_cuda_graph_state(self, max_bs: int, max_seq_len: int) -> None:
        """Allocate what all sizes share, for up to `max_bs` sequences of up to `max_seq_len` tokens."""
        _unsupported(self)

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> GridMetadata:
        """Returns what a captured size reads in addition to `slots` and `kv_lens` (int32 `[bs]`).

        The addresses of all of these tensors have to stay the same.
        """
        _unsupported(self)

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Update in place what was derived from `slots` and `kv_lens`, without waiting for the device."""
        _unsupported(self)


def _unsupported(backend: AttentionBackend) -> NoReturn:
    raise NotImplementedError(f"{type(backend).__name__} has no grid of prefill graphs")


class PagedBackend(AttentionBackend):
    """A CUDA backend whose decode and prefill can be called separately, and which reads no host lists.

    `decode` and `prefill` write their own sequences' tokens of `output`, which like `query` is
    `[T, num_heads, head_dim]`.

    The methods of the grid are those of a backend that derives nothing from slots and lengths outside the
    graph: it reads them directly from the step's inputs, so that a replay has nothing to update.
    """

    @abstractmethod
    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows: the first `ctx.num_decode_device` or `ctx.num_decode` sequences."""

    @abstractmethod
    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the sequences after the decode rows."""

    @abstractmethod
    def queries_per_block(self, tokens: int) -> int:
        """Returns how many queries one row of `ctx.blocks` stands for in a step of `tokens` tokens."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        output = torch.empty_like(query)
        if ctx.num_decode:
            self.decode(query, output, layer, ctx)
        if ctx.has_prefill:
            self.prefill(query, output, layer, ctx)
        return output

    def supports_batch_prefill_cuda_graph(self) -> bool:
        """Returns True."""
        return True

    def init_batch_prefill_cuda_graph_state(self, max_bs: int, max_seq_len: int) -> None:
        """Does nothing: sizes share only the step's inputs."""

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> GridMetadata:
        """Returns the prompts' `cu_seqlens_q` and blocks, which are fixed for a size."""
        blocks = block_table([seq_len] * bs, 0, self.queries_per_block(bs * seq_len))
        return GridMetadata(
            cu_seqlens_q=torch.arange(bs + 1, dtype=torch.int32, device=slots.device) * seq_len,
            blocks=torch.from_numpy(blocks).to(slots.device),
        )

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Does nothing: `slots` and `kv_lens` are already updated."""


def block_table(q_lens: Sequence[int], first: int, per_block: int) -> NDArray[np.int32]:
    """Returns the query blocks of ragged prefill, int32 `[blocks, 2]`, for sequences from `first` on.

    A block is described by its sequence and the first query.
    """
    lens = np.asarray(q_lens[first:], dtype=np.int64)
    counts = -(-lens // per_block)
    sequences = np.repeat(np.arange(first, first + len(lens)), counts)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.stack([sequences, within * per_block], axis=1).astype(np.int32)
