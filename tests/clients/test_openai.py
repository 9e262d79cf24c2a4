"""Clients of OpenAI's API, as they are published, against a live server of a small model.

Each is a program of its own, in its own environment; it ends with an error at the first reply that is not as
it should be.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.served import Served, serve
from tests.server.live import LiveServer
from tests.support.sensitive_model import write_sensitive_model
from tests.support.tool_model import write_tool_model

PROGRAMS = Path(__file__).with_name("programs")
MODEL, KEY = "small", "a-key"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_sensitive_model(tmp_path_factory.mktemp("model") / MODEL)
    options = ("--model", str(model), "--dtype", "float32", "--max-running-requests", "8", "--api-key", KEY)
    with serve(*options) as served:
        yield served


@pytest.mark.parametrize("program", ["openai_strict", "langchain_openai_client", "litellm_client"])
def test_a_client_gets_what_it_expects(
    served: Served, client_python: Callable[[str], Path], program: str
) -> None:
    run(client_python("openai"), program, served.url)


def test_langchain_takes_tool_calls(client_python: Callable[[str], Path], tmp_path: Path) -> None:
    """Over a worker that repeats the prompt, which begins with what the model is to say."""
    python = client_python("openai")
    with LiveServer(write_tool_model(tmp_path / MODEL), max_model_len=2048, api_key=KEY) as server:
        run(python, "langchain_tools_client", server.url)


def test_instructor_gets_objects(client_python: Callable[[str], Path], tmp_path: Path) -> None:
    """By tools and by a schema, from a model with random weights; by JSON, from one that is told them."""
    python, model = client_python("instructor"), write_tool_model(tmp_path / MODEL)
    options: dict[str, Any] = {"max_model_len": 2048, "api_key": KEY}
    with LiveServer(model, **options) as server:
        run(python, "instructor_client", server.url, "json")
    guided = {"real": True, "device": "cpu", "dtype": "float32", "reasoning_parser": "none"}
    with LiveServer(model, **options, **guided) as server:
        for mode in ("tools", "json_schema"):
            run(python, "instructor_client", server.url, mode)


def run(python: Path, program: str, url: str, *more: str) -> None:
    command = [str(python), str(PROGRAMS / f"{program}.py"), url, MODEL, KEY, *more]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.endswith("all done\n")
