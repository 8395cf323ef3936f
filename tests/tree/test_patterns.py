"""Patterns: which texts are patterns, and which paths they select."""

from __future__ import annotations

import pytest

from stager.tree.listing import Kind, Row
from stager.tree.patterns import Patterns, is_numbered_pattern, is_pattern, numbered_regex


@pytest.mark.parametrize("text", ["*.pyc", "/a b/", "**/d/*", "[a-z]?", "\\!a", "a#", " a"])
def test_a_line_of_a_gitignore_is_a_pattern(text: str) -> None:
    assert is_pattern(text)


@pytest.mark.parametrize("text", ["", " ", "!a", "#a", "a\\"])
def test_a_comment_a_negation_and_a_blank_line_are_no_patterns(text: str) -> None:
    assert not is_pattern(text)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("{n}", True),
        ("part-{n}.*", True),
        ("rank{n}/", True),
        ("/a b/{n}/**", True),
        ("**/{n}?[a-z]", True),
        ("{m}{n}", True),
        ("", False),
        ("part", False),
        ("{n}{n}", False),
        ("{n}/{n}", False),
        ("{ n }", False),
        ("{N}", False),
        ("!{n}", False),
        ("#{n}", False),
        ("{n}\\", False),
        ("\ue000{n}", False),
        ("[{n}]", False),
        ("x[{n}]y", False),
        ("**/*a*{n}", True),
        ("*a*b*{n}", False),
    ],
)
def test_a_numbered_pattern_has_one_number(text: str, is_one: bool) -> None:
    assert is_numbered_pattern(text) == is_one


def test_the_expression_of_a_numbered_pattern_finds_all_digits() -> None:
    found = numbered_regex("part-{n}.*").match("deep/part-0012.tar")
    assert found
    assert found["number"] == "0012"
    assert not numbered_regex("part-{n}").match("part-")


def test_a_number_may_follow_digits_of_the_pattern() -> None:
    found = numbered_regex("part-00{n}.txt").match("part-0012.txt")
    assert found
    assert found["number"] == "12"
    assert not numbered_regex("part-00{n}.txt").match("part-012.txt")
    assert not numbered_regex("p*{n}.txt").match("p12.tx")


@pytest.mark.parametrize(
    ("path", "is_folder", "left_out"),
    [
        (b"a.py", False, False),
        (b"a.txt", False, True),
        (b"tests", True, True),
        (b"tests", False, True),
        (b"docs", True, False),
        (b"docs/\xff.py", False, False),
    ],
)
def test_a_folder_is_left_out_only_by_exclude(
    path: bytes, *, is_folder: bool, left_out: bool
) -> None:
    patterns = Patterns(["*.py"], ["tests/"])
    assert patterns.leaves_out(path, is_folder=is_folder) == left_out


def test_folders_that_are_not_included_and_contain_nothing_are_pruned() -> None:
    folders = [Row(path, Kind.FOLDER) for path in (b"", b"a", b"a/b", b"empty", b"kept")]
    rows = [*folders, Row(b"a/b/x.py", Kind.FILE)]
    found = Patterns(["*.py", "kept/"], []).pruned(rows)
    assert [row.path for row in found] == [b"", b"a", b"a/b", b"kept", b"a/b/x.py"]
    assert Patterns([], ["x"]).pruned(rows) == rows


def test_patterns_that_match_nothing_are_known() -> None:
    include = ["*.py", "/b/", "/c", "/empty/", "*.txt"]
    patterns = Patterns(include, [])
    names = [b"", b"a.py", b"b", b"b/x", b"empty"]
    folders = (b"", b"b", b"empty")
    patterns.pruned(Row(name, Kind.FOLDER if name in folders else Kind.FILE) for name in names)
    assert patterns.unmatched == ("/c", "*.txt")
