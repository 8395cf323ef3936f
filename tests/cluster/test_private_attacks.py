"""Attacks on the folders that a site makes for one job or user, where it made their parents 1777.

Each is tried for real, by bob against alice, or by alice against root; none succeeds.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.store.cache import Cache
from tests.cluster.cluster import USERS
from tests.cluster.pair import PARENT, Pair, said, started
from tests.cluster.site import PYTHON, STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

ALICE, BOB = USERS["alice"], USERS["bob"]
OWN = f"{PARENT}/%u.%j.%r"
HINT = "--gres=localscratch:GB"
POLICY = f"""
roots = [
    "/nvme",
    {{ path = "{OWN}", hint = "{HINT}" }},
    {{ path = "/tmp", private = true }},
]
variables = {{ SLURM_TMPDIR = "{OWN}" }}
"""
REPLACED = "bob (uid 5002) could replace what is staged there; tell the administrator"


@pytest.fixture(scope="module", autouse=True)
def _by_job(installed_site: Site) -> Iterator[None]:
    site = installed_site
    site.run(f"mkdir -m 755 {PARENT}", user="root")
    for folder in (PARENT, "/tmp"):
        mount = f"mount -t tmpfs -o size=64m,mode=1777 none {folder}"
        site.run(mount, user="root", on="n1")
    try:
        with site.policy(POLICY):
            yield
    finally:
        site.run(f"umount {PARENT} /tmp", user="root", on="n1")
        site.run(f"rmdir {PARENT}", user="root")


class Jobs(Pair):
    """The jobs, which stage one source."""

    def stage(self, path: str = "", user: str = "alice", command: str = "stage") -> tuple[int, str]:
        """Return the exit code, and what is said, of the user's stage to that job's folder."""
        return self.run(command, f"/shared/x:{path or self.folder(user) + '/x'}", user=user)

    def as_root(self, command: str, *words: str) -> tuple[int, str]:
        """Return the same of a command of root's about alice's job."""
        line = [STAGECTL, command, f"--job={self.alice.id}", *words]
        return said(self.site.run(line, user="root", on="n1", check=False))


@pytest.fixture
def jobs(site: Site) -> Iterator[Jobs]:
    pair = Jobs(site, *started(site))
    yield pair
    pair.end()


@pytest.fixture(autouse=True)
def _empty(site: Site) -> Iterator[None]:
    yield
    site.run(f"find {PARENT} /tmp -mindepth 1 -delete", user="root", on="n1")


def no_copy(path: str, user: str) -> str:
    """Return what root is told of a path where the user has staged nothing."""
    listed = f"stagectl status --user {user} lists what is staged"
    return f"stage: n1: {path} is no copy of {user} here; {listed}\n"


def attack(site: Site, command: str) -> None:
    """Try ``command`` as bob. The kernel must refuse it."""
    done = site.run(command, user="bob", on="n1", check=False)
    assert done.returncode != 0, command
    assert re.search("denied|not permitted", done.stderr), done.stderr


def test_what_another_user_made_first_is_not_used(site: Site, jobs: Jobs) -> None:
    own, trap = jobs.folder(), f"{PARENT}/trap"
    site.run(f"mkdir -m 777 {trap}", user="bob", on="n1")
    for make in (f"ln -s {trap}", "ln -s /nothing", "mkdir -m 777", "touch"):
        site.run(f"{make} {own}", user="bob", on="n1")
        assert jobs.stage() == (6, f"stage: n1: {own}: {REPLACED}\n")
        site.run(f"rm -r {own}", user="bob", on="n1")
    site.run(f"touch {own}.file; chmod 666 {own}.file", on="n1")
    site.run(f"ln {own}.file {own}", user="bob", on="n1")
    replaced = REPLACED.replace("bob (uid 5002)", "all users")
    assert jobs.stage() == (6, f"stage: n1: {own}: {replaced}\n")
    assert [*site.path("n1", trap).iterdir()] == []


def test_a_folder_that_is_private_in_stage_toml_alone_is_no_trap(site: Site, jobs: Jobs) -> None:
    """Bob has what is in /tmp of the node, which is to be another one for each job."""
    records, home = "/tmp/.slurm-stage", f"/tmp/.slurm-stage/{ALICE}"
    site.run(f"mkdir -p -m 777 /tmp/trap/{ALICE}", user="bob", on="n1")
    for make, problem in (
        ("mkdir -m 777", f"belongs to uid {BOB}, not to uid 0 or uid {ALICE}"),
        ("touch", "is a plain file, not a folder"),
        ("ln -s /tmp/trap", "is a symbolic link, not a folder"),
    ):
        site.run(f"{make} {records}", user="bob", on="n1")
        message = f"stage: n1: {records} {problem}; tell the administrator\n"
        assert jobs.stage("/tmp/x") == (6, message)
        site.run(f"rm -r {records}", user="bob", on="n1")
    assert [*site.path("n1", f"/tmp/trap/{ALICE}").iterdir()] == []
    assert jobs.stage("/tmp/x")[0] == 0
    for command in (
        f"ls {home}", f"mkdir {records}/{BOB}", f"mv {records} /tmp/taken", "rm -f /tmp/x",
    ):  # fmt: skip
        attack(site, command)
    locks = site.popen(
        f"exec 3</tmp 4<{records} 5</tmp/x 6<{PARENT}; for each in 3 4 5 6; do flock $each; done;"
        "echo held; sleep 600",
        user="bob", on="n1",
    )  # fmt: skip
    try:
        assert locks.stdout
        assert locks.stdout.readline() == "held\n"
        site.run("echo newer >/shared/x")
        site.run(f"mkdir -m 700 {jobs.folder()}", on="n1")
        for path in ("/tmp/x", f"{jobs.folder()}/x"):
            code, text = jobs.stage(path)
            assert code == 0, text
            assert site.copy("n1", path).read_text() == "newer\n"
        code, text = jobs.as_root("evict", "--user=alice", "/tmp/x")
        assert (code, text) == (0, "stage: /tmp/x: evicted on n1\n")
    finally:
        locks.kill()
        locks.wait()


def test_a_namespace_hides_what_another_user_has_in_the_nodes_folder(
    site: Site, jobs: Jobs
) -> None:
    """Bob's process stays in the folder over which that of the jobs is mounted."""
    site.run("mkdir -m 777 /tmp/.slurm-stage; echo bobs >/tmp/x", user="bob", on="n1")
    inside = site.popen(
        "cd /tmp; echo there; read; ls -A . .slurm-stage; cat x", user="bob", on="n1"
    )
    assert inside.stdout
    assert inside.stdout.readline() == "there\n"
    site.run("mount -t tmpfs -o size=64m,mode=1777 none /tmp", user="root", on="n1")
    try:
        assert jobs.stage("/tmp/x")[0] == 0
        assert digest(site.copy("n1", "/tmp/x")) == digest(site.shared("x"))
        assert inside.communicate("\n")[0] == ".:\n.slurm-stage\nx\n\n.slurm-stage:\nbobs\n"
    finally:
        site.run("umount /tmp", user="root", on="n1")
    # Outside of the job, root's commands find what bob has there.
    site.run(f"mkdir /tmp/.slurm-stage/{ALICE} /tmp/.slurm-stage/0", user="bob", on="n1")
    assert jobs.as_root("evict", "--user=alice", "/tmp/x") == (2, no_copy("/tmp/x", "alice"))
    assert "nothing is staged for anybody" in jobs.as_root("status", "--by=user")[1]
    assert site.copy("n1", "/tmp/x").read_text() == "bobs\n"


