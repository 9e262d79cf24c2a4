"""Packed copies of new weights on a CPU, made before the pause of their commit, which swaps them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from torch import Tensor

from segue.host import free_cpu_memory
from segue.kernels.ops import Derived
from segue.logs import logger
from segue.memory.budget import gib
from segue.weight_update.served import ServedWeights


class PackedAhead:
    """The packed copies of weights that are to be served.

    Each one is made where steps run, between two steps: parallel operations in a second thread would make
    every step take twice as long. So serving waits for one layer at a time, and never for all of them.
    """

    def __init__(self, served: ServedWeights) -> None:
        self._served = served
        self._made: dict[str, Derived | None] = {}  # by parameter; None: its layer keeps no copy

    def make(
        self, names: Iterable[str], view: Callable[[str], Tensor], is_cancelled: Callable[[], bool]
    ) -> None:
        """Pack parameters that have not been packed yet.

        What cannot be packed now, for lack of memory, is left to the commit, which frees the old copy first.

        Args:
            names: of the parameters.
            view: returns the new values of one; they must stay as they are.
            is_cancelled: whether the rest is not wanted any more.
        """
        given = dict.fromkeys(names)  # in order
        packers = {name: self._served.packer(name) for name in given if name not in self._made}
        new = {name: pack for name, pack in packers.items() if pack is not None}
        needed = sum(view(name).numel() for name in new) * self._served.dtype.itemsize
        free = free_cpu_memory()
        if needed > free:
            logger.info(
                "the weights are packed in the pause of their commit: packing them before would take %s, and "
                "%s is free",
                *(gib(needed), gib(free)),
            )
            return
        for name, pack in new.items():
            if is_cancelled():
                return
            scales = self._served.weight_map.scales.get(name)
            if scales is not None and scales.name not in given:  # they lie in a slab that does not change
                continue
            values = view(name), None if scales is None else view(scales.name)
            # An error on the stream of the steps would make all later steps fail.
            made = self._served.submit(partial(_result_or_error, partial(pack, *values))).result()
            if isinstance(made, Exception):
                logger.warning("weights are packed in the pause of their commit, not before (%s)", made)
                return
            self._made[name] = made

    def forget(self, names: Iterable[str]) -> None:
        """Forget the copies of parameters whose values change again."""
        for name in names:
            self._made.pop(name, None)

    def clear(self) -> None:
        """Forget all copies."""
        self._made.clear()

    def take(self, names: Collection[str]) -> dict[str, Derived]:
        """Return the copies of these parameters, as far as they are made, and forget all."""
        made, self._made = self._made, {}
        return {name: copy for name, copy in made.items() if copy is not None and name in names}


def _result_or_error(work: Callable[[], Derived | None]) -> Derived | Exception | None:
    try:
        return work()
    except Exception as error:
        return error
