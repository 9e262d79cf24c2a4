"""Measures attention over a KV cache in FP8 beside one in bfloat16, with its variants side by side.

    python -m bench.kv_fp8

The heads are those of Qwen3-8B, in pages of 64 tokens. A variant of decode is a number of keys per block,
a number of blocks on their way, and whether values are read as words (`kernels/triton/attention.py`). The
roofline is reading all keys and values once at the bandwidth of `bench.roofline`. The last table is of
storing the keys and values of a step.
"""

from __future__ import annotations

import itertools

import torch

from bench import report
from bench.attention import measure
from bench.roofline import Machine
from bench.tune_gemm import chain_time
from segue.attention import registry
from segue.attention.base import AttentionShape
from segue.attention.registry import Setting
from segue.attention.tiles import Tiles
from segue.kernels.triton.norm import qk_norm_rope_store

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
DECODE = [(1, 1, 640), (32, 1, 640), (256, 1, 640), (256, 1, 2048)]
PREFILL = [(1, 1024, 1024), (8, 256, 256), (2, 512, 4096), (4, 2048, 2048)]
Row = list[str]


def setting(*, fp8: bool) -> Setting:
    """Return what a backend has to support."""
    device = torch.device("cuda", 0)
    return Setting(shape=SHAPE, device=device, dtype=torch.bfloat16, page_size=64, fp8_kv=fp8)


def row(
    name: str, backend: str, steps: list[tuple[int, int, int]], *, fp8: bool, **attributes: object
) -> Row:
    """Return the microseconds per layer of a variant, each with its share of the roofline."""
    found = [name]
    for count, q_len, kv_len in steps:
        micros = measure(backend, setting(fp8=fp8), count, q_len, kv_len, **attributes)
        size = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * (1 if fp8 else 2)
        share = count * kv_len * size / Machine().read * 1e6 / micros
        found.append(f"{micros:.1f} ({share:.0%})" if q_len == 1 else f"{micros:.1f}")
    return found


def decode() -> list[Row]:
    """Return a row per variant of decode."""
    rows = [row("bfloat16", "triton", DECODE, fp8=False)]
    for words, block, stages in itertools.product((True, False), (64, 128), (3, 5)):
        name = f"FP8, {block} keys, {stages} stages{', words' * words}"
        tiles = Tiles(rows=128, keys=64, decode_keys=block)
        chosen = {"_decode_words": words, "_tiles": tiles, "_decode_stages": stages}
        rows.append(row(name, "triton", DECODE, fp8=True, **chosen))
    return rows


def prefill() -> list[Row]:
    """Return a row per backend, and one for FP8."""
    backends = [name for name in registry.supported_backends(setting(fp8=False)) if "invariant" not in name]
    rows = [row(f"bfloat16, {name}", name, PREFILL, fp8=False) for name in backends]
    return [*rows, row("FP8, triton", "triton", PREFILL, fp8=True)]


def store(tokens: int, *, fp8: bool) -> float:
    """Return the microseconds of norm, rotary embedding and store of one layer."""
    heads, kv_heads, dim = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pool = [torch.zeros(2 * tokens, kv_heads * dim, device="cuda").to(dtype) for _ in range(2)]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(heads + kv_heads, dim, device="cuda")
    angles = [torch.ones(4096, dim // 2, device="cuda") for _ in range(2)]
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda") % 4096
    rows = torch.randperm(2 * tokens, device="cuda")[:tokens]

    def run(_: int) -> torch.Tensor:
        return qk_norm_rope_store(
            qkv,
            norm,
            1e-6,
            *angles,
            positions,
            rows,
            *pool,
            dtype=torch.bfloat16,
            scales=(1.0, 1.0) if fp8 else None,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
        )

    return chain_time(run, 16)


def main() -> None:
    """Print three tables, and store them."""

    def header(steps: list[tuple[int, int, int]]) -> Row:
        return ["", *(f"{count} x {q_len} of {kv_len}" for count, q_len, kv_len in steps)]

    tables = {"decode": (header(DECODE), decode()), "prefill": (header(PREFILL), prefill())}
    stores = [
        [name, *(f"{store(tokens, fp8=fp8):.1f}" for tokens in (256, 8192))]
        for name, fp8 in (("bfloat16", False), ("FP8", True))
    ]
    tables["norm, rotary embedding and store"] = ["", "256 tokens", "8192 tokens"], stores
    for name, (titles, rows) in tables.items():
        report.show(f"{name}: µs per layer (share of the roofline)", titles, rows)
    print(f"written to {report.save('gpu_kv_fp8', {name: rows for name, (_, rows) in tables.items()})}")


if __name__ == "__main__":
    main()
