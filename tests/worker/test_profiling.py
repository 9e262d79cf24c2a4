"""When profiles begin and end, on rank 0, and the trace of one rank."""

from __future__ import annotations

import gzip
import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.api.profile import ProfileRequest
from segue.errors import InvalidRequestError
from segue.messages.profile import BeginTrace, EndTrace, ProfileAnswer, StartProfile, StopProfile, Traced
from segue.worker.profiling import ProfileControl, RankProfiler


class Ranks:
    """Two ranks that reply when they are told to."""

    def __init__(self) -> None:
        self.control = ProfileControl(2)
        self.sent: list[Any] = []

    def go(self, *, reply: bool = True, errors: list[str] | None = None) -> list[ProfileAnswer]:
        """Carry out the commands; returns the answers to the frontend."""
        answers = []
        while True:
            messages, commands = self.control.take()
            answers += messages
            self.sent += [pair[0] for pair in commands]
            if not reply or not (messages or commands):
                return answers
            for pair in commands:
                for rank, command in enumerate(pair):
                    fields = {"file": f"{rank}"} if isinstance(command, EndTrace) else {}
                    wrong = errors if errors and rank else []
                    answer = Traced(rank=rank, call=command.call, errors=wrong, fields=fields)
                    self.control.on_rank(answer, 0.0)

    def kinds(self) -> list[type]:
        found, self.sent = [type(each) for each in self.sent], []
        return found


def start(call: int, num_steps: int | None = None) -> StartProfile:
    return StartProfile(call=call, path="p", activities=["CPU"], num_steps=num_steps)


def test_a_profile_runs_until_it_is_stopped_and_names_every_trace() -> None:
    ranks = Ranks()
    ranks.control.start(start(1))
    assert ranks.go() == [ProfileAnswer(1)] and ranks.kinds() == [BeginTrace]
    ranks.control.start(start(2))
    (refused,) = ranks.go()
    assert "POST /stop_profile first" in refused.error
    ranks.control.on_step()
    ranks.control.stop(StopProfile(3))
    assert ranks.go() == [ProfileAnswer(3, files=("0", "1"))] and ranks.kinds() == [EndTrace]
    ranks.control.stop(StopProfile(4))
    assert ranks.go()[0].files == ("0", "1"), "what has ended last can be asked for once more"
    ranks.control.stop(StopProfile(5))
    assert "no profile runs" in ranks.go()[0].error


def test_a_profile_ends_by_itself_after_its_steps() -> None:
    ranks = Ranks()
    ranks.control.start(start(1, num_steps=2))
    ranks.go()
    ranks.kinds()
    ranks.control.on_step()
    assert ranks.go() == [] and ranks.kinds() == []
    ranks.control.on_step()
    ranks.go()
    ranks.control.on_step()
    ranks.go()
    assert ranks.kinds() == [EndTrace]
    ranks.control.stop(StopProfile(2))
    assert ranks.go() == [ProfileAnswer(2, files=("0", "1"))]


def test_a_stop_that_comes_while_it_begins_is_done_then() -> None:
    ranks = Ranks()
    ranks.control.start(start(1))
    ranks.control.stop(StopProfile(2))
    assert [each.call for each in ranks.go()] == [1, 2]
    assert ranks.kinds() == [BeginTrace, EndTrace]


def test_if_a_rank_cannot_trace_the_others_end_too() -> None:
    ranks = Ranks()
    ranks.control.start(start(1))
    (answer,) = ranks.go(errors=["no"])
    assert answer.error == "rank 1: no" and ranks.kinds() == [BeginTrace, EndTrace]
    ranks.control.start(start(2))
    assert ranks.go() == [ProfileAnswer(2)]


def profiler(replies: queue.Queue[Traced]) -> RankProfiler:
    runner: Any = SimpleNamespace(
        tp=SimpleNamespace(rank=1), device=torch.device("cpu"), on_stream=lambda work: work()
    )
    return RankProfiler(runner, replies.put)


def test_a_rank_writes_its_trace(tmp_path: Path) -> None:
    replies: queue.Queue[Traced] = queue.Queue()
    rank = profiler(replies)
    path = str(tmp_path / "new" / "run")
    rank.handle(
        BeginTrace(call=1, path=path, activities=["CPU", "GPU"], with_stack=False, record_shapes=True)
    )
    assert replies.get(timeout=20).errors == []
    torch.ones(3) @ torch.ones(3)
    rank.handle(EndTrace(call=2))
    reply = replies.get(timeout=20)
    assert reply.errors == [] and reply.fields["file"] == f"{path}-rank1.pt.trace.json.gz"
    with gzip.open(reply.fields["file"]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::dot" in names
    rank.handle(EndTrace(call=3))
    assert replies.get(timeout=20).fields == {}, "nothing is traced"


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    replies: queue.Queue[Traced] = queue.Queue()
    (tmp_path / "file").touch()
    command = BeginTrace(
        call=1, path=str(tmp_path / "file" / "x"), activities=["CPU"], with_stack=False, record_shapes=False
    )
    profiler(replies).handle(command)
    (error,) = replies.get(timeout=20).errors
    assert "the profile failed: " in error


def test_traces_stay_within_their_directory(tmp_path: Path) -> None:
    root = tmp_path / "traces"
    assert ProfileRequest().path(str(root)).startswith(f"{root}/segue-")
    assert ProfileRequest(output_dir=str(root / "a")).path(str(root)).startswith(f"{root}/a/segue-")
    for outside in (str(tmp_path), f"{root}/../x", f"{root}2", ""):
        with pytest.raises(InvalidRequestError, match="output_dir"):
            ProfileRequest(output_dir=outside).path(str(root))
    with pytest.raises(InvalidRequestError, match="--profile-dir"):
        ProfileRequest().path(None)
    for name in ("start_step", "profile_by_stage"):
        with pytest.raises(InvalidRequestError, match=name):
            ProfileRequest(**{name: 1}).path(str(root))
