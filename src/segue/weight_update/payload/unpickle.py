"""Reads a pickle of tensors into plain descriptions; nothing that the pickle names is imported or called.

An explicit list maps the allowed globals to the small classes here. The number and types of their arguments
are checked, so that a description stays small. Whether it fits its storage is checked where tensors are built
from it (`decode.py`).
"""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct, structs

from segue.dtypes import ITEM_SIZES
from segue.errors import InvalidRequestError
from segue.weight_update.payload.pickle_machine import (
    MAX_ITEMS,
    Function,
    PickleMachine,
    converted,
    refusal,
)

_DTYPES = {name: getattr(torch, name) for name in ITEM_SIZES}
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sizes = Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
_Hooks = Annotated[dict[Any, Any], Meta(max_length=0)] | None  # of an honest tensor there are none


class SavedStorage(Struct):
    """A storage in `torch.save`'s format from before zip files; see :func:`read_saved`."""

    data: bytes  # empty: a storage of no bytes


class View(Struct, tag=True):
    """A tensor in a storage; ``offset`` and ``stride`` count elements. Only the types are checked."""

    storage: SavedStorage
    dtype: torch.dtype | None  # None: the storage's dtype
    offset: Count
    size: Sizes
    stride: Sizes


class CudaView(Struct, tag=True):
    """A tensor in another process's GPU memory; the fields have the order of torch's reduction.

    Only the types are checked.
    """

    tensor_class: str
    size: Sizes
    stride: Sizes
    offset: Count  # elements
    storage_class: str
    dtype: torch.dtype
    device: int | str  # the sender's device index, or the UUID
    handle: bytes | None
    storage_bytes: Count
    storage_offset: Count  # bytes from the start of the allocation
    requires_grad: bool
    counter_handle: bytes | None
    counter_offset: Count | None
    event_handle: bytes | None
    needs_event: bool | None


class TensorMetadata(Struct):
    """A tensor's range in a flattened bucket."""

    name: str
    shape: Sizes
    dtype: torch.dtype
    start_idx: Count
    end_idx: Count


class PerRank(Struct):
    """A tensor that was pickled once per rank."""

    values: list[bytes]


def _inline(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> View:
    """Describes a call of `_rebuild_tensor_v2`, for a tensor whose storage's bytes are in the pickle."""
    return View(storage, None, offset, size, stride)


def _first(tensor: Any, *_: Any) -> Any:
    """Describes a call of `_rebuild_parameter` by the tensor in it."""
    return tensor


def _shared(_: Any, storage: Any, metadata: Any) -> View:
    """Describes a call of `rebuild_tensor`: class, storage (perhaps with a dtype), and the view's shape."""
    offset, size, stride, _ = metadata
    storage, dtype = storage if type(storage) is tuple else (storage, None)
    return View(storage, dtype, offset, size, stride)


_REDUCTIONS = "torch.multiprocessing.reductions"
_CUDA = Function("rebuild_cuda_tensor", CudaView, *(field.type for field in structs.fields(CudaView)))
# Types of arguments: of a storage in `rebuild_tensor`, and of all arguments of two functions.
_Storage = SavedStorage | tuple[SavedStorage, torch.dtype]
_INLINE = (SavedStorage, Count, Sizes, Sizes, bool, _Hooks, _Hooks)
_PARAMETER = (View | CudaView, bool, _Hooks)
# Magic number, protocol, (…, key, device, number of elements, view), keys.
_Saved = tuple[int, int, tuple[Literal["storage"], torch.dtype, str, str, Count, None], tuple[str]]
_Reduced = tuple[Count, Sizes, Sizes, bool]  # offset, size, stride, requires_grad

# The stand-ins for all allowed globals: functions, dtypes, and classes, of which only the names are needed.
_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): Function("Size", tuple, Sizes),
    ("collections", "OrderedDict"): Function("OrderedDict", dict),
    ("torch._utils", "_rebuild_tensor_v2"): Function("_rebuild_tensor_v2", _inline, *_INLINE, least=4),
    ("torch._utils", "_rebuild_parameter"): Function("_rebuild_parameter", _first, *_PARAMETER, least=1),
    ("torch.storage", "_load_from_bytes"): Function("_load_from_bytes", SavedStorage, bytes),
    **{
        (_REDUCTIONS, each.name): each
        for each in (
            Function("rebuild_tensor", _shared, str, _Storage, _Reduced),
            Function("rebuild_storage_empty", lambda _: SavedStorage(b""), str),
            Function("rebuild_typed_storage", lambda *both: both, SavedStorage, torch.dtype),
            _CUDA,
        )
    },
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch.storage", "TypedStorage"): "TypedStorage",
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
}

