"""The digest of a file with holes is that of all its bytes."""

from __future__ import annotations

import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from stager.base.digest import Digest


@given(st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=50))), st.integers(0, 5_000))
@example([(3 << 20, b"data"), (1 << 20, b"more")], (2 << 20) + 1)
def test_what_is_passed_over_counts_as_zeros(pieces: list[tuple[int, bytes]], end: int) -> None:
    digest, whole = Digest(), b""
    for hole, data in pieces:
        whole += bytes(hole)
        digest.update(memoryview(data), len(whole))
        whole += data
    whole += bytes(end)
    assert digest.hexdigest(len(whole)) == xxhash.xxh3_128_hexdigest(whole)
