"""An engine that nobody could end goes on with its requests: the KV cache of its successor stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.gms.fencing import ProcessFence
from tests.gms.serving import serving
from tests.support.held_steps import StepGate
from tests.support.shadows import WAIT_S, ShadowProcess, wait_until

# An engine with the real worker, whose steps can be held, and which does not end when it hears of a newer
# one.
PROGRAM = """
import sys, tests.server.fake_server as program
deaf = "from segue.model_runner import service_generations as s; s._end_replaced = lambda epoch: None; "
held = deaf + "from tests.support.held_steps import work; work()"
program.COMMAND = sys.executable, "-P", "-c", held
sys.exit(program.main())
"""
TOKENS, STEPS = 60, 20
PROMPT = "Once upon a time"


class Reply:
    """A streamed reply, which a thread reads."""

    def __init__(self, url: str) -> None:
        self.ids: list[int] = []
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def result(self) -> list[int]:
        self._thread.join(WAIT_S)
        return self.ids

    def _read(self, url: str) -> None:
        params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"text": PROMPT, "stream": True, "sampling_params": params}
        with (
            suppress(httpx.TransportError),  # its engine has ended
            httpx.stream("POST", f"{url}/generate", json=body, timeout=WAIT_S) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.ids = json.loads(line[6:]).get("output_ids", self.ids)  # or that it has ended


def kv_of(worker: int) -> list[int]:
    """Descriptors of the slabs that a process may write to; the service that made them is in this process."""
    lines = Path(f"/proc/{worker}/maps").read_text().splitlines()
    wanted = {int(line.split()[4]) for line in lines if " rw-s " in line and "memfd:segue-slab" in line}
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the list itself
            if (inode := os.fstat(descriptor).st_ino) in wanted:
                found[inode] = descriptor
    assert found.keys() == wanted and wanted
    return [os.dup(descriptor) for descriptor in found.values()]


def digest(slabs: list[int]) -> str:
    """The digest of all that is in slabs."""
    found = hashlib.blake2b()
    for slab in slabs:
        found.update(os.pread(slab, os.fstat(slab).st_size, 0))
    return found.hexdigest()


def test_an_engine_that_cannot_be_ended_leaves_the_kv_of_its_successor_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessFence, "kill", lambda self, process: None)
    monkeypatch.setattr(ProcessFence, "_kill", lambda self, number: None)
    program, cohort = tmp_path / "program.py", tmp_path / "cohort"
    program.write_text(PROGRAM)
    monkeypatch.setattr("tests.support.shadows.PROGRAM", str(program))
    cohort.mkdir(mode=0o700)
    gates = {name: StepGate(tmp_path / f"{name}-steps") for name in ("old", "new")}
    with serving(tmp_path / "gms") as gms_dir:
        options: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "num_kv_tokens": 4096,
            "wake": "manual",
        }
        options |= {"gms_dir": str(gms_dir), "kv_owner": "gms", "fence_timeout_s": 0.2, "deterministic": True}

        def engine(name: str) -> ShadowProcess:
            return ShadowProcess(tiny_model, cohort, name, gates[name].environment, **options)

        def wake(engine: ShadowProcess) -> None:
            engine.until("standby")
            reply = engine.system.post("/engine/wake_up")
            assert reply.status_code == 200, reply.text

        def hold(engine: ShadowProcess, gate: StepGate) -> Reply:
            """Have a request that runs, and does not go on."""
            gate.close_after(STEPS)
            reply = Reply(engine.url)
            wait_until(lambda: len(reply.ids) == STEPS, "its last step")
            return reply

        with engine("old") as old, engine("new") as new:
            wake(old)
            new.until("standby")
            expected = Reply(old.url).result()
            assert len(expected) == TOKENS
            cut = hold(old, gates["old"])
            kv_of_old = kv_of(*old.workers())
            old.process.send_signal(signal.SIGSTOP)  # only its frontend looks at the lock
            (cohort / "default.lock").unlink()
            wake(new)
            assert new.probe("health")[1]["epoch"] == 2
            reply, kv_of_new = hold(new, gates["new"]), kv_of(*new.workers())
            of_old, of_new = digest(kv_of_old), digest(kv_of_new)

            gates["old"].open()
            wait_until(lambda: digest(kv_of_old) != of_old, "the old engine goes on")
            old.process.send_signal(signal.SIGCONT)
            assert old.process.wait(60) != 0, "it looks at its lock, and ends"
            assert digest(kv_of_new) == of_new
            gates["new"].open()
            assert reply.result() == expected
            cut.result()
        for slab in (*kv_of_old, *kv_of_new):
            os.close(slab)