def test_a_full_disk_leaves_no_part_of_a_file(site: Site, jobs: Jobs) -> None:
    own = jobs.folder()
    site.run(f"mkdir -m 700 {own}", on="n1")
    fill = f"head -c 100M /dev/zero >{PARENT}/bobs"
    assert site.run(fill, user="bob", on="n1", check=False).returncode != 0
    code, text = jobs.stage()
    assert code == 5
    assert text.startswith(f"stage: n1: {own}: not enough room: 2.9 MiB needed, 0 B free, ")
    assert text.endswith(f"; ask for more by {HINT}\n")
    assert [*site.path("n1", own).glob("x*")] == []
    assert [*site.path("n1", own).glob(".slurm-stage/*/partial/*")] == []
    site.run(f"rm {PARENT}/bobs", user="bob", on="n1")
    assert jobs.stage()[0] == 0


def test_a_stage_at_the_start_of_a_job_uses_its_own_folder_alone(site: Site) -> None:
    """Neither one that another user made, nor one by the number of restarts of an outer job."""
    site.run("echo new >/shared/x")
    jobs = []
    for user in ("bob", "alice"):
        restarted = {"SLURM_RESTART_COUNT": "3"}
        value = "--stage=/shared/x:$SLURM_TMPDIR/x"
        job = site.sbatch("true", "-wn1", "--hold", value, env=restarted)
        site.run(f"mkdir -m 700 {PARENT}/alice.{job.id}.0", user=user, on="n1")
        site.run(["scontrol", "release", job.id])
        jobs.append(job)
    for job in jobs:
        job.wait()
    theirs, own = (f"{PARENT}/alice.{job.id}.0" for job in jobs)
    assert jobs[0].output() == (
        f"stage: n1: {theirs}: {REPLACED}\n"
        "stage: the job's own program was not started (exit code 6)\n"
    )
    assert [*site.path("n1", theirs).iterdir()] == []
    assert jobs[1].output().startswith(f"stage: {own}/x: 4 B from /shared/x to n1 in ")


