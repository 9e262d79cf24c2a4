"""The rule that import contracts cannot see whole: pure modules run where torch cannot be imported at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import segue

SOURCE = Path(segue.__path__[0])
IMPURE = {"segue.worker.loop"}
BLOCKED = ("torch", "transformers", "zmq")
DISAGG = (
    *("frames", "handshake", "layout", "machine", "peers"),
    *("lease", "lease_machine", "leases", "offer", "offer_machine", "offers"),
)
MEMORY = ("cuda_driver", "cuda_vmm", "memfd", "vmm", "window")
ROUTER = (  # its pure modules
    *("attempts", "breaker", "candidates", "choice", "decide", "fleet", "frames", "index", "prompts"),
    *("records", "splice"),
)

PROGRAM = """
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None  # importing it now raises ImportError
for module in {modules!r}:
    importlib.import_module(module)
"""


def pure_modules() -> list[str]:
    rooms = ("scheduler", "laps", "weight_update/control", "messages", "gms", "discovery")
    paths = [path for room in rooms for path in sorted((SOURCE / room).glob("*.py"))]
    names = [".".join(["segue", *path.relative_to(SOURCE).with_suffix("").parts]) for path in paths]
    disagg = [f"segue.disagg.{name}" for name in DISAGG]
    memory = [f"segue.memory.{name}" for name in MEMORY]
    router = [f"segue.router.{name}" for name in ROUTER]
    failover = [f"segue.failover.{name}" for name in ("epochs", "lock")]
    kernels = [f"segue.kernels.{name}" for name in ("gemm_plan", "moe_plan", "plan_store")]
    kvcache = ["segue.kvcache.journal", "segue.kvcache.prefix_cache"]
    return [*names, *disagg, *kernels, *kvcache, *memory, *failover, *router]


def imports_without_torch(modules: list[str]) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(blocked=BLOCKED, modules=modules)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True, timeout=60)


def test_pure_modules_import_without_torch() -> None:
    result = imports_without_torch(pure_modules())
    assert result.returncode == 0, result.stderr


def loaded_by(modules: list[str]) -> set[str]:
    """The modules that are loaded in a process that imports these."""
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=SOURCE.parent, capture_output=True, text=True, timeout=60, check=True
    )
    return set(result.stdout.split())


def test_the_decisions_of_a_router_load_no_engine() -> None:
    loaded = loaded_by([f"segue.router.{name}" for name in ROUTER])
    rooms = ("worker", "scheduler", "model_runner", "launch", "frontend", "server")
    assert "segue.laps.cost" in loaded
    assert not loaded & {"torch", "zmq", "asyncio", *(f"segue.{room}" for room in rooms)}


def test_the_locks_of_the_memory_service_do_no_io() -> None:
    loaded = loaded_by(["segue.gms.fsm", "segue.gms.kv_fsm"])
    assert not loaded & {"torch", "transformers", "asyncio", "socket", "msgspec", "segue.memory"}


def test_a_router_loads_no_engine() -> None:
    loaded = loaded_by(["segue.router.lifecycle"])
    rooms = ("worker", "scheduler", "model_runner", "launch", "frontend.tokenizer")
    assert "segue.router.relay" in loaded
    assert not loaded & {"torch", "transformers", "zmq", *(f"segue.{room}" for room in rooms)}


def test_the_libraries_of_etcd_and_kubernetes_are_loaded_only_if_they_are_used() -> None:
    loaded = loaded_by(["segue.router.lifecycle", "segue.failover.epochs"])
    assert "segue.discovery.opening" in loaded
    assert not loaded & {"etcd3gw", "requests", "kubernetes_asyncio", "aiohttp"}


def test_the_check_sees_a_module_that_needs_torch() -> None:
    assert "torch" in imports_without_torch(["segue.kvcache.pool"]).stderr
