"""The steps that compile all kernels before an engine is ready: no step of a request needs another variant.

The tests of variants need Triton, but no GPU.
"""

from __future__ import annotations

import ast
import math
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import segue
from segue.layers.blocks import Linear
from segue.messages.control import EngineLimits
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NewSlot, StepPlan
from segue.model_runner import graphs
from segue.model_runner.warm_up import (
    SAMPLING,
    WarmUpStep,
    all_steps,
    captured_sizes,
    representatives,
    row_steps,
)
from tests.support import fake_cuda as fake
from tests.support.fake_cuda import QWEN3, FakeModel, Variants, recorded

fake_cuda = fake.fake_cuda
SOURCE = Path(segue.__file__).parent
# Kernels that the warm-up's steps launch, by the module that defines them.
OF_STEPS = {
    *("attention.attend", "attention.decode", "attention.plan_decode", "gemm._gemm"),
    *("gate_up_silu._gate_up_silu", "gate_up_silu._silu_mul", "norm._add_rms_norm"),
    *("norm._qk_norm_rope_store", "all_reduce._add_rms_norm", "step_inputs._embed_inputs"),
    *("step_inputs._list_pages", "step_inputs._scatter", "sampling._choose_block"),
    *("sampling._choose_token", "sampling._sum_chunk", "sampling._sum_row"),
    *("moe_gemm.down_by_token", "moe_gemm.gate_up_by_pair", "moe_gemm.gemm_by_tile", "moe_gemm.sum_pairs"),
    *("moe_routing._count", "moe_routing._route", "moe_routing._sort"),
    *("fp8_gemm._fp8_gemm", "fp8_tokens._quantize_tokens", "fp8_tokens._block_gemm"),
    *("gate_up_silu._silu_mul_fp8", "gemv._gemv", "token_attention._attend_token"),
}
OF_PLANS = {"fp8_gemm._split_tokens"}  # launched by steps too, if the start found such a plan
# The others, and what compiles them before an engine is ready. None is left that no request can reach.
OF_OTHERS = {
    "grouped_copy._copy": "memory.tensor_ops.warm_up",
    "grouped_copy._find_non_finite": "memory.tensor_ops.warm_up",
    "page_slices._copy_slices": "disagg.transports.cuda_ipc.warm_up",
}


def embed_inputs(numbers: torch.Tensor, pool: torch.Tensor) -> None:
    """Launch a small kernel."""
    from segue.kernels.triton import step_inputs

    weight = torch.ones(9, 64)
    step_inputs.embed_inputs(numbers, numbers, pool, pool, weight, 0, page_size=4, page_rows=8)


def limits(**changes: int) -> EngineLimits:
    sizes = {"num_pages": 8, "page_size": 4, "max_seq_len": 100, "max_running_requests": 20}
    return EngineLimits(**sizes | {"chunked_prefill_size": 64} | changes)


def is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) == "triton.jit"


