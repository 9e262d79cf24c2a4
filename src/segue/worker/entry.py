"""Where a worker process begins and ends: ``python -m segue.worker.entry``.

Python's garbage collector and its orderly end would go through the 200,000 objects of torch several times: a
fifth of the CPU time of a worker that is started and stopped. What the imports have made is never looked at.
"""

from __future__ import annotations

import gc
import os
import sys

from segue.host import collect_from_now_on


def main() -> None:
    """Run :func:`segue.worker.main.main`, and end the process; an error of it is raised."""
    gc.disable()
    from segue.worker.main import main as work

    collect_from_now_on()
    work()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all that needs an end has had it


if __name__ == "__main__":
    main()
