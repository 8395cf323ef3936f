"""What becomes of a job's comment when its stage has ended."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from stager.launch.comment import with_result

WORDS = st.text(string.ascii_letters + string.punctuation, min_size=1)


def test_a_result_is_one_printable_line_of_limited_length() -> None:
    assert with_result("", "no ':'\n  /a\x1b\n    ^") == "stage: no ':' /a? ^"
    assert with_result("mine", "x" * 400) == f"mine; stage: {'x' * 297}..."


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS.filter(lambda own: "stage: " not in own))
def test_the_users_part_stays_and_only_the_last_result_is_kept(
    results: list[str], own: str
) -> None:
    comment = own
    for result in results:
        comment = with_result(comment, result)
    if own != "(null)":
        assert comment == f"{own}; {with_result('', results[-1])}"
