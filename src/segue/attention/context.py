"""One forward step as the model sees it."""

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
    """A batch of ragged sequences, decode rows first. T tokens, S sequences, L rows of logits.

    The host lists and the device tensors say the same; the model itself reads only tensors, so a captured
    step can be replayed with new values in the same storage.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64, or int32 of a static step, [T], each token's place in its sequence
    slot_mapping: Tensor  # int64 [T], token rows of the pool for each K and V; padding: of the scratch page
    logits_indices: Tensor | None  # int [L], the tokens whose hidden states the model returns; None: all
    slots: Sequence[int]  # S request slots, rows of the page table
    q_lens: Sequence[int]  # S tokens of this step
    kv_lens: Sequence[int]  # S tokens in the cache, this step's included
    slots_device: Tensor  # int64, or int32 of a static step, [S]
    kv_lens_device: Tensor  # int32 [S]
    cu_seqlens_q_device: Tensor  # int32 [S + 1], where each sequence's tokens begin
    num_decode: int  # the first so many sequences have one token each
    page_table: PageTable
    kv: KVPool
    backend: AttentionBackend
    # Of a captured step, which has no host lists:
    num_decode_device: Tensor | None = None  # int32 [1]; num_decode is the most there can be
    blocks: Tensor | None = None  # the backend's, for the sequences behind the decode rows
    num_tokens: Tensor | None = None  # int32 [1], tokens before those that pad the end; None: not known
    num_logits_indices: Tensor | None = None  # int32 [1], the same of `logits_indices`

    @property
    def has_prefill(self) -> bool:
        """Whether sequences may follow the decode rows."""
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
        """Work out positions and the slot mapping."""
        device = kv.data.device
        slots_device = torch.tensor(slots, dtype=torch.int64, device=device)
        kv_lens_device = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        ends = list(accumulate(q_lens))
        positions = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)]).to(
            device
        )
        index = torch.int64 if device.type == "cpu" else torch.int32  # as static steps have: compiled once
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
            kv_lens_device=kv_lens_device,
            cu_seqlens_q_device=torch.tensor([0, *ends], dtype=torch.int32, device=device),
            num_decode=num_decode,
            page_table=page_table,
            kv=kv,
            backend=backend,
        )
