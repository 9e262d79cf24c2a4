"""The experts' kernels compared with the plain-torch backend, over odd shapes, padded and in graphs."""

from dataclasses import replace

import pytest
import torch

import segue
from segue.kernels.ops import route
from segue.layers import moe_backend
from segue.layers.moe_backend import run_by_expert, select
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# (experts, experts per token, hidden size, expert size)
SMALL, MANY, ODD = (3, 1, 64, 40), (128, 8, 256, 96), (60, 4, 136, 72)
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
CASES = [
    *[(1, SMALL, dtype) for dtype in (FLOAT, BRAIN, HALF)],
    *[(tokens, SMALL, BRAIN) for tokens in (5, 5000)],
    *[(tokens, MANY, BRAIN) for tokens in (1, 2, 33, 300)],
    *[(tokens, ODD, dtype) for tokens in (1, 70, 1000) for dtype in (FLOAT, BRAIN)],
    (20, (5, 5, 72, 24), FLOAT),
]
PLANS = ["by pair", "16", "16 by TMA", "128", "128 by TMA", "128 by TMA, halves"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(tokens, experts, per_token, hidden, size, dtype=torch.float32):
    """Returns hidden states, both weight tensors, the routing weights and the experts."""
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    gate_up = torch.randn(experts, 2 * size, hidden, device="cuda").mul_(hidden**-0.5).to(dtype)
    down = torch.randn(experts, hidden, size, device="cuda").mul_(size**-0.5).to(dtype)
    logits = torch.randn(tokens, experts, device="cuda")
    return x, gate_up, down, *route(logits, per_token, renormalise=True)


def expected(x, gate_up, down, weights, experts):
    """Returns the result of plain torch in float64."""
    return run_by_expert(x.double(), gate_up.double(), down.double(), weights.double(), experts)


def close(actual, expected):
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def plan(name):
    """Returns the plan that a name in `PLANS` describes."""
    from segue.kernels.triton.moe import MoEPlan, TileConfig

    if name == "by pair":
        return MoEPlan(1, TileConfig(8, 128, 2, 4), TileConfig(8, 128, 2, 4))
    config = TileConfig(64, 64, 3, 8 if "128" in name else 4, tma="TMA" in name, halves="halves" in name)
    return MoEPlan(128 if "128" in name else 16, config, replace(config, block_n=128))


@pytest.mark.parametrize(("tokens", "shape", "dtype"), CASES)
def test_the_experts_agree_with_plain_torch(tokens, shape, dtype) -> None:
    case = make(tokens, *shape, dtype=dtype)
    close(select("auto", torch.device("cuda")).run(*case), expected(*case))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shape", [(70, *ODD), (600, 5, 4, 320, 200)])
@pytest.mark.parametrize("chosen", ["any", "one"])
def test_every_plan_agrees_with_plain_torch(name, shape, chosen) -> None:
    from segue.kernels.triton.moe import run_experts

    x, gate_up, down, weights, experts = make(*shape, dtype=torch.bfloat16)
    if chosen == "one":  # many tiles of one expert and none of the others
        experts = torch.full_like(experts, shape[1] - 1)
    case = x, gate_up, down, weights, experts
    close(run_experts(*case, plan=plan(name)), expected(*case))


@pytest.mark.parametrize("name", ["by pair", "16", "128 by TMA, halves"])
def test_a_replay_gives_the_bits_of_the_eager_run_every_time(name) -> None:
    from segue.kernels.triton.moe import run_experts

    logits = torch.randn(200, 60, device="cuda")
    x, gate_up, down, _, _ = make(200, *ODD, torch.bfloat16)

    def step():
        return run_experts(x, gate_up, down, *route(logits, 4, renormalise=True), plan=plan(name))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        eager = step()
        for _ in range(2):
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(result, eager)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("tokens", [1, 64, 682, 683, 13000])
def test_pairs_are_sorted_by_expert_and_split_into_tiles(tokens, block) -> None:
    from segue.kernels.triton.moe_routing import sort

    num_experts = 11
    experts = torch.randint(0, num_experts + 1, (tokens, 3), device="cuda", dtype=torch.int32)
    order, tiles = sort(experts, num_experts, block)
    flat = experts.flatten().long()
    routed = int((flat < num_experts).sum())
    assert torch.equal(order[:routed].long(), flat.argsort(stable=True)[:routed])
    expected_tiles, start = [], 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts)[:num_experts].tolist()):
        expected_tiles += [[expert, start + i, min(block, count - i)] for i in range(0, count, block)]
        start += count
    found = tiles.T.tolist()
    assert found[: len(expected_tiles)] == expected_tiles
    assert all(expert == -1 for expert, _, _ in found[len(expected_tiles) :])


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "renormalise", "dtype"),
    [(1, 3, 3, True, FLOAT), (5, 128, 8, True, BRAIN), (70, 60, 4, False, BRAIN), (99, 7, 1, False, FLOAT)],
)
def test_routing_agrees_with_the_cpu(tokens, experts, per_token, renormalise, dtype) -> None:
    # The logits are distinct in bfloat16 too, since of equal ones either may be chosen.
    logits = torch.rand(tokens, experts).argsort(-1).float().sub(experts / 2).div(8).to(dtype)
    weights, chosen = route(logits.cuda(), per_token, renormalise=renormalise)
    expected_weights, expected_experts = route(logits, per_token, renormalise=renormalise)
    assert torch.equal(chosen.cpu().long(), expected_experts)
    torch.testing.assert_close(weights.cpu(), expected_weights)


