"""Tensors over addresses at which slabs are mapped, unmapped and mapped again.

DLPack takes any address of the host or of a CUDA device, and does not look whether something is mapped there.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_DEVICES = {"cpu": 1, "cuda": 2}  # kDLCPU, kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),  # NULL: the tensor is contiguous
        ("byte_offset", c_uint64),
    )


class _ManagedTensor(Structure):
    """``DLManagedTensor``, and behind it the shape that it points to."""

    _fields_ = (("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p), ("length", c_int64))


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = c_void_p, (c_size_t,)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
_NAME = c_char_p(b"dltensor")  # the capsule keeps the pointer


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the `num_bytes` bytes at an address as a tensor of `uint8`, without taking hold of the memory.

    Nothing need be mapped there yet; only an access to the tensor's values needs it. Whoever owns the memory
    keeps the address valid as long as the tensor, or a view of it, is used.
    """
    assert num_bytes > 0, "a tensor over no bytes has no address"
    raw = _libc.malloc(ctypes.sizeof(_ManagedTensor))
    managed = _ManagedTensor.from_address(raw)
    managed.tensor = _DLTensor(
        data=address,
        device_type=_DEVICES[device.type],
        device_id=device.index or 0,
        ndim=1,
        type_code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=raw + _ManagedTensor.length.offset,
    )
    managed.context = None
    # The description is freed with the tensor, the memory is not. A function of C needs no GIL, so that the
    # tensor may also be freed by a thread without it, or after the interpreter.
    managed.deleter = ctypes.cast(_libc.free, c_void_p)
    managed.length = num_bytes
    tensor: Tensor = from_dlpack(_new_capsule(raw, _NAME, None))
    return tensor
