"""The inputs of one forward step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from segue.attention.base import AttentionBackend
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A batch of ragged sequences, decode rows first: T tokens, S sequences, L rows of logits.

    Where there are host lists, they hold the values of the device tensors. The model reads only tensors, so a
    captured step can be replayed with new values at the same addresses.
    """

    input_ids: Tensor  # int64 [T]
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
    num_decode_device: Tensor | None = None  # int32 [1]; num_decode is its upper bound
    blocks: Tensor | None = None  # the backend's blocks of the sequences after the decode rows
    num_tokens: Tensor | None = None  # int32 [1], tokens without the padding at the end; None: unknown
    num_logits_indices: Tensor | None = None  # int32 [1], `logits_indices` without their padding

    @property
    def has_prefill(self) -> bool:
        """Whether the step may have sequences after the decode rows."""
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
        """Make the context of an eager step: computes positions, slot mapping and device tensors."""
        device = kv.data.device
        slots_device = torch.tensor(slots, dtype=torch.int64, device=device)
        ends = list(accumulate(q_lens))
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
