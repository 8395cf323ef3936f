"""What becomes of a file of the store equals it and leaves it as it was, on real filesystems."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.fs.clone import Way, fill, link, way_between
from stager.fs.reader import data_extents
from tests.support.disks import bound, btrfs, ext4, tmpfs, xfs
from tests.support.nightly import repeated
from tests.support.users import as_ordinary_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stager.base.extents import Extent
    from tests.support.disks import Disk

    Make = Callable[[], Disk]

pytestmark = pytest.mark.root

MIB = 1 << 20
#: Where a file has data: so much that room is reserved first, and two blocks, after a hole each. It
#: ends with a hole.
PIECES = {0: 9 * MIB, 12 * MIB: 4096, 14 * MIB: 4096}
SIZE = 16 * MIB + 5
#: Before Linux 5.18, no blocks are shared between two mounts of a filesystem.
BETWEEN_MOUNTS = tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 18)
XFS_WITHOUT = partial(xfs, make="-m reflink=0")


class Place:
    """A folder of a store, and one of a destination, on which all users may write."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder = store / "store", folder / "folder"
        for one in (self.store, self.folder):
            one.mkdir(exist_ok=True)
            one.chmod(0o777)
        self.source, self.target = self.store / "source", self.folder / "target"

    def way(self) -> tuple[Way, str]:
        between = str(self.store), str(self.folder)
        return way_between(*between)

    def write(self) -> bytes:
        with self.source.open("wb") as file:
            file.truncate(SIZE)  # before, as XFS reserves room behind what is written last
            for offset, length in PIECES.items():
                file.seek(offset)
                file.write(os.urandom(length))
            file.flush()
            os.fsync(file.fileno())
        return self.source.read_bytes()

    def fill(self, way: Way) -> Way:
        with self.source.open("rb") as source, self.target.open("wb") as target:
            return fill(way, source.fileno(), target.fileno())

    def link(self) -> bool:
        return link(str(self.source), str(self.target))


def data_of(path: Path) -> list[Extent]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return list(data_extents(file.fileno(), SIZE))


def shares_all(path: Path) -> bool:
    """Return whether each extent of a file is shared with another file."""
    shown = subprocess.check_output(["filefrag", "-v", "-s", path], text=True)
    flags = [line.rpartition(":")[2] for line in shown.splitlines() if re.match(r" +\d+:", line)]
    return bool(flags) and all("shared" in these for these in flags)


def attributes(text: str, folder: Path) -> None:
    subprocess.run(["chattr", *text.split(), folder], check=True)


@pytest.mark.parametrize("naming", ["unnamed", repeated("named")], indirect=True)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (xfs, (Way.REFLINK, "")),
        (btrfs, (Way.REFLINK, "")),
        (XFS_WITHOUT, (Way.HARD_LINK, "this xfs cannot share blocks")),
        (ext4, (Way.HARD_LINK, "this ext4 cannot share blocks")),
        (tmpfs, (Way.HARD_LINK, "this tmpfs cannot share blocks")),
    ],
    ids=["XFS", "btrfs", "XFS without reflinks", "ext4", "tmpfs"],
)
@pytest.mark.usefixtures("naming")
def test_a_trial_finds_the_best_way_and_leaves_nothing(
    make: Make, expected: tuple[Way, str]
) -> None:
    with make() as disk:
        place = Place(disk, disk)
        assert as_ordinary_user(place.way) == expected
        assert list(place.store.iterdir()) == list(place.folder.iterdir()) == []


@pytest.mark.parametrize(
    "case",
    [
        (xfs, Way.REFLINK, Way.REFLINK),
        (xfs, Way.COPY, Way.COPY),
        (btrfs, Way.REFLINK, Way.REFLINK),
        (ext4, Way.REFLINK, Way.COPY),
        repeated((btrfs, Way.COPY, Way.COPY)),
        repeated((XFS_WITHOUT, Way.REFLINK, Way.COPY)),
        repeated((tmpfs, Way.REFLINK, Way.COPY)),
    ],
)
def test_a_file_is_equal_with_its_holes_and_what_is_written_to_it_is_its_own(
    case: tuple[Make, Way, Way],
) -> None:
    make, way, used = case
    with make() as disk:
        place = Place(disk, disk)
        data = place.write()
        assert place.fill(way) is used
        assert place.target.read_bytes() == data
        assert data_of(place.target) == data_of(place.source)
        assert len(data_of(place.target)) == len(PIECES)
        if make in (xfs, btrfs):
            assert shares_all(place.target) == (used is Way.REFLINK)
        with place.target.open("r+b") as file:
            file.write(b"other")
            file.truncate(MIB)
        assert place.source.read_bytes() == data


