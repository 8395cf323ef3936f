"""Pieces of an SVG plot, for light and dark pages. It loads nothing, so that GitHub shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Of what every plot has, and of lines in three colours.
STYLE = """
text { font: 12px sans-serif; fill: #57606a }
.title { font-weight: bold; fill: #24292f }
.axis { stroke: #d0d7de }
.line { fill: none; stroke-width: 2 }
.blue { stroke: #0969da }
.green { stroke: #1a7f37 }
.orange { stroke: #bc4c00; stroke-dasharray: 5 4 }
.violet { fill: #8250df }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .title { fill: #f0f6fc }
  .axis { stroke: #3d444d }
  .blue { stroke: #4493f8 }
  .green { stroke: #3fb950 }
  .orange { stroke: #f0883e }
  .violet { fill: #ab7df8 }
}
"""


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return the whole picture, in pixels."""
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "label") -> str:
    """Return words whose start, middle or end is at ``x``."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> str:
    """Return a straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def curve(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Return a line through all of ``points``."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {colour}" points="{places}"/>'
