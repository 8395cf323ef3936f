"""Requests from many threads, to real files, folders, disks and servers."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError, UsageError
from stager.rank.load import Disk, Load, measure, open_source
from stager.source.endpoints import RemoteSettings
from tests.support.hub import Hub, serving
from tests.support.users import USER, as_user
from tests.support.web import Handler, web_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stager.rank.load import Measured
    from tests.support.web import Web

SETTINGS = RemoteSettings(patience=5, allow_http=True)
MIB = 1 << 20


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as server:
        server.data = os.urandom(3_000_000)
        yield server


def measured(path: str, load: Load, most: int = 1 << 30, seconds: float = 60) -> Measured:
    with closing(open_source(path, SETTINGS)) as target:
        return measure(target, load, seconds, most)


def test_requests_to_a_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    one = measured(str(path), Load("read", 8192, 3), most=5 * 8192)
    assert (one.what, one.block, one.threads, one.requests, one.size, one.retries) == (
        "read", 8192, 3, 5, 5 * 8192, 0
    )  # fmt: skip
    assert 0 < one.p50 <= one.p99 <= one.seconds


def test_a_file_is_read_again_and_its_end_is_shorter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    one = measured(str(path), Load("read", 8192, 1), most=4 * 8192)
    assert (one.requests, one.size) == (4, 20_000)


def test_an_image_is_not_measured() -> None:
    with pytest.raises(UsageError) as caught:
        open_source("docker://registry/team/x:v2", SETTINGS)
    assert str(caught.value) == (
        "docker://registry/team/x:v2 is an image, which is made of several files; measure a file, "
        "a folder or another URL"
    )


def test_the_time_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    one = measured(str(path), Load("read", 4096, 2), seconds=0.05)
    assert one.requests >= 2
    assert one.seconds < 5


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    for name, size in {"a": 5000, "below/b": 10, "empty": 0}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    one = measured(str(tmp_path), Load("read", 4096, 1), most=3 * 4096)
    assert (one.requests, one.size) == (3, 5010)


def test_a_folder_without_data_cannot_be_measured(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, message in (
        (tmp_path, f"{tmp_path} has no files with data, so it cannot be measured"),
        (
            tmp_path / "empty",
            f"{tmp_path}/empty is empty, so it cannot be measured; name a larger file",
        ),
    ):
        with pytest.raises(SourceError) as caught:
            open_source(str(path), SETTINGS)
        assert str(caught.value) == message


@pytest.mark.parametrize("folder", [False, True])
def test_a_file_that_becomes_shorter_is_told(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    (tmp_path / "other").write_bytes(b"x")
    with closing(open_source(str(tmp_path if folder else path), SETTINGS)) as target:
        path.write_bytes(b"")
        with pytest.raises(SourceError) as caught:
            measure(target, Load("read", 8192, 4), 60, 1 << 20)
        assert str(caught.value) == f"{path} became shorter while it was read"


def test_requests_to_a_web_server_are_ranges(web: Web) -> None:
    web.faults = [Handler.cut_off, lambda handler: handler.refuse(503)]
    one = measured(web.url, Load("read", MIB, 2), most=3 * MIB)
    assert (one.requests, one.size, one.retries) == (3, 3_000_000, 2)
    assert {"bytes=0-1048575", "bytes=1048576-2097151"} <= set(web.log)


def test_requests_to_a_hub_are_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    hub.create()
    hub.commit("models/org/model", {"weights.bin": os.urandom(50_000), "config.json": b"{}"})
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        one = measured("hf://org/model", Load("read", 20_480, 2), most=4 * 20_480)
    assert (one.requests, one.size) == (4, 50_002)
    assert hub.served() == {"weights.bin": 50_000, "config.json": 2}


def test_a_disk_is_written_and_read_and_nothing_is_left(tmp_path: Path) -> None:
    for name in ("write", "read"):
        with closing(Disk(str(tmp_path), MIB + 4096)) as disk:
            one = measure(disk, Load(name, 65_536, 4, is_random=True), 60, 2 * MIB)
        assert (one.what, one.requests) == (name, 32)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.root
def test_a_user_writes_to_the_own_part_of_a_disk(tmp_path: Path) -> None:
    os.chown(tmp_path, USER, USER)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)

    def act() -> int:
        with closing(Disk(str(tmp_path), MIB)) as disk:
            return measure(disk, Load("write", 65_536, 1), 60, MIB).requests

    assert as_user(USER, act) == 16
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
