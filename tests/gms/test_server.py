"""The memory service's socket: real processes, and what hostile or broken clients send."""

from __future__ import annotations

import array
import asyncio
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from segue.errors import MemoryServiceError
from segue.gms import messages as wire
from segue.gms.server import GmsServer, lock_directory
from segue.gms.service import MemoryService
from segue.gms.store import SlabStore
from segue.gms.supervisor import GMS_COMMAND
from segue.gms.transport import SOCKET, new_socket, receive, send
from segue.memory.memfd import MemfdVMM
from tests.conftest import least_measured
from tests.gms.running import SLAB, descriptors_of, end, manifest, refusal, running, start, target, until
from tests.support.child import start_child

HELLO = wire.encode(wire.OpenSession(call=1, protocol=wire.PROTOCOL, tag="watch"))


@pytest.fixture(scope="module")
def shared_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    directory = tmp_path_factory.mktemp("gms") / "d"
    with running(directory) as process:
        yield directory, process


def raw(directory: Path) -> socket.socket:
    connection = new_socket()
    connection.connect(str(directory / SOCKET))
    connection.settimeout(60)
    return connection


def answer(connection: socket.socket) -> wire.Reply | None:
    """What the service sends next; None: it has closed the connection."""
    try:
        frame, descriptors = receive(connection)
    except ConnectionError:
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    return wire.decode_reply(frame) if frame else None


def is_ended(connection: socket.socket) -> bool:
    while (reply := answer(connection)) is not None:
        if isinstance(reply, wire.CallRefused) and reply.code == "protocol":
            return answer(connection) is None
    return True


def attack(directory: Path, rng: random.Random) -> None:
    """One client that breaks the protocol in a random way, and must lose its session."""
    with raw(directory) as connection:
        if rng.random() < 0.7:
            send(connection, HELLO)
            assert isinstance(answer(connection), wire.SessionOpened)
        kind = rng.randrange(8)
        try:
            if kind == 0:
                send(connection, rng.randbytes(rng.randrange(1, 2000)))
            elif kind == 1:  # a length of 4 GiB, in msgpack's own words
                send(connection, bytes([0xDD]) + struct.pack(">I", 0xFFFFFFFF))
            elif kind == 2:
                connection.sendmsg([b"x" * (wire.MAX_FRAME + 1)])
            elif kind == 3:  # more descriptors than the service has room for
                ends = [os.dup(0) for _ in range(100)]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends))]
                connection.sendmsg([HELLO], rights)
                for end in ends:
                    os.close(end)
            elif kind == 4:  # descriptors where none belong
                send(connection, wire.encode(wire.GetNote(call=2, name="n")), [0, 0, 0])
            elif kind == 5:  # a manifest that is a pipe
                reading, writing = os.pipe()
                send(connection, wire.encode(wire.AskWeights(call=2, mode="rw")), [reading])
                os.close(reading)
                os.close(writing)
            elif kind == 6:
                send(connection, msgspec.msgpack.encode({"type": "Nothing", "call": 1}))
            else:
                send(connection, wire.encode(wire.CallDone(call=3)))
        except (BrokenPipeError, ConnectionError):
            return
        assert is_ended(connection)


def latencies(directory: Path, num_calls: int) -> list[float]:
    found = []
    with target(directory, tag="watch") as client:
        for _ in range(num_calls):
            before = time.perf_counter()
            client.note("nothing")
            found.append(time.perf_counter() - before)
    return sorted(found)


def idle_descriptors(process: subprocess.Popen[bytes]) -> int:
    """The number of the service's descriptors once all clients of earlier tests are gone."""

    def num_sockets() -> int:
        folder = f"/proc/{process.pid}/fd"
        names = []
        for number in os.listdir(folder):
            with suppress(FileNotFoundError):
                names.append(os.readlink(f"{folder}/{number}"))
        return sum(name.startswith("socket:") for name in names)

    until(lambda: num_sockets() == 3, "a client's connection is left")  # the listener, and asyncio's own pair
    return descriptors_of(process)


def seconds_added_by_an_attack(directory: Path) -> float:
    """By how much the p99 of another client's call exceeds twice that without an attack."""
    quiet = latencies(directory, 200)
    with_attack: list[float] = []
    measuring = threading.Thread(target=lambda: with_attack.extend(latencies(directory, 200)))
    measuring.start()
    for seed in range(150):
        attack(directory, random.Random(seed))
    measuring.join()
    return with_attack[198] - 2 * quiet[198]


