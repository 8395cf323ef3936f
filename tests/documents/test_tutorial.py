"""The tutorial: what it says is printed is what is printed today."""

from __future__ import annotations

import re

from tests.documents.pages import DOCS, Said, said
from tests.support.session import new_home, run_session, without_figures

COMMANDS = said(f"{DOCS}/start/tutorial.md")


def text_of(session: list[Said]) -> str:
    """Return commands and their output as one text, of which pytest shows what differs."""
    return "".join(f"$ {each.command}\n{each.output}" for each in session)


def test_the_commands_print_what_the_tutorial_says() -> None:
    with new_home() as home:
        steps = run_session([each.command for each in COMMANDS], home)
    printed = [Said(step.command, step.text) for step in steps]
    assert without_figures(text_of(printed)) == without_figures(text_of(COMMANDS))


def test_lines_with_other_words_are_not_alike() -> None:
    lines = [line for each in COMMANDS for line in each.output.splitlines()]
    for line in lines:
        alike = without_figures(line)
        words = [word for word in re.findall("[A-Za-z]{4,}", alike) if word in line]
        assert words or line.strip() in ("^", "4")
        for word in words:
            assert without_figures(line.replace(word, f"{word}x")) != alike
