"""Which lines of a batch script are its head, and what its #STAGE and #SBATCH lines say."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.errors import DirectiveError, DirectiveErrors, UsageError
from stager.base.options import Options, Validate
from stager.request.grammar import Directive
from stager.request.script import (
    cut_values,
    head,
    ignored_lines,
    likely_mistakes,
    may_stage,
    refused_by_sbatch,
    sbatch_values,
)
from tests.support.directives import (
    BASH,
    TEXTS,
    assert_the_caret_is_under_the_text,
    fault_of,
    message,
    parse_script,
)


def test_the_head_ends_at_the_first_command() -> None:
    lines = [BASH, "#SBATCH -N2\n", "\n", "echo begun\n", "# later\n"]
    assert list(head(lines)) == ["#!/bin/bash", "#SBATCH -N2", ""]


def test_a_script_without_commands_is_all_head() -> None:
    assert list(head([BASH, "# end"])) == ["#!/bin/bash", "# end"]


@pytest.mark.parametrize(
    "line", ["", "\n", "\r\n", "  \n", "\t\n", "# why\n", "  # why\n", "\t#\n"]
)
def test_blank_lines_and_comments_do_not_end_the_head(line: str) -> None:
    assert parse_script([BASH, line, "#STAGE /a:/b\n"]) == (Directive("/a", "/b"),)


@pytest.mark.parametrize("line", ["echo\n", "  echo\n", ": # no-op\n", "X=1\n", "}\n"])
def test_a_directive_after_the_first_command_is_not_read(line: str) -> None:
    assert parse_script([BASH, "#STAGE /a:/b\n", line, "#STAGE /c:/d\n"]) == (
        Directive("/a", "/b"),
    )


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ("#STAGE /a:/b\n", True), ("#STAGE\r\n", True), ("#SBATCH --stage=/a:/b\n", True),
        ("#SBATCH -N2 --stage '/a:/b", True), ("#SBATCH\t--stage /a:/b\n", True),
        ("#SBATCH --stage-tolerate=1\n", True), ("#SBATCH -N2 --stage-tolerate 1", True),
        ("#STAGED /a /b\n", False), (" #STAGE /a:/b\n", False), ("#SBATCH --stages=/a\n", False),
        ("#SBATCH --comment=--stage=/a\n", False), ("#SBATCH -N2\n", False),
        ("srun --stage=/a:/b true\n", False),
    ],
)  # fmt: skip
def test_a_line_behind_the_first_command_is_found(line: str, ignored: bool) -> None:
    found = [(3, line.rstrip())] if ignored else []
    assert list(ignored_lines([BASH, "true\n", line])) == found
    assert list(ignored_lines([BASH, "# true\n", line])) == []


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_line_may_end_as_on_any_system(end: str) -> None:
    assert parse_script([f"#!/bin/bash{end}", f"#STAGE /a:/b,validate=always{end}"]) == (
        Directive("/a", "/b", Options(validate=Validate.ALWAYS)),
    )


@pytest.mark.parametrize(
    "line",
    [
        "##STAGE /a:/b",
        "#STAGEX /a /b",
        "#STAGE/a /b",
        "#STAGE: /a /b",
        "#STAGE=/a:/b",
        "# STAGE /a /b",
        " #STAGE /a:/b",
        "#stage /a /b",
        "#SBATCH --stage=/a:/b",
    ],
)
def test_a_line_that_only_resembles_a_directive_is_a_comment(line: str) -> None:
    assert parse_script([BASH, line, "#STAGE /c:/d"]) == (Directive("/c", "/d"),)


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("# STAGE /a /b", "#STAGE SRC:DST"),
        ("#stage /a /b", "#STAGE SRC:DST"),
        ("#Stage\t'/a b' /b", "#STAGE SRC:DST"),
        (" #STAGE /a:/b", "#STAGE SRC:DST"),
        ("#STAGE: /a /b", "#STAGE SRC:DST"),
        ("#STAGE=/a:/b", "#STAGE SRC:DST"),
        ("# stage s3://bucket/a /b", "#STAGE SRC:DST"),
        ("# SBATCH --stage=/a:/b", "#SBATCH --stage=SRC:DST"),
        ("#sbatch -N2 --stage /a:/b", "#SBATCH --stage=SRC:DST"),
        ("#STAGE /a:/b", ""),
        ("#STAGE", ""),
        ("##STAGE /a:/b", ""),
        ("# stage the data", ""),
        ("# stages /a", ""),
        ("#SBATCH --stage=/a:/b", ""),
        ("##SBATCH --stage=/a:/b", ""),
        ("# SBATCH -N2", ""),
        ("#STAGES /a /b", "#STAGE SRC:DST"),
        ("#STAGES are many", ""),
        ("#STAGES=/a:/b", "#STAGE SRC:DST"),
        ("#STAG /a /b", "#STAGE SRC:DST"),
        ("#STGAE\t/a /b", "#STAGE SRC:DST"),
        ("#STAGED '/a b' /b", "#STAGE SRC:DST"),
        ("#STAGR s3://bucket/a /b", "#STAGE SRC:DST"),
        ("#STAGED are the files", ""),
        ("# staged /a", ""),
        ("#staged /a /b", ""),
        ("##STAGED /a /b", ""),
        ("#STORAGE /a", ""),
        ("#USAGE: /a/b.sh", ""),
        ("#SBATCH -stage=/a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBATCH -N2 --stages=/a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBATCH --stag /a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBATCH --Stage=/a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBATCH --comment='-stage=/a'", ""),
        ("#SBATCH --stages='/a", ""),
        ("#SBATCH --stage-tolerate=1", ""),
        ("#SBTACH --stage=/a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBATHC -N2 --stage /a:/b", "#SBATCH --stage=SRC:DST"),
        ("#SBTACH -N2", ""),
    ],
)
def test_a_comment_that_was_meant_to_stage_is_found(line: str, form: str) -> None:
    found = [(2, form, line)] if form else []
    assert list(likely_mistakes([BASH, f"{line}\n"])) == found
    assert list(likely_mistakes([BASH, "true\n", line])) == []


def test_all_lines_that_cannot_be_read_are_told_at_once() -> None:
    lines = [BASH, "#STAGE /a\n", "#STAGE /c:/d\n", "#STAGE /e\n"]
    with pytest.raises(DirectiveErrors) as caught:
        parse_script(lines)
    problem = "no ':' between source and destination: write #STAGE SRC:DST[,key=value…]"
    assert caught.value.message == (
        f"{problem}\n  #STAGE /a\n           ^\n{problem}\n  #STAGE /e\n           ^"
    )


def test_each_line_is_one_directive_in_the_script_s_order() -> None:
    lines = [BASH, "#STAGE /c:/d,validate=always\n", "#SBATCH -N2\n", "#STAGE /a:/b\n"]
    assert parse_script(lines) == (
        Directive("/c", "/d", Options(validate=Validate.ALWAYS)),
        Directive("/a", "/b"),
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["", "#STAGE ", "#SBATCH "]).flatmap(lambda t: TEXTS.map(t.__add__)))
)
def test_any_script_is_read_or_refused_with_a_caret_under_a_line(lines: list[str]) -> None:
    asked = True
    with suppress(UsageError):  # of several lines
        asked = bool(parse_script(lines))
    assert may_stage(lines) is asked
    faults = [fault_of(parse_script, [line]) for line in lines]
    for error in (*faults, fault_of(sbatch_values, lines)):
        if error:
            assert error.text in {line.rstrip("\r\n") for line in lines}
            assert_the_caret_is_under_the_text(error)


# the options of sbatch


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("#SBATCH --stage=/a:/b", ["/a:/b"]),
        ("#SBATCH --stage /a:/b", ["/a:/b"]),
        ("#SBATCH\t-N2  --stage=/a:/b  -t 5\n", ["/a:/b"]),
        ("#SBATCH --stage=/a:/b # why it's so\r\n", ["/a:/b"]),
        ("#SBATCH --stage='/a b:/c'", ["/a b:/c"]),
        ("#SBATCH '--stage=/a;b:/c'", ["/a;b:/c"]),
        ('#SBATCH --stage "/a:/b"', ["/a:/b"]),
        ("#SBATCH --stage=/a\\\\:b:/c", ["/a\\:b:/c"]),
        ("#SBATCH --stage=/a:/b --stage=/c:/d", ["/a:/b", "/c:/d"]),
        ("#SBATCH --stage=", [""]),
        ("#SBATCH--stage=/a:/b", ["/a:/b"]),
        ("#SBATCH -N2", []),
        ("#SBATCH --stages=/a:/b", []),
        ("#SBATCH -stage=/a:/b", []),
        ("##SBATCH --stage=/a:/b", []),
        ("# SBATCH --stage=/a:/b", []),
        (" #SBATCH --stage=/a:/b", []),
        ("#STAGE /a:/b", []),
    ],
)
def test_the_values_of_stage_on_a_line_of_sbatch(line: str, values: list[str]) -> None:
    assert sbatch_values([BASH, line]) == values


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ('#SBATCH --stage="/a\\\\:b:/c"', ["/a\\:b:/c"]),
        ('#SBATCH --stage="/a\\:b:/c"', ["/a:b:/c"]),
        ("#SBATCH --stage='/a\\:b:/c'", ["/a:b:/c"]),
        ("#SBATCH --stage=/a#1:/b", ["/a"]),  # which `parse_script` refuses
    ],
)
def test_sbatch_takes_backslashes_within_quotes_and_a_hash_within_a_word(
    line: str, values: list[str]
) -> None:
    assert sbatch_values([BASH, line]) == values


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("#SBATCH --stage=/a:/b#1", 21),
        ("#SBATCH --stage /a#1:/b", 18),
        ("#SBATCH '--stage=/a:/b'#1 # why", 23),
        ("#SBATCH --stage-tolerate=2#1", 26),
        ("#SBATCH -JN#1 --stage=/a:/b", 11),
        ("#SBATCH --stage=/a:/b# it's", 21),
        ("#SBATCH --stage=/a:/b #1", -1),
        ("#SBATCH '--stage=/a:/b#1'", -1),
        ("#SBATCH --stage=/a:/b\\#1", -1),
        ("#SBATCH --stage=/a:/b -JN#1", -1),
        ("#SBATCH -JN#1", -1),
        ("#SBATCH -JN#1 # as --stage=/a:/b", -1),
        ("#SBATCH --stage='/a:/b#1", -1),
    ],
)
def test_a_hash_that_cuts_a_line_of_sbatch_is_refused(line: str, at: int) -> None:
    problem = (
        "sbatch takes this '#' for the beginning of a comment; put the value in quotes, or write a "
        "space before a comment"
    )
    told = fault_of(parse_script, [BASH, line, "#STAGE /c:/d"])
    assert (told and str(told)) == (message(problem, line, at) if at >= 0 else None)
    assert fault_of(parse_script, [BASH, "true", line]) is None


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("#SBATCH --stage /a:/b --stage=/c:/d", ["/a:/b", "/c:/d"]),
        ("#SBATCH --stage=/a:/b --stage /c:/d --stage=/e:/f", ["/a:/b", "/c:/d", "/e:/f"]),
        ("#SBATCH --stage --stage=/a:/b", ["--stage=/a:/b"]),
    ],
)
def test_both_ways_to_write_the_option_keep_their_order(line: str, values: list[str]) -> None:
    assert sbatch_values([BASH, line]) == values


def test_the_lines_of_sbatch_end_with_the_head() -> None:
    lines = [BASH, "#SBATCH --stage=/a:/b\n", "  # why\n", "#SBATCH --stage=/c:/d\n"]
    assert sbatch_values([*lines, "date\n", "#SBATCH --stage=/e:/f\n"]) == ["/a:/b", "/c:/d"]


def test_the_values_of_stage_tolerate_on_a_line_of_sbatch() -> None:
    line = "#SBATCH --stage=/a:/b --stage-tolerate=1 --stage-tolerate '10%'"
    assert sbatch_values([BASH, line]) == ["/a:/b"]
    assert sbatch_values([BASH, line], "--stage-tolerate") == ["1", "10%"]


@pytest.mark.parametrize("option", ["--stage", "--stage-tolerate"])
def test_an_option_of_sbatch_without_a_value_is_refused(option: str) -> None:
    line = f"#SBATCH -N2 {option} # why"
    with pytest.raises(DirectiveError) as caught:
        sbatch_values([BASH, line])
    assert str(caught.value) == message(f"{option} has no value", line, 12)
    assert list(cut_values([BASH, line])) == []


def test_a_line_of_sbatch_whose_quotes_do_not_match_is_refused() -> None:
    line = "#SBATCH --stage='/a:/b"
    with pytest.raises(DirectiveError) as caught:
        sbatch_values([BASH, line])
    assert str(caught.value) == message("the closing ' is missing", line, 22)


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        ("#SBATCH --stage=/a b:/c", ["b:/c"]),
        ("#SBATCH --stage=/a:/b, validate=always -N2", ["validate=always"]),
        ("#SBATCH --stage /a:/b c --stage=/d:/e", ["c"]),
        ("#SBATCH --stage=/a:/b -N 2", []),
        ("#SBATCH -N 2 --stage=/a:/b # b", []),
        ("#SBATCH --stage='/a b:/c'", []),
        ("#SBATCH --stage='/a:/b c", []),
        ("#STAGE /a:/b c", []),
    ],
)
def test_a_blank_in_a_value_of_stage_is_found(line: str, behind: list[str]) -> None:
    assert list(cut_values([BASH, line])) == [(2, word) for word in behind]


def test_what_sbatch_refuses_is_found() -> None:
    lines = ["#! /bin/sh\n", "true\n", "true\r\n", "true\r\n"]
    windows = "this line ends in CR LF, as in Windows; convert the file with dos2unix"
    assert list(refused_by_sbatch(lines)) == [(3, windows)]
    no_interpreter = "it does not begin with '#!' and the path of an interpreter"
    assert list(refused_by_sbatch(["\n", "#!/bin/sh\n"])) == [(1, no_interpreter)]
    assert list(refused_by_sbatch([])) == [(1, "it is empty")]
    program = "this line has a null byte; name a batch script, not a program"
    assert list(refused_by_sbatch(["\x7fELF\0\n", "\0\r\n"])) == [(1, program)]
    assert list(refused_by_sbatch([BASH, "a\0\n"])) == [(2, program)]
