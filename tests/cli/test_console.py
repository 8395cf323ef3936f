"""What is printed for people is text, whatever names it holds."""

from __future__ import annotations

import pytest

from stager.cli.terminal import printable_lines


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain \u00e9", "plain \u00e9"),
        ("a\x1b]0;x\x07b\tc\u202e", "a?]0;x?b?c?"),
        ("problem\n  its reason\n  ^", "problem\n  its reason\n  ^"),
        ("a name\nstage: forged", "a name?stage: forged"),
        ("a name\n stage: forged\r\u2028x", "a name? stage: forged??x"),
        ("ends\n", "ends?"),
        ("\udce9", "\udce9"),
    ],
)
def test_a_name_adds_no_line_to_a_message(text: str, printed: str) -> None:
    assert printable_lines(text) == printed
