"""Tensor parallelism over gloo: in float32 every rank gets the same tokens as a single rank."""

import pytest

from tests.model_runner import making, tiny
from tests.model_runner.ranks import run_ranks, scenario


@pytest.mark.parametrize(
    ("save", "size"),
    [  # Qwen3 has 2 KV heads, so two ranks hold each head
        (tiny.save_llama, 2),
        pytest.param(tiny.save_qwen3, 4, marks=pytest.mark.slow),
    ],
    ids=["llama at 2", "qwen3 at 4 with replicated KV heads"],
)
def test_all_ranks_sample_the_tokens_of_a_single_rank(save, size, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = save(tmp_path)
    runner = making.make_runner(tmp_path)
    expected = scenario(runner)
    runner.close()
    assert expected[1] == tiny.reference(model, making.prompt(30, seed=30), 16)
    assert run_ranks(tmp_path, size, tmp_path) == [expected] * size
