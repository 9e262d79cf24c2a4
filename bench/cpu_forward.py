"""Measures the model's forward alone on this CPU: `python -m bench.cpu_forward`.

The model has random weights in the shape of SmolLM2-135M; there is no sampling and no scheduling. Beside each
time stands the time that only reading memory takes. In prefill, page faults cost more than arithmetic unless
GLIBC_TUNABLES is, joined by colons, glibc.malloc.hugetlb=1, glibc.malloc.mmap_threshold=1073741824 and
glibc.malloc.trim_threshold=1073741824.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from segue.attention.base import AttentionShape, Context
from segue.attention.registry import Setting, select
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from segue.models.config import ModelConfig, RopeConfig
from segue.models.decoder import Decoder, build_model

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_position=8192,
    tie_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
)
CASES = [(1, 1, 128), (1, 1, 512), (16, 1, 128), (16, 1, 512), (1, 512, 512), (1, 512, 1024)]
PAGE_SIZE = 16


def random_model(dtype: torch.dtype, deterministic: bool) -> Decoder:
    """Build the model with small random weights, and pack them."""
    model = build_model(SMOLLM2, dtype=dtype, deterministic=deterministic)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        weight = torch.randn(parameter.shape) * 0.02 if parameter.dim() > 1 else torch.ones(parameter.shape)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight.to(dtype), requires_grad=False))
    if SMOLLM2.tie_embeddings:
        model.lm_head.weight = model.embed.weight
    model.build_derived()
    return model


def context(model: Decoder, deterministic: bool, num_sequences: int, q_len: int, kv_len: int) -> Context:
    """Build a step of sequences of equal length, with their pages in random order."""
    config, dtype = model.config, model.norm.weight.dtype
    pages = -(-kv_len // PAGE_SIZE)
    sizes = KVShape(
        num_pages=pages * num_sequences,
        num_layers=config.num_layers,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    pool = KVPool(sizes, backing.zeros(sizes.num_bytes, torch.device("cpu")))
    pool.data.normal_()
    table = PageTable(
        max_running=num_sequences,
        max_seq_len=kv_len,
        page_size=PAGE_SIZE,
        scratch_page=pool.scratch_page,
        device="cpu",
    )
    order = torch.randperm(pool.num_pages).view(num_sequences, pages).tolist()
    for slot in range(num_sequences):
        table.assign(slot, 0, order[slot])
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )
    setting = Setting(
        shape=shape,
        device=torch.device("cpu"),
        dtype=dtype,
        page_size=PAGE_SIZE,
        deterministic=deterministic,
    )
    return Context.build(
        input_ids=torch.randint(0, config.vocab_size, (num_sequences * q_len,)),
        slots=list(range(num_sequences)),
        q_lens=[q_len] * num_sequences,
        kv_lens=[kv_len] * num_sequences,
        logits_indices=torch.arange(1, num_sequences + 1) * q_len - 1,
        num_decode=num_sequences if q_len == 1 else 0,
        page_table=table,
        kv=pool,
        backend=select("auto", setting).make(shape, pool),
    )


def milliseconds(runs: Sequence[Callable[[], object]], seconds: float) -> list[tuple[float, float]]:
    """Return the fastest and the median time of each of `runs`.

    The runs take turns, so that other load on the machine slows all of them equally.
    """
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) * 1e3)
    return [(min(taken), statistics.median(taken)) for taken in times]


def main() -> None:
    """Print one line per case and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--deterministic", action="store_true", help="measure that mode too, in turns")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each case")
    options = parser.parse_args()
    modes = [False, True] if options.deterministic else [False]
    models = [random_model(getattr(torch, options.dtype), mode) for mode in modes]
    memory = torch.ones(64 << 20)
    bandwidth = memory.nbytes / milliseconds([memory.sum], 1.0)[0][0] / 1e6
    weight_bytes = sum(parameter.nbytes for parameter in models[0].parameters())
    print(f"{torch.get_num_threads()} threads, {bandwidth:.0f} GB/s, {weight_bytes / 1e6:.0f} MB of weights")
    with torch.inference_mode():
        for num_sequences, q_len, kv_len in CASES:
            steps = []
            for model, mode in zip(models, modes, strict=True):
                ctx = context(model, mode, num_sequences, q_len, kv_len)
                steps.append(partial(step, model, ctx))
            kv_bytes = num_sequences * kv_len * ctx.kv.page_bytes // PAGE_SIZE
            memory_ms = (weight_bytes + kv_bytes) / bandwidth / 1e6
            for mode, (best, median) in zip(modes, milliseconds(steps, options.seconds), strict=True):
                rate = num_sequences * q_len / best * 1e3
                print(
                    f"{num_sequences:2d} x {q_len:3d} of {kv_len:4d}: best {best:7.2f} ms, "
                    f"median {median:7.2f} ms, {rate:6.0f} tok/s, memory alone {memory_ms:5.2f} ms"
                    f"{', deterministic' if mode else ''}",
                    flush=True,
                )


def step(model: Decoder, ctx: Context) -> object:
    """Return the logits of the last token of each sequence."""
    return model.logits(model(ctx))


if __name__ == "__main__":
    main()
