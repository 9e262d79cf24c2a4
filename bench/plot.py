"""Draws small line charts as SVG: two dozen lines of code instead of a plotting library for a few curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_COLOURS = ("#1b6ca8", "#c8553d", "#4c956c", "#8f5ea2")
_WIDTH, _HEIGHT, _MARGIN = 360, 240, 44

Curves = Mapping[str, Sequence[tuple[float, float]]]


def charts(path: Path, panels: Mapping[str, Curves], x_label: str) -> Path:
    """Write the panels side by side; each has a title and named curves of (x, y), and axes from zero."""
    parts = [_panel(title, curves, x_label, i * _WIDTH) for i, (title, curves) in enumerate(panels.items())]
    width = _WIDTH * len(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    return path


def _panel(title: str, curves: Curves, x_label: str, left: int) -> str:
    points = [point for curve in curves.values() for point in curve]
    top_x, top_y = (max((p[axis] for p in points), default=1.0) * 1.1 or 1.0 for axis in (0, 1))
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
    for i, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(curve)))
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{place.partition(",")[0]}" cy="{place.partition(",")[2]}" r="3" fill="{colour}"/>'
            for place in places.split()
        ]
        parts.append(f'<text x="{_MARGIN + 6}" y="{32 + 14 * i}" fill="{colour}">{escape(name)}</text>')
    return f'<g transform="translate({left},0)">{"".join(parts)}</g>'
