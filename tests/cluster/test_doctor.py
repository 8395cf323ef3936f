"""``stagectl doctor`` says what holds on the cluster, and finds each fault that is put there."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.site import POLICY, PREFIX, PYTHON, STAGECTL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

PLUGIN = f"{PREFIX}/lib/spank_stage.so has version 0.1.0, as this package"
TMPFS = (
    "TmpFS=/tmp: users can keep jobs from starting there: set TmpFS in slurm.conf to a folder of "
    "root's with mode 0755"
)
NOT_MADE = (
    "/nvme/.slurm-stage is not there, and any user could take the name: have it made at boot (a "
    "line in /etc/tmpfiles.d)"
)
CONNECTIONS = "ranks accept connections from ranks of their stage alone"
FILES = "only root can write stage.toml, plugstack.conf, the prefix, the plugin"
FUSE = (
    "users can mount filesystems by /usr/bin/fusermount and /usr/bin/fusermount3: unless they need "
    "it, chmod u-s"
)
NO_NODE = (
    "this is no compute node, so its disks were not checked; use -w NODE, or run this in a job or "
    "on a compute node"
)
NOT_TRIED = "note     MPI was not tried: run this in a job, if you can of two nodes"
#: A line about a disk on which nothing is wrong.
DISK = re.compile(r"(?:ok|note) +(\S+): /nvme (?:\(|is in memory).*")
SITE = [
    (
        "note     partition main: users share nodes, and reach each other's ports: see "
        "SECURITY.md, or set ExclusiveUser=YES or OverSubscribe=EXCLUSIVE"
    ),
    (
        "note     ranks listen on all interfaces, on ports from 1024 on: choose an interface that "
        "only the nodes reach (OMPI_MCA_btl_tcp_if_include in [launch] environment), or close the "
        "nodes' ports to other machines"
    ),
    "note     srun listens on any port: set SrunPortRange, so that a firewall can tell its ports",
]


def sysctls(where: str) -> list[str]:
    """The lines about the kernel, which is this machine's."""
    lines = []
    for name in ("symlinks", "hardlinks", "regular"):
        value = int(Path(f"/proc/sys/fs/protected_{name}").read_text())
        remedy = "" if value else ": set it to 1 (in a file of /etc/sysctl.d)"
        verdict = "ok" if value else "problem"
        lines.append(f"{verdict:<8} {where}: fs.protected_{name} is {value}{remedy}")
    return lines


def judged(output: str) -> list[str]:
    """The lines of the doctor. What is said of disks, which depends on the machine, is left out."""
    return [DISK.sub(r"disk     \1", line) for line in output.splitlines()]


def doctor(site: Site, user: str, on: str) -> list[str]:
    """The lines of the doctor, less the last, which counts them."""
    done = site.run([STAGECTL, "doctor"], user=user, on=on, check=False)
    *lines, counts = judged(done.stdout)
    problems = sum(line.startswith("problem ") for line in lines)
    assert (done.returncode, done.stderr) == (int(problems > 0), "")
    assert counts.startswith(f"stage: {problems} problem")
    return lines


def in_job(site: Site, user: str = "alice") -> list[str]:
    job = site.sbatch(f"{STAGECTL} doctor", "-N4", user=user)
    job.wait()
    return judged(job.output())[:-1]


def test_a_login_node_is_told_what_holds_for_the_site(site: Site) -> None:
    for user in ("alice", "root"):
        assert sorted(doctor(site, user, "login")) == sorted(
            [
                *sysctls("login"),
                f"unknown  login: {NO_NODE}",
                f"note     login: {FUSE}",
                *SITE,
                f"ok       login: {FILES}",
                f"ok       login: {PLUGIN}",
                f"ok       login: {CONNECTIONS}",
                "ok       srun has the MPI plugin pmix",
                NOT_TRIED,
            ]
        )


