"""Experts in FP8 on CUDA: kernels compared with float32, and engines with the CPU's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from segue.kernels.fp8 import FP8Experts, quantize
from segue.kernels.ops import route
from segue.layers.moe_backend import run_by_expert, select
from tests.checkpoint import tiny, tiny_fp8
from tests.gpu.test_kernels import normal
from tests.gpu.test_moe import plan
from tests.model_runner import making

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EVEN, ODD = (16, 4, 256, 384), (60, 4, 304, 136)  # experts, experts per token, hidden size, expert size


def weights(experts: int, rows: int, columns: int, block: int, dtype: torch.dtype, seed: int) -> FP8Experts:
    values = normal(experts * rows, columns, seed=seed).mul_(columns**-0.5)
    weight, scales = quantize(values, block)
    return FP8Experts(
        weight.contiguous().view(experts, rows, columns), scales.view(experts, rows, -1), block, dtype
    )


def check(
    tokens: int, shape: tuple[int, int, int, int], block: int, dtype: torch.dtype, **options: Any
) -> None:
    experts, per_token, hidden, size = shape
    gate_up, down = (
        weights(experts, *each, block, dtype, seed)
        for seed, each in enumerate(((2 * size, hidden), (hidden, size)), 1)
    )
    x = normal(tokens, hidden, dtype=dtype)
    routed = route(normal(tokens, experts, seed=3), per_token, renormalise=True, num_unpadded=None)
    if options:
        from segue.kernels.triton.moe import run_experts

        found = run_experts(x, gate_up, down, *routed, **options)
    else:
        found = select("auto", x.device).run(x, gate_up, down, *routed)
    exact = run_by_expert(
        x.float(), *(replace(each, dtype=torch.float32).values() for each in (gate_up, down)), *routed
    )
    assert found.dtype == dtype
    assert (found.float() - exact).norm() < (8e-3 if dtype == torch.bfloat16 else 1e-3) * exact.norm()


@pytest.mark.parametrize("name", ["by pair", "16", "16 by TMA", "128", "128 by TMA, halves"])
@pytest.mark.parametrize(("block", "shape"), [(0, EVEN), (128, EVEN), (16, ODD)])
def test_every_plan_agrees_with_float32(name: str, block: int, shape: tuple[int, int, int, int]) -> None:
    if "TMA" in name and shape == ODD:
        pytest.skip("TMA takes no tiles that do not divide the weights")
    check(70, shape, block, torch.bfloat16, plan=plan(name))


@pytest.mark.parametrize("tokens", [1, 5, 300, 3000])
@pytest.mark.parametrize(("block", "dtype"), [(0, torch.bfloat16), (128, torch.float16)])
def test_few_and_many_tokens_agree_with_float32(tokens: int, block: int, dtype: torch.dtype) -> None:
    check(tokens, EVEN, block, dtype)


def test_values_are_scaled_over_a_whole_range_of_exponents() -> None:
    """Each value of FP8 that is finite, and scales from 2**-12 to 2**4."""
    from segue.kernels.triton.moe import run_experts

    finite = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    finite = torch.where(finite.float().isfinite(), finite.float(), 0).to(torch.float8_e4m3fn)
    x = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    weight = finite.view(1, 1, 256).expand(1, 128, 256).contiguous()
    scales = torch.exp2(torch.arange(128, device="cuda") % 17 - 12.0).view(1, 128, 1).contiguous()
    gate = FP8Experts(torch.cat([weight, weight], 1), torch.cat([scales, scales], 1), 0, torch.bfloat16)
    identity = torch.eye(256, 128, device="cuda").to(torch.float8_e4m3fn)[None]
    down = FP8Experts(identity, torch.ones(1, 256, 1, device="cuda"), 0, torch.bfloat16)
    one = torch.ones(256, 1, device="cuda"), torch.zeros(256, 1, dtype=torch.int32, device="cuda")
    for name in ("by pair", "16", "128 by TMA, halves"):
        found = run_experts(x, gate, down, *one, plan=plan(name))
        exact = run_by_expert(
            x.float(), *(replace(each, dtype=torch.float32).values() for each in (gate, down)), *one
        )
        torch.testing.assert_close(found.float(), exact, rtol=1.5e-2, atol=1e-20)


@pytest.mark.parametrize("layout", ["float32", "blocks"])
def test_an_engine_agrees_with_one_on_a_cpu(layout: str, tmp_path: Path) -> None:
    """Prompts and decoded tokens, eagerly and from graphs, for few requests and for more than 64."""
    model = tiny_fp8.model("qwen3-moe", vocab_size=making.VOCAB, head_dim=64)
    tiny.save(model, tmp_path) if layout == "float32" else tiny_fp8.write(tmp_path, layout, model)
    prompts = [making.prompt(3 + i % 70, seed=i) for i in range(80)]

    def run(**options: Any) -> torch.Tensor:
        common = {"model": str(tmp_path), "quantization": "fp8", "dtype": "bfloat16", "num_kv_tokens": 16384}
        params = {"max_new_tokens": 4, "temperature": 0.0}
        with segue.Engine(**common, **options, max_running_requests=80, embedded=True) as engine:
            assert engine.get_server_info()["quantization"] == "fp8"
            found = engine.generate(
                input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=0
            )
        each = [entry[0] for one in found for entry in one["meta_info"]["input_token_logprobs"]]
        return torch.tensor([value for value in each if value is not None])

    expected = run(device="cpu")
    for options in ({}, {"disable_cuda_graph": True}):
        found = run(device="cuda", **options)
        assert (found - expected).abs().mean() < 0.02


def test_experts_in_fp8_get_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from segue.kernels import plan_store
    from segue.kernels.model_gemm import ModelExperts
    from segue.kernels.moe_plan import TOKENS
    from segue.kernels.plan_store import PlanCache
    from segue.kernels.triton.launch import device_facts
    from segue.kernels.triton.plan_timing import find_plans

    monkeypatch.setattr(plan_store, "_found", {})
    layers = [
        (
            weights(32, 1536, 1024, 128, torch.bfloat16, seed),
            weights(32, 1024, 768, 128, torch.bfloat16, seed),
        )
        for seed in range(2)
    ]
    cache = PlanCache.of(tmp_path, device_facts(), {})
    found, text = find_plans([ModelExperts(weights=layers, per_token=4)], cache, budget_s=20)
    assert list(found) == ["32x4x768x1024 fp8/128"]
    assert text.startswith(f"{len(TOKENS)} of {len(TOKENS)} timed in ")
