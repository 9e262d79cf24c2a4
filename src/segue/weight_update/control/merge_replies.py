"""Merges the ranks' replies about their weights to one answer; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from segue.messages.weight_operations import CheckWeights, GetWeights

_MASK = (1 << 64) - 1


def merge(request: GetWeights | CheckWeights, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the fields of all ranks' replies to the fields of one answer.

    ``GetWeights`` gives ``{"values"}``: the first ``truncate_size`` rows as nested lists. A checksum gives
    ``{"checksums", "total"}``, which do not depend on the number of ranks, and ``{"ranks"}``, the sum of each
    rank. A snapshot gives ``{"num_bytes"}``, and a comparison ``{"differ"}``: the names of the tensors.
    """
    if isinstance(request, GetWeights):
        values = np.zeros(ranks[0]["shape"], np.float32)
        for part in (part for fields in ranks for part in fields["parts"]):
            box = tuple(slice(*bounds) for bounds in part["place"])
            values[box] = np.frombuffer(part["float32"], np.float32).reshape(values[box].shape)
        return {"values": values.tolist()}
    if request.action == "checksum":
        sums: dict[str, int] = {}
        for fields in ranks:
            for name, value in fields["checksums"].items():
                sums[name] = (sums.get(name, 0) + value) & _MASK
        totals = [sum(fields["checksums"].values()) & _MASK for fields in ranks]
        return {"checksums": sums, "total": sum(totals) & _MASK, "ranks": totals}
    if request.action == "snapshot":
        return {"num_bytes": sum(fields["num_bytes"] for fields in ranks)}
    return {"differ": sorted({name for fields in ranks for name in fields["differ"]})}
