"""The holder and the service as children of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from segue.errors import MemoryServiceError
from tests.gms.running import SLAB, end, manifest, num_memfds, start, target, until
from tests.support.child import start_child


def children(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """The process ids of the children, by their commands; one that was forked just now has none yet."""
    found = {}
    own = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            words = [b"", *command.split(b"\0")]
            if command != own and words[-2] in (b"serve", b"hold"):
                found[words[-2].decode()] = int(pid)
    return found


def load(directory: Path) -> int:
    with target(directory) as client:
        grant = client.ask(manifest())
        os.close(client.allocate(grant.lease, [SLAB])[0])
        client.seal(grant.lease, manifest(digests=(1,)))
        return client.commit(grant.lease)


def current(directory: Path) -> int | None:
    with target(directory, tag="watch") as client:
        return client.opened.current


def test_a_killed_child_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    process = start(tmp_path / "d", "--devices", "cpu", "--on-child-exit", "restart")
    try:
        generation = load(tmp_path / "d")
        for command in ("serve", "hold", "serve"):
            with target(tmp_path / "d", tag="watch") as client:
                until(lambda: len(children(process)) == 2, "both children run")
                until(lambda: num_held(process) >= 3, "the holder has nothing")
                before = children(process)[command]
                os.kill(before, signal.SIGKILL)
                until(lambda c=command, b=before: children(process).get(c, b) != b, "it is not started")
                if command == "serve":
                    until(lambda: client.is_lost, "the killed service answers")
            until(lambda: current(tmp_path / "d") == generation, "the weights are lost")
        assert process.poll() is None
    finally:
        end(process)
    assert process.returncode == 0


OFTEN = """
import sys
from segue.gms.config import GmsConfig
from segue.gms.supervisor import AnswerRules, GmsSupervisor
config = GmsConfig(gms_dir=sys.argv[1], devices="cpu", on_child_exit="restart")
rules = AnswerRules(period_s=0.1, answer_s=0.4, start_s=2)
sys.exit(GmsSupervisor(config, "restart", rules).run())
"""


def test_a_child_that_was_stopped_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    process = start_child([sys.executable, "-c", OFTEN, str(tmp_path / "d")], start_new_session=True)
    try:
        generation = load(tmp_path / "d")
        until(lambda: num_held(process) >= 3, "the holder has nothing")
        before = children(process)["serve"]
        os.kill(before, signal.SIGSTOP)
        until(lambda: children(process).get("serve", before) != before, "it is not started again")
        until(lambda: current(tmp_path / "d") == generation, "the weights are lost")
        assert process.poll() is None
    finally:
        end(process)
    assert process.returncode == 0


DIES_WHILE_IT_IS_ASKED = """
import os, signal, sys
from segue.errors import MemoryServiceError
from segue.gms.config import GmsConfig
from segue.gms.supervisor import AnswerRules, GmsSupervisor
config = GmsConfig(gms_dir=sys.argv[1], devices="cpu", on_child_exit="restart")
rules = AnswerRules(period_s=0.1, max_failures=1, start_s=0)
supervisor = GmsSupervisor(config, "restart", rules)

def check():
    supervisor._checks["serve"] = lambda: None
    pid = supervisor._children["serve"].process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    raise MemoryServiceError("it does not answer")

supervisor._checks = {"hold": lambda: None, "serve": check}
sys.exit(supervisor.run())
"""


def test_a_child_that_ends_while_it_is_asked_is_started_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES_WHILE_IT_IS_ASKED, str(tmp_path / "d")]
    process = start_child(command, start_new_session=True)
    try:
        assert load(tmp_path / "d")
        assert process.poll() is None
    finally:
        end(process)
    assert process.returncode == 0


def num_held(process: subprocess.Popen[bytes]) -> int:
    """The memfds that the holder has."""
    pid = children(process).get("hold")
    return 0 if pid is None else num_memfds(pid)


def test_the_end_of_a_child_can_end_all(tmp_path: Path) -> None:
    process = start(tmp_path / "d", "--devices", "cpu", "--on-child-exit", "exit")
    target(tmp_path / "d", tag="watch").close()
    until(lambda: len(children(process)) == 2, "both children run")
    os.kill(children(process)["hold"], signal.SIGKILL)
    assert process.wait(60) == 1
    try:
        target_at_once(tmp_path / "d")
    except MemoryServiceError as error:
        assert "no memory service answers" in error.message
    else:
        raise AssertionError("the service runs on")


def target_at_once(directory: Path) -> None:
    from segue.gms.client import GmsClient
    from segue.gms.client_connection import GmsTarget

    GmsClient(GmsTarget(directory=str(directory), tag="watch", connect_s=0)).close()
