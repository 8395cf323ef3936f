"""``stagectl doctor`` says nothing on a sound site, and finds each fault that is put there."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.cluster.hostile import own_filesystem
from tests.cluster.site import PLUGSTACK as PLUGSTACK_LINE
from tests.cluster.site import PREFIX, PYTHON, STAGECTL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: What a sound site has in stage.toml and in slurm.conf.
SOUND_POLICY = """\
roots = ["/nvme", "/run/scratch"]
[shared]
owner = "stage"
roots = ["/nvme/shared"]
[launch.environment]
OMPI_MCA_btl_tcp_if_include = "eth0"
OMPI_MCA_btl_tcp_port_min_v4 = "41000"
"""
SOUND_CONF = "SrunPortRange=60001-63000\n"
ALONE = ["scontrol", "update", "PartitionName=main", "ExclusiveUser=YES"]
#: Makes a machine sound, whatever the one is like that the cluster runs on.
MAKE_SOUND = """\
set -e
mkdir -m 755 /run/sound
for name in symlinks hardlinks regular; do
    echo 1 >/run/sound/$name
    mount --bind /run/sound/$name /proc/sys/fs/protected_$name
done
cp /usr/bin/fusermount3 /run/sound/
mount --bind /run/sound/fusermount3 /usr/bin/fusermount3
mkdir -p /run/sound/net/eth0
echo 25000 >/run/sound/net/eth0/speed
mount --bind /run/sound/net /sys/class/net
"""
#: The same for the disks of a node: two of a fixed size.
MAKE_DISKS = """\
for path in /nvme /run/scratch; do
    image=/run/sound/$(basename $path)
    mkdir -p $path
    truncate --size=100M $image
    mkfs.ext4 -q -m 0 $image
    mount -o loop $image $path
    chmod 1777 $path
    mkdir -m 755 $path/.slurm-stage
