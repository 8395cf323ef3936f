"""Which copies stay on the nodes between jobs: how long, in how much space, and for whom."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import ACCOUNTS, SITE_ACCOUNT, USERS
from tests.cluster.mid_transfer import SERVER, SLOW, receives, slow_source, stopped
from tests.cluster.site import PLUGSTACK, PREFIX, STAGECTL, UNLIMITED, digest, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

MIB = 1 << 20
OWNER = ACCOUNTS[SITE_ACCOUNT]
NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"


@pytest.fixture(autouse=True)
def _sources(site: Site) -> None:
    """Make four files of 60 MiB, f1 to f4, that belong to alice, unless they are there."""
    make = "rm -f f$i; head -c 62914560 /dev/urandom >f$i"
    site.run(f"cd /shared; for i in 1 2 3 4; do [ -O f$i ] || {{ {make}; }}; done")


def stage(
    site: Site, *names: str, nodes: str = "n1,n2", user: str = "alice", more: str = ""
) -> Job:
    """Return a job that has staged these files and ended."""
    wishes = [f"--stage=/shared/{name}:/nvme/{name}{more}" for name in names]
    job = site.sbatch("true", f"-w{nodes}", *wishes, user=user)
    job.wait()
    return job


def held(site: Site, node: str) -> list[str]:
    """Return the names of the copies on a node."""
    return sorted(path.name for path in site.copy(node, "/nvme").glob("f?"))


@contextmanager
def using(site: Site, name: str, node: str = "n1") -> Iterator[Job]:
    """Keep a job running that has staged the file."""
    job = site.sbatch("echo started; sleep 60", f"-w{node}", f"--stage=/shared/{name}:/nvme/{name}")
    job.wait_for(lambda _: "started" in job.output())
    try:
        yield job
    finally:
        job.cancel()
        job.wait()


@contextmanager
def small_disk(site: Site, node: str = "n1", size: str = "200M") -> Iterator[None]:
    site.remount_nvme(node, "loop", size)
    site.restart_slurmd(node)
    try:
        with site.policy(UNLIMITED):
            yield
    finally:
        site.restore_nvme(node)
        site.restart_slurmd(node)


# Lifetime


def test_lifetime_job_ends_with_the_job_and_other_copies_stay(site: Site) -> None:
    stage(site, "f1")
    assert stage(site, "f2", more=",lifetime=job").wait().exit_code == "0:0"
    site.assert_healthy()
    for node in ("n1", "n2"):
        assert held(site, node) == ["f1"]
        assert len(site.records(node)) == 1


def test_folders_that_a_stage_made_go_with_the_last_copy_in_them(site: Site) -> None:
    def stage_as(user: str, more: str = "") -> None:
        wish = f"--stage=/shared/f1:/nvme/bob/in/f1{more}"
        assert site.sbatch("true", "-wn1,n2", wish, user=user).wait().exit_code == "0:0"

    stage_as("alice")
    for node in ("n1", "n2"):
        site.run(f"{STAGECTL} evict /nvme/bob/in/f1", on=node)
        assert not site.copy(node, "/nvme/bob").exists()
    stage_as("alice", ",lifetime=job")
    site.assert_healthy()
    stage_as("bob", ",lifetime=job")
    site.assert_healthy()
    for node in ("n1", "n2"):
        assert not site.copy(node, "/nvme/bob").exists()


def test_a_copy_with_lifetime_job_stays_until_its_last_job_ends(site: Site) -> None:
    with using(site, "f1") as first:
        second = stage(site, "f1", nodes="n1", more=",lifetime=job")
        assert "current on n1, nothing moved" in second.output()
        site.run(["scancel", first.id], user="root")
        first.wait()
    site.assert_healthy()
    assert held(site, "n1") == []  # as the second job, the last that asked for it, had said
    third = site.sbatch("sleep 60", "-wn1", "--stage=/shared/f2:/nvme/f2,lifetime=job")
    third.wait_for(lambda _: "f2" in third.output())
    stage(site, "f2", nodes="n1", more=",lifetime=job")
    assert held(site, "n1") == ["f2"]
    third.cancel()
    third.wait()
    site.assert_healthy()
    assert held(site, "n1") == []


def test_a_requeued_and_a_cancelled_job_leave_no_mark(site: Site) -> None:
    job = site.sbatch("echo started; sleep 60", "-N4", "--stage=/shared/f1:/nvme/f1,lifetime=job")
    job.wait_for(lambda _: "started" in job.output())
    assert [path.name for path in site.path("n3", "/run/slurm-stage/jobs").iterdir()] == [
        f"{job.id}.{USERS['alice']}"
    ]
    job.requeue()
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    job.cancel()
    job.wait()
    site.assert_healthy()
    assert site.leftovers() == []
    assert [held(site, node) for node in site.nodes] == [[]] * 4
    for node in site.nodes:
        assert not site.path(node, "/run/slurm-stage/5001").exists()


def test_nobody_replaces_what_a_running_job_uses(site: Site) -> None:
    """Neither another source nor a new version, by an option or by hand; but jobs may share it."""
    site.run("mkdir /shared/set; echo old >/shared/set/a; cp -r /shared/set /shared/other")
    wish = "/shared/set:/nvme/set"
    site.run("rm -f /shared/go")
    script = "until [ -e /shared/go ]; do sleep 0.1; done; cat /nvme/set/a"
    first = site.sbatch(f"echo started; {script}", "-wn1,n2", f"--stage={wish}")
    first.wait_for(lambda _: "started" in first.output())
    sharing = site.sbatch("cat /nvme/set/a", "-wn1,n3", f"--stage={wish}")
    assert sharing.wait().exit_code == "0:0", sharing.output()
    used = f"/nvme/set is used by job {first.id}, and would be replaced"
    remedy = "choose another destination, or submit again when it has ended"
    other = "--stage=/shared/other:/nvme/set"
    third = site.sbatch("true", "-wn2,n3", other)
    assert third.wait().exit_code == "9:0"
    assert f"stage: n2: {used} (it is of /shared/set); {remedy}\n" in third.output()
    site.run("rm /shared/set/a; echo new >/shared/set/b")
    by_hand = site.sbatch(f"{STAGECTL} plan {wish}; {STAGECTL} stage {wish}", "-wn1")
    assert by_hand.wait().exit_code == "9:0"
    changed = "the source changed, or other files of it are wanted"
    assert by_hand.output() == f"stage: n1: {used} ({changed}); {remedy}\n" * 2
    # The job that was refused on n2 uses nothing on n3.
    assert site.sbatch("true", "-wn3", other).wait().exit_code == "0:0"
    site.run("touch /shared/go")
    assert first.wait().exit_code == "0:0"
    assert first.output().endswith("old\n")
    assert site.sbatch("cat /nvme/set/b", "-wn1", f"--stage={wish}").wait().exit_code == "0:0"
    site.run("rm -r /shared/set /shared/other /shared/go")


def test_a_job_that_has_ended_keeps_nobody_from_a_new_version(site: Site) -> None:
    """Its clean-up has never come, so that the list of what it used is still there."""
    site.run("echo old >/shared/in")
    ended = site.sbatch("true", "-wn1", "--stage=/shared/in:/nvme/in")
    ended.wait()
    script = f"""
