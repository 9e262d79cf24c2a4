"""Finds out what KV pages between processes can rely on, on the GPUs of this host.

Each fact is found in a process of its own with a time limit, so that one that crashes or hangs costs only
itself. All results are printed, and stored as ``$OUT/cuda_ipc_facts.json`` (without ``OUT``: in the current
directory) after each fact. It takes 200 seconds at most, on one GPU or more::

    python -m bench.cuda_ipc_facts [FACT]…
"""

from __future__ import annotations

import json
import os
import platform
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from segue.memory import cuda_driver as cuda
from segue.memory import shared

TOTAL_S = 195.0
LIMITS_S = {
    "environment": 25,
    "legacy_same_gpu": 15,
    "legacy_cross_gpu": 15,
    "legacy_same_process": 10,
    "descriptor_same_gpu": 15,
    "descriptor_cross_gpu": 15,
    "descriptor_same_process": 20,
    "descriptor_unseen_gpu": 15,
    "descriptor_large": 20,
    "descriptor_wrong_size": 15,
    "expandable_source": 20,
    "reader_killed": 15,
    "writer_killed": 50,
    "speed_copies": 30,
    "speed_rows": 30,
    "speed_kernel": 50,
    "local_speed": 20,
}
MIB, GIB = 1 << 20, 1 << 30


# --- the driver, without torch: a writer's process starts in a second ---


class IpcHandle(Structure):
    _fields_ = (("bytes", c_char * 64),)


class Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class BatchAttributes(Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))


class Copy2D(Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", c_size_t), ("source_y", c_size_t), ("source_type", c_int), ("source_host", c_void_p),
        ("source", c_uint64), ("source_array", c_void_p), ("source_pitch", c_size_t),
        ("target_x", c_size_t), ("target_y", c_size_t), ("target_type", c_int), ("target_host", c_void_p),
        ("target", c_uint64), ("target_array", c_void_p), ("target_pitch", c_size_t),
        ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


_MORE: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_uint, c_size_t),
    "cuMemsetD8Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpy2DAsync_v2": (POINTER(Copy2D), c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
}


def use(device: int) -> c_void_p:
    """Make a device's primary context current, and return it."""
    library = cuda._library()
    for name, types in _MORE.items():
        getattr(library, name).argtypes = types
    context = c_void_p()
    cuda.call("cuDevicePrimaryCtxRetain", byref(context), device)
    cuda.call("cuCtxSetCurrent", context)
    return context


def count_devices() -> int:
    found = c_int()
    cuda._library()
    cuda.call("cuDeviceGetCount", byref(found))
    return found.value


def take(num_bytes: int) -> int:
    found = c_uint64()
    cuda.call("cuMemAlloc_v2", byref(found), num_bytes)
    return found.value


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    cuda.call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)


def new_stream() -> int:
    found = c_void_p()
    cuda.call("cuStreamCreate", byref(found), 1)  # non-blocking
    assert found.value
    return found.value


