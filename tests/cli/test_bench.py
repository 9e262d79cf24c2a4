"""The command lines of `segue bench`, over the fake worker; tests/bench has the measurements themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from segue.api.engine import Engine
from segue.cli import main
from segue.errors import BenchmarkError, ConfigError
from tests.server.live import LiveServer
from tests.support.fake_engine import FAKE_WORKER

RUNNER = CliRunner()
SHORT = ["--input-tokens", "3-9", "--output-tokens", "4-8", "--max-id", "90"]


def test_an_engine_is_measured_without_a_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_worker_command", FAKE_WORKER)
    words = ["--model", str(tiny_model), "--load-format", "dummy", "--requests", "5", "--repeats", "2"]
    file = tmp_path / "found.json"
    result = RUNNER.invoke(main.app, ["bench", "offline", *words, *SHORT, "--json", str(file)])
    assert result.exit_code == 0, result.exception
    assert "output tokens/s" in result.stdout and "median" in result.stdout
    found = json.loads(file.read_text())
    assert found["circumstances"]["segue"] and found["arguments"]["requests"] == 5
    assert len(found["runs"]) == 2 and found["output tokens/s"] > 0
    assert all(5 * 4 <= each["output_tokens"] <= 5 * 8 for each in found["runs"])


def measure(server: LiveServer, *words: str) -> Any:
    load = ["--rate", "40", "--seconds", "0.3", "--processes", "1", *SHORT]
    return RUNNER.invoke(main.app, ["bench", "serving", f"{server.url}/v1", *load, *words])


def test_a_server_is_measured_with_its_key(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with LiveServer(tiny_model, api_key="secret") as server:
        result = measure(server, "--api-key", "secret", "--json", str(file))
        assert result.exit_code == 0, (result.exception, result.output)
        refused = measure(server)
        assert isinstance(refused.exception, BenchmarkError) and "answers 401" in str(refused.exception)
        server.assert_nothing_left()
    found = json.loads(file.read_text())
    (run,) = found["rates"]
    assert found["model"] == "tiny-model" and run["rate"] == 40
    assert run["failed"] == 0 and 0 < run["ttft_s"]["p50"] <= run["end_s"]["p50"]


@pytest.mark.slow
def test_chats_are_measured_and_failed_requests_are_exit_code_1(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        chat = measure(server, "--chat", "--may-stop")
        assert chat.exit_code == 0, (chat.exception, chat.output)
        failed = measure(server, "--model", "another")
        assert failed.exit_code == 1 and "a request failed: HTTP/1.1 404" in failed.stderr
        server.assert_nothing_left()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["serving", "ftp://h:1"], "must be a server's URL"),
        (["serving", "http://h:1", "--input-tokens", "9-3"], "input_tokens='9-3': give a number of tokens"),
        (["offline", "--output-tokens", "0"], "output_tokens='0'"),
        (["offline", "--output-tokens", "many"], "output_tokens='many'"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        RUNNER.invoke(main.app, ["bench", *words], catch_exceptions=False)
