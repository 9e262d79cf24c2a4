"""The end of a rank's start: what rank 0 tells the frontend, and that nothing of the start is left."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError
from segue.messages.control import GraphCost
from segue.worker import main
from segue.worker.main import _ready
from tests.model_runner import making, tiny


def test_the_end_of_the_start_names_what_the_graphs_have_cost(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    runner = making.make_runner(tmp_path)
    assert _ready(runner, [], "both", None).graphs == {}, "there are none on a CPU"
    runner.graph_costs = {"decode": GraphCost(num_graphs=1, seconds=0.5, num_bytes=1 << 20)}
    assert _ready(runner, [], "both", None).graphs == runner.graph_costs
    runner.close()


@pytest.mark.parametrize("error", [None, ConfigError("no such model", param="model"), ValueError("odd")])
def test_no_process_compiles_kernels_after_a_start_that_succeeds_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    done: list[str] = []

    def make(*_: Any) -> Any:
        done.append("start")
        if error is not None:
            raise error

    monkeypatch.setattr(main, "resolve_model", lambda _: None)
    monkeypatch.setattr(main, "ModelRunner", make)
    monkeypatch.setattr(main.compilations, "end_processes", lambda: done.append("end"))
    outbox: Any = SimpleNamespace(send=lambda _: done.append("failed"))
    started = main.start_runner(EngineConfig(model="m"), TPInfo(rank=0, size=1), tmp_path, outbox)
    assert (started is None) == (error is not None)
    assert done == ["start", *(["failed"] if error else []), "end"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_of_the_device_is_made_beside_the_import_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    both = threading.Barrier(2, timeout=10)
    done: list[Any] = []

    def begin(*what: Any) -> None:
        both.wait()  # passes only if they run at the same time
        done.append((*what, threading.current_thread() is threading.main_thread()))
        if fails:
            raise RuntimeError

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: begin("context", device))
    monkeypatch.setattr(main, "import_kernels", lambda: begin("kernels"))
    main._prepare_device(3)
    for thread in threading.enumerate():
        if thread.name == "segue-context":
            thread.join()
    assert sorted(done) == [("context", 3, False), ("kernels", True)]
