"""Attacks of one user on another, or on root, on nodes that both use.

Each is tried for real, as the second user; alice's stage must be right or be refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from stager.request.items import StageRequest
from tests.cluster.cluster import ACCOUNTS, SITE_ACCOUNT, USERS
from tests.cluster.site import PLUGSTACK, PREFIX, PYTHON, STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.site import Site

NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"
WISH = "--stage=/shared/data:/nvme/data"
ALICE, BOB = USERS["alice"], USERS["bob"]


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run("rm -f /shared/data; head -c 30000000 /dev/urandom >/shared/data")


def attack(site: Site, command: str, node: str = "n2") -> str:
    """Try ``command`` as bob on a node; return its error messages. It must fail."""
    done = site.run(command, user="bob", on=node, check=False)
    assert done.returncode != 0, "bob got what he wanted"
    return done.stderr


def stage(site: Site, *options: str) -> str:
    """Return the output of alice's job on all nodes."""
    job = site.sbatch("true", "-N4", *(options or [WISH]))
    job.wait()
    return job.output()


def check_copies(site: Site, path: str = "/nvme/data") -> None:
    for node in site.nodes:
        copy = site.copy(node, path)
        assert digest(copy) == digest(site.shared("data"))
        assert (copy.stat().st_uid, copy.stat().st_nlink) == (ALICE, 1)


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
        f"ls /run/slurm-stage/{ALICE}",
    ):
        assert "denied" in attack(site, command) or "not permitted" in attack(site, command)
    assert "current on n[1-4]" in stage(site)


def test_a_record_does_not_make_a_file_current_for_another_user(site: Site) -> None:
    """Bob stages to alice's destination first and changes his copy; his record calls it current."""
    site.sbatch("true", "-N4", WISH, user="bob").wait()
    for node in site.nodes:
        site.run("chmod 666 /nvme/data; echo poison >/nvme/data", user="bob", on=node)
    assert stage(site) == (
        f"stage: n[1-4]: /nvme/data belongs to uid {BOB}; choose another destination\n"
        + NOT_STARTED.format(6)
    )


def test_a_damaged_record_is_ignored_and_the_file_staged_again(site: Site) -> None:
    stage(site)
    (record,) = site.records("n1")
    whole = record.read_text()
    newer = json.dumps({**json.loads(whole), "version": 99})
    for text in ("", "{", "[" * 100_000, "\0" * 4096, whole[:100], newer, whole * 2):
        record.write_text(text)
        assert "from the copy on n2 to n1 in" in stage(site)
        assert record.read_text() != text
    check_copies(site)


# The path to the destination


@pytest.mark.parametrize("trap", ["mkdir -m 777 /nvme/new", "mkdir -m 1777 /nvme/new"])
def test_a_parent_folder_of_another_user_is_refused(site: Site, trap: str) -> None:
    site.run(trap, user="bob", on="n3")
    assert stage(site, "--stage=/shared/data:/nvme/new/data") == (
        f"stage: n3: /nvme/new belongs to uid {BOB}, who could replace what is staged there; "
        f"choose another destination\n{NOT_STARTED.format(6)}"
    )
    assert not site.copy("n1", "/nvme/new").exists()


def test_a_symbolic_link_as_parent_folder_is_refused(site: Site) -> None:
    site.run("mkdir /nvme/mine; echo precious >/nvme/mine/data", on="n3")
    site.run("ln -s /nvme/mine /nvme/new", user="bob", on="n3")
    assert stage(site, "--stage=/shared/data:/nvme/new/data") == (
        "stage: n3: /nvme/new is a symbolic link, not a folder; a folder is needed there: remove "
        f"it, or choose another destination\n{NOT_STARTED.format(6)}"
    )
    assert site.copy("n3", "/nvme/mine/data").read_text() == "precious\n"


def test_a_parent_swapped_for_a_link_during_a_stage_is_not_followed(site: Site) -> None:
    """While alice stages, bob keeps replacing a missing parent folder by a symbolic link."""
    site.run("fallocate -l 3G /shared/large", user="alice")
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
                assert new.stat().st_size == 3 << 30
            else:
                assert state.exit_code == "6:0", job.output()
    finally:
        swap.kill()
        swap.wait()
        site.run("rm -f /shared/large")


def test_a_symbolic_link_at_the_destination_is_replaced_and_not_followed(site: Site) -> None:
    site.run("echo precious >/nvme/mine; ln -s /nvme/mine /nvme/data", on="n2")
    assert "/nvme/data: 28.6 MiB from /shared/data to n[1-4]" in stage(site)
    assert site.copy("n2", "/nvme/mine").read_text() == "precious\n"
    check_copies(site)


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
        f"stage: n2: /nvme/second belongs to uid {ALICE}; choose another destination\n"
        + NOT_STARTED.format(6)
    )


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
        job = site.sbatch("echo started; sleep 60", "-N4", WISH, user="bob")
        job.wait_for(lambda _: "started" in job.output())
        evil_words(site, "n2", job.id)
        before = {name: os.lstat(site.path("n2", name)) for name in ("/etc", "/etc/shadow")}
        job.cancel()
        job.wait()
        site.assert_healthy(30)
    after = {name: os.lstat(site.path("n2", name)) for name in ("/etc", "/etc/shadow")}
    assert before == after
    left = os.listdir(site.path("n2", f"/run/slurm-stage/{BOB}"))
    assert left == [f"{job.id}.1"]  # a folder, which bob himself can remove
    assert "root" not in site.path("n2", "/run/stage.prom").read_text().replace("root=", "")
    assert site.leftovers() == []
    site.run(f"rm -r /run/slurm-stage/{BOB}/{job.id}.1", user="bob", on="n2")


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
    job = site.sbatch("true", "-N4", f"--export={export}", WISH, user="bob")
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


