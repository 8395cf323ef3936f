"""URLs in files of the user's own, and what is secret in them."""

from __future__ import annotations

import os
import subprocess
from base64 import b64decode
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError, StageError, UsageError
from stager.base.formats import ARCHIVES
from stager.launch.credentials import read_url_files
from stager.request.grammar import parse_line
from stager.source.endpoints import Secret, secrets_of
from tests.support.directives import NAMES, parse_value

if TYPE_CHECKING:
    from pathlib import Path

URL = "https://bucket.s3.amazonaws.com/data/set.tar"
QUERY = "X-Amz-Credential=AKIA%2F20261128&X-Amz-Signature=5ec2e7"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "url"
    path.write_text(f"{URL}?{QUERY}\n")
    path.chmod(0o600)
    return path


def read(value: str, environment: dict[str, str] | None = None) -> str:
    [directive] = read_url_files(parse_value(value), {} if environment is None else environment)
    return directive.source


@pytest.mark.parametrize(
    ("text", "url", "secret"),
    [
        (f"{URL}?{QUERY}\n", URL, Secret("", QUERY)),
        (f"{URL}?versionId=3#part", URL, Secret("", "versionId=3")),
        ("https://me:p%40ss@host:8443/a%2Fb\r\n", "https://host:8443/a%2Fb", Secret("me:p@ss", "")),
        ("https://host/a", "https://host/a", Secret()),
    ],
)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_url_is_taken_apart(text: str, url: str, secret: Secret, mode: int, file: Path) -> None:
    file.write_text(text)
    file.chmod(mode)
    environment: dict[str, str] = {}
    assert read(f"@{file}:/nvme/x", environment) == url
    assert secrets_of(environment) == {url: secret}


def test_a_password_has_the_bytes_that_are_written(file: Path) -> None:
    file.write_text("https://me:%C3%A9%E9%ff@host/a")
    environment: dict[str, str] = {}
    read(f"@{file}:/nvme/x", environment)
    header = secrets_of(environment)["https://host/a"].headers["Authorization"]
    assert b64decode(header.removeprefix("Basic ")) == b"me:\xc3\xa9\xe9\xff"


def test_a_line_names_a_file_and_a_home_is_known(file: Path) -> None:
    names = replace(NAMES, home=str(file.parent))
    found = read_url_files(parse_line("#STAGE @~/url:/nvme/x,extract", names), {})
    assert [(one.source, one.destination) for one in found] == [(URL, "/nvme/x")]


def fault(file: Path, options: str = "") -> str:
    with pytest.raises(StageError) as caught:
        read(f"@{file}:/nvme/x{options}")
    assert "5ec2e7" not in str(caught.value)
    assert caught.value.code == (2 if options else 4)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "\n", f"{URL}?{QUERY}\n{URL}\n", f"ftp://x/5ec2e7?{QUERY}", f"{URL}?{QUERY} x", "\xe9"],
)
def test_what_is_no_url_is_told_but_not_shown(text: str, file: Path) -> None:
    file.write_text(text)
    assert fault(file) == f"{file}: it has no URL; write one https://HOST/PATH, on one line alone"


def test_a_url_that_cannot_be_staged_is_told(file: Path) -> None:
    file.write_text("https://5ec2e7@host?x")
    assert fault(file) == f"{file}: its URL is not complete; write https://HOST/PATH"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o701, 0o666])
def test_a_file_that_others_may_use_is_refused(mode: int, file: Path) -> None:
    file.chmod(mode)
    assert fault(file) == f"{file}: others may use it; have it your own, by chmod 600"


@pytest.mark.root
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 5001, 5001)
    assert fault(file) == f"{file}: others may use it; have it your own, by chmod 600"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    remedy = "check the path, and that this node mounts its filesystem"
    absent = f"{tmp_path}/absent"
    assert fault(tmp_path / "absent") == f"{absent}: No such file or directory; {remedy}"
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert fault(tmp_path / "fifo") == f"{tmp_path}/fifo: it is no file; write the URL into one"


def test_options_that_do_not_fit_the_url_are_refused(file: Path) -> None:
    file.write_text(f"https://host/set.bin?{QUERY}")
    assert fault(file, ",extract").startswith(
        f"https://host/set.bin: 'extract' needs an archive as source: {' '.join(ARCHIVES)}"
    )
    assert fault(file, ",decompress").startswith(
        "https://host/set.bin: 'decompress' needs a compressed file as source: "
    )


def test_two_secrets_of_one_url_are_refused(file: Path) -> None:
    other = file.parent / "other"
    other.write_text(f"{URL}?versionId=5ec2e7")
    other.chmod(0o600)
    with pytest.raises(UsageError) as caught:
        read_url_files(parse_value(f"@{file}:/nvme/a;@{other}:/nvme/b"), {})
    assert str(caught.value) == (
        f"{other}: another file has {URL} with another query or user; stage one of them in another "
        "job"
    )


def test_more_secrets_than_the_kernel_takes_are_refused(tmp_path: Path) -> None:
    values = []
    for at in range(9):
        file = tmp_path / f"{at}"
        file.write_text(f"https://host/{at}?{'s' * 16_000}")
        file.chmod(0o600)
        values.append(f"@{file}:/nvme/{at}")
    environment: dict[str, str] = {}
    assert len(read_url_files(parse_value(";".join(values[:8])), environment)) == 8
    subprocess.run(["true"], env=environment, check=True)
    with pytest.raises(UsageError) as caught:
        read_url_files(parse_value(";".join(values)), {})
    assert str(caught.value) == (
        "the sources of this job that are URLs with a secret are too long for the environment of "
        "the ranks (144252 bytes of at most 130048); stage fewer of them in one job"
    )


def test_a_file_is_no_destination() -> None:
    with pytest.raises(UsageError):
        parse_value("/a:@/b")


def test_an_unreadable_file_is_a_fault_of_the_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        read(f"@{tmp_path}:/nvme/x")
