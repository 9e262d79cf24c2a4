"""The adapter's command line and its clock."""

import subprocess
import sys
import time

import pytest

from bench.offline import age, engine_options
from segue.errors import ConfigError


def test_options_are_those_of_the_engine():
    found = engine_options(["--tp=2", "--disable-cuda-graph=1", "--num-kv-tokens=4096"])
    assert found == {"tp": 2, "disable_cuda_graph": True, "num_kv_tokens": 4096}


@pytest.mark.parametrize("argument", ["--nothing=1", "--tp", "tp=2", "--tp=x", "--tp=0", "--dtype=int3"])
def test_another_option_is_an_error_that_shows_it(argument):
    with pytest.raises(ConfigError, match=argument.partition("=")[2] or argument):
        engine_options([argument])


def test_without_arguments_it_says_what_it_needs():
    run = subprocess.run([sys.executable, "-m", "bench.offline"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "size" in run.stderr


def test_a_process_is_as_old_as_its_imports_make_it():
    code = "import time; time.sleep(0.3); from bench.offline import age; print(age())"
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 < float(run.stdout) < time.monotonic() - began + 0.1
    assert age() > 0