def test_among_equal_logits_the_lowest_experts_are_chosen() -> None:
    _, experts = route(torch.zeros(3, 9, device="cuda"), 4, renormalise=True)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3


def test_a_token_of_nan_changes_no_other_token() -> None:
    x, gate_up, down, _, _ = make(40, *SMALL, torch.bfloat16)
    logits = torch.randn(40, 3, device="cuda")
    clean = select("auto", x.device).run(x, gate_up, down, *route(logits, 1, renormalise=True))
    x[7], logits[7] = float("nan"), float("nan")
    with_nan = select("auto", x.device).run(x, gate_up, down, *route(logits, 1, renormalise=True))
    others = torch.arange(40, device="cuda") != 7
    assert with_nan[7].isnan().all() and torch.equal(with_nan[others], clean[others])


@pytest.mark.parametrize("name", ["by pair", "16", "128 by TMA, halves"])
@pytest.mark.parametrize("real", [0, 1, 30])
def test_padding_is_routed_to_no_expert(name, real) -> None:
    from segue.kernels.triton.moe import run_experts
    from segue.kernels.triton.moe_routing import sort

    x, gate_up, down, _, _ = make(48, 9, 4, 136, 72, torch.bfloat16)
    logits = torch.randn(48, 9, device="cuda")
    logits[:real, 4:] -= 100
    logits[real:, :4] -= 100  # only padding tokens choose experts 4 and above
    clean = run_experts(x, gate_up, down, *route(logits, 4, renormalise=True), plan=plan(name))
    x[real:], logits[real + 1 :] = float("nan"), float("nan")
    count = torch.tensor([real], dtype=torch.int32, device="cuda")
    weights, experts = route(logits, 4, renormalise=True, num_unpadded=count)
    padded = run_experts(x, gate_up, down, weights, experts, plan=plan(name))
    assert torch.equal(padded[:real], clean[:real])
    assert not padded[real:].any()
    assert (experts[real:] == 9).all() and (experts[:real] < 4).all()
    _, tiles = sort(experts, 9, 16)
    assert (tiles[0] < 4).all()  # no weights of experts 4 and above are read
    assert torch.equal(run_by_expert(x, gate_up, down, weights, experts)[real:], padded[real:])


@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graphs", "eager"])
def test_a_mixture_in_the_engine_gives_the_tokens_of_transformers(tmp_path, disable_cuda_graph):
    model = tiny.save_qwen3_moe(tmp_path)
    prompts = [making.prompt(5 + 7 * i, seed=i) for i in range(11)]
    options = making.options(
        tmp_path,
        device="cuda",
        page_size=16,
        num_kv_tokens=1500,
        max_running_requests=9,
        chunked_prefill_size=48,
        disable_cuda_graph=disable_cuda_graph,
        graph_self_check=not disable_cuda_graph,
    )
    with segue.Engine(**options, embedded=True) as engine:
        replies = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 20})
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == tiny.reference(model, prompt, 20)


def test_padding_of_a_captured_step_goes_to_no_expert(tmp_path, monkeypatch):
    tiny.save_qwen3_moe(tmp_path)
    entry, seen = select("triton", torch.device("cuda")), {}

    def run(x, gate_up, down, weights, experts):
        if len(experts) not in seen:  # happens before the capture
            seen[len(experts)] = torch.zeros_like(experts)
        seen[len(experts)].copy_(experts)
        return entry.run(x, gate_up, down, weights, experts)

    monkeypatch.setattr(moe_backend, "select", lambda name, device, **_: replace(entry, run=run))
    runner = making.make_runner(tmp_path, device="cuda", page_size=16, max_running_requests=8)
    try:
        planner = Planner(runner)
        planner.run([(planner.add(making.prompt(20)), 20)])
        size = 32  # tokens of the smallest graph that 20 tokens fit in
        # The first layer has all tokens of a step, the last layer only those of `logits_indices`.
        for experts, real in ((seen[size], 20), (seen[8], 1)):
            assert (experts[:real] < 11).all() and (experts[real:] == 11).all()
    finally:
        runner.close()


def test_a_backend_that_cannot_be_captured_runs_eagerly(tmp_path, monkeypatch):
    from segue.model_runner.cuda_executor import CUDAExecutor

    model = tiny.save_qwen3_moe(tmp_path)
    monkeypatch.setattr(moe_backend, "select", lambda name, device, **_: select("torch", device))
    runner = making.make_runner(tmp_path, device="cuda", page_size=16)
    try:
        assert isinstance(runner._executor, CUDAExecutor) and runner._executor.num_graphs == 0
        sequence = Planner(runner).generate(making.prompt(20), 8)
        assert sequence.output == tiny.reference(model, making.prompt(20), 8)
    finally:
        runner.close()
