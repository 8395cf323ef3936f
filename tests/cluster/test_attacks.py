"""Attacks of one user on another, or on root, on nodes that both use.

Each is tried for real, as the second user; alice's stage must be right or be refused.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from stager.base.digest import digest_of_data
from stager.request.items import StageRequest
from tests.cluster.cluster import ACCOUNTS, SITE_ACCOUNT, USERS
from tests.cluster.hostile import dead_folder, forge_record, never_answers, own_filesystem
from tests.cluster.site import (
    HANGS,
    PLUGSTACK,
    POLICY,
    PREFIX,
    PYTHON,
    SOURCE,
    STAGECTL,
    digest,
)
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"
WISH = "--stage=/shared/data:/nvme/data"
ALICE, BOB = USERS["alice"], USERS["bob"]


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run("rm -f /shared/data; head -c 3000000 /dev/urandom >/shared/data")


def attack(site: Site, command: str, node: str = "n2") -> str:
    """Try ``command`` as bob on a node; return its error messages. It must fail."""
    done = site.run(command, user="bob", on=node, check=False)
    assert done.returncode != 0, "bob got what he wanted"
    return done.stderr


def stage(site: Site, *options: str, nodes: str = "n1,n2") -> str:
    """Return the output of alice's job on these nodes: two, as each takes the same time again."""
    job = site.sbatch("true", f"-w{nodes}", *(options or [WISH]))
    job.wait()
    return job.output()


def check_copies(site: Site) -> None:
    for node in ("n1", "n2"):
        copy = site.copy(node, "/nvme/data")
        assert digest(copy) == digest(site.shared("data"))
        assert (copy.stat().st_uid, copy.stat().st_nlink) == (ALICE, 1)


# The library by which ranks know each other


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_no_stage_goes_on_without_the_library_that_closes_strangers_connections(
    site: Site, node: str
) -> None:
    library = f"{PREFIX}/lib/stage_peers.so"
    closed = f"cp {library} /run/closed; chmod 600 /run/closed; mount --bind /run/closed {library}"
    site.run(closed, user="root", on=node)
    try:
        output = stage(site)
    finally:
        site.run(f"umount {library}", user="root", on=node)
    where = "" if node == "n1" else f"{node}: "  # the first node starts no rank
    assert output == (
        f"stage: {where}{library} cannot be loaded, without which ranks accept connections from "
        "anyone; tell the administrator to install slurm-stage there again\n"
        f"{NOT_STARTED.format(8)}"
    )
    stage(site)
    check_copies(site)


# Records and locks


def test_no_user_reads_or_forges_records_and_locks_of_another(site: Site) -> None:
    stage(site)
    home = f"/nvme/.slurm-stage/{ALICE}"
    for command in (
        f"ls {home}",
        f"cat {home}/lock",
        f"cat {home}/records/*",
        f"touch {home}/records/forged.json",
        f"touch {home}/partial/guessed",
        f"mv {home} /nvme/.slurm-stage/{BOB}",
        f"mkdir /nvme/.slurm-stage/{USERS['carol']}",
        "mv /nvme/.slurm-stage /nvme/taken",
        f"touch /run/slurm-stage/jobs/17.{BOB}",
        "ls /run/slurm-stage/jobs",
    ):
        assert "denied" in attack(site, command) or "not permitted" in attack(site, command)
    assert "current on n[1-2]" in stage(site)


def test_a_record_does_not_make_a_file_current_for_another_user(site: Site) -> None:
    """Bob stages to alice's destination first and changes his copy; his record calls it current."""
    site.sbatch("true", "-wn1,n2", WISH, user="bob").wait()
    for node in ("n1", "n2"):
        site.run("chmod 666 /nvme/data; echo poison >/nvme/data", user="bob", on=node)
    assert stage(site) == (
        f"stage: n[1-2]: /nvme/data belongs to bob (uid {BOB}); choose another destination, such "
        "as /nvme/alice/data\n" + NOT_STARTED.format(6)
    )


def test_a_damaged_record_is_ignored_and_the_file_staged_again(site: Site) -> None:
    stage(site)
    (record,) = site.records("n1")
    newer = json.dumps({**json.loads(record.read_text()), "version": 99})
    for text in ("[" * 100_000, newer):  # unit tests damage it in more ways
        record.write_text(text)
        assert "from the copy on n2 to n1 in" in stage(site)
        assert record.read_text() != text
    check_copies(site)


# The path to the destination


@pytest.mark.parametrize("trap", ["mkdir -m 777 /nvme/new", "mkdir -m 1777 /nvme/new"])
def test_a_parent_folder_of_another_user_is_refused(site: Site, trap: str) -> None:
    site.run(trap, user="bob", on="n3")
    assert stage(site, "--stage=/shared/data:/nvme/new/data", nodes="n1,n3") == (
        f"stage: n3: /nvme/new belongs to bob (uid {BOB}), who could replace what is staged there; "
        f"choose another destination\n{NOT_STARTED.format(6)}"
    )
    assert not site.copy("n1", "/nvme/new").exists()


def test_a_folder_of_roots_in_which_others_may_write_is_refused_or_noted(site: Site) -> None:
    """Without the sticky bit, whoever may write in a folder can replace what is in it."""
    for node in ("n1", "n2"):
        site.run(
            "mkdir -m 2777 /nvme/all; mkdir -m 2770 /nvme/team; chgrp project /nvme/team", on=node
        )
    assert stage(site, "--stage=/shared/data:/nvme/all/data") == (
        "stage: n[1-2]: /nvme/all: all users could replace what is staged there; choose another "
        "destination, or have its owner set the sticky bit (chmod +t)\n" + NOT_STARTED.format(6)
    )
    note = (
        "stage: /nvme/team/data: note: all members of the group project could replace the copy, as "
        "they may write in /nvme/team; choose another destination, or have its owner set the "
        "sticky bit (chmod +t), unless that is wanted\n"
    )
    for _ in range(2):  # also where the copy is current
        assert note in stage(site, "--stage=/shared/data:/nvme/team/data")
    for node in ("n1", "n2"):
        site.run("chmod +t /nvme/all /nvme/team", on=node)
    for folder in ("all", "team"):
        assert "note: all" not in stage(site, f"--stage=/shared/data:/nvme/{folder}/data")


def test_a_symbolic_link_as_parent_folder_is_refused(site: Site) -> None:
    site.run("mkdir /nvme/mine; echo precious >/nvme/mine/data", on="n3")
    site.run("ln -s /nvme/mine /nvme/new", user="bob", on="n3")
    assert stage(site, "--stage=/shared/data:/nvme/new/data", nodes="n1,n3") == (
        f"stage: n3: /nvme/new is a symbolic link that belongs to bob (uid {BOB}), not a folder of "
        f"yours; choose another destination\n{NOT_STARTED.format(6)}"
    )
    assert site.copy("n3", "/nvme/mine/data").read_text() == "precious\n"


def test_a_parent_swapped_for_a_link_during_a_stage_is_not_followed(site: Site) -> None:
    """While alice stages, bob keeps replacing a missing parent folder by a symbolic link."""
    site.run("fallocate -l 200M /shared/large", user="alice")
    site.run("mkdir /nvme/mine; echo precious >/nvme/mine/data", on="n3")
    swap = site.popen(
        "while :; do rmdir /nvme/new 2>/dev/null; ln -sn /nvme/mine /nvme/new 2>/dev/null && "
        "echo swapped; mv -T /nvme/new /nvme/old 2>/dev/null; rm -f /nvme/old; done",
        user="bob", on="n3",
    )  # fmt: skip
    try:
        for _ in range(3):
            job = site.sbatch("true", "-wn3,n4", "--stage=/shared/large:/nvme/new/data")
            state = job.wait(120)
            assert site.copy("n3", "/nvme/mine/data").read_text() == "precious\n"
            new = site.copy("n3", "/nvme/new/data")
            if state.exit_code == "0:0":
                assert new.stat().st_size == 200 << 20
            else:
                assert state.exit_code == "6:0", job.output()
    finally:
        swap.kill()
        swap.wait()
        site.run("rm -f /shared/large")


