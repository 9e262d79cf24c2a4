"""A reader of pickles that runs no code: it interprets the opcodes of pickled tensors on a stack of values.

Python's own unpickler lets a payload use a list or a tuple in several places. A few bytes can then describe a
value that takes hours to compare, to hash or to print, or gigabytes to copy. Here, a payload of n bytes makes
a tree of at most O(n) plain values. Only leaves may be shared: numbers, text, bytes, descriptions, and tuples
of these.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from segue.errors import InvalidRequestError

REMEDY = (
    "send safetensors bytes, or what SGLang's clients send: a list of (name, tensor), or a flattened bucket, "
    "whose tensors lie in GPU memory or were pickled by pickle.dumps"
)

MAX_ITEMS = 64  # items of a tuple, arguments of a call; rebuild_cuda_tensor has 15
_MAX_OPCODES = 2_000_000  # a bucket has about 35 per tensor
_MAX_KEY = 64  # characters of a dict's key; all keys are names of fields
_MAX_SHOWN = 120  # characters of the payload in an error message
_BYTES_PER_OBJECT = 8  # an honest payload has more bytes per list, dict or call
_FREE_OBJECTS = 64  # allowed in addition

Check = Callable[[Any], bool]


class PickleError(InvalidRequestError):
    """The payload is not a pickle of tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """Stands for a function that a pickle names; the pickle never gets the function itself."""

    name: str
    make: Callable[..., Any]
    kinds: tuple[Check, ...]  # one check per argument
    least: int  # number of required arguments

    def call(self, arguments: Any) -> Any:
        """Returns the description that a call with ``arguments`` makes.

        Raises:
            PickleError: this function takes another number of arguments, or other types.
        """
        if type(arguments) is not tuple or not self.least <= len(arguments) <= len(self.kinds):
            raise _refusal(f"calls {self.name} with a wrong number of arguments")
        for index, (argument, is_fit) in enumerate(zip(arguments, self.kinds, strict=False)):
            if not is_fit(argument):
                raise _refusal(
                    f"calls {self.name} with a {type(argument).__name__} that does not fit as argument "
                    f"{index}"
                )
        return self.make(*arguments)


class Record:
    """An object of a data class; ``fields`` has the pickle's values, unchecked."""

    __slots__ = ("fields",)
    fields: dict[str, Any] | None

    def __init__(self) -> None:
        self.fields = None


class _Unshared:
    """Stands in the memo for a list, a dict, or a tuple that contains one of these."""


_UNSHARED = _Unshared()
_CONTAINERS = frozenset([tuple, list, dict])


