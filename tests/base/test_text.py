"""Sizes, times and counts as messages show them."""

from __future__ import annotations

import os

import pytest

from stager.base.text import SHOW_BYTES, bytes_text, files_text, printable, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"), (268_435_456, "256.0 MiB"), (1 << 40, "1.0 TiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)  # fmt: skip
def test_bytes_have_the_largest_unit_that_they_fill(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (5, "5.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (61, "1 min 1 s"),
        (3600, "1 h 0 min"), (5000, "1 h 23 min"),
    ],
)  # fmt: skip
def test_seconds_have_two_units_from_a_minute_on(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_files_are_counted() -> None:
    assert [files_text(count) for count in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


@pytest.mark.parametrize("text", ["/a\tb", "/a\nb", "/a\x1bb", "/a\ud800b"])
def test_what_does_not_print_becomes_one_question_mark(text: str) -> None:
    assert printable(text) == "/a?b"
    assert printable("/é 漢") == "/é 漢"


def test_a_byte_that_is_no_utf_8_is_shown_as_its_number() -> None:
    name = os.fsdecode(b"bad\xff\xc3\xa9")
    assert printable(name) == "bad\\xffé"
    assert f"{name}\ud800".encode("ascii", SHOW_BYTES) == b"bad\\xff\\xe9\\ud800"
