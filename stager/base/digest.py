"""Compute digests of data that arrives in order: of a file without its holes, and of a transfer.

That of a file is put together from those of its pieces, so that several ranks can compute it: each
of them the digests of what it reads. It is the xxh3-128 of the file's bytes, or, if these are more
than PIECE, of the digests of its pieces, each of which is the xxh3-128 of PIECE bytes, or of what
is left at the end.

Only the ranks of one stage can compute that of a transfer. Each chunk is hashed by xxh3-128 with a
secret seed of its own, and the hashes by keyed BLAKE2b. A process that puts other bytes into the
transfer knows no seed and sees no hash, and it has one attempt: a difference ends the stage before
anything is published.

xxh3 is no cryptographic MAC. Nobody has shown that without the seed it is hard to find two texts
with the same hash, and a seed has 64 bits. What is stronger is too slow for the one thread that
hashes on each rank: on one core BLAKE2b hashes 1.4 GB/s, GMAC 10, Poly1305 15, and xxh3 87.
"""

from __future__ import annotations

from _blake2 import blake2b  # hashlib is slow to import: it loads OpenSSL
from functools import cache

import xxhash

from stager.base.telemetry import count

#: Bytes of a digest.
DIGEST_SIZE = 16
#: Bytes of a piece of a file: a few of the longest chunks that are read at once, and so few that
#: the pieces of 100 MB still keep several ranks busy. The digests of a TiB take one MiB.
PIECE = 16 << 20
#: A hole is hashed as zeros, at most so many at a time.
_ZEROS = memoryview(bytes(1 << 20))


class Digest:
    """The digest of a file. Bytes that are passed over count as zeros.

    ``begin`` is where the data begins that is added here, a multiple of PIECE.
    """

    def __init__(self, begin: int = 0) -> None:
        self._pieces = bytearray()
        self._piece = xxhash.xxh3_128()
        self._at = begin

    def update(self, data: memoryview, offset: int) -> None:
        """Add the ``data`` at ``offset`` bytes, which is behind all that was added before."""
        self._skip(offset)
        self._add(data)

    def pieces(self, end: int) -> bytes:
        """Return the digests of the pieces that were added, up to ``end`` bytes, together."""
        self._skip(end)
        return bytes(self._pieces) + (self._piece.digest() if self._at % PIECE else b"")

    def digest(self, size: int) -> bytes:
        """Return the digest of the whole file of ``size`` bytes."""
        return digest_of_pieces(self.pieces(size))

    def hexdigest(self, size: int) -> str:
        """Return the digest of the whole file of ``size`` bytes in hexadecimal."""
        return self.digest(size).hex()

    def _add(self, data: memoryview) -> None:
        while data:
            room = PIECE - self._at % PIECE
            self._piece.update(data[:room])
            self._at += min(room, len(data))
            data = data[room:]
            if not self._at % PIECE:
                self._pieces += self._piece.digest()
                self._piece.reset()

    def _skip(self, offset: int) -> None:
        while self._at < offset:
            if not self._at % PIECE and self._at + PIECE <= offset:
                self._pieces += _digest_of_hole()
                self._at += PIECE
            else:
                self._add(_ZEROS[: min(offset - self._at, PIECE - self._at % PIECE)])
            count()


@cache
def _digest_of_hole() -> bytes:
    """Return the digest of a piece without data."""
    zeros = xxhash.xxh3_128()
    for _ in range(PIECE // len(_ZEROS)):
        zeros.update(_ZEROS)
    return zeros.digest()


def digest_of_pieces(digests: bytes) -> bytes:
    """Return the digest of a file of which all pieces have these ``digests``. Pure."""
    return digests if len(digests) == DIGEST_SIZE else xxhash.xxh3_128_digest(digests)


def digest_of_data(data: bytes | memoryview) -> bytes:
    """Return the digest of a file with this ``data``. Pure."""
    if len(data) <= PIECE:
        return xxhash.xxh3_128_digest(data)
    whole = Digest()
    whole.update(memoryview(data), 0)
    return whole.digest(len(data))


#: Bytes of the seed of xxh3.
_SEED_SIZE = 8


class KeyedDigest:
    """The digest of the chunks that are added in order; ``key`` is of this transfer alone."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._chunks = blake2b(key=key, digest_size=DIGEST_SIZE, person=b"chunks")

    def add(self, index: int, message: memoryview) -> None:
        """Add the chunk ``index`` as it travels: its bytes and its status byte."""
        place = index.to_bytes(8, "big")
        seed = blake2b(place, key=self._key, digest_size=_SEED_SIZE, person=b"seed").digest()
        # Unlike `xxh3_128_digest`, this lets the thread that calls MPI run meanwhile.
        chunk = xxhash.xxh3_128(seed=int.from_bytes(seed, "big"))
        chunk.update(message)
        self._chunks.update(chunk.digest())

    def hexdigest(self) -> str:
        """Return the digest of all chunks in hexadecimal."""
        return self._chunks.hexdigest()
