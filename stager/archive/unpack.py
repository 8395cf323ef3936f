"""Unpack an archive into a folder, or refuse all of it.

Nobody else can reach the folder yet, so everything is checked before anybody sees a file. No member
is created through a link, and no link leads out.
"""

from __future__ import annotations

from contextlib import closing
from typing import IO, TYPE_CHECKING, cast

from stager.archive.content import Begun, format_of
from stager.archive.damage import explained
from stager.archive.decompress import ReadAhead, decompressed
from stager.archive.tar import MemberKind, members
from stager.archive.tar_sparse import with_holes
from stager.archive.tar_stream import TarStream
from stager.archive.target import NEITHER, Target, may_run_as_another
from stager.archive.zip import opened_zip, unpack_zip
from stager.base.formats import Container

if TYPE_CHECKING:
    from stager.archive.tar import Member
    from stager.archive.target import Limits


def unpack(archive: IO[bytes], name: str, folder: bytes, limits: Limits) -> dict[bytes, bytes]:
    """Unpack the ``archive`` of that ``name`` into the empty ``folder``.

    Return the xxh3-128 of each file by its path in the folder. Raise UsageError, which names the
    archive and the member, if the archive is hostile, SourceError if it is damaged, SpaceError, and
    OSError.
    """
    target = Target(folder, limits, name)
    with explained(name, "archive", "unpack"):
        begun = Begun(archive)
        container, compression = format_of(begun.first, name)
        if container is Container.ZIP:
            with opened_zip(archive, target) as whole:
                unpack_zip(whole, target)
        else:
            with closing(ReadAhead(decompressed(cast("IO[bytes]", begun), compression))) as blocks:
                _unpack_tar(TarStream(blocks), target)
        target.finish()
    return target.digests


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
