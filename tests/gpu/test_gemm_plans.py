"""Plans that are found at a start: right, faster than cuBLAS, kept, and within the budget."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import segue
from segue.kernels.gemm_plan import ROWS, GemmPlan, candidates
from segue.kernels.model_gemm import ModelGemm
from segue.kernels.plan_store import PlanCache
from tests.model_runner import making, tiny

pytestmark = pytest.mark.gpu


def model_gemm(kind, size, depth, *, rows, copies=4, biased=False, dtype=torch.bfloat16) -> ModelGemm:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    return ModelGemm(
        weights=[normal(size, depth) * depth**-0.5 for _ in range(copies)],
        bias=normal(size) if biased else None,
        kind=kind,
        dtype=dtype,
        first_rows=rows,
        last_rows=rows,
    )


KINDS = [("split", False), ("split", True), ("whole", True), ("gated", False)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "biased"), KINDS)
def test_every_candidate_is_right(kind, biased, rows) -> None:
    from segue.kernels.triton import gemm
    from segue.kernels.triton.launch import device_facts

    own = model_gemm(kind, 3072, 2560, rows=rows, biased=biased)
    [shape] = own.shapes()
    x = torch.randn(rows, 2560, device="cuda").to(torch.bfloat16)
    exact = F.linear(x.double(), own.weights[0].double(), own.bias.double() if biased else None)
    if kind == "gated":
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    found = candidates([shape], device_facts())[shape]
    assert found
    for plan in found:
        result = gemm.run(plan, x, own.weights[0], own.bias, torch.bfloat16, gated=kind == "gated")
        result = result.sum(0) if plan.splits > 1 else result
        assert (result - exact).abs().max() <= 1e-2 * exact.abs().max(), plan


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("splits", [3, 7, 13])
def test_splits_of_unequal_length_add_up(splits, tma) -> None:
    """76 steps: 26 + 26 + 24, six times 11 + 10, and twelve times 6 + 4."""
    from segue.kernels.triton import gemm

    own = model_gemm("split", 2560, 9728, rows=5, copies=1, biased=True)
    x = torch.randn(5, 9728, device="cuda").to(torch.bfloat16)
    parts = gemm.run(GemmPlan(tma, 16, 64, 128, splits, 4, 4), x, own.weights[0], own.bias, torch.bfloat16)
    exact = F.linear(x.double(), own.weights[0].double(), own.bias.double())
    assert parts.shape == (splits, 5, 2560)
    assert (parts.sum(0) - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.fixture
def cache(tmp_path) -> PlanCache:
    from segue.kernels.triton.launch import device_facts

    return PlanCache.of(tmp_path, device_facts(), {"torch": torch.__version__})


@pytest.fixture
def no_plans(monkeypatch) -> Iterator[None]:
    """A process that has found no plans yet."""
    from segue.kernels import plan_store
    from segue.kernels.triton import gemm, moe

    monkeypatch.setattr(plan_store, "_found", {})
    for cached in (gemm.choose, moe.choose):
        cached.cache_clear()
    yield
    for cached in (gemm.choose, moe.choose):
        cached.cache_clear()


def test_plans_are_found_kept_and_used(no_plans, cache) -> None:
    from segue.kernels.triton import gemm
    from segue.kernels.triton.plan_timing import find_plans, use_plans

    gemms = [model_gemm("split", 2560, 9728, rows=8), model_gemm("gated", 19456, 2560, rows=8)]
    began = time.monotonic()
    found, text = find_plans(gemms, cache)
    assert time.monotonic() - began < 10
    assert text.startswith("2 of 2 timed in ")
    assert set(found["2560x9728"]["8"]) == {"split"}
    assert cache.load() == found
    assert find_plans(gemms, cache) == (found, "all are stored or cached")
    use_plans(found)
    plan = found["2560x9728"]["8"]["split"]
    assert gemm.choose(8, 9728, 2560, torch.bfloat16, "split") == (GemmPlan(**plan) if plan else None)
    assert gemm.choose(8, 9728, 2560, torch.float16, "split") is None


def test_a_plan_that_was_found_is_faster_than_cublas(cache) -> None:
    """Measured again, with a margin for noise."""
    from segue.kernels.triton import gemm
    from segue.kernels.triton.plan_timing import ChainTimer, find_plans

    own = model_gemm("split", 2560, 4096, rows=8, copies=12)
    found, _ = find_plans([own], cache)
    if (plan := found["2560x4096"]["8"]["split"]) is None:
        pytest.skip("cuBLAS is the fastest here")
    x = torch.randn(8, 4096, device="cuda").to(torch.bfloat16)
    timer, weights = ChainTimer(), own.weights
    ours = timer(lambda i: gemm.run(GemmPlan(**plan), x, weights[i % 12], None, torch.bfloat16), 36)
    assert ours < 1.05 * timer(lambda i: F.linear(x, weights[i % 12]), 36)


def test_a_plan_has_to_be_faster_for_the_fewest_rows_that_it_serves(cache, monkeypatch) -> None:
    """cuBLAS has tiles for 40 rows, and the tile of a plan is padded to 64."""
    from segue.kernels.triton import plan_tasks, plan_timing

    library = {33: 5.0, 64: 10.0}
    asked = set()

    def timer(run, copies: int) -> float:
        plan, (x,) = run.args
        asked.add(len(x))
        return 6.0 if plan else library[len(x)]

    monkeypatch.setattr(plan_timing, "ChainTimer", lambda: timer)
    monkeypatch.setattr(plan_tasks.GemmTask, "reading", lambda self, plan: 0.0)
    own = model_gemm("split", 2560, 4096, rows=64)
    own = dataclasses.replace(own, first_rows=33)
    found, _ = plan_timing.find_plans([own], cache)
    assert found == {"2560x4096": {"64": {"split": None}}}
    assert asked == {33, 64}


def test_experts_get_plans(no_plans, cache) -> None:
    from segue.kernels.model_gemm import ModelExperts
    from segue.kernels.moe_plan import TOKENS, MoEPlan
    from segue.kernels.triton import moe
    from segue.kernels.triton.plan_timing import find_plans, use_plans

    def layer() -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (32, 1536, 1024), (32, 1024, 768)
        gate_up, down = (torch.randn(shape, device="cuda").to(torch.bfloat16) * 0.03 for shape in shapes)
        return gate_up, down

    experts = ModelExperts(weights=[layer() for _ in range(3)], per_token=4)
    found, text = find_plans([experts], cache)
    assert text.startswith(f"{len(TOKENS)} of {len(TOKENS)} timed in ")
    assert list(found) == ["32x4x768x1024"]
    use_plans(found)
    for tokens, by_kind in found["32x4x768x1024"].items():
        if plan := by_kind[moe.KIND]:
            assert moe.choose(experts.shape, int(tokens), torch.bfloat16) == MoEPlan.of(plan)


def test_what_the_budget_has_no_time_for_is_neither_used_nor_kept(cache) -> None:
    from segue.kernels.triton.plan_timing import find_plans

    found, text = find_plans([model_gemm("split", 2560, 1664, rows=8)], cache, budget_s=-1.0)
    assert (found, cache.load()) == ({}, {})
    assert text.startswith("0 of 1 timed")


def test_a_plan_with_wrong_results_is_refused(cache, monkeypatch, caplog) -> None:
    from segue.kernels.triton import gemm
    from segue.kernels.triton.plan_timing import find_plans

    run = gemm.run
    monkeypatch.setattr(gemm, "run", lambda *args, **kwargs: run(*args, **kwargs) * 1.1)
    found, _ = find_plans([model_gemm("split", 2560, 4096, rows=8)], cache)
    assert found == {"2560x4096": {"8": {"split": None}}}
    assert "wrong results" in caplog.text


def test_a_second_start_times_nothing(tmp_path) -> None:
    """The weights are large enough to be timed."""
    tiny.save_llama(tmp_path, hidden_size=1024, intermediate_size=2560, num_hidden_layers=1)
    options = making.options(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        page_size=16,
        cache_dir=str(tmp_path / "cache"),
    )
    details = []
    for _ in range(2):
        with segue.Engine(**options, embedded=True) as engine:
            steps = engine.get_server_info()["decided"]["init_steps"]
        details.append(next(step["detail"] for step in steps if step["name"] == "GEMM plans"))
    assert " timed in " in details[0]
    assert details[1] == "all are stored or cached"


@pytest.mark.timeout(300)  # it takes minutes where few cores compile
def test_all_kernels_compile_for_devices_that_are_not_here() -> None:
    command = [sys.executable, "-m", "bench.compile_kernels", "80", "89", "90", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
