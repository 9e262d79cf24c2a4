import pytest
import torch
import torch.nn.functional as F

from segue.errors import ConfigError
from segue.kernels.batch_invariant import BatchInvariantGemm, cancelling_inputs
from segue.kernels.cpu.build import kernels
from segue.layers.moe_backend import run_by_expert, run_expert, run_expert_batch_invariant, select


def test_the_torch_backend_agrees_with_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    tokens, experts, per_token, hidden, size = 9, 5, 2, 12, 7
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, per_token)
    gate_up, down = torch.randn(experts, 2 * size, hidden), torch.randn(experts, hidden, size)
    chosen = torch.stack([torch.randperm(experts - 1)[:per_token] for _ in range(tokens)])
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for weight, expert in zip(weights[t], chosen[t], strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            expected[t] += weight * (down[expert] @ (F.silu(gate) * up))
    actual = run_by_expert(x, gate_up, down, weights, chosen)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_tokens_of_no_expert_add_nothing() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(5, 12), torch.randn(3, 14, 12), torch.randn(3, 12, 7)
    weights, experts = torch.rand(5, 2), torch.tensor([[0, 1], [3, 3], [2, 1], [3, 3], [1, 3]])
    clean = run_by_expert(x, gate_up, down, weights, experts)
    x[1], x[3] = float("nan"), float("nan")
    with_nan = run_by_expert(x, gate_up, down, weights, experts)
    assert torch.equal(with_nan, clean) and not with_nan[[1, 3]].any() and with_nan[[0, 2, 4]].all()


def test_batch_invariant_experts_give_a_token_the_same_bits_in_any_batch() -> None:
    rows, gate_up = cancelling_inputs(16, 64, 2 * 96, torch.float32)  # exact results are 0
    down = cancelling_inputs(1, 96, 64, torch.float32)[1]
    expected = run_expert_batch_invariant(rows, gate_up * 1e6, down)
    for count in (1, 2, 3, 5, 9, 15):
        assert torch.equal(run_expert_batch_invariant(rows[:count], gate_up * 1e6, down), expected[:count])


@pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)
def test_batch_invariant_experts_use_the_cpus_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BatchInvariantGemm, "from_weight")  # it tests the GEMMs of every shape
    torch.manual_seed(0)
    rows, gate_up = cancelling_inputs(70, 64, 2 * 33, torch.bfloat16)
    gate_up, down = gate_up + 0.1, torch.randn(64, 33).to(torch.bfloat16)
    expected = run_expert_batch_invariant(rows, gate_up, down)
    gate, up = F.linear(rows.double(), gate_up.double()).chunk(2, -1)
    torch.testing.assert_close(
        expected.double(), F.linear(F.silu(gate) * up, down.double()), atol=0.2, rtol=2e-2
    )
    assert torch.equal(run_expert(rows[:16], gate_up, down), expected[:16]), "5 to 16 rows, in any mode"


@pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)
@pytest.mark.parametrize("cancels", ["gate", "down"])
def test_each_gemm_of_the_cpus_experts_is_batch_invariant(cancels: str) -> None:
    rows, weight = cancelling_inputs(70, 64, 64, torch.bfloat16)  # exact results are 0
    torch.manual_seed(0)
    one, normal = torch.eye(64, dtype=torch.bfloat16), torch.randn(64, 64).to(torch.bfloat16)
    gate, up, down = (weight * 2**20, normal, normal) if cancels == "gate" else (one, one, weight)
    gate_up = torch.cat([gate, up])
    expected = run_expert_batch_invariant(rows, gate_up, down)
    assert expected.any()
    for count in (1, 2, 3, 5, 17, 64):
        assert torch.equal(run_expert_batch_invariant(rows[:count], gate_up, down), expected[:count])


def test_auto_takes_triton_on_cuda_and_torch_on_the_cpu() -> None:
    assert select("auto", torch.device("cuda")).name == "triton"
    assert select("auto", torch.device("cpu")).name == "torch"
    assert select("auto", torch.device("cpu"), deterministic=True).name == "torch-invariant"
    assert not select("torch", torch.device("cuda")).graph  # the host reads the counts


def test_the_error_for_an_unknown_backend_names_it_and_all_backends() -> None:
    with pytest.raises(ConfigError) as error:
        select("warp", torch.device("cpu"))
    assert "warp" in error.value.message
    assert "torch" in error.value.message
