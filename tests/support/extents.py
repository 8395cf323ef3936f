"""Files with holes, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from stager.base.extents import Extent


@st.composite
def extents(draw: st.DrawFn) -> tuple[int, list[Extent]]:
    """Return a file's size and its extents of data, in order and not adjacent."""
    found: list[Extent] = []
    end = 0
    for hole, length in draw(st.lists(st.tuples(st.integers(1, 300_000), st.integers(1, 90_000)))):
        found.append(Extent(end + hole, length))
        end = found[-1].end
    return end + draw(st.integers(0, 100_000)), found
