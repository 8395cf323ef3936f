"""`stagectl pack`: one archive of a folder, made once, that holds all that is in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

import stager.archive.pack
from stager.archive.pack import pack
from stager.archive.target import Limits
from stager.archive.unpack import unpack
from stager.base.errors import IntegrityError, LaunchError, SourceError, UsageError
from stager.tree.walk import walk
from tests.support.stagectl import STAGECTL, run

if TYPE_CHECKING:
    from pathlib import Path

    from stager.tree.listing import Listing

TARS = ("tar", "tar.gz", "tgz", "tar.xz", "txz", "tar.zst", "tzst")
NO_LIMITS = Limits(1 << 40, 1 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that can be packed."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "empty").mkdir(mode=0o700)
    (folder / "bin/tool").write_bytes(os.urandom(3 << 20))
    (folder / "bin/tool").chmod(0o755)
    (folder / "bin/link").symlink_to("tool")
    (folder / "twin").hardlink_to(folder / "bin/tool")
    (folder / ("long" * 60)).write_text("x")
    (folder / os.fsdecode(b"\xff\n")).touch()
    for path in (folder / "bin/tool", folder / "bin", folder / "empty", folder):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return folder


def seen(listing: Listing) -> list[tuple[object, ...]]:
    columns = listing.paths, listing.kinds, listing.modes, listing.sizes
    seconds = [mtime // 10**9 for mtime in listing.mtimes]
    return [*zip(*columns, seconds, strict=True), tuple(listing.targets.items())]


@pytest.mark.parametrize("suffix", TARS)
def test_what_is_packed_is_what_is_unpacked(folder: Path, tmp_path: Path, suffix: str) -> None:
    archive = tmp_path / f"a.{suffix}"
    packed = pack(str(folder), str(archive))
    assert (packed.files, packed.size, packed.fresh) == (3, (3 << 20) + 1, True)
    assert packed.packed_size == archive.stat().st_size
    out = tmp_path / "out"
    out.mkdir()
    with archive.open("rb") as file:
        unpack(file, archive.name, os.fsencode(out), NO_LIMITS)
    assert seen(walk(str(out))) == seen(walk(str(folder)))


def test_a_squashfs_image_holds_it_too(folder: Path, tmp_path: Path) -> None:
    pack(str(folder), str(tmp_path / "a.sqsh"))
    subprocess.run(
        ["unsquashfs", "-d", tmp_path / "out", tmp_path / "a.sqsh"], check=True, capture_output=True
    )
    assert seen(walk(str(tmp_path / "out"))) == seen(walk(str(folder)))


def test_without_the_program_for_images_it_says_what_else_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"mksquashfs is not installed here; pack a \.tar\.zst"):
        pack(str(folder), str(tmp_path / "a.sqsh"))
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


@pytest.mark.parametrize("suffix", [*TARS, "sqsh"])
def test_it_is_packed_once_and_again_when_something_changed(
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
    # A folder that takes the other's place, and is older than the archive.
    shutil.copytree(folder, tmp_path / "other", symlinks=True)
    folder.rename(tmp_path / "old")
    (tmp_path / "other").rename(folder)
    os.utime(archive)
    assert [fresh(), fresh()] == [True, False]


@pytest.mark.parametrize("suffix", ["tar", "sqsh"])
def test_a_folder_that_changes_meanwhile_is_not_packed(
    folder: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any) -> None:
        write(*arguments)
        (folder / "twin").touch()

    write = stager.archive.pack._write
    monkeypatch.setattr("stager.archive.pack._write", changing)
    with pytest.raises(IntegrityError) as told:
        pack(str(folder), str(tmp_path / f"a.{suffix}"))
    text = f"{folder} changed while it was packed; pack it again once it rests"
    assert str(told.value) == text
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_what_extract_would_refuse_is_not_packed_or_mended(folder: Path, tmp_path: Path) -> None:
    (folder / "bin/tool").chmod(0o4755)
    pack(str(folder), str(tmp_path / "a.tar"))
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getmember("bin/tool").mode == 0o755
    (folder / "bin/out").symlink_to("/etc/passwd")
    with pytest.raises(UsageError) as told:
        pack(str(folder), str(tmp_path / "a.tar"))
    assert str(told.value) == (
        f"{folder}/bin/out is a link that leads out of the archive, and extract would refuse it; "
        "remove it, or pack a .sqsh"
    )
    pack(str(folder), str(tmp_path / "a.sqsh"))


@pytest.mark.parametrize(("mode", "given"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_an_archive_is_for_those_only_who_may_see_the_folder(
    folder: Path, tmp_path: Path, mode: int, given: int
) -> None:
    folder.chmod(mode)
    pack(str(folder), str(tmp_path / "a.tar"))
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == given


def test_what_cannot_be_packed_is_told_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    known = ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar .sqsh .squashfs"
    for name in ("a.zip", "a"):
        with pytest.raises(UsageError) as refused:
            pack(str(folder), name)
        assert str(refused.value) == f"{name}: what is packed must be named like one of {known}"
    inside = folder / "a.tar"
    with pytest.raises(UsageError) as refused:
        pack(str(folder), str(inside))
    where = "lies in the folder that is packed; choose another name"
    assert str(refused.value) == f"{inside} {where}"
    os.mkfifo(folder / "pipe")
    with pytest.raises(SourceError, match=r"/pipe is a named pipe, which cannot be staged"):
        pack(str(folder), str(tmp_path / "a.tar"))
    (tmp_path / "b.tar").mkdir()
    with pytest.raises(UsageError, match=r"/b\.tar is no plain file; choose another name"):
        pack(str(folder), str(tmp_path / "b.tar"))
    (tmp_path / "b.tar").rmdir()
    with pytest.raises(SourceError, match=r"/nothing: No such file or directory"):
        pack(str(tmp_path / "nothing"), str(tmp_path / "a.tar"))
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_an_archive_that_was_there_stays_when_packing_fails(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_text("before")
    os.utime(archive, (0, 0))
    (folder / "bin/tool").chmod(0)
    if os.getuid() == 0:
        os.unlink(folder / "bin/tool")
        os.mkfifo(folder / "bin/tool")
    with pytest.raises(SourceError):
        pack(str(folder), str(archive))
    assert archive.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "env"]


def test_the_command_says_what_to_write_into_the_job(folder: Path) -> None:
    (folder / "pyvenv.cfg").touch()
    ran = run([*STAGECTL, "pack", str(folder)], folder)
    first, second = ran.out.splitlines()
    size = r"\d+\.\d MiB"
    assert re.fullmatch(
        rf"stage: {folder}\.tar\.zst: 4 files, {size} packed into {size} in \d+\.\d s", first
    )
    assert second == f"stage: stage it with --stage={folder}.tar.zst:DST,extract,relocate=venv"
    again = run([*STAGECTL, "pack", str(folder)], folder)
    current = (
        rf"stage: {folder}\.tar\.zst: up to date, nothing packed \(4 files, {size} in {size}\)"
    )
    assert re.fullmatch(current, again.out.splitlines()[0])
    (folder / "pyvenv.cfg").unlink()
    (folder / "conda-meta").mkdir()
    assert run([*STAGECTL, "pack", str(folder)], folder).out.splitlines()[1] == (
        "stage: a conda environment works only at the path where it was made; to stage it to DST, "
        "pack it with conda-pack --dest-prefix DST"
    )
    ran = run([*STAGECTL, "pack", str(folder), "/nowhere/a.tar"], folder)
    text = "stage: /nowhere/a.tar: No such file or directory\n"
    assert (ran.code, ran.err) == (6, text)
