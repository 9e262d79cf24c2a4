"""Prefill by one backend, decode by another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from segue.attention.base import PagedBackend
from segue.attention.context import Context


class PairedAttention(PagedBackend):
    """Prefill by one backend, or by several according to the step's size, and decode by another."""

    def __init__(self, prefill: Sequence[tuple[int, PagedBackend]], decode: PagedBackend) -> None:
        """Take backends made for the same model and pool.

        Each entry of `prefill` is a backend after the largest number of tokens per step that it serves,
        ascending; the last backend also serves all larger steps.
        """
        self._sizes, self._decode = prefill, decode

    def _prefill(self, tokens: int) -> PagedBackend:
        return next((half for max_tokens, half in self._sizes if tokens <= max_tokens), self._sizes[-1][1])

    def prepare(self, ctx: Context) -> None:
        """Prepare the backends that this step uses, each once."""
        halves = [self._prefill(len(ctx.positions))] if ctx.has_prefill else []
        if ctx.num_decode and self._decode not in halves:
            halves.append(self._decode)
        for half in halves:
            half.prepare(ctx)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`."""
        self._decode.decode(query, output, layer, ctx)

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`."""
        self._prefill(len(query)).prefill(query, output, layer, ctx)

    def queries_per_block(self, tokens: int) -> int:
        """See `PagedBackend.queries_per_block`."""
        return self._prefill(tokens).queries_per_block(tokens)
