"""Prompts from lines of text and of JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from segue.cli.prompt_file import PromptFile
from segue.errors import ConfigError

SAMPLING = {"temperature": 0.7}


def test_lines_of_text_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"one\r\n\n two \n\xff\nlast")
    found = list(PromptFile(str(path), "auto", SAMPLING).prompts())
    assert [(each.index, each.id, each.ask and each.ask.prompt) for each in found] == [
        (0, "0", "one"),
        (2, "2", " two "),
        (3, "3", None),
        (4, "4", "last"),
    ]
    assert found[2].error == "it is not UTF-8"
    assert found[0].ask is not None and found[0].ask.sampling == SAMPLING
    assert list(PromptFile(str(path), "auto", {}).digests()) == [(each.index, each.digest) for each in found]


def test_an_object_has_a_prompt_or_messages_and_sampling_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    lines: list[Any] = [
        {"prompt": "one", "id": "a", "temperature": 0, "seed": None},
        {"messages": talk, "max_tokens": 3},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    file = PromptFile("-", "jsonl", SAMPLING)
    assert len(list(file.digests())) == 2
    first, second = (each.ask for each in file.prompts())
    assert first is not None and second is not None
    assert (first.prompt, first.sampling) == ("one", {"temperature": 0})
    assert (second.messages, second.sampling) == (talk, {"temperature": 0.7, "max_tokens": 3})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON"),
        ("[1]", "give an object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": 3}', "prompt=3"),
        ('{"messages": "Hi"}', "messages"),
        ('{"messages": [{"role": "boss", "content": "Hi"}]}', "role"),
        ('{"prompt": "a", "max_tokes": 3}', "max_tokes.*max_tokens"),
        ('{"prompt": "a", "top_p": 2}', "top_p=2"),
        (r'{"prompt": "\ud83d"}', "lone surrogate"),
        (r'{"prompt": "a", "id": "\ud83d"}', "lone surrogate"),
    ],
)
def test_a_wrong_line_has_an_error(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    (found,) = PromptFile(str(path), "auto", SAMPLING).prompts()
    assert found.ask is None
    assert re.search(words, found.error), found.error


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt.*cannot be read"):
        list(PromptFile(str(tmp_path / "none.txt"), "auto", {}).prompts())
