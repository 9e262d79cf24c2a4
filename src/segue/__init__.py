"""Segue: an LLM inference engine for the places where serving must not break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.version import __version__

if TYPE_CHECKING:
    from segue.api.engine import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: workers and ``segue --help`` do not need it."""
    if name == "Engine":
        from segue.api.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
