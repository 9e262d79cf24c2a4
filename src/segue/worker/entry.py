"""Where a worker process begins and ends: ``python -m segue.worker.entry``.

Python's garbage collector and its orderly end would go through the 200,000 objects of torch several times: a
fifth of the CPU time of a worker that is started and stopped. What the imports have made is never looked at.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from contextlib import suppress

from segue.host import collect_from_now_on
from segue.kernels.compile_processes import can_compile, import_triton


def main() -> None:
    """Run :func:`segue.worker.main.main`, and end the process; an error of it is raised."""
    gc.disable()
    spec = json.loads(sys.stdin.buffer.readline())
    beside = threading.Thread(target=_prepare, name="segue-prepare", daemon=True)
    if has_gpu := spec["config"]["device"] != "cpu" and can_compile():
        beside.start()
    from segue.worker.main import main as work

    if has_gpu:
        beside.join()  # the next step may be a fork
    collect_from_now_on()
    work(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all that needs an end has had it


def _prepare() -> None:
    """Do what a GPU needs and what takes time without Python's lock, while another thread imports torch."""
    with suppress(OSError, AttributeError):  # it is done again where it is needed, which tells of the error
        ctypes.CDLL("libcuda.so.1").cuInit(0)  # the driver looks for devices; there is no context yet
    import_triton()


if __name__ == "__main__":
    main()