def launches(path: Path) -> Iterator[str]:
    """Yield the kernels that a module launches, by `kernel[grid](...)`."""
    tree = ast.parse(path.read_text())
    home = {
        node.name: path.stem
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("segue.kernels.triton."):
            home |= {alias.asname or alias.name: node.module.rpartition(".")[2] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name in home:
                yield f"{home[name]}.{name}"
            elif (SOURCE / "kernels" / "triton" / f"{name.partition('.')[0]}.py").exists():
                yield name


def test_every_kernel_that_is_launched_is_compiled_at_the_start() -> None:
    files = [*(SOURCE / "kernels" / "triton").glob("*.py"), SOURCE / "attention" / "triton.py"]
    users = [path for path in SOURCE.rglob("*.py") if "segue.kernels.triton" in path.read_text()]
    found = {kernel for path in {*files, *users} for kernel in launches(path)}
    assert found == OF_STEPS | OF_PLANS | OF_OTHERS.keys()
    for function in OF_OTHERS.values():
        module, _, name = function.rpartition(".")
        tree = ast.parse((SOURCE / (module.replace(".", "/") + ".py")).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_interval_of_rows_is_represented() -> None:
    steps = {3, 8, 40, 100}
    found = representatives(steps, 50)
    assert found == [1, 3, 8, 40, 50]
    classes = {sum(step < rows for step in steps) for rows in range(1, 51)}
    assert {sum(step < rows for step in steps) for rows in found} == classes
    assert representatives(steps, 1) == [1]


def test_of_captured_sizes_the_first_of_each_interval_is_run() -> None:
    assert captured_sizes([16, 1, 2, 8, 4, 3], {3, 8}) == [1, 4, 16]


@pytest.mark.parametrize(
    "changes", [{}, {"chunked_prefill_size": 4, "max_running_requests": 2}, {"max_seq_len": 2}]
)
def test_the_work_fits_an_engine(changes: dict[str, int]) -> None:
    sizes = limits(**changes)
    rows, chunk = sizes.max_running_requests, sizes.chunked_prefill_size
    found = [*all_steps({3, 8, 40}, sizes)]
    for step in found:
        plan = step.plan(1)
        assert 0 < len(plan.slots) <= rows and max(plan.slots) < rows
        assert plan.num_tokens <= rows + chunk and max(plan.lens) < sizes.max_seq_len
        assert plan.pages == [] and plan.starts == [0] * len(plan.slots)
        assert all(new.prompt_len == length for new, length in zip(plan.new_slots, plan.lens, strict=True))
    assert {step.mode for step in found} == set(SAMPLING)
    assert any(step.decode for step in found) and any(step.prompts for step in found)


def test_every_mode_of_sampling_has_a_request_that_needs_it() -> None:
    assert [params.sampling_mode for params in SAMPLING.values()] == [*SAMPLING]


def test_a_scored_prompt_has_the_logits_of_all_its_tokens() -> None:
    plan = WarmUpStep(prompts=(9,), scores=True).plan(1)
    assert (plan.num_logits, plan.sampling_mode) == ([9], "full")
    assert plan.new_slots[0].params.prompt_logprobs_start == 0


def requests(rng: random.Random, model: FakeModel, count: int) -> Iterator[StepPlan]:
    """Yield random plans, of the next steps: decode, prompts, both, and prompts with log-probabilities."""
    sizes = model.limits
    rows, chunk, longest = sizes.max_running_requests, sizes.chunked_prefill_size, sizes.max_seq_len - 1
    for _ in range(count):
        kind, few = rng.choice(("decode", "prompts", "both", "scored")), rng.choice((8, 16, rows))
        decode = 0 if kind in ("prompts", "scored") else rng.randint(1, min(few, rows - (kind == "both")))
        prompts: list[int] = []
        if kind != "decode":
            left = rng.randint(1, min(chunk, rng.choice((16, 300, chunk))))
            while left and len(prompts) < rows - decode:
                prompts.append(rng.randint(1, min(left, longest, rng.choice((8, longest)))))
                left -= prompts[-1]
        lens = [1] * decode + prompts
        samples = [True] * decode + [rng.random() < 0.7 for _ in prompts]
        mode = "full" if kind == "scored" else rng.choice([*SAMPLING])
        params = rng.choice((SAMPLING[mode], SamplingParams(max_new_tokens=9, temperature=0.0)))
        params = msgspec.structs.replace(params, logprobs=rng.choice((-1, 0, 3 if mode == "full" else 0)))
        yield StepPlan(
            model.state.step + 1,
            new_slots=[NewSlot(slot, pack_ids([0] * n), n, params) for slot, n in enumerate(lens)],
            num_decode=decode,
            slots=[*range(len(lens))],
            starts=[0] * len(lens),
            lens=lens,
            num_logits=lens if kind == "scored" else [int(each) for each in samples],
            samples=samples,
            sampling_mode=mode,
        )


def missing(found: Variants, warmed: Variants) -> list[tuple[str, str]]:
    return sorted(found.keys() - warmed.keys())


def warmed_by(model: FakeModel, patch: pytest.MonkeyPatch) -> Variants:
    """The variants that the warm-up compiles."""
    from segue.model_runner import cuda_executor

    patch.setattr(cuda_executor, "compiled_together", recorded)
    found: Variants = model.executor.warm_up(model.limits, captures=True)
    return found


FP8 = {
    "hidden_size": 4096,
    "quantization_config": {"quant_method": "fp8"},
}  # large enough for products in FP8
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {},
    "few rows": {"rows": 8, "chunk": 4, "max_seq_len": 64},
    "many rows": {"rows": 1024, "chunk": 2048},
    "float32": {"dtype": torch.float32, "rows": 16, "chunk": 64, "max_seq_len": 300},
    "odd heads": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "head_dim": 64},
    "experts": fake.EXPERTS,
    "FP8": FP8,
    "FP8, blocks": {**FP8, **FP8_BLOCKS, "rows": 600, "chunk": 2048},
    "FP8, small": {**FP8_BLOCKS, "rows": 1024, "chunk": 16384},
    "experts in FP8": {**fake.EXPERTS, **FP8_BLOCKS, "rows": 16, "chunk": 300, "max_seq_len": 600},
    "deterministic": {"deterministic": True},
    "KV in FP8": {"fp8_kv": True},
    "deterministic, KV in FP8": {"deterministic": True, "fp8_kv": True},
    "two ranks": {"ranks": 2, "one_shot": True},
    "two ranks by NCCL": {"ranks": 2},
    "FlashInfer": {"flashinfer": True, "rows": 64, "chunk": 300},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_step_needs_a_variant_that_the_warm_up_lacks(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = FakeModel(**MODELS[name])
    warmed = warmed_by(model, monkeypatch)
    assert model.state.step == 0
    with recorded() as eager:
        for plan in requests(random.Random(1), model, 40):
            model.executor.run(plan).result()
    assert not missing(eager, warmed)
    model.state.step = 0
    model.executor._inputs.clear()
    with recorded() as captured, torch.inference_mode():
        assert model.executor.capture(lambda: 0, 1) == []
    assert not missing(captured, warmed)
    monkeypatch.setattr(graphs.Graphs, "replay", lambda *_: None)
    with recorded() as replayed:
        for plan in requests(random.Random(2), model, 40):
            model.executor.run(plan).result()
    assert not missing(replayed, warmed) and len(replayed) < len(eager)


def test_the_warm_up_knows_the_plans_that_the_start_found(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights in FP8: each number of rows has another number of splits, and other readers of them."""
    from segue.kernels import plan_store
    from segue.kernels.fp8_plan import FP8Plan, FP8Shape
    from segue.kernels.triton import fp8_gemm

    model = FakeModel(**FP8_BLOCKS, rows=40, chunk=300)
    found: plan_store.Plans = {}
    for splits, rows in enumerate((1, 5, 10, 14, 47), 2):  # nothing else changes there
        plans = {
            kind: asdict(FP8Plan(64, 64, 128, count, 3, 4, fp8_tokens=splits % 2 == 0))
            for kind, count in (("split", splits), *[("gated", 1)] * (splits % 2))
        }
        for module in model.model.modules():
            if isinstance(module, Linear) and module.scale is not None:
                key = FP8Shape(1, *module.weight.shape, module.block, "split").key
                found.setdefault(key, {})[str(rows)] = plans
    monkeypatch.setattr(plan_store, "_found", found)
    fp8_gemm.choose_fp8.cache_clear()
    warmed = warmed_by(model, monkeypatch)
    with recorded() as needed:
        for plan in requests(random.Random(1), model, 40):
            model.executor.run(plan).result()
    fp8_gemm.choose_fp8.cache_clear()
    assert not missing(needed, warmed)
    assert sum(kernel == "norm._add_rms_norm" for kernel, _ in needed) > 5
    assert {kernel for kernel, _ in needed} >= OF_PLANS


def test_together_the_models_launch_every_kernel(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for options in (
        {"rows": 64},
        {**FP8, "rows": 16},
        {**FP8, **FP8_BLOCKS, "rows": 16},
        {**fake.EXPERTS, "rows": 16},
        {"ranks": 2, "one_shot": True, "rows": 16},
        {"flashinfer": True, "rows": 16},
    ):
        names |= {kernel for kernel, _ in warmed_by(FakeModel(**options), monkeypatch)}
    assert names == OF_STEPS


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float16}, fake.EXPERTS], ids=["Qwen3", "float16", "MoE"]
)
def test_a_step_of_one_token_has_four_kernels_around_its_layers(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Each kernel takes 2 µs or more, however little it does."""
    from triton.runtime.jit import JITFunction

    model, launched = FakeModel(**options, rows=8, chunk=16), list[str]()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with torch.inference_mode():
        model.executor._run_decode(1)
    assert launched[:3] == ["_embed_inputs", "_gemv", "_attend_token"]
    assert launched[-3:] == ["_gemv", "_choose_block", "_choose_token"]
    if not options.get("num_experts"):
        layer = ["_gemv", "_attend_token", "_gemv", "_gemv", "_gemv"]
        assert launched[1:-3] == layer * model.config.num_layers


@pytest.mark.parametrize(("heads", "dim"), [(64, 64), (64, 128), (33, 128)])
def test_attention_of_one_token_is_for_groups_that_fit_the_registers(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, heads: int, dim: int
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": dim}
    found = {kernel for kernel, _ in warmed_by(FakeModel(**sizes, rows=2, chunk=16), monkeypatch)}
    assert ("token_attention._attend_token" in found) == (heads * dim <= 4096)
    assert "attention.decode" in found


def test_only_layers_that_differ_are_run(fake_cuda: None) -> None:
    model = FakeModel(**fake.EXPERTS, rows=8, chunk=64, max_seq_len=64, num_hidden_layers=9).model
    before = [*model.layers]
    with model.distinct_layers():
        assert [*model.layers] == [before[0], before[1], before[8]]  # the second one alone is dense
    assert [*model.layers] == before
    dense = FakeModel(rows=8, chunk=64, max_seq_len=64).model
    first, _, _, last = dense.layers
    with dense.distinct_layers():
        assert [*dense.layers] == [first, last]


def test_kernels_are_compiled_and_not_launched(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from segue.kernels.compilations import compiled_together
    from segue.kernels.triton.step_inputs import embed_inputs

    loaded: list[str] = []
    launches: list[bool] = []
    launch = JITFunction.run

    def counted(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        launches.append(warmup)
        return launch(function, *args, warmup=warmup, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: loaded.append(kernel.name))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    numbers = torch.ones(9, dtype=torch.int32)
    pool, weight = torch.ones((2, 16), dtype=torch.int32), torch.ones(9, 64)
    for expected in ((2, 0), (0, 0)):  # then both variants are there
        with compiled_together(torch.device("cpu"), 1, lambda *counts: told.append(counts)) as found:
            for count in (1, 9, 2):
                of_count = numbers[:count], numbers[:count]
                found_embeds, rows = embed_inputs(*of_count, pool, pool, weight, 0, page_size=4, page_rows=8)
                assert found_embeds.tolist() == [[0.0] * 64] * count and rows.tolist() == [0] * count
        assert (found.compiled, found.loaded) == expected
    assert loaded == ["_embed_inputs"] * 2 and told == [(1, 2), (2, 2)]
    assert all(launches) and len(launches) == (2 if triton.__version__.startswith("3.6.") else 6)


@pytest.mark.parametrize("has_code_per_kernel", [True, False])
def test_a_process_compiles_what_the_cache_on_disk_lacks(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_code_per_kernel: bool
) -> None:
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.compiler import CompiledKernel

    from segue.kernels import compilations
    from segue.kernels.compile_processes import Variant, compile_variant
    from segue.kernels.triton import step_inputs

    jobs: list[Variant] = []

    def compile(job: Variant) -> bool:
        jobs.append(job)
        listener, knobs.compilation.listener = knobs.compilation.listener, None  # another process has none
        compile_variant(pickle.loads(pickle.dumps(job)))
        knobs.compilation.listener = listener
        return True

    launchers: list[Any] = []
    monkeypatch.setattr(driver, "CudaLauncher", lambda *kernel: launchers.append(kernel))
    if has_code_per_kernel:
        monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    else:
        monkeypatch.delattr(driver, "make_launcher", raising=False)
    monkeypatch.setattr(compilations, "_processes", SimpleNamespace(compile=compile))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: None)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    numbers, pool = torch.ones(9, dtype=torch.int32), torch.ones((2, 16), dtype=torch.int32)
    for expected in ((1, 0), (0, 1)):
        step_inputs._embed_inputs.device_caches.clear()
        with compilations.compiled_together(torch.device("cpu")) as found:
            embed_inputs(numbers, pool)
        assert (found.compiled, found.loaded) == expected
    assert [job.name for job in jobs] == ["_embed_inputs"] and len(launchers) == has_code_per_kernel
    step_inputs._embed_inputs.device_caches.clear()


def test_a_lean_launch_is_triton_s_launch_without_hooks(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton
    from triton import knobs
    from triton.compiler import CompiledKernel

    from segue.kernels.compilations import compiled_together
    from segue.kernels.launching import lean_launches
    from segue.kernels.triton import norm, step_inputs

    is_known = triton.__version__.startswith("3.6.")  # another version launches as ever
    launches: list[tuple[Any, ...]] = []

    def load(kernel: CompiledKernel) -> None:
        kernel.module, kernel.function, kernel._run = 1, kernel.name, lambda *args: launches.append(args)

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    numbers, pool = torch.ones(9, dtype=torch.int32), torch.ones((2, 16), dtype=torch.int32)
    x, weight = torch.ones((3, 64), dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)

    def run() -> list[tuple[Any, ...]]:
        launches.clear()
        embed_inputs(numbers, pool)
        norm.add_rms_norm(x, x, weight, 1e-6)
        return [*launches]

    with compiled_together(torch.device("cpu")):
        run()
    ours = run()
    with lean_launches():
        lean = run()
    assert len(lean) == len(ours) == 2
    for one, other in zip(ours, lean, strict=True):
        assert one[:6] == other[:6] and (other[6:9] == (None, None, None)) == is_known
        for mine, theirs in zip(one[9:], other[9:], strict=True):
            same = (
                isinstance(mine, torch.Tensor) and mine.shape == theirs.shape and mine.dtype == theirs.dtype
            )
            assert same or mine == theirs
    with lean_launches():
        thread = threading.Thread(target=run)  # of another engine, on a stream of its own
        thread.start()
        thread.join()
    assert [each[7:9] for each in launches] == [each[7:9] for each in ours]  # the hooks
    told: list[Any] = []
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [told.append])
    with lean_launches():
        assert run()[0][7] is knobs.runtime.launch_enter_hook
    for kernel in (step_inputs._embed_inputs, norm._add_rms_norm):
        kernel.device_caches.clear()


def test_a_search_for_plans_waits_while_another_engine_s_launches_are_replaced(fake_cuda: None) -> None:
    """Otherwise it would put back what the other engine has long stopped to use."""
    from triton.runtime.jit import JITFunction

    from segue.kernels.launching import launched_by
    from segue.kernels.triton.plan_timing import _kernels

    own, entered, leave = JITFunction.run, threading.Event(), threading.Event()

    def compile(plan: Any, inputs: Any) -> None:
        entered.set()
        assert leave.wait(60)

    task: Any = SimpleNamespace(run=compile)
    search = threading.Thread(target=_kernels, args=(task, None, ()))
    with launched_by(lambda launch: lambda *args, **options: launch(*args, **options)):
        search.start()
        entered.wait(0.1)
    leave.set()
    search.join(60)
    assert entered.is_set() and JITFunction.run is own


def test_processes_compile_the_kernels_of_plans_until_the_deadline(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.kernels import compilations
    from segue.kernels.triton import plan_timing

    jobs: list[str] = []
    processes = SimpleNamespace(compile=jobs.append, count=3)
    monkeypatch.setattr(compilations, "_processes", processes)
    monkeypatch.setattr(compilations, "missing_variant", lambda compile: compile())
    for deadline, expected in ((math.inf, ["kernel"]), (0.0, [])):
        jobs.clear()
        with plan_timing._UntilDeadline(deadline) as compilers:
            late = compilers.submit(lambda: "kernel").exception()
            assert compilers._threads._max_workers == 3, "no job waits for a process beyond the deadline"
        assert jobs == expected and isinstance(late, plan_timing._TooLateError) == (not expected)


def test_the_search_knows_which_kernels_there_was_no_time_to_compile(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton import knobs

    from segue.kernels.triton import plan_timing, step_inputs

    def run(plan: str | None, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        numbers, pool = inputs
        embed_inputs(numbers, pool)

    numbers, pool = torch.ones(9, dtype=torch.int32), torch.ones((2, 16), dtype=torch.int32)
    task: Any = SimpleNamespace(plans=["plan"], inputs=lambda: (numbers, pool), run=run)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    for deadline, is_late in ((0.0, True), (math.inf, False)):
        step_inputs._embed_inputs.device_caches.clear()
        [[[kernel]]] = plan_timing._compile([task], deadline)
        assert (plan_timing._is_late(kernel), plan_timing._is_compiled(kernel)) == (is_late, not is_late)
    step_inputs._embed_inputs.device_caches.clear()


@pytest.mark.parametrize("kind", ["split", "whole", "gated"])
def test_the_search_compiles_what_plans_are_compared_with(fake_cuda: None, kind: Any) -> None:
    """And counts the reading of its partials once: the run of a gated GEMM has their reader."""
    from segue.kernels.fp8 import FP8
    from segue.kernels.gemm_plan import ROWS
    from segue.kernels.model_gemm import ModelFP8Gemm
    from segue.kernels.triton.launch import device_facts
    from segue.kernels.triton.plan_tasks import plan_tasks
    from segue.kernels.triton.plan_timing import _compile

    weights = [(torch.empty(2048, 1024, dtype=FP8), torch.empty(2048, 1))]
    own = ModelFP8Gemm(weights=weights, block=0, bias=None, kind=kind, first_rows=1, last_rows=64)
    tasks = plan_tasks([own], {}, device_facts())
    assert len(tasks) == len(ROWS)
    with recorded() as compiled:
        _compile(tasks, math.inf)
    for task in tasks:
        with recorded() as timed:
            result = task.run(None, task.inputs())
        assert timed and not missing(timed, compiled)
        assert (task.reading(None) > 0) == (result.dim() == 3) == (kind == "split")


def test_a_kernel_is_queued_by_any_version_of_triton() -> None:
    from segue.kernels.compilations import _submit_once

    kernel_cache: dict[str, Any] = {}
    key = "a variant"

    def finalize() -> None:
        kernel_cache[key] = "compiled"

    for others in ((), ("cleanup",)):  # 3.6 to 3.8, and 3.9
        queued = _submit_once(lambda *given: given, "key", "compile", finalize, *others)
        assert queued == ("key", "compile", finalize, *others) and kernel_cache.pop(key) is queued


def test_a_kernel_is_made_ready_for_the_compiler_once(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from segue.kernels import compilations
    from segue.kernels.triton import step_inputs

    asked: list[str] = []
    compiler = JITFunction._do_compile
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda self, *args, **kw: asked.append("") or compiler(self, *args, **kw)
    )
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: None)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    step_inputs._embed_inputs.device_caches.clear()
    numbers, pool = torch.ones(9, dtype=torch.int32), torch.ones((2, 16), dtype=torch.int32)
    with compilations.compiled_together(torch.device("cpu")):
        for _ in range(5):
            embed_inputs(numbers, pool)
    assert len(asked) == 1
    step_inputs._embed_inputs.device_caches.clear()


def test_pages_of_any_pool_are_copied_by_kernels_that_are_there(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.disagg.transports import cuda_ipc
    from segue.kernels.triton.page_slices import copy_slices

    pool, rng = FakeModel(rows=8, chunk=64, max_seq_len=64).executor.kv, random.Random(3)
    monkeypatch.setattr(cuda_ipc, "compiled_together", lambda *_: nullcontext())
    with recorded() as warmed:
        cuda_ipc.warm_up(pool)
    head, address = 2 * QWEN3["head_dim"], pool.data.data_ptr()
    with recorded() as found:
        for _ in range(60):
            ours, theirs, pages = (rng.randint(1, 8) for _ in range(3))
            copy_slices(
                address + head * rng.randint(0, 7),
                (1 << 40) + head * rng.randint(0, 7),
                torch.zeros((2, pages), dtype=torch.int64),
                num_rows=rng.choice((1, 16, 72, 1800)),
                source_row=ours * head,
                target_row=theirs * head,
                run=min(ours, theirs) * head,
            )
    assert found and not missing(found, warmed)


def test_one_row_is_run_apart_from_two_on_any_device(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here neither stored plans nor splits of keys change behind one row."""
    from segue.kernels.triton import gemm

    monkeypatch.setattr(gemm, "stored_plans", lambda *_: {})
    model = FakeModel(flashinfer=True, rows=8, chunk=64, max_seq_len=64)
    steps = row_steps(model.model, model.executor.backend, model.limits)
    assert captured_sizes([1, 2, 3, 4], steps) == [1, 2]


def test_plans_that_were_found_at_the_start_have_steps(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.kernels import plan_store
    from segue.kernels.moe_plan import MoEShape
    from segue.kernels.triton import gemm, moe

    shape = MoEShape(16, 3, 64, 1024)
    assert not {24, 40} & (gemm.row_steps() | moe.token_steps(shape))
    found = {"2560x2560": {"24": {"split": None}}, shape.key: {"40": {moe.KIND: None}}}
    monkeypatch.setattr(plan_store, "_found", found)
    assert 24 in gemm.row_steps()
    assert 40 in moe.token_steps(shape)
