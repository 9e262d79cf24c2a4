"""Measures what the router costs: latency, CPU time per event, memory, and what clients leave behind.

    python -m bench.router [--processes 2]

The router is a real ``segue router`` process. Its workers have no model (`bench.fake_worker`), and the
clients only note what arrives (`bench.stream_clients`), so that neither limits the router. On few cores all
of them share these, and the latencies say as much of the machine as of the router; the CPU time per event
does not.
Bars: section "What it costs" of docs/router.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.router_bars import MANY_CORES, bars, figures, holds, limited_by
from bench.router_fleet import Fleet, busy_s, cpu_s, fleet, num_descriptors, num_held, rss_mib, stats
from bench.stream_clients import Streamed, clock, leave, probe, stream
from segue.bench.load import percentile
from segue.doctor.machine import num_cores

# Clients that leave: how many at once, and the seconds within which each of them leaves.
STORM, LEISURE = (200, 0.05), (40, 0.2)
EVENTS_PER_S = 50.0  # of a stream: a step of 20 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    probes: int = 400  # single requests, each way
    window_s: float = 3.0  # in which the events of streams count
    levels: Sequence[int]  # events per second of all streams together
    load: int  # events per second beside which latency is measured
    pairs: int = 3  # windows of streams, each way
    streams: int = 4000
    leaving: int = 10_000


# --- latency ---


def added(direct: Sequence[float], routed: Sequence[float]) -> dict[str, float]:
    """Return percentiles in ms, directly and through the router, and how much larger the latter are."""
    found = {}
    for share in (0.5, 0.99):
        here, there = 1e3 * percentile(direct, share), 1e3 * percentile(routed, share)
        name = f"p{round(100 * share)}_ms"
        found |= {f"direct_{name}": here, f"routed_{name}": there, f"added_{name}": there - here}
    return found


def alone(running: Fleet, probes: int) -> dict[str, float]:
    """Measure requests one at a time: from the request to the first event."""
    direct, routed = running.pool.submit(probe, [running.workers[0], running.url], probes, 1).result()
    return added(direct, routed)


def beside_streams(running: Fleet, size: Size) -> dict[str, Any]:
    """Measure requests one at a time, and the events of streams, while streams are at ``size.load``.

    For single requests the streams run through the router, whichever way the requests go. For events the
    streams go either way by turns.
    """
    events: dict[str, list[float]] = {"direct": [], "routed": []}
    for pair in range(size.pairs):
        for way in ("direct", "routed") if pair % 2 else ("routed", "direct"):
            urls = running.workers if way == "direct" else [running.url]
            _, found = streamed(running, urls, size.load, size.window_s)
            events[way] += [each for part in found for each in part.transit_s]
    found_probes = _probe_beside(running, size)
    return {
        "events_per_s": size.load,
        "requests": found_probes,
        "events": added(events["direct"], events["routed"]),
    }


def _probe_beside(running: Fleet, size: Size) -> dict[str, float]:
    """Measure single requests in a further process, while the others keep streams open."""
    num_probes = max(20, size.probes // 2)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.sleep, 0).result()
        seconds = 2.0 + num_probes * 0.015
        begin = clock() + 1.5
        streams = _streams(running, [running.url], size.load, begin, begin + seconds)
        time.sleep(begin - clock())
        direct, routed = pool.submit(probe, [running.workers[0], running.url], num_probes, 2).result()
        for each in streams:
            each.result()
    return added(direct, routed)


# --- streams ---


def _streams(running: Fleet, urls: Sequence[str], events_per_s: int, begin: float, end: float) -> list[Any]:
    """Let all client processes keep streams open over a window; each process uses one of the URLs."""
    count = max(1, round(events_per_s / EVENTS_PER_S))
    shares = [len(range(i, count, running.num_clients)) for i in range(running.num_clients)]
    return [
        running.pool.submit(stream, urls[i % len(urls)], share, EVENTS_PER_S, begin, end, end, i)
        for i, share in enumerate(shares)
    ]


def streamed(
    running: Fleet, urls: Sequence[str], events_per_s: int, window_s: float
) -> tuple[dict[str, Any], list[Streamed]]:
    """Keep streams open for a window; return the router's part in it, and what the clients got."""
    begin = clock() + 1.0 + events_per_s / EVENTS_PER_S * 0.002  # time to open the streams
    futures = _streams(running, urls, events_per_s, begin, begin + window_s)
    for worker in running.workers:
        stats(worker)  # forgets how late its steps were before
    time.sleep(begin - clock())
    before = {pid: cpu_s(pid) for pid in running.router}
    busy, workers = busy_s(), [cpu_s(pid) for pid in running.worker_pids]
    time.sleep(begin + window_s - clock())
    busy = busy_s() - busy
    used = [cpu_s(pid) - before[pid] for pid in running.router]
    router = sum(used)
    busiest = max(cpu_s(pid) - before for pid, before in zip(running.worker_pids, workers, strict=True))
    found = [future.result() for future in futures]
    told = [stats(worker) for worker in running.workers]
    num_events = sum(each.num_events for each in found)
    transit = [each for part in found for each in part.transit_s]
    return {
        "offered_per_s": events_per_s,
        "events_per_s": num_events / window_s,
        "router_cpu": router / window_s,  # all processes of the router together, in cores
        "busiest_router_cpu": max(used) / window_s,
        "machine_cpu": busy / window_s / num_cores(),  # share of all cores, other work included
        "us_per_event": 1e6 * router / max(1, num_events),
        "transit_p50_ms": 1e3 * percentile(transit, 0.5),
        "transit_p99_ms": 1e3 * percentile(transit, 0.99),
        "worker_late_ms": 1e3 * max(each["late_s"] for each in told),
        "worker_cpu": busiest / window_s,
        "client_cpu": max(each.cpu for each in found),
        "num_lost": sum(each.num_lost for each in found),
    }, found


