"""FP8 on CUDA: kernels and engines compared with the CPU's, and that few rows read no dequantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import segue
from segue.distributed.info import TPInfo
from segue.kernels.fp8 import dequantize, quantize
from segue.messages.weight_update import Commit, Take
from tests.checkpoint import tiny, tiny_fp8
from tests.gpu.test_kernels import normal
from tests.model_runner import making
from tests.weight_update.updating import rank_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def logprobs_of_prompts(engine: segue.Engine, prompts: list[list[int]]) -> torch.Tensor:
    found = engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    )
    each = [entry[0] for one in found for entry in one["meta_info"]["input_token_logprobs"]]
    return torch.tensor([value for value in each if value is not None])


@pytest.mark.parametrize("block", [0, 16, 128])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64, 65, 300])
@pytest.mark.parametrize(("size", "depth"), [(100, 304), (1536, 576), (6144, 4096), (4096, 12288)])
def test_gemm(size: int, depth: int, rows: int, may_split: bool, has_bias: bool, block: int) -> None:
    from segue.kernels.triton.fp8_gemm import fp8_linear
    from segue.kernels.triton.fp8_tokens import takes_fp8

    x = normal(rows, depth, dtype=torch.bfloat16)
    weight, scales = quantize(normal(size, depth, seed=1).mul_(0.02), block)
    weight = weight.contiguous()
    bias = normal(size, dtype=torch.bfloat16, seed=2) if has_bias else None
    found = fp8_linear(x, weight, scales, block, bias, may_split=may_split)
    if found.dim() == 3:
        found = found.sum(0)
    tokens = x.float()
    if takes_fp8(rows, weight, block, x.dtype):
        tokens = dequantize(*quantize(x, block, num_scales=1), block)
    expected = tokens @ dequantize(weight, scales, block).T + (0 if bias is None else bias.float())
    assert (found.float() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_in_fp8_is_turned_to_the_dtype_of_activations_exactly(dtype: torch.dtype) -> None:
    from segue.kernels.triton.fp8_gemm import fp8_linear

    numbers = torch.arange(256, dtype=torch.uint8, device="cuda")
    numbers[(numbers & 0x7F) == 0x7F] = 0  # NaN
    x, scales = torch.eye(16, 256, dtype=dtype, device="cuda"), torch.ones(256, 1, device="cuda")
    for shift in range(0, 256, 16):  # each number is in each place of a word
        weight = torch.stack([numbers.roll(shift + row) for row in range(256)]).view(torch.float8_e4m3fn)
        found = fp8_linear(x, weight, scales, 0, None, may_split=False)
        assert torch.equal(found, weight.to(dtype).T[:16])


@pytest.mark.parametrize("block", [0, 16, 128])
@pytest.mark.parametrize(
    ("kind", "rows"), [("split", 1), ("split", 33), ("whole", 16), ("gated", 17), ("gated", 64)]
)
def test_every_plan_that_a_start_tries_is_right(kind: Any, rows: int, block: int) -> None:
    from segue.kernels.fp8_plan import FP8Shape, candidates
    from segue.kernels.triton.fp8_gemm import run_fp8
    from segue.kernels.triton.launch import device_facts

    shape = FP8Shape(rows, 4096, 12288, block, kind)
    x = normal(rows, shape.depth, dtype=torch.bfloat16) * torch.logspace(-3, 3, rows, device="cuda")[:, None]
    x = x.to(torch.bfloat16)
    weight, scales = quantize(normal(shape.size, shape.depth, seed=1).mul_(0.02), block)
    weight, bias = weight.contiguous(), normal(shape.size, dtype=torch.bfloat16, seed=2)
    expected = x.double() @ dequantize(weight, scales, block).T.double()
    if kind == "gated":
        gate, up = expected.chunk(2, -1)
        expected, bias = torch.nn.functional.silu(gate) * up, None
    else:
        expected += bias.double()
    plans = candidates([shape], device_facts())[shape]
    assert {plan.fp8_tokens for plan in plans} == ({False} if block == 16 else {False, True})
    for plan in plans:
        found = run_fp8(plan, x, weight, scales, block, bias, gated=kind == "gated").double()
        found = found.sum(0) if plan.splits > 1 else found
        assert ((found - expected).norm(dim=1) < 4e-3 * expected.norm(dim=1)).all(), plan


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("kind", ["split", "whole", "gated"])
@pytest.mark.parametrize(("rows", "block_m"), [(5, 16), (17, 16), (33, 64)])
@pytest.mark.parametrize("depth", [304, 640])
def test_tokens_split_into_two_numbers_in_fp8_need_not_fill_tiles(
    depth: int, rows: int, block_m: int, kind: str, block: int
) -> None:
    """Nor do three splits divide the blocks of a token; its blocks have factors of their own."""
    from segue.kernels.fp8_plan import FP8Plan
    from segue.kernels.triton.fp8_gemm import run_fp8

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor cores of Hopper multiply in FP8 like this")
    gated = kind == "gated"
    size = 208 if gated else 104
    x = normal(rows, depth, dtype=torch.bfloat16)
    x[1, :128], x[:, 128:256] = 0, x[:, 128:256] * 2.0**20
    weight, scales = quantize(normal(size, depth, seed=1).mul_(0.02), block)
    bias = None if gated else normal(size, dtype=torch.bfloat16, seed=2)
    expected = x.double() @ dequantize(weight, scales, block).T.double()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    else:
        expected += bias.double()
    plan = FP8Plan(block_m, 64, 128, 3 if kind == "split" else 1, stages=3, warps=4, fp8_tokens=True)
    found = run_fp8(plan, x, weight.contiguous(), scales, block, bias, gated=gated).double()
    found = found.sum(0) if plan.splits > 1 else found
    assert ((found - expected).norm(dim=1) < 4e-3 * expected.norm(dim=1)).all()


def test_a_start_finds_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from segue.kernels import plan_store
    from segue.kernels.fp8_plan import FP8Plan, FP8Shape
    from segue.kernels.model_gemm import ModelFP8Gemm
    from segue.kernels.triton import fp8_gemm, plan_timing
    from segue.kernels.triton.launch import device_facts

    monkeypatch.setattr(plan_store, "_found", {})
    weights = [quantize(normal(6144, 4096, seed=seed)) for seed in range(4)]
    weights = [(weight.contiguous(), scales) for weight, scales in weights]
    common: dict[str, Any] = {"weights": weights, "block": 0, "bias": None, "first_rows": 1, "last_rows": 64}
    kinds = [ModelFP8Gemm(**common, kind=kind) for kind in ("split", "gated")]
    cache = plan_store.PlanCache.of(tmp_path, device_facts(), {})
    found, text = plan_timing.find_plans(kinds, cache)
    print(text, found)
    assert text.startswith("8 of 8 timed in ")
    plan_timing.use_plans(found)
    for rows, by_kind in found["6144x4096 fp8"].items():
        for kind, plan in by_kind.items():
            chosen = fp8_gemm.choose_fp8(FP8Shape(int(rows), 6144, 4096, 0, kind), torch.bfloat16)
            assert chosen == (FP8Plan(**plan) if plan else None)
    fp8_gemm.choose_fp8.cache_clear()


def test_a_start_goes_without_a_plan_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from segue.kernels import fp8_plan
    from segue.kernels.model_gemm import ModelFP8Gemm
    from segue.kernels.plan_store import PlanCache
    from segue.kernels.triton import plan_timing
    from segue.kernels.triton.launch import device_facts

    large = fp8_plan.FP8Plan(64, 128, 256, splits=1, stages=6, warps=4)
    monkeypatch.setattr(fp8_plan, "candidates", lambda shapes, device: {shape: [large] for shape in shapes})
    weight, scales = quantize(normal(4096, 4096), 16)
    common: dict[str, Any] = {"block": 16, "bias": None, "first_rows": 33, "last_rows": 64}
    own = ModelFP8Gemm(weights=[(weight.contiguous(), scales)], kind="split", **common)
    found, _ = plan_timing.find_plans([own], PlanCache.of(tmp_path, device_facts(), {}))
    assert found == {"4096x4096 fp8/16": {"64": {"split": None}}}
    assert "a plan cannot run: OutOfResources" in caplog.text


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**127)], ids=str)
def test_a_token_that_is_not_finite_gives_no_result_like_others(value: float, block: int) -> None:
    """Nor does one that is almost too large."""
    from segue.kernels.fp8_plan import FP8Plan
    from segue.kernels.triton.fp8_gemm import run_fp8
    from segue.kernels.triton.fp8_tokens import multiply_in_fp8, quantize_tokens
    from segue.kernels.triton.gate_up_silu import silu_mul_fp8
    from segue.kernels.triton.norm import add_rms_norm

    size = 256
    weight, scales = quantize(normal(size, size, seed=1), block)
    weight = weight.contiguous()
    x = normal(70, size, dtype=torch.bfloat16)
    x[1, 3] = x[2, 200] = value
    found: dict[Any, torch.Tensor] = {}
    for fp8_tokens in {False, torch.cuda.get_device_capability() >= (9, 0)}:
        plan = FP8Plan(16, 64, 128, splits=1, stages=3, warps=4, fp8_tokens=fp8_tokens)
        found[plan] = run_fp8(plan, x[:8], weight, scales, block, None)
    if torch.cuda.get_device_capability() >= (9, 0) and value != -(2.0**127):  # a norm makes that 0
        ones = torch.ones_like(x)
        tokens = {"quantized": quantize_tokens(x, block)}
        tokens["norm"] = add_rms_norm(x, None, ones[0], 1e-6, fp8_block=block)[0]
        tokens["activation"] = silu_mul_fp8(torch.cat([ones, x], 1), block)
        found |= {name: multiply_in_fp8(each, weight, scales, None) for name, each in tokens.items()}
    for name, result in found.items():
        is_like_others = result.abs() < 1e30
        assert not is_like_others[1:3].any() and is_like_others[0].all() and is_like_others[3:].all(), name


def test_large_weights_and_many_rows_are_multiplied_in_fp8() -> None:
    from segue.kernels.triton.fp8_tokens import can_multiply_in_fp8

    for block in (0, 128):
        found = can_multiply_in_fp8(6144, 4096, block, torch.bfloat16)
        assert found == (torch.cuda.get_device_capability() >= (9, 0))
        assert not can_multiply_in_fp8(1536, 576, block, torch.bfloat16)
    assert not can_multiply_in_fp8(6144, 4096, 16, torch.bfloat16)


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(("rows", "depth"), [(1, 16), (7, 576), (300, 4096), (65, 12288)])
def test_tokens_are_quantized_as_on_a_cpu(rows: int, depth: int, block: int) -> None:
    from segue.kernels.triton.fp8_tokens import quantize_tokens

    x = normal(rows, depth, dtype=torch.bfloat16)
    x[0] = 0
    found = quantize_tokens(x, block)
    expected, of_rows = quantize(x.cpu(), block, num_scales=1)
    assert torch.equal(found.scales.cpu(), of_rows)
    assert torch.equal(found.values.cpu().float(), expected.float())


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(("rows", "size"), [(65, 4096), (300, 12288), (70, 5120)])
def test_an_activation_quantizes_like_the_kernel_that_only_does_that(
    rows: int, size: int, block: int
) -> None:
    from segue.kernels.triton.fp8_tokens import quantize_tokens
    from segue.kernels.triton.gate_up_silu import silu_mul, silu_mul_fp8

    gate_up = normal(rows, 2 * size, dtype=torch.bfloat16)
    gate_up[1] = 0
    found, expected = silu_mul_fp8(gate_up, block), quantize_tokens(silu_mul(gate_up, torch.bfloat16), block)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("rows", "size"), [(65, 4096), (300, 12288), (70, 5120)])
def test_a_norm_quantizes_what_it_would_give_but_for_rounding(
    rows: int, size: int, splits: int, block: int
) -> None:
    """Both norms add up the squares in an order of their own, so bfloat16 may be rounded the other way."""
    from segue.kernels.triton.fp8_tokens import quantize_tokens
    from segue.kernels.triton.norm import add_rms_norm

    x, residual = (normal(rows, size, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    x[0] = residual[0] = 0
    weight = normal(size, dtype=torch.bfloat16, seed=2)
    branch = x if splits == 1 else torch.stack([x.float(), x.float() * 0.5])
    found, total = add_rms_norm(branch, residual, weight, 1e-6, fp8_block=block)
    normed, of_both = add_rms_norm(branch, residual, weight, 1e-6)
    expected = quantize_tokens(normed, block)
    assert torch.equal(total, of_both)
    step = 2**-7  # from a number in bfloat16 to the next one, relative to it, at most
    torch.testing.assert_close(found.scales, expected.scales, rtol=1.01 * step, atol=0)
    bits = [each.values.view(torch.uint8).int() for each in (found, expected)]
    steps = [torch.where(each < 128, each, 128 - each) for each in bits]  # numbers in FP8, counted from 0
    apart = (steps[0] - steps[1]).abs()
    share = (apart > 0).double().mean().item()
    print(f"{share:.1e} of the values differ")
    assert apart.max() <= 1 and share < 2e-3


@pytest.mark.parametrize("layout", ["float32", "blocks"])
def test_quantizing_early_changes_logprobs_by_rounding_alone(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.kernels.triton import fp8_tokens
    from segue.layers.blocks import Linear

    monkeypatch.setattr(fp8_tokens, "_MIN_WEIGHTS", 1)
    fp8_tokens.can_multiply_in_fp8.cache_clear()
    model = tiny_fp8.model("qwen3", vocab_size=making.VOCAB, head_dim=64, hidden_size=1024)
    tiny.save(model, tmp_path) if layout == "float32" else tiny_fp8.write(tmp_path, layout, model)
    asked = []

    def run() -> torch.Tensor:
        options: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "quantization": "fp8",
            "num_kv_tokens": 16384,
            "gemm_plans": "stored",  # those that a start finds may differ from run to run
        }
        with segue.Engine(str(tmp_path), **options, embedded=True) as engine:
            return logprobs_of_prompts(engine, [making.prompt(70 + i, seed=i) for i in range(3)])

    fp8_block = Linear.fp8_block
    monkeypatch.setattr(Linear, "fp8_block", lambda *args: asked.append(fp8_block(*args)) or asked[-1])
    early = run()
    assert {block for block in asked if block is not None} == {0 if layout == "float32" else 128}
    monkeypatch.setattr(Linear, "fp8_block", lambda *args: None)
    difference = (run() - early).abs()
    print(f"logprobs differ by {difference.mean().item():.1e}, {difference.max().item():.1e} at most")
    assert difference.mean() < 2e-3
    fp8_tokens.can_multiply_in_fp8.cache_clear()


@pytest.mark.parametrize("block", [0, 16, 128])
def test_weights_have_the_bits_of_a_cpu(block: int) -> None:
    values = normal(300, 1000, dtype=torch.bfloat16)
    for on_cuda, on_cpu in zip(quantize(values, block), quantize(values.cpu(), block), strict=True):
        assert torch.equal(on_cuda.cpu().view(torch.uint8), on_cpu.view(torch.uint8))


@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("qwen3", layout) for layout in ("float32", *tiny_fp8.LAYOUTS)),
        *(("qwen3-moe", layout) for layout in ("float32", "blocks", "rows")),
    ],
)
def test_loading_and_updating_give_the_bits_of_a_cpu(
    kind: str, layout: str, tp: TPInfo, tmp_path: Path
) -> None:
    models = [tiny_fp8.model(kind) for _ in range(2)]
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for number, model in enumerate(models):
        path = tmp_path / str(number)
        tiny.save(model, path) if layout == "float32" else tiny_fp8.write(path, layout, model)
    state = {name: tensor.bfloat16() for name, tensor in models[1].state_dict().items()}
    with (
        rank_of(tmp_path / "0", tp, device="cuda:0", quantization="fp8") as gpu,
        rank_of(tmp_path / "0", tp, quantization="fp8") as cpu,
    ):
        assert gpu.served.arena.checksum() == cpu.served.arena.checksum()
        for rank in (gpu, cpu):
            rank.do(Take, session=1, payload=save(state), copy=True)
            rank.do(Commit, session=1)
        assert gpu.served.arena.checksum() == cpu.served.arena.checksum()


@pytest.mark.parametrize(
    ("layout", "kv"), [*((layout, "auto") for layout in ("float32", *tiny_fp8.LAYOUTS)), ("float32", "fp8")]
)
def test_an_engine_agrees_with_one_on_a_cpu(layout: str, kv: str, tmp_path: Path) -> None:
    """Prompts and decoded tokens, eagerly and from graphs, for few requests and for more than 64."""
    model = tiny_fp8.model("qwen3", vocab_size=making.VOCAB, head_dim=64)
    tiny.save(model, tmp_path) if layout == "float32" else tiny_fp8.write(tmp_path, layout, model)
    prompts = [making.prompt(3 + i % 70, seed=i) for i in range(80)]

    def run(**options: Any) -> torch.Tensor:
        common = {"model": str(tmp_path), "quantization": "fp8", "dtype": "bfloat16", "num_kv_tokens": 16384}
        common |= {"kv_cache_dtype": kv}
        with segue.Engine(**common, **options, max_running_requests=80, embedded=True) as engine:
            return logprobs_of_prompts(engine, prompts)

    expected = run(device="cpu")
    for options in ({}, {"disable_cuda_graph": True}):
        found = run(device="cuda", **options)
        assert (found - expected).abs().mean() < 0.02


def test_with_kv_in_fp8_chunks_and_cached_prefixes_change_no_bit(tmp_path: Path) -> None:
    """A deterministic engine: decode and prompts read the same keys and values, whoever has computed them."""
    tiny.save(tiny_fp8.model("qwen3", vocab_size=making.VOCAB, head_dim=64), tmp_path)
    common = {"model": str(tmp_path), "dtype": "bfloat16", "num_kv_tokens": 16384, "kv_cache_dtype": "fp8"}

    def run(repeat: int = 1, **options: Any) -> Any:
        with segue.Engine(**common, **options, deterministic=True, embedded=True) as engine:
            for _ in range(repeat):
                found = engine.generate(
                    input_ids=[making.prompt(200, seed=i) for i in range(5)],
                    sampling_params={"max_new_tokens": 30, "temperature": 0.0},
                    return_logprob=True,
                )
        return [one["meta_info"]["output_token_logprobs"] for one in found]

    whole = run(disable_prefix_cache=True)
    assert run(disable_prefix_cache=True, chunked_prefill_size=100) == whole
    assert run(repeat=2) == whole
