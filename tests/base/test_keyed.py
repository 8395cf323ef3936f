"""The digest of chunks by a key depends on each byte, on the order, and on the key."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stager.base.digest import KeyedDigest

KEY = bytes(range(32))
CHUNKS = [b"one", b"two", b"one"]


def digest(chunks: list[bytes], key: bytes = KEY) -> str:
    keyed = KeyedDigest(key)
    for index, chunk in enumerate(chunks):
        keyed.add(index, memoryview(chunk))
    return keyed.hexdigest()


def test_equal_chunks_and_keys_have_equal_digests() -> None:
    assert digest(CHUNKS) == digest(CHUNKS)
    assert digest([]) == digest([])
    assert len(digest([])) == 32


@pytest.mark.parametrize(
    "other",
    [
        [],
        CHUNKS[:2],
        CHUNKS[:1],
        [*CHUNKS, b""],
        [b"two", b"one", b"one"],
        [b"onetwo", b"one"],
        [b"one", b"two", b"onf"],
        [b"one", b"two", b"one\0"],
    ],
)
def test_other_chunks_have_another_digest(other: list[bytes]) -> None:
    assert digest(other) != digest(CHUNKS)


@given(st.binary(min_size=32, max_size=32))
def test_another_key_gives_another_digest(key: bytes) -> None:
    assert (digest(CHUNKS, key) == digest(CHUNKS)) == (key == KEY)


def test_each_chunk_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    real = xxhash.xxh3_128

    def spy(*, seed: int) -> xxhash.xxh3_128:
        seeds.append(seed)
        return real(seed=seed)

    monkeypatch.setattr(xxhash, "xxh3_128", spy)
    digest(CHUNKS * 100)
    digest(CHUNKS * 100, bytes(32))
    assert len(set(seeds)) == 600
    assert max(seeds) > 2**60
