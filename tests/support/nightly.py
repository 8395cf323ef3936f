"""What ``make nightly`` alone runs: a test earns the time that each run of CI pays for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def repeated(value: object) -> ParameterSet:
    """Return a value of a test that `make test` runs with another one, as unit tests have both."""
    return pytest.param(value, marks=pytest.mark.nightly)
