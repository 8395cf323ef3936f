"""Directives are printed so that the grammar reads them back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.options import Mode, Options, Validate, Verify
from stager.request.grammar import Directive, print_value
from tests.support.directives import DIRECTIVES, parse_value


@pytest.mark.parametrize(
    ("directives", "text"),
    [
        ([], ""),
        ([Directive("/a", "/b")], "/a:/b"),
        ([Directive("/a", "/b", Options(validate=Validate.STAT))], "/a:/b"),
        ([Directive("/a", "/b", Options(validate=Validate.ALWAYS))], "/a:/b,validate=always"),
        (
            [Directive("/a", "/b", Options(validate=Validate.ALWAYS, verify=Verify.READBACK))],
            "/a:/b,validate=always,verify=readback",
        ),
        ([Directive("/a:/,b", "/b;\\")], r"/a\:/\,b:/b\;\\"),
        ([Directive("/a b \t", "/c, d:e")], "/a b \t:/c, d\\:e"),
        ([Directive("/$USER", "/%j")], r"/\$USER:/\%j"),
        ([Directive("/a", "/b"), Directive("/c", "/d")], "/a:/b;/c:/d"),
        ([Directive("/a", "shared:/b"), Directive("", "shared:/")], "/a:shared:/b;:shared:/"),
        ([Directive("/a:shared", "/b:shared:/c")], r"/a\:shared:/b:shared\:/c"),
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


@pytest.mark.parametrize(
    ("directive", "text"),
    [
        (Directive("/a", "/b", Options(mode=Mode.COPY)), "/a:/b"),
        (Directive("/a", "/b", Options(mode=Mode.SHARD)), "/a:/b,mode=shard"),
        (
            Directive("/a", "/b", Options(mode=Mode.SHARD, by="a:{n}")),
            "/a:/b,mode=shard,by=a:{n}",
        ),
    ],
)
def test_the_mode_is_printed_where_it_is_not_the_usual_one(directive: Directive, text: str) -> None:
    assert print_value([directive]) == text
