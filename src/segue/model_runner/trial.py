"""A trial step of the largest size, before there is a KV cache: what it takes is kept free for real ones."""

from __future__ import annotations

import torch

from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.attention.registry import Selection
from segue.kvcache.pool import KVPool
from segue.kvcache.table import PageTable
from segue.memory.peak import PeakMeter
from segue.model_runner.choices import Choices
from segue.models.decoder import Decoder


def measure_activations(model: Decoder, choices: Choices, selection: Selection, shape: AttentionShape) -> int:
    """Peak bytes of an eager prefill of the largest chunk, and of logits for as many rows as can run.

    It runs on a small KV pool of its own, in sequences as long as the model allows. If more rows can decode
    than a chunk has tokens, the chunk is as long as they are many.
    """
    q_lens = _cut(max(choices.chunked_prefill_size, choices.max_running_requests), choices.longest)
    pages_each = -(-max(q_lens) // choices.page_size)
    kv = make_pool(model, choices, num_pages=pages_each * len(q_lens))
    table = PageTable(
        max_running=len(q_lens),
        max_seq_len=max(q_lens),
        page_size=choices.page_size,
        scratch_page=kv.scratch_page,
        device=choices.device,
    )
    for row in range(len(q_lens)):
        table.assign(row, 0, range(row * pages_each, (row + 1) * pages_each))
    num_tokens = sum(q_lens)
    ctx = Context.build(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=choices.device),
        rows=list(range(len(q_lens))),
        q_lens=q_lens,
        kv_lens=q_lens,
        num_decode=0,
        page_table=table,
        kv=kv,
        backend=selection.make(shape, kv),
    )
    meter = PeakMeter(choices.device)
    with torch.inference_mode():
        meter.start()
        model.logits(model(ctx)[: choices.max_running_requests])
        return meter.stop()


def make_pool(model: Decoder, choices: Choices, *, num_pages: int) -> KVPool:
    """A KV pool for this rank's heads."""
    return KVPool(
        num_pages=num_pages,
        num_layers=model.config.num_layers,
        page_size=choices.page_size,
        num_kv_heads=model.part.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=choices.dtype,
        device=choices.device,
    )


def _cut(total: int, longest: int) -> list[int]:
    return [min(longest, total - start) for start in range(0, total, longest)]
