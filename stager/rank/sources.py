"""Look at the items' sources from rank 0, and check their options against what they are."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.errors import SourceError, UsageError
from stager.base.options import ITSELF, FolderLayout, Links, Options, Relocate, Share
from stager.base.paths import VENV_CONFIG
from stager.base.progress import Kind, doing
from stager.base.text import listed
from stager.disk.permissions import copy_mode
from stager.disk.record import SourceFacts
from stager.request.kinds import check_options
from stager.source.access import look_at
from stager.source.facts import Selection, Source
from stager.source.location import is_url
from stager.wire.codec import (
    BYTES,
    FLAG,
    NUMBER,
    TEXT,
    Codec,
    list_of,
    optional,
    record_of,
    tuple_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.rank.agree import Context
    from stager.request.items import StageItem, StageRequest
    from stager.source.facts import Listings
    from stager.tree.venv import Interpreter


def _interpreter() -> Codec[Interpreter]:
    from stager.tree.venv import Interpreter  # rarely needed

    links = list_of(BYTES)
    as_set = Codec(
        lambda paths: links.to_data(sorted(paths)), lambda data: frozenset(links.from_data(data))
    )
    return record_of(Interpreter, path=TEXT, links=as_set, is_shared=FLAG, at=TEXT)


_FACTS = record_of(
    SourceFacts, size=NUMBER, mtime_ns=NUMBER, ctime_ns=NUMBER, inode=NUMBER, revision=TEXT
)
#: How what rank 0 sees travels to the other ranks.
SOURCES = tuple_of(
    record_of(
        Source,
        facts=_FACTS,
        mode=NUMBER,
        group=NUMBER,
        allocated=NUMBER,
        files=NUMBER,
        listing=TEXT,
        interpreter=optional(
            Codec(
                lambda value: _interpreter().to_data(value),
                lambda data: _interpreter().from_data(data),
            )
        ),
        unmatched=tuple_of(TEXT),
        is_left_alone=FLAG,
        leaving=NUMBER,
    )
)


def selection_of(options: Options) -> Selection:
    """Return what an item stages of a folder."""
    decompress = () if options.decompress == ITSELF else options.decompress
    as_cache = options.layout is FolderLayout.HUB
    follow = options.links is Links.FOLLOW
    return Selection(options.include, options.exclude, decompress, as_cache, follow)


def look_at_sources(
    context: Context, items: Sequence[StageItem], listings: Listings
) -> tuple[Source, ...]:
    """Return what rank 0 sees of the sources; return nothing on other ranks.

    Only rank 0 asks shared storage: hundreds of nodes that do so at once are slow. The listings of
    folders are added to ``listings``. Raise SourceError if a source is missing or cannot be read;
    it names others that are missing, too. Raise UsageError or PolicyRefusal if an item's options do
    not fit its source.
    """
    if context.comm.rank:
        return ()
    copied = [(item.source, item.destination) for item in items if item.options.is_whole_copy]
    sources: list[Source] = []
    for at, item in enumerate(items):
        try:
            with doing(Kind.READ, item.source):
                sources.append(_look_at(context.request, item, copied, listings))
        except SourceError as error:
            others = _missing(items[at + 1 :], item.source)
            if not others:
                raise
            either = " either" if _missing([item]) else ""
            raise SourceError(f"{error.message}; not found{either}: {listed(others)}") from None
    return tuple(sources)


def _missing(items: Iterable[StageItem], known: str = "") -> list[str]:
    """Return which sources are missing, without URLs, which may take a while, and the ``known``."""
    missing: list[str] = []
    for source in dict.fromkeys(item.source for item in items if item.source != known):
        if not is_url(source):
            with doing(Kind.READ, source):
                try:
                    os.stat(source)
                except (FileNotFoundError, NotADirectoryError):
                    missing.append(source)
                except OSError:
                    pass  # it is there
    return missing


def _look_at(
    request: StageRequest,
    item: StageItem,
    copied: Sequence[tuple[str, str]],
    listings: Listings,
) -> Source:
    # What was staged for all users is used only by those who could read the source.
    selection = selection_of(item.options)
    source = look_at(item.source, selection, listings, request.remote, to_be_read=item.shared)
    check_options(item, is_folder=source.is_tree)
    source = replace(source, unmatched=listings.unmatched(item.source, selection))
    if item.options.relocate is Relocate.VENV:
        source = _environment(item, source, copied)
    elif source.is_tree and item.destination != item.source:
        listing = listings.get(item.source, selection)
        source = replace(source, is_left_alone=bool(listing and listing.has(VENV_CONFIG)))
    return _permitted(source, item)


def _permitted(source: Source, item: StageItem) -> Source:
    """Return the ``source`` with the mode and the group of its copy. Raise UsageError."""
    share, group = item.options.share, os.getegid()
    if item.shared and share is Share.NONE:
        share = Share.ALL  # `way` sees to it that all can read the source
    if share is Share.GROUP:
        if source.group not in (group, *os.getgroups()):
            raise UsageError(
                f"{item.source}: share=group is for the source's group (gid {source.group}), and "
                "you are not in it"
            )
        group = source.group
    mode = copy_mode(source.mode, share, is_folder=source.is_tree)
    return replace(source, mode=mode, group=group)


def _environment(item: StageItem, source: Source, copied: Sequence[tuple[str, str]]) -> Source:
    """Add an environment's interpreter, and its path on the nodes if the job stages it as well."""
    from stager.tree.venv import check_place, find_interpreter, staged_at  # rarely needed

    check_place(item.destination)
    if not source.is_tree:  # an archive, whose interpreter is known when it is unpacked
        return source
    found = find_interpreter(item.source, item.source)
    if found:
        found = replace(found, at=staged_at(found.path, copied))
    return replace(source, interpreter=found)