def test_a_node_is_told_what_holds_there(site: Site) -> None:
    for user in ("alice", "root"):
        assert sorted(doctor(site, user, "n1")) == sorted(
            [
                *sysctls("n1"),
                f"problem  n1: {TMPFS}",
                f"problem  n1: {NOT_MADE}",
                f"note     n1: {FUSE}",
                *SITE,
                "ok       n1: /nvme: users cannot move each other's files",
                "disk     n1",
                f"ok       n1: {FILES}",
                "ok       n1: /run/slurm-stage belongs to root, and jobs are marked there",
                f"ok       n1: {PLUGIN}",
                f"ok       n1: {CONNECTIONS}",
                "ok       srun has the MPI plugin pmix",
                NOT_TRIED,
            ]
        )


def test_a_job_is_told_what_holds_on_all_its_nodes(site: Site) -> None:
    with site.sharing():
        assert sorted(in_job(site)) == sorted(
            [
                *sysctls("n[1-4]"),
                f"problem  n[1-4]: {TMPFS}",
                f"note     n[1-4]: {FUSE}",
                *SITE,
                "ok       n[1-4]: /nvme: users cannot move each other's files",
                "disk     n[1-4]",
                "ok       n[1-4]: /nvme/.slurm-stage belongs to root",
                "ok       n[1-4]: /nvme/shared: only root and stage can write there",
                f"ok       n[1-4]: {FILES}",
                "ok       n[1-4]: /run/slurm-stage belongs to root, and jobs are marked there",
                f"ok       n[1-4]: {PLUGIN}",
                f"ok       n[1-4]: {CONNECTIONS}",
                "ok       n[1-4]: stage.toml is the same everywhere",
                "ok       n[1-4]: slurm-stage is the same everywhere",
                "ok       stage (uid 5010) stages for all users",
                "ok       srun has the MPI plugin pmix",
                "ok       two ranks on n[1-2] find each other by --mpi=pmix",
            ]
        )


@contextmanager
def replaced(site: Site, node: str, path: str, *edits: str) -> Iterator[None]:
    """Replace a file on one node by a copy of it, which the shell commands ``edits`` change."""
    copy = f"/shared/doctor.{node}.{Path(path).name}"
    site.run([*["cp", "--preserve=mode"], path, copy], user="root", on=node)
    for edit in edits:
        site.run(f"{edit} {copy}", user="root")
    site.run(["mount", "--bind", copy, path], user="root", on=node)
    try:
        yield
    finally:
        site.run(["umount", path], user="root", on=node)
        site.run(["rm", copy], user="root")


@contextmanager
def faults(site: Site) -> Iterator[None]:
    """Put faults on each of the nodes."""
    with ExitStack() as stack:
        stack.enter_context(
            replaced(site, "n3", "/etc/slurm/stage.toml", "echo '# more' >>", "chmod 666")
        )
        pyxis = "sed -i '1i optional /usr/lib/spank_pyxis.so'"
        stack.enter_context(replaced(site, "n4", "/etc/slurm/plugstack.conf", pyxis))
        another = r"sed -i 's/for Slurm 0x....../for Slurm 0x2a0b05/'"
        stack.enter_context(replaced(site, "n2", f"{PREFIX}/lib/spank_stage.so", another))
        site.path("n2", "/nvme").chmod(0o777)
        stack.callback(site.path("n2", "/nvme").chmod, 0o1777)
        site.run("mkdir /nvme/.slurm-stage", user="bob", on="n4")
        stack.callback(site.run, "rmdir /nvme/.slurm-stage", user="root", on="n4")
        site.run("mount --bind /nvme /nvme; mount -o remount,bind,ro /nvme", user="root", on="n1")
        stack.callback(site.run, "umount /nvme", user="root", on="n1")
        yield