printf '/nvme/in\\0' >/run/slurm-stage/$(id -u)/{ended.id}.uses
echo new >/shared/in
{STAGECTL} plan /shared/in:/nvme/in; {STAGECTL} stage /shared/in:/nvme/in && cat /nvme/in
rm /run/slurm-stage/$(id -u)/{ended.id}.uses"""
    job = site.sbatch(script, "-wn1,n2", "--stage=/shared/in:/nvme/in")
    job.wait()
    assert job.output().endswith("\nnew\n"), job.output()
    assert "would be replaced" not in job.output()
    site.run("rm /shared/in")


def test_a_second_source_is_refused_within_a_job_also_after_another_job_used_the_copy(
    site: Site,
) -> None:
    site.run("echo a >/shared/a; echo b >/shared/b; rm -f /shared/go")
    other = f"{STAGECTL} stage /shared/b:/nvme/x; echo $? $(cat /nvme/x)"
    script = f"echo started; until [ -e /shared/go ]; do sleep 0.1; done; {other}"
    wish = "--stage=/shared/a:/nvme/x"
    first = site.sbatch(script, "-wn1", wish)
    first.wait_for(lambda _: "started" in first.output())
    assert site.sbatch("true", "-wn1", wish).wait().exit_code == "0:0"
    site.run("touch /shared/go")
    first.wait()
    assert "/nvme/x was staged from /shared/a by this job; " in first.output()
    assert first.output().endswith("\n9 a\n")
    site.run("rm /shared/a /shared/b /shared/go")


@pytest.mark.parametrize("at_once", [4, 1])
def test_of_array_tasks_with_one_place_for_their_files_one_at_a_time_runs(
    site: Site, at_once: int
) -> None:
    """Together, one wins; one after the other, each has its own."""
    site.run("for i in 1 2 3 4; do echo $i >/shared/in_$i; done")
    wait = "until [ $(grep -ls 'not started' /shared/told_*|wc -l) = 3 ]; do sleep 0.1; done"
    script = f"[ {at_once} = 1 ] || {wait}; echo $SLURM_ARRAY_TASK_ID $(cat /nvme/in)"
    options = [f"--array=1-4%{at_once}", "-n1", "-wn1", "--output=/shared/told_%a"]
    line = ["sbatch", "--wait", "-Q", *options, "--stage=/shared/in_%a:/nvme/in"]
    done = site.run([*line, "--wrap", script], check=False)
    told = site.run("cat /shared/told_*; rm /shared/told_* /shared/in_*").stdout
    ran = [line for line in told.splitlines() if not line.startswith("stage:")]
    assert all(line.split()[0] == line.split()[1] for line in ran), told
    assert (len(ran), done.returncode) == ((1, 9) if at_once == 4 else (4, 0)), told
    pattern = r"stage: n1: /nvme/in is used by job \d+, and would be replaced \(it is of \S+\); "
    assert len(re.findall(pattern, told)) == 4 - len(ran), told


def test_a_part_that_a_running_job_uses_is_not_replaced(site: Site) -> None:
    """Each node's part is current, but of another split: the next job has one node less."""
    site.run("mkdir /shared/set; cd /shared/set; for i in 1 2 3 4 5 6; do echo $i >part-$i; done")
    wish = "--stage=/shared/set:/nvme/set,mode=shard"
    first = site.sbatch("echo started; sleep 60", "-wn1,n2,n3", wish)
    first.wait_for(lambda _: "started" in first.output())
    second = site.sbatch("true", "-wn1,n2", wish)
    assert second.wait().exit_code == "9:0"
    first.cancel()
    first.wait()
    site.run("rm -r /shared/set")
    assert f"/nvme/set is used by job {first.id}, and would be replaced (" in second.output()


