"""Whole stages of compressed files, which every node decompresses."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError
from stager.base.options import ITSELF, Share, Validate, Verify
from stager.fs.files import digest_of
from stager.fs.reader import FileReader
from stager.request.items import Space, Work
from stager.store.cache import open_cache
from stager.wire.layout import Settings
from tests.support.archives import zstd_compress
from tests.support.world import World, messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mpi4py import MPI

    from stager.request.items import StageItem
    from stager.store.record import Record

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd_compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
#: What is hard to compress, many zeros, and what is easy to compress.
DATA = os.urandom(30_000) + bytes(300_000) + b"words " * 50_000
WHEN = 1_700_000_000 * 10**9


class CompressedWorld(World):
    """Nodes to which one compressed file is staged."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder, "set")
        self.data: bytes = comm.bcast(DATA)
        self.make(".gz")

    def make(self, suffix: str) -> None:
        """Make the source of two members, with this suffix."""
        self.source = self.source.with_name(f"set{suffix}")
        compress = COMPRESS[suffix]
        self.write(compress(self.data[:100_000]) + compress(self.data[100_000:]))

    def write(self, text: bytes) -> None:
        """Write ``text`` to the source."""

        def write() -> None:
            self.source.write_bytes(text)
            self.source.chmod(0o640)
            os.utime(self.source, ns=(WHEN, WHEN))

        self.on_first(write)

    def wanted(self, **options: object) -> tuple[StageItem, ...]:
        """Return the item, with ``decompress`` and these options."""
        return self.items(**{"source": str(self.source), "decompress": ITSELF, **options})

    def record(self) -> Record:
        """Return the record of the copy on this node."""
        cache = open_cache(f"{self.node.disk}/nvme", os.getuid(), disk=self.node.disk)
        record = cache.load("/nvme/set")
        assert record
        return record

    def partial(self) -> list[str]:
        """Return what is left of partial files on this node."""
        return os.listdir(self.copy.parent / f".slurm-stage/{os.getuid()}/partial")


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> CompressedWorld:
    return CompressedWorld(comm, folder)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("verify", Verify)
def test_a_file_is_decompressed_on_all_nodes(
    world: CompressedWorld, suffix: str, verify: Verify
) -> None:
    world.make(suffix)
    (item,) = world.run(items=world.wanted(verify=verify)).items
    size = world.source.stat().st_size
    assert world.copy.read_bytes() == world.data
    assert (item.received, item.size, item.source_bytes_read) == (world.nodes, size, size)
    assert (item.senders, item.tree) == ([], None)
    facts, record = world.copy.stat(), world.record()
    assert (stat.S_IMODE(facts.st_mode), facts.st_mtime_ns) == (0o600, WHEN)
    assert (record.made, record.tree) == ("decompressed", None)
    assert (record.source_facts.size, record.copy_facts.size) == (size, len(world.data))
    assert record.digest == digest_of(str(world.copy)) == item.digest
    assert world.partial() == []
    (again,) = world.run(items=world.wanted(verify=verify)).items
    assert (again.received, again.current, again.source_bytes_read) == ([], world.nodes, 0)


@pytest.mark.parametrize("readers", [1, 3])
def test_each_byte_of_the_source_is_read_once(world: CompressedWorld, readers: int) -> None:
    transfer = Settings(chunk=4096, depth=2, readers=(readers,), writers=4)
    (item,) = world.run(items=world.wanted(), transfer=transfer).items
    assert item.source_bytes_read == world.source.stat().st_size
    assert world.copy.read_bytes() == world.data


def test_a_node_that_lacks_the_copy_reads_the_source(world: CompressedWorld) -> None:
    world.run(items=world.wanted())
    inode = world.copy.stat().st_ino
    world.on_last(world.copy.unlink)
    (item,) = world.run(items=world.wanted()).items
    assert (item.received, item.senders) == ([world.nodes[-1]], [])
    assert item.source_bytes_read == world.source.stat().st_size
    assert world.copy.read_bytes() == world.data
    if world.comm.rank < world.comm.size - 1:
        assert world.copy.stat().st_ino == inode


