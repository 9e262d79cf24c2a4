"""Decodes the tensors in the body of a request: values, or handles to GPU memory that another process owns.

A payload is safetensors bytes, or a pickle as SGLang's clients make it: a list of (name, tensor), or a
flattened bucket, in which one tensor holds the bytes of all tensors, and records give the range of each.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import safetensors.torch
import torch
from msgspec import structs
from safetensors import SafetensorError
from torch import Tensor

from segue.errors import InvalidRequestError
from segue.memory.device_shared import visible_uuids
from segue.weight_update.payload.pickle_machine import Record, refusal
from segue.weight_update.payload.unpickle import (
    CudaView,
    PerRank,
    TensorMetadata,
    View,
    load,
    read_saved,
)

Form = Literal["safetensors", "flattened_bucket"]
NamedTensors = list[tuple[str, Tensor]]

BASE64_PIECE = 1 << 20  # characters, a multiple of four

# Of torch's CUDA IPC: bytes of an event handle, and reference counters in the shared file.
_EVENT_HANDLE = 64
_NUM_COUNTERS = 10_000
_MAX_NAME = 1024  # characters of a tensor's name
_BYTES_PER_TENSOR = 8  # an honest pickle has more bytes per tensor, even for tensors that share memory
_FREE_TENSORS = 64  # allowed in addition
_COUNTER_FILE = re.compile(rb"/torch_[A-Za-z0-9_]{1,64}")


def from_base64(text: str) -> bytes:
    """Decode a payload, a piece at a time: one call into C would hold up the steps for as long as it takes.

    The frontend has refused what is not base64 (:func:`segue.api.weights.check_base64`).
    """
    payload = bytearray()
    for start in range(0, len(text), BASE64_PIECE):
        payload += base64.b64decode(text[start : start + BASE64_PIECE], validate=True)
    return bytes(payload)


def decode(payload: bytes, device: torch.device, *, rank: int = 0) -> NamedTensors:
    """Returns the names and tensors of ``payload``: values on the CPU, and handles as tensors on their GPU.

    Tensors in GPU memory are the sender's: copy and drop them before the sender may change them. A name may
    occur twice.

    Args:
        payload: the bytes, decoded from base64.
        device: of this rank; handles to GPU memory need a CUDA device.
        rank: this tensor-parallel rank, for a pickle with one tensor per rank.

    Raises:
        InvalidRequestError: the payload has no known form, is truncated, or contradicts its own description.
    """
    if _is_safetensors(payload):
        try:
            return list(safetensors.torch.load(payload).items())
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"the payload is not a complete safetensors file ({error}); send the whole file"
            ) from error
    if payload[:1] != pickle.PROTO:
        raise refusal(f"the payload ({len(payload)} bytes) is neither safetensors nor a pickle")
    builder = _TensorBuilder(device, rank, len(payload) // _BYTES_PER_TENSOR + _FREE_TENSORS)
    try:
        return builder.tensors(load(payload))
    except (RuntimeError, TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
        raise refusal(f"the payload's tensors cannot be built ({str(error)[:300]})") from error


def encode(named_tensors: Iterable[tuple[str, Tensor]], form: Form = "safetensors") -> bytes:
    """Returns a payload for :func:`decode`: values, or for a "flattened_bucket" on a GPU a handle to a copy.

    The copy is one new tensor. torch keeps it until the reader has dropped the decoded tensors, and frees it
    at the next ``torch.cuda.ipc_collect()``.
    """
    tensors = [(name, tensor.detach()) for name, tensor in named_tensors]
    if form == "safetensors":
        # Cloned, since tied weights share memory, which the format refuses.
        return safetensors.torch.save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors})
    return pickle.dumps(_bucket(tensors))


@dataclass
class FlattenedTensorMetadata:
    """A tensor's range in a flattened bucket; class and fields have SGLang's names."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int  # bytes
    end_idx: int  # bytes
    numel: int  # bytes


class _InGpuMemory:
    """A tensor that pickles as a handle to GPU memory, with its GPU's UUID instead of the index."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        _, arguments = reduce_tensor(self.tensor)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return rebuild_cuda_tensor, (*arguments[:6], uuid, *arguments[7:])  # argument 6 is the device's index


def _bucket(tensors: NamedTensors) -> dict[str, Any]:
    """Returns the content of a pickled flattened bucket: all bytes end to end, and each tensor's range."""
    if not tensors:
        return {"flattened_tensor": None, "metadata": []}
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])
    metadata, end = [], 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start))
    return {"flattened_tensor": _InGpuMemory(flat) if flat.is_cuda else flat, "metadata": metadata}


def _is_safetensors(payload: bytes) -> bool:
    """Whether a payload begins like a safetensors file: 8 bytes with its length, then a JSON header."""
    return (
        len(payload) > 8
        and payload[8:9] == b"{"
        and int.from_bytes(payload[:8], "little") <= len(payload) - 8
    )