# Room


def test_the_least_recently_used_copy_is_evicted_unless_a_job_uses_it(site: Site) -> None:
    with small_disk(site):
        stage(site, "f1")
        stage(site, "f2")
        with using(site, "f1"):
            stage(site, "f3")
            assert held(site, "n1") == ["f1", "f2", "f3"]
            # f1 is the least recently used, but in use.
            job = stage(site, "f4")
            first, second = job.output().splitlines()
            assert first == "stage: /nvme/f2: evicted on n1 to make room"
            assert second.startswith(
                "stage: /nvme/f4: 60.0 MiB from /shared/f4 to n[1-2] (2 nodes)"
            )
            assert held(site, "n1") == ["f1", "f3", "f4"]
            assert held(site, "n2") == ["f1", "f2", "f3", "f4"]
            assert digest(site.copy("n1", "/nvme/f1")) == digest(site.shared("f1"))


def test_a_job_without_enough_room_evicts_nothing(site: Site) -> None:
    with small_disk(site):
        stage(site, "f1", user="bob")
        stage(site, "f2")
        stage(site, "f3")
        inodes = {name: site.copy("n1", f"/nvme/{name}").stat().st_ino for name in held(site, "n1")}
        with using(site, "f3"):
            job = stage(site, "f4", "f1", "f2", nodes="n1,n2,n3")
            assert job.wait().exit_code == "6:0"  # f1 belongs to bob there
            job = stage(site, "f4", "f2", nodes="n1,n2,n3")
            assert job.wait().exit_code == "5:0"
        stays = r"(?:/nvme/f2 \(needed by this job\)|/nvme/f3 \(in use\))"  # the larger one first
        assert re.fullmatch(
            r"stage: n1: /nvme: not enough room: 60\.1 MiB needed, [^,]+ free, [^,]+ still "
            rf"missing; 120\.0 MiB of your copies stay: {stays}, {stays}; wait until the jobs that "
            r"use copies have ended, delete other files of yours there, or ask for nodes with "
            r"larger disks\n" + re.escape(NOT_STARTED.format(5)),
            job.output(),
        )
        assert held(site, "n1") == ["f1", "f2", "f3"]
        assert inodes == {
            name: site.copy("n1", f"/nvme/{name}").stat().st_ino for name in held(site, "n1")
        }


