"""The interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from segue.attention.context import Context
    from segue.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend supports; `None` means no limit."""

    devices: tuple[str, ...]  # torch device types
    dtypes: tuple[torch.dtype, ...]
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group_size: int | None = None  # query heads per key-value head
    architectures: tuple[tuple[int, int], ...] | None = None  # CUDA compute capabilities
    package: tuple[str, str] | None = None  # required module, and the extra that installs it
    graphs: bool = False  # whether its steps can be captured in CUDA graphs
    deterministic: bool = False  # batch-invariant: neither batching nor chunking changes a query's bits


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
    blocks: Tensor  # int32 [*, 2], see `segue.attention.query_blocks`


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


class PagedBackend(AttentionBackend, Protocol):
    """A CUDA backend whose decode and prefill can be called separately, and which reads no host lists.

    Both methods write their own sequences' tokens of `output`, which like `query` is
    `[T, num_heads, head_dim]`.
    """

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows: the first `ctx.num_decode_device` or `ctx.num_decode` sequences."""
        ...

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the sequences after the decode rows."""
        ...

    def queries_per_block(self, tokens: int) -> int:
        """Returns how many queries one row of `ctx.blocks` stands for in a step of `tokens` tokens."""
        ...


class BackendFactory(Protocol):
    """Makes a backend for one model on one pool."""

    def __call__(self, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        """Make the backend, which owns its buffers."""
        ...
