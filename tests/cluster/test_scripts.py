"""What people copy by hand in their job scripts, as lines of `--stage` on the sites where they do.

What the cases of others cover is with these: a job's folder after a requeue, with `%r`, and a
folder by array task in `test_shapes`; two jobs that stage one file at once in `test_failures`;
names that a job cannot fill in in `test_names`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cluster import shapes
from tests.cluster.cluster import FINAL_STATES, CommandFailed, Job
from tests.cluster.mid_transfer import SLOW, slow_source
from tests.cluster.processes import is_rank, processes
from tests.cluster.site import POLICY, wait_until
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.cluster.shapes import Shape
    from tests.cluster.site import Site

DATA = "/shared/prj"
#: How lines begin that no script writes; srun may say that the step before has not ended yet.
OURS = ("stage: ", "srun: ")
VARIABLE = POLICY + '[variables]\nSLURM_TMPDIR = "/nvme/%u"\n'
KNOWN = (
    "known: $SLURM_TMPDIR $USER $SLURM_JOB_ID $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID "
    "$SLURM_JOB_NAME $SLURM_RESTART_COUNT"
)
DISKS = "this site's disks"
NO_CONDA = "'conda' is not one of auto, no"
IN_SCRIPT = "(for a variable that only the script knows, run stagectl stage in the script)"
OPTIONS = (
    "known: validate, verify, lifetime, relocate, include, exclude, extract, decompress, mode, by, "
    "share, layout, links, replace, via, as. If not, write \\, where it is part of a path (in an "
    "#SBATCH line \\\\,)"
)
OUTSIDE = (
    "is not beneath a folder that this site stages to; choose a destination beneath /nvme; if you "
    "wrote a variable, put the value in single quotes"
)


@pytest.fixture(autouse=True)
def _sources(site: Site) -> Iterator[None]:
    site.run(f"mkdir -p {DATA}/run/proj /shared/elsewhere ~/data; echo x > {DATA}/run/x.inp")
    yield
    site.run(f"rm -rf {DATA} /shared/elsewhere /shared/results ~/data", check=False)


def pack(site: Site, path: str, kind: str, *members: str) -> None:
    """Make an archive of a kind of shutil's; each member's content is its name."""
    archive = site.path("login", path)
    folder = archive.with_name(f"{archive.name} packed")
    for member in members:
        (folder / member).parent.mkdir(parents=True, exist_ok=True)
        (folder / member).write_text(f"{member}\n")
    shutil.make_archive(str(archive), kind, folder)


def submitted(site: Site, line: str, script: str, folder: str = f"{DATA}/run") -> Job:
    """Return the job that a command line of a user's shell, which ends in job.sh, submits."""
    site.run(["tee", f"{folder}/job.sh"], input=f"#!/bin/bash\n{script}\n")
    done = site.run(line, cwd=folder)
    return Job(site, done.stdout.split()[-1], done.stderr)


# ------------------------------------------------------- cases 1 to 3, 5, 8, 11 and 12

BY_JOB = f"""#SBATCH --nodes=4 --chdir=/shared/elsewhere
#SBATCH --stage={DATA}/train.tar:$SLURM_TMPDIR/train,extract
#SBATCH --stage=~/data/top.zip:$SLURM_TMPDIR/records,extract
#SBATCH --stage=~/data/flat.zip:$SLURM_TMPDIR/flat,extract
#SBATCH --stage=proj/.venv:$SLURM_TMPDIR/venv
#SBATCH --stage={DATA}/a.zip:$SLURM_TMPDIR/set/a,extract;{DATA}/b.zip:$SLURM_TMPDIR/set/b,extract
set -e
results() {{
    kill $program
    to=/shared/results/$SLURM_JOB_ID && mkdir -p $to
    srun sh -c "mv $SLURM_TMPDIR/out $to/\\$SLURMD_NODENAME"
    exit 0
}}
trap results USR1
srun bash -c 'cd $SLURM_TMPDIR && cat train/train/1 records/top/é flat/ü set/[ab]/? $1/$1 &&
    venv/bin/python -c "import sys; print(sys.prefix)" && venv/bin/tool' sh $1
srun bash -c 'echo result of $SLURMD_NODENAME > $SLURM_TMPDIR/out'
sleep 600 & program=$!
echo started
wait
"""
SEEN = ["a", "b", "birds", "top/é", "train/1", "ü"]


