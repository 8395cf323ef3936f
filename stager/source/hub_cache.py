"""Lay out a model as the hub's own programs keep it in their cache. Pure.

There, ``blobs`` has the contents, each once; ``snapshots/COMMIT`` has the files, as links to them;
and ``refs`` tells the commit of a branch or tag.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.source.prefix import folders_above
from stager.source.remote import MODE, Version, tag_of
from stager.tree.listing import Kind, Listing, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stager.source.prefix import Objects

_BLOBS, _SNAPSHOTS, _REFS = b"blobs", b"snapshots", b"refs"


def as_cache(plain: Listing, blobs: Mapping[bytes, str], commit: str, revision: str) -> Listing:
    """Return the listing of the cache's folder of a model whose files are ``plain``.

    ``blobs`` has the names of contents by path.
    """
    above = b"%s/%s" % (_SNAPSHOTS, commit.encode())
    rows = {row.path: row for row in _snapshot(plain, blobs, above)}
    if revision != commit:
        path = b"%s/%s" % (_REFS, revision.encode())
        size, mtime = len(commit), plain.mtimes[0]
        rows[path] = _row(plain, path, Kind.FILE, MODE, size, mtime, tag_of(commit))
    for path in {b""}.union(*map(folders_above, rows)) - rows.keys():
        rows[path] = _row(plain, path, Kind.FOLDER, plain.modes[0], 0, plain.mtimes[0], 0)
    return Listing.of(rows.values())


def _snapshot(plain: Listing, blobs: Mapping[bytes, str], above: bytes) -> Iterator[Row]:
    """Yield the files of a commit as links, the folders they are in, and their contents."""
    for row, path in enumerate(plain.paths):
        at = b"%s/%s" % (above, path) if path else above
        mtime, tag = plain.mtimes[row], plain.inodes[row]
        if plain.kinds[row] == Kind.FOLDER:
            yield _row(plain, at, Kind.FOLDER, plain.modes[row], 0, mtime, 0)
            continue
        blob = b"%s/%s" % (_BLOBS, blobs[path].encode())
        yield _row(plain, blob, Kind.FILE, MODE, plain.sizes[row], mtime, tag)
        link = _row(plain, at, Kind.LINK, 0, 0, mtime, 0)
        yield link._replace(target=b"../" * at.count(b"/") + blob)


def _row(
    plain: Listing, path: bytes, kind: Kind, mode: int, size: int, mtime: int, tag: int
) -> Row:
    return Row(path, kind, mode, size, mtime, 0, tag, plain.owners[0], plain.groups[0])


class CacheFiles:
    """The files of the cache's folder, which are read from the files of a commit."""

    def __init__(self, files: Objects, listing: Listing, commit: str) -> None:
        self._files = files
        self._commit = commit.encode()
        above = len(_SNAPSHOTS) + len(commit) + 2
        #: By path of a blob, the path of a file that has these contents.
        self._paths = {
            os.fsdecode(listing.targets[row].lstrip(b"./")): os.fsdecode(listing.paths[row][above:])
            for row in listing.rows(Kind.LINK)
        }

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from the file at ``path``; see `Objects.fetch`."""
        if path in self._paths:
            return self._files.fetch(self._paths[path], version, buffer, offset)
        buffer[:] = self._commit[offset : offset + len(buffer)]
        return version, 0
