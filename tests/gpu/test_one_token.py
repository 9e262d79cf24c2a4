"""The kernels of steps of one token: GEMMs, and attention with what precedes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from bench import suite
from segue.kernels.activations import TokenQKV, Unnormed
from segue.kernels.fp8 import dequantize, quantize
from tests.gpu.test_attention import make_case
from tests.gpu.test_kernels import close, normal
from tests.model_runner import making
from tests.model_runner.planner import Planner

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("normed", "gated"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("block", [None, 0, 16, 128])
@pytest.mark.parametrize(
    ("size", "depth"),
    [
        (64, 48),
        (64, 96),
        (6144, 1024),
        (151936, 1024),
        (1000, 2560),
        (9000, 2560),
        (514, 9728),
        (2000, 14336),
        (30, 17408),
    ],
)
def test_gemv(size, depth, block, normed, gated, dtype) -> None:
    from segue.kernels.triton.gemv import gemv

    x, residual, of_norm = (normal(1, depth, seed=seed).to(dtype) for seed in range(3))
    x[0, 5] = 300  # others are rounded to what such a number leaves them
    weight, scales = normal(size, depth, seed=3) * 0.05, None
    if block is not None:
        weight, scales = quantize(weight, block)
    weight = weight.contiguous() if scales is not None else weight.to(dtype)
    bias = None if gated else normal(size, seed=4).to(dtype)
    total = torch.full_like(x, 7)
    token = Unnormed(x, residual, of_norm[0], 1e-6, total) if normed else x
    found = gemv(token, weight, scales, block or 0, bias, torch.float32, gated=gated)
    exact = x.double()
    if normed:
        exact += residual
        assert torch.equal(total, exact.to(dtype))
        exact *= of_norm.double() / (exact.square().mean() + 1e-6).sqrt()
    values = weight if scales is None else dequantize(weight, scales, block or 0)
    expected = exact @ values.double().T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = silu(gate) * up
    else:
        expected += bias
    assert found.shape == expected.shape
    assert (found - expected).norm() < (2e-3 if block is not None else 1e-5) * expected.norm()


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -(2.0**127)])
@pytest.mark.parametrize("block", [None, 0, 128])
def test_no_result_of_a_token_with_such_a_number_is_like_others(block, x) -> None:
    from segue.kernels.triton.gemv import gemv

    weight, scales = normal(256, 256).to(torch.bfloat16), None
    if block is not None:
        weight, scales = quantize(weight, block)
        weight = weight.contiguous()
    token = normal(1, 256, dtype=torch.bfloat16)
    assert (gemv(token, weight, scales, block or 0, None, torch.float32).abs() < 1e30).all()
    token[0, 77] = x
    has_weight = (weight[:, 77].float() != 0)[None]
    found = gemv(token, weight, scales, block or 0, None, torch.float32)
    assert not (found.abs() < 1e30)[has_weight].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scales", [None, (0.3, 2.5)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(8, 2, 128), (3, 3, 64), (1, 1, 32), (2, 7, 256)]
)
@pytest.mark.parametrize(
    ("length", "page_size"),
    [(1, 16), (2, 1), (64, 64), (65, 64), (66, 5), (129, 64), (257, 128), (1500, 128), (9000, 64)],
)
def test_attention_of_one_token(length, page_size, kv_heads, group, head_dim, norms, scales, dtype) -> None:
    from segue.kernels.triton.norm import qk_norm_rope_store

    case = make_case(
        "triton", [1], [length], 1, dtype, page_size=page_size, kv_heads=kv_heads, group=group,
        head_dim=head_dim, scales=scales,
    )  # fmt: skip
    ctx, pool, heads = case.ctx, case.ctx.kv, kv_heads * group
    qkv = normal(1, (heads + 2 * kv_heads) * head_dim).to(dtype)
    weight = normal(heads + kv_heads, head_dim, seed=3) if norms else None
    angles = torch.arange(length, device="cuda")[:, None] * normal(head_dim // 2, seed=4)
    angles = angles.cos(), angles.sin()
    keys, values = pool.key_rows[case.layer], pool.value_rows[case.layer]
    torch.cuda.synchronize()  # the kernel reads all but `qkv` before the one before it has ended
    query = qk_norm_rope_store(
        qkv, weight, 1e-6, *angles, ctx.positions, ctx.slot_mapping, keys, values,
        dtype=dtype, scales=scales, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    ctx.backend.prepare(ctx)
    expected = ctx.backend.forward(query, None, None, case.layer, ctx)
    row = ctx.slot_mapping[0]
    stored = keys[row].clone(), values[row].clone()
    keys[row], values[row] = float("nan"), float("nan")
    for _ in range(2):  # the second call has the counters that the first one left
        found = ctx.backend.attend_token(TokenQKV(qkv, weight, 1e-6, *angles), case.layer, ctx)
        close(found, expected.float(), dtype)
        assert torch.equal(values[row].view(torch.uint8), stored[1].view(torch.uint8))
        assert_neighbours(keys[row], stored[0])


def assert_neighbours(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that few numbers are rounded to a neighbour of the expected ones, and none further."""
    kind = torch.int8 if found.dtype == torch.float8_e4m3fn else torch.int16
    steps = (found.view(kind).int() - expected.view(kind).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.02


def test_a_token_that_is_padding_is_not_stored() -> None:
    case = make_case("triton", [1], [100], 1, head_dim=64)
    before = case.ctx.kv.data.clone()
    ctx = replace(case.ctx, num_decode_device=torch.zeros(1, dtype=torch.int32, device="cuda"))
    qkv, angles = normal(1, 5 * 2 * 64, dtype=torch.bfloat16), (normal(200, 32), normal(200, 32))
    token = TokenQKV(qkv, None, 1e-6, *angles)
    assert ctx.backend.attend_token(token, case.layer, ctx) is not None
    assert torch.equal(ctx.kv.data.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}], ids=str)
def test_kernels_that_overlap_give_the_bits_of_kernels_that_run_alone(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each replay the self-check runs the step again, each kernel when the one before has ended."""
    from triton.runtime.jit import JITFunction

    (tmp_path / "config.json").write_text(
        json.dumps(suite.COMMON | suite.SHAPES["0.6b"] | {"num_hidden_layers": 4})
    )
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "page_size": 64}
    common |= {"num_kv_tokens": 8192, "max_model_len": 4096, "max_running_requests": 2}
    runner = making.make_runner(
        tmp_path, **common, **options, gemm_plans="stored", chunked_prefill_size=512, graph_self_check=True
    )
    launch, launched = JITFunction.run, []

    def run_alone(function: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(function.__name__)
        result = launch(function, *args, **kwargs)
        torch.cuda.synchronize()
        return result

    monkeypatch.setattr(JITFunction, "run", run_alone)
    planner = Planner(runner)
    for length in (5, 3000):  # the programs of the second one have more than one block of keys
        assert len(planner.generate(making.prompt(length), 60, 512).output) == 60
    runner.close()
    assert launched.count("_attend_token") == 2 * 59 * 4