def forge(site: Site, jobs: Jobs, destination: str) -> None:
    """Write a record of alice's for this path beneath the folder of her job."""
    own = jobs.folder()
    cache = Cache(str(site.path("n1", f"{own}/.slurm-stage/{ALICE}")))
    record = json.loads(Path(cache.record_path(f"{own}/x")).read_text())
    forged = Path(cache.record_path(destination))
    forged.write_text(json.dumps(record | {"destination": destination}))
    os.chown(forged, ALICE, ALICE)


def test_records_that_alice_forges_lead_root_nowhere_else(site: Site, jobs: Jobs) -> None:
    own, bobs = jobs.folder(), jobs.folder("bob")
    for user in ("alice", "bob"):
        site.run(f"mkdir -m 700 {jobs.folder(user)}", user=user, on="n1")
        assert jobs.stage(user=user)[0] == 0
    site.run(f"ln -s {bobs} {own}/away; ln -s /etc {own}/etc", on="n1")
    upward = f"{own}/../{os.path.basename(bobs)}/x"
    for destination in (f"{bobs}/x", upward, f"{own}/away/x", f"{own}/etc/passwd", "/nvme/x"):
        forge(site, jobs, destination)
    records = f"{own}/.slurm-stage"
    for uid in (0, BOB):
        site.run(f"cp -a {records}/{ALICE} {records}/{uid}", on="n1")
    # As each user's, as all users', as root's own.
    code, text = jobs.as_root("status", "--by=user")
    assert code == 0
    assert re.findall(r"^ *(\w+) +\d+ +0 +(\d+) ", text, re.MULTILINE) == [("alice", "1")]
    assert "nothing is staged for bob" in jobs.as_root("status", "--user=bob")[1]
    assert "nothing is staged for you" in jobs.as_root("status", "--by=file")[1]
    code, text = jobs.as_root("status", "--by=file", "--user=alice")
    assert re.findall(rf"^ *({PARENT}/\S+/\w+) .* \d (\w+) ", text, re.MULTILINE) == [
        (f"{own}/away/x", "missing"), (f"{own}/etc/passwd", "missing"), (f"{own}/x", "ready"),
    ]  # fmt: skip
    for owner in ("alice", "bob"):
        for path in (f"{bobs}/x", upward):
            answer = jobs.as_root("evict", f"--user={owner}", path)
            assert answer == (2, no_copy(f"{bobs}/x", owner))
    closed = f"{own}/away belongs to bob (uid {BOB}), and is closed to you; choose another place"
    code, text = jobs.as_root("evict", "--user=alice", "--older=1s")
    assert (code, text.splitlines()) == (
        6,
        [
            f"stage: {own}/x: evicted on n1",
            f"stage: kept on n1: {own}/etc/passwd (not the copy, which is gone)",
            f"stage: n1: {closed}",
        ],
    )
    assert not site.copy("n1", f"{own}/x").exists()
    assert digest(site.copy("n1", f"{bobs}/x")) == digest(site.shared("x"))
    code, text = jobs.stage(user="bob")
    assert (code, text.split(",")[0]) == (0, f"stage: {bobs}/x: current on n1")
    # Alice's own stage does not follow what leads away, either.
    assert jobs.stage(f"{own}/away/x") == (6, f"stage: n1: {closed}\n")
    site.run(f"rm -r {records}", on="n1")
    for make, problem in (
        ("ln -s /nvme/.slurm-stage", "is a symbolic link, not a folder"),
        ("touch", "is a plain file, not a folder"),
        ("mkdir -m 777", f"can be written to by users other than uid 0 or uid {ALICE}"),
    ):
        site.run(f"{make} {records}", on="n1")
        before = sorted(site.path("n1", "/nvme/.slurm-stage").rglob("*"))
        message = f"stage: n1: {records} {problem}; tell the administrator\n"
        assert jobs.stage() == (6, message)
        assert "nothing is staged for anybody" in jobs.as_root("status", "--by=user")[1]
        assert sorted(site.path("n1", "/nvme/.slurm-stage").rglob("*")) == before
        site.run(f"rm -r {records}", on="n1")


