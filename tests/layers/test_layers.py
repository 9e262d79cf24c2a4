"""Each layer compared with the formula in plain torch, unsharded and as shards whose results are combined."""

import pytest
import torch
import torch.nn.functional as F

from segue.kernels.ops import embed
from segue.layers.blocks import Linear, RMSNorm, RowParallelLinear
from segue.models.rope import Rotary
from tests.layers.filling import DTYPES, OneOfSeveralRanks, check_close, fill


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [0, 1, 19])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_multiplies_and_adds_the_bias(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 24), (10, 24), (10,)))
    layer = fill(Linear(24, 10, bias=True), weight=weight, bias=bias)
    check_close(layer(x), x.double() @ weight.double().T + bias.double())


def test_a_linear_layer_takes_input_that_is_not_contiguous() -> None:
    wide, weight = torch.randn(5, 48), torch.randn(10, 24)
    layer = fill(Linear(24, 10), weight=weight)
    for x in (wide[:, ::2], wide[:, 24:], torch.randn(24, 5).T):
        check_close(layer(x), x @ weight.T)


def test_build_derived_packs_a_changed_weight_again() -> None:
    x, weight = torch.randn(3, 24), torch.randn(10, 24)
    layer = fill(Linear(24, 10), weight=weight.clone())
    layer.weight.mul_(2)
    layer.build_derived()
    check_close(layer(x), 2 * x @ weight.T)


def test_row_parallel_shards_sum_to_the_whole_and_add_the_bias_once() -> None:
    x, weight, bias = torch.randn(7, 24), torch.randn(10, 24), torch.randn(10)
    parts = [
        fill(
            RowParallelLinear(8, 10, collectives=OneOfSeveralRanks(rank, 3), bias=True),
            weight=weight[:, 8 * rank : 8 * rank + 8],
            bias=bias,
        )(x[:, 8 * rank : 8 * rank + 8])
        for rank in range(3)
    ]
    check_close(torch.stack(parts).sum(0), F.linear(x, weight, bias))


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 3), (5, 4)])
def test_embedding_and_head_shards_of_an_uneven_vocabulary_add_up(vocab: int, size: int) -> None:
    weight, ids, hidden = torch.randn(vocab, 6), torch.arange(vocab), torch.randn(4, 6)
    rows = -(-vocab // size)
    padded = F.pad(weight, (0, 0, 0, rows * size - vocab))
    embedded, logits = [], []
    for rank in range(size):
        mine = padded[rows * rank : rows * (rank + 1)]
        embedded.append(embed(ids, mine, rows * rank))
        logits.append(fill(Linear(6, rows, float32_output=True), weight=mine)(hidden))
    check_close(torch.stack(embedded).sum(0), weight)
    check_close(torch.cat(logits, -1)[:, :vocab], hidden @ weight.T)


def test_a_linear_layer_with_float32_output_gives_the_logits_of_half_weights_in_float32() -> None:
    weight, hidden = torch.randn(8, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    logits = fill(Linear(6, 8, float32_output=True), weight=weight)(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (4, 8))
    check_close(logits.bfloat16(), hidden.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8).to(dtype), torch.randn(8).to(dtype)
    layer = fill(RMSNorm(8, 0.1), weight=weight)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    check_close(layer(x)[0], expected)
    check_close(layer(x[:0])[0], expected[:0])


def test_add_adds_the_residual_before_the_norm() -> None:
    x, residual, layer = torch.randn(5, 8), torch.randn(5, 8), fill(RMSNorm(8, 0.1), weight=torch.randn(8))
    total = x + residual
    normed, summed = layer(x, residual)
    check_close(summed, total)
    check_close(normed, layer(total)[0])


def test_rotary_angles_are_exact_at_large_positions() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    positions = torch.tensor([0, 1, 131_071])
    cos, sin = Rotary(frequencies, 1.5, 64).angles(positions, torch.bfloat16)
    assert (cos.dtype, cos.shape) == (torch.bfloat16, (3, 1, 8))
    radians = (positions[:, None].double() * frequencies.double())[:, None]
    check_close(cos, 1.5 * torch.cat([radians.cos()] * 2, -1))
    check_close(sin, 1.5 * torch.cat([-radians.sin(), radians.sin()], -1))
