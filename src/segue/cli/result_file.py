"""Answers as lines of JSON, in a file that a later run of the same command goes on with."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from segue.cli.backends import Answered
from segue.cli.prompt_file import PromptLine
from segue.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    """What became of a prompt: an answer, an error, or what there was of an answer with an error."""

    line: PromptLine
    answer: Answered | None = None
    error: str | None = None

    def encoded(self) -> bytes:
        """Return it as a line of the output."""
        answer = self.answer
        content = {
            "id": self.line.id,
            "index": self.line.index,
            "text": answer and answer.text,
            "finish_reason": answer and answer.finish_reason,
            "prompt_tokens": answer and answer.prompt_tokens,
            "completion_tokens": answer and answer.completion_tokens,
            "error": self.error,
            "digest": self.line.digest,
        }
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"


class ResultFile:
    """The file of the answers, or the standard output for "-"; each answer is written at once.

    ``done`` has the index and the digest of each prompt whose answer is there already. Prompts with errors
    are not done: their lines are removed, as is a last line that was not written completely.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        """Open the file; with ``overwrite`` what it has is dropped.

        Raises:
            ConfigError: it cannot be written, another run writes to it, or it has other lines than answers.
        """
        self._path = path
        self.done: dict[int, str] = {}
        self._files: list[BinaryIO] = []  # the last one is written; a lock lasts until its file is closed
        if path != "-":
            try:
                with self._errors():
                    self._open(overwrite)
            except BaseException:
                self.close()
                raise

    def check(self, prompts: Iterable[tuple[int, str]]) -> int:
        """Return the number of prompts, of which each has an index and a digest.

        Raises:
            ConfigError: an answer in the file is not that of a prompt.
        """
        count, known = 0, 0
        for index, digest in prompts:
            count += 1
            if index in self.done:
                known += 1
                if self.done[index] != digest:
                    raise self._other_input(f"its answer {index} is that of another prompt")
        if known < len(self.done):
            raise self._other_input("it has answers of prompts that the input has not")
        return count

    def write(self, outcome: PromptOutcome) -> None:
        """Write a line; raises ConfigError if it cannot be written, as on a full disk."""
        with self._errors():
            file = self._files[-1] if self._files else sys.stdout.buffer
            file.write(outcome.encoded())
            file.flush()

    def close(self) -> None:
        """Close the file, if it is one."""
        for file in self._files:
            with suppress(OSError):  # `write` has raised it already
                file.close()

    def _open(self, overwrite: bool) -> None:
        file = open(self._path, "a+b")  # noqa: SIM115, `close` closes it
        self._files.append(file)
        self._lock(file)
        if overwrite:
            file.truncate(0)
            return
        file.seek(0)
        kept = list(self._answers(file))
        if sum(map(len, kept)) == file.tell():
            return
        # A new file takes the place of the old one, so that nothing is lost if this process ends now. The old
        # one stays open: its lock is for those that have opened it already.
        temporary = f"{self._path}.{os.getpid()}.tmp"
        renewed = open(temporary, "w+b")  # noqa: SIM115, as above
        self._files.append(renewed)
        self._lock(renewed)
        try:
            renewed.writelines(kept)
            renewed.flush()
            os.fsync(renewed.fileno())
            os.replace(temporary, self._path)
        except OSError:
            os.unlink(temporary)
            raise

    def _answers(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines that have answers, and note whose they are."""
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):  # only the last line can be so: it was not written completely
                return
            try:
                content = json.loads(line)
                index, digest, error = int(content["index"]), content["digest"], content["error"]
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                raise self._other_input(f"its line {number + 1} is no answer") from None
            if error is None:
                self.done[index] = digest
                yield line

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output={self._path!r}: another process writes to it; let it end, or give another file",
                param="output",
            ) from None

    def _other_input(self, fault: str) -> ConfigError:
        remedy = "give another --output, or --overwrite to drop what it has"
        return ConfigError(f"output={self._path!r}: {fault}; {remedy}", param="output")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an OSError of the block into a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"output={self._path!r}: it cannot be written ({error.strerror}); make room or give another "
                "file, and run the same command again to continue",
                param="output",
            ) from None
