"""The ranks' replies to one command, taken together; does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from segue.messages.weight_operations import CheckWeights, GetWeights
from segue.messages.weight_update import RankReply

_SHOWN = 20  # problems listed in a message
_MASK = (1 << 64) - 1


def problems(replies: Sequence[RankReply]) -> str:
    """Joins the replies' errors to one text, each once if all ranks agree; empty if there are none."""
    distinct = {tuple(reply.errors) for reply in replies}
    if len(distinct) == 1:
        lines = list(replies[0].errors)
    else:
        lines = [f"rank {reply.rank}: {error}" for reply in replies for error in reply.errors]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "; ".join(lines[:_SHOWN] + more)


def staging(replies: Sequence[RankReply]) -> dict[str, Any]:
    """Returns the kind of staging memory, and the bytes staged on all ranks together."""
    fields = replies[0].fields
    return {
        "place": fields.get("place", "device"),
        "num_bytes": sum(reply.fields.get("staging_bytes", 0) for reply in replies),
        "note": fields.get("note", ""),
    }


def merge(request: GetWeights | CheckWeights, replies: Sequence[RankReply]) -> dict[str, Any]:
    """Merges what all ranks found in their weights to the fields of one answer.

    ``GetWeights`` gives ``{"values"}``: the first ``truncate_size`` rows as nested lists. A checksum gives
    ``{"checksums", "total"}``, which do not depend on the number of ranks, and ``{"ranks"}``, the sum of each
    rank. A snapshot gives ``{"num_bytes"}``, and a comparison ``{"differ"}``: the names of the tensors.
    """
    ranks = [reply.fields for reply in replies]
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
