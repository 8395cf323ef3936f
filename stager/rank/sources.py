"""Look at the items' sources from rank 0, and check their options against what they are."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.codec import BYTES, FLAG, NUMBER, TEXT, Codec, record_of, tuple_of
from stager.base.errors import SourceError, UsageError
from stager.base.options import ITSELF, FolderLayout, Links, Mode, Options, Relocate, Share
from stager.base.telemetry import Kind, doing
from stager.base.text import listed
from stager.fs.files import copy_mode
from stager.request.items import check_options
from stager.source.access import look_at
from stager.source.facts import Selection, Source, SourceFacts
from stager.source.schemes import Scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.rank.agree import Context
    from stager.request.items import StageItem, StageRequest
    from stager.source.facts import Listings
    from stager.tree.environments import Environment


def _environment() -> Codec[Environment]:
    from stager.tree.environments import Environment  # rarely needed

    paths = tuple_of(BYTES)
    return record_of(
        Environment, path=BYTES, links=paths, interpreter=BYTES, homes=paths, base=BYTES,
        comes_along=FLAG, sees_packages=FLAG,
    )  # fmt: skip


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
        environments=tuple_of(
            Codec(
                lambda value: _environment().to_data(value),
                lambda data: _environment().from_data(data),
            )
        ),
        relocation=TEXT,
        environment_note=TEXT,
        unmatched=tuple_of(TEXT),
        leaving=NUMBER,
    )
)


def selection_of(options: Options) -> Selection:
    """Return what an item stages of a folder."""
    decompress = () if options.decompress == ITSELF else options.decompress
    as_cache = options.layout is FolderLayout.HUB
    follow = options.links is Links.FOLLOW
    relocate = options.relocate is Relocate.AUTO and options.mode is Mode.COPY
    return Selection(options.include, options.exclude, decompress, as_cache, follow, relocate)


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
    sources: list[Source] = []
    for at, item in enumerate(items):
        try:
            with doing(Kind.READ, item.source):
                sources.append(_look_at(context.request, item, listings))
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
        if not Scheme.of(source).is_url:
            with doing(Kind.READ, source):
                try:
                    os.stat(source)
                except (FileNotFoundError, NotADirectoryError):
                    missing.append(source)
                except OSError:
                    pass  # it is there
    return missing


def _look_at(request: StageRequest, item: StageItem, listings: Listings) -> Source:
    # What was staged for all users is used only by those who could read the source.
    selection = selection_of(item.options)
    source = look_at(item.source, selection, listings, request.remote, to_be_read=item.shared)
    check_options(item, is_folder=source.is_tree)
    source = replace(source, unmatched=listings.unmatched(item.source, selection))
    if item.options.extract:  # its environments are known when it is unpacked
        source = replace(source, relocation=item.options.relocate.value)
    elif source.environments:
        source = _relocated(item, source)
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


def _relocated(item: StageItem, source: Source) -> Source:
    from stager.tree.environments import not_plain, relocation_digest  # rarely needed

    if note := not_plain(item.source, item.destination):
        return replace(source, environments=(), environment_note=note)
    return replace(source, relocation=relocation_digest(source.environments))
