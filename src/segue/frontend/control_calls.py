"""Control calls to the scheduler, such as a pause: each has a number, by which its answer is found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import convert

from segue.errors import InvalidRequestError, RoleChangeError, SegueError, error_of
from segue.failover.life import Life
from segue.frontend.control_log import ControlLog
from segue.messages import control
from segue.messages.control import FlushResult, FrontendMessage, PauseMode, PauseResult
from segue.messages.fleet import Role
from segue.messages.memory import MemoryAnswer, MemoryTag, ReleaseMemory, ResumeMemory
from segue.messages.profile import Activity, ProfileAnswer, StartProfile, StopProfile
from segue.messages.weight_operations import WeightOperation
from segue.messages.weight_update import WeightAnswer, WeightCall, WithdrawCall

ControlAnswer = (
    control.State
    | control.EngineLoad
    | control.Paused
    | control.Continued
    | control.Flushed
    | control.RoleSet
    | MemoryAnswer
    | ProfileAnswer
    | WeightAnswer
)
Answer = TypeVar("Answer", bound=ControlAnswer)


class ControlCalls:
    """The calls that wait for their answers. It lives on one event loop."""

    def __init__(self, send: Callable[[FrontendMessage], None], life: Life, log: ControlLog) -> None:
        """``send`` sends to the scheduler; ``life`` knows whether it answers; ``log`` gets what is done."""
        self._send = send
        self._life = life
        self._log = log
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by number
        self._num_calls = 0

    def answer(self, message: ControlAnswer) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        future = self._waiting.get(message.call)
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: SegueError) -> None:
        """End all calls with an error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def pause(self, mode: PauseMode, ttl_s: float | None = None) -> PauseResult:
        """Stop generation of what the scheduler has, and return once nothing runs."""
        sent = time.monotonic()
        with self._log.timed("pause", f"pause ({mode})") as noted:
            answer = await self._ask(lambda call: control.Pause(call, mode, ttl_s, sent), control.Paused)
            noted.text += f": {answer.num_running} running, {answer.num_waiting} waiting"
        return convert(answer, PauseResult, from_attributes=True)

    async def continue_generation(self) -> None:
        """Continue generation. No effect if it is not paused."""
        await self._ask(control.Continue, control.Continued)

    async def flush_cache(self, timeout_s: float = 0.0, *, retract: bool = False) -> FlushResult:
        """Drop all cached KV, unless a request still holds KV after ``timeout_s`` seconds.

        With ``retract`` requests that run give their KV back first, and compute it anew afterwards.
        """
        with self._log.timed("flush", "flush of the KV cache") as noted:
            answer = await self._ask(lambda call: control.Flush(call, timeout_s, retract), control.Flushed)
            done = f"{answer.flushed_items} tokens dropped" if answer.success else f"no, {answer.error_msg}"
            noted.text += f": {done}"
        return convert(answer, FlushResult, from_attributes=True)

    async def ask_weights(
        self, operation: WeightOperation, roots: list[str] | None = None, from_hub: bool = True
    ) -> WeightAnswer:
        """Have the workers perform an operation on the weights, and return their answer.

        A checkpoint may be read from the directories ``roots`` (None: any) and, if ``from_hub``, by a hub id.
        """
        return await self._ask(lambda call: WeightCall(call, operation, roots, from_hub), WeightAnswer)

    async def release_memory(self, tags: Sequence[MemoryTag], *, backup: bool = False) -> MemoryAnswer:
        """Give memory back to the system; running requests are retracted, and nothing is generated.

        Raises:
            MemorySaverError: the engine runs without ``enable_memory_saver``, or weights are being updated.
            MemoryResumeError: the host has no memory for a ``backup`` of the weights.
        """
        with self._log.timed("memory", f"release of memory: {', '.join(tags)}"):
            return await self._move_memory(lambda call: ReleaseMemory(call, list(tags), backup))

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> MemoryAnswer:
        """Take released memory again.

        Raises:
            MemorySaverError: the engine runs without ``enable_memory_saver``.
            MemoryResumeError: there is too little memory; what was released is still released.
        """
        with self._log.timed("memory", f"resumption of memory: {', '.join(tags)}"):
            return await self._move_memory(lambda call: ResumeMemory(call, list(tags)))

    async def _move_memory(self, message: Callable[[int], FrontendMessage]) -> MemoryAnswer:
        answer = await self._ask(message, MemoryAnswer)
        if answer.error:
            raise error_of(answer.error, answer.message)
        return answer

    async def start_profile(
        self,
        path: str,
        activities: Sequence[Activity],
        *,
        num_steps: int | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> None:
        """Trace steps until :meth:`stop_profile`, or so many; each rank's trace is at ``path``, and its rank.

        Raises:
            InvalidRequestError: there is a profile already, or a rank cannot trace.
        """

        def message(call: int) -> FrontendMessage:
            return StartProfile(
                call=call,
                path=path,
                activities=list(activities),
                num_steps=num_steps,
                with_stack=with_stack,
                record_shapes=record_shapes,
            )

        await self._profile(message)

    async def stop_profile(self) -> list[str]:
        """End the profile; returns the traces, by rank, also of one that has ended by itself.

        Raises:
            InvalidRequestError: there is none, or a trace cannot be written.
        """
        return list((await self._profile(StopProfile)).files)

    async def _profile(self, message: Callable[[int], FrontendMessage]) -> ProfileAnswer:
        answer = await self._ask(message, ProfileAnswer)
        if answer.error:
            raise InvalidRequestError(answer.error)
        return answer

    async def get_state(self, *, check: bool = False) -> control.State:
        """Return the scheduler's state; with ``check`` also the violated invariants."""
        return await self._ask(lambda call: control.GetState(call, check), control.State)

    async def get_load(self) -> control.EngineLoad:
        """Return how much work the scheduler has."""
        return await self._ask(control.GetLoad, control.EngineLoad)

    async def set_role(self, role: Role, timeout_s: float) -> None:
        """Have the engine take other work, once the work that goes has ended.

        Raises:
            RoleChangeError: it did not end within so many seconds, or the engine cannot do such work.
        """
        with self._log.timed("role", f"change of the role to {role}"):
            answer = await self._ask(lambda call: control.SetRole(call, role, timeout_s), control.RoleSet)
            if answer.error:
                raise RoleChangeError(answer.error, param="role")

    async def _ask(self, message: Callable[[int], FrontendMessage], kind: type[Answer]) -> Answer:
        """Send the message for a new call number, and wait for the answer with that number.

        Raises:
            EngineDeadError: the engine has ended.
            EngineHungError: the engine does not answer. It may still carry out the call when it recovers.
        """
        if (silence := self._life.silence) is not None:
            raise silence
        self._num_calls += 1
        call = self._num_calls
        self._waiting[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            answer = await self._waiting[call]
        except asyncio.CancelledError:
            if kind is WeightAnswer and self._life.error is None:  # nobody waits for a group to be met
                self._send(WithdrawCall(call))
            raise
        finally:
            del self._waiting[call]
        assert isinstance(answer, kind)
        return answer
