"""What an attention backend is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    page_sizes: tuple[int, ...] | None
    decode_graph: bool  # a pure decode step can be captured in a CUDA graph
    prefill_graph: bool  # a step with prefill in it can be captured
    deterministic: bool  # the same request gives the same bits, whatever else is in the step
    indexes_by_row: bool  # reads the page table by row; otherwise rows are gathered for it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one rank's attention, the same in every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, before the softmax


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over the paged KV cache.

    Masks are bottom-right aligned: of a sequence's `q_len` queries, query `p` sees key `j` if and only if
    `j <= p + kv_len - q_len`. A query that sees no key gives 0. What lies in slots beyond `kv_len`, and in
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


class BackendFactory(Protocol):
    """Makes a backend for one model on one pool."""

    def __call__(self, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        """Make the backend; buffers it needs live as long as it does."""
        ...
