"""`stagectl` about copies, on the nodes of a job and elsewhere, with nodes that do not answer."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import HANGS, PREFIX, STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

WISH = "--stage=/shared/a:/nvme/a"
GIB = r"\d+\.\d [GT]iB"


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run("head -c 3000000 /dev/urandom > /shared/a")


def plain(line: str) -> str:
    """Return a table's line with one space between cells, and T for its age."""
    return re.sub(r"\d+ s ago", "T", re.sub(" +", " ", line))


def rooms(nodes: str) -> str:
    return rf"/nvme: {GIB}( to {GIB})? free of {GIB} on {re.escape(nodes)}"


def run_in_job(site: Site, script: str, *options: str) -> list[str]:
    """Return the lines that the job's script prints after the summary of its stage."""
    job = site.sbatch(script, "-N4", *options)
    job.wait()
    return job.output().splitlines()[1:]


def test_status_folds_the_nodes_of_a_job(site: Site) -> None:
    header, row, total, room = run_in_job(site, f"{STAGECTL} status", WISH)
    job = plain(row).split()[-1]
    assert plain(header) == "NODE DST SIZE STAGED STATE KEPT SOURCE LAST JOB"
    assert plain(row) == f"n[1-4] /nvme/a 2.9 MiB T ready job {job} /shared/a {job}"
    assert total == "1 file, 4 copies, 11.4 MiB in all"
    assert re.fullmatch(rooms("n[1-4]"), room)


#: Prints what bash would offer behind the line that is typed.
TAB = f"""\
source {PREFIX}/share/bash-completion/completions/stagectl
tab() {{
	COMP_LINE=$1 COMP_POINT=${{#1}}
	_stagectl_completion {STAGECTL} "${{1##* }}"
	echo "${{COMPREPLY[*]}}"
}}
"""


def test_tab_completes_nodes_and_copies_in_a_job(site: Site) -> None:
    script = f"{TAB}tab 'stagectl status -w n4,'\ntab 'stagectl pin /n'\ntab 'stagectl evict --ol'"
    assert run_in_job(site, script, WISH) == ["n4,n1 n4,n2 n4,n3", "/nvme/a", "--older"]
    manual = site.run(f"cd {PREFIX}/share/man; find -type f | sort").stdout.split()
    assert manual == [
        "./man1/stagectl.1", "./man5/stage.toml.5", "./man7/slurm-stage.7",
        "./man8/spank_stage.8",
    ]  # fmt: skip


def test_status_shows_what_the_nodes_of_a_job_lack(site: Site) -> None:
    site.sbatch("true", "-N2", "-w", "n[2-3]", WISH).wait()
    site.copy("n3", "/nvme/a").unlink()
    job = site.sbatch(f"{STAGECTL} status; {STAGECTL} status --by file", "-N4")
    assert job.wait().exit_code == "0:0"
    _, *lines = map(plain, job.output().splitlines())
    table, by_file = lines[:3], lines[6]
    used = table[1].split()[-1]
    assert table == [
        "n[1,4] /nvme/a 2.9 MiB - missing - /shared/a -",
        f"n2 /nvme/a 2.9 MiB T ready - /shared/a {used}",
        f"n3 /nvme/a 2.9 MiB T missing - /shared/a {used}",
    ]
    assert by_file == "/nvme/a 2.9 MiB 2 3 missing, 1 ready - /shared/a"


def test_status_as_json_and_by_user(site: Site) -> None:
    lines = run_in_job(site, f"{STAGECTL} status --json; {STAGECTL} status --by user", WISH)
    end = lines.index("}") + 1
    told = json.loads("\n".join(lines[:end]))
    assert [node["node"] for node in told["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert {node["state"] for node in told["nodes"]} <= {"mixed", "allocated"}
    assert {node["entries"][0]["state"] for node in told["nodes"]} == {"ready"}
    assert told["missing"] == {}
    assert plain(lines[end + 1]) == "alice 1 0 4 11.4 MiB n[1-4]"


def test_a_record_that_cannot_be_read_is_counted(site: Site) -> None:
    site.sbatch("true", "-N4", WISH).wait()
    [record] = site.records("n2")
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 9}))
    job = site.sbatch(f"{STAGECTL} status", "-N4")
    assert job.wait().exit_code == "0:0"
    path = f"/nvme/.slurm-stage/5001/records/{record.name}"
    assert job.output().splitlines()[-1] == (
        "n2: 1 record cannot be read, so its copy, if there is one, is not listed; its user can "
        "stage it again (if it is a folder, first delete that folder). The record: "
        f"{path}: version 9, expected 8"
    )


# Nodes that do not answer


