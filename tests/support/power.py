"""Cut the power of a node's disk at some moments of its stages, and stage again on what is left.

``unshare --mount python -m tests.support.power FOLDER PROGRAM SEED MOMENTS`` needs root, and a
mount namespace of its own. ``PROGRAM`` is ``logged_disk``. It prints a line for each moment, among
the events of its stages.

A file and a folder are staged in two versions. A disk keeps what was written before its last flush,
and of what was written since, any part. So each cut is a copy of the image as it was before, with
all writes up to the last flush before a moment, and some of those after it.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from tests.support.world import World, messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: The numbers of `logged_disk` before the data of a write.
_HEAD = struct.Struct("=qq")
_FILES = 40


class Entry(NamedTuple):
    """A write to the disk at an ``offset``, or a flush, which has no data."""

    offset: int
    data: bytes


class Node(World):
    """One rank, and the two versions of what it stages: a file, and a folder of small files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MPI.COMM_SELF, folder, "data")
        self.disk = self.copy.parent
        self._folder = folder / "folder"
        folder_item = self.items(source=str(self._folder), destination="/nvme/folder")
        self._both = (*self.request.items, *folder_item)

    def stage(self, version: int) -> list[str]:
        """Make a version of both sources, and stage it. Return the failures."""
        self._folder.mkdir(exist_ok=True)
        for path, data in self.contents(version).items():
            place = self._folder / path if path else self.source
            if not place.exists() or place.read_bytes() != data:
                place.write_bytes(data)
        return messages(self.run(items=self._both))

    @staticmethod
    def contents(version: int) -> dict[str, bytes]:
        """Return what is in the files of a version: by their path, which the single file lacks."""
        small = {f"part{at}": f"{version} {at}\n".encode() * (at + 1) for at in range(_FILES)}
        return {"": b"%d" % version * 100_000, **small}

    def copied(self) -> tuple[str, str]:
        """Return which version of the file, and of the folder, is on the disk: 0 if none is."""
        file = {"": self.copy.read_bytes()} if self.copy.exists() else {}
        staged = self.disk / "folder"
        folder = (
            {path.name: path.read_bytes() for path in staged.iterdir()} if staged.exists() else {}
        )
        return _version_of(file, [""]), _version_of(folder, [f"part{at}" for at in range(_FILES)])


def _version_of(found: dict[str, bytes], names: Sequence[str]) -> str:
    """Return which version the files ``names`` are that were ``found``: 0 if there are none."""
    for version in (1, 2):
        if found == {name: Node.contents(version)[name] for name in names}:
            return str(version)
    return "broken" if found else "0"


def entries_of(log: bytes) -> Iterator[Entry]:
    """Yield what is in a log of `logged_disk`."""
    at = 0
    while at < len(log):
        offset, length = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        data = log[at : at + max(length, 0)]
        yield Entry(offset, data)
        at += len(data)


def left_of(entries: Sequence[Entry], chance: random.Random) -> list[Entry]:
    """Return which writes of ``entries`` a disk has after its power was cut: some since the flush.

    Pure but for ``chance``.
    """
    last = max((at for at, one in enumerate(entries) if one.offset < 0), default=0)
    kept = chance.choice((0, 0.5, 1))
    since = [one for one in entries[last:] if chance.random() < kept]
    return [one for one in (*entries[:last], *since) if one.offset >= 0]


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[None]:
    """Mount an image by a loop device."""
    subprocess.run(["mount", "-o", "loop,noatime", image, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def logged(program: str, image: Path, folder: Path, log: Path) -> Iterator[None]:
    """Mount an image on ``folder`` whose writes are logged."""
    shown = image.with_name("shown")
    shown.mkdir()
    with subprocess.Popen([program, image, shown, log]) as server:
        while not (shown / "disk").exists():
            assert server.poll() is None
            time.sleep(0.01)
        with mounted(shown / "disk", folder):
            yield
        subprocess.run(["umount", shown], check=True)


def main(folder: Path, program: str, seed: int, moments: int) -> None:
    """Stage two versions, then cut the power at ``moments`` of that time."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    node = Node(folder)
    before, image, log = folder / "before", folder / "image", folder / "log"
    with before.open("wb") as file:
        file.truncate(24 << 20)
    lazy = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-E", lazy, before], check=True)
    shutil.copyfile(before, image)
    lengths = []
    with logged(program, image, node.disk, log):
        for version in (1, 2):
            lengths.append(log.stat().st_size)
            assert node.stage(version) == []
        lengths.append(log.stat().st_size)
    entries = list(entries_of(log.read_bytes()[: lengths[-1]]))
    chance = random.Random(seed)
    for _ in range(moments):
        # Each second one after all: what is still in memory then is lost.
        moment = chance.choice((len(entries), chance.randrange(len(entries))))
        shutil.copyfile(before, image)
        with image.open("r+b") as disk:
            for offset, data in left_of(entries[:moment], chance):
                os.pwrite(disk.fileno(), data, offset)
        with mounted(image, node.disk):
            was = node.copied()
            failures = node.stage(2)
            print(moment, *was, "then", *node.copied(), *failures, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
