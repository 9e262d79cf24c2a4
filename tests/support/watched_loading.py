"""The real server with workers that note what they load, and of which one can stop in the middle of it.

``python watched_loading.py '{option: value, …}'`` prints its URL. Each worker adds a line to ``LOADS`` per
block of weights that it has read: its server's process, its own one, and the bytes. The first worker that has
read the fraction ``STOP_AT`` of its weights, or is about to commit them if that is ``commit``, writes its own
process and its server's into ``STOPPED``, and does nothing any more.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from segue.config import EngineConfig
from segue.errors import SegueError
from segue.listener import bind
from segue.logs import configure
from segue.server.lifecycle import serve


def stop() -> None:
    """Stop for ever, unless another worker has done so."""
    file = Path(os.environ["STOPPED"])
    own = file.with_suffix(f".{os.getpid()}")
    own.write_text(f"{os.getppid()} {os.getpid()}")
    try:
        os.link(own, file)  # fails if the file is there
    except FileExistsError:
        return
    time.sleep(600)


def watch() -> None:
    """Replace what reads and what commits weights by what also notes it."""
    from segue.checkpoint import load
    from segue.gms.client import GmsClient

    read_weights, commit = load.read_weights, GmsClient.commit
    stop_at = os.environ.get("STOP_AT", "")

    def noted(source: Any, weight_map: Any, make: Any, dtype: Any, **options: Any) -> Iterator[int]:
        total = sum(math.prod(shape) for shape in weight_map.parameters.values()) * dtype.itemsize
        done = 0
        with open(os.environ["LOADS"], "a") as loads:
            for num_bytes in read_weights(source, weight_map, make, dtype, **options):
                done += num_bytes
                loads.write(f"{os.getppid()} {os.getpid()} {num_bytes}\n")
                loads.flush()
                if stop_at not in ("", "commit") and done >= float(stop_at) * total:
                    stop()
                yield num_bytes

    def commit_or_stop(client: GmsClient, lease: int) -> Any:
        if stop_at == "commit":
            stop()
        return commit(client, lease)

    load.read_weights = noted
    GmsClient.commit = commit_or_stop  # type: ignore[method-assign]


def main() -> int:
    if len(sys.argv) == 1:
        from segue.worker.main import main as work

        watch()
        work()
        return 0
    config = EngineConfig.create(**json.loads(sys.argv[1]))
    configure(config.log_level)
    listener = bind(config.host, config.port)
    command = (sys.executable, str(Path(__file__).resolve()))
    try:
        return uvloop.run(serve(config, listener, lambda _, url: print(f"ready {url}", flush=True), command))
    except SegueError as error:
        print(f"failed {error.message}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
