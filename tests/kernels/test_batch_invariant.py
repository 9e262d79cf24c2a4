"""Batch-invariant operations on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from segue.errors import ConfigError
from segue.kernels import batch_invariant
from segue.kernels.batch_invariant import BatchInvariantGemm, cancelling_inputs, split_rows
from segue.kernels.ops import (
    Plain,
    gate_up_silu,
    linear,
    log_probabilities,
    pack,
    rms_norm,
    rotate,
    silu_mul,
)

ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 44, 64, 70, 129, 256, 300, 600]


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 511, 512, 513, 8192])
@pytest.mark.parametrize("sizes", [(4, 8, 16, 32, 64, 128, 256), (16,), (16, 256)])
def test_split_rows_covers_all_rows_with_little_padding(count: int, sizes: tuple[int, ...]) -> None:
    blocks = split_rows(count, sizes)
    assert set(blocks) <= set(sizes)
    assert count <= sum(blocks) < count + max(sizes[0], count)
    assert sum(blocks[:-1]) < count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 64), (331, 64), (576, 1536), (40, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_deterministic_gemm_gives_a_row_the_same_bits_in_any_batch(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    rows, weight = cancelling_inputs(max(ROWS), shape[1], shape[0], dtype)  # exact results are 0
    # The bias is as small as the rounding errors, so that adding it first or last gives different bits.
    bias_values = (torch.randn(shape[0]) * 1e-6).to(dtype) if bias else None
    gemm = pack(weight, deterministic=True)
    expected = linear(rows[:16], weight, bias_values, gemm)
    for count in ROWS:
        indices = torch.randint(0, 16, (count,))
        assert torch.equal(linear(rows[indices], weight, bias_values, gemm), expected[indices]), count
        assert gemm is not None and torch.equal(gemm(rows[indices], bias_values), expected[indices]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    rows, gate = cancelling_inputs(max(ROWS), 64, 48, dtype)  # exact results are 0
    weight = torch.cat([gate * 2**20, torch.randn(48, 64).to(dtype)])
    gemm = pack(weight, deterministic=True)
    expected = gate_up_silu(rows[:16], weight, None, gemm)
    assert isinstance(expected, Tensor) and expected.any()
    for count in ROWS:
        indices = torch.randint(0, 16, (count,))
        result = gate_up_silu(rows[indices], weight, None, gemm)
        assert isinstance(result, Tensor) and torch.equal(result, expected[indices]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_gemm_agrees_with_the_plain_one(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(37, 64), torch.randn(48, 64), torch.randn(48)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    found = linear(x, weight, bias, pack(weight, deterministic=True))
    torch.testing.assert_close(found, F.linear(x, weight, bias))


def gemm_that_differs_for(changed_rows: int) -> type[Plain]:
    """Returns a GEMM whose summation order differs for `changed_rows` rows."""

    class OtherOrder(Plain):
        def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
            if len(x) == changed_rows:
                return F.linear(x.flip(1), self.weight.flip(1), bias)
            return F.linear(x, self.weight, bias)

    return OtherOrder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_with_another_summation_order_are_not_used(dtype: torch.dtype) -> None:
    gemm = BatchInvariantGemm.from_weight(torch.randn(96, 64).to(dtype), gemm_that_differs_for(64))
    assert 64 not in gemm.sizes and 16 in gemm.sizes


def test_a_cpu_whose_gemms_depend_on_a_rows_index_is_refused() -> None:
    class DependsOnIndex(Plain):
        def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
            front, back = F.linear(x[:9], self.weight), F.linear(x[9:].flip(1), self.weight.flip(1))
            return torch.cat([front, back])

    with pytest.raises(ConfigError, match=r"16 rows by a weight \[96, 64\]"):
        BatchInvariantGemm.from_weight(torch.randn(96, 64), DependsOnIndex)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_invariant_silu_agrees_with_the_ordinary_one(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 200) * 8).to(dtype)
    torch.testing.assert_close(batch_invariant.silu_mul(gate_up, dtype), silu_mul(gate_up.clone(), dtype))


# Sizes are large enough that threads split a tensor within a row, and odd, so that SIMD vectors do not fit.
ROWWISE = {
    "silu_mul": (lambda x: batch_invariant.silu_mul(x, x.dtype), (198,)),
    "rms_norm": (lambda x: rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-5), (331,)),
    "rms_norm of heads": (lambda x: rms_norm(x, torch.linspace(0.5, 2, 27).expand(9, -1), 1e-5), (9, 27)),
    "rotate": (lambda x: rotate(x, x[:, :1].cos(), x[:, :1].sin()), (9, 26)),
    "angles": (lambda x: torch.cat([(x * 999).cos(), (x * 999).sin()], -1), (331,)),
    "softmax": (lambda x: x.softmax(-1), (331,)),
    "softmax of a large vocabulary": (lambda x: x.float().softmax(-1), (49157,)),
    "logprobs": (lambda x: log_probabilities(x.float(), torch.zeros(len(x), 1, dtype=torch.int64)), (331,)),
    "logprobs of a large vocabulary": (
        lambda x: log_probabilities(x.float(), torch.zeros(len(x), 1, dtype=torch.int64)),
        (49157,),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    operation, shape = ROWWISE[name]
    num_rows = 40 if shape[0] > 10000 else max(ROWS)
    rows = (torch.randn(num_rows, *shape) * 3).to(dtype)
    expected = torch.cat([operation(row[None].clone()) for row in rows])
    for count in (count for count in [*ROWS, 257, 271, 433] if count <= num_rows):
        indices = torch.randperm(num_rows)[:count]
        assert torch.equal(operation(rows[indices]), expected[indices]), count