def test_a_symbolic_link_at_the_destination_is_neither_replaced_nor_followed(site: Site) -> None:
    site.run("echo precious >/nvme/mine; ln -s /nvme/mine /nvme/data", on="n2")
    assert stage(site) == (
        "stage: n2: /nvme/data is a symbolic link that was not staged; it is kept: "
        "move it, delete it, choose another destination, or add the option replace\n"
        + NOT_STARTED.format(6)
    )
    assert site.copy("n2", "/nvme/mine").read_text() == "precious\n"
    assert site.copy("n2", "/nvme/data").is_symlink()
    assert not site.copy("n1", "/nvme/data").exists()


def test_a_copy_with_a_second_hard_link_is_not_current_nor_replaced_by_others(site: Site) -> None:
    stage(site)
    # Bob may not link a file that he cannot write. Alice may; then her copy has two names.
    assert "not permitted" in attack(site, "ln /nvme/data /nvme/bobs")
    site.run("ln /nvme/data /nvme/second", on="n2")
    assert "from the copy on n1 to n2 in" in stage(site)
    check_copies(site)
    # To bob, who stages there, it is another user's file.
    job = site.sbatch("true", "-wn2", "--stage=/shared/data:/nvme/second", user="bob")
    job.wait()
    assert job.output() == (
        f"stage: n2: /nvme/second belongs to alice (uid {ALICE}); choose another destination, such "
        "as /nvme/bob/second\n" + NOT_STARTED.format(6)
    )


# Row 3: a copy is its owner's alone


SECRET = "for alice alone"
#: Alice's private places: what she runs to make each, and the directive's source and options. Each
#: file itself is readable for everybody.
PRIVATE = {
    "a file in a closed home": (
        "mkdir -m 700 closed; echo {secret} >closed/file",
        "/home/alice/closed/file", "",
    ),
    "a folder in one that was made with umask 077": (
        "umask 077; mkdir -p mask/set/sub; cd mask; echo {secret} >set/sub/file; chmod -R a+rX set",
        "/home/alice/mask/set", "",
    ),
    "an archive in a closed home": (
        "mkdir -m 700 tars; cd tars; mkdir set; echo {secret} >set/file; tar cf set.tar set",
        "/home/alice/tars/set.tar", ",extract",
    ),
    "parts of a folder in a closed home": (
        "mkdir -m 700 parts; mkdir parts/set; echo {secret} | tee parts/set/{1..4}",
        "/home/alice/parts/set", ",mode=shard",
    ),
    "a file with an access control list": (
        "mkdir lists; echo {secret} >lists/file; {deny} lists/file",
        "/home/alice/lists/file", "",
    ),
    "a file below a folder with an access control list": (
        "mkdir -p above/set; echo {secret} >above/set/file; {deny} above",
        "/home/alice/above/set/file", "",
    ),
    "a file with an access control list in a folder": (
        "mkdir -p within/set; echo {secret} >within/set/file; {deny} within/set/file",
        "/home/alice/within/set", "",
    ),
}  # fmt: skip
#: The command that keeps bob out of a file by an access control list (of which 4 denies him).
DENY = (
    'python3 -c \'import os, struct, sys; os.setxattr(sys.argv[1], "system.posix_acl_access", '
    'struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in '
    f"((1, 7, -1 % 2**32), (2, 0, {BOB}), (4, 5, -1 % 2**32), (16, 5, -1 % 2**32), "
    "(32, 5, -1 % 2**32))))'"
)


def make_private(site: Site) -> None:
    """Make the sources of `PRIVATE`, and let bob offer one of them as a link of his own."""
    site.run("rm -rf /home/alice/*/")
    site.run("rm -f /shared/offered", user="bob")
    for make, source, _ in PRIVATE.values():
        site.run(make.replace("{secret}", f"'{SECRET}'").replace("{deny}", DENY))
        assert stolen(site, [source], "login") == [], "it is private at its source"
    site.run("ln -s /home/alice/closed/file /shared/offered", user="bob")


def private_items(more: str = "") -> dict[str, str]:
    """Return the options to stage all private sources, by the path of each copy."""
    offers = [*((source, given) for _, source, given in PRIVATE.values()), ("/shared/offered", "")]
    copies = [f"/nvme/private{number}" for number in range(len(offers))]
    return {
        copy: f"--stage={source}:{copy}{given}{more}"
        for copy, (source, given) in zip(copies, offers, strict=True)
    }


def stolen(site: Site, paths: Iterable[str], node: str, user: str = "bob") -> list[str]:
    """Return those of the ``paths`` in or at which the user can read the secret."""
    look = f"for path in {' '.join(paths)}; do grep -rqs '{SECRET}' $path && echo $path; done; true"
    return site.run(look, user=user, on=node).stdout.split()


def test_a_copy_is_closed_to_those_who_could_not_reach_its_source(site: Site) -> None:
    make_private(site)
    items = private_items()
    output = stage(site, *items.values())
    assert "stage: /nvme/private0: 16 B from /home/alice/closed/file to n[1-2]" in output
    for node in ("n1", "n2"):
        assert stolen(site, items, node) == []
        assert len(stolen(site, items, node, user="alice")) == len(items)


def test_a_users_own_word_opens_the_copy_until_it_is_taken_back(site: Site) -> None:
    """The control of the test above: the same sources, shared by their owner's own word."""
    make_private(site)
    shared, items = private_items(",share=all"), private_items()
    stage(site, *shared.values())
    for node in ("n1", "n2"):
        assert stolen(site, items, node) == list(items)
    stage(site, *items.values())
    for node in ("n1", "n2"):
        assert stolen(site, items, node) == []


def test_a_copy_for_the_group_is_read_by_its_members_alone(site: Site) -> None:
    """Alice and carol are in the group; bob is not."""
    site.run(
        "rm -rf /shared/project; mkdir -m 755 /shared/project; cd /shared/project; mkdir set; "
        f"echo {SECRET} | tee set/file >file; chgrp -R project ."
    )
    copies = ["/nvme/file", "/nvme/set"]
    items = [f"--stage=/shared/project/{copy[6:]}:{copy},share=group" for copy in copies]
    stage(site, *items)
    for node in ("n1", "n2"):
        assert stolen(site, copies, node, user="carol") == copies
        assert stolen(site, copies, node) == []
    job = site.sbatch("true", "-wn1,n2", items[0], user="bob")
    job.wait()
    assert "share=group is for the source's group" in job.output()


def test_what_only_a_users_own_mount_shows_stays_with_the_user(site: Site) -> None:
    """The kernel lets nobody else into a filesystem of alice's own, whatever its modes say."""
    mine, copies = "/tmp/set/mine", ["/nvme/file", "/nvme/set"]
    site.run(f"mkdir -p /tmp/behind {mine}; echo {SECRET} >/tmp/behind/file", on="n1")
    items = [f"--stage={mine}/file:/nvme/file", "--stage=/tmp/set:/nvme/set"]
    with own_filesystem(
        site, "/tmp/behind", mine, node="n1", user="alice", options="default_permissions"
    ):
        assert stolen(site, [f"{mine}/file"], "n1") == []
        site.sbatch("true", "-wn1,n2", *items).wait()
        assert stolen(site, copies, "n2", user="alice") == copies
        assert stolen(site, copies, "n2") == []
        site.sbatch("true", "-wn1,n2", *(f"{item},share=all" for item in items)).wait()
        assert stolen(site, copies, "n2") == copies
    site.run("rm -r /tmp/behind /tmp/set", on="n1")


@pytest.mark.parametrize("name", ["file", "", "set"])
def test_nothing_is_staged_of_a_filesystem_that_a_stranger_mounted(site: Site, name: str) -> None:
    """Bob's process could claim any inode, time and mode, such as those of a file of alice's."""
    site.run(
        "mkdir -p /tmp/behind /tmp/bobs/set/inner; touch /tmp/behind/file", user="bob", on="n1"
    )
    point = "/tmp/bobs/set/inner" if name == "set" else "/tmp/bobs/set"
    with own_filesystem(site, "/tmp/behind", point, node="n1", user="bob", options="allow_other"):
        source = "/tmp/bobs/set" if name == "set" else f"/tmp/bobs/set/{name}".rstrip("/")
        site.run("ln -sfn /tmp/bobs /shared/offered", user="bob")
        offered = source.replace("/tmp/bobs", "/shared/offered")
        job = site.sbatch("true", "-wn1,n2", f"--stage={offered}:/nvme/copy")
        job.wait()
    where = f"{offered}/inner" if name == "set" else offered
    assert job.output() == (
        f"stage: n1: {where} is on a filesystem that uid {BOB} mounted, who can pretend anything "
        f"of what is seen there; copy it elsewhere first\n{NOT_STARTED.format(4)}"
    )
    site.run("rm -r /tmp/behind /tmp/bobs /shared/offered", user="bob", on="n1")


