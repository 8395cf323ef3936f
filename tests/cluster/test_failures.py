"""Each failure ends the job with one message, leaves nothing behind and drains no node."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed
from tests.cluster.mid_transfer import (
    BEHIND,
    SERVER,
    SLOW,
    await_transfer,
    receives,
    slow_source,
    stopped,
)
from tests.cluster.site import (
    HANGS,
    PLUGSTACK,
    POLICY,
    PYTHON,
    STAGECTL,
    digest,
    wait_until,
)
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.cluster.site import Site

DATA = "/shared/data"
WISH = f"--stage={DATA}:/nvme/data"
#: Of the nodes the one that launches and another: each further one takes the same time again.
NODES, TWO = ("n1", "n3"), "-wn1,n3"
#: Files whose transfer lasts long enough for anything to happen meanwhile: 40 s, or 2 s.
LARGE, SMALL = f"{SLOW}/data", f"{SLOW}/small"
NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run(f"rm -f {DATA}; head -c 30000000 /dev/urandom > {DATA}")


def fails(site: Site, code: int, message: str, *options: str, script: str = "echo started") -> None:
    """Check that a job fails with this code and just this message, and leaves no copy."""
    job = site.sbatch(script, TWO, *(options or [WISH]))
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", f"{code}:0")
    assert job.output() == f"stage: {message}\n{NOT_STARTED.format(code)}"
    assert set(site.node_states().values()) <= {"idle", "mixed", "allocated", "completing"}
    for node in site.nodes:
        assert not site.copy(node, "/nvme/data").is_file()
        assert site.records(node) == []


def works(site: Site) -> None:
    """Check that a job that stages the same file succeeds."""
    job = site.sbatch("true", TWO, WISH)
    assert job.wait().exit_code == "0:0", job.output()
    for node in NODES:
        assert digest(site.copy(node, "/nvme/data")) == digest(site.path("login", DATA))


@pytest.fixture(scope="module")
def slow(installed_site: Site) -> Iterator[Site]:
    """The site, on whose n1 LARGE and SMALL are."""
    with slow_source(installed_site, 40 << 20):
        installed_site.run(f"head -c {2 << 20} /dev/urandom >{BEHIND}/small")
        yield installed_site


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (
            DATA,
            f"no ':' between source and destination: write SRC:DST\n  {DATA}\n  {' ' * 12}^",
        ),
        (
            f"{DATA}:/nvme/a,validat=size",
            ("unknown option 'validat'; did you mean 'validate'? If not, write \\, where it is "
            "part of a path (in an #SBATCH line \\\\,)\n"
            f"  {DATA}:/nvme/a,validat=size\n  {' ' * 21}^"),
        ),
        (
            f"{DATA}:/nvme/a;/data:nvme/b",
            ("the destination must begin with '/' or a variable of the site, right behind ':': "
            f"write SRC:DST\n  {DATA}:/nvme/a;/data:nvme/b\n  {' ' * 27}^"),
        ),
        (
            f"{DATA}:/nvme/a\nb",
            ("a control character is not allowed in a directive\n"
            f"  {DATA}:/nvme/a?b\n  {' ' * 20}^"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "command", ["sbatch --wrap true", repeated("salloc true"), repeated("srun true")]
)
def test_a_bad_directive_is_refused_at_once(
    site: Site, command: str, value: str, complaint: str
) -> None:
    name, *rest = command.split()
    with pytest.raises(CommandFailed) as refused:
        site.run([name, f"--stage={value}", *rest])
    assert (refused.value.code, refused.value.stdout) == (2, "")
    assert refused.value.stderr == f"stage: {complaint}\n"
    assert site.run(["squeue", "-h"]).stdout == ""


def test_a_destination_outside_of_the_sites_roots_is_refused_at_once(site: Site) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run(["sbatch", f"--stage={DATA}:/home/alice/data", "--wrap", "true"])
    assert refused.value.code == 3
    assert refused.value.stderr == (
        "stage: /home/alice/data is not beneath a folder that this site stages to; "
        "choose a destination beneath /nvme\n"
    )


def test_a_bad_stage_line_fails_the_job(site: Site) -> None:
    job = site.sbatch("#!/bin/bash\n#STAGE /shared/data\necho started\n", "-N1")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "2:0")
    assert job.output() == (
        "stage: no ':' between source and destination: write #STAGE SRC:DST[,key=value…]\n"
        f"  #STAGE /shared/data\n  {' ' * 19}^\n{NOT_STARTED.format(2)}"
    )


def test_a_stage_line_with_a_no_break_space_fails_the_job(site: Site) -> None:
    job = site.sbatch("#!/bin/bash\n#STAGE\u00a0/shared/data:/nvme/data\necho started\n", "-N1")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "2:0")
    assert job.output() == (
        "stage: write a space behind #STAGE: #STAGE SRC:DST[,key=value…]\n"
        f"  #STAGE?/shared/data:/nvme/data\n  {' ' * 6}^\n{NOT_STARTED.format(2)}"
    )


def test_a_missing_source(site: Site) -> None:
    site.path("login", DATA).unlink()
    fails(
        site, 4,
        f"n1: {DATA}: No such file or directory; "
        "check the path, and that the compute nodes mount this filesystem",
    )  # fmt: skip
    site.run(f"echo now > {DATA}")
    works(site)


def test_an_unreadable_source(site: Site) -> None:
    site.path("login", DATA).chmod(0)
    fails(site, 4, f"n1: {DATA}: Permission denied")
    site.path("login", DATA).chmod(0o644)
    works(site)


@pytest.mark.parametrize(("source", "kind"), [("/dev/null", "a character device")])
def test_a_source_that_is_no_plain_file(site: Site, source: str, kind: str) -> None:
    message = f"n1: {source} is {kind}; only a plain file or a folder can be staged"
    fails(site, 4, message, f"--stage={source}:/nvme/data")


def test_a_full_disk_on_one_node(site: Site) -> None:
    with site.nvme("n3", "loop", "20M"):
        job = site.sbatch("echo started", TWO, WISH)
        state = job.wait()
        assert (state.state, state.exit_code) == ("FAILED", "5:0")
        assert re.fullmatch(
            r"stage: n3: /nvme: not enough room: 28\.7 MiB needed, [^,]+ free, [^,]+ still "
            r"missing; the whole disk has only [^:]+: ask for nodes with larger disks, or stage "
            r"less\n" + re.escape(NOT_STARTED.format(5)),
            job.output(),
        )
        assert site.leftovers() == []
        assert [site.records(node) for node in site.nodes] == [[], [], [], []]
        assert not any(site.copy(node, "/nvme/data").exists() for node in site.nodes)
    works(site)


def test_a_full_disk_with_a_current_copy_is_no_failure(site: Site) -> None:
    with site.nvme("n3", "tmpfs", "40M"):
        assert site.sbatch("true", TWO, WISH).wait().exit_code == "0:0"
        site.run("cat /dev/zero > /nvme/bobs", user="bob", on="n3", check=False)
        job = site.sbatch("true", TWO, WISH)
        assert job.wait().exit_code == "0:0", job.output()
        assert "nothing moved" in job.output()
        assert site.leftovers() == []


def test_an_unwritable_destination_on_one_node(site: Site) -> None:
    site.path("n3", "/nvme/data").mkdir(mode=0o755)
    message = "n3: /nvme/data: no permission to write there; choose another destination"
    fails(site, 6, message, f"{WISH}/")
    site.path("n3", "/nvme/data").rmdir()
    site.run("rm -r /nvme/data", user="root", on="n1", check=False)
    works(site)


def test_a_file_on_the_nodes_disk_is_not_staged_over_itself(site: Site) -> None:
    site.run("mkdir /nvme/alice; ln -s alice /nvme/link; echo mine >/nvme/alice/own", on="n1")
    stage = "--stage=/nvme/link/own:/nvme/alice/own,lifetime=job,replace"
    problem = (
        "n1: /nvme/alice/own is the source itself, to which /nvme/link/own leads; choose another "
        "destination"
    )
    fails(site, 6, problem, "-N2", "-wn[1-2]", stage)
    assert site.path("n1", "/nvme/alice/own").read_text() == "mine\n"
    assert not site.path("n2", "/nvme/alice/own").exists()


def test_a_destination_that_belongs_to_another_user(site: Site) -> None:
    site.run("echo bob > /nvme/bobs", user="bob", on="n3")
    message = (
        "n3: /nvme/bobs belongs to bob (uid 5002); choose another destination, such as "
        "/nvme/alice/bobs"
    )
    fails(site, 6, message, f"--stage={DATA}:/nvme/bobs")
    message = (
        "n3: /nvme/bobs is a plain file that belongs to bob (uid 5002), not a folder of yours; "
        "choose another destination"
    )
    fails(site, 6, message, f"--stage={DATA}:/nvme/bobs/data")
    assert site.path("n3", "/nvme/bobs").read_text() == "bob\n"


def test_a_folder_that_another_user_has_closed_is_named_with_its_owner(site: Site) -> None:
    for node in NODES:
        site.run("mkdir --mode=700 /nvme/closed", user="bob", on=node)
    closed = "/nvme/closed belongs to bob (uid 5002), and is closed to you"
    message = f"n[1,3]: {closed}; choose another place"
    fails(site, 6, message, f"--stage={DATA}:/nvme/closed/data")


def test_a_cache_root_that_a_node_lacks(site: Site) -> None:
    with site.policy('roots = ["/nvme", "/nvme2"]\n'):
        fails(
            site, 6, "n[1,3]: /nvme2, where this site stages, cannot be used on this node: "
            "No such file or directory; tell the administrator",
            f"--stage={DATA}:/nvme2/data",
        )  # fmt: skip


def test_the_wrong_mpi_is_named_with_the_remedy(site: Site) -> None:
    with site.policy(POLICY + '[launch]\nmpi = "none"\n'):
        job = site.sbatch("echo started", TWO, WISH)
        state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    message, *_ = job.output().splitlines()
    assert "mpi in the [launch] section of stage.toml may not fit" in message
    works(site)


def test_an_mpi_that_slurm_lacks(site: Site) -> None:
    with site.policy(POLICY + '[launch]\nmpi = "nonsense"\n'):
        job = site.sbatch("echo started", TWO, WISH)
        state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    works(site)


def test_a_broken_policy_is_refused_by_name(site: Site) -> None:
    with site.policy('roots = ["/nvme"]\n[launch]\nmpy = "pmix"\n'):
        with pytest.raises(CommandFailed) as refused:
            site.run(["sbatch", WISH, "--wrap", "true"])
        assert refused.value.code == 3
        assert refused.value.stderr == (
            "stage: /etc/slurm/stage.toml: launch.mpy: unknown key; did you mean mpi? "
            "stage.toml(5) lists all; tell the administrator\n"
        )


def told_of_the_end_of_a_job(site: Site, fault: Callable[[], AbstractContextManager[None]]) -> str:
    """Return what slurmd logs of the clean-up after a job that staged and ends during a fault."""
    job = site.sbatch("touch /shared/begun; sleep 60", "-wn1", WISH)
    job.wait_for(lambda _: site.shared("begun").exists())
    try:
        with fault():
            job.cancel()
            job.wait_for(lambda _: set(site.node_states().values()) == {"idle"})
    finally:
        site.shared("begun").unlink()
    begin = f"stage: cleaning up after job {job.id} failed: "
    _, _, told = (site.base / "log/slurmd-n1.log").read_text().partition(begin)
    works(site)
    return told.splitlines()[0]


def test_a_stage_toml_that_is_gone_when_a_job_ends_is_named_in_slurmds_log(site: Site) -> None:
    config = site.path("login", "/etc/slurm/stage.toml")

    @contextmanager
    def gone() -> Iterator[None]:
        config.rename(f"{config}.away")
        try:
            yield
        finally:
            config.with_name("stage.toml.away").rename(config)

    assert told_of_the_end_of_a_job(site, gone) == (
        "/etc/slurm/stage.toml: No such file or directory; restore it, or correct config= in "
        "plugstack.conf"
    )


def test_a_mistyped_argument_is_named_in_slurmds_log_when_a_job_ends(site: Site) -> None:
    """It leaves the plugin with the default path, which is not what has to be corrected."""
    default = site.path("login", PYTHON)

    @contextmanager
    def mistyped() -> Iterator[None]:
        default.rename(f"{default}.away")
        site.write_plugstack(PLUGSTACK.replace("python=", "pythn="))
        try:
            yield
        finally:
            site.write_plugstack(PLUGSTACK)
            default.with_name("python3.away").rename(default)

    assert told_of_the_end_of_a_job(site, mistyped) == (
        f"plugstack.conf: argument 'pythn={PYTHON}' is not valid; write python=/PATH and "
        "config=/PATH"
    )


def test_an_unknown_argument_in_plugstack_is_refused_by_name(site: Site) -> None:
    site.write_plugstack(PLUGSTACK.replace("config=", "conf="))
    try:
        with pytest.raises(CommandFailed) as refused:
            site.run(["sbatch", "--wrap", "true"])
    finally:
        site.write_plugstack(PLUGSTACK)
    assert (
        "stage: plugstack.conf: argument 'conf=/etc/slurm/stage.toml' is not valid; "
        "write python=/PATH and config=/PATH"
    ) in refused.value.stderr


def test_scancel_during_a_transfer(site: Site, slow: Site) -> None:
    job = site.sbatch("touch /shared/started", "-N4", f"--stage={LARGE}:/nvme/deep/er/data")
    await_transfer(site)
    job.cancel()
    assert job.wait().state == "CANCELLED"
    site.assert_healthy()
    job.wait_for(lambda _: not any(site.path(node, "/nvme/deep").exists() for node in site.nodes))
    assert site.leftovers() == []
    for node in site.nodes:
        assert site.records(node) == []
    assert not site.shared("started").exists()
    works(site)


def test_scancel_of_an_srun_that_holds_many_tasks(site: Site, slow: Site) -> None:
    tasks = ["-N4", "--ntasks-per-node=3", f"--stage={LARGE}:/nvme/data"]
    srun = site.popen(["srun", *tasks, "touch", "/shared/started"])
    wait_for_ranks(site)
    site.run("scancel --user=alice")
    assert srun.wait(timeout=60) != 0
    site.assert_healthy()
    assert site.leftovers() == []
    assert not any(site.copy(node, "/nvme/data").exists() for node in site.nodes)
    assert not site.shared("started").exists()


def test_a_killed_slurmstepd_fails_the_job_though_slurm_would_wait(site: Site, slow: Site) -> None:
    large = f"--stage={LARGE}:/nvme/data"
    job = site.sbatch("touch /shared/started", TWO, "--no-requeue", large)
    wait_for_ranks(site)
    stepd = rf"slurmstepd: .{job.id}.0."
    # A rank that begins after the end of slurmstepd knows that by this variable.
    rank = "tr '\\0' '\\n' </proc/$(pgrep -f '[s]tager.rank')/environ | grep ^STAGE_PARENT="
    number = site.run(["pgrep", "-f", stepd], on="n3", user="root").stdout
    assert site.run(rank, on="n3", user="root").stdout == f"STAGE_PARENT={number}"
    site.run(["pkill", "-9", "-f", stepd], on="n3", user="root")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    lost = "n3: the staging process there was killed, or the node failed; submit again\n"
    assert job.output().startswith(f"stage: staging ended early: {lost}")
    assert not site.shared("started").exists()
    works(site)


def test_what_an_earlier_run_of_the_job_left_on_a_node_does_not_keep_it_from_starting(
    site: Site,
) -> None:
    """PMIx refuses a step whose folder is there: so it is after a requeue, if a node failed."""
    job = site.sbatch("true", TWO, "--hold", WISH)
    site.run(["mkdir", f"/var/spool/slurmd/pmix.{job.id}.0"], on="n3", user="root")
    site.run(f"scontrol release {job.id}", user="root")
    assert job.wait().exit_code == "0:0"
    again, staged = re.findall("^stage: .*", job.output(), re.MULTILINE)
    assert again == "stage: Slurm could not start a process; the staging starts again"
    assert "from /shared/data to n[1,3] " in staged
    site.run(["rmdir", f"/var/spool/slurmd/pmix.{job.id}.0"], on="n3", user="root")


def test_a_killed_rank_fails_the_job_which_tells_what_was_evicted(site: Site, slow: Site) -> None:
    old = site.sbatch("true", "-N4", f"--stage={DATA}:/nvme/old")
    assert old.wait().exit_code == "0:0"
    with site.policy(POLICY + "[cache]\nuser_limit = '50MiB'\n"):
        job = site.sbatch("touch /shared/started", "-N4", f"--stage={LARGE}:/nvme/data")
        await_transfer(site)  # every node has made room
        site.run(["pkill", "-9", "-f", "stager.rank"], on="n3", user="root")
        state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    # Either the rank's neighbours notice first, or Slurm.
    lost = "n3: the staging process there was killed, or the node failed"
    why = rf"({lost}|srun ended with code \d+); submit again\n"
    evicted = r"stage: /nvme/old: evicted on n\[1-4\] \(4 nodes\) to make room\n"
    assert re.match(f"{evicted}stage: staging ended early: {why}", job.output()), job.output()
    assert not site.shared("started").exists()
    works(site)


def wait_for_ranks(site: Site) -> None:
    """Return when the transfer has begun: the first node writes the copy."""
    wait_until(lambda: receives(site, "n1"))


def test_a_source_that_changes_while_it_is_read(site: Site) -> None:
    site.run(f"fallocate -l 200M {DATA}")
    writer = site.popen(f"while sleep 0.05; do touch {DATA}; done")
    try:
        job = site.sbatch("touch /shared/started", "-N2", WISH)
        state = job.wait()
    finally:
        writer.kill()
        writer.wait()
    assert (state.state, state.exit_code) == ("FAILED", "7:0")
    assert job.output().endswith(
        f"stage: n1: {DATA} changed while it was read; submit again when nothing writes to it\n"
        f"{NOT_STARTED.format(7)}"
    )
    works(site)


def test_two_jobs_with_one_destination_wait_for_each_other(site: Site) -> None:
    site.run(f"fallocate -l 3G {DATA}")
    first = site.sbatch("true", "-wn[1-2]", WISH)
    wait_for_ranks(site)
    second = site.sbatch("true", "-wn[2-3]", WISH)
    assert first.wait().exit_code == "0:0"
    assert second.wait().exit_code == "0:0"
    waiting, done = second.output().splitlines()[0], second.output().splitlines()[-1]
    said = rf"stage: /nvme/data: waiting for job {first.id} on n2(, \d+\.\d s so far)?"
    assert re.fullmatch(said, waiting)
    assert "from the copy on n2 to n3 in " in done
    assert done.endswith("; current on n2")


def test_a_wait_that_is_too_long_ends_with_code_9(site: Site, slow: Site) -> None:
    wish = f"--stage={LARGE}:/nvme/data"
    first = site.sbatch("true", "-wn[1-2]", wish)
    wait_for_ranks(site)
    with site.policy("lock_timeout = 1\n" + POLICY):
        second = site.sbatch("touch /shared/started", TWO, wish)
        state = second.wait()
    assert (state.state, state.exit_code) == ("FAILED", "9:0")
    first.cancel()
    first.wait()
    message = second.output().splitlines()[-2]
    assert re.fullmatch(
        rf"stage: n1: /nvme/data is being staged by job {first.id}; "
        r"gave up after waiting \d+\.\d s; submit again when that job has staged it",
        message,
    )
    assert not site.shared("started").exists()


def test_srun_fails_with_the_code_in_all_its_tasks(site: Site) -> None:
    with pytest.raises(CommandFailed) as failed:
        site.run(
            ["srun", "-N4", "-n8", "--stage=/shared/none:/nvme/data", "touch", "/shared/started"]
        )
    assert failed.value.code == 4
    assert (
        "stage: n1: /shared/none: No such file or directory; "
        "check the path, and that the compute nodes mount this filesystem\n"
    ) in failed.value.stderr
    assert not site.shared("started").exists()


def test_srun_ends_soon_when_the_launch_fails(site: Site) -> None:
    """The waiting tasks on all nodes get the error, though no rank ever started there."""
    begun = time.monotonic()
    with site.policy(POLICY + '[launch]\nmpi = "none"\n'), pytest.raises(CommandFailed) as failed:
        site.run(["srun", "-N4", "-n8", WISH, "touch", "/shared/started"])
    assert failed.value.code == 8
    assert time.monotonic() - begun < HANGS
    assert not site.shared("started").exists()


def test_srun_ends_soon_when_the_first_node_has_another_stage_toml(site: Site) -> None:
    """The waiting tasks on other nodes are ended, and srun has the code of the first."""
    wrong = site.shared("stage.toml")
    wrong.write_text(f"{POLICY}root = 1\n")
    config = "/etc/slurm/stage.toml"
    site.run(["mount", "--bind", "/shared/stage.toml", config], user="root", on="n1")
    begun = time.monotonic()
    try:
        with pytest.raises(CommandFailed) as failed:
            site.run(["srun", "-N4", "-n8", WISH, "touch", "/shared/started"])
    finally:
        site.await_epilogs()
        site.run(["umount", config], user="root", on="n1")
    assert failed.value.code == 3
    told = (
        f"stage: {config}: root: unknown key; did you mean roots? stage.toml(5) lists all; "
        "tell the administrator\n"
    )
    assert told in failed.value.stderr
    assert time.monotonic() - begun < HANGS
    assert not site.shared("started").exists()


def test_stage_outside_of_a_job_is_refused(site: Site) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run([STAGECTL, "stage", f"{DATA}:/nvme/data"])
    assert refused.value.code == 2
    assert refused.value.stderr == (
        "stage: not inside a Slurm job: use sbatch, salloc or srun first, --job ID for a job of "
        "yours that is running, --hosts or --hostfile to name nodes, or --local N to simulate N "
        "nodes on this machine\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        ["sbatch", "-N1", WISH, ":", "-N1", "--wrap", "true"],
        ["sbatch", "-N1", ":", "-N1", WISH, "--wrap", "true"],
        ["srun", "-N1", WISH, "true", ":", "-N1", "true"],
        ["salloc", "-N1", ":", "-N1", WISH, "true"],
        ["sbatch", "/home/alice/het.sh"],
    ],
    ids=["first part", "second part", "srun", "salloc", "script"],
)
def test_a_heterogeneous_job_is_refused(site: Site, line: list[str]) -> None:
    script = f"#!/bin/bash\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1 {WISH}\ntrue\n"
    site.path("login", "/home/alice/het.sh").write_text(script)
    with pytest.raises(CommandFailed) as refused:
        site.run(line)
    assert refused.value.code == 2
    message = "staging does not work in a heterogeneous job; submit each part as its own job"
    assert refused.value.stderr == f"stage: {message}\n"


def test_an_empty_option_is_refused(site: Site) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run(["sbatch", "--stage=", "--wrap", "true"])
    assert refused.value.code == 2
    assert (
        refused.value.stderr
        == "stage: source and destination are missing: write SRC:DST\n  \n  ^\n"
    )


def test_a_source_replaced_while_the_job_waited_is_staged_again(site: Site) -> None:
    works(site)
    holder = site.popen(
        ["/opt/slurm-stage/bin/python3", "-c", HOLD_LOCK, "/nvme/.slurm-stage/5001"], on="n3"
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    job = site.sbatch(f"cmp {DATA} /nvme/data", TWO, WISH)
    job.wait_for(lambda _: "waiting" in job.output())
    site.run(f"head -c 30000000 /dev/urandom > {DATA}.new; mv {DATA}.new {DATA}")
    holder.kill()
    holder.communicate()
    assert job.wait().exit_code == "0:0", job.output()
    assert f"from {DATA} to n[1,3]" in job.output()


#: A process that holds the lock of /nvme/data until it is killed.
HOLD_LOCK = """
import sys, time
from stager.store.cache import Cache
from stager.store.locks import Locks
assert Locks(Cache(sys.argv[1])).take("/nvme/data")
print(flush=True)
time.sleep(60)
"""


def test_a_destination_beneath_another_is_refused_at_once(site: Site) -> None:
    wish = f"--stage={DATA}:/nvme/d;/shared/img.sqsh:/nvme/d/data"
    with pytest.raises(CommandFailed) as refused:
        site.run(["sbatch", wish, "--wrap", "true"])
    assert refused.value.code == 2
    message = (
        "/nvme/d/data is in /nvme/d, which another directive stages as a whole; choose a "
        "destination outside of it"
    )
    assert refused.value.stderr == f"stage: {message}\n"


WORLD_OF_ONE = """#!/bin/bash
args=("$@")
for i in "${!args[@]}"; do
    case ${args[i]} in -N|-n) args[i+1]=1;; --nodelist=*) unset "args[i]";; esac
