"""Weight updates of engines that share their weights: who follows, and what a successor serves."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from segue.gms.messages import CommitLease
from segue.messages.weight_operations import CheckWeights
from segue.messages.weight_update import Inspect
from tests.e2e.served import Served, serve
from tests.e2e.syncing import GREEDY, PROMPTS, Syncing, file_of, split, tensors_of, write_checkpoints
from tests.gms import running as gms
from tests.gms.relay import Relay, relaying
from tests.support.shadows import ShadowProcess, wait_until
from tests.support.shared_client import shared_client
from tests.weight_update.conftest import trainer_address as trainer_address
from tests.weight_update.updating import rank_of

pytestmark = pytest.mark.timeout(300)
REAL = """
import sys, tests.server.fake_server as program
from segue.launch.processes import WORKER_COMMAND
program.COMMAND = WORKER_COMMAND
sys.exit(program.main())
"""
START_S = 120.0  # on a GPU, kernels may have to be compiled first
MASK = (1 << 64) - 1
PART = "model.layers.0.self_attn.q_proj.weight"


def _serves_or_stands_by(engine: ShadowProcess) -> bool:
    return engine.state in ("active", "standby")


def checksum_of(checkpoint: Path, dtype: torch.dtype = torch.float32) -> int:
    """The checksum of weights that come from a checkpoint's files."""
    with rank_of(checkpoint, dtype=dtype) as rank:
        sums: dict[str, int] = rank.do(Inspect, request=CheckWeights(action="checksum"))["checksums"]
    return sum(sums.values()) & MASK


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Checkpoints of one model, and the checksums of their weights."""
    paths = write_checkpoints(tmp_path_factory.mktemp("checkpoints"), "qwen3", 3)
    return [(path, checksum_of(path)) for path in paths]


def facts_of(http: httpx.Client) -> tuple[int, str]:
    """The checksum of the weights that an engine serves, and their version."""
    total, info = http.get("/weights_checker").json()["total"], http.get("/model_info").json()
    return total, info["weight_version"]


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_route_updates_all_engines(
    tmp_path: Path, trainer_address: str, checkpoints: list[tuple[Path, int]], tp: int
) -> None:
    (old, before), (new, after), (third, last) = checkpoints
    options = ["--model", str(old), "--dtype", "float32", "--device", "cpu", "--num-kv-tokens", "4096"]
    options += ["--gms-dir", str(tmp_path / "gms"), "--tp", str(tp)]
    with gms.running(tmp_path / "gms") as service, ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            servers = list(pool.map(lambda _: stack.enter_context(serve(*options)), range(2)))
        sync = Syncing(servers[:1], trainer_address)
        stack.callback(sync.close)
        other = stack.enter_context(httpx.Client(base_url=servers[1].url, timeout=60))

        def expect(checksum: int, version: str) -> None:
            assert facts_of(sync.http) == (checksum, version)
            gms.until(lambda: facts_of(other) == (checksum, version), "the other engine follows")

        expect(before, "0")
        ask(sync.http, "/update_weights_from_disk", model_path=str(new))
        expect(after, "1")
        sync.new_trainer(third)
        sync.meet(ranks=tp)
        for flattened in (False, True):
            done = sync.update(third, flattened=flattened, weight_version=f"flat {flattened}")
            assert done["success"], done
            version = facts_of(sync.http)[1]
            expect(last, version)
            ask(sync.http, "/update_weights_from_disk", model_path=str(old), weight_version="old")
            expect(before, "old")
        with safe_open(file_of(new), "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
        payload = base64.b64encode(save(state)).decode()
        ask(sync.http, "/update_weights_from_tensor", serialized_named_tensors=[payload] * tp)
        expect(after, facts_of(sync.http)[1])
        ask(sync.http, "/update_weight_version", new_version="named")
        expect(after, "named")
        ask(other, "/update_weights_from_disk", model_path=str(third), weight_version="turn")
        gms.until(lambda: facts_of(sync.http) == (last, "turn"), "the first engine follows the other one")
        assert sync.replies() == sync.replies(other)
        gms.end(service, signal.SIGKILL)
        for path, body in (
            ("/update_weights_from_disk", {"model_path": str(old)}),
            ("/update_weight_version", {"new_version": "none"}),
        ):
            response = sync.http.post(path, json=body)
            assert response.status_code == 400 and "memory service" in response.text, response.text
        assert facts_of(sync.http) == facts_of(other) == (last, "turn")
        assert sync.replies() == sync.replies(other), "serving goes on"


class Cohort:
    """Engines that stand by for each other, behind a relay to the service."""

    def __init__(self, model: Path, directory: Path, relay: Relay, gms_dir: Path, **options: Any) -> None:
        self.relay = relay
        self._directory = directory
        self._model = model
        self._options = {
            **{"load_format": "auto", "dtype": "float32", "device": "cpu", "num_kv_tokens": 4096},
            **{"deterministic": True, "gms_dir": str(gms_dir), **options},
        }
        self.engines: dict[str, ShadowProcess] = {}

    def start(self, *names: str) -> None:
        """Start engines, and wait until each of them serves or stands by."""
        for name in names:
            self.engines[name] = ShadowProcess(self._model, self._directory, name, **self._options)
        for name in names:
            engine = self.engines[name]
            wait_until(partial(_serves_or_stands_by, engine), f"{name} starts", START_S)

    @property
    def active(self) -> ShadowProcess:
        """The engine that serves; waits until one does."""
        found: list[ShadowProcess] = []

        def is_there() -> bool:
            found[:] = [each for each in self.engines.values() if each.state == "active"]
            return bool(found)

        gms.until(is_there, "an engine that serves")
        return found[0]

    def kill(self, engine: ShadowProcess) -> None:
        """Kill an engine; the kernel kills its ranks."""
        (name,) = (name for name, each in self.engines.items() if each is engine)
        self.engines.pop(name).__exit__()

    def close(self) -> None:
        for engine in list(self.engines.values()):
            self.kill(engine)


NewCohort = Callable[..., Cohort]


@contextmanager
def cohorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, devices: str = "cpu", **options: Any
) -> Iterator[NewCohort]:
    """Yields what makes a cohort of a model behind a service for devices; the options are for all engines."""
    program, directory = tmp_path / "real.py", tmp_path / "cohort"
    program.write_text(REAL)
    monkeypatch.setattr("tests.support.shadows.PROGRAM", str(program))
    directory.mkdir(mode=0o700)
    with (
        gms.running(tmp_path / "gms", "--devices", devices),
        relaying(tmp_path / "gms", tmp_path / "relay") as relay,
        ExitStack() as stack,
    ):

        def new(model: Path, **more: Any) -> Cohort:
            cohort = Cohort(model, directory, relay, tmp_path / "relay", **options, **more)
            stack.callback(cohort.close)
            return cohort

        yield new


@pytest.fixture
def new_cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewCohort]:
    with cohorts(tmp_path, monkeypatch) as new:
        yield new


def http_of(engine: ShadowProcess) -> httpx.Client:
    return shared_client(base_url=engine.url, timeout=60)


def facts(engine: ShadowProcess) -> tuple[int, str]:
    with http_of(engine) as http:
        return facts_of(http)


def replies(engine: ShadowProcess) -> Any:
    """Greedy tokens, their logprobs, and the version that the reply names."""
    body = {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_logprob": True}
    with http_of(engine) as http:
        found = http.post("/generate", json=body)
    assert found.status_code == 200, found.text
    rows = found.json()
    versions = {row["meta_info"]["weight_version"] for row in rows}
    return [(row["output_ids"], row["meta_info"]["output_token_logprobs"]) for row in rows], versions


def current(tmp_path: Path) -> int:
    with gms.target(tmp_path / "gms", tag="watch") as client:
        found: int = client.status()["cohorts"]["default"]["current"]
    return found


def test_what_a_successor_serves_is_what_the_service_has(
    tmp_path: Path, trainer_address: str, checkpoints: list[tuple[Path, int]], new_cohort: NewCohort
) -> None:
    check_successors(tmp_path, trainer_address, checkpoints, new_cohort)


def check_successors(
    tmp_path: Path, trainer_address: str, checkpoints: list[tuple[Path, int]], new_cohort: NewCohort
) -> None:
    """Kills the engine that serves at each stage of an update, and looks at what its successor serves."""
    (old, before), (new, _), (third, last) = checkpoints
    cohort = new_cohort(old)
    cohort.start("a")
    cohort.start("b", "c", "d")
    expected, first = replies(cohort.active), current(tmp_path)

    # While it receives: one of two buckets has come.
    sync = Syncing([Served(cohort.active.process, cohort.active.url)], trainer_address)  # type: ignore[arg-type]
    sync.new_trainer(new)
    sync.meet()
    parts = split(tensors_of(new), 2)
    assert sync.prepare(parts, weight_version="lost")["status"] == "ready"
    sync.send(parts[:1])
    sync.until(num_buckets_received=1)
    cohort.kill(cohort.active)
    sync.close()
    successor = cohort.active
    assert (facts(successor), current(tmp_path)) == ((before, "0"), first)
    assert replies(successor) == expected

    # Sealed, and paused; the update is one of a part of the weights.
    with http_of(successor) as http, ThreadPoolExecutor(1) as pool:
        ask(http, "/pause_generation", mode="in_place", ttl_s=3600)
        cohort.relay.hold(CommitLease)
        state = {PART: torch.ones(http_shape(new))}
        body = {"serialized_named_tensors": [base64.b64encode(save(state)).decode()]}
        update = pool.submit(http.post, "/update_weights_from_tensor", json=body)
        cohort.relay.wait_held()
        cohort.kill(successor)
        with pytest.raises(httpx.TransportError):
            update.result()
    successor = cohort.active
    assert (facts(successor), current(tmp_path)) == ((before, "0"), first)
    with http_of(successor) as http, ThreadPoolExecutor(1) as pool:
        assert http.get("/is_paused").json()["is_paused"]
        ask(http, "/continue_generation")
        assert replies(successor) == expected

        # After the flip, before the engine knows.
        cohort.relay.hold(CommitLease, reply=True)
        body = {"model_path": str(third), "weight_version": "v3"}
        update = pool.submit(http.post, "/update_weights_from_disk", json=body)
        cohort.relay.wait_held()
        cohort.kill(successor)
        with pytest.raises(httpx.TransportError):
            update.result()
    successor = cohort.active
    assert current(tmp_path) != first
    assert facts(successor) == (last, "v3")
    with_third, versions = replies(successor)
    assert versions == {"v3"} and with_third != expected[0]
    with http_of(successor) as http:
        assert http.get("/model_info").json()["model_path"] == str(third)
        cohort.start("e")  # it starts with the current weights, not with those of --model
        ask(http, "/update_weight_version", new_version="renamed")
    cohort.kill(successor)
    assert facts(cohort.active) == (last, "renamed")
    assert replies(cohort.active) == (with_third, {"renamed"})


def http_shape(checkpoint: Path) -> list[int]:
    return next(shape for name, _, shape in tensors_of(checkpoint) if name == PART)


@pytest.mark.slow
def test_an_engine_that_is_killed_between_the_remaps_of_its_ranks_leaves_the_new_weights(
    tmp_path: Path, checkpoints: list[tuple[Path, int]], new_cohort: NewCohort
) -> None:
    (old, _), (new, after), _ = checkpoints
    cohort = new_cohort(old, tp=2)
    cohort.start("a")
    cohort.start("b")
    engine = cohort.active
    with http_of(engine) as http, ThreadPoolExecutor(1) as pool:
        cohort.relay.hold(CommitLease)
        body = {"model_path": str(new), "weight_version": "v1"}
        update = pool.submit(http.post, "/update_weights_from_disk", json=body)
        cohort.relay.wait_held()
        ranks = engine.workers()
        before = [mapped(pid) for pid in ranks]
        os.kill(ranks[1], signal.SIGSTOP)  # it will not serve the new weights
        cohort.relay.release()
        gms.until(lambda: mapped(ranks[0]) != before[0], "one rank serves the new weights")
        assert mapped(ranks[1]) == before[1]
        cohort.kill(engine)
        with pytest.raises(httpx.TransportError):
            update.result()
    assert facts(cohort.active) == (after, "v1")


def mapped(pid: int) -> set[str]:
    """The slabs that a rank serves, as inodes."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "segue-slab" in line and " r--p " in line}
