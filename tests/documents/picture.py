"""Draw a session with stagectl on simulated nodes, as README shows it.

``python -m tests.documents.picture FILE`` (`make pictures`) runs the commands and writes the SVG.
It names no font that must be loaded, as GitHub shows pictures without what is elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tests.support.session import new_home, run_session
from tests.support.terminal import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.session import Step

#: What comes before the session, and is not in the picture.
_BEFORE = ("cd", "head -c 64M /dev/urandom > img.sqsh")
_STAGE = "stagectl stage --local 4 img.sqsh:/nvme/"
_COMMANDS = (_STAGE, _STAGE, "stagectl status --by file --local-root stage-nodes")

#: Pixels: a column and a line of text in the font's size, and the margin around all.
_COLUMN, _LINE, _SIZE, _MARGIN = 8.4, 20, 14, 16
_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_BACKGROUND, _PLAIN, _TYPED = "#0d1117", "#c9d1d9", "#ffffff"
_COLOURS = {
    "white": _TYPED, "cyan": "#39c5cf", "green": "#3fb950", "brown": "#d29922", "red": "#ff7b72",
}  # fmt: skip
_PROMPT = Piece("$ ", "green")


def session() -> list[Step]:
    """Run the commands on four simulated nodes, as `make demo` does."""
    with new_home() as home:
        return run_session([*_BEFORE, *_COMMANDS], home)[len(_BEFORE) :]


def svg(steps: Sequence[Step]) -> str:
    """Return a picture of the commands and of what they printed."""
    lines = [line for step in steps for line in (_typed(step), *step.lines)]
    longest = max(sum(len(piece.text) for piece in line) for line in lines)
    width, height = 2 * _MARGIN + _COLUMN * longest, 2 * _MARGIN + _LINE * len(lines)
    box = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    style = f'font-family="{_FONT}" font-size="{_SIZE}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>',
        f'<rect width="100%" height="100%" rx="6" fill="{_BACKGROUND}"/>',
        *(_drawn(line, number) for number, line in enumerate(lines, 1)),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _typed(step: Step) -> list[Piece]:
    return [_PROMPT, Piece(step.command, "white")]


def _drawn(line: Sequence[Piece], number: int) -> str:
    """Return a line as a group of its pieces, each of which is as long in every font."""
    return f"<g>{''.join(_texts(line, _MARGIN + _LINE * number - (_LINE - _SIZE)))}</g>"


def _texts(line: Sequence[Piece], y: int) -> Iterator[str]:
    column = 0
    for text, colour in line:
        place = f'x="{_MARGIN + _COLUMN * column:.1f}" y="{y}"'
        length = f'textLength="{_COLUMN * len(text):.1f}" lengthAdjust="spacingAndGlyphs"'
        # Browsers make one of several spaces, but not of these.
        shown = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
        yield f'<text {place} {length} fill="{_COLOURS.get(colour, _PLAIN)}">{shown}</text>'
        column += len(text)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(session()), "utf-8")