def test_clients_that_break_the_protocol_lose_their_session_alone(
    shared_service: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    directory, process = shared_service
    idle = idle_descriptors(process)
    with target(directory, cohort="fuzz") as client:
        lease = client.ask(manifest()).lease
        found = least_measured(0.1, lambda: seconds_added_by_an_attack(directory))
        os.close(client.allocate(lease, [SLAB])[0])  # the others' sessions go on
    assert found < 0.1, f"the p99 of a call became more than twice as long, and {found} s longer"
    assert process.poll() is None
    until(lambda: descriptors_of(process) == idle, "descriptors are left")


def answers(directory: Path) -> bool:
    try:
        with target(directory, tag="watch") as client:
            return client.note("nothing") is None
    except MemoryServiceError as error:
        assert error.code == "limit"  # the ends of the many connects are not all seen yet
        return False


def test_a_thousand_connects_leave_nothing(shared_service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    directory, process = shared_service
    idle = idle_descriptors(process)
    silent = [raw(directory) for _ in range(200)]
    for _ in range(1000):
        raw(directory).close()
    until(lambda: answers(directory), "silent peers keep others out")
    for connection in silent:
        assert answer(connection) is None  # each is ended after the handshake's time
        connection.close()
    until(lambda: descriptors_of(process) == idle, "descriptors are left")


def test_more_sessions_than_allowed_are_refused(
    shared_service: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    directory, process = shared_service
    idle_descriptors(process)
    clients = [target(directory, tag="watch") for _ in range(wire.MAX_SESSIONS)]
    try:
        assert refusal(lambda: target(directory, tag="watch")).code == "limit"
    finally:
        for client in clients:
            client.close()
    idle_descriptors(process)


def test_a_token_is_checked(tmp_path: Path) -> None:
    with running_with_token(tmp_path / "d") as directory:
        assert refusal(lambda: target(directory, tag="watch", token="wrong")).code == "access"
        assert refusal(lambda: target(directory, tag="watch")).code == "access"
        target(directory, tag="watch", token="right").close()


class running_with_token:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __enter__(self) -> Path:
        self.process = start(self.directory, "--devices", "cpu", "--gms-token", "right")
        target(self.directory, tag="watch", token="right").close()
        return self.directory

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def test_another_user_is_refused(tmp_path: Path) -> None:
    def somebody(connection: socket.socket) -> tuple[int, int]:
        return 1, os.geteuid() + 1

    async def serve() -> None:
        service = MemoryService(SlabStore({"cpu": MemfdVMM()}))
        server = GmsServer(service, str(tmp_path / "d"), credentials=somebody)
        task = asyncio.create_task(server.run())
        try:
            error = await asyncio.to_thread(lambda: refusal(lambda: target(tmp_path / "d", tag="watch")))
            assert error.code == "access" and "--allow-uid" in error.message
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            service.store.close()

    asyncio.run(serve())


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(0o770)
    with pytest.raises(MemoryServiceError, match="others may write to"):
        lock_directory(str(directory))


def test_a_second_service_in_a_directory_is_refused(tmp_path: Path) -> None:
    lock = lock_directory(str(tmp_path / "d"))
    with pytest.raises(MemoryServiceError, match="another memory service"):
        lock_directory(str(tmp_path / "d"))
    os.close(lock)
    os.close(lock_directory(str(tmp_path / "d")))


def test_the_socket_is_this_users_alone(shared_service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    directory, _ = shared_service
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / SOCKET).stat().st_mode & 0o777 == 0o600


FORKED = """
import os, sys, time
from tests.gms.running import manifest, target
from pathlib import Path
client = target(Path(sys.argv[1]), cohort="forked")
client.ask(manifest())
if os.fork() == 0:
    time.sleep(60)
print("child", flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_end_of_a_process_is_seen_while_its_child_has_the_socket(
    shared_service: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    directory, _ = shared_service
    process = start_child(
        [sys.executable, "-c", FORKED, str(directory)], stdout=subprocess.PIPE, start_new_session=True
    )
    with target(directory, tag="watch") as client:
        assert process.stdout is not None and process.stdout.readline() == b"child\n"
        until(
            lambda: not any(each["cohort"] == "forked" for each in client.status()["sessions"]),
            "the session of a process that has ended goes on",
        )
    os.killpg(process.pid, 9)
    process.wait(60)
    process.stdout.close()


def test_a_service_whose_directory_was_made_anew_leaves_the_new_one_s_socket(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "d"
    with running(directory) as old:
        shutil.rmtree(directory)
        with running(directory):
            end(old)
            target(directory, tag="watch").close()


def test_a_service_that_hangs_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    with running(tmp_path / "d") as service:
        service.send_signal(signal.SIGSTOP)
        words = ["ready", "--gms-dir", str(tmp_path / "d"), "--timeout-s", "0.5"]
        tool = subprocess.run([*GMS_COMMAND, *words], capture_output=True, text=True, timeout=40)
        service.send_signal(signal.SIGCONT)
    assert tool.returncode == 1 and "timed out" in tool.stderr
