"""A folder as the source: every node gets a complete mirror, and only changes move."""

from __future__ import annotations

import os
import random
import re
import shlex
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.tree.walk import walk
from tests.cluster.processes import is_rank, processes
from tests.cluster.site import STAGECTL
from tests.cluster.watch import Watch
from tests.support.installation import install_python
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.processes import Process
    from tests.cluster.site import Site

SOURCE, COPY = "/shared/tree", "/nvme/tree"
WISH = f"--stage={SOURCE}:{COPY}"
#: What is the same on any number of nodes is tried on two.
NODES, TWO, ON_ALL = ("n1", "n2"), "-wn1,n2", r"n\[1-2\] \(2 nodes\)"
SIZE, TIME = r"\d+(\.\d)? [KM]?i?B", r"\d+\.\d s"
NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"

#: Shell commands, run as alice, that make a folder with awkward names and kinds of files. It
#: has many, so it is made once and then copied.
MAKE = r"""
chmod -fR u+rwX /shared/tree; rm -rf /shared/tree
[ -d /shared/made ] && exec cp -a /shared/made /shared/tree
mkdir -p /shared/tree/a/b/empty /shared/tree/closed /shared/tree/lib
cd /shared/tree
for i in $(seq 500); do head -c $((i * 37)) /dev/urandom > lib/file$i; done
head -c 9000000 /dev/urandom > a/large
: > a/zero
ln a/large a/b/twin
ln -s ../a/large a/link; ln -s nowhere a/dangling; ln -s . a/b/self
touch $'a/new\nline' $'a/\xff\xfe' 'a/ blank ' 'a/-rf' 'a/*' $'a/\\' 'a/"quoted"' a/$'\xc3\xa9'
truncate -s 40M a/sparse; printf x | dd of=a/sparse bs=1 seek=20000000 conv=notrunc status=none
chmod 755 lib/file1; chmod 600 lib/file2; chmod 444 lib/file3; chmod 640 lib/file4
touch -d '1969-07-20 20:17:40.123456789' lib/file5; touch -h -d '2001-02-03' a/dangling
mkdir -m 2750 a/group; touch a/group/file; echo closed > closed/file
touch -d '2002-03-04 05:06:07' a/b closed; chmod 555 closed
cp -a /shared/tree /shared/made
"""
#: Prints what differs between source and copy on the node where it runs; nothing if equal.
COMPARE = f"rsync -anciHS --chmod=ug-s,go= --delete {SOURCE}/ {COPY}/"


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run(["bash", "-c", MAKE])


def stage(site: Site, wish: str = WISH, script: str = f"srun {COMPARE}", nodes: str = TWO) -> str:
    """Return the output of a job, which must succeed and leave nothing behind."""
    job = site.sbatch(script, nodes, wish)
    state = job.wait()
    assert (state.exit_code, job.output()) == ("0:0", job.output())
    assert site.leftovers() == []
    return job.output()


def digest(site: Site, node: str, folder: str = COPY) -> str:
    """Return one digest of all names, kinds, modes, sizes, times and bytes of a folder."""
    line = (
        f"cd {folder} && (find . -type d -printf '%P %m %T@\\n' | sort; "
        "find . -not -type d -printf '%P %y %m %s %T@ %l\\n' | sort; "
        "find . -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum"
    )
    return site.run(line, on=node).stdout


def inodes(site: Site, node: str) -> dict[bytes, int]:
    listing = walk(str(site.copy(node, COPY)))
    return dict(zip(listing.paths, listing.inodes, strict=True))


def test_a_folder_is_the_same_on_every_node(site: Site) -> None:
    output = stage(site, nodes="-N4")
    moved = rf"stage: {COPY}: 513 files, {SIZE} from {SOURCE} to n\[1-4\] \(4 nodes\) in {TIME}"
    assert re.fullmatch(rf"{moved} \({SIZE}/s a node\)\n", output)
    for node in site.nodes:
        sparse = site.copy(node, COPY) / "a/sparse"
        assert sparse.stat().st_blocks * 512 < 1 << 20