class PickleMachine:
    """Reads one pickle of a file; the file's size limits the number of objects that it may make."""

    def __init__(
        self, file: io.BytesIO, find: Callable[[str, str], Any], *, has_persistent_ids: bool = False
    ) -> None:
        """``find``: returns the stand-in for a global, by module and name, or raises if it is not allowed.

        ``has_persistent_ids``: persistent ids are allowed, and each is read as itself.
        """
        self._file = file
        self._find = find
        self._has_persistent_ids = has_persistent_ids
        self._num_left = file.getbuffer().nbytes // _BYTES_PER_OBJECT + _FREE_OBJECTS
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """Read the pickle and return its value; the file's position is then behind it.

        Raises:
            PickleError: an opcode, or a use of one, that no pickle of tensors has.
            Exception: any error of `pickletools` for broken bytes, and IndexError if the stack is too short.
        """
        steps = _STEPS
        argument: Any
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
            step = steps.get(opcode.name)
            if step is None:
                raise _refusal(f"has opcode {opcode.name}, which is not allowed")
            if count >= _MAX_OPCODES:
                raise PickleError(
                    f"the payload's pickle has more than {_MAX_OPCODES} opcodes; send several smaller ones"
                )
            if opcode.name.endswith("PUT") and argument > count:
                raise _refusal(f"skips to memo entry {argument}")
            step(self, argument)
        return self._pop()

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise _refusal("takes a value from behind a mark")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if (self._marks and len(self._stack) <= self._marks[-1]) or type(self._stack[-1]) is not kind:
            raise _refusal(f"fills something that is no {kind.__name__}")
        return self._stack[-1]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_new(self, value: Any) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            size = self._file.getbuffer().nbytes
            raise _refusal(f"of {size} bytes makes more objects than tensors of that size need")
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _tuple(self, values: list[Any]) -> None:
        if len(values) > MAX_ITEMS:
            raise _refusal(f"has a tuple of {len(values)} items; the limit is {MAX_ITEMS}")
        self._stack.append(tuple(values))

    def _put(self, index: int) -> None:
        value = self._stack[-1]
        if type(value) in _CONTAINERS and not is_flat(value):
            value = _UNSHARED
        self._memo += [_UNSHARED] * (index + 1 - len(self._memo))
        self._memo[index] = value

    def _get(self, index: int) -> None:
        value = self._memo[index]
        if value is _UNSHARED:
            raise _refusal(f"uses a list, a dict or a nested tuple twice (memo entry {index})")
        self._stack.append(value)

    def _set_items(self, pairs: list[Any]) -> None:
        target = self._top(dict)
        if len(pairs) % 2:
            raise _refusal("has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str or len(key) > _MAX_KEY:
                raise _refusal(f"has a dict whose keys are not text of at most {_MAX_KEY} characters")
            target[key] = value

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise _refusal("has a global whose name is not text")
        self._stack.append(self._find(module, name))

    def _reduce(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        if type(function) is not Function:
            raise _refusal(f"calls a {type(function).__name__}")
        self._push_new(function.call(arguments))

    def _new_object(self, _: Any) -> None:
        arguments, kind = self._pop(), self._pop()
        if (
            not (isinstance(kind, type) and issubclass(kind, Record))
            or type(arguments) is not tuple
            or arguments
        ):
            raise _refusal("makes an object of something that is no data class, or with arguments")
        self._push_new(kind())

    def _build(self, _: Any) -> None:
        state, record = self._pop(), self._stack[-1]
        if not isinstance(record, Record) or type(state) is not dict or record.fields is not None:
            raise _refusal("sets fields of something that has no fields, or sets them twice")
        if not all(_is_field(value) for value in state.values()):
            raise _refusal(
                "has an object with a field that is neither a number, text, bytes nor a list of bytes"
            )
        record.fields = state

    def _persistent_id(self, _: Any) -> None:
        if not self._has_persistent_ids:
            raise _refusal("has a persistent id, which is not allowed")


def is_flat(value: Any) -> bool:
    """Whether a container is a tuple without further containers in it."""
    return type(value) is tuple and not any(type(item) in _CONTAINERS for item in value)


def _is_field(value: Any) -> bool:
    if type(value) is list:
        return all(type(item) is bytes for item in value)
    items = value if is_flat(value) else (value,)
    return not any(type(item) in _CONTAINERS or isinstance(item, Record) for item in items)


def _refusal(what: str) -> PickleError:
    return PickleError(f"the payload's pickle {what[: 2 * _MAX_SHOWN]}; {REMEDY}")


_Step = Callable[[PickleMachine, Any], None]


def _pop_to_tuple(count: int) -> _Step:
    def step(machine: PickleMachine, _: Any) -> None:
        values = [machine._pop() for _ in range(count)]
        machine._push(tuple(reversed(values)))

    return step


def _stack_global(machine: PickleMachine, _: Any) -> None:
    name = machine._pop()
    machine._global(machine._pop(), name)


def _append(machine: PickleMachine, _: Any) -> None:
    value = machine._pop()
    machine._top(list).append(value)


def _appends(machine: PickleMachine, _: Any) -> None:
    values = machine._since_mark()
    machine._top(list).extend(values)


def _set_item(machine: PickleMachine, _: Any) -> None:
    value = machine._pop()
    machine._set_items([machine._pop(), value])


_VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "BINBYTES8", "SHORT_BINBYTES",
)  # fmt: skip

_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(_VALUES, PickleMachine._push),
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "MARK": lambda machine, _: machine._marks.append(len(machine._stack)),
    "EMPTY_LIST": lambda machine, _: machine._push_new([]),
    "EMPTY_DICT": lambda machine, _: machine._push_new({}),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    "TUPLE": lambda machine, _: machine._tuple(machine._since_mark()),
    "TUPLE1": _pop_to_tuple(1),
    "TUPLE2": _pop_to_tuple(2),
    "TUPLE3": _pop_to_tuple(3),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine._set_items(machine._since_mark()),
    "BINPUT": PickleMachine._put,
    "LONG_BINPUT": PickleMachine._put,
    "MEMOIZE": lambda machine, _: machine._put(len(machine._memo)),
    "BINGET": PickleMachine._get,
    "LONG_BINGET": PickleMachine._get,
    "GLOBAL": lambda machine, names: machine._global(*names.split(" ", 1)),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": PickleMachine._reduce,
    "NEWOBJ": PickleMachine._new_object,
    "BUILD": PickleMachine._build,
    "BINPERSID": PickleMachine._persistent_id,
}
