"""Draw rates by size as an SVG: points in, text out. Pure."""

from __future__ import annotations

from itertools import cycle
from math import ceil, floor, log2, log10
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from stager.base.text import bytes_text, elided

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    #: By what a line stands for, its points: bytes of a message or block, and bytes a second.
    Lines = Mapping[str, Sequence[tuple[int, float]]]

#: Pixels: the picture, and within it the area of the lines. The legend is to the right of that.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _BELOW = 760, 72, 520, 44, 340, 60
_ROW = 20
#: Colours that most people tell apart (Okabe and Ito, Color Universal Design, 2008).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Where there are more lines than colours, the next ones are broken.
_DASHES = ("none", "8 4", "2 3")
_MOST_LABELS, _STEPS = 8, 5
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def svg(title: str, across: str, lines: Lines, limits: Mapping[str, float]) -> str:
    """Return a picture of each line, and of each limit as a broken line across.

    ``across`` says what the sizes are of. A limit is a rate that depends on no size. Sizes are on a
    logarithmic axis, rates on a linear one that begins with 0.
    """
    sizes = sorted({size for points in lines.values() for size, _ in points})
    rates = [rate for points in lines.values() for _, rate in points]
    scale = _Scale(sizes, max([*rates, *limits.values()], default=0.0))
    height = max(_BOTTOM + _BELOW, _TOP + _ROW * (len(lines) + len(limits) + 1))
    box = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text((_LEFT + _WIDTH) / 2, 22, elided(title, 90), size=14),
        *_axes(scale, sizes, across),
    ]
    row = _TOP + _ROW / 2
    kinds = cycle((colour, dash) for dash in _DASHES for colour in _COLOURS)
    for (name, points), (colour, dash) in zip(lines.items(), kinds, strict=False):
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        places = [(scale.x(size), scale.y(rate)) for size, rate in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" {style}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts += _legend(row, name, style)
        row += _ROW
    for name, rate in limits.items():
        style = 'stroke="#555555" stroke-dasharray="6 4"'
        y = scale.y(rate)
        parts.append(_rule(_LEFT, y, _RIGHT, y, style))
        parts.append(_text(_LEFT + 4, y - 4, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Where sizes and rates are in the picture, and the unit of the rates."""

    def __init__(self, sizes: Sequence[int], highest: float) -> None:
        self._first, self._last = (log2(sizes[0]), log2(sizes[-1])) if sizes else (0.0, 0.0)
        self.factor, self.unit = next(
            ((factor, unit) for factor, unit in _UNITS if highest >= factor), _UNITS[-1]
        )
        self.step = _round_step(highest / self.factor / _STEPS)
        self.steps = max(1, ceil(highest / self.factor / self.step))

    def x(self, size: int) -> float:
        if self._first == self._last:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + (_RIGHT - _LEFT) * (log2(size) - self._first) / (self._last - self._first)

    def y(self, rate: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * rate / self.factor / (self.steps * self.step)


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``least``.

    >>> _round_step(0.21), _round_step(3), _round_step(0)
    (0.5, 5.0, 1.0)
    """
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _axes(scale: _Scale, sizes: Sequence[int], across: str) -> Iterator[str]:
    for step in range(scale.steps + 1):
        rate = step * scale.step
        y = scale.y(rate * scale.factor)
        yield _rule(_LEFT, y, _RIGHT, y, 'stroke="#dddddd"')
        yield _text(_LEFT - 8, y + 4, f"{rate:g}", "end")
    every = ceil(len(sizes) / _MOST_LABELS)
    for size in sizes[::every] if sizes else ():
        x = scale.x(size)
        yield _rule(x, _BOTTOM, x, _BOTTOM + 5, 'stroke="black"')
        yield _text(x, _BOTTOM + 20, bytes_text(size).replace(".0 ", " "))
    yield _rule(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, 'stroke="black"')
    yield _rule(_LEFT, _TOP, _LEFT, _BOTTOM, 'stroke="black"')
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, across)
    middle = (_TOP + _BOTTOM) / 2
    yield (
        f'<text transform="translate(18 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"rate in {scale.unit}</text>"
    )


def _legend(y: float, name: str, style: str) -> list[str]:
    return [
        _rule(_RIGHT + 20, y, _RIGHT + 48, y, style),
        _text(_RIGHT + 56, y + 4, elided(name, 26), "start"),
    ]


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'
