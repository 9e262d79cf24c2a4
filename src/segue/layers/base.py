"""The base class of all layers."""

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module whose call is its `forward`: looking for hooks takes 2 % of a decode step on the CPU."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Bind the subclass's `__call__` to its own `forward`."""
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward  # type: ignore[method-assign]
