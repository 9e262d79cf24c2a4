"""Each layer compared with the formula in plain torch, unsharded and as shards whose results are combined."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo
from segue.layers.blocks import (
    MLP,
    Linear,
    ParallelHead,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from segue.layers.moe import MoE
from segue.layers.moe_backend import run_by_expert
from segue.models.rope import Rotary

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class OneOfSeveralRanks(Collectives):
    """The collectives of one of several ranks; they return its partial results unchanged."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(TPInfo(rank, size))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def fill(layer: Any, **weights: Tensor) -> Any:
    """Set the parameters of `layer` by dotted name (`__` for a dot), then build its derived tensors."""
    for name, weight in weights.items():
        owner, _, leaf = name.replace("__", ".").rpartition(".")
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(weight.contiguous(), requires_grad=False))
    for module in layer.modules():
        if hasattr(module, "build_derived"):
            module.build_derived()
    return layer


def check_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=4 * tolerance, rtol=tolerance)


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
        embedding = fill(
            VocabParallelEmbedding(rows, 6, collectives=OneOfSeveralRanks(rank, size)), weight=mine
        )
        embedded.append(embedding(ids))
        tied = {"tied": embedding, "collectives": OneOfSeveralRanks(rank, size)}
        head = fill(ParallelHead(rows, 6, rows * size, **tied))
        assert not list(head.parameters()), "a tied weight is a parameter of the embedding only"
        logits.append(head(hidden))
    check_close(torch.stack(embedded).sum(0), weight)
    check_close(torch.cat(logits, -1)[:, :vocab], hidden @ weight.T)


def test_an_untied_head_gives_float32_logits_without_the_padding() -> None:
    weight, hidden = torch.randn(8, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    head = fill(ParallelHead(8, 6, 7, tied=None, collectives=Collectives()), weight=weight)
    logits = head(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (4, 7))
    check_close(logits.bfloat16(), (hidden.double() @ weight.double().T)[:, :7])


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_mlp_shards_sum_to_the_gated_mlp(size: int, bias: bool) -> None:
    x, gate, up, down = torch.randn(5, 6), torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 8)
    biases = [torch.randn(n) if bias else torch.zeros(n) for n in (8, 8, 6)]
    hidden = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
    parts = []
    for rank in range(size):

        def shard(weight: Tensor, dim: int = 0, rank: int = rank) -> Tensor:
            return weight.chunk(size, dim)[rank]

        weights = {"gate_up__weight": torch.cat([shard(gate), shard(up)]), "down__weight": shard(down, 1)}
        if bias:
            weights |= {
                "gate_up__bias": torch.cat([shard(biases[0]), shard(biases[1])]),
                "down__bias": biases[2],
            }
        parts.append(
            fill(MLP(6, 8 // size, bias=bias, collectives=OneOfSeveralRanks(rank, size)), **weights)(x)
        )
    check_close(torch.stack(parts).sum(0), F.linear(hidden, down, biases[2]))


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
    check_close(torch.stack(parts).sum(0), expected)


def test_rotary_angles_are_exact_at_large_positions() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    positions = torch.tensor([0, 1, 131_071])
    cos, sin = Rotary(frequencies, 1.5, 64).angles(positions, torch.bfloat16)
    assert (cos.dtype, cos.shape) == (torch.bfloat16, (3, 1, 8))
    radians = (positions[:, None].double() * frequencies.double())[:, None]
    check_close(cos, 1.5 * torch.cat([radians.cos()] * 2, -1))
    check_close(sin, 1.5 * torch.cat([-radians.sin(), radians.sin()], -1))
