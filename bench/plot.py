"""Small charts as SVG: line charts, bars and timelines, instead of a plotting library.

    python -m bench.plot

draws `results/gpu_updates_and_pauses.svg`, the picture of README.md, from `gpu_weight_sync.json` (written by
`bench.weight_sync`) and `gpu_pause.json` (written by `bench.pause`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_COLOURS = ("#1b6ca8", "#c8553d", "#4c956c", "#8f5ea2")
_MARK = "#222"
_WIDTH, _HEIGHT, _MARGIN = 360, 240, 44
_MOST_DOTS = 40  # of a curve, before they get small
_RESULTS = Path(__file__).with_name("results")

Curves = Mapping[str, Sequence[tuple[float, float]]]


def charts(
    path: Path, panels: Mapping[str, Curves], x_label: str, marks: Mapping[str, float] | None = None
) -> Path:
    """Write the panels side by side; each has a title and named curves of (x, y), and axes from zero.

    All have the same axis of x. ``marks``: upright lines in each panel, with their names and x.
    """
    last = max((x for curves in panels.values() for curve in curves.values() for x, _ in curve), default=0.0)
    parts = [
        _panel(title, curves, x_label, i * _WIDTH, last, marks or {})
        for i, (title, curves) in enumerate(panels.items())
    ]
    width = _WIDTH * len(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    return path


def _panel(
    title: str, curves: Curves, x_label: str, left: int, last: float, marks: Mapping[str, float]
) -> str:
    """Return the SVG of one panel of curves up to x = `last`, `left` pixels from the picture's left edge."""
    highest = max((y for curve in curves.values() for _, y in curve), default=0.0)
    top_x, top_y = last * 1.1 or 1.0, highest * 1.1 or 1.0
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + wide * x / top_x, _HEIGHT - _MARGIN - high * y / top_y

    parts = [f'<text x="{_MARGIN}" y="16" font-weight="bold">{escape(title)}</text>']
    for i in range(5):
        x, y = at(top_x * i / 4, top_y * i / 4)
        parts.append(f'<line x1="{_MARGIN}" x2="{_MARGIN + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 4}" y="{y + 4:.1f}" text-anchor="end">{top_y * i / 4:.3g}</text>')
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 14}" text-anchor="middle">{top_x * i / 4:.3g}</text>'
        )
    parts.append(
        f'<text x="{_MARGIN + wide / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for name, mark in marks.items():
        x, _ = at(mark, 0.0)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_MARGIN}" y2="{_HEIGHT - _MARGIN}" stroke="{_MARK}" '
            f'stroke-dasharray="4 3"/><text x="{x + 4:.1f}" y="{_HEIGHT - _MARGIN - 6}" fill="{_MARK}">'
            f"{escape(name)}</text>"
        )
    for i, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(curve)))
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        radius = 3 if len(curve) <= _MOST_DOTS else 1
        for place in places.split():
            left_of, _, above = place.partition(",")
            parts.append(f'<circle cx="{left_of}" cy="{above}" r="{radius}" fill="{colour}"/>')
        parts.append(f'<text x="{_MARGIN + 6}" y="{32 + 14 * i}" fill="{colour}">{escape(name)}</text>')
    return f'<g transform="translate({left},0)">{"".join(parts)}</g>'


# --- bars ---

_BARS_WIDTH, _LABELS, _BAR, _PITCH = 760, 220, 16, 26
_RUNS, _STOPPED, _PAUSE, _STEP = "#4c956c", "#c8553d", "#1b6ca8", "#b8bcc2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar: its parts from left to right, as (length, colour), and the text behind its end."""

    label: str
    parts: Sequence[tuple[float, str]]
    text: str


def bars(path: Path, panels: Mapping[str, Sequence[Bar]], legend: Mapping[str, str]) -> Path:
    """Write one panel below the other, each with a title and its own scale; ``legend``: colour -> text."""
    parts, top = [], 10
    for title, rows in panels.items():
        parts.append(f'<text x="14" y="{top + 14}" font-weight="bold" font-size="13">{escape(title)}</text>')
        top += 26
        longest = max(sum(length for length, _ in row.parts) for row in rows)
        scale = (_BARS_WIDTH - _LABELS - 300) / longest
        for row in rows:
            parts.append(_bar(row, top, scale))
            top += _PITCH
        top += 16
    x = 14
    for colour, text in legend.items():
        parts.append(f'<rect x="{x}" y="{top}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{top + 10}">{escape(text)}</text>')
        x += 40 + 6 * len(text)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_BARS_WIDTH}" height="{top + 24}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    return path


