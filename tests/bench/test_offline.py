"""The adapter's command line and its clock."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bench.offline import result_name, teacher_config
from bench.starting import age, engine_options
from segue.bench.load import Lengths
from segue.bench.offline import Batch, OfflineRun, measure, summary
from segue.config import EngineConfig
from segue.errors import BenchmarkError, ConfigError
from tests.support.fake_engine import FakeEngine


def test_options_are_parsed_as_engine_options():
    found = engine_options(["--tp=2", "--disable-cuda-graph=1", "--num-kv-tokens=4096"])
    assert found == {"tp": 2, "disable_cuda_graph": True, "num_kv_tokens": 4096}


@pytest.mark.parametrize("argument", ["--nothing=1", "--tp", "tp=2", "--tp=x", "--tp=0", "--dtype=int3"])
def test_a_wrong_option_is_an_error_that_names_it(argument):
    with pytest.raises(ConfigError, match=argument.partition("=")[2] or argument):
        engine_options([argument])


def test_a_missing_size_is_named():
    run = subprocess.run([sys.executable, "-m", "bench.offline"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "size" in run.stderr


def test_the_age_of_a_process_includes_its_imports():
    code = "import time; time.sleep(0.3); from bench.starting import age; print(age())"
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 < float(run.stdout) < time.monotonic() - began + 0.1
    assert age() > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "gpu_offline_8b"),
        ({"deterministic": True}, "gpu_offline_8b_deterministic"),
        ({"attention_backend": "fa3,flashinfer"}, "gpu_offline_8b_fa3-flashinfer"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "gpu_offline_8b_fp8_fp8_kv"),
    ],
)
def test_a_named_attention_backend_has_a_result_file_and_does_not_score_its_own_tokens(options, name):
    config = EngineConfig(**options)
    assert result_name("8b", config, fp8=config.quantization == "fp8") == name
    assert teacher_config(config).attention_backend == "auto"


LENGTHS = Lengths(prompt=(3, 9), output=(5, 9), max_id=90)


def test_batches_are_drawn_anew_for_each_seed_and_alike_for_the_same():
    one, again, other = (Batch.draw(4, LENGTHS, temperature=0.5, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert all(3 <= len(prompt) <= 9 and max(prompt) <= 90 for prompt in one.prompts)


def test_a_batch_is_timed_and_its_progress_is_told(tiny_model):
    batch, told = Batch.draw(6, LENGTHS, temperature=0.0, seed=1), []
    with FakeEngine(str(tiny_model), load_format="dummy", log_level="error") as engine:
        run = measure(engine, batch, told.append)
        short = replace(batch, max_tokens=[*batch.max_tokens[:-1], 10_000])
        with pytest.raises(BenchmarkError, match=r"made \d+ tokens where \d+ were asked for"):
            measure(engine, short)
    assert (run.requests, run.output_tokens) == (6, sum(batch.max_tokens))
    assert run.prompt_tokens == sum(map(len, batch.prompts))
    assert told[-1] == run.output_tokens and run.seconds > 0


def test_the_summary_has_medians_of_rates():
    runs = [OfflineRun(requests=2, prompt_tokens=10, output_tokens=20, seconds=s) for s in (1.0, 2.0, 4.0)]
    found = summary(runs)
    assert (found["output tokens/s"], found["tokens/s"], found["requests/s"]) == (10.0, 15.0, 1.0)
    assert [each["seconds"] for each in found["runs"]] == [1.0, 2.0, 4.0]
