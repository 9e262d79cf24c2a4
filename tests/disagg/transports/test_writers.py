"""A process is a writer until it has given up its mapping, or is proven to have ended."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import msgpack

from segue.disagg.transports import writers
from segue.disagg.transports.base import Done, Writer
from segue.disagg.transports.writers import Greeting, WriterWatch
from segue.errors import TransportError
from segue.memory import shared
from tests.conftest import WaitUntil
from tests.disagg.transports.ranks import LARGE, Reader, Remote, Sender, WriterRank, pairs, wait_for

TOKEN = b"t" * 32
# Connects as another user, shows the token, and prints the answer, and whether a descriptor came with it.
STRANGER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect(sys.argv[1])
    connection.send(bytes.fromhex(sys.argv[2]))
    message, descriptors, _, _ = socket.recv_fds(connection, 1024, 1)
    print(message.decode(), len(descriptors))
except PermissionError:
    print("no permission")
"""


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[WriterWatch]:
    descriptor, gone = shared.create(4096), list[Writer]()
    watch = WriterWatch(str(tmp_path / "rank"), TOKEN, descriptor, gone.append)
    yield watch
    watch.close()
    os.close(descriptor)


def visit(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(path)
    return connection


def answer(path: str, greeting: bytes) -> tuple[bytes, bool]:
    """The answer to a greeting, and whether a descriptor came with it."""
    with visit(path) as connection:
        connection.send(greeting)
        message, descriptor = shared.receive_descriptor(connection, 1024)
        if descriptor is not None:
            os.close(descriptor)
        return message, descriptor is not None


def test_a_writer_killed_in_a_copy_is_gone_once_its_process_has_ended(
    make_reader: Callable[..., Reader], make_remote: Callable[..., Remote], wait_until: WaitUntil
) -> None:
    reader, remote = make_reader(LARGE), make_remote(WriterRank, LARGE)
    peer = remote("connect", reader.path, reader.export.blob)
    remote("post", peer, pairs(*[(page % 3, page % 3) for page in range(100_000)]))
    wait_until(lambda: reader.pages[:3].all(), what="the copy's begin")
    reader.pool.data.zero_()
    wait_until(lambda: reader.pages[:3].any(), what="further copies")  # it is in the middle of the push
    assert [writer.pid for writer in reader.export.writers()] == [remote.process.pid] and not reader.gone
    remote.process.kill()
    wait_until(lambda: reader.gone, what="the proof of the writer's end")
    reader.pool.data.zero_()
    assert reader.states == ["Z"]  # the process had ended when it was called gone
    assert reader.export.writers() == [] and reader.gone[0].session == "prefill/7"
    assert not reader.pool.data.any()


def test_a_writer_that_is_stopped_is_still_a_writer(
    reader: Reader, sender: Sender, make_remote: Callable[..., Remote], wait_until: WaitUntil
) -> None:
    remote = make_remote(WriterRank)
    peer = remote("connect", reader.path, reader.export.blob)
    remote.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, remote.process.pid, os.WSTOPPED | os.WNOWAIT)
    pass_by(reader, sender, wait_until)
    assert [writer.pid for writer in reader.export.writers()] == [remote.process.pid]
    remote.process.send_signal(signal.SIGCONT)
    remote("push", peer, pairs((2, 2)))
    assert reader.pages[2] == 3


def test_a_writer_whose_connection_has_ended_may_still_write(
    reader: Reader, sender: Sender, make_remote: Callable[..., Remote], wait_until: WaitUntil
) -> None:
    remote = make_remote(WriterRank)
    peer = remote("connect", reader.path, reader.export.blob)
    remote("break_connection", peer)
    pass_by(reader, sender, wait_until)
    assert [writer.pid for writer in reader.export.writers()] == [remote.process.pid]
    remote.process.kill()
    wait_until(lambda: len(reader.gone) == 2)
    assert reader.states[-1] == "Z" and not reader.export.writers()


def pass_by(reader: Reader, sender: Sender, wait_until: WaitUntil) -> None:
    """Connect and disconnect another writer: all that came before it has been served then."""
    number = len(reader.gone)
    sender.transport.disconnect(sender.connect(reader))
    wait_until(lambda: len(reader.gone) == number + 1)
    assert reader.gone[-1].pid == os.getpid()


def test_a_writer_that_disconnects_is_gone_while_its_process_lives(
    reader: Reader, make_remote: Callable[..., Remote], wait_until: WaitUntil
) -> None:
    remote = make_remote(WriterRank)
    peer = remote("connect", reader.path, reader.export.blob)
    (writer,) = reader.export.writers()
    remote("disconnect", peer)
    wait_until(lambda: reader.gone == [writer])
    assert reader.export.writers() == [] and reader.states[0] in "RSD"


def test_writers_are_listed_in_the_order_in_which_they_came(
    reader: Reader, make_sender: Callable[..., Sender], wait_until: WaitUntil
) -> None:
    senders = [make_sender(session=session) for session in ("first", "second", "third")]
    for sender in senders:
        sender.connect(reader)
    assert [(writer.number, writer.session) for writer in reader.export.writers()] == [
        (1, "first"),
        (2, "second"),
        (3, "third"),
    ]
    senders[1].transport.close()
    wait_until(lambda: [writer.number for writer in reader.export.writers()] == [1, 3])


