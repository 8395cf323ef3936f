"""The digest of a file is put together from those of its pieces, however its data comes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.base import digest as module
from stager.base.digest import PIECE, Digest, digest_of_data, digest_of_pieces
from stager.fs.files import digest_of, read_back

#: Bytes of a piece where many files are tried.
SMALL = 4096


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", SMALL)
    monkeypatch.setattr(module, "_ZEROS", memoryview(bytes(SMALL // 4)))
    monkeypatch.setattr(module, "_digest_of_hole", lambda: xxhash.xxh3_128_digest(bytes(SMALL)))


def as_defined(data: bytes, size: int = SMALL) -> str:
    if len(data) <= size:
        return xxhash.xxh3_128_hexdigest(data)
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))


@pytest.mark.usefixtures("_small_pieces")
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * SMALL), st.binary(max_size=2 * SMALL))),
    st.integers(0, 3 * SMALL),
)
@example([(0, bytes(SMALL))], 0)
@example([(1, b"data"), (3 * SMALL, b"more")], 2 * SMALL)
def test_what_is_passed_over_counts_as_zeros(parts: list[tuple[int, bytes]], end: int) -> None:
    digest, whole = Digest(), b""
    for hole, data in parts:
        whole += bytes(hole)
        digest.update(memoryview(data), len(whole))
        whole += data
    whole += bytes(end)
    assert digest.hexdigest(len(whole)) == as_defined(whole) == digest_of_data(whole).hex()


@pytest.mark.usefixtures("_small_pieces")
@settings(deadline=None)
@given(st.integers(0, 9 * SMALL), st.lists(st.integers(0, 10)))
def test_the_parts_of_several_ranks_are_those_of_the_whole(size: int, cuts: list[int]) -> None:
    data = (b"some data" * size)[:size]
    found = b""
    for begin, behind in pairwise(sorted(cut * SMALL for cut in [0, *cuts, 10])):
        part = Digest(begin)
        part.update(memoryview(data)[begin:behind], begin)
        found += part.pieces(min(size, behind))
    assert digest_of_pieces(found).hex() == as_defined(data)


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 5000])
def test_a_file_is_read_to_its_digest(tmp_path: Path, size: int) -> None:
    data, path = (b"some data" * size)[:size], f"{tmp_path}/file"
    Path(path).write_bytes(data)
    assert digest_of(path) == read_back(path) == as_defined(data, PIECE)


@pytest.mark.parametrize("size", [PIECE, 3 * PIECE - 1])
def test_a_hole_is_hashed_as_zeros(size: int) -> None:
    assert Digest().hexdigest(size) == as_defined(bytes(size), PIECE)