class _TensorBuilder:
    """Builds tensors from unpickled descriptions, and checks that each lies within its storage.

    A storage of the payload is read and copied once, however often the payload refers to it. The payload is
    not trusted: every size in it is checked before memory is used accordingly.
    """

    def __init__(self, device: torch.device, rank: int, max_tensors: int) -> None:
        """Build for tensor-parallel rank `rank`; a payload of more than `max_tensors` tensors is refused."""
        self._device, self._rank, self._max_tensors = device, rank, max_tensors
        # The keys are ids of bytes objects (a hash would read all bytes in one call into C); the values keep
        # these alive, so that no id is reused.
        self._storages: dict[int, tuple[bytes, torch.dtype, Tensor]] = {}
        self._loaded: dict[int, tuple[bytes, Any]] = {}  # this rank's pickles

    def tensors(self, content: Any) -> NamedTensors:
        """Returns the named tensors of an unpickled payload, a list of pairs or a flattened bucket."""
        if isinstance(content, dict) and content.keys() == {"flattened_tensor", "metadata"}:
            return self._unflatten(**content)
        if not isinstance(content, list):
            raise refusal(f"the payload is a pickled {type(content).__name__}")
        self._check_number(content)
        return [self._named(pair) for pair in content]

    def _named(self, pair: Any) -> tuple[str, Tensor]:
        """Returns one name and its tensor; of a tensor that was pickled per rank, this rank's."""
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise refusal("the payload is a list with items that are not (name, tensor)")
        name, what = pair
        _check_name(name)
        if isinstance(what, Record) and isinstance(what.fields, PerRank):
            data = what.fields.values[self._rank]
            if id(data) not in self._loaded:
                self._loaded[id(data)] = data, load(data)
            what = self._loaded[id(data)][1]
        return name, self._tensor(name, what)

    def _check_number(self, items: list[Any]) -> None:
        """Refuse more tensors than a payload of this size can honestly have: each costs time and memory."""
        if len(items) > self._max_tensors:
            raise refusal(
                f"the payload has {len(items)} tensors, but its size allows for {self._max_tensors} at most"
            )

    def _tensor(self, name: str, what: Any) -> Tensor:
        """Builds one tensor from a description of the pickle, in host memory or on its sender's GPU."""
        if isinstance(what, View):
            dtype, raw = self._storage(what.storage.data)
            dtype = what.dtype or dtype
            # `raw` is uint8: drop the bytes of an incomplete last element before viewing it as `dtype`.
            values = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            _check_view(name, what, values.numel())
            return values.as_strided(what.size, what.stride, what.offset)
        if isinstance(what, CudaView):
            return self._in_gpu_memory(name, what)
        raise refusal(f"the payload has a {type(what).__name__} instead of tensor {name[:80]!r}")

    def _storage(self, data: bytes) -> tuple[torch.dtype, Tensor]:
        """Returns a storage's dtype, and a copy of its bytes as `uint8[n]`; empty `data` has no bytes."""
        if id(data) not in self._storages:
            dtype, content = read_saved(data) if data else (torch.uint8, memoryview(b""))
            raw = torch.empty(len(content), dtype=torch.uint8)
            raw.numpy()[:] = content
            self._storages[id(data)] = data, dtype, raw
        return self._storages[id(data)][1:]

    def _unflatten(self, flattened_tensor: Any, metadata: Any) -> NamedTensors:
        """Returns the tensors of a flattened bucket: each record of `metadata` names a range of its bytes."""
        if not isinstance(metadata, list) or not all(
            isinstance(item, Record) and isinstance(item.fields, TensorMetadata) for item in metadata
        ):
            raise refusal("the bucket's metadata is not a list of FlattenedTensorMetadata")
        if not metadata:
            return []
        flat = self._tensor("flattened_tensor", flattened_tensor)
        if flat.dim() != 1 or not flat.is_contiguous():
            raise InvalidRequestError(
                f"flattened_tensor has shape {list(flat.shape)}; send a contiguous tensor of one dimension"
            )
        self._check_number(metadata)
        raw, pieces, num_bytes = flat.view(torch.uint8), [], 0
        for item in metadata:
            name, piece = _piece(raw, item.fields, unit=flat.itemsize)
            num_bytes += piece.nbytes
            if num_bytes > raw.numel():  # pieces may be copied, so this limits the memory of the copies
                raise InvalidRequestError(
                    f"the tensors of the bucket have more than its {raw.numel()} bytes: some overlap. Give "
                    "each tensor bytes of its own"
                )
            pieces.append((name, piece))
        return pieces

    def _in_gpu_memory(self, name: str, what: CudaView) -> Tensor:
        """Returns a tensor in the sender's GPU memory, opened by CUDA IPC without a copy."""
        if self._device.type != "cuda":
            raise InvalidRequestError(
                f"tensor {name[:80]!r} is in GPU memory, but this engine runs on {self._device.type}; send "
                "safetensors bytes"
            )
        if not what.storage_bytes:
            _check_view(name, what, 0)
            return torch.empty(what.size, dtype=what.dtype, device=self._device)
        _check_handles(name, what)
        _check_view(name, what, what.storage_bytes // what.dtype.itemsize)
        device = torch.device("cuda", _device_index(what.device))
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, what.handle, what.storage_bytes, what.storage_offset,
            what.counter_handle, what.counter_offset, what.event_handle, what.needs_event,
        )  # fmt: skip
        _check_allocation(name, storage)
        return torch.empty(0, dtype=what.dtype, device=device).set_(
            storage, what.offset, what.size, what.stride
        )