def test_a_cancelled_job_names_the_copies_that_it_had_removed(site: Site) -> None:
    stage(site, "f1", nodes="n1")
    stage(site, "f2", nodes="n1")
    with (
        site.policy('roots = ["/nvme"]\n[cache]\nuser_limit = "130MiB"\n'),
        slow_source(site, 40 << 20),
    ):
        job = site.sbatch("true", "-wn1", f"--stage={SLOW}/data:/nvme/data")
        job.wait_for(lambda _: "/nvme/data:" in job.written())  # a line on its progress
        job.cancel()
        job.wait()
    site.assert_healthy()
    assert "stage: /nvme/f1: evicted on n1 to make room\n" in job.output()
    assert "stage: ended by signal 15; the job's own program was not started\n" in job.output()
    assert held(site, "n1") == ["f2"]


def test_the_site_limits_the_space_of_a_user(site: Site) -> None:
    with site.policy('roots = ["/nvme"]\n[cache]\nuser_limit = "130MiB"\n'):
        for name in ("f1", "f2", "f3"):
            assert stage(site, name).wait().exit_code == "0:0"
        assert held(site, "n1") == ["f2", "f3"]
        job = stage(site, "f1", "f2", "f3")
        assert job.wait().exit_code == "5:0"
        assert job.output() == (
            "stage: n[1-2]: /nvme: not enough room: 60.0 MiB needed; your limit on this disk is "
            "130.0 MiB, and your other copies take 120.0 MiB; 120.0 MiB of your copies stay: "
            "/nvme/f2 (needed by this job), /nvme/f3 (needed by this job); stage less\n"
            f"{NOT_STARTED.format(5)}"
        )


def test_a_copy_that_is_the_source_of_a_stage_is_not_evicted_for_it(site: Site) -> None:
    stage(site, "f1", nodes="n1")
    stage(site, "f2", nodes="n1")
    with site.policy('roots = ["/nvme"]\n[cache]\nuser_limit = "130MiB"\n'):
        job = site.sbatch("true", "-wn1", "--stage=/nvme/f1:/nvme/f3")
        assert job.wait().exit_code == "0:0", job.output()
    assert held(site, "n1") == ["f1", "f3"]
    assert digest(site.copy("n1", "/nvme/f3")) == digest(site.shared("f1"))


def test_headroom_evicts_copies_of_any_user(site: Site) -> None:
    with small_disk(site):
        stage(site, "f1", user="bob")
        stage(site, "f2")
        with site.policy(f'{UNLIMITED}headroom = "100MB"\n'):
            stage(site, "f3", nodes="n1")
            site.assert_healthy()
        assert held(site, "n1") == ["f3"]
        assert held(site, "n2") == ["f1", "f2"]


def test_headroom_takes_no_further_copy_for_a_folder_with_files_of_ones_own(site: Site) -> None:
    site.run("mkdir -p /shared/few; echo staged >/shared/few/a")
    with small_disk(site, size="250M"):
        stage(site, "few", nodes="n1")
        site.run("echo mine >/nvme/few/mine", on="n1")
        stage(site, "f1", "f2", nodes="n1")
        with site.policy(f'{UNLIMITED}headroom = "80MB"\n'):
            stage(site, "f3", nodes="n1")
            site.assert_healthy()
        assert held(site, "n1") == ["f2", "f3"]
        assert (site.copy("n1", "/nvme/few/mine")).read_text() == "mine\n"


# Sharing


@pytest.fixture
def shared_root(site: Site) -> Iterator[str]:
    """Make a folder of the site's account on the nodes and allow it as a shared root."""
    with site.sharing() as folder:
        yield folder


def share(site: Site, source: str, user: str) -> Job:
    job = site.sbatch(
        "srun sha256sum /nvme/shared/*", "-wn1,n2", f"--stage={source}:/nvme/shared/", user=user
    )
    job.wait()
    return job


def test_a_shared_copy_serves_users_who_may_read_the_source(site: Site, shared_root: str) -> None:
    assert share(site, "/shared/f1", SITE_ACCOUNT).wait().exit_code == "0:0"
    inode = site.copy("n1", f"{shared_root}/f1").stat().st_ino
    job = share(site, "/shared/f1", "bob")
    summary, *digests = job.output().splitlines()
    assert summary.startswith(
        f"stage: {shared_root}/f1: current on n[1-2] (2 nodes), nothing moved"
    )
    assert digests == [f"{digest(site.shared('f1'))}  {shared_root}/f1"] * 2
    assert site.copy("n1", f"{shared_root}/f1").stat().st_ino == inode


