"""Compares Segue with another engine on the pinned offline workload, and checks the bars.

    python -m bench.vllm_offline 0.6b | tee theirs.log
    python -m bench.offline 0.6b
    python -m bench.peers 0.6b theirs.log

Reads the log of the other engine, which ran on the same GPU just before or after, and the results that
`bench.offline` wrote. Segue has to be ahead in every figure; some have a higher bar: a ratio to the other
engine's figure, or a number of milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import report, suite
from bench.offline import figures

# Bars: how many times faster than the other engine, and the longest first tokens in milliseconds.
RATIOS = {
    "0.6b": {
        "offline256": 1.10,
        "decode bs=1": 1.6,
        "decode bs=32": 1.3,
        "decode bs=256": 1.12,
        "prefill 64x2048": 1.1,
    },
    "8b": {"offline256": 1.04, "decode bs=1": 1.15, "decode bs=32": 1.1, "decode bs=256": 1.08},
}
MAX_MS = {
    "0.6b": {"first_token prompt=16": 2.6, "first_token prompt=256": 3.2, "first_token prompt=1024": 5.5},
}
PER_SECOND = ("offline256", "prefill 64x2048")  # figures in tokens/s, where more is better


def judged(size: str, name: str, ours: float, theirs: float) -> tuple[float, str, bool]:
    """Return how many times faster Segue is, the bar in words, and whether it holds."""
    faster = ours / theirs if name in PER_SECOND else theirs / ours
    if most := MAX_MS.get(size, {}).get(name):
        return faster, f"{most} ms", ours <= most and faster > 1
    if ratio := RATIOS.get(size, {}).get(name):
        return faster, f"{ratio:.2f} x", faster >= ratio
    return faster, "> 1 x", faster > 1


def circumstances(lines: Iterable[str]) -> dict[str, Any]:
    """Return the circumstances that the other engine's log has, if it has any."""
    for line in lines:
        if line.startswith("CIRCUMSTANCES "):
            found: dict[str, Any] = json.loads(line.removeprefix("CIRCUMSTANCES "))
            return found
    return {}


def main() -> int:
    """Check the bars.

    The exit code is 1 if a bar is missed or has no figure, or if tokens were not scored again or are wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=suite.SHAPES)
    parser.add_argument("log", type=Path, help="the suite's output for the other engine")
    args = parser.parse_args()
    size = args.size
    ours = json.loads((report.RESULTS / f"gpu_offline_{size}.json").read_text())
    lines = args.log.read_text().splitlines()
    theirs = figures([line for line in lines if line.split()[2:3] == [size]])
    expected = {*RATIOS.get(size, {}), *MAX_MS.get(size, {}), *ours["figures"], *theirs}
    if missing := sorted(expected - (theirs.keys() & ours["figures"].keys())):
        parser.error(f"no figure of both engines for {', '.join(missing)}: run both suites to their end")
    rows, verdicts = [], {}
    for name, value in ours["figures"].items():
        faster, bar, holds = judged(size, name, value, theirs[name])
        verdicts[name] = {"ours": value, "theirs": theirs[name], "faster": round(faster, 3), "holds": holds}
        word = "holds" if holds else "MISSED"
        share = f"{ours['of the floor'][name]:.0%}"
        rows.append([name, f"{value:.6g}", f"{theirs[name]:.6g}", f"{faster:.3f} x", bar, word, share])
    columns = ["", "Segue", "other engine", "faster", "bar", "", "of the roofline"]
    report.show(f"{size}: tokens/s or ms", columns, rows)
    scores = ours.get("scored again")
    right = bool(scores) and not any(score["wrong"] for score in scores.values())
    if not right:
        print(f"gpu_offline_{size}.json has wrong tokens, or none scored again: its speed does not count")
    found = {
        "ours": ours["circumstances"],
        "theirs": circumstances(lines),
        "right": right,
        "figures": verdicts,
    }
    print(f"written to {report.save(f'gpu_peers_{size}', found)}")
    return 0 if right and all(verdict["holds"] for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
