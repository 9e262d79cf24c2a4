"""Quantization to FP8 and back."""

import pytest
import torch

from segue.kernels import ops
from segue.kernels.fp8 import FP8, dequantize, expand_scales, has_nan, quantize, scale_shapes
from segue.sizes import ceil_div


@pytest.fixture
def values() -> torch.Tensor:
    values = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    values[3] *= 1e-6
    values[4] = 0
    values[5, :7] = torch.tensor([448.0, -448.0, 1.0, -0.5, 0.0, 240.0, 2.0**-6])
    return values


@pytest.mark.parametrize("block", [0, 16, 128])
def test_values_are_within_the_rounding_of_fp8(block: int, values: torch.Tensor) -> None:
    """A value has four bits of precision, or if it is small, that of the smallest values of its scale."""
    weight, scales = quantize(values, block)
    assert weight.dtype == FP8 and scales.shape == (40, ceil_div(300, block or 300))
    error = (dequantize(weight, scales, block) - values).abs()
    of_scale = scales.repeat_interleave(block or 300, 1)[:, :300]
    assert (error <= torch.maximum(values.abs() / 16, of_scale * 2**-10) * (1 + 1e-6)).all()
    assert torch.equal(dequantize(weight, scales, block)[4], torch.zeros(300))


def test_the_scale_with_the_least_error_is_taken(values: torch.Tensor) -> None:
    def error(num_scales: int) -> torch.Tensor:
        weight, scales = quantize(values, num_scales=num_scales)
        return (dequantize(weight, scales) - values).square().sum(1)

    assert torch.equal(quantize(values)[1], quantize(values, num_scales=4)[1])
    assert torch.equal(quantize(values, 16)[1], quantize(values, 16, 12)[1])
    assert (error(4) <= error(1) * (1 + 1e-3)).all()
    assert error(4)[8:].sum() < 0.97 * error(1)[8:].sum()


@pytest.mark.parametrize("block", [0, 16, 128])
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(block: int, values: torch.Tensor) -> None:
    weight, scales = quantize(values, block)
    for row in range(len(values)):
        one, of_one = quantize(values[row : row + 1], block)
        assert torch.equal(one.view(torch.uint8), weight[row : row + 1].view(torch.uint8))
        assert torch.equal(of_one, scales[row : row + 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_shows_in_its_scale(bad: float, values: torch.Tensor) -> None:
    values[7, 200] = bad
    _, scales = quantize(values, 128)
    assert (~scales.isfinite()).nonzero().tolist() == [[7, 1]]


def test_nan_is_found_among_values_in_fp8() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert has_nan(weight[:128]) and has_nan(weight[128:])
    assert not has_nan(weight[:127]) and not has_nan(weight[128:255])


@pytest.mark.parametrize("block", [0, 16, 128])
def test_scales_of_checkpoints_are_expanded(block: int) -> None:
    """Each kind of scales gives a part what slicing the scale of each single value would."""
    shape, rows, columns = (200, 384), slice(100, 190), slice(128, 384)
    for of_shape in scale_shapes(shape, block):
        scales = torch.rand(of_shape).bfloat16()
        full = scales.reshape(scales.shape if scales.dim() == 2 else (-1, 1)).float()
        if len(full) == 2:
            full = full.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
        expected = full.expand(shape)[rows, columns]
        found = expand_scales(scales, shape, rows, columns, block)
        assert found.shape == (90, 256 // (block or 256))
        assert torch.equal(found.repeat_interleave(block or 256, 1), expected)
    assert len(scale_shapes(shape, block)) == (6 if block else 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gemm_by_a_weight_in_fp8(dtype: torch.dtype, deterministic: bool, values: torch.Tensor) -> None:
    for block in (0, 16, 128):
        weight, scales = quantize(values, block)
        gemm = ops.pack_fp8(weight, scales, block, dtype, deterministic=deterministic)
        x, bias = torch.randn(5, 300).to(dtype), torch.randn(40).to(dtype)
        found = ops.linear(x, weight, bias, gemm)
        expected = x.float() @ dequantize(weight, scales, block).T + bias.float()
        assert found.dtype == dtype and gemm.num_bytes >= values.numel() * dtype.itemsize
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert (found.float() - expected).norm() < tolerance * expected.norm()
