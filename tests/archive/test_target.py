"""What the folder that is filled takes, counts and refuses."""

from __future__ import annotations

import io
import os
import resource
import tarfile
from contextlib import contextmanager
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from stager.archive import unpack as module
from stager.archive.target import Limits, Target
from stager.base.errors import SpaceError, UsageError
from stager.tree.walk import walk
from tests.support.archives import (
    NO_LIMITS,
    Entry,
    a_file,
    a_folder,
    a_link,
    excess,
    of_type,
    refusal,
    refused,
    seen,
    tar_of,
    unpack,
    with_time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_later_member_takes_the_place_of_an_earlier(out: Path) -> None:
    text = tar_of(a_file("a", b"old"), a_file("a", b"new"), a_link("b", "a"), a_file("b", b"file"))
    assert set(unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)) == {b"a", b"b"}
    assert [(out / name).read_bytes() for name in "ab"] == [b"new", b"file"]
    assert not (out / "b").is_symlink()


def test_folders_in_the_paths_of_members_count_too(out: Path) -> None:
    text = tar_of(a_file("a/b/c/d"))
    message = excess("3 members", "unpacked_members, reached at 'a/b/c'")
    assert refused(text, out, limits=Limits(10, 3)) == message
    (out.parent / "other").mkdir()
    unpack(io.BytesIO(text), "x.tar", bytes(out.parent / "other"), Limits(10, 4))


def test_many_members_may_be_deep_down(out: Path) -> None:
    deep = "/".join(["d"] * 500)  # which whoever clears up after the tests can remove
    entries = [a_file(f"{deep}/{number}", b"") for number in range(300)]
    assert len(unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), NO_LIMITS)) == 300


def test_the_room_on_the_disk_is_a_limit_of_its_own(out: Path) -> None:
    text = tar_of(a_file("a", bytes(5000)), a_file("b", b"1"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10_000, 10, room=12_288))
    with pytest.raises(SpaceError) as caught:
        unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10_000, 10, room=12_287))
    assert caught.value.message == (
        "x.tar: it unpacks to more than the 12.0 KiB that you may still write on this disk; "
        "free space there (stagectl evict), or ask for nodes with larger disks"
    )


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_whole_or_it_is_an_error(out: Path) -> None:
    text = tar_of(a_file("a", bytes(200_000)))
    with files_of_at_most(100_000), pytest.raises(OSError, match="File too large"):
        unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)


@pytest.mark.parametrize("data", [[b"abc"], [b"ab", b"cde"], [b"abcd", b"e"], [4, 1], []])
def test_a_file_must_have_the_size_that_was_admitted(out: Path, data: list[bytes | int]) -> None:
    target = Target(bytes(out), NO_LIMITS, "x.tar")
    pieces = (memoryview(piece) if isinstance(piece, bytes) else piece for piece in data)
    with pytest.raises(UsageError) as caught:
        target.make_file(b"a", pieces, size=4, mode=0o644, mtime=0)
    why = "does not have the size that the archive states"
    assert caught.value.message == refusal("a", why)
    assert target.digests == {}


def test_a_hard_link_to_itself_is_ignored(out: Path) -> None:
    link = of_type("./a", tarfile.LNKTYPE, "a")
    assert set(unpack(io.BytesIO(tar_of(a_file("a"), link)), "x.tar", bytes(out), NO_LIMITS)) == {
        b"a"
    }
    assert (out / "a").read_bytes() == b"data"


def test_a_hard_link_takes_the_place_of_a_file(out: Path) -> None:
    text = tar_of(a_file("a"), a_file("b", b"old"), of_type("b", tarfile.LNKTYPE, "a"))
    digests = unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "b").samefile(out / "a")
    assert digests[b"b"] == digests[b"a"]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (a_file("x/" + "n" * 256), "has a name of more than 255 bytes"),
        (a_link("l", "n" * 4096), "is a link with a target that is too long"),
        (a_link("bin/python\n", "/etc/python"), "is a link that leads out of the archive"),
        (a_link("bad\udcff", "/etc"), "is a link that leads out of the archive"),
    ],
)
def test_a_member_that_the_disk_cannot_hold_is_named(out: Path, entry: Entry, why: str) -> None:
    assert refused(tar_of(entry), out) == refusal(entry[0].name[:80], why)