done
mkdir -m 755 /nvme/shared
chown stage: /nvme/shared
"""
UNDO = """\
umount /usr/bin/fusermount3 /sys/class/net /proc/sys/fs/protected_{symlinks,hardlinks,regular}
umount --quiet /run/scratch /nvme
rm -r /run/sound
rm -rf /run/scratch
"""
DISK = "(ext4, O_DIRECT, O_TMPFILE): R of R free"
#: What is told of every machine, and of every node that runs jobs.
EVERYWHERE = [
    "fs.protected_hardlinks is 1",
    "fs.protected_regular is 1",
    "fs.protected_symlinks is 1",
    "only root can write stage.toml, plugstack.conf, the prefix, the plugin",
    f"{PREFIX}/lib/spank_stage.so has version 0.1.0, as this package",
    "ranks accept connections from ranks of their stage alone",
    "users cannot mount filesystems (fusermount is not setuid)",
]
ON_NODES = [
    *EVERYWHERE,
    "/nvme: users cannot move each other's files",
    "/run/scratch: users cannot move each other's files",
    "/nvme/.slurm-stage belongs to root",
    "/run/scratch/.slurm-stage belongs to root",
    "/nvme/shared: only root and stage can write there",
    "/run/slurm-stage belongs to root, and jobs are marked there",
    "ranks use eth0 (25 Gbit/s)",
    f"/nvme {DISK}",
    f"/run/scratch {DISK}",
    "ranks load Open MPI L, which knows pmix",
]
AMONG_NODES = [
    "stage.toml is the same everywhere",
    "slurm-stage is the same everywhere",
    "spank_stage.so is the same everywhere",
    "the MPI library is the same everywhere",
    "the network is the same everywhere",
    "the clocks agree",
]
OF_SITE = [
    "stage (uid 5010) stages for all users",
    "partition main: a node has jobs of one user at a time",
    "the ranks' ports are chosen (OMPI_MCA_btl_tcp_port_min_v4)",
    "srun listens on the ports 60001-63000",
    "srun has the MPI plugin pmix",
]
RANKS_LISTEN = (
    "note     ranks listen on all interfaces, on ports from 1024 on: close the nodes' ports to "
    "other machines; OMPI_MCA_btl_tcp_port_min_v4 in [launch] environment chooses Open MPI's"
)
NOT_TRIED = "note     MPI was not tried: run this in a job, if you can of two nodes"
NOT_BY_ROOT = (
    "note     MPI was not tried: root starts no ranks; run this as an ordinary user, in a job"
)
NO_NODE = (
    "note     login: this is no compute node, so its disks, network and MPI were not checked: use "
    "-w NODE, or run this in a job or on a compute node"
)
#: What depends on the machine and the moment, and what stands for it here: the room on a disk, the
#: version of the MPI library, an hour, which of two ranks srun noticed first.
VARIES = {
    re.compile(r"\d[\d.]* [KMG]?i?B of \d[\d.]* [KMG]iB"): "R of R",
    re.compile(r"Open MPI \d[\d.]*"): "Open MPI L",
    re.compile(r"3[56]\d\d s ahead"): "S ahead",
    re.compile(r"srun ended with code (143|1)"): "srun ended with code C",
}
SAME = "is not as on the other machines: install the same everywhere"


@pytest.fixture(scope="module")
def sound_site(installed_site: Site) -> Iterator[Site]:
    """The cluster as a site on which the doctor finds nothing."""
    site = installed_site
    machines = {"login": MAKE_SOUND, **dict.fromkeys(site.nodes, MAKE_SOUND + MAKE_DISKS)}
    with ExitStack() as stack:
        for machine, script in machines.items():
            stack.callback(site.run, UNDO, user="root", on=machine, check=False)
            site.run(script, user="root", on=machine)
        stack.callback(site.reconfigure)
        site.reconfigure(SOUND_CONF)
        site.run(ALONE, user="root")
        stack.enter_context(site.policy(SOUND_POLICY))
        site.assert_healthy()
        yield site
    site.assert_healthy()
    assert site.leftovers() == []


def readable(output: str) -> list[str]:
    """The lines of the doctor, with letters for what VARIES."""
    for varying, letter in VARIES.items():
        output = varying.sub(letter, output)
    return output.splitlines()


def in_job(site: Site, nodes: int = 4, *, options: str = "") -> Job:
    job = site.sbatch(f"{STAGECTL} doctor {options}", f"-N{nodes}")
    job.wait()
    return job


def ok_lines(where: str, texts: list[str]) -> list[str]:
    return [f"ok       {where}: {text}" if where else f"ok       {text}" for text in texts]


def test_a_sound_site_is_told_to_be_sound(sound_site: Site) -> None:
    job = in_job(sound_site)
    *lines, counts = readable(job.output())
    assert sorted(lines) == sorted(
        [
            *ok_lines("n[1-4]", ON_NODES + AMONG_NODES),
            *ok_lines("", OF_SITE),
            "ok       two ranks on n[1-2] find each other by --mpi=pmix",
        ]
    )
    assert counts == f"stage: 0 problems, 0 could not be checked, 0 notes, {len(lines)} ok"
    assert job.info()["ExitCode"] == "0:0"


def test_what_cannot_be_seen_from_where_one_is_is_no_problem(sound_site: Site) -> None:
    expected = {
        "login": [NO_NODE, *ok_lines("login", EVERYWHERE)],
        "n1": ok_lines("n1", ON_NODES),
    }
    for machine, lines in expected.items():
        for user, hello in (("alice", NOT_TRIED), ("root", NOT_BY_ROOT)):
            done = sound_site.run([STAGECTL, "doctor"], user=user, on=machine)
            *told, _ = readable(done.stdout)
            assert sorted(told) == sorted([*lines, *ok_lines("", OF_SITE), hello])
            assert done.stderr == ""


@dataclass(frozen=True)
class Fault:
    """What puts a fault on a node, as root, what undoes it, and what the doctor says of it."""

    node: str
    put: str
    undo: str
    lines: tuple[str, ...]


#: ``changed FILE COMMAND…`` mounts a copy, which the command changes, over a file of one node.
#: The package is changed in a layer over /opt, which the node has for itself.
HELPERS = """\
set -e
changed() {
    local file=$1 copy=/run/fault/$(basename "$1")
    shift
    cp --preserve=mode "$file" "$copy"
    "$@" "$copy"
    mount --bind "$copy" "$file"
}
mkdir -p /run/fault/upper /run/fault/work
mount -t overlay -o lowerdir=/opt,upperdir=/run/fault/upper,workdir=/run/fault/work overlay /opt
"""
TIDY = "umount --lazy /opt; rm -rf /run/fault"
PLUGSTACK, CONFIG, PLUGIN = (
    "/etc/slurm/plugstack.conf", "/etc/slurm/stage.toml", f"{PREFIX}/lib/spank_stage.so"
)  # fmt: skip
PACKAGES = f"{PREFIX}/lib/python3*/site-packages"
MAKE = "restart slurmd, which makes it (without the plugin, Prolog does)"


def faults(slurm: str, alice: int = 5001, bob: int = 5002) -> list[Fault]:
    """Faults that stand beside each other on four nodes of that version of Slurm."""
    return [
        Fault(
            "n1", "mount -o remount,ro /nvme", "mount -o remount,rw /nvme",
            (("problem  n1: /nvme: no file can be made there (Read-only file system): see to the "
             "disk, its mount and the folder's mode"),),
        ),
        Fault(
            "n1", "cat /dev/zero >/run/scratch/file || true", "rm /run/scratch/file",
            ("note     n1: /run/scratch (ext4) is almost full: R of R free",),
        ),
        Fault(
            "n1", f"changed {PLUGSTACK} truncate --size=0", f"umount {PLUGSTACK}",
            ((f"problem  n1: spank_stage.so is not named in {PLUGSTACK}: write one line, "
             "there or in a file that it includes: required /PATH/spank_stage.so "
             f"python={PREFIX}/bin/python3 "
             "config=/etc/slurm/stage.toml (without it, TaskProlog must stage)"),),
        ),
        Fault(
            "n1", f"rm {PREFIX}/lib/stage_peers.so", "",
            ((f"problem  n1: {PREFIX}/lib/stage_peers.so is not there, by which ranks know each "
             "other: install by a package or by packaging/install"),),
        ),
        Fault(
            "n2", f"chmod 700 {PREFIX}/lib/stage_peers.so", "",
            ((f"problem  n2: users cannot load {PREFIX}/lib/stage_peers.so, by which ranks know "
             f"each other: chmod o+r {PREFIX}/lib/stage_peers.so"),),
        ),
        Fault(
            "n2", "chmod 777 /nvme", "chmod 1777 /nvme",
            ("problem  n2: /nvme: users can move each other's files: chmod +t /nvme",),
        ),
        Fault(
            "n2", "chmod 777 /nvme/shared", "chmod 755 /nvme/shared",
            (("problem  n2: /nvme/shared: others than root and stage can write there: chown stage "
             "/nvme/shared; chmod 755 /nvme/shared"),),
        ),
        Fault(
            "n2", "umount /run/scratch; rmdir /run/scratch",
            "mkdir /run/scratch; mount -o loop /run/sound/scratch /run/scratch",
            (("problem  n2: /run/scratch is not there: mount the disk, or correct roots in "
             "stage.toml"),),
        ),
        Fault(
            "n2", f"sed -i 's/for Slurm 0x....../for Slurm 0x2a0b05/' {PLUGIN}", "",
            ((f"problem  n2: {PLUGIN} is built for Slurm 42.11, and this is {slurm}, so srun, "
             "sbatch and salloc fail for everybody, slurmd does not start, and nodes drain: build "
             "it with this Slurm's headers (packaging/install)"),
             f"problem  n2: spank_stage.so {SAME}"),
        ),
        Fault(
            "n2", "echo 'import time; now = time.time; time.time = lambda: now() + 3600' "
            ">/run/fault/clock; changed $(ls /etc/python3*/sitecustomize.py) "
            "cp /run/fault/clock", "umount /etc/python3*/sitecustomize.py",
            (("problem  n2: the clock is S ahead, so ages of copies are wrong: have it set "
             "(chrony, systemd-timesyncd)"),),
        ),
        Fault(
            "n3", f"changed {CONFIG} sh -c 'echo >>$0; chmod 666 $0'", f"umount {CONFIG}",
            (f"problem  n3: stage.toml {SAME}",
             f"problem  n3: {CONFIG}: others than root can write it: chown root, chmod go-w"),
        ),
        Fault(
            "n3", f"rm -r {PACKAGES}/mpi4py", "",
            (("problem  n3: ranks cannot load an MPI library (ModuleNotFoundError: No module named "
             "'mpi4py'): install Open MPI or MPICH, and this package again if mpi4py is missing"),),
        ),
        Fault(
            "n3", "umount /run/scratch; mount -t tmpfs -o mode=1777,size=50M none /run/scratch",
            "umount /run/scratch; mount -o loop /run/sound/scratch /run/scratch",
            ("note     n3: /run/scratch is in memory (tmpfs), which copies take: R of R free",),
        ),
        Fault(
            "n3", "chmod 777 /run/slurm-stage", "chmod 755 /run/slurm-stage",
            ("problem  n3: /run/slurm-stage: others than root can write there: remove it",),
        ),
        Fault(
            "n4", f"changed {PLUGSTACK} sed -i '1i optional /usr/lib/spank_pyxis.so'",
            f"umount {PLUGSTACK}",
            ((f"problem  n4: spank_pyxis.so is before spank_stage.so in {PLUGSTACK}, so "
             "containers are started before their images are staged: list spank_stage.so first"),),
        ),
        Fault(
            "n4", f"chown {bob} /nvme/.slurm-stage", "chown root /nvme/.slurm-stage",
            (("problem  n4: /nvme/.slurm-stage is not a folder of root's with mode 0755: if it has "
              "folders of several users, chown root /nvme/.slurm-stage; else remove it, and "
              + MAKE),),
        ),
        Fault(
            "n4", f"sed -i 's/^Version: .*/Version: 0.0.9/' {PACKAGES}/slurm_stage-*/METADATA", "",
            ((f"problem  n4: {PLUGIN} has version 0.1.0, this package 0.0.9: install plugin and "
             "package together (packaging/install)"), f"problem  n4: slurm-stage {SAME}"),
        ),
        Fault(
            "n4", f"chown {alice} {PREFIX}/bin", "",
            (f"problem  n4: {PREFIX}/bin: others than root can write it: chown root, chmod go-w",),
        ),
        Fault(
            "n4", "echo 0 >/run/sound/hardlinks", "echo 1 >/run/sound/hardlinks",
            (("problem  n4: fs.protected_hardlinks is 0: write fs.protected_hardlinks = 1 into a "
             "file of /etc/sysctl.d, and run sysctl --system"),),
        ),
        Fault(
            "n4", "chmod u+s /run/sound/fusermount3", "chmod u-s /run/sound/fusermount3",
            (("note     n4: users can mount filesystems by /usr/bin/fusermount and "
             "/usr/bin/fusermount3, which other users may enter (user_allow_other): unless they "
              "need it, chmod u-s"),),
        ),
        Fault(
            "n4", "ip link add ib0 type veth peer name ib1; ip address add 10.2.0.1/24 dev ib0; "
            "ip link set ib0 up; ip link set ib1 up; mkdir /run/sound/net/ib0; "
            "echo 100000 >/run/sound/net/ib0/speed; echo 32 >/run/sound/net/ib0/type",
            "ip link delete ib0; rm -r /run/sound/net/ib0",
            (("note     n4: ib0 (InfiniBand, 100 Gbit/s) is faster than eth0 (25 Gbit/s), which "
             "OMPI_MCA_btl_tcp_if_include in [launch] environment names: if MPI should use it, set "
             'interface = "ib0" in [launch]'),
             ("note     n4: the network is not as on the other machines: see to cables and "
             "drivers")),
        ),
    ]  # fmt: skip


@contextmanager
def put(site: Site, every: list[Fault]) -> Iterator[None]:
    """Put faults on the nodes, and undo them, the last first."""
    with ExitStack() as stack:
        for node in sorted({fault.node for fault in every}):
            own = [fault for fault in every if fault.node == node]
            undo = "\n".join([*(fault.undo for fault in reversed(own)), TIDY])
            stack.callback(site.run, undo, user="root", on=node)
            lines = "\n".join([HELPERS, *(fault.put for fault in own)])
            site.run(lines, user="root", on=node)
        yield


#: What is said of folders of n4 on a filesystem that nodes may share.
FUSE = "fuse.own_filesystem, which nodes share"
ON_FUSE = [
    (
        f"problem  n4: /run/scratch is on {FUSE}: each would write its own copy there: name a "
        "folder on the node's own disk in stage.toml (roots)"
    ),
]


@contextmanager
def on_fuse(site: Site, path: str) -> Iterator[None]:
    """Have a folder of n4 on a filesystem of root's that a process serves, as many shared ones."""
    behind = f"/run/fault{path.replace('/', '-')}"
    site.run(f"cp --archive {path} {behind}", user="root", on="n4")
    with own_filesystem(site, behind, path, node="n4", user="root", options="allow_other"):
        yield
    site.run(f"rm -r {behind}", user="root", on="n4")


