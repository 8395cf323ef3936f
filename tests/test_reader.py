"""Where a file has data, as its filesystem tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.errors import SourceError
from stager.layout import Extent
from stager.reader import FileReader

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
    ],
    ids=["empty", "short", "dense", "a hole", "hole behind", "holes around", "hole between"],
)
def test_extents(tmp_path: Path, size: int, data: list[int], extents: list[Extent]) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        for offset in data:
            file.seek(offset)
            file.write(BLOCK[:size])
        file.truncate(size)
    reader = FileReader(str(path))
    assert list(reader.extents(size)) == extents
    reader.close()


def test_a_missing_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        FileReader(str(tmp_path / "none"))
    assert str(caught.value) == f"{tmp_path}/none: No such file or directory"
