"""The file of answers, and how a later run goes on with it."""

from __future__ import annotations

import json
import resource
from contextlib import closing
from pathlib import Path

import pytest

from segue.cli.backends import Answered
from segue.cli.prompt_file import PromptLine
from segue.cli.result_file import PromptOutcome, ResultFile
from segue.errors import ConfigError

ANSWER = Answered(text="é", finish_reason="stop", prompt_tokens=1, completion_tokens=2)
DIGESTS = [(index, f"d{index}") for index in range(4)]


def outcome(index: int, error: str | None = None) -> PromptOutcome:
    line = PromptLine(index=index, id=f"line-{index}", digest=f"d{index}", ask=None)
    return PromptOutcome(line=line, answer=None if error else ANSWER, error=error)


def write(path: Path, *outcomes: PromptOutcome) -> None:
    file = ResultFile(str(path), overwrite=False)
    with closing(file):
        for each in outcomes:
            file.write(each)


def test_errors_and_a_half_written_line_are_dropped_and_the_rest_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, outcome(2), outcome(0, "too long"), outcome(1))
    with path.open("ab") as file:
        file.write(outcome(3).encoded()[:-1])  # only the end of the line is missing
    results = ResultFile(str(path), overwrite=False)
    assert results.done == {2: "d2", 1: "d1"}
    assert results.check(DIGESTS) == 4
    results.write(outcome(0))
    results.close()
    assert path.read_bytes() == b"".join(outcome(index).encoded() for index in (2, 1, 0))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "id": "line-2",
        "index": 2,
        "text": "é",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "error": None,
        "digest": "d2",
    }


@pytest.mark.parametrize(
    ("content", "prompts", "words"),
    [
        ("hello\n", DIGESTS, "line 1 is no answer"),
        ('{"index": [], "digest": "", "error": null}\n', DIGESTS, "line 1 is no answer"),
        ('{"index": Infinity, "digest": "", "error": null}\n', DIGESTS, "line 1 is no answer"),
        (f"{'[' * 100_000}\n", DIGESTS, "line 1 is no answer"),
        ('{"index": 1, "digest": "x", "error": null}\n', DIGESTS, "answer 1 is that of another prompt"),
        ('{"index": 9, "digest": "d9", "error": null}\n', DIGESTS, "prompts that the input has not"),
    ],
)
def test_the_answers_of_another_input_are_not_continued(
    content: str, prompts: list[tuple[int, str]], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    with (
        pytest.raises(ConfigError, match=f"{words}.*--overwrite"),
        closing(ResultFile(str(path), overwrite=False)) as file,
    ):
        file.check(prompts)
    assert path.read_text() == content
    with closing(ResultFile(str(path), overwrite=True)) as file:
        assert file.check(prompts) == len(prompts) and path.read_text() == ""


@pytest.mark.parametrize("first", ["", "half a line"])
def test_two_runs_do_not_write_to_one_file(first: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(first)
    file = ResultFile(str(path), overwrite=False)
    with pytest.raises(ConfigError, match="another process writes to it"):
        ResultFile(str(path), overwrite=True)
    file.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(str(tmp_path / "none" / "answers.jsonl"), overwrite=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"File too large.*same command again"):
            write(tmp_path / "answers.jsonl", outcome(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
