"""A destination that all nodes see: written once, kept for the jobs of all nodes, closed to others.

The attacks are tried for real, by bob against alice; none succeeds.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.mid_transfer import (
    BEHIND,
    MICROSECONDS,
    SERVER,
    SLOW,
    kill_rank,
    receives,
    slow_source,
    stopped,
)
from tests.cluster.servers import HOST, HUB_PORT, Registry, hub, registry
from tests.cluster.site import STAGECTL, wait_until
from tests.support.images import BLOBS
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

ROOT = "/shared/scratch"
X, Y, DST = "/shared/x", "/shared/y", f"{ROOT}/x"
RECORDS = f"{ROOT}/.slurm-stage"
CACHE = f"{RECORDS}/{USERS['alice']}"
WISH = f"--stage={X}:{DST}"
IMAGE = f"docker://{Registry.name}/team/img:v1"


@pytest.fixture(scope="module", autouse=True)
def _policy(installed_site: Site) -> Iterator[None]:
    text = (
        f'roots = ["/nvme", "{ROOT}"]\n[source]\nallow = ["hf://org/", "{IMAGE}"]\n'
        f'endpoints = ["https://{HOST}:{HUB_PORT}"]\nca_file = "/shared/ca.pem"\n'
    )
    with installed_site.policy(text):
        yield


@pytest.fixture(autouse=True)
def _root(site: Site) -> Iterator[None]:
    site.run(f"mkdir -m 1777 {ROOT}", user="root")
    site.run(f"rm -f {X} {Y}; head -c 3000000 /dev/urandom >{X}; head -c 9 {X} >{Y}")
    yield
    site.run(f"rm -r {ROOT}", user="root")


def stage(site: Site, nodes: str, *words: str, script: str = "true") -> Job:
    return site.sbatch(script, f"-w{nodes}", *(words or (WISH,)))


def ended(job: Job) -> str:
    """Return the output of a job that has succeeded."""
    assert job.wait().exit_code == "0:0", job.output()
    return job.output()


@contextmanager
def using(site: Site, nodes: str) -> Iterator[Job]:
    """Keep a job running that has staged X."""
    job = stage(site, nodes, script="echo started; sleep 600")
    job.wait_for(lambda _: "started" in job.output())
    yield job
    job.cancel()
    job.wait()
    site.await_epilogs()


@contextmanager
def _seen(site: Site, node: str, microseconds: int = 0) -> Iterator[None]:
    """Have another node see the slow source, with an answer's time of its own."""
    line = ["/shared/slow_folder", BEHIND, SLOW, str(microseconds)]
    site.run(line, user="root", on=node)
    yield
    site.run(["umount", "--lazy", SLOW], user="root", on=node)


def facts(site: Site) -> tuple[int, int]:
    there = site.path("login", DST).stat()
    return there.st_ino, there.st_mtime_ns


def test_it_is_written_once_for_all_nodes_and_jobs(site: Site) -> None:
    site.run(f"head -c 140000000 /dev/urandom >{X}")  # each node writes a part
    ended(stage(site, "n[1-2]", f"--stage={Y}:{ROOT}/y"))  # makes alice's cache
    dry = ended(site.sbatch(f"{STAGECTL} plan {X}:{DST}", "-wn[1-2]"))
    assert "x: 133.5 MiB would move from /shared/x once for n[1-2] (2 nodes) (absent)" in dry
    said = ended(stage(site, "n[1-2]", script=f"cmp {X} {DST}"))
    assert "x: 133.5 MiB from /shared/x once for n[1-2] (2 nodes) in " in said
    first = facts(site)
    assert "current on n[3-4] (2 nodes), nothing moved" in ended(stage(site, "n[3-4]"))
    assert facts(site) == first
    table = ended(site.sbatch(f"{STAGECTL} status", "-wn[1-4]"))
    rows = [line.split()[:2] for line in table.splitlines()]
    assert ["shared", DST] in rows
    assert sum(DST in line for line in table.splitlines()) == 1


