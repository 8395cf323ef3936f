"""The plugin's lists of directives (prolog/spank/list.c), compiled with sanitizers.

The C code is compared with `contains`, which splits a list as the grammar in `stager` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.request.grammar import split_value
from tests.support.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def items(text: str) -> list[str]:
    """Return the directives of a list, without the blanks before each."""
    return [part.lstrip(" \t") for part in split_value(text)]


def contains(text: str, part: str) -> bool:
    """Return whether the directives of ``part`` stand in the list, one behind the other."""
    listed, wanted = items(text), items(part)
    if "" in wanted:
        return False
    starts = range(len(listed) - len(wanted) + 1)
    return any(listed[at : at + len(wanted)] == wanted for at in starts)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], bool]]:
    """Ask the compiled code whether a list contains a part."""
    with compiled("list", tmp_path_factory.mktemp("list")) as ask_program:
        yield ask_program


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("/a:/b", "/a:/b", True),
        ("/x:/y;/a:/b", "/a:/b", True),
        ("/a:/b;/x:/y", "/a:/b", True),
        ("/x:/y;/a:/b;/c:/d", "/a:/b;/c:/d", True),
        ("/a:/b;/x:/y;/c:/d", "/a:/b;/c:/d", False),
        ("/a:/bc", "/a:/b", False),
        ("/z/a:/b", "/a:/b", False),
        ("/a:/b;/c", "/c:/d", False),
        # an escaped ';' belongs to a path
        (r"/x\;/a:/b", "/a:/b", False),
        (r"/a:/b\;/c", "/a:/b", False),
        (r"/a:/b\;/c", "/a:/b\\", False),
        (r"/x\;/a:/b", r"/x\;/a:/b", True),
        (r"/c:/d;/x\;/a:/b", r"/x\;/a:/b", True),
        # an escaped backslash escapes nothing
        (r"/x:/y\\;/a:/b", "/a:/b", True),
        (r"/x:/y\\\;/a:/b", "/a:/b", False),
        (r"/x:/y\\\\;/a:/b", "/a:/b", True),
        # blanks before a directive say nothing, others belong to a path
        (" /x:/y;\t /a:/b", "/a:/b", True),
        ("/x:/y;/a:/b", " /a:/b", True),
        ("/x:/y;/a:/b ", "/a:/b", False),
        ("/x:/y;/a:/b", "/a:/b\t", False),
        ("/x:/y; /a:/b ", "/a:/b ", True),
        ("/a:/b\\ ", "/a:/b", False),
        ("/a:/b\\ ;/c:/d", "/a:/b\\ ", True),
        ("/a :/b", "/a:/b", False),
        # an empty directive is in no list
        ("", "", False),
        (" ", " ", False),
        ("/a:/b", "", False),
        ("/a:/b;", "/a:/b;", False),
        ("/a:/b;;/c:/d", "/a:/b;;/c:/d", False),
        ("/a:/b;;/c:/d", "/c:/d", True),
        ("\\", "\\", True),
    ],
)
def test_a_list_contains_a_directive(
    ask: Callable[[str, str], bool], text: str, part: str, expected: bool
) -> None:
    assert contains(text, part) is expected
    assert ask(text, part) is expected


@given(*[st.lists(st.sampled_from(list("ab;;\\\\ \t")), max_size=12).map("".join)] * 2)
@settings(max_examples=2000, deadline=None)
def test_any_text_is_split_as_the_grammar_says(
    ask: Callable[[str, str], bool], text: str, part: str
) -> None:
    assert ask(text, part) is contains(text, part)


@given(st.lists(st.sampled_from(["a", r"a\;b", r"b\\", r"\ a\ ", "a b"]), min_size=1), st.data())
@settings(max_examples=500, deadline=None)
def test_a_run_of_directives_is_found(
    ask: Callable[[str, str], bool], directives: list[str], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(directives) - 1))
    last = data.draw(st.integers(first + 1, len(directives)))
    between = data.draw(st.sampled_from([";", "; ", ";\t "]))
    assert ask(between.join(directives), ";".join(directives[first:last]))