def _check_name(name: str) -> None:
    """Refuse a name of more than `_MAX_NAME` characters, which no checkpoint has."""
    if len(name) > _MAX_NAME:
        raise InvalidRequestError(
            f"the payload has a tensor called {name[:80]!r}, {len(name)} characters; use text of at most "
            f"{_MAX_NAME} characters as names"
        )


def _is_small(shape: list[int]) -> bool:
    """Whether the number of elements fits torch, even if sizes of 0 count as 1."""
    return prod(max(size, 1) for size in shape) < 1 << 62


def _check_view(name: str, view: View | CudaView, num_items: int) -> None:
    """Check that a view lies within its storage's elements, and repeats none of them (a stride of 0)."""
    size, stride, offset = view.size, view.stride, view.offset
    is_sound = (
        len(size) == len(stride)
        and _is_small(size)
        and prod(size) <= num_items
        and (0 in size or offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) < num_items)
    )
    if not is_sound:
        raise InvalidRequestError(
            f"tensor {name[:80]!r} does not lie within its storage of {num_items} elements; send a "
            "contiguous tensor that does"
        )


def _piece(raw: Tensor, record: TensorMetadata, unit: int) -> tuple[str, Tensor]:
    """Returns name and tensor of one record of a bucket; the record's indices count ``unit`` bytes."""
    name, shape, dtype, start, end = structs.astuple(record)
    _check_name(name)
    is_sound = (
        _is_small(shape)
        and start <= end <= raw.numel() // unit
        and prod(shape) * dtype.itemsize == (end - start) * unit
    )
    if not is_sound:
        raise InvalidRequestError(
            f"tensor {name[:80]!r} does not fill its range of the bucket's {raw.numel()} bytes; make the "
            "bucket's metadata and its bytes together"
        )
    values = raw[start * unit : end * unit]
    if values.data_ptr() % dtype.itemsize or values.storage_offset() % dtype.itemsize:
        values = values.clone()
    return name, values.view(dtype).view(shape)


def _check_handles(name: str, what: CudaView) -> None:
    """Refuse handles that torch would use unchecked: it writes a counter in a file that the sender names."""
    counter, event = what.counter_handle, what.event_handle
    is_sound = (
        None not in (what.handle, what.needs_event)
        and what.counter_offset is not None
        and what.counter_offset < _NUM_COUNTERS
        and event is not None
        and (len(event) == _EVENT_HANDLE or not what.needs_event)
        and counter is not None
        and _COUNTER_FILE.fullmatch(counter) is not None
        and _shared_file_size(counter) >= _NUM_COUNTERS * 8
    )
    if not is_sound:
        raise InvalidRequestError(
            f"tensor {name[:80]!r} has no valid handle to GPU memory; its process must be alive, on this "
            "machine and in the same IPC namespace, and hold the tensor until the update is answered"
        )


def _shared_file_size(handle: bytes) -> int:
    """Returns the bytes of the shared-memory file with torch's reference counters; 0 if there is none."""
    try:
        return os.stat(b"/dev/shm" + handle).st_size
    except OSError:
        return 0


def _device_index(device: Any) -> int:
    """Returns this process's index of the sender's GPU, given as an index or as a UUID."""
    uuids = visible_uuids()
    if type(device) is int and 0 <= device < len(uuids):
        return device
    if device in uuids:
        return uuids.index(device)
    raise InvalidRequestError(
        f"a tensor is on GPU {str(device)[:80]}, but this rank sees {', '.join(uuids)}: let sender and "
        "engine see the same GPUs (CUDA_VISIBLE_DEVICES)"
    )


def _check_allocation(name: str, storage: torch.UntypedStorage) -> None:
    """Check that a storage lies within mapped memory, whose size only the driver knows.

    The memory may be several adjacent allocations, as with torch's expandable segments.
    """
    covered = storage.data_ptr()
    end = covered + storage.nbytes()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    address_range = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    while covered < end:
        code = address_range(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(covered))
        if code != 0 or base.value + size.value <= covered:
            raise InvalidRequestError(
                f"tensor {name[:80]!r} claims {storage.nbytes()} bytes of GPU memory, but its allocation has "
                f"fewer (the driver's answer: {code}). Send it from the process that owns it"
            )
        covered = base.value + size.value
