"""The classes of transformers that load tokenizers, mostly without the index of its models."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

PACKAGE = "transformers"
GENERIC = "PreTrainedTokenizerFast"
_MODULE = f"{PACKAGE}.tokenization_utils_tokenizers"  # which has the generic class since 5.0


def tokenizer_class(name: str) -> Any:
    """Return the class ``name`` of transformers.

    The import of transformers reads the 2,000 files of its models, which takes most of its 0.5 s: a third of
    what the start of a frontend costs. The generic class needs none of them, and is imported without that.
    """
    if name == GENERIC and PACKAGE not in sys.modules and (spec := find_spec(PACKAGE)) is not None:
        sys.modules[PACKAGE] = _Unread(spec)
        try:
            return getattr(importlib.import_module(_MODULE), name)
        except ImportError:  # another version keeps it elsewhere
            pass
    return getattr(importlib.import_module(PACKAGE), name)


class _Unread(ModuleType):
    """A package whose own file is executed only once somebody asks for something that is defined there."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(PACKAGE)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = spec.submodule_search_locations or []
        self.__version__ = version(PACKAGE)  # its submodules ask for it
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        """Import the package in place of this one, and return what it has."""
        if name.startswith("__") and name != "__all__":  # those who look through all modules ask for some
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}", name=name, obj=self)
        with self._lock:
            if sys.modules.get(PACKAGE) is self:
                del sys.modules[PACKAGE]
        return getattr(importlib.import_module(PACKAGE), name)
