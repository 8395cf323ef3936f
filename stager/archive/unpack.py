"""An archive's bytes in, as they come, its files in a folder out; a hostile archive is refused.

The folder is one that nobody else can reach yet, so that all is judged before anybody sees it. No
member is put anywhere by way of a link, and no link leads out.
"""

from __future__ import annotations

from contextlib import closing
from typing import IO

from stager.archive.decompress import Ahead, decompressed
from stager.archive.tar import FILES, FOLDERS, HARD_LINK, LINK, TarStream, members, with_holes
from stager.archive.target import SETUID, Limits, Target
from stager.archive.zip import opened_zip, unpack_zip
from stager.base.errors import SourceError, SpaceError, StageError
from stager.base.formats import is_zip


def unpack(archive: IO[bytes], name: str, folder: bytes, limits: Limits) -> dict[bytes, bytes]:
    """Unpack the ``archive`` of that ``name`` into the empty ``folder``.

    Returns the xxh3-128 of each file by its path in the folder. Raises UsageError, which names the
    member, where the archive is hostile, SourceError where it is damaged, SpaceError, and OSError.
    """
    target = Target(folder, limits)
    try:
        if is_zip(name):
            with opened_zip(archive, limits) as whole:
                unpack_zip(whole, target)
        else:
            with closing(Ahead(decompressed(archive, name.lower()))) as blocks:
                _unpack_tar(TarStream(blocks), target)
        target.finish()
    except (StageError, OSError):
        raise
    except MemoryError:
        raise SpaceError(f"{name}: too little memory to unpack it; ask for more") from None
    except Exception as error:
        # Whatever the libraries raise: all that they were given is the archive.
        text = str(error) or "it ends early"
        raise SourceError(f"{name} cannot be unpacked: {text}") from None
    return target.digests


def _unpack_tar(tar: TarStream, target: Target) -> None:
    for member in members(tar):
        name, kind, mode, mtime, target_of_link, size, stored, extents = member
        is_folder, is_file = kind in FOLDERS, kind in FILES
        # What a folder or a link says of a size means nothing, but it makes no room for others.
        path = target.judge(
            name, size if is_file else min(size, 0), 0 if is_folder else mode & SETUID
        )
        if is_file:
            data = with_holes(tar, member) if extents is not None else tar.pieces(size)
            target.make_file(path, mode, mtime, data, size)
        elif is_folder:
            target.make_folder(path, mode, mtime)
        elif kind == LINK:
            target.make_link(path, target_of_link, mtime)
        elif kind == HARD_LINK and stored:
            raise target.refusal(path, "is a hard link with data of its own")
        elif kind == HARD_LINK:
            target.make_twin(path, target_of_link)
        else:
            raise target.refusal(path, "is no file, folder or link")
    tar.end()
