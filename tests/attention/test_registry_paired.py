from typing import Any

import numpy as np
import pytest
from torch import Tensor

from segue.attention.base import AttentionShape, Context, StepLengths
from segue.attention.registry import PairedAttention
from segue.kvcache.pool import KVPool
from tests.attention.case import Case


class Half:
    """Writes its number into the tokens that it serves."""

    num_bytes = 10
    serves_prefill = serves_decode = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.prepared = 0
        self.plans: list[StepLengths] = []

    def plan(self, lengths: StepLengths) -> None:
        self.plans.append(lengths)

    def prepare(self, ctx: Context) -> None:
        self.prepared += 1

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        output[: ctx.num_decode] = self.number

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        output[ctx.num_decode :] = self.number

    def queries_per_block(self, tokens: int) -> int:
        return self.number


@pytest.mark.parametrize(
    ("q_lens", "num_decode", "prefill"),
    [([1, 1], 2, 0), ([3, 4], 0, 9), ([1, 1, 4], 2, 5), ([1, 1, 5], 2, 9), ([1, 1], 1, 5), ([40], 0, 9)],
)
def test_each_half_serves_its_sequences_and_sizes(q_lens: list[int], num_decode: int, prefill: int) -> None:
    small, large, decode = Half(5), Half(9), Half(7)

    def make(shape: AttentionShape, pool: KVPool) -> Any:
        return PairedAttention([(6, small), (20, large)], decode)  # type: ignore[list-item,arg-type]

    case = Case(q_lens, [q + 2 for q in q_lens], num_decode, make=make)
    output = case.run()
    assert (output[:num_decode] == 7).all() and (output[num_decode:] == prefill).all()
    prepared = {half.number for half in (small, large, decode) if half.prepared}
    assert prepared == {prefill, 7 if num_decode else 0} - {0}
    assert [make(case.shape, case.ctx.kv).queries_per_block(tokens) for tokens in (6, 7, 21)] == [5, 9, 9]


def test_a_backend_that_serves_both_halves_prepares_once() -> None:
    both = Half(3)

    def make(shape: AttentionShape, pool: KVPool) -> Any:
        return PairedAttention([(6, both), (20, Half(4))], both)  # type: ignore[list-item,arg-type]

    Case([1, 2], [5, 5], 1, make=make).run()
    assert both.prepared == 1 and both.serves_prefill and both.serves_decode


@pytest.mark.parametrize(
    ("tokens", "max_decode", "has_prefill", "planned"),
    [(2, 2, False, {7}), (6, 0, True, {5}), (7, 3, True, {7, 9}), (40, 1, True, {7, 9})],
)
def test_the_backends_plan_whose_halves_a_step_has(
    tokens: int, max_decode: int, has_prefill: bool, planned: set[int]
) -> None:
    halves = [Half(5), Half(9), Half(7)]
    small, large, decode = halves
    paired = PairedAttention([(6, small), (20, large)], decode)  # type: ignore[list-item,arg-type]
    assert paired.num_bytes == 30
    assert [(half.serves_prefill, half.serves_decode) for half in halves] == [(True, False)] * 2 + [
        (False, True)
    ]
    lengths = StepLengths(
        kv_lens=np.ones(3, dtype=np.int32),
        cu_seqlens_q=np.arange(4, dtype=np.int32),
        tokens=tokens,
        num_decode=0,
        max_decode=max_decode,
        has_prefill=has_prefill,
    )
    paired.plan(lengths)
    assert {half.number for half in halves if half.plans == [lengths]} == planned