def not_ok(output: str) -> list[str]:
    """The lines that are not ok, and not the last, which counts them."""
    return sorted(line for line in readable(output)[:-1] if not line.startswith("ok "))


#: Nodes on which stagectl cannot answer. Without python3 nobody tidies up after this job: the next
#: one does.
SILENT = [
    Fault(
        "n2", f"rm {PREFIX}/bin/python3; "
        "printf '#!/bin/sh\ncase $4 in node) exec sleep 12;; esac\nexec sleep 5\n' "
        f">{PREFIX}/bin/python3; "
        f"chmod 755 {PREFIX}/bin/python3", "", ("no answer within 10 s",),
    ),
    Fault(
        "n3", f"rm -r {PREFIX}/bin", "",
        (f"slurmstepd-n3: error: execve(): {PYTHON}: No such file or directory",),
    ),
    Fault(
        "n4", f"rm -r {PACKAGES}/xxhash", "",
        ("ModuleNotFoundError: No module named 'xxhash'",),
    ),
]  # fmt: skip


def test_nodes_that_do_not_answer_are_told_with_the_reason(sound_site: Site) -> None:
    with put(sound_site, SILENT):
        job = in_job(sound_site, options="--json")
    findings = json.loads(job.output())["findings"]
    remedy = "slurm-stage must be there, as here; if it is, look what keeps the node from working"
    assert [one for one in findings if one["state"] != "ok"] == [
        {
            "name": "node", "state": "problem", "nodes": [fault.node],
            "text": f"stagectl does not answer there: {fault.lines[0]}", "remedy": remedy,
        }
        for fault in SILENT
    ]  # fmt: skip
    assert [one["text"] for one in findings if one["name"] == "hello"] == [
        "two ranks on n1 find each other by --mpi=pmix"
    ]
    assert job.info()["ExitCode"] == "1:0"