done
exec srun "${args[@]}"
"""


def test_a_world_of_the_wrong_size_is_named_with_the_remedy(site: Site) -> None:
    wrapper = site.shared("srun-of-one")
    wrapper.write_text(WORLD_OF_ONE)
    wrapper.chmod(0o755)
    with site.policy(POLICY + '[launch]\nsrun = "/shared/srun-of-one"\n'):
        message = (
            "MPI started 1 process, but the job has {} nodes; try again, and if it fails again "
            "tell the administrator (mpi in the [launch] section of stage.toml may not fit this "
            "MPI library; srun --mpi=list names Slurm's plugins, Open MPI needs pmix)"
        )
        fails(site, 8, message.format(2))
        begun = time.monotonic()
        with pytest.raises(CommandFailed) as failed:
            site.run(["srun", "-N4", "-n8", WISH, "touch", "/shared/started"])
    assert failed.value.code == 8
    assert f"stage: {message.format(4)}\n" in failed.value.stderr
    assert time.monotonic() - begun < HANGS
    assert not site.shared("started").exists()


def test_a_disk_that_was_full_before_its_first_use(site: Site) -> None:
    with site.nvme("n3", "loop", "20M"):
        site.run("cat /dev/zero > /nvme/bobs; true", user="bob", on="n3", check=False)
        job = site.sbatch("echo started", TWO, WISH)
        assert job.wait().exit_code == "5:0", job.output()
        assert re.match(
            r"stage: n3: /nvme: not enough room: \d+\.\d MiB needed, [\d.]+ \w+ free, ",
            job.output(),
        )


def test_a_signal_for_the_users_program_does_not_end_the_stage(site: Site, slow: Site) -> None:
    job = site.sbatch(f"cmp {BEHIND}/small /nvme/data", TWO, f"--stage={SMALL}:/nvme/data")
    wait_for_ranks(site)
    with stopped(site, "n1", SERVER):
        site.run(["scancel", "--batch", "--signal=USR1", job.id])
    assert job.wait().exit_code == "0:0", job.output()


def test_users_can_stage_after_root_asked_for_a_status(site: Site) -> None:
    for node in site.nodes:
        site.run([STAGECTL, "status"], user="root", on=node)
    works(site)


def test_a_folder_in_which_other_users_could_replace_the_copy_is_refused(site: Site) -> None:
    for node in NODES:
        site.run("mkdir /nvme/bobs; chmod 777 /nvme/bobs", user="bob", on=node)
    message = (
        "n[1,3]: /nvme/bobs belongs to bob (uid 5002), who could replace what is staged there; "
        "choose another destination"
    )
    fails(site, 6, message, f"--stage={DATA}:/nvme/bobs/data")
