"""What a hostile user has on a node: filesystems that never answer, and forged records."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stager.store.cache import Cache
from tests.cluster.cluster import USERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

_PROGRAM = "dead_folder"
_FUSE = Path(__file__).parents[1] / "bench/slow_folder.c"
#: Gives a node what sites have that allow FUSE: a device for all, and a file that permits
#: allow_other.
_ALLOW = """
[ -e /run/fuse ] && exit
mknod -m 666 /run/fuse c 10 229 && mount --bind /run/fuse /dev/fuse
echo user_allow_other >/run/fuse.conf && mount --bind /run/fuse.conf /etc/fuse.conf
"""


#: Takes that away again: other tests look at what a node allows.
_FORBID = """
umount /dev/fuse /etc/fuse.conf; rm -f /run/fuse /run/fuse.conf; true
"""


@contextmanager
def fuse(site: Site, node: str) -> Iterator[None]:
    """Let users of a node mount filesystems of their own."""
    site.run(_ALLOW, user="root", on=node)
    try:
        yield
    finally:
        site.run(_FORBID, user="root", on=node)


@contextmanager
def dead_folder(
    site: Site, path: str, *, node: str, user: str = "bob", options: str = "allow_other"
) -> Iterator[None]:
    """Mount a filesystem at ``path``, as that user, that never answers any request."""
    program = site.shared(_PROGRAM)
    if not program.exists():
        source = Path(__file__).with_name(f"{_PROGRAM}.c")
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        line = ["gcc", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source), *flags]
        subprocess.run(line, check=True)
    line = [f"/shared/{_PROGRAM}", path, options]
    with fuse(site, node):
        daemon = site.popen(line, user=user, on=node)
        try:
            assert daemon.stdout
            assert daemon.stdout.readline() == "mounted\n"
            yield
        finally:
            daemon.kill()
            daemon.wait()
            site.run(f"umount --lazy {path}; true", user="root", on=node)


@contextmanager
def own_filesystem(
    site: Site, folder: str, path: str, *, node: str, user: str, options: str
) -> Iterator[None]:
    """Show ``folder`` at ``path`` as a filesystem of that user's own."""
    program = site.shared("own_filesystem")
    flags = ["-O2", "-I/usr/include/fuse3", str(_FUSE), "-lfuse3"]
    subprocess.run(["gcc", "-o", str(program), *flags], check=True)
    with fuse(site, node):
        site.run(["/shared/own_filesystem", folder, path, "0", options], user=user, on=node)
        try:
            yield
        finally:
            site.run(f"umount --lazy {path}", user="root", on=node)
            program.unlink(missing_ok=True)  # a second one may have run


def never_answers(site: Site, path: str, *, node: str) -> bool:
    """Whether a process of root's that looks at ``path`` waits, and cannot be killed."""
    look = site.popen(["stat", path], user="root", on=node)
    try:
        look.wait(2)
    except subprocess.TimeoutExpired:
        look.kill()
        return site.run(["pgrep", "-x", "stat"], user="root", on=node, check=False).stdout != ""
    return False


def forge_record(
    site: Site, destination: str, like: str, *, node: str, user: str = "bob",
    root: str = "/nvme", **changes: Any,
) -> None:  # fmt: skip
    """Write a record for ``destination``, as the user could, like the one of another copy.

    Of a nested object in ``changes`` only the fields that are given change.
    """
    cache = Cache(str(site.path(node, f"{root}/.slurm-stage/{USERS[user]}")))
    data = json.loads(Path(cache.record_path(like)).read_text()) | {"destination": destination}
    for key, value in changes.items():
        data[key] = data[key] | value if isinstance(value, dict) else value
    own = USERS[user]
    path = Path(cache.record_path(destination))
    announced = path.parent.with_name("announced")
    announced.mkdir(exist_ok=True)
    os.chown(announced, own, own)
    for forged in (path, announced / path.name):
        forged.write_text(json.dumps(data))
        os.chown(forged, own, own)
