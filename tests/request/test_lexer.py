"""Pieces of a directive keep their positions; the grammar's tests cover what they become."""

from __future__ import annotations

import pytest

from stager.request.lexer import Field, escape, field, read_escapes, split, split_words


def test_a_run_between_separators_ends_at_the_next_one() -> None:
    text = "a,\\,b, c "
    runs = split(read_escapes(text), ",", len(text))
    assert [field(chars, end) for chars, end in runs] == [
        Field("a", 0), Field(",b", 3), Field("c", 7),
    ]  # fmt: skip


def test_an_empty_field_is_where_its_run_ends() -> None:
    runs = split(read_escapes("a, ,b"), ",", 5)
    assert field(*runs[1]) == Field("", 3)


@pytest.mark.parametrize(
    ("path", "text"),
    [("/a", "/a"), ("/a:b,c;d\\", "/a\\:b\\,c\\;d\\\\"), ("/a b ", "/a b\\ "), ("/\t", "/\\\t"),
     ("/$USER/%j/~", "/\\$USER/\\%j/\\~"), ("/$/50%/%20n/~a", "/$/50%/%20n/~a")],
)  # fmt: skip
def test_a_path_is_escaped_where_the_grammar_would_split_or_strip_it(path: str, text: str) -> None:
    assert escape(path) == text


@pytest.mark.parametrize("sbatch", [False, True])
def test_words_are_found_with_their_positions(sbatch: bool) -> None:
    assert split_words("#X /a 'b c' '' d # e", 2, sbatch=sbatch) == [
        Field("/a", 3), Field("b c", 6), Field("", 12), Field("d", 15),
    ]  # fmt: skip
