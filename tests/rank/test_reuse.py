"""A folder is split alike on all ranks, and refused where it cannot be."""

from __future__ import annotations

import os
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from stager.base.errors import UsageError
from stager.base.options import Mode, Options
from stager.base.paths import SHARD_LIST
from stager.rank.reuse import split
from stager.request.items import StageItem
from stager.tree.listing import Kind, Listing, Row

if TYPE_CHECKING:
    from stager.rank.plan import Task

NAMES = ("n0", "n1")


def task(by: str = "") -> Task:
    options = Options(mode=Mode.SHARD, by=by)
    item = StageItem("/shared/x", "/nvme/x", "/nvme", options)
    return cast("Task", SimpleNamespace(item=item))


def listing_of(*names: str) -> Listing:
    rows = [Row(os.fsencode(name), Kind.FILE, size=10) for name in sorted(names)]
    return Listing.of([Row(b"", Kind.FOLDER), *rows])


def marks(*held: int) -> bytes:
    return zlib.compress(bytes(held))


def test_a_file_stays_on_the_node_that_has_it() -> None:
    listing = listing_of("a", "b")
    found = split(task(), listing, [marks(0, 0, 1), marks(0, 1, 0)], NAMES)
    assert list(found.owners) == [-1, 1, 0]
    assert found.text == b"n1\t10\ta\nn0\t10\tb\n"


def test_a_number_decides_the_node_whoever_has_the_file() -> None:
    listing = listing_of("a3", "b4")
    found = split(task("*{n}"), listing, [marks(0, 1, 0), marks(0, 0, 1)], NAMES)
    assert list(found.owners) == [-1, 1, 0]


def test_a_split_is_named_by_its_nodes_and_its_list() -> None:
    nothing = [marks(0, 0, 0)] * 2
    first = split(task(), listing_of("a", "b"), nothing, NAMES)
    assert first.name.startswith("2:")
    assert split(task(), listing_of("a", "b"), nothing, NAMES).name == first.name
    assert split(task(), listing_of("a", "c"), nothing, NAMES).name != first.name


def test_a_file_in_the_place_of_the_list_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        split(task(), listing_of("a", SHARD_LIST), [marks(0, 0, 0)] * 2, NAMES)
    assert refused.value.message == (
        f"mode=shard writes a list to /nvme/x/{SHARD_LIST}, but the source has a file of that "
        f"name; leave it out with exclude=/{SHARD_LIST}"
    )
