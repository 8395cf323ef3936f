"""The filesystem of a job's disks: jobs that ask get it, and nothing of it outlives them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import HANGS, POLICY, STAGECTL, wait_until
from tests.cluster.test_fuse import compile_restless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

DRIVER, MOUNT, DATA, NOTES = (
    "/shared/driver",
    "/run/shared-fs",
    "/nvme/.slurm-stage-shared",
    "/run/slurm-stage/shared",
)
SHARED_FS = f'{POLICY}[shared_fs]\ndriver = "{DRIVER}"\nfolder = "/nvme"\nmount = "{MOUNT}"\n'
#: Two nodes, and a third one of the same partition that has no job.
TWO, WISH = "-wn1,n3", "--stage=:shared:/scratch"
DAEMON = "4242424"
#: Its servers are one with the driver's output and one that is on its own. Its ``stop`` removes
#: nothing, which is the worst that one can do but not end.
SCRIPT = f"""#!/bin/sh
echo "$1 $STAGE_JOB $STAGE_NODES $(id -u)" >> /nvme/calls
[ $1 = start ] || {{ [ ! -e /shared/hangs ] || sleep {DAEMON}; exit 0; }}
setsid sleep {DAEMON} &
setsid sleep {DAEMON} >/dev/null 2>&1 </dev/null &
mkdir -p $STAGE_FOLDER/a/b $STAGE_FOLDER/files; touch $STAGE_FOLDER/a/b/c
chmod 0 $STAGE_FOLDER/a/b $STAGE_FOLDER/a
if [ -e /shared/bare ]; then exit 0
elif [ $(id -u) = 0 ]; then
    size=$(cat /shared/size || echo 9T)
    mount -t tmpfs -o size=$size,uid=$STAGE_UID,mode=0700 job $STAGE_MOUNT
else /shared/restless $STAGE_FOLDER/files $STAGE_MOUNT; fi
! grep -qsw $STAGE_NODE /shared/fails || {{ echo begins; echo no disk answers >&2; exit 1; }}
"""


@pytest.fixture(scope="module")
def _restless(tidied_site: Site) -> None:
    """What the driver mounts as the job's user."""
    compile_restless(tidied_site)
    tidied_site.run("chmod 666 /dev/fuse", user="root")  # as the package fuse3 has it


