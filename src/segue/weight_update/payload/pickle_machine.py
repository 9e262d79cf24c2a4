"""A reader of pickles that runs no code: Python's own unpickler, with few opcodes and with limits.

`pickle._Unpickler` is the standard library's unpickler in Python. It reads each opcode by a method, and only
these methods make or call anything. Here only the opcodes of pickled tensors are allowed, and those that make
objects, call functions or share values have methods of ours.

`pickle.Unpickler`, in C, has no place for such checks: it lets a payload use a list or a tuple in several
places. A few bytes can then describe a value that takes hours to compare, to hash or to print, or gigabytes
to copy. Here, a payload of n bytes makes a tree of at most O(n) plain values. Only leaves may be shared:
numbers, text, bytes, descriptions, and tuples of these.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from pickle import _Unpickler
from typing import Any

import msgspec

from segue.errors import InvalidRequestError

_REMEDY = (
    "send safetensors bytes, or what SGLang's clients send: a list of (name, tensor), or a flattened bucket, "
    "whose tensors lie in GPU memory or were pickled by pickle.dumps"
)

MAX_ITEMS = 64  # items of a tuple, arguments of a call; rebuild_cuda_tensor has 15
_MAX_OPCODES = 2_000_000  # a bucket has about 35 per tensor
_MAX_KEY = 64  # characters of a dict's key; all keys are names of fields
_MAX_SHOWN = 120  # characters of the payload in an error message
_BYTES_PER_OBJECT = 8  # an honest payload has more bytes per list, dict, mark or call
_FREE_OBJECTS = 64  # allowed in addition


class Function:
    """Stands for a function that a pickle names; the pickle never gets the function itself."""

    def __init__(self, name: str, make: Callable[..., Any], *kinds: Any, least: int | None = None) -> None:
        """Stand for the function ``name``, whose calls ``make`` replaces with a description.

        ``kinds``: the types of the arguments; ``least``: the number of required ones, None: all.
        """
        # A struct with one field per argument, by which msgspec checks the number and types of a call's.
        self.name, self._make = name, make
        fields: list[Any] = [(f"argument{index}", kind) for index, kind in enumerate(kinds[:least])]
        fields += [(f"optional{index}", kind, None) for index, kind in enumerate(kinds[len(fields) :])]
        self._arguments = msgspec.defstruct(name, fields, array_like=True, forbid_unknown_fields=True)

    def call(self, arguments: Any) -> Any:
        """Returns the description that a call with ``arguments`` makes.

        Raises:
            InvalidRequestError: this function takes another number of arguments, or other types.
        """
        converted(arguments, self._arguments, f"calls {self.name} with arguments that do not fit")
        return self._make(*arguments)


class Record:
    """An object of a data class; its fields must be those of the struct ``kind``, and have their types."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._kind = kind
        self._fields: msgspec.Struct | None = None

    @property
    def fields(self) -> msgspec.Struct:
        """The fields, as an instance of the struct."""
        if self._fields is None:
            raise _refusal("has an object without fields")
        return self._fields

    def build(self, state: Any) -> None:
        """Set the fields, once."""
        if self._fields is not None:
            raise _refusal("sets fields of an object twice")
        self._fields = converted(state, self._kind, "has an object whose fields do not fit")


