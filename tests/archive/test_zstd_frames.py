"""Whether a zstd stream ends where one of its frames ends, however it was made and read."""

from __future__ import annotations

import io

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.archive.damage import DamagedError
from stager.archive.zstd_frames import ZstdFrames

#: A frame that decompressors pass over.
SKIPPED = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc"
#: Data that is stored as it is, as one byte repeated, and compressed, in several blocks.
DATA = st.one_of(
    st.binary(max_size=50),
    st.builds(bytes, st.sampled_from([1, 5, 200_000])),
    st.sampled_from([b"words " * 60_000, b""]),
)


def a_frame(data: bytes, *, checksum: bool, sized: bool, level: int = 1) -> bytes:
    made = zstandard.ZstdCompressor(
        level=level, write_checksum=checksum, write_content_size=sized
    ).compressobj(len(data) if sized else -1)
    return made.compress(data) + made.flush()


FRAMES = st.builds(
    a_frame, DATA, checksum=st.booleans(), sized=st.booleans(), level=st.sampled_from([1, 19])
) | st.just(SKIPPED)
STREAMS = st.lists(FRAMES, min_size=1, max_size=3)


def follow(text: bytes, size: int) -> None:
    frames = ZstdFrames(io.BytesIO(text))
    while data := frames.read(size):
        assert len(data) <= size
    frames.end()


@settings(max_examples=100, deadline=None)
@given(STREAMS, st.sampled_from([1, 3, 7, 1 << 18]))
def test_a_whole_stream_ends_where_its_last_frame_ends(stream: list[bytes], size: int) -> None:
    follow(b"".join(stream), size)


@settings(max_examples=200, deadline=None)
@given(STREAMS, st.data())
def test_a_stream_that_is_cut_off_ends_early(stream: list[bytes], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(stream[-1]) - 1))
    if not cut and len(stream) > 1:  # the frames before it are whole
        return
    with pytest.raises(DamagedError, match=r"^it ends early$"):
        follow(b"".join(stream[:-1]) + stream[-1][:cut], 1 << 18)


@pytest.mark.parametrize("rest", [b"\0", b"abc", b"abcd", bytes(100)])
def test_something_else_behind_the_last_frame_is_damage(rest: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^something else follows the compressed data$"):
        follow(zstandard.compress(b"data") + rest, 100)


def test_what_is_no_zstd_is_damage() -> None:
    with pytest.raises(DamagedError, match=r"^it is not in the format of zstd$"):
        follow(b"\x1f\x8b\x08\x00", 100)
