"""The kernels for CUDA in Triton's interpreter, which needs no GPU: compared with the oracle.

They run where Triton is installed and TRITON_INTERPRET is 1. The interpreter has no bfloat16 products, but
keys and values in FP8 are multiplied in float16.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.attention.case import Case

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of the interpreter
]
CASES = {
    "few rows, split": ([1] * 3, [9, 700, 33], 3),
    "many rows, planned": ([1] * 30, [*range(1, 30), 300], 30),
    "prompts": ([20, 3, 5], [40, 100, 3], 0),
    "both": ([1, 20], [70, 20], 1),
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 8.9."""
    from segue.attention import triton
    from segue.kernels.gemm_plan import DeviceFacts
    from segue.kernels.triton import launch

    sizes = {"num_sms": 16, "shared_bytes": 99 << 10, "memory_bytes": 1 << 30, "bandwidth": 1e12}
    monkeypatch.setattr(triton, "device_facts", lambda: DeviceFacts(name="", capability=(8, 9), **sizes))
    monkeypatch.setattr(launch, "is_hopper", lambda: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_a_cache_in_fp8(name: str, head_dim: int, invariant: bool, dtype: torch.dtype) -> None:
    from segue.attention.triton import TritonAttention, TritonInvariantAttention

    make = TritonInvariantAttention if invariant else TritonAttention
    Case(*CASES[name], head_dim=head_dim, group=2, dtype=dtype, scales=(0.3, 2.5), make=make).check()


def test_decode_that_another_backend_serves_is_not_planned() -> None:
    from segue.attention.triton import TritonAttention

    case = Case(*CASES["many rows, planned"], head_dim=16, make=TritonAttention)
    backend: Any = case.ctx.backend
    backend.prepare(case.ctx)
    assert backend._plan is not None
    backend.serves_decode = False
    backend.prepare(case.ctx)
    assert backend._plan is None


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 2.5)])
def test_keys_and_values_are_stored_in_fp8(scales: tuple[float, float]) -> None:
    """The interpreter rounds some numbers up to half of what they are: the bits are compared on a GPU."""
    from segue.kernels.fp8 import FP8
    from segue.kernels.triton.norm import qk_norm_rope_store

    heads, kv_heads, dim, tokens = 4, 2, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(1))
    qkv[0] *= 1e4  # too large for FP8
    rows = torch.arange(tokens)
    angles = torch.rand(tokens, dim // 2)

    def run(stored: torch.dtype, scales: tuple[float, float] | None) -> tuple[torch.Tensor, ...]:
        pool = [torch.zeros(tokens, kv_heads * dim).to(stored) for _ in range(2)]
        query = qk_norm_rope_store(
            *(qkv, None, 1e-6, angles.cos(), angles.sin(), rows, rows, *pool),
            **{"dtype": torch.float32, "scales": scales},
            **{"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim},
        )
        return query, *pool

    query, *plain = run(torch.float32, None)
    same, *found = run(FP8, scales)
    assert torch.equal(query, same)
    for one, other, scale in zip(found, plain, scales, strict=True):
        expected = other.clamp(-448 * scale, 448 * scale)
        is_close = torch.isclose(one.float() * scale, expected, rtol=2**-4, atol=scale * 2**-10)
        assert is_close.float().mean() > 0.9 and bool(is_close[0].all())
