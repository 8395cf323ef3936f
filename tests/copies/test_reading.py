"""Files of copies are read once, and not more of them than allowed."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stager.copies.reading import Reading
from stager.disk.files import read_back

if TYPE_CHECKING:
    from pathlib import Path

#: Seconds after which a file that was written is taken for one that rests.
REST = 0.15


def test_a_file_is_read_once_and_again_if_it_was_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))
    time.sleep(REST)
    reading = Reading(2000)
    for _ in range(3):  # more often than the limit allows to read it
        assert reading.digest(str(file)) == read_back(str(file))
    facts = file.stat()
    file.write_bytes(b"x" * 1000)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert reading.digest(str(file)) == read_back(str(file))
    assert reading.digest(str(tmp_path / "file")) == "", "it was written to just now"


def test_what_is_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(600))
    (tmp_path / "large").write_bytes(bytes(601))
    reading = Reading(1200)
    assert reading.digest(str(tmp_path / "small")) == read_back(str(tmp_path / "small"))
    assert reading.skipped == 0
    assert reading.digest(str(tmp_path / "large")) == ""
    assert reading.skipped == 1