def test_what_a_job_sets_leads_into_no_folder_of_another(site: Site, jobs: Jobs) -> None:
    own, bobs = jobs.folder(), jobs.folder("bob")
    for user in ("alice", "bob"):
        site.run(f"mkdir -m 700 {jobs.folder(user)}", user=user, on="n1")
    as_bob = {"USER": "bob", "LOGNAME": "bob", "SLURM_JOB_USER": "bob", "SLURM_JOB_UID": str(BOB)}

    def plan(destination: str, **variables: str) -> tuple[int, str]:
        of_job = {"JOB_ID": jobs.alice.id, "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1"}
        environment = {f"SLURM_{name}": value for name, value in of_job.items()} | variables
        line = [STAGECTL, "plan", f"/shared/x:{destination}"]
        return said(site.run(line, on="n1", env=environment, check=False))

    outside = "is not beneath a folder that this site stages to; choose a destination beneath"
    places = f"/nvme or {own} or /tmp"
    assert plan(f"{bobs}/x", **as_bob) == (3, f"stage: {bobs}/x {outside} {places}\n")
    code, text = plan("$SLURM_TMPDIR/x", **as_bob)
    assert (code, text.split(": ")[1]) == (0, f"{own}/x")
    code, text = plan("$SLURM_TMPDIR/x", SLURM_RESTART_COUNT="9")
    assert (code, text) == (6, f"stage: n1: there is no {own[:-1]}9: ask for it by {HINT}\n")
    code, text = plan("$SLURM_TMPDIR/x", SLURM_JOB_ID=jobs.bob.id)
    assert code == 8
    assert f"Unable to create step for job {jobs.bob.id}: Access/permission denied" in text
    assert plan("$SLURM_TMPDIR/x", SLURM_JOB_ID=f"../{jobs.bob.id}")[0] == 2
    name = "/nvme/.%x/x"
    for destination, variable, value, problem in (
        ("$SLURM_TMPDIR/x", "SLURM_RESTART_COUNT", "../bob", "how often the job was restarted"),
        (name, "SLURM_JOB_NAME", ".", "the job's name"),
        (name, "SLURM_JOB_NAME", "..", "the job's name"),
        (name, "SLURM_JOB_NAME", "a/../../etc", "the job's name"),
        (name, "SLURM_JOB_NAME", "a\n/b", "the job's name"),
        (name, "SLURM_JOB_NAME", "a\x1b[31m", "the job's name"),
    ):
        code, text = plan(destination, **{variable: value})
        shown = re.sub(r"[\n\x1b]", "?", value)
        assert code == 2
        assert f" is {problem}, '{shown}', which cannot be in a path" in text
    code, text = plan(name, SLURM_JOB_NAME="n" * 300)
    assert (code, text) == (6, f"stage: n1: /nvme/.{'n' * 300}/x: File name too long\n")
    code, text = plan("/nvme/%x", SLURM_JOB_NAME="a,replace")
    assert (code, text.split(": ")[1]) == (0, "/nvme/a,replace")
    # Root's commands ask Slurm, whose text a name may imitate.
    code, text = said(site.run([STAGECTL, "status"], user="root", on="n1", env=as_bob, check=False))
    assert (code, f"{OWN}, /tmp: there in a job only" in text) == (0, True), text
    code, text = said(
        site.run([STAGECTL, "status"], user="root", on="n1", check=False,
                 env={"SLURM_JOB_UID": "x"})
    )  # fmt: skip
    assert (code, "Traceback" in text) == (0, False)
    renamed = f"x UserId=root(0) Restarts=../bob.{jobs.bob.id} ArrayTaskId=../.. JobName=../x"
    site.run(["scontrol", "update", f"JobId={jobs.alice.id}", f"JobName={renamed}"])
    code, text = jobs.as_root("status", "--by=file", "--user=alice")
    assert (code, f"\n{own}: " in text) == (0, True), text


