"""The engine for Python: ``segue.Engine``."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from segue.api.control import (
    FlushQuery,
    MemoryRequest,
    PauseRequest,
    SleepQuery,
    memory_of_level,
    memory_reply,
)
from segue.api.loop_thread import AsyncStream, LoopThread, blocking_stream
from segue.api.native import NativeCall, NativeReplies, parse_call
from segue.api.validation import parse, plain
from segue.api.weights import with_weight_operations
from segue.config import EngineConfig
from segue.errors import EngineDeadError
from segue.frontend.tokenizer import Tokenizer
from segue.launch import engine_info
from segue.launch.processes import WORKER_COMMAND
from segue.launch.runtime import Runtime
from segue.messages.control import FlushResult, PauseResult


@with_weight_operations
class Engine:
    """A model, ready to generate.

    Works in scripts, in notebooks and beside a running event loop: the engine has a thread of its own, and
    every method has a form whose name begins with ``async_``. Use it as a context manager, or call
    :meth:`shutdown`::

        with segue.Engine("path/to/model") as engine:
            print(engine.generate("The capital of France is")["text"])

    Args:
        model: directory, GGUF file or hub id; None is the bundled SmolLM2-135M-Instruct.
        embedded: run the scheduler in a thread of this process instead of worker processes.
        options: those of :class:`segue.config.EngineConfig`; unset ones come from ``SEGUE_…`` variables.

    Raises:
        SegueError: the engine cannot start; the message says what to change.
    """

    _worker_command: Sequence[str] = WORKER_COMMAND

    if TYPE_CHECKING:  # the methods of the operations on weights

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(self, model: str | None = None, *, embedded: bool = False, **options: Any) -> None:
        """Start the engine and wait until it is ready; the class's docstring has the arguments."""
        if model is not None:
            options["model"] = model
        self.config = EngineConfig.create(**options)
        self._thread = LoopThread("segue-engine")
        try:
            self._runtime = self._thread.call(
                Runtime.start_active(self.config, embedded=embedded, command=self._worker_command)
            )
        except BaseException:
            self._thread.stop()
            raise
        self._closer = weakref.finalize(self, _close, self._thread, self._runtime)  # also at exit

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self._runtime.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer and chat template, if it has them."""
        return self._runtime.manager.encoder.tokenizer

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Continue a prompt, or a batch of prompts.

        ``sampling_params`` and ``fields`` are those of the native API (``POST /generate``):
        ``max_new_tokens``, ``temperature``, …, and ``return_logprob``, ``rid``, ``priority``, ….

        Returns:
            The reply ``{"text", "output_ids", "meta_info"}``; a list of them for a batch, or for
            ``n`` above 1 in ``sampling_params``; with ``stream`` an
            iterator of growing replies.

        Raises:
            InvalidRequestError: a value outside its rule.
            EngineDeadError: the engine's worker died, or it was shut down.
        """
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return blocking_stream(self._running, self._updates(body), self)
        return self._running.call(self._generate(body))

    def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """As :meth:`generate`: to be awaited, or with ``stream`` an asynchronous iterator."""
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return AsyncStream(self._running, self._updates(body), self)
        return self._running.call_async(self._generate(body))

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End a request, a batch, or all; their replies are what they have. An unknown rid does nothing."""
        self._running.call(self._abort(rid, abort_all))

    async def async_abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """As :meth:`abort_request`."""
        await self._running.call_async(self._abort(rid, abort_all))

    def pause_generation(self, mode: str = "retract", ttl_s: float | None = None) -> PauseResult:
        """Stop generating; returns once nothing runs. Threads that wait for replies go on waiting.

        Args:
            mode: ``wait`` lets running requests end, ``in_place`` leaves all where they are, ``retract``
                takes their KV and has them wait, ``abort`` ends them. A weaker mode than the present one
                changes nothing.
            ttl_s: seconds after which it continues by itself; None: never.

        Raises:
            InvalidRequestError: an unknown mode, or a ``ttl_s`` that is no positive number.
        """
        return self._running.call(self._pause(mode, ttl_s))

    async def async_pause_generation(self, mode: str = "retract", ttl_s: float | None = None) -> PauseResult:
        """As :meth:`pause_generation`."""
        return await self._running.call_async(self._pause(mode, ttl_s))

    def continue_generation(self) -> None:
        """Generate again; nothing happens if it was not paused."""
        self._running.call(self._runtime.manager.calls.continue_generation())

    async def async_continue_generation(self) -> None:
        """As :meth:`continue_generation`."""
        await self._running.call_async(self._runtime.manager.calls.continue_generation())

    def flush_cache(self, timeout: float = 0.0) -> FlushResult:
        """Forget all cached KV. Refused while a live request owns some, or while requests run or wait.

        ``timeout``: seconds to wait until it would not be refused.
        """
        return self._running.call(self._flush(timeout))

    async def async_flush_cache(self, timeout: float = 0.0) -> FlushResult:
        """As :meth:`flush_cache`."""
        return await self._running.call_async(self._flush(timeout))

    def release_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Give the memory of ``weights`` or ``kv_cache`` back to the system; without ``tags`` of both.

        Running requests are retracted, and wait. The engine needs the option ``enable_memory_saver``.

        Raises:
            InvalidRequestError: an unknown tag.
            MemorySaverError: the option is off, or an update of the weights is open.
        """
        return self._running.call(self._move_memory("release", tags))

    async def async_release_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """As :meth:`release_memory_occupation`."""
        return await self._running.call_async(self._move_memory("release", tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Take released memory again. Requests go on once all of it is there, and all weights were sent.

        Raises:
            InvalidRequestError: an unknown tag.
            MemorySaverError: the option ``enable_memory_saver`` is off.
            MemoryResumeError: there is too little memory; what was released is still released.
        """
        return self._running.call(self._move_memory("resume", tags))

    async def async_resume_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """As :meth:`resume_memory_occupation`."""
        return await self._running.call_async(self._move_memory("resume", tags))

    def sleep(self, level: int = 1) -> dict[str, Any]:
        """Release all memory. Level 1 keeps the weights in the host's memory, level 2 drops them."""
        return self._running.call(self._sleep(level))

    async def async_sleep(self, level: int = 1) -> dict[str, Any]:
        """As :meth:`sleep`."""
        return await self._running.call_async(self._sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """As :meth:`resume_memory_occupation`, by vLLM's name."""
        return self.resume_memory_occupation(tags)

    async def async_wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """As :meth:`wake_up`."""
        return await self.async_resume_memory_occupation(tags)

    def is_sleeping(self) -> bool:
        """Whether any memory is released."""
        return bool(self._runtime.manager.stats.counters.released)

    def get_weight_version(self) -> str:
        """The name of the served weights."""
        return self._runtime.manager.weights.version

    async def async_get_weight_version(self) -> str:
        """As :meth:`get_weight_version`."""
        return self.get_weight_version()

    def get_server_info(self) -> dict[str, Any]:
        """Options, version, what was decided at start, and ``internal_states``."""
        return self._running.call(engine_info.server_info(self._runtime))

    async def async_get_server_info(self) -> dict[str, Any]:
        """As :meth:`get_server_info`."""
        return await self._running.call_async(engine_info.server_info(self._runtime))

    def shutdown(self) -> None:
        """End requests in flight with what they have, and the workers. Calling it again does nothing."""
        self._closer()

    async def async_shutdown(self) -> None:
        """As :meth:`shutdown`."""
        await asyncio.to_thread(self._closer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.async_shutdown()

    @property
    def _running(self) -> LoopThread:
        """The thread of the engine's event loop; raises EngineDeadError after the shutdown."""
        if not self._closer.alive:
            raise EngineDeadError("this engine was shut down; make a new segue.Engine")
        return self._thread

    def _call(self, body: dict[str, Any]) -> NativeCall:
        model = self._runtime.served_model
        return parse_call(body, model.max_prompts, defaults=model.sampling_defaults)

    async def _generate(self, body: dict[str, Any]) -> Any:
        """Generate on the engine's loop, and return the finished reply, or the replies of a batch."""
        manager, call = self._runtime.manager, self._call(body)
        with await manager.submit(call.requests, call.batch_id) as generation:
            return (await NativeReplies(manager, call, generation).result())[0]

    async def _updates(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Generate on the engine's loop, and yield the growing replies; closing it aborts the requests."""
        manager, call = self._runtime.manager, self._call(body)
        with await manager.submit(call.requests, call.batch_id) as generation:
            async for update in NativeReplies(manager, call, generation).updates():
                yield update

    async def _abort(self, rid: str | None, abort_all: bool) -> None:
        self._runtime.manager.abort(plain(rid or ""), abort_all=abort_all)

    async def _pause(self, mode: str, ttl_s: float | None) -> PauseResult:
        checked = parse(PauseRequest, plain({"mode": mode, "ttl_s": ttl_s}))
        return await self._runtime.manager.pause_generation(checked.pause_mode, checked.ttl_s)

    async def _move_memory(self, way: Literal["release", "resume"], tags: Any) -> dict[str, Any]:
        memory, manager = parse(MemoryRequest, plain({"tags": tags})).memory, self._runtime.manager
        move = manager.calls.release_memory if way == "release" else manager.calls.resume_memory
        return memory_reply(await move(memory))

    async def _sleep(self, level: int) -> dict[str, Any]:
        manager, query = self._runtime.manager, parse(SleepQuery, plain({"level": level}))
        tags, backup = memory_of_level(query.level, manager.ready.device)
        return memory_reply(await manager.calls.release_memory(tags, backup=backup))

    async def _flush(self, timeout: float) -> FlushResult:
        return await self._runtime.manager.calls.flush_cache(
            parse(FlushQuery, plain({"timeout": timeout}), coerces=True).timeout
        )


def _body(
    prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments as the body of ``POST /generate``; None means that a field is left out."""
    body = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
    return {name: plain(value, name) for name, value in (body | fields).items() if value is not None}


def _close(thread: LoopThread, runtime: Runtime) -> None:
    """Shut an engine down. Called by its finalizer, once: by ``shutdown``, on collection, or at exit."""
    if thread.is_forked:  # it is the parent's to close
        return
    if thread.is_current:  # collected on the engine's own thread, which cannot wait for itself
        threading.Thread(target=_close, args=(thread, runtime)).start()
        return
    thread.call(runtime.shutdown())
    thread.stop()
