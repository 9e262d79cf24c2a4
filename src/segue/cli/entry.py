"""Where every command line of Segue begins."""

from __future__ import annotations

import gc
import sys

from segue.host import collect_from_now_on


def main() -> None:
    """Run the command line. A SegueError is printed as one red line, and the exit code is 1."""
    gc.disable()  # while modules are imported; it would look at all of them several times
    try:
        _run()
    finally:
        # Python's end would collect garbage several times: a tenth of the time of a short command.
        gc.freeze()


def _run() -> None:
    """Run the command that the first word names, with only the modules that it needs."""
    command, words = sys.argv[1:2], sys.argv[2:]
    if command == ["gms"]:
        # The rest is not loaded: a probe runs `segue gms ready` every few seconds, and engines wait for a
        # service that is started again.
        from segue.cli.gms import main as gms

        collect_from_now_on()
        gms(words)
    elif command == ["doctor"]:
        from segue.cli.doctor import main as doctor

        collect_from_now_on()
        doctor(words)
    elif command in (["serve"], ["router"]):
        from segue.cli.serving import main as serving

        # Before a server runs, it imports more, and then calls `collect_from_now_on`.
        serving(command[0], words)
    else:
        from segue.cli.main import main as everything

        collect_from_now_on()
        everything()