def test_root_is_told_how_to_look_at_nodes_without_ssh(sound_site: Site) -> None:
    done = sound_site.run([STAGECTL, "doctor", "-w", "n[1-2]"], user="root", check=False)
    (line,) = (line for line in done.stdout.splitlines() if "does not answer" in line)
    assert line.startswith("problem  n[1-2]: stagectl does not answer there: ")
    assert line.endswith(
        ": ssh must reach the node, and slurm-stage be there; without ssh, run this in a job "
        "(salloc -w NODES stagectl doctor)"
    )


def test_each_fault_on_a_node_is_told_with_the_node_and_the_remedy(sound_site: Site) -> None:
    every = faults(sound_site.run("sinfo --version").stdout.split()[1])
    assert len(every) >= 20
    with (
        put(sound_site, every),
        on_fuse(sound_site, "/run/scratch"),
    ):
        job = in_job(sound_site)
    told = [line for fault in every for line in fault.lines]
    assert not_ok(job.output()) == sorted([*told, *ON_FUSE])
    assert job.info()["ExitCode"] == "1:0"
    # Nothing is left of them.
    assert not_ok(in_job(sound_site).output()) == []


def told_on_login(site: Site, change: str) -> list[str]:
    """The problems that `stagectl doctor` names after a change of plugstack.conf by sed."""
    wrong = f"changed {PLUGSTACK} sed -i '{change}'"
    with put(site, [Fault("login", wrong, f"umount {PLUGSTACK}", ())]):
        done = site.run([STAGECTL, "doctor"], user="alice", on="login", check=False)
    assert done.returncode == 1
    return [line for line in not_ok(done.stdout) if line.startswith("problem")]


