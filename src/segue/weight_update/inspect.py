"""Values, checksums and snapshots of the served weights, by their checkpoint names, and their reset.

A rank holds some boxes of each checkpoint tensor, in parameters that are fused from several tensors. A
`Slice` of the weight map, here called a part, says which box of the tensor (`source`) lies in which box of
which parameter (`destination`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.errors import InvalidRequestError
from segue.memory.checksum import MASK, scramble
from segue.memory.tensor_ops import BLOCK, BLOCK_CUDA, equal
from segue.messages.weight_operations import GetWeights, Inspection
from segue.models import weight_map
from segue.models.weight_map import Box, Slice
from segue.weight_update.served import ServedWeights

_MAX_VALUES = 1 << 20  # in an answer: one process turns them into lists while generation waits
_DEFAULT_ROWS = 100  # `truncate_size`'s default: allowed even if these rows have more values than that


class Inspector:
    """Executes `Inspect` commands, on the compute stream; keeps the last snapshot."""

    def __init__(self, served: ServedWeights) -> None:
        self._served = served
        self._snapshot: dict[str, Tensor] | None = None  # parameter -> its values, in host memory
        self._owned_slices: dict[str, tuple[Slice, ...]] | None = None

    def answer(self, request: Inspection) -> dict[str, Any]:
        """Returns the fields of this rank's reply; `control.calls.merge` merges those of all ranks.

        Raises:
            InvalidRequestError: there is no such tensor, or no snapshot to compare with.
        """
        if isinstance(request, GetWeights):
            return self._values(request.name, request.truncate_size)
        if request.action == "checksum":
            return {"checksums": self._checksums()}
        if request.action == "reset_tensors":
            self._reset()
            return {}
        if request.action == "snapshot":
            self._snapshot = {
                name: self._served.arena.view(name).to("cpu", copy=True)
                for name in self._served.arena.layout.table
            }
            return {"num_bytes": self._served.arena.num_bytes}
        return {"differ": self._differing()}

    def _values(self, name: str, size: int) -> dict[str, Any]:
        """Returns this rank's share of the first `size` rows of the tensor `name`.

        `shape` is that of these rows on all ranks together. Each item of `parts` has its `place`, which is
        the bounds per dimension within them, and its values as the bytes of float32.
        """
        table = self._served.weight_map
        meaning = table.aliases.get(name, name)
        if meaning not in table.slices:
            raise InvalidRequestError(f"{name!r} is not a tensor of this model: use a name of its checkpoint")
        shape = table.shapes[meaning]
        if len(shape) > 2:
            raise InvalidRequestError(f"{name!r} holds many experts; ask for one: {table.stacked[name][0]}")
        columns = shape[1] if len(shape) == 2 else 1
        most = max(_DEFAULT_ROWS, _MAX_VALUES // columns)
        if min(size, shape[0]) > most:
            raise InvalidRequestError(
                f"truncate_size is {size}: that many rows of {name!r}, {columns} values per row, have more "
                f"than {_MAX_VALUES} values; ask for {most} at most"
            )
        parts = []
        for part in table.slices[meaning]:
            rows = part.source[0]
            count = min(size, rows.stop) - rows.start  # not above 0: this part begins after the wanted rows
            if count > 0:
                values = self._served.destination(part).read()[:count].float().cpu().contiguous()
                place = [
                    [rows.start, rows.start + count],
                    *([box.start, box.stop] for box in part.source[1:]),
                ]
                parts.append({"place": place, "float32": values.numpy().tobytes()})
        return {"shape": [min(size, shape[0]), *shape[1:]], "parts": parts}

    def _checksums(self) -> dict[str, int]:
        """Returns checkpoint name -> sum of the checksums of this rank's parts, for tensors that it counts.

        The sums of all ranks add up to the tensor's checksum. The device is waited for once, not per tensor.
        """
        if self._owned_slices is None:
            self._owned_slices = _owned_slices(self._served)
        owned = self._owned_slices
        names = [name for name in owned if owned[name]]
        sums = [
            torch.stack([self._checksum(*each) for each in self._contents(name, owned[name])]).sum()
            for name in names
        ]
        found = torch.stack(sums).tolist() if sums else []
        return {name: value & MASK for name, value in zip(names, found, strict=True)}

    def _contents(self, name: str, parts: Iterable[Slice]) -> Iterator[tuple[str, Tensor, Box]]:
        """Yields what counts in the checksum of a tensor: each of `parts`, with a name and its box.

        Scales of a part in FP8 are a part too. Those of whole rows count with the first columns alone.
        """
        for part in parts:
            memory, rows = self._served.destination(part), part.source[0]
            yield name, memory.values, part.source
            if memory.scales is not None and (memory.block or part.source[1].start == 0):
                first = part.source[1].start // (memory.block or 1)
                columns = slice(first, first + memory.scales.shape[1])
                yield f"{name}: scales", memory.scales, (rows, columns)

    def _checksum(self, name: str, view: Tensor, box: Box) -> Tensor:
        """Returns the checksum of one part, with its box of a tensor: an int64 scalar on its device.

        Each value's bits are multiplied by a weight of its row and one of its column in the whole tensor,
        then summed modulo 2**64. So it does not matter how the ranks split a tensor. The rows' weights depend
        on `name` as well, so that two tensors with exchanged contents change the total.
        """
        rows, columns = (view, box[1]) if view.dim() == 2 else (view[:, None], slice(0, 1))
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        of_columns = _position_weights(columns.start, rows.shape[1], 1, view.device)
        of_rows = _position_weights(box[0].start, rows.shape[0], key, view.device)
        total = torch.zeros((), dtype=torch.int64, device=view.device)
        step = max(1, (BLOCK_CUDA if view.is_cuda else BLOCK) // rows.shape[1])
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.itemsize]
        for start in range(0, len(rows), step):
            block = rows[start : start + step].view(kind).long()
            total += block.mul_(of_columns).sum(1).mul_(of_rows[start : start + step]).sum()
        return total

    def _differing(self) -> list[str]:
        """Returns the checkpoint names of the tensors whose bits on this rank differ from the snapshot."""
        snapshot = self._snapshot
        if snapshot is None:
            raise InvalidRequestError(
                "there is no snapshot to compare with: take one first (action 'snapshot')"
            )
        table, arena = self._served.weight_map, self._served.arena
        # Whole parameters first: the parts of many experts, one by one, take two to four times as long.
        changed = {
            name for name, values in snapshot.items() if not equal(arena.view(name), values, values.dtype)
        }
        changed |= {name for name, scales in table.scales.items() if scales.name in changed}
        return [
            name
            for name in table.names
            if any(
                part.parameter in changed
                and not all(
                    equal(one, other, other.dtype)
                    for one, other in zip(
                        self._served.destination(part).tensors,
                        self._served.destination(part, snapshot.__getitem__).tensors,
                        strict=True,
                    )
                )
                for part in table.slices[name]
            )
        ]

    def _reset(self) -> None:
        """Make every value NaN, which no update sends, and which no step could compute with unnoticed.

        Padding, which no update writes, stays zero.
        """
        arena = self._served.arena
        for name in arena.layout.table:
            arena.view(name).fill_(float("nan"))
        for name, box in self._served.weight_map.padding.items():
            arena.view(name)[box].zero_()
        self._served.note_lost()


def _owned_slices(served: ServedWeights) -> dict[str, tuple[Slice, ...]]:
    """Returns, per checkpoint name, the slices that this rank counts in a checksum.

    A slice that several ranks hold (a norm, a shared KV head) counts on the first of them only. These ranks
    follow each other, so it is enough to compare with the rank before this one.
    """
    table, tp = served.weight_map, served.tp
    if tp.rank == 0:
        return {name: table.slices[name] for name in table.names}
    before = weight_map.build(served.config, TPInfo(rank=tp.rank - 1, size=tp.size)).slices
    return {
        name: tuple(
            part for part in table.slices[name] if all(part.source != held.source for held in before[name])
        )
        for name in table.names
    }


def _position_weights(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """Returns the checksum's weights of `count` rows or columns, of which the first is number `first`.

    They are `int64[count]`, pseudo-random by position and `key`, and odd, so that no bit of a value is lost.
    """
    places = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    return scramble(places.mul_(2 * key + 1)).bitwise_or_(1)
