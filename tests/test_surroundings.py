"""The signal settings and proxies of the tests' caller do not reach the processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

from tests.support.child import start_child

CHILD = """
import os, signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print([name for name in os.environ if name.lower().endswith("_proxy")])
"""


def test_a_background_job_behind_a_proxy_starts_children_with_default_settings() -> None:
    program = f"""
        import signal, subprocess, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a job in the background
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
        import tests.conftest
        subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
    """
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout.splitlines() == ["True", "True", "[]", "[]"], found.stderr


def test_a_child_of_a_test_lives_on_when_the_thread_that_started_it_has_ended() -> None:
    found: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(
        target=lambda: found.append(start_child(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    )
    thread.start()
    thread.join()
    assert found[0].communicate(b"alive", timeout=30) == (b"alive", None)
