"""Directives and texts close to the grammar, for property tests; the layout of messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from hypothesis import strategies as st

from stager.base.errors import DirectiveError
from stager.base.options import (
    ITSELF,
    OPTION_TYPES,
    Lifetime,
    Mode,
    Options,
    Relocate,
    Validate,
    Verify,
    Via,
)
from stager.base.text import columns, printable, showable
from stager.request import grammar, script
from stager.request.grammar import Directive
from stager.request.names import Names
from stager.tree.patterns import is_numbered_pattern as is_numbered
from stager.tree.patterns import is_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

BASH = "#!/bin/bash\n"
#: Where a relative source begins.
FOLDER = "/home/alice/runs"
NAMES = Names(
    letters={"u": "alice", "U": "1000", "j": "17", "A": "16", "a": "3", "x": "train", "r": "0"},
    variables={"SLURM_TMPDIR": "/nvme/%u.%j.%r"},
    environment={"SCRATCH": "/shared/alice", "STORE": "s3://bucket", "EMPTY": ""},
    folder=FOLDER,
    home="/home/alice",
)

#: Characters with a meaning in the grammars, and bytes that are not UTF-8.
AWKWARD = st.sampled_from("::,,;;\\\\  \t'\"#=/.~$%*é漢😀\xa0\u2028\x7f\udc80\udcff")
PRINTABLE = st.characters(min_codepoint=0x20, exclude_categories=["Cs"])
#: What is expanded elsewhere.
EXPANDED = st.sampled_from(
    ["$USER", "${USER}", "$(", "%j", "%4t", "%%", "%A_%a", "/~", "/~/", ":shared:", "shared:/"]
)
PATHS = (
    st.lists(st.text(AWKWARD | PRINTABLE, max_size=4) | EXPANDED, max_size=3)
    .map("".join)
    .map("/{}".format)
)
#: Behind a blank, a word is an option or nothing can be there.
NO_DESTINATION = re.compile(rf"[ \t]\Z|(\A|/)\.\.(/|\Z)|\s({'|'.join(OPTION_TYPES)})([=\s]|\Z)")
#: Values of ``include=`` and ``exclude=``; a directive has no control characters.
PATTERNS = st.lists(
    st.sampled_from(["*.pyc", "__pycache__/", "/a,b", "a:b", "a;b", "a b", "**/x", "[a-z]?"])
    | st.text(AWKWARD | PRINTABLE, max_size=8).filter(is_pattern),
    max_size=2,
).map(tuple)
#: Values of ``by=``.
NUMBERED = st.sampled_from(["{n}", "part-{n}.*", "rank{n}/", "/a, b:{n};", "**/{n}*", "\\ {n}"]) | (
    st.builds("{}{{n}}{}".format, *[st.text(AWKWARD | PRINTABLE, max_size=4)] * 2).filter(
        is_numbered
    )
)
#: Values of ``as=``.
NAMES_OF_COPIES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}", fullmatch=True).filter(
    lambda name: name not in grammar.RESERVED
)
DESTINATIONS = PATHS.filter(lambda path: not NO_DESTINATION.search(path))
COPIES = st.builds(
    Directive,
    PATHS,
    DESTINATIONS | DESTINATIONS.map("shared:{}".format),
    st.builds(
        Options,
        st.sampled_from(Validate),
        st.sampled_from(Verify),
        st.sampled_from(Lifetime),
        st.sampled_from(Relocate),
        PATTERNS,
        PATTERNS,
        via=st.sampled_from(Via),
        name=st.just("") | NAMES_OF_COPIES,
    ),
)
UNPACKED = st.builds(
    Directive,
    PATHS.map("{}.tar.gz".format),
    DESTINATIONS,
    st.builds(Options, extract=st.just(True)),
)
DECOMPRESSED = st.builds(
    Directive,
    PATHS.map("{}x.zst".format),
    DESTINATIONS,
    st.builds(Options, decompress=st.just(ITSELF)),
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
DIRECTIVES = COPIES | UNPACKED | DECOMPRESSED | SHARDS

#: Pieces that combine at random into text close to the grammars.
PIECES = st.sampled_from(
    [
        *("/a", "/b", "/", "..", "https://h:80", "validate", "always", "--stage", "--stage="),
        *("mode", "shard", "by", "{n}", "$USER", "%j", "/~", ":/", ":$", "$SLURM_TMPDIR"),
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


def parse_value(text: str) -> tuple[Directive, ...]:
    return grammar.parse_value(text, NAMES)


def parse_script(lines: Iterable[str]) -> tuple[Directive, ...]:
    return script.parse_script(lines, NAMES)


def assert_the_caret_is_under_the_text(error: DirectiveError) -> None:
    problem, shown, caret = error.message.rsplit("\n", 2)
    assert problem == error.problem
    window, column = shown.removeprefix("  "), len(caret) - len("  ^")
    assert (shown, caret) == (f"  {window}", " " * (column + 2) + "^")
    assert len(window) <= 76
    assert 0 <= error.position <= len(error.text)
    # Characters take no, one or two columns, so several prefixes may end at the caret's column.
    places = [n for n in range(len(window) + 1) if columns(window[:n]) == column]
    hidden = showable(error.text)
    text, position = printable(hidden), len(printable(hidden[: error.position]))
    starts = [position - place for place in places]
    assert window in [text[start : start + len(window)] for start in starts if start >= 0]


def fault_of(read: Callable[[T], object], text: T) -> DirectiveError | None:
    try:
        read(text)
    except DirectiveError as error:
        return error
    return None


def message(problem: str, shown: str, column: int) -> str:
    return f"{problem}\n  {shown}\n  {' ' * column}^"