# Row 4: nothing that was put in the place of a source is copied


def test_a_subfolder_swapped_for_a_link_is_not_followed(site: Site) -> None:
    """When alice's stage has listed the top of bob's folder, he swaps one of its subfolders."""
    site.run(f"rm -rf closed; mkdir -m 700 closed; echo {SECRET} >closed/file")
    swapped = 0
    for number in range(2):
        top = f"/shared/set{number}"
        make = f"rm -rf {top}*; mkdir -p {top}/sub {top}/{{1..1500}}; touch {top}/sub/file"
        site.run(make, user="bob")
        # The same path as alice's, so that a listing of the one is one of the other.
        line = ["python3", f"{SOURCE}/tests/cluster/swap.py", top, "sub", "/home/alice/closed"]
        bob = site.popen(line, user="bob")
        assert bob.stdout
        assert bob.stdout.readline() == "ready\n"
        copy = f"/nvme/set{number}"
        output = stage(site, f"--stage={top}:{copy}")
        swapped += bob.stdout.readline() == "swapped\n"
        for node in ("n1", "n2"):
            found = stolen(site, [copy], node) + stolen(site, [copy], node, user="alice")
            assert found == [], output
    assert swapped == 2
    site.run("rm -rf /shared/set?*", user="bob")


# Row 9: what alice packs is written to her own file, whatever bob puts in its place

REPLACE = """
while :; do for file in /shared/open/.packed.*; do
[ -f "$file" ] && [ ! -L "$file" ] && rm -f "$file" && ln -s /home/alice/precious "$file" && echo 1
done; done
"""


@pytest.mark.parametrize("suffix", ["sqsh", "tar.zst"])
def test_packing_writes_into_no_file_that_another_user_names(site: Site, suffix: str) -> None:
    site.run(
        "echo precious >precious; rm -rf /shared/open /shared/set; mkdir -m 777 /shared/open; "
        "mkdir /shared/set; head -c 30000000 /dev/urandom >/shared/set/data"
    )
    bob = site.popen(REPLACE, user="bob")
    try:
        for _ in range(3):
            done = site.run(
                [STAGECTL, "pack", "/shared/set", f"/shared/open/packed.{suffix}"], check=False
            )
            assert site.path("login", "/home/alice/precious").read_text() == "precious\n"
            if done.returncode:  # its name is there for a moment, before it is renamed
                assert done.returncode == 6
                assert done.stderr == (
                    f"stage: /shared/open/packed.{suffix}: somebody else replaced it while it was "
                    "written; pack into a folder where only you may write\n"
                )
            else:
                facts = site.path("login", f"/shared/open/packed.{suffix}").lstat()
                assert (stat.S_ISREG(facts.st_mode), facts.st_uid) == (True, USERS["alice"])
    finally:
        bob.kill()
    site.run("rm -rf /shared/open /shared/set")


# Row 14: what others named does not forge lines on alice's terminal

FORGED = "$'x\\nstage: all files are current\\e[2J'"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            f"mkfifo {FORGED}",
            " is a named pipe, which cannot be staged; leave it out with exclude=",
        ),
        (f"echo >{FORGED}; chmod 600 {FORGED}", ": Permission denied"),
        (f"mkdir -m 700 {FORGED}", ": Permission denied"),
    ],
    ids=["a pipe", "a file that cannot be read", "a folder that cannot"],
)
def test_a_name_in_a_message_forges_no_line(site: Site, make: str, message: str) -> None:
    site.run(f"rm -rf /shared/evil; mkdir /shared/evil; cd /shared/evil; {make}", user="bob")
    output = stage(site, "--stage=/shared/evil:/nvme/evil")
    site.run("rm -rf /shared/evil", user="bob")
    shown = "/shared/evil/x?stage: all files are current?[2J"
    assert output == f"stage: n1: {shown}{message}\n" + NOT_STARTED.format(4)


# Root's part


def evil_words(site: Site, node: str, job: str) -> None:
    """Fill bob's folder of step statuses, in which root cleans up, with traps."""
    site.run(
        f"cd /run/slurm-stage/{BOB} && rm -f {job}.* && ln -s /etc/shadow {job}.figures && "
        f"mkfifo {job}.uses && ln -s /etc {job}.0 && mkdir -p {job}.1/deep && "
        f"ln -s / {job}.2 && touch $'{job}.new\\nline'; "
        f"cd /nvme/.slurm-stage/{BOB} && rm -rf records && ln -s /etc records",
        user="bob", on=node,
    )  # fmt: skip


def test_cleaning_up_as_root_follows_no_link_and_never_blocks(site: Site) -> None:
    with site.policy('roots = ["/nvme"]\n[metrics]\ntextfile = "/run/stage.prom"\n'):
        job = site.sbatch("echo started; sleep 60", "-wn1,n2", WISH, user="bob")
        job.wait_for(lambda _: "started" in job.output())
        evil_words(site, "n2", job.id)
        before = {name: os.lstat(site.path("n2", name)) for name in ("/etc", "/etc/shadow")}
        job.cancel()
        job.wait()
        site.assert_healthy(30)
    after = {name: os.lstat(site.path("n2", name)) for name in ("/etc", "/etc/shadow")}
    assert before == after
    assert not os.path.lexists(site.path("n2", f"/run/slurm-stage/{BOB}"))
    assert "root" not in site.path("n2", "/run/stage.prom").read_text().replace("root=", "")
    assert site.leftovers() == []


@pytest.fixture
def _scripts(site: Site) -> Iterator[None]:
    """Use the site's own Prolog and Epilog beside the plugin."""
    scripts = f"Prolog={PREFIX}/libexec/job_prolog\nEpilog={PREFIX}/libexec/job_epilog\n"
    site.reconfigure(f"{scripts}PrologFlags=Alloc\n")
    yield
    site.write_plugstack(PLUGSTACK)
    site.reconfigure()


@pytest.fixture
def spy(site: Site, tmp_path: Path) -> str:
    """Make a library and Python start-up files that record the user id under which they run."""
    source = tmp_path / "spy.c"
    source.write_text(
        '#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void f(void)'
        '{ FILE *f = fopen("/shared/spy/seen", "a"); if (f) { fprintf(f, "%d\\n", (int)geteuid()); '
        "fclose(f); } }\n"
    )  # fmt: skip
    site.run("mkdir -m 777 /shared/spy; touch /shared/spy/seen; chmod 666 /shared/spy/seen")
    folder = site.shared("spy")
    line = ["cc", "-shared", "-fPIC", "-o", str(folder / "spy.so"), str(source)]
    subprocess.run(line, check=True)
    python = "import os; print(os.geteuid(), file=open('/shared/spy/seen', 'a'))\n"
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "start.py"):
        (folder / name).write_text(python)
    return "/shared/spy"


@pytest.mark.usefixtures("_scripts")
def test_no_environment_of_a_user_reaches_programs_that_run_as_root(site: Site, spy: str) -> None:
    environment = {
        "LD_PRELOAD": f"{spy}/spy.so", "LD_AUDIT": f"{spy}/spy.so", "LD_LIBRARY_PATH": spy,
        "PYTHONPATH": spy, "PYTHONSTARTUP": f"{spy}/start.py", "PYTHONHOME": spy,
        "PYTHONUSERBASE": spy, "BASH_ENV": f"{spy}/start.py", "ENV": f"{spy}/start.py",
    }  # fmt: skip
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in environment.items())])
    job = site.sbatch("true", "-wn1,n2", f"--export={export}", WISH, user="bob")
    state = job.wait()
    site.assert_healthy()
    seen = set(site.shared("spy/seen").read_text().split())
    site.run("rm -rf /shared/spy")
    assert seen == {str(BOB)}, "the spy worked, and never as root"
    assert state.exit_code == "0:0", job.output()


HOSTILE = (
    "a\nb",
    "'; touch /run/pwned; '",
    '"$(touch /run/pwned)"',
    "`touch /run/pwned`",
    "x" * 100_000,
)


