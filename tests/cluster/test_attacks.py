"""Attacks of one user on another, or on root, on nodes that both use.

Each is tried for real, as the second user; alice's stage must be right or be refused.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import xxhash

from tests.cluster.cluster import USERS
from tests.cluster.site import PLUGSTACK, PREFIX, SOURCE, digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.cluster.cluster import Job
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


# Rows 1 and 2: a stranger who speaks as a rank

INJECT = f"{SOURCE}/tests/cluster/inject.py"
#: Attempts to be faster than the true rank, which connects some 30 ms after the other listens.
RACES = 5


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
    """Stage on n1 and n2 while bob acts as the ranks there. Return the job and what he printed.

    Try again until each of his processes has printed ``done``: otherwise nothing was tried.
    """
    said: list[str] = []
    for _ in range(RACES):
        site.empty_disks()
        job = site.sbatch("true", "-wn1,n2", "--hold", WISH)
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
        if all(done in text for text in said):
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
@pytest.mark.parametrize("what", ["put", "source", "ack"])
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
    right, wrong = (xxhash.xxh3_128_hexdigest(head + word + tail) for word in words)
    to_n2 = [f"{words[0].decode()}={words[1].decode()}", f"{right}={wrong}"]
    acts = {0: ["relay", f"{wrong}={right}"], 1: ["relay", *to_n2]}
    job, said = speak_as_ranks(site, acts, "accepted as rank ")
    assert f"replaced {words[0].decode()}\n" in said[1]
    check_right_or_refused(site, job)
