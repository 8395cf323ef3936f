"""How is a source of any scheme looked at, and opened to be read?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stager.base.errors import UsageError
from stager.source.posix import PosixFile, look_at_source
from stager.source.schemes import Location, Scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.base.extents import Extent
    from stager.source.description import Listings, Selection, Source
    from stager.source.endpoints import RemoteSettings
    from stager.tree.stream import Stream


class TreeReader(Protocol):
    """Reads the stream of a folder's files.

    ``bytes_read`` counts the bytes, and ``retries`` the requests to a store that were repeated.
    """

    bytes_read: int
    retries: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on. Raise IntegrityError or SourceError."""

    def close(self) -> None:
        """Close what is open."""


class SourceReader(TreeReader, Protocol):
    """Reads a single file of the version that was looked at."""

    def extents(self, size: int) -> Iterator[Extent]:
        """Yield where the first ``size`` bytes have data. Raise SourceError."""

    def check(self) -> None:
        """Raise IntegrityError if another version was, or may have been, read."""


def look_at(
    path: str,
    selection: Selection,
    listings: Listings,
    settings: RemoteSettings,
    *,
    to_be_read: bool = False,
) -> Source:
    """Return what is at ``path``, a path or a URL; add a folder's listing to ``listings``.

    With ``to_be_read``, check that this user may read it. Raise SourceError if there is nothing
    that can be staged; UsageError if one object or image has patterns.
    """
    scheme = Scheme.of(path)
    if not scheme.is_url:
        return look_at_source(path, selection, listings, to_be_read=to_be_read)
    is_folder = Location.parse(path).is_folder
    if not is_folder and (selection.include or selection.exclude):
        remedy = "remove include and exclude"
        if scheme.is_made:
            raise UsageError(f"{path} is one image; {remedy}")
        raise UsageError(
            f"{path} is one object; {remedy}, or write a '/' behind it for all that lies beneath"
        )
    # Slow to import, and not needed for files.
    if scheme is Scheme.DOCKER:
        from stager.source.registry import look_at_image

        return look_at_image(path, settings)
    if scheme is Scheme.HF:
        from stager.source.hub import look_at_model

        return look_at_model(path, selection, listings, settings)
    if is_folder:
        from stager.source.prefix import look_at_prefix

        return look_at_prefix(path, selection, listings, settings)
    from stager.source.remote import look_at_object

    return look_at_object(path, settings)


def open_file(
    path: str, source: Source, settings: RemoteSettings, *, for_all: bool = False
) -> SourceReader:
    """Open a single file to be read.

    Raise IntegrityError if it is another version, SourceError if it cannot be read or, with
    ``for_all``, not by all users.
    """
    if not Scheme.of(path).is_url:
        return PosixFile(path, source, for_all=for_all)
    from stager.source.remote import ObjectReader

    return ObjectReader(path, source, settings)


def open_tree(
    path: str,
    source: Source,
    stream: Stream,
    settings: RemoteSettings,
    selection: Selection,
    *,
    is_only: bool = False,
) -> TreeReader:
    """Open a folder, whose ``stream`` is to be read. Each file is checked when it is read.

    One that ``is_only`` reads the whole stream.
    """
    if not Scheme.of(path).is_url:
        from stager.tree.stream import StreamReader

        homes = {one.base: one.homes[0] for one in source.environments if one.comes_along}
        return StreamReader(
            path, stream, source=source.facts.inode, follow=selection.follow, homes=homes
        )
    if Scheme.of(path) is Scheme.HF:
        from stager.source.hub import open_model

        return open_model(
            path, source, stream, settings, as_cache=selection.as_cache, is_only=is_only
        )
    from stager.source.prefix import open_prefix

    return open_prefix(path, stream, settings, is_only=is_only)