def test_a_line_of_the_plugin_that_is_wrong_is_told(sound_site: Site) -> None:
    unknown = f"problem  login: argument pythn={PREFIX}/bin/python3 in {PLUGSTACK} is not valid"
    fails = "srun, sbatch and salloc fail for everybody"
    config = f"problem  login: config=/etc/slurm/none.toml in {PLUGSTACK} is not there"
    assert told_on_login(sound_site, "s/python=/pythn=/; s/stage.toml/none.toml/") == [
        f"{unknown}, so {fails}: write python=/PATH",
        f"{config}: put it there, or correct the line",
    ]
    absent = f"problem  login: {PREFIX}/libs/spank_stage.so in {PLUGSTACK} is not there"
    follows = "--stage is an unknown option, and jobs start without their files"
    assert told_on_login(sound_site, "s/required/optional/; s!/lib/!/libs/!") == [
        f"{absent}, so {follows}: correct the path, or install the plugin there"
    ]


def told_on(site: Site, machine: str, policy: str) -> list[str]:
    """What is not ok by another stage.toml, as seen from a machine outside of a job."""
    site.write_policy(policy)
    try:
        done = site.run([STAGECTL, "doctor"], on=machine, check=False)
    finally:
        site.write_policy(SOUND_POLICY)
    assert (done.returncode, done.stderr) == (1, "")
    return not_ok(done.stdout)


