"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

from stager.wire.route import Algorithm


@dataclass(frozen=True, slots=True)
class Settings:
    """How bytes are to move: ``chunk`` in bytes, ``depth`` of the ring in chunks.

    0 ``depth``, ``readers`` or ``writers`` stand for what is best; ``direct`` for writing past the
    page cache.
    """

    chunk: int = 2 << 20
    depth: int = 0
    readers: int = 0
    writers: int = 0
    algorithm: Algorithm = Algorithm.AUTO
    direct: bool = True


#: The settings of a site that chooses nothing.
DEFAULT_SETTINGS = Settings()
