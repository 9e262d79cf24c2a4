"""The real server over the fake worker: ``python fake_server.py '{option: value, …}'`` prints its URL."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from segue.host import collect_from_now_on

WORKER = Path(__file__).resolve().parent.parent / "support" / "fake_worker.py"
COMMAND = (sys.executable, str(WORKER))


def main() -> int:
    gc.disable()  # as `segue serve` does
    import uvloop

    from segue.config import EngineConfig
    from segue.errors import SegueError
    from segue.listener import bind
    from segue.logs import configure
    from segue.server.lifecycle import serve

    collect_from_now_on()
    config = EngineConfig.create(**json.loads(sys.argv[1]))
    configure(config.log_level)
    listener = bind(config.host, config.port)
    print(f"bound {listener.getsockname()[1]}", flush=True)
    try:
        return uvloop.run(serve(config, listener, lambda _, url: print(f"ready {url}", flush=True), COMMAND))
    except SegueError as error:
        print(f"failed {error.message}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
