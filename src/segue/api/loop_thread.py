"""An event loop in a thread of its own, so that a blocking caller, a notebook or another loop can use it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from segue.errors import EngineDeadError

T = TypeVar("T")
PATIENCE_S = 5.0  # for what still runs when the loop is to stop
# The system may run a signal's handler on any thread that starts a thread or a process, and that does not
# wake the main thread: it has to look, or a Ctrl-C is lost for as long as it waits.
SIGNAL_POLL_S = 0.1


class LoopThread:
    """Runs coroutines for callers on other threads and loops, on an event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread, which gets the ``name``, and its loop."""
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._stopped = False
        self._lock = threading.RLock()  # nothing is submitted behind the stop, where nobody would run it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the thread's own, and so has no such thread."""
        return os.getpid() != self._pid

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the thread's loop, and return the future of its result without waiting.

        Raises:
            EngineDeadError: the loop was stopped, or it runs in the parent of this process.
        """
        if self.is_forked:
            coroutine.close()  # else Python would warn that it was never awaited
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}, and a fork cannot use it; "
                f"make a segue.Engine in process {os.getpid()}"
            )
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise EngineDeadError("this engine was shut down; make a new segue.Engine")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's loop, and wait for its result; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            while True:
                try:
                    return future.result(SIGNAL_POLL_S)
                except TimeoutError:
                    if future.done():  # by now, or with a TimeoutError of its own
                        return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As :meth:`call`, awaited on another event loop; cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self) -> None:
        """End the loop and its thread."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        """Run the loop until :meth:`stop`, then give its tasks ``PATIENCE_S`` to end, and close it."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):  # a start that was interrupted stops its workers
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE_S))
        self._loop.close()


async def _step(source: AsyncIterator[T]) -> T | None:
    """The next item, or None at the end."""
    return await anext(source, None)


def blocking_stream(
    thread: LoopThread, source: AsyncGenerator[T, None], owner: object
) -> Generator[T, None, None]:
    """Yield the items of an asynchronous generator that runs on ``thread``; leaving early closes it there.

    The items must not be None. ``owner``, the engine, is only kept alive: it is shut down when collected.
    """
    try:
        while (item := thread.call(_step(source))) is not None:
            yield item
    finally:
        with suppress(EngineDeadError):
            if thread.is_current:  # collected on the engine's own thread, which cannot wait for itself
                thread.submit(source.aclose())
            else:
                thread.call(source.aclose())


class AsyncStream(AsyncIterator[T], Generic[T]):
    """The items of a generator on ``thread``, for a caller with its own event loop.

    It is iterated over with ``async for``. ``await`` gives the stream itself, since SGLang's users await it.
    """

    def __init__(self, thread: LoopThread, source: AsyncGenerator[T, None], owner: object) -> None:
        self._owner = owner  # must outlive the stream
        self._items = self._pull(thread, source)

    def __await__(self) -> Generator[Any, None, AsyncStream[T]]:
        yield from ()
        return self

    async def __anext__(self) -> T:
        return await anext(self._items)

    async def aclose(self) -> None:
        """End early."""
        await self._items.aclose()

    @staticmethod
    async def _pull(thread: LoopThread, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the items of ``source``. The caller's loop closes this generator when it ends itself."""
        try:
            while (item := await thread.call_async(_step(source))) is not None:
                yield item
        finally:
            with suppress(EngineDeadError):
                await thread.call_async(source.aclose())
