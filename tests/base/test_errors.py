"""Each failure's exit code, its text with the node, and the caret under a directive's fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stager.base import errors
from stager.base.errors import (
    BusyError,
    DestinationError,
    DirectiveError,
    Failure,
    IntegrityError,
    LaunchError,
    PolicyRefusal,
    SourceError,
    SpaceError,
    StageError,
    UsageError,
)

DIGITS = "0123456789" * 2000


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError, 2),
        (DirectiveError, 2),
        (PolicyRefusal, 3),
        (SourceError, 4),
        (SpaceError, 5),
        (DestinationError, 6),
        (IntegrityError, 7),
        (LaunchError, 8),
        (BusyError, 9),
    ],
)
def test_each_class_owns_its_exit_code(error: type[StageError], code: int) -> None:
    assert error.code == code


def test_each_code_of_a_class_and_of_the_plugin_says_what_it_means_and_what_to_do() -> None:
    codes = errors.exit_codes()
    assert [*codes] == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "127", "128+N"]
    assert all(text.endswith(".") for texts in codes.values() for text in texts)
    plugin = (Path(__file__).parents[2] / "prolog/spank/stage.h").read_text()
    found = re.findall(r"\bSTAGE_[A-Z]+ = (\d+)\b(?! \*)", plugin)
    named = {code for code in found if int(code) < 256}
    assert named - {"20", "45"} <= {code.removesuffix("+N") for code in codes}


def test_a_directive_that_does_not_parse_is_a_usage_error() -> None:
    assert DirectiveError.__mro__[1:3] == (UsageError, StageError)


def test_the_text_of_an_error_names_the_node_where_one_is_known() -> None:
    assert str(SpaceError("/nvme is full", "n3")) == "n3: /nvme is full"


def test_the_text_of_an_error_without_a_node_is_its_message() -> None:
    assert str(SpaceError("/nvme is full")) == "/nvme is full"


def test_a_failure_carries_code_message_and_the_node_where_it_was_caught() -> None:
    assert Failure.of(SpaceError("/nvme is full"), "n1") == Failure(5, "/nvme is full", "n1")


def test_a_failure_keeps_the_node_that_the_error_names() -> None:
    assert Failure.of(BusyError("held", "n3"), "n1") == Failure(9, "held", "n3")


@pytest.mark.parametrize(
    ("text", "position", "shown", "column"),
    [
        ("", 0, "", 0),
        ("/a:b", 0, "/a:b", 0),
        ("/a:b", 3, "/a:b", 3),
        ("/a:b", 4, "/a:b", 4),
        (DIGITS[:76], 75, DIGITS[:76], 75),
        (DIGITS[:76], 76, DIGITS[:76], 76),
        (DIGITS[:77], 77, DIGITS[1:77], 76),
        (DIGITS[:77], 0, DIGITS[:76], 0),
        (DIGITS, 0, DIGITS[:76], 0),
        (DIGITS, 38, DIGITS[:76], 38),
        (DIGITS, 39, DIGITS[1:77], 38),
        (DIGITS, 10_000, DIGITS[9_962:10_038], 38),
        (DIGITS, 19_962, DIGITS[19_924:], 38),
        (DIGITS, 19_963, DIGITS[19_924:], 39),
        (DIGITS, 20_000, DIGITS[19_924:], 76),
    ],
)
def test_the_caret_stands_under_the_fault_in_a_window_of_76_characters(
    text: str, position: int, shown: str, column: int
) -> None:
    caret = " " * column + "^"
    assert str(DirectiveError("wrong", text, position)) == f"wrong\n  {shown}\n  {caret}"


def test_the_caret_stands_under_the_fault_behind_wide_and_combined_characters() -> None:
    text = "/数据/e\u0301:nvme/x"
    position = text.index("nvme")
    assert str(DirectiveError("wrong", text, position)) == f"wrong\n  {text}\n  {' ' * 8}^"


@pytest.mark.parametrize("char", ["\t", "\n", "\0", "\x1b", "\x9b", "\u2028", "\u200b", "\ud800"])
def test_a_character_that_does_not_print_is_shown_as_a_question_mark(char: str) -> None:
    assert str(DirectiveError("wrong", f"/a{char}:b", 4)) == "wrong\n  /a?:b\n      ^"


def test_the_caret_stands_behind_a_byte_that_is_no_utf_8() -> None:
    assert str(DirectiveError("wrong", "/a\udc80:b", 4)) == "wrong\n  /a\\x80:b\n         ^"


def test_a_directive_error_keeps_its_parts() -> None:
    error = DirectiveError("wrong", "/a:b", 3)
    assert (error.problem, error.text, error.position, error.node) == ("wrong", "/a:b", 3, None)
