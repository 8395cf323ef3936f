"""Sparse files keep their holes, and impossible lists of holes are refused."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from stager.archive.target import Limits
from stager.fs.files import digest_of
from tests.support.archives import (
    damaged,
    described,
    excess,
    header,
    record,
    refused,
    tar_of,
    unpack,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("form", ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1",
                                  "posix --sparse-version=1.0"])  # fmt: skip
def test_files_keep_their_holes(tmp_path: Path, out: Path, form: str) -> None:
    files = {"a": (5, 60), "empty": (0, 0), "end": (3, 30)}
    (tmp_path / "in").mkdir()
    for name, (count, last) in files.items():
        with (tmp_path / "in" / name).open("wb") as file:
            for number in range(count):
                file.seek((number * 10) << 20)
                file.write(b"x%d" % number * 3000)
            file.truncate(last << 20)
    command = ["tar", "-c", "-S", *f"--format={form}".split(), "-C", str(tmp_path / "in"), *files]
    text = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(text) < 1 << 20
    digests = unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(90 << 20, 3))
    for name in files:
        data = (tmp_path / "in" / name).read_bytes()
        assert (out / name).read_bytes() == data
        assert digests[name.encode()].hex() == digest_of(f"{out}/{name}")
        assert (out / name).stat().st_blocks < 512


def sparse(numbers: bytes, size: int, stored: int) -> bytes:
    """Return a sparse file of version 1.0, whose list stands before its data."""
    records = {b"major": b"1", b"minor": b"0", b"name": b"s", b"realsize": b"%d" % size}
    body = b"".join(record(b"GNU.sparse." + key, value) for key, value in records.items())
    return described(tarfile.XHDTYPE, body) + header("x", stored) + numbers


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (b"1" * 30 + b"\n", "a header has a number that cannot be read"),
        (
            b"9" * 18 + b"\n" + b"0\n" * 600_000,
            "the list of a sparse file's data is longer than 1 MiB",
        ),
        (b"1\n600\n512\n", "the list of a sparse file's data has an impossible position"),
        (b"2\n512\n1\n0\n1\n", "the list of a sparse file's data has an impossible position"),
        (b"1\n0\n4\n", "a sparse file has more data than is listed"),
        (b"1\n0\n\n", "a header has a number that cannot be read"),
        (b"600\n0\n" + b"1\n" * 1199, "the list of a sparse file's data is longer than the file"),
    ],
)
def test_impossible_holes_are_damage(out: Path, numbers: bytes, why: str) -> None:
    numbers += bytes(-len(numbers) % 512)
    text = sparse(numbers, 1024, min(len(numbers) + 512, 2048)) + bytes(512) + tar_of()
    assert refused(text, out) == damaged(why)


def test_holes_count_in_the_size_of_a_file(out: Path) -> None:
    text = sparse(b"1\n0\n0\n".ljust(512, b"\0"), 1 << 50, 512) + tar_of()
    assert refused(text, out) == excess("1.0 TiB", "unpacked_size, reached at 's'")
