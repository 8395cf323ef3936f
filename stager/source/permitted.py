"""Decide the permissions of the copies of all files in a folder."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import chain, compress
from threading import get_ident
from typing import TYPE_CHECKING

from stager.base.linux import leave_shared_folder, open_at
from stager.base.options import Share
from stager.base.progress import count
from stager.disk.files import OPEN_FOLDER
from stager.disk.permissions import copied_mode, private_mode, shared_mode
from stager.source.way import READ, has_acl
from stager.tree.listing import Kind
from stager.tree.walk import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.tree.listing import Listing

#: A folder, and the names of some of its entries.
_Siblings = tuple[bytes, list[bytes]]
_WITH_MODES = Kind.FILE, Kind.FOLDER


def permitted(
    path: str, listing: Listing, mode: int, share: Share, *, follow: bool = False
) -> Listing:
    """Return the ``listing`` of the folder at ``path`` with the modes that a copy may have.

    ``mode`` is that of the folder itself. Nobody reaches what is in it who may not enter it. An
    entry that has an access control list is for the owner of the copy alone. With ``follow``, links
    to folders are followed.
    """
    modes = listing.modes[:]
    if mode & READ and share is not Share.ALL:
        for row in _rows_with_acl(path, listing, follow=follow):
            modes[row] = private_mode(modes[row])
    if share is not Share.SOURCE:
        for row, kind in enumerate(listing.kinds):
            if kind in _WITH_MODES:
                copied = copied_mode(modes[row], is_folder=kind == Kind.FOLDER)
                modes[row] = shared_mode(copied, share)
    modes[0] = mode
    return replace(listing, modes=modes)


def _rows_with_acl(path: str, listing: Listing, *, follow: bool) -> Iterable[int]:
    """Return the rows of files and folders that have an access control list, or may have one."""
    modes = listing.modes
    rows = [
        row
        for row, kind in enumerate(listing.kinds)
        if row and kind in _WITH_MODES and modes[row] & READ
    ]
    try:
        root = os.open(path, OPEN_FOLDER)
    except OSError:
        return rows
    try:
        paths = list(map(listing.source_path, rows))
        # In a thread that may have a current folder of its own.
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(_look_everywhere, root, paths, follow).result()
    finally:
        os.close(root)
    return compress(rows, answers)


def _look_everywhere(root: int, paths: Sequence[bytes], follow: bool) -> list[bool]:
    """Return for each of the ``paths`` beneath ``root`` whether it may have such a list."""
    thread = get_ident() if leave_shared_folder() else None

    def look(siblings: _Siblings) -> list[bool]:
        folder, names = siblings
        try:
            descriptor = open_at(root, folder, OPEN_FOLDER, follow=follow)
        except OSError:  # it was moved; reading from it will fail
            return [True] * len(names)
        try:
            if get_ident() == thread:
                os.fchdir(descriptor)  # names in the current folder are the fastest to look up
                return list(map(_has_acl, names))
            # There is no listxattrat(2) before Linux 6.13.
            base = b"/proc/self/fd/%d/" % descriptor
            return [_has_acl(base + name) for name in names]
        finally:
            os.close(descriptor)

    with closing(Workers()) as workers:
        answers = workers.each(look, _by_folder(paths), len)
        return list(chain.from_iterable(answers))


def _has_acl(path: bytes) -> bool:
    count()  # there may be millions, on storage that answers slowly
    return has_acl(path)


def _by_folder(paths: Iterable[bytes]) -> list[_Siblings]:
    """Return the ``paths``, in their order, as the folders and the names that follow each other.

    >>> _by_folder([b"a/b", b"a/c", b"d"])
    [(b'a', [b'b', b'c']), (b'', [b'd'])]
    """
    folders: list[_Siblings] = []
    for folder, _, name in (path.rpartition(b"/") for path in paths):
        if not folders or folder != folders[-1][0]:
            folders.append((folder, []))
        folders[-1][1].append(name)
    return folders
