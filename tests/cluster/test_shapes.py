"""Sites that give their jobs a disk in another way than a folder that stays (`shapes`).

At each, one line in a script stages into the folder that the site gives to the job, and nothing of
it remains when the site takes the folder away.
"""

from __future__ import annotations

import re
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import shapes
from tests.cluster.cluster import FINAL_STATES
from tests.cluster.mid_transfer import SLOW, slow_source
from tests.cluster.site import STAGECTL, wait_until
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.cluster.cluster import Job
    from tests.cluster.shapes import Shape
    from tests.cluster.site import Site

    Make = Callable[[Site], AbstractContextManager[Shape]]

NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"
needs_cgroups = pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
    reason="Slurm needs systemd for the memory limits of cgroup v2",
)


@pytest.fixture(scope="module", autouse=True)
def _sources(tidied_site: Site) -> None:
    for user in ("alice", "bob"):
        folder = tidied_site.shared(user)
        (folder / "dir/sub").mkdir(parents=True)
        (folder / "dir/sub/member").write_text(f"folder of {user}\n")
        (folder / "f").write_text(f"file of {user}\n")
        with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
            archive.add(folder / "f", "packed")
    tidied_site.run("/usr/bin/python3 -m venv --without-pip /shared/env")


def script(shape: Shape, user: str) -> str:
    """Return a script that says what it finds, and does not end before /shared/go is there."""
    folder, source = f"${shape.variable}", f"/shared/{user}"
    wanted = (
        f"{source}/f:{folder}/f;{source}/dir:{folder}/dir;"
        f"{source}/a.tar.gz:{folder}/a,extract;/shared/env:{folder}/env"
    )
    return f"""#!/bin/bash
#SBATCH {" ".join(shape.request)}
#SBATCH --stage={wanted}
srun bash -c 'cd {folder} && cmp {source}/f f && cmp {source}/f a/packed &&
    diff -r {source}/dir dir && env/bin/python -c "import sys; print(sys.prefix)"'
srun '--stage={source}/f:{folder}/f' true
echo started ${{SLURM_RESTART_COUNT:-0}}
until [ -e /shared/go ]; do sleep 0.1; done
"""


def await_start(job: Job) -> None:
    """Wait until a `script` has staged in its present run."""

    def started(record: dict[str, str]) -> bool:
        return record["JobState"] in FINAL_STATES or start(record) in job.output()

    job.wait_for(started, 90)


def start(record: dict[str, str]) -> str:
    """Return what a `script` writes when it has staged."""
    return f"started {record['Restarts']}\n"


def told(job: Job) -> list[str]:
    """Return what a job of `script` has written, but for what says that nothing was to be done."""
    moved = re.compile(r"stage: (\S+): .* (from \S+ to \S+)( \(2 nodes\))? in .*")
    # On a busy machine srun says that the step before has not ended yet.
    idle = re.compile(r"srun: .*|stage: \S+: (note: .*|current on .*, nothing moved .*)")
    lines = [line for line in job.output().splitlines() if not idle.fullmatch(line)]
    return sorted(moved.sub(r"\1 \2", line) for line in lines)


def expected(shape: Shape, job: Job, user: str, nodes: str, count: int) -> list[str]:
    """Return what it should have written on so many nodes."""
    folder, source = shape.folder(job, user), f"/shared/{user}"
    return sorted(
        [
            f"{folder}/f from {source}/f to {nodes}",
            f"{folder}/dir from {source}/dir to {nodes}",
            f"{folder}/a from {source}/a.tar.gz to {nodes}",
            f"{folder}/env from /shared/env to {nodes}",
            *[f"{folder}/env"] * count,
            start(job.info()).rstrip(),
        ]
    )