def code_of(work: Callable[[], Any]) -> str:
    """Run something and say how it ended, because a failure is a fact too."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "ok"


def properties(device: int) -> cuda.AllocationProperties:
    location = cuda.MemoryLocation(cuda.ON_DEVICE, device)
    return cuda.AllocationProperties(type=cuda.PINNED, handle_types=cuda.POSIX_DESCRIPTOR, location=location)


def physical(device: int, num_bytes: int) -> c_uint64:
    handle = c_uint64()
    cuda.call("cuMemCreate", byref(handle), num_bytes, byref(properties(device)), 0)
    return handle


def map_for(handle: c_uint64, num_bytes: int, *devices: int) -> int:
    address = c_uint64()
    cuda.call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
    cuda.call("cuMemMap", address, num_bytes, 0, handle, 0)
    for device in devices:
        location = cuda.MemoryLocation(cuda.ON_DEVICE, device)
        access = cuda.AccessDescription(location, cuda.READ_WRITE)
        cuda.call("cuMemSetAccess", address, num_bytes, byref(access), 1)
    return address.value


def export(handle: c_uint64) -> int:
    descriptor = c_int(-1)
    cuda.call("cuMemExportToShareableHandle", byref(descriptor), handle, cuda.POSIX_DESCRIPTOR, 0)
    return descriptor.value


def imported(descriptor: int) -> c_uint64:
    handle = c_uint64()
    cuda.call("cuMemImportFromShareableHandle", byref(handle), descriptor, cuda.POSIX_DESCRIPTOR)
    return handle


def to_host(address: int, num_bytes: int) -> bytes:
    buffer = (c_char * num_bytes)()
    cuda.call("cuMemcpyDtoH_v2", buffer, address, num_bytes)
    return buffer.raw


# --- a second process ---


@contextmanager
def child(role: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(12)
    command = [sys.executable, "-m", "bench.cuda_ipc_facts", "--child", role, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | environment)
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        ours.close()


def tell(pipe: socket.socket, descriptor: int | None = None, **message: Any) -> None:
    packed = json.dumps(message).encode()
    if descriptor is None:
        pipe.send(packed)
    else:
        shared.send_descriptor(pipe, packed, descriptor)


def hear(pipe: socket.socket) -> tuple[dict[str, Any], int | None]:
    message, descriptor = shared.receive_descriptor(pipe, 65536)
    if not message:
        raise EOFError("the other process has ended")
    return json.loads(message), descriptor


def child_writer(pipe: socket.socket) -> None:
    """Opens memory of the other process, and writes to it as it is told."""
    order, descriptor = hear(pipe)
    context = use(order["device"])
    size = order["size"]
    began = time.monotonic()
    try:
        if descriptor is not None:
            address = map_for(imported(descriptor), size, order["device"])
        else:
            found = c_uint64()
            handle = IpcHandle.from_buffer_copy(bytes.fromhex(order["handle"]))
            cuda.call("cuIpcOpenMemHandle_v2", byref(found), handle, 1)
            address = found.value
    except Exception as error:
        tell(pipe, error=str(error))
        return
    seconds = time.monotonic() - began
    source = take(64 * MIB)
    cuda.call("cuMemsetD8_v2", source, 0x5A, 64 * MIB)
    stream = new_stream()
    copy_async(address, source, MIB, stream)
    end = size - MIB
    copy_async(address + end, source, MIB, stream)
    cuda.call("cuStreamSynchronize", stream)
    tell(pipe, opened_s=seconds, context=bool(context))
    while True:
        order, _ = hear(pipe)
        if order["do"] == "flood":
            flood(pipe, address, source, stream, order)
        elif order["do"] == "copy":
            tell(pipe, result=code_of(lambda: copy_now(address, source, stream)))
        elif order["do"] == "close":
            tell(pipe, result="closed")
            return


def copy_now(address: int, source: int, stream: int) -> None:
    copy_async(address, source, 64 * MIB, stream)
    cuda.call("cuStreamSynchronize", stream)


def flood(pipe: socket.socket, address: int, source: int, stream: int, order: dict[str, Any]) -> None:
    """Keep copies of 64 MiB queued, for ever; tell when the first ones are queued."""
    event = c_void_p()
    cuda.call("cuEventCreate", byref(event), 2)
    said = False
    while True:
        for _ in range(order["queued"] // 2):
            copy_async(address, source, 64 * MIB, stream)
        if said:
            while cuda._library().cuEventQuery(event):
                pass
        else:
            said = True
            tell(pipe, queued=order["queued"] // 2)
        cuda.call("cuEventRecord", event, stream)


def child_reader(pipe: socket.socket) -> None:
    """Exports memory and waits."""
    order, _ = hear(pipe)
    use(order["device"])
    size = order["size"]
    if order["legacy"]:
        address, handle = take(size), IpcHandle()
        cuda.call("cuIpcGetMemHandle", byref(handle), address)
        tell(pipe, handle=bytes(handle).hex())
    else:
        physical_memory = physical(order["device"], size)
        address = map_for(physical_memory, size, order["device"])
        tell(pipe, export(physical_memory))
    cuda.call("cuMemsetD8_v2", address, 0, size)
    while True:
        hear(pipe)


# --- the facts ---


def environment() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "kernel": platform.release(),
        "version": platform.version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "devices": [],
        "peer_access": {},
    }
    with suppress(Exception):
        import triton

        found["triton"] = triton.__version__
    version = c_int()
    cuda._library()
    cuda.call("cuDriverGetVersion", byref(version))
    found["driver_api"] = version.value
    count = torch.cuda.device_count()
    for index in range(count):
        of_device = torch.cuda.get_device_properties(index)
        attributes = {str(number): cuda.attribute(index, number) for number in (102, 103, 16, 40, 75)}
        device = {"name": of_device.name, "uuid": str(of_device.uuid), "attributes": attributes}
        found["devices"].append(device)
    for a in range(count):
        for b in range(count):
            if a != b:
                found["peer_access"][f"{a}->{b}"] = torch.cuda.can_device_access_peer(a, b)
    library = cuda._library()
    names = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemcpyWithAttributesAsync")
    found["functions"] = [name for name in names if hasattr(library, name)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found["SO_PEERPIDFD"] = code_of(lambda: ours.getsockopt(socket.SOL_SOCKET, 77))
    found["pidfd_open"] = code_of(lambda: os.pidfd_open(os.getpid()))
    found["peer_process"] = code_of(lambda: shared.peer_process(ours))
    found["memfd"] = code_of(lambda: shared.create(4096))
    theirs.close()
    with suppress(OSError):
        command = ["nvidia-smi", "topo", "-m"]
        found["topology"] = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    found["variables"] = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("CUDA", "PYTORCH", "NCCL", "TORCH")) and not value.startswith("/")  # no paths
    }
    return found


def share(legacy: bool, reader: int, writer: int, size: int = 256 * MIB, **variables: str) -> dict[str, Any]:
    """Export memory of a device, and let another process write to it from a device."""
    use(reader)
    message: dict[str, Any] = {"device": writer, "size": size}
    descriptor = None
    began = time.monotonic()
    if legacy:
        address, handle = take(size), IpcHandle()
        cuda.call("cuIpcGetMemHandle", byref(handle), address)
        message["handle"] = bytes(handle).hex()
    else:
        physical_memory = physical(reader, size)
        address = map_for(physical_memory, size, reader)
        descriptor = export(physical_memory)
    seconds = time.monotonic() - began
    cuda.call("cuMemsetD8_v2", address, 0, size)
    cuda.call("cuCtxSynchronize")
    with child("writer", **variables) as (_, pipe):
        tell(pipe, descriptor, **message)
        answer, _ = hear(pipe)
    answer["taken_s"] = seconds
    places = {"first": 0, "second": MIB, "middle": size // 2, "last": size - MIB}
    bytes_there = {name: to_host(address + at, 16).hex()[:8] for name, at in places.items()}
    answer["bytes"] = bytes_there
    expected = {"first": "5a" * 4, "second": "00" * 4, "middle": "00" * 4, "last": "5a" * 4}
    answer["right"] = bytes_there == expected
    return answer


def other() -> int:
    return min(1, count_devices() - 1)


def legacy_same_gpu() -> dict[str, Any]:
    return share(True, 0, 0)


def legacy_cross_gpu() -> dict[str, Any]:
    return share(True, other(), 0) if other() else {"skipped": "one GPU"}


def legacy_same_process() -> dict[str, Any]:
    use(0)
    address, handle, found = take(MIB), IpcHandle(), c_uint64()
    cuda.call("cuIpcGetMemHandle", byref(handle), address)
    return {"open": code_of(lambda: cuda.call("cuIpcOpenMemHandle_v2", byref(found), handle, 1))}


def descriptor_same_gpu() -> dict[str, Any]:
    return share(False, 0, 0)


def descriptor_cross_gpu() -> dict[str, Any]:
    return share(False, other(), 0) if other() else {"skipped": "one GPU"}


def descriptor_unseen_gpu() -> dict[str, Any]:
    """The writer sees its own GPU only."""
    return share(False, other(), 0, CUDA_VISIBLE_DEVICES="0") if other() else {"skipped": "one GPU"}


def descriptor_large() -> dict[str, Any]:
    """More bytes than 2**34, so that more elements than 2**32."""
    return share(False, other(), 0, size=20 * GIB)


def descriptor_same_process() -> dict[str, Any]:
    """Through Segue's own module, as two engines in one process would."""
    import torch

    from segue.memory import device_shared

    here, there = torch.device("cuda", 0), torch.device("cuda", other())
    mapping, descriptor = device_shared.create(100 * MIB + 123, there)
    tensor = device_shared.as_tensor(mapping, there).zero_()
    again = device_shared.open_descriptor(descriptor, 100 * MIB + 123, here)
    source = torch.full((MIB,), 7, dtype=torch.uint8, device=here)
    torch.cuda.synchronize(here)
    stream = torch.cuda.Stream(here)
    cuda.use_device(0)
    addresses = [np.array([address], np.uint64) for address in (again.address, source.data_ptr())]
    cuda.copy_pages(*addresses, MIB, stream.cuda_stream)
    torch.cuda.synchronize(here)
    free = torch.cuda.mem_get_info(there)[0]
    found = {
        "device_of_tensor": str(tensor.device),
        "different_addresses": mapping.address != again.address,
        "right": int(tensor.sum(dtype=torch.int64)) == 7 * MIB,
        "addition": code_of(tensor.add_(1).sum().item),
        "pointer_is_ours": tensor.data_ptr() == mapping.address,
    }
    again.close()
    del tensor, mapping
    os.close(descriptor)
    found["freed_bytes"] = torch.cuda.mem_get_info(there)[0] - free
    return found


