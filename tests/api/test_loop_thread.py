"""The event loop beside a blocking caller."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_a_signal_that_another_thread_takes_still_interrupts_a_call() -> None:
    program = """
        import asyncio, signal, sys, threading
        from segue.api.loop_thread import LoopThread

        def take_a_signal():  # as the system may choose for any thread that starts threads or processes
            main = threading.main_thread().ident
            while sys._current_frames()[main].f_code.co_name != "wait":
                pass
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        async def forever():
            threading.Thread(target=take_a_signal).start()
            await asyncio.Event().wait()

        thread = LoopThread("test")
        try:
            thread.call(forever())
        except KeyboardInterrupt:
            thread.stop()
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("interrupted\n", 0), ended.stderr