def test_what_a_job_uses_stays_until_it_ends(site: Site) -> None:
    other = f"--stage={Y}:{DST}"
    with using(site, "n[1-2]") as job:
        before = facts(site)
        refused = stage(site, "n[3-4]", other)
        assert refused.wait().exit_code == "9:0"
        assert f"job {job.id}" in refused.output()
        kept = site.run([STAGECTL, "evict", DST], on="n4", check=False)
        assert (kept.returncode, f"{DST} is used by job {job.id};" in kept.stderr) == (9, True)
        assert facts(site) == before
    ended(stage(site, "n[3-4]", other))
    assert facts(site) != before


def test_the_list_of_a_job_whose_node_died_keeps_nothing(site: Site) -> None:
    ended(stage(site, "n[1-2]"))
    site.run(f"printf '{DST}\\0' >{CACHE}/999999.uses")
    ended(stage(site, "n[3-4]", f"--stage={Y}:{DST}"))
    assert not site.path("login", f"{CACHE}/999999.uses").exists()


def test_two_jobs_on_other_nodes_write_it_once(site: Site) -> None:
    with slow_source(site, 3 << 20), _seen(site, "n3"):
        wish = f"--stage={SLOW}/data:{DST}"
        first = stage(site, "n[1-2]", wish)
        wait_until(lambda: receives(site, "n1", f"{CACHE}/partial"))
        with stopped(site, "n1", f"{SERVER}{MICROSECONDS}"):
            second = site.sbatch("true", "-wn[3-4]", wish)
            second.wait_for(lambda _: "waiting for" in second.output())
        assert " once for n[1-2] (2 nodes) in " in ended(first)
        written = facts(site)
        ended(second)
        assert facts(site) == written


@pytest.mark.parametrize("node", ["n2", repeated("n1")])
def test_a_rank_that_is_killed_while_it_writes_leaves_nothing(site: Site, node: str) -> None:
    with slow_source(site, 3 << 20), _seen(site, "n2", MICROSECONDS):
        site.run(f"cp {BEHIND}/data {BEHIND}/other")
        job = stage(site, "n[1-2]", f"--stage={SLOW}:{DST}")
        wait_until(lambda: all(receives(site, one, f"{CACHE}/partial") for one in ("n1", "n2")))
        kill_rank(site, node)
        assert job.wait().exit_code == "8:0"
    # Either the other rank notices first, or Slurm.
    why = rf"({node}: the staging process there was killed, or the node failed|srun ended with .*)"
    told = (
        rf"stage: staging ended early: {why}; submit again\n(  .*\n)*"
        r"stage: the job's own program was not started \(exit code 8\)\n"
    )
    assert re.fullmatch(told, job.output()), job.output()
    assert not site.path("login", DST).exists()
    assert " once for n[1-2] (2 nodes) in " in ended(stage(site, "n[1-2]"))
    assert [*site.path("login", f"{CACHE}/partial").iterdir()] == []


def test_a_model_and_an_image_are_asked_for_once_and_written_once(site: Site) -> None:
    files = {"weights.bin": os.urandom(20_000_001), "below/config.json": b"{}", "empty": b""}
    with hub(site) as models, registry(site) as images:
        site.run(f"cat /shared/hub/ca.pem {images.certificate} >/shared/ca.pem")
        models.commit("models/org/model", files)
        images.push("team/img:v1", "text", 20_000_000)
        wish = f"--stage=hf://org/model:{ROOT}/model;{IMAGE}:{ROOT}/img.sqsh"
        copies = "model: 3 files, 19.1 MiB from hf://org/model", f"img.sqsh: 19.1 MiB from {IMAGE}"
        for nodes in ("n[1-2]", "n[3-4]"):
            job = site.sbatch("true", f"-w{nodes}", wish, env={"HF_ENDPOINT": models.endpoint})
            said = ended(job)
            for copy in copies if nodes == "n[1-2]" else ():
                assert f"stage: {ROOT}/{copy} once for n[1-2] (2 nodes) in " in said
        assert said.count(": current on n[3-4] (2 nodes), nothing moved (") == 2
        assert models.served() == {"weights.bin": 20_000_001, "config.json": 2}
        assert [*images.sent().values()] == [1] * BLOBS
    there = site.path("login", f"{ROOT}/model")
    assert {name: (there / name).read_bytes() for name in files} == files
    assert site.run(["unsquashfs", "-cat", f"{ROOT}/img.sqsh", "data/kept"]).stdout == "text\n"


