"""A text is read back from its compact form as it was, and no more of it than is allowed."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.request import items as module
from stager.request.items import compact, expand

PLAIN = set(string.ascii_letters + string.digits + "+/=:")


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.just("\udcff/é"))
def test_a_text_is_read_back_as_it_was(text: str) -> None:
    short = compact(text)
    assert set(short) <= PLAIN
    assert expand(short) == text


@pytest.mark.parametrize("text", ["", "{}", '{"items": []}'])
def test_a_text_that_is_not_compact_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="it does not begin with xz:"):
        expand(text)


def test_what_repeats_becomes_short() -> None:
    assert len(compact("/shared/alice/data " * 10_000)) < 2_000


def test_a_text_that_was_cut_or_changed_is_an_error() -> None:
    short = compact("abc" * 100)
    with pytest.raises(ValueError, match="it ends early"):
        expand(short[:-8])
    with pytest.raises(ValueError, match="it cannot be decompressed"):
        expand("xz:" + "A" * 64)


def test_no_more_is_read_back_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 1_000)
    assert expand(compact("a" * 1_000)) == "a" * 1_000
    with pytest.raises(ValueError, match="it ends early, or has more than 1000 bytes"):
        expand(compact("a" * 1_001))
