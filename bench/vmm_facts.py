"""Finds out what slabs under fixed addresses can rely on, on one GPU of this host.

Each fact is found in a process of its own with a time limit, so that one that crashes or hangs costs only
itself. A table is printed, and all results are stored as ``bench/results/gpu_vmm_facts.json``. It takes six
minutes at most, mostly less than two, and 24 GiB of free memory of the GPU::

    python -m bench.vmm_facts [FACT]…
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bench import report
from segue.errors import SegueError
from segue.memory import cuda_driver as cuda
from segue.memory import shared
from segue.memory.cuda_vmm import CudaVMM
from segue.memory.window import MemoryWindow

MIB, GIB = 1 << 20, 1 << 30
# The question that each fact answers, the seconds that it may take, and what the engine takes for granted.
FACTS: dict[str, tuple[str, int, str]] = {
    "tensor_on_unmapped_range": ("DLPack tensor over a range in which nothing is mapped", 30, "works"),
    "descriptor_pins": ("a descriptor alone keeps the memory after its creator has ended", 40, "kept"),
    "owner_has_no_context": ("a process that only makes slabs takes device memory for itself", 30, "0 MiB"),
    "exchange_idle": ("ms to unmap and map 16 slabs of 1 GiB, idle", 40, "1 to 3 ms"),
    "exchange_busy": ("the same, while another stream is busy, without waiting for it", 40, "no wait"),
    "create_rate": ("GiB/s of cuMemCreate, in slabs of 1 GiB and of 2 MiB", 40, "above 100"),
    "read_only_write": ("a kernel's write to a slab mapped for reading", 40, "an error there, bytes kept"),
    "kill_with_kernel": (
        "SIGKILL during a kernel of 2 s: order of EOF, pidfd, and free memory",
        60,
        "EOF first",
    ),
    "graph_after_exchange": ("a captured graph replayed after an exchange", 40, "bit-equal"),
}


# --- facts: each returns a dictionary whose `answer` is one line of the table ---


def _torch() -> Any:
    import torch

    torch.cuda.init()
    return torch


def _vmm() -> CudaVMM:
    torch = _torch()
    return CudaVMM(0, torch.cuda.synchronize)


def _tensor(window: MemoryWindow) -> Any:
    from segue.memory.binding import tensor_at

    return tensor_at(window.address, window.size, _torch().device("cuda", 0))


def _free() -> int:
    return int(_torch().cuda.mem_get_info(0)[0])


def tensor_on_unmapped_range() -> dict[str, Any]:
    vmm = _vmm()
    window = MemoryWindow(vmm, GIB)
    tensor = _tensor(window)
    views = [tensor[i * MIB :].view(_torch().float32) for i in range(4)]
    window.map(0, vmm.private(GIB), writable=True)
    tensor.fill_(3)
    return {"answer": "works" if int(tensor[::MIB].sum()) == 3 * 1024 else "wrong bytes", "views": len(views)}


def descriptor_pins() -> dict[str, Any]:
    """A child makes and fills a slab, sends the descriptor, and is killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _child("make", theirs)
    _, descriptor = shared.receive_descriptor(ours, 64)
    assert descriptor is not None, "the child sent no descriptor"
    child.send_signal(signal.SIGKILL)
    child.wait()
    vmm = _vmm()
    window = MemoryWindow(vmm, GIB)
    slab = vmm.adopt(descriptor, GIB)
    window.map(0, slab, writable=False)
    vmm.close(slab)
    kept = bool(_tensor(window).eq(5).all())
    window.close()
    before = _free()
    os.close(descriptor)
    return {"answer": "kept" if kept else "lost", "freed_bytes_after_close": _free() - before}


def owner_has_no_context() -> dict[str, Any]:
    """Device memory that a process takes which makes a slab of 1 GiB, beyond the slab."""
    _torch()
    before = _free()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _child("own", theirs)
    _, descriptor = shared.receive_descriptor(ours, 64)
    taken = before - _free()
    child.kill()
    child.wait()
    os.close(descriptor or 0)
    return {"answer": f"{(taken - GIB) / MIB:.0f} MiB", "taken_bytes": taken, "slab_bytes": GIB}


