from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.bench.profile import StepBench, StepProfile
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError
from segue.model_runner.demand import weight_bytes
from segue.models.config import ModelConfig
from tests.model_runner import making, tiny
from tests.support.fake_cuda import EXPERTS, QWEN3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepBench]:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny.save_llama(directory)
    bench = StepBench(EngineConfig(**making.options(directory)))
    assert min(bench._speed) > 0
    bench._speed = 1e13, 1e14  # no step is faster, however busy the machine was while it was measured
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


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.5), ("cpu", 1.0)])
def test_experts_in_fp8_are_half_the_bytes_on_a_gpu(device: str, share: float) -> None:
    """Of one token the experts that it chooses are read, and of many tokens the arithmetic is the same."""
    moe = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = ModelConfig.from_hf(QWEN3 | EXPERTS | moe | {"hidden_size": 2048, "vocab_size": 8})

    def milliseconds(quantization: Any, tokens: int) -> float:
        model = config.quantized(quantization)
        num_bytes = weight_bytes(model, TPInfo(), torch.bfloat16)
        runner = SimpleNamespace(dtype=torch.bfloat16, weight_bytes=num_bytes, device=torch.device(device))
        bench: Any = SimpleNamespace(_speed=(4e12, 8e14), _model=model, runner=runner)
        return StepBench._roofline(bench, tokens, kv_tokens=0, logits=1)

    assert milliseconds("fp8", 1) == pytest.approx(share * milliseconds("none", 1), rel=0.05)
    assert milliseconds("fp8", 4096) == pytest.approx(milliseconds("none", 4096), rel=0.05)


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
