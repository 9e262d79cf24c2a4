"""The beginning of a worker process: what is imported beside torch, and that it ends before a fork."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import segue.worker.main
from segue.worker import entry


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "auto"), (True, "cpu"), (False, "auto")])
def test_a_gpu_that_is_there_and_is_used_is_prepared_beside_the_import_of_torch(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str
) -> None:
    done: list[Any] = []

    def work(spec: dict[str, Any]) -> None:
        names = [thread.name for thread in threading.enumerate()]
        done.append((spec["rank"], "segue-prepare" in names))

    monkeypatch.setattr(entry, "can_compile", lambda: has_gpu)
    monkeypatch.setattr(entry, "import_triton", lambda: done.append(threading.current_thread().name))
    monkeypatch.setattr(entry, "collect_from_now_on", lambda: done.append("collect"))
    monkeypatch.setattr(segue.worker.main, "main", work)
    driver = SimpleNamespace(cuInit=lambda flags: done.append(f"cuInit {flags}"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(os, "_exit", done.append)
    line = json.dumps({"config": {"device": device}, "rank": 7}).encode() + b"\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line)))
    entry.main()
    is_prepared = has_gpu and device != "cpu"
    assert done == [*(["cuInit 0", "segue-prepare"] if is_prepared else []), "collect", (7, False), 0]
