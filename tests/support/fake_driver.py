"""A CUDA driver that only notes its calls, for tests of the order of calls and of what follows a failure."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

INVALID_VALUE = 1
TEXT = b"invalid argument"


class FakeDriver:
    """In the place of the driver's library: every function notes its name and arguments, and succeeds."""

    def __init__(self, *absent: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails: set[str] = set()  # functions that return INVALID_VALUE
        self._absent = absent
        self._handles: Iterator[int] = iter(range(0x1000, 0x10000, 0x1000))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in self._absent:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            if name == "cuGetErrorString":
                arguments[1]._obj.value = TEXT
                return 0
            self.calls.append((name, arguments))
            if name in self.fails:
                return INVALID_VALUE
            for argument in arguments[:1]:  # results are written to where the first argument points
                result = getattr(argument, "_obj", None)
                if isinstance(result, ctypes.c_int | ctypes.c_uint64 | ctypes.c_size_t | ctypes.c_void_p):
                    result.value = next(self._handles)
            return 0

        return function

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of a function."""
        return [arguments for called, arguments in self.calls if called == name]
