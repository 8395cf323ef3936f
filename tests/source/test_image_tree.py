"""The files of unpacked images, which may be hostile."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.errors import SourceError
from stager.source.image_tree import ImageConfig, complete, config_of

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "created": "2026-11-22T10:00:00.123456789Z",
    "config": {
        "Env": ["PATH=/bin", "GREETING=hello you"],
        "Entrypoint": ["/bin/echo", "a b"],
        "Cmd": ["$HOME"],
        "WorkingDir": "/work dir",
        "Volumes": {"/srv/two": {}, "/srv/one": {}, "/a b": {}, "/${HOME}": {}, "/../up": {}},
    },
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def write_layout(folder: Path, config: Any) -> str:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    (blobs / "c").write_text(json.dumps(config))
    (blobs / "m").write_text(json.dumps({"config": {"digest": "sha256:c"}}))
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:m"}]}))
    return str(folder)


def test_the_configuration_is_read_from_the_layout(tmp_path: Path) -> None:
    assert config_of(write_layout(tmp_path, CONFIG)) == ImageConfig(
        ("PATH=/bin", "GREETING=hello you"), ("/bin/echo", "a b"), ("$HOME",), "/work dir",
        ("/srv/one", "/srv/two"), 1_795_341_600,
    )  # fmt: skip
    assert ImageConfig.of({"created": "yesterday", "config": None}) == ImageConfig()


@pytest.mark.parametrize("config", [None, [], {"config": []}, {"config": {"Env": 1}}])
def test_a_strange_configuration_is_a_fault_of_the_image(tmp_path: Path, config: object) -> None:
    layout = write_layout(tmp_path, config)
    if config == {"config": []}:
        assert config_of(layout) == ImageConfig()
        return
    with pytest.raises(SourceError) as caught:
        config_of(layout)
    assert str(caught.value) == "the image's configuration cannot be read; check the image"


def test_a_digest_leads_to_no_other_file(tmp_path: Path) -> None:
    layout = write_layout(tmp_path, CONFIG)
    (tmp_path / "index.json").write_text('{"manifests": [{"digest": "sha256:../../secret"}]}')
    (tmp_path / "secret").write_text("{}")
    with pytest.raises(SourceError):
        config_of(layout)


def test_environment_and_command_are_where_enroot_looks_for_them(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/environment").write_text("OLD=1\n")
    complete(str(root), ImageConfig.of(CONFIG))
    assert (root / "etc/environment").read_text() == "PATH=/bin\nGREETING=hello you\n"
    script = (root / "etc/rc").read_text().replace("/work dir", str(root))

    def output(*argv: str) -> str:
        line = ["sh", "-s", *argv]
        return subprocess.run(
            line, input=script, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert output() == "a b $HOME\n"
    assert output("x  y") == "a b x  y\n"


def test_volumes_are_mounted_and_nothing_else_that_the_image_names(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/fstab").write_text("/dev/sda1 /boot ext4 defaults 0 1\n")
    complete(str(root), ImageConfig.of(CONFIG))
    assert (root / "etc/fstab").read_text() == (
        "${ENROOT_ROOTFS}/srv/one /srv/one none x-create=dir,bind,rw,nosuid,nodev\n"
        "${ENROOT_ROOTFS}/srv/two /srv/two none x-create=dir,bind,rw,nosuid,nodev\n"
    )
    assert sorted(path.name for path in (root / "srv").iterdir()) == ["one", "two"]
    complete(str(root), ImageConfig())
    assert (root / "etc/fstab").read_text() == ""


@pytest.mark.parametrize("volume", ["/link", "/link/below", "/real/link", "/real/link/below"])
@pytest.mark.parametrize("target", ["/home", "../outside", "real"])
def test_a_volume_behind_a_link_is_not_mounted(root: Path, volume: str, target: str) -> None:
    (root / "real").mkdir()
    for link in (root / "link", root / "real/link"):
        link.symlink_to(target)
    (root / "file").touch()
    complete(str(root), ImageConfig(volumes=(volume, "/file", "/file/below", "/real")))
    assert (root / "etc/fstab").read_text() == (
        "${ENROOT_ROOTFS}/real /real none x-create=dir,bind,rw,nosuid,nodev\n"
    )


def test_folders_in_the_place_of_files_are_left_alone(root: Path) -> None:
    for name in ("rc.local", "fstab"):
        (root / "etc" / name).mkdir(parents=True)
    complete(str(root), ImageConfig(command=("echo", "started"), folder=str(root)))
    assert (root / "etc/rc.local").is_dir()
    script = (root / "etc/rc").read_text().replace("/etc/rc.local", f"{root}/etc/rc.local")
    assert subprocess.check_output(["sh", "-c", script]) == b"started\n"
    (root / "etc/environment").unlink()
    (root / "etc/environment").mkdir()
    with pytest.raises(SourceError) as caught:
        complete(str(root), ImageConfig())
    assert str(caught.value) == "the image has a folder /etc/environment; check the image"


def test_what_an_image_does_when_it_boots_does_not_end_the_command(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/rc.local").write_text("#!/bin/sh\nexit 0\n")
    config = ImageConfig(entrypoint=("/bin/echo",), command=("started",), folder=str(root))
    complete(str(root), config)
    script = (root / "etc/rc").read_text().replace("/etc/rc.local", f"{root}/etc/rc.local")
    done = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"started\n"


def test_the_folder_that_the_command_starts_in_is_made_where_it_is_missing(root: Path) -> None:
    (root / "srv").mkdir()
    os.utime(root / "srv", (7, 7))
    before = os.umask(0o077)
    try:
        complete(str(root), ImageConfig(folder="/srv/work/here", created=9))
    finally:
        os.umask(before)
    facts = [(root / path).stat() for path in ("srv", "srv/work", "srv/work/here")]
    assert [(one.st_mode & 0o777, one.st_mtime) for one in facts[1:]] == [(0o755, 9), (0o755, 9)]
    assert facts[0].st_mtime == 7


def test_without_entrypoint_and_command_a_shell_is_started() -> None:
    assert ImageConfig().script.splitlines()[-1] == "exec /bin/sh"
    assert ImageConfig(entrypoint=("/init",)).script.splitlines()[-1] == "exec /init "


def test_no_link_leads_out_of_the_image(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (outside / "file").chmod(0o400)
    (root / "link").symlink_to(outside / "file")
    (root / "folder").symlink_to(outside)
    (root / "etc").symlink_to(outside)
    complete(str(root), ImageConfig(folder="/folder/new", volumes=("/link/new",)))
    complete(str(root), ImageConfig.of(CONFIG))
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").stat().st_mode & 0o777 == 0o400
    (root / "etc").unlink()
    (root / "etc").mkdir()
    (root / "etc/environment").symlink_to(outside / "file")
    complete(str(root), ImageConfig.of(CONFIG))
    assert (outside / "file").read_text() == "mine"
    assert (root / "etc/environment").read_text().startswith("PATH=")


def test_all_files_can_be_read_by_the_user_afterwards(root: Path) -> None:
    (root / "closed").mkdir()
    (root / "closed/file").write_text("x")
    (root / "closed/file").chmod(0)
    (root / "closed").chmod(0)
    (root / "program").touch(mode=0o555)
    complete(str(root), ImageConfig())
    assert (root / "closed").stat().st_mode & 0o777 == 0o700
    assert (root / "closed/file").stat().st_mode & 0o777 == 0o400
    assert (root / "program").stat().st_mode & 0o777 == 0o555