def descriptor_wrong_size() -> dict[str, Any]:
    """Mapping more than there is has to fail."""
    use(0)
    descriptor = export(physical(0, 64 * MIB))
    sizes = {"equal": 64 * MIB, "less": 32 * MIB, "more": 128 * MIB}
    found = {
        name: code_of(lambda s=size: map_for(imported(descriptor), s, 0)) for name, size in sizes.items()
    }
    descriptor = shared.create(64 * MIB)
    found["a memfd"] = code_of(lambda: imported(descriptor))
    return found


def expandable_source() -> dict[str, Any]:
    """A source of torch's expandable segments can be copied; its legacy handle cannot be taken."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    use(0)
    source = torch.full((64 * MIB,), 9, dtype=torch.uint8, device="cuda:0")
    physical_memory = physical(other(), 64 * MIB)
    target = map_for(physical_memory, 64 * MIB, 0)
    copy = code_of(lambda: copy_now(target, source.data_ptr(), new_stream()))
    handle = IpcHandle()
    legacy = code_of(lambda: cuda.call("cuIpcGetMemHandle", byref(handle), source.data_ptr()))
    return {"copy": copy, "first": to_host(target, 8).hex(), "legacy_handle": legacy}


def reader_killed() -> dict[str, Any]:
    """What a writer's mapping is worth after the process that exported it is killed."""
    use(0)
    found: dict[str, Any] = {}
    source, stream = take(64 * MIB), new_stream()
    for legacy in (False, True):
        device = other()
        with child("reader") as (process, pipe):
            tell(pipe, device=device, size=64 * MIB, legacy=legacy)
            answer, descriptor = hear(pipe)
            free, total = c_size_t(), c_size_t()
            cuda.call("cuMemGetInfo_v2", byref(free), byref(total))
            try:
                if legacy:
                    opened = c_uint64()
                    handle = IpcHandle.from_buffer_copy(bytes.fromhex(answer["handle"]))
                    cuda.call("cuIpcOpenMemHandle_v2", byref(opened), handle, 1)
                    address = opened.value
                else:
                    assert descriptor is not None
                    address = map_for(imported(descriptor), 64 * MIB, 0)
            except Exception as error:
                found["legacy" if legacy else "descriptor"] = {"open": str(error)}
                continue
            before = code_of(lambda a=address: copy_now(a, source, stream))
            process.kill()
            process.wait()
            after = code_of(lambda a=address: copy_now(a, source, stream))
            time.sleep(0.3)
            later = code_of(lambda a=address: copy_now(a, source, stream))
            own = code_of(lambda: copy_now(take(64 * MIB), source, stream))
        result = {"before": before, "after": after, "later": later, "own memory": own}
        found["legacy" if legacy else "descriptor"] = result
    return found


