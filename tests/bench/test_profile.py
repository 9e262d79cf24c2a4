from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.bench.profile import StepBench, StepProfile
from segue.config import EngineConfig
from segue.errors import ConfigError
from tests.model_runner import making, tiny


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepBench]:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny.save_llama(directory)
    bench = StepBench(EngineConfig(**making.options(directory)))
    yield bench
    bench.close()


def check(found: StepProfile) -> None:
    assert 0 < found.host_milliseconds < found.milliseconds
    assert 0 < found.roofline_milliseconds < found.milliseconds
    times = [kernel.microseconds for kernel in found.kernels]
    assert times == sorted(times, reverse=True)
    linear = next(kernel for kernel in found.kernels if "linear" in kernel.name)
    assert linear.calls >= 9  # two layers of four, and the head
    assert sum(times) / 1e3 < 5 * found.milliseconds


def test_decode_steps_are_profiled(bench: StepBench) -> None:
    check(bench.decode(3, 100))


def test_decode_steps_with_a_prompt_in_each_are_profiled(bench: StepBench) -> None:
    before = bench._scheduler.totals.prompt_tokens
    found = bench.decode(3, 100, 20)
    check(found)
    assert found.label == "decode, 3 rows of 100 tokens, and a prompt of 20"
    steps = 8 + 40 + 10  # warm, timed, traced: a prompt in each
    assert bench._scheduler.totals.prompt_tokens - before == steps * 20 + 3 * (100 - 8 - 40 // 2)


@pytest.mark.parametrize(
    ("rows", "prompt", "words"), [(7, 20, "9 rows: at most 8"), (2, 65, "chunked-prefill-size")]
)
def test_a_prompt_that_does_not_fit_beside_the_rows_is_refused(
    bench: StepBench, rows: int, prompt: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        bench.decode(rows, 100, prompt)


def test_a_prompt_of_several_chunks_is_profiled(bench: StepBench) -> None:
    found = bench.prefill(150)
    check(found)
    assert found.label == "prefill of 150 tokens"


def test_the_engine_is_empty_after_a_profile(bench: StepBench) -> None:
    bench.decode(2, 100)
    bench.decode(2, 100)


def test_a_row_that_just_fits_the_longest_sequence_is_profiled(bench: StepBench) -> None:
    assert bench.runner.limits.max_seq_len == 256
    check(bench.decode(1, 220))  # 192 tokens of a prompt, computed in 3 steps, and at most 3 + 2 + 58 more


@pytest.mark.parametrize(("rows", "context"), [(9, 100), (2, 250), (8, 120), (1, 221)])
def test_rows_that_do_not_fit_are_refused(bench: StepBench, rows: int, context: int) -> None:
    with pytest.raises(ConfigError, match=str(rows)):
        bench.decode(rows, context)


def test_tensor_parallel_engines_are_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp=2"):
        StepBench(EngineConfig(**making.options(tmp_path, tp=2)))