# Row 1: nothing of root's listens to others, so root starts no rank. Files for all users are staged
# by an account of the site's own.

NOT_AS_ROOT = (
    "root stages nothing: submit as an ordinary user, or to stage for all users as the account "
    "that stage.toml names as owner in [shared]"
)
ROOT_INSTEAD = (
    "root stages nothing: submit as an ordinary user, or to stage for all users as stage, the "
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
        line = site.sbatch(
            f"#!/bin/sh\n#STAGE {value.replace(':', ' ')}\necho ran", "-N4", user="root"
        )
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
        assert job.output().count("ranks do not run as root: submit as an ordinary user, ") == 2
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
        assert site.sbatch("true", "-N4", FOR_ALL, user=SITE_ACCOUNT).wait().exit_code == "0:0"
        assert stage(site, FOR_ALL).startswith(
            "stage: /nvme/shared/data: current on n[1-4] (4 nodes), nothing moved"
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
        job = site.sbatch("true", "-N4", FOR_ALL + "2", user="bob")
        assert job.wait().exit_code == "6:0"
        assert "only the site's account (uid 5010) stages files there" in job.output()
        check_shared = {site.copy(node, f"{folder}/data").stat().st_uid for node in site.nodes}
        assert check_shared == {ACCOUNTS[SITE_ACCOUNT]}


def test_a_copy_that_root_staged_with_an_older_version_is_not_used(site: Site) -> None:
    with site.sharing() as folder:
        assert site.sbatch("true", "-N4", FOR_ALL, user=SITE_ACCOUNT).wait().exit_code == "0:0"
        for node in site.nodes:
            os.chown(site.copy(node, f"{folder}/data"), 0, 0)
        assert stage(site, FOR_ALL) == (
            f"stage: n[1-4]: {folder}/data cannot be used: only the site's account (uid 5010) "
            "stages files there, for all users, and the copy is missing or not up to date "
            "(replaced); ask the administrator, or choose another destination\n"
            + NOT_STARTED.format(6)
        )


# Row 8: PMIx makes a folder for each step in TmpFS, by default /tmp, where any user can take the
# name.


def take_names(site: Site, folder: str = "/tmp") -> str:
    """As bob, make the folders of alice's next jobs on n2. Return what mkdir complains of."""
    last = site.sbatch("true", "-N1")
    last.wait()
    names = f"{folder}/spmix_appdir_{ALICE}_{{{int(last.id) + 1}..{int(last.id) + 4}}}.{{0..3}}"
    return site.run(f"mkdir -m 700 {names}", user="bob", on="n2", check=False).stderr


@pytest.fixture
def _free_names(site: Site) -> Iterator[None]:
    yield
    site.run("rm -rf /tmp/spmix_appdir_*", user="root", on="n2")


@pytest.mark.usefixtures("_free_names")
def test_who_takes_the_names_of_pmix_is_told(site: Site) -> None:
    assert take_names(site) == ""
    job = site.sbatch("true", "-N4", WISH)
    assert job.wait(120).exit_code == "8:0"
    assert re.sub(r"_\d+\.\d ", "_JOB.STEP ", job.output()) == (
        f"stage: MPI did not start: n2: /tmp/spmix_appdir_{ALICE}_JOB.STEP belongs to uid {BOB}, "
        "who keeps your jobs from starting there; tell the administrator, who can remove it and "
        "set TmpFS in slurm.conf to a folder in which only root can write\n" + NOT_STARTED.format(8)
    )


@pytest.mark.usefixtures("_free_names")
def test_nobody_takes_the_names_of_pmix_where_tmpfs_is_roots(site: Site) -> None:
    for node in site.nodes:
        site.run("mkdir -p -m 755 /run/slurm-tmp", user="root", on=node)
    site.reconfigure("TmpFS=/run/slurm-tmp\n")
    try:
        assert take_names(site) == ""  # where they were the way to keep alice's jobs from starting
        assert "Permission denied" in take_names(site, "/run/slurm-tmp")
        assert "/nvme/data: 28.6 MiB from /shared/data to n[1-4]" in stage(site)
    finally:
        site.reconfigure()


# Row 16: a node that answers for others is not believed.

#: In the place of n3's Python: it answers for all nodes, that they hold nothing.
LIAR = """\
#!/bin/bash
[ "$4" = node ] || exec -a "$0" /usr/bin/python3 "$@"
exec -a "$0" /usr/bin/python3 -I -c '
from stager.launch.answers import frames, hello
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
    stage(site, "-wn1,n2,n4", "-N3", WISH)
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
    assert done.stderr == (
        "stage: n1: /nvme/set: 1 file differs from what was staged: x?stage: all copies verified"
        "?]0;taken?; delete it on that node (rm -r) and stage it again\n"
    )
