"""The adapter's command line and its clock."""

import subprocess
import sys
import time

import pytest

from bench.offline import age, engine_options
from segue.errors import ConfigError


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
    code = "import time; time.sleep(0.3); from bench.offline import age; print(age())"
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 < float(run.stdout) < time.monotonic() - began + 0.1
    assert age() > 0