def test_the_second_job_moves_nothing_and_opens_no_file(site: Site) -> None:
    stage(site)
    before = {node: inodes(site, node) for node in NODES}
    with Watch(site.shared("tree/lib")) as watch:
        output = stage(site, script="true")
    assert (watch.opened, watch.read) == (0, 0)
    current = rf"stage: {COPY}: current on {ON_ALL}, nothing moved \(513 files, {SIZE}, {TIME}\)\n"
    assert re.fullmatch(current, output)
    assert {node: inodes(site, node) for node in NODES} == before


def test_only_what_changed_moves(site: Site) -> None:
    stage(site)
    before = inodes(site, "n2")
    site.run("cd /shared/tree; echo changed > lib/file7; rm lib/file8; echo new > lib/new")
    output = stage(site)
    moved = (
        rf"stage: {COPY}: 2 files, 12 B \(511 files kept, 1 file deleted\) from {SOURCE} "
        rf"to {ON_ALL} "
    )
    assert re.match(moved, output)
    after = inodes(site, "n2")
    assert {path for path in before if after.get(path) != before[path]} == {
        b"lib/file7", b"lib/file8",
    }  # fmt: skip


def test_a_node_without_the_folder_gets_it_from_another_node(site: Site) -> None:
    three = "-wn[1-3]"
    stage(site, nodes=three)
    site.run(f"chmod -R u+w {COPY}; rm -rf {COPY}", on="n3")
    with Watch(site.shared("tree/lib")) as watch:
        output = stage(site, script="true", nodes=three)
    assert (watch.opened, watch.read) == (0, 0)
    assert f"{COPY}: 513 files, " in output
    assert " from the copy on n1 to n3 in " in output
    assert output.endswith("; current on n[1-2] (2 nodes)\n")
    stage(site, nodes=three)


def test_lifetime_job_and_evict_leave_the_users_own_files(site: Site) -> None:
    write = f"srun -N1 -n1 -wn2 sh -c 'echo mine > {COPY}/mine'"
    stage(site, f"{WISH},lifetime=job", write)
    site.assert_healthy()
    mine = site.copy("n2", f"{COPY}/mine")
    assert not site.copy("n1", COPY).exists()
    assert os.listdir(mine.parent) == ["mine"]
    assert f"{COPY}: 513 files, " in stage(site, script="true")
    assert in_job(site, f"evict {COPY}") == (
        "0:0",
        f"stage: {COPY}: evicted on n1\nstage: {COPY}: evicted, but for files of yours, on n2\n",
    )
    assert os.listdir(mine.parent) == ["mine"]
    assert mine.read_text() == "mine\n"


def fails(site: Site, code: int, message: str, wish: str = WISH, nodes: str = TWO) -> None:
    job = site.sbatch("echo started", nodes, wish)
    state, told = job.wait(), f"stage: {message}\n{NOT_STARTED.format(code)}"
    assert (state.exit_code, job.output()) == (f"{code}:0", told)
    assert site.leftovers() == []
    site.assert_healthy()


def test_what_was_not_staged_is_not_replaced(site: Site) -> None:
    site.run(f"mkdir {COPY}; echo mine > {COPY}/results", on="n2")
    what = f"{COPY} is a folder that was not staged"
    remedy = "it is kept: move it, delete it, or choose another destination"
    fails(site, 6, f"n2: {what}; {remedy}; to put the copy into it, write {COPY}/")
    assert (site.copy("n2", COPY) / "results").read_text() == "mine\n"