@pytest.mark.parametrize(
    "make",
    [
        shapes.alliance,
        repeated(partial(shapes.alliance, first=True)),
        shapes.gres,
        shapes.job_container,
        shapes.auto_tmpdir,
        partial(shapes.auto_tmpdir, first=True),
        pytest.param(shapes.ram, marks=needs_cgroups),
        shapes.user,
    ],
    ids=[
        "alliance",
        "alliance_first",
        "gres",
        "job_container",
        "auto_tmpdir",
        "auto_tmpdir_first",
        "ram",
        "user",
    ],
)
def test_one_line_stages_into_the_folder_that_the_site_gives_to_the_job(
    site: Site, make: Make
) -> None:
    with make(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        site.run("rm -f /shared/go")
        two = site.sbatch(script(shape, "alice"), "-N2", "-wn[1-2]")
        one = site.sbatch(script(shape, "bob"), "-N1", "-wn1", user="bob")
        await_start(two)
        await_start(one)
        assert told(two) == expected(shape, two, "alice", "n[1-2]", 2)
        assert told(one) == expected(shape, one, "bob", "n1", 1)
        one.cancel()
        two.requeue()
        await_start(two)
        assert told(two) == expected(shape, two, "alice", "n[1-2]", 2)
        site.run("touch /shared/go")
        assert two.wait().exit_code == "0:0"
        assert one.wait().state == "CANCELLED"
        site.await_epilogs()
        assert shape.contents(site) == before
        assert site.left_behind() == []


def test_a_users_next_job_finds_the_folder_of_the_first(site: Site) -> None:
    with shapes.user(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        site.run("rm -f /shared/go")
        first = site.sbatch(script(shape, "alice"), "-N2", "-wn[1-2]")
        await_start(first)
        line = f"#!/bin/bash\n#SBATCH --stage=/shared/alice/f:${shape.variable}/f\n"
        second = site.sbatch(line, "-N2", "-wn[1-2]")
        assert second.wait().exit_code == "0:0"
        assert re.fullmatch(
            r"stage: /lscratch/alice/f: current on n\[1-2\] \(2 nodes\), nothing moved .*\n",
            second.output(),
        )
        site.await_epilogs()
        assert site.path("n2", "/lscratch/alice/f").exists()
        site.run("touch /shared/go")
        assert first.wait().exit_code == "0:0"
        site.await_epilogs()
        assert shape.contents(site) == before


@pytest.mark.nightly  # as after a requeue, but Slurm itself ends the job
def test_a_job_that_lost_a_node_stages_again(site: Site) -> None:
    with shapes.alliance(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        site.run("rm -f /shared/go")
        job = site.sbatch(script(shape, "alice"), "-N2", "-wn[1-2]")
        await_start(job)
        down = ["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test"]
        site.run(down, user="root")
        job.wait_for(lambda record: record["JobState"] == "PENDING")
        site.resume()
        job.start_again()
        await_start(job)
        assert told(job) == expected(shape, job, "alice", "n[1-2]", 2)
        site.run("touch /shared/go")
        assert job.wait().exit_code == "0:0"
        site.await_epilogs()
        assert shape.contents(site) == before


def test_all_tasks_of_a_first_step_are_told_the_end_of_its_stage(site: Site) -> None:
    """Also where the site gives each step mounts of its own before anything is mounted for it."""
    with shapes.auto_tmpdir(site) as shape:
        site.write_policy(shape.policy())
        line = ["salloc", "-N2", "-n4", "-wn[1-2]", "--stage=/shared/alice/f:$TMPDIR/f,as=f"]
        done = site.run([*line, "srun", "bash", "-c", "cat $STAGE_f"], timeout=60)
        assert done.stdout == "file of alice\n" * 4
        site.await_epilogs()
        assert site.left_behind() == []


def test_each_task_of_an_array_has_its_own(site: Site) -> None:
    site.run("cd /shared/alice && cp f in.1 && cp a.tar.gz in.2", user="root")
    text = """#!/bin/bash
#SBATCH --array=1-2 --nodelist=n1
#SBATCH --stage=/shared/alice/in.%a:$SLURM_TMPDIR/in
cmp /shared/alice/in.$SLURM_ARRAY_TASK_ID $SLURM_TMPDIR/in && ls $SLURM_TMPDIR
"""
    with shapes.alliance(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        job = site.sbatch(text)
        assert job.wait().exit_code == "0:0", job.output()
        assert job.output().count("\nin\n") == 2
        site.await_epilogs()
        assert shape.contents(site) == before


@pytest.mark.parametrize(
    "make",
    [shapes.alliance, repeated(shapes.gres), shapes.auto_tmpdir, repeated(shapes.user)],
    ids=["alliance", "gres", "auto_tmpdir", "user"],
)
def test_a_job_that_is_cancelled_while_it_stages_leaves_nothing(site: Site, make: Make) -> None:
    writes = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q /.slurm-stage/5001/partial/"
    with make(site) as shape, slow_source(site, 30 << 20):
        site.write_policy(shape.policy())
        before = shape.contents(site)
        text = f"#!/bin/bash\n#SBATCH --stage={SLOW}/data:${shape.variable}/data\n"
        job = site.sbatch(text, "-N2", "-wn[1-2]", *shape.request)
        wait_until(lambda: site.run(writes, user="root", on="n2", check=False).returncode == 0)
        job.cancel()
        assert job.wait().state == "CANCELLED"
        site.assert_healthy(30)
        assert shape.contents(site) == before


def test_a_job_is_told_how_to_ask_for_a_folder_or_more_room(site: Site) -> None:
    site.run("head -c 50M /dev/urandom > /shared/large")
    text = "#!/bin/bash\n#SBATCH --stage=/shared/large:$LSCRATCH/large\n"
    with shapes.gres(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        absent = site.sbatch(text, "-N2", "-wn[1-2]")
        assert absent.wait().exit_code == "6:0"
        assert absent.output() == (
            f"stage: n[1-2]: there is no {shape.folder(absent, 'alice')}: ask for it by "
            f"--gres=lscratch:MB\n{NOT_STARTED.format(6)}"
        )
        full = site.sbatch(text, "-N2", "-wn[1-2]", *shape.request)
        assert full.wait().exit_code == "5:0"
        begin = f"stage: n[1-2]: {shape.folder(full, 'alice')}: not enough room: "
        assert full.output().startswith(begin)
        end = f": ask for more by --gres=lscratch:MB, or stage less\n{NOT_STARTED.format(5)}"
        assert full.output().endswith(end)
        assert "larger disks" not in full.output()
        site.await_epilogs()
        assert shape.contents(site) == before


def test_a_jobs_own_folder_is_looked_after_from_elsewhere(site: Site) -> None:
    with shapes.job_container(site) as shape:
        site.write_policy(shape.policy())
        site.run("rm -f /shared/go")
        job = site.sbatch(script(shape, "alice"), "-N1", "-wn1")
        await_start(job)

        def told(command: str, *arguments: str, on: str = "login") -> str:
            words = [STAGECTL, command, f"--job={job.id}", *arguments]
            done = site.run(words, on=on, check=False)
            return done.stdout + done.stderr

        other_job = ["srun", "-N1", "-wn2", STAGECTL, "status", f"--job={job.id}"]
        for shown in (told("status"), told("status", on="n1"), site.run(other_job).stdout):
            assert re.search(r"^n1 +/tmp/f .* ready ", shown, re.MULTILINE)
            assert shown.endswith(f"/tmp: as seen in job {job.id}\n")
        for command, done in (("verify", "verified"), ("pin", "pinned"), ("unpin", "unpinned")):
            assert told(command, "/tmp/f") == f"stage: /tmp/f: {done} on n1\n"
        assert told("evict", "/tmp/f") == "stage: /tmp/f: evicted on n1\n"
        assert "/tmp/f " not in told("status")
        told("stage", "/shared/alice/f:/tmp/g,lifetime=job")
        second = told("stage", "/shared/bob/f:/tmp/g")
        assert "/tmp/g was staged from /shared/alice/f by this job; " in second
        for by in ("node", "file"):
            shown = told("status", f"--by={by}")
            assert "/tmp/g" in shown
        outside = site.run([STAGECTL, "stage", "--hosts=n1", "/shared/alice/f:/tmp/h"], check=False)
        assert outside.returncode == 3
        assert outside.stderr.endswith("; choose a destination beneath /tmp (in a job)\n")
        site.run("touch /shared/go")
        job.wait()
        assert told("status") == f"stage: job {job.id} is not running: its state is COMPLETED\n"


@needs_cgroups
def test_what_does_not_fit_into_the_memory_of_a_job_is_refused(site: Site) -> None:
    site.run("head -c 310M /dev/urandom > /shared/large")
    text = "#!/bin/bash\n#SBATCH --stage=/shared/large:$RAMDISK/large\n"
    with shapes.ram(site) as shape:
        site.write_policy(shape.policy())
        job = site.sbatch(text, "-N1", "-wn1", *shape.request)
        assert job.wait().exit_code == "5:0"
        refused = re.compile(
            rf"stage: n1: {shape.folder(job, 'alice')}: this folder is in memory, and there is not "
            r"enough: 310\.0 MiB needed, \d+\.\d MiB left of what the job may take on this node; "
            rf"ask for more by --mem, or stage less\n{re.escape(NOT_STARTED.format(5))}"
        )
        assert refused.fullmatch(job.output())
        job = site.sbatch("sleep 600", "-N1", "-wn1", *shape.request)
        job.wait_for(lambda record: record["JobState"] == "RUNNING")
        shown = site.run([STAGECTL, "status", f"--job={job.id}"]).stdout
        free = re.search(rf"^{shape.folder(job, 'alice')}: (.*) MiB free of ", shown, re.MULTILINE)
        assert free
        assert float(free[1]) < 300
