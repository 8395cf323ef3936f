"""Decide the permissions of the copies of all files in a folder."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from itertools import chain, compress
from typing import TYPE_CHECKING

from stager.base.linux import open_beneath
from stager.base.options import Share
from stager.disk.files import OPEN_FOLDER
from stager.disk.permissions import copied_mode, private_mode, shared_mode
from stager.source.way import READ, has_acl
from stager.tree.listing import Kind
from stager.tree.walk import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.tree.listing import Listing


def permitted(path: str, listing: Listing, mode: int, share: Share) -> Listing:
    """Return the ``listing`` of the folder at ``path`` with the modes that a copy may have.

    ``mode`` is that of the folder itself. Nobody reaches what is in it who may not enter it. An
    entry that has an access control list is for the owner of the copy alone.
    """
    modes = listing.modes[:]
    if mode & READ and share is not Share.ALL:
        for row in _rows_with_acl(path, listing):
            modes[row] = private_mode(modes[row])
    if share is not Share.SOURCE:
        for row, kind in enumerate(listing.kinds):
            if kind in (Kind.FILE, Kind.FOLDER):
                copied = copied_mode(modes[row], is_folder=kind == Kind.FOLDER)
                modes[row] = shared_mode(copied, share)
    modes[0] = mode
    return replace(listing, modes=modes)


def _rows_with_acl(path: str, listing: Listing) -> Iterator[int]:
    """Yield the rows of files and folders that have an access control list, or may have one."""
    rows: dict[bytes, list[int]] = {}
    for row, kind in enumerate(listing.kinds):
        if row and kind in (Kind.FILE, Kind.FOLDER) and listing.modes[row] & READ:
            rows.setdefault(listing.paths[row].rpartition(b"/")[0], []).append(row)

    def look(folder: bytes) -> list[bool]:
        try:
            descriptor = open_beneath(root, folder, OPEN_FOLDER)
        except OSError:  # it was moved; reading from it will fail
            return [True] * len(rows[folder])
        start = len(folder) + 1 if folder else 0
        # There is no listxattrat(2) before Linux 6.13.
        base = b"/proc/self/fd/%d/" % descriptor
        try:
            return [has_acl(base + listing.paths[row][start:]) for row in rows[folder]]
        finally:
            os.close(descriptor)

    try:
        root = os.open(path, OPEN_FOLDER)
    except OSError:
        yield from chain.from_iterable(rows.values())
        return
    with closing(Workers()) as workers:
        answers = workers.each(look, list(rows), len)
        yield from compress(chain.from_iterable(rows.values()), chain.from_iterable(answers))
    os.close(root)