def test_files_that_cannot_be_staged_are_named(site: Site) -> None:
    site.run("mkfifo /shared/tree/a/pipe")
    what = f"{SOURCE}/a/pipe is a named pipe, which cannot be staged"
    fails(site, 4, f"n1: {what}; leave it out with exclude=")
    site.run("rm /shared/tree/a/pipe; chmod 0 /shared/tree/lib/file9")
    fails(site, 4, f"n1: {SOURCE}/lib/file9: Permission denied")
    site.run("chmod 644 /shared/tree/lib/file9; chmod 0 /shared/tree/a/b")
    fails(site, 4, f"n1: {SOURCE}/a/b: Permission denied")
    site.run("chmod 755 /shared/tree/a/b")
    stage(site)


def test_a_full_disk_fails_the_stage_before_anything_moves(site: Site) -> None:
    with site.nvme("n2", "loop", "30M"):
        stage(site)
        before = digest(site, "n2")
        site.run("head -c 40000000 /dev/urandom > /shared/tree/more")
        job = site.sbatch("true", TWO, WISH)
        assert job.wait().exit_code == "5:0"
        assert re.fullmatch(
            r"stage: n2: /nvme: not enough room: [^,]+ needed, [^,]+ free, [^,]+ still missing; "
            r"the whole disk has only [^:]+: ask for nodes with larger disks, or stage less\n"
            + re.escape(NOT_STARTED.format(5)),
            job.output(),
        )
        assert digest(site, "n2") == before
        assert site.leftovers() == []
        site.run("rm /shared/tree/more")
        # A copy makes room for another one, but not what its user added to it.
        site.run(f"echo mine > {COPY}/mine", on="n2")
        room = os.statvfs(site.copy("n2", "/nvme"))
        site.run(f"head -c {room.f_bavail * room.f_frsize + 1_000_000} /dev/zero > /shared/other")
        output = stage(site, "--stage=/shared/other:/nvme/other", "true")
        assert f"stage: {COPY}: evicted on n2 to make room\n" in output
        assert os.listdir(site.copy("n2", COPY)) == ["mine"]
        site.run("rm /shared/other")


def test_a_folder_with_lifetime_job_is_removed_at_the_end_of_the_job(site: Site) -> None:
    stage(site, f"{WISH},lifetime=job")
    site.assert_healthy()
    assert [site.copy(node, COPY).exists() for node in site.nodes] == [False] * 4
    assert [site.records(node) for node in site.nodes] == [[]] * 4


def in_job(site: Site, line: str, nodes: str = TWO) -> tuple[str, str]:
    """Return the exit code and output of ``stagectl`` in a job."""
    job = site.sbatch(f"{STAGECTL} {line}", nodes)
    return job.wait().exit_code, job.output()


