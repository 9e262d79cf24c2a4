"""Values as Python callers write them, as the types that JSON has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from segue.errors import InvalidRequestError, short_repr


def plain(value: Any, name: str = "") -> Any:
    """The same value of plain types: numbers of numpy, paths, arrays, views and generators are converted.

    Raises:
        InvalidRequestError: a set, which has no order; ``name`` is its field's.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list and all(type(item) is int for item in value):
        return value  # token ids: nothing to convert
    match value:
        case bool() | np.bool_():
            return bool(value)
        case str():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case os.PathLike():
            return os.fspath(value)
        case np.ndarray():
            return value.tolist()
        case Mapping():
            return {plain(key): plain(item, str(key)) for key, item in value.items()}
        case set() | frozenset():
            text = f"{name}={short_repr(value)}: must be a list, for a set has no order"
            raise InvalidRequestError(text, param=name)
        case Iterable() if not isinstance(value, (bytes, bytearray, memoryview)):
            return [plain(item, name) for item in value]
        case _:
            return value