@pytest.fixture(params=["user", "root"])
def shared_site(site: Site, _restless: None, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The site with a driver that runs as the job's user, or as root."""
    driver = site.shared("driver")
    driver.write_text(SCRIPT)
    driver.chmod(0o755)
    with site.policy(f"{SHARED_FS}user = {'false' if request.param == 'root' else 'true'}\n"):
        yield site
        for name in ("bare", "fails", "hangs", "size"):
            site.shared(name).unlink(missing_ok=True)


def left(site: Site, *nodes: str) -> list[str]:
    """Return what there is of any job's filesystem on the nodes."""
    # Root cannot look at what a user mounts, but sees its name.
    names = "; ".join(f"compgen -G '{folder}/*'" for folder in (MOUNT, DATA, NOTES))
    daemons = f"[s]leep {DAEMON}|[r]estless |[m]fs(master|chunkserver|mount) "
    ports = "ss -Hltn 'sport >= :12000 and sport < :32000'"  # of the driver moosefs
    look = f"pgrep -fa '{daemons}'; {ports}; grep {MOUNT}/ /proc/mounts; {names}"
    return [
        f"{node}: {line}"
        for node in nodes or site.nodes
        for line in site.run(f"{look}; true", user="root", on=node).stdout.splitlines()
    ]


def runs(site: Site, *options: str, script: str = "exit 0") -> Job:
    """Return a job that asks for it, and runs until `goes`."""
    wait = "date >> begun; until [ -e go ]; do sleep 0.1; done"
    site.run("rm -f go begun")
    job = site.sbatch(f"{wait}; {script}", TWO, WISH, *options)
    wait_until(lambda: begun(site) == 1, HANGS)
    for node in ("n1", "n3"):
        here = left(site, node)
        assert {f"{node}: {folder}/{job.id}" for folder in (MOUNT, DATA, NOTES)} <= {*here}
        assert sum(DAEMON in line for line in here) == 2
    return job


def begun(site: Site) -> int:
    """Return how often the job's script has begun."""
    return len(site.run("cat begun; true").stdout.splitlines())


def goes(site: Site) -> None:
    """Let the job's script end."""
    site.run("touch go")


def ends(site: Site, job: Job) -> None:
    goes(site)
    assert job.wait().state == "COMPLETED"


def fails(site: Site, job: Job) -> None:
    goes(site)
    assert job.wait().exit_code == "3:0"


def is_cancelled(_: Site, job: Job) -> None:
    job.cancel()
    assert job.wait().state == "CANCELLED"


def slurmd_restarts(site: Site, job: Job) -> None:
    before = left(site)
    site.restart_slurmd("n3")
    assert left(site) == before
    ends(site, job)


def time_is_up(site: Site, job: Job) -> None:
    site.run(["scontrol", "update", f"JobId={job.id}", "EndTime=now+1"], user="root")
    assert job.wait().state == "TIMEOUT"


def stop_hangs(site: Site, job: Job) -> None:
    site.shared("hangs").touch()
    ends(site, job)


def a_node_dies(site: Site, job: Job, node: str = "n3") -> None:
    with site.rebooting(node):
        down = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"]
        site.run(down, user="root")
        assert job.wait(60).state == "NODE_FAIL"
    site.revive()


def the_first_node_dies(site: Site, job: Job) -> None:
    a_node_dies(site, job, "n1")


@pytest.mark.parametrize(
    ("end", "shared_site"),
    [
        (ends, "user"),
        (fails, "user"),
        (is_cancelled, "user"),
        (slurmd_restarts, "user"),
        (stop_hangs, "user"),
        (a_node_dies, "root"),
        (the_first_node_dies, "user"),
        pytest.param(time_is_up, "user", marks=pytest.mark.nightly),
    ],
    indirect=["shared_site"],
)
def test_nothing_outlives_a_job(shared_site: Site, end: Callable[[Site, Job], None]) -> None:
    script = "exit 3" if end is fails else "exit 0"
    job = runs(shared_site, "--no-requeue", script=script)
    end(shared_site, job)
    wait_until(lambda: left(shared_site) == [], HANGS)


def test_only_jobs_that_ask_get_one(shared_site: Site) -> None:
    job = shared_site.sbatch("srun true; echo ${STAGE_SHARED-none}", TWO)
    assert (job.wait().state, job.output()) == ("COMPLETED", "none\n")
    assert not shared_site.path("n1", "/nvme/calls").exists()
    job = shared_site.sbatch("echo $STAGE_SHARED", TWO, WISH)
    assert job.wait().state == "COMPLETED"
    assert job.output().endswith(f"\n{MOUNT}/{job.id}\n")
    shared_site.await_epilogs()
    for node in ("n1", "n3"):
        calls = shared_site.path(node, "/nvme/calls").read_text().splitlines()
        assert [call.split()[:4] for call in calls] == [
            [action, job.id, "n1", "n3"] for action in ("start", "stop")
        ]


def test_a_start_that_fails_half_way_is_told_and_undone(shared_site: Site) -> None:
    shared_site.shared("fails").write_text("n1 n3")
    job = shared_site.sbatch("echo started", TWO, WISH)
    assert job.wait().state == "FAILED"
    assert re.search(
        r"^stage: n.* the filesystem of the job's disks did not start: no disk answers;",
        job.output(),
    )
    assert "\nstarted" not in job.output()
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize(
    ("shared_site", "nodes"), [("user", "n3"), ("root", "n[1,3]")], indirect=["shared_site"]
)
def test_a_driver_that_mounts_nothing_is_told(shared_site: Site, nodes: str) -> None:
    shared_site.shared("bare").touch()
    job = shared_site.sbatch("echo started", f"-w{nodes}", WISH)
    assert job.wait().state == "FAILED"
    assert job.output() == (
        f"stage: {nodes}: {MOUNT}/{job.id}: the driver of [shared_fs] has mounted nothing there; "
        "tell the administrator to look at it\n"
        "stage: the job's own program was not started (exit code 6)\n"
    )
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["root"], indirect=True)
def test_a_driver_that_mounts_another_filesystem_on_each_node_is_told(shared_site: Site) -> None:
    job = shared_site.sbatch("echo started", TWO, "--stage=/etc/hosts:shared:/")
    assert job.wait().state == "FAILED"
    assert job.output().splitlines()[-2:] == [
        (
            f"stage: n1: {MOUNT}/{job.id}: the job's nodes do not see one filesystem there; tell "
            "the administrator to look at the driver of [shared_fs]"
        ),
        "stage: the job's own program was not started (exit code 6)",
    ]
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["root"], indirect=True)
def test_what_has_no_room_there_needs_more_nodes(shared_site: Site) -> None:
    shared_site.shared("size").write_text("20M")
    shared_site.run("rm -f /shared/large; head -c 40M /dev/zero >/shared/large")
    job = shared_site.sbatch("echo started", "-wn3", "--stage=/shared/large:shared:/")
    assert job.wait().state == "FAILED"
    assert job.output() == (
        f"stage: {MOUNT}/{job.id}: filesystem of the disks of one node, 20.0 MiB of 20.0 MiB free\n"
        f"stage: n3: {MOUNT}/{job.id}: not enough room: 40.0 MiB needed, 20.0 MiB free, of which "
        "this site keeps 1.0 MiB free, 21.0 MiB still missing; the whole disk has only 20.0 MiB: "
        "ask for more by --nodes, or stage less\n"
        "stage: the job's own program was not started (exit code 5)\n"
    )
    wait_until(lambda: left(shared_site) == [], HANGS)