def test_status_verify_and_evict_work_on_folders(site: Site) -> None:
    stage(site)
    code, told = in_job(site, "status")
    assert code == "0:0"
    row = rf"n\[1-2\] +{COPY} +513 files, \d+\.\d MiB +\d+ s ago +ready +- +{SOURCE} +\d+\n"
    assert re.search(row, told)
    assert in_job(site, "verify") == ("0:0", f"stage: {COPY}: verified on n[1-2] (2 nodes)\n")
    damaged = site.copy("n2", COPY) / "lib/file11"
    facts = damaged.stat()
    with damaged.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(damaged, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    fault = "1 file is missing, or not as staged: lib/file11; stage it again"
    verified = f"stage: {COPY}: verified on n1\nstage: n2: {COPY}: {fault}\n"
    assert in_job(site, "verify") == ("7:0", verified)
    assert "1 file, 407 B (512 files kept)" in stage(site, f"{WISH},validate=checksum")
    evicted = f"stage: {COPY}: evicted on n[1-2] (2 nodes)\n"
    assert in_job(site, f"evict {COPY}") == ("0:0", evicted)
    assert [site.copy(node, COPY).exists() for node in site.nodes] == [False] * 4
    assert site.leftovers() == []


def test_evict_keeps_a_folder_that_a_user_put_in_the_place_of_a_copy(site: Site) -> None:
    stage(site, script="true")
    # The new folder often has the inode of the old one, on disks that reuse inodes at once.
    site.run(f"chmod -R u+w {COPY}; rm -rf {COPY}; mkdir {COPY}; echo mine > {COPY}/f", on="n1")
    in_job(site, f"evict {COPY}")
    assert (site.copy("n1", COPY) / "f").read_text() == "mine\n"


def test_an_archive_is_unpacked_on_every_node_and_not_kept(site: Site) -> None:
    site.run("rm /shared/tree/a/dangling; touch -d 2001-02-03 /shared/tree/a; "
             "cd /shared && tar -czf tree.tar.gz -C tree .")  # fmt: skip
    compare = f"srun rsync -anciHS --chmod=ug-s,go= --delete {SOURCE}/ {COPY}/"
    wish = f"--stage=/shared/tree.tar.gz:{COPY},extract"
    # A tar has whole seconds, so rsync must ignore smaller differences.
    output = stage(site, wish, compare.replace("-anciHS", "-anciHS --modify-window=1"))
    moved = rf"stage: {COPY}: 513 files, {SIZE} from /shared/tree.tar.gz to {ON_ALL} in {TIME}"
    assert re.fullmatch(rf"{moved} \({SIZE}/s a node\)\n", output)
    output = stage(site, wish, "true")
    current = rf"stage: {COPY}: current on {ON_ALL}, nothing moved \(513 files, {SIZE}, {TIME}\)\n"
    assert re.fullmatch(current, output)
    assert sorted(path.name for path in site.copy("n1", "/nvme").iterdir()) == [
        ".slurm-stage", "tree",
    ]  # fmt: skip


def test_a_hostile_archive_fails_the_job_and_leaves_nothing(site: Site) -> None:
    site.run("cd /shared && tar -czf bad.tgz --transform 's,^,../,' -P img-none 2>/dev/null; "
             "echo x > evil && tar -czPf bad.tgz --transform 's,^,../../,' evil")  # fmt: skip
    why = (
        "/shared/bad.tgz: its member '../../evil' has '..' in its path: nothing was unpacked; "
        "create the archive again without it"
    )
    fails(site, 2, f"n[1-2]: {why}", f"--stage=/shared/bad.tgz:{COPY},extract")
    assert [site.copy(node, COPY).exists() for node in site.nodes] == [False] * 4
    assert [site.copy(node, "/nvme/evil").exists() for node in site.nodes] == [False] * 4


def test_a_disk_that_fills_while_an_archive_is_unpacked(site: Site) -> None:
    site.run("cd /shared && head -c 60000000 /dev/zero > zeros && tar -czf zeros.tgz zeros")
    with site.nvme("n2", "loop", "30M"):
        job = site.sbatch("true", TWO, f"--stage=/shared/zeros.tgz:{COPY},extract")
        assert job.wait().exit_code == "5:0"
        assert re.fullmatch(
            r"stage: n2: /shared/zeros.tgz: it unpacks to more than the \d+\.\d [KM]iB that you "
            r"may still write on this disk; free space there \(stagectl evict\), or ask for nodes "
            r"with larger disks\n" + re.escape(NOT_STARTED.format(5)),
            job.output(),
        )
        assert site.leftovers() == []


def test_a_relocated_environment_works_at_its_destination(site: Site) -> None:
    site.run("rm -rf /shared/env; /usr/bin/python3 -m venv /shared/env", timeout=120)
    (site.shared("env") / "bin/tool").write_text(
        "#!/shared/env/bin/python3\nimport sys, pip\nprint(sys.prefix, pip.__file__)\n"
    )
    (site.shared("env") / "bin/tool").chmod(0o755)
    modules = next(site.shared("env").glob("lib/python3*/site-packages/pip"))
    use = "/nvme/env/bin/tool; . /nvme/env/bin/activate; echo $VIRTUAL_ENV; which tool"
    wish = "--stage=/shared/env:/nvme/env"
    with Watch(modules) as watch:
        assert site.sbatch("true", TWO, wish).wait().exit_code == "0:0"
    assert watch.opened > 0
    with Watch(modules) as watch, Watch(site.shared("env") / "bin") as programs:
        job = site.sbatch(f"srun bash -c '{use}'", TWO, wish)
        assert job.wait().exit_code == "0:0"
    assert [watch.opened, programs.opened] == [0, 0]
    summary, *lines = job.output().splitlines()
    assert re.match(rf"stage: /nvme/env: current on {ON_ALL}, nothing moved", summary)
    pip = modules.relative_to(site.shared("env"))
    assert sorted(lines) == sorted(
        [f"/nvme/env /nvme/env/{pip}/__init__.py", "/nvme/env", "/nvme/env/bin/tool"] * 2
    )


SOFTWARE = "/shared/software"
#: What a job does with the environment; nothing of it may come from shared storage.
USE = """
. /nvme/project/.venv/bin/activate && pip --version && python -c '
import ctypes, project, sqlite3, ssl, sys; print(sys.prefix, sys.base_prefix)'
"""


@pytest.fixture
def project(site: Site) -> Iterator[str]:
    """A project with an environment, whose Python is of its own, on storage that is mounted."""
    folder, image = site.shared("software"), "/shared/software.ext4"
    install_python(folder / "python", f"{SOFTWARE}/python")
    path = f"{SOFTWARE}/project"
    site.run(["mkdir", "-p", f"{path}/src"], user="root")
    (folder / "project/src/project.py").touch()
    site.run(f"chown -R alice {SOFTWARE}", user="root")
    site.run(f"{SOFTWARE}/python/bin/python3 -m venv {path}/.venv", timeout=120)
    (packages,) = (folder / "project/.venv").glob("lib/python3*/site-packages")
    (packages / "__editable__.project.pth").write_text(f"{path}/src\n")
    make = f"/sbin/mkfs.ext4 -q -d {SOFTWARE} {image} 500M && rm -rf {SOFTWARE}/*"
    site.run(make, user="root")
    mounted = [partial(site.run, user="root", on=node) for node in NODES]
    for run in mounted:
        run(["mount", "-o", "loop,ro", image, SOFTWARE])
    yield path
    for run in mounted:
        run(["umount", SOFTWARE], check=False)
    site.run(["rm", "-rf", SOFTWARE, image], user="root")


def test_an_environment_in_a_project_works_without_shared_storage(site: Site, project: str) -> None:
    wish = f"--stage={project}:/nvme/project"
    assert site.sbatch("true", TWO, wish).wait().exit_code == "0:0"
    job = site.sbatch("true", TWO, wish)
    assert job.wait().exit_code == "0:0"
    assert re.match(rf"stage: /nvme/project: current on {ON_ALL}, nothing moved", job.output())
    for node in NODES:
        site.run(["umount", SOFTWARE], user="root", on=node)
    job = site.sbatch(f"srun bash -c {shlex.quote(USE)}", TWO)
    assert job.wait().exit_code == "0:0", job.output()
    env = "/nvme/project/.venv"
    pip, used = sorted(set(job.output().splitlines()), key=len, reverse=True)
    assert f" from {env}/lib/python3" in pip
    assert used == f"{env} {env}/.python"


CHANGE = """
cd /shared/tree; for i in $(seq 20); do head -c 200000 /dev/urandom > lib/changed$i; done
head -c 20000000 /dev/urandom > a/large
"""


@pytest.mark.parametrize("kills", [4, repeated(20)])
def test_kills_leave_the_old_tree_or_the_new_one(site: Site, kills: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    dice = random.Random(seed)
    stage(site, nodes="-N4")
    versions = {digest(site, "n1")}
    killed = 0
    while killed < kills:  # now and then a rank has ended before
        site.run(CHANGE)
        versions.add(digest(site, "n1", SOURCE))
        job = site.sbatch("true", "-N4", WISH)
        victim = rank_of(site, job, dice)
        time.sleep(dice.uniform(0, 0.5))
        killed += bool(victim and victim.kill())
        job.wait()
        found = {node: digest(site, node) for node in site.nodes}
        assert set(found.values()) <= versions, f"seed {seed}: {victim}"
        assert site.leftovers() == [], f"seed {seed}: {victim}"
    stage(site, nodes="-N4")
    site.assert_healthy()


def rank_of(site: Site, job: Job, dice: random.Random) -> Process | None:
    """Return one of the job's ranks, once all are running; None if the job ended before."""
    while job.info()["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"):
        ranks = [one for one in processes(site) if is_rank(one)]
        if len(ranks) >= len(site.nodes):
            return dice.choice(ranks)
    return None


UPDATE = """
cd /shared/tree; for i in $(seq 300); do echo {0} $i > lib/file$i; done
mkdir -p lib/of{0}/inner; echo new > lib/of{0}/inner/file; rm -rf lib/of{1}
"""
#: What the user adds, in a folder that goes with the next version, too.
OWN = {"mine": "1", "lib/mine": "2", "lib/of0/mine": "3", "results/a/b": "4"}


@pytest.mark.parametrize("kind", ["rank", "slurmd", "node"])
@pytest.mark.parametrize("kills", [1, repeated(7)])
def test_an_update_that_is_cut_off_is_finished_for_the_next_user(
    site: Site, kind: str, kills: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    dice = random.Random(seed)
    site.run(UPDATE.format(0, "none"))
    stage(site, nodes="-N4", script="true")
    own = {}
    for name, text in OWN.items():
        site.run(
            f"mkdir -p {os.path.dirname(f'{COPY}/{name}')}; echo {text} > {COPY}/{name}", on="n2"
        )
        own[name] = site.copy("n2", f"{COPY}/{name}").stat()
    number = hits = 0
    while hits < kills:  # now and then the update is over before
        number += 1
        site.run(UPDATE.format(number, number - 1))
        job = site.sbatch("true", "-N4", "--no-requeue", WISH)
        hits += hit_during_update(site, job, kind, dice.uniform(0, 0.03))
        job.wait()
        site.revive()
        for name, facts in own.items():
            there = site.copy("n2", f"{COPY}/{name}")
            assert there.read_text() == f"{OWN[name]}\n", f"seed {seed}"
            assert there.stat().st_ino == facts.st_ino, f"seed {seed}"
        output = stage(site, nodes="-N4", script="true")
        found = {node: digest_of_staged(site, node, COPY) for node in site.nodes}
        assert set(found.values()) == {digest_of_staged(site, "n1", SOURCE)}, (
            f"seed {seed}: {output}"
        )
    site.assert_healthy()


def digest_of_staged(site: Site, node: str, folder: str) -> str:
    """Return one digest of the names and bytes of a folder, without what is the user's own."""
    line = (
        f"cd {folder} && find . -type f -not -name mine -not -path './results/*' -print0 | "
        "sort -z | xargs -0 sha256sum | sha256sum"
    )
    return site.run(line, on=node).stdout


def hit_during_update(site: Site, job: Job, kind: str, delay: float) -> bool:
    """Kill n2's rank or slurmd, or all of it, once it updates its copy. Return whether it did."""
    updates = site.path("n2", "/nvme")
    while job.info()["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"):
        ranks = [one for one in processes(site) if is_rank(one) and one.node == "n2"]
        while ranks and all(os.path.exists(f"/proc/{one.pid}") for one in ranks):
            if any(updates.glob(".slurm-stage/*/updates/*.new")):
                time.sleep(delay)
                hit(site, kind, ranks)
                return True
    return False


def hit(site: Site, kind: str, ranks: list[Process]) -> None:
    if kind == "rank":
        for one in ranks:
            one.kill()
    elif kind == "slurmd":
        site.restart_slurmd("n2")
    else:
        with site.rebooting("n2"):
            pass


def test_what_was_changed_in_a_folder_is_restored_only_if_the_user_says_so(site: Site) -> None:
    stage(site, nodes="-N4")
    site.run(f"cd {COPY}; mkdir a/__pycache__; echo compiled > a/__pycache__/x.pyc", on="n3")
    site.run(f"cd {COPY}; echo result > a/result; mkdir -m 0 closed-one", on="n3")
    assert f"{COPY}: current on n[1-4]" in stage(site, script="true", nodes="-N4")
    site.run(f"cd {COPY}; echo x >> lib/file8", on="n4")
    states = {node: site.run([STAGECTL, "status"], on=node).stdout for node in ("n3", "n4")}
    assert (" ready " in states["n3"], " changed " in states["n4"]) == (True, True), states
    refused = (
        f"n4: {COPY} holds 1 file that was added or changed after staging: lib/file8; it is kept: "
        "move it elsewhere, choose another destination, or add the option replace"
    )
    fails(site, 6, refused, nodes="-N4")
    code, told = in_job(site, f"plan {SOURCE}:{COPY}", "-N4")
    assert (code, told) == ("6:0", f"stage: {refused}\n")
    site.run("echo more > /shared/tree/lib/new; echo theirs > /shared/tree/a/result")
    fails(site, 6, refused, nodes="-N4")
    assert not (site.copy("n1", COPY) / "lib/new").exists()
    site.run(f"cp {SOURCE}/lib/file9 {COPY}/lib/other; rm {COPY}/lib/file8", on="n4")
    way = refused.replace("n4", "n3").replace("lib/file8", "a/result")
    fails(site, 6, way, nodes="-N4")
    assert not (site.copy("n1", COPY) / "lib/new").exists()
    assert f"{COPY}: 3 files, " in stage(site, f"{WISH},replace", "true", nodes="-N4")
    assert (site.copy("n3", COPY) / "a/result").read_text() == "theirs\n"
    assert (site.copy("n3", COPY) / "a/__pycache__/x.pyc").read_text() == "compiled\n"
    assert (site.copy("n3", COPY) / "closed-one").is_dir()
    assert (site.copy("n4", COPY) / "lib/other").exists()
    site.run(f"rm {SOURCE}/a/result")


def test_a_snapshot_of_a_hub_on_shared_storage_is_staged_with_what_its_links_lead_to(
    site: Site,
) -> None:
    cache = "/shared/hub/models--org--model"
    source, copy = f"{cache}/snapshots/ab12", "/nvme/model"
    site.run(
        f"mkdir -p {cache}/blobs {source}/below; cd {source}; echo one >../../blobs/1; "
        "head -c 5000000 /dev/urandom >../../blobs/2; "
        "ln -s ../../blobs/1 config.json; ln -s ../../../blobs/2 below/model.bin"
    )
    wish = f"--stage={source}:{copy}"
    refused = site.sbatch("true", "-N1", wish)
    assert refused.wait().exit_code == "4:0", refused.output()
    assert "take the files that they lead to by links=follow\n" in refused.output()
    wish, equal = (
        f"{wish},links=follow",
        f"srun rsync -anciHSL --chmod=ug-s,go= --delete {source}/ {copy}/",
    )
    assert ": 2 files, 4.8 MiB from " in stage(site, wish, equal)
    assert f"stage: {copy}: current on n[1-2] (2 nodes), nothing moved" in stage(site, wish, equal)
    site.run(f"echo two >{cache}/blobs/1")
    assert f"stage: {copy}: 1 file, 4 B (1 file kept) from " in stage(site, wish, equal)
    assert {site.copy(node, f"{copy}/config.json").read_text() for node in ("n1", "n2")} == {
        "two\n"
    }
    site.run(f"rm {cache}/blobs/1")
    dangling = site.sbatch("true", "-N1", wish)
    assert dangling.wait().exit_code == "4:0", dangling.output()
    assert f"{source}/config.json is a link that cannot be followed (No such file" in (
        dangling.output()
    )
    site.run("rm -r /shared/hub")