def _bar(bar: Bar, top: float, scale: float) -> str:
    """Return the SVG of one bar at `top` pixels; `scale`: pixels per unit of length."""
    middle, x = top + _BAR - 4, float(_LABELS)
    parts = [f'<text x="{_LABELS - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>']
    for length, colour in bar.parts:
        width = length * scale
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
        x += width
    parts.append(f'<text x="{x + 8:.1f}" y="{middle}">{escape(bar.text)}</text>')
    return "".join(parts)


# --- lanes ---

_LANES_WIDTH, _LANE_LABELS, _LANE_TEXT = 900, 170, 290
_OPACITY = (1.0, 0.6, 0.3)  # of `LaneSpan.shade`


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Something that takes time, or only a moment, in the unit of the picture."""

    begin: float
    end: float
    shade: int  # 0: the colour itself; 1, 2: paler


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: what happens there, from left to right, and a text at the right."""

    label: str
    colour: str
    spans: Sequence[LaneSpan]
    text: str


def timeline(path: Path, title: str, rows: Sequence[Lane], unit: str) -> Path:
    """Write one row below the other, over a common axis of time that begins at 0."""
    last = max(span.end for row in rows for span in row.spans)
    scale = (_LANES_WIDTH - _LANE_LABELS - _LANE_TEXT) / last
    bottom = 34 + _PITCH * len(rows)
    parts = [f'<text x="14" y="20" font-weight="bold" font-size="13">{escape(title)}</text>']
    for quarter in range(5):
        x = _LANE_LABELS + scale * last * quarter / 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{bottom}" stroke="#ddd"/>')
        name = f"{last * quarter / 4:,.0f}" + (f" {unit}" if quarter == 4 else "")
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{name}</text>')
    for index, row in enumerate(rows):
        top = 34 + _PITCH * index
        parts.append(
            f'<text x="{_LANE_LABELS - 8}" y="{top + 12}" text-anchor="end">{escape(row.label)}</text>'
        )
        for span in row.spans:
            x, width = _LANE_LABELS + scale * span.begin, max(1.5, scale * (span.end - span.begin))
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{row.colour}" '
                f'fill-opacity="{_OPACITY[span.shade]}"/>'
            )
        x = _LANES_WIDTH - _LANE_TEXT + 10
        parts.append(f'<text x="{x}" y="{top + 12}">{escape(row.text)}</text>')
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LANES_WIDTH}" height="{bottom + 24}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    return path


def updates_and_pauses(updates: Mapping[str, Any], pauses: Mapping[str, Any], path: Path) -> Path:
    """Draw how little weight updates and pauses stop generation, from the results of both benchmarks."""

    def update(label: str, found: Mapping[str, Any]) -> Bar:
        """Return the bar of a weight update, in ms: first requests run, then they are stopped."""
        still = 1e3 * found["timings"]["write_s"]
        whole = 1e3 * found["timings"]["total_s"]
        lost = f"{found['lost_receiving']:.0%}"
        return Bar(
            label=label,
            parts=[(whole - still, _RUNS), (still, _STOPPED)],
            text=f"{whole:.0f} ms, {still:.0f} of them stopped; tokens {lost} slower",
        )

    def pause(label: str, ms: float) -> Bar:
        return Bar(label=label, parts=[(ms, _PAUSE)], text=f"{ms:.0f} ms")

    def step(label: str, ms: float) -> Bar:
        return Bar(label=label, parts=[(ms, _STEP)], text=f"{ms:.0f} ms")

    load, decoding, prefilling = updates["under load"], pauses["decoding"], pauses["prefilling"]
    size, chunk = updates["flattened"]["GB"], prefilling["tokens"] // 2
    return bars(
        path,
        {
            f"{size:.1f} GB of new weights while {load['streams']} streams generate": [
                update("sent at the default, 25 GB/s", load),
                update("sent without a limit", updates["under load, at full speed"]),
            ],
            f"From a pause request to its answer, while {decoding['rows']} requests decode": [
                step("one decode step", decoding["step"]),
                pause("pause, median", decoding["p50"]),
                pause("pause, 99th percentile", decoding["p99"]),
            ],
            f"The same, in a prompt of {prefilling['tokens']:,} tokens": [
                step(f"one chunk of {chunk:,} tokens", prefilling["chunk"]),
                pause("pause, median", prefilling["p50"]),
                pause("pause, worst", prefilling["worst"]),
            ],
        },
        {
            _RUNS: "requests run",
            _STOPPED: "generation is stopped",
            _PAUSE: "until nothing runs any more",
            _STEP: "a step, for comparison",
        },
    )


def main() -> None:
    updates, pauses = (
        json.loads((_RESULTS / f"{name}.json").read_text()) for name in ("gpu_weight_sync", "gpu_pause")
    )
    print(updates_and_pauses(updates, pauses, _RESULTS / "gpu_updates_and_pauses.svg"))


if __name__ == "__main__":
    main()