def test_a_copy_with_and_one_without_decompress_replace_each_other(
    world: CompressedWorld,
) -> None:
    world.run(items=world.wanted())
    (item,) = world.run(items=world.wanted(decompress=())).items
    assert (item.received, item.reasons) == (world.nodes, ["made differently"])
    assert world.copy.read_bytes() == world.source.read_bytes()
    (item,) = world.run(items=world.wanted()).items
    assert (item.received, item.reasons) == (world.nodes, ["made differently"])
    assert world.copy.read_bytes() == world.data


def test_a_damaged_copy_is_found_by_its_checksum(world: CompressedWorld) -> None:
    world.run(items=world.wanted())
    (item,) = world.run(items=world.wanted(validate=Validate.CHECKSUM)).items
    assert item.received == []

    def spoil() -> None:
        facts = world.copy.stat()
        with world.copy.open("r+b") as file:
            file.write(b"x" if world.data[:1] != b"x" else b"y")
        os.utime(world.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    world.on_last(spoil)
    (item,) = world.run(items=world.wanted(validate=Validate.CHECKSUM)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], [])
    assert item.reasons == ["it is damaged"]
    assert world.copy.read_bytes() == world.data


def test_a_dry_run_reports_and_makes_nothing(world: CompressedWorld) -> None:
    (item,) = world.run(items=world.wanted(), work=Work.PLAN).items
    assert (item.received, item.size) == (world.nodes, world.source.stat().st_size)
    assert not world.copy.exists()