def test_faults_of_stage_toml_are_told_on_every_machine(sound_site: Site) -> None:
    if True:
        assert told_on(sound_site, "login", 'roots = "/nvme"\n') == sorted(
            [
                f"problem  {CONFIG}: roots: must be a list",
                RANKS_LISTEN,
                NO_NODE, NOT_TRIED,
            ]
        )  # fmt: skip
        wrong = (
            '[launch]\nmpi = "pmi2"\nauthenticate = false\nsrun = "/nowhere/srun"\n'
            '[launch.environment]\nOMPI_MCA_btl_tcp_if_include = "ib0"\n'
        )
        assert told_on(sound_site, "n1", 'roots = ["/nvme", "/run/absent"]\n' + wrong) == sorted(
            [
                ("problem  n1: /run/absent is not there: mount the disk, or correct roots in "
                "stage.toml"),
                ("problem  n1: ranks accept connections from anyone: set authenticate = true in "
                "[launch]"),
                ("problem  n1: ranks load Open MPI L, which needs pmix: set mpi = \"auto\" in "
                "[launch]"),
                ("problem  n1: there is no interface ib0 that is up, which "
                "OMPI_MCA_btl_tcp_if_include in [launch] environment names: correct it, or see to "
                "the interface"),
                RANKS_LISTEN,
                ("problem  /nowhere/srun, which stage.toml names, is not there or cannot be run: "
                "correct srun in [launch]"),
                NOT_TRIED,
            ]
        )  # fmt: skip


def test_faults_of_slurm_conf_are_told_on_every_machine(sound_site: Site) -> None:
    """Without the plugin, and with scripts that Slurm cannot run: no job starts meanwhile."""
    scripts = (
        f"TaskProlog=/nowhere/task_prolog\nEpilog={CONFIG.replace('stage.toml', 'job_epilog')}"
    )
    try:
        sound_site.path("login", "/etc/slurm/job_epilog").touch()
        sound_site.path("login", "/etc/slurm/job_epilog").chmod(0o666)
        sound_site.write_plugstack("")
        sound_site.reconfigure(f"PrologEpilogTimeout=30\n{scripts}\n")
        told = told_on(sound_site, "n1", SOUND_POLICY)
    finally:
        sound_site.path("login", "/etc/slurm/job_epilog").unlink()
        sound_site.write_plugstack(PLUGSTACK_LINE)
        sound_site.reconfigure(SOUND_CONF)
        sound_site.run(ALONE, user="root")
    assert told == sorted(
        [
            ("problem  n1: Prolog is not set, which a site without the plugin needs: "
            "Prolog=/etc/slurm/slurm-stage/job_prolog in slurm.conf"),
            ("problem  n1: /nowhere/task_prolog is not there: put the script there, or correct "
            "slurm.conf"),
            ("problem  n1: /etc/slurm/job_epilog cannot be executed: chmod 755 "
            "/etc/slurm/job_epilog"),
            ("problem  n1: /etc/slurm/job_epilog: others than root can write it: chown root, chmod "
            "go-w"),
            ("problem  PrologEpilogTimeout is 30 s: Slurm drains a node whose clean-up takes "
            "longer, and a user's process can make it last almost 50 s: set it to 50 or more, or "
            "remove it"),
            ("note     partition main: users share nodes, and reach each other's ports: see "
            "SECURITY.md, or set ExclusiveUser=YES or OverSubscribe=EXCLUSIVE"),
            ("note     srun listens on any port: set SrunPortRange, so that a firewall can tell "
            "its ports"),
            NOT_TRIED,
        ]
    )  # fmt: skip


