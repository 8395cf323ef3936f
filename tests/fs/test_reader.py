"""Where a file has data, as its filesystem tells, and what is read of it."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.fs.reader import FileReader

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
BLOCK = b"x" * 4096


@pytest.mark.parametrize(
    ("size", "data", "extents"),
    [
        (0, [], []),
        (10, [0], [Extent(0, 10)]),
        (4096, [0], [Extent(0, 4096)]),
        (MIB, [], []),
        (MIB, [0], [Extent(0, 4096)]),
        (MIB, [8192], [Extent(8192, 4096)]),
        (MIB, [0, MIB - 4096], [Extent(0, 4096), Extent(MIB - 4096, 4096)]),
        (MIB, [MIB - 4096], [Extent(MIB - 4096, 4096)]),
        (MIB - 1, [MIB - 4096], [Extent(MIB - 4096, 4095)]),
        (MIB, [0, 4096, 16384], [Extent(0, 8192), Extent(16384, 4096)]),
    ],
    ids=[
        "empty", "short", "dense", "a hole", "hole behind", "holes around", "hole between",
        "hole before", "hole before an odd end", "blocks together",
    ],
)  # fmt: skip
def test_extents(tmp_path: Path, size: int, data: list[int], extents: list[Extent]) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        for offset in data:
            file.seek(offset)
            file.write(BLOCK[:size])
        file.truncate(size)
    with closing(FileReader(str(path))) as reader:
        assert list(reader.extents(size)) == extents


@pytest.mark.parametrize(("hole", "blocks", "extent"), [(0, 3, (0, 8197)), (4096, 2, (4096, 4101))])
def test_a_file_that_grew_has_extents_up_to_the_size_that_was_asked_for(
    tmp_path: Path, hole: int, blocks: int, extent: tuple[int, int]
) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.seek(hole)
        file.write(BLOCK * blocks)
    os.truncate(path, MIB)
    with closing(FileReader(str(path))) as reader:
        assert list(reader.extents(8197)) == [extent]


def test_bytes_are_read_at_their_offset_and_counted(tmp_path: Path) -> None:
    data = os.urandom(10_000)
    (tmp_path / "file").write_bytes(data)
    buffer = memoryview(bytearray(3000))
    with closing(FileReader(str(tmp_path / "file"))) as reader:
        for offset in (7000, 0):
            reader.read_into(buffer, offset)
            assert buffer == data[offset : offset + 3000]
        assert reader.bytes_read == 6000


def test_a_file_that_ends_early_is_an_integrity_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with closing(FileReader(str(path))) as reader:
        with pytest.raises(IntegrityError) as caught:
            reader.read_into(memoryview(bytearray(6)), 0)
        assert str(caught.value) == f"{path} became shorter while it was read"
        assert reader.bytes_read == 5


def test_what_cannot_be_read_is_a_source_error(tmp_path: Path) -> None:
    with closing(FileReader(str(tmp_path))) as reader:
        with pytest.raises(SourceError) as caught:
            reader.read_into(memoryview(bytearray(1)), 0)
        assert str(caught.value) == f"{tmp_path}: Is a directory"


def test_a_named_pipe_is_opened_without_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with closing(FileReader(str(tmp_path / "pipe"))) as reader:
        with pytest.raises(SourceError) as caught:
            reader.read_into(memoryview(bytearray(1)), 0)
        assert str(caught.value) == f"{tmp_path}/pipe: Illegal seek"


def test_a_missing_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        FileReader(str(tmp_path / "none"))
    assert str(caught.value) == f"{tmp_path}/none: No such file or directory"
