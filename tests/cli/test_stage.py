"""``stagectl stage``: on simulated nodes, and in a job of one node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.desk import (
    ALL,
    JOB,
    MISSING,
    NO_CONFIG,
    NOT_BENEATH,
    OUTSIDE,
    STAGED,
    TWICE,
    Desk,
    call,
    untimed,
)
from tests.support.stagectl import STAGECTL, Ran, environment

#: The folder that a mpiexec has for its files, in its environment.
FOLDER = re.compile(r"PRTE_MCA_prte_local_tmpdir_base=([^\0]+)")


def test_a_file_is_staged_once_and_then_to_the_nodes_that_lost_it(desk: Desk) -> None:
    value = f"{desk.source}:/nvme/img.sqsh"
    staged = STAGED.format(source=desk.source, nodes=ALL)
    assert desk.local("stage", value) == Ran(0, f"{staged}\n", "")
    inodes = [desk.copy(node).stat().st_ino for node in (1, 2, 3)]
    assert [desk.copy(node).read_bytes() for node in (1, 2, 3)] == [desk.source.read_bytes()] * 3

    skipped = f"stage: /nvme/img.sqsh: current on {ALL}, nothing moved (293.0 KiB, T)\n"
    assert desk.local("stage", value) == Ran(0, skipped, "")
    assert [desk.copy(node).stat().st_ino for node in (1, 2, 3)] == inodes

    desk.copy(2).unlink()
    restored = STAGED.format(source="the copy on node1", nodes="node2")
    text = f"{restored}; current on node[1,3] (2 nodes)\n"
    assert desk.local("stage", value) == Ran(0, text, "")
    assert desk.copy(2).read_bytes() == desk.source.read_bytes()
    assert [desk.copy(node).stat().st_ino for node in (1, 3)] == [inodes[0], inodes[2]]


def test_a_copy_is_its_owners_alone_unless_it_is_shared(desk: Desk) -> None:
    (desk.folder / "set/sub").mkdir(parents=True)
    for name, mode in (("img", 0o664), ("set/tool", 0o755), ("set/sub/file", 0o444)):
        (desk.folder / name).touch()
        (desk.folder / name).chmod(mode)
    subprocess.run(["tar", "-cf", "set.tar", "set"], cwd=desk.folder, check=True)
    items = ["img:/nvme/img", "set:/nvme/set", "set.tar:/nvme/tar,extract"]
    for share, file, folder, tool, locked in (
        ("", 0o600, 0o700, 0o700, 0o400),
        (",share=group", 0o640, 0o750, 0o750, 0o440),
        (",share=all", 0o644, 0o755, 0o755, 0o444),
        ("", 0o600, 0o700, 0o700, 0o400),
    ):
        modes = {"img": file, "set": folder, "set/tool": tool, "set/sub": folder}
        modes |= {"set/sub/file": locked, "tar": folder, "tar/set": folder}
        modes |= {"tar/set/tool": tool, "tar/set/sub/file": locked}
        told = desk.local("stage", *(f"{desk.folder}/{item}{share}" for item in items))
        assert told.code == 0
        assert {
            name: stat.S_IMODE(desk.copy(2, f"/nvme/{name}").stat().st_mode) for name in modes
        } == modes


def test_what_a_killed_mpiexec_leaves_stops_no_later_one(desk: Desk) -> None:
    line = [
        *STAGECTL, "stage", "--config", str(desk.config), "--local", "3",
        "--local-root", str(desk.nodes), f"{desk.source}:/nvme/img.sqsh",
    ]  # fmt: skip
    with subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True) as stage:
        children = Path(f"/proc/{stage.pid}/task/{stage.pid}/children")
        while not (mpiexec := children.read_text().strip()):
            assert stage.poll() is None
        while not (found := FOLDER.search(Path(f"/proc/{mpiexec}/environ").read_text())):
            assert stage.poll() is None
        folder = Path(found[1])
        while not list(folder.rglob("ompi.*")):
            assert stage.poll() is None
        os.kill(int(mpiexec), signal.SIGKILL)
        assert stage.stderr
        assert "ended by signal 9" in stage.stderr.read()
    # A later mpiexec with the number of that process would end at once if it found these files.
    assert not folder.exists()


def test_what_stays_in_spite_of_lifetime_job_is_told(desk: Desk) -> None:
    value = f"{desk.source}:/nvme/img.sqsh"
    assert desk.local("stage", value).code == 0
    assert "note:" not in desk.local("stage", f"{value},lifetime=job").out
    assert desk.simulated("pin", "/nvme/img.sqsh").code == 0
    pinned = desk.local("stage", f"{value},lifetime=job").out.splitlines()[1:]
    why = "it is pinned (stagectl unpin lets it go)"
    assert pinned == [f"stage: /nvme/img.sqsh: note: it stays on {ALL} after the job: {why}"]
    assert desk.simulated("unpin", "/nvme/img.sqsh").code == 0
    assert "note:" not in desk.local("stage", f"{value},lifetime=job").out


def test_a_file_can_be_staged_into_the_users_own_folder_where_a_staged_one_was(desk: Desk) -> None:
    (desk.folder / "set").mkdir()
    value = f"{desk.source}:/nvme/set/img.sqsh"
    assert desk.local("stage", f"{desk.folder}/set:/nvme/set").code == 0
    why = "/nvme/set/img.sqsh lies in /nvme/set, which is staged as a whole"
    refused = desk.local("stage", value)
    assert (refused.code, why in refused.err) == (6, True)
    for number in (1, 2):
        desk.copy(number, "/nvme/set").rmdir()
    moved = desk.copy(3, "/nvme/set")
    moved.rename(f"{moved}-moved")
    moved.mkdir()
    assert desk.local("stage", value).code == 0


def test_a_kept_copy_that_its_user_has_removed_is_not_kept_when_it_is_staged_for_a_job(
    desk: Desk,
) -> None:
    folder = desk.folder / "set"
    folder.mkdir()
    for source, name in ((desk.source, "img.sqsh"), (folder, "set")):
        value = f"{source}:/nvme/{name}"
        assert desk.local("stage", value).code == 0
        for number in (1, 2, 3):
            copy = desk.copy(number, f"/nvme/{name}")
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
        assert "note:" not in desk.local("stage", f"{value},lifetime=job").out
        assert "note:" not in desk.local("stage", f"{value},lifetime=job").out
        entries = json.loads(desk.simulated("status", "--json").out)["nodes"]
        kept = {one["lifetime"] for node in entries for one in node["entries"]}
        assert kept == {"job"}


@pytest.mark.parametrize("options", ["", ",validate=always", ",extract", ",mode=shard"])
def test_added_files_stay_and_changed_ones_go_only_by_replace(desk: Desk, options: str) -> None:
    source = desk.folder / "set"
    (source / "sub").mkdir(parents=True)
    for name in "abcdef":
        (source / name).write_text(name)
    if options == ",extract":
        with tarfile.open(desk.folder / "set.tar", "w") as archive:
            archive.add(source, ".")
        source = desk.folder / "set.tar"
    value = f"{source}:/nvme/set{options}"
    assert desk.local("stage", value).code == 0
    for name in ("sub/results", "log", "new/1"):
        own = desk.copy(2, f"/nvme/set/{name}")
        own.parent.mkdir(exist_ok=True)
        own.write_text("mine")
    (staged, *_) = sorted(desk.copy(3, "/nvme/set").glob("[a-f]"))
    staged.write_text("mine")
    os.utime(desk.folder / "set.tar" if options == ",extract" else desk.folder / "set/a")
    refused = (
        f"stage: node3: /nvme/set holds 1 file that was added or changed after staging: "
        f"{staged.name}; it is kept: move it elsewhere, choose another destination, or add the "
        "option replace\n"
    )
    for command in ("plan", "stage"):
        assert desk.local(command, value) == Ran(6, "", refused)
    assert staged.read_text() == "mine"
    said = desk.local("stage", f"{value},replace")
    assert said.code == 0
    note = (
        "stage: /nvme/set: note: on node3, what was not staged, or was changed since, was "
        "replaced; write what you want to keep elsewhere"
    )
    assert [line for line in said.out.splitlines() if "note:" in line] == [note]
    for name in ("sub/results", "log", "new/1"):
        assert desk.copy(2, f"/nvme/set/{name}").read_text() == "mine"


def test_json_has_what_was_done(staged: tuple[Desk, Ran]) -> None:
    desk, ran = staged
    done = json.loads(ran.out)
    seconds = [done.pop("seconds"), done["items"][0].pop("seconds")]
    assert all(isinstance(number, float) and 0 < number < 30 for number in seconds)
    assert sum(done.pop("phases").values()) == pytest.approx(seconds[0])
    assert done["items"][0].pop("peak_memory") > 1 << 20
    assert (ran.code, ran.err) == (0, "")
    assert done == {
        "version": 1,
        "items": [
            {
                "source": str(desk.source),
                "destination": "/nvme/img.sqsh",
                "size": 300_000,
                "received": ["node1", "node2", "node3"],
                "current": [],
                "senders": [],
                "digest": "534c4aa790cd6677008b36bda244561b",
                "source_bytes_read": 300_000,
                "reasons": ["absent"],
                "tree": None,
                "shard_list": "",
                "notes": [],
                "retries": 0,
                "ways": [],
                "once": False,
            }
        ],
        "failures": [],
        "dry_run": False,
        "evicted": [],
        "slow": [],
        "code": 0,
    }


def test_a_missing_source_ends_with_4(desk: Desk) -> None:
    assert desk.local("stage", "/nowhere/img:/nvme/img") == Ran(
        4, "", f"stage: node1: /nowhere/img: {MISSING}\n"
    )
    assert [path for path in desk.nodes.glob("node*/nvme/*") if path.name[0] != "."] == []


def test_other_missing_sources_are_named_with_the_first(desk: Desk) -> None:
    names = ("img", "a", "b", "img/c", "d")
    values = [f"/nowhere/{name}:/nvme/{at}" for at, name in enumerate(names)]
    values += [f"{desk.source}:/nvme/x", "/nowhere/img:/nvme/y", f"{desk.source}/none:/nvme/z"]
    assert desk.local("stage", *values) == Ran(
        4,
        "",
        f"stage: node1: /nowhere/img: {MISSING}; not found either: /nowhere/a, /nowhere/b, "
        "/nowhere/img/c and 2 more\n",
    )


def test_a_folder_is_no_place_for_a_file(desk: Desk) -> None:
    taken = desk.copy(1, "/nvme/a/b")
    taken.mkdir(parents=True)
    remedy = "write /nvme/a/b/ to put the file into it, or choose another destination"
    ran = desk.local("stage", f"{desk.source}:/nvme/a/b")
    assert ran == Ran(6, "", f"stage: node1: {taken} is a folder; {remedy}\n")
    assert list(taken.iterdir()) == []


def test_missing_sources_are_named_with_a_first_that_cannot_be_staged(desk: Desk) -> None:
    pipe = desk.folder / "pipe"
    os.mkfifo(pipe)
    ran = desk.local("stage", f"{pipe}:/nvme/x", "/nowhere/a:/nvme/y")
    why = "is a named pipe; only a plain file or a folder can be staged"
    assert ran == Ran(4, "", f"stage: node1: {pipe} {why}; not found: /nowhere/a\n")


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        (["/a:/nvme/b", "/c:/nvme/b"], 2, TWICE),
        (["/a:/b"], 3, NOT_BENEATH),
        (["/a"], 2, "no ':' between source and destination: write SRC:DST\n  /a\n    ^"),
    ],
    ids=["two sources to one destination", "not the site's", "no directive"],
)  # fmt: skip
def test_a_wrong_request_ends_before_anything_is_made(
    desk: Desk, values: list[str], code: int, message: str
) -> None:
    assert desk.local("stage", *values) == Ran(code, "", f"stage: {message}\n")
    assert not desk.nodes.exists()


@pytest.mark.parametrize(
    ("root", "problem"),
    [("img.sqsh", "Not a directory"), ("/proc/nodes", "No such file or directory")],
)
def test_a_local_root_that_cannot_be_written_ends_with_2(
    desk: Desk, root: str, problem: str
) -> None:
    desk.nodes = desk.folder / root
    assert desk.local("stage", f"{desk.source}:/nvme/img") == Ran(
        2, "", f"stage: {desk.nodes}/node1/nvme: {problem}; choose another --local-root\n"
    )


@pytest.mark.root
def test_simulated_nodes_of_root_are_not_asked_for_a_url(desk: Desk) -> None:
    desk.config.write_text('roots = ["/nvme"]\n[source]\nallow = ["http://127.0.0.1:1/"]\n')
    for command in ("stage", "plan"):
        ran = desk.local(command, "http://127.0.0.1:1/a:/nvme/b")
        assert ran == Ran(
            2, "",
            "stage: http://127.0.0.1:1/a: simulated nodes of root reach no server; run this as an "
            "ordinary user\n",
        )  # fmt: skip


def test_simulated_nodes_have_the_sites_folders_of_a_job(desk: Desk) -> None:
    root = "/scratch/%U.%j"
    desk.config.write_text(f'roots = [{{ path = "{root}" }}]\n[variables]\nTMPDIR = "{root}"\n')
    folder = f"/scratch/{os.getuid()}.%j"
    for name, place in (("x", "$TMPDIR"), ("%x", root)):
        ran = desk.local("stage", f"{desk.source}:{place}/{name}")
        assert ran.out.startswith(f"stage: {folder}/{name}: 293.0 KiB from {desk.source} "), ran


def test_stage_outside_of_a_job_says_what_to_use_first(desk: Desk) -> None:
    assert desk.stagectl("stage", "/a:/nvme/b") == Ran(2, "", f"stage: {OUTSIDE}\n")


def test_a_job_that_is_named_is_the_only_place_to_stage_to(desk: Desk) -> None:
    said = "stage: use only one of --job, --hosts, --hostfile, --launcher and --local\n"
    for other in (["--local", "2"], ["--hosts", "n1"], ["--launcher", "slurm"]):
        assert desk.stagectl("stage", "--job", "17", *other, "/a:/nvme/b") == Ran(2, "", said)


def test_stage_in_a_job_needs_the_sites_stage_toml(desk: Desk) -> None:
    desk.config.unlink()
    ran = desk.stagectl("stage", "/a:/nvme/b", **JOB)
    assert ran == Ran(3, "", f"stage: {desk.config} {NO_CONFIG}\n")


FOR_ALL = (
    "submit as an ordinary user; to stage for all users, submit as nobody, the owner in [shared] "
    "of stage.toml"
)


@pytest.mark.root
@pytest.mark.parametrize("command", ["stage", "plan", "gate", "bench"])
@pytest.mark.parametrize(
    ("shared", "remedy"),
    [
        ("", "submit as an ordinary user"),
        (
            '[shared]\nowner = "nobody"\nroots = ["/site"]\n',
            FOR_ALL,
        ),
    ],
    ids=["alone", "shared"],
)
def test_root_starts_no_ranks_on_real_nodes(
    desk: Desk, command: str, shared: str, remedy: str
) -> None:
    (desk.folder / "srun").write_text(f"#!/bin/sh\ntouch {desk.folder}/started\n")
    (desk.folder / "srun").chmod(0o755)
    desk.config.write_text(f'roots = ["/nvme"]\n[launch]\nsrun = "{desk.folder}/srun"\n{shared}')
    values = ["/a:/nvme/b"] if command in ("stage", "plan") else []
    ran = desk.stagectl(command, *values, **JOB, STAGE_DIRECTIVES="/a:/nvme/b")
    ended = "stage: the job's own program was not started (exit code 3)\n"
    message = f"stage: root cannot stage: {remedy}\n"
    assert ran == Ran(3, "", message + ended * (command == "gate"))
    assert not (desk.folder / "started").exists()


def test_an_srun_that_is_not_there_ends_with_8(job: Desk) -> None:
    job.config.write_text('roots = ["/nvme"]\n[launch]\nsrun = "/nowhere/srun"')
    ran = job.stagectl("stage", "/a:/nvme/b", **JOB)
    message = (
        "/nowhere/srun, which stage.toml names, is not there or cannot be run; tell the "
        "administrator to correct srun in [launch]"
    )
    assert ran == Ran(8, "", f"stage: {message}\n")


def test_a_job_stages_by_its_srun_and_its_number_is_recorded(job: Desk) -> None:
    copy = job.folder / "nvme/img.sqsh"
    ran = untimed(job.stagectl("stage", f"{job.source}:{copy}", **JOB))
    node = socket.gethostname()
    text = f"stage: {copy}: 293.0 KiB from {job.source} to {node} in T (R a node)\n"
    assert ran == Ran(0, text, "")
    assert copy.read_bytes() == job.source.read_bytes()
    [record] = (job.folder / "nvme/.slurm-stage").glob("*/records/*")
    assert json.loads(record.read_text())["used_by_job"] == 17


def test_the_ranks_get_the_transfer_settings_of_the_site(job: Desk) -> None:
    (job.folder / "srun").write_text('#!/bin/sh\necho "$STAGE_REQUEST"\n')
    with job.config.open("a") as config:
        config.write(
            '[transfer]\nchunk = "1MiB"\nmemory = "5MiB"\nalgorithm = "tree"\n'
            "readers = 3\nwriters = 2\ndirect = false\n"
        )
    ran = job.stagectl("stage", f"{job.source}:{job.folder}/nvme/img", **JOB)
    printed = json.loads(ran.err.splitlines()[-1])
    assert (ran.code, printed["transfer"]) == (
        8,
        {
            "chunk": 1 << 20, "depth": 5, "readers": [3], "writers": 2, "algorithm": "tree",
            "requests": 1, "direct": False,
        },
    )  # fmt: skip


def test_a_job_without_a_home_stages_too(job: Desk) -> None:
    # Open MPI does not begin without HOME, and a job of sbatch --export=NIL has none.
    copy = job.folder / "nvme/img.sqsh"
    variables = environment(**JOB)
    del variables["HOME"]
    line = ["stage", "--config", str(job.config), f"{job.source}:{copy}"]
    ran = call(line, job.folder, variables, alone=True)
    assert (ran.code, ran.err) == (0, "")
    assert copy.read_bytes() == job.source.read_bytes()


def test_a_file_whose_path_is_not_utf8_is_staged(job: Desk) -> None:
    source = job.source.rename(job.folder / os.fsdecode(b"caf\xe9"))
    ran = untimed(job.stagectl("stage", f"{source}:{job.folder}/nvme/", **JOB))
    text = (
        f"stage: {job.folder}/nvme/caf\\xe9: 293.0 KiB from {job.folder}/caf\\xe9 "
        f"to {socket.gethostname()} in T (R a node)\n"
    )
    assert ran == Ran(0, text, "")
    assert (job.folder / "nvme" / source.name).read_bytes() == source.read_bytes()


def test_files_that_are_dated_after_2262_are_staged(job: Desk) -> None:
    (job.folder / "set").mkdir()
    for path in (job.source, job.folder / "set/late", job.folder / "set"):
        path.exists() or path.write_text("late")
        os.utime(path, (10**10, 10**10))  # in 2286
    line = ["stage", f"{job.source}:{job.folder}/nvme/", f"{job.folder}/set:{job.folder}/nvme/"]
    assert job.stagectl(*line, **JOB).code == 0
    assert (job.folder / "nvme/set/late").read_text() == "late"
    assert (job.folder / "nvme/set/late").stat().st_mtime_ns == (1 << 63) - 1
    again = job.stagectl(*line, **JOB)
    assert (again.code, again.out.count("current on ")) == (0, 2)


def test_a_failure_as_json_has_its_code_and_node(job: Desk) -> None:
    value = f"/nowhere/img:{job.folder}/nvme/img"
    ran = job.stagectl("stage", "--json", value, **JOB)
    done = json.loads(ran.out)
    node = socket.gethostname()
    assert sum(done.pop("phases").values()) == pytest.approx(done.pop("seconds"))
    assert (ran.code, ran.err) == (4, "")
    assert done == {
        "version": 1,
        "items": [],
        "failures": [{"code": 4, "message": f"/nowhere/img: {MISSING}", "node": node}],
        "dry_run": False,
        "evicted": [],
        "slow": [],
        "code": 4,
    }


def phases_of(line: str) -> list[str]:
    """The phases that the line names; they add up but for rounding, and the last is the longest."""
    found = re.fullmatch(r"stage: (\d+\.\d\d) s: (.*); longest: (.*)", line)
    assert found
    printed = [text.rpartition(" ") for text in found[2].split(", ")]
    seconds = {phase: float(number) for phase, _, number in printed}
    assert sum(seconds.values()) == pytest.approx(float(found[1]), abs=0.005 * (len(printed) + 1))
    assert seconds[found[3]] == max(seconds.values())
    return list(seconds)


def test_verbose_tells_where_the_time_went(job: Desk) -> None:
    copy = job.folder / "nvme/img.sqsh"
    ran = job.stagectl("stage", "-v", f"{job.source}:{copy}", **JOB)
    launched, staged, times = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert launched == "stage: srun --mpi=pmix starts the ranks"
    assert staged.startswith(f"stage: {copy}: 293.0 KiB from {job.source} to ")
    assert phases_of(times) == [
        "launch", "MPI init", "survey", "wait", "open", "read", "write", "broadcast", "fsync",
        "publish", "end",
    ]  # fmt: skip


def test_verbose_tells_where_the_time_of_a_failure_went(job: Desk) -> None:
    ran = job.stagectl("stage", "--verbose", f"/nowhere/img:{job.folder}/nvme/img", **JOB)
    message = f"stage: {socket.gethostname()}: /nowhere/img: {MISSING}\n"
    assert (ran.code, ran.err) == (4, message)
    launched, times = ran.out.splitlines()
    assert launched == "stage: srun --mpi=pmix starts the ranks"
    first, second, *_, last = phases_of(times)
    assert (first, second, last) == ("launch", "MPI init", "end")
