"""A file's destination is settled for all nodes alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stager.base.options import ITSELF, Options
from stager.disk.record import SourceFacts
from stager.rank.stage import settle
from stager.request.items import StageItem
from stager.source.facts import Source

FACTS = SourceFacts(size=1, mtime_ns=2, ctime_ns=3, inode=4)
FILE = Source(FACTS, 0o644, 0, 1)
FOLDER = Source(FACTS, 0o755, 0, 1, files=1, listing="digest")
ITEM = StageItem("/shared/x", "/nvme/dst", "/nvme")


@pytest.mark.parametrize(
    ("source", "options", "is_folder", "destination"),
    [
        (FILE, Options(), [False, False], "/nvme/dst"),
        (FILE, Options(), [True, True], "/nvme/dst/x"),
        (FILE, Options(), [False, True], "/nvme/dst/x"),
        (FOLDER, Options(), [True, True], "/nvme/dst"),
        (FILE, Options(extract=True), [True, True], "/nvme/dst"),
    ],
    ids=["absent", "a folder everywhere", "a folder on one node", "a tree", "an archive"],
)
def test_a_file_goes_into_a_folder_if_any_node_has_one_at_its_destination(
    source: Source, options: Options, is_folder: list[bool], destination: str
) -> None:
    item = StageItem("/shared/x", "/nvme/dst", "/nvme", options)
    (settled,) = settle([item], [source], [[on_node] for on_node in is_folder])
    assert settled.destination == destination


def test_what_is_decompressed_goes_into_a_folder_without_its_suffix() -> None:
    item = StageItem("/shared/x.gz", "/nvme/dst", "/nvme", Options(decompress=ITSELF))
    for is_folder, destination in ((True, "/nvme/dst/x"), (False, "/nvme/dst")):
        (settled,) = settle([item], [FILE], [[is_folder], [False]])
        assert settled.destination == destination


def test_a_name_that_was_added_is_not_added_again() -> None:
    item = replace(ITEM, destination="/nvme/dst/x", has_name=True)
    assert settle([item], [FILE], [[True], [False]])[0].destination == "/nvme/dst/x"


def test_each_item_is_settled_by_its_own_destination() -> None:
    items = settle([ITEM, ITEM], [FILE, FILE], [(False, True), (False, False)])
    assert [item.destination for item in items] == ["/nvme/dst", "/nvme/dst/x"]
