"""A child for tests: it answers GET /ready, and does what its arguments say.

Arguments: the port, then any of ``deaf`` (ignores SIGTERM and SIGINT), ``slow`` (ends half a second after
SIGTERM), ``fork`` (starts a process that outlives it), ``stubborn-fork`` (one that would live for long),
``exit`` (ends at once with exit code 3), ``sick=FILE`` (while the
file exists, it answers GET /live with 503).
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        files = [Path(way.removeprefix("sick=")) for way in sys.argv if way.startswith("sick=")]
        is_sick = self.path == "/live" and any(file.exists() for file in files)
        self.send_response(503 if is_sick else 200)
        self.end_headers()
        self.wfile.write(b'{"serving": 2}')

    def log_message(self, *_: object) -> None: ...


def main() -> None:
    port, ways = int(sys.argv[1]), sys.argv[2:]
    print(f"pid {os.getpid()}", flush=True)
    if "exit" in ways:
        sys.exit(3)
    if "deaf" in ways:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "slow" in ways:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("ended slowly"), sys.exit(0)))
    for way, seconds in (("fork", "0.3"), ("stubborn-fork", "600")):
        if way in ways:
            other = subprocess.Popen(["sleep", seconds], start_new_session=True)
            print(f"fork {other.pid}", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()


if __name__ == "__main__":
    main()
