"""Define how a transfer is tuned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Bytes of the key by which the ranks of one stage know each other.
KEY_SIZE = 32


class Algorithm(StrEnum):
    """The way of chunks from their reader to all other ranks."""

    AUTO = "auto"
    #: The MPI library's own broadcast of each chunk: one at a time, or several at once.
    BCAST = "bcast"
    IBCAST = "ibcast"
    #: From each rank to the next: full rate; the number of hops grows with the number of ranks.
    CHAIN = "chain"
    #: Along two binary trees, where the inner ranks of one are the leaves of the other: full rate;
    #: the number of hops grows with the logarithm of the number of ranks.
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Settings:
    """How bytes move. A number 0 lets the ranks choose."""

    #: Bytes of a message.
    chunk: int = 2 << 20
    #: Chunks for which a rank has buffers.
    depth: int = 0
    #: Ranks that take turns in reading: so many at first, and the next number where these are too
    #: slow. Empty lets the ranks choose.
    readers: tuple[int, ...] = ()
    #: Threads that write on each rank.
    writers: int = 0
    algorithm: Algorithm = Algorithm.AUTO
    #: Reads that each of these ranks has under way at once.
    requests: int = 1
    #: Whether copies are written past the page cache.
    direct: bool = True


#: The settings of a site that sets none.
DEFAULT_SETTINGS = Settings()