# Allowed in any module: clients have copies of SGLang's code in modules of their own.
_BY_NAME: dict[str, Any] = {
    "_rebuild_cuda_tensor_modified": _CUDA,
    "FlattenedTensorMetadata": TensorMetadata,
    "LocalSerializedTensor": PerRank,
}

_IN_SHARED_MEMORY = ("rebuild_storage_fd", "rebuild_storage_filename")
_MAX_SHOWN = 120  # characters of a refused name


def load(payload: bytes) -> Any:
    """Returns the value of ``payload``, one pickle: lists, dicts, numbers, and the classes of this module.

    Only its leaves are shared; a payload of n bytes takes O(n) time and memory.

    Raises:
        InvalidRequestError: it is not a pickle of tensors, or too large.
    """
    return _read(PickleMachine(io.BytesIO(payload), resolve))


def read_saved(data: bytes) -> tuple[torch.dtype, memoryview]:
    """Returns the dtype and the bytes of a storage in the format of :class:`SavedStorage`.

    Raises:
        InvalidRequestError: as for :func:`load`, or the parts contradict each other.
    """
    file = io.BytesIO(data)
    magic, protocol, _, storage, keys = (
        _read(PickleMachine(file, _resolve_saved, has_persistent_ids=True)) for _ in range(5)
    )
    magic, protocol, (_, dtype, key, _, count, _), (listed,) = converted(
        (magic, protocol, storage, keys), _Saved, "has an inlined storage that is not in torch.save's format"
    )
    if (magic, protocol) != (0x1950A86A20F9469CFC6C, 1001):
        raise refusal("an inlined storage is not in torch.save's format")
    content = memoryview(data)[file.tell() :]
    # There is one storage: its number of elements (8 bytes) and their bytes follow the pickles.
    is_whole = key == listed and int.from_bytes(content[:8], "little") == count
    if not is_whole or len(content) != 8 + count * dtype.itemsize:
        raise refusal(f"an inlined storage of {len(data)} bytes contradicts its own header")
    return dtype, content[8:]


def resolve(module: str, name: str) -> Any:
    """Returns the stand-in for ``module.name``.

    Raises:
        InvalidRequestError: it is not on the list of allowed globals.
    """
    found = _GLOBALS.get((module, name), _BY_NAME.get(name))
    if found is not None:
        return found
    if module == _REDUCTIONS and name in _IN_SHARED_MEMORY:
        raise refusal(
            "the payload's tensors are in the sender's shared memory, which only its own children can open"
        )
    shown = f"{module[:_MAX_SHOWN]}.{name}"[:_MAX_SHOWN]
    raise refusal(f"the payload's pickle refers to {shown!r}, which is not allowed")


def _resolve_saved(module: str, name: str) -> Any:
    """Returns what :func:`resolve` does, or the dtype of a storage class."""
    return _STORAGES[name] if module == "torch" and name in _STORAGES else resolve(module, name)


def _read(machine: PickleMachine) -> Any:
    """Returns what `machine` reads; any error of broken bytes becomes an `InvalidRequestError`."""
    try:
        return machine.load()
    except InvalidRequestError:
        raise
    except Exception as error:  # any error of pickletools or the machine for broken bytes
        text = f"{type(error).__name__}: {str(error)[:_MAX_SHOWN]}"
        raise refusal(f"the payload is not a pickle of tensors ({text})") from error