@pytest.mark.usefixtures("_scripts")
def test_no_text_of_a_user_is_run_by_prolog_or_epilog(site: Site) -> None:
    site.write_plugstack("")  # otherwise the plugin would refuse the job at once
    names = ("SPANK_STAGE", "SLURM_SPANK_STAGE", "SLURM_JOB_UID", "SLURM_JOB_ID")
    jobs = [
        site.sbatch("true", "-wn1", env={name: text}, user="bob")
        for name in names
        for text in HOSTILE
    ]
    assert {job.wait().state for job in jobs} == {"COMPLETED"}
    site.assert_healthy()
    assert not site.path("n1", "/run/pwned").exists()
    assert site.leftovers() == []


def test_a_list_of_directives_that_is_too_long_is_refused_at_once(site: Site) -> None:
    value = "/shared/data:/nvme/" + "x" * 30_000
    many = ["--stage=" + value.replace("x", str(number), 1) for number in range(6)]
    done = site.run(["sbatch", *many, "--wrap", "true"], check=False, user="bob")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "stage: the --stage options are longer than 122880 bytes together; write #STAGE lines in "
        "the batch script instead, or stage a folder or an archive\n"
    )


# Rows 7 and 18: strangers at the ports of a rank

#: Connects to the ports from 1024 on of each node, where MPI listens, and sends one byte to each,
#: again and again.
KNOCK = """
import socket, sys, threading, time

def knock(node, port):
    held = []
    while True:
        try:
            held.append(socket.create_connection((node, port), 1))
            held[-1].send(b"?")
        except OSError:
            time.sleep(0.02)
        if len(held) > 20:
            held.pop(0).close()

for node in sys.argv[1:]:
    for port in range(1024, 1028):
        threading.Thread(target=knock, args=(node, port), daemon=True).start()
time.sleep(120)
"""


def test_knocks_at_the_ports_of_mpi_hold_a_job_up_no_longer_than_its_limits(site: Site) -> None:
    limits = "[launch]\nauthenticate = false\nstart_timeout = 15\n[transfer]\nstall_timeout = 5\n"
    knocks = site.popen([PYTHON, "-c", KNOCK, *site.nodes], user="bob")
    try:
        with site.policy(POLICY + limits):
            job = site.sbatch("true", "-N4", WISH)
            code = job.wait(60).exit_code
    finally:
        knocks.kill()
        knocks.wait()
    # On a busy machine he may be too slow to hold the job up, or come when the ranks have begun.
    assert code in ("0:0", "8:0")
    assert code == "0:0" or job.output().endswith(NOT_STARTED.format(8))
    assert "Traceback" not in job.output()
    assert stage(site).startswith("stage: /nvme/data: "), "a job after his is not held up"


#: The watch of one rank; addresses pass through stdin and stdout.
WATCH = """
import json, os, sys
from stager.rank.guard import Address, Guard

number = int(sys.argv[1])
guard = Guard(sys.argv[1], lambda node: None, lambda node: print("unwatched", node, flush=True))
own = guard.address
print(json.dumps([own.node, own.host, own.port, own.token.hex(), own.proof.hex()]), flush=True)
ring = [Address(*one[:3], *map(bytes.fromhex, one[3:])) for one in json.loads(sys.stdin.readline())]
guard.watch(ring, number)
print("watching", flush=True)
sys.stdin.readline()
"""


def test_idle_connections_do_not_keep_the_watch_between_ranks_from_standing(site: Site) -> None:
    ranks = [
        site.popen([PYTHON, "-c", WATCH, str(number)], on=node)
        for number, node in enumerate(site.nodes[:3])
    ]
    try:
        addresses = [json.loads(_line_of(rank)) for rank in ranks]
        ports = [str(port) for _, _, port, *_ in addresses]
        knocks = site.popen([PYTHON, "-c", IDLE, *ports], user="bob")
        assert _line_of(knocks) == "6 connections\n"
        for rank in ranks:
            print(json.dumps(addresses), file=rank.stdin, flush=True)
        assert [_line_of(rank) for rank in ranks] == ["watching\n"] * 3
    finally:
        for command in (*ranks, knocks):
            command.kill()
            command.wait()


#: Holds two connections to the port of each of the first nodes.
IDLE = """
import socket, sys, time
held = [
    socket.create_connection((f"n{1 + number // 2}", int(sys.argv[1 + number // 2])))
    for number in range(2 * len(sys.argv[1:]))
]
print(len(held), "connections", flush=True)
time.sleep(60)
"""


def _line_of(command: subprocess.Popen[str]) -> str:
    assert command.stdout
    return command.stdout.readline()


# Rows 5 and 17: root's parts end, whatever a user's filesystem does


def running(site: Site, node: str, user: str = "bob") -> Job:
    """Return a job of the user that has staged on one node and runs on."""
    wish = f"--stage=/shared/data:/nvme/{user}-data"
    job = site.sbatch("echo started; sleep 600", f"-w{node}", wish, user=user)
    job.wait_for(lambda _: "started" in job.output())
    return job


def end(site: Site, job: Job, limit: float = 45) -> float:
    """Cancel the job. Return after how many seconds its node is idle: the epilog has a limit."""
    begun = time.monotonic()
    job.cancel()
    job.wait()
    site.assert_healthy(limit)
    return time.monotonic() - begun


ROOM = f"/run/slurm-stage/{BOB}"
THREE_ROOTS = (
    'roots = ["/nvme", "/nvme/one", "/nvme/two"]\n[cache]\nheadroom = "900TB"\n'
    '[metrics]\ntextfile = "/run/stage.prom"\n'
)


@pytest.mark.parametrize("options", ["allow_other", repeated("fsname=private")])
@pytest.mark.parametrize("path", [ROOM, f"/nvme/.slurm-stage/{BOB}", f"{ROOM}/inner"])
def test_a_filesystem_that_never_answers_does_not_hold_a_node(
    site: Site, path: str, options: str
) -> None:
    """Bob mounts it over each folder of his that the clean-up enters."""
    job = running(site, "n2")
    if path.endswith("inner"):
        site.run(["mkdir", path], user="bob", on="n2")
    with dead_folder(site, path, node="n2", options=options):
        if options == "allow_other":
            assert never_answers(site, path, node="n2"), "the attack is real"
        end(site, job)
        assert site.sbatch("true", "-wn2", WISH).wait().exit_code == "0:0"
        site.assert_healthy()
        # The filesystem is there still, and its user's room is gone all the same.
        left = site.run(
            "ls /run/slurm-stage/jobs; ls -d /run/slurm-stage/5*/",
            user="root",
            on="n2",
            check=False,
        )
        assert left.stdout == ""


def test_forged_records_that_lead_to_it_do_not_hold_a_node(site: Site) -> None:
    """With headroom and metrics the clean-up looks at each copy of each user, for each root."""
    site.run("mkdir -m 1777 /nvme/one /nvme/two", user="root", on="n2")
    with site.policy(THREE_ROOTS):
        job = running(site, "n2")
        site.run("mkdir /nvme/bobs", user="bob", on="n2")
        with dead_folder(site, "/nvme/bobs", node="n2"):
            assert never_answers(site, "/nvme/bobs", node="n2"), "the attack is real"
            forge_record(site, "/nvme/bobs/x", "/nvme/bob-data", node="n2", lifetime="job")
            end(site, job)
            assert site.sbatch("true", "-wn2", WISH).wait().exit_code == "0:0"
            site.assert_healthy(45)


def test_who_is_first_on_a_disk_names_no_users_and_keeps_nobody_out(site: Site) -> None:
    """Root would start a process as each user whose number has a folder, after every job."""
    names = "/nvme/.slurm-stage/{6001..6200} /nvme/.slurm-stage/" + str(BOB)
    site.run(["bash", "-c", f"mkdir -p {names}"], user="bob", on="n2")
    assert site.sbatch("true", "-wn2", WISH).wait().exit_code == "0:0"
    shown = site.run(
        "ls /nvme/.slurm-stage /nvme/.slurm-stage.of-*; stat -c %U /nvme/.slurm-stage",
        user="root", on="n2",
    )  # fmt: skip
    records, aside = shown.stdout.split("\n\n")
    assert records.split() == ["/nvme/.slurm-stage:", str(ALICE), str(BOB)]
    assert aside.splitlines()[1:] == [*map(str, range(6001, 6201)), "root"]


