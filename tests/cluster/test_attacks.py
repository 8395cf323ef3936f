"""Attacks of one user on another, or on root, on nodes that both use.

Each is tried for real, as the second user; alice's stage must be right or be refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.hostile import dead_folder, forge_record, never_answers
from tests.cluster.site import PLUGSTACK, POLICY, PREFIX, PYTHON, STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@pytest.mark.parametrize("options", ["allow_other", "fsname=private"])
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


def test_a_prolog_part_that_hangs_is_given_up(site: Site) -> None:
    """The folder of bob's records does not answer when root is to prepare the disks again."""
    end(site, running(site, "n2"))
    with dead_folder(site, f"/nvme/.slurm-stage/{BOB}", node="n2"), site.policy(POLICY):
        job = site.sbatch("true", "-wn2", WISH.replace("data", "bobs"), user="bob")
        job.wait_for(lambda record: record["JobState"] == "RUNNING")
        # Root is through, and bob's own rank waits for his own filesystem.
        site.sbatch("true", "-wn2", WISH).wait(40)
        prepare = ["pgrep", "-f", "stager.root.prepare"]
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
    yield
    site.reconfigure()
    file.unlink()


def launched(site: Site, script: str, *options: str) -> Job:
    """Return a job that has started; Slurm 22.05 fails to make a namespace now and then."""
    for _ in range(20):
        if job := started(site.sbatch(script, "-wn2", *options)):
            return job
        site.assert_healthy(30)
    raise AssertionError("Slurm started none of the jobs")


def started(job: Job) -> Job | None:
    """Return the job when it has started, or cancel it and return None if Slurm holds it."""
    job.wait_for(lambda record: "started" in job.output() or "eld" in record["Reason"])
    if "started" in job.output():
        return job
    job.cancel()
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
    stage(site, "-wn2", WISH)
    job = running(site, "n2")
    for number in range(3000):  # so that bob has the time to find the process
        forge_record(site, f"/nvme/{number}", "/nvme/bob-data", node="n2")
    stop = site.popen(
        "while :; do pkill -STOP -u bob -f 'stagectl [s]tatus'; done", user="bob", on="n2"
    )
    try:
        outputs = [status_as_root(site, "n2") for _ in range(3)]
    finally:
        stop.kill()
        stop.wait()
    assert max(seconds for _, seconds, _ in outputs) < 30
    assert SILENT in outputs[0][0] + outputs[1][0] + outputs[2][0], "bob stopped it"
    assert all("alice" in output for output, _, _ in outputs)
    end(site, job)


def test_a_dead_filesystem_does_not_hold_roots_status(site: Site) -> None:
    stage(site, "-wn2", WISH)
    job = running(site, "n2")
    with dead_folder(site, f"/nvme/.slurm-stage/{BOB}", node="n2"):
        output, seconds, _ = status_as_root(site, "n2")
        assert SILENT in output
        assert "alice" in output
        assert seconds < 30
    end(site, job)


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
    for number in range(4000):
        name = f"/nvme/{number}/{'d' * 30_000}"
        forge_record(site, name, "/nvme/bob-data", node="n2", source=f"/{'s' * 30_000}")
    script = (
        "import resource, subprocess, sys; tidy = [sys.executable, '-I', '-m', "
        "'stager.copies.tidy', '--config', '/etc/slurm/stage.toml', '--usage']; "
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
        headroom = disk.f_bavail * disk.f_frsize + 10_000_000
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
        lie = f"yes '1e9 1e9 1e9 1e9 1e9' | head -20 >{ROOM}/{job.id}.figures"
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
