"""Every text that the grammar takes, and the whole message for every text that it refuses."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stager.base.errors import DirectiveError, UsageError
from stager.base.options import Lifetime, Mode, Options, Relocate, Validate, Verify
from stager.request.directive import MAX_LIST, Directive, merge, parse_value, print_value
from stager.request.script import head, parse_script, sbatch_values
from stager.tree.patterns import is_numbered_pattern as is_numbered
from stager.tree.patterns import is_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

BASH = "#!/bin/bash\n"
BLANK_RULE = "a backslash stands before : , ; \\ or a blank only"
CONTROL = "a control character is not allowed in a directive"
APART = "source and destination stand apart: #STAGE SRC DST [key=value…]"
EMPTY = "an empty directive: write SRC:DST"
SECOND_COLON = "a second ':'; write \\: for one that belongs to a path"
KNOWN = "validate, verify, lifetime, relocate, mode, include, exclude, extract, by"
NO_NUMBER = (
    "'{}' is no pattern with {{n}} in the place of a number, and at most two * in a name: "
    "part-{{n}}.*"
)
TOO_LONG = (
    "the list of directives has {} characters; 32768 are allowed: "
    "stage an archive instead of many files"
)

#: What the grammars give a meaning to, and bytes that are no UTF-8.
AWKWARD = st.sampled_from("::,,;;\\\\  \t'\"#=/.~$*é漢😀\xa0\u2028\x7f\udc80\udcff")
PRINTABLE = st.characters(min_codepoint=0x20, exclude_categories=["Cs"])
PATHS = st.text(AWKWARD | PRINTABLE, max_size=8).map("/{}".format)
#: What may stand behind ``include=`` and ``exclude=``; a directive has no control characters.
PATTERNS = st.lists(
    st.sampled_from(["*.pyc", "__pycache__/", "/a,b", "a:b", "a;b", "a b", "**/x", "[a-z]?"])
    | st.text(AWKWARD | PRINTABLE, max_size=8).filter(is_pattern),
    max_size=2,
).map(tuple)
#: What may stand behind ``by=``.
NUMBERED = st.sampled_from(["{n}", "part-{n}.*", "rank{n}/", "/a, b:{n};", "**/{n}*", "\\ {n}"]) | (
    st.builds("{}{{n}}{}".format, *[st.text(AWKWARD | PRINTABLE, max_size=4)] * 2).filter(
        is_numbered
    )
)
DESTINATIONS = PATHS.filter(lambda path: ".." not in path.split("/"))
COPIES = st.builds(
    Directive,
    PATHS,
    DESTINATIONS,
    st.builds(
        Options,
        st.sampled_from(Validate),
        st.sampled_from(Verify),
        st.sampled_from(Lifetime),
        st.sampled_from(Relocate),
        PATTERNS,
        PATTERNS,
    ),
)
UNPACKED = st.builds(
    Directive,
    PATHS.map("{}.tar.gz".format),
    DESTINATIONS,
    st.builds(Options, extract=st.just(True)),
)
SHARDS = st.builds(
    Directive,
    PATHS,
    DESTINATIONS,
    st.builds(
        Options,
        st.sampled_from(Validate),
        include=PATTERNS,
        exclude=PATTERNS,
        mode=st.just(Mode.SHARD),
        by=st.just("") | NUMBERED,
    ),
)
DIRECTIVES = COPIES | UNPACKED | SHARDS

#: Pieces from which random text comes near to what the grammars take.
PIECES = st.sampled_from(
    [
        *("/a", "/b", "/", "..", "https://h:80", "validate", "size", "--stage", "--stage="),
        *("mode", "shard", "by", "{n}"),
        *(
            ":",
            ",",
            ";",
            "=",
            "\\",
            "'",
            '"',
            "#",
            " ",
            "\t",
            "\n",
            "\r",
            "\0",
            "\x9b",
            "\udc80",
            "漢",
        ),
    ]
)
NEARLY = st.lists(PIECES, max_size=12).map("".join)
BYTES = st.binary(max_size=40).map(lambda block: block.decode(errors="surrogateescape"))
TEXTS = NEARLY | BYTES | st.text(max_size=40)


def assert_the_caret_is_under_the_text(error: DirectiveError) -> None:
    problem, shown, caret = error.message.rsplit("\n", 2)
    assert problem == error.problem
    window, column = shown.removeprefix("  "), len(caret) - len("  ^")
    assert (shown, caret) == (f"  {window}", " " * (column + 2) + "^")
    assert 0 <= column <= len(window) <= 76
    assert 0 <= error.position <= len(error.text)
    start = error.position - column
    part = error.text[start : start + len(window)]
    assert window == "".join(char if char.isprintable() else "?" for char in part)


def fault_of(read: Callable[[T], object], text: T) -> DirectiveError | None:
    try:
        read(text)
    except DirectiveError as error:
        return error
    return None


def value_fault(text: str) -> str:
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    return str(caught.value)


def line_fault(line: str) -> str:
    with pytest.raises(DirectiveError) as caught:
        parse_script([BASH, line])
    return str(caught.value)


def message(problem: str, shown: str, column: int) -> str:
    return f"{problem}\n  {shown}\n  {' ' * column}^"


# a value that is right


@pytest.mark.parametrize(
    ("text", "directives"),
    [
        ("/a:/b", [Directive("/a", "/b")]),
        ("/a:/b/", [Directive("/a", "/b/")]),
        ("/a/../x:/b", [Directive("/a/../x", "/b")]),
        ("/a:/b..c/...", [Directive("/a", "/b..c/...")]),
        ("/a:/b,validate=stat", [Directive("/a", "/b", Options(validate=Validate.STAT))]),
        ("/a:/b,validate=size", [Directive("/a", "/b", Options(validate=Validate.SIZE))]),
        ("/a:/b,validate=checksum", [Directive("/a", "/b", Options(validate=Validate.CHECKSUM))]),
        ("/a:/b,validate=always", [Directive("/a", "/b", Options(validate=Validate.ALWAYS))]),
        ("/a:/b,verify=stream", [Directive("/a", "/b")]),
        ("/a:/b,lifetime=job", [Directive("/a", "/b", Options(lifetime=Lifetime.JOB))]),
        ("/a:/b,lifetime=cache", [Directive("/a", "/b")]),
        ("/a:/b,verify=readback", [Directive("/a", "/b", Options(verify=Verify.READBACK))]),
        (
            "/a:/b,verify=readback,validate=size",
            [Directive("/a", "/b", Options(validate=Validate.SIZE, verify=Verify.READBACK))],
        ),
        ("/a:/b;/c:/d", [Directive("/a", "/b"), Directive("/c", "/d")]),
        (
            "/a:/b,validate=size;/c:/d",
            [Directive("/a", "/b", Options(validate=Validate.SIZE)), Directive("/c", "/d")],
        ),
        ("/a:/b;/a:/b", [Directive("/a", "/b"), Directive("/a", "/b")]),
    ],
)
def test_a_value_is_directives_joined_by_semicolons(text: str, directives: list[Directive]) -> None:
    assert parse_value(text) == tuple(directives)


@pytest.mark.parametrize(
    ("text", "source", "destination"),
    [
        ("/a\\:1:/b\\:2", "/a:1", "/b:2"),
        ("/a\\,1:/b\\,2", "/a,1", "/b,2"),
        ("/a\\;1:/b\\;2", "/a;1", "/b;2"),
        ("/a\\\\:/b\\\\", "/a\\", "/b\\"),
        ("/a\\\\\\::/b", "/a\\:", "/b"),
        ("/a\\ :/b\\ ", "/a ", "/b "),
        ("/a\\\t:/b\\\t", "/a\t", "/b\t"),
        ("/a\\ b:/c d", "/a b", "/c d"),
    ],
)
def test_a_backslash_takes_a_separator_or_a_blank_as_it_is(
    text: str, source: str, destination: str
) -> None:
    assert parse_value(text) == (Directive(source, destination),)


@pytest.mark.parametrize(
    ("text", "directive"),
    [
        (" /a : /b ", Directive("/a", "/b")),
        ("\t/a\t:\t/b\t", Directive("/a", "/b")),
        ("/a b:/c  d", Directive("/a b", "/c  d")),
        (" /a : /b , validate=size ", Directive("/a", "/b", Options(validate=Validate.SIZE))),
        ("/a\\ \\  : /b", Directive("/a  ", "/b")),
        ("/a\xa0:/b\u3000", Directive("/a\xa0", "/b\u3000")),
    ],
)
def test_blanks_around_a_field_are_dropped_and_those_within_kept(
    text: str, directive: Directive
) -> None:
    assert parse_value(text) == (directive,)


@pytest.mark.parametrize("char", ["'", '"', "#", "=", "~", "$", "*", "é", "漢", "😀", "\udcff"])
def test_any_other_character_belongs_to_the_path(char: str) -> None:
    assert parse_value(f"/a{char}:/{char}b") == (Directive(f"/a{char}", f"/{char}b"),)


# a value that is refused


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("", EMPTY, 0),
        ("  ", EMPTY, 2),
        ("/a:/b;", EMPTY, 6),
        (";/a:/b", EMPTY, 0),
        ("/a:/b; ;/c:/d", EMPTY, 7),
        (",validate=size", EMPTY, 0),
        ("/a", "no ':' between source and destination", 2),
        ("/a\\:/b", "no ':' between source and destination", 6),
        ("/a,validate=size", "no ':' between source and destination", 2),
        ("/a:/b;/c", "no ':' between source and destination", 8),
        ("/a:/b:/c", SECOND_COLON, 5),
        ("/a::/b", SECOND_COLON, 3),
        (":/b", "the source is empty", 0),
        ("/a:", "the destination is empty", 3),
        ("/a: ,validate=size", "the destination is empty", 4),
    ],
)
def test_a_value_without_its_two_paths_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("text", "what", "column"),
    [
        ("a:/b", "source", 0),
        ("./a:/b", "source", 0),
        (" ~/a:/b", "source", 1),
        ("$HOME/a:/b", "source", 0),
        ("C\\:/a:/b", "source", 0),
        ("/a:b", "destination", 3),
        ("/a: ../b", "destination", 4),
        ("/a:/b;/c:d", "destination", 9),
    ],
)
def test_a_path_that_is_not_absolute_is_refused(text: str, what: str, column: int) -> None:
    problem = f"the {what} must be an absolute path ($VARIABLES and ~ are not expanded here)"
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize("text", ["/a:/b/../c", "/a:/..", "/a:/b/..", "/a:/../", "/a:/b/../../c"])
def test_a_destination_that_climbs_is_refused(text: str) -> None:
    assert value_fault(text) == message("'..' is not allowed in a destination", text, 3)


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a:/b",
        "https://host:8080/a:/b",
        "http://host:/b",
        "s3://bucket/key:/b",
        "git+ssh://host/a:/b",
        "file:///a:/b",
        "https\\://host/a:/b",
    ],
)
def test_the_colons_of_a_url_separate_nothing_and_the_url_is_refused(text: str) -> None:
    problem = "the source is a URL; only files can be staged"
    assert value_fault(text) == message(problem, text, 0)


@pytest.mark.parametrize("text", ["/a:https://host/b", "/a:https://host:80/b", "/a:s3\\://b/c"])
def test_a_url_as_destination_is_refused_as_one(text: str) -> None:
    problem = "the destination is a URL; only files can be staged"
    assert value_fault(text) == message(problem, text, 3)


@pytest.mark.parametrize(
    ("text", "column"),
    [("/a\\b:/c", 2), ("/a:/b\\", 5), ("\\/a:/b", 0), ("/a:/b;/c\\d:/e", 8), ("/a\\\xa0:/b", 2)],
)
def test_a_backslash_before_anything_else_is_refused(text: str, column: int) -> None:
    shown = text.replace("\xa0", "?")
    assert value_fault(text) == message(BLANK_RULE, shown, column)


@pytest.mark.parametrize("char", ["\0", "\n", "\r", "\x1b", "\x1f"])
def test_a_control_character_is_refused(char: str) -> None:
    assert value_fault(f"/a:/b{char}") == message(CONTROL, "/a:/b?", 5)
    assert value_fault(f"/a\\{char}:/b") == message(BLANK_RULE, "/a\\?:/b", 2)


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("/a:/b,verify=x", "'x' is none of stream, readback", 13),
        ("/a:/b,verify=readback,verify=stream", "'verify' is given twice", 22),
        ("/a:/b,lifetime=forever", "'forever' is none of cache, job", 15),
        ("/a:/b,lifetime", "'lifetime' needs a value: lifetime=…", 6),
        ("/a:/b,lifetime=job,lifetime=job", "'lifetime' is given twice", 19),
        ("/a:/b,lifetim=job", "unknown option 'lifetim'; did you mean 'lifetime'?", 6),
        ("/a:/b,verfy=x", "unknown option 'verfy'; did you mean 'verify'?", 6),
        ("/a:/b,validat=size", "unknown option 'validat'; did you mean 'validate'?", 6),
        ("/a:/b, Validate=size", "unknown option 'Validate'; did you mean 'validate'?", 7),
        ("/a:/b,validate =size", "unknown option 'validate '; did you mean 'validate'?", 6),
        (
            "/a:/b,owner=0",
            f"unknown option 'owner'; known: {KNOWN}",
            6,
        ),
        (
            "/a:/b,owner",
            f"unknown option 'owner'; known: {KNOWN}",
            6,
        ),
        ("/a:/b,validate", "'validate' needs a value: validate=…", 6),
        ("/a:/b,validate=size,validate=size", "'validate' is given twice", 20),
        ("/a:/b,validate=size,validate", "'validate' is given twice", 20),
        ("/a:/b,validate=", "'' is none of stat, size, checksum, always", 15),
        ("/a:/b,validate=Size", "'Size' is none of stat, size, checksum, always", 15),
        ("/a:/b, validate= size", "' size' is none of stat, size, checksum, always", 16),
        ("/a:/b,validate=size=1", "'size=1' is none of stat, size, checksum, always", 15),
        ("/a\\,:/b,validate=x", "'x' is none of stat, size, checksum, always", 17),
        ("/a:/b;/c:/d,validate=x", "'x' is none of stat, size, checksum, always", 21),
    ],
)
def test_an_option_that_is_wrong_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem, text, column)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "/a:/b,\x9b31mred=1",
            f"unknown option '?31mred'; known: {KNOWN}",
        ),
        ("/a:/b,validate=\udc80", "'?' is none of stat, size, checksum, always"),
    ],
)
def test_what_a_message_quotes_is_printable_like_its_window(text: str, problem: str) -> None:
    assert value_fault(text).splitlines()[0] == problem


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a" * 20_000, 20_000),
        ("/a:" * 6_666 + "/b", 5),
        ("/" + "a" * 9_999 + "\x1b" + "a" * 9_999, 10_000),
        ("/" + "a" * 9_998 + ":" + "b" * 10_000, 10_000),
        ("/a:/b;" * 3_333 + "/c", 20_000),
        ("/a:/b," + "k" * 19_994, 6),
    ],
)
def test_the_caret_is_found_in_a_text_of_20_000_characters(text: str, position: int) -> None:
    with pytest.raises(DirectiveError) as caught:
        parse_value(text)
    assert (len(text), caught.value.position) == (20_000, position)
    assert_the_caret_is_under_the_text(caught.value)


# the list of directives


def test_a_value_may_have_as_many_characters_as_the_list() -> None:
    long = "b" * (MAX_LIST - len("/a:/"))
    assert parse_value(f"/a:/{long}") == (Directive("/a", f"/{long}"),)


def test_a_longer_value_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        parse_value("/a:/".ljust(MAX_LIST + 1, "b"))
    assert str(caught.value) == TOO_LONG.format(32_769)


def test_a_list_that_grew_too_long_by_merging_is_refused() -> None:
    half = MAX_LIST // 2
    one, other = (Directive("/a", f"/{name}".ljust(half, "b")) for name in "xy")
    with pytest.raises(UsageError) as caught:
        merge([one, other])
    assert str(caught.value) == TOO_LONG.format(32_768 + len("/a:;/a:"))


def test_merging_keeps_each_different_directive_once_and_in_order() -> None:
    one, two = Directive("/a", "/b"), Directive("/a", "/b", Options(validate=Validate.SIZE))
    assert merge([two, one, two, one]) == (two, one)


def test_merging_nothing_gives_nothing() -> None:
    assert merge([]) == ()


# printing


@pytest.mark.parametrize(
    ("directives", "text"),
    [
        ([], ""),
        ([Directive("/a", "/b")], "/a:/b"),
        ([Directive("/a", "/b", Options(validate=Validate.STAT))], "/a:/b"),
        ([Directive("/a", "/b", Options(validate=Validate.SIZE))], "/a:/b,validate=size"),
        (
            [Directive("/a", "/b", Options(validate=Validate.SIZE, verify=Verify.READBACK))],
            "/a:/b,validate=size,verify=readback",
        ),
        ([Directive("/a:,", "/b;\\")], "/a\\:\\,:/b\\;\\\\"),
        ([Directive("/a b \t", "/c\\ ")], "/a b\\ \\\t:/c\\\\\\ "),
        ([Directive("/a", "/b"), Directive("/c", "/d")], "/a:/b;/c:/d"),
    ],
)
def test_directives_are_printed_in_the_grammar(directives: list[Directive], text: str) -> None:
    assert print_value(directives) == text


@settings(max_examples=2000, deadline=None)
@given(st.lists(DIRECTIVES, min_size=1, max_size=3).map(tuple))
def test_a_printed_value_is_read_back_as_the_same_directives(
    directives: tuple[Directive, ...],
) -> None:
    assert parse_value(print_value(directives)) == directives


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_any_text_is_taken_as_a_value_or_refused_with_a_caret_under_it(text: str) -> None:
    error = fault_of(parse_value, text)
    if error:
        assert_the_caret_is_under_the_text(error)
    else:
        directives = parse_value(text)
        assert parse_value(print_value(directives)) == directives


@settings(max_examples=60, deadline=None)
@given(NEARLY, st.integers(0, 20_000))
def test_the_caret_is_under_a_fault_however_far_into_the_value(text: str, before: int) -> None:
    assume(not text.endswith("\\") and fault_of(parse_value, text))
    with pytest.raises(DirectiveError) as caught:
        parse_value(f"/{'a' * before}:/b;{text};/a:/{'b' * (20_000 - before)}")
    assert_the_caret_is_under_the_text(caught.value)


# a script's head


def test_the_head_ends_at_the_first_command() -> None:
    lines = [BASH, "#SBATCH -N2\n", "\n", "echo begun\n", "# later\n"]
    assert list(head(lines)) == ["#!/bin/bash", "#SBATCH -N2", ""]


def test_a_script_without_commands_is_all_head() -> None:
    assert list(head([BASH, "# end"])) == ["#!/bin/bash", "# end"]


@pytest.mark.parametrize(
    "line", ["", "\n", "\r\n", "  \n", "\t\n", "# why\n", "  # why\n", "\t#\n"]
)
def test_blank_lines_and_comments_do_not_end_the_head(line: str) -> None:
    assert parse_script([BASH, line, "#STAGE /a /b\n"]) == (Directive("/a", "/b"),)


@pytest.mark.parametrize("line", ["echo\n", "  echo\n", ": # no-op\n", "X=1\n", "}\n"])
def test_a_directive_after_the_first_command_is_not_read(line: str) -> None:
    assert parse_script([BASH, "#STAGE /a /b\n", line, "#STAGE /c /d\n"]) == (
        Directive("/a", "/b"),
    )


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_line_may_end_as_on_any_system(end: str) -> None:
    assert parse_script([f"#!/bin/bash{end}", f"#STAGE /a /b validate=size{end}"]) == (
        Directive("/a", "/b", Options(validate=Validate.SIZE)),
    )


@pytest.mark.parametrize(
    "line",
    [
        "##STAGE /a /b",
        "#STAGEX /a /b",
        "#STAGE/a /b",
        "#STAGE: /a /b",
        "#STAGE=/a:/b",
        "# STAGE /a /b",
        " #STAGE /a /b",
        "#stage /a /b",
        "#SBATCH --stage=/a:/b",
    ],
)
def test_a_line_that_only_resembles_a_directive_is_a_comment(line: str) -> None:
    assert parse_script([BASH, line, "#STAGE /c /d"]) == (Directive("/c", "/d"),)


def test_each_line_is_one_directive_in_the_script_s_order() -> None:
    lines = [BASH, "#STAGE /c /d validate=always\n", "#SBATCH -N2\n", "#STAGE /a /b\n"]
    assert parse_script(lines) == (
        Directive("/c", "/d", Options(validate=Validate.ALWAYS)),
        Directive("/a", "/b"),
    )


# a #STAGE line


@pytest.mark.parametrize(
    ("line", "source", "destination"),
    [
        ("#STAGE /a /b", "/a", "/b"),
        ("#STAGE\t/a\t/b\t", "/a", "/b"),
        ("#STAGE   /a   /b   ", "/a", "/b"),
        ("#STAGE /a /b/", "/a", "/b/"),
        ("#STAGE \"/a b\" '/c d'", "/a b", "/c d"),
        ("#STAGE /a\\ b /c' 'd", "/a b", "/c d"),
        ("#STAGE '/a\\:' \"/b\\\\\"", "/a\\:", "/b\\"),
        ('#STAGE "/it\'s" \'/"b"\'', "/it's", '/"b"'),
        ('#STAGE "/a\\b" "/\\$c"', "/a\\b", "/$c"),
        ("#STAGE /a:1,2;3 /b:4,5;6", "/a:1,2;3", "/b:4,5;6"),
        ("#STAGE /a=1 /b=2", "/a=1", "/b=2"),
        ("#STAGE ''/a /b''", "/a", "/b"),
    ],
)
def test_a_line_is_quoted_as_in_a_shell(line: str, source: str, destination: str) -> None:
    assert parse_script([BASH, line]) == (Directive(source, destination),)


@pytest.mark.parametrize(
    ("line", "directive"),
    [
        ("#STAGE /a /b # why", Directive("/a", "/b")),
        ("#STAGE /a /b #why", Directive("/a", "/b")),
        ("#STAGE /a /b # it's", Directive("/a", "/b")),
        ("#STAGE /a /b verify=readback", Directive("/a", "/b", Options(verify=Verify.READBACK))),
        (
            "#STAGE /a /b validate=size # why",
            Directive("/a", "/b", Options(validate=Validate.SIZE)),
        ),
        ("#STAGE '/a #1' \"/b #2\" # why", Directive("/a #1", "/b #2")),
        ("#STAGE /a\\#1 '/b'\\#2", Directive("/a#1", "/b#2")),
    ],
)
def test_a_comment_may_end_a_line(line: str, directive: Directive) -> None:
    assert parse_script([BASH, line]) == (directive,)


@pytest.mark.parametrize(
    ("line", "directive"),
    [
        ("#STAGE /a#1 /b", Directive("/a#1", "/b")),
        ("#STAGE /a /b#2", Directive("/a", "/b#2")),
        ("#STAGE /a '/b'#2 # why", Directive("/a", "/b#2")),
    ],
)
def test_a_hash_within_a_word_begins_no_comment(line: str, directive: Directive) -> None:
    assert parse_script([BASH, line]) == (directive,)


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("#STAGE", 6),
        ("#STAGE   ", 6),
        ("#STAGE # why", 12),
        ("#STAGE /a", 9),
        ("#STAGE /a:/b", 12),
        ("#STAGE /a validate=size", 23),
        ("#STAGE /a:/b,validate=size", 26),
    ],
)
def test_a_line_without_its_two_words_is_refused(line: str, column: int) -> None:
    assert line_fault(line) == message(APART, line, column)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('#STAGE "/a /b', "no closing quotation"),
        ("#STAGE /a '/b", "no closing quotation"),
        ("#STAGE /a /it's", "no closing quotation"),
        ("#STAGE /a /b \\", "no escaped character"),
    ],
)
def test_a_line_whose_quotes_do_not_match_is_refused(line: str, problem: str) -> None:
    assert line_fault(line) == message(problem, line, len(line))


@pytest.mark.parametrize(
    ("line", "problem", "column"),
    [
        ("#STAGE '' /b", "the source is empty", 7),
        ("#STAGE /a ''", "the destination is empty", 10),
        ("#STAGE /a /b/../c", "'..' is not allowed in a destination", 10),
        ("#STAGE s3://b/k /b", "the source is a URL; only files can be staged", 7),
        ("#STAGE /a s3://b/k", "the destination is a URL; only files can be staged", 10),
        (
            "#STAGE /a /b owner=1",
            f"unknown option 'owner'; known: {KNOWN}",
            13,
        ),
        (
            "#STAGE /a /b /c",
            f"unknown option '/c'; known: {KNOWN}",
            13,
        ),
        ("#STAGE /a /b mode=shard by=part", NO_NUMBER.format("part"), 27),
        ("#STAGE /a /b 'by={n}'", "'by' is for mode=shard", 13),
        ("#STAGE /a /b valid=size", "unknown option 'valid'; did you mean 'validate'?", 13),
        ("#STAGE /a /b validate", "'validate' needs a value: validate=…", 13),
        ("#STAGE /a /b validate=x", "'x' is none of stat, size, checksum, always", 22),
        ("#STAGE /a /b validate=size validate=x", "'validate' is given twice", 27),
        ("#STAGE /a /b verfy=x", "unknown option 'verfy'; did you mean 'verify'?", 13),
        ("#STAGE /a /b verify", "'verify' needs a value: verify=…", 13),
        ("#STAGE /a /b verify=x", "'x' is none of stream, readback", 20),
        ("#STAGE /a /b verify=readback verify=x", "'verify' is given twice", 29),
        ("#STAGE /a\x1b /b", CONTROL, 9),
        ("#STAGE /a /b # \x1b", CONTROL, 15),
        ("#STAGE /a\r /b", CONTROL, 9),
    ],
)
def test_a_line_that_is_wrong_is_refused(line: str, problem: str, column: int) -> None:
    shown = line.replace("\x1b", "?").replace("\r", "?")
    assert line_fault(line) == message(problem, shown, column)


@pytest.mark.parametrize(
    ("line", "what", "column"),
    [
        ("#STAGE a /b", "source", 7),
        ("#STAGE validate=size /b", "source", 7),
        ("#STAGE ~/a /b", "source", 7),
        ("#STAGE $HOME/a /b", "source", 7),
        ("#STAGE /a b", "destination", 10),
        ('#STAGE "/a b" c', "destination", 14),
        ("#STAGE /d\\ ata a", "destination", 15),
        ("#STAGE '/a'b a", "destination", 13),
    ],
)
def test_a_relative_path_in_a_line_is_refused(line: str, what: str, column: int) -> None:
    problem = f"the {what} must be an absolute path ($VARIABLES and ~ are not expanded here)"
    assert line_fault(line) == message(problem, line, column)


@pytest.mark.parametrize(
    "line",
    [
        "#STAGE '/'a /b validate=zz # /a /b validate=zz",
        "#STAGE '/'a /b validate=zz # /a /b",
        "#STAGE '/'a /b validate=zz # /a",
    ],
)
def test_a_comment_does_not_draw_the_caret_away(line: str) -> None:
    problem = "'zz' is none of stat, size, checksum, always"
    assert line_fault(line) == message(problem, line, 24)


@settings(max_examples=300, deadline=None)
@given(DIRECTIVES)
def test_a_line_with_quoted_words_is_read_as_its_directive(directive: Directive) -> None:
    options = [f"validate={directive.options.validate}", f"verify={directive.options.verify}"]
    options.append(f"lifetime={directive.options.lifetime}")
    options.append(f"relocate={directive.options.relocate}")
    options.append(f"mode={directive.options.mode}")
    options += [f"by={directive.options.by}"] * bool(directive.options.by)
    options += ["extract"] * directive.options.extract
    options += [f"include={pattern}" for pattern in directive.options.include]
    options += [f"exclude={pattern}" for pattern in directive.options.exclude]
    words = [directive.source, directive.destination, *options]
    assert parse_script([BASH, f"#STAGE {shlex.join(words)}\n"]) == (directive,)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["", "#STAGE ", "#SBATCH "]).flatmap(lambda t: TEXTS.map(t.__add__)))
)
@example(["#STAGE '/'a /b validate=zz # /a /b"])
def test_any_script_is_read_or_refused_with_a_caret_under_a_line(lines: list[str]) -> None:
    for error in (fault_of(parse_script, lines), fault_of(sbatch_values, lines)):
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
        ("#STAGE /a /b", []),
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
        ("#SBATCH --stage=/a#1:/b", ["/a"]),
    ],
)
def test_sbatch_takes_backslashes_within_quotes_and_a_hash_within_a_word(
    line: str, values: list[str]
) -> None:
    assert sbatch_values([BASH, line]) == values


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


def test_a_line_of_sbatch_whose_quotes_do_not_match_is_refused() -> None:
    line = "#SBATCH --stage='/a:/b"
    with pytest.raises(DirectiveError) as caught:
        sbatch_values([BASH, line])
    assert str(caught.value) == message("no closing quotation", line, 22)


@pytest.mark.parametrize("pattern", ["", " ", "!kept", "#comment", "\\\\"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    text = f"/a:/b,exclude={pattern}"
    with pytest.raises(DirectiveError) as told:
        parse_value(text)
    shown = pattern.replace("\\\\", "\\").strip()
    assert told.value.problem == f"'{shown}' is no pattern as in a .gitignore (without ! and #)"
    assert told.value.position == len("/a:/b,exclude=")


def test_patterns_may_be_given_more_than_once() -> None:
    (directive,) = parse_value("/a:/b,exclude=*.pyc,include=/lib,exclude=a\\,b")
    assert (directive.options.include, directive.options.exclude) == (("/lib",), ("*.pyc", "a,b"))
    line = "#STAGE /a /b exclude=*.pyc include=/lib 'exclude=a,b'"
    assert parse_script([line]) == (directive,)


def test_extract_takes_no_value_and_is_for_archives() -> None:
    (directive,) = parse_value("/a.tar.zst:/b,extract")
    assert directive == Directive("/a.tar.zst", "/b", Options(extract=True))
    assert parse_script(["#STAGE /a.tar.zst /b extract"]) == (directive,)
    with pytest.raises(DirectiveError) as told:
        parse_value("/a.tar:/b,extract=yes")
    assert (told.value.problem, told.value.position) == ("'extract' takes no value", 17)
    with pytest.raises(DirectiveError) as told:
        parse_value("/a.rar:/b,extract")
    known = ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar .zip"
    assert (told.value.problem, told.value.position) == (f"'extract' is for archives: {known}", 0)


# mode=shard


@pytest.mark.parametrize(
    ("text", "directive"),
    [
        ("/a:/b,mode=copy", Directive("/a", "/b")),
        ("/a:/b,mode=shard", Directive("/a", "/b", Options(mode=Mode.SHARD))),
        ("/a:/b,mode=shard,by={n}", Directive("/a", "/b", Options(mode=Mode.SHARD, by="{n}"))),
        (
            "/a:/b,by=rank{n}/,mode=shard",
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="rank{n}/")),
        ),
        (
            "/a:/b,mode=shard,by=a\\,{n}",
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="a,{n}")),
        ),
        (
            "/a:/b,mode=shard,relocate=none,exclude=*.pyc",
            Directive("/a", "/b", Options(exclude=("*.pyc",), mode=Mode.SHARD)),
        ),
    ],
)
def test_a_folder_may_be_spread_over_the_nodes(text: str, directive: Directive) -> None:
    assert parse_value(text) == (directive,)


@pytest.mark.parametrize(
    ("directive", "text"),
    [
        (Directive("/a", "/b", Options(mode=Mode.COPY)), "/a:/b"),
        (Directive("/a", "/b", Options(mode=Mode.SHARD)), "/a:/b,mode=shard"),
        (
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="a:{n}")),
            "/a:/b,mode=shard,by=a\\:{n}",
        ),
    ],
)
def test_the_mode_is_printed_where_it_is_not_the_usual_one(directive: Directive, text: str) -> None:
    assert print_value([directive]) == text


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("/a:/b,mode", "'mode' needs a value: mode=…", 6),
        ("/a:/b,mode=0644", "'0644' is none of copy, shard", 11),
        ("/a:/b,mode=", "'' is none of copy, shard", 11),
        ("/a:/b,mode=shard,mode=copy", "'mode' is given twice", 17),
        ("/a:/b,mod=shard", "unknown option 'mod'; did you mean 'mode'?", 6),
        ("/a:/b,mode=shard,by", "'by' needs a value: by=…", 17),
        ("/a:/b,mode=shard,by={n},by={n}", "'by' is given twice", 24),
        ("/a:/b,mode=shard,by=", NO_NUMBER.format(""), 20),
        ("/a:/b,mode=shard,by=part-*", NO_NUMBER.format("part-*"), 20),
        ("/a:/b,mode=shard,by={n}-{n}", NO_NUMBER.format("{n}-{n}"), 20),
        ("/a:/b,mode=shard,by=!{n}", NO_NUMBER.format("!{n}"), 20),
        ("/a:/b,mode=shard,by=#{n}", NO_NUMBER.format("#{n}"), 20),
        ("/a:/b,by={n}", "'by' is for mode=shard", 6),
        ("/a:/b,validate=size,by={n},mode=copy", "'by' is for mode=shard", 20),
        ("/a.zip:/b,extract,mode=shard", "'extract' has no sense with mode=shard", 10),
        ("/a.zip:/b,mode=shard,extract", "'extract' has no sense with mode=shard", 21),
        ("/a:/b,mode=shard,relocate=venv", "'relocate' has no sense with mode=shard", 17),
        ("/a:/b,relocate=venv,mode=shard", "'relocate' has no sense with mode=shard", 6),
    ],
)
def test_a_mode_that_is_wrong_is_refused(text: str, problem: str, column: int) -> None:
    assert value_fault(text) == message(problem, text, column)
