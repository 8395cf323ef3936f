"""Attacks of one user on another's copies in the node's store, or on root where it makes the store.

Each is tried for real, as the second user. What root's part refuses is in tests/node as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.hostile import forge_record, own_filesystem
from tests.cluster.pair import PARENT, Pair, started
from tests.cluster.site import digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.site import Site

ALICE, BOB = USERS["alice"], USERS["bob"]
STORE = f"{PARENT}/site/store"
POLICY = f"""
roots = ["{PARENT}/%u.%j.%r"]
[cache]
keep_free = 0
user_limit = 0
store = "{STORE}"
"""


@pytest.fixture(scope="module", autouse=True)
def _disk(installed_site: Site) -> Iterator[None]:
    site = installed_site
    site.run(f"mkdir -m 755 {PARENT}", user="root")
    site.run(f"mount -t tmpfs -o size=64m,mode=1777 none {PARENT}", user="root", on="n1")
    try:
        with site.policy(POLICY):
            yield
    finally:
        site.run(f"umount {PARENT}", user="root", on="n1")
        site.run(f"rmdir {PARENT}", user="root")


class Jobs(Pair):
    """The jobs, which stage one source."""

    def stage(self, name: str = "x", user: str = "alice", options: str = "") -> tuple[int, str]:
        """Return the exit code, and what is said, of the user's stage to that job's folder."""
        return self.run("stage", f"/shared/x:{self.folder(user)}/{name}{options}", user=user)


@pytest.fixture
def jobs(site: Site) -> Iterator[Jobs]:
    pair = Jobs(site, *started(site))
    for user in ("alice", "bob"):
        site.run(["mkdir", "-m", "700", pair.folder(user)], user=user, on="n1")
    yield pair
    pair.end()
    site.run(f"find {PARENT} -mindepth 1 -delete", user="root", on="n1")


def entry(site: Site, user: int = ALICE) -> Path:
    """Return the only entry of a user in the store."""
    [found] = site.path("n1", f"{STORE}/.slurm-stage/{user}/store").glob("*/x")
    return found


def inside(path: Path) -> str:
    """Return the path on the node of what is there at the host's ``path``."""
    return STORE + str(path).partition(STORE)[2]


def test_what_another_user_made_first_is_not_used(site: Site, jobs: Jobs) -> None:
    taken, trap = f"{PARENT}/site", f"{PARENT}/trap"
    site.run(f"mkdir -m 777 {trap}", user="bob", on="n1")
    # Unit tests of root's part have more.
    for number, make in enumerate((f"ln -s {trap}", "mkdir -m 777", "touch")):
        site.run(f"{make} {taken}", user="bob", on="n1")
        code, text = jobs.stage(f"x{number}")
        assert code == 0, text
        assert f"note: not kept for the next job: n1: {STORE}" in text
        site.run(f"rm -r {taken}", user="bob", on="n1")
    # On a filesystem of bob's own, folders seem to be root's.
    site.run(f"mkdir {taken}", user="bob", on="n1")
    with own_filesystem(site, "/opt", taken, node="n1", user="bob", options="allow_other"):
        seen = site.run(["stat", "-c", "%u %a", taken], user="root", on="n1").stdout
        code, text = jobs.stage("y")
    assert (seen, code) == ("0 755\n", 0)
    assert f"note: not kept for the next job: n1: {STORE}" in text
    site.run(f"rm -r {taken}", user="bob", on="n1")
    assert [*site.path("n1", trap).iterdir()] == []
    assert jobs.stage("x")[0] == 0
    assert entry(site).stat().st_uid == ALICE


