"""How is an archive unpacked into a folder, or one file decompressed: all of it or nothing?

Nobody else can reach the folder yet, so everything is checked before anybody sees a file. No member
is created through a link, and no link leads out.
"""

from __future__ import annotations

import mmap
from contextlib import closing
from itertools import cycle
from typing import IO, TYPE_CHECKING, Protocol, cast

from stager.archive.content import Begun, check_compressed, compression_in, tar_compression
from stager.archive.damage import explained
from stager.archive.decompress import ReadAhead, decompressed, decompressed_into
from stager.archive.tar import MemberKind, TarStream, members, with_holes
from stager.archive.target import NEITHER, excess, may_run_as_another, no_room
from stager.archive.zip import opened_zip, unpack_zip
from stager.base.digest import Digest
from stager.base.extents import ALIGNMENT, SMALLEST_HOLE
from stager.base.formats import COMPRESSIONS, Compression, compressed_suffix
from stager.base.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.archive.tar import Member
    from stager.archive.target import Limits, Target

#: Bytes that are written at a time, a multiple of SMALLEST_HOLE; such pieces that may wait for it.
_PIECE, _WAITING = 1 << 20, 4
_ZEROS = bytes(SMALLEST_HOLE)


class SingleTarget(Protocol):
    """A new file."""

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes."""

    def allocate(self, size: int, extents: tuple[()]) -> None:
        """Give the file its size; no more data will come."""


def decompress(compressed: IO[bytes], name: str, partial: SingleTarget, limits: Limits) -> str:
    """Decompress the file of that ``name`` into ``partial``.

    Return the digest of what was written, in hexadecimal. Raise UsageError if that is more than
    the site allows, SourceError if the file is damaged, SpaceError or DestinationError.
    """
    whole = _Whole(name, partial, limits)
    with explained(name, "file", "decompress"), closing(_read_ahead(compressed, name)) as pieces:
        for piece in pieces:
            whole.add(piece)
        return whole.finish()


def _read_ahead(compressed: IO[bytes], name: str) -> ReadAhead[memoryview]:
    """Return the pieces of what is in the file, by its content or else by its ``name``."""
    begun = Begun(compressed)
    check_compressed(begun.first)
    found = compression_in(begun.first)
    if found is Compression.NONE:
        found = COMPRESSIONS[compressed_suffix(name)]
    # One is filled and one is written while all others wait.
    buffers = _buffers(_WAITING + 2)
    return ReadAhead(decompressed_into(buffers, cast("IO[bytes]", begun), found), _WAITING)


def _buffers(count: int) -> Iterator[memoryview]:
    """Yield so many buffers again and again, aligned as direct writes require it."""
    return cycle([memoryview(mmap.mmap(-1, _PIECE)) for _ in range(count)])


class _Whole:
    """What a file of that ``name`` decompresses to, written without its zeros."""

    def __init__(self, name: str, partial: SingleTarget, limits: Limits) -> None:
        self._name = name
        self._partial = partial
        self._limits = limits
        self._digest = Digest()
        #: Bytes so far, and those of the disk that they take.
        self._at = self._allocated = 0

    def add(self, piece: memoryview) -> None:
        """Write the next bytes. Raise UsageError, SpaceError or DestinationError."""
        if self._at + len(piece) > self._limits.size:
            raise excess(self._name, bytes_text(self._limits.size), "unpacked_size")
        for begin, end in _data_in(piece):
            self._make_room(end - begin)
            self._digest.update(piece[begin:end], self._at + begin)
            self._partial.write(piece[begin:end], self._at + begin)
        self._at += len(piece)

    def finish(self) -> str:
        """Give the file its size, and return its digest. Raise SpaceError or DestinationError."""
        self._partial.allocate(self._at, ())  # there may be a hole at the end
        return self._digest.hexdigest(self._at)

    def _make_room(self, size: int) -> None:
        """Count ``size`` bytes more on the disk. Raise SpaceError if there is no room for them."""
        self._allocated += -(-size // ALIGNMENT) * ALIGNMENT
        if self._limits.room is not None and self._allocated > self._limits.room:
            raise no_room(self._name, self._limits.room)


def _data_in(piece: memoryview) -> Iterator[tuple[int, int]]:
    """Yield where ``piece`` has data, from begin to end. What is between them becomes holes."""
    begin = 0
    for at in range(0, len(piece), SMALLEST_HOLE):
        part = piece[at : at + SMALLEST_HOLE]
        if len(part) == SMALLEST_HOLE and _ZEROS.startswith(part):
            if begin < at:
                yield begin, at
            begin = at + SMALLEST_HOLE
    if begin < len(piece):
        yield begin, len(piece)


def unpack(archive: IO[bytes], target: Target) -> None:
    """Unpack the ``archive`` into the empty folder of ``target``, which is to be finished then.

    Raise UsageError, which names the archive and the member, if the archive is hostile, SourceError
    if it is damaged, SpaceError, and OSError.
    """
    with explained(target.name, "archive", "unpack"):
        begun = Begun(archive)
        compression = tar_compression(begun.first, target.name)
        if compression is None:
            with opened_zip(archive, target) as whole:
                unpack_zip(whole, target)
        else:
            with closing(ReadAhead(decompressed(cast("IO[bytes]", begun), compression))) as blocks:
                _unpack_tar(TarStream(blocks), target)


def _unpack_tar(tar: TarStream, target: Target) -> None:
    for member in members(tar):
        _unpack_member(tar, member, target)
    tar.end()


def _unpack_member(tar: TarStream, member: Member, target: Target) -> None:
    name, kind, mode, mtime, link_target, size, stored, extents = member
    is_file, is_folder = kind is MemberKind.FILE, kind is MemberKind.FOLDER
    # The size of a folder or a link means nothing, but may not make room for other members.
    counted = size if is_file else min(size, 0)
    runs_as_another = not is_folder and may_run_as_another(mode)
    path = target.admit(name, counted, runs_as_another=runs_as_another)
    if is_file:
        data = (
            tar.pieces(size)
            if extents is None
            else with_holes(tar, extents, size=size, stored=stored)
        )
        target.make_file(path, data, size=size, mode=mode, mtime=mtime)
    elif is_folder:
        target.make_folder(path, mode=mode, mtime=mtime)
    elif kind is MemberKind.LINK:
        target.make_link(path, link_target, mtime=mtime)
    elif kind is MemberKind.HARD_LINK and not stored:
        target.make_hard_link(path, link_target)
    elif kind is MemberKind.HARD_LINK:
        raise target.refusal(path, "is a hard link with data of its own")
    else:
        raise target.refusal(path, NEITHER)