def test_what_some_users_cannot_read_becomes_no_copy_for_all_without_a_word(
    site: Site, shared_root: str
) -> None:
    """Alice leads the account to what its group may read, but bob may not."""
    site.run(
        "cd /shared; rm -rf private open offered; mkdir -m 750 private; cp f2 private; cp f2 open; "
        "chmod 640 open; chmod 644 private/f2; chown -R alice:stage private open",
        user="root",
    )
    site.run("ln -s private/f2 /shared/offered")
    for name, closed in (("open", "open"), ("offered", "private")):
        job = share(site, f"/shared/{name}", SITE_ACCOUNT)
        assert job.output() == (
            f"stage: n1: /shared/{name}: a copy there would be for all users, and /shared/{closed} "
            "is not open to all: chmod go+rX, or share=all, which opens the copy all the same\n"
            + NOT_STARTED.format(4)
        )
        assert not site.copy("n1", f"{shared_root}/{name}").exists()
    line = f"--stage=/shared/open:{shared_root}/open,share=all"
    shown = ["stat", "-c", "%a", f"{shared_root}/open"]
    assert site.run(["srun", "-N1", line, *shown], user=SITE_ACCOUNT).stdout == "644\n"
    site.run("rm -r /shared/private /shared/open /shared/offered", user="root")


def test_only_the_sites_account_stages_to_a_shared_root(site: Site, shared_root: str) -> None:
    job = share(site, "/shared/f1", "alice")
    assert job.output() == (
        f"stage: n[1-2]: {shared_root}/f1 cannot be used: only the site's account (uid {OWNER}) "
        "stages files there, for all users, and the copy is missing or not up to date (absent); "
        f"ask the administrator, or choose another destination\n{NOT_STARTED.format(6)}"
    )


def test_a_shared_copy_is_evicted_by_its_account_but_not_while_a_job_uses_it(
    site: Site, shared_root: str
) -> None:
    copy = f"{shared_root}/f1"
    assert share(site, "/shared/f1", SITE_ACCOUNT).wait().exit_code == "0:0"
    user = site.sbatch("echo started; sleep 60", "-wn1", f"--stage=/shared/f1:{shared_root}/")
    user.wait_for(lambda _: "started" in user.output())
    refused = site.run(
        [STAGECTL, "evict", copy], user=SITE_ACCOUNT, on="n1", check=False
    )  # fmt: skip
    assert (refused.returncode, refused.stderr) == (
        9,
        f"stage: n1: {copy} is used by job {user.id}; evict it when it has ended\n",
    )
    for someone in ("alice", "root"):
        refused = site.run([STAGECTL, "evict", copy], user=someone, on="n1", check=False)
        assert refused.returncode == 3
        assert refused.stderr == (
            f"stage: n1: {copy} was staged for all users: only the account that staged it (uid "
            f"{OWNER}) may evict it, or root by --user {SITE_ACCOUNT}\n"
        )
    user.cancel()
    user.wait()
    site.assert_healthy()
    gone = site.run([STAGECTL, "evict", copy], user=SITE_ACCOUNT, on="n1")
    assert gone.stdout == f"stage: {copy}: evicted on n1\n"


def test_a_shared_copy_is_not_replaced_under_a_job_that_came_meanwhile(
    site: Site, shared_root: str
) -> None:
    copy = f"{shared_root}/x"
    wish = f"--stage=/shared/f1:{copy}"
    assert site.sbatch("true", "-wn1", wish, user=SITE_ACCOUNT).wait().exit_code == "0:0"
    with slow_source(site, 4 * MIB):
        new = f"--stage={SLOW}/data:{copy}"
        account = site.sbatch("true", "-wn1", new, user=SITE_ACCOUNT)
        wait_until(lambda: receives(site, "n1", f"{shared_root}/.slurm-stage/{OWNER}/partial"))
        with stopped(site, "n1", SERVER):
            user = site.sbatch("echo started; sleep 60", "-wn1", wish)
            user.wait_for(lambda _: "started" in user.output())
        account.wait()
        told = f"{copy} was not replaced, as meanwhile job {user.id} began to use it; "
        assert told in account.output()
        assert digest(site.copy("n1", copy)) == digest(site.shared("f1"))
        user.cancel()
        user.wait()
        site.assert_healthy()