def converted(value: Any, kind: Any, complaint: str) -> Any:
    """Returns a value of the pickle as a ``kind``, a type; refuses any other."""
    try:
        return msgspec.convert(value, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:  # the text has types and places, and no values
        raise _refusal(f"{complaint} ({error})") from None


_CONTAINERS = frozenset([tuple, list, dict])


class PickleMachine(_Unpickler):
    """Reads one pickle of a file; the file's size limits the number of objects that it may make.

    Each method ``load_…`` executes one opcode: it takes the operands from ``stack`` and pushes the result.
    The ones here replace the standard library's, and refuse what no honest payload of tensors contains.
    """

    # Of the base class:
    stack: list[Any]  # the values since the last mark
    append: Callable[[Any], None]  # pushes a value
    pop_mark: Callable[[], list[Any]]  # removes the last mark, and returns the values since it
    memo: _Memo

    def __init__(
        self, file: io.BytesIO, find: Callable[[str, str], Any], *, has_persistent_ids: bool = False
    ) -> None:
        """``find``: returns the stand-in for a global, by module and name, or raises if it is not allowed.

        ``has_persistent_ids``: persistent ids are allowed, and each is read as itself.
        """
        super().__init__(file)
        self._find = find
        self._has_persistent_ids = has_persistent_ids
        self._size = file.getbuffer().nbytes
        self._num_left = self._size // _BYTES_PER_OBJECT + _FREE_OBJECTS
        # In place of the standard library's table: only allowed opcodes, and a limited number of them.
        self.dispatch = _CountedDispatch()  # type: ignore[assignment, misc]  # used as a mapping only
        self.memo = _Memo()

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a global."""
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Returns the persistent id itself, if such ids are allowed."""
        if not self._has_persistent_ids:
            raise _refusal("has a persistent id, which is not allowed")
        return pid

    def _count_object(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise _refusal(f"of {self._size} bytes makes more objects than tensors of that size need")

    def load_mark(self) -> None:
        self._count_object()
        super().load_mark()  # type: ignore[misc]

    def load_empty_list(self) -> None:
        self._count_object()
        self.append([])

    def load_empty_dictionary(self) -> None:
        self._count_object()
        self.append({})

    def load_tuple(self) -> None:
        """Make a tuple of the values since the last mark; it may be used again, so its size is limited."""
        values = self.pop_mark()
        if len(values) > MAX_ITEMS:
            raise _refusal(f"has a tuple of {len(values)} items; the limit is {MAX_ITEMS}")
        self.append(tuple(values))

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, pairs: list[Any]) -> None:
        """Set the items of the dict on top of the stack; ``pairs`` has keys and values in turn."""
        target = self.stack[-1]
        if type(target) is not dict:
            raise _refusal("fills something that is no dict")
        if len(pairs) % 2:
            raise _refusal("has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str or len(key) > _MAX_KEY:
                raise _refusal(f"has a dict whose keys are not text of at most {_MAX_KEY} characters")
            target[key] = value

    def load_reduce(self) -> None:
        """Replace a function and its arguments by the description that `Function.call` makes."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Function:
            raise _refusal(
                f"calls a {type(function).__name__}; only functions that rebuild tensors may be called"
            )
        self._count_object()
        self.append(function.call(arguments))

    def load_newobj(self) -> None:
        """Make an empty `Record` of a data class; `load_build` then sets its fields."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and arguments == ()):
            raise _refusal("makes an object of something that is no data class, or with arguments")
        self._count_object()
        self.append(Record(kind))

    def load_build(self) -> None:
        """Set the fields of the `Record` on top of the stack."""
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record):
            raise _refusal("sets fields of something that has no fields")
        record.build(state)


# Each allowed opcode is read by the method that the standard library has for it, or by its override above.
_ALLOWED_OPCODES: dict[int, Callable[[Any], None]] = {
    opcode[0]: getattr(PickleMachine, _Unpickler.dispatch[opcode[0]].__name__)
    for opcode in (
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL,
        pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
        pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES,
        pickle.BINBYTES8, pickle.SHORT_BINBYTES, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1,
        pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
        pickle.SETITEM, pickle.SETITEMS, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET,
        pickle.LONG_BINGET, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID,
    )
}  # fmt: skip


class _CountedDispatch:
    """Gives the unpickler the method for each opcode, and counts the opcodes."""

    def __init__(self) -> None:
        self._num_left = _MAX_OPCODES

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        """Returns the method that executes opcode ``code``; the unpickler asks for each opcode it reads."""
        if code not in _ALLOWED_OPCODES:
            name = next((each.name for each in pickletools.opcodes if each.code == chr(code)), hex(code))
            raise _refusal(f"has opcode {name}, which is not allowed")
        self._num_left -= 1
        if self._num_left < 0:
            raise InvalidRequestError(
                f"the payload's pickle has more than {_MAX_OPCODES} opcodes; send several smaller ones"
            )
        return _ALLOWED_OPCODES[code]


class _Memo:
    """Keeps the values that a pickle may use again, by the number of their entry.

    A list, a dict or a nested tuple only takes up its entry, and is refused when it is used again.
    """

    _UNSHARED = object()

    def __init__(self) -> None:
        self._values: list[Any] = []

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, index: int, value: Any) -> None:
        if index > len(self._values):
            raise _refusal(f"skips to memo entry {index}")
        if type(value) in _CONTAINERS and not is_flat(value):
            value = self._UNSHARED
        self._values[index : index + 1] = [value]  # replaces an entry, or appends one

    def __getitem__(self, index: int) -> Any:
        value = self._values[index]
        if value is self._UNSHARED:
            raise _refusal(f"uses a list, a dict or a nested tuple twice (memo entry {index})")
        return value


def is_flat(value: Any) -> bool:
    """Whether a container is a tuple without further containers in it."""
    return type(value) is tuple and not any(type(item) in _CONTAINERS for item in value)


def refusal(what: str) -> InvalidRequestError:
    """Returns the error for a payload, with what is wrong and what to send instead."""
    return InvalidRequestError(f"{what}; {_REMEDY}")


def _refusal(what: str) -> InvalidRequestError:
    """Returns the error for a payload whose pickle is at fault: `what` continues "the payload's pickle …"."""
    return refusal(f"the payload's pickle {what[: 2 * _MAX_SHOWN]}")
