"""The calls of FlashAttention-3, with a reference for its operator; GPU tests use the real operator."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.attention.fa3 import FA3Attention
from tests.attention.case import Case
from tests.attention.oracle import attend
from tests.attention.static import Static


def forward(query: Tensor, keys: Tensor, values: Tensor, *, out: Tensor, **given: Any) -> None:
    """The reference of FlashAttention-3's `fwd` on paged keys: one sequence at a time."""
    starts, lens, table = given["cu_seqlens_q"], given["seqused_k"], given["page_table"]
    if starts is None:  # [S, queries, heads, head_dim]
        starts = torch.arange(len(query) + 1) * query.shape[1]
        query, out = query.flatten(0, 1), out.flatten(0, 1)
    else:
        assert int((starts[1:] - starts[:-1]).max()) <= given["max_seqlen_q"]
    assert len(lens) == len(table) == len(given["leftpad_k"]) == len(starts) - 1
    assert given["is_causal"] and not given["leftpad_k"].any()
    for i, length in enumerate(lens.tolist()):
        pages = table[i, : -(-length // keys.shape[1])].long()
        queries = slice(int(starts[i]), int(starts[i + 1]))
        found = attend(
            query[queries],
            keys[pages].flatten(0, 1)[:length],
            values[pages].flatten(0, 1)[:length],
            given["softmax_scale"],
        )
        out[queries] = found.to(out.dtype)


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_3", ModuleType("flash_attn_3"))
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", ModuleType("flash_attn_3._C"))
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=forward), raising=False)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "num_decode"),
    [
        ([1, 1, 1], [5, 70, 16], 3),
        ([7, 20], [7, 90], 0),
        ([1, 1, 7, 1], [5, 70, 30, 1], 2),
        ([5, 4], [3, 0], 0),
    ],
)
def test_every_step_agrees_with_the_oracle(q_lens: list[int], kv_lens: list[int], num_decode: int) -> None:
    Case(q_lens, kv_lens, num_decode, make=FA3Attention).check()


@pytest.mark.parametrize("slots", [4, 20])
def test_padded_steps_of_any_mix_agree_with_the_oracle(slots: int) -> None:
    case = Case([1, 1, 1, 12, 30], [9, 40, 1, 50, 30], 3, make=FA3Attention)
    static = Static(case, slots=slots, tokens=50)
    for members, num_decode in (([0, 1, 3], 2), ([0, 1, 2], 3), ([4, 3], 0), ([2, 4], 1)):
        static.load(members, num_decode)
        static.check(members)


def test_each_half_computes_only_its_own_sequences() -> None:
    case = Case([1, 1, 12], [9, 40, 50], 2, make=FA3Attention)
    seen: dict[bool, tuple[int, list[int]]] = {}

    def recording(query: Tensor, keys: Tensor, values: Tensor, **given: Any) -> None:
        seen[given["num_splits"] == 1] = len(query), given["cu_seqlens_q"].tolist()
        forward(query, keys, values, **given)

    backend: Any = case.ctx.backend
    backend._forward = recording
    case.check()
    # Decode gets no other queries, because its buffer of partial results grows with the queries.
    assert seen == {False: (2, [0, 1, 2, 2]), True: (14, [2, 2, 2, 14])}


def test_for_a_half_that_another_backend_serves_nothing_is_computed() -> None:
    case = Case([1, 1, 12], [9, 40, 50], 2, make=FA3Attention)
    backend: Any = case.ctx.backend
    for half in ("prefill", "decode"):
        backend._starts = backend._decode_starts = torch.empty(0)
        backend.serves_prefill, backend.serves_decode = half == "prefill", half == "decode"
        backend.prepare(case.ctx)
        assert (len(backend._starts), len(backend._decode_starts)) == (
            (4, 0) if half == "prefill" else (0, 4)
        )
