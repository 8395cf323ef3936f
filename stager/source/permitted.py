"""Decide the permissions of the copies of all files in a folder."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import chain, compress
from threading import get_ident
from typing import TYPE_CHECKING

from stager.base.linux import leave_shared_folder, open_beneath
from stager.base.options import Share
from stager.disk.files import OPEN_FOLDER
from stager.disk.permissions import copied_mode, private_mode, shared_mode
from stager.source.way import READ, has_acl
from stager.tree.listing import Kind
from stager.tree.walk import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


def _rows_with_acl(path: str, listing: Listing) -> Iterable[int]:
    """Return the rows of files and folders that have an access control list, or may have one."""
    rows: dict[bytes, list[int]] = {}
    for row, kind in enumerate(listing.kinds):
        if row and kind in (Kind.FILE, Kind.FOLDER) and listing.modes[row] & READ:
            rows.setdefault(listing.source_path(row).rpartition(b"/")[0], []).append(row)
    every = chain.from_iterable(rows.values())
    try:
        root = os.open(path, OPEN_FOLDER)
    except OSError:
        return every
    try:
        # In a thread that may have a current folder of its own.
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(_look_everywhere, root, listing, rows).result()
    finally:
        os.close(root)
    return compress(every, answers)


def _look_everywhere(root: int, listing: Listing, rows: Mapping[bytes, list[int]]) -> list[bool]:
    """Return for each of the ``rows``, which are by folder, whether it may have such a list."""
    thread = get_ident() if leave_shared_folder() else None

    def look(folder: bytes) -> list[bool]:
        try:
            descriptor = open_beneath(root, folder, OPEN_FOLDER)
        except OSError:  # it was moved; reading from it will fail
            return [True] * len(rows[folder])
        start = len(folder) + 1 if folder else 0
        base = b""
        try:
            if get_ident() == thread:
                os.fchdir(descriptor)  # names in the current folder are the fastest to look up
            else:
                # There is no listxattrat(2) before Linux 6.13.
                base = b"/proc/self/fd/%d/" % descriptor
            return [has_acl(base + listing.source_path(row)[start:]) for row in rows[folder]]
        finally:
            os.close(descriptor)

    with closing(Workers()) as workers:
        answers = workers.each(look, list(rows), len)
        return list(chain.from_iterable(answers))