def test_roots_programs_do_not_look_into_such_folders(site: Site, jobs: Jobs) -> None:
    own = jobs.folder()
    site.run(f"mkdir -m 700 {own}", on="n1")
    for path in (f"{own}/x", "/tmp/x", "/nvme/x"):
        assert jobs.stage(path)[0] == 0
    textfile = "/run/stage.prom"
    extra = f'[cache]\nheadroom = "900TB"\n[metrics]\ntextfile = "{textfile}"\n'
    trace = "/run/trace"
    config = "--config /etc/slurm/stage.toml"
    site.write_policy(POLICY + extra)
    try:
        site.run(
            f"{PYTHON} -I -m stager.node.prolog {config} --job 999 {ALICE}", user="root", on="n1"
        )
        room = f"/run/slurm-stage/{ALICE}"
        site.run(f"printf '{own}/x\\0/tmp/x\\0' >{room}/999.uses", on="n1")
        for program in (f"prolog {config} {ALICE}", f"epilog {config} 999 {ALICE}"):
            site.run(
                f"rm -f /run/slurm-stage/after-boot.json /run/slurm-stage/*.prepared; strace -f"
                f" -qq -e trace=%file -o {trace} {PYTHON} -I -m stager.node.{program}",
                user="root", on="n1",
            )  # fmt: skip
            text = site.path("n1", trace).read_text()
            assert '"/nvme' in text
            assert PARENT not in text
            assert '"/tmp' not in text
        shown = site.path("n1", textfile).read_text()
        assert 'root="/nvme"' in shown
        assert PARENT not in shown
        assert "/tmp" not in shown
        for path in (f"{own}/x", "/tmp/x"):
            assert digest(site.copy("n1", path)) == digest(site.shared("x"))
    finally:
        site.write_policy(POLICY)
        site.run(f"rm -f {trace} {textfile}", user="root", on="n1")


def test_a_variable_that_leads_out_is_refused_with_stage_toml(site: Site) -> None:
    for old, new, problem in (
        (f'= "{OWN}" }}', f'= "{OWN}/../.." }}', "variables.SLURM_TMPDIR"),
        (f'= "{OWN}" }}', '= "/nvme/../etc" }', "variables.SLURM_TMPDIR"),
        (f'= "{OWN}" }}', '= "/etc/%x" }', "variables.SLURM_TMPDIR"),
    ):
        assert old in POLICY
        with site.policy(POLICY.replace(old, new)):
            code, text = said(site.run([STAGECTL, "site"], check=False))
            assert code == 3
            assert problem in text
    site.write_policy(POLICY)
