"""Attacks a server: ``python -m tests.attack [URL] --seconds 120 --seed 0``; exit code 1 after a finding.

The attack is a part of the tests, whose server and clients it uses, and is not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import httpx

from bench import report
from tests.attack import runner
from tests.attack.gauges import MIB
from tests.attack.target import Target

HEALTH_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description="Attack a server of this machine."
    )
    parser.add_argument(
        "url", nargs="?", help="a server on a loopback address; without a URL a server is started"
    )
    parser.add_argument("--key", help="the server's API key or admin key")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all groups together")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same attacks")
    parser.add_argument("--health-s", type=float, default=HEALTH_S, help="the longest that /health may take")
    parser.add_argument(
        "--group",
        action="append",
        choices=sorted(runner.GROUPS),
        help="attack only with this group; repeatable",
    )
    given = parser.parse_args(arguments)
    names = given.group or list(runner.GROUPS)
    try:
        found = nullcontext(runner.running(given.url, given.key)) if given.url else runner.started()
    except (ValueError, httpx.HTTPError) as error:
        print(f"attack: {error}", file=sys.stderr)
        return 2
    with found as target:
        outcomes = runner.run(target, names, given.seconds, given.seed, given.health_s)
        show(target, outcomes)
    return 1 if any(outcome.findings for outcome in outcomes) else 0


def show(target: Target, outcomes: Sequence[runner.Outcome]) -> None:
    """Print the attacks, the server's resource usage and the findings."""
    report.show(
        "What was tried", ["what", "times"], [[what, f"{n:,}"] for what, n in sorted(target.tried.items())]
    )
    header = ["group", "tried", "longest /health, ms", "memory, MiB", "files", "threads", "findings"]
    report.show(f"An attack on {target.url}", header, [_row(outcome) for outcome in outcomes])
    for outcome in outcomes:
        for finding in outcome.findings:
            print(f"{outcome.group}: {finding.what}: {finding.seen}")


def _row(outcome: runner.Outcome) -> list[str]:
    health = f"{outcome.longest_health_s * 1e3:.0f}" if outcome.probes else "not asked"
    memory = files = threads = "not known"
    if (before := outcome.before) is not None and (after := outcome.after) is not None:
        memory = f"{before.resident / MIB:.0f} → {after.resident / MIB:.0f}"
        files, threads = f"{before.files} → {after.files}", f"{before.threads} → {after.threads}"
    return [outcome.group, f"{outcome.tried:,}", health, memory, files, threads, str(len(outcome.findings))]


if __name__ == "__main__":
    sys.exit(main())