# Attacks


def attack(site: Site, command: str, on: str = "n3") -> None:
    """Try ``command`` as bob. The kernel must refuse it."""
    done = site.run(command, user="bob", on=on, check=False)
    assert done.returncode != 0, command
    assert re.search("denied|not permitted", done.stderr), done.stderr


def test_another_user_reaches_nothing_of_a_cache_that_all_nodes_see(site: Site) -> None:
    ended(stage(site, "n[1-2]"))
    for command in (
        f"touch {CACHE}/partial/0123",  # the probe's name
        f"flock -n {CACHE}/partial true",  # its lock
        f"flock -n {CACHE}/lock true",
        f"readlink -v {CACHE}/secret",
        f"printf '{DST}\\0' >{CACHE}/17.uses",
        f"cat {CACHE}/lock",
        f"mv {CACHE} {ROOT}/taken",
        f"mkdir {RECORDS}/{USERS['bob']}.new",
        f"ln -s /tmp {RECORDS}/new",
        f"rm {DST}",
        f"mv {ROOT}/y {DST}; mv {Y} {DST}",
    ):
        attack(site, command)


def test_locks_that_another_user_holds_on_all_nodes_stop_no_stage(site: Site) -> None:
    ended(stage(site, "n[1-2]", f"--stage={Y}:{ROOT}/y"))
    hold = f"exec 3<{ROOT} 4<{RECORDS}; flock 3; flock 4; echo held; sleep 600"
    locks = site.popen(hold, user="bob", on="n3")
    try:
        assert locks.stdout
        assert locks.stdout.readline() == "held\n"
        assert " once for n[1-2] " in ended(stage(site, "n[1-2]"))
    finally:
        locks.kill()
        locks.wait()


@pytest.mark.parametrize("make", [f"ln -s {ROOT}/trap {RECORDS}", f"touch {RECORDS}"])
def test_records_that_another_user_made_first_are_not_used(site: Site, make: str) -> None:
    site.run(f"mkdir -p -m 777 {ROOT}/trap/{USERS['alice']}; {make}", user="bob")
    job = stage(site, "n[1-2]")
    assert job.wait().exit_code == "6:0"
    assert "tell the administrator" in job.output()
    assert not site.path("login", DST).exists()
    assert [*site.path("login", f"{ROOT}/trap/{USERS['alice']}").iterdir()] == []


def test_the_uses_of_another_user_keep_nothing_of_ones_own(site: Site) -> None:
    """Bob's list, in his own cache, names alice's copy."""
    own = f"{RECORDS}/{USERS['bob']}"
    ended(stage(site, "n[1-2]"))
    assert site.sbatch("true", "-wn[1-2]", f"--stage={Y}:{ROOT}/b", user="bob").wait().state
    forge = (
        f"printf '{DST}\\0' >{own}/999997.uses; truncate -s 1T {own}/999998.uses; "
        f"mkfifo {own}/999999.uses"
    )
    site.run(forge, user="bob")
    evict = site.run([STAGECTL, "evict", DST], on="n4")
    assert f"{DST}: evicted" in evict.stdout
    # Nor do they stop bob's own stage.
    job = site.sbatch("true", "-wn[1-2]", f"--stage={Y}:{ROOT}/b", user="bob")
    assert job.wait().exit_code == "0:0"


def test_a_command_on_all_nodes_acts_once(site: Site) -> None:
    ended(stage(site, "n[1-2]"))
    for command, done in (("verify", "verified"), ("pin", "pinned"), ("unpin", "unpinned")):
        said = ended(site.sbatch(f"{STAGECTL} {command} {DST}", "-wn[1-4]"))
        assert re.fullmatch(rf"stage: {DST}: {done} on n\d( \(.*\))?\n", said), said
    said = ended(site.sbatch(f"{STAGECTL} evict {DST}", "-wn[1-4]"))
    assert re.fullmatch(rf"stage: {DST}: evicted on n\d( \(.*\))?\n", said), said
    assert not site.path("login", DST).exists()