def test_a_time_that_no_listing_holds_becomes_the_nearest(out: Path) -> None:
    unpack(io.BytesIO(tar_of(with_time(10**11))), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "when").stat().st_mtime_ns == (1 << 63) - 1


def test_a_path_that_is_too_long_is_refused(out: Path) -> None:
    name = "/".join(["d" * 200] * 20)
    below = "/".join(["o" * 200] * (3900 // 201 - len(bytes(out)) // 201))
    assert "has a path that is too long" in refused(tar_of(a_file(f"{name}/{below}")), out)


def unpack_by(text: bytes, out: Path, order: tuple[int, ...]) -> Target:
    """Unpack a tar by several ranks, one after the other in that ``order``; return rank 0's."""
    limits = Limits(1 << 20, 100)
    targets = [Target(bytes(out), limits, "x.tar", rank, len(order)) for rank in range(len(order))]
    for rank in order:
        module.unpack(io.BytesIO(text), targets[rank])
    targets[0].finish()
    return targets[0]


#: Members with the same path, links among them, folders, and larger files than the others.
MEMBERS = (
    a_file("a", b"old"), a_file("b", b"other"), a_file("a", b"new"), a_link("link", "a"),
    a_folder("empty"), a_file("deep/er/c", bytes(9000)), of_type("deep/c2", tarfile.LNKTYPE, "a"),
    a_file("d", b"file"), a_link("d", "a"), a_link("e", "a"), a_file("e", b"was a link"),
    of_type("b", tarfile.LNKTYPE, "deep/er/c"), of_type("b2", tarfile.LNKTYPE, "b"),
    of_type("e2", tarfile.LNKTYPE, "e"), a_file("f", b"1"), of_type("f", tarfile.LNKTYPE, "b2"),
    a_file("f", b"last"), of_type("link2", tarfile.LNKTYPE, "link"), a_file("deep/g", b""),
)  # fmt: skip


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_several_ranks_make_what_one_does(
    out: Path, order: tuple[int, ...], tmp_path: Path
) -> None:
    (alone := tmp_path / "alone").mkdir()
    text = tar_of(*MEMBERS)
    digests = unpack(io.BytesIO(text), "x.tar", bytes(alone), NO_LIMITS)
    assert unpack_by(text, out, order).digests == digests
    assert seen(walk(str(out))) == seen(walk(str(alone)))
    for name in digests:
        path = name.decode()
        assert (out / path).read_bytes() == (alone / path).read_bytes()


def test_ranks_make_about_as_much_each(out: Path) -> None:
    text = tar_of(a_file("large", bytes(3 << 19)), *(a_file(f"f{n}", b"1") for n in range(5)))
    made = []
    for rank in range(3):
        (of_rank := out / str(rank)).mkdir()
        module.unpack(io.BytesIO(text), Target(bytes(of_rank), NO_LIMITS, "x.tar", rank, 3))
        made.append(sorted(os.listdir(of_rank)))
    assert made == [["large"], ["f0", "f2", "f4"], ["f1", "f3"]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_refuse_what_one_would(out: Path, order: tuple[int, ...]) -> None:
    link, beneath = a_link("a", "/"), a_file("a/b")
    with pytest.raises(UsageError) as caught:
        unpack_by(tar_of(link, beneath), out, order)
    why = "lies beneath 'a', which is a file or link earlier in the archive"
    assert caught.value.message == refusal("a/b", why)


def test_ranks_do_not_replace_what_a_late_hard_link_leads_to(out: Path) -> None:
    again = of_type("b", tarfile.LNKTYPE, "a")
    with pytest.raises(UsageError) as caught:
        unpack_by(tar_of(a_file("a"), a_file("b"), again, a_file("a")), out, (0, 1))
    why = "is there again, after a hard link to it that replaced a file"
    assert caught.value.message == refusal("a", why)