#: Two sruns that start everything but ranks as they should: by one the ranks lose Slurm's PMI, and
#: each is a world of one; the other does not end.
SRUNS = {
    "loses": (
        'count=$(($# - 4)); exec /usr/bin/srun "${@:1:count}" --mpi=none bash -c '
        '"unset \\${!SLURM_*}; OMPI_MCA_ess_singleton_isolated=1 exec \\"\\$@\\"" '
        '- "${@:count + 1}"'
    ),
    "hangs": "exec sleep 60",
}


def hello_line(site: Site, launch: str, nodes: int = 2) -> str:
    """What the doctor says in a job of two ranks started by these settings of ``[launch]``."""
    site.write_policy(SOUND_POLICY.replace("[launch.env", f"[launch]\n{launch}\n[launch.env"))
    try:
        output = in_job(site, nodes).output()
    finally:
        site.write_policy(SOUND_POLICY)
    (line,) = (line for line in readable(output) if " ranks on " in line)
    return line


def test_two_ranks_without_the_interface_that_the_site_names(sound_site: Site) -> None:
    """MPI blames its own inside then."""
    named = SOUND_POLICY.replace('OMPI_MCA_btl_tcp_if_include = "eth0"\n', "")
    sound_site.write_policy(f'{named}[launch]\ninterface = "nope0"\n')
    try:
        told = [line for line in readable(in_job(sound_site, 2).output()) if "nope0" in line]
    finally:
        sound_site.write_policy(SOUND_POLICY)
    assert told == [
        (
            "problem  n[1-2]: there is no interface nope0 that is up, which interface in [launch] "
            "names: correct it, or see to the interface"
        ),
        (
            "problem  two ranks on n[1-2] do not find each other by --mpi=pmix (n[1-2] has no "
            "interface that is up and leads to other nodes of those that interface in [launch] of "
            "stage.toml names (nope0)): correct it, or see to the interface"
        ),
    ]


def test_an_interface_that_only_the_watch_between_ranks_needs(sound_site: Site) -> None:
    """MPI is told of eth0, so it works, but each stage on two nodes fails."""
    assert hello_line(sound_site, 'interface = "nope0"').startswith(
        "problem  two ranks on n[1-2] do not find each other by --mpi=pmix (staging ended early: "
        "n1: this node has no interface nope0 with an address by which other nodes can reach it): "
        "correct interface, mpi or environment in [launch]; this says more: "
    )


def test_two_ranks_are_started_as_a_stage_starts_its_own(sound_site: Site) -> None:
    for name, command in SRUNS.items():
        srun = sound_site.shared(f"{name}-srun")
        others = '[ "${!#}" = stager.rank ] || exec /usr/bin/srun "$@"'
        srun.write_text(f"#!/bin/bash\n{others}\n{command}\n")
        srun.chmod(0o755)
    fails = (
        "problem  two ranks on {} do not find each other by --mpi={} ({}): correct interface, "
        "mpi or environment in [launch]; this says more: srun -w {} --mpi={} "
        f"{PYTHON} -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"
    )
    two, one = "n[1-2] -N2", "n1 -N1 -n2"
    none = "hangs-srun has started no staging process on any node, or none that can read its Python"
    assert [
        hello_line(sound_site, 'mpi = "pmix"', nodes=1),
        hello_line(sound_site, 'mpi = "none"', nodes=1),
        hello_line(sound_site, 'srun = "/shared/loses-srun"'),
        hello_line(sound_site, 'srun = "/shared/hangs-srun"\nstart_timeout = 2'),
    ] == [
        "ok       two ranks on n1 find each other by --mpi=pmix",
        fails.format("n1", "none", "srun ended with code C", one, "none"),
        fails.format("n[1-2]", "pmix", "each is alone", two, "pmix"),
        fails.format("n[1-2]", "pmix", f"MPI did not start within 2 s: {none}", two, "pmix"),
    ]
