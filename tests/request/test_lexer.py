"""Pieces of a directive keep their positions; the grammar's tests cover what they become."""

from __future__ import annotations

import pytest

from stager.request.lexer import SEPARATOR, Word, escape, read, sbatch_words


def test_the_parts_between_separators_keep_their_positions() -> None:
    parts = read(r"#X a;\;b\c;").split(SEPARATOR)
    assert [(part.value, part.at, part.places[-1]) for part in parts] == [
        ("#X a", 0, 4), (r";b\c", 5, 10), ("", 11, 11),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/a", "/a"), (r"/a:b/c,d;e\f", r"/a:b/c\,d\;e\\f"), ("/a:/b:$:", r"/a\:/b\:\$\:"),
        ("/a:b", r"/a\:b"), ("/a ~,1 ", "/a ~,1 "), ("/$/50%/%20n", r"/\$/50\%/\%20n"),
    ],
)  # fmt: skip
def test_a_path_is_escaped_where_the_grammar_would_split_or_fill_it(path: str, text: str) -> None:
    assert escape(path) == text


def test_words_of_sbatch_are_found_with_their_positions() -> None:
    assert sbatch_words("#SBATCH /a 'b c' '' d # e") == [
        Word("/a", 8), Word("b c", 11), Word("", 17), Word("d", 20),
    ]  # fmt: skip