def test_no_node_may_leave_as_its_part_of_the_data_would_go_too(shared_site: Site) -> None:
    shared_site.shared("fails").write_text("n3")
    job = shared_site.sbatch("echo started", TWO, WISH, "--stage-tolerate=1")
    assert job.wait().state == "FAILED"
    assert (
        "1 of 2 nodes has failed, and none may (the job's filesystem is on all its nodes)"
        in job.output()
    )
    wait_until(lambda: left(shared_site) == [], HANGS)


def test_two_jobs_on_the_same_nodes_do_not_meet(shared_site: Site) -> None:
    first = runs(shared_site)
    before = {*left(shared_site)}
    second = shared_site.sbatch("true", TWO, WISH)
    assert second.wait().state == "COMPLETED"
    shared_site.await_epilogs()
    assert {*left(shared_site)} == before
    ends(shared_site, first)
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["user"], indirect=True)
def test_what_does_not_go_is_removed_after_a_later_job(shared_site: Site) -> None:
    job = runs(shared_site)
    stuck = f"{DATA}/{job.id}/stuck"
    mount = f"mkdir {stuck} {stuck}2; touch {stuck}/file; mount -t tmpfs none {stuck}2"
    shared_site.run(mount, user="root", on="n3")
    ends(shared_site, job)
    wait_until(lambda: len(left(shared_site)) == 2, HANGS)
    assert left(shared_site) == [f"n3: {DATA}/{job.id}", f"n3: {NOTES}/{job.id}"]
    shared_site.run(f"rm -r {stuck}", user="root", on="n3")
    shared_site.sbatch("true", TWO, WISH).wait()
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["user"], indirect=True)
def test_a_script_that_names_it_in_a_stage_line_gets_one(shared_site: Site) -> None:
    text = "#!/bin/sh\n#STAGE :shared:/scratch\nls $STAGE_SHARED; exit 4\n"
    shared_site.shared("script").write_text(text)
    command = f"sbatch -W -o out {TWO} /shared/script with arguments"
    sent = shared_site.run(command, check=False)
    assert sent.returncode == 4
    assert shared_site.run("tail -1 out").stdout == "scratch\n"
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["user"], indirect=True)
def test_another_user_gets_nothing_of_it(shared_site: Site) -> None:
    first = runs(shared_site)
    mount, data, note = (f"{folder}/{first.id}" for folder in (MOUNT, DATA, NOTES))
    before = {*left(shared_site)}
    attacks = [f"{attack} {own}" for attack in ("ls", "cd", "rmdir") for own in (mount, data)]
    attacks += [f"mv {own} {own}0" for own in (mount, data, note)]
    attacks += [f"mkdir {folder}/1234" for folder in (MOUNT, DATA, NOTES)]
    attacks += [f"ln -s /etc {folder}/1234" for folder in (MOUNT, DATA, NOTES)]
    attacks += [f"ls {NOTES}", f"rm -f {note}", f"echo >>{note}"]
    each = "".join(f"({attack}) && echo '{attack}' done\n" for attack in attacks)
    tried = shared_site.run(f"{each}true", user="bob", on="n1")
    assert (tried.stdout, tried.stderr.count("\n") >= len(attacks)) == ("", True)
    hand = {"STAGE_JOB": first.id, "STAGE_SHARED": mount, "STAGE_MOUNT": mount}
    hand |= {"STAGE_FOLDER": data, "STAGE_UID": "5001", "STAGE_SHARED_JOB": first.id}
    hand |= {"SPANK_STAGE_SHARED": first.id, "SLURM_SPANK_STAGE_SHARED": first.id}
    script = f"{STAGECTL} stage /etc/hosts:shared:/x; echo $? $STAGE_SHARED"
    script = f"echo $STAGE_SHARED; export SLURM_JOB_ID={first.id} SLURM_JOBID={first.id}; {script}"
    second = shared_site.sbatch(script, TWO, WISH, user="bob", env=hand)
    assert second.wait().state == "COMPLETED"
    assert f"\n{MOUNT}/{second.id}\n" in second.output()
    assert second.output().endswith(f"\n8 {MOUNT}/{second.id}\n")
    shared_site.await_epilogs()
    assert {*left(shared_site)} == before
    ends(shared_site, first)
    wait_until(lambda: left(shared_site) == [], HANGS)