def test_no_user_reaches_what_another_has_in_the_store(site: Site, jobs: Jobs) -> None:
    site.run("chmod 6755 /shared/x")
    assert [jobs.stage(name, options=how)[0] for name, how in (("x", ""), ("l", ",via=link"))] == [
        0, 0,
    ]  # fmt: skip
    jobs.stage("x", user="bob")
    before = entry(site).stat()
    assert (before.st_uid, before.st_mode & 0o7777) == (ALICE, 0o500)
    own, home = inside(entry(site)), f"{STORE}/.slurm-stage/{ALICE}"
    bobs = f"{STORE}/.slurm-stage/{BOB}"
    commands = (
        f"ls {home}", f"ls {home}/store", f"cat {own}", f"cat {home}/records/*",
        f"ln {own} {PARENT}/taken", f"ln {own} {bobs}/taken", f"ln -P {home} {PARENT}/taken",
        f"mv {home} {bobs}/taken", f"mv {STORE} {PARENT}/taken", f"rm -r {home}",
        f"mv {STORE}/.slurm-stage {PARENT}/taken", f"touch {own}", f"chmod 777 {home}",
        f"touch {home}/records/forged.json", f"mkdir {STORE}/.slurm-stage/{USERS['carol']}",
        f"mkdir {STORE}/mine", f"chmod 777 {STORE}", f"flock {home}/lock true", f"head {home}/lock",
        f"mount -t tmpfs none {home}", f"cat {jobs.folder()}/l", f"ln {jobs.folder()}/x {PARENT}/y",
        f"mknod {bobs}/store/device b 1 0",
    )  # fmt: skip
    tries = "".join(f"{command} && echo done: {command}\n" for command in commands)
    output = site.run(f"exec 2>&1\n{tries}true", user="bob", on="n1").stdout
    assert len(re.findall("denied|not permitted|not allowed|superuser", output)) == len(commands)
    assert "done: " not in output
    # What a user mounts in a namespace of his own is seen there alone.
    mount = f"mount -t tmpfs none {STORE} && touch {STORE}/mine"
    site.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount], user="bob",
             on="n1", check=False)  # fmt: skip
    for command in ("evict", "verify"):
        assert jobs.run(command, own) == (2, absent(own))
    assert jobs.run("evict", "/shared/x")[0] == 9  # bob's own, which his job uses
    after = entry(site).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert "nothing moved" in jobs.stage("again")[1]


def absent(path: str) -> str:
    return f"stage: n1: {path} is no copy of yours here; stagectl status lists what is staged\n"


def test_a_forged_record_reaches_nothing_of_another_user(site: Site, jobs: Jobs) -> None:
    for user in ("alice", "bob"):
        assert jobs.stage(user=user)[0] == 0
    kept = entry(site)
    like = inside(entry(site, BOB))
    for path in (
        inside(kept),
        f"{jobs.folder()}/x",
        f"{STORE}/../../etc/hostname",
        "/etc/hostname",
    ):
        forge_record(site, path, like, node="n1", root=STORE, source="/shared/forged")
    for words in (["evict", inside(kept)], ["evict", "/shared/forged"], ["verify"]):
        jobs.run(*words)
    assert digest(kept) == digest(site.shared("x"))
    assert digest(site.path("n1", f"{jobs.folder()}/x")) == digest(site.shared("x"))
    assert site.path("n1", "/etc/hostname").exists()
    assert "nothing moved" in jobs.stage("again")[1]


def test_what_a_user_puts_in_the_place_of_an_entry_is_not_used(site: Site, jobs: Jobs) -> None:
    site.run("rm -f /shared/other; echo other >/shared/other; chmod 600 /shared/other")
    assert jobs.stage("0")[0] == 0
    path = inside(entry(site))
    for number, make in enumerate(
        ("ln -s /shared/other", "mkfifo", "mkdir", "cp /shared/other"), 1
    ):
        site.run(f"rm -rf {path}; {make} {path} || true", on="n1")
        code, text = jobs.stage(str(number))
        assert (code, "from /shared/x to n1" in text) == (0, True), text
        assert digest(site.path("n1", f"{jobs.folder()}/{number}")) == digest(site.shared("x"))
        assert entry(site).is_file()
    assert site.shared("other").read_text() == "other\n"


def test_who_fills_the_store_keeps_no_other_from_it(site: Site, jobs: Jobs) -> None:
    with site.policy(POLICY + "size = 5000000\n"):
        assert [jobs.stage(user=user)[0] for user in ("bob", "alice")] == [0, 0]
        site.run("head -c 3000000 /dev/urandom >/shared/x2")
        code, text = jobs.run("stage", f"/shared/x2:{jobs.folder('bob')}/x2")
        assert code == 0
        assert "the size of the node's store is 4.8 MiB" in text
        assert "stay: /shared/x (in use)" in text
        jobs.end()
    [left] = site.path("n1", f"{STORE}/.slurm-stage").glob("*/store/*/*")
    assert left.name == "x"