def _rss_mib(running: Fleet) -> float:
    return sum(map(rss_mib, running.router))


def many_streams(running: Fleet, count: int) -> dict[str, Any]:
    """Keep ``count`` streams open that get an event every two seconds; return the router's memory."""
    before = _rss_mib(running)
    begin = clock() + 1.5 + count * 0.004
    shares = [len(range(i, count, running.num_clients)) for i in range(running.num_clients)]
    end = begin + 3.0
    futures = [
        running.pool.submit(stream, running.url, share, 0.5, begin, end, end + 1.0, i)
        for i, share in enumerate(shares)
    ]
    time.sleep(end - clock())
    after, held = _rss_mib(running), num_held(running.url)
    found = [future.result() for future in futures]
    return {
        "streams": held,
        "num_lost": sum(each.num_lost for each in found),
        "rss_before_mib": before,
        "rss_mib": after,
        "kib_per_stream": (after - before) * 1024 / count,
    }


# --- clients that leave ---


def leaving(running: Fleet, count: int) -> dict[str, Any]:
    """Let clients leave at random moments; return what the router and the workers keep.

    A quarter of them comes in a storm, in which most leave before the router has answered, the next quarter
    at leisure, and so does the other half.
    """
    rss, begun, began, num_clients = [], 0, clock(), 0
    for number, (at_once, most_s) in enumerate((STORM, LEISURE, STORM, LEISURE)):
        share, each = count // 4 // running.num_clients, max(1, at_once // running.num_clients)
        futures = [
            running.pool.submit(leave, running.url, share, each, most_s, 4 * i + number)
            for i in range(running.num_clients)
        ]
        begun += sum(future.result() for future in futures)
        num_clients += share * running.num_clients
        settled_s = _settle(running)
        rss.append(_rss_mib(running))
    told = [stats(worker) for worker in running.workers]
    return {
        "clients": num_clients,
        "had_events": begun,
        "seconds": clock() - began,
        "settled_s": settled_s,
        "held": num_held(running.url),
        "worker_legs": sum(each["legs"] for each in told),
        "worker_connections": sum(each["connections"] - 2 for each in told),  # without /watch and /stats
        "router_descriptors": sum(map(num_descriptors, running.router)),
        "rss_half_mib": rss[1],
        "rss_mib": rss[3],
    }


