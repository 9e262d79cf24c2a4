import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.attention import cpu
from segue.attention.cpu_invariant import InvariantCPUAttention
from tests.attention.case import TOLERANCE, Case


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode_of_ragged_sequences_agrees_with_the_oracle(dtype: torch.dtype, page_size: int) -> None:
    Case([1] * 5, [1, 7, 33, 200, 16], 5, page_size=page_size, dtype=dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_of_equal_lengths_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    Case([1] * 3, [40, 40, 40], 3, dtype=dtype).check()


def test_decode_groups_very_different_lengths_and_agrees_with_the_oracle(
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 2.5)])
def test_a_mixed_step_over_a_pool_in_fp8_agrees_with_the_oracle(
    scales: tuple[float, float], dtype: torch.dtype
) -> None:
    for make in (cpu.CPUAttention, InvariantCPUAttention):
        lens = [1, 1, 1, 20, 130, 5, 3], [1, 33, 200, 20, 150, 3, 0]
        Case(*lens, 3, dtype=dtype, scales=scales, make=make).check()


def test_the_scores_of_a_long_context_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    softmax = torch.softmax

    def recording(scores: Tensor, dim: int) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(cpu, "_MAX_SCORES", 6 * 300 * 7)
    monkeypatch.setattr(cpu.torch, "softmax", recording)
    Case([50], [300], 0).run()
    assert len(sizes) == 8 and max(sizes) <= 6 * 300 * 7
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "_MAX_SCORES", 6 * 300 * 7)
    Case([50], [300], 0).check()


def test_a_query_that_attends_to_no_key_gives_zero() -> None:
    case = Case([5, 4], [3, 0], 0)
    case.check()
    output = case.run()
    assert output[:2].abs().sum() == 0
    assert output[5:].abs().sum() == 0


def test_one_query_head_per_key_value_head() -> None:
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