def test_a_hard_link_is_the_file_of_the_store() -> None:
    with ext4() as disk:
        place = Place(disk, disk)
        place.write()
        assert place.link()
        assert place.source.samefile(place.target)
        with pytest.raises(FileExistsError):
            place.link()


def test_a_file_with_too_many_names_gets_no_more() -> None:
    with ext4(make="-O ^has_journal") as disk:
        place = Place(disk, disk)
        place.source.write_bytes(b"")
        for number in range(64_999):
            os.link(place.source, place.store / str(number))
        assert not place.link()
        assert not place.target.exists()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (xfs, (Way.REFLINK, "") if BETWEEN_MOUNTS else (Way.COPY, "another mount")),
        (ext4, (Way.COPY, "this ext4 cannot share blocks, another mount")),
    ],
    ids=["XFS", "ext4"],
)
def test_between_two_mounts_of_a_filesystem_there_are_no_hard_links(
    make: Make, expected: tuple[Way, str]
) -> None:
    with make() as disk, bound(disk) as again:
        place = Place(disk, again)
        assert place.way() == expected
        data = place.write()
        assert not place.link()
        assert place.fill(Way.REFLINK) == expected[0]
        assert place.target.read_bytes() == data


def test_a_file_is_copied_to_another_filesystem() -> None:
    with xfs() as disk, tmpfs() as memory:
        place = Place(disk, memory)
        assert place.way() == (Way.COPY, "another filesystem")
        data = place.write()
        assert place.fill(Way.REFLINK) is Way.COPY
        assert place.target.read_bytes() == data
        assert data_of(place.target) == data_of(place.source)


def test_subvolumes_share_blocks_and_a_full_quota_is_told() -> None:
    with btrfs() as disk:
        volume = disk / "volume"
        subprocess.run(["btrfs", "--quiet", "subvolume", "create", volume], check=True)
        place = Place(disk, volume)
        assert place.way() == (Way.REFLINK, "")
        data = place.write()
        assert place.fill(Way.REFLINK) is Way.REFLINK
        assert place.target.read_bytes() == data
        place.target.unlink()
        subprocess.run(["btrfs", "--quiet", "quota", "enable", disk], check=True)
        subprocess.run(["btrfs", "--quiet", "qgroup", "limit", "1M", volume], check=True)
        with pytest.raises(OSError, match="quota") as refused:
            place.fill(Way.COPY)
        assert refused.value.errno == errno.EDQUOT
        assert place.source.read_bytes() == data


def test_a_file_that_the_kernel_does_not_reflink_is_copied() -> None:
    with btrfs() as disk:
        place = Place(disk, disk)
        assert place.way() == (Way.REFLINK, "")
        attributes("+C", place.store)  # its new files are written in place, and have no checksums
        data = place.write()
        assert place.fill(Way.REFLINK) is Way.COPY
        assert place.target.read_bytes() == data


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (xfs, (Way.REFLINK, "")),
        (
            XFS_WITHOUT,
            (Way.COPY, "this xfs cannot share blocks, another project quota"),
        ),
    ],
    ids=["XFS", "XFS without reflinks"],
)
def test_a_folder_with_a_project_of_its_own_gets_no_hard_links(
    make: Make, expected: tuple[Way, str]
) -> None:
    with make() as disk:
        place = Place(disk, disk)
        attributes("-p 42 +P", place.folder)
        assert place.way() == expected
        place.write()
        assert not place.link()


@pytest.mark.parametrize("make", [partial(tmpfs, "8M"), partial(ext4, "8M")], ids=["tmpfs", "ext4"])
def test_a_full_disk_is_found_before_a_large_file_is_copied(make: Make, tmp_path: Path) -> None:
    with make() as disk:
        place = Place(tmp_path, disk)
        place.write()
        with pytest.raises(OSError, match="No space") as refused:
            place.fill(Way.COPY)
        assert refused.value.errno == errno.ENOSPC
        assert place.target.read_bytes().strip(b"\0") == b""
