"""Archives made of folders: complete, current, and none that could not be unpacked."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

import stager.archive.create as module
from stager.archive.create import pack
from stager.base.errors import (
    DestinationError,
    IntegrityError,
    LaunchError,
    SourceError,
    UsageError,
)
from stager.tree.walk import walk
from tests.support.archives import NO_LIMITS, seen, unpack
from tests.support.stagectl import STAGECTL, Ran, run

if TYPE_CHECKING:
    from pathlib import Path

TARS = ("tar", "tar.gz", "tgz", "tar.xz", "txz", "tar.bz2", "tbz2", "tar.zst", "tzst")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that can be packed."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "empty").mkdir(mode=0o700)
    (folder / "bin/tool").write_bytes(os.urandom(3 << 20))
    (folder / "bin/tool").chmod(0o755)
    (folder / "bin/link").symlink_to("tool")
    (folder / "second").hardlink_to(folder / "bin/tool")
    (folder / ("long" * 60)).write_text("x")
    (folder / os.fsdecode(b"\xff\n")).touch()
    for path in (folder / "bin/tool", folder / "bin", folder / "empty", folder):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return folder


@pytest.mark.parametrize("suffix", TARS)
def test_what_is_packed_is_what_is_unpacked(folder: Path, tmp_path: Path, suffix: str) -> None:
    archive = tmp_path / f"a.{suffix}"
    told: list[tuple[int, int]] = []
    packed = pack(str(folder), str(archive), lambda *bytes_read: told.append(bytes_read))
    assert (packed.files, packed.size, packed.fresh) == (3, (3 << 20) + 1, True)
    assert told == sorted(told)
    assert told[-1] == (packed.size, packed.size)
    assert packed.packed_size == archive.stat().st_size
    out = tmp_path / "out"
    out.mkdir()
    with archive.open("rb") as file:
        unpack(file, archive.name, os.fsencode(out), NO_LIMITS)
    assert seen(walk(str(out))) == seen(walk(str(folder)))


def test_a_squashfs_image_holds_the_same(folder: Path, tmp_path: Path) -> None:
    pack(str(folder), str(tmp_path / "a.sqsh"))
    subprocess.run(
        ["unsquashfs", "-d", tmp_path / "out", tmp_path / "a.sqsh"], check=True, capture_output=True
    )
    assert seen(walk(str(tmp_path / "out"))) == seen(walk(str(folder)))


def test_without_mksquashfs_another_format_is_proposed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"mksquashfs is not installed here; pack a \.tar\.zst"):
        pack(str(folder), str(tmp_path / "a.sqsh"))
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


@pytest.mark.parametrize("suffix", [*TARS, "sqsh"])
def test_a_folder_is_packed_once_and_again_when_something_changed(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    archive = tmp_path / f"a.{suffix}"

    def fresh() -> bool:
        return pack(str(folder), str(archive)).fresh

    assert [fresh(), fresh()] == [True, False]
    (folder / "bin/tool").chmod(0o700)
    assert [fresh(), fresh()] == [True, False]
    (folder / "bin/link").unlink()
    assert [fresh(), fresh()] == [True, False]
    archive.write_bytes(b"")
    assert [fresh(), fresh()] == [True, False]
    # A folder that takes the other's place.
    shutil.copytree(folder, tmp_path / "other", symlinks=True)
    folder.rename(tmp_path / "old")
    (tmp_path / "other").rename(folder)
    assert [fresh(), fresh()] == [True, False]


@pytest.mark.parametrize("suffix", ["tar", "sqsh"])
def test_a_folder_that_changes_meanwhile_is_not_packed(
    folder: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any) -> None:
        write(*arguments)
        (folder / "second").touch()

    write = module._write
    monkeypatch.setattr(module, "_write", changing)
    with pytest.raises(IntegrityError) as caught:
        pack(str(folder), str(tmp_path / f"a.{suffix}"))
    text = f"{folder} changed while it was packed; pack it again when nothing writes to it"
    assert str(caught.value) == text
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_what_extract_would_refuse_is_not_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "bin/tool").chmod(0o4755)
    pack(str(folder), str(tmp_path / "a.tar"))
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getmember("bin/tool").mode == 0o755
    (folder / "bin/out").symlink_to("/etc/passwd")
    with pytest.raises(UsageError) as caught:
        pack(str(folder), str(tmp_path / "a.tar"))
    assert str(caught.value) == (
        f"{folder}/bin/out is a link that leads out of the archive, so extract would refuse it; "
        "remove it, or pack a .sqsh"
    )
    pack(str(folder), str(tmp_path / "a.sqsh"))


def test_what_cannot_be_packed_is_reported_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    known = ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar .sqsh .squashfs"
    for name in ("a.zip", "a"):
        with pytest.raises(UsageError) as refused:
            pack(str(folder), name)
        assert str(refused.value) == f"{name}: the name of the archive must end in one of {known}"
    inside = folder / "a.tar"
    with pytest.raises(UsageError) as refused:
        pack(str(folder), str(inside))
    where = "lies in the folder that is to be packed; choose another place"
    assert str(refused.value) == f"{inside} {where}"
    os.mkfifo(folder / "pipe")
    with pytest.raises(SourceError, match="which cannot be staged") as failed:
        pack(str(folder), str(tmp_path / "a.tar"))
    what = "is a named pipe, which cannot be staged; move it out of the folder"
    assert str(failed.value) == f"{folder}/pipe {what}"
    (tmp_path / "b.tar").mkdir()
    taken = r"/b\.tar exists and is not a plain file; choose another name"
    with pytest.raises(UsageError, match=taken):
        pack(str(folder), str(tmp_path / "b.tar"))
    (tmp_path / "b.tar").rmdir()
    nothing, file = tmp_path / "nothing", tmp_path / "env/bin/tool"
    for path, why in (
        (nothing, f"{nothing}: there is no such folder; check the path"),
        (file, f"{file} is not a folder; stage a file as it is, without pack"),
        (file / "x", f"{file}/x: there is no such folder; check the path"),
    ):
        with pytest.raises(SourceError) as missing:
            pack(str(path), str(tmp_path / "a.tar"))
        assert str(missing.value) == why
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_an_archive_that_was_there_stays_when_packing_fails(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    pack(str(folder), str(archive))
    before = archive.read_bytes()
    (folder / "bin/tool").chmod(0)
    if os.getuid() == 0:
        os.unlink(folder / "bin/tool")
        os.mkfifo(folder / "bin/tool")
    with pytest.raises(SourceError):
        pack(str(folder), str(archive))
    assert archive.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "env"]


@pytest.mark.parametrize("suffix", [*TARS, "sqsh"])
def test_a_file_that_was_not_packed_from_the_folder_is_kept(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    archive, other = tmp_path / f"a.{suffix}", tmp_path / "other"
    (other / "env").mkdir(parents=True)
    pack(str(other / "env"), str(archive))  # what another folder was packed into is kept, too
    for content in (archive.read_bytes(), b"mine"):
        archive.write_bytes(content)
        with pytest.raises(DestinationError) as caught:
            pack(str(folder), str(archive))
        assert str(caught.value) == (
            f"{archive} is there already, and was not packed from {folder}, or was changed since; "
            "delete it, or choose another name"
        )
        assert archive.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == [archive.name, "env", "other"]


@pytest.mark.parametrize("leads_to", ["", "old", "none"])
def test_a_symbolic_link_is_not_replaced(tmp_path: Path, leads_to: str) -> None:
    (tmp_path / "set").mkdir()
    pack(f"{tmp_path}/set", f"{tmp_path}/old.tar")
    (tmp_path / "set/a").write_text("a")
    (tmp_path / "empty.tar").touch()
    link = tmp_path / "link.tar"
    link.symlink_to(f"{leads_to or 'empty'}.tar")
    with pytest.raises(DestinationError) as caught:
        pack(f"{tmp_path}/set", str(link))
    assert caught.value.message == (
        f"{link} is a symbolic link; delete it, or name the file that it leads to"
    )
    assert link.is_symlink()


@pytest.mark.parametrize("suffix", ["tar", "tar.zst"])
def test_an_archive_that_was_changed_since_is_kept(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    archive = tmp_path / f"a.{suffix}"
    pack(str(folder), str(archive))
    with archive.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")  # a byte of its end
    changed = archive.read_bytes()
    for _ in range(2):
        with pytest.raises(DestinationError) as caught:
            pack(str(folder), str(archive))
        assert str(caught.value) == (
            f"{archive} was changed or copied since it was packed from {folder}; delete it, or "
            "choose another name"
        )
        (folder / "new").touch()
    assert archive.read_bytes() == changed


@pytest.mark.parametrize("first", [b"", None])
def test_what_is_put_at_the_archives_place_meanwhile_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes | None
) -> None:
    archive = tmp_path / "a.tar"
    if first is not None:
        archive.write_bytes(first)
    write = module._write

    def writing(*arguments: Any) -> None:
        write(*arguments)
        archive.write_bytes(b"mine")

    monkeypatch.setattr(module, "_write", writing)
    with pytest.raises(DestinationError) as caught:
        pack(str(folder), str(archive))
    assert str(caught.value) == (
        f"{archive} was written while the folder was packed; delete it, or choose another name"
    )
    assert archive.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "env"]


def test_a_tar_of_one_that_was_packed_is_kept(folder: Path, tmp_path: Path) -> None:
    """The mark is looked for where pack writes it, not among the contents."""
    pack(str(folder), str(tmp_path / "a.tar"))
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.add(tmp_path / "a.tar", "a.tar")
    with pytest.raises(DestinationError, match="was not packed from"):
        pack(str(folder), str(tmp_path / "b.tar"))


def test_a_folder_is_known_by_all_its_paths(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").symlink_to(".")
    (tmp_path / "latest").symlink_to("env")
    monkeypatch.chdir(folder)
    paths = (str(folder), f"{folder}/", f"{tmp_path}/elsewhere/env", "../env", ".")
    archive = str(tmp_path / "a.tar")
    assert [pack(path, archive).fresh for path in paths] == [True, False, False, False, False]
    # A link to the newest version.
    latest, archive = str(tmp_path / "latest"), str(tmp_path / "b.tar")
    assert pack(latest, archive).fresh
    (tmp_path / "latest").unlink()
    (tmp_path / "newer").mkdir()
    (tmp_path / "latest").symlink_to("newer")
    assert pack(latest, archive).fresh


def test_the_command_prints_the_directive_for_the_job(folder: Path) -> None:
    ran = run([*STAGECTL, "pack", str(folder)], folder)
    first, second = ran.out.splitlines()
    size = r"\d+\.\d MiB"
    assert re.fullmatch(
        rf"stage: {folder}\.tar\.zst: 3 files, {size} packed into {size} in \d+\.\d s", first
    )
    assert second == f"stage: stage it with --stage={folder}.tar.zst:DST,extract"
    again = run([*STAGECTL, "pack", str(folder)], folder)
    current = (
        rf"stage: {folder}\.tar\.zst: up to date, nothing packed \(3 files, {size} in {size}\)"
    )
    assert re.fullmatch(current, again.out.splitlines()[0])
    (folder / "conda-meta").mkdir()
    assert run([*STAGECTL, "pack", str(folder)], folder).out.splitlines()[1] == (
        "stage: a conda environment works only at the path where it was made; to stage it to DST, "
        "pack it with conda-pack --dest-prefix DST"
    )
    ran = run([*STAGECTL, "pack", str(folder), "/nowhere/a.tar"], folder)
    text = "stage: /nowhere/a.tar: its folder does not exist; make it, or choose another place\n"
    assert (ran.code, ran.err) == (6, text)
    shutil.copytree(folder, folder.with_name("new"), symlinks=True)
    subprocess.run(["tar", "cf", "new.tar.zst", "new"], cwd=folder.parent, check=True)
    text = (
        "stage: {0}.tar.zst is there already, and was not packed from {0}, or was changed since; "
        "delete it, or choose another name\n"
    ).format(folder.with_name("new"))
    for arguments in ([], ["--json"]):
        assert run([*STAGECTL, "pack", *arguments, f"{folder.parent}/new"], folder) == Ran(
            6, "", text
        )


def test_the_command_prints_json(folder: Path) -> None:
    archive = folder.parent / "b.tar"
    printed = {
        "archive": str(archive), "files": 3, "size": (3 << 20) + 1,
        "options": ["extract"], "conda": False,
    }  # fmt: skip
    for fresh in (True, False):
        ran = run([*STAGECTL, "pack", "--json", str(folder), "../b.tar"], folder)
        assert (ran.code, ran.err) == (0, "")
        result = json.loads(ran.out)
        assert 0 < result.pop("seconds") < 60
        assert result == {
            "version": 1,
            **printed,
            "packed_size": archive.stat().st_size,
            "fresh": fresh,
        }
    ran = run([*STAGECTL, "pack", "--json", str(folder), "/nowhere/a.tar"], folder)
    assert ran == Ran(
        6,
        "",
        "stage: /nowhere/a.tar: its folder does not exist; make it, or choose another place\n",
    )


def test_an_image_is_not_made_of_a_folder_that_others_can_change(tmp_path: Path) -> None:
    (tmp_path / "set/open").mkdir(parents=True)
    (tmp_path / "set/open").chmod(0o777)
    with pytest.raises(UsageError) as caught:
        pack(str(tmp_path / "set"), str(tmp_path / "set.sqsh"))
    assert str(caught.value) == (
        f"{tmp_path}/set/open: others could change it while mksquashfs reads it; pack a .tar.zst "
        "instead"
    )
    pack(str(tmp_path / "set"), str(tmp_path / "set.tar.zst"))


@pytest.mark.parametrize("suffix", ["sqsh", "tar"])
def test_an_archive_is_its_owners_alone(tmp_path: Path, suffix: str) -> None:
    """What was closed in the folder is in its bytes."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file").touch(0o644)
    pack(str(tmp_path / "set"), str(tmp_path / f"a.{suffix}"))
    assert (tmp_path / f"a.{suffix}").stat().st_mode & 0o7777 == 0o600


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files named, as on a filesystem that has no others, such as NFS."""
    real = os.open

    def refuse(path: str, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)


def pack_and_be_killed(folder: Path, archive: str) -> None:
    """Pack ``set`` in a process that is killed when half of the archive is written."""

    def die(_folder: object, _archive: str, file: int, *_: object) -> None:
        os.write(file, bytes(10_000))
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            module._write = die  # type: ignore[assignment]
            pack(str(folder / "set"), str(folder / archive))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("suffix", ["sqsh", "tar"])
def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "set").mkdir()
    pack_and_be_killed(tmp_path, f"x.{suffix}")
    assert sorted(os.listdir(tmp_path)) == ["set"]


def test_a_named_left_over_is_removed_by_the_next_writer(tmp_path: Path, named: None) -> None:
    (tmp_path / "set").mkdir()
    pack_and_be_killed(tmp_path, "x.tar")
    (_,) = tmp_path.glob(".x.tar.*")
    others = [".x.tar.swp", ".x.tar.abcdefgh.part", ".y.tar.abcdefgh", "x.tar.abcdefgh"]
    for name in others:
        (tmp_path / name).touch()
    with (tmp_path / ".x.tar.12345678").open("w") as held:  # by a writer that runs
        fcntl.flock(held, fcntl.LOCK_EX)
        assert pack(str(tmp_path / "set"), str(tmp_path / "x.tar")).fresh
    found = sorted(os.listdir(tmp_path))
    assert found == sorted([*others, ".x.tar.12345678", "set", "x.tar"])


@pytest.mark.parametrize("suffix", ["sqsh", "tar"])
def test_what_is_put_in_the_place_of_an_unfinished_archive_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: None, suffix: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file").write_text("data")
    (tmp_path / "precious").write_text("precious")
    write = module._write

    def swap_then_write(*arguments: Any) -> None:
        (partial,) = tmp_path.glob(".x.*")
        partial.unlink()
        partial.symlink_to("precious")
        write(*arguments)

    monkeypatch.setattr(module, "_write", swap_then_write)
    with pytest.raises(DestinationError) as caught:
        pack(str(tmp_path / "set"), str(tmp_path / f"x.{suffix}"))
    assert str(caught.value) == (
        f"{tmp_path}/x.{suffix}: somebody else replaced it while it was written; pack into a "
        "folder where only you may write"
    )
    assert (tmp_path / "precious").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "set"]


def test_a_folder_swapped_for_a_link_while_it_is_packed_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for top in ("set", "private"):
        (tmp_path / top / "sub").mkdir(parents=True)
        (tmp_path / top / "sub/file").write_text(top[:3])
    write = module._write

    def swap_then_write(*arguments: Any) -> None:
        (tmp_path / "set/sub").rename(tmp_path / "away")
        (tmp_path / "set/sub").symlink_to("../private/sub")
        write(*arguments)

    monkeypatch.setattr(module, "_write", swap_then_write)
    with pytest.raises(IntegrityError, match="changed while it was packed"):
        pack(str(tmp_path / "set"), str(tmp_path / "x.tar"))
    assert not (tmp_path / "x.tar").exists()


@pytest.mark.parametrize("suffix", ["sqsh", "tar"])
def test_a_link_that_leads_elsewhere_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The link stands above the folder, where another user may have put it."""
    for name, text in (("one", "open"), ("two", "closed")):
        (tmp_path / name / "set").mkdir(parents=True)
        (tmp_path / name / "set/file").write_text(text)
    link = tmp_path / "link"
    link.symlink_to("one")
    check = "_check_strangers" if suffix == "sqsh" else "_check_links"

    def swap(*_: object) -> None:
        link.unlink()
        link.symlink_to("two")

    monkeypatch.setattr(module, check, swap)
    archive = tmp_path / f"out.{suffix}"
    with pytest.raises(IntegrityError, match="was replaced while its folder was listed"):
        pack(f"{link}/set", str(archive))
    assert sorted(os.listdir(tmp_path)) == ["link", "one", "two"]


def test_a_link_to_a_folder_is_packed_as_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    pack(str(tmp_path / "link"), str(tmp_path / "out.sqsh"))
    line = ["unsquashfs", "-d", str(tmp_path / "out"), str(tmp_path / "out.sqsh")]
    subprocess.run(line, check=True, capture_output=True)
    assert (tmp_path / "out/bin/tool").read_bytes() == (folder / "bin/tool").read_bytes()
