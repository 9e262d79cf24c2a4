"""Profiles of an engine's steps: rank 0 decides when they begin and end, and each rank writes its trace."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.logs import logger
from segue.messages.control import SchedulerMessage
from segue.messages.profile import (
    Activity,
    BeginTrace,
    EndTrace,
    ProfileAnswer,
    ProfileCommand,
    StartProfile,
    StopProfile,
    Traced,
)
from segue.messages.weight_update import RankReply
from segue.weight_update.control.outbox import Outbox

if TYPE_CHECKING:  # it needs torch, which the loop does not
    from segue.model_runner.runner import ModelRunner


class ProfileState(Enum):
    """Whether steps are traced: OFF -> BEGINNING -> ON -> WRITING -> OFF."""

    OFF = auto()
    BEGINNING = auto()
    ON = auto()
    WRITING = auto()


class ProfileControl:
    """The profiles of one engine, on rank 0; :meth:`take` returns what is to be sent."""

    def __init__(self, num_ranks: int) -> None:
        self._outbox = Outbox[ProfileCommand](num_ranks)
        self.state = ProfileState.OFF
        self._num_steps: int | None = None  # asked for; None: until it is stopped
        self._steps_left = 0
        self._stops: list[int] = []  # calls that wait for the traces
        self._last = ProfileAnswer(0, error="no profile was started; POST /start_profile first")

    def start(self, message: StartProfile) -> None:
        """Begin a profile, unless there is one."""
        if self.state is not ProfileState.OFF:
            text = f"a profile is {self.state.name.lower()}; POST /stop_profile first"
            self._outbox.send(ProfileAnswer(message.call, error=text))
            return
        self.state, self._num_steps = ProfileState.BEGINNING, message.num_steps
        command = BeginTrace(
            path=message.path,
            activities=message.activities,
            with_stack=message.with_stack,
            record_shapes=message.record_shapes,
        )

        def on_begun(replies: list[RankReply], wrong: str, now: float) -> None:
            self.state, self._steps_left = ProfileState.ON, message.num_steps or 0
            if wrong:  # ranks that have begun end their traces, which nobody wants
                self._end()
            self._outbox.send(ProfileAnswer(message.call, error=wrong))

        self._outbox.command(command, then=on_begun)

    def stop(self, message: StopProfile) -> None:
        """End the profile; if it has ended by itself, answer with what it has written."""
        if self.state is ProfileState.OFF:
            last, self._last = (
                self._last,
                ProfileAnswer(0, error="no profile runs; POST /start_profile first"),
            )
            self._outbox.send(ProfileAnswer(message.call, error=last.error, files=last.files))
            return
        self._stops.append(message.call)
        if self.state is ProfileState.ON:
            self._end()

    def on_step(self) -> None:
        """Note that a step has ended."""
        if self.state is ProfileState.ON and self._num_steps is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._end()

    def on_rank(self, reply: Traced, now: float) -> None:
        """Take a rank's reply to a command."""
        self._outbox.on_reply(reply, now)
        if self.state is ProfileState.ON and self._stops:  # the stop came while the profile began
            self._end()

    def take(self) -> tuple[list[SchedulerMessage], list[Sequence[ProfileCommand]]]:
        """Return the messages for the frontend and the commands for the ranks, one per rank in each entry."""
        return self._outbox.take()

    def _end(self) -> None:
        def on_ended(replies: list[RankReply], wrong: str, now: float) -> None:
            self.state = ProfileState.OFF
            files = tuple(reply.fields["file"] for reply in replies if "file" in reply.fields)
            self._last = ProfileAnswer(0, error=wrong, files=files)
            for call in self._stops:
                self._outbox.send(ProfileAnswer(call, error=wrong, files=files))
            self._stops = []
            logger.info("profile: %s", wrong or ", ".join(files))

        self.state = ProfileState.WRITING
        self._outbox.command(EndTrace(), then=on_ended)


class RankProfiler:
    """Traces the steps of one rank, with torch's profiler; executes each `ProfileCommand`."""

    def __init__(self, runner: ModelRunner, send: Callable[[Traced], None]) -> None:
        """Prepare torch's profiler: its first trace in a process takes seconds to begin.

        ``send`` is called from any thread.
        """
        self._runner = runner
        self._send = send
        self._trace: Any = None  # torch's profiler; None: nothing is traced
        self._file = Path()
        runner.on_stream(lambda: self._end(self._traced(["CPU", "GPU"])))

    def handle(self, command: ProfileCommand) -> None:
        """Execute a command, and reply: to the end of a trace once a thread has written it.

        The profiler begins and ends on the thread of the steps, whose operators it records.
        """
        try:
            if isinstance(command, BeginTrace):
                self._runner.on_stream(lambda: self._begin(command))
                self._reply(command)
            elif self._trace is None:
                self._reply(command)
            else:
                trace, self._trace = self._trace, None
                self._runner.on_stream(lambda: self._end(trace))
                threading.Thread(target=self._write, args=(command, trace), name="segue-trace").start()
        except Exception as error:
            self._reply(command, error)

    def _begin(self, command: BeginTrace) -> None:
        self._file = Path(f"{command.path}-rank{self._runner.tp.rank}.pt.trace.json.gz")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._trace = self._traced(command.activities, command.record_shapes, command.with_stack)

    def _traced(self, activities: Sequence[Activity], shapes: bool = False, stack: bool = False) -> Any:
        """Returns a profiler that has begun; on a CPU there is but one kind of activity."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self._runner.device.type == "cuda"
        kinds = [ProfilerActivity.CPU] if "CPU" in activities or not on_gpu else []
        if "GPU" in activities and on_gpu:
            kinds.append(ProfilerActivity.CUDA)
        trace = profile(activities=kinds, record_shapes=shapes, with_stack=stack, acc_events=True)
        trace.start()
        return trace

    def _end(self, trace: Any) -> None:
        import torch

        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        trace.stop()

    def _write(self, command: EndTrace, trace: Any) -> None:
        try:
            trace.export_chrome_trace(str(self._file))
            with gzip.open(self._file) as file:  # torch only logs a directory that it cannot write to
                file.read(1)
            self._reply(command, file=str(self._file))
        except Exception as error:
            self._reply(command, error)

    def _reply(self, command: ProfileCommand, error: Exception | None = None, **fields: Any) -> None:
        errors = [] if error is None else [f"the profile failed: {type(error).__name__}: {error}"]
        self._send(Traced(rank=self._runner.tp.rank, call=command.call, errors=errors, fields=fields))