def test_a_filesystem_over_the_records_of_all_holds_nobody(site: Site) -> None:
    """Bob takes the folder's name on a new disk, and mounts there what never answers."""
    site.run("mkdir /nvme/.slurm-stage", user="bob", on="n2")
    with dead_folder(site, "/nvme/.slurm-stage", node="n2"):
        job = site.sbatch("true", "-wn2", WISH)
        assert job.wait().exit_code == "6:0"
        assert job.output() == (
            "stage: n2: /nvme/.slurm-stage: a filesystem is mounted there; tell the administrator\n"
            + NOT_STARTED.format(6)
        )
        site.assert_healthy(20)
        told = site.run([STAGECTL, "doctor"], user="root", on="n2", check=False).stdout
        wrong = "a filesystem is mounted at /nvme/.slurm-stage: unmount it (umount -l)"
        assert f"problem  n2: {wrong}\n" in told
        assert never_answers(site, "/nvme/.slurm-stage", node="n2"), "the control"
        for _ in range(100):
            left = site.run("pgrep -af stager.node", user="root", on="n2", check=False).stdout
            if not left:
                break
            time.sleep(0.2)
        assert left == ""
    site.run("rmdir /nvme/.slurm-stage", user="bob", on="n2")


@pytest.mark.parametrize("answers", [True, False])
def test_a_users_filesystem_is_not_taken_for_a_shared_root(site: Site, *, answers: bool) -> None:
    """Bob takes the name of a root where the site's disk is missing. He could claim any owner."""
    site.run("mkdir /nvme/shared /tmp/behind", user="bob", on="n2")
    mounted = (
        own_filesystem(
            site, "/tmp/behind", "/nvme/shared", node="n2", user="bob", options="allow_other"
        )
        if answers
        else dead_folder(site, "/nvme/shared", node="n2")
    )
    text = (
        f'roots = ["/nvme"]\n[shared]\nowner = "{SITE_ACCOUNT}"\nroots = ["/nvme/shared"]\n'
        '[metrics]\ntextfile = "/run/stage.prom"\n'
    )
    with site.policy(text), mounted:
        job = site.sbatch("true", "-wn2", "--stage=/shared/data:/nvme/shared/data")
        assert job.wait().exit_code == "6:0"
        assert job.output() == (
            f"stage: n2: /nvme/shared is on a filesystem that uid {BOB} mounted; tell the "
            f"administrator\n{NOT_STARTED.format(6)}"
        )
        site.assert_healthy(20)
        for command in ("status", "doctor"):
            told = site.run([STAGECTL, command], user="root", on="n2", check=False)
            assert "Traceback" not in told.stderr
        assert "a user mounted a filesystem at /nvme/shared: unmount it (umount -l)" in told.stdout
    site.run("rmdir /nvme/shared /tmp/behind", user="bob", on="n2")


def test_a_prolog_part_that_hangs_is_given_up(site: Site) -> None:
    """The folder of bob's records does not answer when root is to prepare the disks again."""
    end(site, running(site, "n2"))
    with dead_folder(site, f"/nvme/.slurm-stage/{BOB}", node="n2"), site.policy(POLICY):
        job = site.sbatch("true", "-wn2", WISH.replace("data", "bobs"), user="bob")
        job.wait_for(lambda record: record["JobState"] == "RUNNING")
        # Root is through, and bob's own rank waits for his own filesystem.
        site.sbatch("true", "-wn2", WISH).wait(40)
        prepare = ["pgrep", "-f", "stager.node.prolog"]
        assert not site.run(prepare, user="root", on="n2", check=False).stdout
    job.cancel()
    job.wait()
    site.assert_healthy(45)


# Row 6: a user's room in /run is bounded


def test_a_user_who_fills_the_room_in_run_harms_nobody_else(site: Site) -> None:
    job = running(site, "n2")
    for fill in (
        f"dd if=/dev/zero of={ROOM}/fill bs=1M",
        f"rm {ROOM}/fill; cd {ROOM} && for i in $(seq 5000); do : >$i || exit; done",
    ):
        assert "No space left on device" in attack(site, fill)
        site.run("echo written >/run/daemon", user="root", on="n2")
        assert site.sbatch("true", "-wn2", WISH).wait().exit_code == "0:0"
        mine = site.sbatch("true", "-wn2", "--stage=/shared/data:/nvme/more", user="bob")
        assert mine.wait().exit_code == "5:0"
        assert mine.output() == (
            f"stage: n2: {ROOM}/{mine.id}.0.4294967291: your folder {ROOM} is full, which holds "
            "what your jobs stage; delete the files that you put there, and submit again\n"
            + NOT_STARTED.format(5)
        )
    end(site, job)
    assert site.leftovers() == []


def test_a_room_stays_for_the_users_other_job_and_goes_with_the_last(site: Site) -> None:
    first, second = running(site, "n2"), running(site, "n2")
    first.cancel()
    first.wait()
    site.run(["ls", f"{ROOM}/{second.id}.uses"], user="bob", on="n2")
    assert [line for line in site.leftovers() if "mounted" in line] == [f"n2: {ROOM} is mounted"]
    end(site, second)
    assert site.leftovers() == []


@pytest.fixture
def _private_namespaces(site: Site) -> Iterator[None]:
    """Give each job a mount namespace of its own, with a private /tmp."""
    file = site.path("login", "/etc/slurm/job_container.conf")
    file.write_text("AutoBasePath=true\nBasePath=/cluster/private\n")
    site.reconfigure("JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n")
    try:
        yield
    finally:
        site.run(["scancel", "--user=alice"], user="root")
        site.assert_healthy(120)
        site.reconfigure()
        file.unlink()


def launched(site: Site, script: str, *options: str) -> Job:
    """Return a job that has started; Slurm 22.05 fails to make a namespace now and then."""
    for _ in range(20):
        if job := started(site.sbatch(script, "-wn2", *options)):
            return job
    raise AssertionError("Slurm started none of the jobs")


def started(job: Job) -> Job | None:
    """Return the job when it has started, or cancel it and return None if Slurm holds it."""
    job.wait_for(lambda record: "started" in job.output() or "eld" in record["Reason"], 150)
    if "started" in job.output():
        return job
    job.cancel()
    job.wait(120)
    return None


@pytest.mark.usefixtures("_private_namespaces")
def test_jobs_with_namespaces_of_their_own_share_their_users_room(site: Site) -> None:
    room = f"/run/slurm-stage/{ALICE}"
    show = f"stat -c 'device %d' {room}"
    site.run("rm -f /shared/go")
    # This job's namespace is made before there is a room, and it stages when another has made it.
    first = launched(
        site,
        f"echo started; until [ -e /shared/go ]; do sleep 0.1; done; srun --overlap {WISH} true; "
        f"{show}; echo end; sleep 600",
    )
    second = launched(site, f"echo started; {show}; echo end; sleep 600", WISH)
    second.wait_for(lambda _: "end" in second.output())
    site.run("touch /shared/go")
    first.wait_for(lambda _: "end" in first.output())
    device = site.run(show, user="root", on="n2").stdout
    assert device in first.output()
    assert device in second.output()
    assert device != site.run("stat -c 'device %d' /run", user="root", on="n2").stdout
    for job in (first, second):
        job.cancel()
        job.wait()
    site.assert_healthy(45)
    assert site.leftovers() == []


# Rows 10, 12 and 13: root's status and clean-up have limits


