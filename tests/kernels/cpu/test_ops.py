"""The CPU's own kernels agree with torch's operators, and give a row the same bits in any batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from segue.kernels.cpu import ops
from segue.kernels.cpu.build import kernels
from tests.support import emulated_tiles

pytestmark = pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)
ROWS = [1, 2, 3, 4, 7, 12, 16, 29, 65, 600]
SHAPES = [(48, 64), (1, 32), (37, 40), (100, 576), (130, 7), (19, 13000)]  # [N, K] of a weight


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=["this CPU's instructions", "emulated tiles"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "emulated tiles":
        emulated_tiles.use(monkeypatch)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gemm_is_exact_but_for_the_order_of_its_sums(shape: tuple[int, int], bias: bool) -> None:
    weight, added = normal(*shape), normal(shape[0]) if bias else None
    for rows in ROWS:
        x = normal(rows, shape[1])
        expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
        result = ops.gemm(x, weight, added, torch.float32)
        torch.testing.assert_close(result.double(), expected, atol=2e-6 * shape[1], rtol=1e-5)
        assert torch.equal(ops.gemm(x, weight, added, torch.bfloat16), result.to(torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int]) -> None:
    size, depth = shape
    weight, gate_up, x = normal(size, depth), normal(2 * size, depth), normal(max(ROWS), depth)
    qkv, weights = normal(max(ROWS), size * 2), torch.rand(depth)
    for function in (
        lambda rows: ops.gemm(rows, weight, None, torch.float32, invariant=True),
        lambda rows: ops.gate_up_silu(rows, gate_up, invariant=True),
        lambda rows: ops.silu_mul(qkv[: len(rows)].contiguous()),
        lambda rows: ops.add_rms_norm(rows, None, weights, 1e-5)[0],
    ):
        whole = function(x)
        for rows in ROWS:
            assert torch.equal(function(x[:rows]), whole[:rows])
    assert torch.equal(
        ops.gemm(x[5:6].contiguous(), weight, None, torch.float32, invariant=True)[0],
        ops.gemm(x, weight, None, torch.float32, invariant=True)[5],
    )


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_not_finite_stays_in_its_row(invariant: bool) -> None:
    weight = normal(74, 40)
    for rows in (2, 4, 5, 17, 33):
        x = normal(rows, 40)
        bad = x.clone()
        bad[1, 0], bad[1, 39], rest = math.nan, math.inf, torch.arange(rows) != 1
        for function in (
            lambda x: ops.gemm(x, weight, None, torch.bfloat16, invariant=invariant),
            lambda x: ops.gate_up_silu(x, weight, invariant=invariant),
        ):
            result = function(bad)
            assert result[1].isnan().all() and torch.equal(result[rest], function(x)[rest])


@pytest.mark.parametrize("size", [1, 16, 37, 1536])
def test_gate_and_up_are_joined(size: int) -> None:
    weight = normal(2 * size, 96)
    for rows in ROWS:
        x = normal(rows, 96)
        gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
        torch.testing.assert_close(
            ops.gate_up_silu(x, weight).double(), F.silu(gate) * up, atol=1e-3, rtol=1e-2
        )


def test_the_activation_of_extreme_values() -> None:
    gate = torch.tensor([[-1e30, -200.0, -100.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], -1).to(torch.bfloat16)
    expected = F.silu(gate.to(torch.bfloat16).float()).to(torch.bfloat16)
    torch.testing.assert_close(ops.silu_mul(gate_up), expected, equal_nan=True, atol=1e-30, rtol=0)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (2, 1, 128)])
def test_norm_rope_and_store(heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    for tokens in (1, 5, 40):
        qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
        weight = torch.rand(heads + kv_heads, dim) if norm else None
        radians = torch.rand(tokens, 1, dim // 2) * 6
        cos = torch.cat([radians.cos()] * 2, -1).to(torch.bfloat16)
        sin = torch.cat([-radians.sin(), radians.sin()], -1).to(torch.bfloat16)
        rows = torch.randperm(64)[:tokens]
        keys, values = normal(64, kv_heads * dim), normal(64, kv_heads * dim)
        before = keys.clone(), values.clone()
        x = qkv.double().view(tokens, -1, dim)
        qk, value = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
        if weight is not None:
            qk = qk * torch.rsqrt(qk.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        expected = qk * cos.double() + qk.roll(dim // 2, -1) * sin.double()
        ops.norm_rope_store(
            qkv,
            weight,
            1e-5,
            cos,
            sin,
            rows,
            keys,
            values,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
        )
        rotated = qkv.view(tokens, -1, dim)[:, : heads + kv_heads]
        torch.testing.assert_close(rotated.double(), expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(keys[rows], rotated[:, heads:].flatten(1))
        assert torch.equal(values[rows], value.to(torch.bfloat16).flatten(1))
        others = torch.ones(64, dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(keys[others], before[0][others]) and torch.equal(values[others], before[1][others])


def test_the_weight_of_a_norm_is_float32() -> None:
    with pytest.raises(AssertionError, match="build_derived"):
        ops.add_rms_norm(normal(2, 64), None, normal(64), 1e-5)


def test_the_sum_of_a_norm_is_the_next_residual() -> None:
    for rows, size in ((1, 576), (40, 576), (3, 50)):
        x, residual, weight = normal(rows, size), normal(rows, size), torch.rand(size)
        total = x + residual
        expected = F.rms_norm(total.float(), (size,), weight, 1e-5)
        result, kept = ops.add_rms_norm(x, residual, weight, 1e-5)
        assert kept is residual and torch.equal(kept, total)
        torch.testing.assert_close(result.float(), expected, atol=1e-2, rtol=1e-2)
