"""Segue: an LLM inference engine for the places where serving must not break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segue.frontend.engine import Engine

__all__ = ["Engine", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: workers and ``segue --help`` do not need it."""
    if name == "Engine":
        from segue.frontend.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