class Waiting:
    """A job that has staged, and runs a command when `go` is called."""

    def __init__(self, site: Site, command: str, *options: str) -> None:
        self._site = site
        site.shared("go").unlink(missing_ok=True)
        wait = "while [ ! -e /shared/go ]; do sleep 0.1; done"
        script = f"{wait}; date +%s.%N; {command}; echo code $?; date +%s.%N; echo end"
        self.job = site.sbatch(script, *(options or ("-N4",)), WISH)
        self._await("stage: ")

    def _await(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.job.output():
            assert time.monotonic() < deadline, self.job.output()
            time.sleep(0.1)

    def go(self) -> list[str]:
        """Return what the command prints, for which Slurm needs minutes."""
        self._site.run("touch /shared/go")
        # Do not wait for the job's end, for which Slurm needs its nodes back.
        self._await("end\n")
        output = self.job.output().splitlines()
        # Slurm adds messages of its own when a node fails.
        first, last = (n for n, line in enumerate(output) if re.fullmatch(r"\d+\.\d+", line))
        begun, *lines, ended = output[first : last + 1]
        assert float(ended) - float(begun) < HANGS, lines
        return lines


def test_status_with_a_slurmd_gone_answers_for_the_others_soon(site: Site) -> None:
    waiting = Waiting(site, f"{STAGECTL} status")
    site._stop_daemon("slurmd-n3")
    try:
        lines = waiting.go()
    finally:
        site._start_slurmd("n3")
    waiting.job.wait()
    job = waiting.job.id
    assert plain(lines[1]) == f"n[1-2,4] /nvme/a 2.9 MiB T ready job {job} /shared/a {job}"
    assert lines[2] == "1 file, 3 copies, 8.6 MiB in all"
    assert re.fullmatch(rooms("n[1-2,4]"), lines[3])
    silent = (
        "n3: no answer within 10 s; ask again, and if it stays silent see whether the node and "
    )
    assert lines[4:] == [f"{silent}its disks work, or tell the administrator", "code 0"]
    site.assert_healthy(60)


def test_status_with_a_node_down_answers_for_the_others_at_once(site: Site) -> None:
    waiting = Waiting(site, f"{STAGECTL} status -w n[1-4]", "-N3", "-w", "n[1-2,4]")
    site.run(["scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test"], user="root")
    try:
        lines = waiting.go()
    finally:
        site.resume()
    waiting.job.wait()
    assert plain(lines[1]).startswith("n[1-2,4] /nvme/a 2.9 MiB T ready job ")
    assert lines[-2:] == ["n3: down", "code 0"]


def test_a_drained_node_is_asked_and_marked(site: Site) -> None:
    waiting = Waiting(site, f"{STAGECTL} status")
    site.run(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"], user="root")
    try:
        lines = waiting.go()
    finally:
        site.resume()
    waiting.job.wait()
    assert plain(lines[1]).startswith("n[1-4] /nvme/a 2.9 MiB T ready job ")
    assert lines[-2:] == ["n2: draining", "code 0"]


# verify, evict, pin, unpin


def test_copies_are_pinned_unpinned_and_evicted_over_the_nodes_of_a_job(site: Site) -> None:
    site.sbatch("true", "-N4", WISH).wait()
    commands = [
        "pin /nvme/a", "evict /nvme/a", "unpin -w n[1-2] /nvme/a", "evict -w n[1-2] /nvme/a",
        "evict --older 1s", "unpin /nvme/a", "evict --dry-run /nvme/a", "evict /nvme/a",
        "pin /nvme/a",
    ]  # fmt: skip
    # In jobs, PATH finds stagectl, and the site's own python3.
    script = "\n".join(f"stagectl {command} 2>&1; echo $?" for command in commands)
    script += "\ncommand -v stagectl python3"
    time.sleep(1.1)  # records hold times in whole seconds
    job = site.sbatch(script, "-N4")
    job.wait()
    assert job.output().splitlines() == [
        "stage: /nvme/a: pinned on n[1-4] (4 nodes)", "0",
        "stage: n[1-4]: /nvme/a is pinned; unpin it first: stagectl unpin /nvme/a", "3",
        "stage: /nvme/a: unpinned on n[1-2] (2 nodes)", "0",
        "stage: /nvme/a: evicted on n[1-2] (2 nodes)", "0",
        "stage: kept on n[3-4] (2 nodes): /nvme/a (pinned)",
        "stage: nothing to evict on n[1-2] (2 nodes)", "0",
        "stage: /nvme/a: unpinned on n[3-4] (2 nodes)", "0",
        "stage: /nvme/a: would be evicted on n[3-4] (2 nodes)", "0",
        "stage: /nvme/a: evicted on n[3-4] (2 nodes)", "0",
        "stage: n[1-4]: /nvme/a is no copy of yours here; stagectl status lists what is staged",
        "2",
        "/opt/site/bin/stagectl", "/usr/bin/python3",
    ]  # fmt: skip
    assert [site.records(node) for node in site.nodes] == [[]] * 4
    assert not any(site.copy(node, "/nvme/a").exists() for node in site.nodes)


def test_a_copy_that_a_running_job_uses_is_not_evicted(site: Site) -> None:
    """But for the job itself, if it is the only one."""
    site.shared("go").unlink(missing_ok=True)
    evict = f"{STAGECTL} evict /nvme/a 2>&1; echo $?"
    user = site.sbatch(f"until [ -e /shared/go ]; do sleep 0.1; done; {evict}", "-N4", WISH)
    user.wait_for(lambda _: "/nvme/a" in user.output())
    job = site.sbatch(evict, "-N2")
    job.wait()
    used = f"/nvme/a is used by job {user.id}; evict it when it has ended"
    assert job.output() == f"stage: n[1-2]: {used}\n9\n"
    site.run("touch /shared/go")
    user.wait()
    site.run("rm /shared/go")
    assert user.output().endswith("stage: /nvme/a: evicted on n[1-4] (4 nodes)\n0\n")


def test_verify_finds_the_one_damaged_copy(site: Site) -> None:
    site.sbatch("true", "-N4", WISH).wait()
    damaged = site.copy("n2", "/nvme/a")
    facts = damaged.stat()
    with damaged.open("r+b") as file:
        file.write(b"damage")
    os.utime(damaged, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    job = site.sbatch(f"{STAGECTL} verify", "-N4")
    assert job.wait().exit_code == "7:0"
    remedy = "its bytes differ from its checksum; stage it again"
    assert sorted(job.output().splitlines()) == [
        "stage: /nvme/a: verified on n[1,3-4] (3 nodes)",
        f"stage: n2: /nvme/a: the copy is damaged: {remedy}",
    ]
    script = f"{STAGECTL} status | grep /nvme/a; {STAGECTL} stage /shared/a:/nvme/a 2>&1"
    job = site.sbatch(script, "-N4")
    assert job.wait().exit_code == "0:0"
    *table, staged, note = job.output().splitlines()
    assert plain(table[0]).startswith("n[1,3-4] /nvme/a 2.9 MiB T ready ")
    assert plain(table[1]).startswith("n2 /nvme/a 2.9 MiB T damaged ")
    assert " from the copy on n1 to n2 in " in staged
    assert note == (
        "stage: /nvme/a: note: on n2, the copy was damaged: its bytes were not those that were "
        "staged"
    )
    assert digest(damaged) == digest(site.shared("a"))


# Outside of a job


@pytest.fixture
def ssh(site: Site) -> Iterator[None]:
    """Run sshd on all nodes but n4."""
    with site.sshd("n1", "n2", "n3"):
        yield


@pytest.mark.usefixtures("ssh")
def test_nodes_are_asked_by_clustershell_outside_of_a_job(site: Site) -> None:
    job = site.sbatch("true", "-N4", WISH)
    job.wait()

    def stagectl(*arguments: str) -> tuple[int, list[str]]:
        ran = site.run([STAGECTL, *arguments], check=False)
        return ran.returncode, [plain(line) for line in (ran.stdout + ran.stderr).splitlines()]

    code, lines = stagectl("status", "-w", "n[1-4]")
    assert (code, lines[1]) == (0, f"n[1-3] /nvme/a 2.9 MiB T ready - /shared/a {job.id}")
    instead = "stage: if these nodes cannot be reached by ssh, ask them within a job of yours: "
    assert lines[-2:] == [
        "n4: ssh: connect to host n4 port 22: Connection refused",
        instead + "stagectl status --job ID, or salloc -w n[1-4] stagectl status",
    ]
    assert stagectl("evict", "-w", "n[1-2]", "/nvme/a") == (
        0, ["stage: /nvme/a: evicted on n[1-2] (2 nodes)"]
    )  # fmt: skip
    running = site.sbatch("sleep 60", "-N2", "-w", "n[2-3]")
    running.wait_for(lambda record: record["JobState"] == "RUNNING")
    code, lines = stagectl("status", "--job", running.id)
    refused = site.run([STAGECTL, "status", "--job", running.id], user="bob", check=False)
    # bob has no key.
    verify = site.run([STAGECTL, "verify", "-w", "n2"], user="bob", check=False)
    inside = site.run(f"srun --jobid={running.id} --overlap -N1 -n1 {STAGECTL} status")
    running.cancel()
    running.wait()
    assert (code, lines[1:3]) == (
        0,
        [
            "n2 /nvme/a 2.9 MiB - missing - /shared/a -",
            f"n3 /nvme/a 2.9 MiB T ready - /shared/a {job.id}",
        ],
    )
    assert plain(inside.stdout).splitlines()[1:3] == lines[1:3]
    assert (refused.returncode, refused.stderr) == (8, "")
    assert refused.stdout.endswith("Access/permission denied\n")
    assert verify.returncode == 8
    told = instead + "stagectl verify --job ID, or salloc -w n2 stagectl verify"
    assert verify.stderr.splitlines()[-1] == told


def test_a_demo_shows_its_copies_whatever_the_sites_rules_are(site: Site) -> None:
    assert "1 file, 2 copies, 512.0 MiB in all" in site.run(f"{STAGECTL} demo --nodes 2").stdout