@pytest.mark.parametrize("make", [shapes.alliance, repeated(shapes.gres)])
def test_one_line_each_for_what_is_copied_to_the_jobs_folder(
    site: Site, make: Callable[[Site], AbstractContextManager[Shape]]
) -> None:
    pack(site, f"{DATA}/train", "tar", "train/1")
    pack(site, f"{DATA}/birds", "gztar", "birds")
    for name in "ab":
        pack(site, f"{DATA}/{name}", "zip", name)
    pack(site, "/home/alice/data/top", "zip", "top/é")
    pack(site, "/home/alice/data/flat", "zip", "ü")
    env = f"{DATA}/run/proj/.venv"
    site.run(f"/usr/bin/python3 -m venv --without-pip {env} && touch {env}/bin/tool")
    tool = site.path("login", f"{env}/bin/tool")
    tool.write_text(f"#!{env}/bin/python3\nimport sys; print(sys.executable)\n")
    tool.chmod(0o755)
    with make(site) as shape:
        site.write_policy(shape.policy())
        before = shape.contents(site)
        line = f'"--stage={DATA}/$n.tar.gz:\\${shape.variable}/,extract" {" ".join(shape.request)}'
        script = BY_JOB.replace("SLURM_TMPDIR", shape.variable)
        job = submitted(site, f"n=birds; sbatch -o job.out {line} job.sh $n", script)
        job.wait_for(
            lambda record: record["JobState"] in FINAL_STATES or "started\n" in job.output()
        )
        folder = shape.folder(job, "alice")
        found = [*SEEN, f"{folder}/venv", f"{folder}/venv/bin/python3"]
        lines = [line for line in job.output().splitlines() if not line.startswith(OURS)]
        assert sorted(lines) == sorted([*found * 4, "started"])
        moved = [line.split(": ")[1:] for line in job.output().splitlines() if " from " in line]
        assert sorted(place for place, _ in moved) == sorted(
            f"{folder}/{name}"
            for name in ("birds", "flat", "records", "set/a", "set/b", "train", "venv")
        )
        assert all(" to n[1-4] (4 nodes) in " in told for _, told in moved)
        site.run(["scancel", "--batch", "--signal=USR1", job.id])
        assert job.wait().exit_code == "0:0", job.output()
        results = site.run(f"cd /shared/results/{job.id} && tail -n+1 *").stdout
        assert results == "\n".join(f"==> {node} <==\nresult of {node}\n" for node in site.nodes)
        site.await_epilogs()
        assert shape.contents(site) == before


# -------------------------------------------------------------------- cases 4 and 7

SCRATCH = f"""#!/bin/bash
#SBATCH -N2 -wn[1-2]
#SBATCH --stage={DATA}/env.tar.bz2:/lscratch/%u/env,extract
#SBATCH --stage={SLOW}:/lscratch/%u/set
srun sh -c 'cat /lscratch/alice/env/tool && ls /lscratch/alice/set'
"""


def test_a_killed_job_leaves_no_lock_in_the_users_folder(site: Site) -> None:
    pack(site, f"{DATA}/env", "bztar", "tool")
    writes = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q /.slurm-stage/5001/partial/.*data"
    with shapes.user(site) as shape, slow_source(site, 8 << 20):
        site.write_policy(shape.policy())
        before = shape.contents(site)
        first = site.sbatch(SCRATCH)
        wait_until(lambda: site.run(writes, user="root", on="n2", check=False).returncode == 0)
        [rank] = [one for one in processes(site) if one.node == "n2" and is_rank(one)]
        os.kill(rank.pid, signal.SIGSTOP)
        second = site.sbatch(SCRATCH)
        second.wait_for(lambda _: f"waiting for job {first.id} on n" in second.output())
        rank.kill()
        assert first.wait().state == "FAILED"
        assert second.wait().exit_code == "0:0", second.output()
        lines = [line for line in second.output().splitlines() if not line.startswith(OURS)]
        assert sorted(lines) == ["data", "data", "tool", "tool"]
        site.await_epilogs()
        assert shape.contents(site) == before


# -------------------------------------------------------------------- cases 9 and 10


def test_the_tasks_of_an_array_share_a_folder_of_the_array(site: Site) -> None:
    text = f"""#!/bin/bash
#SBATCH --array=1-3 --nodelist=n1 --stage={DATA}/run/x.inp:/nvme/%u/%A/index
cat /nvme/alice/$SLURM_ARRAY_JOB_ID/index
"""
    job = site.sbatch(text)
    assert job.wait().exit_code == "0:0", job.output()
    said = job.output()
    assert (said.count(" to n1 in "), said.count(", nothing moved"), said.count("x\n")) == (1, 2, 3)


def test_a_requeued_job_works_in_a_new_copy_of_its_submit_folder(site: Site) -> None:
    script = """#SBATCH --nodelist=n1 --requeue --open-mode=append --output=job.out
#SBATCH --stage=.:/nvme/%u/%j/%r,exclude=*.out
cd /nvme/alice/$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0} && ls
echo y >> x.inp && echo result > result
echo started ${SLURM_RESTART_COUNT:-0}
[ "$SLURM_RESTART_COUNT" ] || exec sleep 600
"""
    job = submitted(site, "sbatch job.sh", script)
    job.wait_for(lambda _: "started 0\n" in job.output())
    job.requeue()
    state = job.wait()
    assert (state.exit_code, state.restarts) == ("0:0", 1)
    ours = re.sub(r"(?m)^(stage|srun|slurmstepd)\S*: .*\n", "", job.output())
    assert ours == "job.sh\nproj\nx.inp\nstarted 0\njob.sh\nproj\nx.inp\nstarted 1\n"
    assert site.path("n1", f"/nvme/alice/{job.id}/0/result").exists()


