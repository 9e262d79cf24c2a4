"""Each layer against the formula in plain torch, alone and as shards whose results are put together."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.distributed.collectives import SingleRank
from segue.distributed.info import TPInfo
from segue.layers.embedding import ParallelHead, VocabParallelEmbedding
from segue.layers.linear import Linear, RowParallelLinear
from segue.layers.mlp import MLP
from segue.layers.moe import MoE
from segue.layers.moe_backend import run_by_expert
from segue.layers.norm import RMSNorm
from segue.layers.rotary import Rotary

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Alone(SingleRank):
    """One rank of several that gives its partial results back as they are."""

    def __init__(self, rank: int, size: int) -> None:
        self.tp = TPInfo(rank, size)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def fill(layer: Any, **weights: Tensor) -> Any:
    """Give `layer` its parameters by dotted name (`__` for a dot), then what is derived from them."""
    for name, weight in weights.items():
        owner, _, leaf = name.replace("__", ".").rpartition(".")
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(weight.contiguous(), requires_grad=False))
    for module in layer.modules():
        if hasattr(module, "build_derived"):
            module.build_derived()
    return layer


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [0, 1, 19])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_is_a_product_and_a_bias(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 24), (10, 24), (10,)))
    layer = fill(Linear(24, 10, bias=True), weight=weight, bias=bias)
    near(layer(x), x.double() @ weight.double().T + bias.double())


def test_a_linear_layer_takes_what_is_not_contiguous() -> None:
    wide, weight = torch.randn(5, 48), torch.randn(10, 24)
    layer = fill(Linear(24, 10), weight=weight)
    for x in (wide[:, ::2], wide[:, 24:], torch.randn(24, 5).T):
        near(layer(x), x @ weight.T)


def test_a_packed_copy_follows_a_changed_weight_when_it_is_built_anew() -> None:
    x, weight = torch.randn(3, 24), torch.randn(10, 24)
    layer = fill(Linear(24, 10), weight=weight.clone())
    layer.weight.mul_(2)
    layer.build_derived()
    near(layer(x), 2 * x @ weight.T)


def test_row_parallel_shards_sum_to_the_whole_and_add_the_bias_once() -> None:
    x, weight, bias = torch.randn(7, 24), torch.randn(10, 24), torch.randn(10)
    parts = [
        fill(
            RowParallelLinear(8, 10, collectives=Alone(rank, 3), bias=True),
            weight=weight[:, 8 * rank : 8 * rank + 8],
            bias=bias,
        )(x[:, 8 * rank : 8 * rank + 8])
        for rank in range(3)
    ]
    near(torch.stack(parts).sum(0), F.linear(x, weight, bias))


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 3), (5, 4)])
def test_embedding_and_head_shards_of_an_uneven_vocabulary_make_the_whole(vocab: int, size: int) -> None:
    weight, ids, hidden = torch.randn(vocab, 6), torch.arange(vocab), torch.randn(4, 6)
    rows = -(-vocab // size)
    padded = F.pad(weight, (0, 0, 0, rows * size - vocab))
    embedded, logits = [], []
    for rank in range(size):
        mine = padded[rows * rank : rows * (rank + 1)]
        embedding = fill(VocabParallelEmbedding(rows, 6, collectives=Alone(rank, size)), weight=mine)
        embedded.append(embedding(ids))
        tied = {"tied": embedding, "collectives": Alone(rank, size)}
        head = fill(ParallelHead(rows, 6, rows * size, **tied))
        assert not list(head.parameters()), "a tied weight is the embedding's alone"
        logits.append(head(hidden))
    near(torch.stack(embedded).sum(0), weight)
    near(torch.cat(logits, -1)[:, :vocab], hidden @ weight.T)


def test_a_head_of_its_own_gives_float32_logits_without_the_padding() -> None:
    weight, hidden = torch.randn(8, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    head = fill(ParallelHead(8, 6, 7, tied=None, collectives=SingleRank()), weight=weight)
    logits = head(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (4, 7))
    near(logits.bfloat16(), (hidden.double() @ weight.double().T)[:, :7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8).to(dtype), torch.randn(8).to(dtype)
    layer = fill(RMSNorm(8, 0.1), weight=weight)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    near(layer(x), expected)
    near(layer(x[:0]), expected[:0])


def test_a_norm_adds_to_the_residual_first() -> None:
    x, residual, layer = torch.randn(5, 8), torch.randn(5, 8), fill(RMSNorm(8, 0.1), weight=torch.randn(8))
    total = x + residual
    normed, summed = layer.add(x, residual)
    near(summed, total)
    near(normed, layer(total))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_mlp_shards_sum_to_the_gated_mlp(size: int, bias: bool) -> None:
    x, gate, up, down = torch.randn(5, 6), torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 8)
    biases = [torch.randn(n) if bias else torch.zeros(n) for n in (8, 8, 6)]
    hidden = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
    parts = []
    for rank in range(size):

        def cut(weight: Tensor, dim: int = 0, rank: int = rank) -> Tensor:
            return weight.chunk(size, dim)[rank]

        weights = {"gate_up__weight": torch.cat([cut(gate), cut(up)]), "down__weight": cut(down, 1)}
        if bias:
            weights |= {"gate_up__bias": torch.cat([cut(biases[0]), cut(biases[1])]), "down__bias": biases[2]}
        parts.append(fill(MLP(6, 8 // size, bias=bias, collectives=Alone(rank, size)), **weights)(x))
    near(torch.stack(parts).sum(0), F.linear(hidden, down, biases[2]))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_moe_shards_sum_to_the_weighted_experts(size: int, norm: bool) -> None:
    x, router = torch.randn(5, 6), torch.randn(4, 6)
    gate, up, down = torch.randn(4, 8, 6), torch.randn(4, 8, 6), torch.randn(4, 6, 8)
    weights, chosen = (x @ router.T).softmax(-1).topk(2)
    if norm:
        weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.stack(
        [
            sum(
                w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token)))
                for w, e in zip(ws, es, strict=True)
            )
            for token, ws, es in zip(x, weights, chosen, strict=True)
        ]
    )
    parts = []
    for rank in range(size):
        layer = MoE(
            hidden_size=6,
            num_experts=4,
            num_experts_per_tok=2,
            intermediate_size=8 // size,
            norm_topk_prob=norm,
            backend=run_by_expert,
        )
        fill(
            layer,
            router__weight=router,
            experts__gate_up=torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1),
            experts__down=down.chunk(size, 2)[rank],
        )
        parts.append(layer(x.clone()))
    near(torch.stack(parts).sum(0), expected)


def test_rotary_angles_are_position_times_frequency_scaled_and_exact_far_out() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    positions = torch.tensor([0, 1, 131_071])
    cos, sin = Rotary(frequencies, 1.5, 64).angles(positions, torch.bfloat16)
    assert (cos.dtype, cos.shape) == (torch.bfloat16, (3, 1, 8))
    radians = (positions[:, None].double() * frequencies.double())[:, None]
    near(cos, 1.5 * torch.cat([radians.cos()] * 2, -1))
    near(sin, 1.5 * torch.cat([-radians.sin(), radians.sin()], -1))
