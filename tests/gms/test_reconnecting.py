"""Sessions that outlive the service: what was read is known again, from the holder or from an engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.reconnecting import KeptWeights, SessionKeeper
from segue.messages.requests import FIRST_WEIGHT_VERSION
from tests.gms.running import SLAB, end, manifest, num_memfds, refusal, start, target, until

ENGINE, SHADOW = "a", "b"


@dataclass
class Engine:
    """One rank that reads, and what its keeper has said."""

    client: GmsClient
    reading: KeptWeights
    epoch: int = 0
    changes: list[bool] = field(default_factory=list)
    stale: list[MemoryServiceError] = field(default_factory=list)
    reopened: int = 0

    def keep(self) -> SessionKeeper:
        def note_reopened() -> None:
            self.reopened += 1

        return SessionKeeper(
            self.client,
            self,
            epoch=lambda: self.epoch,
            on_change=self.changes.append,
            on_reopened=note_reopened,
            on_stale=self.stale.append,
        )

    def kept(self) -> KeptWeights:
        return replace(self.reading, descriptors=[os.dup(each) for each in self.reading.descriptors])

    def renumber(self, number: int) -> None:
        self.reading = replace(self.reading, generation=number)

    @property
    def is_back(self) -> bool:
        return self.changes[-2:] == [True, False]


@dataclass
class Service:
    """The service and its holder, which a test kills and starts again."""

    directory: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *commands: str) -> None:
        for command in commands:
            options = ["--devices", "cpu"] if command == "serve" else []
            self.processes[command] = start(self.directory, *options, command=command)
        target(self.directory, tag="watch").close()

    def kill(self, *commands: str) -> None:
        for command in commands:
            end(self.processes.pop(command), signal.SIGKILL)

    def events(self) -> list[str]:
        with target(self.directory, tag="watch") as client:
            return [event.kind for event in client.events()]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    found = Service(tmp_path / "d")
    yield found
    for process in found.processes.values():
        end(process)


def load(directory: Path, name: str) -> GmsClient:
    """Return the session of an engine that has loaded, or reads."""
    client = target(directory, engine=name)
    grant = client.ask(manifest())
    if grant.mode == "rw":
        os.close(client.allocate(grant.lease, [SLAB])[0])
        client.seal(grant.lease, manifest(digests=(1,)))
        client.commit(grant.lease)
    return client


@contextmanager
def reading(client: GmsClient, epoch: int = 0, *, keeps: bool = True) -> Iterator[Engine]:
    """Read the current generation; with `keeps` there is a keeper for the session."""
    generation = 2  # the lease of the first load is number 1
    sizes, descriptors = client.export(generation, client.target.rank)
    assert sizes == [SLAB]
    found = client.manifest(generation, client.target.rank)
    engine = Engine(
        client,
        KeptWeights(generation=generation, manifest=found, descriptors=descriptors, is_loaded=True),
        epoch=epoch,
    )
    keeper = engine.keep() if keeps else None
    try:
        yield engine
    finally:
        if keeper is not None:
            keeper.close()
        for descriptor in descriptors:
            os.close(descriptor)


def readers(directory: Path) -> list[str]:
    """The engines that read the current generation, by their names."""
    with target(directory, tag="watch") as client:
        found = client.status()
    (current,) = (each["current"] for each in found["cohorts"].values())
    texts = next(each["readers"] for each in found["generations"] if each["generation"] == current)
    return sorted(text.split()[0].split("/")[1] for text in texts)


def test_a_service_that_is_started_again_gets_all_back_from_its_holder(service: Service) -> None:
    service.start("hold", "serve")
    with ExitStack() as stack:
        engines = []
        for name in (ENGINE, SHADOW):
            engines.append(stack.enter_context(reading(load(service.directory, name))))
        until(lambda: held(service) >= 3, "the holder has nothing")
        service.kill("serve")
        until(lambda: all(each.changes == [True] for each in engines), "nobody notices")
        service.start("serve")
        until(lambda: all(each.is_back for each in engines), "they do not come back")
        assert [each.reopened for each in engines] == [1, 1]
        assert readers(service.directory) == [ENGINE, SHADOW]
        kinds = service.events()
        assert kinds.count("adopted") == 1, "the holder's, and no engine's"
        assert not any(each.stale for each in engines)


def held(service: Service) -> int:
    return num_memfds(service.processes["hold"].pid)


def test_what_neither_service_nor_holder_knows_the_engines_offer(service: Service) -> None:
    service.start("hold", "serve")
    with ExitStack() as stack:
        engines = []
        for name, epoch in ((ENGINE, 0), (SHADOW, 3)):
            engines.append(stack.enter_context(reading(load(service.directory, name), epoch)))
        service.kill("serve", "hold")
        service.start("hold", "serve")
        until(lambda: all(each.is_back for each in engines), "they do not come back")
        assert readers(service.directory) == [ENGINE, SHADOW]
        numbers = {each.reading.generation for each in engines}
        assert len(numbers) == 1, "both have the same number"
        stranger = target(service.directory, engine="c")
        grant = stranger.ask(manifest())
        assert (grant.mode, {grant.generation}) == ("ro", numbers), "nothing is loaded again"
        stranger.close()


def test_the_version_of_what_an_engine_offers_is_its_cohorts_alone(service: Service) -> None:
    service.start("serve")
    with reading(load(service.directory, ENGINE)) as engine:
        engine.reading = replace(engine.reading, weight_version="v7")  # it has renamed what it loaded
        service.kill("serve")
        service.start("serve")
        until(lambda: engine.is_back, "it does not come back")
        for cohort, version in {engine.client.target.cohort: "v7", "other": FIRST_WEIGHT_VERSION}.items():
            with target(service.directory, cohort=cohort) as reader:
                assert reader.ask(manifest()).weight_version == version, cohort


NEWER = manifest(digests=(7,))  # what an engine reads that serves, and has updated its weights


def offer_newer(client: GmsClient, descriptor: int) -> int:
    return client.offer(40, NEWER, [descriptor], epoch=3, is_loaded=False, weight_version="7")


def test_the_offer_of_a_newer_engine_replaces_an_older_one(service: Service) -> None:
    service.start("serve")
    with reading(load(service.directory, SHADOW)) as shadow:
        service.kill("serve")
        service.start("serve")
        until(lambda: shadow.is_back, "it does not come back")
        with target(service.directory, engine=ENGINE) as engine:
            number = offer_newer(engine, shadow.reading.descriptors[0])
            assert number > shadow.reading.generation
            assert readers(service.directory) == [ENGINE], "the shadow has not followed yet"
            assert offer_newer(engine, shadow.reading.descriptors[0]) == number, "the same once more"


def test_an_engine_with_older_weights_than_the_cohort_has_must_end(service: Service) -> None:
    service.start("serve")
    client = load(service.directory, SHADOW)
    with reading(client, keeps=False) as shadow:
        service.kill("serve")
        service.start("serve")
        with target(service.directory, engine=ENGINE) as engine:
            number = offer_newer(engine, shadow.reading.descriptors[0])
            keeper = shadow.keep()
            until(lambda: bool(shadow.stale), "it goes on")
            assert (shadow.stale[0].code, shadow.changes) == ("other", [True])
            with target(service.directory, tag="watch") as watch:
                assert watch.opened.current == number
            keeper.close()


def test_two_ranks_offer_what_is_whole_only_together(service: Service) -> None:
    service.start("serve")
    clients = [target(service.directory, engine=ENGINE, rank=rank, size=2) for rank in range(2)]
    grant = clients[0].ask(manifest(tp_size=2))
    clients[1].join(grant.lease)
    wanted = [manifest(rank=rank, tp_size=2, digests=(rank,)) for rank in range(2)]
    slabs: list[int] = []
    for client, each in zip(clients, wanted, strict=True):
        slabs += client.allocate(grant.lease, [SLAB])
        client.seal(grant.lease, each)
    clients[0].commit(grant.lease)
    service.kill("serve")
    service.start("serve")
    for client in clients:
        client.reopen([grant.generation])
        assert client.opened.lost_pins == [grant.generation]

    def offer(rank: int) -> int:
        return clients[rank].offer(grant.generation, wanted[rank], [slabs[rank]], epoch=1, is_loaded=True)

    assert [offer(0), offer(0)] == [0, 0], "the other rank is missing"
    number = offer(1)
    assert number and offer(0) == number
    assert readers(service.directory) == [ENGINE, ENGINE]
    for client, each in zip(clients, slabs, strict=True):
        os.close(each)
        client.close()


def bad_offers(client: GmsClient) -> list[Callable[[], int]]:
    """Offers that break the protocol: too many slabs, unsealed ones, and a part without its beginning."""
    descriptor = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SLAB)
    one = manifest(digests=(1,))
    return [
        lambda: client.offer(1, one, [descriptor, descriptor], epoch=1, is_loaded=True),
        lambda: client.offer(1, one, [descriptor], epoch=1, is_loaded=True),
    ]


def test_an_offer_that_is_no_slab_ends_the_session_alone(service: Service) -> None:
    service.start("serve")
    for number in range(2):
        with target(service.directory, engine=ENGINE) as client:
            assert refusal(bad_offers(client)[number]).code == "protocol"
    assert service.events().count("adopted") == 0
