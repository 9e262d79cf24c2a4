"""A pickle of tensors read into plain descriptions: nothing that it names is imported or called.

Two locks. The opcodes are looked through first: only those that pickles of tensors consist of, and not many
of them, so that a few bytes cannot ask for gigabytes. Then globals resolve to nothing but the small classes
here, by an explicit list; what they describe is checked by who builds tensors of it (`payload.py`).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any

import torch

from segue.errors import InvalidRequestError

REMEDY = (
    "send safetensors bytes, or what SGLang's clients send: a list of (name, tensor), or a flattened bucket, "
    "whose tensors lie in GPU memory or were pickled by pickle.dumps"
)

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip

_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL",
    "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID",
}  # fmt: skip
_MAX_OPCODES = 2_000_000  # about 35 a tensor of a bucket
_MAX_SHOWN = 120  # characters of a refused name


@dataclass(slots=True)
class SavedStorage:
    """A storage as `torch.save` wrote it before it wrote zip files; see :func:`read_saved`."""

    data: Any


@dataclass(slots=True)
class EmptyStorage:
    """A storage of no bytes."""


@dataclass(slots=True)
class View:
    """A tensor in a storage; ``offset`` and ``stride`` count elements. Nothing is checked yet."""

    storage: Any
    dtype: Any  # None: that of the storage
    offset: Any
    size: Any
    stride: Any


@dataclass(slots=True)
class CudaView:
    """A tensor in another process's GPU memory, in the order of torch's reduction. Nothing is checked yet."""

    tensor_class: Any
    size: Any
    stride: Any
    offset: Any  # elements
    storage_class: Any
    dtype: Any
    device: Any  # index as the sender counts, or the UUID
    handle: Any
    storage_bytes: Any
    storage_offset: Any  # bytes from the start of the allocation
    requires_grad: Any
    counter_handle: Any
    counter_offset: Any
    event_handle: Any
    needs_event: Any


class Record:
    """An object of a data class; ``fields`` is what the pickle says, unchecked."""

    __slots__ = ("fields",)
    fields: Any

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class TensorMetadata(Record):
    """A tensor's place in a flattened bucket."""


class PerRank(Record):
    """A tensor pickled once for each rank."""


class _Call:
    """What stands for a function, so that a pickle cannot get hold of the function itself."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _inline(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> View:
    return View(storage=storage, dtype=None, offset=offset, size=size, stride=stride)


def _shared(_: Any, storage: Any, metadata: Any) -> View:
    offset, size, stride, _ = metadata
    dtype = None
    if type(storage) is tuple:
        storage, dtype = storage
    return View(storage=storage, dtype=dtype, offset=offset, size=size, stride=stride)


_REDUCTIONS = "torch.multiprocessing.reductions"

_CALLS = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor_v2"): _inline,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch.storage", "_load_from_bytes"): SavedStorage,
    (_REDUCTIONS, "rebuild_tensor"): _shared,
    (_REDUCTIONS, "rebuild_storage_empty"): lambda _: EmptyStorage(),
    (_REDUCTIONS, "rebuild_typed_storage"): lambda storage, dtype: (storage, dtype),
    (_REDUCTIONS, "rebuild_cuda_tensor"): CudaView,
}

# Clients have copies of SGLang's code in modules of their own.
_BY_NAME: dict[str, Any] = {
    "_rebuild_cuda_tensor_modified": CudaView,
    "FlattenedTensorMetadata": TensorMetadata,
    "LocalSerializedTensor": PerRank,
}

_CLASSES = frozenset(
    [
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
    ]
)

_IN_SHARED_MEMORY = ("rebuild_storage_fd", "rebuild_storage_filename")


def load(payload: bytes) -> Any:
    """What ``payload``, one pickle, describes: lists, dicts, numbers, and the classes of this module.

    Raises:
        InvalidRequestError: it is no pickle, not one of tensors, or too large a one.
    """
    return _load(io.BytesIO(payload), _Unpickler)


def read_saved(data: bytes) -> tuple[torch.dtype, memoryview]:
    """The dtype and the bytes of a storage in the format that :class:`SavedStorage` has.

    Raises:
        InvalidRequestError: as :func:`load`, or its parts do not fit together.
    """
    file = io.BytesIO(data)
    magic, protocol, _, storage, keys = (_load(file, _SavedUnpickler) for _ in range(5))
    if magic != 0x1950A86A20F9469CFC6C or protocol != 1001:
        raise InvalidRequestError(f"an inlined storage is not in torch.save's format; {REMEDY}")
    kind, dtype, key, _, count, view = storage
    content = memoryview(data)[file.tell() :]
    if (
        (kind, view, keys) != ("storage", None, [key])
        or not isinstance(dtype, torch.dtype)
        or type(count) is not int
        or int.from_bytes(content[:8], "little") != count
        or len(content) != 8 + count * dtype.itemsize
    ):
        raise InvalidRequestError(
            f"an inlined storage of {len(data)} bytes does not have what its header says; {REMEDY}"
        )
    return dtype, content[8:]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What stands for ``module.name`` if it is on the list."""
        if (module, name) in _CALLS:
            return _Call(_CALLS[module, name])
        if name in _BY_NAME:
            known = _BY_NAME[name]
            return known if issubclass(known, Record) else _Call(known)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in _CLASSES:
            return name
        if module == _REDUCTIONS and name in _IN_SHARED_MEMORY:
            raise InvalidRequestError(
                "the payload's tensors lie in the sender's shared memory, which only its own children can "
                f"open; {REMEDY}"
            )
        shown = f"{module}.{name}"[:_MAX_SHOWN]
        raise InvalidRequestError(f"the payload's pickle refers to {shown!r}, which is not allowed; {REMEDY}")


class _SavedUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The dtype of a storage class."""
        return (
            _STORAGES[name] if module == "torch" and name in _STORAGES else super().find_class(module, name)
        )

    def persistent_load(self, pid: Any) -> Any:
        """The description that stands for a storage."""
        return pid


def _load(file: io.BytesIO, unpickler: type[_Unpickler]) -> Any:
    start = file.tell()
    try:
        _check_opcodes(file)
        file.seek(start)
        return unpickler(file).load()
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever a crafted pickle makes the unpickler stumble over
        raise InvalidRequestError(
            f"the payload is no pickle of tensors ({type(error).__name__}: {str(error)[:_MAX_SHOWN]}); "
            + REMEDY
        ) from error


def _check_opcodes(file: io.BytesIO) -> None:
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if opcode.name not in _OPCODES:
            raise InvalidRequestError(
                f"the payload's pickle has opcode {opcode.name}, which is not allowed; {REMEDY}"
            )
        if count >= _MAX_OPCODES:
            raise InvalidRequestError(
                f"the payload's pickle has more than {_MAX_OPCODES} opcodes; send several smaller ones"
            )
        if opcode.name.endswith("PUT") and argument > count:  # the memo is an array, allocated up to here
            raise InvalidRequestError(f"the payload's pickle skips to memo entry {argument}; {REMEDY}")
