"""Archives are unpacked while they are written, or after; what is wrong with them is raised."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from contextlib import closing
from functools import partial
from typing import IO, TYPE_CHECKING

import pytest

from stager.archive.target import Limits
from stager.base.errors import SourceError
from stager.fs.partial_file import Partial
from stager.rank.decoder import Piped, Spooled
from stager.store.cache import open_cache
from tests.support.archives import unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMITS = Limits(1 << 30, 1000, 1 << 30)
DATA = b"data" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    return folder


def unpacked(name: str, folder: Path) -> Callable[[IO[bytes]], dict[bytes, bytes]]:
    """Return what unpacks an archive of that name into the folder."""
    return partial(unpack, name=name, folder=os.fsencode(folder), limits=LIMITS)


def piped(folder: Path) -> Piped[dict[bytes, bytes]]:
    """Return what unpacks x.tar while it is written."""
    take = unpacked("x.tar", folder)
    return Piped(take, name="x.tar", folder=str(folder), verb="unpack")


def tar_of(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_a_tar_archive_is_unpacked_while_it_is_written(folder: Path) -> None:
    text = tar_of("a", DATA)
    with closing(piped(folder)) as unpacker:
        for at in range(0, len(text), 70_000):
            unpacker.write(memoryview(text)[at : at + 70_000], at)
        assert list(unpacker.finish()) == [b"a"]
    assert (folder / "a").read_bytes() == DATA


def test_an_archive_that_cannot_be_unpacked_is_raised_to_its_writer(folder: Path) -> None:
    text = memoryview(b"no archive" * 1_000_000)  # more than waits in the pipe
    with (
        closing(piped(folder)) as unpacker,
        pytest.raises(SourceError, match=r"^x\.tar cannot be unpacked: "),
    ):
        unpacker.write(text, 0)


def test_an_archive_that_ends_early_is_raised_at_its_end(folder: Path) -> None:
    with closing(piped(folder)) as unpacker:
        unpacker.write(memoryview(tar_of("a", DATA))[:100_000], 0)
        with pytest.raises(SourceError, match=r"^x\.tar cannot be unpacked: "):
            unpacker.finish()


def test_a_zip_archive_is_unpacked_when_all_of_it_is_written(tmp_path: Path, folder: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", DATA)
    text = buffer.getvalue()
    (tmp_path / "nvme").mkdir()
    cache = open_cache(str(tmp_path / "nvme"), os.getuid())
    spool = Partial(cache, direct=False)
    take = unpacked("x.zip", folder)
    with closing(Spooled(take, folder=str(folder), partial=spool)) as unpacker:
        unpacker.write(memoryview(text)[1000:], 1000)
        unpacker.write(memoryview(text)[:1000], 0)
        assert not (folder / "a").exists()
        assert list(unpacker.finish()) == [b"a"]
    assert (folder / "a").read_bytes() == DATA


def test_whatever_ends_the_unpacking_is_raised_with_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def end(_: IO[bytes]) -> None:
        raise SystemExit(3)

    with closing(Piped(end, name="x.tar", folder="/", verb="unpack")) as unpacker:
        with pytest.raises(SourceError) as caught:
            unpacker.finish()
        assert str(caught.value) == "x.tar cannot be unpacked: SystemExit(3)"
    assert capfd.readouterr().err.endswith("SystemExit: 3\n")
