"""Clients that need token ids, prompts' log-probabilities and echo, against a live server of a small model.

Each is a program of its own, in its own environment; it ends with an error at the first reply that is not as
it should be.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.served import Served, serve
from tests.support.sensitive_model import write_sensitive_model

PROGRAMS = Path(__file__).with_name("programs")
STAND_INS = Path(__file__).with_name("stand_ins")
MODEL = "small"
STREAMS = 64
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ClientPython = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sensitive_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    options = ("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32", "--deterministic")
    with serve(*options, "--max-running-requests", str(STREAMS), "--max-logprobs", "100") as served:
        yield served


def run(python: Path, program: str, *arguments: object, **env: str) -> None:
    command = [str(python), str(PROGRAMS / f"{program}.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ | env)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.endswith("all done\n")


def test_renderers_gets_what_the_native_route_gives(
    served: Served, model: Path, client_python: ClientPython
) -> None:
    run(client_python("renderers"), "renderers_client", served.url, MODEL, model, STREAMS)
    assert served.state()["num_generated_tokens"] > 0


def test_trl_generates_chats_and_scores_as_transformers(
    served: Served, model: Path, client_python: ClientPython
) -> None:
    path = os.pathsep.join([str(STAND_INS), os.environ["PYTHONPATH"]])
    run(client_python("trl"), "trl_client", served.url, model, PYTHONPATH=path)


def test_lm_eval_gets_what_its_own_transformers_model_gets(
    served: Served, model: Path, client_python: ClientPython, tmp_path: Path
) -> None:
    run(client_python("lm-eval"), "lm_eval_client", served.url, MODEL, model, tmp_path)