# -------------------------------------------------------------------- what is refused


def refused(site: Site, line: str, script: str = "true", **env: str) -> str:
    """Return what sbatch says that refuses a job, submitted from a folder by a user's shell."""
    site.run(["tee", f"{DATA}/run/job.sh"], input=f"#!/bin/bash\n{script}\n")
    with site.policy(VARIABLE), pytest.raises(CommandFailed) as caught:
        site.run(line, cwd=f"{DATA}/run", env=env)
    return caught.value.stderr


@pytest.mark.parametrize(
    ("value", "at", "problem"),
    [
        ("x:$SLURM_TMPDIRR/x", "$", (
            f"$SLURM_TMPDIRR is no variable of {DISKS}; did you mean $SLURM_TMPDIR? {IN_SCRIPT}"
        )),
        ("x:$LOCAL/x", "$", f"$LOCAL is no variable of {DISKS}; {KNOWN} {IN_SCRIPT}"),
        ("x:$SLURM_TMPDIR/%N", "%", (
            "%N is not filled in, as the path is one for all nodes and tasks; known: %u %U %j %A "
            "%a %x %r; write \\% for a percent sign"
        )),
        ("/data/$1.tar.gz:/nvme/,extract", "$", (
            "only a shell fills in '$1': give --stage on sbatch's command line, in double quotes, "
            "or write \\$1 for these characters"
        )),
        ("$SLURM_TMPDIR/out:/shared/out", "$", (
            "$SLURM_TMPDIR is on each node's own disk, from which nothing is copied back; have the "
            "script move results to shared storage"
        )),
        ("a.tar:/nvme/a,extract,strip=1", "strip", f"unknown option 'strip'; {OPTIONS}"),
        (".:/nvme/%u/%j,work,exclude=*.out", "work", f"unknown option 'work'; {OPTIONS}"),
        ("env.tar.gz:/nvme/env,extract,relocate=conda", "conda", NO_CONDA),
        ("env.tar.gz.old:/nvme/env,extract", "env", (
            "'extract' needs an archive as source: .tar.gz .tgz .tar.zst .tzst .tar.xz .txz "
            ".tar.bz2 .tbz2 .tbz .tar .zip"
        )),
    ],
)  # fmt: skip
def test_a_line_that_no_site_can_fill_in_is_refused_by_sbatch(
    site: Site, value: str, at: str, problem: str
) -> None:
    caret = f"{' ' * (2 + value.index(at))}^"
    script = f"#SBATCH --stage={value}"
    assert refused(site, "sbatch job.sh", script) == f"stage: {problem}\n  {value}\n{caret}\n"


def test_three_archives_in_one_folder_are_refused(site: Site) -> None:
    listed = ";".join(f"/prj/{name}.zip:$SLURM_TMPDIR/set,extract" for name in "abc")
    said = (
        "stage: /nvme/alice/set is the destination of two directives: from /prj/a.zip "
        "(validate=stat, extract) and from /prj/{}.zip (validate=stat, extract); remove one of "
        "them, or change its destination\n"
    )
    lines = said.format("b") + said.format("c")
    assert refused(site, "sbatch job.sh", f"#SBATCH --stage={listed}") == lines


def test_a_variable_that_the_login_nodes_shell_replaced_is_told(site: Site) -> None:
    line = "sbatch --stage=/a:$SLURM_TMPDIR/a job.sh"
    assert refused(site, line) == f"stage: /a {OUTSIDE}\n"
    outside, _, _ = OUTSIDE.rpartition("; ")
    assert refused(site, line, SLURM_TMPDIR="/tmp") == (
        f"stage: /tmp/a {outside}; /tmp is what $SLURM_TMPDIR is here: put the value in single "
        "quotes if you wrote this variable\n"
    )


def test_a_star_is_answered_with_the_folder(site: Site) -> None:
    job = submitted(site, "sbatch -wn1 -o job.out --stage='*:/nvme/%u/' job.sh", "true")
    remedy = f"patterns are not expanded: stage the folder {DATA}/run\n"
    path = f"{DATA}/run/*"
    assert job.message == f"stage: warning: {path}: not seen from this machine; {remedy}"
    assert job.wait().exit_code == "4:0"
    assert job.output() == (
        f"stage: n1: {path}: No such file or directory; {remedy}"
        "stage: the job's own program was not started (exit code 4)\n"
    )
