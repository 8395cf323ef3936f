"""Define how a transfer is tuned."""

from __future__ import annotations

from dataclasses import dataclass

from stager.wire.route import Algorithm


@dataclass(frozen=True, slots=True)
class Settings:
    """How bytes move. A number 0 lets the ranks choose."""

    #: Bytes of a message.
    chunk: int = 2 << 20
    #: Chunks for which a rank has buffers.
    depth: int = 0
    #: Ranks that take turns in reading; threads that write on each rank.
    readers: int = 0
    writers: int = 0
    algorithm: Algorithm = Algorithm.AUTO
    #: Whether copies are written past the page cache.
    direct: bool = True


#: The settings of a site that sets none.
DEFAULT_SETTINGS = Settings()