def status_as_root(site: Site, node: str) -> tuple[str, float, int]:
    """Return the output of root's status of all users, its seconds and its MiB."""
    script = (
        "import resource, subprocess, sys, time; begun = time.monotonic(); "
        f"done = subprocess.run(['{STAGECTL}', 'status', '--by', 'user'], capture_output=True); "
        "sys.stdout.buffer.write(done.stdout); print(time.monotonic() - begun, "
        "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    )
    done = site.run([PYTHON, "-c", script], user="root", on=node, timeout=120)
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    seconds, size = last.split()
    return output, float(seconds), int(size)


SILENT = (
    "n2: the copies of bob are not listed: a process that looks at them as this user did not "
    "answer in time; look for a filesystem of that user that does not answer, or for a process of "
    "that user that stops it"
)


def test_a_process_that_bob_stops_does_not_hold_roots_status(site: Site) -> None:
    stage(site, nodes="n2")
    job = running(site, "n2")
    for number in range(3000):  # so that bob has the time to find the process
        forge_record(site, f"/nvme/{number}", "/nvme/bob-data", node="n2")
    stop = site.popen(
        "while :; do pkill -STOP -u bob -f 'stagectl [s]tatus'; done", user="bob", on="n2"
    )
    try:
        outputs = [status_as_root(site, "n2")]
        while SILENT not in outputs[-1][0] and len(outputs) < 5:
            outputs.append(status_as_root(site, "n2"))
    finally:
        stop.kill()
        stop.wait()
    assert max(seconds for _, seconds, _ in outputs) < HANGS
    assert SILENT in outputs[-1][0], "bob stopped it"
    assert all("alice" in output for output, _, _ in outputs)
    end(site, job)


def test_a_dead_filesystem_does_not_hold_roots_status(site: Site) -> None:
    stage(site, nodes="n2")
    job = running(site, "n2")
    with dead_folder(site, f"/nvme/.slurm-stage/{BOB}", node="n2"):
        output, seconds, _ = status_as_root(site, "n2")
    end(site, job)
    assert "alice" in output
    assert "bob" not in output, "what is mounted over his folder is not entered"
    assert seconds < HANGS


def test_root_lists_and_removes_a_users_copies_as_that_user(site: Site) -> None:
    """Bob's records name alice's copy and a filesystem that never answers, and lead elsewhere."""
    stage(site, nodes="n2")
    end(site, running(site, "n2"))
    facts = site.copy("n2", "/nvme/data").stat()
    as_alices = {"inode": facts.st_ino, "owner": ALICE, "mtime_ns": facts.st_mtime_ns}
    forge_record(site, "/nvme/data", "/nvme/bob-data", node="n2", copy_facts=as_alices)
    forge_record(site, "/nvme/bobs/x", "/nvme/bob-data", node="n2")

    def stagectl(*line: str, user: str = "root") -> tuple[int, str]:
        begun = time.monotonic()
        ran = site.run([STAGECTL, *line], user=user, on="n2", check=False)
        assert time.monotonic() - begun < HANGS
        return ran.returncode, ran.stdout + ran.stderr

    absent = "is no copy of bob here; stagectl status --user bob lists what is staged\n"
    refused = (
        f"stage: only root may use the copies of another user (uid {BOB}); run this as root, or "
        "leave out --user\n"
    )
    site.run("mkdir /nvme/bobs", user="bob", on="n2")
    with dead_folder(site, "/nvme/bobs", node="n2"):
        assert never_answers(site, "/nvme/bobs", node="n2"), "the attack is real"
        code, listed = stagectl("status", "--user", "bob")
        places = [line.split()[1] for line in listed.splitlines() if line.startswith("n2 ")]
        assert (code, places) == (0, ["/nvme/bob-data", "/nvme/bobs/x", "/nvme/data"])
        evict = "evict", "--user", "bob"
        assert stagectl(*evict, "/nvme/data") == (
            6, "stage: n2: /nvme/data: Operation not permitted\n"
        )  # fmt: skip
        assert digest(site.copy("n2", "/nvme/data")) == digest(site.shared("data"))
        gone = "stage: /nvme/bob-data: evicted on n2\n"
        assert stagectl(*evict, "-w", "n2", "/nvme/bob-data") == (0, gone)
        assert stagectl(*evict, "/nvme/bob-data") == (2, f"stage: n2: /nvme/bob-data {absent}")
        assert not site.copy("n2", "/nvme/bob-data").exists()
        for command in ("status", "evict"):
            line = [command, "--user", "bob", *(["/nvme/bobs/x"] if command == "evict" else [])]
            assert stagectl(*line, user="alice") == (3, refused)
    assert "/nvme/data" in stagectl("status", "--user", "alice", user="alice")[1]
    with dead_folder(site, f"/nvme/.slurm-stage/{BOB}", node="n2"):
        assert stagectl(*evict, "/nvme/bobs/x") == (2, f"stage: n2: /nvme/bobs/x {absent}")


def test_a_huge_list_of_uses_costs_root_little(site: Site) -> None:
    job = running(site, "n2")
    _, _, before = status_as_root(site, "n2")
    fill = f"yes /nvme/{'x' * 20} | head -c 15000000 | tr '\\n' '\\0' >{ROOM}/{job.id}.uses"
    site.run(fill, user="bob", on="n2")
    output, _, size = status_as_root(site, "n2")
    assert "bob" in output
    assert size < before + 50
    end(site, job)


def test_bloated_records_take_little_memory(site: Site) -> None:
    job = running(site, "n2")
    for number in range(2000):
        name = f"/nvme/{number}/{'d' * 30_000}"
        forge_record(site, name, "/nvme/bob-data", node="n2", source=f"/{'s' * 30_000}")
    script = (
        "import resource, subprocess, sys; tidy = [sys.executable, '-I', '-m', "
        "'stager.node.tidy', '--config', '/etc/slurm/stage.toml', '--usage']; "
        "print(subprocess.run(tidy, capture_output=True, text=True).stdout.strip(), "
        "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    )
    answer, _, size = site.run([PYTHON, "-c", script], user="bob", on="n2").stdout.rpartition(" ")
    assert json.loads(answer)["usage"]["/nvme"][1] == 1
    assert int(size) < 100
    end(site, job)


# Row 11: headroom is what the disk says


def test_a_forged_size_does_not_keep_the_copies_of_others(site: Site) -> None:
    site.run("mkdir -p /shared/tree; echo 1 >/shared/tree/file", user="bob")
    with site.nvme("n2", "loop", "300M"):
        site.sbatch("true", "-wn2", WISH).wait()
        site.sbatch("true", "-wn2", "--stage=/shared/tree:/nvme/tree", user="bob").wait()
        site.assert_healthy()
        # Older than alice's copy, and larger than the disk.
        size = {"allocated": 9 * 10**14}
        forge_record(site, "/nvme/tree", "/nvme/tree", node="n2", used_at=1, tree=size)
        disk = os.statvfs(site.path("n2", "/nvme"))
        headroom = disk.f_bavail * disk.f_frsize + 1_000_000
        with site.policy(f'roots = ["/nvme"]\n[cache]\nheadroom = {headroom}\n'):
            site.sbatch("true", "-wn2", "--stage=/shared/tree:/nvme/carols", user="carol").wait()
            site.assert_healthy(45)
        assert not site.copy("n2", "/nvme/tree").exists()
        assert not site.copy("n2", "/nvme/data").exists()
    site.run("rm -r /shared/tree", user="bob")


# Row 15: figures


def test_a_lie_about_figures_counts_up_to_a_jobs_most(site: Site) -> None:
    with site.policy('roots = ["/nvme"]\n[metrics]\ntextfile = "/run/stage.prom"\n'):
        job = running(site, "n2")
        lie = f"yes '1e9 1e9 1e9 1e9 1e9 1e9' | head -20 >{ROOM}/{job.id}.figures"
        site.run(lie, user="bob", on="n2")
        end(site, job)
        figures = dict(
            line.rsplit(" ", 1)
            for line in site.path("n2", "/run/stage.prom").read_text().splitlines()
            if not line.startswith("#")
        )
    assert float(figures["slurm_stage_hits_total"]) <= 10_100
    assert float(figures["slurm_stage_seconds_total"]) < 3600


# Row 19: marks


def test_nobody_sees_which_jobs_stage_on_a_node(site: Site) -> None:
    job = running(site, "n2", "alice")
    mark = f"/run/slurm-stage/jobs/{job.id}.{ALICE}"
    assert site.path("n2", mark).exists()
    for command in (f"stat {mark}", f"ls /run/slurm-stage/{ALICE}"):
        assert "Permission denied" in attack(site, command)
    end(site, job)


# Row 1: nothing of root's listens to others, so root starts no rank. Files for all users are staged
# by an account of the site's own.

NOT_AS_ROOT = (
    "root cannot stage: submit as an ordinary user; to stage for all users, submit as the owner in "
    "[shared] of stage.toml"
)
ROOT_INSTEAD = (
    "root cannot stage: submit as an ordinary user; to stage for all users, submit as stage, the "
    "owner in [shared] of stage.toml"
)
FOR_ALL = "--stage=/shared/data:/nvme/shared/data"


@pytest.fixture
def ranks(site: Site) -> Iterator[Path]:
    """A file with a line for each rank that starts on any node: the uid of its user."""
    log = site.shared("ranks")
    log.touch()
    log.chmod(0o666)
    python = site.path("login", f"{PREFIX}/bin/python3")
    real = os.readlink(python)
    python.unlink()
    python.write_text(
        '#!/bin/sh\n[ "$3" = stager.rank ] && id -u >>/shared/ranks\n'
        f'exec -a "$0" {real} "$@"\n'.replace("/bin/sh", "/bin/bash")
    )
    python.chmod(0o755)
    yield log
    python.unlink()
    python.symlink_to(real)
    log.unlink()


def test_root_is_refused_wherever_it_asks_for_a_stage(site: Site, ranks: Path) -> None:
    """Attack: ranks listen on ports that users reach; root's ranks would obey them as root."""
    refused = (3, f"stage: {NOT_AS_ROOT}\n")
    with site.sharing():
        for command in (
            ["sbatch", "-N4", FOR_ALL, "--wrap=true"],
            ["srun", "-N4", FOR_ALL, "true"],
            ["salloc", "-N4", FOR_ALL, "true"],
        ):
            done = site.run(command, user="root", check=False)
            assert (done.returncode, done.stderr) == refused
        in_gate = f"stage: n1: {NOT_AS_ROOT}\n"
        # The variable by which the plugin passes the list, and the lines of a script.
        value = FOR_ALL.removeprefix("--stage=")
        job = site.sbatch("echo ran", "-N4", user="root", env={"SLURM_SPANK_STAGE": value})
        line = site.sbatch(f"#!/bin/sh\n#STAGE {value}\necho ran", "-N4", user="root")
        step = site.sbatch(
            f"SLURM_SPANK_STAGE={value} srun -N4 echo ran; exit $?", "-N4", user="root"
        )
        assert [one.wait().exit_code for one in (line, step)] == ["3:0", "3:0"]
        assert line.output() == in_gate
        assert in_gate in step.output()
        assert "ran" not in step.output().splitlines()
        # sbatch itself forgets the list of an outer job.
        assert (job.wait().exit_code, job.output()) == ("0:0", "ran\n")
        for arguments in (f"stage {value}", f"plan {value}", "bench --size 1"):
            job = site.sbatch(f"{STAGECTL} {arguments}", "-N4", user="root")
            assert (job.wait().exit_code, job.output()) == ("3:0", f"stage: {ROOT_INSTEAD}\n")
        assert ranks.read_text() == ""
        # Without any of the checks before: the rank itself refuses, and opens no port.
        request = StageRequest((), 2, 60).to_json()
        rank = f"STAGE_REQUEST='{request}' srun -N2 -n2 --mpi=pmix {PYTHON} -I -m stager.rank"
        job = site.sbatch(rank, "-N2", user="root")
        job.wait()
        assert job.output().count("root cannot stage: submit as an ordinary user; ") == 2
        assert ranks.read_text() == "0\n0\n"
        ranks.write_text("")
        # The control: the site's account stages there, and its ranks are no root's.
        staged = site.sbatch("true", "-N4", FOR_ALL, user=SITE_ACCOUNT)
        assert staged.wait().exit_code == "0:0", staged.output()
        assert ranks.read_text() == f"{ACCOUNTS[SITE_ACCOUNT]}\n" * 4


def test_the_copies_of_the_sites_account_are_for_all_users_and_only_it_writes_there(
    site: Site,
) -> None:
    with site.sharing() as folder:
        assert site.sbatch("true", "-wn1,n2", FOR_ALL, user=SITE_ACCOUNT).wait().exit_code == "0:0"
        assert stage(site, FOR_ALL).startswith(
            "stage: /nvme/shared/data: current on n[1-2] (2 nodes), nothing moved"
        )
        cache = f"{folder}/.slurm-stage/{ACCOUNTS[SITE_ACCOUNT]}"
        for command in (
            f"touch {folder}/forged",
            f"mv {folder}/data {folder}/taken",
            f"echo poison >{folder}/data",
            f"touch {cache}/records/forged.json",
            f"ls {cache}/partial",
            f"mkdir {folder}/.slurm-stage/{BOB}",
        ):
            assert "denied" in attack(site, command)
        job = site.sbatch("true", "-wn1,n2", FOR_ALL + "2", user="bob")
        assert job.wait().exit_code == "6:0"
        assert "only the site's account (uid 5010) stages files there" in job.output()
        owners = {site.copy(node, f"{folder}/data").stat().st_uid for node in ("n1", "n2")}
        assert owners == {ACCOUNTS[SITE_ACCOUNT]}


def test_a_copy_that_root_staged_with_an_older_version_is_not_used(site: Site) -> None:
    with site.sharing() as folder:
        assert site.sbatch("true", "-wn1,n2", FOR_ALL, user=SITE_ACCOUNT).wait().exit_code == "0:0"
        for node in ("n1", "n2"):
            os.chown(site.copy(node, f"{folder}/data"), 0, 0)
        assert stage(site, FOR_ALL) == (
            f"stage: n[1-2]: {folder}/data cannot be used: only the site's account (uid 5010) "
            "stages files there, for all users, and the copy is missing or not up to date "
            "(replaced); ask the administrator, or choose another destination\n"
            + NOT_STARTED.format(6)
        )


# Row 8: PMIx makes a folder for each step in TmpFS, by default /tmp, where any user can take the
# name. The ranks' steps have theirs in a folder of root's.


def test_nobody_takes_the_names_of_pmix(site: Site) -> None:
    last = site.sbatch("true", "-N1")
    last.wait()
    names = f"spmix_appdir_{ALICE}_{{{int(last.id) + 1}..{int(last.id) + 4}}}.{{0..3}}"
    site.run(f"mkdir -m 700 /tmp/{names}", user="bob", on="n2")
    try:
        assert "/nvme/data: 2.9 MiB from /shared/data to n[1-2]" in stage(site)
    finally:
        site.run("rmdir /tmp/spmix_appdir_*", user="root", on="n2")
    taken = site.run(f"mkdir /run/slurm-stage/{names}", user="bob", on="n2", check=False)
    assert "Permission denied" in taken.stderr
    assert site.run("ls /run/slurm-stage", user="root", on="n2").stdout.count("spmix") == 0


# Who listens on all of the few ports that a site names for MPI keeps ranks from starting.


def test_who_takes_all_ports_of_mpi_is_told(site: Site) -> None:
    hold = """
import socket, sys
ports = [socket.create_server(("", port)) for port in range(9100, 9120)]
open("/shared/held", "w")
sys.stdin.read()
"""
    site.run("rm -f /shared/held")
    names = {"min": "9100", "range": "20"}
    lines = ", ".join(f'OMPI_MCA_btl_tcp_port_{name}_v4 = "{one}"' for name, one in names.items())
    bob = site.popen([PYTHON, "-c", hold], user="bob", on="n2")
    try:
        site.run("until [ -e /shared/held ]; do sleep 0.1; done", timeout=60)
        with site.policy(f"{POLICY}[launch]\nenvironment = {{ {lines} }}\n"):
            job = site.sbatch("true", "-wn1,n2", WISH)
            assert job.wait().exit_code == "8:0"
    finally:
        bob.communicate()
    assert job.output().startswith(
        "stage: n2: MPI cannot start here: each port from 9100 to 9119 is taken, and "
    )


# Row 16: a node that answers for others is not believed.

#: In the place of n3's Python: it answers for all nodes, that they hold nothing.
LIAR = """\
#!/bin/bash
[ "$4" = node ] || exec -a "$0" /usr/bin/python3 "$@"
exec -a "$0" /usr/bin/python3 -I -c '
from stager.launch.nodes import frames, hello
for node in ("n1", "n2", "n4", "n3"):
    print(hello(node))
    print(*frames(node, {"entries": [], "rooms": [["/nvme", 1, 2]], "unread": []}), sep="\\n")
print("srun: launching StepId=1.0 on host n1, 1 tasks: 2", flush=True)
'
"""


@pytest.fixture
def _liar(site: Site) -> Iterator[None]:
    fake = site.shared("liar")
    fake.write_text(LIAR)
    fake.chmod(0o755)
    folder = f"{PREFIX}/bin"
    site.run(
        f"cp -a {folder} /run/bin; rm /run/bin/python3; cp /shared/liar /run/bin/python3; "
        f"mount --bind /run/bin {folder}",
        user="root", on="n3",
    )  # fmt: skip
    yield
    site.run(f"umount -l {folder}; rm -r /run/bin", user="root", on="n3")
    fake.unlink()


@pytest.mark.usefixtures("_liar")
def test_a_node_that_answers_for_others_is_named_and_they_speak_for_themselves(site: Site) -> None:
    stage(site, nodes="n1,n2,n4")
    script = f"sleep 1; {STAGECTL} status --json"
    job = site.sbatch(script, "-N4")
    job.wait()
    nodes = {one["node"]: one for one in json.loads(job.output())["nodes"]}
    assert {name: (len(one["entries"]), one["problem"]) for name, one in nodes.items()} == {
        "n1": (1, ""),
        "n2": (1, ""),
        "n3": (0, "it answered in the name of n1; check this node"),
        "n4": (1, ""),
    }


# Rows 1, 2 and 7: a stranger who speaks as a rank, or knocks

INJECT = f"{SOURCE}/tests/cluster/inject.py"
#: Attempts to be faster than the true rank, which connects some 30 ms after the other listens.
RACES = 5
#: What the job says if its ranks were started again.
RESTARTED = "; the staging starts again"


@pytest.fixture
def _open(site: Site) -> Iterator[None]:
    """Have ranks accept whoever connects. End a stage that does not start: Open MPI may hang then.

    It may if bob and the rank connect at once.
    """
    settings = "[launch]\nauthenticate = false\nstart_timeout = 30\n"
    with site.policy(f'roots = ["/nvme"]\n{settings}'):
        yield


def speak_as_ranks(
    site: Site, acts: Mapping[int, Sequence[str]], done: str
) -> tuple[Job, Sequence[str]]:
    """Run alice's job on n1 and n2 while bob acts as the ranks there.

    Return the job and what he printed.

    Try again until each of his processes has printed ``done`` and the ranks were not started again,
    without him: otherwise nothing was tried.
    """
    said: list[str] = []
    for _ in range(RACES):
        site.empty_disks()
        job = site.sbatch("true", WISH, "-wn1,n2", "--hold")
        speakers = [
            site.popen(
                ["python3", INJECT, f"10.0.0.{2 - rank}", job.id, str(rank), *act],
                user="bob", on=f"n{rank + 1}",
            )
            for rank, act in acts.items()
        ]  # fmt: skip
        try:
            for speaker in speakers:
                assert speaker.stdout
                assert speaker.stdout.readline() == "ready\n"
            site.run(["scontrol", "release", job.id], user="root")
            job.wait(150)
        finally:
            site.run(["scancel", job.id], user="root", check=False)
            for speaker in speakers:
                speaker.kill()
            said = [speaker.communicate()[0] for speaker in speakers]
        if all(done in text for text in said) and RESTARTED not in job.written():
            return job, said
    pytest.fail(f"bob was never taken for a rank: {said}")


def check_staged(site: Site, job: Job) -> None:
    """Check that the stage did not notice bob."""
    assert job.wait().exit_code == "0:0", job.output()
    for node in ("n1", "n2"):
        assert digest(site.copy(node, "/nvme/data")) == digest(site.shared("data"))


def check_right_or_refused(site: Site, job: Job) -> None:
    """Check that each copy has the right bytes, and that a failure is told in one message."""
    for copy in (site.copy(node, "/nvme/data") for node in ("n1", "n2")):
        assert not copy.exists() or digest(copy) == digest(site.shared("data"))
    state, output = job.wait(), job.output()
    if state.exit_code == "0:0":
        return
    assert state.exit_code in ("7:0", "8:0"), output
    reason = (
        "was not signed by this stage"
        if state.exit_code == "8:0"
        else "/nvme/data: the bytes received differ from those sent"
    )
    assert reason in output
    assert "Traceback" not in output
    assert output.endswith(NOT_STARTED.format(state.exit_code.removesuffix(":0")))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", [["run", "hostname >>/shared/mark"], ["send", "put"]])
def test_a_stranger_is_not_taken_for_a_rank(site: Site, rank: int, act: list[str]) -> None:
    job, said = speak_as_ranks(site, {rank: act}, "not accepted\n")
    assert said == ["not accepted\n"]
    assert not site.shared("mark").exists()
    check_staged(site, job)


def test_a_stranger_between_two_ranks_is_not_taken_for_either(site: Site) -> None:
    job, said = speak_as_ranks(site, {0: ["relay"], 1: ["relay"]}, "not accepted\n")
    assert said == ["not accepted\n"] * 2
    check_staged(site, job)


@pytest.mark.parametrize("target", [1, 2])
def test_knocks_of_a_stranger_do_not_hold_a_rank_up(site: Site, target: int) -> None:
    """Bob is on the login node. Each of his connections is closed before he has the next."""
    job = site.sbatch("true", "-wn1,n2", "--hold", WISH)
    knocking = ["python3", INJECT, f"10.0.0.{target}", job.id, "0", "knock"]
    knocker = site.popen(knocking, user="bob")
    assert knocker.stdout
    assert knocker.stdout.readline() == "ready\n"
    site.run(["scontrol", "release", job.id], user="root")
    check_staged(site, job)
    said = knocker.communicate(timeout=60)[0]
    assert int(said.removeprefix("knocked ").removesuffix(" times\n")) > 50


@pytest.mark.usefixtures("_open")
@pytest.mark.parametrize("what", ["put", repeated("source"), repeated("ack")])
def test_a_stranger_who_crashes_a_rank_has_nothing_published(site: Site, what: str) -> None:
    """The control of "send" above: nothing but the library prevents the crash."""
    job, _ = speak_as_ranks(site, {1: ["send", what]}, f"sent {what}\n")
    assert job.wait().exit_code == "8:0"
    assert job.output().endswith(NOT_STARTED.format(8))
    for node in ("n1", "n2"):
        assert not site.copy(node, "/nvme/data").exists()


@pytest.mark.usefixtures("_open")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_who_speaks_as_a_rank_runs_no_command(site: Site, rank: int) -> None:
    """Bob's message is a pickle that runs a command, in place of the rank's first message."""
    command = "{ hostname; id; } >>/shared/mark"
    try:
        job, _ = speak_as_ranks(site, {rank: ["run", command]}, "answered message 1 with ")
        mark = site.shared("mark")
        assert not mark.exists(), mark.read_text()
    finally:
        site.run("rm -f /shared/mark")
    check_right_or_refused(site, job)


@pytest.mark.usefixtures("_open")
def test_bytes_that_a_stranger_changed_between_ranks_are_not_published(site: Site) -> None:
    """Bob relays all that two ranks send to each other. He knows the file, and its digests."""
    words = (b"the words of alice", b"the words of bob!!")
    head, tail = os.urandom(15 << 20), os.urandom(15 << 20)
    site.shared("data").write_bytes(head + words[0] + tail)
    right, wrong = (digest_of_data(head + word + tail).hex() for word in words)
    to_n2 = [f"{words[0].decode()}={words[1].decode()}", f"{right}={wrong}"]
    acts = {0: ["relay", f"{wrong}={right}"], 1: ["relay", *to_n2]}
    job, said = speak_as_ranks(site, acts, "accepted as rank ")
    assert f"replaced {words[0].decode()}\n" in said[1]
    check_right_or_refused(site, job)


# Row 14: names that others chose are printed as text.


def test_a_name_forges_no_line_on_the_terminal_of_another_user(site: Site) -> None:
    """Bob's file, in a folder that alice stages, is named like a message and a terminal's title."""
    forged = "x\nstage: all copies verified\x1b]0;taken\x07"
    site.run(["mkdir", "/shared/set"], user="bob")
    site.run(["touch", f"/shared/set/{forged}"], user="bob")
    try:
        stage(site, "--stage=/shared/set:/nvme/set")
        site.run('for file in /nvme/set/*; do echo more >>"$file"; done', on="n1")
        done = site.run([STAGECTL, "verify", "/nvme/set"], on="n1", check=False)
    finally:
        site.run("rm -r /shared/set", user="bob")
    assert (done.returncode, done.stdout) == (7, "")
    shown = "x?stage: all copies verified?]0;taken?"
    assert done.stderr == (
        f"stage: n1: /nvme/set: 1 file is missing, or not as staged: {shown}; keep what you "
        f"changed ({shown}) elsewhere, then stage it again with the option replace\n"
    )