def _exchange(window: MemoryWindow, slabs: list[Any], others: list[Any]) -> float:
    began = time.perf_counter()
    for index in range(len(slabs)):
        window.unmap(index * GIB)
    for index, slab in enumerate(others):
        window.map(index * GIB, slab, writable=False)
    return (time.perf_counter() - began) * 1e3


def _exchanges(synchronise: Callable[[], object]) -> tuple[MemoryWindow, list[float]]:
    """Exchange eight slabs under a window of sixteen places; one set fits beside the other."""
    vmm = CudaVMM(0, synchronise)
    sets = [[vmm.private(GIB) for _ in range(8)] for _ in range(2)]
    window = MemoryWindow(vmm, 16 * GIB)
    for index, slab in enumerate(sets[0] * 2):  # a slab may be mapped at two addresses
        window.map(index * GIB, slab, writable=False)
    times = []
    for cycle in range(10):
        here, there = sets[cycle % 2] * 2, sets[1 - cycle % 2] * 2
        times.append(_exchange(window, here, there))
    return window, times


def exchange_idle() -> dict[str, Any]:
    _torch()
    _, times = _exchanges(lambda: None)
    return {"answer": f"{statistics.median(times):.2f} ms", "ms": times}


def exchange_busy() -> dict[str, Any]:
    """The other stream's kernel runs for seconds; an exchange that waits for it takes as long."""
    torch = _torch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(6_000_000_000)  # cycles: 3 s or more
        ended = torch.cuda.Event()
        ended.record()
    _, times = _exchanges(lambda: None)
    was_busy = not ended.query()
    torch.cuda.synchronize()
    waits = "no wait" if was_busy else "it waits for the other stream"
    return {"answer": f"{statistics.median(times):.2f} ms, {waits}", "ms": times, "busy_at_end": was_busy}


def create_rate() -> dict[str, Any]:
    found: dict[str, Any] = {}
    vmm = _vmm()
    for size, count in ((GIB, 16), (2 * MIB, 1024)):
        began = time.perf_counter()
        slabs = [vmm.private(size) for _ in range(count)]
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        for slab in slabs:
            vmm.close(slab)
        freed = time.perf_counter() - began
        rate = {
            "create_gib_per_s": size * count / GIB / seconds,
            "free_gib_per_s": size * count / GIB / freed,
        }
        found[f"{size // MIB} MiB"] = rate
    return {"answer": ", ".join(f"{k}: {v['create_gib_per_s']:.0f}" for k, v in found.items()), **found}


