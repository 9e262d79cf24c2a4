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
from segue.model_runner.resolved_config import Choices
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder

# Operations per second that most devices reach, to foresee how long a trial takes.
_CPU_SPEED, _CUDA_SPEED = 1e11, 1e14
_LONG_S = 2.0


def least_activations(config: ModelConfig, choices: Choices) -> int:
    """Bytes that the trial takes at least: two hidden states per token, and logits of the rows that run."""
    hidden = 2 * choices.largest_step * config.hidden_size * choices.dtype.itemsize
    return hidden + 4 * choices.max_running_requests * config.vocab_size


def check_sizes(demand: Demand, choices: Choices) -> None:
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
            f"max_running_requests={choices.max_running_requests} and chunked_prefill_size="
            f"{choices.chunked_prefill_size} need at least {gib(needed)} beside weights and KV{kept}, but "
            f"only {gib(usable)} may be used (memory_ratio {demand.memory_ratio} of what is free); lower "
            f"--max-running-requests or --chunked-prefill-size{' or --weight-staging-gb' if staging else ''}",
            param="max_running_requests",
        )


def measure_activations(model: Decoder, choices: Choices, selection: Selection, shape: AttentionShape) -> int:
    """Peak bytes of an eager prefill of the largest chunk, and of logits for as many rows as can run.

    It runs on a small KV pool of its own, in sequences as long as the model allows. If more rows can decode
    than a chunk has tokens, the chunk is as long as they are many.

    Raises:
        OutOfMemoryError: the device has too little memory for it.
    """
    _announce(model, choices)
    try:
        return _measure(model, choices, selection, shape)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {choices.largest_step} tokens (chunked_prefill_size={choices.chunked_prefill_size}, "
            f"max_running_requests={choices.max_running_requests}) takes more memory than the device has "
            f"beside the weights; lower --chunked-prefill-size or --max-running-requests",
            param="chunked_prefill_size",
        ) from error


def _announce(model: Decoder, choices: Choices) -> None:
    speed = _CPU_SPEED if choices.device.type == "cpu" else _CUDA_SPEED
    seconds = 2 * model.weights_per_token() * choices.largest_step / speed
    if seconds > _LONG_S:
        logger.info(
            "trying a step of %d tokens, the largest there can be, which may take %.0f s or more; lower "
            "--chunked-prefill-size (%d) or --max-running-requests (%d) for a faster start and shorter steps",
            choices.largest_step,
            seconds,
            choices.chunked_prefill_size,
            choices.max_running_requests,
        )


def _measure(model: Decoder, choices: Choices, selection: Selection, shape: AttentionShape) -> int:
    q_lens = _cut(choices.largest_step, choices.longest)
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
