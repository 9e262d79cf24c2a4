"""Many prompts, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from segue.cli.backends import Answered, TextQuery
from segue.cli.batch import BatchRun
from segue.cli.prompt_file import PromptLine
from segue.cli.remote import ServerUnavailableError
from segue.errors import EngineDeadError, InvalidRequestError


class Scripted:
    """Answers by what the prompt says, once ``parallel`` prompts are asked together."""

    def __init__(self, parallel: int = 1) -> None:
        self._together = threading.Barrier(parallel)
        self.in_flight, self.most, self.refusals = 0, 0, 3
        self._lock = threading.Lock()

    def complete(self, ask: TextQuery) -> Answered:
        with self._lock:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        try:
            self._together.wait(60)
            return self._answer(ask.prompt or "")
        finally:
            with self._lock:
                self.in_flight -= 1

    def _answer(self, prompt: str) -> Answered:
        if prompt == "long":
            raise InvalidRequestError("it is too long")
        if prompt == "dead":
            raise EngineDeadError("the engine has died")
        if prompt == "away":
            raise ServerUnavailableError("cannot reach it")
        if prompt == "busy" and self.refusals:
            self.refusals -= 1
            raise ServerUnavailableError("503")
        reason = "abort" if prompt == "abort" else "stop"
        return Answered(text=prompt.upper(), finish_reason=reason, prompt_tokens=1, completion_tokens=3)


def lines(*prompts: str) -> Iterator[PromptLine]:
    for index, prompt in enumerate(prompts):
        ask = None if prompt == "wrong" else TextQuery(prompt=prompt)
        yield PromptLine(index=index, id=str(index), digest="", ask=ask, error="it is wrong")


def ignore() -> None:
    pass


def test_as_many_prompts_as_allowed_are_in_flight() -> None:
    model = Scripted(3)
    run = BatchRun(model, parallel=3, patience_s=0)
    found = list(run.outcomes(lines(*"abcdef"), ignore))
    assert sorted(each.answer.text for each in found if each.answer) == list("ABCDEF")
    assert model.most == 3
    assert (run.totals.num_answers, run.totals.num_tokens) == (6, 18)


def test_an_error_of_one_prompt_does_not_end_the_run() -> None:
    run = BatchRun(Scripted(), parallel=1, patience_s=0)
    found = list(run.outcomes(lines("wrong", "long", "abort", "ok"), ignore))
    assert [each.error for each in found] == [
        "it is wrong",
        "it is too long",
        "the request was aborted",
        None,
    ]
    assert found[2].answer is not None and found[2].answer.text == "ABORT"
    assert (run.totals.num_answers, run.totals.num_errors) == (1, 3)


def test_a_server_without_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.cli.batch.FIRST_WAIT_S", 0.001)
    (found,) = BatchRun(Scripted(), parallel=1, patience_s=10).outcomes(lines("busy"), ignore)
    assert found.error is None


@pytest.mark.parametrize(("prompt", "kind"), [("dead", EngineDeadError), ("away", ServerUnavailableError)])
def test_a_model_that_is_gone_ends_the_run(prompt: str, kind: type[Exception]) -> None:
    outcomes = BatchRun(Scripted(), parallel=1, patience_s=0.1).outcomes(lines("ok", prompt, "ok"), ignore)
    assert next(outcomes).error is None
    with pytest.raises(kind):
        next(outcomes)
