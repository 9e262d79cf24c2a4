"""A trial step of the largest size, before there is a KV cache: what it takes is kept free for real ones.

Sizes that cannot fit are refused before anything is computed, and a trial that takes long is announced.
"""

from __future__ import annotations

import torch

from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.attention.registry import Selection
from segue.errors import OutOfMemoryError
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool
from segue.logs import logger
from segue.memory.budget import Demand, gib
from segue.memory.peak import PeakMeter
from segue.model_runner.resolved_config import ResolvedConfig
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder

# Operations per second that most devices reach, to foresee how long a trial takes.
_CPU_SPEED, _CUDA_SPEED = 1e11, 1e14
_LONG_S = 2.0


def least_activations(config: ModelConfig, resolved: ResolvedConfig) -> int:
    """Bytes that the trial takes at least: two hidden states per token, and logits of the rows that run."""
    hidden = 2 * resolved.largest_step * config.hidden_size * resolved.dtype.itemsize
    return hidden + 4 * resolved.max_running_requests * config.vocab_size


def check_sizes(demand: Demand, resolved: ResolvedConfig) -> None:
    """Refuse sizes that cannot fit, before weights are loaded and a step is tried.

    Raises:
        OutOfMemoryError: what `demand` reserves, with the least that activations take, is more than there is.
    """
    needed = demand.local_ranks * demand.reserve.total
    usable = int(demand.memory_ratio * demand.free_before)
    if needed > usable:
        staging = demand.local_ranks * demand.reserve.staging
        kept = f" ({gib(staging)} of it for weight updates)" if staging else ""
        raise OutOfMemoryError(
            f"max_running_requests={resolved.max_running_requests} and chunked_prefill_size="
            f"{resolved.chunked_prefill_size} need at least {gib(needed)} beside weights and KV{kept}, but "
            f"only {gib(usable)} may be used (memory_ratio {demand.memory_ratio} of what is free); lower "
            f"--max-running-requests or --chunked-prefill-size{' or --weight-staging-gb' if staging else ''}",
            param="max_running_requests",
        )


def measure_activations(
    model: Decoder, resolved: ResolvedConfig, selection: Selection, shape: AttentionShape
) -> int:
    """Peak bytes of an eager prefill of the largest chunk, and of logits for as many rows as can run.

    It runs on a small KV pool of its own, in sequences as long as the model allows. If more rows can decode
    than a chunk has tokens, the chunk is as long as they are many.

    Raises:
        OutOfMemoryError: the device has too little memory for it.
    """
    _announce(model, resolved)
    try:
        return _measure(model, resolved, selection, shape)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {resolved.largest_step} tokens "
            f"(chunked_prefill_size={resolved.chunked_prefill_size}, "
            f"max_running_requests={resolved.max_running_requests}) takes more memory than the device has "
            f"beside the weights; lower --chunked-prefill-size or --max-running-requests",
            param="chunked_prefill_size",
        ) from error


def _announce(model: Decoder, resolved: ResolvedConfig) -> None:
    speed = _CPU_SPEED if resolved.device.type == "cpu" else _CUDA_SPEED
    seconds = 2 * model.weights_per_token() * resolved.largest_step / speed
    if seconds > _LONG_S:
        logger.info(
            "trying a step of %d tokens, the largest there can be, which may take %.0f s or more; lower "
            "--chunked-prefill-size (%d) or --max-running-requests (%d) for a faster start and shorter steps",
            resolved.largest_step,
            seconds,
            resolved.chunked_prefill_size,
            resolved.max_running_requests,
        )


def _measure(model: Decoder, resolved: ResolvedConfig, selection: Selection, shape: AttentionShape) -> int:
    q_lens = _cut(resolved.largest_step, resolved.max_len)
    pages_each = -(-max(q_lens) // resolved.page_size)
    kv = make_pool(model, resolved, num_pages=pages_each * len(q_lens))
    table = PageTable(
        max_running=len(q_lens),
        max_seq_len=max(q_lens),
        page_size=resolved.page_size,
        scratch_page=kv.scratch_page,
        device=resolved.device,
    )
    for row in range(len(q_lens)):
        table.assign(row, 0, range(row * pages_each, (row + 1) * pages_each))
    num_tokens = sum(q_lens)
    ctx = Context.build(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=resolved.device),
        slots=list(range(len(q_lens))),
        q_lens=q_lens,
        kv_lens=q_lens,
        num_decode=0,
        page_table=table,
        kv=kv,
        backend=selection.make(shape, kv),
    )
    meter = PeakMeter(resolved.device)
    with torch.inference_mode():
        meter.start()
        model.logits(model(ctx)[: resolved.max_running_requests])
        return meter.stop()


def make_pool(model: Decoder, resolved: ResolvedConfig, *, num_pages: int) -> KVPool:
    """A KV pool for this rank's heads."""
    return KVPool(
        num_pages=num_pages,
        num_layers=model.config.num_layers,
        page_size=resolved.page_size,
        num_kv_heads=model.part.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=resolved.dtype,
        device=resolved.device,
    )


def _cut(total: int, max_len: int) -> list[int]:
    return [min(max_len, total - start) for start in range(0, total, max_len)]
