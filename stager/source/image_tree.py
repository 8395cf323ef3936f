"""Complete the files of an unpacked image, so that they can be packed and used as a container.

The image's configuration is not in its layers. Its environment, its command and its volumes are
written where enroot, and so pyxis, look for them: in ``/etc/environment``, ``/etc/rc`` and
``/etc/fstab``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stager.base.errors import SourceError
from stager.base.telemetry import count
from stager.fs.files import OPEN_FOLDER, opened, write_all

#: Bytes of a configuration, which is small.
_MOST = 4 << 20
#: To open a folder, and to fail with ENOTDIR for a link in its place.
_NO_LINK = OPEN_FOLDER | os.O_NOFOLLOW
#: What the user needs of files and of folders, to pack them, and to make folders there.
_READ, _ENTER = stat.S_IRUSR, stat.S_IRWXU
#: A volume, or a folder to start in, that is made if the image lacks it. Others are left alone:
#: nothing is made outside of the image, and blanks and variables have a meaning in ``/etc/fstab``.
_PLAIN_FOLDER = re.compile(r"(/(?!\.{1,2}(/|$))[\w.+@=,:~-]{1,255}){1,64}/?", re.ASCII)
#: ``/etc/rc`` reads ``/etc/rc.local``, where enroot's users change the command. The image's own is
#: that of a machine that boots and often ends with ``exit 0``: the command would never be started.
_RC_LOCAL = "# /etc/rc reads this before it starts the command.\n"


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says of how it is used; ``created`` is in seconds since 1970, 0 if unknown."""

    environment: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    folder: str = "/"
    volumes: tuple[str, ...] = ()
    created: int = 0

    @classmethod
    def of(cls, data: Any) -> ImageConfig:
        """Return what the JSON object ``data`` says. Raise ValueError or TypeError."""
        config = data.get("config") or {}
        return cls(
            environment=_texts(config.get("Env")),
            entrypoint=_texts(config.get("Entrypoint")),
            command=_texts(config.get("Cmd")),
            folder=str(config.get("WorkingDir") or "/"),
            volumes=tuple(filter(_PLAIN_FOLDER.fullmatch, sorted(_texts(config.get("Volumes"))))),
            created=_seconds(str(data.get("created") or "")),
        )

    @property
    def script(self) -> str:
        """The script that enroot starts: the entrypoint with what is given, or with the command."""
        folder = shlex.quote(self.folder)
        entrypoint = "".join(f"{shlex.quote(one)} " for one in self.entrypoint)
        command = shlex.join(self.command or (() if self.entrypoint else ("/bin/sh",)))
        return (
            f"mkdir -p {folder} 2>/dev/null\n"
            f"cd {folder} && unset OLDPWD || exit 1\n"
            "[ ! -f /etc/rc.local ] || . /etc/rc.local\n"
            f'[ $# -eq 0 ] || exec {entrypoint}"$@"\n'
            f"exec {entrypoint}{command}\n"
        )

    @property
    def mounts(self) -> str:
        """What enroot mounts: the volumes, which can be written where the rest cannot."""
        options = "none x-create=dir,bind,rw,nosuid,nodev"
        return "".join(f"${{ENROOT_ROOTFS}}{one} {one} {options}\n" for one in self.volumes)


def config_of(layout: str) -> ImageConfig:
    """Return the configuration of the only image in an OCI layout. Raise SourceError."""
    try:
        (image,) = _load(f"{layout}/index.json")["manifests"]
        manifest = _load(_blob(layout, image))
        return ImageConfig.of(_load(_blob(layout, manifest["config"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError("the image's configuration cannot be read; check the image") from None


def complete(root: str, config: ImageConfig) -> None:
    """Let the user read all files beneath ``root``, and add what the ``config`` says.

    What is written gets the time of the image, so that one image always becomes the same file. An
    image may have a link anywhere: none is followed. Raise OSError.
    """
    _make_readable(root)
    with opened(root, OPEN_FOLDER) as folder:
        made = {
            path: _make_folder(folder, path, config.created)
            for path in (config.folder, *config.volumes)
            if _PLAIN_FOLDER.fullmatch(path)
        }
        # enroot would follow a link in the place of a volume to a folder of the machine.
        volumes = tuple(path for path in config.volumes if made[path])
        with suppress(FileExistsError):
            os.mkdir("etc", 0o755, dir_fd=folder)
        with suppress(NotADirectoryError), opened("etc", _NO_LINK, folder) as etc:
            environment = "".join(f"{one}\n" for one in config.environment if "\n" not in one)
            _write(etc, "environment", environment, config.created, is_needed=True)
            _write(etc, "rc", config.script, config.created, is_needed=True)
            _write(etc, "rc.local", _RC_LOCAL, config.created)
            _write(etc, "fstab", replace(config, volumes=volumes).mounts, config.created)
            os.utime(etc, (config.created, config.created))
        os.utime(folder, (config.created, config.created))


def _make_folder(root: int, path: str, time: int) -> bool:
    """Make a folder and those above it, as far as they are missing.

    Return False if a link or a file is in the place of one of them.
    """
    with suppress(NotADirectoryError), ExitStack() as stack:
        folder = root
        for name in path.strip("/").split("/"):
            before = os.fstat(folder).st_mtime_ns
            is_new = True
            try:
                os.mkdir(name, dir_fd=folder)
                os.utime(folder, ns=(before, before))
            except FileExistsError:
                is_new = False
            folder = stack.enter_context(opened(name, _NO_LINK, folder))
            if is_new:
                os.fchmod(folder, 0o755)
                os.utime(folder, (time, time))
        return True
    return False


def _write(etc: int, name: str, text: str, time: int, *, is_needed: bool = False) -> None:
    """Write a file of ``/etc``. Leave a folder in its place alone, or raise SourceError."""
    try:
        os.unlink(name, dir_fd=etc)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        if is_needed:
            raise SourceError(f"the image has a folder /etc/{name}; check the image") from None
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(name, flags, etc) as file:
        os.fchmod(file, 0o644)
        write_all(file, text.encode(errors="replace"), 0)
        os.utime(file, (time, time))


def _make_readable(root: str) -> None:
    """Give the user the permissions on files and folders that root would not need."""
    folders = [root]
    for folder in folders:  # grows while it is read
        _grant(folder, os.lstat(folder).st_mode, _ENTER)
        with os.scandir(folder) as entries:
            for entry in entries:
                count()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folders.append(entry.path)
                elif stat.S_ISREG(mode):
                    _grant(entry.path, mode, _READ)


def _grant(path: str, mode: int, wanted: int) -> None:
    if mode & wanted != wanted:
        os.chmod(path, stat.S_IMODE(mode) | wanted)


def _blob(layout: str, descriptor: Any) -> str:
    algorithm, _, digits = descriptor["digest"].partition(":")
    if not (algorithm.isalnum() and digits.isalnum()):
        raise ValueError("this is no digest")
    return f"{layout}/blobs/{algorithm}/{digits}"


def _load(path: str) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read(_MOST))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value or ())


def _seconds(text: str) -> int:
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp()))
    except (ValueError, OverflowError):
        return 0
