"""What an attention backend is."""

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
    """What a backend can do; `None` means no limit."""

    devices: tuple[str, ...]  # torch device types
    dtypes: tuple[torch.dtype, ...]
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group_size: int | None = None  # query heads a key-value head
    architectures: tuple[tuple[int, int], ...] | None = None  # CUDA compute capabilities
    package: tuple[str, str] | None = None  # the module it needs, and the extra that installs it
    graphs: bool = False  # its steps can be captured in CUDA graphs
    deterministic: bool = False  # a query's bits depend on nothing else in its step, nor on how it was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one rank's attention, the same in every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, before the softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class GridMetadata:
    """The part of a context that is fixed for `bs` sequences of `seq_len` queries each."""

    cu_seqlens_q: Tensor  # int32 [bs + 1]
    blocks: Tensor  # int32 [*, 2], see `segue.attention.query_blocks`


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over the paged KV cache.

    Masks are bottom-right aligned: of a sequence's `q_len` queries, query `p` sees key `j` if and only if
    `j <= p + kv_len - q_len`. A query that sees no key gives 0. What lies in the pool beyond `kv_len`, and in
    the scratch page, never reaches an output, NaN included.
    """

    def prepare(self, ctx: Context) -> None:
        """Work out once a step what all layers share. Called before the first `forward` of the step."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend over the pool, which already holds this step's keys and values.

        `query` is `[T, num_heads, head_dim]`; `key` and `value`, `[T, num_kv_heads, head_dim]`, are this
        step's own, for backends that need not read them back; on CUDA they are None.
        Returns `[T, num_heads, head_dim]`, contiguous.
        """
        ...

    # A grid of prefill graphs: `bs` prompts of `seq_len` queries each, padded at the front,
    # where the mask lets them see what they should. From replay to replay `slots` and `kv_lens` change, at
    # the same addresses.

    def supports_batch_prefill_cuda_graph(self) -> bool:
        """Whether the methods below are there."""
        return False

    def init_batch_prefill_cuda_graph_state(self, max_bs: int, max_seq_len: int) -> None:
        """Allocate what all sizes share, for up to `max_bs` sequences of up to `max_seq_len` tokens."""
        _unsupported(self)

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> GridMetadata:
        """What a captured size reads besides `slots` and `kv_lens` (int32 `[bs]`), at addresses that stay."""
        _unsupported(self)

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Bring what was derived from `slots` and `kv_lens` up to date, in place, without waiting."""
        _unsupported(self)


def _unsupported(backend: AttentionBackend) -> NoReturn:
    raise NotImplementedError(f"{type(backend).__name__} has no grid of prefill graphs")


class PagedBackend(AttentionBackend, Protocol):
    """A backend on CUDA, whose halves can be had apart and whose steps need no lists of the host.

    Each half writes its own tokens of `output`, like `query` `[T, num_heads, head_dim]`.
    """

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows: the first `ctx.num_decode` sequences, or as many as the device says."""
        ...

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the sequences behind the decode rows."""
        ...

    def queries_per_block(self, tokens: int) -> int:
        """Queries of a sequence in one row of `ctx.blocks`, in a step of `tokens`."""
        ...


class BackendFactory(Protocol):
    """Makes a backend for one model on one pool."""

    def __call__(self, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        """Make the backend; buffers it needs live as long as it does."""
        ...