@pytest.mark.parametrize("shared_site", ["user"], indirect=True)
def test_what_a_user_puts_into_it_leads_its_removal_nowhere(shared_site: Site) -> None:
    """Links, and mounts of his own."""
    make = "mkdir -m 777 /nvme/open; mkdir /nvme/kept; touch /nvme/kept/file"
    shared_site.run(make, user="root", on="n1")
    shared_site.run("touch /nvme/open/file", on="n1")
    see = "stat -c '%n %A %U' /nvme/open /nvme/kept /nvme/*/file"
    before = shared_site.run(see, on="n1").stdout
    script = f"""
    cd {DATA}/$SLURM_JOB_ID || exit
    mkdir -p mounted/here linked && ln -s /nvme/open /nvme/kept linked
    fusermount3 -u $STAGE_SHARED && /shared/restless /nvme $STAGE_SHARED &&
    /shared/restless /nvme $PWD/mounted/here && ls mounted/here/open $STAGE_SHARED/kept
    """
    job = runs(shared_site, script=script)
    ends(shared_site, job)
    assert job.output().count("file\n") == 2
    wait_until(lambda: left(shared_site) == [], HANGS)
    assert shared_site.run(see, on="n1").stdout == before


@pytest.mark.nightly
@pytest.mark.parametrize("shared_site", ["user"], indirect=True)
def test_a_requeued_job_gets_another_one(shared_site: Site) -> None:
    shared_site.reconfigure("PrologFlags=Alloc\n")
    try:
        job = runs(shared_site, "--requeue")
        job.requeue()
        wait_until(lambda: begun(shared_site) == 2, HANGS)
        ends(shared_site, job)
    finally:
        shared_site.reconfigure()
    wait_until(lambda: left(shared_site) == [], HANGS)