def test_the_copy_may_be_opened_to_all(world: CompressedWorld) -> None:
    world.run(items=world.wanted(share=Share.ALL))
    assert stat.S_IMODE(world.copy.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text[: len(text) // 2],
        lambda text: text + b"garbage",
        lambda text: text[:5000] + bytes([text[5000] ^ 1]) + text[5001:],
        lambda _: b"",
    ],
    ids=["cut off", "half", "garbage", "changed", "empty"],
)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_file_does_not_change_the_old_copy(
    world: CompressedWorld, suffix: str, spoil: Callable[[bytes], bytes]
) -> None:
    world.make(suffix)
    world.run(items=world.wanted())
    before = world.copy.stat()
    world.on_first(lambda: world.source.write_bytes(spoil(world.source.read_bytes())))
    outcome = world.run(items=world.wanted())
    assert [failure.node for failure in outcome.failures] == world.nodes
    for failure in outcome.failures:
        assert failure.code == SourceError.code
        assert failure.message.startswith(
            f"{world.source} cannot be decompressed: the file is damaged ("
        )
    assert (world.copy.stat().st_ino, world.copy.read_bytes()) == (before.st_ino, world.data)
    assert world.partial() == []


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_source_that_is_overwritten_while_it_is_read_is_not_called_damaged(
    world: CompressedWorld, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    # More than fits into the pipe, so that what cannot be decompressed is noticed meanwhile.
    before, after = world.comm.bcast([gzip.compress(os.urandom(2_500_000 + n), 1) for n in (0, 9)])
    world.write(before)
    overwritten: list[int] = []
    read_into = FileReader.read_into

    def overwrite(reader: FileReader, buffer: memoryview, offset: int) -> None:
        read_into(reader, buffer, offset)
        if offset == 0 and len(overwritten) < attempts:
            overwritten.append(offset)
            with world.source.open("r+b") as file:  # which has the same inode
                file.write(after)
                file.truncate()

    monkeypatch.setattr(FileReader, "read_into", overwrite)
    outcome = world.run(items=world.wanted(), transfer=Settings(chunk=65536, depth=2, readers=(1,)))
    changed = "changed while it was read; submit again when nothing writes to it"
    if attempts == 3:
        assert messages(outcome) == [f"7 node0: {world.source} {changed}"]
        assert not world.copy.exists()
    else:
        assert outcome.failures == []
        assert world.copy.read_bytes() == gzip.decompress(after)


def test_a_file_that_unpacks_to_too_much_is_refused(world: CompressedWorld) -> None:
    outcome = world.run(items=world.wanted(), space=Space(unpacked_size=10_000))
    why = (
        f"{world.source}: it has more than the 9.8 KiB that the site allows (unpacked_size): "
        "nothing was unpacked; ask the administrator to allow more"
    )
    assert messages(outcome) == [f"2 {node}: {why}" for node in world.nodes]
    assert not world.copy.exists()
    assert world.partial() == []


def test_a_file_that_unpacks_to_more_than_the_users_limit_is_refused(
    world: CompressedWorld,
) -> None:
    outcome = world.run(items=world.wanted(), space=Space(user_limit=100_000))
    why = (
        f"{world.source}: it unpacks to more than the 97.7 KiB that you may still write on this "
        "disk; free space there (stagectl evict), or ask for nodes with larger disks"
    )
    assert messages(outcome) == [f"5 {node}: {why}" for node in world.nodes]
    assert not world.copy.exists()


def test_a_folder_is_not_decompressed(world: CompressedWorld) -> None:
    world.source = world.source.with_name("folder.gz")
    world.on_first(world.source.mkdir)
    assert messages(world.run(items=world.wanted())) == [
        (
            f"2 node0: {world.source} is a folder; name the files in it that are to be "
            "decompressed by a pattern, such as decompress=*"
        )
    ]


class CompressedTree(CompressedWorld):
    """Nodes to which a folder is staged that has compressed files in it."""

    def make(self, suffix: str) -> None:
        self.source = self.source.with_name("set")
        self.on_first(self.fill)

    def fill(self) -> None:
        """Make the folder: small and large files, one that is not compressed, and links."""
        (self.source / "deep").mkdir(parents=True)
        for suffix, compress in COMPRESS.items():
            (self.source / f"small{suffix}.txt{suffix}").write_bytes(
                compress(b"small" + suffix.encode())
            )
        (self.source / "deep/large.gz").write_bytes(gzip.compress(self.data, 1) * 3)
        (self.source / "plain.gz.txt").write_bytes(b"plain")
        (self.source / "left.gz").write_bytes(b"not compressed at all")
        os.link(self.source / "small.gz.txt.gz", self.source / "deep/again.gz")
        (self.source / "link").symlink_to("plain.gz.txt")

    def wanted(self, **options: object) -> tuple[StageItem, ...]:
        chosen = {"decompress": ("*",), "exclude": ("left.gz",), **options}
        return self.items(**{"source": str(self.source), **chosen})

    @property
    def files(self) -> dict[str, bytes]:
        """What the copy must have."""
        small = {f"small{suffix}.txt": b"small" + suffix.encode() for suffix in COMPRESS}
        return {
            **small, "deep/large": self.data * 3, "plain.gz.txt": b"plain",
            "deep/again": b"small.gz", "link": b"plain",
        }  # fmt: skip

    def assert_copied(self) -> None:
        found = {
            str(path.relative_to(self.copy)): path.read_bytes()
            for path in self.copy.rglob("*")
            if not path.is_dir()
        }
        assert found == self.files


@pytest.fixture
def tree(comm: MPI.Intracomm, folder: Path) -> CompressedTree:
    return CompressedTree(comm, folder)


@pytest.mark.parametrize("verify", Verify)
def test_files_of_a_folder_are_decompressed(tree: CompressedTree, verify: Verify) -> None:
    # Chunks that are smaller than the large file.
    transfer = Settings(chunk=4096, depth=4)
    (item,) = tree.run(items=tree.wanted(verify=verify), transfer=transfer).items
    tree.assert_copied()
    size = sum(
        path.stat().st_size
        for path in tree.source.rglob("*")
        if path.is_file() and path.name not in ("left.gz", "again.gz", "link")
    )
    assert (item.received, item.size, item.source_bytes_read) == (tree.nodes, size, size)
    assert (tree.copy / "deep/again").samefile(tree.copy / "small.gz.txt")
    source = (tree.source / "deep/large.gz").stat()
    assert (tree.copy / "deep/large").stat().st_mtime_ns == source.st_mtime_ns
    for validate in Validate:
        (again,) = tree.run(items=tree.wanted(validate=validate)).items
        assert (again.current == tree.nodes) is (validate is not Validate.ALWAYS)
    tree.assert_copied()


def test_only_a_changed_file_is_decompressed_again(tree: CompressedTree) -> None:
    tree.run(items=tree.wanted())
    inode = (tree.copy / "deep/large").stat().st_ino
    tree.on_first(
        lambda: (tree.source / "small.xz.txt.xz").write_bytes(COMPRESS[".xz"](b"small.xz"))
    )
    (item,) = tree.run(items=tree.wanted()).items
    assert item.tree
    assert (item.received, item.tree.moved) == (tree.nodes, 1)
    assert (tree.copy / "deep/large").stat().st_ino == inode
    tree.assert_copied()


def test_a_node_that_lacks_the_folder_reads_the_source_folder(tree: CompressedTree) -> None:
    tree.run(items=tree.wanted())
    tree.on_last(lambda: shutil.rmtree(tree.copy))
    (item,) = tree.run(items=tree.wanted()).items
    assert (item.received, item.senders) == ([tree.nodes[-1]], [])
    tree.assert_copied()


def test_a_folder_with_and_one_without_decompress_replace_each_other(tree: CompressedTree) -> None:
    tree.run(items=tree.wanted())
    (item,) = tree.run(items=tree.wanted(decompress=())).items
    assert (item.received, item.reasons) == (tree.nodes, ["made differently"])
    assert (tree.copy / "deep/large.gz").exists()
    (item,) = tree.run(items=tree.wanted()).items
    assert (item.received, item.reasons) == (tree.nodes, ["made differently"])
    tree.assert_copied()


@pytest.mark.parametrize("name", ["left.gz", "deep/large.gz"])
def test_a_damaged_file_in_a_folder_is_named(tree: CompressedTree, name: str) -> None:
    tree.run(items=tree.wanted())

    def spoil() -> None:
        text = (tree.source / name).read_bytes()
        (tree.source / name).write_bytes(text[: len(text) // 2])

    tree.on_first(spoil)
    outcome = tree.run(items=tree.wanted(exclude=()), transfer=Settings(chunk=4096, depth=4))
    for failure in outcome.failures:
        assert failure.code == SourceError.code
        named, _, why = failure.message.partition(" cannot be decompressed: ")
        assert (named.removeprefix(f"{tree.source}/"), why.partition(";")[0]) in {
            ("left.gz", "it is not compressed"),
            ("deep/large.gz", "the file is damaged (it ends early)"),
        }
    assert [failure.node for failure in outcome.failures] == tree.nodes
    assert tree.partial() == []
    tree.assert_copied()


def test_files_that_decompress_to_one_path_are_refused(tree: CompressedTree) -> None:
    tree.on_first(lambda: (tree.source / "deep/large").write_bytes(b""))
    assert messages(tree.run(items=tree.wanted())) == [
        (
            f"2 node0: {tree.source}/deep/large.gz would be decompressed to deep/large, which is "
            "there as well; leave one of them out with exclude=, or name others with decompress="
        )
    ]


def test_a_folder_that_unpacks_to_too_much_is_refused(tree: CompressedTree) -> None:
    most = len(tree.data) * 3 + 10
    outcome = tree.run(items=tree.wanted(), space=Space(unpacked_size=most))
    assert [failure.code for failure in outcome.failures] == [2] * len(tree.nodes)
    assert "that the site allows (unpacked_size)" in outcome.failures[0].message
    assert not tree.copy.exists()
    assert tree.partial() == []


def test_a_pattern_for_a_single_file_is_refused(world: CompressedWorld) -> None:
    assert messages(world.run(items=world.wanted(decompress=("*",)))) == [
        f"2 node0: {world.source} is not a folder; write decompress alone, without a pattern"
    ]