def writer_killed() -> dict[str, Any]:
    """Kill a writer in mid-copy, and look for bytes of it after its pidfd is readable."""
    size = 64 * MIB
    use(other())
    physical_memory = physical(other(), size)
    address = map_for(physical_memory, size, other())
    rounds: list[dict[str, Any]] = []
    ends = time.monotonic() + LIMITS_S["writer_killed"] - 8
    stream = new_stream()
    while time.monotonic() < ends and len(rounds) < 16:
        queued = (8, 200, 4000)[len(rounds) % 3]
        descriptor = export(physical_memory)
        with child("writer") as (process, pipe):
            tell(pipe, descriptor, device=0, size=size)
            os.close(descriptor)
            answer, _ = hear(pipe)
            if "error" in answer:
                return {"error": answer["error"]}
            tell(pipe, do="flood", queued=queued)
            hear(pipe)
            time.sleep(random.uniform(0.005, 0.05))
            pidfd = os.pidfd_open(process.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            # Shows that the writer does write: a mark does not stay.
            cuda.call("cuMemsetD8_v2", address, 0x11, size)
            cuda.call("cuCtxSynchronize")
            time.sleep(0.01)
            writes = set(to_host(address, size)) != {0x11}
            began = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            poll.poll(5000)
            seconds = time.monotonic() - began
            cuda.call("cuMemsetD8Async", address, 0x22, size, stream)
            cuda.call("cuStreamSynchronize", stream)
            marked = time.monotonic() - began
            time.sleep(0.3)
            raw = to_host(address, size)
            os.close(pidfd)
        rounds.append(
            {
                "queued": queued,
                "was_writing": writes,
                "kill_to_pidfd_ms": round(1e3 * seconds, 2),
                "pidfd_to_marked_ms": round(1e3 * (marked - seconds), 3),
                "foreign_bytes": size - raw.count(0x22),
            }
        )
    return {"rounds": rounds}


# --- speed; every copy is from GPU 0 to `other()` ---


def timed(enqueue: Callable[[], None], stream: int, num_bytes: int, repeats: int = 3) -> dict[str, float]:
    best, host = 1e9, 1e9
    for _ in range(repeats + 1):
        began = time.monotonic()
        enqueue()
        queued = time.monotonic()
        cuda.call("cuStreamSynchronize", stream)
        best, host = min(best, time.monotonic() - began), min(host, queued - began)
    return {
        "GB/s": round(num_bytes / best / 1e9, 1),
        "ms": round(1e3 * best, 3),
        "host_ms": round(1e3 * host, 3),
    }


def pools(size: int) -> tuple[int, int, int]:
    """Source, target and stream."""
    use(0)
    return take(size), map_for(physical(other(), size), size, 0), new_stream()


def speed_copies() -> dict[str, Any]:
    """One copy per page; pages in an order that is not that of memory."""
    source, target, stream = pools(2 * GIB)
    found: dict[str, Any] = {"gpus": "two" if other() else "one"}
    for page in (4096, 65536, MIB, 7 * MIB // 2, 9 * MIB):
        for total in (MIB, 64 * MIB, GIB):
            count = min(total // page, 4096)
            if not count:
                continue
            pages = random.Random(1).sample(range(2 * GIB // page), count)

            def enqueue(pages: list[int] = pages, page: int = page) -> None:
                for at in pages:
                    copy_async(target + at * page, source + at * page, page, stream)

            found[f"{page} bytes x {count}"] = timed(enqueue, stream, page * count)
            with suppress(AttributeError):
                found[f"{page} bytes x {count}, batch"] = batch(source, target, stream, pages, page)
    return found


def batch(source: int, target: int, stream: int, pages: list[int], page: int) -> Any:
    """cuMemcpyBatchAsync_v2, which is one call for all pages."""
    function = cuda._library().cuMemcpyBatchAsync_v2
    function.argtypes = (
        c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p
    )  # fmt: skip
    count = len(pages)
    targets = (c_uint64 * count)(*[target + at * page for at in pages])
    sources = (c_uint64 * count)(*[source + at * page for at in pages])
    sizes = (c_size_t * count)(*[page] * count)
    attributes, first = BatchAttributes(order=1, flags=1), c_size_t(0)

    def enqueue() -> None:
        code = function(targets, sources, sizes, count, byref(attributes), byref(first), 1, stream)
        if code:
            raise RuntimeError(f"code {code}")

    try:
        return timed(enqueue, stream, page * count)
    except RuntimeError as error:
        return str(error)


def speed_rows() -> dict[str, Any]:
    """Half of the heads of each row, by two-dimensional copies of the copy engines."""
    source, target, stream = pools(GIB)
    found: dict[str, Any] = {}
    for width, pitches in (
        (256, (512, 256)),
        (1024, (2048, 1024)),
        (1024, (1024, 2048)),
        (4096, (8192, 4096)),
    ):
        rows = 36 * 2 * 64  # Qwen3-8B, 64 tokens
        page = rows * max(pitches)
        count = min(32, GIB // page)

        def enqueue(
            width: int = width,
            pitches: tuple[int, int] = pitches,
            page: int = page,
            count: int = count,
            rows: int = rows,
        ) -> None:
            for at in range(count):
                copy = Copy2D(
                    source_type=2, source=source + at * page, source_pitch=pitches[0],
                    target_type=2, target=target + at * page, target_pitch=pitches[1],
                    width=width, height=rows,
                )  # fmt: skip
                cuda.call("cuMemcpy2DAsync_v2", byref(copy), stream)

        name = f"{width} bytes of rows of {pitches[0]} to {pitches[1]}, {count} pages of {rows} rows"
        try:
            found[name] = timed(enqueue, stream, width * rows * count)
        except Exception as error:
            found[name] = str(error)
    return found


def speed_kernel() -> dict[str, Any]:
    """Segue's Triton kernel for slices of rows, and whole pages, by number of programs."""
    import torch

    from segue.disagg.layout import HeadRoute, PageShape, RowRuns, row_runs
    from segue.kernels.triton.page_slices import copy_slices

    source, target, _ = pools(GIB)
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream(0)
    found: dict[str, Any] = {}
    for heads in ((8, 4), (4, 8), (8, 8), (2, 1)):
        shapes = [PageShape(num_layers=36, page_size=64, num_heads=h, head_bytes=256) for h in heads]
        route = HeadRoute(source_rank=0, target_rank=0, source_head=0, target_head=0, num_heads=min(heads))
        runs = row_runs(route, *shapes)
        count = min(32, GIB // max(shape.page_bytes for shape in shapes))
        pages = torch.arange(count, dtype=torch.int64).repeat(2, 1).pin_memory()
        for programs in (2, 4, 8, 16, 32, 64):

            def enqueue(
                runs: RowRuns = runs,
                pages: torch.Tensor = pages,
                programs: int = programs,
            ) -> None:
                with torch.cuda.stream(stream):
                    table = pages.to("cuda:0", non_blocking=True)
                    copy_slices(
                        source,
                        target,
                        table,
                        num_rows=runs.num_rows,
                        source_row=runs.source_row,
                        target_row=runs.target_row,
                        run=runs.run,
                        num_programs=programs,
                    )

            num_bytes = count * shapes[0].num_rows * min(heads) * 256
            name = f"{heads[0]} to {heads[1]} heads, {count} pages, {programs} programs"
            try:
                found[name] = timed(enqueue, stream.cuda_stream, num_bytes)
            except Exception as error:
                found[name] = traceback.format_exc(limit=-3) + str(error)
                break
    return found


def local_speed() -> dict[str, Any]:
    """Whether kernels are as fast on memory with a descriptor as on memory of torch."""
    import torch

    from segue.memory import device_shared

    device = torch.device("cuda", 0)
    mapping, descriptor = device_shared.create(4 * GIB, device)
    os.close(descriptor)
    found = {}
    tensors = {
        "torch": torch.zeros(4 * GIB, dtype=torch.uint8, device=device),
        "descriptor": device_shared.as_tensor(mapping, device).zero_(),
    }
    for name, tensor in tensors.items():
        values = tensor.view(torch.bfloat16)
        rows = values.view(-1, 1024)
        indices = torch.randperm(len(rows), device=device)[: len(rows) // 4]
        found[f"{name}, sum"] = clock(lambda v=values: v.sum(), 4 * GIB)
        found[f"{name}, gather of rows"] = clock(lambda r=rows, i=indices: r[i], 2 * GIB)
    return found


def clock(work: Callable[[], Any], num_bytes: int) -> str:
    import torch

    best = 1e9
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return f"{num_bytes / best / 1e6:.0f} GB/s"


def run(name: str, seconds: float) -> dict[str, Any]:
    """Find a fact in a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.cuda_ipc_facts", "--fact", name]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        errors += f"\nended after {seconds:.0f} s"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "exit_code": process.returncode}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if lines:
        found["result"] = json.loads(lines[-1].removeprefix("RESULT "))
    if process.returncode or not lines:
        found["errors"] = errors[-3000:]
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        pipe = socket.socket(fileno=int(sys.argv[3]))
        {"writer": child_writer, "reader": child_reader}[sys.argv[2]](pipe)
        return
    if sys.argv[1:2] == ["--fact"]:
        print("RESULT", json.dumps(globals()[sys.argv[2]]()))
        return
    path = Path(os.environ.get("OUT", ".")) / "cuda_ipc_facts.json"
    ends = time.monotonic() + TOTAL_S
    facts: dict[str, Any] = {}
    for name in sys.argv[1:] or LIMITS_S:
        left = ends - time.monotonic()
        facts[name] = run(name, min(LIMITS_S[name], left)) if left > 3 else {"skipped": "no time is left"}
        path.write_text(json.dumps(facts, indent=1))
        print(name, json.dumps(facts[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
