"""Measures the attention backends against each other, and stores their order in the table that "auto" reads.

    python -m bench.attention

Every step is timed as a chain of layers in one CUDA graph, so that launches do not count. Prefill has as many
sequence slots as a captured step. For each device, head size and page size, the backends are ordered by the
geometric mean over the steps, so that a short step counts as much as a long one: once for decode, and once
for each number of prefill tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import geometric_mean

import torch
import torch.nn.functional as F

from bench import report
from bench.tune_gemm import chain_time
from segue.attention import registry
from segue.attention.base import AttentionShape, Context
from segue.attention.registry import Setting
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing

# Each step: sequences, new tokens per sequence, cached tokens per sequence. Prefill: by the step's tokens.
PREFILL = {
    256: [(1, 256, 256), (16, 16, 16), (1, 256, 4096)],
    1024: [(1, 1024, 1024), (16, 64, 64), (2, 512, 4096)],
    2048: [(1, 2048, 2048), (8, 256, 256), (4, 512, 4096)],
    8192: [(4, 2048, 2048), (1, 8192, 8192), (16, 512, 512)],
}
DECODE = [(1, 1, 640), (8, 1, 640), (32, 1, 640), (256, 1, 640), (32, 1, 4096), (1, 1, 16384)]
HEADS = (16, 8)  # of queries, of keys and values
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 64, 128)
LAYERS = 4
SLOTS = 257  # sequences that a captured step has room for, the dummy request included


def measure(name: str, setting: Setting, count: int, q_len: int, kv_len: int, **attributes: object) -> float:
    """Return the microseconds of one layer's attention, by a backend with some `attributes` set."""
    shape, device = setting.shape, setting.device
    pages = -(-kv_len // setting.page_size)
    sizes = KVShape(
        num_pages=count * pages,
        num_layers=LAYERS,
        page_size=setting.page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=setting.dtype,
        fp8=setting.fp8_kv,
    )
    pool = KVPool(sizes, backing.zeros(sizes.num_bytes, device))
    if setting.fp8_kv:
        pool.data.view(torch.uint8).random_(0x30, 0x40)  # 0.5 to 1.875
    else:
        pool.data.normal_()
    table = PageTable(
        max_running=count,
        max_seq_len=max(kv_len, 4096),
        page_size=setting.page_size,
        scratch_page=pool.scratch_page,
        device=device,
    )
    table.data[:count, :pages] = torch.randperm(count * pages, device=device).view(count, pages)
    ctx = Context.build(
        input_ids=torch.zeros(count * q_len, dtype=torch.int64, device=device),
        slots=range(count),
        q_lens=[q_len] * count,
        kv_lens=[kv_len] * count,
        num_decode=count if q_len == 1 else 0,
        page_table=table,
        kv=pool,
        backend=registry.select(name, setting).make(shape, pool),
    )
    if q_len > 1:
        ctx = replace(
            ctx,
            slots_device=F.pad(ctx.slots_device, (0, SLOTS - count), value=count),
            kv_lens_device=F.pad(ctx.kv_lens_device, (0, SLOTS - count), value=1),
            cu_seqlens_q_device=F.pad(ctx.cu_seqlens_q_device, (0, SLOTS - count), value=count * q_len),
        )
    query = torch.randn(count * q_len, shape.num_heads, shape.head_dim, device=device, dtype=setting.dtype)
    for attribute, value in attributes.items():
        setattr(ctx.backend, attribute, value)
    ctx.backend.prepare(ctx)
    return chain_time(lambda layer: ctx.backend.forward(query, None, None, layer % LAYERS, ctx), 4 * LAYERS)


def rank(half: str, setting: Setting, steps: list[tuple[int, int, int]]) -> list[str]:
    """Return the backends, the fastest first, and print their times."""
    times = {
        name: [measure(name, setting, *step) for step in steps]
        for name in registry.supported_backends(setting)
    }
    order = sorted(times, key=lambda name: geometric_mean(times[name]))
    report.show(
        f"{half}, heads of {setting.shape.head_dim}, pages of {setting.page_size}: µs per layer",
        ["backend", *(f"{count} x {q_len} of {kv_len}" for count, q_len, kv_len in steps)],
        [[name, *(f"{time:.1f}" for time in times[name])] for name in order],
    )
    return order


def main() -> None:
    """Measure the installed backends, and replace the entries of this compute capability in the table."""
    device = torch.device("cuda", 0)
    table = json.loads(registry.TABLE.read_text())
    mine: dict[str, dict[str, object]] = {}
    table[registry.capability(device)] = mine
    for head_dim in HEAD_DIMS:
        shape = AttentionShape(
            num_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=head_dim, scale=head_dim**-0.5
        )
        mine[str(head_dim)] = {}
        for page_size in PAGE_SIZES:
            setting = Setting(shape=shape, device=device, dtype=torch.bfloat16, page_size=page_size)
            mine[str(head_dim)][str(page_size)] = {
                "prefill": {tokens: rank("prefill", setting, steps) for tokens, steps in PREFILL.items()},
                "decode": rank("decode", setting, DECODE),
            }
    registry.TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
