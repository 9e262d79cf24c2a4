import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.attention import cpu
from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.kvcache.pool import KVPool
from segue.kvcache.table import PageTable
from tests.attention.oracle import attend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Case:
    """Sequences with known keys and values, scattered over a pool that is NaN everywhere else."""

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        num_decode: int,
        *,
        page_size: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(len(q_lens) * 1000 + sum(kv_lens))
        pages_each = [-(-kv // page_size) for kv in kv_lens]
        num_pages = sum(pages_each) + 2
        pool = KVPool(
            num_pages=num_pages,
            num_layers=3,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device="cpu",
        )
        pool.data.fill_(float("nan"))
        table = PageTable(
            max_running=len(q_lens),
            max_seq_len=max(*kv_lens, 1) + 3,
            page_size=page_size,
            scratch_page=pool.scratch_page,
            device="cpu",
        )
        free = torch.randperm(num_pages, generator=generator).tolist()
        for row, count in enumerate(pages_each):
            table.assign(row, 0, [free.pop() for _ in range(count)])

        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, head_dim, generator=generator).to(dtype)

        self.keys = [normal(kv, kv_heads) for kv in kv_lens]
        self.values = [normal(kv, kv_heads) for kv in kv_lens]
        self.queries = [normal(q, kv_heads * group) for q in q_lens]
        self.shape = AttentionShape(
            num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.4
        )
        self.layer = 1
        for row, kv in enumerate(kv_lens):
            slots = table.slots(torch.full((kv,), row), torch.arange(kv))
            pool.write(self.layer, pool.token_rows(slots), self.keys[row], self.values[row])
        self.ctx = Context.build(
            input_ids=torch.zeros(sum(q_lens), dtype=torch.int64),
            rows=list(range(len(q_lens))),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            page_table=table,
            kv=pool,
            backend=cpu.CPUAttention(self.shape, pool),
        )

    def run(self) -> Tensor:
        new = [
            (keys[-len(q) :], values[-len(q) :])
            for keys, values, q in zip(self.keys, self.values, self.queries, strict=True)
        ]
        # A query before the first key has no key of its own; what stands there must not matter.
        missing = [len(q) - len(k) for q, (k, _) in zip(self.queries, new, strict=True)]
        key, value = (
            torch.cat(
                [
                    torch.cat([part.new_full((gap, *part.shape[1:]), float("nan")), part])
                    for gap, part in zip(missing, parts, strict=True)
                ]
            )
            for parts in zip(*new, strict=True)
        )
        self.ctx.backend.prepare(self.ctx)
        return self.ctx.backend.forward(torch.cat(self.queries), key, value, self.layer, self.ctx)

    def check(self) -> None:
        expected = torch.cat(
            [
                attend(q, k, v, self.shape.scale)
                for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
            ]
        )
        tolerance = TOLERANCE[self.queries[0].dtype]
        torch.testing.assert_close(self.run().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode_of_ragged_sequences_agrees_with_the_oracle(dtype: torch.dtype, page_size: int) -> None:
    Case([1] * 5, [1, 7, 33, 200, 16], 5, page_size=page_size, dtype=dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_of_equal_lengths_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    Case([1] * 3, [40, 40, 40], 3, dtype=dtype).check()


def test_decode_lengths_far_apart_are_grouped_and_agree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_MAX_PADDING", 30)
    Case([1] * 6, [3, 90, 5, 100, 2, 88], 6).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 50), (20, 20), (9, 100), (150, 150), (129, 300), (1, 260), (300, 301)]
)
def test_prefill_agrees_with_the_oracle(q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    Case([q_len], [kv_len], 0, dtype=dtype).check()


def test_a_long_context_bounds_the_scores_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    softmax = torch.softmax

    def noting(scores: Tensor, dim: int) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(cpu, "_MAX_SCORES", 6 * 300 * 7)
    monkeypatch.setattr(cpu.torch, "softmax", noting)
    Case([50], [300], 0).run()
    assert len(sizes) == 8 and max(sizes) <= 6 * 300 * 7
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "_MAX_SCORES", 6 * 300 * 7)
    Case([50], [300], 0).check()


def test_a_query_that_sees_no_key_gives_zero() -> None:
    case = Case([5, 4], [3, 0], 0)
    case.check()
    output = case.run()
    assert output[:2].abs().sum() == 0
    assert output[5:].abs().sum() == 0


def test_one_query_head_a_key_value_head() -> None:
    Case([1, 20], [9, 150], 1, group=1).check()


def test_one_key_value_head() -> None:
    Case([1, 1, 20], [9, 4, 150], 2, kv_heads=1, group=8, head_dim=64).check()


@st.composite
def batches(draw: st.DrawFn) -> Case:
    num_decode = draw(st.integers(0, 4))
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 160)), max_size=3, min_size=num_decode == 0)
    )
    kv_lens = draw(st.lists(st.integers(1, 120), min_size=num_decode, max_size=num_decode))
    return Case(
        [1] * num_decode + [q for q, _ in prefills],
        kv_lens + [q + before for q, before in prefills],
        num_decode,
        page_size=draw(st.sampled_from([1, 3, 16, 64])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 24])),
    )


@settings(max_examples=40, deadline=None)
@given(batches())
def test_any_mix_agrees_with_the_oracle(case: Case) -> None:
    case.check()