def _settle(running: Fleet) -> float:
    """Wait until the router holds nothing and no worker has a leg, for at most 10 s; return the seconds."""
    began = clock()
    while num_held(running.url) or any(stats(worker)["legs"] for worker in running.workers):
        if clock() - began > 10:
            break
        time.sleep(0.01)
    return clock() - began


# --- all of it ---


def measure(size: Size, others: int, processes: int) -> dict[str, Any]:
    """Measure everything; return the figures by name.

    Args:
        size: how much.
        others: the number of worker processes, and of client processes.
        processes: of the router.
    """
    found: dict[str, Any] = {"workers": others, "processes": processes}
    with fleet(others, processes) as running:
        found["alone"] = alone(running, size.probes)
        found["beside_streams"] = beside_streams(running, size)
        found["levels"] = [streamed(running, [running.url], level, size.window_s)[0] for level in size.levels]
    found["limited_by"] = limited_by(found["levels"])
    with fleet(others, processes) as running:
        found["many_streams"] = many_streams(running, size.streams)
    with fleet(others, processes) as running:
        found["leaving"] = leaving(running, size.leaving)
    return found


def main() -> int:
    """Measure, print a table, store ``router.json``; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", default="router", help="of the file of results")
    parser.add_argument("--processes", type=int, default=1, help="of the router")
    args = parser.parse_args()
    cores = num_cores()
    if cores >= MANY_CORES:
        size = Size(levels=(10_000, 20_000, 25_000, 30_000, 35_000, 40_000, 50_000), load=15_000)
    else:
        size = Size(levels=(3_200, 3_200, 3_200, 6_400, 9_600), load=3_200)
    began = clock()
    found = measure(size, max(1, min(5, (cores - 1) // 3)), args.processes)
    found["seconds"] = clock() - began
    found["figures"] = figures(found)
    limits, rows, verdicts = bars(cores, args.processes), [], {}
    for name, value in found["figures"].items():
        if (bar := limits.get(name)) is not None:
            verdicts[name] = {"bar": f"{bar[0]} {bar[1]}", "holds": holds(value, bar)}
        word = "" if bar is None else "holds" if verdicts[name]["holds"] else "MISSED"
        rows.append([name, f"{value:.5g}", "" if bar is None else f"{bar[0]} {bar[1]:g}", word])
    found["bars"] = verdicts
    columns = ["events/s offered", "passed on", "router CPU", "us per event", "p50 ms", "p99 ms"]
    report.show("streams through the router", columns, [_level_row(level) for level in found["levels"]])
    report.show(f"the router on {cores} cores", ["", "", "bar", ""], rows)
    print(f"events per second were limited by {found['limited_by']}")
    print(f"written to {report.save(args.name, found)} after {found['seconds']:.0f} s")
    missing = limits.keys() - found["figures"].keys()
    for name in sorted(missing):
        print(f"no figure: {name}", file=sys.stderr)
    return 0 if not missing and all(verdict["holds"] for verdict in verdicts.values()) else 1


def _level_row(level: dict[str, Any]) -> list[str]:
    return [
        f"{level['offered_per_s']:,}",
        f"{level['events_per_s']:,.0f}",
        f"{level['router_cpu']:.0%}",
        f"{level['us_per_event']:.1f}",
        *(f"{level[name]:.2f}" for name in ("transit_p50_ms", "transit_p99_ms")),
    ]


if __name__ == "__main__":
    sys.exit(main())
