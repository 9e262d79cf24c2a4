"""The deterministic backends are correct, and their bits do not depend on chunking and batching."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.attention import cpu_invariant
from segue.attention.avx512 import AVX512InvariantAttention
from segue.attention.base import AttentionBackend, Context
from segue.attention.cpu_invariant import InvariantCPUAttention
from segue.errors import ConfigError
from segue.kernels.cpu.build import kernels
from tests.attention.case import TOLERANCE, Case

Chunk = tuple[int, int, int]  # a sequence, its number of earlier tokens, its number of tokens in this step


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_any_mix_agrees_with_the_oracle(page_size: int, dtype: torch.dtype) -> None:
    q_lens, kv_lens = [1, 1, 1, 9, 150, 1, 129], [1, 33, 200, 100, 150, 50, 300]
    Case(q_lens, kv_lens, 3, page_size=page_size, dtype=dtype, make=InvariantCPUAttention).check()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 1, 24), (1, 8, 64), (2, 20, 8), (1, 400, 8)])
def test_any_grouping_of_heads_agrees_with_the_oracle(kv_heads: int, group: int, head_dim: int) -> None:
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim}
    Case([1, 1, 20], [9, 70, 150], 2, make=InvariantCPUAttention, **sizes).check()


def test_a_query_that_attends_to_no_key_gives_zero() -> None:
    case = Case([5, 4], [3, 0], 0, make=InvariantCPUAttention)
    case.check()
    assert case.run()[:2].abs().sum() == 0


def test_the_scores_of_a_long_context_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    softmax = torch.softmax

    def recording(scores: Tensor, dim: int) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    case = Case([1] * 9 + [50], [300] * 10, 9, make=InvariantCPUAttention)
    monkeypatch.setattr(cpu_invariant, "_MAX_SCORES", 2 * 400 * 16)
    monkeypatch.setattr(cpu_invariant.torch, "softmax", recording)
    case.run()
    assert len(sizes) > 2 and max(sizes) <= 2 * 400 * 16
    case.check()


class Sequences:
    """Sequences in a pool, which can be computed in any chunks."""

    def __init__(
        self, lens: list[int], dtype: torch.dtype, backend: type[AttentionBackend], page_size: int = 16
    ) -> None:
        make = {"page_size": page_size, "kv_heads": 3, "group": 3, "head_dim": 64, "dtype": dtype}
        self.case = Case(lens, lens, 0, make=backend, **make)
        self.lens = lens

    def step(self, chunks: list[Chunk]) -> list[Tensor]:
        """Returns the attention of each chunk's tokens, computed in one step."""
        case, old = self.case, self.case.ctx
        chunks = [(s, start, min(count, self.lens[s] - start)) for s, start, count in chunks]
        order = sorted(range(len(chunks)), key=lambda i: chunks[i][2] != 1)  # decode rows first
        q_lens = [chunks[i][2] for i in order]
        ctx = Context.build(
            input_ids=torch.zeros(sum(q_lens), dtype=torch.int64),
            slots=[chunks[i][0] for i in order],
            q_lens=q_lens,
            kv_lens=[sum(chunks[i][1:]) for i in order],
            num_decode=q_lens.count(1),
            page_table=old.page_table,
            kv=old.kv,
            backend=old.backend,
        )
        ctx.backend.prepare(ctx)

        def tokens(tensors: list[Tensor]) -> Tensor:
            return torch.cat(
                [tensors[s][start : start + count] for s, start, count in (chunks[i] for i in order)]
            )

        output = ctx.backend.forward(
            tokens(case.queries), tokens(case.keys), tokens(case.values), case.layer, ctx
        )
        parts = dict(zip(order, output.split(q_lens), strict=True))
        return [parts[i] for i in range(len(chunks))]

    def whole(self, sequence: int) -> Tensor:
        """Returns the attention of a whole sequence, computed in a step of its own."""
        return self.step([(sequence, 0, self.lens[sequence])])[0]


LENS = [200, 1, 64, 65, 129, 333, 17]


BACKENDS = [
    (torch.float32, InvariantCPUAttention),
    (torch.bfloat16, InvariantCPUAttention),
    *([] if kernels().library is None else [(torch.bfloat16, AVX512InvariantAttention)]),
]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda each: f"{each[0]}-{each[1].__name__}")
def sequences(request: pytest.FixtureRequest) -> Sequences:
    return Sequences(LENS, *request.param)


def check_same_bits(sequences: Sequences, chunks: list[Chunk]) -> None:
    """Check that a step gives its tokens the same bits as a step of their whole sequence alone."""
    for (s, start, _), found in zip(chunks, sequences.step(chunks), strict=True):
        assert torch.equal(found, sequences.whole(s)[start : start + len(found)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_every_step(sequences: Sequences, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(LENS))), min_size=1, max_size=7, unique=True))
    counts = st.one_of(st.just(1), st.sampled_from([2, 4, 7, 64, 128, 512]))
    check_same_bits(
        sequences, [(s, data.draw(st.integers(0, LENS[s] - 1)), data.draw(counts)) for s in chosen]
    )


def test_many_decode_rows_have_the_bits_of_each_alone(sequences: Sequences) -> None:
    order = list(range(len(LENS)))
    random.Random(0).shuffle(order)
    for step in range(40):
        chunks = [(s, step % LENS[s], 1) for s in order]
        for chunk, found in zip(chunks, sequences.step(chunks), strict=True):
            assert torch.equal(found, sequences.step([chunk])[0])


class OneBitOff(InvariantCPUAttention):
    """Changes one bit of the output in a step of a single token.

    The CPU's GEMMs may round alike in every step. So only a backend that is made to depend on the step can
    show that the comparison fails.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer: int, ctx: Context) -> Tensor:
        output = super().forward(query, key, value, layer, ctx)
        if len(query) == 1:
            number = output.view(-1)[:1]
            number.copy_(torch.nextafter(number, torch.full_like(number, torch.inf)))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backend_with_one_other_bit_fails_the_same_comparison(dtype: torch.dtype) -> None:
    sequences = Sequences(LENS, dtype, OneBitOff)
    check_same_bits(sequences, [(0, 150, 1), (2, 10, 4)])  # five tokens in one step, as in the whole sequence
    with pytest.raises(AssertionError):
        check_same_bits(sequences, [(0, 150, 1)])


def test_a_gemm_size_that_rounds_differently_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bmm = torch.bmm

    def rounding_differently(a: Tensor, b: Tensor) -> Tensor:
        return bmm(a.double(), b.double()).to(a.dtype) if a.shape[1] == 64 else bmm(a, b)

    monkeypatch.setattr(cpu_invariant.torch, "bmm", rounding_differently)
    find = cpu_invariant._agreeing_rows.__wrapped__
    assert 64 not in find(3, 64, torch.float32)
    assert 16 in find(3, 64, torch.float32)


@pytest.mark.parametrize(
    "differs", [lambda a, b: len(a) == 2, lambda a, b: b.shape[2] > 4000], ids=["two", "long"]
)
def test_a_cpu_whose_gemms_depend_on_their_number_or_length_is_refused(
    differs: Callable[[Tensor, Tensor], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bmm = torch.bmm
    monkeypatch.setattr(
        cpu_invariant.torch,
        "bmm",
        lambda a, b: bmm(a.double(), b.double()).to(a.dtype) if differs(a, b) else bmm(a, b),
    )
    with pytest.raises(ConfigError, match="GEMMs of 16 rows"):
        cpu_invariant._agreeing_rows.__wrapped__(3, 64, torch.float32)
