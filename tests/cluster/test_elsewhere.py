"""Slurm's programs are outside of the system's folders on the nodes, where few look for them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import LOGIN_PATH, SITE_BIN, CommandFailed
from tests.cluster.site import HANGS, POLICY, PREFIX, PYTHON, STAGECTL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

SLURM = "/opt/slurm"
MOVED = "srun,scancel,scontrol,sinfo,squeue"
#: Where they are otherwise: in /usr/bin, or where they were built in /usr/local/bin.
BIN, SBIN = (Path(shutil.which(name, path=LOGIN_PATH) or "/").parent for name in ("srun", "slurmd"))
#: Takes the commands out of that folder of a node, and of nobody else.
HIDE = f"""
mkdir /run/hidden /run/hidden/upper /run/hidden/work
mount -t overlay overlay -o lowerdir={BIN},upperdir=/run/hidden/upper,workdir=/run/hidden/work {BIN}
rm {BIN}/{{{MOVED}}}
"""
WISH = "--stage=/shared/a:/nvme/a"
NAMED = f'{POLICY}[launch]\nsrun = "{SLURM}/bin/srun"\n'
WRONG = f'{POLICY}[launch]\nsrun = "/opt/other/srun"\n'
FOLDERS = "/usr/local/bin, /usr/bin, /bin, /usr/local/sbin, /usr/sbin, /sbin"
NAME_IT = 'tell the administrator to name it in stage.toml (srun = "/PATH/srun" in [launch])'
NAMES_SRUN = NAME_IT.replace("it", "the srun beside it")
NEITHER = [
    f"n1: srun is in none of the folders {FOLDERS}, {SLURM}/bin; {NAME_IT}",
    "the job's own program was not started (exit code 8)",
]
REFUSED = (
    "/opt/other/srun, which stage.toml names, is not there or cannot be run; tell the "
    "administrator to correct srun in [launch]"
)


@pytest.fixture(scope="module")
def _moved(installed_site: Site) -> Iterator[None]:
    site = installed_site
    folder = f"{SLURM}/{{bin,sbin}}"
    copy = f"cp {BIN}/{{{MOVED}}} {SLURM}/bin; cp {SBIN}/slurmstepd {SLURM}/sbin"
    site.run(f"set -e; mkdir -p {folder}; {copy}", user="root")
    for node in site.nodes:
        site.run(f"set -e; {HIDE}", user="root", on=node)
    site.slurmd_options = ("-d", f"{SLURM}/sbin/slurmstepd")
    site.restart_all_slurmd()
    yield
    site.slurmd_options = ()
    for node in site.nodes:
        site.run(f"umount --lazy {BIN} && rm -r /run/hidden", user="root", on=node)
    site.run(f"rm -r {SLURM}", user="root")
    site.restart_all_slurmd()


@pytest.fixture
def moved(site: Site, _moved: None) -> Site:
    """The site whose nodes have Slurm's programs beneath /opt/slurm."""
    site.run("head -c 1000 /dev/urandom > /shared/a")
    return site


def test_the_plugin_finds_the_commands_of_the_slurm_that_runs_it(moved: Site) -> None:
    done = moved.run(["srun", "-N4", WISH, "cmp", "/shared/a", "/nvme/a"])
    assert " to n[1-4] (4 nodes) in " in done.stderr


def test_stagectl_says_where_it_looked_and_what_names_the_folder(moved: Site) -> None:
    script = f"{STAGECTL} stage /shared/a:/nvme/a; echo $?; {STAGECTL} status; echo $?"
    with_path = f"{script}; export PATH=$PATH:{SLURM}/bin; {script}"
    job = moved.sbatch(with_path, "-N2", "-w", "n[1-2]")
    job.wait()
    # The last is in the PATH of all users of this cluster.
    problem = f"srun is in none of the folders {FOLDERS}, {SITE_BIN}; {NAME_IT}"
    without = f"stage: n1: {problem}\n8\nn[1-2]: {problem}\n8\n"
    assert job.output().startswith(f"{without}stage: /nvme/a: 1000 B from ")
    assert job.output().count("\n0\n") == 2
    with moved.policy(NAMED):
        job = moved.sbatch(script, "-N2", "-w", "n[1-2]")
        job.wait()
    assert "\n8\n" not in job.output()
    assert "current on n[1-2] (2 nodes), nothing moved" in job.output()


@pytest.mark.parametrize("line", ["", "salloc -N4 -n8 "])
def test_nothing_waits_where_stage_toml_names_no_srun(moved: Site, line: str) -> None:
    begun = time.monotonic()
    with moved.policy(WRONG), pytest.raises(CommandFailed) as failed:
        moved.run(f"{line}srun -N4 -n8 {WISH} touch /shared/started")
    assert time.monotonic() - begun < HANGS
    assert failed.value.code == 8
    said = [one for one in failed.value.stderr.splitlines() if one.startswith("stage: ")]
    assert said == [
        f"stage: n1: {REFUSED}",
        "stage: the job's own program was not started (exit code 8)",
    ]
    assert not moved.shared("started").exists()


@pytest.mark.parametrize(
    ("line", "hidden", "code", "expected"),
    [
        ("", f"{SLURM}/bin", 8, NEITHER),
        ("salloc -N4 -n8 ", f"{SLURM}/bin", 8, NEITHER),
        ("", f"{PREFIX}/bin", 127, [f"n1: {PYTHON} cannot be run; tell the administrator"]),
    ],
    ids=["srun", "salloc", "no python3"],
)
def test_nothing_waits_where_the_first_node_can_tell_slurm_nothing(
    moved: Site, line: str, hidden: str, code: int, expected: list[str]
) -> None:
    """It has neither srun nor scancel, or not even stagectl."""
    moved.run(f"mount -t tmpfs none {hidden}", user="root", on="n1")
    begun = time.monotonic()
    try:
        with pytest.raises(CommandFailed) as failed:
            moved.run(f"{line}srun -N4 -n8 {WISH} touch /shared/started")
    finally:
        moved.await_epilogs()
        moved.run(f"umount {hidden}", user="root", on="n1")
    assert time.monotonic() - begun < HANGS
    assert failed.value.code == code
    said = [one for one in failed.value.stderr.splitlines() if one.startswith("stage: ")]
    assert said == [f"stage: {one}" for one in expected]
    assert not moved.shared("started").exists()
    # What could not be run could not clean up: the next job on the node sees to that.
    moved.run(f"srun -N1 -w n1 {WISH} true")
    moved.await_epilogs()


@pytest.mark.usefixtures("_task_prolog")
def test_task_prolog_finds_scontrol_beside_the_srun_of_stage_toml(moved: Site) -> None:
    script = "#!/bin/bash\n#STAGE /shared/a:/nvme/a\ncmp /shared/a /nvme/a && echo same\n"
    job = moved.sbatch(script, "-N2", "-w", "n[1-2]")
    assert job.wait().exit_code == "8:0"
    folders = FOLDERS.replace(", ", ":").partition(":/usr/local/sbin")[0]
    problem = f"n1: scontrol is in none of the folders {folders}"
    assert job.output().splitlines()[0] == f"stage: {problem}; {NAMES_SRUN}"
    with moved.policy(NAMED):
        job = moved.sbatch(script, "-N2", "-w", "n[1-2]")
        assert job.wait().exit_code == "0:0", job.output()
    assert job.output().endswith("same\n")