# Root's part, by the plugin or by the site's own scripts


def test_figures_are_kept_for_prometheus(site: Site) -> None:
    site.path("n1", "/run/slurm-stage/figures.json").unlink(missing_ok=True)
    with site.policy('roots = ["/nvme"]\n[metrics]\ntextfile = "/run/figures.prom"\n'):
        stage(site, "f1", "f2")
        stage(site, "f1", "f3")
        stage(site, "nothing")
        site.assert_healthy()
    text = site.path("n1", "/run/figures.prom").read_text()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert 0 < float(figures.pop("slurm_stage_seconds_total")) < 60
    assert figures == {
        'slurm_stage_bytes{root="/nvme"}': str(3 * 62914560),
        'slurm_stage_entries{root="/nvme"}': "3",
        "slurm_stage_hits_total": "1",
        "slurm_stage_misses_total": "3",
        "slurm_stage_evictions_total": "0",
        "slurm_stage_failures_total": "1",
        "slurm_stage_slow_total": "0",
    }
    assert not list(site.path("n1", "/run").glob("figures.prom.*"))
    assert not site.path("n3", "/run/figures.prom").exists()


def test_prolog_and_epilog_of_the_site_mark_jobs_and_clean_up(site: Site) -> None:
    scripts = f"Prolog={PREFIX}/libexec/job_prolog\nEpilog={PREFIX}/libexec/job_epilog\n"
    site.reconfigure(f"{scripts}PrologFlags=Alloc\n")
    try:
        job = site.sbatch(
            "echo started; sleep 2", "-N4", "--stage=/shared/f1:/nvme/f1,lifetime=job"
        )
        job.wait_for(lambda _: "started" in job.output())
        assert os.listdir(site.path("n2", "/run/slurm-stage/jobs")) == [f"{job.id}.5001"]
        job.wait()
        site.assert_healthy()
        assert site.leftovers() == []
        assert held(site, "n2") == []
    finally:
        site.reconfigure()


def test_a_job_leaves_no_mark_when_slurmd_restarts_while_it_runs(site: Site) -> None:
    with using(site, "f1", "n2"):
        site.restart_slurmd("n2")
    site.assert_healthy()
    assert site.leftovers() == []


def test_a_job_that_ended_without_its_clean_up_is_cleaned_up_after_a_later_one(site: Site) -> None:
    with using(site, "f1", "n1,n2") as running:  # it has no process on n2
        with using(site, "f2", "n2") as lost:
            site.write_plugstack("")
        site.await_epilogs()
        site.write_plugstack(PLUGSTACK)
        marks = site.path("n2", "/run/slurm-stage/jobs")
        assert {mark.name for mark in marks.iterdir()} == {
            f"{job.id}.{USERS['alice']}" for job in (running, lost)
        }
        site.run(["srun", "-wn2", "true"])
        site.await_epilogs()
        assert len(os.listdir(marks)) == 2  # a job is not asked for at once
        (marks / f"999999.{USERS['alice']}").touch()  # of a job that Slurm has forgotten
        for mark in marks.iterdir():
            os.utime(mark, (0, mark.stat().st_mtime))
        for _ in range(3):
            site.run(["srun", "-wn2", "true"])
            site.await_epilogs()
        assert os.listdir(marks) == [f"{running.id}.{USERS['alice']}"]
        said = site.run(f"srun -N1 -wn2 {STAGECTL} evict /nvme/f1 /nvme/f2", check=False)
        assert "/nvme/f2: evicted on n2" in said.stdout + said.stderr


def test_each_task_of_a_step_may_evict_what_its_job_staged(site: Site) -> None:
    script = f"""{STAGECTL} stage /shared/f1:/nvme/f1 >/dev/null || exit
srun -N4 {STAGECTL} evict /nvme/f1; echo $?
{STAGECTL} stage /shared/f1:/nvme/f1 >/dev/null || exit
printf '0 true\\n1 {STAGECTL} evict /nvme/f1\\n' >/home/alice/programs
srun -N2 -n2 --multi-prog /home/alice/programs; echo $?"""
    job = site.sbatch(script, "-N4")
    assert job.wait().exit_code == "0:0"
    evicted = "stage: /nvme/f1: evicted on n[1-4] (4 nodes)"
    assert job.output().splitlines() == [evicted, "0", evicted, "0"]