def test_each_fault_is_told_with_its_node_and_the_remedy(site: Site) -> None:
    site.run("mkdir -m 755 /run/tmpfs", user="root", on="n1")
    for node in site.nodes[1:]:
        site.run("mkdir -m 755 -p /run/tmpfs", user="root", on=node)
    site.reconfigure("TmpFS=/run/tmpfs\nSrunPortRange=60001-63000\n")
    try:
        with faults(site):
            told = in_job(site)
    finally:
        site.reconfigure()
    version = site.run("sinfo --version").stdout.split()[1]
    expected = [line for line in sysctls("n[1-4]") if line.startswith("problem")] + [
        "problem  n2: /nvme: users can move each other's files: chmod +t /nvme",
        f"problem  n1: {NOT_MADE}",
        (
            "problem  n1: /nvme: no file can be made there (Read-only file system): see to the "
            "disk, its mount and the folder's mode"
        ),
        (
            f"problem  n2: {PREFIX}/lib/spank_stage.so is built for Slurm 42.11, and this is "
            f"{version}: build it with this Slurm's headers (packaging/install)"
        ),
        (
            "problem  n4: spank_pyxis.so is before spank_stage.so in plugstack.conf, so containers "
            "are started before their images are staged: list spank_stage.so first"
        ),
        (
            "problem  n4: /nvme/.slurm-stage is not a folder of root's with mode 0755: remove it, "
            "and have it made at boot (a line in /etc/tmpfiles.d)"
        ),
        (
            "problem  n3: /etc/slurm/stage.toml: others than root can write it: chown root, "
            "chmod go-w"
        ),
        ("problem  n3: stage.toml is not as on the other machines: install the same everywhere"),
    ]
    assert sorted(line for line in told if line.startswith("problem")) == sorted(expected)
    assert "ok       n[1-4]: TmpFS=/run/tmpfs: only root can write there" in told
    assert "ok       srun listens on the ports 60001-63000" in told


#: Two sruns that start everything but ranks as they should: by one the ranks lose Slurm's PMI, and
#: each is a world of one; the other does not end.
SRUNS = {
    "loses": (
        'count=$(($# - 4)); exec /usr/bin/srun "${@:1:count}" --mpi=none env -u SLURM_JOBID '
        '-u SLURM_PROCID "${@:count + 1}"'
    ),
    "hangs": "exec sleep 60",
}


def hello_line(site: Site, launch: str, nodes: int = 2) -> str:
    """What the doctor says in a job of two ranks started by these settings of ``[launch]``."""
    with site.policy(f"{POLICY}[launch]\n{launch}\n"):
        job = site.sbatch(f"{STAGECTL} doctor", f"-N{nodes}")
        job.wait()
    (line,) = (line for line in judged(job.output()) if " two ranks " in line)
    return line


def test_two_ranks_are_started_as_a_stage_starts_its_own(site: Site) -> None:
    for name, command in SRUNS.items():
        srun = site.shared(f"{name}-srun")
        others = '[ "${!#}" = stager.rank ] || exec /usr/bin/srun "$@"'
        srun.write_text(f"#!/bin/bash\n{others}\n{command}\n")
        srun.chmod(0o755)
    fails = (
        "problem  two ranks on {} do not find each other by --mpi={} ({}): correct mpi or "
        "environment in [launch]; this says more: srun -w {} --mpi={} "
        f"{PYTHON} -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"
    )
    two, one = "n[1-2] -N2", "n1 -N1 -n2"
    assert [
        hello_line(site, 'mpi = "pmix"', nodes=1),
        hello_line(site, 'mpi = "none"', nodes=1),
        hello_line(site, 'srun = "/shared/loses-srun"'),
        hello_line(site, 'srun = "/shared/hangs-srun"\nstart_timeout = 2'),
    ] == [
        "ok       two ranks on n1 find each other by --mpi=pmix",
        fails.format("n1", "none", "srun ended with code 143", one, "none"),
        fails.format("n[1-2]", "pmix", "each is alone", two, "pmix"),
        fails.format("n[1-2]", "pmix", "MPI did not start within 2 s", two, "pmix"),
    ]
