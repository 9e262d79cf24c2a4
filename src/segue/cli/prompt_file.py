"""Prompts from a file: a line of text each, or a JSON object each with its own sampling fields."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segue.cli.backends import TextQuery
from segue.cli.sampling import SAMPLING_FIELDS, check_sampling, nearest
from segue.errors import ConfigError, InvalidRequestError, SegueError, short_repr

InputFormat = Literal["auto", "text", "jsonl"]
FIELDS = ("id", "prompt", "messages", *SAMPLING_FIELDS)
_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of the input, with what is to be answered or, if the line cannot be used, the reason."""

    index: int  # of the line, from 0
    id: str  # its own one; the index, if it has none
    digest: str  # of the line: an answer that is there already is known to be this line's
    ask: TextQuery | None
    error: str = ""


class PromptFile:
    """The lines of a file, or of the standard input for "-"; blank lines do not count as prompts."""

    def __init__(self, path: str, form: InputFormat, sampling: Mapping[str, Any]) -> None:
        """Take the sampling fields of lines that do not have them.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path = path
        self._is_jsonl = Path(path).suffix.lower() in _SUFFIXES if form == "auto" else form == "jsonl"
        self._sampling = sampling
        # The standard input can be read only once.
        self._stdin = sys.stdin.buffer.readlines() if path == "-" else None

    def digests(self) -> Iterator[tuple[int, str]]:
        """Yield the index and the digest of each prompt; raises ConfigError if the file cannot be read."""
        return ((index, _digest(line)) for index, line in self._lines())

    def prompts(self) -> Iterator[PromptLine]:
        """Yield each prompt; raises ConfigError if the file cannot be read."""
        return (self._prompt(index, line) for index, line in self._lines())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the index and the text of each line that is not blank, without its end."""
        try:
            if self._stdin is not None:
                yield from _not_blank(self._stdin)
                return
            with open(self._path, "rb") as file:
                yield from _not_blank(file)
        except OSError as error:
            raise ConfigError(
                f"input={self._path!r}: it cannot be read ({error.strerror}); give a file of prompts",
                param="input",
            ) from None

    def _prompt(self, index: int, line: bytes) -> PromptLine:
        id_ = str(index)
        try:
            text = line.decode()
            if not self._is_jsonl:
                ask = TextQuery(prompt=text, sampling=self._sampling)
            else:
                fields = _fields(text)
                id_ = str(fields.pop("id", index))
                ask = _ask(fields, self._sampling)
        except UnicodeDecodeError:
            return PromptLine(index=index, id=id_, digest=_digest(line), ask=None, error="it is not UTF-8")
        except SegueError as error:
            return PromptLine(index=index, id=id_, digest=_digest(line), ask=None, error=error.message)
        return PromptLine(index=index, id=id_, digest=_digest(line), ask=ask)


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a line that are not null."""
    try:
        content = json.loads(text)
        if "\\u" in text:  # an escape may write what no text has
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "the line has a lone surrogate, which is no character; give valid Unicode"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is no JSON ({error}); give an object per line") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(
            f"the line is {short_repr(content)}; give an object with prompt or messages"
        )
    return {name: value for name, value in content.items() if value is not None}


def _ask(fields: dict[str, Any], sampling: Mapping[str, Any]) -> TextQuery:
    """Return what a line asks, its own sampling fields before those of the command."""
    from segue.api.openai.requests import ChatCompletionRequest, CompletionRequest
    from segue.api.validation import parse

    for name in fields:
        if name not in FIELDS:
            raise InvalidRequestError(
                f"unknown field {name!r}{nearest(name, FIELDS)}; known: {', '.join(FIELDS)}", param=name
            )
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either prompt or messages, and not both", param="prompt")
    params = {**sampling, **fields}
    check_sampling(params)
    if messages is not None:
        parse(ChatCompletionRequest, {"messages": messages})
        return TextQuery(messages=messages, sampling=params)
    if not isinstance(prompt, str):
        raise InvalidRequestError(f"prompt={short_repr(prompt)}: expected a string", param="prompt")
    parse(CompletionRequest, {"prompt": prompt})
    return TextQuery(prompt=prompt, sampling=params)


def _not_blank(lines: Any) -> Iterator[tuple[int, bytes]]:
    for index, line in enumerate(lines):
        if line.strip():
            yield index, line.rstrip(b"\r\n")


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:16]
