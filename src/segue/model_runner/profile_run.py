"""The profile run: a step of the largest size, before the KV cache is allocated, measures the activations.

Sizes that cannot fit are refused before anything is computed, and a long profile run is announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from segue.attention.base import AttentionShape, Context
from segue.attention.registry import Selection
from segue.errors import OutOfMemoryError
from segue.kernels.compilations import compiled_together
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVScales
from segue.logs import logger
from segue.memory import backing
from segue.memory.budget import Demand, gib
from segue.memory.peak import PeakMeter
from segue.model_runner.resolved_config import ResolvedConfig
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder
from segue.sizes import ceil_div

# Operations per second that most devices reach, to estimate how long the profile run takes.
_CPU_SPEED, _CUDA_SPEED = 1e11, 1e14
_LONG_S = 2.0


def min_activations(config: ModelConfig, resolved: ResolvedConfig) -> int:
    """Return a lower bound of the activations in bytes: two hidden states per token, and all rows' logits."""
    hidden = 2 * resolved.max_step_tokens * config.hidden_size * resolved.dtype.itemsize
    return hidden + 4 * resolved.max_running_requests * config.vocab_size


def check_sizes(demand: Demand, resolved: ResolvedConfig) -> None:
    """Refuse sizes that cannot fit, before the weights are loaded and the profile run starts.

    Raises:
        OutOfMemoryError: `demand` reserves more than the memory that may be used; its activations are those
            of `min_activations`.
    """
    needed = demand.local_ranks * demand.num_engines * demand.reserve.total
    usable = int(demand.memory_ratio * demand.free_before)
    if needed > usable:
        staging = demand.local_ranks * demand.num_engines * demand.reserve.staging
        updates = f" ({gib(staging)} of it for weight updates)" if staging else ""
        raise OutOfMemoryError(
            f"max_running_requests={resolved.max_running_requests} and chunked_prefill_size="
            f"{resolved.chunked_prefill_size} need at least {gib(needed)} beside weights and KV{updates}, "
            f"but only {gib(usable)} may be used (memory_ratio {demand.memory_ratio} of what is free); lower "
            f"--max-running-requests or --chunked-prefill-size{' or --weight-staging-gb' if staging else ''}",
            param="max_running_requests",
        )


def measure_activations(
    model: Decoder, resolved: ResolvedConfig, selection: Selection, shape: AttentionShape
) -> int:
    """Return the peak bytes of an eager prefill of the largest step, with the logits of all rows.

    The buffers that the attention backend keeps are among them.

    The profile run has a small KV pool of its own, and sequences as long as the model allows. Of equal layers
    it runs the first and the last one: layers leave nothing behind but what the next one takes.

    Raises:
        OutOfMemoryError: the device has too little memory for the profile run.
    """
    try:
        with model.distinct_layers():
            _announce(model, resolved)
            return _measure(model, resolved, selection, shape)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {resolved.max_step_tokens} tokens "
            f"(chunked_prefill_size={resolved.chunked_prefill_size}, "
            f"max_running_requests={resolved.max_running_requests}) takes more memory than the device has "
            f"beside the weights; lower --chunked-prefill-size or --max-running-requests",
            param="chunked_prefill_size",
        ) from error


def _announce(model: Decoder, resolved: ResolvedConfig) -> None:
    """Log that the profile run takes long, if its estimate is above `_LONG_S` seconds."""
    speed = _CPU_SPEED if resolved.device.type == "cpu" else _CUDA_SPEED
    seconds = 2 * model.weights_per_token() * resolved.max_step_tokens / speed
    if seconds > _LONG_S:
        logger.info(
            "profile run: a step of %d tokens, the largest possible, which may take %.0f s or more; lower "
            "--chunked-prefill-size (%d) or --max-running-requests (%d) for a faster start and shorter steps",
            resolved.max_step_tokens,
            seconds,
            resolved.chunked_prefill_size,
            resolved.max_running_requests,
        )


def _measure(model: Decoder, resolved: ResolvedConfig, selection: Selection, shape: AttentionShape) -> int:
    """Run one prefill of `max_step_tokens` zero tokens, and return the peak of its temporaries in bytes.

    The step needs a KV pool and a page table of its own, which are freed when it has ended.
    """
    q_lens = _split(resolved.max_step_tokens, resolved.max_len)
    pages_each = ceil_div(max(q_lens), resolved.page_size)
    take = partial(backing.zeros, device=resolved.device)
    kv = make_pool(model, resolved, pages_each * len(q_lens), take)
    table = PageTable(
        max_running=len(q_lens),
        max_seq_len=max(q_lens),
        page_size=resolved.page_size,
        scratch_page=kv.scratch_page,
        device=resolved.device,
    )
    for slot in range(len(q_lens)):
        table.assign(slot, first=0, pages=range(slot * pages_each, (slot + 1) * pages_each))
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

    def run() -> None:
        step = ctx
        if resolved.device.type == "cuda":  # as in steps, whose contexts keep the embeddings
            step = replace(ctx, input_ids=None, input_embeds=model.embeddings(ctx))
        model.logits(model(step)[: resolved.max_running_requests])

    with torch.inference_mode():
        if resolved.device.type == "cuda":
            with compiled_together(resolved.device, model.shard.tp.size):
                run()
        meter.start()
        run()
        return meter.stop() + ctx.backend.num_bytes


def make_pool(
    model: Decoder,
    resolved: ResolvedConfig,
    num_pages: int,
    take: Callable[[int], Tensor],
    scales: KVScales | None = None,
) -> KVPool:
    """Return a KV pool for the heads of this rank; `take` gives it so many zeroed bytes.

    `scales` are those of a pool in FP8; None: all are 1.
    """
    shape = resolved.kv_shape(model.config, model.shard, num_pages)
    return KVPool(shape, take(shape.num_bytes), scales)


def _split(total: int, max_len: int) -> list[int]:
    """Return the lengths of sequences of up to `max_len` tokens that have `total` tokens together."""
    return [min(max_len, total - start) for start in range(0, total, max_len)]
