"""The grid of prefill graphs for backends that read slots and lengths directly from the step's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.attention.base import GridMetadata
from segue.attention.query_blocks import block_table


class GridPrefill:
    """Implements the grid for backends that derive nothing from slots and lengths outside the graph.

    A replay has nothing to update.
    """

    def queries_per_block(self, tokens: int) -> int:
        """Returns how many queries one row of the blocks stands for in a step of `tokens` tokens."""
        raise NotImplementedError

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
