"""Only numbers in the range that counts are taken from users."""

from __future__ import annotations

import math

import pytest

from stager.node.as_user import MOST, as_number, or_zero


@pytest.mark.parametrize("value", [0, 1.5, b"7", b" 1e3 ", MOST])
def test_a_number_is_taken(value: object) -> None:
    assert as_number(value) == or_zero(value) == float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [None, "7", [7], {}, -1, math.nan, math.inf, MOST * 2, 10**400, b"", b"x", b"nan", b"1e300"],
)
def test_anything_else_is_refused(value: object) -> None:
    assert or_zero(value) == 0
    with pytest.raises(ValueError, match=r"not a number in the range|could not convert"):
        as_number(value)
