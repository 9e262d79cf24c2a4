"""Fits the cost model of GEMM plans to the measured plans, and shows how well it ranks them.

    python -m bench.fit_gemm [--trials N]

The stored table has the best plan of each shape, and no times, so the fit is to ranks: it makes the measured
plan cheap among all plans that are worth trying. For each shape, all others are fitted, from constants that
know nothing, and the measured plans of the shape left out are looked for among the candidates: that is what
happens to a shape that nobody measured. It needs no GPU. The constants belong into `FITTED` of
`segue.kernels.gemm_plan`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench import report
from bench.roofline import Machine
from segue.kernels.gemm_plan import (
    FITTED,
    NUM_CANDIDATES,
    Constants,
    DeviceFacts,
    GemmPlan,
    GemmShape,
    Terms,
    candidates,
    seconds,
    terms,
    tile,
    valid_plans,
)

TABLE = Path(__file__).parents[1] / "src" / "segue" / "kernels" / "triton" / "gemm.json"
H200 = DeviceFacts(
    name="NVIDIA H200",
    capability=(9, 0),
    num_sms=132,
    shared_bytes=227 << 10,
    memory_bytes=int(139.8 * 2**30),
    bandwidth=Machine().read,
)
HEAD = 32768  # a weight with as many rows is a head
# Where the fit starts: rough guesses.
START = Constants(
    share=2.0, latency=1e-6, operations=1.5, round=5e-7, program=1e-7, partials=1.2, warps=1e-8, tma=0.0
)
TEMPERATURE = 0.03  # plans whose times differ by this share count as almost equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One GEMM whose best plan was measured."""

    shape: GemmShape
    plans: Sequence[GemmPlan]  # those that are worth trying
    best: int  # index of the measured plan in `plans`


def measured(table: dict[str, dict[str, dict[str, dict[str, object] | None]]]) -> list[Measured]:
    """Return the GEMMs of a table, without those for which cuBLAS is the fastest."""
    found = []
    for name, by_rows in table.items():
        size, depth = map(int, name.split("x"))
        for rows, by_kind in by_rows.items():
            for kind, stored in by_kind.items():
                # A whole result that may be split as well is the same plan twice; the head is never split.
                same = kind == "whole" and stored == by_kind["split"] and size < HEAD
                if stored is None or same or (kind == "split" and size >= HEAD):
                    continue
                shape = GemmShape(int(rows), size, depth, "split" if kind == "split" else "whole")
                plan, plans = GemmPlan(**stored), list(valid_plans(shape, H200))  # type: ignore[arg-type]
                if plan in plans:
                    found.append(Measured(shape=shape, plans=plans, best=plans.index(plan)))
                else:
                    print(f"not among the plans that are worth trying: {shape}: {plan}")
    return found


class Fit:
    """The terms of all plans of several GEMMs, as arrays `[GEMM, plan]`."""

    def __init__(self, gemms: Sequence[Measured]) -> None:
        self.gemms = gemms
        width = max(len(gemm.plans) for gemm in gemms)
        self.inside = np.zeros((len(gemms), width), dtype=bool)
        values = np.ones((len(Terms._fields), len(gemms), width))
        for row, gemm in enumerate(gemms):
            self.inside[row, : len(gemm.plans)] = True
            for column, plan in enumerate(gemm.plans):
                values[:, row, column] = terms(plan, gemm.shape, H200)
        self.terms = Terms(*values)
        self.best = np.array([gemm.best for gemm in gemms])

    def times(self, constants: Constants) -> np.ndarray:
        """Return the predicted seconds, infinite beyond the plans of a GEMM."""
        predicted = np.maximum(seconds(self.terms, constants), 1e-9)  # type: ignore[arg-type]
        return np.where(self.inside, predicted, np.inf)

    def loss(self, constants: Constants, rows: np.ndarray) -> float:
        """Return how little the measured plans of `rows` stand out: the mean cross entropy."""
        logits = np.where(self.inside, -np.log(self.times(constants)) / TEMPERATURE, -np.inf)[rows]
        top = logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(rows)), self.best[rows]]
        return float((np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0] - chosen).mean())

    def constants(self, start: Constants, rows: np.ndarray, trials: int, seed: int = 0) -> Constants:
        """Return the constants with the least loss that a random walk of `trials` steps finds."""
        random = np.random.default_rng(seed)
        found, least = start, self.loss(start, rows)
        for trial in range(trials):
            width = 0.5 * (1 - trial / trials) + 0.02
            changes = random.normal(size=len(start)) * width * (random.random(len(start)) < 0.4)
            # Only the cost of TMA may be negative: then a step is cheaper than by threads.
            scaled = (value * float(np.exp(by)) for value, by in zip(found, changes, strict=True))
            tried = Constants(*scaled)._replace(tma=found.tma + float(changes[-1]) * 5e-8)
            if (loss := self.loss(tried, rows)) < least:
                found, least = tried, loss
        return found


def won(gemms: Iterable[Measured]) -> set[GemmPlan]:
    """Return the tiles of the measured plans."""
    return {tile(gemm.plans[gemm.best]) for gemm in gemms}


def main() -> None:
    """Print the constants and how often the measured plans are among the candidates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--trials", type=int, default=3000, help="steps of the fit's random walk; 0: take those in use"
    )
    args = parser.parse_args()
    [table] = [each["plans"] for each in json.loads(TABLE.read_text()) if each["capability"] == "9.0"]
    fit = Fit(measured(table))
    shapes = [(gemm.shape.size, gemm.shape.depth) for gemm in fit.gemms]
    everything = np.arange(len(shapes))
    constants = fit.constants(START, everything, args.trials)
    print("FITTED = Constants(")
    for name, value in zip(Constants._fields, constants, strict=True):
        print(f"    {name}={value:.3g},")
    print(
        f")  # loss {fit.loss(constants, everything):.3f}, of those in use {fit.loss(FITTED, everything):.3f}"
    )
    lines, found = [], Counter[str]()
    for left_out in dict.fromkeys(shapes):
        own = [gemm for gemm, shape in zip(fit.gemms, shapes, strict=True) if shape == left_out]
        others = np.array([i for i, shape in enumerate(shapes) if shape != left_out])
        fitted = fit.constants(START, others, args.trials) if args.trials else FITTED
        proposed = candidates([gemm.shape for gemm in own], H200, won(fit.gemms[i] for i in others), fitted)
        missed = [gemm for gemm in own if gemm.plans[gemm.best] not in proposed[gemm.shape]]
        tiles = [
            gemm
            for gemm in missed
            if not any(_size(plan) == _size(gemm.plans[gemm.best]) for plan in proposed[gemm.shape])
        ]
        names = ", ".join(f"{gemm.shape.rows} {gemm.shape.kind}" for gemm in missed)
        lines.append(
            [f"{left_out[0]}x{left_out[1]}", str(len(own)), str(len(missed)), str(len(tiles)), names]
        )
        found.update(gemms=len(own), missed=len(missed), tiles=len(tiles))
    report.show(
        f"measured plans that are not among the {NUM_CANDIDATES} candidates, predicted from the other shapes",
        ["shape", "GEMMs", "plan", "tile and split", "rows and kind"],
        lines,
    )
    seen, sizes = found["gemms"] - found["missed"], found["gemms"] - found["tiles"]
    print(f"of {found['gemms']} GEMMs: the plan is a candidate for {seen}, its tile and split for {sizes}")


def _size(plan: GemmPlan) -> GemmPlan:
    """Return the plan's tile and split alone."""
    return replace(plan, stages=0, warps=0, tma=False)


if __name__ == "__main__":
    main()