def read_only_write() -> dict[str, Any]:
    vmm = _vmm()
    descriptor = vmm.create(GIB)
    window = MemoryWindow(vmm, GIB)
    slab = vmm.adopt(descriptor, GIB)
    window.map(0, slab, writable=True)
    _tensor(window).fill_(5)
    window.remap(0, slab, writable=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _child("write", theirs)
    shared.send_descriptor(ours, b"slab", descriptor)
    said = ours.recv(4096).decode()
    child.wait(30)
    kept = bool(_tensor(window).eq(5).all())
    return {"answer": f"{said.partition(':')[0]}, bytes {'kept' if kept else 'CHANGED'}", "error": said}


def kill_with_kernel() -> dict[str, Any]:
    """Milliseconds from SIGKILL to the end of the socket, to the pidfd, and to free memory."""
    _torch()
    before = _free()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _child("spin", theirs)
    ours.recv(16)
    pidfd = os.pidfd_open(child.pid)
    poll, since = select.poll(), time.perf_counter()
    poll.register(ours.fileno(), select.POLLHUP | select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    child.send_signal(signal.SIGKILL)
    seen: dict[str, float] = {}
    while len(seen) < 3 and time.perf_counter() - since < 30:
        for number, _ in poll.poll(1):
            poll.unregister(number)
            seen["EOF" if number == ours.fileno() else "pidfd"] = (time.perf_counter() - since) * 1e3
        if "memory" not in seen and before - _free() < 64 * MIB:
            seen["memory"] = (time.perf_counter() - since) * 1e3
    child.wait()
    order = sorted(seen, key=lambda name: seen[name])
    return {"answer": ", ".join(f"{name} {seen[name]:.1f} ms" for name in order), "ms": seen}


def graph_after_exchange() -> dict[str, Any]:
    torch, vmm = _torch(), _vmm()
    window = MemoryWindow(vmm, 4 * MIB)
    slabs = [vmm.private(window.size) for _ in range(2)]
    weight = _tensor(window).view(torch.float32).view(1024, 1024)
    for slab in slabs:
        window.map(0, slab, writable=True)
        weight.normal_()
        window.clear()
    window.map(0, slabs[0], writable=False)
    inputs, output = (torch.randn(64, 1024, device="cuda") for _ in range(2))
    torch.mm(inputs, weight, out=output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(inputs, weight, out=output)
    equal = []
    for cycle in range(20):
        window.remap(0, slabs[cycle % 2], writable=False)
        graph.replay()
        equal.append(bool(torch.equal(output.clone(), torch.mm(inputs, weight))))
    return {"answer": "bit-equal" if all(equal) else f"{equal.count(False)} of 20 differ"}


# --- the other processes ---


def _child(role: str, end: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.vmm_facts", "--child", role, str(end.fileno())]
    process = subprocess.Popen(command, pass_fds=[end.fileno()])
    end.close()
    return process


def _as_child(role: str, pipe: socket.socket) -> None:
    if role == "own":  # no torch, and no context
        shared.send_descriptor(pipe, b"slab", CudaVMM(0).create(GIB))
        time.sleep(30)
    vmm = _vmm()
    window = MemoryWindow(vmm, GIB)
    if role == "make":
        descriptor = vmm.create(GIB)
        window.map(0, vmm.adopt(descriptor, GIB), writable=True)
        _tensor(window).fill_(5)
        _torch().cuda.synchronize()
        shared.send_descriptor(pipe, b"slab", descriptor)
        time.sleep(30)
    elif role == "write":
        _, descriptor = shared.receive_descriptor(pipe, 64)
        assert descriptor is not None
        window.map(0, vmm.adopt(descriptor, GIB), writable=False)
        try:
            _tensor(window).fill_(9)
            _torch().cuda.synchronize()
            pipe.send(b"written: no error")
        except Exception as error:
            pipe.send(f"error: {str(error)[:500]}".encode())
        os._exit(1)  # the context is broken
    elif role == "spin":
        window.map(0, vmm.private(GIB), writable=True)
        _tensor(window).fill_(1)
        _torch().cuda.synchronize()
        _torch().cuda._sleep(4_000_000_000)  # cycles: about 2 s
        pipe.send(b"running")
        time.sleep(30)


# --- all facts ---


def run(name: str) -> dict[str, Any]:
    """Find a fact in a process of its own."""
    began, limit = time.monotonic(), FACTS[name][1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.vmm_facts", "--fact", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        errors = f"it took more than {limit} s"
        out = ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too
    process.communicate()
    found: dict[str, Any] = {"question": FACTS[name][0], "expected": FACTS[name][2]}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    found |= json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"answer": "no answer"}
    if not lines:
        found["errors"] = errors[-3000:]
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Find the facts that are named, or all; returns 1 if one has no answer and 2 without a GPU."""
    if sys.argv[1:2] == ["--child"]:
        _as_child(sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
        return 0
    if sys.argv[1:2] == ["--fact"]:
        print("RESULT", json.dumps(globals()[sys.argv[2]]()))
        return 0
    if unknown := set(sys.argv[1:]) - FACTS.keys():
        print(f"no such fact: {', '.join(sorted(unknown))}; there are {', '.join(FACTS)}")
        return 2
    try:
        devices = cuda.device_uuids()
    except SegueError as error:
        print(f"no fact can be found without a GPU: {error.message}")
        return 2
    facts = {}
    for name in sys.argv[1:] or FACTS:
        facts[name] = run(name)
        print(f"{name}: {facts[name]['answer']}", flush=True)
    rows = [[fact["question"], fact["expected"], fact["answer"]] for fact in facts.values()]
    report.show("What slabs can rely on", ["fact", "the engine relies on", "found"], rows)
    print(report.save("gpu_vmm_facts", {"devices": devices, "facts": facts}))
    return int(any(fact["answer"] == "no answer" for fact in facts.values()))


if __name__ == "__main__":
    sys.exit(main())
