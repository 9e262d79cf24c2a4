"""``segue generate`` with files, by an engine in this process and by a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from segue.api.engine import Engine
from segue.cli import main
from segue.cli.batch import RunStoppedError
from segue.errors import ConfigError
from tests.server.live import LiveServer
from tests.support.fake_engine import FAKE_WORKER

RUNNER = CliRunner()


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["id"]: each for each in found}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A conversation, a text, a prompt that the model refuses, and a line that is wrong."""
    path = tmp_path / "prompts.jsonl"
    lines: list[Any] = [
        {"id": "text", "prompt": "abc", "max_tokens": 6},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        {"id": "refused", "messages": [{"role": "user", "content": "refuse"}]},
        {"id": "wrong", "prompt": "abc", "top_p": 7},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("place", ["server", "process"])
def test_a_file_of_prompts_is_answered_and_continued(
    place: str, prompts: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_worker_command", FAKE_WORKER)
    output = tmp_path / "answers.jsonl"
    words = ["generate", "--input", str(prompts), "--output", str(output), "--parallel", "2"]
    if place == "process":
        first = RUNNER.invoke(main.app, [*words, "--model", str(tiny_model), "--load-format", "dummy"])
    else:
        with LiveServer(tiny_model, api_key="secret") as server:
            monkeypatch.setenv("SEGUE_API_KEY", "secret")
            first = RUNNER.invoke(main.app, [*words, "--url", server.url])
            server.assert_nothing_left()
    assert first.exit_code == 3, first.exception
    assert first.stderr.startswith("2 answers, 2 errors; 11 tokens in ")
    found = answers(output)
    assert found["text"]["text"] == "abcabc"
    assert (found["text"]["finish_reason"], found["text"]["completion_tokens"]) == ("length", 6)
    assert found["chat"]["error"] is None and found["chat"]["completion_tokens"] == 5
    assert "refused by the template" in found["refused"]["error"]
    assert "top_p=7" in found["wrong"]["error"]
    if place == "process":  # a server that is gone: what is there stays
        with pytest.raises(ConfigError, match="another prompt"):
            prompts.write_text(prompts.read_text().replace("abc", "abd"))
            RUNNER.invoke(main.app, words, catch_exceptions=False)
        return
    lines = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[:2]))
    again = RUNNER.invoke(main.app, [*words, "--url", server.url])
    assert (again.exit_code, again.stderr) == (0, "all 2 answers are there already\n")
    assert list(answers(output)) == [each for each in found if each in ("text", "chat")]


def test_a_server_that_dies_ends_the_run_with_a_remedy(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXIT_AT_STEP", "20")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n" * 3)
    words = ["generate", "--input", str(prompts), "--parallel", "1", "--patience-s", "0.1"]
    words += ["--max-tokens", "12"]
    with LiveServer(tiny_model) as server, pytest.raises(RunStoppedError, match=r"1 of 3.*run the same"):
        RUNNER.invoke(main.app, [*words, "--url", server.url], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "either a text to continue or --input"),
        (["abc", "--input", "x"], "either a text to continue or --input"),
        (["abc", "--output", "x"], "go with --input"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        RUNNER.invoke(main.app, ["generate", *words], catch_exceptions=False)
