"""The service is killed and started again: it adopts everything from the holder."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.holder import Holder
from segue.gms.transport import HOLDER_SOCKET, new_socket, receive, send
from tests.gms.running import SLAB, end, manifest, num_memfds, start, target, until


class Pair:
    """A holder and a service, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, command: str) -> None:
        options = ("--devices", "cpu") if command == "serve" else ()
        self.processes[command] = start(self.directory, *options, command=command)

    def kill(self, command: str) -> None:
        end(self.processes.pop(command), signal.SIGKILL)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "d")
    pair.start("hold")
    until((tmp_path / "d" / HOLDER_SOCKET).exists, "the holder does not start")
    pair.start("serve")
    yield pair
    for process in pair.processes.values():
        end(process)


def load(client: GmsClient, text: bytes) -> int:
    """Load one slab that begins with a text."""
    grant = client.ask(manifest())
    (descriptor,) = client.allocate(grant.lease, [SLAB])
    os.pwrite(descriptor, text, 0)
    os.close(descriptor)
    client.seal(grant.lease, manifest(digests=(1,)))
    return client.commit(grant.lease)


def first_bytes(client: GmsClient, generation: int, count: int) -> bytes:
    _, (descriptor,) = client.export(generation, 0)
    found = os.pread(descriptor, count, 0)
    os.close(descriptor)
    return found


def lost(client: GmsClient) -> bool:
    try:
        client.note("x")
    except MemoryServiceError as error:
        assert error.code == "lost"
        client.close()
        return True
    return False


def test_a_killed_service_adopts_everything_when_it_is_started_again(pair: Pair) -> None:
    client = target(pair.directory)
    generation = load(client, b"weights")
    assert client.claim() == 1
    client.put_note("geometry", b"g")
    pair.kill("serve")
    assert lost(client)
    began = time.monotonic()
    pair.start("serve")
    again = GmsClient(client.target, pins=[generation, 99])
    seconds = time.monotonic() - began
    with again:
        assert again.opened.incarnation != client.opened.incarnation
        assert again.opened.current == generation and again.opened.epoch == 1
        assert again.opened.lost_pins == [99]
        assert first_bytes(again, generation, 7) == b"weights"  # pinned without having asked
        assert again.manifest(generation, 0) == manifest(digests=(1,))
        assert again.note("geometry") == b"g"
        with target(pair.directory) as other:
            assert other.ask(manifest()).mode == "ro"
        assert any(event.kind == "adopted" for event in again.events())
        assert seconds < 20, seconds  # of it, most is the start of Python
        print(f"adopted {seconds:.2f} s after the start of the process")


def test_each_cohort_calls_its_weights_as_before_the_service_was_started_again(pair: Pair) -> None:
    with target(pair.directory) as client, target(pair.directory, cohort="other") as other:
        generation = load(client, b"weights")
        other.ask(manifest())
        client.rename(generation, 0, "v7")
        pair.kill("serve")
    pair.start("serve")
    for cohort, version in {"default": "v7", "other": "", "later": ""}.items():
        with target(pair.directory, cohort=cohort) as again:
            assert again.ask(manifest()).weight_version == version, cohort


def test_a_note_that_engines_keep_is_theirs_to_put_again(pair: Pair) -> None:
    client = target(pair.directory)
    client.put_note("sizes", b"1", keeps=True)
    client.put_note("canary", b"2")
    pair.kill("serve")
    until(lambda: lost(client), "the killed service answers")
    pair.start("serve")
    with target(pair.directory) as again:
        assert (again.note("sizes"), again.note("canary")) == (None, b"2")


def test_a_generation_that_was_being_written_is_loaded_again(pair: Pair) -> None:
    with target(pair.directory) as client:
        grant = client.ask(manifest())
        os.close(client.allocate(grant.lease, [SLAB])[0])
        pair.kill("serve")
        assert lost(client)
    pair.start("serve")
    with target(pair.directory) as client:
        assert client.ask(manifest()).mode == "rw"


def test_a_holder_that_is_started_again_gets_everything(pair: Pair) -> None:
    with target(pair.directory) as client:
        generation = load(client, b"weights")
        pair.kill("hold")
        pair.start("hold")
        until(lambda: num_held(pair) >= 3, "the new holder gets nothing")  # slab, manifest, ledger
        pair.kill("serve")
    pair.start("serve")
    with target(pair.directory) as client:
        assert client.ask(manifest()).generation == generation
        assert first_bytes(client, generation, 7) == b"weights"


def num_held(pair: Pair) -> int:
    """The memfds that the holder has."""
    return num_memfds(pair.processes["hold"].pid)


def test_a_freed_generation_is_forgotten_by_the_holder(pair: Pair) -> None:
    with target(pair.directory) as client:
        first = load(client, b"first")
        until(lambda: num_held(pair) == 3, "the holder has not the slab, the manifest and the ledger")
        grant = client.ask(manifest(), "rw", update_epoch=client.claim())
        os.close(client.allocate(grant.lease, [SLAB])[0])
        client.seal(grant.lease, manifest(digests=(2,)))
        client.commit(grant.lease)
        until(lambda: num_held(pair) == 5, "the holder has not both")
        client.unpin(first)
        until(lambda: num_held(pair) == 3, "the holder keeps a freed generation")


def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    holder = Holder(str(tmp_path / "d"))
    with pytest.raises(MemoryServiceError, match="another memory holder"):
        Holder(str(tmp_path / "d"))
    holder.close()


def test_a_holder_without_free_descriptors_takes_the_next_client_once_it_has_some(tmp_path: Path) -> None:
    holder = Holder(str(tmp_path / "d"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with new_socket() as client:
        client.settimeout(60)
        client.connect(holder.path)
        free = os.dup(0)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            holder.serve_once()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        send(client, b"A")
        holder.serve_once()  # the connection
        holder.serve_once()  # the message
        assert receive(client) == (b"E", [])
    holder.close()
