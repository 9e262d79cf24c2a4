"""One process of a child."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from segue.cluster import processes
from segue.cluster.processes import ChildProcess
from tests.cluster.running import is_alive, stand_in
from tests.conftest import WaitUntil

PARENT = """
import asyncio
from segue.cluster.processes import ChildProcess
from tests.cluster.running import stand_in

async def main():
    process = ChildProcess(stand_in("a", 0, "deaf"), lambda line: print(line, flush=True))
    await process.wait()

asyncio.run(main())
"""


async def lines_of(program: str) -> tuple[list[str], str]:
    """The lines that a Python program writes as a child, and how it ended."""
    lines: list[str] = []
    spec = replace(stand_in("a", 0), command=(sys.executable, "-S", "-E", "-c", program))
    process = ChildProcess(spec, lines.append)
    reason = await asyncio.wait_for(process.wait(), 60)
    await process.close()
    return lines, reason


def test_the_lines_of_both_outputs_arrive_whole() -> None:
    program = "import os; os.write(1, b'one\\r\\ntw'); os.write(2, b'o\\n\\nb\\xff'); raise SystemExit(4)"
    lines, reason = asyncio.run(lines_of(program))
    assert lines == ["one", "two", "", "b\ufffd"] and reason == "with exit code 4"


def test_a_wait_that_was_cancelled_makes_no_error_of_the_process_s_end() -> None:
    async def test() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        spec = replace(stand_in("a", 0), command=(sys.executable, "-S", "-E", "-c", "input()"))
        process = ChildProcess(spec, print)
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await process.close()
        assert errors == []

    asyncio.run(test())


def test_a_line_without_end_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LINE_BYTES", 1000)
    lines, _ = asyncio.run(lines_of("print('x' * 5000)"))
    assert "".join(lines) == "x" * 5000 and len(lines) > 2 and max(map(len, lines)) < 2000


def test_the_log_ends_with_the_last_process_that_writes_to_it() -> None:
    program = "import os, time; os.fork() or (time.sleep(0.2), print('late', flush=True), os._exit(0))"
    lines, reason = asyncio.run(lines_of(program))
    assert lines == ["late"] and reason == "with exit code 0"


def test_a_child_has_no_input_and_a_session_of_its_own() -> None:
    program = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    lines, reason = asyncio.run(lines_of(program))
    assert lines == ["True ''"] and reason == "with exit code 0"


def test_the_end_by_a_signal_is_named() -> None:
    lines, reason = asyncio.run(lines_of("import os; os.kill(os.getpid(), 15)"))
    assert lines == [] and reason == "by signal SIGTERM"


def test_a_child_is_killed_with_its_parent(wait_until: WaitUntil) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[1])
        assert is_alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), what="the child is dead too")


STARTS = """
import sys
from tests.support.child import start_child
print(start_child(["sleep", "600"], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


def test_a_process_that_a_test_starts_is_killed_with_the_tests(wait_until: WaitUntil) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STARTS], stdin=pipe, stdout=pipe, text=True) as tests:
        assert tests.stdout is not None
        pid = int(tests.stdout.readline())
        assert is_alive(pid)
        tests.kill()
        wait_until(lambda: not is_alive(pid), what="the child is dead too")


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = "from segue.cluster.processes import die_with; die_with(1 << 22); print('lives')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


def test_a_close_that_is_cancelled_leaves_no_open_file() -> None:
    async def test() -> None:
        program = "import os, time; os.fork() or print('begun', flush=True); time.sleep(60)"
        spec = replace(stand_in("a", 0), command=(sys.executable, "-S", "-E", "-c", program))
        begun = asyncio.Event()
        process = ChildProcess(spec, lambda _: begun.set())
        await asyncio.wait_for(begun.wait(), 60)
        closing = asyncio.create_task(process.close())
        await asyncio.sleep(0)  # it waits for the end of the log, which the other process keeps open
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        os.killpg(process.pid, signal.SIGKILL)
        assert closing.cancelled() and process._log.closed

    asyncio.run(test())
