import pytest
import torch

from segue.kernels.cpu import ops as cpu
from segue.kernels.ops import (
    Plain,
    add_rms_norm,
    embed,
    linear,
    list_pages,
    pack,
    rms_norm,
    rotate,
    route,
    silu_mul,
)
from tests.kernels.formulas import rms_norm_reference, rotate_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (5, 3, 8)])
def test_rms_norm_agrees_with_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[1:])
    expected = rms_norm_reference(x, weight, 1e-3)
    torch.testing.assert_close(rms_norm(x.clone(), weight, 1e-3), expected, atol=1e-6, rtol=TOLERANCE[dtype])


def test_rms_norm_of_zeros_is_zero_and_of_small_values_is_bounded_by_epsilon() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-6, -1e-6]])
    expected = x / torch.tensor([[1.0], [1e-2]])
    torch.testing.assert_close(rms_norm(x, torch.ones(2), 1e-4), expected, rtol=1e-4, atol=0)


def test_rms_norm_does_not_change_its_input() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8), 1e-5)
    assert torch.equal(x, before)


def test_add_rms_norm_returns_the_sum_as_the_next_residual() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotate_agrees_with_its_reference(dtype: torch.dtype) -> None:
    x, radians = torch.randn(5, 3, 12), torch.rand(5, 1, 6) * 6
    cos = torch.cat([radians.cos()] * 2, -1).to(dtype)
    sin = torch.cat([-radians.sin(), radians.sin()], -1).to(dtype)
    expected = rotate_reference(x, cos.float(), sin.float())
    actual = rotate(x.to(dtype), cos, sin).float()
    torch.testing.assert_close(actual, expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_gemm_agrees_with_the_plain_one(rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 24).to(dtype), torch.randn(40, 24).to(dtype)
    bias_values = torch.randn(40).to(dtype) if bias else None
    packed = pack(weight)
    if cpu.usable(weight):
        assert packed is None, "our own kernel multiplies by the weight itself"
    else:
        assert isinstance(packed, Plain) or (packed is not None and packed.num_bytes >= weight.nbytes)
    expected = linear(x.double(), weight.double(), None if bias_values is None else bias_values.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        linear(x, weight, bias_values, packed).double(), expected, atol=4 * tolerance, rtol=tolerance
    )


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_mul(torch.cat([gate, up], -1), gate.dtype), expected)


@pytest.mark.parametrize("renormalise", [False, True])
def test_routing_takes_the_most_probable_experts_of_each_token(renormalise: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]])
    weights, experts = route(logits, 2, renormalise=renormalise)
    assert experts.tolist() == [[1, 2], [2, 0]]
    shares = logits.gather(1, experts) if renormalise else logits
    expected = logits.gather(1, experts).exp() / shares.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


def test_pages_are_listed_one_sequence_after_the_other() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = list_pages(table, torch.tensor([2, 0, 3]), torch.tensor([0, 3, 3, 5], dtype=torch.int32))
    assert (found[:5].tolist(), found.dtype, len(found)) == ([20, 21, 22, 30, 31], torch.int32, 30)


@pytest.mark.parametrize("start", [0, 128])
def test_ids_of_other_shards_embed_as_zero(start: int) -> None:
    weight, ids = torch.randn(200, 8), torch.arange(33) * 101 % 400
    expected = torch.stack(
        [weight[i - start] if 0 <= i - start < 200 else torch.zeros(8) for i in ids.tolist()]
    )
    assert torch.equal(embed(ids, weight, start), expected)