def test_only_who_shows_the_token_gets_the_descriptor(watch: WriterWatch, tmp_path: Path) -> None:
    path = str(tmp_path / "rank")
    for greeting, why in (
        (msgpack.encode(Greeting(b"x" * 32, "stranger", time.monotonic())), b"its token is wrong"),
        (msgpack.encode(Greeting(b"", "stranger", time.monotonic())), b"its token is wrong"),
        (b"\xff", b"its greeting cannot be read"),
        (b"x" * 5000, b"its greeting cannot be read"),
    ):
        message, has_descriptor = answer(path, greeting)
        assert message.startswith(why) and not has_descriptor
    assert watch.writers() == []
    assert answer(path, msgpack.encode(Greeting(TOKEN, "guest", time.monotonic()))) == (b"welcome", True)


def test_a_writer_that_left_its_descriptor_unread_is_gone(tmp_path: Path, wait_until: WaitUntil) -> None:
    path, descriptor, resume = str(tmp_path / "busy"), shared.create(4096), threading.Event()
    watch = WriterWatch(path, TOKEN, descriptor, lambda writer: wait_for(resume))
    with visit(path) as other, visit(path) as connection:
        for each in (connection, other):
            each.send(msgpack.encode(Greeting(TOKEN, "guest", time.monotonic())))
            assert select.select([each], [], [], 20)[0]
        other.send(writers.RELEASED)
        wait_until(lambda: len(watch.writers()) == 1)
        connection.send(writers.RELEASED)
    resume.set()  # only now the watch sees both that it said so and that it has closed the connection
    wait_until(lambda: not watch.writers())
    watch.close()
    os.close(descriptor)


def test_a_visitor_that_says_nothing_is_sent_away_and_delays_nobody(
    watch: WriterWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "rank")
    monkeypatch.setattr(writers, "CONNECT_S", 0.2)
    with visit(path) as silent:
        assert answer(path, msgpack.encode(Greeting(TOKEN, "guest", time.monotonic())))[1]
        assert silent.recv(1024).startswith(b"it sent no token within 0.2 s")


def test_only_this_user_reaches_the_socket(watch: WriterWatch, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "rank").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("mode", "expected"), [(0o600, "no permission"), (0o666, "it runs as user 65534, and")]
)
def test_another_user_gets_nothing(mode: int, expected: str) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    descriptor, gone = shared.create(4096), list[Writer]()
    watch = WriterWatch(str(folder / "rank"), TOKEN, descriptor, gone.append)
    try:
        (folder / "rank").chmod(mode)
        greeting = msgpack.encode(Greeting(TOKEN, "stranger", time.monotonic())).hex()
        program = [sys.executable, "-c", STRANGER, str(folder / "rank"), greeting]
        said = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout
        assert said.startswith(expected) and not said.endswith(" 1\n")
        assert watch.writers() == []
    finally:
        watch.close()
        os.close(descriptor)
        shutil.rmtree(folder)


def test_a_path_that_exists_is_named(watch: WriterWatch, tmp_path: Path) -> None:
    path = str(tmp_path / "rank")
    with pytest.raises(TransportError, match=f"'{path}' cannot be made .*must be new"):
        WriterWatch(path, TOKEN, 0, lambda writer: None)


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="at most 107 bytes"):
        WriterWatch(str(tmp_path / ("x" * 108)), TOKEN, 0, lambda writer: None)


def test_closing_ends_the_thread_and_the_connections(watch: WriterWatch, tmp_path: Path) -> None:
    path = str(tmp_path / "rank")
    with visit(path) as connection:
        connection.send(msgpack.encode(Greeting(TOKEN, "guest", time.monotonic())))
        _, descriptor = shared.receive_descriptor(connection, 1024)
        assert descriptor is not None
        os.close(descriptor)
        for _ in range(2):
            watch.close()
        assert connection.recv(1) == b"" and not Path(path).exists()
    assert [writer.session for writer in watch.writers()] == ["guest"]  # it has not said that it is done


def test_nobody_is_let_in_for_a_banned_session(reader: Reader, make_sender: Callable[..., Sender]) -> None:
    first, second = make_sender(session="lost"), make_sender(session="other")
    peer = first.connect(reader)
    reader.export.ban("lost")
    with pytest.raises(TransportError, match="its connection to this worker is lost"):
        first.connect(reader)
    second.connect(reader)
    assert [writer.session for writer in reader.export.writers()] == ["lost", "other"]
    assert isinstance(first.push(peer, pairs((1, 1))), Done)  # it was let in before


@pytest.mark.parametrize("age_s", [writers.LATE_S + 1, -5.0], ids=["late", "of another clock"])
def test_a_writer_whose_session_was_not_opened_lately_is_refused(
    watch: WriterWatch, tmp_path: Path, age_s: float
) -> None:
    assert watch.writers() == []
    message, has_descriptor = answer(
        str(tmp_path / "rank"), msgpack.encode(Greeting(TOKEN, "guest", time.monotonic() - age_s))
    )
    assert message.startswith(b"its connection to this worker was not opened within") and not has_descriptor


def test_bans_do_not_pile_up(
    watch: WriterWatch, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr(writers, "LATE_S", 0.05)
    for number in range(1000):
        watch.ban(f"s{number}")

    def is_short() -> bool:
        watch.ban("last")
        return len(watch._banned) == 1

    wait_until(is_short, what="the end of old bans")
