"""What the measurements of `bench.router` must reach."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

BEHIND_MS = 100.0  # p99 of the events' way above which the router is falling behind
IDLE_MB = 80  # of a process of the router without streams
MANY_CORES = 8  # from here on, the router has a core for itself


def sustained(levels: Sequence[dict[str, Any]]) -> float:
    """Return the most events per second of which the router passed on 99 % without falling behind."""
    return max((level["events_per_s"] for level in levels if _is_sustained(level)), default=0.0)


def _is_sustained(level: dict[str, Any]) -> bool:
    is_whole: bool = level["events_per_s"] >= 0.99 * level["offered_per_s"]
    return is_whole and level["transit_p99_ms"] <= BEHIND_MS


def limited_by(levels: Sequence[dict[str, Any]]) -> str:
    """Return what kept the events per second from being more, at the level with the most of them.

    A figure that was limited by something else than the router says nothing about the router.
    """
    top = max(levels, key=lambda level: level["offered_per_s"])
    if _is_sustained(top):
        return f"the load: {top['offered_per_s']:,} per second were offered, and no more were tried"
    shares = {
        "a process of the router": top["busiest_router_cpu"],
        "a worker process": top["worker_cpu"],
        "a client process": top["client_cpu"],
        "the cores of the machine, which other processes use too": top["machine_cpu"],
    }
    name = max(shares, key=lambda each: shares[each])
    return f"{name} ({shares[name]:.0%} busy)"


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the figures that have bars, by name."""
    many, left = found["many_streams"], found["leaving"]
    kept = [level for level in found["levels"] if _is_sustained(level)] or found["levels"]
    us = median(level["us_per_event"] for level in kept)  # beyond them, events arrive joined, and cost less
    return {
        "added p50, lone request, ms": found["alone"]["added_p50_ms"],
        "added p99, lone request, ms": found["alone"]["added_p99_ms"],
        "added p50, request beside streams, ms": found["beside_streams"]["requests"]["added_p50_ms"],
        "added p99, request beside streams, ms": found["beside_streams"]["requests"]["added_p99_ms"],
        "added p50, event, ms": found["beside_streams"]["events"]["added_p50_ms"],
        "added p99, event, ms": found["beside_streams"]["events"]["added_p99_ms"],
        "CPU time per event, us": us,
        # An estimate: what a process would carry if it had a core for itself, and used all of it.
        "events per second and process, estimated from the CPU time": 1e6 / us,
        "events per second, sustained": sustained(found["levels"]),
        "events per second and process, sustained": sustained(found["levels"]) / found["processes"],
        f"memory with {many['streams']} streams, MiB": many["rss_mib"],
        "clients that have left": left["clients"],
        "legs held after all clients have left": left["held"] + left["worker_legs"],
        "connections to workers after all clients have left": left["worker_connections"],
        "memory growth from the second half of leaving clients, MiB": left["rss_mib"] - left["rss_half_mib"],
    }


def bars(cores: int, processes: int = 1) -> dict[str, tuple[str, float]]:
    """Return the bar of each figure that has one: the comparison and the value.

    Further processes of the router may each take as much memory as one does without streams.
    """
    many = cores >= MANY_CORES
    memory_mb = 400 + (0 if processes == 1 else IDLE_MB * processes)
    found = {
        "added p50, lone request, ms": ("<=", 1.0 if many else 2.5),
        "CPU time per event, us": ("<=", 33.3),
        "legs held after all clients have left": ("<=", 0),
        "connections to workers after all clients have left": ("<=", 0),
        "memory growth from the second half of leaving clients, MiB": ("<=", 8),
        "clients that have left": (">=", 9_990),
        "memory with 4000 streams, MiB": ("<=", memory_mb * 1e6 / 2**20),
    }
    if many:  # where all processes share the cores, these figures are those of the machine
        found |= {
            "added p50, request beside streams, ms": ("<=", 1.0),
            "added p50, event, ms": ("<=", 1.0),
            "added p99, lone request, ms": ("<=", 5),
            "added p99, request beside streams, ms": ("<=", 5),
            "added p99, event, ms": ("<=", 5),
            "events per second and process, sustained": (">=", 30_000),
        }
    return found


def holds(value: float, bar: tuple[str, float]) -> bool:
    """Whether a figure keeps its bar."""
    return value <= bar[1] if bar[0] == "<=" else value >= bar[1]
