import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.attention.avx512 import AVX512Attention, AVX512InvariantAttention
from segue.kernels.cpu.build import kernels
from tests.attention.case import Case
from tests.support import emulated_tiles

pytestmark = pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)


@pytest.fixture(autouse=True, params=["this CPU's instructions", "emulated tiles"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "emulated tiles":
        emulated_tiles.use(monkeypatch)


def case(
    q_lens: list[int],
    kv_lens: list[int],
    num_decode: int,
    *,
    page_size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    make: type[AVX512Attention] = AVX512Attention,
) -> Case:
    return Case(
        q_lens,
        kv_lens,
        num_decode,
        page_size=page_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        make=make,
    )


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode_of_ragged_sequences_agrees_with_the_oracle(page_size: int) -> None:
    case([1] * 6, [1, 7, 33, 600, 16, 256], 6, page_size=page_size).check()


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 50), (20, 20), (9, 100), (150, 150), (129, 300), (1, 260), (300, 301), (70, 70)]
)
def test_prefill_agrees_with_the_oracle(q_len: int, kv_len: int, page_size: int) -> None:
    case([q_len], [kv_len], 0, page_size=page_size).check()


def test_a_query_that_attends_to_no_key_gives_zero() -> None:
    blind = case([5, 4], [3, 0], 0)
    blind.check()
    output = blind.run()
    assert output[:2].abs().sum() == 0
    assert output[5:].abs().sum() == 0


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 8), (1, 5), (1, 16), (1, 17), (2, 20)])
def test_groups_of_any_size(kv_heads: int, group: int) -> None:
    case([1, 1, 20], [9, 400, 150], 2, kv_heads=kv_heads, group=group).check()


@pytest.mark.parametrize("num_decode", [0, 1])
def test_keys_whose_scores_are_minus_infinity_have_no_weight(num_decode: int) -> None:
    extreme = case([1, 40], [600, 600], num_decode)
    for row in range(2):
        extreme.queries[row][..., 0] = 1.0
        extreme.keys[row][:300, :, 0] = float("-inf")  # more than a block of keys
        slots = extreme.ctx.page_table.kv_slots(torch.full((600,), row), torch.arange(600))
        rows = extreme.ctx.kv.token_rows(slots)
        extreme.ctx.kv.write(extreme.layer, rows, extreme.keys[row], extreme.values[row])
    extreme.check()


def test_a_nan_in_a_query_stays_in_its_head() -> None:
    poisoned = case([1, 4], [20, 30], 1)
    poisoned.queries[0][0, 0, 0] = float("nan")
    output = poisoned.run()
    assert output[0, 0].isnan().all() and not output[0, 1:].isnan().any() and not output[1:].isnan().any()


@st.composite
def batches(draw: st.DrawFn) -> Case:
    num_decode = draw(st.integers(0, 4))
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 90), st.integers(0, 300)), max_size=3, min_size=num_decode == 0)
    )
    kv_lens = draw(st.lists(st.integers(1, 600), min_size=num_decode, max_size=num_decode))
    return case(
        [1] * num_decode + [q for q, _ in prefills],
        kv_lens + [q + before for q, before in prefills],
        num_decode,
        page_size=draw(st.sampled_from([1, 3, 16, 64])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from([64, 128, 192, 256, 512])),
        make=draw(st.sampled_from([AVX512Attention, AVX512InvariantAttention])),
    )


@settings(max_examples=40, deadline=None)
@given(batches())
def test_any_mix_agrees_with_the_oracle(mixed: Case) -> None:
    mixed.check()
