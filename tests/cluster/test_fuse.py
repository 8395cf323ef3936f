"""Sources on a FUSE filesystem that keeps no inode numbers: another one at each look, and node.

Nor does it keep the times of folders.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.site import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

PROGRAM = REPOSITORY / "tests/support/restless.c"
FILE, FOLDER = "/run/remote/file", "/run/remote/folder"
STAGE = f"--stage={FILE}:/nvme/file;{FOLDER}:/nvme/folder;{FOLDER}:/nvme/parts,mode=shard"
NOTES = [
    f"stage: {copy}: note: {source} is on a FUSE filesystem: a change that leaves sizes and times "
    "as they were is not noticed"
    for source, copy in ((FILE, "/nvme/file"), (FOLDER, "/nvme/folder"), (FOLDER, "/nvme/parts"))
]
COMPARE = f"srun -n4 sh -c 'cmp {FILE} /nvme/file && diff -r {FOLDER} /nvme/folder' && echo same"


def compile_restless(site: Site) -> None:
    """Make the program /shared/restless, which mounts such a filesystem."""
    flags = ["-O2", "-Wall", "-Werror", "-I/usr/include/fuse3"]
    program = str(site.shared("restless"))
    subprocess.run(["gcc", "-o", program, *flags, str(PROGRAM), "-lfuse3"], check=True)


@contextmanager
def restless(site: Site) -> Iterator[None]:
    """Mount such a view of /shared/kept on all nodes."""
    compile_restless(site)
    nodes = ["login", *site.nodes]
    for node in nodes:
        mount = "mkdir /run/remote && /shared/restless /shared/kept /run/remote"
        site.run(mount, user="root", on=node)
    try:
        yield
    finally:
        for node in nodes:
            site.run("umount /run/remote && rmdir /run/remote", user="root", on=node)


def test_a_file_a_folder_and_shards_are_staged_once_from_a_filesystem_without_inode_numbers(
    site: Site,
) -> None:
    site.run(
        "rm -rf /shared/kept; mkdir -p /shared/kept/folder/in; cd /shared/kept; "
        "head -c 40000000 /dev/urandom | tee file > folder/large; truncate -s 9M folder/in/sparse; "
        "for name in a b c d e f; do echo $name > folder/in/$name; done"
    )
    with restless(site):
        job = site.sbatch(COMPARE, "-N4", STAGE)
        assert (job.wait().exit_code, job.output()) == ("0:0", job.output())
        assert [line for line in job.output().splitlines() if "note:" in line] == NOTES
        assert job.output().splitlines()[-1] == "same"
        again = site.sbatch("true", "-N4", STAGE)
        assert again.wait().exit_code == "0:0"
        assert again.output().count("nothing moved") == 3
        site.run("echo more >> /shared/kept/file; echo more >> /shared/kept/folder/in/a")
        changed = site.sbatch(COMPARE, "-N4", STAGE)
        assert changed.wait().exit_code == "0:0"
        assert changed.output().splitlines()[-1] == "same"
