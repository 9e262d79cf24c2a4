"""The beginning of a worker process: what is imported beside torch, and that it ends before a fork."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import segue.worker.main
from segue.worker import entry


@pytest.mark.parametrize("has_gpu", [True, False])
def test_where_there_is_a_gpu_it_is_prepared_beside_the_import_of_torch(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    done: list[Any] = []

    def work() -> None:
        names = [thread.name for thread in threading.enumerate()]
        done.append(("work", "segue-prepare" in names))

    monkeypatch.setattr(entry, "can_compile", lambda: has_gpu)
    monkeypatch.setattr(entry, "import_triton", lambda: done.append(threading.current_thread().name))
    monkeypatch.setattr(entry, "collect_from_now_on", lambda: done.append("collect"))
    monkeypatch.setattr(segue.worker.main, "main", work)
    driver = SimpleNamespace(cuInit=lambda flags: done.append(f"cuInit {flags}"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(os, "_exit", done.append)
    entry.main()
    assert done == [*(["cuInit 0", "segue-prepare"] if has_gpu else []), "collect", ("work", False), 0]
