"""Deadlines do not count the time in which the router itself was stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from segue.router.deadline import within

DEADLINE_S = 0.3
CHILD = """
import asyncio, socket, sys, uvloop
from segue.router.deadline import within

async def read(sock):
    for _ in range(5):  # turns of the event loop
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b"x"

async def main():
    with socket.socket(fileno=int(sys.argv[1])) as theirs:
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(theirs.send, b"waits"))
        await within(float(sys.argv[2]), read(theirs))
        theirs.send(b"found")

uvloop.run(main())
"""


async def forever(cancelled: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def test_the_result_is_returned() -> None:
    async def work() -> int:
        return 7

    assert asyncio.run(within(DEADLINE_S, work())) == 7


def test_an_error_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError):
        asyncio.run(within(DEADLINE_S, work()))


def test_work_that_does_not_end_is_cancelled_at_the_deadline() -> None:
    async def test() -> None:
        cancelled, began = asyncio.Event(), time.monotonic()
        with pytest.raises(TimeoutError):
            await within(DEADLINE_S, forever(cancelled))
        assert time.monotonic() - began >= DEADLINE_S * 0.99 and cancelled.is_set()

    asyncio.run(test())


def test_the_work_of_a_caller_that_is_cancelled_is_cancelled() -> None:
    async def test() -> None:
        cancelled = asyncio.Event()
        caller = asyncio.ensure_future(within(60.0, forever(cancelled)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert cancelled.is_set()

    asyncio.run(test())


def test_what_has_come_while_the_process_was_stopped_is_found() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60)
        with theirs:
            command = [sys.executable, "-c", CHILD, str(theirs.fileno()), str(DEADLINE_S)]
            child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            assert ours.recv(5) == b"waits"
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            ours.sendall(b"xxxxx")
            time.sleep(2 * DEADLINE_S)  # this time is what the test is about
            os.kill(child.pid, signal.SIGCONT)
            assert ours.recv(5) == b"found"
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
