"""The picture in README: its text is what stagectl prints today, and nothing else is loaded."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.documents.picture import session, svg
from tests.support.session import REPOSITORY, Step, without_figures
from tests.support.terminal import Piece

PICTURE = REPOSITORY / "slurm-config/session.svg"
GROUP = "{http://www.w3.org/2000/svg}g"


def lines_of(picture: str) -> list[str]:
    """Return the text of each line of a picture."""
    lines = ["".join(group.itertext()) for group in ElementTree.fromstring(picture).iter(GROUP)]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def test_the_picture_shows_what_the_commands_print() -> None:
    drawn, printed = lines_of(PICTURE.read_text()), lines_of(svg(session()))
    assert [*map(without_figures, drawn)] == [*map(without_figures, printed)]


def test_readme_shows_the_picture_which_loads_nothing() -> None:
    text = PICTURE.read_text()
    assert "](slurm-config/session.svg)" in (REPOSITORY / "README.md").read_text()
    assert len(text) < 40_000
    assert re.findall(r"\w+://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|src=|url\(|@import|<script|<style|<image", text)


def test_a_picture_has_each_command_and_its_lines_in_their_colours() -> None:
    step = Step("ls <a>", [[Piece("a & ", "default"), Piece("██", "cyan")], []])
    stretched = 'lengthAdjust="spacingAndGlyphs"'
    texts = (
        f'x="16.0" y="30" textLength="16.8" {stretched} fill="#3fb950">$\xa0',
        f'x="32.8" y="30" textLength="50.4" {stretched} fill="#ffffff">ls\xa0&lt;a&gt;',
        f'x="16.0" y="50" textLength="33.6" {stretched} fill="#c9d1d9">a\xa0&amp;\xa0',
        f'x="49.6" y="50" textLength="16.8" {stretched} fill="#39c5cf">██',
    )
    prompt, typed, plain, bar = (f"<text {text}</text>" for text in texts)
    assert svg([step]).splitlines()[2:] == [
        f"<g>{prompt}{typed}</g>", f"<g>{plain}{bar}</g>", "<g></g>", "</svg>",
    ]  # fmt: skip
    assert lines_of(svg([step])) == ["$ ls <a>", "a & ██", ""]
